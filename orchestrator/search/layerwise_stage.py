"""The ways to compute one stage's layers within its bytes, each layer in one of its options, changes of tp between neighbours paid for.

A dynamic program over the layers. A point is what some choice for the layers so far adds up to: bytes, the largest transient, seconds.
Identical layers make the same sums in any order, so that a run adds no more points than it has different sums. Dropped is a point that no
longer fits, one whose bound is not below what is asked for, and behind a run one that another with the same tp covers in everything.

The bound puts a price on bytes (Lagrangian relaxation; Handler and Zang, "A dual algorithm for the constrained shortest path problem",
Networks 1980): the fastest sequence at that price is a shortest path, and less the price of all bytes there are it undercuts every sequence
that fits. What of the reduction does not hide behind a backward pass is the larger of two sums over layers (all hidden, or as much as
fits), so the bound is that of a mean of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from itertools import groupby
from operator import add, itemgetter, le
from typing import NamedTuple

from orchestrator.cost.layerwise import Outer, Prices, Way, stage_price
from orchestrator.strategy.layerwise import LayerwiseStage

INFINITE = float("inf")
ROUNDING = 1e-9
"""Relative slack of a bound against a sum of the same terms in another order."""
MOST_LIMITS = 8
"""Values of the transient bytes that are solved; where more may be faster, the front is no longer complete."""
MOST_POINTS, MOST_OF_SEVERAL = 120, 20
"""Points that are kept of a stage that is alone, and of one among others; of more, those with the least bounds are kept, and the front is
no longer complete."""
MOST_SHARES = 6
"""Means of the two sums that are looked at."""


class Front(NamedTuple):
    """Ways that fit and that no other one covers, the fastest first; seconds that none undercuts; `complete`: whether all ways below the
    seconds that were asked for are among them or covered."""

    ways: list[LayerwiseStage]
    least_s: float
    complete: bool


class _Option(NamedTuple):
    """A way of a layer: bytes that it adds to the stage, and what it adds to the two sums."""

    way: Way
    nbytes: float
    sums: tuple[float, float]


class _Sequence(NamedTuple):
    """The cheapest at some price: seconds + price x bytes, bytes, the two sums; and by layer and tp before it the least that is left."""

    priced: float
    nbytes: float
    sums: tuple[float, float]
    rest: list[dict[int, float]]


_Trace = tuple["_Trace", Way] | None
_Point = tuple[tuple[float, ...], float, _Trace, int]
"""(bytes, transient bytes, and what of seconds matters: `StageSolver._compared`), the priced seconds so far, the ways, and a number that
says which ways and changes of tp they are, in any order."""


def mean(sums: tuple[float, float], share: float) -> float:
    """The weighted mean of two sums, where the second has this share."""
    return sums[0] + share * (sums[1] - sums[0])


class StageSolver:
    """The ways for these runs (kind, layers) on stage `index` within `room` bytes, beside what is there whatever the layers. Seconds are
    those of all micro-batches in the stage; of the `whole` step also what of the reduction is not hidden, and the update."""

    def __init__(
        self, prices: Prices, outer: Outer, index: int, runs: Sequence[tuple[str, int]], flight: int, room: float, *, whole: bool
    ) -> None:
        self.prices, self.outer, self.index, self.flight, self.room, self.whole = prices, outer, index, flight, room, whole
        self.slack = 1 + prices.slack
        self.layers = [kind for kind, count in runs for _ in range(count)]
        self.hides = (1 - prices.slowdown) * prices.hidden_share * whole
        overhead, _ = prices.overheads_s()
        self.m, self.alone = outer.num_microbatches, outer.pp == 1
        self.most = MOST_POINTS if self.alone else MOST_OF_SEVERAL
        self.constant = self.m * overhead
        self.ahead = self.hides * overhead / 2
        """Seconds of reduction that hide behind the overhead of a backward pass."""
        kinds = [kind for kind, _ in runs]
        self.options = {kind: self._options(kind) for kind in kinds}
        self.legal = all(self.options.values())
        self.switch: dict[str, dict[tuple[int, int], tuple[float, float]]] = {}
        sizes = {0} | {tp for by_tp in self.options.values() for tp in by_tp}
        for kind in self.options:
            self.switch[kind] = {
                (a, b): prices.switch(kind, a, b, outer) if a and a != b else (0.0, 0.0) for a in sizes for b in self.options[kind]
            }
        self.least_transient = (
            max((min(way.transient_bytes for way in prices.ways(kind, outer)) for kind in kinds), default=0.0) if self.legal else 0.0
        )
        self.cap = room - self.slack * self.least_transient
        self.steps = 0
        """Steps taken from a point to one behind the next layer."""
        self.price, self.share, self.least = 0.0, 0.0, INFINITE
        """The price of a byte in seconds and the share of the second sum at which the bound is largest; and that bound in seconds."""

    def sums(self, forward: float, backward: float, sync: float, optimizer: float) -> tuple[float, float]:
        """Seconds if all of the reduction is hidden, and if as much as fits a backward pass."""
        base = self.m * (forward + backward)
        if not self.whole:
            return base, base
        base += optimizer
        return base + self.prices.slowdown * sync, base + sync - self.hides * backward

    def nbytes(self, way: Way) -> float:
        """What a layer adds to the stage's bytes, without what is transient."""
        return way.static_bytes + self.slack * self.flight * way.saved_bytes

    def _options(self, kind: str) -> dict[int, list[_Option]]:
        """The ways to compute a layer of this kind, by tp, without those that another one of the same tp undercuts in everything."""
        by_tp: dict[int, list[tuple[tuple[float, ...], _Option]]] = {}
        for way in self.prices.ways(kind, self.outer):
            nbytes = self.nbytes(way)
            numbers = (nbytes, way.transient_bytes, way.forward_s, way.backward_s, way.sync_s, way.optimizer_s)
            option = _Option(way, nbytes, self.sums(way.forward_s, way.backward_s, way.sync_s, way.optimizer_s))
            kept = by_tp.setdefault(way.choice.tp, [])
            if not any(all(map(le, other, numbers)) for other, _ in kept):
                kept[:] = [entry for entry in kept if not all(map(le, numbers, entry[0]))] + [(numbers, option)]
        return {tp: [option for _, option in kept] for tp, kept in by_tp.items()}

    # ---- the bound

    def _cheapest(self, share: float, price: float, weight: float = 1.0) -> _Sequence:
        """The sequence of least weight x seconds + price x bytes."""
        best = {
            kind: {
                tp: min((weight * mean(o.sums, share) + price * o.nbytes, i) for i, o in enumerate(options))
                for tp, options in by_tp.items()
            }
            for kind, by_tp in self.options.items()
        }
        moves = {
            kind: {pair: weight * mean(self.sums(*seconds, 0.0, 0.0), share) for pair, seconds in pairs.items()}
            for kind, pairs in self.switch.items()
        }
        before = [{0: 0.0}, *(dict.fromkeys(self.options[kind], 0.0) for kind in self.layers)]
        rest, onwards = before[-1], list[dict[int, int]]()
        rows = [rest]
        for i in range(len(self.layers) - 1, -1, -1):
            kind = self.layers[i]
            ahead = [(tp, cost + rest[tp]) for tp, (cost, _) in best[kind].items()]
            move, row, to = moves[kind], {}, {}
            for a in before[i]:
                row[a], to[a] = min([(move[a, b] + cost, b) for b, cost in ahead])
            rows.append(row)
            onwards.append(to)
            rest = row
        nbytes = first = second = 0.0
        at = 0
        for kind, to in zip(self.layers, reversed(onwards), strict=True):
            option = self.options[kind][to[at]][best[kind][to[at]][1]]
            change = self.sums(*self.switch[kind][at, to[at]], 0.0, 0.0)
            nbytes, first, second = nbytes + option.nbytes, first + option.sums[0] + change[0], second + option.sums[1] + change[1]
            at = to[at]
        rows.reverse()
        return _Sequence(rows[0][0], nbytes, (first, second), rows)

    def _dual(self, share: float, leanest: _Sequence) -> tuple[float, float, float]:
        """(seconds that nothing which fits undercuts, the price of a byte that says so, by how much the second sum is above the first
        there): where the lines of a sequence that fits and of one that doesn't meet, until no sequence is below."""
        fast = self._cheapest(share, 0.0)
        if fast.nbytes <= self.cap:
            return fast.priced, 0.0, fast.sums[1] - fast.sums[0]
        fits = leanest
        while True:  # mostly a handful of times: no price comes again
            price = (mean(fits.sums, share) - mean(fast.sums, share)) / (fast.nbytes - fits.nbytes)
            found = self._cheapest(share, price)
            if found.priced >= (mean(fits.sums, share) + price * fits.nbytes) * (1 - ROUNDING):
                return found.priced - price * self.cap, price, fits.sums[1] - fits.sums[0]
            fast, fits = (fast, found) if found.nbytes <= self.cap else (found, fits)

    def bound(self) -> float:
        """Seconds that no ways which fit undercut; infinite where none fits. Sets the price behind it."""
        if not self.legal:
            return INFINITE
        self.least = INFINITE
        leanest = self._cheapest(0.0, 1.0, weight=0.0)
        if leanest.nbytes > self.cap * (1 + ROUNDING):
            return INFINITE
        low, high, share, tried = 0.0, 1.0, 0.0, list[tuple[float, float, float]]()
        for turn in range(MOST_SHARES if self.hides else 1):
            value, price, tilt = self._dual(share, leanest)
            tried.append((value - share * self.ahead, price, share))
            low, high = (share, high) if tilt > self.ahead else (low, share)
            if (turn == 0 and high == 0.0) or (turn == 1 and low == 1.0):
                break
            share = 1.0 if turn == 0 else (low + high) / 2
        value, self.price, self.share = max(tried, key=itemgetter(0))
        self.least = value + self.constant
        return self.least

    # ---- the ways

    def front(self, upper: float) -> Front:
        """The ways below `upper` seconds, of a stage that is alone the best of them.

        The transient bytes are a maximum: for each value that it can have, the ways that need no more are looked for in what that leaves.
        """
        least = self.bound() if self.least == INFINITE else self.least
        if least >= upper:
            return Front([], least, True)
        limits = {o.way.transient_bytes for by_tp in self.options.values() for some in by_tp.values() for o in some}
        solvers = [self._limited(limit) for limit in sorted(limits) if limit >= self.least_transient]
        solvers.sort(key=StageSolver.bound)
        ways: list[LayerwiseStage] = []
        top, left = upper, INFINITE
        for place, solver in enumerate(solvers):
            if solver.least >= top:
                break
            if place == MOST_LIMITS:
                left = min(left, solver.least)
                break
            found, whole = solver.fastest(top)
            self.steps += solver.steps
            if not whole:
                left = min(left, solver.least)
            ways = uncovered([*ways, *found])
            if self.alone and ways:
                top = min(top, *map(self.seconds, ways))
        ways.sort(key=self.seconds)
        return Front(ways, max(least, min([left, upper, *map(self.seconds, ways)])), left == INFINITE)

    def _limited(self, transient: float) -> StageSolver:
        """The solver with only the options that need at most `transient` transient bytes, in the room that those leave."""
        part = copy(self)
        part.options = {
            kind: {tp: kept for tp, some in by_tp.items() if (kept := [o for o in some if o.way.transient_bytes <= transient])}
            for kind, by_tp in self.options.items()
        }
        part.least_transient, part.cap, part.steps = transient, self.room - self.slack * transient, 0
        return part

    def seconds(self, cost: LayerwiseStage) -> float:
        """Seconds that a priced stage takes, as this solver adds them up: of all micro-batches, and for the whole step also the update and
        what is not hidden of the reduction."""
        return self.m * (cost.forward_s + cost.backward_s) + (cost.exposed_s + cost.optimizer_s if self.whole else 0.0)

    def _compared(self, forward: float, backward: float, sync: float, optimizer: float) -> tuple[float, ...]:
        """The seconds in which a way must not be beaten; where the stage is alone, the two sums."""
        return self.sums(forward, backward, sync, optimizer) if self.alone else (forward, backward, sync, optimizer)

    def fastest(self, upper: float) -> tuple[list[LayerwiseStage], bool]:
        """The stages of less than `upper` seconds that fit and that no other one undercuts in everything, and whether none was left out for
        number."""
        most = (upper - self.constant + self.share * self.ahead + self.price * self.cap) * (1 + ROUNDING)
        room, slack, complete = self.room * (1 + ROUNDING), self.slack, True
        rests = self._cheapest(self.share, self.price).rest
        leanest = [0.0]
        for kind in reversed(self.layers):
            leanest.append(leanest[-1] + min(option.nbytes for options in self.options[kind].values() for option in options))
        leanest.reverse()
        points: dict[int, list[_Point]] = {0: [((0.0, self.least_transient, *self._compared(0.0, 0.0, 0.0, 0.0)), 0.0, None, 0)]}
        digit, width = 1, len(self.layers).bit_length()  # of the numbers that tell points apart: a way or a change of tp
        for i, kind in enumerate(self.layers):
            reach: dict[int, dict[int, _Point]] = {}
            if i == 0 or kind != self.layers[i - 1]:
                digits: dict[object, int] = {}
            for tp, options in self.options[kind].items():
                rest, leave = rests[i + 1][tp], room - leanest[i + 1]
                costs = []
                for option in options:
                    way = option.way
                    added = self._compared(way.forward_s, way.backward_s, way.sync_s, way.optimizer_s)
                    if id(option) not in digits:
                        digits[id(option)], digit = digit, digit << width
                    costs.append((mean(option.sums, self.share) + self.price * option.nbytes, digits[id(option)], option, added))
                costs.sort(key=itemgetter(0))
                here = reach.setdefault(tp, {})
                for before, some in points.items():
                    f, b = self.switch[kind][before, tp]
                    change, changed = mean(self.sums(f, b, 0.0, 0.0), self.share), self._compared(f, b, 0.0, 0.0)
                    if before != tp and (before, tp) not in digits:
                        digits[before, tp], digit = digit, digit << width
                    turn = digits.get((before, tp), 0)
                    onwards = [
                        (cost + change, own + turn, o.nbytes, o.way.transient_bytes, [*map(add, changed, added)], o.way)
                        for cost, own, o, added in costs
                    ]
                    self.steps += len(some) * len(onwards)
                    for (nbytes, transient, *seconds), spent, trace, name in some:
                        for cost, own, more, high, shift, way in onwards:
                            priced = spent + cost
                            if priced + rest > most:
                                break
                            now, largest = name + own, high if high > transient else transient
                            total = nbytes + more
                            if total + slack * largest <= leave and now not in here:
                                here[now] = (total, largest, *map(add, seconds, shift)), priced, (trace, way), now
            another = i + 1 < len(self.layers) and kind != self.layers[i + 1]  # kind of layers follows
            points = {}
            for tp, found in reach.items():
                points[tp], whole = _kept([*found.values()], self.most, dominance=another)
                complete = complete and whole
        ends = [point for some in points.values() for point in some if point[0][0] + slack * point[0][1] <= self.room]
        if self.alone:  # only the best is wanted
            ends = sorted(ends, key=lambda point: max(point[0][2], point[0][3] - self.ahead))[:1]
        else:
            ends, _ = _kept([(numbers[2:], priced, trace, name) for numbers, priced, trace, name in ends], len(ends), dominance=True)
        made = [self._made(trace) for _, _, trace, _ in ends]
        return uncovered([cost for cost in made if self.seconds(cost) < upper]), complete

    def _made(self, trace: _Trace) -> LayerwiseStage:
        ways: list[Way] = []
        while trace is not None:
            trace, way = trace
            ways.append(way)
        pairs = zip(self.layers, reversed(ways), strict=True)
        return stage_price(self.prices, self.outer, self.index, _tidy(list(pairs)))


def _tidy(layers: Sequence[tuple[str, Way]]) -> list[tuple[str, Way, int]]:
    """Layers as blocks: neighbours of one kind and tp cost the same in any order."""
    tidy: list[tuple[str, Way, int]] = []
    for (kind, _), members in groupby(layers, key=lambda layer: (layer[0], layer[1].choice.tp)):
        counts: dict[Way, int] = {}
        for _, way in members:
            counts[way] = counts.get(way, 0) + 1
        tidy += [(kind, way, count) for way, count in counts.items()]
    return tidy


def _kept(points: list[_Point], most: int, *, dominance: bool) -> tuple[list[_Point], bool]:
    """The points that are kept, `most` at most: those with the least bounds, and with `dominance` none that another one undercuts in
    everything; and whether that is all."""
    points.sort(key=lambda point: point[1])
    if not dominance:
        return points[:most], len(points) <= most
    kept: list[_Point] = []
    for point in points:
        if not any(all(map(le, other[0], point[0])) for other in kept):
            if len(kept) == most:
                return kept, False
            kept.append(point)
    return kept, True


def uncovered(costs: Sequence[LayerwiseStage]) -> list[LayerwiseStage]:
    """The stages that no other one undercuts in everything: what is not hidden of the reduction counts together with the backward pass that
    it follows."""
    found: dict[tuple[float, ...], LayerwiseStage] = {}
    numbers = [(cost.forward_s, cost.backward_s, cost.backward_s + cost.exposed_s, cost.optimizer_s) for cost in costs]
    for seconds, cost in sorted(zip(numbers, costs, strict=True), key=itemgetter(0)):  # what covers another one comes before it
        if not any(all(map(le, other, seconds)) for other in found):
            found[seconds] = cost
    return [*found.values()]
