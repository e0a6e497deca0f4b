"""Which plan has which axis of the support table, how an axis is asked about, and what stands in the table's cells."""

from __future__ import annotations

from typing import Any

import support_table as table
from msgspec.structs import replace
from report_plans import CLUSTER, LLAMA, PLAN, TRAINING

from orchestrator.engines import ENGINES
from orchestrator.hardware.spec import Software
from orchestrator.model.families import describe
from orchestrator.plan import LayerSpan, Plan, Stage
from orchestrator.strategy.spec import PP_BEFORE_DP
from orchestrator.strategy.workload import Workload


def stages(*modes: str) -> tuple[Stage, ...]:
    """A stage of two layers each, recomputed so."""
    return tuple(Stage(layers=(LayerSpan(kind="decoder", first=0, count=2, recompute=mode),)) for mode in modes)  # type: ignore[arg-type]


BARE = replace(PLAN, tp=1, pp=1, dp=1, cp=1, ep=1, vpp=1, zero_stage=0, sequence_parallel=False, stages=stages("none"))
AXES = {axis.name: axis for axis in table.AXES}


def has(**fields: Any) -> set[str]:
    """Names of the axes that a plan with these fields has."""
    plan: Plan = replace(BARE, **fields)
    return {name for name, axis in AXES.items() if axis.used(plan)}


def test_a_plan_has_the_axes_of_its_choices_and_no_others() -> None:
    pipeline = "pp, megatron-core's 1F1B"
    uneven = (stages("none")[0], replace(stages("none")[0], layers=(LayerSpan(kind="decoder", first=2, count=3),)))
    two: dict[str, Any] = {"pp": 2, "stages": stages("none", "none")}
    for fields, names in (
        ({}, set()),
        ({"tp": 2}, {"tp"}),
        ({"sequence_parallel": True}, {"tp with sequence parallelism"}),
        (two, {pipeline}),
        (two | {"schedule": "deepspeed_1f1b"}, {"pp, DeepSpeed's PipelineModule"}),
        (two | {"vpp": 2, "schedule": "interleaved", "stages": (replace(stages("none")[0], layers=(
            LayerSpan(kind="decoder", first=0, count=1), LayerSpan(kind="decoder", first=2, count=1, chunk=1))),) * 2},
         {"pp, interleaved (vpp)"}),
        (two | {"stages": uneven}, {pipeline, "uneven stages"}),
        (two | {"rank_order": PP_BEFORE_DP}, {pipeline}),
        (two | {"rank_order": PP_BEFORE_DP, "dp": 2},
         {pipeline, "pp over ranks nearer than dp's (tp-cp-ep-pp-dp)", "dp, ZeRO-0"}),
        ({"rank_order": PP_BEFORE_DP, "dp": 2}, {"dp, ZeRO-0"}),
        (two | {"stages": stages("full", "none")}, {pipeline, "recompute full", "recompute that differs by stage"}),
        (two | {"stages": stages("selective", "selective")}, {pipeline, "recompute selective"}),
        ({"stages": stages("mlp")}, {"recompute of other modules"}),
        ({"cp": 2}, {"cp"}),
        ({"ep": 2}, {"ep"}),
        *(({"dp": 2, "zero_stage": stage}, {f"dp, ZeRO-{stage}"}) for stage in range(4)),
        ({"zero_stage": 3}, set()),
        ({"zero_stage": 1, "zero_shard_size": 2}, {"ZeRO-1 in instances"}),
        ({"zero_stage": 3, "zero_shard_size": 2}, {"ZeRO-3 with hpZ"}),
        ({"zero_stage": 2, "zero_shard_size": 2}, set()),
        ({"megatron_fsdp": True}, {"ZeRO-3 by Megatron-FSDP"}),
        ({"offload_optimizer": True}, {"optimizer offload"}),
        ({"tiled_mlp": 2}, {"MLPs in pieces of a sequence"}),
        ({"tiled_logits": 2}, {"logits in pieces of a sequence"}),
        ({"offload_activations": True}, {"activation checkpoints in host memory"}),
    ):  # fmt: skip
        assert has(**fields) == names, fields


def test_ranks_that_an_axis_leaves_are_data_parallel() -> None:
    for fields, dp in (({}, 8), ({"tp": 2}, 4), ({"tp": 2, "pp": 2}, 2), ({"tp": 2, "pp": 2, "cp": 2}, 1), ({"ep": 2}, 8)):
        found = table.candidate("megatron", 8, 16, fields)
        assert (found.mesh.dp, found.num_microbatches, found.micro_batch_size) == (dp, 16 // dp, 1)
        assert found.strategy.zero_stage == 1
        assert all(getattr(found.mesh, name) == degree for name, degree in fields.items())
    assert table.candidate("megatron", 8, 16, {"zero_stage": 3}).strategy.zero_stage == 3
    assert table.candidate("megatron", 8, 16, {"pp": 2, "vpp": 2, "schedule": "interleaved"}).vpp == 2


def workload(**fields: Any) -> Workload:
    training = replace(TRAINING, global_batch_size=64, **fields)
    return Workload(model=describe(LLAMA, 8192), training=training, cluster=replace(CLUSTER, num_gpus=8))


def test_an_axis_is_taken_where_one_workload_takes_it_and_else_the_first_reason_is_said() -> None:
    megatron, hf = (ENGINES[name].capabilities(Software()) for name in ("megatron", "deepspeed"))
    assert table.refusal(megatron, AXES["tp"], [workload()]) is None
    assert table.refusal(megatron, AXES["uneven stages"], [workload()]) is None
    assert table.refusal(hf, AXES["tp"], [workload(precision="fp8"), workload()]) is None, "the second"
    first = table.refusal(hf, AXES["tp"], [workload(precision="fp8"), workload(precision="fp8")])
    assert first is not None
    assert first[0] == "unsuited"
    for name in ("pp, megatron-core's 1F1B", "uneven stages", "ZeRO-1 in instances"):
        assert table.refusal(hf, AXES[name], [workload()]) is not None, name
    other = table.refusal(megatron, AXES["pp, DeepSpeed's PipelineModule"], [workload()])
    assert other == ("schedules", "megatron has the schedules 1f1b, interleaved")


def test_cells_say_by_what_a_family_is_known_to_train() -> None:
    megatron = ENGINES["megatron"].capabilities(Software())
    trained = {"a long name of a test": replace(BARE, tp=2), "short": replace(BARE, tp=2, model=LLAMA), "other engine": replace(
        BARE, cp=2, engine="deepspeed")}  # fmt: skip
    text = table.markdown([megatron], {"llama": [workload()], "gpt": [workload()]}, trained)
    rows = {line.split(" | ")[0].removeprefix("| "): [cell.strip(" |") for cell in line.split(" | ")[1:]] for line in text.splitlines()
            if line.startswith("| ")}  # fmt: skip
    assert text.splitlines()[:2] == ["| megatron | llama | gpt |", "|---|---|---|"]
    assert rows["tp"] == ["trains exactly (`short`)", f"{table.FILES} (trained with llama)"]
    assert rows["cp"] == [f"{table.FILES} (no training has it)"] * 2, "another engine's training is not this one's"
    assert rows["ep"] == ["refused because experts"] * 2
    assert "Why megatron refuses, for one case of each rule: " in text
    assert "*experts*: ep=2: a dense model has no experts" in text
    assert text.endswith(".\n")
