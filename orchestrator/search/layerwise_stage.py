"""The fastest ways to compute one stage's layers within its bytes, exact, at a cost that grows with runs of identical layers.

The time of a stage is linear in how many layers are computed which way, but for what redistribution costs where neighbours differ in tp,
and for the gradient reduction that hides behind one backward pass: micro-batches and update, and the larger of two linear functions (all
hidden, and as much hidden as fits). Memory is a sum and one maximum (the transient part), which is fixed in turn to each value it can
have. What is left is a constrained shortest path (Handler and Zang, "A dual algorithm for the constrained shortest path problem", Networks
1980): a price on bytes gives a bound that nothing undercuts, and what each layer that is not computed in the then cheapest way adds to it.
A run of identical layers is gone through in one step: every choice of sizes to visit, and of a count for each way, whose additions stay
within the gap between bound and solution (`_Front._elements`); what comes of several runs is kept on Pareto fronts of (bytes, the two
times). The bound mixes sequences, so that it changes sizes for nothing: where it stays far below the solution, each set of sizes that a
sequence may visit is bounded, and searched, for itself (`_Front.visiting`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cached_property
from heapq import heappop, heappush
from itertools import combinations, pairwise
from math import ceil
from operator import le
from typing import NamedTuple

from orchestrator.search.layerwise_paths import Objective
from orchestrator.search.layerwise_prices import Outer, Prices, Way

INFINITE = float("inf")
ROUNDING = 1e-9
"""Relative slack of a bound against a sum of the same terms in another order."""
GAPS = (0.0003, 0.001, 0.003, 0.01, 0.05)
"""How far above the bound a solution is looked for, one after the other: fronts grow with the gap."""
SPLIT = 0.001
"""From this gap on a solution is looked for by sets of sizes."""
MOST_SIZES = 6
"""Of more, a set is not searched: the result is no longer exact where it could be faster."""
SHARES = 6
"""Means of the two times that are looked at: the larger of the two is at least any mean."""
ROUNDED = 1e-6
"""Share of the bound: ways that add no more cost the same at that price. Mixed so that the bytes fit, they are a first solution."""
PRICES = 30
"""Prices of a byte that are tried; the best is mostly met after a handful."""
MOST_LIMITS = 24
"""Values of the transient bytes that are solved; where more may be faster, the result is no longer exact (`StageSolver.least`)."""
MOST_POINTS = 100
"""Of a front, in all: of more, those with the least bounds are kept, likewise."""
MOST_COUNTS = 300
"""Choices of counts for one run: of more, likewise."""
MOST_EVERY = 1000
"""Ways that are kept, where all are wanted, and a quarter of those that are compared: of more, none."""
WIDER = 10
"""Times as many of both, where those were not enough, once a good solution is known."""
MANY = 32
"""Choices of counts that are not worth being compared with each other."""
LONGEST = 5
"""Changes of size inside a run that are looked at: each costs an exchange; where more could pay, the result is no longer exact."""
DIRECT = 8
"""Layers that are gone through one by one, before steps of the whole run are squared."""
SAME = 1e-14


class _Priced(NamedTuple):
    """A way with what it adds to the stage: bytes; seconds if all of the reduction is hidden, and if as much as fits one backward pass."""

    way: Way
    nbytes: float
    times: tuple[float, float]


class _Run(NamedTuple):
    """`ways` by tp, or by tp and the sizes visited."""

    layers: int
    ways: dict[int, list[_Priced]]
    switch: dict[tuple[int, int], tuple[float, float]]
    """Times of a change of tp inside the run or into it."""
    detours: frozenset[tuple[int, int, int]]
    """(a, b, c): a change from a to c is dearer than one by way of b."""


class _Element(NamedTuple):
    """One way through a run: what it adds to the bound, bytes, the two times, sizes in order, and layers of each way."""

    more: float
    nbytes: float
    t0: float
    t1: float
    walk: tuple[int, ...]
    at: int
    """The state behind it: tp, or tp and the sizes visited."""
    counts: tuple[tuple[Way, int], ...]


Path = tuple["Path", int, _Element] | None
"""The way here: (what came before, run, element)."""
_Point = tuple[float, float, float, Path]
"""Bytes, the two times, the way here."""
NUMBERS = 6
_Many = tuple[tuple[float, ...], float, Path]
"""Bytes, transient bytes, seconds forward and backward, of the reduction, of the update; what the way adds to the bound; the way here."""
_Sum = tuple[float, float, float, float]
"""Of a path: time + price x bytes, bytes, and the two times."""
_Partial = tuple[int, float, float, float, float, tuple[tuple[Way, int], ...]]
"""Layers of a run, what they add to the bound, to the bytes and the two times beside as many in the common way; and which they are."""
NOTHING: _Sum = (0.0, 0.0, 0.0, 0.0)
NEVER: _Sum = (INFINITE, 0.0, 0.0, 0.0)
MASK = 32
"""Bits of a state that hold tp; those above are the sizes visited so far, where that is asked."""
TP = (1 << MASK) - 1


class StageSolver:
    """The fastest ways for one stage's layers within `room` bytes."""

    def __init__(
        self, prices: Prices, outer: Outer, runs: Sequence[tuple[str, int]], flight: int, room: float, objective: Objective
    ) -> None:
        self.prices, self.outer, self.flight, self.room, self.objective = prices, outer, flight, room, objective
        self.kinds = [kind for kind, _ in runs]
        self.counts = [count for _, count in runs]
        self.ways = [prices.ways(kind, outer) for kind in self.kinds]
        self.hides = (1 - prices.slowdown) * prices.hidden_share * objective.exposed
        self.ahead = self.hides * prices.overheads_s()[0] / 2
        """Seconds of reduction that hide behind the overhead of a backward pass."""
        self.least = 0.0
        """Seconds that no ways undercut, once solved: those of the solution where it is exact."""
        self.price, self.share = 0.0, 0.0
        """Of a byte, and of time 1 in the mean of the two, where the bound was largest."""

    def times(self, way: Way) -> tuple[float, float]:
        """The two linear times of a layer."""
        forward, backward, exposed, optimizer = self.objective
        base = forward * way.forward_s + backward * way.backward_s + optimizer * way.optimizer_s
        return base + exposed * self.prices.slowdown * way.sync_s, base + exposed * way.sync_s - self.hides * way.backward_s

    def nbytes(self, way: Way) -> float:
        """What a layer adds to the stage's bytes."""
        return way.static_bytes + self.prices.slack * self.flight * way.saved_bytes

    def solve(self, upper: float = INFINITE) -> tuple[float, list[tuple[int, Way, int]]] | None:
        """(seconds, blocks as (run, way, layers)) below `upper`; None where nothing that fast fits.

        The transient bytes are a maximum. For a range of the values that it can have, the ways that need no more than the largest, in what
        the least leaves, are bounded; the range with the least bound is halved, until it is one value, which is solved.
        """
        self.least = upper
        if not all(self.ways):
            return None
        best: tuple[float, list[tuple[int, Way, int]]] | None = None
        limits = sorted({way.transient_bytes for ways in self.ways for way in ways})
        low = bisect_left(limits, self._least_transient)
        ranges = [(0.0, len(limits) - 1, len(limits) - 1), (0.0, low, len(limits) - 2)]
        solved = 0
        left: list[_Front] = []
        while ranges:
            bound, low, high = heappop(ranges)
            near = best[0] if best else upper
            if bound >= near * (1 - ROUNDING):
                break
            if solved == MOST_LIMITS:
                self.least = min(self.least, bound)
                break
            if low > high:
                continue
            runs = self._runs(limits[high])
            assert runs is not None
            front = _Front(runs, self.room - self.prices.slack * limits[low], self.ahead, two=self.objective.exposed > 0.0)
            if low < high:
                if front.bound(near):
                    middle = (low + high) // 2
                    heappush(ranges, (front.lower, low, middle))
                    heappush(ranges, (front.lower, middle + 1, high))
                continue
            solved += 1
            found = front.solve(near)
            if not front.exact:
                left.append(front)
            if found is not None:
                best = found
        for front in left:  # again, now that a good solution is known
            front.times = WIDER
            found = front.solve(best[0] if best else upper)
            if not front.exact:
                self.least = min(self.least, front.lower)
            if found is not None:
                best = found
        if best is not None:
            self.least = min(self.least, best[0])
        return best

    @cached_property
    def _least_transient(self) -> float:
        """The fewest transient bytes that any ways need."""
        return max(min(way.transient_bytes for way in ways) for ways in self.ways)

    def bound(self, upper: float = INFINITE) -> float:
        """Seconds that nothing which fits undercuts, or `upper` if that is less: all ways, with the fewest transient bytes that any ways
        need. Sets the price."""
        front = self._loosest(upper) if all(self.ways) else None
        if front is None:
            return upper
        self.price, self.share = front.price, front.share
        return min(upper, front.lower)

    def _loosest(self, upper: float, *, all_numbers: bool = False) -> _Front | None:
        """Bounded: all ways, in what the fewest transient bytes leave; None where nothing that fits is below `upper`."""
        runs = self._runs(INFINITE, all_numbers=all_numbers)
        assert runs is not None
        cap = self.room - self.prices.slack * self._least_transient
        front = _Front(runs, cap, self.ahead, two=self.objective.exposed > 0.0, all_numbers=all_numbers)
        return front if front.bound(upper) else None

    def every(self, upper: float = INFINITE) -> list[list[tuple[int, Way, int]]] | None:
        """All ways that fit and are below `upper` seconds, but those that another one covers in every number of a stage (forward,
        backward, reduction, update): as blocks. None where there are more of them than are looked at.

        As `_Front._search` goes through the runs, but that what is kept covers in all numbers, bytes and transient bytes.
        """
        front = self._loosest(upper, all_numbers=True) if all(self.ways) else None
        if front is None:
            return []
        points: list[_Many] = []
        for part in front.visiting(upper) if upper < INFINITE else [front]:
            some = None if len(part.sizes) > MOST_SIZES else self._every(part, upper)
            if some is None:
                return None
            points += some
        kept = _uncovered_numbers(points, 2)
        return None if kept is None else [_path_blocks(path) for _, _, path in kept]

    def _every(self, front: _Front, upper: float) -> list[_Many] | None:
        front.rest = [{at: total[0] for at, total in row.items()} for row in front._totals(front.price, front.share)]
        slack = upper
        if upper < INFINITE:
            slack = (upper + front.share * self.ahead + front.price * front.cap) * (1 + ROUNDING) - front.rest[0][0]
        points: dict[int, list[_Many]] = {0: [((0.0,) * NUMBERS, 0.0, None)]}
        for r in range(len(self.kinds)):
            reach: dict[int, list[_Many]] = {}
            for before, some in points.items():
                elements = [(element, self._numbers(r, before, element)) for element in front._elements(r, before, slack)]
                if not front.exact:
                    return None
                for numbers, more, path in some:
                    for element, added in elements:
                        if element.more > slack - more:
                            break
                        nbytes = numbers[0] + added[0]
                        transient = max(numbers[1], added[1], self._least_transient)
                        if nbytes + self.prices.slack * transient + front.leanest[r + 1] <= self.room * (1 + ROUNDING):
                            total = (nbytes, transient, *(a + b for a, b in zip(numbers[2:], added[2:], strict=True)))
                            reach.setdefault(element.at, []).append((total, more + element.more, (path, r, element)))
                    if sum(map(len, reach.values())) > 4 * MOST_EVERY:
                        return None
            points = {}
            for at, some in reach.items():
                kept = _uncovered_numbers(some, 0)
                if kept is None:
                    return None
                points[at] = kept
        return [point for some in points.values() for point in some if point[0][0] + self.prices.slack * point[0][1] <= self.room]

    def _numbers(self, r: int, before: int, element: _Element) -> tuple[float, ...]:
        """Of a way through run r: bytes, transient bytes, seconds forward and backward, of the reduction, of the update."""
        forward = backward = sync = optimizer = transient = 0.0
        for way, count in element.counts:
            forward += count * way.forward_s
            backward += count * way.backward_s
            sync += count * way.sync_s
            optimizer += count * way.optimizer_s
            transient = max(transient, way.transient_bytes)
        for a, b in pairwise((before & TP, *element.walk)):
            if a and a != b:
                f, back = self.prices.switch(self.kinds[r], a, b, self.outer)
                forward, backward = forward + f, backward + back
        return element.nbytes, transient, forward, backward, sync, optimizer

    @cached_property
    def _switches(self) -> list[tuple[dict[tuple[int, int], tuple[float, float]], frozenset[tuple[int, int, int]]]]:
        """Of each run: times of a change of tp inside it or into it; detours that pay."""
        found: list[tuple[dict[tuple[int, int], tuple[float, float]], frozenset[tuple[int, int, int]]]] = []
        earlier = {0}
        for kind, ways in zip(self.kinds, self.ways, strict=True):
            here = {way.choice.tp for way in ways}
            switch, passes = {}, {}
            for a in here | earlier:
                for b in here:
                    f, back = passes[a, b] = self.prices.switch(kind, a, b, self.outer) if a and a != b else (0.0, 0.0)
                    time = self.objective.forward * f + self.objective.backward * back
                    switch[a, b] = (time, time - self.hides * back)
            found.append((switch, _detours(passes)))
            earlier = here
        return found

    def _runs(self, limit: float, *, all_numbers: bool = False) -> list[_Run] | None:
        """With ways that need no more transient bytes; None where there are none."""
        runs: list[_Run] = []
        earlier = {0}
        for ways, count, (switches, detours) in zip(self.ways, self.counts, self._switches, strict=True):
            by_tp: dict[int, list[_Priced]] = {}
            for way in ways:
                if way.transient_bytes <= limit:
                    by_tp.setdefault(way.choice.tp, []).append(_Priced(way, self.nbytes(way), self.times(way)))
            if not by_tp:
                return None
            for tp, group in by_tp.items():  # of equal tp, so that neighbours don't matter
                seen = [_all_numbers(w) if all_numbers else (w.nbytes, *w.times) for w in group]
                by_tp[tp] = [w for i, w in enumerate(group) if not any(_covers(a, seen[i], j < i) for j, a in enumerate(seen) if j != i)]
            switch = {(a, b): switches[a, b] for a in {*by_tp} | earlier for b in by_tp}
            runs.append(_Run(count, by_tp, switch, detours))
            earlier = {*by_tp}
        return runs


def _all_numbers(priced: _Priced) -> tuple[float, ...]:
    way = priced.way
    return priced.nbytes, way.transient_bytes, way.forward_s, way.backward_s, way.sync_s, way.optimizer_s


def _covers(a: tuple[float, ...], b: tuple[float, ...], earlier: bool) -> bool:
    """Whether a way with numbers `b` is not needed beside one with `a`."""
    return all(map(le, a, b)) and (a != b or earlier)


def _uncovered_numbers(points: list[_Many], skip: int) -> list[_Many] | None:
    """Those that no other one beats in all numbers, but for the first `skip`; None where there are too many."""
    points.sort(key=lambda point: sum(point[0][2:]))
    kept: list[_Many] = []
    seen: list[tuple[float, ...]] = []
    for point in points:
        numbers = point[0][skip:]
        if not any(all(map(le, other, numbers)) for other in seen):
            kept.append(point)
            seen.append(numbers)
            if len(kept) > MOST_EVERY:
                return None
    return kept


def mean(times: tuple[float, float], share: float) -> float:
    """Of the two times, the second with this share."""
    return times[0] + share * (times[1] - times[0])


def _plus(a: _Sum, b: _Sum, times: int = 1) -> _Sum:
    return a[0] + times * b[0], a[1] + times * b[1], a[2] + times * b[2], a[3] + times * b[3]


def _squared(step: dict[int, dict[int, _Sum]]) -> dict[int, dict[int, _Sum]]:
    """Twice as many layers."""
    found: dict[int, dict[int, _Sum]] = {}
    for a, row in step.items():
        best: dict[int, _Sum] = {}
        for via, one in row.items():
            for b, other in step[via].items():
                if b not in best or one[0] + other[0] < best[b][0]:
                    best[b] = _plus(one, other)
        found[a] = best
    return found


def _cheapest(row: dict[int, _Sum], rest: dict[int, _Sum]) -> _Sum:
    """The least of a step and what follows it."""
    at, step = min(row.items(), key=lambda item: item[1][0] + rest[item[0]][0])
    return _plus(step, rest[at])


class _Front:
    """Least max(time 0, time 1) over sequences of ways whose bytes are within `cap`; `ahead` comes off time 1. `sizes`: all of them are
    visited, and no others; `ends`: what the state holds beside tp at the end then (`_visiting`, `_changing`)."""

    def __init__(
        self,
        runs: list[_Run],
        cap: float,
        ahead: float,
        *,
        two: bool,
        all_numbers: bool = False,
        sizes: tuple[int, ...] = (),
        ends: int = 0,
    ) -> None:
        self.runs, self.cap, self.ahead, self.two, self.sizes, self.ends = runs, cap, ahead, two, sizes, ends
        self.all_numbers = all_numbers
        """Whether what no other one covers in those two times is not enough."""
        self.times = 1
        """As many points and counts as usual."""
        self.exact = True
        self.price, self.share = 0.0, 0.0
        self.lower = INFINITE
        """Seconds that no sequence undercuts."""

    def bound(self, upper: float) -> bool:
        """Whether something that fits may be below `upper`; sets the bound and the price behind it."""
        self.leanest = [0.0] * (len(self.runs) + 1)
        self.span: list[tuple[float, float]] = []
        """Of each run the fewest and the most bytes."""
        for run in self.runs:
            nbytes = [priced.nbytes for ways in run.ways.values() for priced in ways]
            self.span.append((min(nbytes) * run.layers, max(nbytes) * run.layers))
        for r in range(len(self.runs) - 1, -1, -1):
            self.leanest[r] = self.leanest[r + 1] + self.span[r][0]
        if self.leanest[0] > self.cap:
            return False
        self.lower, self.near = -INFINITE, upper
        share, lines = 0.0, []
        for turn in range(SHARES if self.two else 1):
            dual = self._dual(share, self.near)
            if dual is None:
                return False
            bound, price, seconds, tilt = dual
            if bound > self.lower:
                self.lower, self.price, self.share = bound, price, share
            self.near = min(self.near, seconds * (1 + 4 * ROUNDING))  # wide enough that the path itself is found
            if (turn == 0 and tilt <= 0.0) or (turn == 1 and tilt >= 0.0) or self.lower >= self.near * (1 - 5 * ROUNDING):
                break  # the larger of the two times is the one that was looked at
            lines.append((share, bound, tilt))
            if turn == 0:
                share = 1.0
                continue
            # The bound is concave in the share: its largest value is where its tangents on both sides meet, or lower.
            s0, b0, t0 = max(line for line in lines if line[2] > 0.0)
            s1, b1, t1 = min(line for line in lines if line[2] <= 0.0)
            share = min(max((b1 - b0 + t0 * s0 - t1 * s1) / (t0 - t1), s0), s1)
            if b0 + t0 * (share - s0) <= self.lower * (1 + ROUNDING):
                break
        return True

    def solve(self, upper: float) -> tuple[float, list[tuple[int, Way, int]]] | None:
        """The best strictly below `upper`; None where there is none."""
        self.exact = True
        return self._within(upper) if self.bound(upper) else None

    def _within(self, upper: float) -> tuple[float, list[tuple[int, Way, int]]] | None:
        """Likewise, once it is bounded."""
        self.rest = [{at: total[0] for at, total in row.items()} for row in self._totals(self.price, self.share)]
        rounded = self._search(INFINITE, ROUNDED * self.lower)
        if rounded is not None and rounded[0] >= self.near:
            rounded = None
        near = self.near if rounded is None else rounded[0]
        whole = not self.sizes and len({tp for run in self.runs for tp in run.ways}) > 1
        for gap in GAPS:
            if self.lower * (1 + gap) >= near:
                break
            if whole and gap > SPLIT:
                return self._by_sizes(near, rounded)
            found = self._search(self.lower * (1 + gap))
            if found is not None:
                return found
        found = self._search(near) or rounded
        if found is None and near < upper:  # the path that said so is made of parts that cost the same
            self.exact = False
        return found

    def _by_sizes(
        self, near: float, best: tuple[float, list[tuple[int, Way, int]]] | None
    ) -> tuple[float, list[tuple[int, Way, int]]] | None:
        """The best below `near`, or else `best`: for each set of sizes those that visit just these, the least bound first. The bound of all
        mixes sizes without a change between them; that of a set has at least one change fewer than sizes."""
        least = INFINITE
        for front in sorted(self.visiting(near), key=lambda front: front.lower):
            if front.lower >= near * (1 - ROUNDING):
                break
            if len(front.sizes) > MOST_SIZES:
                self.exact, least = False, min(least, front.lower)
                continue
            front.near, front.times = min(front.near, near), self.times
            found = front._within(near)
            if not front.exact:
                self.exact, least = False, min(least, front.lower)
            if found is not None:
                best, near = found, found[0]
        self.lower = max(self.lower, min(least, near))
        return best

    def visiting(self, upper: float) -> list[_Front]:
        """For each set of sizes what visits just these, bounded; without those that have nothing below `upper`. All sets of more than
        MOST_SIZES are bounded as one: by what has as many changes of size."""
        share, price = self.share, self.price
        each = [{tp: min(mean(w.times, share) + price * w.nbytes for w in ways) for tp, ways in run.ways.items()} for run in self.runs]
        into: dict[tuple[int, int], float] = {}
        for run in self.runs:
            for (a, b), change in run.switch.items():
                into[a, b] = min(into.get((a, b), INFINITE), mean(change, share))
        tps = sorted({tp for run in self.runs for tp in run.ways})
        found = [self._part(_changing(self.runs), tuple(tps), MOST_SIZES)] if len(tps) > MOST_SIZES else []
        for sizes in (chosen for n in range(1, MOST_SIZES + 1) for chosen in combinations(tps, n)):
            rows = [[row[tp] for tp in sizes if tp in row] for row in each]
            if not all(rows):
                continue
            total = sum(run.layers * min(row) for run, row in zip(self.runs, rows, strict=True))
            entered = [min((into.get((a, b), INFINITE) for a in sizes if a != b), default=0.0) for b in sizes]
            total += sum(entered) - max(entered)  # all but the first are
            if total - share * self.ahead - price * self.cap < upper * (1 - ROUNDING):
                found.append(self._part(_visiting(self.runs, sizes), sizes, (1 << len(sizes)) - 1))
        return [front for front in found if front.bound(upper)]

    def _part(self, runs: list[_Run], sizes: tuple[int, ...], ends: int) -> _Front:
        return _Front(runs, self.cap, self.ahead, two=self.two, all_numbers=self.all_numbers, sizes=sizes, ends=ends)

    def _totals(self, price: float, share: float) -> list[dict[int, _Sum]]:
        """For each run: by the tp of the layer before, the least of all that follows."""
        after = {at: NOTHING if at >> MASK == self.ends else NEVER for at in self.runs[-1].ways}
        found = [after]
        for r in range(len(self.runs) - 1, -1, -1):
            run = self.runs[r]
            each: dict[int, _Sum] = {}
            for tp, ways in run.ways.items():
                _, nbytes, (t0, t1) = min(ways, key=lambda w: mean(w.times, share) + price * w.nbytes)
                each[tp] = (t0 + share * (t1 - t0) + price * nbytes, nbytes, t0, t1)
            step: dict[int, dict[int, _Sum]] = {}
            for (a, b), (s0, s1) in run.switch.items():
                step.setdefault(a, {})[b] = _plus(each[b], (s0 + share * (s1 - s0), 0.0, s0, s1))
            inside = {a: row for a, row in step.items() if a in run.ways}
            after = self._further(run.layers - 1, inside, after)
            after = {a: _cheapest(step[a], after) for a in (self.runs[r - 1].ways if r else (0,))}
            found.append(after)
        return found[::-1]

    @staticmethod
    def _further(layers: int, step: dict[int, dict[int, _Sum]], rest: dict[int, _Sum]) -> dict[int, _Sum]:
        """So many layers of a run in front of `rest`."""
        stay, *others = sorted({a & TP: row[a] for a, row in step.items()}.values(), key=lambda one: one[0])
        alone = all(other[0] > stay[0] + ROUNDING * abs(stay[0]) for other in others)
        for done in range(min(layers, DIRECT)):
            new = {a: _cheapest(row, rest) for a, row in step.items()}
            if alone and all(abs(new[a][0] - rest[a][0] - stay[0]) <= SAME * abs(new[a][0]) for a in new):  # in this way for what is left
                return {a: _plus(total, stay, layers - done - 1) for a, total in new.items()}
            rest = new
        left = max(0, layers - DIRECT)
        while left:
            if left & 1:
                rest = {a: _cheapest(row, rest) for a, row in step.items()}
            left >>= 1
            if left:
                step = _squared(step)
        return rest

    def _path(self, price: float, share: float) -> tuple[float, float, float, float]:
        """(bytes, mean time, true time, time 1 less time 0) of the path with the least mean time + price x bytes."""
        total, nbytes, t0, t1 = self._totals(price, share)[0][0]
        if total == INFINITE:
            return 0.0, INFINITE, INFINITE, 0.0
        t1 -= self.ahead
        return nbytes, t0 + share * (t1 - t0), max(t0, t1), t1 - t0

    def _dual(self, share: float, upper: float) -> tuple[float, float, float, float] | None:
        """(bound, price of a byte, seconds of the best path met that fits, time 1 less time 0 behind the bound): the largest bound over
        prices, for a mean of the two times in which time 1 has this share. A path's bound is a line over the price; the next price is where
        the lines of a path that fits and of one that doesn't meet. None as soon as a bound is not below `upper`."""
        best, at, seen, tilt = -INFINITE, 0.0, INFINITE, 0.0
        enough = upper * (1 - ROUNDING)

        def look(price: float) -> tuple[float, float, float]:
            nonlocal best, at, seen, tilt
            nbytes, time, seconds, difference = self._path(price, share)
            bound = time + price * (nbytes - self.cap)
            if bound > best:
                best, at, tilt = bound, price, difference
            if nbytes <= self.cap:
                seen = min(seen, seconds)
            return nbytes, time, difference

        fat = look(0.0)
        if fat[0] > self.cap and best < enough:
            price = max(fat[1], 1e-12) / max(self.cap, 1.0)
            lean = look(price)
            while lean[0] > self.cap and best < enough and price < 1e30:
                fat, price = lean, 8 * price
                lean = look(price)
            for _ in range(PRICES):
                if lean[0] > self.cap or best >= enough or best >= seen * (1 - ROUNDING):
                    break
                price = (lean[1] - fat[1]) / (fat[0] - lean[0])
                meet = fat[1] + price * (fat[0] - self.cap)
                found = look(price)
                if found[1] + price * (found[0] - self.cap) >= meet - ROUNDING * abs(meet):
                    break
                fat, lean = (fat, found) if found[0] <= self.cap else (found, lean)
            if at > 0.0 and fat[0] > lean[0]:  # of both, mixed so that they just fit
                tilt = mean((lean[2], fat[2]), (self.cap - lean[0]) / (fat[0] - lean[0]))
        return None if best >= enough else (best, at, seen, tilt)

    def _search(self, upper: float, slack: float | None = None) -> tuple[float, list[tuple[int, Way, int]]] | None:
        """The best strictly below `upper`, on Pareto fronts by the tp of the last layer. `slack`: of those that add no more to the least
        time + price x bytes, in place of all that may be below `upper`."""
        share, price = self.share, self.price
        least = self.rest[0][0]
        self.exact = True
        if slack is None:
            slack = (upper + share * self.ahead + price * self.cap) * (1 + ROUNDING) - least
        points: dict[int, list[_Point]] = {0: [(0.0, 0.0, -self.ahead, None)]}
        start = -share * self.ahead
        for r in range(len(self.runs)):
            room = self.cap * (1 + ROUNDING) - self.leanest[r + 1]
            ahead: dict[int, list[_Point]] = {}
            for before, front in points.items():
                elements = self._elements(r, before, slack)
                spent = self.rest[r][before] - least - start
                for nbytes, t0, t1, path in front:
                    left = slack - (t0 + share * (t1 - t0) + price * nbytes + spent)
                    for element in elements:
                        if element.more > left:
                            break
                        b = nbytes + element.nbytes
                        if b <= room:
                            ahead.setdefault(element.at, []).append((b, t0 + element.t0, t1 + element.t1, (path, r, element)))
            if not ahead:
                return None
            points = {tp: self._kept(reach) for tp, reach in ahead.items()} if r < len(self.runs) - 1 else ahead
        ends = [(max(t0, t1), path) for front in points.values() for b, t0, t1, path in front if b <= self.cap]
        seconds, path = min(ends, key=lambda end: end[0], default=(INFINITE, None))
        if seconds >= upper:
            return None
        return seconds, _path_blocks(path)

    def _kept(self, reach: list[_Point]) -> list[_Point]:
        kept = _pareto(reach)
        if len(kept) > self.times * MOST_POINTS:
            self.exact = False
            kept.sort(key=lambda point: mean(point[1:3], self.share) + self.price * point[0])
            kept = kept[: self.times * MOST_POINTS]
        return kept

    def _elements(self, r: int, before: int, slack: float) -> list[_Element]:
        """Ways through run r behind a layer of tp `before` that add at most `slack` to the least time + price x bytes; least first."""
        run, share, price, rest = self.runs[r], self.share, self.price, self.rest[r + 1]
        n, detours = run.layers, run.detours
        cost = {tp: [(mean(w.times, share) + price * w.nbytes, w) for w in ways] for tp, ways in run.ways.items()}
        each = {tp: min(c for c, _ in ways) for tp, ways in cost.items()}
        cheapest = min(each.values())
        base = self.rest[r][before]
        onwards = min(rest[at] for at in run.ways)
        found: list[_Element] = []
        if base == INFINITE:
            return found

        def next_to(visits: tuple[int, ...]) -> list[int]:
            """Where it may go on from there."""
            there = [at for at in run.ways if at & TP != visits[-1] & TP and (visits[-1], at) in run.switch]
            came = tuple(at & TP for at in (before, *visits))
            return [at for at in there if not (at & TP in came[1:] and _needless((*came, at & TP), detours))]

        def walk(visits: tuple[int, ...], s0: float, s1: float, least: float) -> None:
            """`least`: of a layer at each of the visits and the exchanges between them."""
            if least + (n - len(visits)) * cheapest + onwards - base > slack:
                return
            if rest[visits[-1]] < INFINITE:
                found.extend(self._counts(r, visits, cost, (s0, s1), rest[visits[-1]] - base, slack))
            if len(visits) == min(n, LONGEST):
                left = slack - least - (n - len(visits) - 1) * cheapest - onwards + base
                more = (mean(run.switch[visits[-1], at], share) + each[at] for at in next_to(visits))
                self.exact = self.exact and (len(visits) == n or min(more, default=INFINITE) > left)
                return
            for at in next_to(visits):
                a0, a1 = run.switch[visits[-1], at]
                walk((*visits, at), s0 + a0, s1 + a1, least + a0 + share * (a1 - a0) + each[at])

        for at in run.ways:
            if (before, at) in run.switch:
                s0, s1 = run.switch[before, at]
                walk((at,), s0, s1, s0 + share * (s1 - s0) + each[at])
        found.sort(key=lambda element: element.more)
        return found

    def _counts(
        self,
        r: int,
        visits: tuple[int, ...],
        cost: dict[int, list[tuple[float, _Priced]]],
        switch: tuple[float, float],
        beyond: float,
        slack: float,
    ) -> list[_Element]:
        """Every count of each way in a run with these visits: all but the cheapest way are counted, the rest is computed in that.

        Of the second cheapest as many layers as the bytes ask for: no fewer than fit if all other runs are at their leanest, no more than
        if they are at their fattest.
        """
        n = self.runs[r].layers
        sizes = tuple(at & TP for at in visits)
        ways = sorted([(c, w) for at in dict(zip(sizes, visits, strict=True)).values() for c, w in cost[at]], key=lambda entry: entry[0])
        (c0, common), others = ways[0], ways[:0:-1]
        least = mean(switch, self.share) + n * c0 + beyond
        left = slack - least
        if left < 0.0 or (len(sizes) > 1 and len(sizes) > n):
            return []
        needs = {tp: sizes.count(tp) for tp in sizes}
        loose = self.cap * (1 + ROUNDING) - self.leanest[0] + self.span[r][0] - n * common.nbytes
        tight = self.cap - sum(high for _, high in self.span) + self.span[r][1] - n * common.nbytes
        partial: list[_Partial] = [(0, 0.0, 0.0, 0.0, 0.0, ())]
        for index, (c, w) in enumerate(others):
            more, nbytes = c - c0, w.nbytes - common.nbytes
            a0, a1 = w.times[0] - common.times[0], w.times[1] - common.times[1]
            final = index == len(others) - 1 and len(sizes) == 1
            further: list[_Partial] = []
            for used, added, b, t0, t1, counts in partial:
                fewest, most = 0, n - used
                if more > 0.0 and left < INFINITE:
                    most = min(most, int((left - added) / more + ROUNDING))
                if final and nbytes < 0.0 <= min(a0, a1):  # leaner and slower
                    fewest = max(0, ceil((b - loose) / -nbytes - ROUNDING))
                    if not self.all_numbers:
                        most = min(most, max(0, ceil((b - tight) / -nbytes)))
                elif final and nbytes > 0.0 >= max(a0, a1):
                    most = min(most, int((loose - b) / nbytes + ROUNDING))
                    if not self.all_numbers:
                        fewest = max(0, min(most, int((tight - b) / nbytes)))
                for k in range(fewest, most + 1):
                    more_counts = (*counts, (w.way, k)) if k else counts
                    further.append((used + k, added + k * more, b + k * nbytes, t0 + k * a0, t1 + k * a1, more_counts))
            partial = further
            if self.all_numbers:
                if len(partial) > 4 * MOST_EVERY:
                    self.exact = False
                    return []
                continue
            if len(partial) > 4 * self.times * MOST_COUNTS:
                self.exact = False
                partial = sorted(partial, key=lambda entry: entry[1])[: 4 * self.times * MOST_COUNTS]
            if len(partial) > MANY:
                partial = _uncovered(partial, needs)
            if len(partial) > self.times * MOST_COUNTS:
                self.exact = False
                partial = sorted(partial, key=lambda entry: entry[1])[: self.times * MOST_COUNTS]
        found = []
        for used, added, b, t0, t1, counts in partial:
            every = (*counts, (common.way, n - used)) if used < n else counts
            if len(needs) > 1 or needs[sizes[0]] > 1:
                there = dict.fromkeys(needs, 0)
                for way, k in every:
                    there[way.choice.tp] += k
                if any(there[tp] < need for tp, need in needs.items()):
                    continue
            total0, total1 = switch[0] + n * common.times[0] + t0, switch[1] + n * common.times[1] + t1
            found.append(_Element(least + added, n * common.nbytes + b, total0, total1, sizes, visits[-1], every))
        return found


def _visiting(runs: Sequence[_Run], sizes: tuple[int, ...]) -> list[_Run]:
    """The same with states of tp and the sizes visited so far, of these alone; each run has one of them."""
    found = []
    earlier = {0}
    for run in runs:
        bits = {tp: 1 << MASK + i for i, tp in enumerate(sizes) if tp in run.ways}
        ways = {tp | seen << MASK: run.ways[tp] for tp in bits for seen in range(1 << len(sizes)) if seen << MASK & bits[tp]}
        switch = {(a, tp | a & ~TP | bit): run.switch[a & TP, tp] for a in {*ways} | earlier for tp, bit in bits.items()}
        found.append(_Run(run.layers, ways, switch, run.detours))
        earlier = {*ways}
    return found


def _changing(runs: Sequence[_Run]) -> list[_Run]:
    """The same with states of tp and the changes of size so far, of which no more than MOST_SIZES are counted."""
    found = []
    earlier = {0}
    for run in runs:
        ways = {tp | changes << MASK: run.ways[tp] for tp in run.ways for changes in range(MOST_SIZES + 1)}
        switch = {}
        for a in {*ways} | earlier:
            for tp in run.ways:
                changes = min((a >> MASK) + (a & TP not in (0, tp)), MOST_SIZES)
                switch[a, tp | changes << MASK] = run.switch[a & TP, tp]
        found.append(_Run(run.layers, ways, switch, run.detours))
        earlier = {*ways}
    return found


def _detours(switch: dict[tuple[int, int], tuple[float, float]]) -> frozenset[tuple[int, int, int]]:
    """(a, b, c) where a change from a to c is dearer than one by way of b."""
    found = set()
    for (a, b), first in switch.items():
        for (d, c), second in switch.items():
            if a != b == d != c:
                direct = switch[a, c]
                if direct[0] > (first[0] + second[0]) * (1 + ROUNDING) or direct[1] > (first[1] + second[1]) * (1 + ROUNDING):
                    found.add((a, b, c))
    return frozenset(found)


def _needless(walk: tuple[int, ...], detours: frozenset[tuple[int, int, int]]) -> bool:
    """Whether a visit between the first and the last can be left out, its layers computed at another visit of that size.

    >>> _needless((0, 1, 2, 1), frozenset()), _needless((0, 1, 2, 4), frozenset())
    (True, False)
    >>> _needless((2, 1, 4, 1, 8), frozenset({(2, 1, 4), (4, 1, 8)}))
    False
    """
    return any(walk[1:].count(b) > 1 and (a, b, c) not in detours for a, b, c in zip(walk, walk[1:], walk[2:], strict=False))


def _uncovered(partial: list[_Partial], needs: dict[int, int]) -> list[_Partial]:
    """Those that no other one beats in layers, bytes and both times, among those with as many layers of each size that the run visits."""
    groups: dict[tuple[int, ...], list[_Partial]] = {}
    for entry in partial:
        there = dict.fromkeys(needs, 0)
        if len(needs) > 1:
            for way, k in entry[5]:
                there[way.choice.tp] += k
        groups.setdefault(tuple(min(there[tp], need) for tp, need in needs.items()), []).append(entry)
    found: list[_Partial] = []
    for group in groups.values():
        kept: list[_Partial] = []
        flat = all(entry[3] == entry[4] for entry in group)
        sizes: list[float] = []  # bytes, ascending, and the least time 0 with no more of them
        times: list[float] = []
        for entry in sorted(group, key=lambda entry: entry[:5]):  # so that none of those that are kept has more layers
            _, _, b, t0, t1, _ = entry
            at = bisect_right(sizes, b)
            if at and times[at - 1] <= t0:
                if flat:
                    continue
                for index, other in enumerate(kept):
                    if other[4] <= t1 and other[2] <= b and other[3] <= t0:
                        kept[0], kept[index] = other, kept[0]  # it may well beat the next ones
                        break
                else:
                    kept.append(entry)
                continue
            kept.append(entry)
            last = at
            while last < len(times) and times[last] >= t0:
                last += 1
            sizes[at:last], times[at:last] = [b], [t0]
        found += kept
    return found


def _blocks(run: int, element: _Element) -> list[tuple[int, Way, int]]:
    """The element's layers in order: at each visit of a size but its last, one layer."""
    left = dict(element.counts)
    blocks: list[tuple[int, Way, int]] = []
    for index, tp in enumerate(element.walk):
        mine = [way for way in left if way.choice.tp == tp and left[way]]
        if tp in element.walk[index + 1 :]:
            blocks.append((run, mine[0], 1))
            left[mine[0]] -= 1
        else:
            blocks += [(run, way, left.pop(way)) for way in mine]
    return blocks


def _path_blocks(path: Path) -> list[tuple[int, Way, int]]:
    found: list[tuple[int, Way, int]] = []
    while path is not None:
        path, r, element = path
        found[:0] = _blocks(r, element)
    return found


def _pareto(front: list[_Point]) -> list[_Point]:
    """Those that no other one beats in all three; asked first: the ones that are fastest so far, which beat most."""
    front.sort(key=lambda p: p[:3])
    kept: list[_Point] = []
    fast0: _Point = (INFINITE, INFINITE, INFINITE, None)
    fast1 = fast0
    for point in front:
        _, t0, t1, _ = point
        beaten = t0 >= fast0[1] and t1 >= fast1[2]
        if beaten and (t1 >= fast0[2] or t0 >= fast1[1] or any(other[1] <= t0 and other[2] <= t1 for other in kept)):
            continue
        kept.append(point)
        if t0 < fast0[1]:
            fast0 = point
        if t1 < fast1[2]:
            fast1 = point
    return kept
