"""Which layers go to which stage of a pipeline: bounded, then searched until nothing undercuts what was found.

A stage can't be faster than its layers with a price on bytes, which is a sum over kinds and counts, and it can't end before a micro-batch
has come down to it and gone back up. A dynamic program over the borders finds the split whose bound is least; its stages are then solved,
and that is repeated until they all are. From then on splits are taken one by one, the least bound first (best-first branch and bound), and
each is closed by search/layerwise_close.py.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from heapq import heappop, heappush
from itertools import accumulate, groupby
from math import comb, prod
from operator import le
from typing import NamedTuple

from orchestrator.cost.schedule import in_flight
from orchestrator.search.layerwise_close import Closer, Cut, Solved, numbers
from orchestrator.search.layerwise_paths import Objective, through, times
from orchestrator.search.layerwise_prices import Outer, Prices, Way, plan_price, stage_price
from orchestrator.search.layerwise_stage import INFINITE, ROUNDING, StageSolver, mean
from orchestrator.strategy.layerwise import ENDS, LayerwiseStage

FEW_WAYS = 60
"""Up to so many, all ways of a stage are gone through, once for all objectives."""
MOST_SOLVED = 2000
"""Stages that are solved for means of paths, for one (batch, pp, micro-batches)."""
MOST_CUTS = 60
"""Means of paths that every split is bounded by."""
MOST_SPLITS = 20000
"""Splits, whole or begun, that are looked at for one (batch, pp, micro-batches)."""
CLOSE = 1e-3
"""How close an estimate comes to what it could say."""
FAR = 1e12
"""Seconds that no step takes: what needs more does not fit."""
FIRST_ROUNDS, MOST_ROUNDS = 4, 100
"""Times that the stages of the split with the least bound are solved and the bound is looked for anew."""


def _tidy(blocks: Sequence[tuple[int, Way, int]]) -> list[tuple[int, Way, int]]:
    """Neighbours of one run and tp cost the same in any order: each way once."""
    tidy: list[tuple[int, Way, int]] = []
    for (run, _), members in groupby(blocks, key=lambda block: (block[0], block[1].choice.tp)):
        counts: dict[Way, int] = {}
        for _, way, count in members:
            counts[way] = counts.get(way, 0) + count
        tidy += [(run, way, count) for way, count in counts.items()]
    return tidy


_Node = tuple[float, int, tuple[tuple[int, int, int], ...], float, float]
"""A split that is begun: seconds that it does not undercut, for ties, its stages, the way of one micro-batch through them, the most that
one of them with what leads to it takes."""
_Found = tuple[float, tuple[LayerwiseStage, ...]]
"""Seconds, stages."""


def uncovered(costs: Sequence[LayerwiseStage]) -> list[LayerwiseStage]:
    """Those that no other one covers: what is not hidden of the reduction counts together with the backward pass that it follows."""
    kept: list[tuple[float, ...]] = []
    found: list[LayerwiseStage] = []
    for cost in sorted(costs, key=lambda cost: sum(numbers(cost))):
        seconds = (cost.forward_s, cost.backward_s, cost.backward_s + cost.exposed_s, cost.optimizer_s)
        if not any(all(map(le, other, seconds)) for other in kept):
            kept.append(seconds)
            found.append(cost)
    return found


class _Sums:
    """Sums over layers from the first on, of one number for each kind."""

    def __init__(self, runs: Sequence[tuple[str, int]], each: dict[str, float]) -> None:
        self.begins = [0, *accumulate(count for _, count in runs)]
        self.each = [each[kind] for kind, _ in runs]
        self.before = [0.0, *accumulate(count * each[kind] for kind, count in runs)]

    def to(self, layer: int) -> float:
        """Of the layers before this one."""
        run = min(bisect_right(self.begins, layer) - 1, len(self.each) - 1)
        return self.before[run] + (layer - self.begins[run]) * self.each[run]


class _Place(NamedTuple):
    """What bounds an objective of the stages at one place: sums over layers of bytes, of seconds, and of seconds with a price on bytes;
    `ends`: what embedding and head add to each."""

    room: float
    price: float
    sums: tuple[_Sums, _Sums, _Sums]
    ends: tuple[float, float, float]
    overhead: float
    known: dict[tuple[tuple[str, int], ...], float]


class Splits:
    """The stages of one outer choice."""

    def __init__(self, prices: Prices, outer: Outer, usable: float) -> None:
        self.prices, self.outer, self.usable = prices, outer, usable
        self.pp, self.m = outer.pp, outer.num_microbatches
        self.inner = [(kind, count) for kind, count in prices.runs if kind not in ENDS]
        self.layers = sum(count for _, count in self.inner)
        self.first = prices.runs[0][0] if prices.runs[0][0] in ENDS else None
        self.last = prices.runs[-1][0] if prices.runs[-1][0] in ENDS else None
        self.overhead, self.once = prices.overheads_s()
        self._fastest: dict[str, float] = {}
        self.step, self.first_pass = through(self.m), through(1)
        self.work, self.one = through(self.m, whole=False), through(1, whole=False)
        self.back = 2 * prices.hop_s(outer)
        self._solved: dict[tuple[object, ...], tuple[float, Solved | None]] = {}
        self._places: dict[tuple[int, Objective], _Place] = {}
        self._between: dict[tuple[bool, bool, int, int], tuple[tuple[str, int], ...]] = {}
        self._priced: dict[int, tuple[float, float]] = {}
        self._cuts: list[tuple[Cut, list[dict[int, float]]]] = []
        """Means of paths that bounded a split most, and for each the least that is left from a stage and start."""
        self._counted: dict[tuple[tuple[str, int], ...], int] = {}
        self._fronts: dict[tuple[object, ...], list[LayerwiseStage] | None] = {}
        self.met: dict[tuple[object, ...], list[LayerwiseStage]] = {}
        """Of a stage: the ways that some objective liked best."""
        self._below = INFINITE
        """Of one stage: seconds that it was solved for."""
        self.least = INFINITE
        """Seconds that no split undercuts, as far as is known, or what it was asked to stay below."""

    def fastest(self, kind: str) -> float:
        """Seconds of a micro-batch in one layer of this kind; infinite where it has no legal way."""
        if kind not in self._fastest:
            ways = self.prices.ways(kind, self.outer)
            self._fastest[kind] = min((way.forward_s + way.backward_s for way in ways), default=INFINITE)
        return self._fastest[kind]

    @cached_property
    def _held(self) -> list[tuple[int, float]]:
        """Micro-batches in flight by stage, and bytes that are there whatever the layers."""
        flights = [in_flight("1f1b", self.pp, p, self.m) for p in range(self.pp)]
        return [(flight, self.prices.fixed_bytes(self.outer, p, flight)) for p, flight in enumerate(flights)]

    @cached_property
    def _way(self) -> _Sums:
        """Of one micro-batch, at the fastest."""
        return _Sums(self.inner, {kind: self.fastest(kind) for kind, _ in self.inner})

    # ---- a stage

    def _runs(self, p: int, start: int, end: int) -> tuple[tuple[str, int], ...]:
        place = (p == 0, p == self.pp - 1, start, end)
        if place not in self._between:
            self._between[place] = tuple(self._make_runs(p, start, end))
        return self._between[place]

    def _make_runs(self, p: int, start: int, end: int) -> list[tuple[str, int]]:
        runs: list[tuple[str, int]] = [(self.first, 1)] if p == 0 and self.first else []
        offset = 0
        for kind, count in self.inner:
            low, high = max(start - offset, 0), min(end - offset, count)
            if low < high:
                runs.append((kind, high - low))
            offset += count
        if p == self.pp - 1 and self.last:
            runs.append((self.last, 1))
        return runs

    def key(self, p: int, start: int, end: int) -> tuple[object, ...]:
        """Stages with the same key cost the same."""
        return (self._runs(p, start, end), *self._held[p])

    def _solver(self, p: int, start: int, end: int, objective: Objective) -> StageSolver:
        flight, fixed = self._held[p]
        return StageSolver(self.prices, self.outer, self._runs(p, start, end), flight, self.usable - fixed, objective)

    def _priced_blocks(self, p: int, start: int, end: int, blocks: Sequence[tuple[int, Way, int]]) -> LayerwiseStage:
        runs = self._runs(p, start, end)
        return stage_price(self.prices, self.outer, p, [(runs[r][0], way, count) for r, way, count in _tidy(blocks)])

    def _few(self, p: int, start: int, end: int) -> bool:
        """Whether all ways for these layers are at hand."""
        if end - start > FEW_WAYS:
            return False
        runs = self._runs(p, start, end)
        if runs not in self._counted:
            counted = ((count, len(self.prices.ways(kind, self.outer))) for kind, count in runs)
            self._counted[runs] = prod(comb(count + ways - 1, count) if ways else 0 for count, ways in counted)
        return self._counted[runs] <= FEW_WAYS

    def _front(self, p: int, start: int, end: int) -> list[LayerwiseStage] | None:
        """All ways for these layers that no other ones cover; None if they may be many."""
        if not self._few(p, start, end):
            return None
        key = self.key(p, start, end)
        if key not in self._fronts:
            self._fronts[key] = self._every(p, start, end, self.step, INFINITE)
        return self._fronts[key]

    def _every(self, p: int, start: int, end: int, objective: Objective, upper: float) -> list[LayerwiseStage] | None:
        overhead = objective.passes * self.overhead
        found = self._solver(p, start, end, objective).every(upper - overhead)
        return None if found is None else uncovered([self._priced_blocks(p, start, end, blocks) for blocks in found])

    def every(self, p: int, start: int, end: int, objective: Objective, upper: float) -> list[LayerwiseStage] | None:
        """All ways below `upper` seconds of the objective that no other ones cover, the fastest first; None if they are too many."""
        found = self._front(p, start, end)
        if found is None:
            found = self._every(p, start, end, objective, upper)
        if found is None:
            return None
        timed = sorted((times(objective, numbers(cost)), i) for i, cost in enumerate(found))
        return [found[i] for seconds, i in timed if seconds < upper]

    def solve(self, p: int, start: int, end: int, upper: float, objective: Objective) -> Solved | None:
        """The best ways for layers [start, end) in stage p, below `upper` seconds; None: there are none."""
        stage = self.key(p, start, end)
        key = (objective, *stage)
        known = self._solved.get(key)
        if known is not None and (known[1] is not None or known[0] >= upper):
            return known[1]
        found: Solved | None = None
        front = self._front(p, start, end)
        if front is not None:
            timed = ((times(objective, numbers(cost)), i) for i, cost in enumerate(front))
            seconds, i = min(timed, default=(INFINITE, 0))
            if seconds < INFINITE:
                found, upper = Solved(front[i], seconds), INFINITE
        else:
            solver = self._solver(p, start, end, objective)
            overhead = objective.passes * self.overhead
            answer = solver.solve(upper - overhead)
            if answer is not None:
                found = Solved(self._priced_blocks(p, start, end, answer[1]), min(answer[0], solver.least) + overhead)
            else:
                upper = min(upper, solver.least + overhead)
        self._solved[key] = (upper, found)
        if found is not None:
            met = self.met.setdefault(stage, [])
            if all(numbers(cost) != numbers(found.cost) for cost in met):
                met.append(found.cost)
        return found

    def _place(self, p: int, objective: Objective) -> _Place:
        place = self._places.get((p, objective))
        if place is None:
            price, share = self._priced.get(p, (0.0, 0.0))
            price = price / self.m * objective.passes
            share = share if objective.exposed else 0.0
            solver = self._solver(p, 0, 0, objective)
            columns: tuple[dict[str, float], ...] = ({}, {}, {})
            for kind, _ in self.prices.runs:
                ways = [(solver.nbytes(way), mean(solver.times(way), share)) for way in self.prices.ways(kind, self.outer)]
                columns[0][kind] = min(nbytes for nbytes, _ in ways)
                columns[1][kind] = min(seconds for _, seconds in ways)
                columns[2][kind] = min(seconds + price * nbytes for nbytes, seconds in ways)
            here = [kind for kind, there in ((self.first, p == 0), (self.last, p == self.pp - 1)) if kind and there]
            least = min(way.transient_bytes for kind, _ in self.inner for way in self.prices.ways(kind, self.outer))
            lean, step, priced = (_Sums(self.inner, column) for column in columns)
            a, b, c = (sum(column[kind] for kind in here) for column in columns)
            overhead = objective.passes * self.overhead - share * solver.ahead
            place = _Place(solver.room - self.prices.slack * least, price, (lean, step, priced), (a, b, c), overhead, {})
            self._places[p, objective] = place
        return place

    def floor(self, p: int, start: int, end: int, objective: Objective) -> float:
        """Seconds that layers [start, end) in stage p need at least; infinite where they don't fit."""
        place = self._place(p, objective)
        runs = self._runs(p, start, end)
        known = place.known.get(runs)
        if known is None:
            known = place.known[runs] = self._floor(place, start, end)
        return known

    @staticmethod
    def _floor(place: _Place, start: int, end: int) -> float:
        lean, step, priced = (sums.to(end) - sums.to(start) + more for sums, more in zip(place.sums, place.ends, strict=True))
        if lean > place.room * (1 + ROUNDING):
            return INFINITE
        return (max(step, priced - place.price * place.room) if place.price > 0.0 else step) + place.overhead

    def known(self, p: int, start: int, end: int, upper: float, objective: Objective) -> float:
        """`floor`, or what solving said; where all ways are at hand, what it is."""
        if self._front(p, start, end) is not None:
            found = self.solve(p, start, end, INFINITE, objective)
            return INFINITE if found is None else found.seconds
        least = self.floor(p, start, end, objective)
        limit, found = self._solved.get((objective, *self.key(p, start, end)), (0.0, None)) if least < upper else (0.0, None)
        return max(least, limit if found is None else found.seconds)

    # ---- the splits

    def estimate(self) -> float:
        """A better bound than that of work alone, and the prices of bytes behind it, without solving a stage."""
        even = self._borders()
        total = 0.0
        for p in range(self.pp):
            solver = self._solver(p, even[p], even[p + 1], self.step)
            total = max(total, solver.bound() + self.m * self.overhead)
            self._priced[p] = solver.price, solver.share
        if self.pp == 1:
            self.least = total + self.once
        else:
            low, high = 0.0, 2 * total + self.once  # no split is below `low`
            while self._ranges(high) is None and high < INFINITE:
                low, high = high, (4 * high if self.layers * high < FAR else INFINITE)
            while high < INFINITE and high - low > CLOSE * high:
                middle = (low + high) / 2
                low, high = (middle, high) if self._ranges(middle) is None else (low, middle)
            self.least = low
        return self.least

    def even(self, upper: float) -> _Found | None:
        """Stages with as much to do, if that is below `upper`; of one stage the best. Raises the bound."""
        if self.pp == 1:
            found = self.solve(0, 0, self.layers, upper, self.step)
            self.least = min(upper, (self.known(0, 0, self.layers, upper, self.step) if found is None else found.seconds) + self.once)
            best = None if found is None else self._simulated([found], upper)
            self._below = best[0] if best else upper
            return best
        even = self._borders()
        return self._solved_split([(p, even[p], even[p + 1]) for p in range(self.pp)], upper, self.step)

    def begin(self, upper: float) -> _Found | None:
        """A good split below `upper`, and what none undercuts."""
        return None if self.pp == 1 else self._refined(upper, FIRST_ROUNDS)

    def finish(self, upper: float) -> _Found | None:
        """The best split below `upper`, once it is begun."""
        if self.pp == 1:
            if self.least >= upper * (1 - ROUNDING) or upper >= self._below * (1 - ROUNDING):
                return None
            self._solved.clear()  # what was left open may not be, now that less is asked
            return self.even(upper)
        best = self._refined(upper, MOST_ROUNDS)
        upper = best[0] if best else upper
        return (self._searched(upper) if self.least < upper else None) or best

    def _refined(self, upper: float, rounds: int) -> _Found | None:
        """The stages of the split with the least bound are solved, until that changes nothing; raises the bound. The best split that is met
        so."""
        best: _Found | None = None
        before: list[tuple[int, int, int]] = []
        for _ in range(rounds):
            upper = best[0] if best else upper
            table = self._table(upper)
            if table is None:
                self.least = upper
                break
            self.least, path = table
            if path == before:
                break
            before = path
            best = self._solved_split(path, upper) or best
        return best

    def _solved_split(self, path: Sequence[tuple[int, int, int]], upper: float, objective: Objective | None = None) -> _Found | None:
        """Each stage for itself, then all together; None where that is not below `upper`."""
        if any(self.floor(*stage, self._main(stage[0])) >= upper for stage in path):
            return None
        stages: list[Solved | None] = []
        for stage in path:
            stages.append(self.solve(*stage, upper, objective or self._main(stage[0])))
            if stages[-1] is None:
                return None
        return self._simulated([stage for stage in stages if stage is not None], upper)

    def _simulated(self, stages: Sequence[Solved], upper: float) -> _Found | None:
        costs = tuple(stage.cost for stage in stages)
        seconds = plan_price(self.prices, self.outer, costs)
        return (seconds, costs) if seconds < upper else None

    def _lead(self, p: int, layers: int) -> float:
        """Seconds of one micro-batch through the stages before stage p, down and back, at the fastest."""
        if p == 0:
            return 0.0
        first = self.fastest(self.first) if self.first else 0.0
        return first + self._way.to(layers) + p * (self.overhead + self.back)

    def _main(self, p: int) -> Objective:
        """What of stage p delays the end: the first stage's reduction does for certain."""
        return self.work if p else self.step

    def _ranges(self, upper: float) -> list[range] | None:
        """For each stage, and behind the last: where it may begin in a split of less than `upper` seconds."""
        pp, layers = self.pp, self.layers

        def slow(p: int, start: int, end: int) -> bool:
            return self._lead(p, start) + self.floor(p, start, end, self._main(p)) + self.once >= upper

        highest = [0]
        for p in range(pp):
            start = highest[-1]
            low, high = start, layers - (pp - 1 - p)
            while low < high:  # the farthest end; a stage that begins later ends no earlier
                middle = (low + high + 1) // 2
                low, high = (low, middle - 1) if slow(p, start, middle) else (middle, high)
            if low == start:
                return None
            highest.append(low)
        if highest[-1] < layers:
            return None
        lowest = [layers]
        for p in range(pp - 1, -1, -1):
            end = lowest[-1]
            low, high = p, end - 1
            while low < high:
                middle = (low + high) // 2
                low, high = (middle + 1, high) if slow(p, middle, end) else (low, middle)
            if slow(p, low, end):
                return None
            lowest.append(low)
        lowest.reverse()
        if lowest[0] > 0:
            return None
        found = [range(low, high + 1) for low, high in zip(lowest, highest, strict=True)]
        found[0], found[pp] = range(1), range(layers, layers + 1)
        return found if all(found) else None

    def _terms(self, p: int, start: int, end: int, upper: float) -> tuple[float, float]:
        """Seconds of all micro-batches in a stage, and what it adds to the way of one through it."""
        if p == 0:
            return self.known(p, start, end, upper, self.step), self.known(p, start, end, upper, self.first_pass) + self.back
        return self.known(p, start, end, upper, self.work), self.floor(p, start, end, self.one) + (self.back if p < self.pp - 1 else 0.0)

    def _table(self, upper: float) -> tuple[float, list[tuple[int, int, int]]] | None:
        """(seconds that no split undercuts, the split that is said to take that long as (stage, start, end)); None: no split is below
        `upper`. `self.togo`: for each stage and start the least that is left.

        A stage can't end before a micro-batch has come down to it, it has worked m times, and the last gradient has gone back up to the
        first stage, whose reduction then is not hidden and whose update follows.
        """
        ranges = self._ranges(upper)
        if ranges is None:
            return None
        self.togo: list[dict[int, float]] = [{} for _ in range(self.pp)] + [{self.layers: 0.0}]
        onwards: list[dict[int, int]] = [{} for _ in range(self.pp)]
        for p in range(self.pp - 1, -1, -1):
            for start in ranges[p]:
                lead = self._lead(p, start) + self.once
                best, at = INFINITE, -1
                for end, rest in self.togo[p + 1].items():
                    if end <= start:
                        continue
                    every, one = self._terms(p, start, end, upper)
                    bound = max(every, one + rest)
                    if bound < best and lead + bound < upper:
                        best, at = bound, end
                if at >= 0:
                    self.togo[p][start], onwards[p][start] = best, at
        if 0 not in self.togo[0]:
            return None
        path, start = [], 0
        for p in range(self.pp):
            path.append((p, start, onwards[p][start]))
            start = onwards[p][start]
        return self.togo[0][0] + self.once, path

    def _bound(self, path: Sequence[tuple[int, int, int]], upper: float) -> float:
        """Seconds that a whole split does not undercut, by what is known now."""
        rest = 0.0
        for p, start, end in reversed(path):
            every, one = self._terms(p, start, end, upper)
            rest = max(every, one + rest)
        return rest + self.once

    def _cut(self, cut: Cut) -> None:
        """Every split of the table is bounded by this mean of paths from now on."""
        togo: list[dict[int, float]] = [{} for _ in range(self.pp)] + [{self.layers: 0.0}]
        for p in range(self.pp - 1, -1, -1):
            for start in self.togo[p]:
                ends = ((end, rest) for end, rest in togo[p + 1].items() if end > start)
                togo[p][start] = min((self._along(cut, p, start, end) + rest for end, rest in ends), default=INFINITE)
        self._cuts = [(cut, togo), *self._cuts[: MOST_CUTS - 1]]

    def _along(self, cut: Cut, p: int, start: int, end: int) -> float:
        """Seconds that a mean of paths spends in a stage at least."""
        objective = cut.objectives[p]
        return self.known(p, start, end, INFINITE, objective) if objective.passes > 0.0 else 0.0

    def _cut_bound(self, path: Sequence[tuple[int, int, int]], start: int, upper: float) -> float:
        """Seconds that no split that begins like this undercuts, by the means of paths of splits that were closed; the one that excludes it
        is asked first from then on."""
        best = 0.0
        for index, (cut, togo) in enumerate(self._cuts):
            bound = cut.constant + sum(self._along(cut, *stage) for stage in path) + togo[len(path)].get(start, INFINITE)
            if bound > best:
                best = bound
                if best >= upper:
                    self._cuts.insert(0, self._cuts.pop(index))
                    break
        return best

    def _searched(self, upper: float) -> _Found | None:
        """The splits of the table, the least bound first: each is solved, then closed."""
        closer = Closer(self, upper)
        self._cuts.clear()
        heap: list[_Node] = [(self.least, 0, (), 0.0, 0.0)]
        solved: set[tuple[tuple[int, int, int], ...]] = set()
        left = INFINITE  # what splits that could not be closed may take
        looked = 0
        while heap:
            bound, _, path, lead, largest = heappop(heap)
            if bound >= closer.upper * (1 - ROUNDING):
                break
            looked += 1
            if looked > MOST_SPLITS or closer.spent >= MOST_SOLVED:
                left = min(left, bound)
                break
            p, start = len(path), path[-1][2] if path else 0
            further = self._cut_bound(path, start, closer.upper)
            if further > bound * (1 + ROUNDING):
                if further < closer.upper * (1 - ROUNDING):
                    heappush(heap, (further, -looked, path, lead, largest))
                continue
            if p < self.pp:
                for end, rest in self.togo[p + 1].items():
                    if end > start:
                        every, one = self._terms(p, start, end, closer.upper)
                        further = max(bound, max(largest, lead + every, lead + one + rest) + self.once)
                        if further < closer.upper:
                            node = (*path, (p, start, end))
                            heappush(heap, (further, -looked, node, lead + one, max(largest, lead + every)))
                continue
            if path not in solved:
                solved.add(path)
                for stage in path:
                    self.solve(*stage, closer.upper, self._main(stage[0]))
                further = max(bound, self._bound(path, closer.upper))
                if further > bound:
                    if further < closer.upper:
                        heappush(heap, (further, -looked, path, lead, largest))
                    continue
            left = min(left, max(bound, closer.close(path)))
            if closer.cuts:
                self._cut(max(closer.cuts, key=lambda cut: cut.constant + sum(cut.least)))
        self.least = min(left, closer.upper)
        return closer.best

    def _borders(self) -> list[int]:
        """Where stages begin if each has as much to do, every layer at its fastest, and none too few bytes for its layers."""
        spent, borders = self._way, [0]
        total = spent.to(self.layers)
        for p in range(1, self.pp):
            low, high = borders[-1] + 1, self.layers - (self.pp - p)
            while low < high:
                middle = (low + high) // 2
                low, high = (low, middle) if spent.to(middle) >= total * p / self.pp * (1 - ROUNDING) else (middle + 1, high)
            borders.append(low)
        return [*borders, self.layers]
