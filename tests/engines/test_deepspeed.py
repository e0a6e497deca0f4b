"""The deepspeed engine: rules refuse with their reasons, files are the golden ones, transformers' and DeepSpeed's own code take them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hand_plans import BERT, GPT, LLAMA, LLAMA3_8B, T5, candidate, make_plan, training_for, workload_of
from msgspec.structs import replace
from test_rules import GROUPED, WIDE, refusals, workload
from test_translate import GOLDEN, REGENERATE, file_of, job_of, listing, same

from orchestrator.cost.calibration import datasheet
from orchestrator.cost.price import CostModel
from orchestrator.engines import ENGINES
from orchestrator.engines.deepspeed.translate import own_settings
from orchestrator.engines.ds_config import ds_config
from orchestrator.engines.hf_config import hf_fields, inexpressible
from orchestrator.hardware.spec import Software
from orchestrator.model.families import describe
from orchestrator.model.hugging_face import hugging_face
from orchestrator.model.lora import Lora
from orchestrator.model.parts.attention import GroupedQueryAttention
from orchestrator.model.parts.experts import Experts
from orchestrator.model.parts.mamba2 import Mamba2
from orchestrator.model.parts.part import Nothing
from orchestrator.model.parts.vision import Vision
from orchestrator.model.spec import Architecture, Pointwise
from orchestrator.model.traced import Feed, Traced
from orchestrator.model.training import Training
from orchestrator.plan import Plan, from_json, to_json
from orchestrator.strategy.axes import cp
from orchestrator.strategy.legality import broken_rule, rules_of, unsuited
from orchestrator.strategy.pins import Pins
from orchestrator.strategy.spec import Mesh, Strategy
from orchestrator.strategy.tree import FIXED_WITH, GIVEN, LEVELS, Tree
from orchestrator.strategy.workload import Workload

DS = "deepspeed"
HF_T5 = T5
LONG = Training(global_batch_size=512, seq_length=8192, lr=1.5e-4, min_lr=1.5e-5, warmup=100, steps=1000)
SGD = training_for(GPT, precision="fp32", optimizer="sgd", clip=0.0, schedule="constant")


def full(model: Architecture) -> list[tuple[Any, int]]:
    return [("full", model.num_layers + model.decoder_num_layers)]


PLANS: dict[str, Plan] = {
    "hf_llama3_8b_zero3_hpz": make_plan(DS, LLAMA3_8B, training=LONG, world=64, zero_stage=3, zero_shard_size=8, recompute=full(LLAMA3_8B)),
    "hf_llama3_8b_autotp": make_plan(DS, LLAMA3_8B, training=LONG, world=16, tp=4, zero_stage=1, micro_batch_size=2),
    "hf_llama3_8b_ulysses": make_plan(
        DS, replace(LLAMA3_8B, rope_scaling_factor=8.0), training=LONG, world=16, cp=8, zero_stage=3, recompute=full(LLAMA3_8B)
    ),
    "hf_qwen2": make_plan(DS, replace(LLAMA, add_qkv_bias=True), zero_stage=2),
    "hf_gpt_offload": make_plan(DS, GPT, zero_stage=2, offload_optimizer=True),
    "hf_bert_fp16_v100": make_plan(DS, BERT, gpu="V100-SXM2-16GB", tp=2, zero_stage=1, training=training_for(BERT, precision="fp16")),
    "hf_t5_autotp": make_plan(DS, HF_T5, gpu="A100-SXM-40GB", world=16, tp=2, zero_stage=2, recompute=full(HF_T5)),
    "hf_gpt_cpu_sgd": make_plan(DS, GPT, gpu="cpu", world=4, zero_stage=3, training=SGD),
    "hf_llama_cpu_zero0": make_plan(DS, LLAMA, gpu="cpu", world=4, tp=2, zero_stage=0),
}

NO_BIAS = replace(GPT, add_bias_linear=False)
FOUR = Experts(num_experts=4, topk=2, ffn_hidden_size=32)
NARROW = {"grad_accum_dtype": "bf16", "grad_reduce_dtype": "bf16"}


def with_experts(**fields: Any) -> Architecture:
    """A model of Mixtral's kind."""
    return replace(LLAMA, family="mixtral", feed_forward=replace(FOUR, **fields))


WINDOWED = replace(LLAMA, family="phi3", mixer=GroupedQueryAttention(window=12))

MIXTRAL = with_experts()
ROTARY = GroupedQueryAttention(chunk=8, qk_norm="l2")
LLAMA4 = replace(
    with_experts(topk=1, shared_ffn_hidden_size=32, score="sigmoid", normalized=False, scores_on_input=True), family="llama4", mixer=ROTARY
)
STATES = replace(
    LLAMA,
    family="mamba2",
    position_embedding="none",
    mixer=Mamba2(num_heads=4, head_dim=32, state_size=8, num_groups=2),
    feed_forward=Nothing(),
)
SIGMOID = with_experts(score="sigmoid", expert_bias=True, shared_ffn_hidden_size=32, aux_loss_coeff=0.001)


def seeing(kind: str) -> Architecture:
    """A model of this kind that looks at images, around a small Llama."""
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 48, "patch_size": 4, "image_size": 16}
    return replace(LLAMA, vision=Vision(model_type=kind, hidden_act="gelu", class_token=True, **sizes))


CASES: list[tuple[str, Workload, dict[str, Any], str]] = [
    ("seeing", workload(seeing("llava"), lora=Lora(rank=4, bits=4)), {}, "lora.bits=4 of llava, which looks at images"),
    ("seeing", workload(seeing("llava"), task="sft", packing=True), {}, "data.packing=true of llava, which looks at images"),
    ("autotp_family", workload(seeing("llava")), {"tp": 2, "dp": 4}, "AutoTP was never tried with transformers' Llava"),
    ("ulysses_family", workload(seeing("llava")), {"cp": 2, "dp": 4}, "can't be run under DeepSpeed's Ulysses"),
    ("hf_architecture", workload(seeing("qwen3_vl")), {}, "of qwen3_vl before a text model"),
    ("hf_architecture", workload(seeing("eva")), {}, "model.vision of eva: engine=deepspeed has llava"),
    ("unsuited", workload(precision="fp8"), {}, "has no precision fp8"),
    ("option_tp_comm_overlap", workload(), {"tp_comm_overlap": True}, "deepspeed has tp_comm_overlap false"),
    ("optimizer_dtypes", workload(exp_avg_dtype="bf16"), {}, "needs precision_aware_optimizer=true"),
    ("precision_here", workload(gpu="cpu", precision="fp16"), {}, "CPU"),
    ("seq_pos", workload(seq_length=256), {}, "seq_length=256 is above max_position_embeddings=128"),
    ("hidden_heads", workload(replace(GPT, num_attention_heads=6)), {}, "num_attention_heads=6 does not divide hidden_size=64"),
    ("head_groups", workload(replace(LLAMA, num_query_groups=3)), {}, "num_query_groups=3"),
    ("hf_architecture", workload(NO_BIAS), {}, "GPT2LMHeadModel have biases"),
    ("hf_architecture", workload(replace(GPT, position_embedding="rope")), {}, "position_embedding=rope"),
    ("hf_architecture", workload(replace(GPT, activation="swiglu")), {}, "activation=swiglu"),
    ("hf_architecture", workload(replace(GPT, num_query_groups=2)), {}, "no grouped queries"),
    ("hf_architecture", workload(replace(LLAMA, hidden_dropout=0.1)), {}, "attention dropout only"),
    ("hf_architecture", workload(replace(T5, add_bias_linear=True)), {}, "no biases"),
    ("grad_dtype", workload(gpu="cpu", grad_accum_dtype="bf16"), {}, "bf16 with precision fp32"),
    ("rank_order", workload(), {"order": ("tp", "cp", "ep", "pp", "dp")}, "tp-cp-ep-pp-dp"),
    ("experts", workload(), {"ep": 2}, "ep=2: a dense model has no experts"),
    ("experts", workload(MIXTRAL), {"ep": 8}, "ep=8 does not divide num_experts=4"),
    ("experts_fold", workload(MIXTRAL), {"ep": 4, "dp": 2, "cp": 1}, "ep*etp=4 does not divide tp*cp*dp=2"),
    ("capacity", workload(with_experts(capacity_factor=1.25)), {}, "experts.capacity_factor=1.25: transformers' experts take every token"),
    ("expert_balance", workload(SIGMOID), {}, "transformers' Glm4MoeForCausalLM has no loss that balances experts"),
    ("experts_autotp", workload(MIXTRAL), {"tp": 2, "dp": 4, "zero_stage": 3}, "takes them beside AutoEP alone (ep above 1)"),
    ("experts_autotp", workload(MIXTRAL), {"tp": 2, "dp": 4, "ep": 2, "zero_stage": 2}, "clips by a norm without most of the experts"),
    ("experts_autotp", workload(MIXTRAL), {"tp": 2, "dp": 4, "ep": 2, "zero_stage": 3}, "no plan of the attention alone is written"),
    ("autoep", workload(MIXTRAL), {"cp": 2, "dp": 4, "ep": 2, "zero_stage": 3}, "stage 3 without sequence parallelism only"),
    ("autoep", workload(MIXTRAL, **NARROW), {"ep": 2, "zero_stage": 0}, "averages norms of different experts"),
    ("autoep", workload(MIXTRAL), {"ep": 2, "zero_stage": 3, "zero_shard_size": 4}, "no second copy"),
    ("autoep", workload(MIXTRAL), {"ep": 2, "zero_stage": 2, "offload_optimizer": True}, "offload_optimizer with ep=2"),
    ("autoep_fp16", workload(MIXTRAL, precision="fp16"), {"ep": 2, "zero_stage": 1}, "ep=2 with precision fp16"),
    ("lora_experts", workload(MIXTRAL, lora=Lora(rank=4)), {}, "lora.targets=all-linear: the weights of transformers' experts are no li"),
    ("lora_autoep", workload(MIXTRAL, lora=Lora(rank=4, targets=("q_proj",))), {"ep": 2, "zero_stage": 1}, "tried AutoEP with adapters"),
    ("lora_linears", workload(LLAMA, lora=Lora(rank=4, targets=("linear_qkv",))), {}, "(engine=megatron); transformers has q_proj, k_proj"),
    ("lora_linears", workload(LLAMA, lora=Lora(rank=4, bridge="mcore-bridge")), {}, "lora.bridge=mcore-bridge: is of megatron-core's"),
    ("quantised_linears", workload(LLAMA, lora=Lora(rank=4, bits=4)), {"tp": 2, "dp": 4}, "AutoTP would cut packed weights"),
    ("quantised_linears", workload(LLAMA, lora=Lora(rank=4, bits=8)), {"tp": 2, "dp": 4}, "AutoTP would cut packed weights"),
    ("quantised_programs", workload(LLAMA, lora=Lora(rank=4, bits=4)), {"cp": 2, "dp": 4}, "divide the batch by all ranks"),
    ("quantised_programs", workload(LLAMA, lora=Lora(rank=4, bits=4)), {"offload_activations": True}, "call DeepSpeed's functions for it"),
    ("int8_gpu", workload(LLAMA, gpu="V100-SXM2-32GB", lora=Lora(rank=4, bits=8), precision="fp16"), {"dp": 8}, "on V100-SXM2-32GB"),
    ("int8_zero3", workload(LLAMA, lora=Lora(rank=4, bits=8)), {"dp": 8, "zero_stage": 3}, "beside what ZeRO-3 divides; 4 bits are"),
    ("axis_pp", workload(), {"pp": 2, "dp": 4}, "deepspeed has no pp"),
    ("schedule", workload(), {"pp": 2, "dp": 4, "vpp": 2, "schedule": "1f1b"}, "vpp=2 runs interleaved"),
    ("sequence_parallel", workload(LLAMA), {"tp": 2, "dp": 4, "sequence_parallel": True}, "no sequence parallelism"),
    ("autotp_family", workload(), {"tp": 2, "dp": 4}, "AutoTP refuses GPT-2"),
    ("autotp_divides", workload(GROUPED), {"tp": 4, "dp": 2}, "tp=4 does not divide num_query_groups=6"),
    ("autotp_divides", workload(replace(LLAMA, vocab_size=501)), {"tp": 2, "dp": 4}, "vocab_size=501"),
    ("autotp_x", workload(LLAMA), {"tp": 2, "cp": 2, "dp": 2}, "place of the mpu"),
    ("ulysses_family", workload(BERT), {"cp": 2, "dp": 4}, "BertForMaskedLM can't be run under DeepSpeed's Ulysses"),
    ("ulysses_family", workload(WINDOWED), {"cp": 2, "dp": 4}, "cp=2 with a window of 12 tokens: Ulysses drops the mask"),
    ("ulysses", workload(WIDE), {"cp": 4, "dp": 2}, "cp=4 does not divide num_attention_heads=6"),
    ("ulysses", workload(replace(LLAMA, num_query_groups=3, num_attention_heads=6)), {"cp": 2, "dp": 4}, "num_query_groups=3"),
    ("ulysses_seq", workload(LLAMA, seq_length=63), {"cp": 2, "dp": 4}, "cp=2 does not divide seq_length=63"),
    ("mesh", workload(LLAMA, world=10), {"tp": 4, "dp": 2}, "= 8, not the 10 GPUs"),
    ("mesh", workload(world=16), {}, "not the 16 GPUs"),
    ("batch", workload(), {"micro_batch_size": 3}, "micro_batch_size=3 x dp=8 does not divide"),
    ("batch", workload(), {"num_microbatches": 4}, "is not global_batch_size=64"),
    ("gad_mix", workload(), {"zero_stage": 0}, "zero_stage=0 sums gradients in bf16"),
    ("zero_shard_size", workload(), {"zero_shard_size": 4, "zero_stage": 2}, "deepspeed has it with zero_stage 3"),
    ("hpz", workload(LLAMA), {"zero_shard_size": 4, "zero_stage": 3, "tp": 2, "dp": 4}, "silently wrong with tensor parallelism"),
    ("hpz", workload(), {"zero_shard_size": 3, "zero_stage": 3}, "divide the 8 ranks"),
    ("offload_needs", workload(), {"offload_optimizer": True}, "zero_stage 1"),
    ("offload_ulysses", workload(LLAMA), {"offload_optimizer": True, "zero_stage": 2, "cp": 2, "dp": 4}, "under Ulysses"),
    ("sft_stack", workload(BERT, task="sft", packing=True), {}, "task=sft is for decoders: this model is an encoder"),
    ("packed_ulysses", workload(LLAMA, task="sft", packing=True, precision="fp32"), {"cp": 2, "dp": 4}, "without flash attention"),
    ("packed_flash", workload(LLAMA, task="sft", packing=True), {"micro_batch_size": 2}, "would let packed samples see each other"),
    ("packed_states", workload(STATES, task="sft", packing=True), {}, "would carry one sample's state to the next"),
    ("lora_states", workload(STATES, lora=Lora(rank=4)), {}, "beside the linears of Mamba-2 layers"),
    ("autotp_family", workload(STATES), {"tp": 2, "dp": 4}, "transformers' Mamba2ForCausalLM, whose projection to gate"),
    ("autoep_class", workload(LLAMA4), {"ep": 2, "zero_stage": 1}, "the experts of transformers' Llama4ForCausalLM; of Mixtral"),
    ("lora_tp", workload(GPT, lora=Lora(rank=4)), {"tp": 2, "dp": 4}, "tp=2 with lora.rank=4: adapters are divided with"),
    ("lora_hpz", workload(LLAMA, lora=Lora(rank=4)), {"zero_shard_size": 4, "zero_stage": 3}, "zero_shard_size=4 with lora.rank=4"),
    ("lora_offload", workload(LLAMA, lora=Lora(rank=4)), {"offload_optimizer": True, "zero_stage": 2}, "with lora.rank=4: never tried"),
    ("tiles", workload(LLAMA), {"tiled_mlp": 3}, "tiled_mlp=3 does not divide the"),
    ("tiles", workload(GPT), {"tiled_mlp": 2}, "pieces of the MLP and the head of Llama, Qwen2 and Qwen3 alone"),
    ("tiles", workload(LLAMA), {"tiled_logits": 2, "tp": 2, "dp": 4}, "tiled_logits=2 with tp=2: never tried under AutoTP"),
    ("activation_offload", workload(gpu="cpu"), {"offload_activations": True, "recompute": "full"}, "here there is none"),
    ("activation_offload", workload(LLAMA), {"offload_activations": True}, "recompute=none: only full recompute keeps checkpoints"),
    ("activation_offload", workload(HF_T5), {"offload_activations": True, "recompute": "full"}, "tried with transformers' GPT2LMHeadModel"),
    ("activation_offload", workload(LLAMA), {"offload_activations": True, "recompute": "full", "tp": 2, "dp": 4}, "tp=2 ep=1: never tried"),
    ("eight_bit_adam", workload(gpu="cpu", optimizer="adamw_8bit"), {}, "optimizer=adamw_8bit is bitsandbytes', on GPUs"),
    ("recompute", workload(), {"recompute": "selective"}, "deepspeed has recompute none, full"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "given", "choices", "reason"), CASES, ids=[f"{case[0]}-{case[3]}" for case in CASES])
def test_a_rule_refuses_with_its_reason(rule: str, given: Workload, choices: dict[str, Any], reason: str) -> None:
    choices = dict(choices)
    schedule = choices.pop("schedule", None)
    chosen = candidate(DS, **({"dp": 8} | choices))
    chosen = replace(chosen, schedule=schedule) if schedule else chosen
    rules = {rule.id: rule for rule in rules_of(ENGINES[DS].capabilities(Software()), given)}
    assert reason in (rules[rule].check(chosen, given) or "")


def test_a_recorded_model_is_not_fine_tuned() -> None:
    """Its linears have no names here that adapters could be given for, and its head is its own."""
    sizes = {"seq_length": 64, "itemsize": 2, "hidden_size": 64, "ffn_hidden_size": 64, "max_position_embeddings": 64}
    recorded = replace(LLAMA, traced=Traced(model_class="Stranger", feeds=(), runs=(), **sizes))
    for given in ({"lora": Lora(rank=4)}, {"task": "sft", "packing": True}):
        found = workload(LLAMA, **given)
        found = replace(found, model=replace(found.model, architecture=recorded))
        assert "of Stranger" in refusals(DS, found)["recorded"]


@pytest.mark.parametrize("packing", [True, False])
def test_a_recorded_decoder_of_text_takes_supervised_samples_that_are_not_packed(packing: bool) -> None:
    sizes = {"seq_length": 64, "itemsize": 2, "hidden_size": 64, "ffn_hidden_size": 64, "max_position_embeddings": 64}
    ids = Feed(name="input_ids", shape=(64,), dtype="int64", high=512)
    labels = replace(ids, name="labels", copies="input_ids")
    traced = Traced(model_class="NewForCausalLM", config="{}", feeds=(ids, labels), runs=(), **sizes)
    found = workload(LLAMA, task="sft", packing=packing)
    found = replace(found, model=replace(found.model, architecture=replace(LLAMA, traced=traced)))
    assert ("recorded" in refusals(DS, found)) is packing


def test_padded_samples_may_be_divided_and_be_several_at_a_time() -> None:
    padded = workload(LLAMA, task="sft", packing=False)
    assert not {"packed_ulysses", "packed_flash"} & refusals(DS, padded, cp=2, dp=4, micro_batch_size=2).keys()


def test_the_pipeline_refuses_supervised_samples_and_names_the_engines_that_take_them() -> None:
    found = unsuited(ENGINES["megatron_deepspeed"].capabilities(Software()), workload(task="sft", packing=True))
    assert found == "megatron_deepspeed has no task=sft; engine=deepspeed and engine=megatron have"


def test_other_engines_refuse_adapters_and_name_those_that_have_them() -> None:
    found = {name: unsuited(engine.capabilities(Software()), workload(lora=Lora(rank=4))) for name, engine in ENGINES.items()}
    why = "megatron_deepspeed has no adapters (lora.rank=4); engine=deepspeed trains them, megatron plans them"
    assert found == {"deepspeed": None, "megatron": None, "megatron_deepspeed": why}


def test_megatrons_own_program_is_told_no_adapters_and_names_the_one_that_is() -> None:
    """entry=pretrain_gpt.py ended in "no legal plan ... megatron has no adapters; megatron plans them"."""
    program, given = ENGINES["megatron"].program, workload(LLAMA, lora=Lora(rank=4))
    assert program is not None
    assert unsuited(program.capabilities(Software()), given) is None
    said = program.why_never(LLAMA, given.training, Software())
    assert str(said).endswith("has no adapters (lora.rank=4), which write=bridge is told")


def test_autotp_needs_the_whole_model_in_host_memory() -> None:
    """8.03e9 parameters in bf16 are 15 GiB a rank."""
    given = workload(LLAMA3_8B)
    given = replace(given, model=describe(LLAMA3_8B, 64), cluster=replace(given.cluster, host_memory=8 * 2**30))
    assert "AutoTP builds the whole model" in refusals(DS, given, tp=2, dp=4, zero_stage=3)["autotp_host"]
    assert "autotp_host" not in refusals(DS, given, zero_stage=3)


def test_activation_checkpoints_must_fit_host_memory() -> None:
    """All layers but the last, each of 64 tokens x 4,096 in bf16 (half a MiB) a sample; Ulysses divides the tokens, and an optimizer's
    states of 8.03e9 parameters x 18 bytes / 8 ranks, 16.8 GiB, are there too."""
    given = workload(LLAMA3_8B)
    given = replace(given, model=describe(LLAMA3_8B, 64), cluster=replace(given.cluster, host_memory=31 * 2**19))
    asked = {"offload_activations": True, "recompute": "full", "zero_stage": 2}
    assert "activations_host" not in refusals(DS, given, **asked)
    assert "needs 31.0 MiB of host memory a rank, of 15.5 MiB" in refusals(DS, given, micro_batch_size=2, **asked)["activations_host"]
    assert "activations_host" not in refusals(DS, given, micro_batch_size=2, cp=2, dp=4, **asked)
    assert "needs 16.8 GiB" in refusals(DS, given, offload_optimizer=True, **asked)["activations_host"]


def test_what_ds_config_has_no_field_for_is_said() -> None:
    plan = make_plan(DS, LLAMA, zero_stage=2, recompute=full(LLAMA))
    own = [note for note in job_of(replace(plan, offload_activations=True)).notes if "no field" in note]
    assert own == [
        "ds_config.json has no field for offload_activations: orchestrator.programs.hugging_face calls DeepSpeed's functions for it."
    ]
    assert not [note for note in job_of(plan).notes if "no field" in note]


def test_experts_are_divided_over_data_parallel_ranks_alone() -> None:
    """Four experts on eight GPUs: ep of 1, 2 and 4, under ZeRO-1 to 3 where it is above 1."""
    leaves = list(Tree(ENGINES[DS].capabilities(Software()), workload(MIXTRAL), Pins()).leaves(lambda cut: None))
    found = {(leaf.candidate.mesh.dp, leaf.candidate.mesh.ep) for leaf in leaves if leaf.candidate.mesh.cp == 1}
    assert found == {(8, 1), (8, 2), (8, 4)}
    stages = {(leaf.candidate.mesh.cp > 1, leaf.candidate.strategy.zero_stage) for leaf in leaves if leaf.candidate.mesh.ep > 1}
    assert stages == {(False, 1), (False, 2), (False, 3), (True, 1), (True, 2)}, "with Ulysses AutoEP has no stage 3"


def test_autoep_needs_the_whole_model_in_host_memory_but_at_stage_3() -> None:
    given = workload(MIXTRAL)
    given = replace(given, cluster=replace(given.cluster, host_memory=1000))
    assert "AutoEP builds the whole model" in refusals(DS, given, ep=2, zero_stage=1)["autoep_host"]
    assert "autoep_host" not in refusals(DS, given, ep=2, zero_stage=3)


def test_an_offloaded_optimizer_needs_host_memory() -> None:
    given = workload(LLAMA3_8B)
    given = replace(given, cluster=replace(given.cluster, host_memory=1000))
    assert "of host memory a rank, of 1000 B" in refusals(DS, given, zero_stage=2, offload_optimizer=True)["offload_host"]
    assert "offload_host" not in refusals(DS, given, zero_stage=2)


def test_a_plan_of_experts_says_so_to_deepspeed() -> None:
    """Nothing where every rank has all of them, and the coefficient of the model's own loss of balance."""
    balanced = with_experts(aux_loss_coeff=0.02)
    plan = make_plan(DS, balanced, ep=4, zero_stage=2)
    files = {file.path: json.loads(file.content) for file in ENGINES[DS].translate(plan).files if file.path.endswith(".json")}
    assert files["ds_config.json"]["expert_parallel"] == {"enabled": True, "autoep_size": 4, "preset_model": "mixtral"}
    assert files["engine.json"]["model"]["expert_balance"] == 0.02
    plain = "".join(file.content for file in ENGINES[DS].translate(make_plan(DS, MIXTRAL, zero_stage=2)).files if "ds_config" in file.path)
    assert "expert_parallel" not in plain
    assert "expert_balance" not in plain


def test_every_rule_has_a_case_that_it_refuses() -> None:
    tested = {case[0] for case in CASES} | {"autotp_host", "autoep_host", "activations_host", "offload_host", "recorded"}
    assert {rule.id for rule in ENGINES[DS].capabilities(Software()).rules} <= tested


def test_rules_have_distinct_names_and_need_only_what_the_tree_decides() -> None:
    rules = rules_of(ENGINES[DS].capabilities(Software()), workload())
    assert len({rule.id for rule in rules}) == len(rules)
    for rule in rules:
        for name in rule.needs:
            assert name in LEVELS or name in GIVEN or name in FIXED_WITH or name == "zero_shard_size", (rule.id, name)


@pytest.mark.parametrize("model", [GPT, LLAMA, BERT, T5], ids=lambda model: model.family)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_family_is_legal_under_every_stage(model: Architecture, stage: int) -> None:
    given = workload(model, **({"grad_accum_dtype": "bf16"} if stage == 0 else {}))
    assert refusals(DS, given, zero_stage=stage) == {}
    if model.family != "gpt":
        assert refusals(DS, given, zero_stage=stage, tp=2, dp=4, num_microbatches=16) == {}


# ---------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("name", PLANS)
def test_the_job_is_the_golden_one(name: str) -> None:
    folder = GOLDEN / name
    files = listing(job_of(PLANS[name]))
    if os.environ.get(REGENERATE):
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in files.items():
            (folder / path).write_text(content)
    assert {path.name for path in folder.iterdir()} == files.keys()
    for path, content in files.items():
        read = yaml.safe_load if path.endswith(".yaml") else json.loads
        assert same(read(content), read((folder / path).read_text())), path


@pytest.mark.parametrize("name", PLANS)
def test_every_covering_plan_is_legal_and_survives_json(name: str) -> None:
    plan = PLANS[name]
    assert broken_rule(ENGINES[DS].capabilities(plan.cluster.software), plan.candidate, workload_of(plan)) is None
    assert job_of(from_json(to_json(plan))) == job_of(plan)


@pytest.mark.parametrize("name", PLANS)
def test_a_ds_config_leaves_no_default_that_changes_training(name: str) -> None:
    """README, silently wrong 3, 5, 8, 10 and 12."""
    plan = PLANS[name]
    config = json.loads(file_of(plan, "ds_config.json"))
    assert config["gradient_clipping"] == plan.training.clip
    assert ("train_batch_size" in config) == (plan.tp == 1)
    assert config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * plan.dp == plan.global_batch_size
    assert '"auto"' not in json.dumps(config)
    mixed = plan.training.precision != "fp32"
    stated = config.get("data_types", {}).get("grad_accum_dtype")
    assert stated == (plan.training.grad_accum_dtype if mixed and plan.zero_stage >= 1 else None)
    assert config["zero_optimization"].get("zero_hpz_partition_size") == (plan.zero_shard_size if plan.tp == 1 else None)
    assert config.get("tensor_parallel") == ({"autotp_size": plan.tp, "vocab_parallel_lm_head": False} if plan.tp > 1 else None)


def test_attention_follows_the_machine() -> None:
    assert hf_fields(make_plan(DS, LLAMA))["attn_implementation"] == "flash_attention_2"
    assert (
        hf_fields(make_plan(DS, LLAMA, gpu="V100-SXM2-16GB", training=training_for(LLAMA, precision="fp16")))["attn_implementation"]
        == "sdpa"
    )
    assert hf_fields(make_plan(DS, T5))["attn_implementation"] == "sdpa"
    assert hf_fields(make_plan(DS, LLAMA, software=Software(flash_attention=False)))["attn_implementation"] == "sdpa"


def test_only_zero3_without_autotp_is_built_in_partitions() -> None:
    assert hf_fields(make_plan(DS, LLAMA, zero_stage=3))["zero_init"]
    assert not hf_fields(make_plan(DS, LLAMA, zero_stage=3, tp=2))["zero_init"]
    assert not hf_fields(make_plan(DS, LLAMA, zero_stage=2))["zero_init"]


# ---------------------------------------------------------------------------------------------------------------- price


@pytest.mark.parametrize("model", [GPT, LLAMA, BERT, T5], ids=lambda model: model.family)
def test_torchs_own_operations_are_never_faster_than_fused_ones(model: Architecture) -> None:
    """The same candidate, with DeepSpeed's states, on megatron-core's layers and on Hugging Face's."""
    plan = make_plan(DS, model, zero_stage=1)
    spec, training, cluster = describe(model, 64, plan.training.decoder_seq_length), plan.training, plan.cluster
    traits = ENGINES[DS].traits(cluster.software)
    fused = replace(traits, layers="megatron", unfused_attention=(), logits_bytes=8.0)
    workload = Workload(model=spec, training=training, cluster=cluster)
    mine, other = (CostModel(workload, b, datasheet(cluster, b)).price(plan.candidate, plan.stages) for b in (traits, fused))
    # But for the few ids that pad Megatron's vocabulary.
    assert mine.step_time_s >= 0.999 * other.step_time_s
    if model.normalization == "RMSNorm":
        assert mine.by_cause["memory_bound"] > 1.3 * other.by_cause["memory_bound"]


def test_ulysses_moves_less_the_more_ranks_share_a_sequence() -> None:
    """DeepSpeed-Ulysses (arXiv 2309.14509), section 3.2: each link carries 4Nh/P."""
    layer = describe(replace(GPT, num_attention_heads=8), 64).kind("decoder")

    def forward_bytes(size: int) -> float:
        items = cp.traffic(layer, Strategy(mesh=Mesh(cp=size)), 1, 2, kind="all_to_all")
        return sum(item.nbytes * item.count for item in items if item.when == "forward")

    assert forward_bytes(2) == 4 * 64 * GPT.hidden_size * 2 / 2
    assert forward_bytes(8) == forward_bytes(2) / 4


def test_the_bytes_of_an_unfused_norm_are_counted_from_its_kernels() -> None:
    """LlamaRMSNorm in 16 bits: to fp32 2+4, square 4+4, mean 4, times rsqrt 4+4, back 4+2, times the weight 2+2."""
    spec = hugging_face(describe(LLAMA, 64))
    norms = [op for op in spec.kind("decoder").ops if isinstance(op, Pointwise) and op.name == "input_layernorm"]
    assert sum(op.moved for op in norms) == (2 + 4) + (4 + 4) + 4 + (4 + 4) + (4 + 2) + (2 + 2)
    assert len(norms) == 8


# ---------------------------------------------------------------------------------------------------------------- the engines' own code


COUNTED = (GPT, replace(GPT, tie_embeddings=False), LLAMA, replace(LLAMA, tie_embeddings=True), BERT, T5, replace(T5, activation="geglu"))
"""Architectures whose parameters are counted beside those of the plans."""


def _judge() -> dict[str, Any]:
    """transformers' modules on the meta device, and DeepSpeed's config code at the plan's world size, in one process."""
    cases = {
        name: {"model": hf_fields(plan), "world": plan.world_size, "dp": plan.dp, "config": ds_config(plan, own_settings(plan))}
        for name, plan in PLANS.items()
    }
    for model in COUNTED:
        cases[f"count {model.family} {model.tie_embeddings} {model.activation}"] = {"model": hf_fields(make_plan(DS, model, gpu="cpu"))}
    program = Path(__file__).parent / "hf_judge.py"
    done = subprocess.run([sys.executable, str(program)], input=json.dumps(cases), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("ANSWERS "))
    answers: dict[str, Any] = json.loads(line.removeprefix("ANSWERS "))
    return answers


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    return _judge()


@pytest.mark.engines
def test_our_layers_have_as_many_parameters_as_transformers(answers: dict[str, Any]) -> None:
    models = [plan.model for plan in PLANS.values()]
    for model, (name, answer) in zip([*models, *COUNTED], answers.items(), strict=True):
        spec = hugging_face(describe(model, 64, 32 if model.family == "t5" else None))
        assert answer["parameters"] == spec.parameters, name


@pytest.mark.engines
@pytest.mark.parametrize("name", PLANS)
def test_deepspeed_reads_the_config_as_it_is_meant(name: str, answers: dict[str, Any]) -> None:
    plan, read = PLANS[name], answers[name]["deepspeed"]
    assert read["zero_stage"] == plan.zero_stage
    assert read["clip"] == plan.training.clip
    assert (read["micro_batch_size"], read["num_microbatches"]) == (plan.micro_batch_size, plan.num_microbatches)
    assert read["hpz"] == (plan.zero_shard_size or 1)
    assert read["autotp"] == (plan.tp if plan.tp > 1 else 0)
    if plan.tp == 1:
        assert read["train_batch_size"] == read["by_hand"] == plan.global_batch_size


def test_what_transformers_can_not_say_is_said_in_words() -> None:
    for model in (GPT, LLAMA, BERT, T5):
        assert inexpressible(model) is None
    windowed = replace(GPT, mixer=GroupedQueryAttention(window=8))
    assert inexpressible(windowed) == "transformers' GPT2LMHeadModel has no window"
