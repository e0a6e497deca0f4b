"""The inner search: which layers go to which stage, and in which way each stage computes them, at the least simulated step time.

A partition is a path through states (layers that the stages before hold); a step from one state to the next is a stage with its layers, and
has the ways to compute them: recompute choices of an engine's plan (search/inner.py), or a way for each layer (search/layerwise.py).

1. Bound. Stage i can't end before a micro-batch has come down to it through the stages before, it has worked m times, and the last gradient
   has gone back up: lead(j) summed over j < i, plus m x work(i), and what it waits for the stages behind it. The least of the largest of
   these over all ways to complete a partition is a scalar dynamic program (`_to_go`).
2. A depth-first branch and bound along it, the least bound first: what the bound leaves is simulated.
3. Where more is left than is worth simulating (`left` says what that may take), the mean of critical paths that bounds most is looked for
   (`_sharpen`, cost/schedule/critical_path.py), and 2 is done once more with both bounds; a partition that takes too long on the critical
   path of another one is then not simulated (`_on_known`).

If nothing is left, the answer is the optimum of the simulated score over the steps that were given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from orchestrator.cost.schedule.critical_path import CriticalPath, Times, game, graph_of, longest
from orchestrator.cost.schedule.names import of_chunks

PASSES_FOR_STEP = 10
"""Passes simulated in the time that one step of a partition is bounded."""
MOST_ROUNDS = 30
"""Rounds of the game that sharpens a bound, at most; it is mostly over after ten."""
NODES_WALKED = 600_000
"""Passes in all rounds together: a quarter of a second."""
MOST_CLIMBS = 6
"""Partitions that come up in the game of which, the best first, better ones are looked for near by."""
ROUNDING = 1e-12
"""Relative slack of a bound against a simulated time: the same terms, added in another order."""
CLOSE = 1e-9
"""Relative distance at which the game's bound is close enough to the best one, where that one leaves nothing to look at."""
FEW_ROUNDS = 15
"""Rounds of the game where a search's first look leaves much: they bring most of what it does."""
FAR = 0.02
"""Relative distance of what is left from the best partition at which that game is played."""
MOST_KNOWN = 3
"""Means of critical paths that are kept of a schedule, the newest."""
LEFT_OPEN = 1e-3
"""Relative distance at which the game's bound is close enough to the best one, where that one leaves something to look at."""
STRIDE = 1 << 20
"""A number above the layers of any model: a state is a number of layers, and may be a multiple of this larger."""
INFINITE = float("inf")


class Way(NamedTuple):
    """One way to compute a stage: seconds of a micro-batch by chunk, and once a step what of the reduction nothing hides and the update;
    bytes; and what its maker knows it by."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    exposed_s: float
    optimizer_s: float
    peak_bytes: float
    made: Any

    @property
    def work_s(self) -> float:
        """Seconds of a micro-batch in all chunks, forward and backward."""
        return sum(self.forward_s) + sum(self.backward_s)


Steps = list[dict[int, list[tuple[int, list[Way]]]]]
"""For each stage: from a state to the states behind the stage, each with the ways to compute what is between."""


Paths = dict[tuple[object, ...], list[tuple[CriticalPath, Sequence[float]]]]
"""Means of critical paths that bounded most, each with the transfers' seconds there, by the order of passes (`Partitions.shape`)."""


class Pipeline(NamedTuple):
    """What all partitions share. `hops`: seconds of a transfer by virtual border; `once_s`: of a step, beside the schedule and the update;
    `busy_s`: of a step, that no schedule undercuts; `score`: simulated seconds of a step of these ways, or where
    that is above a limit, any seconds above it that the step does not undercut; `paths`: what others of the search found."""

    schedule: str
    pp: int
    m: int
    vpp: int
    group: int | None
    hops: Sequence[float]
    once_s: float
    busy_s: float
    score: Callable[[Sequence[Way], float], float]
    paths: Paths | None = None

    @property
    def passes(self) -> int:
        """Passes that simulating a partition takes: after a few rounds a schedule has become periodic."""
        return 2 * self.pp * self.vpp * min(self.m, 4 * (self.group or self.pp))


class Best(NamedTuple):
    """A partition: its simulated seconds, and the way of each stage."""

    seconds: float
    ways: tuple[Way, ...]


class _Above(NamedTuple):
    """Seconds of the stages above in a partition: a micro-batch's way `down` through their first chunks; their way down and up again with
    the exposed time of the one that this delays most (`lead`); the `largest` end so far; the largest `update` by the optimizer; what the
    critical paths have `spent`."""

    down: float
    lead: float
    largest: float
    update: float
    spent: float


class _Cut(NamedTuple):
    """A mean of critical paths as a sum over stages. `values`: by stage, of each way by its id; `togo`: the least of the stages that are
    left, by stage and state; `constant`: transfers."""

    values: list[dict[int, float]]
    togo: list[dict[int, float]]
    constant: float


class Partitions:
    """The partitions that `steps` allow, from state 0 to `end`; every state in `steps` must lead on to the end."""

    def __init__(self, pipeline: Pipeline, steps: Steps, end: int) -> None:
        self.pipeline, self.steps, self.end = pipeline, steps, end
        self.pp, self.m = pipeline.pp, pipeline.m
        self.hops = [*pipeline.hops[: self.pp - 1], 0.0]
        self.flat = pipeline.vpp == 1 and self.pp > 1
        kind = of_chunks(pipeline.schedule, pipeline.vpp, pipeline.group)
        self.transfers = [kind.transfers(self.pp, p, self.m) for p in range(self.pp)]
        self.half_duplex = kind.half_duplex
        (self.start,) = steps[0]
        self.behind, self.updates, self.togo = self._bounds()
        self.bound = max(self.togo[0].get(self.start, INFINITE), pipeline.busy_s) + self.updates[0].get(self.start, 0.0) + pipeline.once_s
        """Seconds that no partition undercuts."""
        self.left = INFINITE
        """Seconds that none undercuts of those that were left out."""
        self.spent = 0
        """What partitions and their bounds took, in simulated passes."""
        self.best: Best | None = None
        self._path: list[Way] = []
        self._cut: _Cut | None = None
        self._critical: list[CriticalPath] = []
        """Critical paths of partitions, the one that last was longer than a limit first."""

    def _bounds(self) -> tuple[list[dict[int, tuple[float, float]]], list[dict[int, float]], list[dict[int, float]]]:
        """For each stage and state, the least over the ways to complete the partition: seconds that a micro-batch takes forward, and
        backward, through the last chunks of the stages that are left (and without chunks its transfers); the largest update; the largest
        lead + work (`_work`), and without chunks at least the turns that micro-batches make through all the stages that are left."""
        behind: list[dict[int, tuple[float, float]]] = [{} for _ in range(self.pp)] + [{self.end: (0.0, 0.0)}]
        updates: list[dict[int, float]] = [{} for _ in range(self.pp)] + [{self.end: 0.0}]
        togo: list[dict[int, float]] = [{} for _ in range(self.pp)] + [{self.end: 0.0}]
        for p in range(self.pp - 1, -1, -1):
            turns, hop, both, flat = (self.m - 1) // (self.pp - p) + 1, self.hops[p], self._waits_twice(p), self.flat
            known = {
                end: (f, b, togo[p + 1][end] + 2 * hop, updates[p + 1][end], self._turn(p, (f, b))) for end, (f, b) in behind[p + 1].items()
            }
            terms: dict[int, list[tuple[float, ...]]] = {}  # what of a way is the same wherever it leads to, by the id of a list of ways
            for state, steps in self.steps[p].items():
                forward = backward = update = least = INFINITE
                for end, ways in steps:
                    f, b, rest, after, turn = known[end]
                    here = terms.get(id(ways))
                    if here is None:
                        here = terms[id(ways)] = [
                            (
                                way.forward_s[-1],
                                way.backward_s[-1],
                                way.optimizer_s,
                                way.forward_s[0] + way.backward_s[0],
                                *self._own(p, way),
                            )
                            for way in ways
                        ]
                    for last_forward, last_backward, optimizer, lead, work, first, last in here:  # min and max would take twice as long
                        if f + last_forward < forward:  # noqa: PLR1730
                            forward = f + last_forward
                        if b + last_backward < backward:  # noqa: PLR1730
                            backward = b + last_backward
                        later = optimizer if optimizer > after else after
                        if later < update:  # noqa: PLR1730
                            update = later
                        if flat:
                            first = turn - first if turn > first else 0.0
                            last = turn - last if turn > last else 0.0
                            work += first + last if both or not first or not last else max(first, last)
                        if lead + rest > work:  # noqa: PLR1730
                            work = lead + rest
                        if work < least:  # noqa: PLR1730
                            least = work
                if flat:
                    forward, backward = forward + hop, backward + hop
                    least = max(least, turns * (forward + backward))
                behind[p][state], updates[p][state], togo[p][state] = (forward, backward), update, least
        return behind, updates, togo

    def _work(self, p: int, way: Way, behind: tuple[float, float]) -> float:
        """Seconds from when the first micro-batch reaches stage p, computed so, until the last gradient leaves it. Without chunks with what
        it waits for the stages behind it, which take a micro-batch `behind` seconds there and back, transfers included.

        Its first backward pass comes after the first micro-batch's turn through them, not just after its warm-up; and its last one after
        the last micro-batch's turn, not just after those that its warm-up was ahead. Where transfers block, the stage spends all those over
        its borders: beside each pass of its warm-up `beside` of them, and `more` before the turn is over.
        """
        work, first, last = self._own(p, way)
        if not self.flat:
            return work
        turn = self._turn(p, behind)
        first, last = max(0.0, turn - first), max(0.0, turn - last)
        return work + (first + last if self._waits_twice(p) else max(first, last))

    def _own(self, p: int, way: Way) -> tuple[float, float, float]:
        """Seconds that depend on this way alone, for `_work`: of its work with its transfers, and those that it is ahead of the turn of
        the first and of the last micro-batch."""
        work = self.m * way.work_s
        if not self.flat:
            return work, 0.0, 0.0
        before, behind_it = self.hops[p - 1] if p else 0.0, self.hops[p]
        up, down = self.transfers[p]
        ahead, beside = min(self.m - 1, self.pp - 1 - p), before + behind_it
        work += max(0, up - 2) * before + down * behind_it
        return work, ahead * (way.forward_s[0] + beside), ahead * (way.backward_s[0] + beside)

    def _turn(self, p: int, behind: tuple[float, float]) -> float:
        """Seconds of a micro-batch's turn through the stages behind p, for `_work`, less transfers that its warm-up has had before."""
        behind_it = self.hops[p]
        return sum(behind) + 2 * behind_it - (2 if self.half_duplex or self.m <= self.pp - 1 - p else 1) * behind_it

    def _waits_twice(self, p: int) -> bool:
        """Whether there are more micro-batches than stage p's warm-up has: it waits for the first one's turn and for the last one's."""
        return self.m - 1 > self.pp - 1 - p

    # ---- branch and bound

    def search(self, upper: float, most: int, *, sharply: bool = False, near: Best | None = None) -> Best | None:
        """The best partition of at most `upper` seconds, in the time of `most` simulated passes. `sharply`: with critical paths, and with
        what is better near by the partitions that come up there, and `near` another one."""
        self.upper, self.most, self.left = upper, self.spent + most, INFINITE
        if not self._excluded(self.bound):
            self._by_known()
        if sharply and self.pp > 1 and not self._excluded(self.bound):
            met = sorted(self._sharpen(), key=lambda best: best.seconds)[:MOST_CLIMBS]
            for start in met if near is None else [near, *met]:
                if not self._excluded(self.bound):
                    self._climb(start)
        self._from_start()
        if self._is_loose() and not sharply and most >= FEW_ROUNDS * self.pipeline.passes:
            self._sharpen(FEW_ROUNDS)
            self.most, self.left = self.spent + most, INFINITE
            self._from_start()
        return self.best

    def _from_start(self) -> None:
        if not self._excluded(self.bound):
            self._down(0, self.start, _Above(0.0, 0.0, 0.0, 0.0, 0.0 if self._cut is None else self._cut.constant))

    def _is_loose(self) -> bool:
        """Whether what was left out may be much faster than the best, in a schedule of chunks of which no critical paths are known."""
        if self.pipeline.vpp == 1 or self.pipeline.paths is None or self.shape in self.pipeline.paths:
            return False
        return self.left < (1 - FAR) * (self.upper if self.best is None else self.best.seconds)

    def _excluded(self, bound: float) -> bool:
        if self.best is not None:
            return bound * (1 - ROUNDING) >= self.best.seconds
        return bound > self.upper * (1 + ROUNDING)

    def _down(self, p: int, state: int, above: _Above) -> None:
        """Complete the partition whose first p stages are `_path`."""
        if p == self.pp:
            self._simulate(self._path, self.upper if self.best is None else self.best.seconds)
            return
        found: list[tuple[float, int, Way, _Above]] = []
        cut, hop = self._cut, self.hops[p]
        for end, ways in self.steps[p][state]:
            rest, behind = self.togo[p + 1][end], self.behind[p + 1][end]
            for way in ways:
                update = max(above.update, way.optimizer_s)
                lead = max(above.lead, above.down + way.exposed_s)
                largest = max(above.largest, lead + self._work(p, way, behind))
                onwards = lead + way.forward_s[0] + way.backward_s[0] + 2 * hop
                bound, spent = max(largest, onwards + rest, self.pipeline.busy_s), above.spent
                if cut is not None:
                    spent += cut.values[p][id(way)]
                    bound = max(bound, spent + cut.togo[p + 1][end])
                bound += max(update, self.updates[p + 1][end]) + self.pipeline.once_s
                found.append((bound, end, way, _Above(above.down + way.forward_s[0] + hop, onwards, largest, update, spent)))
        self.spent += PASSES_FOR_STEP * len(found)
        found.sort(key=lambda step: step[0])
        for bound, end, way, below in found:
            if self._excluded(bound):
                return
            if self.spent >= self.most:
                self.left = min(self.left, bound)
                return
            self._path.append(way)
            self._down(p + 1, end, below)
            self._path.pop()

    def _simulate(self, ways: Sequence[Way], limit: float = INFINITE) -> float:
        """Seconds of a partition's step, or where they are above the limit, any above it that the step does not undercut."""
        self.spent += self.pipeline.passes
        seconds = self._on_known(ways, limit)
        if seconds is None:
            seconds = self.pipeline.score(ways, limit)
        if seconds < self.best.seconds if self.best is not None else seconds <= self.upper:
            self.best = Best(seconds, tuple(ways))
        return seconds

    def _on_known(self, ways: Sequence[Way], limit: float) -> float | None:
        """Seconds of a step that are above the limit by the critical path of another partition; None where none of them is as long."""
        if limit == INFINITE or not self._critical:
            return None
        times, besides = self._of_ways(ways), max(way.optimizer_s for way in ways) + self.pipeline.once_s
        for place, path in enumerate(self._critical):
            seconds = path.seconds(times) + besides
            if seconds > limit * (1 + ROUNDING):
                self._critical.insert(0, self._critical.pop(place))
                return seconds
        return None

    def _climb(self, start: Best) -> None:
        """Goes on from a partition to a better one that differs by a layer which is in another stage, as long as there is one."""
        pairs = [(giving, taking) for giving in range(self.pp) for taking in range(self.pp) if giving != taking]
        here, since, turn = start, 0, 0
        while since < len(pairs) and self.spent < self.most:
            ways = self._moved(here.ways, *pairs[turn % len(pairs)])
            turn, since = turn + 1, since + 1
            if ways is not None and (seconds := self._simulate(ways, here.seconds)) < here.seconds:
                here, since = Best(seconds, tuple(ways)), 0

    def _moved(self, ways: Sequence[Way], giving: int, taking: int) -> list[Way] | None:
        """The partition with a layer less in the one stage and one more in the other; None where that is not among the steps."""
        found, state, old = list[Way](), self.start, self.start
        for p, way in enumerate(ways):
            known = (end for end, some in self.steps[p].get(old, ()) if way in some)
            old = next(known, -1)
            between = min(giving, taking) <= p < max(giving, taking)
            wanted = (old + ((1 if taking < giving else -1) if between else 0)) % STRIDE
            state, there = next(((end, some) for end, some in self.steps[p].get(state, ()) if end % STRIDE == wanted), (-1, None))
            if old < 0 or there is None:
                return None
            found.append(way if way in there else there[0])
        return found

    # ---- critical paths

    def _of_ways(self, ways: Sequence[Way]) -> Times:
        """What a partition's passes take."""
        forward = [way.forward_s[v] for v in range(self.pipeline.vpp) for way in ways]
        backward = [way.backward_s[v] for v in range(self.pipeline.vpp) for way in ways]
        return Times(forward, backward, self.pipeline.hops, [way.exposed_s for way in ways])

    def _along(self, path: CriticalPath) -> tuple[_Cut, list[Way]]:
        """The path as a bound, and the partition that takes least on it: the shortest path over the borders."""
        pp, chunks = self.pp, range(self.pipeline.vpp)
        values: list[dict[int, float]] = []
        togo: list[dict[int, float]] = [{} for _ in range(pp)] + [{self.end: 0.0}]
        best: list[dict[int, tuple[int, Way]]] = []
        for p in range(pp - 1, -1, -1):
            known: dict[int, float] = {}
            onwards: dict[int, tuple[int, Way]] = {}
            forward, backward = path.forward[p::pp], path.backward[p::pp]
            for state, steps in self.steps[p].items():
                least = INFINITE
                for end, ways in steps:
                    rest = togo[p + 1][end]
                    for way in ways:
                        seconds = known.get(id(way))
                        if seconds is None:
                            seconds = sum([forward[v] * way.forward_s[v] + backward[v] * way.backward_s[v] for v in chunks])
                            seconds = known[id(way)] = seconds + path.ends[p] * way.exposed_s
                        if seconds + rest < least:
                            least = togo[p][state] = seconds + rest
                            onwards[state] = end, way
            values.append(known)
            best.append(onwards)
        chosen, state = [], self.start
        for onwards in reversed(best):
            state, way = onwards[state]
            chosen.append(way)
        return _Cut(values[::-1], togo, path.transfers_s), chosen

    @property
    def shape(self) -> tuple[object, ...]:
        """What the order of passes depends on."""
        pipeline = self.pipeline
        return pipeline.schedule, self.pp, self.m, pipeline.vpp, pipeline.group or self.pp

    def _by_known(self) -> None:
        """Raise `bound` by the critical paths of other pipelines with the same order of passes; a transfer on them takes at least the least
        share of its time there."""
        paths = self.pipeline.paths or {}
        for path, hops in paths.get(self.shape, ()):
            share = min([here / there for here, there in zip(self.pipeline.hops, hops, strict=True) if there], default=0.0)
            self._cut_by(path._replace(transfers_s=share * path.transfers_s))

    def _cut_by(self, path: CriticalPath) -> tuple[float, bool, list[Way]]:
        """Seconds of a step, but for what comes once, that the path takes at least, whether that raises `bound`, and the partition in which
        it takes them."""
        cut, chosen = self._along(path)
        least = cut.togo[0][self.start] + cut.constant
        seconds = least + self.updates[0][self.start] + self.pipeline.once_s
        more = seconds > self.bound
        if more:
            self.bound, self._cut = seconds, cut
        return least, more, chosen

    def _sharpen(self, most: int = MOST_ROUNDS) -> list[Best]:
        """Raise `bound` by the best mean of critical paths: a game between who chooses the partition and who chooses the path, in which
        each in turn answers best what the other plays (the double oracle: McMahan, Gordon and Blum, ICML 2003). Partitions that come up
        are simulated: they are good ones, and are returned. In so many rounds at `most`."""
        pipeline = self.pipeline
        graph = graph_of(pipeline.schedule, self.pp, self.m, pipeline.vpp, pipeline.group)
        evenly = [float(self.m)] * (self.pp * pipeline.vpp)
        chosen = self._along(CriticalPath(evenly, evenly, 0.0, [0.0] * self.pp))[1]
        fixed = self.updates[0][self.start] + pipeline.once_s
        partitions: list[Times] = []
        paths: list[CriticalPath] = []
        payoffs: list[list[float]] = []
        met: list[Best] = []
        by_partition: list[float] = []
        sharpest: CriticalPath | None = None

        def add(path: CriticalPath) -> None:
            paths.append(path)
            self._critical.append(path)
            payoffs.append([path.seconds(times) for times in partitions])

        for _ in range(min(most, NODES_WALKED // len(graph.costs))):
            met.append(Best(self._simulate(chosen), tuple(chosen)))
            partitions.append(times := self._of_ways(chosen))
            for path, row in zip(paths, payoffs, strict=True):
                row.append(path.seconds(times))
            add(longest(graph, times)[1])
            _, by_path, by_partition = game(payoffs, by_partition)
            value, path = longest(graph, Times.mean(partitions, by_partition))
            together = CriticalPath.mean(paths, by_path)
            least, more, chosen = self._cut_by(together)
            sharpest = together if more else sharpest
            if self._excluded(self.bound) or least >= value * (1 - (CLOSE if self._excluded(value + fixed) else LEFT_OPEN)):
                break
            add(path)
        if sharpest is not None and pipeline.paths is not None:
            known = pipeline.paths.setdefault(self.shape, [])
            known.append((sharpest, pipeline.hops))
            del known[:-MOST_KNOWN]
        return met


def through(steps: Steps, end: int) -> Steps | None:
    """The steps between states that can be reached and lead on to the end; None where no partition is left."""
    known = {end}
    kept: Steps = []
    for row in reversed(steps):
        going = {state: [step for step in onwards if step[0] in known and step[1]] for state, onwards in row.items()}
        kept.append({state: onwards for state, onwards in going.items() if onwards})
        known = {*kept[-1]}
    kept.reverse()
    reached = {*kept[0]}
    for p, row in enumerate(kept):
        kept[p] = {state: onwards for state, onwards in row.items() if state in reached}
        reached = {end for onwards in kept[p].values() for end, _ in onwards}
    return kept if kept[0] else None
