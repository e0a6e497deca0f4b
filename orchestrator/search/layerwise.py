"""The layer-wise search: every layer its own tp, data parallelism or ZeRO-3, and recompute; pipeline outermost; the batch, if it is open.

Stages are bounded by sums over layers at a price on bytes, solved one by one where that matters (search/layerwise_stage.py), and put
together like those of the engines' plans (search/partition.py). What no plan undercuts is known in any case
(`LayerwiseResult.at_least_s`); it is the plan's own time where all ways of all stages that could be part of a faster plan were compared.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate
from math import ceil
from typing import NamedTuple

from orchestrator.cost.bounds import filled
from orchestrator.cost.layerwise import AnalyticPrices, Outer, Prices, ProfilePrices, Way, plan_price, stage_price
from orchestrator.cost.schedule import in_flight
from orchestrator.errors import NoPlanError
from orchestrator.search.layerwise_stage import INFINITE, ROUNDING, Front, StageSolver, mean
from orchestrator.search.partition import Partitions, Pipeline, Steps, through
from orchestrator.search.partition import Way as StageWay
from orchestrator.strategy.layerwise import LayerwisePlan, LayerwiseStage
from orchestrator.strategy.layout import ENDS
from orchestrator.strategy.pins import MemoryLimit
from orchestrator.strategy.tree import divisors
from orchestrator.units import format_bytes

__all__ = ["AnalyticPrices", "LayerwiseResult", "Outer", "Prices", "ProfilePrices", "Way", "layerwise", "plan_price", "stage_price"]

MOST_BATCHES = 32
CLOSE = 1e-3
"""Relative: a stage is solved again only where at least this share less is asked for."""
MOST_ROUNDS = 6
"""Times that the stages of the split with the least bound are solved and the bound is looked for anew."""
MOST_SOLVED = 150
"""Stages that are solved for one outer choice; of more, only splits of those that were met are compared."""
MOST_STEPS = 100_000
"""Steps that solving the stages of one outer choice may take: an eighth of a second."""
MOST_PASSES = 40_000
"""Passes that may be simulated for the splits of one outer choice, or what takes as long."""
LATER, LAST_TURN = 1.02, 2
"""An outer choice is estimated, looked at, and looked at again with what others have found: each turn as if it were so much slower."""


class LayerwiseResult(NamedTuple):
    """The plan, and what is known about all others of its space."""

    plan: LayerwisePlan
    at_least_s: float
    """Seconds that no plan of this batch undercuts, nor one of another batch that was open, counted in samples."""

    @property
    def exact(self) -> bool:
        """Whether nothing of the space is faster."""
        return self.at_least_s >= self.plan.step_time_s * (1 - 2 * ROUNDING)


class Found(NamedTuple):
    """A plan of one outer choice: seconds, stages."""

    seconds: float
    stages: tuple[LayerwiseStage, ...]


Split = list[tuple[int, int, int]]
"""(stage, its first layer, the first one behind it), in order."""


def sums(runs: Sequence[tuple[str, int]], each: dict[str, float]) -> list[float]:
    """The sums of one number for each kind of layer over the first 0, 1, 2, ... layers.

    >>> sums([("a", 2), ("b", 1)], {"a": 1.0, "b": 5.0})
    [0.0, 1.0, 2.0, 7.0]
    """
    return [0.0, *accumulate(each[kind] for kind, count in runs for _ in range(count))]


class _Place(NamedTuple):
    """What bounds the stages at one place: bytes there are for layers, their price, sums over layers of bytes, of seconds, and of seconds
    with a price on bytes; what embedding and head add to each; seconds besides."""

    room: float
    price: float
    sums: tuple[list[float], list[float], list[float]]
    ends: tuple[float, float, float]
    constant: float


class Splits:
    """The stages of one outer choice, and which layers go to which."""

    def __init__(self, prices: Prices, outer: Outer, usable: float) -> None:
        self.prices, self.outer, self.usable = prices, outer, usable
        self.pp, self.m = outer.pp, outer.num_microbatches
        self.inner = [(kind, count) for kind, count in prices.runs if kind not in ENDS]
        self.layers = sum(count for _, count in self.inner)
        self.first = prices.runs[0][0] if prices.runs[0][0] in ENDS else None
        self.last = prices.runs[-1][0] if prices.runs[-1][0] in ENDS else None
        self.overhead, self.once = prices.overheads_s()
        self.hop = prices.hop_s(outer)
        self.back = 2 * self.hop
        self.fastest = {
            kind: min((way.forward_s + way.backward_s for way in prices.ways(kind, outer)), default=INFINITE) for kind, _ in prices.runs
        }
        self.work_s = sum(count * self.fastest[kind] for kind, count in prices.runs) + self.pp * self.overhead
        """Seconds of a micro-batch in all stages at least; infinite where some layer has no legal way."""
        self.least = filled(self.work_s, self.pp, self.m, 1, self.hop) + self.once if self.work_s < INFINITE else INFINITE
        """Seconds that no split undercuts, as far as is known."""
        self._held = [(n, prices.fixed_bytes(outer, p, n)) for p in range(self.pp) for n in (in_flight("1f1b", self.pp, p, self.m),)]
        """Micro-batches in flight by stage, and bytes that are there whatever the layers."""
        self._way = sums(self.inner, self.fastest)
        """Seconds of one micro-batch forward and backward through the first so many layers, each at its fastest."""
        self._places: list[_Place] = []
        self._fronts: dict[tuple[object, ...], tuple[float, Front]] = {}
        """For each stage that was solved: the seconds that were asked for, and the front of its ways."""
        self.steps = 0
        """Steps that solving stages has taken."""

    # ---- a stage

    def _runs(self, p: int, start: int, end: int) -> tuple[tuple[str, int], ...]:
        runs: list[tuple[str, int]] = [(self.first, 1)] if p == 0 and self.first else []
        offset = 0
        for kind, count in self.inner:
            low, high = max(start - offset, 0), min(end - offset, count)
            if low < high:
                runs.append((kind, high - low))
            offset += count
        if p == self.pp - 1 and self.last:
            runs.append((self.last, 1))
        return tuple(runs)

    def _solver(self, p: int, start: int, end: int) -> StageSolver:
        """What of stage p delays the end for certain: its work, and the first stage's reduction and update."""
        flight, fixed = self._held[p]
        room = self.usable - fixed
        return StageSolver(self.prices, self.outer, p, self._runs(p, start, end), flight, room, whole=p == 0)

    def _key(self, p: int, start: int, end: int) -> tuple[object, ...]:
        """Stages with the same key cost the same."""
        return (self._runs(p, start, end), self._held[p], p == 0)

    def front(self, p: int, start: int, end: int, upper: float) -> Front:
        """The ways for layers [start, end) in stage p that may be part of a plan of less than `upper` seconds."""
        key = self._key(p, start, end)
        asked, front = self._fronts.get(key, (INFINITE, None))
        if front is None or (not front.complete and upper < asked * (1 - CLOSE)):
            solver = self._solver(p, start, end)
            found = solver.front(upper - self.once)
            self.steps += solver.steps
            front = found if front is None else found._replace(least_s=max(found.least_s, front.least_s))
            self._fronts[key] = upper, front
        return front

    def known(self, p: int, start: int, end: int) -> float:
        """Seconds that stage p with these layers needs at least: what solving said, or sums over layers; infinite where they don't fit."""
        solved = self._fronts.get(self._key(p, start, end)) if self._fronts else None
        if solved is not None:
            return solved[1].least_s
        room, price, (lean, seconds, priced), (bytes_here, s_here, priced_here), constant = self._places[p]
        if lean[end] - lean[start] + bytes_here > room * (1 + ROUNDING):
            return INFINITE
        return max(seconds[end] - seconds[start] + s_here, priced[end] - priced[start] + priced_here - price * room) + constant

    def _place(self, p: int, solver: StageSolver) -> _Place:
        columns: tuple[dict[str, float], ...] = ({}, {}, {})
        for kind, _ in self.prices.runs:
            ways = [
                (solver.nbytes(way), mean(solver.sums(way.forward_s, way.backward_s, way.sync_s, way.optimizer_s), solver.share))
                for way in self.prices.ways(kind, self.outer)
            ]
            columns[0][kind] = min(nbytes for nbytes, _ in ways)
            columns[1][kind] = min(seconds for _, seconds in ways)
            columns[2][kind] = min(seconds + solver.price * nbytes for nbytes, seconds in ways)
        here = [kind for kind, there in ((self.first, p == 0), (self.last, p == self.pp - 1)) if kind and there]
        least = min(way.transient_bytes for kind, _ in self.inner for way in self.prices.ways(kind, self.outer))
        lean, seconds, priced = (sums(self.inner, column) for column in columns)
        a, b, c = (sum(column[kind] for kind in here) for column in columns)
        constant = solver.constant - solver.share * solver.ahead
        return _Place(solver.room - solver.slack * least, solver.price, (lean, seconds, priced), (a, b, c), constant)

    # ---- the splits

    def estimate(self, upper: float) -> None:
        """Raise the bound, to `upper` seconds at most: each stage of the even split says what a byte is worth at its place."""
        even = self._even()
        for p, start, end in even:
            solver = self._solver(p, start, end)
            bound = solver.bound()
            self._places.append(self._place(p, solver))
            if self.pp == 1:
                self.least = max(self.least, bound + self.once)
        if self.pp > 1:
            self.least = max(self.least, self._table(upper)[0])

    def _together(self, split: Split, upper: float) -> Found | None:
        """The best of a split's ways below `upper`."""
        steps: Steps = [{start: [(end, self._stage_ways(self.front(p, start, end, upper)))]} for p, start, end in split]
        return self._found(through(steps, self.layers), upper)[0]

    def finish(self, upper: float) -> Found | None:
        """The best below `upper` over all splits whose stages are not too slow alone; raises the bound where nothing was left out."""
        best, split, before = None, self._even(), list[tuple[int, int, int]]()
        for _ in range(MOST_ROUNDS):  # a good split makes few stages worth solving
            if split == before or not split:
                break
            ways = [self.front(*stage, upper).ways for stage in split]
            best = (self._together(split, upper) if all(ways) else None) or best
            upper = upper if best is None else best.seconds
            before, (_, split) = split, self._table(upper)
        edges = sorted(self._edges(upper), key=lambda edge: self._lead(edge[0], edge[1]) + self.known(*edge))
        steps: Steps = [{} for _ in range(self.pp)]
        most, solved, complete = self.steps + MOST_STEPS, 0, True
        for edge in edges:
            p, start, end = edge
            new = self._key(*edge) not in self._fronts
            solved += new
            if new and (solved > MOST_SOLVED or self.steps >= most):
                complete = False
                continue
            front = self.front(*edge, upper)
            complete = complete and front.complete
            steps[p].setdefault(start, []).append((end, self._stage_ways(front)))
        found, left = self._found(through(steps, self.layers), upper)
        self.least = max(self.least, self._table(upper)[0])
        if complete:
            self.least = max(self.least, left)
        self.least = min(self.least, upper if found is None else found.seconds)
        return found or best

    def _found(self, steps: Steps | None, upper: float) -> tuple[Found | None, float]:
        """(the best of less than `upper` seconds, seconds that nothing which was left out undercuts)."""
        if steps is None:
            return None, INFINITE
        pipeline = Pipeline("1f1b", self.pp, self.m, 1, None, [self.hop] * self.pp, self.once, 0.0, self._score)
        walk = Partitions(pipeline, steps, self.layers)
        best = walk.search(upper * (1 - ROUNDING), MOST_PASSES)
        if walk.left < (upper if best is None else best.seconds):
            best = walk.search(upper * (1 - ROUNDING), MOST_PASSES, sharply=True)
        return None if best is None else Found(best.seconds, tuple(way.made for way in best.ways)), walk.left

    def _score(self, ways: Sequence[StageWay], limit: float) -> float:
        return plan_price(self.prices, self.outer, [way.made for way in ways])

    @staticmethod
    def _stage_ways(front: Front) -> list[StageWay]:
        return [StageWay((way.forward_s,), (way.backward_s,), way.exposed_s, way.optimizer_s, way.peak_bytes, way) for way in front.ways]

    def _lead(self, p: int, layers: int) -> float:
        """Seconds of one micro-batch through the stages before stage p, down and back, at the fastest."""
        if p == 0:
            return 0.0
        first = self.fastest[self.first] if self.first else 0.0
        return first + self._way[layers] + p * (self.overhead + self.back)

    def _edges(self, upper: float) -> Iterable[tuple[int, int, int]]:
        """(stage, first layer, first behind) of splits in which no stage alone takes `upper` seconds, from the last stage on."""
        farthest = [0]
        for p in range(self.pp):
            end = farthest[-1]
            while end < self.layers - (self.pp - 1 - p) and not self._slow(p, farthest[-1], end + 1, upper):
                end += 1
            farthest.append(end)
        reached = {self.layers} if farthest[-1] == self.layers else set()
        for p in range(self.pp - 1, -1, -1):
            here = set()
            for end in reached:
                for start in range(min(end - 1, farthest[p]), p - 1, -1):
                    if self._slow(p, start, end, upper):
                        break
                    if p or start == 0:
                        here.add(start)
                        yield p, start, end
            reached = here

    def _slow(self, p: int, start: int, end: int, upper: float) -> bool:
        return self._lead(p, start) + self.known(p, start, end) + self.once >= upper

    def _table(self, upper: float) -> tuple[float, Split]:
        """(seconds that no split undercuts, the split that is said to take that long); `upper` and none where no split is below.

        A stage can't end before a micro-batch has come down to it, it has worked m times, and the last gradient has gone back up to the
        first stage, whose reduction then is not hidden and whose update follows.
        """
        togo: list[dict[int, tuple[float, int]]] = [{} for _ in range(self.pp)] + [{self.layers: (0.0, 0)}]
        for p, start, end in self._edges(upper):
            if end in togo[p + 1]:
                one = self._way[end] - self._way[start] + self.overhead + (self.back if p < self.pp - 1 else 0.0)
                one += self.fastest[self.first] if p == 0 and self.first else 0.0
                one += self.fastest[self.last] if p == self.pp - 1 and self.last else 0.0
                bound = max(self.known(p, start, end), one + togo[p + 1][end][0])
                if self._lead(p, start) + bound + self.once < upper and bound < togo[p].get(start, (INFINITE, 0))[0]:
                    togo[p][start] = bound, end
        if 0 not in togo[0]:
            return upper, []
        split, start = [], 0
        for p in range(self.pp):
            end = togo[p][start][1]
            split.append((p, start, end))
            start = end
        return togo[0][0][0] + self.once, split

    def _even(self) -> Split:
        """The split in which each stage has as much to do, every layer at its fastest, and none too few layers."""
        borders, total = [0], self._way[-1]
        for p in range(1, self.pp):
            share = total * p / self.pp * (1 - ROUNDING)
            borders.append(bisect_left(self._way, share, borders[-1] + 1, self.layers - (self.pp - p)))
        borders.append(self.layers)
        return [(p, borders[p], borders[p + 1]) for p in range(self.pp)]


def open_batches(most: int, world: int) -> tuple[int, ...]:
    """The batches that are searched where the batch is open: those up to `most` of which every rank can have as many samples, at most
    `MOST_BATCHES` of them, evenly chosen.

    >>> open_batches(32, 8), len(open_batches(4096, 8)), open_batches(4, 8)
    ((8, 16, 24, 32), 32, (4,))
    """
    step = world * max(1, ceil(most // world / MOST_BATCHES))
    return tuple(range(step, most + 1, step)) or (most,)


def layerwise(
    prices: Prices,
    global_batch_size: int | Sequence[int],
    limit: MemoryLimit,
    *,
    num_microbatches: int | None = None,
    pp: int | None = None,
) -> LayerwiseResult:
    """The layer-wise plan with most samples a second: the fastest of one batch, or over all batches given.

    `num_microbatches`, `pp`: fixed where given. Raises NoPlanError.
    """
    batches = [global_batch_size] if isinstance(global_batch_size, int) else list(global_batch_size)
    layers = sum(count for kind, count in prices.runs if kind not in ENDS)
    queue: list[tuple[float, int, int, int, Splits]] = []  # when its turn is, its place, which turn, batch, splits
    for batch in batches:
        for stages in divisors(prices.world):
            if stages > layers or pp not in (None, stages):
                continue
            for m in divisors(batch):
                if num_microbatches not in (None, m):
                    continue
                for ends in prices.end_choices(Outer(stages, m, batch // m, None)):
                    splits = Splits(prices, Outer(stages, m, batch // m, ends), limit.usable)
                    if splits.least < INFINITE:
                        queue.append((splits.least / batch, len(queue), 0, batch, splits))
    best: tuple[Found, Outer, int] | None = None
    legal = len(queue)
    each = least = INFINITE  # seconds a sample: of the best plan, and of what none undercuts
    heapify(queue)
    while queue:
        _, place, turn, batch, splits = heappop(queue)
        if splits.least / batch >= each:
            continue
        if turn == 0:
            splits.estimate(each * batch)
        elif (found := splits.finish(each * batch)) is not None:
            best, each = (found, splits.outer, batch), found.seconds / batch
        if turn < LAST_TURN and splits.least / batch < each:
            heappush(queue, (splits.least / batch * LATER ** (turn + 1), place, turn + 1, batch, splits))
        else:
            least = min(least, splits.least / batch)
    if best is None:
        raise NoPlanError(f"no layer-wise plan fits in {format_bytes(limit.usable)} ({legal} outer choices)")
    (seconds, chosen), outer, batch = best
    plan = LayerwisePlan(
        world_size=prices.world,
        pp=outer.pp,
        global_batch_size=batch,
        num_microbatches=outer.num_microbatches,
        stages=chosen,
        step_time_s=seconds,
        peak_memory_bytes=max(stage.peak_bytes for stage in chosen),
        sequence_parallel=prices.sequence_parallel,
    )
    return LayerwiseResult(plan, min(seconds, least * batch))
