"""The choices that decide speed on new GPUs: what megatron-core's own classes are told, taken by them, and what can't be."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hand_plans import LLAMA, LLAMA3_8B, engine_fields, make_plan, training_for
from msgspec.structs import replace

from orchestrator.audit import script
from orchestrator.engines import ENGINES
from orchestrator.engines.megatron_args import megatron_args_sh, megatron_flags
from orchestrator.hardware.spec import Software
from orchestrator.model.parts.experts import Experts
from orchestrator.plan import Plan, from_json, to_json
from orchestrator.strategy.spec import ENGINE_OPTIONS

RECIPES = {"delayed": ("H100-SXM-80GB", "hybrid"), "tensorwise": ("H100-SXM-80GB", "hybrid"), "blockwise": ("H100-SXM-80GB", "e4m3"),
           "mxfp8": ("B200", "e4m3")}  # fmt: skip


def llama(gpu: str = "H100-SXM-80GB", training: dict[str, Any] | None = None, **choices: Any) -> Plan:
    fields = {"seq_length": 4096, "global_batch_size": 64, **(training or {})}
    return make_plan(model=LLAMA3_8B, gpu=gpu, training=training_for(LLAMA3_8B, **fields), **choices)


def flags_of(plan: Plan) -> dict[str, tuple[str, ...]]:
    return {flag: tuple(values) for flag, *values in megatron_flags(plan)}


def with_precision_aware(**training: Any) -> Plan:
    return llama(training={"precision_aware_optimizer": True, **training})


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_fp8_recipe_reaches_both_the_worker_and_the_command_line(recipe: str) -> None:
    gpu, form = RECIPES[recipe]
    plan = llama(gpu, {"precision": "fp8", "fp8_recipe": recipe})
    engine, flags = engine_fields(plan), flags_of(plan)
    assert (engine["transformer_config"]["fp8"], engine["transformer_config"]["fp8_recipe"]) == (form, recipe)
    assert engine["optimizer"]["fp8_recipe"] == recipe
    assert engine["transformer_config"]["params_dtype"] == "bfloat16"
    assert (flags["--fp8-format"], flags["--fp8-recipe"], flags["--bf16"]) == ((form,), (recipe,), ())
    assert ("--fp8-amax-history-len" in flags) == (recipe == "delayed")


@pytest.mark.parametrize("version", ["0.16.1", "0.19.2"])
def test_nvfp4_reaches_both_the_worker_and_the_command_line(version: str) -> None:
    plan = llama("B200", {"precision": "nvfp4"}, software=Software(megatron_core=version))
    config, flags = engine_fields(plan)["transformer_config"], flags_of(plan)
    assert (config["fp4"], config["fp4_recipe"], config["params_dtype"]) == ("e2m1", "nvfp4", "bfloat16")
    assert (flags["--fp4-format"], flags["--fp4-recipe"], flags["--bf16"]) == (("e2m1",), ("nvfp4",), ())
    assert not any("fp8" in name for name in (*config, *flags))
    assert script.read(megatron_args_sh(plan)).reading.keys["train.precision"] == "nvfp4"


@pytest.mark.engines
def test_megatrons_own_configuration_takes_nvfp4() -> None:
    from orchestrator.workers.models import transformer_config

    engine = engine_fields(llama("B200", {"precision": "nvfp4"}))
    engine["module"]["implementation"] = "local"  # Transformer Engine is not installed here
    engine["transformer_config"] |= {"apply_rope_fusion": False}
    config = transformer_config(engine, 0)
    assert (config.fp4, config.fp8) == ("e2m1", None)


@pytest.mark.engines
def test_attention_on_amds_gpus_is_what_amds_image_leaves_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """By Megatron's own check beside what rocm/primus:v26.7 says in its environment: its default is refused, the plan's is taken."""
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.transformer.enums import AttnBackend

    from orchestrator.workers.models import transformer_config

    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    monkeypatch.setenv("NVTE_FUSED_ATTN", "1")
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "0")  # as that check will set it, so that it is put back
    engine = engine_fields(llama("MI300X"))
    engine["module"]["implementation"] = "local"  # Transformer Engine is not installed here
    engine["transformer_config"] |= {"apply_rope_fusion": False}
    config = transformer_config(engine, 0)
    LanguageModule._set_attention_backend(SimpleNamespace(config=config))
    config.attention_backend = AttnBackend.auto
    with pytest.raises(AssertionError, match="NVTE_FLASH_ATTN set to 0"):
        LanguageModule._set_attention_backend(SimpleNamespace(config=config))
    assert flags_of(llama("MI300X"))["--attention-backend"] == ("fused",)
    assert "--attention-backend" not in flags_of(llama())


def test_without_fp8_nothing_of_it_is_said() -> None:
    assert not any(name.startswith(("fp8", "fp4")) for name in engine_fields(llama())["transformer_config"])
    assert not any("fp8" in flag or "precision-aware" in flag for flag in flags_of(llama()))


@pytest.mark.engines
@pytest.mark.parametrize("recipe", RECIPES)
def test_megatrons_own_configuration_takes_every_recipe(recipe: str) -> None:
    from orchestrator.workers.models import transformer_config

    engine = engine_fields(llama(RECIPES[recipe][0], {"precision": "fp8", "fp8_recipe": recipe}))
    engine["module"]["implementation"] = "local"  # Transformer Engine is not installed here
    engine["transformer_config"] |= {"apply_rope_fusion": False}
    config = transformer_config(engine, 0)
    assert (config.fp8, config.fp8_recipe) == (RECIPES[recipe][1], recipe)


def test_the_precision_aware_optimizer_reads_gradients_in_their_own_type() -> None:
    narrow = with_precision_aware(grad_reduce_dtype="bf16", grad_accum_dtype="bf16", exp_avg_dtype="bf16", exp_avg_sq_dtype="fp8")
    fields = engine_fields(narrow)["optimizer"]
    assert (fields["main_grads_dtype"], fields["exp_avg_dtype"], fields["exp_avg_sq_dtype"]) == ("bfloat16", "bfloat16", "uint8")
    assert engine_fields(with_precision_aware())["optimizer"]["main_grads_dtype"] == "float32"
    flags = flags_of(narrow)
    assert flags["--use-precision-aware-optimizer"] == ()
    assert [flags[f"--{name}-dtype"][0] for name in ("main-grads", "exp-avg", "exp-avg-sq")] == ["bf16", "bf16", "fp8"]


@pytest.fixture
def transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much of Transformer Engine, which does not install without CUDA, as megatron-core's check of its Adam asks for."""
    import megatron.core.optimizer.optimizer_config as checked

    class FusedAdam:
        def __init__(self, master_weight_dtype: Any, exp_avg_dtype: Any, exp_avg_sq_dtype: Any, use_decoupled_grad: bool) -> None: ...

    for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["transformer_engine.pytorch.optimizers"].FusedAdam = FusedAdam  # type: ignore[attr-defined]
    monkeypatch.setattr(checked, "is_te_min_version", lambda version: True)


@pytest.mark.engines
def test_megatrons_own_optimizer_configuration_takes_narrow_moments(transformer_engine: None) -> None:
    import torch
    from megatron.core.optimizer import OptimizerConfig

    from orchestrator.workers.models import with_types

    plan = with_precision_aware(exp_avg_dtype="bf16", exp_avg_sq_dtype="fp8", grad_reduce_dtype="bf16", grad_accum_dtype="bf16")
    config = OptimizerConfig(**with_types(OptimizerConfig, engine_fields(plan)["optimizer"]))
    assert (config.exp_avg_dtype, config.exp_avg_sq_dtype, config.main_grads_dtype) == (torch.bfloat16, torch.uint8, torch.bfloat16)
    assert config.use_precision_aware_optimizer_no_fp8_or_ds_fp8  # so that only the missing 16 bits of the weights are kept


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, tuple[str, ...]]]] = {
    # the plan's choices; TransformerConfig's fields; DistributedDataParallelConfig's; flags
    "tp overlap": (
        {"tp": 2, "sequence_parallel": True, "tp_comm_overlap": True},
        {"tp_comm_overlap": True},
        {},
        {"--tp-comm-overlap": ()},
    ),
    "cuda graphs": (
        {"cuda_graph_impl": "local"},
        {"cuda_graph_impl": "local"},
        {},
        {"--cuda-graph-impl": ("local",), "--te-rng-tracker": ()},
    ),
    "instances of the distributed optimizer": (
        {"zero_shard_size": 4},
        {},
        {"num_distributed_optimizer_instances": 2, "use_distributed_optimizer": True},
        {"--num-distributed-optimizer-instances": ("2",), "--use-distributed-optimizer": ()},
    ),
    "heads exchanged, then keys and values passed on": (
        {"cp": 8, "tp": 2, "world": 16, "cp_comm_type": "a2a+p2p"},
        {"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": [4, 2]},
        {},
        {"--cp-comm-type": ("a2a+p2p",), "--hierarchical-context-parallel-sizes": ("4", "2")},
    ),
    "megatron-fsdp": (
        {"zero_stage": 3, "megatron_fsdp": True},
        {"gradient_accumulation_fusion": False},
        {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params", "use_distributed_optimizer": True},
        {
            **{"--use-megatron-fsdp": (), "--data-parallel-sharding-strategy": ("optim_grads_params",), "--use-distributed-optimizer": ()},
            **{"--ckpt-format": ("fsdp_dtensor",), "--no-gradient-accumulation-fusion": ()},
        },
    ),
    "no overlap": (
        {"overlap_grad_reduce": False},
        {},
        {"overlap_grad_reduce": False, "overlap_param_gather": False},
        {},
    ),
    "modules recomputed": (
        {"recompute": [("mlp", 32)]},
        {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
        {},
        {"--recompute-granularity": ("selective",), "--recompute-modules": ("mlp",)},
    ),
}


@pytest.mark.parametrize("version", ["0.16.1", "0.19.2"])
def test_how_tokens_reach_experts_is_said_to_both_releases(version: str) -> None:
    shared = replace(LLAMA3_8B, feed_forward=Experts(num_experts=8, topk=4, ffn_hidden_size=1024, shared_ffn_hidden_size=1024))
    plan = make_plan(model=shared, ep=4, software=Software(megatron_core=version), training=training_for(shared, seq_length=4096))
    plan = replace(plan, moe_shared_expert_overlap=True)
    assert engine_fields(plan)["transformer_config"]["moe_shared_expert_overlap"] is True
    assert flags_of(plan)["--moe-shared-expert-overlap"] == ()
    other = replace(plan, moe_shared_expert_overlap=False, moe_token_dispatcher_type="allgather")
    assert flags_of(other)["--moe-token-dispatcher-type"] == ("allgather",)
    assert "--moe-shared-expert-overlap" not in flags_of(other)


@pytest.mark.parametrize("version", ["0.16.1", "0.19.2"])
def test_the_exchange_beside_another_micro_batch_is_said_to_both_releases(version: str) -> None:
    """Megatron asks there for several queues, where tensor parallelism before Blackwell otherwise asks for one."""
    model = replace(LLAMA3_8B, feed_forward=Experts(num_experts=8, topk=2, ffn_hidden_size=1024))
    plan = make_plan(model=model, tp=2, ep=4, software=Software(megatron_core=version), training=training_for(model, seq_length=4096))
    names = {"overlap_moe_expert_parallel_comm": "--overlap-moe-expert-parallel-comm", "delay_wgrad_compute": "--delay-wgrad-compute"}
    assert not any(flag in flags_of(plan) for flag in names.values())
    assert "CUDA_DEVICE_MAX_CONNECTIONS" in ENGINES["megatron"].translate(plan).environment
    plan = replace(plan, **dict.fromkeys(names, True))
    fields = engine_fields(plan)
    assert all(fields["transformer_config"][name] is True and flags_of(plan)[flag] == () for name, flag in names.items())
    assert fields["ddp"]["delay_wgrad_compute"] is True
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in ENGINES["megatron"].translate(plan).environment


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_reaches_both_the_worker_and_the_command_line(name: str) -> None:
    choices, config, ddp, flags = OPTIONS[name]
    plan = llama(**choices)
    engine, said = engine_fields(plan), flags_of(plan)
    assert (engine["transformer_config"] | engine["per_stage"][0]).items() >= config.items()
    assert engine["ddp"].items() >= ddp.items()
    assert said.items() >= flags.items()
    if name == "no overlap":
        assert not any("overlap" in flag for flag in said)


@pytest.mark.engines
@pytest.mark.parametrize("name", OPTIONS)
def test_megatrons_own_configurations_take_every_option(name: str) -> None:
    from megatron.core.distributed import DistributedDataParallelConfig

    from orchestrator.workers.models import transformer_config

    choices, config, ddp, _ = OPTIONS[name]
    engine = engine_fields(llama(**choices))
    engine["module"]["implementation"] = "local"  # Transformer Engine is not installed here
    engine["transformer_config"] |= {"apply_rope_fusion": False}
    built, reduced = transformer_config(engine, 0), DistributedDataParallelConfig(**engine["ddp"])
    assert {key: getattr(built, key) for key in config} == config
    assert {key: getattr(reduced, key) for key in ddp} == ddp


def test_megatron_fsdp_runs_without_the_one_queue_that_tensor_parallelism_asks_for() -> None:
    """Rules cuda_conn_1 and cuda_conn_fsdp."""
    sharded = {"zero_stage": 3, "megatron_fsdp": True}
    assert "CUDA_DEVICE_MAX_CONNECTIONS" in ENGINES["megatron"].translate(llama(tp=2)).environment
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in ENGINES["megatron"].translate(llama(tp=2, **sharded)).environment


def test_what_only_megatrons_own_program_runs_says_so() -> None:
    job = ENGINES["megatron"].translate(llama(zero_stage=3, megatron_fsdp=True))
    assert "no Megatron-FSDP" in job.without_worker
    assert "entry=PATH/pretrain_gpt.py" in job.without_worker
    assert not ENGINES["megatron"].translate(llama(cp=2)).without_worker


def test_graphs_do_not_register_what_the_allocator_may_move() -> None:
    assert ENGINES["megatron"].translate(llama(cuda_graph_impl="local")).environment["NCCL_GRAPH_REGISTER"] == "0"
    assert "NCCL_GRAPH_REGISTER" not in ENGINES["megatron"].translate(llama()).environment


def test_an_old_plan_has_the_engines_own_ways() -> None:
    plan = llama()
    old = json.loads(to_json(plan))
    for name in (*ENGINE_OPTIONS, "zero_shard_size"):
        old.pop(name)
    for name in ("fp8_recipe", "precision_aware_optimizer", "exp_avg_dtype", "exp_avg_sq_dtype"):
        old["training"].pop(name)
    assert from_json(json.dumps(old)) == plan


def test_products_of_all_experts_at_once_are_amperes_and_later() -> None:
    """Megatron-LM refuses --moe-grouped-gemm before (training/arguments.py:852)."""
    model = replace(LLAMA, feed_forward=Experts(num_experts=8, topk=2, ffn_hidden_size=128))
    for gpu, precision, grouped in (("V100-SXM2-32GB", "fp16", False), ("A100-SXM-80GB", "bf16", True)):
        plan = make_plan(model=model, gpu=gpu, training=training_for(model, precision=precision))
        assert engine_fields(plan)["transformer_config"]["moe_grouped_gemm"] is grouped
        assert (("--moe-grouped-gemm",) in megatron_flags(plan)) is grouped
        assert ("--moe-permute-fusion",) in megatron_flags(plan)
