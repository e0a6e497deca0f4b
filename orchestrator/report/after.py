"""What a run says when it is over: predicted against measured by cause, a slow rank, a slow link, and the constants that would have
predicted it.

Reads the rows of timers.jsonl (workers/step_timers.py): two steps of every rank, divided into its own computing, transfers and waiting.
Pure: numbers and words; printing is the commands'.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import mean, median
from typing import Any, Final

import msgspec
from rich.console import RenderableType

from orchestrator.cost.calibration import Calibration, CalibrationFile, Constant, datasheet, digest, most, unit
from orchestrator.cost.price import CostModel
from orchestrator.hardware.collectives import COLLECTIVES
from orchestrator.plan import Plan
from orchestrator.report.measured import TOLD_APART
from orchestrator.report.text import _table
from orchestrator.units import format_seconds
from orchestrator.values import Value

FILE: Final = "timers.jsonl"
COMPUTE: Final = ("gemm", "attention", "memory_bound", "recompute", "overhead", "offload", "overlap")
"""Causes of a prediction that are a rank's own computing."""
WITHOUT_TRAFFIC: Final = ("gemm", "attention", "memory_bound", "recompute", "overhead", "offload")
"""Causes of a layer's seconds that a rank has alone."""
AXES: Final = ("tp", "cp", "ep", "pp", "dp")
NAMES: Final = {
    "compute": "compute",
    **{axis: f"{axis} traffic" for axis in AXES},
    "other": "other traffic",
    "waiting": "bubble, waiting",
    "optimizer": "optimizer",
    "data": "data",
}
SLOW: Final = 1.5
"""Times what its like takes, in both steps: a rank or a link that is named. GPUs of a cluster differ by 5 to 10%."""
SLOW_ON_SHARED_CORES: Final = 2.5
"""Times that a rank which shares its cores takes what its like takes, in both steps, to be named: it runs when the others let it."""
WORTH: Final = 0.05
"""Share of the step that a slow rank or link must cost to be named."""


AS_PREDICTED: Final = 0.05
"""A step that is no further off needs no other constants."""
LEAST_STEPS: Final = 10
"""Steps after warm-up of a run that suggests constants: on shared cores neighbouring steps differ by half."""
SAID: Final = ("gemm_efficiency", "memory_efficiency", "op_overhead_s", "inner_efficiency", "optimizer_efficiency")
"""The suggested constants that are named; the file has all."""


class Even(Value, frozen=True, kw_only=True):
    """Ranks that are evenly far apart."""

    first: int
    size: int
    stride: int


class Traffic(Value, frozen=True, kw_only=True):
    """Operations of a kind of one group, or from one rank to another, in a phase of a step: how many, bytes together, seconds that the
    transfers held this rank up, and seconds that it waited for the others."""

    step: int
    phase: str
    ranks: tuple[int, ...] | Even
    operation: str
    count: int
    bytes: int
    transfer_s: float
    waiting_s: float

    @property
    def members(self) -> tuple[int, ...]:
        """The group's global ranks."""
        ranks = self.ranks
        return tuple(range(ranks.first, ranks.first + ranks.size * ranks.stride, ranks.stride)) if isinstance(ranks, Even) else ranks


class RankTimes(Value, frozen=True, kw_only=True):
    """A row of timers.jsonl; `phases`: of each step, seconds by phase."""

    rank: int
    host: str
    steps: tuple[int, ...]
    microbatches: int
    peak_memory_bytes: int
    """Peak bytes of this rank, up to the end of these steps."""
    phases: tuple[dict[str, float], ...]
    traffic: tuple[Traffic, ...]

    def held(self, step: int, phase: str) -> float:
        """Seconds that other ranks, or the way to them, held this one up."""
        return sum(one.transfer_s + one.waiting_s for one in self.traffic if one.step == step and one.phase == phase)

    def own(self, step: int, phase: str) -> float:
        """Seconds of a phase that are the rank's own."""
        return max(0.0, self.phases[step].get(phase, 0.0) - self.held(step, phase))

    def step_s(self, step: int) -> float:
        """Seconds of the whole step on this rank."""
        return sum(self.phases[step].values())


class Standing(Value, frozen=True, kw_only=True):
    """A rank, or the link of a group, that takes `times` what its like takes, and `extra_s` more in each step."""

    axis: str
    """The axis of a link's traffic; "" where it is a rank that is slow."""
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    times: float
    extra_s: float

    def said(self) -> str:
        where = f"on {', '.join(self.hosts)}"
        if not self.axis:
            return (f"slow rank: rank {self.ranks[0]} {where} computes {self.times:.1f} times as long as its like, "
                    f"{format_seconds(self.extra_s)} more in each step; the others wait for it")  # fmt: skip
        names = f"{self.ranks[0]} and {self.ranks[1]}" if len(self.ranks) == 2 else ", ".join(map(str, self.ranks[:8]))
        more = ", ..." if len(self.ranks) > 8 else ""
        return (f"slow link: {self.axis} traffic between ranks {names}{more} {where} takes {self.times:.1f} times as long as others', "
                f"{format_seconds(self.extra_s)} more in each step")  # fmt: skip


def read(rows: Iterable[Mapping[str, Any]]) -> tuple[RankTimes, ...]:
    """The rows by rank. Raises ValueError for rows that are none."""
    return tuple(sorted((msgspec.convert(row, RankTimes) for row in rows), key=lambda row: row.rank))


def stage_of(plan: Plan, rank: int) -> int:
    """The pipeline stage of a rank."""
    return rank // plan.mesh.stride("pp") % plan.pp


def axis_of(plan: Plan, traffic: Traffic) -> str:
    """The axis of a plan that a group lies along, by the axes in which its ranks differ: tp, cp, ep, pp, dp; "other" where all of the
    job agrees on something."""
    mesh, members = plan.mesh, traffic.members
    varying = {axis for axis in ("tp", "cp", "pp", "dp") if len({rank // mesh.stride(axis) % mesh.degree(axis) for rank in members}) > 1}
    if varying == {"pp"}:
        return "pp"
    if "pp" in varying:
        return "other"
    if plan.ep > 1 and traffic.phase == "passes" and (traffic.operation == "all_to_all" or varying > {"tp"}):
        return "ep"
    if varying in ({"tp"}, {"cp"}):
        return varying.pop()
    return "dp" if varying <= {"cp", "dp"} and varying else "other"


def alone_seconds(plan: Plan, cost: CostModel, stage: int) -> float:
    """Predicted seconds of a micro-batch on a stage without traffic, forward and backward."""
    candidate, cost = plan.candidate, cost.of_stage(plan.candidate, stage)
    total = candidate.vpp * cost.calibration.microbatch_overhead_s
    for span in plan.stages[stage].layers:
        causes = cost.layer(candidate, span.kind, span.recompute).by_cause
        total += span.count * sum(seconds for cause, seconds in causes.items() if cause in WITHOUT_TRAFFIC)
    return total


def predicted_causes(plan: Plan, step_overhead_s: float) -> dict[str, float]:
    """Seconds of the predicted step by the causes that are measured. What is predicted once a step beside the update (the norm, the
    learning rate, logging) is with the optimizer, where it is measured."""
    by_cause = plan.prediction.by_cause
    found = {"compute": sum(seconds for cause, seconds in by_cause.items() if cause in COMPUTE) - step_overhead_s}
    found |= {axis: by_cause.get(axis, 0.0) for axis in AXES}
    bubble = by_cause.get("bubble", 0.0)  # what is left of the step: without a pipeline only rounding
    found |= {"other": 0.0, "waiting": bubble if bubble > 1e-9 * plan.prediction.step_time_s else 0.0}
    found |= {"optimizer": by_cause.get("optimizer", 0.0) + step_overhead_s, "data": 0.0}
    return found


def measured_causes(plan: Plan, rows: Sequence[RankTimes]) -> dict[str, float]:
    """Mean seconds over the steps that were timed and the ranks of the busiest stage; they sum to the mean step."""
    found = dict.fromkeys(NAMES, 0.0)
    stage = plan.prediction.busiest
    mine = [row for row in rows if stage_of(plan, row.rank) == stage]
    for row in mine:
        parts = len(mine) * len(row.phases)
        for step in range(len(row.phases)):
            found["compute"] += row.own(step, "passes") / parts
            found["optimizer"] += (row.own(step, "update") + row.own(step, "agree")) / parts
            found["data"] += row.own(step, "data") / parts
        for one in row.traffic:
            found[axis_of(plan, one)] += one.transfer_s / parts
            found["waiting"] += one.waiting_s / parts
    return found


def _bound(plan: Plan) -> float:
    return SLOW_ON_SHARED_CORES if plan.cluster.is_cpu else SLOW


def slow_ranks(plan: Plan, rows: Sequence[RankTimes]) -> list[Standing]:
    """Ranks whose own computing takes longer than that of their like in every step that was timed: of the other ranks of their stage, or,
    where there are none, of the other stages for the work that was predicted."""
    work = [stage.forward_s + stage.backward_s for stage in plan.prediction.by_stage]
    found = []
    for row in rows:
        stage = stage_of(plan, row.rank)
        others = [other for other in rows if other is not row and stage_of(plan, other.rank) == stage]
        others = others or [other for other in rows if other is not row]
        if not others:
            continue
        times, extra = [], []
        for step in range(len(row.phases)):
            usual = median(other.own(step, "passes") / work[stage_of(plan, other.rank)] for other in others) * work[stage]
            seconds = row.own(step, "passes")
            times.append(seconds / usual if usual else 1.0)
            extra.append((seconds - usual) / row.step_s(step))
        if min(times) >= _bound(plan) and min(extra) >= WORTH:
            more = mean(share * row.step_s(step) for step, share in enumerate(extra))
            found.append(Standing(axis="", ranks=(row.rank,), hosts=(row.host,), times=mean(times), extra_s=more))
    return found


def priced_seconds(cost: CostModel, traffic: Traffic) -> float | None:
    """Seconds that these operations take by the prices; None for an operation that has none."""
    operation = COLLECTIVES.get(traffic.operation)
    if operation is None or not traffic.count:
        return None
    members = traffic.members
    link = cost.link(len(members), max(1, abs(members[1] - members[0])))
    each = operation(traffic.bytes / traffic.count, len(members), link)
    return traffic.count * (each + cost.calibration.collective_overhead_s)


def slow_links(plan: Plan, cost: CostModel, rows: Sequence[RankTimes]) -> list[Standing]:
    """Groups whose transfers take longer, against their price, than those of the other groups of their axis in every step that was timed;
    where an axis has one group, than all other groups, and where there is one group alone, than its price (not on shared cores, where
    prices of traffic are not so sure)."""
    hosts = {row.rank: row.host for row in rows}
    steps = len(rows[0].phases)
    seconds: dict[tuple[str, tuple[int, ...]], list[list[float]]] = defaultdict(lambda: [[0.0, 0.0] for _ in range(steps)])
    for row in rows:
        for one in row.traffic:
            priced, axis, members = priced_seconds(cost, one), axis_of(plan, one), tuple(sorted(one.members))
            if priced is None or axis == "other" or row.rank != members[0]:  # a group's transfers are the same on all of its ranks
                continue
            seconds[axis, members][one.step][0] += one.transfer_s
            seconds[axis, members][one.step][1] += priced
    ratio: Callable[[list[float]], float] = lambda pair: pair[0] / pair[1]  # noqa: E731
    found = []
    for (axis, members), mine in seconds.items():
        others = [other for key, other in seconds.items() if key[0] == axis and key[1] != members]
        others = others or [other for key, other in seconds.items() if key[1] != members]
        if not others and plan.cluster.is_cpu:
            continue
        times, extra = [], []
        for step in range(steps):
            usual = median(ratio(other[step]) for other in others if other[step][1]) if others else 1.0
            times.append(ratio(mine[step]) / usual if usual else 1.0)
            extra.append(mine[step][0] * (1 - 1 / times[-1]) if times[-1] else 0.0)
        whole = mean(row.step_s(step) for row in rows for step in range(steps))
        if min(times) >= _bound(plan) and min(extra) >= WORTH * whole:
            where = tuple(dict.fromkeys(hosts.get(rank, "?") for rank in members))
            found.append(Standing(axis=axis, ranks=members, hosts=where, times=mean(times), extra_s=mean(extra)))
    return sorted(found, key=lambda one: -one.extra_s)


class After(Value, frozen=True, kw_only=True):
    """Where a run's steps went; `causes`: seconds by cause, (predicted, measured)."""

    steps: tuple[int, ...]
    ranks: int
    causes: dict[str, tuple[float, float]]
    slow_ranks: tuple[Standing, ...]
    slow_links: tuple[Standing, ...]
    constants: dict[str, tuple[float, float]]
    """What the prices had, and what they would have to be; empty where a rank or a link stands out, which is not to be learned."""

    def lines(self) -> list[str]:
        """What stands out, in lines of text."""
        predicted, measured = (sum(pair[index] for pair in self.causes.values()) for index in (0, 1))
        more = sorted(((name, found - said) for name, (said, found) in self.causes.items()), key=lambda item: -abs(item[1]))
        worth = [f"{NAMES[name]} {'+' if by > 0 else '-'}{format_seconds(abs(by))}" for name, by in more[:3] if abs(by) > WORTH * measured]
        why = f"; most by {', '.join(worth)}" if worth else ""
        steps = " and ".join(map(str, self.steps))
        where = f"step{'s' if len(self.steps) > 1 else ''} {steps}, timers of {self.ranks} rank{'s' if self.ranks > 1 else ''}"
        said = [f"predicted {format_seconds(predicted)}, measured {format_seconds(measured)} ({where}){why}"]
        standing = [one.said() for one in (*self.slow_ranks, *self.slow_links)]
        return [*said, *(standing or (["no rank and no link stands out"] if self.ranks > 1 else []))]

    def suggests(self) -> str:
        """How the suggested constants differ, in words; "" where the step is as predicted, or nothing is to be learned from it."""
        predicted, measured = (sum(pair[index] for pair in self.causes.values()) for index in (0, 1))
        if abs(measured / predicted - 1) < AS_PREDICTED:
            return ""
        pairs = {name: pair for name, pair in self.constants.items() if name in SAID}
        return ", ".join(f"{name} {now:.3g} in place of {before:.3g}" for name, (before, now) in pairs.items())

    def unusual(self, steps: Sequence[float]) -> str:
        """Why the timed steps may not be as the run's are, whose `steps` after warm-up took so many seconds; "": they are."""
        timed = sum(measured for _, measured in self.causes.values())
        if len(steps) < LEAST_STEPS:
            return f"{len(self.steps)} steps were timed of {len(steps)} after warm-up, and {LEAST_STEPS} are needed to know what is usual"
        usual = median(steps)
        if abs(timed / usual - 1) > TOLD_APART:
            return f"the {len(self.steps)} timed steps took {format_seconds(timed)}, the run's {format_seconds(usual)}"
        return ""


def after(plan: Plan, cost: CostModel, rows: Sequence[RankTimes]) -> After | None:
    """How the prediction of a plan held in these rows; None without rows of all its ranks, or for a plan without prediction."""
    if not rows or plan.predicted is None or {row.rank for row in rows} != set(range(plan.world_size)):
        return None
    predicted, measured = predicted_causes(plan, cost.calibration.step_overhead_s), measured_causes(plan, rows)
    ranks, links = slow_ranks(plan, rows), slow_links(plan, cost, rows)
    return After(
        steps=rows[0].steps,
        ranks=len(rows),
        causes={name: (predicted[name], measured[name]) for name in NAMES if predicted[name] or measured[name]},
        slow_ranks=tuple(ranks),
        slow_links=tuple(links),
        constants={} if ranks or links else suggested(plan, cost, rows, predicted, measured),
    )


def after_table(found: After) -> RenderableType:
    """A table of seconds by cause, predicted and measured."""
    table = _table(("step time", False), ("predicted", True), ("measured", True), ("difference", True))
    for name, (predicted, measured) in found.causes.items():
        more = measured - predicted
        table.add_row(NAMES[name], format_seconds(predicted) if predicted else "-", format_seconds(measured) if measured else "-",
                      f"{'+' if more > 0 else '-'}{format_seconds(abs(more))}")  # fmt: skip
    return table


# -------------------------------------------------------------------------------------------------------- calibration

COMPUTE_SHARES: Final = ("gemm_efficiency", "attention_efficiency", "attention_backward_efficiency", "memory_efficiency")
COMPUTE_SECONDS: Final = ("op_overhead_s", "microbatch_overhead_s", "layer_floor_s")
TRAFFIC_SHARES: Final = ("inner_efficiency", "outer_efficiency", "p2p_efficiency")
TRAFFIC_SECONDS: Final = ("collective_overhead_s", "latency_factor")


def suggested(
    plan: Plan, cost: CostModel, rows: Sequence[RankTimes], predicted: Mapping[str, float], measured: Mapping[str, float]
) -> dict[str, tuple[float, float]]:
    """Constants as they are and as this run asks for: those of computing all by one factor, measured over predicted of all ranks, those
    of traffic by another, the optimizer's by a third. One run can't tell more apart; `calibrate` fits each of them to several."""
    own = [row.own(step, "passes") for row in rows for step in range(len(row.phases))]
    alone = [alone_seconds(plan, cost, stage_of(plan, row.rank)) * plan.num_microbatches for row in rows for _ in row.phases]
    traffic = [sum(causes[axis] for axis in AXES) for causes in (predicted, measured)]
    update = [causes["optimizer"] - cost.calibration.step_overhead_s for causes in (predicted, measured)]
    asked: dict[str, float] = {}
    if sum(own):
        asked |= _scaled(cost, COMPUTE_SHARES, COMPUTE_SECONDS, sum(own) / sum(alone))
    if all(traffic):
        asked |= _scaled(cost, TRAFFIC_SHARES, TRAFFIC_SECONDS, traffic[1] / traffic[0])
    if min(update) > 0:
        asked |= _scaled(cost, ("optimizer_efficiency",), (), update[1] / update[0])
    return {name: (getattr(cost.calibration, name), value) for name, value in asked.items() if value != getattr(cost.calibration, name)}


def _scaled(cost: CostModel, shares: Sequence[str], seconds: Sequence[str], times: float) -> dict[str, float]:
    """Constants with which what they price takes `times` as long, as far as they may move."""
    constants, gpu = cost.calibration, cost.cluster.gpu.name
    found = {name: getattr(constants, name) / times for name in shares} | {name: getattr(constants, name) * times for name in seconds}
    return {name: float(f"{min(value, most(name, gpu)):.6g}") for name, value in found.items()}


def calibration_file(plan: Plan, cost: CostModel, found: After) -> CalibrationFile:
    """The suggested constants as calibration=FILE takes them: the run's own prices with these in their place."""
    name = f"a run of {plan.model.name} on {plan.world_size} ranks, steps {', '.join(map(str, found.steps))}"
    return file_of(plan, cost, own_constants(cost) | {key: now for key, (_, now) in found.constants.items()}, name, runs=1)


def own_constants(cost: CostModel) -> dict[str, float]:
    """The constants that differ from the datasheet's."""
    base = datasheet(cost.cluster, cost.traits)
    pairs = {name: (getattr(cost.calibration, name), getattr(base, name)) for name in Calibration.__struct_fields__}
    return {name: now for name, (now, before) in pairs.items() if isinstance(now, float) and now != before}


def file_of(plan: Plan, cost: CostModel, constants: Mapping[str, float], origin: str, *, runs: int) -> CalibrationFile:
    """A calibration of these constants for the plan's engine and GPU, of so many runs."""
    return CalibrationFile(
        engine=plan.engine,
        gpu=plan.cluster.gpu.name,
        traits=digest(cost.traits),
        fitted_on=origin,
        constants={key: Constant(value=value, unit=unit(key), origin=origin) for key, value in constants.items()},
        fitted_runs=runs,
        fitted_median_error=0.0,
        held_out_runs=0,
        held_out_median_error=None,
        interval=None,
    )
