"""What each engine does with each parallel axis and model family, as Markdown: from the capabilities, their rules, and the plans that tests
have trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from orchestrator.plan import Plan
from orchestrator.strategy.capabilities import Capabilities
from orchestrator.strategy.layout import ENDS
from orchestrator.strategy.legality import derived_rules, unsuited
from orchestrator.strategy.spec import PP_BEFORE_DP, RECOMPUTE_ORDER, Candidate, Mesh, Strategy
from orchestrator.strategy.workload import Workload

HALF = 2
"""Ranks of an axis that is asked about."""
FILES = "checked up to its files"
"""Translation, the engine's own configuration code and classes at the planned world size (tests/engines); no training of its own."""


class Axis(NamedTuple):
    """A row of the table. `choices`: fields of mesh, strategy and candidate, one of which must be legal; `used`: whether a plan has it;
    `has`: whether an engine has what no candidate says."""

    name: str
    choices: tuple[dict[str, Any], ...]
    used: Callable[[Plan], bool]
    has: Callable[[Capabilities], bool] = lambda capabilities: True


def _modes(plan: Plan) -> list[tuple[str, ...]]:
    """The recompute mode of each layer, by stage."""
    return [tuple(span.recompute for span in stage.layers if span.kind not in ENDS for _ in range(span.count)) for stage in plan.stages]


def _recomputes(*modes: str) -> Callable[[Plan], bool]:
    return lambda plan: any(mode in modes for stage in _modes(plan) for mode in stage)


def _zero(stage: int) -> Callable[[Plan], bool]:
    return lambda plan: plan.dp > 1 and plan.zero_stage == stage


def _shards(stage: int) -> Callable[[Plan], bool]:
    return lambda plan: plan.zero_shard_size is not None and plan.zero_stage == stage


def _pp_before_dp(plan: Plan) -> bool:
    return plan.pp > 1 and plan.dp > 1 and plan.rank_order == PP_BEFORE_DP


def _sizes(plan: Plan) -> list[int]:
    return [sum(span.count for span in stage.chunk(chunk) if span.kind not in ENDS) for chunk in range(plan.vpp) for stage in plan.stages]


WHOLE = ("selective", "full")
MODULES = tuple(mode for mode in RECOMPUTE_ORDER if mode not in ("none", *WHOLE))
OF_EXPERTS: dict[str, Any] = {"tp": HALF, "etp": HALF, "sequence_parallel": True}
"""How megatron-core divides layers of experts as it divides others."""
AXES = (
    Axis("tp", ({"tp": HALF}, OF_EXPERTS), lambda plan: plan.tp > 1),
    Axis("tp with sequence parallelism", ({"tp": HALF, "sequence_parallel": True}, OF_EXPERTS), lambda plan: plan.sequence_parallel),
    Axis("pp, megatron-core's 1F1B", ({"pp": HALF},), lambda plan: plan.pp > 1 and plan.schedule == "1f1b"),
    Axis(
        "pp, interleaved (vpp)",
        ({"pp": HALF, "vpp": HALF, "schedule": "interleaved"},),
        lambda plan: plan.vpp > 1,
    ),
    Axis(
        "pp, DeepSpeed's PipelineModule",
        ({"pp": HALF, "schedule": "deepspeed_1f1b"},),
        lambda plan: plan.schedule == "deepspeed_1f1b",
    ),
    Axis("pp over ranks nearer than dp's (tp-cp-ep-pp-dp)", ({"pp": HALF, "order": PP_BEFORE_DP},), _pp_before_dp),
    Axis("uneven stages", ({"pp": HALF},), lambda plan: len(set(_sizes(plan))) > 1, lambda engine: engine.uneven_stages),
    Axis("cp", ({"cp": HALF},), lambda plan: plan.cp > 1),
    Axis("ep", ({"ep": HALF}, {"ep": HALF, "zero_stage": 1}), lambda plan: plan.ep > 1),
    *(Axis(f"dp, ZeRO-{stage}", ({"zero_stage": stage},), _zero(stage)) for stage in range(4)),
    Axis("ZeRO-1 in instances", ({"zero_stage": 1, "zero_shard_size": HALF},), _shards(1)),
    Axis("ZeRO-3 by Megatron-FSDP", ({"zero_stage": 3, "megatron_fsdp": True},), lambda plan: plan.megatron_fsdp),
    Axis("ZeRO-3 with hpZ", ({"zero_stage": 3, "zero_shard_size": HALF},), _shards(3)),
    Axis("optimizer offload", ({"zero_stage": 2, "offload_optimizer": True},), lambda plan: plan.offload_optimizer),
    Axis("MLPs in pieces of a sequence", ({"tiled_mlp": HALF},), lambda plan: plan.tiled_mlp > 1),
    Axis("logits in pieces of a sequence", ({"tiled_logits": HALF},), lambda plan: plan.tiled_logits > 1),
    Axis(
        "activation checkpoints in host memory",
        ({"zero_stage": 2, "recompute": "full", "offload_activations": True},),
        lambda plan: plan.offload_activations,
    ),
    Axis("recompute selective", ({"recompute": "selective"},), _recomputes("selective")),
    Axis("recompute full", ({"recompute": "full"},), _recomputes("full")),
    *((Axis("recompute of other modules", tuple({"recompute": mode} for mode in MODULES), _recomputes(*MODULES)),) if MODULES else ()),
    Axis(
        "recompute that differs by stage",
        ({"pp": HALF, "recompute": "full"},),
        lambda plan: len(set(_modes(plan))) > 1 and len({mode for stage in _modes(plan) for mode in stage}) > 1,
        lambda engine: engine.recompute_varies != "never",
    ),
)


def candidate(engine: str, world: int, batch: int, fields: Mapping[str, Any]) -> Candidate:
    """Names of mesh and strategy fields together; data parallelism takes the ranks that are left, ZeRO-1 where nothing else is said."""
    mine = dict(fields)
    mesh = {name: mine.pop(name) for name in ("tp", "pp", "cp", "ep", "etp", "order") if name in mine}
    rest = {name: mine.pop(name) for name in ("vpp", "schedule") if name in mine}
    left = world
    for name in ("tp", "pp", "cp"):
        left //= mesh.get(name, 1)
    strategy = Strategy(**{"mesh": Mesh(**mesh, dp=left), "zero_stage": 1, **mine})
    return Candidate(engine=engine, strategy=strategy, micro_batch_size=1, num_microbatches=batch // left, **rest)


def refusal(engine: Capabilities, axis: Axis, workloads: Sequence[Workload]) -> tuple[str, str] | None:
    """(rule, reason) why the engine does not take the axis; None: it does, with one of its choices in one of the workloads."""
    first: tuple[str, str] | None = None
    for workload in workloads:
        why = unsuited(engine, workload)
        if why is not None:
            first = first or ("unsuited", why)
            continue
        for fields in axis.choices:
            asked = candidate(engine.engine, workload.cluster.num_gpus, workload.training.global_batch_size, fields)
            rules = (*engine.rules, *derived_rules(engine, workload))
            broken = next(((rule.id, why) for rule in rules if (why := rule.check(asked, workload)) is not None), None)
            if "pp" in engine.axes and asked.schedule not in engine.schedules:
                broken = ("schedules", f"{engine.engine} has the schedules {', '.join(engine.schedules)}")
            if broken is None and not axis.has(engine):
                broken = ("capabilities", f"{engine.engine} has no {axis.name}")
            if broken is None:
                return None
            first = first or broken
    return first


def markdown(engines: Sequence[Capabilities], given: Mapping[str, Sequence[Workload]], trained: Mapping[str, Plan]) -> str:
    """A table for each engine, families across, and what its rules say. `given`: workloads of each family to judge in, best first;
    `trained`: plans that a test compares with one process, by the test's name."""
    parts = []
    for engine in engines:
        mine = {name: plan for name, plan in trained.items() if plan.engine == engine.engine}
        reasons: dict[str, str] = {}
        lines = [f"| {engine.engine} | {' | '.join(given)} |", "|---" * (len(given) + 1) + "|"]
        for axis in AXES:
            cells = []
            for family, workloads in given.items():
                tests = sorted((name for name, plan in mine.items() if plan.model.family == family and axis.used(plan)), key=len)
                refused = refusal(engine, axis, workloads)
                if tests:
                    cells.append(f"trains exactly (`{tests[0]}`)")
                elif refused is None:
                    others = sorted({plan.model.family for plan in mine.values() if axis.used(plan)})
                    cells.append(f"{FILES} ({'trained with ' + ', '.join(others) if others else 'no training has it'})")
                else:
                    rule, why = refused
                    reasons.setdefault(rule, why)
                    cells.append(f"refused because {rule}")
            lines.append(f"| {axis.name} | {' | '.join(cells)} |")
        said = "; ".join(f"*{rule}*: {why}" for rule, why in sorted(reasons.items()))
        parts.append("\n".join([*lines, "", f"Why {engine.engine} refuses, for one case of each rule: {said}."]))
    return "\n\n".join(parts) + "\n"
