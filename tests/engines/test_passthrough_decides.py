"""What a plan decides of Megatron's and DeepSpeed's own names, by hand; and texts of each kind on both sides of what they may be."""

from __future__ import annotations

from typing import Any

import pytest
from hand_plans import BERT, LLAMA, T5, make_plan, training_for
from msgspec.structs import replace

from orchestrator.engines import passthrough as through
from orchestrator.errors import InputError
from orchestrator.hardware.spec import Software
from orchestrator.model.parts.experts import Experts
from orchestrator.plan import Plan
from orchestrator.strategy.spec import PP_BEFORE_DP

BASE = make_plan(model=LLAMA)
SIX = Experts(num_experts=6, topk=2, ffn_hidden_size=32, shared_ffn_hidden_size=40, aux_loss_coeff=0.1)


def trained(**fields: Any) -> Plan:
    return make_plan(model=LLAMA, training=training_for(LLAMA, **fields))


def decided(plan: Plan, names: Any, of: dict[str, Any] = through.DECIDED) -> dict[str, Any]:
    return {name: of[name][1](plan) for name in names}


NOT_TAKEN = {
    "num_layers_per_virtual_pipeline_stage": None, "num_layers_in_first_pipeline_stage": None, "num_layers_in_last_pipeline_stage": None,
    "decoder_first_pipeline_num_layers": None, "decoder_last_pipeline_num_layers": None, "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False, "use_torch_fsdp2": False, "enable_cuda_graph": False, "external_cuda_graph": False,
    "rampup_batch_size": None, "train_samples": None, "lr_warmup_fraction": None, "lr_warmup_samples": 0, "fp4": None,
    "decoupled_weight_decay": True, "squared_relu": False, "main_params_dtype": "float32",
}  # fmt: skip
"""Other ways to say what the plan says: as without them."""


def test_other_ways_to_say_what_a_plan_says_are_as_without_them() -> None:
    for plan in (BASE, make_plan(model=LLAMA, pp=2, vpp=2), trained(precision="fp8", fp8_recipe="mxfp8")):
        assert decided(plan, NOT_TAKEN) == NOT_TAKEN


def test_each_choice_is_what_megatron_would_be_told() -> None:
    experts = make_plan(model=replace(LLAMA, feed_forward=SIX), ep=2, moe_token_dispatcher_type="flex")
    scaled = make_plan(model=replace(LLAMA, rope_scaling_factor=8.0, kv_channels=16, add_qkv_bias=True, tie_embeddings=True))
    cases: list[tuple[Plan, dict[str, Any]]] = [
        (BASE, {
            "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "virtual_pipeline_model_parallel_size": None,
            "num_virtual_stages_per_pipeline_rank": None, "microbatch_group_size_per_vp_stage": 1, "overlap_p2p_comm": False,
            "batch_p2p_comm": True, "context_parallel_size": 1, "expert_model_parallel_size": 1, "expert_tensor_parallel_size": 1,
            "sequence_parallel": False, "pipeline_model_parallel_layout": None, "recompute_granularity": None, "recompute_num_layers": None,
            "use_tp_pp_dp_mapping": False, "use_distributed_optimizer": True, "use_megatron_fsdp": False,
            "data_parallel_sharding_strategy": "no_shard", "num_distributed_optimizer_instances": 1, "overlap_grad_reduce": True,
            "overlap_param_gather": True, "cp_comm_type": "p2p", "hierarchical_context_parallel_sizes": None,
            "optimizer_cpu_offload": False, "micro_batch_size": 1, "global_batch_size": 64, "seq_length": 64, "decoder_seq_length": None,
            "train_iters": 20, "lr": 3e-4, "min_lr": 0.0, "lr_decay_style": "cosine", "lr_decay_iters": 20, "lr_warmup_iters": 0,
            "adam_beta1": 0.9, "adam_beta2": 0.95, "optimizer": "adam", "bf16": True, "fp16": False, "fp8": None, "fp8_recipe": None,
            "use_precision_aware_optimizer": False, "main_grads_dtype": "float32", "exp_avg_dtype": "float32", "params_dtype": "bfloat16",
            "grad_reduce_in_fp32": True, "grad_reduce_in_bf16": False, "accumulate_allreduce_grads_in_fp32": True, "num_layers": 8,
            "num_query_groups": 4, "group_query_attention": True, "kv_channels": 8, "use_rope_scaling": False, "gated_linear_unit": True,
            "swiglu": True, "untie_embeddings_and_output_weights": True, "num_moe_experts": None, "vocab_size": 500,
            "padded_vocab_size": 512, "make_vocab_size_divisible_by": 128,
        }),
        (make_plan(model=LLAMA, pp=2, vpp=2), {
            "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2,
            "microbatch_group_size_per_vp_stage": 2, "overlap_p2p_comm": True, "batch_p2p_comm": False,
        }),
        (make_plan(model=LLAMA, pp=2, vpp=2, microbatch_group_size_per_vp_stage=3), {"microbatch_group_size_per_vp_stage": 3}),
        (make_plan(model=LLAMA, tp=2, sequence_parallel=True), {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
        (make_plan(model=LLAMA, pp=2, sizes=[5, 3]), {"pipeline_model_parallel_layout": "Et*5|t*3L"}),
        (make_plan(model=LLAMA, pp=2, recompute=[("full", 2), ("full", 1)]), {"recompute_num_layers": [2, 1]}),
        (make_plan(model=LLAMA, recompute=[("full", 3)]), {
            "recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3, "recompute_modules": None,
        }),
        (make_plan(model=LLAMA, zero_stage=0), {"use_distributed_optimizer": False, "overlap_param_gather": False}),
        (make_plan(model=LLAMA, zero_stage=3, megatron_fsdp=True), {
            "use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params",
        }),
        (make_plan(model=LLAMA, zero_shard_size=4), {"num_distributed_optimizer_instances": 2}),
        (make_plan(model=LLAMA, world=16, cp=8, tp=2, cp_comm_type="a2a+p2p"), {
            "cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": [4, 2], "context_parallel_size": 8,
        }),
        (make_plan("megatron_deepspeed", LLAMA, offload_optimizer=True, zero_stage=2), {"optimizer_cpu_offload": True}),
        (replace(BASE, rank_order=PP_BEFORE_DP), {"use_tp_pp_dp_mapping": True}),
        (trained(optimizer="sgd", schedule="linear", warmup=3, steps=30, betas=(0.8, 0.7)), {
            "optimizer": "sgd", "lr_decay_style": "linear", "lr_warmup_iters": 3, "lr_decay_iters": 30, "train_iters": 30,
            "adam_beta1": 0.8, "adam_beta2": 0.7, "decoupled_weight_decay": True,
        }),
        (trained(precision="fp16"), {"bf16": False, "fp16": True, "params_dtype": "float16"}),
        (trained(precision="fp8", fp8_recipe="mxfp8"), {"bf16": True, "fp16": False, "fp8": "e4m3", "fp8_recipe": "mxfp8"}),
        (trained(grad_reduce_dtype="bf16", grad_accum_dtype="bf16"), {
            "grad_reduce_in_fp32": False, "grad_reduce_in_bf16": True, "accumulate_allreduce_grads_in_fp32": False,
        }),
        (trained(precision_aware_optimizer=True, exp_avg_dtype="fp8", exp_avg_sq_dtype="bf16"), {
            "use_precision_aware_optimizer": True, "exp_avg_dtype": "uint8", "exp_avg_sq_dtype": "bfloat16", "main_grads_dtype": "float32",
        }),
        (scaled, {
            "use_rope_scaling": True, "rope_scaling_factor": 8.0, "kv_channels": 16, "add_qkv_bias": True,
            "untie_embeddings_and_output_weights": False,
        }),
        (make_plan(), {"group_query_attention": False, "num_query_groups": 8, "swiglu": False, "gated_linear_unit": False}),
        (make_plan(model=replace(LLAMA, activation="geglu")), {"swiglu": False, "gated_linear_unit": True}),
        (make_plan(model=T5), {"num_layers": 4, "encoder_num_layers": 4, "decoder_num_layers": 4, "decoder_seq_length": 32}),
        (experts, {
            "expert_model_parallel_size": 2, "moe_token_dispatcher_type": "flex", "num_moe_experts": 6, "moe_router_topk": 2,
            "moe_ffn_hidden_size": 32, "moe_shared_expert_intermediate_size": 40, "moe_aux_loss_coeff": 0.1,
        }),
    ]  # fmt: skip
    for plan, wanted in cases:
        assert decided(plan, wanted) == wanted
        for name in wanted:
            through._agree(name, wanted[name], through.decided_by("megatron", name, plan))
            with pytest.raises(InputError, match="contradicts the plan's "):
                through._agree(name, "something else", through.decided_by("megatron", name, plan))


def test_texts_are_taken_by_their_kind() -> None:
    taken: list[tuple[str, Any, Any]] = [
        ("int", "-3", -3), ("int", "+4", 4), ("int?", "null", None), ("int?", "~", None), ("int", None, None), ("float", "1e-3", 1e-3),
        ("float", "2", 2.0), ("float?", "None", None), ("bool", "True", True), ("bool", "FALSE", False), ("bool?", "null", None),
        ("dtype", "bf16", "bfloat16"), ("dtype", "float16", "float16"), ("dtype", "fp8", "uint8"), ("a|b", "b", "b"), ("str", "x", "x"),
        ("any", "null", None), ("any", "1,x", [1, "x"]), ("any", "[1, 2]", [1, 2]), ("any", "True", True), ("any", "word", "word"),
        ("any", '{"a": 1}', {"a": 1}), ("any", ["1", "x"], [1, "x"]), ("any", 5, 5), ("any", "NaN", "NaN"), ("any", "1.5", 1.5),
        ("any", "Infinity", "Infinity"), ("any", "false,1", [False, 1]),
    ]  # fmt: skip
    for kind, text, value in taken:
        found = through.typed("k", kind, text)
        assert (found, type(found)) == (value, type(value)), (kind, text)
    for kind, wrong, why in (
        ("int", "1.0", "is not a whole number"), ("int", "null", "is not a whole number"), ("int", "", "is not a whole number"),
        ("float", "nan", "is not a finite number"), ("float", "inf", "is not a finite number"), ("float", "x", "is not a finite number"),
        ("bool", "1", "is neither; choose one of true, false"), ("dtype", "int8", "is no data type"), ("a|b", "c", "is not known; choose"),
        ("int", ["1"], "needs one value, not a list"), ("str", 5, "needs one value"), ("bool", True, "needs one value"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=why):
            through.typed("k", kind, wrong)


def test_values_of_a_plan_are_of_their_kind() -> None:
    for kind, value in (("bool", True), ("int", 3), ("float", 3), ("float", 0.5), ("any", None), ("any", True), ("any", [1]),
                        ("int?", None), ("a|b", "a"), ("dtype", "bfloat16"), ("str", "x")):  # fmt: skip
        through._check_type("k", kind, value)
    for kind, value in (("bool", 1), ("bool", "true"), ("int", True), ("int", 1.0), ("int", None), ("float", True), ("float", "1"),
                        ("str", 1), ("a|b", "c"), ("dtype", "int8"), ("str", True)):  # fmt: skip
        with pytest.raises(InputError):
            through._check_type("k", kind, value)
    for value in ("auto", {"a": "auto"}, [1, {"b": ["auto"]}]):
        with pytest.raises(InputError, match="is filled in by the Hugging Face Trainer alone"):
            through._refuse_auto("ds.x", value)
    for value in ("automatic", {"auto": 1}, [1, None], 5):
        through._refuse_auto("ds.x", value)


def test_paths_of_a_ds_config_are_known_open_or_sections() -> None:
    assert through._ds_kind("ds.x", "steps_per_print") == "int"
    for path in ("optimizer.params.foreach", "scheduler.params.x.y", "tensor_parallel.tp.tp_size", "zero_optimization.zenflow.topk"):
        assert through._ds_kind("ds.x", path) == "any"
    for path, why in (
        ("zero_optimization", "is a section; write ds.x.KEY=value; choose one of "), ("optimizer", "is a section"),
        ("tensor_parallel", "is a section"), ("a..b", "is no path of a ds_config"), (".a", "is no path"), ("a.", "is no path"),
        ("zero_optimization.stag", "did you mean ds.zero_optimization.stage?"), ("overlap_comm", "did you mean ds.zero_optimization.overl"),
        ("nothing_like_it_at_all", "is no key of DeepSpeed 0.19.8"),
    ):  # fmt: skip
        with pytest.raises(InputError) as caught:
            through._ds_kind("ds.x", path)
        assert why in str(caught.value), path


def test_what_megatron_needs_beside_a_value_is_said() -> None:
    full = [("full", 8)]
    some, two = [("full", 2), ("full", 1)], [("full", 2), ("none", 0)]
    for choices, lacking in (
        ({}, "tp=2 or more"), ({"tp": 2, "sequence_parallel": True}, "sequence_parallel=false"),
        ({"tp": 2}, "recompute=full on every stage"), ({"tp": 2, "recompute": full}, None), ({"tp": 2, "pp": 2, "recompute": some}, None),
        ({"tp": 2, "pp": 2, "recompute": two}, "recompute=full on every stage"),
    ):  # fmt: skip
        assert through._distributed_activations(make_plan(model=LLAMA, **choices)) == lacking, choices  # type: ignore[arg-type]


def with_extra(plan: Plan = BASE, **values: Any) -> Plan:
    return replace(plan, extra={"megatron": values})


def test_flags_of_values_take_the_place_of_ours_or_stand_at_the_end() -> None:
    ours = (("--lr", "0.1"), ("--bf16",), ("--seed", "1"))

    def found(plan: Plan) -> list[tuple[str, ...]]:
        return list(through.with_flags(ours, plan))

    assert found(BASE) == list(ours)
    assert found(with_extra(lr=0.5)) == list(ours), "what the plan decides stands there already"
    assert found(with_extra(init_method_std=0.02))[-1] == ("--init-method-std", "0.02")
    assert found(with_extra(log_throughput=True))[-1] == ("--log-throughput",)
    assert found(with_extra(log_throughput=False)) == list(ours)
    assert found(with_extra(bias_dropout_fusion=False))[-1] == ("--no-bias-dropout-fusion",)
    assert found(with_extra(bias_dropout_fusion=True)) == list(ours)
    assert found(with_extra(window_size=[8, 0]))[-1] == ("--window-size", "8,0")
    assert found(with_extra(bucket_size=None)) == list(ours)
    assert through.with_flags((("--ddp-bucket-size", "5"),), with_extra(bucket_size=None)) == ()
    assert through.with_flags((("--ddp-bucket-size", "5"), ("--x",)), with_extra(bucket_size=7)) == (("--ddp-bucket-size", "7"), ("--x",))
    assert found(with_extra(make_plan(model=LLAMA), bias_activation_fusion=False))[-1] == ("--no-bias-swiglu-fusion",)
    assert found(with_extra(make_plan(model=BERT), bias_activation_fusion=False))[-1] == ("--no-bias-gelu-fusion",)
    assert found(with_extra(batch_p2p_sync=False)) == list(ours), "no flag of it"
    assert through.notes(with_extra(init_method_std=0.02)) == ()
    assert [note.partition(":")[0] for note in through.notes(with_extra(log_throughput=True, batch_p2p_sync=False))] == [
        "megatron_args.sh alone has log_throughput", "Our worker alone has batch_p2p_sync",
    ]  # fmt: skip


def test_values_reach_the_sections_that_have_them() -> None:
    engine = {"transformer_config": {"a": 1}, "ddp": {"b": 2}, "optimizer": {"c": 3}}
    plan = with_extra(init_method_std=0.02, bucket_size=7, log_throughput=True)
    found = through.with_megatron(engine, plan, through.SECTIONS)
    assert found == {
        "transformer_config": {"a": 1, "init_method_std": 0.02}, "ddp": {"b": 2, "bucket_size": 7}, "optimizer": {"c": 3},
    }  # fmt: skip
    assert engine["ddp"] == {"b": 2}
    assert through.with_megatron(engine, plan, ("transformer_config",))["ddp"] == {"b": 2}
    config = {"zero_optimization": {"stage": 1}}
    changed = through.with_ds(config, replace(BASE, extra={"ds": {"zero_optimization.overlap_comm": False, "comms_logger.enabled": True,
                                                                  "zero_optimization.stage": 3}}))  # fmt: skip
    assert changed == {"zero_optimization": {"stage": 1, "overlap_comm": False}, "comms_logger": {"enabled": True}}
    assert config == {"zero_optimization": {"stage": 1}}


def test_values_reach_engines_that_pass_their_group() -> None:
    passes = {"megatron": {"megatron": through.SECTIONS}, "both": {"megatron": ("transformer_config",), "ds": ()}}
    through.check_reached("both", {"ds": {"a": 1}, "megatron": {"b": 2}}, passes)
    through.check_reached("megatron", {"ds": {}, "other": {"a": 1}}, passes)
    with pytest.raises(InputError, match=r"ds\.a=1: does not reach engine=megatron; choose one of both"):
        through.check_reached("megatron", {"ds": {"a": 1}}, passes)
    assert through.reaches(passes["megatron"], {"ds": {}, "megatron": {"a": 1}})
    assert not through.reaches(passes["megatron"], {"ds": {"a": 1}})
    for version, known in (("0.16.1", True), ("0.19.2", True)):
        plan = make_plan(model=LLAMA, software=Software(megatron_core=version))
        through._check_megatron(replace(plan), "init_method_std", 0.1, through.SECTIONS)
        assert (through.megatron_kind("init_method_std", version) is not None) is known
    assert through.megatron_kind("no_such_field") is None
