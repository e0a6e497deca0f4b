"""The best plan of an outer choice as a mixed-integer linear program, for instances that are too large to enumerate.

It shares nothing with search/ and nothing with the cost model's simulation of the schedule, only the prices of stages (`CostModel.stage`):

* A binary variable says that stage p holds the layers [start, end) with such a recompute; the stages' borders are a flow from 0 to all
  layers. What doesn't fit in memory is no variable.
* The schedule is the longest path through its passes: every pass of every micro-batch has an end, at least its stage's seconds after the
  end of whatever it waits for (the pass before it on its stage, the neighbour's pass and a transfer; without chunks a transfer is an event
  of its own, which both stages have in their order). Stage times are linear in the binary variables and the largest end is minimised, so
  that the program has the schedule's time and not a bound of it.

HiGHS solves it (scipy.optimize.milp).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix

from orchestrator.cost.price import CostModel, StageCost
from orchestrator.model.spec import ModelSpec
from orchestrator.strategy.capabilities import Capabilities
from orchestrator.strategy.layout import LayerSpan, Stage
from orchestrator.strategy.legality import rules_of
from orchestrator.strategy.megatron_layout import even_work, of_another_kind, shapes, splits_vary
from orchestrator.strategy.spec import RECOMPUTE_ORDER, Candidate, Mesh, Recompute, Strategy
from orchestrator.strategy.tree import vpp_degrees
from orchestrator.strategy.workload import Workload

SCALE = 1000.0
"""The program's unit of time is a thousandth of the time that it is to be compared with: HiGHS's tolerances (1e-6) are absolute."""

Pass = tuple[str, int, int]
"""("forward" or "backward", virtual stage, micro-batch), or ("transfer", border, how many there were over it before)."""


def flat_order(pp: int, m: int, stage: int) -> list[Pass]:
    """Everything that a stage does under 1F1B, its calls of the communicator among it, one after the other."""
    line: list[Pass] = []
    calls = [0] * pp

    def call(border: int) -> None:
        if 0 <= border < pp - 1:
            line.append(("transfer", border, calls[border]))
            calls[border] += 1

    warm_up = min(m, pp - 1 - stage)
    for j in range(warm_up):
        call(stage - 1)
        line.append(("forward", stage, j))
        call(stage)
    if warm_up < m:
        call(stage - 1)
    for j in range(warm_up, m):
        line.append(("forward", stage, j))
        call(stage)
        line.append(("backward", stage, j - warm_up))
        call(stage - 1)
    for j in range(m - warm_up, m):
        call(stage)
        line.append(("backward", stage, j))
        call(stage - 1)
    return line


def orders(pp: int, m: int, vpp: int) -> list[list[Pass]]:
    """Every stage's passes in the order in which Megatron runs them: 1F1B (Narayanan et al., SC21, figure 4), and for vpp > 1 the
    interleaved schedule, which goes through chunks in groups of pp micro-batches."""
    if vpp == 1:
        return [flat_order(pp, m, stage) for stage in range(pp)]
    total = m * vpp
    found = []
    for stage in range(pp):

        def virtual(k: int, *, backward: bool, stage: int = stage) -> tuple[int, int]:
            chunk, group = k % (pp * vpp) // pp, k // (pp * vpp)
            return (vpp - 1 - chunk if backward else chunk) * pp + stage, group * pp + k % pp

        forward: list[Pass] = [("forward", *virtual(k, backward=False)) for k in range(total)]
        backward: list[Pass] = [("backward", *virtual(k, backward=True)) for k in range(total)]
        warm_up = min(total, 2 * (pp - 1 - stage) + (vpp - 1) * pp)
        line = forward[:warm_up]
        for a, b in zip(forward[warm_up:], backward, strict=False):
            line += [a, b]
        found.append(line + backward[total - warm_up :])
    return found


class Column(NamedTuple):
    """A way for a stage: its layers [start, end), with chunks of the layers of another kind that come first, all of which are in first
    chunks; and how many it has in all."""

    stage: int
    start: int
    end: int
    layers: int
    recompute: tuple[Recompute, int]
    cost: StageCost


def chunks_of(layers: int, vpp: int, *, first: bool) -> list[int]:
    """The layers of each chunk of a stage: equal but for one, the larger ones early, in the first stage late."""
    sizes = [layers // vpp + (index < layers % vpp) for index in range(vpp)]
    return sizes[::-1] if first else sizes


def stage_of(model: ModelSpec, pp: int, p: int, chunks: Sequence[tuple[int, int]], recompute: tuple[Recompute, int]) -> Stage:
    """What the plan has in stage p; each chunk is (first layer, layers)."""
    kinds = [run.layer.kind for run in model.runs[1:-1] for _ in range(run.count)]
    kinds += kinds[-1:] * len(kinds)  # behind those of another kind a chunk's place is no matter
    mode, many = recompute
    spans = [LayerSpan(kind=model.runs[0].layer.kind, first=0, count=1)] if p == 0 else []
    for chunk, (start, size) in enumerate(chunks):
        inside = kinds[start : start + size]
        left = many
        for kind in dict.fromkeys(inside):
            again = min(left, inside.count(kind))
            left -= again
            parts: list[tuple[int, Recompute]] = [(again, mode), (inside.count(kind) - again, "none")]
            spans += [LayerSpan(kind=kind, first=0, count=count, recompute=how, chunk=chunk) for count, how in parts if count]
    if p == pp - 1:
        spans.append(LayerSpan(kind=model.runs[-1].layer.kind, first=0, count=1, chunk=len(chunks) - 1))
    return Stage(layers=tuple(spans))


def outer_choices(capabilities: Capabilities, given: Workload) -> Iterator[tuple[Candidate, list[Recompute]]]:
    """The product of all choices that break none of the engine's rules, with the recompute modes that they may use."""
    world, batch = given.cluster.num_gpus, given.training.global_batch_size
    layers = sum(run.count for run in given.model.runs) - 2
    sizes = range(1, max(world, batch) + 1)
    for pp, tp, dp, mbs in product(sizes, sizes, sizes, sizes):
        if pp * tp * dp != world or batch % (dp * mbs) or pp > layers + 2:
            continue
        if not capabilities.uneven_stages and layers % pp:
            continue
        zeros = capabilities.zero_stages if pp == 1 else capabilities.zero_stages_with_pipeline
        interleaved = "interleaved" in capabilities.schedules
        for zero, sp, vpp in product(zeros, (False, True), vpp_degrees(layers, pp, uneven=capabilities.uneven_stages)):
            if (sp and tp == 1) or (vpp > 1 and not interleaved):
                continue
            candidate = Candidate(
                engine=capabilities.engine,
                strategy=Strategy(
                    mesh=Mesh(tp=tp, dp=dp, pp=pp),
                    zero_stage=zero,
                    sequence_parallel=sp,
                    grad_reduce_dtype=given.training.grad_reduce_dtype,
                ),
                micro_batch_size=mbs,
                num_microbatches=batch // dp // mbs,
                vpp=vpp,
                schedule="interleaved" if vpp > 1 else "1f1b",
            )
            modes = [
                mode
                for mode in RECOMPUTE_ORDER
                if all(rule.check(_with(candidate, mode), given) is None for rule in rules_of(capabilities, given))
            ]
            if modes:
                yield _with(candidate, modes[-1]), modes


def _with(candidate: Candidate, mode: Recompute) -> Candidate:
    return replace(candidate, strategy=replace(candidate.strategy, recompute=mode))


class Answer(NamedTuple):
    """Seconds: the best that was found (infinite: nothing), and what HiGHS has proven that nothing undercuts."""

    best: float
    bound: float


class Program:
    """One outer choice's program."""

    def __init__(
        self, costs: CostModel, model: ModelSpec, capabilities: Capabilities, candidate: Candidate, modes: list[Recompute], usable: float
    ) -> None:
        self.costs, self.model, self.candidate, self.usable = costs, model, candidate, usable
        self.pp, self.vpp, self.m = candidate.mesh.pp, candidate.vpp, candidate.num_microbatches
        self.layers = sum(run.count for run in model.runs) - 2
        several = len(model.runs) > 3
        self.flow = several and self.vpp == 1
        """Whether it matters where a stage starts: several kinds of layers."""
        vary = several and self.vpp > 1 and splits_vary(model, self.pp, self.vpp)
        self.others = of_another_kind(model) if vary else 0
        """Layers of another kind that come first, of which a stage has what its first chunk has: with chunks alone."""
        self.even = not capabilities.uneven_stages or (several and self.vpp > 1 and not vary)
        self.by_work = capabilities.uneven_stages and self.even
        self.head = 0.0
        if vary and self.pp > 1:
            longest = max(costs.layer(candidate, run.layer.kind, "none").seconds for run in model.runs[1:-1])
            self.head = costs.layer(candidate, model.runs[-1].layer.kind, "none").seconds / longest
        self.once = costs.once_seconds(candidate)
        self.hops = costs.hop_seconds(candidate) if self.pp > 1 else ()
        self.columns = [column for p in range(self.pp) for column in self._columns(p, modes)]

    def _columns(self, p: int, modes: list[Recompute]) -> Iterator[Column]:
        for chunks in self._splits(p):
            for mode in modes:
                whole = mode != "full" or len(modes) == 1
                most = max(size for _, size in chunks)
                counts = [0] if mode == "none" else [self.layers] if whole else range(1, most + 1)
                for many in counts:
                    cost = self.costs.stage(self.candidate, stage_of(self.model, self.pp, p, chunks, (mode, many)), p)
                    if cost.peak_bytes <= self.usable:
                        (start, first), whole = chunks[0], sum(size for _, size in chunks)
                        end = min(start + first, self.others) if self.others else start + whole
                        yield Column(p, start, end, whole, (mode, many), cost)

    def _splits(self, p: int) -> Iterator[list[tuple[int, int]]]:
        """The chunks that stage p may have, each (first layer, layers): no stage but the first and the last is empty."""
        pp, vpp, layers = self.pp, self.vpp, self.layers
        if self.even or pp == 1:
            sizes = [layers // (pp * vpp) + (index < layers % (pp * vpp)) for index in range(pp * vpp)]
            sizes = [*even_work(self.model, pp * vpp)] if self.by_work else sizes
            yield [(sum(sizes[:index]), sizes[index]) for index in range(p, pp * vpp, pp)]
            return
        if self.others:
            for start in range(self.others + 1) if p else [0]:
                for count in range(p not in (0, pp - 1), layers + 1):
                    for first, *more in shapes(count, vpp, p, pp, self.head):
                        yield [(start, first), *((self.others, size) for size in more)]
            return
        for start in range(layers + 1) if self.flow and p else [0]:
            for count in range(p not in (0, pp - 1), layers - start + 1):
                if not self.flow:
                    yield [(0, size) for size in chunks_of(count, vpp, first=p == 0)]
                elif p < pp - 1 or start + count == layers:
                    yield [(start, count)]

    def solve(self, against: float, *, only_faster: bool = False, time_limit: float = 60.0) -> Answer:
        """`against`: seconds to scale by. `only_faster`: whether plans that don't undercut them by a millionth are left out."""
        if {column.stage for column in self.columns} != set(range(self.pp)):
            return Answer(float("inf"), float("inf"))
        n = len(self.columns)
        unit = against / SCALE
        lines = orders(self.pp, self.m, self.vpp)
        every = dict.fromkeys(one for line in lines for one in line) if self.pp > 1 else {}
        passes = {one: n + index for index, one in enumerate(every)}
        end, update = n + len(passes), n + len(passes) + 1
        rows: list[dict[int, float]] = []
        low: list[float] = []
        high: list[float] = []

        def row(entries: dict[int, float], at_least: float, at_most: float = np.inf) -> None:
            rows.append(entries)
            low.append(at_least)
            high.append(at_most)

        by_stage: list[list[int]] = [[] for _ in range(self.pp)]
        for index, column in enumerate(self.columns):
            by_stage[column.stage].append(index)
        for indices in by_stage:
            row(dict.fromkeys(indices, 1.0), 1.0, 1.0)
        if self.flow or self.others:
            for p in range(1, self.pp):
                for border in range((self.others or self.layers) + 1):
                    here = {i: 1.0 for i in by_stage[p - 1] if self.columns[i].end == border}
                    here |= {i: -1.0 for i in by_stage[p] if self.columns[i].start == border}
                    if here:
                        row(here, 0.0, 0.0)
        if self.others:
            row({i: 1.0 for i in by_stage[-1] if self.columns[i].end == self.others}, 1.0, 1.0)
        if not self.flow:
            row({i: float(c.layers) for i, c in enumerate(self.columns)}, self.layers, self.layers)

        def seconds(one: Pass) -> dict[int, float]:
            """Minus a pass's seconds, by column."""
            what, virtual, _ = one
            if what == "transfer":
                return {}
            chunk, stage = divmod(virtual, self.pp)
            return {
                i: -(self.columns[i].cost.forward_s if what == "forward" else self.columns[i].cost.backward_s)[chunk] / unit
                for i in by_stage[stage]
            }

        for stage, line in enumerate(lines if self.pp > 1 else []):
            before: Pass | None = None
            for one in line:
                what, virtual, j = one
                takes = self.hops[virtual] / unit if what == "transfer" else 0.0
                needs: list[tuple[int | None, float]] = [(None if before is None else passes[before], takes)]
                if self.vpp > 1 and what == "forward" and virtual:
                    needs.append((passes["forward", virtual - 1, j], self.hops[virtual - 1] / unit))
                if self.vpp > 1 and what == "backward" and virtual < self.pp * self.vpp - 1:
                    needs.append((passes["backward", virtual + 1, j], self.hops[virtual] / unit))
                for need, wait in needs:
                    row({passes[one]: 1.0, **({need: -1.0} if need is not None else {}), **seconds(one)}, wait)
                before = one
            exposed = {i: -self.columns[i].cost.exposed_s / unit for i in by_stage[stage]}
            row({end: 1.0, passes[line[-1]]: -1.0, **exposed}, 0.0)
        if self.pp == 1:
            row({end: 1.0, **{i: -self._alone(c.cost) / unit for i, c in enumerate(self.columns)}}, 0.0)
        for indices in by_stage:
            row({update: 1.0, **{i: -self.columns[i].cost.optimizer_s / unit for i in indices}}, 0.0)
        if only_faster:
            row({end: 1.0, update: 1.0}, -np.inf, SCALE * (1 - 1e-6) - self.once / unit)
        found = self._highs(rows, low, high, n, update + 1, {end: 1.0, update: 1.0}, time_limit)
        if found.status == 2:
            return Answer(float("inf"), float("inf"))
        best = float("inf") if found.x is None else found.fun * unit + self.once
        bound = -np.inf if found.mip_dual_bound is None else found.mip_dual_bound * unit + self.once
        return Answer(best, bound)

    def _alone(self, cost: StageCost) -> float:
        return self.m * (sum(cost.forward_s) + sum(cost.backward_s)) + cost.exposed_s

    @staticmethod
    def _highs(
        rows: list[dict[int, float]], low: list[float], high: list[float], binary: int, variables: int, goal: dict[int, float], limit: float
    ) -> Any:
        index = [(r, c, value) for r, entries in enumerate(rows) for c, value in entries.items()]
        r, c, values = zip(*index, strict=True)
        matrix = csr_matrix((values, (r, c)), shape=(len(rows), variables))
        cost = np.zeros(variables)
        for at, value in goal.items():
            cost[at] = value
        integrality = np.zeros(variables)
        integrality[:binary] = 1
        upper = np.full(variables, np.inf)
        upper[:binary] = 1.0
        return milp(
            cost,
            integrality=integrality,
            bounds=Bounds(np.zeros(variables), upper),
            constraints=LinearConstraint(matrix, np.array(low), np.array(high)),
            options={"mip_rel_gap": 1e-9, "time_limit": limit},
        )
