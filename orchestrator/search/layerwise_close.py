"""One split of the layers over a pipeline's stages, closed: no ways of its stages are faster together than the best that was found.

Paths through the schedule bound it (search/layerwise_paths.py). For the mean of paths that bounds most, each stage is solved for itself:
the ways found are new columns, their schedule's longest path is a new row, until neither changes anything. That is the bound of the ways
made convex, which no plan need attain. Where it is below the best plan, one stage's ways that could still be part of a faster plan are gone
through, each with the other stages bounded anew (branch and bound; the ways are those whose seconds along the paths exceed the least by
less than the gap).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from typing import NamedTuple, Protocol

from orchestrator.search.layerwise_paths import Numbers, Objective, Path, longest, mixed, times
from orchestrator.search.layerwise_prices import Outer, Prices, plan_price
from orchestrator.strategy.layerwise import LayerwiseStage

INFINITE = float("inf")
ROUNDING = 1e-9
"""Relative slack of a bound against a sum of the same terms in another order."""
GAPS = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, INFINITE)
"""How far above the bound a plan is looked for, one after the other: ways grow with the gap."""
MOST_SOLVED = 250
"""Stages that are solved for one split."""
MOST_TURNS = 40
"""Means of paths that are looked at for one bound."""
MOST_PATHS = 24
"""Paths that are kept from one split to the next."""
MOST_MET = 30
"""Known ways of a stage that a bound begins with."""
MOST_TOGETHER = 64
"""Plans that are made of the ways that a mean consists of."""
SHARE = 1e-7
"""Of a way in a mean, below which it is not part of it."""

Stage = tuple[int, int, int]
"""Its place, its first layer, the first one behind it."""


class Solved(NamedTuple):
    """A stage in its best ways for an objective; the seconds of that objective that no ways undercut."""

    cost: LayerwiseStage
    seconds: float


class Stages(Protocol):
    """What is asked of an outer choice's stages."""

    prices: Prices
    outer: Outer
    once: float
    met: dict[tuple[object, ...], list[LayerwiseStage]]

    def key(self, p: int, start: int, end: int) -> tuple[object, ...]: ...
    def solve(self, p: int, start: int, end: int, upper: float, objective: Objective) -> Solved | None: ...
    def known(self, p: int, start: int, end: int, upper: float, objective: Objective) -> float: ...
    def every(self, p: int, start: int, end: int, objective: Objective, upper: float) -> list[LayerwiseStage] | None: ...


class Cut(NamedTuple):
    """A mean of paths: seconds outside the stages, what of each stage counts, and what no ways of it undercut."""

    constant: float
    objectives: tuple[Objective, ...]
    least: tuple[float, ...]


class _Bound(NamedTuple):
    """`ways`: the shares of each stage's ways in the fastest mean."""

    seconds: float
    cut: Cut
    ways: list[list[float]]


def numbers(cost: LayerwiseStage) -> Numbers:
    """Its seconds."""
    return Numbers(cost.forward_s, cost.backward_s, cost.exposed_s, cost.optimizer_s)


class Closer:
    """The best plan below `upper` seconds over the splits that are closed one after the other."""

    def __init__(self, stages: Stages, upper: float) -> None:
        self.stages, self.upper = stages, upper
        self.best: tuple[float, tuple[LayerwiseStage, ...]] | None = None
        self.cuts: list[Cut] = []
        """What was found to bound the last split, before any way was fixed."""
        self.hop = stages.prices.hop_s(stages.outer)
        self.m = stages.outer.num_microbatches
        self.paths: list[Path] = []
        self.spent = 0
        """Stages solved."""
        self.most = 0
        """That may be before the split at hand is left open."""

    def close(self, path: Sequence[Stage]) -> float:
        """Seconds that no plan of this split undercuts; less than `upper` only where it could not be closed."""
        self.cuts = []
        self.most = self.spent + MOST_SOLVED
        return self._close(path, {}, INFINITE)

    def _close(self, path: Sequence[Stage], fixed: Mapping[int, LayerwiseStage], limit: float) -> float:
        """Likewise, with some stages in these ways; `limit` is as good as a larger bound."""
        if len(fixed) == len(path):
            return self._look([fixed[p] for p in range(len(path))])
        known = max((self._of(cut, fixed) for cut in self.cuts), default=0.0)
        if known >= self._enough(limit):
            return known
        bound = self._relaxed(path, fixed, limit)
        if bound is None:
            return known
        if bound.seconds >= self._enough(limit):
            return bound.seconds
        p = self._undecided(bound, fixed)
        least = bound.cut.least[p]
        for gap in GAPS:
            target = min(bound.seconds * (1 + gap), limit, self.upper)
            found = self.stages.every(*path[p], bound.cut.objectives[p], least + target - bound.seconds)
            if found is None or self.spent >= self.most:
                return bound.seconds
            lowest = target
            for cost in found:
                lowest = min(lowest, self._close(path, {**fixed, p: cost}, target))
            if lowest < self._enough(target) or lowest >= self._enough(limit):
                return lowest
        return lowest

    def _floor(self, stage: Stage, objective: Objective) -> float:
        """Seconds of this stage that no ways undercut, as far as is known without solving it."""
        return self.stages.known(*stage, INFINITE, objective) if objective.passes > 0.0 else 0.0

    def _enough(self, limit: float) -> float:
        """What a bound need not exceed."""
        return min(limit, self.upper) * (1 - ROUNDING)

    def _undecided(self, bound: _Bound, fixed: Mapping[int, LayerwiseStage]) -> int:
        """The stage that counts most of those that the fastest mean computes in several ways, or else of all that are left."""

        def weight(p: int) -> tuple[bool, float]:
            return sum(share > SHARE for share in bound.ways[p]) > 1, bound.cut.least[p]

        return max((p for p in range(len(bound.ways)) if p not in fixed), key=weight)

    @staticmethod
    def _of(cut: Cut, fixed: Mapping[int, LayerwiseStage]) -> float:
        """Seconds that this mean of paths takes at least."""
        stages = enumerate(zip(cut.objectives, cut.least, strict=True))
        return cut.constant + sum(times(one, numbers(fixed[p])) if p in fixed else least for p, (one, least) in stages)

    def _look(self, costs: Sequence[LayerwiseStage]) -> float:
        """Seconds of a plan, which is kept if it is the best."""
        seconds = plan_price(self.stages.prices, self.stages.outer, costs)
        if seconds < self.upper:
            self.upper, self.best = seconds, (seconds, tuple(costs))
        return seconds

    def _relaxed(self, path: Sequence[Stage], fixed: Mapping[int, LayerwiseStage], limit: float) -> _Bound | None:
        """The largest bound of means of paths; None where no ways of some stage are known."""
        pp = len(path)
        columns: list[list[LayerwiseStage]] = []
        for p, stage in enumerate(path):
            met = [fixed[p]] if p in fixed else self.stages.met.get(self.stages.key(*stage), [])[-MOST_MET:]
            if not met:
                return None
            columns.append(list(met))
        self._look([column[-1] for column in columns])
        rows = self.paths[-MOST_PATHS:]
        seconds, row = longest([numbers(column[-1]) for column in columns], self.hop, self.m)
        if row not in rows:
            rows.append(row)
        best: _Bound | None = None
        for _ in range(MOST_TURNS):
            timed = [[numbers(cost) for cost in column] for column in columns]
            while True:
                constants = [row.hops * self.hop + self.stages.once for row in rows]
                table = [[[times(one, way) for way in ways] for one, ways in zip(row.stages, timed, strict=True)] for row in rows]
                mean = mixed(constants, table)
                middle = [_middle(ways, shares) for ways, shares in zip(timed, mean.ways, strict=True)]
                seconds, row = longest(middle, self.hop, self.m)
                if seconds + self.stages.once <= mean.seconds * (1 + ROUNDING) or row in rows:
                    break
                rows.append(row)
            self._together(columns, mean.ways)
            objectives = tuple(_objective([row.stages[p] for row in rows], mean.paths) for p in range(pp))
            constant = sum(share * other for share, other in zip(mean.paths, constants, strict=True))
            least = [times(objectives[p], timed[p][0]) if p in fixed else self._floor(stage, objectives[p]) for p, stage in enumerate(path)]
            news = False
            for p, stage in enumerate(path):
                if p in fixed or objectives[p].passes == 0.0:
                    continue
                most = self._enough(limit) - constant - sum(least) + least[p]  # from there on it does not matter what it is
                if most <= least[p]:
                    break
                self.spent += 1
                most *= 1 + 2 * ROUNDING
                solved = self.stages.solve(*stage, most, objectives[p])
                least[p] = self.stages.known(*stage, most, objectives[p]) if solved is None else solved.seconds
                if solved is not None and all(numbers(solved.cost) != way for way in timed[p]):
                    columns[p].append(solved.cost)
                    news = True
            cut = Cut(constant, objectives, tuple(least))
            if not fixed:
                self.cuts.append(cut)
            total = cut.constant + sum(least)
            if best is None or total > best.seconds:
                best = _Bound(total, cut, mean.ways)
            if news:
                self._look([column[-1] for column in columns])
            if not news or best.seconds >= self._enough(limit) or best.seconds >= mean.seconds * (1 - ROUNDING) or self.spent >= self.most:
                break
        self.paths = [row for row, share in zip(rows, mean.paths, strict=True) if share == 0.0] + [
            row for row, share in zip(rows, mean.paths, strict=True) if share > 0.0
        ]
        assert best is not None
        return best._replace(ways=mean.ways)

    def _together(self, columns: Sequence[Sequence[LayerwiseStage]], shares: Sequence[Sequence[float]]) -> None:
        """Plans of the ways that a mean consists of."""
        both = [list(zip(column, row, strict=True)) for column, row in zip(columns, shares, strict=True)]
        parts = [[cost for cost, share in pairs if share > SHARE] for pairs in both]
        if prod(map(len, parts)) <= MOST_TOGETHER:
            for costs in product(*parts):
                self._look(costs)
        else:
            self._look([max(pairs, key=lambda pair: pair[1])[0] for pairs in both])


def _middle(ways: Sequence[Numbers], shares: Sequence[float]) -> Numbers:
    """
    >>> _middle([Numbers(1, 2, 0, 0), Numbers(3, 2, 4, 0)], [0.5, 0.5])
    Numbers(forward=2.0, backward=2.0, exposed=2.0, optimizer=0.0)
    """
    whole = sum(shares)
    return Numbers(*(sum(share * way[i] for way, share in zip(ways, shares, strict=True)) / whole for i in range(4)))


def _objective(passed: Sequence[Objective], shares: Sequence[float]) -> Objective:
    """What counts in a mean of paths."""
    return Objective(*(sum(share * one[i] for one, share in zip(passed, shares, strict=True)) for i in range(4)))
