"""The twelve errors that the engines make without a word (engines README, "Silently wrong"): what a plan, its files and its rules do
against each. tests/workers/test_silent_errors_of_workers.py has what the workers do."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hand_plans import GPT, LLAMA, candidate, make_plan, training_for
from msgspec.structs import replace
from test_deepspeed import PLANS as HUGGING_FACE
from test_rules import refusals, workload
from test_translate import DEEPSPEED as OVER_MEGATRON
from test_translate import file_of

from orchestrator.engines import ENGINES, passthrough
from orchestrator.engines.megatron_args import megatron_flags
from orchestrator.errors import InputError
from orchestrator.model.families import describe
from orchestrator.plan import Plan
from orchestrator.strategy.legality import broken_rule
from orchestrator.strategy.pins import Pins
from orchestrator.strategy.tree import Leaf, Outcome, Tree
from orchestrator.strategy.workload import Workload

WITH_DS_CONFIG = OVER_MEGATRON | HUGGING_FACE
ON_DEEPSPEED = ("megatron_deepspeed", "deepspeed")


def grow(engine: str, given: Workload, pins: Pins | None = None) -> tuple[list[Leaf], list[Outcome]]:
    cuts: list[Outcome] = []
    return list(Tree(ENGINES[engine].capabilities(given.cluster.software), given, pins or Pins()).leaves(cuts.append)), cuts


def refused(plan: Plan, group: str, name: str, text: str) -> str:
    """What the plan's engine says to a user's value."""
    try:
        key, value = passthrough.read(group, name, text)
        ENGINES[plan.engine].translate(replace(plan, extra={group: {key: value}}))
    except InputError as error:
        return str(error)
    return "taken"


def config_of(plan: Plan) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file_of(plan, "ds_config.json"))
    return found


def test_1_interleaved_stages_never_batch_their_sends() -> None:
    """With two stages batched sends mix up the chunks. Megatron-LM's programs overlap unless they are told not to."""
    for pp in (2, 4):
        plan = make_plan(pp=pp, vpp=2)
        fields = json.loads(file_of(plan, "engine.json"))["transformer_config"]
        assert (fields["overlap_p2p_comm"], fields["batch_p2p_comm"]) == (True, False)
        assert "--no-overlap-p2p-communication" not in {flag for flag, *_ in megatron_flags(plan)}
        assert "contradicts the plan's vpp" in refused(plan, "megatron", "overlap_p2p_comm", "false")
        assert "contradicts the plan's vpp" in refused(plan, "megatron", "no-overlap-p2p-communication", "true")
        assert "contradicts the plan's vpp" in refused(plan, "megatron", "batch_p2p_comm", "true")


def test_3_a_second_copy_of_the_weights_is_planned_without_tensor_parallelism_only() -> None:
    given = replace(workload(LLAMA, world=32), model=describe(LLAMA, 64))
    leaves, cuts = grow("deepspeed", given)
    doubled = [leaf.candidate for leaf in leaves if leaf.candidate.strategy.zero_shard_size is not None]
    assert doubled
    assert {(c.strategy.zero_stage, c.strategy.zero_shard_size, c.mesh.tp, c.mesh.cp) for c in doubled} == {(3, 8, 1, 1)}
    wrong = [cut for cut in cuts if cut.rule == "hpz" and cut.candidate.mesh.tp > 1]
    assert wrong
    assert all("silently wrong with tensor parallelism" in (cut.reason or "") for cut in wrong)
    for engine in ("megatron", "megatron_deepspeed"):
        assert not [leaf for leaf in grow(engine, given)[0] if leaf.candidate.strategy.zero_shard_size is not None]
    for engine in ON_DEEPSPEED:
        assert {"hpz", "zero_shard_size"} & {*refusals(engine, given, tp=2, dp=16, zero_stage=3, zero_shard_size=8)}
        message = refused(make_plan(engine, LLAMA, tp=2, zero_stage=3), "ds", "zero_optimization.zero_hpz_partition_size", "4")
        assert "contradicts the plan's zero_shard_size" in message


def test_4_a_pipeline_under_deepspeed_has_zero_0_only_where_the_worker_clips() -> None:
    """Each stage would clip by its own norm: in 16 bits, and under megatron-core's schedule, ZeRO-0 is refused. In fp32 our worker clips
    (test_silent_errors_of_workers.py)."""
    for precision, changes in (("fp32", {}), ("bf16", {"grad_accum_dtype": "bf16"}), ("fp16", {"grad_accum_dtype": "fp16"})):
        gpu = "cpu" if precision == "fp32" else "A100-SXM-80GB"
        given = replace(workload(gpu=gpu, precision=precision, clip=1.0, **changes), model=describe(GPT, 64))
        candidates = [leaf.candidate for leaf in grow("megatron_deepspeed", given)[0]]
        assert any(c.mesh.pp > 1 for c in candidates)
        bare = {c.schedule for c in candidates if c.mesh.pp > 1 and c.strategy.zero_stage == 0}
        assert bare <= ({"deepspeed_1f1b"} if precision == "fp32" else set())
        capabilities = ENGINES["megatron_deepspeed"].capabilities(given.cluster.software)
        for schedule in {*capabilities.schedules} - ({"deepspeed_1f1b"} if precision == "fp32" else set()):
            chosen = replace(candidate("megatron_deepspeed", pp=2, dp=4, num_microbatches=16), schedule=schedule)
            assert broken_rule(capabilities, chosen, given) is not None


@pytest.mark.parametrize("name", WITH_DS_CONFIG)
def test_5_tensor_parallelism_is_never_given_a_train_batch_size(name: str) -> None:
    """AutoTP checks it against the whole world."""
    plan = WITH_DS_CONFIG[name]
    for file in ENGINES[plan.engine].translate(plan).files:
        if file.path.startswith("ds_config"):
            assert ("train_batch_size" in json.loads(file.content)) == (plan.tp == 1), file.path
    assert ("train_batch_size" in json.loads(file_of(plan, "engine.json"))["ds_config"]) == (plan.tp == 1)


def test_6_context_parallelism_is_planned_where_zero_knows_its_group_only() -> None:
    """megatron-core's groups under DeepSpeed have no group over sequence and data; Ulysses' own have."""
    given = replace(workload(LLAMA), model=describe(LLAMA, 64))
    leaves, _ = grow("megatron_deepspeed", given)
    assert {leaf.candidate.mesh.cp for leaf in leaves} == {1}
    assert "axis_cp" in refusals("megatron_deepspeed", given, cp=2, dp=4)
    assert {leaf.candidate.mesh.cp for leaf in grow("deepspeed", given)[0]} == {1, 2, 4, 8}


@pytest.mark.parametrize("name", ["use_torch_fsdp2", "use_megatron_fsdp"])
@pytest.mark.parametrize("tp", [1, 2])
def test_7_fsdp_with_its_default_mesh_is_refused(name: str, tp: int) -> None:
    """It would shard over the tensor-parallel ranks too."""
    assert "contradicts the plan's" in refused(make_plan(tp=tp), "megatron", name, "true")


@pytest.mark.parametrize("name", WITH_DS_CONFIG)
def test_8_sixteen_bit_gradients_are_summed_in_the_type_that_the_plan_says(name: str) -> None:
    plan = WITH_DS_CONFIG[name]
    if plan.training.precision != "fp32" and plan.zero_stage >= 1:
        assert config_of(plan)["data_types"]["grad_accum_dtype"] == plan.training.grad_accum_dtype == "fp32"
    other = "bf16" if plan.training.grad_accum_dtype == "fp32" else "fp32"
    assert "contradicts the plan's training.grad_accum_dtype" in refused(plan, "ds", "data_types.grad_accum_dtype", other)


@pytest.mark.parametrize("engine", ON_DEEPSPEED)
def test_8_stage_0_which_can_not_sum_in_fp32_is_not_planned_for_it(engine: str) -> None:
    assert "gad_mix" in refusals(engine, workload(precision="bf16", grad_accum_dtype="fp32"), zero_stage=0)


@pytest.mark.parametrize("engine", ["megatron", "megatron_deepspeed"])
def test_9_an_mlp_with_biases_is_never_recomputed_alone(engine: str) -> None:
    """megatron-core would loop for ever in backward."""
    given = replace(workload(GPT), model=describe(GPT, 64))
    assert GPT.add_bias_linear
    modes = {mode for leaf in grow(engine, given)[0] for mode in leaf.recompute}
    assert {"none", "full"} <= modes
    assert not [mode for mode in modes if "mlp" in mode]
    plan = make_plan(engine, recompute=[("selective", 8)])
    assert json.loads(file_of(plan, "engine.json"))["per_stage"][0]["recompute_modules"] == ["core_attn"]
    assert "contradicts the plan's stages.recompute" in refused(plan, "megatron", "recompute_modules", "mlp")


@pytest.mark.parametrize("name", WITH_DS_CONFIG)
def test_10_only_the_file_for_the_trainer_says_auto(name: str) -> None:
    plan = WITH_DS_CONFIG[name]
    assert '"auto"' not in file_of(plan, "ds_config.json") + file_of(plan, "engine.json")
    for path, text in (("zero_optimization.reduce_bucket_size", "auto"), ("activation_checkpointing.number_checkpoints", "auto")):
        assert f"ds.{path}=auto: is " in refused(plan, "ds", path, text)
    by_hand = replace(plan, extra={"ds": {"data_types": {"grad_accum_dtype": "auto"}, "checkpoint.tag_validation": ["auto"]}})
    with pytest.raises(InputError):
        ENGINES[plan.engine].translate(by_hand)


@pytest.mark.parametrize("name", WITH_DS_CONFIG)
def test_12_the_bound_of_clipping_is_always_written(name: str) -> None:
    plan = WITH_DS_CONFIG[name]
    for config in (config_of(plan), json.loads(file_of(plan, "engine.json"))["ds_config"]):
        assert config["gradient_clipping"] == plan.training.clip
    assert "contradicts the plan's training.clip" in refused(plan, "ds", "gradient_clipping", "7")


@pytest.mark.parametrize("engine", ON_DEEPSPEED)
def test_12_no_clipping_is_written_as_well(engine: str) -> None:
    assert config_of(make_plan(engine, training=training_for(GPT, clip=0.0)))["gradient_clipping"] == 0.0
