"""Rules take what is just inside their bounds, and refuse what is just outside: the other side of the tables of refusals."""

from __future__ import annotations

from typing import Any

import pytest
from hand_plans import BARE, BERT, GPT, LLAMA, T5, candidate
from msgspec.structs import replace
from test_rules import RULES, workload

from orchestrator.engines.deepspeed import rules as ds
from orchestrator.engines.rules import graphs, mesh, model, options, precision
from orchestrator.hardware.spec import Software
from orchestrator.model.architecture import Architecture, Run
from orchestrator.model.families import describe
from orchestrator.model.lora import Lora
from orchestrator.model.parts.attention import GroupedQueryAttention
from orchestrator.model.parts.experts import Experts
from orchestrator.model.parts.gated_delta_net import GatedDeltaNet
from orchestrator.model.parts.latent_attention import LatentAttention
from orchestrator.model.parts.mamba2 import Mamba2
from orchestrator.model.parts.mlp import Mlp
from orchestrator.model.parts.vision import Vision
from orchestrator.strategy.capabilities import Rule
from orchestrator.strategy.spec import PP_BEFORE_DP
from orchestrator.strategy.workload import Workload

Case = tuple[Any, dict[str, Any], str | None]


def held(rule: Rule, *cases: Case) -> None:
    """(a workload or its model, choices, how the reason begins or None where it is legal)."""
    for number, (given, choices, why) in enumerate(cases):
        found = rule.check(candidate(**({"dp": 8} | choices)), given if isinstance(given, Workload) else workload(given))
        assert (found is None) == (why is None), (number, found)
        assert why is None or (found or "").startswith(why), (number, found)


def with_host(given: Workload, memory: int) -> Workload:
    return replace(given, cluster=replace(given.cluster, host_memory=memory))


def on_nodes(model: Architecture, gpus: int) -> Workload:
    """The model on 16 GPUs in nodes of so many."""
    given = workload(model, world=16)
    inner, *others = given.cluster.levels
    return replace(given, cluster=replace(given.cluster, gpus_per_node=gpus, levels=(replace(inner, size=gpus), *others)))


def over_efa(gpu: str) -> Workload:
    """Experts on 16 GPUs of two nodes, over a network whose cards GPUs cannot use themselves."""
    given = workload(MOE, gpu=gpu, world=16)
    inner, outer, *_ = given.cluster.levels
    return replace(given, cluster=replace(given.cluster, levels=(inner, replace(outer, name="efa", ibgda=False))))


SIX = Experts(num_experts=6, topk=2, ffn_hidden_size=32)
MOE = replace(LLAMA, feed_forward=SIX)
NET = GatedDeltaNet(num_key_heads=4, num_value_heads=8, key_head_dim=8, value_head_dim=8)
LATENT = replace(LLAMA, mixer=LatentAttention(kv_lora_rank=8, qk_head_dim=8, qk_rope_head_dim=4, v_head_dim=8))
CPU, NO_TE = workload(LLAMA, gpu="cpu", software=Software()), workload(LLAMA, software=BARE)


def pattern(*layers: dict[str, Any], **fields: Any) -> Architecture:
    return replace(LLAMA, pattern=tuple(Run(layers=1, **layer) for layer in layers), **fields)


# ---- DeepSpeed


def test_a_model_is_built_whole_where_host_memory_holds_just_that() -> None:
    """16 bits a weight, 32 in fp32, on each rank of AutoTP."""
    half, full = workload(LLAMA), workload(LLAMA, precision="fp32")
    n = describe(LLAMA, 64).parameters
    held(
        ds.autotp_host,
        (with_host(half, 2 * n), {"tp": 2}, None),
        (with_host(half, 2 * n - 1), {"tp": 2}, "tp=2: AutoTP builds the whole model in host memory first"),
        (with_host(half, 0), {"tp": 1}, None),
        (with_host(full, 4 * n), {"tp": 2}, None),
        (with_host(full, 4 * n - 1), {"tp": 2}, "tp=2: AutoTP builds the whole"),
    )


def test_checkpoints_of_all_layers_but_the_last_lie_in_host_memory_beside_the_optimizers_states() -> None:
    """8 layers of 64 tokens x 64: 7 checkpoints of 8,192 bytes, by micro-batch and over cp."""
    given, n = workload(LLAMA), describe(LLAMA, 64).parameters
    one = 7 * 64 * 64 * 2
    away = {"offload_activations": True}
    both = away | {"offload_optimizer": True, "dp": 4, "cp": 2}
    refused = "offload_activations needs "
    for choices, needed in (
        (away, one),
        (away | {"micro_batch_size": 3}, 3 * one),
        (away | {"cp": 2, "dp": 4}, one // 2),
        (both | {"zero_stage": 1}, one // 2 + 18 * n // 8),
        (both | {"zero_stage": 2}, one // 2 + 18 * n // 8),
        (both | {"zero_stage": 3}, one // 2 + 20 * n // 8),
    ):
        held(ds.activations_host, (with_host(given, needed), choices, None), (with_host(given, needed - 1), choices, refused))
    fp32 = workload(LLAMA, precision="fp32")
    held(ds.activations_host, (with_host(fp32, 2 * one), away, None), (with_host(fp32, 2 * one - 1), away, refused))
    held(ds.activations_host, (with_host(given, 0), {}, None))


def test_a_window_as_long_as_the_sequence_hides_nothing_from_ulysses() -> None:
    def windowed(window: int, length: int = 64) -> Workload:
        return workload(replace(LLAMA, family="phi3", mixer=GroupedQueryAttention(window=window)), seq_length=length)

    short = "cp=2 with a window of 63 tokens: Ulysses drops the mask"
    held(
        ds.ulysses_family,
        (windowed(64), {"cp": 2}, None),
        (windowed(65), {"cp": 2}, None),
        (windowed(63), {"cp": 2}, short),
        (windowed(63), {"cp": 1}, None),
        (LLAMA, {"cp": 2}, None),
        (GPT, {"cp": 2}, "cp=2: transformers' GPT2LMHeadModel can't be run"),
        (BERT, {"cp": 1}, None),
    )
    held(
        RULES["ulysses"],
        (LLAMA, {"cp": 8}, None),
        (LLAMA, {"cp": 2}, None),
        (LLAMA, {"cp": 1}, None),
        (LLAMA, {"cp": 3}, "cp=3 does not divide num_attention_heads=8"),
        (replace(LLAMA, num_attention_heads=12, num_query_groups=6), {"cp": 4}, "cp=4 neither divides num_query_groups=6"),
        (replace(LLAMA, num_attention_heads=12, num_query_groups=6), {"cp": 12}, None),
    )
    held(RULES["autotp_x"], (LLAMA, {"tp": 2}, None), (LLAMA, {"cp": 2}, None), (LLAMA, {"tp": 2, "cp": 2}, "tp=2 cp=2"))
    held(
        RULES["offload_ulysses"],
        (LLAMA, {"cp": 2}, None),
        (LLAMA, {"offload_optimizer": True}, None),
        (LLAMA, {"cp": 2, "offload_optimizer": True}, "offload_optimizer with cp=2"),
    )


def test_tiles_divide_the_tokens_of_a_rank_for_plain_models_alone() -> None:
    tied = replace(LLAMA, tie_embeddings=True)
    adapted = workload(LLAMA, lora=Lora(rank=4))
    held(
        RULES["tiles"],
        (GPT, {}, None),
        (LLAMA, {"tiled_mlp": 64}, None),
        (LLAMA, {"tiled_mlp": 32, "cp": 2}, None),
        (LLAMA, {"tiled_mlp": 64, "cp": 2}, "tiled_mlp=64 does not divide the 32 tokens of a sequence on a rank"),
        (LLAMA, {"tiled_logits": 3}, "tiled_logits=3 does not divide the 64 tokens"),
        (LLAMA, {"tiled_mlp": 0}, "tiled_mlp=0 does not divide"),
        (LLAMA, {"tiled_mlp": 2, "tp": 2}, "tiled_mlp=2 with tp=2: never tried"),
        (adapted, {"tiled_mlp": 2}, "tiled_mlp=2 with lora.rank=4"),
        (tied, {"tiled_mlp": 2}, None),
        (tied, {"tiled_mlp": 2, "tiled_logits": 2}, "tiled_logits=2 with tie_embeddings=true"),
        (tied, {"tiled_logits": 2}, "tiled_logits=2 with tie_embeddings=true"),
        (LLAMA, {"tiled_logits": 2}, None),
    )


def test_hpz_takes_groups_of_two_or_more_ranks_that_divide_the_world() -> None:
    third = {"zero_stage": 3}
    held(
        ds.hpz,
        (LLAMA, third, None),
        (LLAMA, third | {"zero_shard_size": 2}, None),
        (LLAMA, third | {"zero_shard_size": 8}, None),
        (LLAMA, third | {"zero_shard_size": 1}, "zero_shard_size=1 must be above 1 and divide the 8 ranks"),
        (LLAMA, third | {"zero_shard_size": 3}, "zero_shard_size=3 must be above 1"),
        (LLAMA, third | {"zero_shard_size": 2, "tp": 2, "dp": 4}, "zero_shard_size=2 with tp=2"),
        (LLAMA, third | {"zero_shard_size": 2, "cp": 2, "dp": 4}, "zero_shard_size=2 with cp=2"),
        (LLAMA, {"zero_stage": 2, "zero_shard_size": 3}, None),
    )
    held(
        RULES["lora_tp"],
        (workload(LLAMA, lora=Lora(rank=4)), {"tp": 2}, None),
        (workload(GPT, lora=Lora(rank=4)), {"tp": 1}, None),
        (GPT, {"tp": 2}, None),
        (workload(GPT, lora=Lora(rank=4)), {"tp": 2}, "tp=2 with lora.rank=4"),
    )
    held(RULES["lora_hpz"], (workload(LLAMA, lora=Lora(rank=4)), {}, None), (LLAMA, {"zero_shard_size": 2}, None))
    held(RULES["lora_offload"], (workload(LLAMA, lora=Lora(rank=4)), {}, None), (LLAMA, {"offload_optimizer": True}, None))
    away = {"offload_activations": True, "recompute": "full"}
    held(
        RULES["activation_offload"],
        (LLAMA, away, None),
        (T5, {}, None),
        (LLAMA, away | {"tp": 2}, "offload_activations with tp=2 ep=1"),
        (LLAMA, away | {"ep": 2}, "offload_activations with tp=1 ep=2"),
        (T5, away, "offload_activations: tried with"),
    )
    held(RULES["autotp_family"], (LLAMA, {"tp": 2}, None), (GPT, {"tp": 1}, None), (GPT, {"tp": 2}, "tp=2: AutoTP refuses GPT-2"))
    held(
        ds.autotp_divides,
        (LLAMA, {"tp": 4}, None),
        (LLAMA, {"tp": 8}, "tp=8 does not divide num_query_groups=4"),
        (replace(LLAMA, vocab_size=501), {"tp": 2}, "tp=2 does not divide vocab_size=501"),
        (replace(LLAMA, vocab_size=501, tie_embeddings=True), {"tp": 2}, None),
        (replace(LLAMA, ffn_hidden_size=193), {"tp": 2}, "tp=2 does not divide ffn_hidden_size=193"),
    )


# ---- megatron-core: cuts


def test_tensor_and_context_parallelism_divide_what_they_cut() -> None:
    held(
        RULES["groups_tp"],
        (LLAMA, {"tp": 2}, None),
        (LLAMA, {"tp": 4}, None),
        (LLAMA, {"tp": 8}, None),
        (replace(LLAMA, num_query_groups=6, num_attention_heads=12), {"tp": 4}, "tp=4 neither divides num_query_groups=6"),
    )
    held(
        RULES["sp_seq_div"],
        (LLAMA, {"tp": 8, "sequence_parallel": True}, None),
        (workload(LLAMA, seq_length=63), {"tp": 2}, None),
        (workload(LLAMA, seq_length=60), {"tp": 2, "cp": 2, "sequence_parallel": True}, None),
        (workload(LLAMA, seq_length=60), {"tp": 4, "cp": 2, "sequence_parallel": True}, "sequence_parallel: tp*cp=8 does not"),
    )
    held(
        RULES["cp_seq"],
        (LLAMA, {"cp": 2}, None),
        (workload(LLAMA, seq_length=63), {"cp": 1}, None),
        (workload(LLAMA, seq_length=66), {"cp": 2}, "2*cp=4 does not divide seq_length=66"),
    )
    held(
        RULES["cp_te"],
        (LLAMA, {"cp": 2}, None),
        (NO_TE, {"cp": 1}, None),
        (NO_TE, {"cp": 2}, "cp=2 needs Transformer Engine's"),
        (workload(LLAMA, gpu="cpu"), {"cp": 2}, None),
    )
    held(
        RULES["cp_family"],
        (BERT, {"cp": 1}, None),
        (LLAMA, {"cp": 2}, None),
        (BERT, {"cp": 2}, "cp=2: in megatron-core every rank of bert"),
    )
    before = {"order": PP_BEFORE_DP, "dp": 2}
    held(
        mesh.expert_order,
        (GPT, before | {"pp": 2}, None),
        (GPT, before | {"cp": 2}, None),
        (GPT, {"dp": 2, "pp": 2, "cp": 2}, None),
        (GPT, before | {"pp": 2, "cp": 2}, "expert_dp=4 is not dp=2"),
        (MOE, before | {"pp": 2, "ep": 2}, "expert_dp=1 is not dp=2"),
    )
    whole = {"sequence_parallel": True, "tp": 2}
    apex = replace(BARE, apex=True)
    held(
        RULES["sp_norm_local"],
        (NO_TE, {"tp": 2}, None),
        (LLAMA, whole, None),
        (workload(LLAMA, gpu="cpu"), whole, None),
        (workload(GPT, software=apex), whole, None),
        (NO_TE, whole, "sequence_parallel with RMSNorm needs Transformer Engine"),
        (workload(LLAMA, software=apex), whole, "sequence_parallel with RMSNorm needs Transformer Engine"),
        (workload(GPT, software=BARE), whole, "sequence_parallel with LayerNorm needs Transformer Engine or Apex"),
        (workload(BERT, software=apex), whole, None),
        (workload(BERT, software=replace(BARE, transformer_engine=True)), whole, "sequence_parallel with bert needs Apex"),
    )


# ---- megatron-core: models


def test_sequences_end_with_the_positions_and_heads_divide_the_width() -> None:
    held(model.positions, (workload(GPT, seq_length=128), {}, None), (workload(GPT, seq_length=129), {}, "seq_length=129 is above max"))
    held(
        model.head_width,
        (GPT, {}, None),
        (replace(GPT, num_attention_heads=6), {}, "num_attention_heads=6 does not divide"),
        (replace(GPT, num_attention_heads=6, kv_channels=8), {}, None),
    )
    held(
        RULES["no_gqa"],
        (LLAMA, {}, None),
        (replace(BERT, num_query_groups=8), {}, None),
        (replace(BERT, num_query_groups=4), {}, "num_query_groups=4 of 8 heads: megatron-core's bert"),
    )
    rope = replace(BERT, position_embedding="rope")
    held(
        RULES["position_embedding"],
        (LLAMA, {}, None),
        (replace(LLAMA, position_embedding="none"), {}, None),
        (rope, {}, None),
        (T5, {}, None),
        (replace(LLAMA, rotary_base=5), {}, None),
        (replace(BERT, rotary_base=5), {}, None),
        (replace(rope, rotary_base=5), {}, "rotary_base=5: megatron-core's bert has 10000"),
        (replace(rope, rope_scaling_factor=2.0), {}, "rope_scaling_factor=2: megatron-core's bert has none"),
        (replace(BERT, position_embedding="none"), {}, "position_embedding=none: megatron-core's bert has learned_absolute, rope"),
        (replace(LLAMA, position_embedding="relative"), {}, "position_embedding=relative: megatron-core's llama has"),
    )
    needs = "position_embedding=relative needs Transformer Engine's attention, on GPUs"
    held(
        RULES["relative_te"],
        (T5, {}, None),
        (workload(T5, software=BARE), {}, needs),
        (NO_TE, {}, None),
        (workload(T5, gpu="cpu", software=Software()), {}, needs),
    )


def test_layers_of_several_kinds_are_those_that_megatron_core_alternates() -> None:
    attention, latent = {"mixer": GroupedQueryAttention()}, {"mixer": LATENT.mixer}
    held(
        RULES["mixer_kinds"],
        (LATENT, {}, None),
        (pattern(attention, {"mixer": NET}), {}, None),
        (pattern(attention, latent), {}, "latent attention in some layers"),
    )
    held(
        RULES["latent_rope"],
        (LATENT, {}, None),
        (replace(LLAMA, position_embedding="none"), {}, None),
        (replace(LATENT, position_embedding="none"), {}, "position_embedding=none: latent attention has rotary"),
    )
    held(
        RULES["latent_sp"],
        (LATENT, {}, None),
        (LATENT, {"tp": 2, "sequence_parallel": True}, None),
        (LLAMA, {"tp": 2}, None),
        (LATENT, {"tp": 2}, "tp=2 without sequence_parallel"),
    )
    mtp = replace(LLAMA, mtp_num_layers=1)
    held(
        RULES["mtp_positions"],
        (mtp, {}, None),
        (replace(mtp, position_embedding="none"), {}, None),
        (GPT, {}, None),
        (replace(GPT, mtp_num_layers=1), {}, "position_embedding=learned_absolute: Megatron has multi-token"),
    )
    tied = replace(mtp, tie_embeddings=True)
    held(
        RULES["mtp_tied"],
        (tied, {}, None),
        (mtp, {"pp": 2}, None),
        (replace(LLAMA, tie_embeddings=True), {"pp": 2}, None),
        (tied, {"pp": 2}, "pp=2 with mtp_num_layers=1 and tied embeddings"),
    )
    four, eight, sinks = (
        {"mixer": GroupedQueryAttention(window=4)},
        {"mixer": GroupedQueryAttention(window=8)},
        {"mixer": GroupedQueryAttention(sinks=True)},
    )
    deep = Vision(model_type="qwen3_vl", deepstack_visual_indexes=(1, 2), num_layers=3, hidden_size=64, num_attention_heads=8,
                  ffn_hidden_size=64, hidden_act="gelu_pytorch_tanh", patch_size=16)  # fmt: skip
    seeing = replace(LLAMA, vision=deep, num_layers=8)
    held(
        RULES["tower"],
        (LLAMA, {"cp": 2}, None),
        (seeing, {}, None),
        (seeing, {"pp": 4, "dp": 2}, None),
        (seeing, {"pp": 8, "dp": 1}, "pp=8: 2 layers are given what the tower saw"),
        (
            seeing,
            {"pp": 2, "vpp": 2, "dp": 4, "num_microbatches": 8},
            "vpp=2 of qwen3_vl: Megatron-Bridge tells its model",
        ),
        (
            replace(seeing, vision=replace(deep, model_type="qwen3_5", deepstack_visual_indexes=())),
            {"pp": 2, "vpp": 2, "dp": 4, "num_microbatches": 8},
            None,
        ),
    )
    held(
        RULES["tower_tp"],
        (LLAMA, {"tp": 8, "dp": 1}, None),
        (seeing, {"tp": 8, "dp": 1}, None),
        (replace(seeing, vision=replace(deep, num_attention_heads=12)), {"tp": 8, "dp": 1}, "tp=8 does not divide the tower's num_att"),
        (replace(seeing, vision=replace(deep, ffn_hidden_size=68)), {"tp": 8, "dp": 1}, "tp=8 does not divide the tower's ffn_hidden"),
    )
    held(
        RULES["tower_unplanned"],
        (LLAMA, {"cp": 2}, None),
        (seeing, {}, None),
        (seeing, {"cp": 2}, "cp=2 of qwen3_vl: every rank of a sequence looks at all of its images"),
        (replace(seeing, vision=replace(deep, model_type="internvl")), {}, "model.vision of internvl: Megatron-Bridge has"),
        (workload(seeing, freeze=("vision", "projector")), {}, None),
        (workload(seeing, freeze=("vision", "language")), {}, None),
        (workload(seeing, task="sft", packing=False), {}, None),
        (workload(seeing, task="sft", packing=True), {}, "data.packing=true of qwen3_vl"),
    )
    held(
        model.window_kinds,
        (pattern(four, attention), {}, None),
        (pattern(four, eight), {}, "windows of 4 and 8 tokens"),
        (pattern(sinks, sinks), {}, None),
        (pattern(sinks, attention), {}, "sinks in some layers only"),
        (pattern(four, attention, mtp_num_layers=1, num_layers=3), {}, None),
        (pattern(four, attention, mtp_num_layers=1), {}, "a prediction layer after windows"),
        (pattern(attention, mtp_num_layers=1), {}, None),
        (pattern(four, mtp_num_layers=1), {}, None),
        (pattern(attention, four, attention, mtp_num_layers=1, num_layers=3), {}, None),
    )
    mamba = replace(LLAMA, mixer=Mamba2(num_heads=8, head_dim=8, state_size=4, num_groups=2))
    held(RULES["mamba_groups"], (mamba, {"tp": 2}, None), (LLAMA, {"tp": 8}, None), (mamba, {"tp": 4}, "tp=4 does not divide mamba2"))
    held(RULES["mamba_cp"], (mamba, {}, None), (LLAMA, {"cp": 2}, None), (mamba, {"cp": 2}, "cp=2 with Mamba-2 layers"))
    nets = replace(LLAMA, mixer=NET)
    other, gated = {"mixer": replace(NET, key_head_dim=4)}, {"mixer": GroupedQueryAttention(output_gate=True)}
    held(
        model.delta_kinds,
        (nets, {}, None),
        (LLAMA, {}, None),
        (pattern({"mixer": NET}, attention), {}, None),
        (pattern({"mixer": NET}, gated), {}, None),
        (pattern({"mixer": NET}, other), {}, "gated delta nets of 2 sizes"),
        (mamba, {}, None),
        (pattern(gated, gated), {}, None),
        (pattern({"mixer": NET}, {"mixer": mamba.mixer}), {}, "gated delta nets beside another mixer"),
        (pattern(gated, attention), {}, "gates of attention's output in some layers only"),
    )
    held(RULES["delta_heads"], (nets, {"tp": 4}, None), (LLAMA, {"tp": 8}, None), (nets, {"tp": 8}, "tp=8 does not divide gated_delta_net"))
    held(
        RULES["delta_norm"],
        (nets, {}, None),
        (LLAMA, {"tp": 2}, None),
        (nets, {"tp": 2, "sequence_parallel": True}, None),
        (nets, {"tp": 2}, "tp=2 without sequence_parallel"),
    )
    held(
        RULES["delta_cp"],
        (nets, {}, None),
        (LLAMA, {"cp": 2}, None),
        (nets, {"cp": 2}, "cp=2 with gated delta nets: Megatron-core 0.16"),
        (workload(nets, software=Software(megatron_core="0.19.0")), {"cp": 2}, "cp=2 with gated delta nets: Megatron-core exchanges"),
    )


# ---- megatron-core: numbers, recompute, options


def test_fp8_takes_widths_and_tokens_in_multiples_from_the_gpu_on_that_has_it() -> None:
    def eight(recipe: str | None = None, gpu: str = "B200", a: Architecture = LLAMA, **fields: Any) -> Workload:
        return workload(a, gpu=gpu, precision="fp8", fp8_recipe=recipe, **fields)

    old = "fp8_recipe={} needs compute capability {}; "
    held(
        RULES["fp8"],
        (eight(None, "L40S"), {}, None),
        (eight("tensorwise", "L40S"), {}, None),
        (eight("blockwise", "H200"), {}, None),
        (eight("mxfp8", "B200"), {}, None),
        (eight(None, "A100-SXM-80GB"), {}, old.format("delayed", 8.9)),
        (eight("blockwise", "L40S"), {}, old.format("blockwise", 9.0)),
        (eight("mxfp8", "H200"), {}, old.format("mxfp8", 10.0)),
        (eight("tensorwise", "MI300X"), {}, None),
        (eight("blockwise", "MI300X"), {}, "fp8_recipe=blockwise on MI300X: ROCm's Transformer Engine refuses it"),
        (eight("mxfp8", "MI355X"), {}, "fp8_recipe=mxfp8 on MI355X: ROCm's Transformer Engine has it on gfx95x alone"),
        (workload(LLAMA, gpu="A100-SXM-80GB"), {}, None),
        (eight(software=BARE), {}, "precision=fp8 needs Transformer Engine"),
        (eight(gpu="cpu", software=Software()), {}, "precision=fp8 needs Transformer Engine"),
    )
    narrow = replace(LLAMA, hidden_size=72)
    held(
        precision.fp8_features,
        (eight(), {"tp": 4}, None),
        (eight(), {"tp": 8}, "fp8 products need widths that are multiples of 16: num_attention_heads*kv"),
        (eight(a=narrow), {}, "fp8 products need widths that are multiples of 16: hidden_size is 72"),
        (narrow, {}, None),
        (eight("mxfp8"), {"tp": 2}, None),
        (eight("mxfp8"), {"tp": 4}, "fp8 products need widths that are multiples of 32: num_attention_h"),
        (eight(a=replace(LLAMA, ffn_hidden_size=24)), {}, None),
        (eight(a=replace(LLAMA, ffn_hidden_size=20)), {}, "fp8 products need widths"),
        (eight(a=replace(LLAMA, mixer=NET)), {}, None),
        (eight(a=replace(LLAMA, mixer=replace(NET, num_value_heads=4))), {}, "fp8 products need widths that are multiples of 16: a gated"),
    )
    held(
        precision.fp8_tokens,
        (eight(), {"cp": 8}, None),
        (eight(), {"cp": 16}, "fp8 products need a multiple of 8 tokens: seq_length=64 x micro_batch_size over"),
        (eight(), {"cp": 16, "micro_batch_size": 2}, None),
        (eight(), {"tp": 16}, None),
        (workload(LLAMA), {"cp": 16}, None),
        (eight(), {"tp": 16, "sequence_parallel": True}, "fp8 products need a multiple of 8 tokens"),
        (eight("mxfp8"), {"cp": 2}, None),
        (eight("mxfp8"), {"cp": 4}, "fp8 products need a multiple of 32 tokens"),
    )


def test_recipes_of_fp8_but_mxfp8_take_eighths_of_tokens_and_sixteenths_of_widths() -> None:
    for recipe in ("delayed", "tensorwise", "blockwise"):
        given = workload(LLAMA, gpu="B200", precision="fp8", fp8_recipe=recipe)
        held(precision.fp8_features, (given, {"tp": 4}, None), (given, {"tp": 8}, "fp8 products need widths that are multiples of 16"))
        held(precision.fp8_tokens, (given, {"cp": 8}, None), (given, {"cp": 16}, "fp8 products need a multiple of 8 tokens"))


def test_the_precision_aware_optimizer_is_transformer_engines_adam_over_divided_states() -> None:
    aware = {"precision_aware_optimizer": True}
    one = {"zero_stage": 1}
    held(
        RULES["precision_aware"],
        (workload(LLAMA, **aware), one, None),
        (LLAMA, {"zero_stage": 0}, None),
        (workload(LLAMA, optimizer="sgd", **aware), one, "precision_aware_optimizer with optimizer=sgd"),
        (workload(LLAMA, precision="fp32", **aware), one, "precision_aware_optimizer with precision=fp32"),
        (workload(LLAMA, software=BARE, **aware), one, "precision_aware_optimizer needs Transformer Engine's Adam"),
        (workload(LLAMA, gpu="cpu", software=Software(), **(aware | {"precision": "bf16"})), one, "precision_aware_optimizer needs Transf"),
        (workload(LLAMA, **aware), {"zero_stage": 0}, "precision_aware_optimizer needs the distributed optimizer"),
    )
    held(
        RULES["one_gradient_buffer"],
        (LLAMA, {}, None),
        (workload(LLAMA, grad_accum_dtype="bf16"), {}, "grad_accum_dtype=bf16 and"),
        (workload(LLAMA, grad_accum_dtype="bf16", grad_reduce_dtype="bf16"), {}, None),
    )


def test_modules_are_recomputed_where_they_are_and_keep_something() -> None:
    def mode(name: str) -> dict[str, Any]:
        return {"recompute": name}

    held(
        RULES["recompute_mlp_bias"],
        (LLAMA, mode("mlp"), None),
        (GPT, mode("full"), None),
        (GPT, mode("mlp"), "recompute=mlp with add_bias"),
    )
    held(
        RULES["recompute_fused_norm"],
        (NO_TE, mode("layernorm"), None),
        (LLAMA, mode("mlp"), None),
        (CPU, mode("layernorm"), None),
        (LLAMA, mode("layernorm"), "recompute=layernorm: Transformer Engine's norms"),
    )
    held(
        RULES["recompute_flash"],
        (LLAMA, mode("selective"), None),
        (NO_TE, mode("core_attn+mlp"), None),
        (CPU, mode("core_attn+mlp"), None),
        (LLAMA, mode("mlp"), None),
        (LLAMA, mode("core_attn+mlp"), "recompute=core_attn+mlp: flash attention keeps no scores"),
    )
    held(
        RULES["recompute_latent"],
        (LATENT, mode("mla_up_proj"), None),
        (LLAMA, mode("full"), None),
        (LLAMA, mode("mla_up_proj"), "recompute=mla_up_proj: mla_up_proj is a module of latent"),
    )
    delayed = workload(MOE, precision="fp8")
    held(
        RULES["recompute_experts"],
        (MOE, mode("moe_act"), None),
        (LLAMA, mode("full"), None),
        (LLAMA, mode("moe_act"), "recompute=moe_act: moe_act is a module of exp"),
        (workload(MOE, software=BARE), mode("moe_act"), "recompute=moe_act: moe_act needs the experts' products as one"),
        (workload(MOE, gpu="cpu", software=Software()), mode("moe_act"), "recompute=moe_act: moe_act needs the experts' products as one"),
        (delayed, mode("moe_act"), "recompute=moe_act: delayed scaling"),
        (workload(MOE, precision="fp8", fp8_recipe="delayed"), mode("moe_act"), "recompute=moe_act: delayed scaling"),
        (workload(MOE, precision="fp8", fp8_recipe="tensorwise"), mode("moe_act"), None),
    )


def test_options_are_taken_where_megatron_has_what_they_need() -> None:
    overlap = {"tp_comm_overlap": True, "sequence_parallel": True}
    held(
        RULES["tp_comm_overlap"],
        (NO_TE, {"tp": 2}, None),
        (LLAMA, overlap | {"tp": 8}, None),
        (workload(LLAMA, world=16), overlap | {"tp": 9}, "tp_comm_overlap: tp=9 reaches beyond the 8 GPUs of node"),
        (NO_TE, overlap, "tp_comm_overlap needs Transformer"),
        (CPU, overlap, "tp_comm_overlap needs Transformer"),
        (LLAMA, {"tp_comm_overlap": True}, "tp_comm_overlap needs sequence_parallel"),
        (LATENT, overlap | {"tp": 8}, "tp_comm_overlap with latent attention does nothing"),
        (workload(LLAMA, precision="fp8", fp8_recipe="tensorwise"), overlap | {"tp": 8}, None),
        (workload(LLAMA, precision="fp8", fp8_recipe="blockwise"), overlap | {"tp": 8}, "tp_comm_overlap with fp8_recipe=blockwise"),
    )
    graph = {"cuda_graph_impl": "local"}
    dropping = replace(LLAMA, attention_dropout=0.1)
    held(
        graphs.beside_recompute,
        (MOE, {}, None),
        (LLAMA, graph, None),
        (LLAMA, {"cuda_graph_impl": "full_iteration", "recompute": "full"}, None),
        (dropping, graph, None),
        (dropping, graph | {"recompute": "mlp"}, None),
        (dropping, graph | {"recompute": "selective", "cuda_graph_modules": "mlp"}, None),
        (dropping, graph | {"recompute": "selective"}, "cuda_graph_impl=local with recompute=selective and attention_dropout=0.1"),
        (replace(LLAMA, hidden_dropout=0.1), graph | {"recompute": "selective"}, None),
    )
    held(
        RULES["cuda_graphs"],
        (MOE, {}, None),
        (LLAMA, graph, None),
        (NO_TE, graph, "cuda_graph_impl=local needs Trans"),
        (CPU, graph, "cuda_graph_impl=local needs Trans"),
        (MOE, graph, None),
        (MOE, graph | {"ep": 2}, None),
        (MOE, {"cuda_graph_impl": "transformer_engine", "ep": 2}, None),
        (MOE, {"cuda_graph_impl": "full_iteration"}, "cuda_graph_impl=full_iteration with experts"),
        (LLAMA, {"cuda_graph_impl": "full_iteration", "cuda_graph_modules": "attn"}, "cuda_graph_modules=attn with cuda_graph_impl=full"),
    )
    held(
        options.cp_kind,
        (LLAMA, {}, None),
        (LLAMA, {"cp": 2}, None),
        (LLAMA, {"cp": 2, "cp_comm_type": "all_gather"}, None),
        (LLAMA, {"cp_comm_type": "a2a"}, "cp_comm_type=a2a needs cp above 1"),
        (CPU, {"cp": 2, "cp_comm_type": "all_gather"}, None),
        (CPU, {"cp": 2}, "cp_comm_type=p2p is Transformer Engine's"),
        (LLAMA, {"cp": 4, "cp_comm_type": "a2a"}, None),
        (LLAMA, {"cp": 2, "tp": 2, "cp_comm_type": "a2a"}, None),
        (LLAMA, {"cp": 4, "tp": 2, "cp_comm_type": "a2a"}, "cp_comm_type=a2a: 4 ranks do not divide num_query_groups/tp=2"),
        (LLAMA, {"cp": 16, "cp_comm_type": "a2a"}, "cp_comm_type=a2a: 16 ranks do not divide num_attention_heads/tp=8"),
        (
            workload(LLAMA, world=16),
            {"cp": 8, "tp": 2, "cp_comm_type": "a2a+p2p"},
            "cp_comm_type=a2a+p2p: 4 ranks do not divide num_query_groups",
        ),
        (workload(replace(LLAMA, num_query_groups=8), world=16), {"cp": 8, "tp": 2, "cp_comm_type": "a2a+p2p"}, None),
        (
            workload(LLAMA, world=16),
            {"cp": 2, "tp": 8, "cp_comm_type": "a2a+p2p"},
            "cp_comm_type=a2a+p2p: cp=2 with tp=8 is not of several",
        ),
    )
    flex = {"moe_token_dispatcher_type": "flex"}
    padding = replace(LLAMA, feed_forward=replace(SIX, capacity_factor=1.0, pad_to_capacity=True))
    held(
        options.dispatcher,
        (LLAMA, {}, None),
        (MOE, {"moe_token_dispatcher_type": "allgather"}, None),
        (MOE, flex | {"ep": 2}, None),
        (MOE, flex | {"tp": 2, "etp": 2}, None),
        (MOE, flex | {"tp": 2, "etp": 1}, "moe_token_dispatcher_type=flex: etp*ep=1"),
        (MOE, flex | {"ep": 6}, "moe_token_dispatcher_type=flex: etp*ep=6, and DeepEP takes 2, 4"),
        (workload(MOE, world=48), flex | {"ep": 48}, "moe_token_dispatcher_type=flex: etp*ep=48"),
        (workload(MOE, world=32), flex | {"ep": 32}, None),
        (workload(MOE, gpu="B200", world=48), flex | {"ep": 48}, None),
        (workload(MOE, gpu="B200"), flex | {"tp": 2, "etp": 1}, "moe_token_dispatcher_type=flex: etp*ep=1"),
        (on_nodes(MOE, 4), flex | {"ep": 4}, None),
        (on_nodes(MOE, 4), flex | {"ep": 8}, "moe_token_dispatcher_type=flex: etp*ep=8 on nodes of 4"),
        (on_nodes(MOE, 4), flex | {"ep": 16}, "moe_token_dispatcher_type=flex: etp*ep=16 on nodes of 4"),
        (over_efa("H100-SXM-80GB"), flex | {"ep": 8}, None),
        (over_efa("H100-SXM-80GB"), flex | {"ep": 16}, "moe_token_dispatcher_type=flex: etp*ep=16 goes over efa, and DeepEP as it is"),
        (over_efa("B200"), flex | {"ep": 8}, None),
        (over_efa("B200"), flex | {"tp": 2, "etp": 2, "ep": 8}, "moe_token_dispatcher_type=flex: etp*ep=16 goes over efa, and HybridEP"),
        (over_efa("B200"), {"ep": 16}, None),
        (padding, flex | {"ep": 2}, "moe_token_dispatcher_type=flex: DeepEP does not"),
        (padding, {"moe_token_dispatcher_type": "allgather"}, None),
        (workload(padding, gpu="B200"), flex | {"ep": 2}, None),
        (workload(MOE, gpu="cpu"), flex | {"ep": 2}, "moe_token_dispatcher_type=flex needs DeepEP"),
        (
            workload(MOE, gpu="MI300X"),
            flex | {"ep": 2},
            "moe_token_dispatcher_type=flex: DeepEP needs NVIDIA's GPUs (its README), not MI300X",
        ),
        (workload(MOE, gpu="cpu"), {"moe_token_dispatcher_type": "allgather"}, None),
        (LLAMA, flex, "moe_token_dispatcher_type=flex: a dense model"),
    )
    apart = {"moe_permute_fusion": False}
    held(
        RULES["permute_fusion"],
        (LLAMA, {}, None),
        (LLAMA, apart, "moe_permute_fusion=false does nothing: a dense model"),
        (MOE, apart, None),
        (MOE, apart | flex | {"ep": 2}, None),
        (workload(MOE, gpu="B200"), apart, None),
        (
            workload(MOE, gpu="B200"),
            apart | flex | {"ep": 2},
            "moe_permute_fusion=false does nothing with moe_token_dispatcher_type=flex on",
        ),
        (workload(MOE, gpu="cpu"), apart, "moe_permute_fusion=false does nothing on a CPU"),
    )
    kept, narrow = {"fp8_param_gather": True}, workload(LLAMA, precision="fp8", fp8_recipe="delayed")
    held(
        RULES["fp8_weights"],
        (LLAMA, {}, None),
        (narrow, {}, None),
        (narrow, kept | {"zero_stage": 1}, None),
        (narrow, kept | {"zero_stage": 3, "megatron_fsdp": True}, None),
        (narrow, kept, "fp8_param_gather with zero_stage=0"),
        (LLAMA, kept | {"zero_stage": 1}, "fp8_param_gather with precision=bf16"),
    )
    hosted, aware = {"offload_optimizer": True, "zero_stage": 1}, workload(LLAMA, precision_aware_optimizer=True)
    delayed, mxfp8 = (workload(LLAMA, precision="fp8", fp8_recipe=name, precision_aware_optimizer=True) for name in ("delayed", "mxfp8"))
    held(
        RULES["optimizer_offload"],
        (LLAMA, {}, None),
        (aware, hosted, None),
        (delayed, hosted | {"fp8_param_gather": True}, None),
        (mxfp8, hosted, None),
        (mxfp8, hosted | {"fp8_param_gather": True}, "offload_optimizer with fp8_param_gather needs train.fp8_recipe=delayed, not mxfp8"),
        (LLAMA, hosted, "offload_optimizer needs train.precision_aware_optimizer=true"),
        (CPU, hosted, "offload_optimizer moves states out of a GPU's memory"),
    )
    fsdp = {"megatron_fsdp": True, "zero_stage": 3}
    held(
        RULES["mfsdp"],
        (LLAMA, fsdp, None),
        (LLAMA, {"pp": 2}, None),
        (LLAMA, fsdp | {"pp": 2}, "megatron_fsdp with pp=2"),
        (CPU, fsdp, "megatron_fsdp needs GPUs"),
        (workload(LLAMA, optimizer="sgd"), fsdp, "megatron_fsdp with optimizer=sgd"),
    )
    summed = {"reduce_scatter_with_fp32_accumulation": True}
    held(
        RULES["fp32_accumulation"],
        (LLAMA, {}, None),
        (LLAMA, summed | {"zero_stage": 1}, None),
        (LLAMA, summed | {"zero_stage": 2}, "reduce_scatter_with_fp32_accumulation with zero_stage=2: it takes"),
        (LLAMA, summed | {"zero_stage": 1, "megatron_fsdp": True}, "reduce_scatter_with_fp32_accumulation with zero_stage=1: it"),
        (LLAMA, summed | {"zero_stage": 1, "zero_shard_size": 2}, "reduce_scatter_with_fp32_accumulation with zero_stage=1 and"),
    )


def test_experts_overlap_where_megatrons_combined_schedule_takes_them() -> None:
    lap = {"overlap_moe_expert_parallel_comm": True}
    shared = replace(MOE, feed_forward=replace(SIX, shared_ffn_hidden_size=32))
    new = Software(megatron_core="0.19.0")
    said = "overlap_moe_expert_parallel_comm: "
    held(
        RULES["expert_overlap"],
        (LLAMA, {}, None),
        (MOE, lap | {"ep": 2}, None),
        (MOE, lap | {"ep": 6}, f"{said}ep=6, one expert a rank: Megatron-core 0.16.1"),
        (MOE, lap | {"ep": 6, "moe_token_dispatcher_type": "flex"}, None),
        (MOE, lap | {"ep": 6, "etp": 2}, None),
        (workload(MOE, software=new), lap | {"ep": 6}, None),
        (MOE, lap | {"ep": 2, "pp": 2, "vpp": 2}, None),
        (MOE, lap | {"ep": 2, "pp": 2}, f"{said}pp=2 needs vpp above 1"),
        (MOE, lap, f"{said}with ep=1"),
        (replace(MOE, mtp_num_layers=1), lap | {"ep": 2, "pp": 2, "vpp": 2}, None),
        (replace(MOE, mtp_num_layers=1), lap | {"ep": 2}, f"{said}mtp_num_layers=1 with pp=1"),
        (workload(replace(MOE, mtp_num_layers=1), software=new), lap | {"ep": 2}, None),
        (replace(MOE, mtp_num_layers=2), lap | {"ep": 2}, f"{said}mtp_num_layers=2: it takes one"),
        (MOE, lap | {"ep": 2, "megatron_fsdp": True}, f"{said}with megatron_fsdp"),
        (MOE, lap | {"ep": 2, "recompute": "moe_act"}, None),
        (MOE, lap | {"ep": 2, "recompute": "mlp"}, f"{said}recompute=mlp: it computes no experts again"),
        (replace(MOE, pattern=(Run(layers=1, feed_forward=Mlp()), Run(layers=3))), lap | {"ep": 2, "recompute": "mlp"}, None),
        (workload(MOE, software=new), lap | {"ep": 2, "megatron_fsdp": True}, None),
        (shared, lap | {"ep": 2, "moe_shared_expert_overlap": True}, f"{said}with moe_shared_expert_overlap"),
        (workload(MOE, precision="fp32"), lap | {"ep": 2}, f"{said}in fp32"),
    )
    own = {"moe_shared_expert_overlap": True}
    held(
        RULES["shared_expert_overlap"],
        (MOE, {}, None),
        (shared, own, None),
        (MOE, own, "moe_shared_expert_overlap: this model has no"),
        (shared, own | {"moe_token_dispatcher_type": "allgather"}, "moe_shared_expert_overlap with moe_token_dispatcher_type=allg"),
    )
    late = {"delay_wgrad_compute": True}
    held(
        RULES["delayed_weight_gradients"],
        (NO_TE, {}, None),
        (MOE, late | lap, None),
        (MOE, late, "delay_wgrad_compute needs overlap_moe"),
        (workload(MOE, freeze=("vision",)), late | lap, None),
        (workload(MOE, freeze=("language",)), late | lap, "delay_wgrad_compute with train.freeze=language"),
        (NO_TE, late | lap, "delay_wgrad_compute needs Transformer"),
        (CPU, late | lap, "delay_wgrad_compute needs Transformer"),
    )


@pytest.mark.engines
@pytest.mark.parametrize("granularity", ["selective", "full"])
def test_megatrons_own_configuration_draws_the_same_border_of_recompute(granularity: str) -> None:
    """Beside the experts' exchange it takes `mlp`, which is that of layers without experts, and refuses full recompute alone."""
    config = pytest.importorskip("megatron.core.transformer.transformer_config")
    fields = {
        "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_moe_experts": 4, "moe_layer_freq": [0, 1], "bf16": True,
        "add_bias_linear": False, "expert_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall",
        "overlap_moe_expert_parallel_comm": True, "recompute_granularity": granularity,
    }  # fmt: skip
    if granularity == "selective":
        assert config.TransformerConfig(**fields, recompute_modules=["mlp"]).recompute_modules == ["mlp"]
    else:
        with pytest.raises((AssertionError, ValueError), match="full recomputation"):
            config.TransformerConfig(**fields, recompute_method="uniform", recompute_num_layers=1)
