"""A user's own values reach the engine, and are refused where they contradict the plan or no engine knows them."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hand_plans import GPT, LLAMA, make_plan, training_for
from msgspec.structs import replace

from orchestrator.engines import ENGINES, passthrough
from orchestrator.engines.megatron_args import megatron_flags
from orchestrator.engines.megatron_versions import RELEASES, Release
from orchestrator.errors import InputError
from orchestrator.hardware.spec import Software
from orchestrator.model.spec import Architecture
from orchestrator.plan import Plan, from_json, to_json

FLAGS = {"0.16.1": "megatron_flags.csv", "0.19.2": "megatron_flags_0.19.csv"}
"""What the parser of each release's tag takes (tests/megatron_lm/flags.py)."""


def with_values(plan: Plan, **groups: dict[str, Any]) -> Plan:
    """The plan with values as a command line gives them."""
    read = {group: dict(passthrough.read(group, name, text) for name, text in values.items()) for group, values in groups.items()}
    return replace(plan, extra=read)


def file_of(plan: Plan, path: str) -> str:
    return next(file.content for file in ENGINES[plan.engine].translate(plan).files if file.path == path)


def deepspeed_plan(**fields: Any) -> Plan:
    return make_plan("megatron_deepspeed", **fields)


# ---------------------------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize(
    ("group", "name", "text", "expected"),
    [
        ("megatron", "init_method_std", "0.01", ("init_method_std", 0.01)),
        ("megatron", "init-method-std", "1e-2", ("init_method_std", 0.01)),
        ("megatron", "no-bias-dropout-fusion", "true", ("bias_dropout_fusion", False)),
        ("megatron", "ddp-bucket-size", "1000", ("bucket_size", 1000)),
        ("megatron", "bucket_size", "null", ("bucket_size", None)),
        ("megatron", "main_grads_dtype", "bf16", ("main_grads_dtype", "bfloat16")),
        ("megatron", "attention_backend", "flash", ("attention_backend", "flash")),
        ("megatron", "window_size", "128,0", ("window_size", [128, 0])),
        ("megatron", "log_throughput", "true", ("log_throughput", True)),
        ("ds", "zero_optimization.overlap_comm", "false", ("zero_optimization.overlap_comm", False)),
        ("ds", "activation_checkpointing.number_checkpoints", "4", ("activation_checkpointing.number_checkpoints", 4)),
        ("ds", "steps_per_print", "7", ("steps_per_print", 7)),
    ],
)
def test_a_text_becomes_a_value_of_the_fields_type(group: str, name: str, text: str, expected: tuple[str, Any]) -> None:
    assert passthrough.read(group, name, text) == expected


@pytest.mark.parametrize(
    ("group", "name", "text", "message"),
    [
        ("megatron", "init_methodstd", "1", "megatron.init_methodstd=1: is no field or flag of Megatron-core 0.16.1 or 0.19.2; did you "
         "mean megatron.init_method_std?"),
        ("megatron", "init_method", "zeros", "is no field or flag"),
        ("megatron", "init_method_std", "much", "megatron.init_method_std=much: is not a finite number"),
        ("megatron", "bias_dropout_fusion", "1", "is neither; choose one of true, false"),
        ("megatron", "attention_backend", "fast", "choose one of flash, fused, unfused, local, auto"),
        ("megatron", "main_grads_dtype", "int8", "is no data type"),
        ("ds", "zero_optimization.overlap_com", "true", "did you mean ds.zero_optimization.overlap_comm?"),
        ("ds", "overlap_comm", "true", "did you mean ds.zero_optimization.overlap_comm?"),
        ("ds", "zero_optimization", "2", "ds.zero_optimization: is a section"),
        ("ds", "steps_per_print", "1.5", "is not a whole number"),
        ("ds", "a b", "1", "is no path of a ds_config"),
    ],
)  # fmt: skip
def test_what_no_engine_knows_is_refused_with_the_nearest(group: str, name: str, text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        passthrough.read(group, name, text)
    assert message in str(caught.value)


# --------------------------------------------------------------------------------------------------------- contradictions

CONTRADICTIONS = [
    ("megatron", "tensor_model_parallel_size", "4", "tp, for which it would be 2"),
    ("megatron", "recompute_granularity", "full", "stages.recompute, for which it would be null"),
    ("megatron", "use_distributed_optimizer", "false", "zero_stage, for which it would be true"),
    ("megatron", "use_megatron_fsdp", "true", "megatron_fsdp"),
    ("megatron", "tp_comm_overlap", "true", "tp_comm_overlap, for which it would be false"),
    ("megatron", "cuda_graph_impl", "local", "cuda_graph_impl, for which it would be none"),
    ("megatron", "overlap_grad_reduce", "false", "overlap_grad_reduce, for which it would be true"),
    ("megatron", "num_distributed_optimizer_instances", "2", "zero_shard_size, for which it would be 1"),
    ("megatron", "moe_token_dispatcher_type", "flex", "moe_token_dispatcher_type"),
    ("megatron", "cp_comm_type", "a2a", "cp_comm_type"),
    ("megatron", "recompute_modules", "mlp", "stages.recompute"),
    ("megatron", "lr", "1.0", "training.lr"),
    ("megatron", "hidden_size", "128", "model.hidden_size, for which it would be 64"),
    ("megatron", "overlap_p2p_comm", "true", "vpp"),
    ("megatron", "microbatch_group_size_per_vp_stage", "3", "microbatch_group_size_per_vp_stage, for which it would be 1"),
    ("megatron", "fp8", "hybrid", "training.precision"),
    ("megatron", "fp8_recipe", "mxfp8", "training.fp8_recipe"),
    ("megatron", "use_precision_aware_optimizer", "true", "training.precision_aware_optimizer"),
    ("ds", "zero_optimization.stage", "2", "zero_stage, for which it would be 1"),
    ("ds", "gradient_clipping", "5.0", "training.clip"),
    ("ds", "train_micro_batch_size_per_gpu", "64", "micro_batch_size"),
    ("ds", "optimizer.params.lr", "1", "training.lr"),
    ("ds", "zero_optimization.offload_optimizer.device", "cpu", 'offload_optimizer, for which it would be none'),
    ("ds", "scheduler.type", "OneCycle", "training.schedule"),
]  # fmt: skip


@pytest.mark.parametrize(("group", "name", "text", "field"), CONTRADICTIONS, ids=lambda value: str(value)[:30])
def test_a_contradiction_names_both(group: str, name: str, text: str, field: str) -> None:
    engine = "megatron" if group == "megatron" else "megatron_deepspeed"
    plan = with_values(make_plan(engine, tp=2), **{group: {name: text}})
    with pytest.raises(InputError) as caught:
        ENGINES[engine].translate(plan)
    assert str(caught.value).startswith(f"{group}.{name}={text}: contradicts the plan")
    assert field in str(caught.value)


def test_what_agrees_with_the_plan_changes_nothing() -> None:
    plan = deepspeed_plan(tp=2, zero_stage=2)
    same = with_values(plan, megatron={"tensor_model_parallel_size": "2"}, ds={"zero_optimization.stage": "2", "gradient_clipping": "1"})
    for path in ("engine.json", "ds_config.json"):
        assert file_of(same, path) == file_of(plan, path)
    plan = make_plan("deepspeed", zero_stage=2)
    assert file_of(with_values(plan, ds={"gradient_clipping": "1"}), "ds_config.auto.json") == file_of(plan, "ds_config.auto.json")


def test_a_value_that_a_hand_put_into_a_plan_is_checked_too() -> None:
    plan = make_plan()
    for extra, message in (
        ({"megatron": {"init_method_std": "much"}}, "is no value of its type, float"),
        ({"megatron": {"init-method-std": 0.1}}, "is called init_method_std in a plan"),
        ({"megatron": {"nonsense": 1}}, "is no field or flag"),
        ({"nonsense": {"a": 1}}, "is no group"),
        ({"ds": {"steps_per_print": 1}}, "does not reach engine=megatron"),
    ):
        with pytest.raises(InputError) as caught:
            ENGINES["megatron"].translate(replace(plan, extra=extra))
        assert message in str(caught.value)


def test_fields_of_megatrons_optimizer_do_not_reach_deepspeed() -> None:
    plan = with_values(deepspeed_plan(), megatron={"log_num_zeros_in_grad": "true"})
    with pytest.raises(InputError, match=r"engine=megatron_deepspeed has DeepSpeed's; ds\.\* reaches those"):
        ENGINES[plan.engine].translate(plan)


# ----------------------------------------------------------------------------------------------------------------- reaching


def test_values_reach_the_classes_and_the_argument_list() -> None:
    values = {
        "init_method_std": "0.01", "average_in_collective": "true", "initial_loss_scale": "64", "no-bias-dropout-fusion": "true",
        "log_throughput": "true", "eval_iters": "3", "batch_p2p_sync": "false", "attention_backend": "unfused",
    }  # fmt: skip
    plan = with_values(make_plan(tp=2), megatron=values)
    engine = json.loads(file_of(plan, "engine.json"))
    assert engine["transformer_config"]["init_method_std"] == 0.01
    assert engine["transformer_config"]["bias_dropout_fusion"] is False
    assert engine["transformer_config"]["attention_backend"] == "unfused"
    assert engine["ddp"]["average_in_collective"] is True
    assert engine["optimizer"]["initial_loss_scale"] == 64
    flags = megatron_flags(plan)
    for expected in (
        ("--init-method-std", "0.01"), ("--ddp-average-in-collective",), ("--initial-loss-scale", "64.0"), ("--no-bias-dropout-fusion",),
        ("--log-throughput",), ("--eval-iters", "3"), ("--attention-backend", "unfused"),
    ):  # fmt: skip
        assert flags.count(expected) == 1
        assert sum(flag[0] == expected[0] for flag in flags) == 1
    notes = " ".join(ENGINES["megatron"].translate(plan).notes)
    assert "megatron_args.sh alone has log_throughput, eval_iters" in notes
    assert "Our worker alone has batch_p2p_sync" in notes


def test_a_window_is_one_word_to_megatrons_parser() -> None:
    """tuple_type (Megatron-LM core_v0.16.1, arguments.py:281); a pattern of layers is a list in one word too (moe_freq_type)."""
    plan = with_values(make_plan(), megatron={"window_size": "1024,0", "window_attn_skip_freq": "[1,1,0]"})
    flags = megatron_flags(plan)
    assert ("--window-size", "1024,0") in flags
    assert ("--window-attn-skip-freq", "([1]*2+[0]*1)") in flags
    assert json.loads(file_of(plan, "engine.json"))["transformer_config"]["window_size"] == [1024, 0]


@pytest.mark.parametrize(("model", "flag"), [(GPT, "--no-bias-gelu-fusion"), (LLAMA, "--no-bias-swiglu-fusion")])
def test_a_fusion_that_is_off_has_the_flag_of_the_activation(model: Architecture, flag: str) -> None:
    """arguments.py:1335."""
    plan = with_values(make_plan(model=model), megatron={"bias_activation_fusion": "false"})
    assert (flag,) in megatron_flags(plan)
    assert "no flag for it" not in " ".join(ENGINES["megatron"].translate(plan).notes)
    on = with_values(make_plan(model=model), megatron={"bias_activation_fusion": "true"})
    assert (flag,) not in megatron_flags(on)


FP8 = training_for(GPT, precision="fp8", fp8_recipe="delayed")
FULL = [("full", 8)]


@pytest.mark.parametrize(
    ("plan", "name", "why"),
    [
        (make_plan(tp=2, recompute=FULL, sequence_parallel=True), "distribute_saved_activations", "it needs sequence_parallel=false"),
        (make_plan(recompute=FULL), "distribute_saved_activations", "it needs tp=2 or more"),
        (make_plan(tp=2), "distribute_saved_activations", "it needs recompute=full on every stage"),
    ],
)
def test_what_megatron_takes_under_other_plans_alone_is_refused(plan: Plan, name: str, why: str) -> None:
    with pytest.raises(InputError, match=why):
        ENGINES["megatron"].translate(with_values(plan, megatron={name: "true"}))
    assert ENGINES["megatron"].translate(with_values(plan, megatron={name: "false"}))


@pytest.mark.parametrize("version", ["0.16.1", "0.19.2"])
def test_context_parallelism_by_sample_which_no_release_can_run_is_refused(version: str) -> None:
    """The installed classes of Megatron say why: the iterator that its loop makes for it (training.py:2496; 0.19: :3479) is none that its
    state machine takes, which sees every step before it starts (--rerun-mode is validate_results unless said)."""
    from megatron.core.datasets.data_schedule import HybridCPDataLoaderWrapper
    from megatron.core.rerun_state_machine import RerunDataIterator, RerunMode, RerunStateMachine

    groups = SimpleNamespace(dp_cp=SimpleNamespace(size=lambda: 4), dp=object(), tp=object())
    batches = HybridCPDataLoaderWrapper(iter([]), SimpleNamespace(max_seqlen_per_dp_cp_rank=64), groups)
    machine = RerunStateMachine(mode=RerunMode.VALIDATE_RESULTS)
    with pytest.raises(AssertionError, match="not wrapped with RerunDataIterator"):
        machine._sanitize_data_iterators(iter(batches))
    assert machine._sanitize_data_iterators(RerunDataIterator(iter([])))

    plan = make_plan(cp=2, software=Software(megatron_core=version))
    with pytest.raises(InputError, match=re.escape("megatron.hybrid_context_parallel=true: stops Megatron-LM 0.16.1 and 0.19 before")):
        ENGINES["megatron"].translate(with_values(plan, megatron={"hybrid_context_parallel": "true"}))
    off = with_values(plan, megatron={"hybrid_context_parallel": "false"})
    assert "--hybrid-context-parallel" not in file_of(off, "megatron_args.sh")


@pytest.mark.parametrize(("recipe", "shared"), [("delayed", False), ("mxfp8", True)])
def test_weights_of_8_bits_are_gathered_where_both_are_said(recipe: str, shared: bool) -> None:
    """One flag sets both (arguments.py:1331); Transformer Engine can't keep MXFP8's in a buffer, so that they share the gradients'."""
    plan = make_plan(training=replace(FP8, fp8_recipe=recipe), gpu="B200", fp8_param_gather=True)
    assert ("--fp8-param-gather",) in megatron_flags(plan)
    engine = json.loads(file_of(plan, "engine.json"))
    assert engine["transformer_config"]["fp8_param"] is engine["ddp"]["fp8_param_gather"] is True
    reuses = "reuse_grad_buf_for_mxfp8_param_ag"
    assert ((f"--{reuses.replace('_', '-')}",) in megatron_flags(plan)) == shared
    assert engine["ddp"].get(reuses, False) is engine["optimizer"].get(reuses, False) is shared
    assert ENGINES["megatron"].translate(with_values(plan, megatron={"fp8_param_gather": "true"}))
    with pytest.raises(InputError, match="contradicts the plan's fp8_param_gather"):
        ENGINES["megatron"].translate(with_values(plan, megatron={"fp8_param": "false"}))


def test_values_reach_every_ds_config() -> None:
    values = {"zero_optimization.reduce_bucket_size": "1000", "comms_logger.enabled": "true"}
    plan = with_values(make_plan("deepspeed", zero_stage=2), ds=values)
    for path in ("ds_config.json", "ds_config.auto.json"):
        config = json.loads(file_of(plan, path))
        assert config["zero_optimization"]["reduce_bucket_size"] == 1000
        assert config["comms_logger"] == {"enabled": True}
    assert json.loads(file_of(plan, "engine.json"))["ds_config"]["zero_optimization"]["reduce_bucket_size"] == 1000


def test_a_plan_reproduces_its_own_values() -> None:
    plan = with_values(deepspeed_plan(zero_stage=2), megatron={"window_size": "8,0"}, ds={"wall_clock_breakdown": "true"})
    again = from_json(to_json(plan))
    assert again == plan
    assert ENGINES[plan.engine].translate(again) == ENGINES[plan.engine].translate(plan)


# ---------------------------------------------------------------------------------------------------------- the known names


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.version)
def test_the_known_flags_are_those_of_megatrons_parser(release: Release) -> None:
    with (Path(__file__).parent / FLAGS[release.version]).open() as file:
        rows = {flag: row for row in csv.DictReader(file) for flag in row["flag"].split("|")}
    known = passthrough.flags(release.version)
    assert len(known) > 600
    lacking = {flag for flag in rows if flag not in {flag for flag, _ in known.values()} and "--no-" not in flag}
    assert len(lacking) < 40, lacking  # aliases, and what is only there to be refused
    for flag, kind in known.values():
        assert rows[flag]["nargs"] == "0" if kind in ("true", "false", "both") else rows[flag]["nargs"] != "0", flag
        if kind in ("int", "float"):
            assert rows[flag]["type"] == kind, flag
        choices, several = (
            re.findall(r"'([^']+)'|AttnBackend\.(\w+)", rows[flag]["choices"]),
            rows[flag]["nargs"] or rows[flag]["type"] == "int",
        )
        if len(choices) > 1 and not several:
            assert kind.split("|") == ["".join(one) for one in choices], flag


@pytest.mark.engines
def test_the_known_fields_are_those_of_the_installed_engines() -> None:
    import known_names
    import megatron.core

    assert known_names.megatron() == passthrough.fields(megatron.core.__version__)
    found = {f"{section}.{name}": kind for section, names in known_names.deepspeed_sections().items() for name, kind in names.items()}
    assert found == {path: kind for path, kind in passthrough.paths().items() if "." in path}


@pytest.mark.engines
def test_every_reachable_field_of_megatron_is_taken_by_its_class() -> None:
    """The names of data types and enumerations become themselves."""
    import torch
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.enums import AttnBackend

    from orchestrator.workers.models import transformer_config, with_types

    values = {"attention_backend": "unfused", "init_method_std": "0.5"}
    plan = with_values(make_plan(gpu="cpu"), megatron=values)
    engine = json.loads(file_of(plan, "engine.json"))
    config = transformer_config(engine, 0)
    assert (config.attention_backend, config.init_method_std) == (AttnBackend.unfused, 0.5)
    assert with_types(OptimizerConfig, {"main_grads_dtype": "bfloat16"})["main_grads_dtype"] is torch.bfloat16
