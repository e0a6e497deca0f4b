"""The layer-wise search: every layer its own tp, data parallelism or ZeRO-3, and recompute; pipeline outermost; the batch, if it is open.

Inside a stage the fastest ways are exact (search/layerwise_stage.py). Which layers go to which stage is bounded first: a stage can't be
faster than its layers with a price on bytes, which is a sum over kinds and counts, and it can't end before a micro-batch has come down to
it and gone back up. A dynamic program over the borders finds the split whose bound is least; its stages are then solved, and that is
repeated until they all are. What it says last no split undercuts (`LayerwiseResult.at_least_s`). Splits that it does not exclude are
simulated, each stage in its fastest ways, which for pp > 1 may not be those of the fastest plan: there the bound says by how much at most.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import accumulate, groupby
from math import ceil
from typing import NamedTuple

from orchestrator.cost.schedule import in_flight
from orchestrator.errors import NoPlanError
from orchestrator.search.floors import filled
from orchestrator.search.layerwise_prices import AnalyticPrices, Outer, Prices, ProfilePrices, Way, plan_price, stage_price
from orchestrator.search.layerwise_stage import INFINITE, ROUNDING, Objective, StageSolver, mean
from orchestrator.strategy.layerwise import ENDS, LayerwisePlan, LayerwiseStage
from orchestrator.strategy.pins import MemoryLimit
from orchestrator.strategy.tree import divisors
from orchestrator.units import format_bytes

__all__ = ["AnalyticPrices", "LayerwiseResult", "Outer", "Prices", "ProfilePrices", "Way", "layerwise", "plan_price", "stage_price"]

FEW_LAYERS = 64
"""Up to so many, one layer computed in another way shows in the step: further objectives are tried (up to 4% in instances of 3 layers)."""
MOST_BATCHES = 32
MOST_SIMULATED = 20
"""Splits simulated for one (batch, pp, micro-batches)."""
CLOSE = 1e-3
"""How close an estimate comes to what it could say."""
FAR = 1e12
"""Seconds that no step takes: what needs more does not fit."""
MIXED = (0.1, 0.4)
"""A step is at least any mean of two bounds: this share of stage 0's own m micro-batches, and the way of one through it to what follows."""
MOST_ROUNDS = 20
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


class LayerwiseResult(NamedTuple):
    """The plan, and what is known about all others of its space."""

    plan: LayerwisePlan
    tried: int
    """(batch, pp, micro-batches, embedding and head) that were solved, of those that are legal."""
    legal: int
    at_least_s: float
    """Seconds that no plan of this batch undercuts, nor one of another batch that was open, counted in samples."""

    @property
    def exact(self) -> bool:
        """Whether nothing of the space is faster."""
        return self.at_least_s >= self.plan.step_time_s * (1 - 2 * ROUNDING)


class _Solved(NamedTuple):
    """A stage in its best ways for an objective; the seconds of that objective that no ways undercut."""

    cost: LayerwiseStage
    seconds: float


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


class _Splits:
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
        self.step, self.first_pass, self.rounds = Objective(self.m), Objective(1), Objective((self.m - 1) // outer.pp + 1)
        self.mixed = {share: Objective(share * self.m + 1 - share) for share in MIXED}
        self.work, self.one = Objective(self.m, whole=False), Objective(1, whole=False)
        self.back = 2 * prices.hop_s(outer)
        self._solved: dict[tuple[object, ...], tuple[float, _Solved | None]] = {}
        self._places: dict[tuple[int, Objective], _Place] = {}
        self._between: dict[tuple[bool, bool, int, int], tuple[tuple[str, int], ...]] = {}
        self._priced: dict[int, tuple[float, float]] = {}
        self.least = INFINITE
        """Seconds that no split undercuts, once `best` is through; at least what it was asked to stay below."""

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

    def _key(self, p: int, start: int, end: int, objective: Objective) -> tuple[object, ...]:
        return (objective, self._runs(p, start, end), *self._held[p])

    def _solver(self, p: int, start: int, end: int, objective: Objective) -> StageSolver:
        flight, fixed = self._held[p]
        return StageSolver(self.prices, self.outer, self._runs(p, start, end), flight, self.usable - fixed, objective)

    def solve(self, p: int, start: int, end: int, upper: float, objective: Objective) -> _Solved | None:
        """The best ways for layers [start, end) in stage p, below `upper` seconds; None: there are none."""
        key = self._key(p, start, end, objective)
        known = self._solved.get(key)
        if known is not None and (known[1] is not None or known[0] >= upper):
            return known[1]
        solver = self._solver(p, start, end, objective)
        overhead = objective.passes * self.overhead
        answer = solver.solve(upper - overhead)
        found: _Solved | None = None
        if answer is not None:
            seconds, blocks = answer
            runs = self._runs(p, start, end)
            cost = stage_price(self.prices, self.outer, p, [(runs[r][0], way, count) for r, way, count in _tidy(blocks)])
            found = _Solved(cost, min(seconds, solver.least) + overhead)
        else:
            upper = min(upper, solver.least + overhead)
        self._solved[key] = (upper, found)
        return found

    def _place(self, p: int, objective: Objective) -> _Place:
        place = self._places.get((p, objective))
        if place is None:
            price, share = self._priced.get(p, (0.0, 0.0))
            price = price / self.m * objective.passes
            share = share if objective.whole else 0.0
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

    def _known(self, p: int, start: int, end: int, upper: float, objective: Objective) -> float:
        """`floor`, or what solving said."""
        least = self.floor(p, start, end, objective)
        limit, found = self._solved.get(self._key(p, start, end, objective), (0.0, None)) if least < upper else (0.0, None)
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

    def best(self, upper: float) -> tuple[float, tuple[LayerwiseStage, ...]] | None:
        """The best split below `upper`."""
        if self.pp == 1:
            found = self.solve(0, 0, self.layers, upper, self.step)
            self.least = upper if found is None else min(upper, found.seconds + self.once)
            return None if found is None else self._simulated([found], upper)
        best: tuple[float, tuple[LayerwiseStage, ...]] | None = None
        even = self._borders()
        stages = [self.solve(p, even[p], even[p + 1], upper, self.step) for p in range(self.pp)]
        if all(stages):
            best = self._simulated([stage for stage in stages if stage is not None], upper)
            upper = best[0] if best else upper
        before: list[tuple[int, int, int]] = []
        for _ in range(MOST_ROUNDS):
            table = self._table(upper)
            if table is None:
                self.least = upper
                return best
            self.least, path = table
            if path == before:
                break
            before = path
            for p, start, end in path:
                for objective in (self.step, self.first_pass, self.rounds, *self.mixed.values()) if p == 0 else (self.work, self.step):
                    self.solve(p, start, end, upper, objective)
        return self._enumerated(upper, best)

    def _simulated(self, stages: Sequence[_Solved], upper: float) -> tuple[float, tuple[LayerwiseStage, ...]] | None:
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
            return self._known(p, start, end, upper, self.step), self._known(p, start, end, upper, self.first_pass) + self.back
        return self._known(p, start, end, upper, self.work), self.floor(p, start, end, self.one) + (self.back if p < self.pp - 1 else 0.0)

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
                    if p == 0 and bound < best:
                        for share, mixed in self.mixed.items():
                            bound = max(bound, self._known(0, 0, end, upper, mixed) + (1 - share) * (self.back + rest))
                    if bound < best and lead + bound < upper:
                        best, at = bound, end
                if at >= 0:
                    self.togo[p][start], onwards[p][start] = best, at
        if 0 not in self.togo[0]:
            return None
        further = max(self._around(upper), self._alone(upper))
        if further >= upper:
            return None
        path, start = [], 0
        for p in range(self.pp):
            path.append((p, start, onwards[p][start]))
            start = onwards[p][start]
        return max(self.togo[0][0] + self.once, further), path

    def _around(self, upper: float) -> float:
        """Seconds that no split of the table undercuts, because no more than pp micro-batches are under way: the first goes down and back
        up, and so does every pp-th after it, one after the other, transfers included; the last follow each other in the last stage."""
        rounds, rest = divmod(self.m - 1, self.pp)
        togo = {self.layers: 0.0}
        for p in range(self.pp - 1, -1, -1):
            here: dict[int, float] = {}
            times = rounds + 1 + (rest if p == self.pp - 1 else 0)
            for start in self.togo[p]:
                for end, after in togo.items():
                    if end > start:
                        one = self._known(p, start, end, upper, self.rounds) if p == 0 else times * self.floor(p, start, end, self.one)
                        total = one + after + ((rounds + 1) * self.back if p < self.pp - 1 else 0.0)
                        here[start] = min(here.get(start, INFINITE), total)
            togo = here
        return togo.get(0, INFINITE) + self.once

    def _alone(self, upper: float) -> float:
        """Seconds that no split of the table undercuts, because some stage has its own work, reduction and update behind it, after a
        micro-batch has come down to it."""
        forward = _Sums(self.inner, {kind: min(way.forward_s for way in self.prices.ways(kind, self.outer)) for kind, _ in self.inner})
        togo = {self.layers: 0.0}
        for p in range(self.pp - 1, -1, -1):
            here: dict[int, float] = {}
            for start in self.togo[p]:
                down = forward.to(start) + p * self.back / 2
                for end, after in togo.items():
                    if end > start:
                        here[start] = min(here.get(start, INFINITE), max(down + self._known(p, start, end, upper, self.step), after))
            togo = here
        return togo.get(0, INFINITE) + self.once

    def _enumerated(
        self, upper: float, best: tuple[float, tuple[LayerwiseStage, ...]] | None
    ) -> tuple[float, tuple[LayerwiseStage, ...]] | None:
        """Splits that their bound does not exclude, simulated, the least bound first: each stage in its best ways with the reduction, then
        for other objectives where that is faster (of few layers, in the first split, for all), from the last stage on."""
        simulated = 0

        def look(path: list[tuple[int, int, int]]) -> None:
            nonlocal best, upper, simulated
            stages = [self.solve(*stage, upper, self.step) or self.solve(*stage, upper, self._main(stage[0])) for stage in path]
            chosen = [stage for stage in stages if stage is not None]
            if len(chosen) < self.pp:
                return
            seconds = plan_price(self.prices, self.outer, [stage.cost for stage in chosen])
            simulated += 1
            for p in range(self.pp - 1, -1, -1):
                few = simulated == 1 and self.layers <= FEW_LAYERS
                for objective in (self.work, *self.mixed.values(), self.first_pass) if few else (self.work,):
                    other = self.solve(*path[p], upper, objective)
                    if other is not None and other.cost != chosen[p].cost:
                        tried = [*chosen[:p], other, *chosen[p + 1 :]]
                        faster = plan_price(self.prices, self.outer, [stage.cost for stage in tried])
                        if faster < seconds:
                            chosen, seconds = tried, faster
            found = self._simulated(chosen, upper)
            if found is not None:
                best, upper = found, found[0]

        def down(p: int, start: int, lead: float, largest: float, path: list[tuple[int, int, int]]) -> None:
            if p == self.pp:
                look(path)
                return
            ways = []
            for end, rest in self.togo[p + 1].items():
                if end > start:
                    every, one = self._terms(p, start, end, upper)
                    ways.append((max(largest, lead + every, lead + one + rest) + self.once, end, lead + one, lead + every))
            for bound, end, below, here in sorted(ways):
                if bound >= upper or simulated >= MOST_SIMULATED:
                    return
                down(p + 1, end, below, max(largest, here), [*path, (p, start, end)])

        down(0, 0, 0.0, 0.0, [])
        self.least = min(self.least, upper)
        return best

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
    queue: list[tuple[float, int, bool, int, _Splits]] = []
    """(seconds a sample that it does not undercut, its place, whether that is an estimate, batch, splits)"""
    layers = sum(count for kind, count in prices.runs if kind not in ENDS)
    for batch in batches:
        for stages in divisors(prices.world):
            if stages > layers or pp not in (None, stages):
                continue
            for m in divisors(batch):
                if num_microbatches not in (None, m):
                    continue
                for ends in prices.end_choices(Outer(stages, m, batch // m, None)):
                    outer = Outer(stages, m, batch // m, ends)
                    splits = _Splits(prices, outer, limit.usable)
                    work = sum(count * splits.fastest(kind) for kind, count in prices.runs) + stages * splits.overhead
                    if work < INFINITE:
                        bound = filled(work, stages, m, 1, prices.hop_s(outer)) + splits.once
                        queue.append((bound / batch, len(queue), False, batch, splits))
    best: tuple[float, tuple[LayerwiseStage, ...], Outer, int] | None = None
    tried, legal = 0, len(queue)
    each = least = INFINITE  # seconds a sample: of the best plan, and of what none undercuts
    heapify(queue)
    while queue:
        bound, place, estimated, batch, splits = heappop(queue)
        if bound >= each:
            break
        if not estimated:
            heappush(queue, (max(bound, splits.estimate() / batch), place, True, batch, splits))
            continue
        tried += 1
        found = splits.best(each * batch)
        least = min(least, max(bound, splits.least / batch))
        if found is not None:
            best = (*found, splits.outer, batch)
            each = found[0] / batch
    if best is None:
        raise NoPlanError(f"no layer-wise plan fits in {format_bytes(limit.usable)} ({legal} outer choices)")
    seconds, chosen, outer, batch = best
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
    return LayerwiseResult(plan, tried, legal, min(seconds, least * batch))
