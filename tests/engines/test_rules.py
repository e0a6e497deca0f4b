"""Each rule refuses what its engine refuses, says why in numbers, and names the engine's own rule."""

from __future__ import annotations

from typing import Any

import pytest
from hand_plans import BARE, BERT, GPT, LLAMA, T5, candidate, cluster, make_plan, training_for
from msgspec.structs import replace

from orchestrator.engines import ENGINES, hf_config, megatron_parts
from orchestrator.engines.megatron_versions import Release
from orchestrator.engines.rules.rule import CHOSEN, FACTS, NAMED, Refusal, Undivided
from orchestrator.hardware.spec import Cluster, Gpu, Software
from orchestrator.model.architecture import Run
from orchestrator.model.families import describe
from orchestrator.model.lora import Lora
from orchestrator.model.parts.attention import GroupedQueryAttention
from orchestrator.model.parts.experts import Experts
from orchestrator.model.parts.gated_delta_net import GatedDeltaNet
from orchestrator.model.parts.latent_attention import LatentAttention
from orchestrator.model.parts.mamba2 import Mamba2
from orchestrator.model.parts.part import Nothing
from orchestrator.model.parts.vision import Vision
from orchestrator.model.spec import Architecture
from orchestrator.model.training import Training
from orchestrator.strategy.legality import broken_rule, plan_only, rules_of, unsuited
from orchestrator.strategy.pins import Pins
from orchestrator.strategy.spec import PP_BEFORE_DP
from orchestrator.strategy.tree import FIXED_WITH, GIVEN, LEVELS, SHAPE, Tree
from orchestrator.strategy.workload import Workload


def workload(
    model: Architecture = GPT, gpu: str = "H100-SXM-80GB", world: int = 8, software: Software | None = None, **changes: Any
) -> Workload:
    training = training_for(model, **({"precision": "fp32"} if gpu == "cpu" else {}) | changes)
    # The rules judge an architecture that describe() would refuse as well: describe one that is in order and swap it.
    sound = {"gpt": GPT, "llama": LLAMA, "bert": BERT, "t5": T5}.get(model.family, GPT)
    length = min(training.seq_length, sound.max_position_embeddings)
    spec = describe(sound, length, training.decoder_seq_length if sound.family == "t5" else None)
    spec = replace(spec, architecture=model, seq_length=training.seq_length)
    return Workload(model=spec, training=training, cluster=cluster(gpu, world, software))


RULES = {rule.id: rule for engine in ENGINES.values() for rule in engine.capabilities(Software()).rules}
KEPT = {"keep_fp8_transpose_cache": True, "megatron_fsdp": True, "fp8_param_gather": True, "zero_stage": 3}
CROWDED_HOST = replace(workload(), cluster=replace(workload().cluster, host_memory=1000))


def refusals(engine: str, given: Workload, **choices: Any) -> dict[str, str]:
    """Every rule that this candidate breaks, with its reason."""
    capabilities = ENGINES[engine].capabilities(given.cluster.software)
    chosen = candidate(engine, **({"dp": 8} | choices))
    found = {rule.id: rule.check(chosen, given) for rule in rules_of(capabilities, given)}
    return {name: why for name, why in found.items() if why is not None}


def windowed(window: int, *, sinks: bool = False) -> Run:
    return Run(layers=1, mixer=GroupedQueryAttention(window=window, sinks=sinks))


BOTH = ("megatron", "megatron_deepspeed")
M, D = "megatron", "megatron_deepspeed"
SIX = Experts(num_experts=6, topk=2, ffn_hidden_size=32)
SHARED = replace(SIX, shared_ffn_hidden_size=32)
MIXTURE = replace(LLAMA, feed_forward=SIX)
BUFFERED = replace(LLAMA, feed_forward=replace(SIX, rank_capacity_factor=1.5))
BALANCED = replace(LLAMA, feed_forward=replace(SIX, aux_loss_coeff=0.01))
OVERLAP: dict[str, Any] = {"overlap_moe_expert_parallel_comm": True}
UNNORMALIZED = replace(LLAMA, feed_forward=replace(SIX, score="sigmoid", normalized=False))
TWO_MIXTURES = replace(LLAMA, pattern=(Run(layers=1, feed_forward=SIX), Run(layers=1, feed_forward=replace(SIX, topk=3))))
TOWER = Vision(
    model_type="qwen3_vl", num_layers=1, hidden_size=8, num_attention_heads=1, ffn_hidden_size=8, hidden_act="gelu", patch_size=2,
)  # fmt: skip
DEEP_TOWER = replace(TOWER, deepstack_visual_indexes=(*range(9),))
BIASED_MIXTURE = replace(MIXTURE, add_bias_linear=True)
LATENT = LatentAttention(q_lora_rank=32, kv_lora_rank=16, qk_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
LATENT_LLAMA = replace(LLAMA, mixer=LATENT)
WIDE = replace(GPT, num_attention_heads=6, hidden_size=96)
GROUPED = replace(LLAMA, num_attention_heads=24, num_query_groups=6, hidden_size=192)

STATES = replace(LLAMA, mixer=Mamba2(num_heads=4, head_dim=32, state_size=8, num_groups=2), feed_forward=Nothing())
DELTA = GatedDeltaNet(num_key_heads=2, num_value_heads=4, key_head_dim=16, value_head_dim=16)
DELTAS = replace(LLAMA, pattern=(Run(layers=3, mixer=DELTA), Run(layers=1)))
WIDE_DELTAS = replace(
    DELTAS,
    **{"kv_channels": 64, "ffn_hidden_size": 256},
    pattern=(Run(layers=3, mixer=replace(DELTA, num_key_heads=4, key_head_dim=64, value_head_dim=64)), Run(layers=1)),
)
TWO_DELTAS = replace(LLAMA, pattern=(Run(layers=1, mixer=DELTA), Run(layers=1, mixer=replace(DELTA, num_value_heads=8))))
BESIDE_STATES = replace(LLAMA, pattern=(Run(layers=1, mixer=DELTA), Run(layers=1, mixer=STATES.mixer)))
HALF_GATED = replace(LLAMA, pattern=(Run(layers=1, mixer=GroupedQueryAttention(output_gate=True)), Run(layers=1)))
SWIFTS = Lora(rank=4, bridge="mcore-bridge")
CASES: list[tuple[str, str, Workload, dict[str, Any], str]] = [
    # (rule, engine, workload, choices, what the reason says)
    ("unsuited", D, workload(precision="fp8"), {}, "has no precision fp8"),
    ("sft_stack", M, workload(BERT, task="sft", packing=False), {}, "task=sft is for decoders"),
    ("packed_thd", M, workload(task="sft", packing=True, software=BARE), {}, "data.packing: it needs Transformer Engine's attention"),
    ("packed_thd", M, workload(task="sft", packing=True), {"cp": 2, "cp_comm_type": "all_gather"}, "all_gather takes no packed"),
    ("packed_thd", M, workload(task="sft", packing=True), {"micro_batch_size": 2}, "one sequence at a time; data.packing=false pads"),
    ("packed_thd", M, workload(task="sft", packing=True), {"cuda_graph_impl": "local"}, "samples begin elsewhere in every sequence"),
    ("lora_bridge", M, workload(BERT, lora=Lora(rank=4)), {}, "lora.rank=4 under Megatron is of decoders: this model is an encoder"),
    ("lora_bridge", M, workload(lora=Lora(rank=4, bits=4)), {}, "lora.bits=4: Megatron's linears hold no frozen weights of so few bits"),
    ("lora_bridge", M, workload(lora=Lora(rank=4), optimizer="muon"), {}, "muon with lora.rank=4: updates of adapters' matrices"),
    ("lora_bridge", M, workload(lora=Lora(rank=2)), {"tp": 4, "dp": 2}, "tp=4 does not divide lora.rank=2: Megatron-Bridge divides"),
    ("lora_bridge", M, workload(lora=Lora(rank=4, targets=("in_proj",))), {}, "in_proj: this model has linear_qkv, linear_proj"),
    ("lora_bridge", M, workload(replace(LLAMA, feed_forward=SIX), lora=SWIFTS), {"tp": 2, "etp": 2, "dp": 4}, "has no adapters of div"),
    ("lora_fsdp", M, workload(lora=Lora(rank=4)), {"zero_stage": 3, "megatron_fsdp": True}, "megatron_fsdp with lora.rank=4: never tried"),
    ("padded_balance", M, workload(BALANCED, task="sft", packing=False), {}, "too; model.aux_loss_coeff=0 leaves that out"),
    ("fp8", M, workload(precision="fp8", software=BARE), {}, "Transformer Engine"),
    ("fp8", M, workload(precision="fp8", fp8_recipe="mxfp8"), {}, "mxfp8 needs compute capability 10.0; H100-SXM-80GB has 9.0"),
    ("fp8", M, workload(precision="nvfp4"), {}, "precision=nvfp4 needs Blackwell's products of blocks; H100-SXM-80GB has none"),
    ("fp8", M, workload(gpu="B200", precision="nvfp4", software=BARE), {}, "precision=nvfp4 needs Transformer Engine"),
    ("fp8_features", M, workload(gpu="B200", precision="nvfp4"), {"tp": 8, "dp": 1}, "nvfp4 products need widths that are multiples of 32"),
    ("fp8_tokens", M, workload(gpu="B200", precision="nvfp4", seq_length=48), {}, "nvfp4 products need a multiple of 32 tokens"),
    ("fp8_features", M, workload(precision="fp8"), {"tp": 8, "dp": 1}, "num_attention_heads*kv_channels/tp=8 is 8"),
    ("fp8_tokens", M, workload(precision="fp8", seq_length=60), {}, "a multiple of 8 tokens: seq_length=60"),
    ("fp8_tokens", M, workload(gpu="B200", precision="fp8", fp8_recipe="mxfp8"), {"tp": 4, "dp": 2, "sequence_parallel": True}, "is 16"),
    ("optimizer_dtypes", M, workload(exp_avg_dtype="bf16"), {"zero_stage": 1}, "exp_avg_dtype=bf16 needs precision_aware_optimizer=true"),
    ("precision_aware", M, workload(precision_aware_optimizer=True), {}, "zero_stage=1"),
    ("precision_aware", M, workload(precision_aware_optimizer=True, software=BARE), {"zero_stage": 1}, "Transformer Engine's Adam"),
    ("precision_aware", M, workload(precision_aware_optimizer=True, optimizer="sgd"), {}, "it is an Adam"),
    ("precision_aware", M, workload(precision_aware_optimizer=True, precision="fp32"), {"zero_stage": 1}, "no narrower copy"),
    ("ddp_bucket", M, workload(), {"ddp_bucket_size": 10**8, "overlap_grad_reduce": False}, "ddp_bucket_size=100000000 does nothing"),
    ("ddp_bucket", M, workload(), {"ddp_bucket_size": 10**8, "megatron_fsdp": True, "zero_stage": 2}, "its units are of whole modules"),
    ("fp8_transposes", M, workload(precision="fp8", fp8_recipe="delayed"), KEPT | {"fp8_param_gather": False}, "it is of megatron_fsdp"),
    ("fp8_transposes", M, workload(precision="fp8", fp8_recipe="delayed"), KEPT | {"zero_stage": 2}, "with zero_stage=2 does nothing"),
    ("fp8_transposes", M, workload(gpu="B200", precision="fp8", fp8_recipe="mxfp8"), KEPT, "both copies of MXFP8 weights are kept anyway"),
    ("fp8_transposes", M, workload(gpu="B200", precision="fp8", fp8_recipe="tensorwise"), KEPT, "on B200 does nothing"),
    ("offloaded_modules", M, workload(), {"offload_modules": "attn_proj"}, "Megatron takes it beside core_attn alone"),
    ("muon", M, workload(optimizer="muon"), {"zero_stage": 1}, "optimizer=muon with zero_stage=1: Megatron-core 0.16.1 has it undivided"),
    ("optimizer_dtypes", D, workload(precision_aware_optimizer=True), {"zero_stage": 1}, "has no precision_aware_optimizer"),
    ("precision_here", M, workload(gpu="V100-SXM2-16GB"), {}, "compute capability 7.0"),
    ("precision_here", D, workload(gpu="cpu", precision="fp16"), {}, "CPU"),
    ("seq_pos", M, workload(seq_length=256), {}, "seq_length=256 is above max_position_embeddings=128"),
    ("seq_pos", M, workload(replace(T5, max_position_embeddings=16), seq_length=16), {}, "decoder_seq_length=32"),
    ("hidden_heads", M, workload(replace(GPT, num_attention_heads=6)), {}, "num_attention_heads=6 does not divide hidden_size=64"),
    ("head_groups", M, workload(replace(LLAMA, num_query_groups=3)), {}, "num_query_groups=3 does not divide num_attention_heads=8"),
    ("no_gqa", M, workload(replace(BERT, num_query_groups=2)), {}, "num_query_groups=2"),
    ("position_embedding", M, workload(replace(GPT, position_embedding="relative")), {}, "relative"),
    ("position_embedding", D, workload(replace(BERT, position_embedding="rope", rotary_base=50000)), {}, "core's bert has 10000"),
    ("position_embedding", M, workload(replace(T5, position_embedding="rope", rope_scaling_factor=8.0)), {}, "t5 has none"),
    ("latent_sp", M, workload(LATENT_LLAMA), {"tp": 2, "dp": 4}, "tp=2 without sequence_parallel: nothing sums"),
    ("latent_rope", M, workload(replace(LATENT_LLAMA, position_embedding="none")), {}, "rotary positions of its own"),
    ("mtp_positions", M, workload(replace(GPT, mtp_num_layers=1)), {}, "with rope and none"),
    ("mtp_tied", M, workload(replace(LLAMA, mtp_num_layers=1, tie_embeddings=True)), {"pp": 2, "dp": 4}, "the table twice"),
    ("recompute_latent", M, workload(LLAMA), {"recompute": "mla_up_proj+mlp"}, "which this model has not"),
    ("recompute_experts", M, workload(LLAMA), {"recompute": "moe_act"}, "a dense model has none"),
    ("recompute_experts", M, workload(MIXTURE, software=BARE), {"recompute": "moe_act", "ep": 2}, "is Transformer Engine's"),
    ("recompute_experts", M, workload(MIXTURE, precision="fp8"), {"recompute": "mla_up_proj+moe_act", "ep": 2}, "delayed scaling"),
    ("tower_unplanned", M, workload(replace(LLAMA, vision=replace(TOWER, model_type="internvl"))), {},
     "model.vision of internvl: Megatron-Bridge has Megatron's layers in the towers of"),
    ("tower_tp", M, workload(replace(LLAMA, vision=TOWER)), {"tp": 2, "dp": 4}, "tp=2 does not divide the tower's num_attention_heads=1"),
    ("tower", M, workload(replace(LLAMA, vision=DEEP_TOWER)), {"pp": 2, "dp": 4}, "pp=2: 9 layers are given what the tower saw"),
    ("window_kinds", M, workload(replace(LLAMA, pattern=(windowed(4), windowed(8)))), {}, "windows of 4 and 8 tokens"),
    ("window_kinds", M, workload(replace(LLAMA, pattern=(windowed(4, sinks=True), Run(layers=1)))), {}, "in some layers only"),
    ("window_kinds", M, workload(replace(LLAMA, mtp_num_layers=1, pattern=(windowed(4), Run(layers=1)))), {}, "of the first layer"),
    ("experts_biases", M, workload(BIASED_MIXTURE), {"tp": 2, "dp": 4, "etp": 2, "sequence_parallel": True}, "silently wrong"),
    ("mixer_kinds", M, workload(replace(LLAMA, pattern=(Run(layers=1), Run(layers=1, mixer=LATENT)))), {}, "one for all layers"),
    ("mamba_groups", M, workload(STATES), {"tp": 4, "dp": 2}, "tp=4 does not divide mamba2.num_groups=2"),
    ("mamba_cp", M, workload(STATES), {"cp": 2, "dp": 4}, "cp=2 with Mamba-2 layers"),
    ("hybrid_stages", M, workload(STATES, world=16), {"pp": 16, "dp": 1}, "pp=16 with 8 layers of one part: megatron-core 0.16.1"),
    ("hybrid_chunks", M, workload(STATES), {"pp": 2, "dp": 4, "vpp": 2}, "vpp=2 with layers of one part"),
    ("delta_kinds", M, workload(TWO_DELTAS), {}, "gated delta nets of 2 sizes in one model"),
    ("delta_kinds", M, workload(BESIDE_STATES), {}, "beside another mixer than grouped-query attention"),
    ("delta_kinds", M, workload(HALF_GATED), {}, "gates of attention's output in some layers only"),
    ("delta_heads", M, workload(DELTAS), {"tp": 4, "dp": 2, "sequence_parallel": True}, "not divide gated_delta_net.num_key_heads=2"),
    ("delta_norm", M, workload(DELTAS), {"tp": 2, "dp": 4}, "tp=2 without sequence_parallel: nothing sums"),
    ("delta_cp", M, workload(DELTAS), {"cp": 2, "dp": 4}, "Megatron-core 0.16.1 has them in whole sequences alone"),
    ("delta_cp", M, workload(DELTAS, software=Software(megatron_core="0.19.2")), {"cp": 2, "dp": 4}, "which is not priced here"),
    ("fp8_features", M, workload(WIDE_DELTAS, precision="fp8"), {"tp": 4, "dp": 2, "sequence_parallel": True}, "projection/tp=4 is 258"),
    ("relative_te", M, workload(replace(T5, position_embedding="relative"), software=BARE), {}, "Transformer Engine"),
    ("relative_te", D, workload(replace(T5, position_embedding="relative"), gpu="cpu"), {}, "on GPUs"),
    ("one_gradient_buffer", M, workload(grad_reduce_dtype="bf16"), {}, "one buffer"),
    ("grad_dtype", M, workload(grad_reduce_dtype="fp16", grad_accum_dtype="fp16"), {}, "fp16 with precision bf16"),
    ("grad_dtype", D, workload(gpu="cpu", grad_accum_dtype="bf16"), {}, "bf16 with precision fp32"),
    ("rank_order", M, workload(), {"order": ("dp", "tp", "cp", "ep", "pp")}, "dp-tp-cp-ep-pp"),
    ("experts", M, workload(), {"ep": 2}, "ep=2: a dense model has no experts"),
    ("experts", M, workload(MIXTURE), {"ep": 4}, "ep=4 does not divide num_experts=6"),
    ("experts_etp", M, workload(), {"ep": 2, "etp": 2}, "etp=2: a dense model has no experts"),
    ("experts_etp", M, workload(MIXTURE), {"ep": 2, "etp": 64}, "etp=64 does not divide the experts' ffn_hidden_size=32"),
    ("experts_ep1", M, workload(MIXTURE), {"tp": 2, "etp": 1, "dp": 4}, "ep=1 with etp=1 and tp=2"),
    ("expert_kinds", M, workload(UNNORMALIZED), {}, "sigmoid scores that are not made to sum to one"),
    ("expert_kinds", M, workload(TWO_MIXTURES), {}, "2 kinds of experts in one model"),
    ("dispatcher", M, workload(MIXTURE), {"moe_token_dispatcher_type": "flex", "dp": 8}, "etp*ep=1"),
    ("experts_fold", M, workload(MIXTURE), {"ep": 2, "pp": 8, "dp": 1}, "ep*etp=2 does not divide tp*cp*dp=1"),
    ("experts_sp", M, workload(MIXTURE), {"ep": 2, "tp": 2, "dp": 4}, "experts with tensor parallelism train with sequence_parallel"),
    ("expert_order", M, workload(), {"pp": 2, "cp": 2, "dp": 2, "order": PP_BEFORE_DP}, "expert_dp=4 is not dp=2"),
    ("axis_ep", D, workload(), {"ep": 2}, "has no ep"),
    ("heads_tp", M, workload(WIDE), {"tp": 4, "dp": 2}, "tp=4 does not divide num_attention_heads=6"),
    ("groups_tp", M, workload(GROUPED), {"tp": 4, "dp": 2}, "tp=4 neither divides num_query_groups=6"),
    ("ffn_tp", M, workload(replace(GPT, ffn_hidden_size=250)), {"tp": 4, "dp": 2}, "tp=4 does not divide ffn_hidden_size=250"),
    ("t5_pp", M, workload(T5), {"pp": 2, "dp": 4}, "no pipeline for T5"),
    ("mesh", M, workload(world=10), {"tp": 4, "dp": 2}, "tp x pp x cp x dp = 8, not the 10 GPUs"),
    ("mesh", M, workload(world=16), {}, "not the 16 GPUs"),
    ("sequence_parallel", M, workload(), {"sequence_parallel": True}, "needs tp > 1"),
    ("sp_seq_div", M, workload(seq_length=60), {"tp": 8, "dp": 1, "sequence_parallel": True}, "tp*cp=8 does not divide seq_length=60"),
    ("sp_norm_local", M, workload(LLAMA, software=BARE), {"tp": 2, "dp": 4, "sequence_parallel": True}, "RMSNorm needs Transformer"),
    ("sp_norm_local", D, workload(GPT, software=BARE), {"tp": 2, "dp": 4, "sequence_parallel": True}, "or Apex"),
    ("sp_norm_local", M, workload(BERT, software=Software(apex=False)), {"tp": 2, "dp": 4, "sequence_parallel": True}, "its head"),
    ("stages", M, workload(world=16), {"pp": 16, "dp": 1}, "pp=16 stages for"),
    ("batch", M, workload(), {"micro_batch_size": 3}, "micro_batch_size=3 x dp=8 does not divide global_batch_size=64"),
    ("batch", M, workload(), {"num_microbatches": 4}, "num_microbatches=4 x dp=8 = 32 is not global_batch_size=64"),
    ("recompute_mlp_bias", M, workload(), {"recompute": "mlp"}, "backward never ends"),
    ("recompute_fused_norm", D, workload(LLAMA), {"recompute": "layernorm+mlp"}, "norms are part of the linears"),
    ("recompute_fused_norm", M, workload(replace(LLAMA, feed_forward=SIX)), {"recompute": "layernorm"}, "and layernorm of these no price"),
    ("recompute_flash", M, workload(LLAMA), {"recompute": "core_attn+mlp"}, "take mlp"),
    ("cp_te", M, workload(software=BARE), {"cp": 2, "dp": 4}, "Transformer Engine"),
    ("cp_seq", M, workload(seq_length=62), {"cp": 2, "dp": 4}, "2*cp=4 does not divide seq_length=62"),
    ("cp_family", M, workload(BERT), {"cp": 2, "dp": 4}, "bert"),
    ("axis_cp", D, workload(), {"cp": 2, "dp": 4}, "has no cp"),
    ("chunks", M, workload(), {"vpp": 2}, "vpp=2 needs a pipeline"),
    ("axis_vpp", D, workload(), {"pp": 2, "dp": 4, "vpp": 2, "num_microbatches": 16, "zero_stage": 1}, "has no vpp"),
    ("vpp_M", M, workload(), {"pp": 4, "dp": 2, "vpp": 2, "num_microbatches": 2, "micro_batch_size": 16}, "pp=4 does not divide"),
    (
        *("vpp_M", M, workload(), {"pp": 4, "dp": 2, "vpp": 2, "num_microbatches": 8, "microbatch_group_size_per_vp_stage": 3}),
        "microbatch_group_size_per_vp_stage=3 with pp=4 and num_microbatches=8: it must be pp to num_microbatches",
    ),
    (
        *("vpp_M", M, workload(), {"pp": 4, "dp": 2, "vpp": 2, "num_microbatches": 8, "microbatch_group_size_per_vp_stage": 5}),
        "the last group has 3 micro-batches, fewer than pp",
    ),
    ("microbatch_groups", M, workload(), {"pp": 4, "dp": 2, "microbatch_group_size_per_vp_stage": 4}, "needs vpp above 1"),
    ("microbatch_groups", D, workload(), {"pp": 4, "dp": 2, "microbatch_group_size_per_vp_stage": 4}, "has no groups of micro-batches"),
    ("zero_stage", M, workload(), {"zero_stage": 2}, "megatron has zero_stage 0, 1"),
    ("zero_stage", M, workload(), {"zero_stage": 3}, "megatron has zero_stage 0, 1"),
    ("zero_shard_size", M, workload(), {"zero_shard_size": 4}, "zero_shard_size=4"),
    ("optimizer_instances", M, workload(), {"zero_stage": 1, "zero_shard_size": 3}, "below dp*cp=8 and divide it"),
    ("tp_comm_overlap", M, workload(LLAMA), {"tp": 2, "dp": 4, "tp_comm_overlap": True}, "needs sequence_parallel"),
    ("tp_comm_overlap", M, workload(software=BARE), {"tp_comm_overlap": True}, "user buffers, on GPUs"),
    (
        *("tp_comm_overlap", M, workload(LATENT_LLAMA)),
        *({"tp": 2, "dp": 4, "sequence_parallel": True, "tp_comm_overlap": True}, "with latent attention does nothing"),
    ),
    (
        *("user_buffers_mxfp8", M, workload(LLAMA, gpu="B200", precision="fp8", fp8_recipe="mxfp8", seq_length=256)),
        *({"tp": 4, "dp": 2, "sequence_parallel": True, "tp_comm_overlap": True}, "64 tokens a rank are no multiple of 128"),
    ),
    ("tp_comm_overlap", M, workload(world=16), {"tp": 16, "dp": 1, "sequence_parallel": True, "tp_comm_overlap": True}, "8 GPUs of node"),
    ("cuda_graphs", M, workload(gpu="cpu"), {"cuda_graph_impl": "local"}, "on GPUs"),
    ("cuda_graphs", M, workload(MIXTURE), {"cuda_graph_impl": "full_iteration"}, "it needs their rank_capacity_factor, or pad_to_capacity"),
    ("rank_capacity", M, workload(BUFFERED), {"moe_token_dispatcher_type": "flex", "ep": 2}, "Megatron-core 0.16.1 has none"),
    ("cuda_graph_modules", M, workload(), {"cuda_graph_impl": "local", "cuda_graph_modules": "attn+moe"}, "a dense model has no experts"),
    (
        *("cuda_graph_overlap", M, workload(MIXTURE)),
        *({**OVERLAP, "ep": 2, "cuda_graph_impl": "full_iteration"}, "0.16.1 has it with transformer_engine"),
    ),
    ("cuda_graph_recompute", M, workload(LLAMA), {"cuda_graph_impl": "local", "recompute": "full"}, "modules only"),
    (
        *("cuda_graph_recompute", M, workload(replace(LLAMA, hidden_dropout=0.1))),
        *({"cuda_graph_impl": "local", "recompute": "mlp"}, "hidden_dropout=0.1"),
    ),
    ("cp_comm", M, workload(LLAMA), {"cp": 8, "dp": 1, "cp_comm_type": "a2a"}, "8 ranks do not divide num_query_groups/tp=4"),
    ("cp_comm", M, workload(), {"cp_comm_type": "all_gather"}, "needs cp above 1"),
    ("cp_comm", M, workload(replace(LLAMA, pattern=(windowed(4), Run(layers=1)))), {"cp": 2, "dp": 4}, "windows with a2a and all_gather"),
    ("cp_comm", M, workload(gpu="cpu", software=Software()), {"cp": 2, "dp": 4}, "on a CPU"),
    ("cp_comm", M, workload(LLAMA), {"cp": 4, "dp": 2, "cp_comm_type": "a2a+p2p"}, "several inner network domains"),
    ("dispatcher", M, workload(), {"moe_token_dispatcher_type": "flex"}, "no experts"),
    ("permute_fusion", M, workload(), {"moe_permute_fusion": False}, "moe_permute_fusion=false does nothing: a dense model"),
    ("shared_expert_overlap", M, workload(MIXTURE), {"moe_shared_expert_overlap": True}, "this model has no shared experts"),
    (
        *("shared_expert_overlap", M, workload(replace(LLAMA, feed_forward=SHARED))),
        *({"moe_shared_expert_overlap": True, "moe_token_dispatcher_type": "flex", "ep": 2}, "Megatron-core has it with alltoall"),
    ),
    ("expert_overlap", M, workload(), OVERLAP, "overlap_moe_expert_parallel_comm: a dense model has no experts"),
    ("expert_overlap", M, workload(MIXTURE), OVERLAP, "with ep=1 tokens travel nowhere"),
    (
        *("expert_overlap", M, workload(replace(LLAMA, feed_forward=replace(SIX, num_experts=4)))),
        *({**OVERLAP, "ep": 4}, "ep=4, one expert a rank: Megatron-core 0.16.1 frees tokens"),
    ),
    ("expert_overlap", M, workload(MIXTURE), {**OVERLAP, "ep": 2, "pp": 2, "dp": 4}, "pp=2 needs vpp above 1"),
    ("expert_overlap", M, workload(MIXTURE), {**OVERLAP, "ep": 2, "recompute": "full"}, "recompute of modules only"),
    ("expert_overlap", M, workload(MIXTURE), {**OVERLAP, "ep": 2, "recompute": "mlp"}, "all layers of this model have them"),
    ("expert_overlap", M, workload(MIXTURE, precision="fp32"), {**OVERLAP, "ep": 2}, "has it for 16-bit models"),
    ("expert_overlap", M, workload(MIXTURE), {**OVERLAP, "ep": 2, "moe_token_dispatcher_type": "allgather"}, "with alltoall and flex"),
    (
        *("expert_overlap", M, workload(replace(LLAMA, feed_forward=SHARED))),
        *({**OVERLAP, "ep": 2, "moe_shared_expert_overlap": True}, "Megatron-core takes one of both"),
    ),
    ("expert_overlap", M, workload(MIXTURE), {**OVERLAP, "ep": 2, "megatron_fsdp": True, "zero_stage": 3}, "0.16.1 gathers weights by"),
    ("expert_overlap", M, workload(replace(MIXTURE, mtp_num_layers=2)), {**OVERLAP, "ep": 2}, "mtp_num_layers=2: it takes one"),
    ("expert_overlap", M, workload(replace(MIXTURE, mtp_num_layers=1)), {**OVERLAP, "ep": 2}, "0.16.1 needs a pipeline"),
    ("delayed_weight_gradients", M, workload(MIXTURE), {"ep": 2, "delay_wgrad_compute": True}, "needs overlap_moe_expert_parallel_comm"),
    (
        *("delayed_weight_gradients", M, workload(MIXTURE, software=BARE)),
        *({**OVERLAP, "ep": 2, "delay_wgrad_compute": True}, "Transformer Engine's linears"),
    ),
    (
        *("fp32_accumulation", M, workload(), {"reduce_scatter_with_fp32_accumulation": True}),
        "zero_stage=0: it takes the place of the reduce-scatter",
    ),
    (
        *("fp32_accumulation", M, workload()),
        *({"zero_stage": 1, "zero_shard_size": 4, "reduce_scatter_with_fp32_accumulation": True}, "one instance of the optimizer"),
    ),
    ("fp8_weights", M, workload(), {"zero_stage": 1, "fp8_param_gather": True}, "precision=bf16: it keeps the weights of FP8"),
    ("fp8_weights", M, workload(precision="fp8", fp8_recipe="delayed"), {"fp8_param_gather": True}, "zero_stage=0: the distributed"),
    ("mfsdp", M, workload(), {"pp": 2, "dp": 4, "megatron_fsdp": True, "zero_stage": 3}, "no pipeline"),
    ("mfsdp", M, workload(gpu="cpu"), {"megatron_fsdp": True, "zero_stage": 3}, "needs GPUs"),
    ("zero_stage", M, workload(), {"megatron_fsdp": True, "zero_stage": 1}, "has zero_stage 2, 3 with megatron_fsdp"),
    ("options", D, workload(), {"cuda_graph_impl": "local", "overlap_grad_reduce": False}, "reduce=false, cuda_graph_impl=local"),
    ("zero_shard_size", D, workload(), {"zero_shard_size": 4, "zero_stage": 3}, "zero_shard_size=4"),
    ("distopt_adam", M, workload(optimizer="sgd"), {"zero_stage": 1}, "Adam only"),
    ("optimizer_offload", M, workload(), {"offload_optimizer": True}, "needs train.precision_aware_optimizer=true"),
    *(
        ("offload_host", engine, CROWDED_HOST, {"zero_stage": 1, "offload_optimizer": True}, "of host memory a rank, of 1000 B")
        for engine in (M, D)
    ),
    ("zero_stage", D, workload(), {"pp": 2, "dp": 4, "zero_stage": 2}, "0, 1 with a pipeline"),
    ("zero_stage", D, workload(), {"pp": 2, "dp": 4, "zero_stage": 3}, "0, 1 with a pipeline"),
    ("pp_zero_megatron", D, workload(gpu="cpu"), {"pp": 2, "dp": 4, "zero_stage": 0}, "zero_stage=0 with schedule=1f1b"),
    ("pp_zero0", D, workload(), {"pp": 2, "dp": 4, "schedule": "deepspeed_1f1b"}, "offered in fp32 only, not in bf16"),
    ("pp_fp16", D, workload(precision="fp16"), {"pp": 2, "dp": 4, "zero_stage": 1}, "precision=fp16 with schedule=1f1b"),
    ("schedule", D, workload(), {"zero_stage": 1, "schedule": "deepspeed_1f1b"}, "needs pp above 1"),
    ("schedule", D, workload(), {"pp": 2, "dp": 4, "vpp": 2, "schedule": "deepspeed_1f1b"}, "vpp=2 runs interleaved"),
    ("schedule", M, workload(), {"pp": 2, "dp": 4, "schedule": "deepspeed_1f1b"}, "1f1b, interleaved, not deepspeed_1f1b"),
    ("gad_mix", D, workload(), {"zero_stage": 0}, "zero_stage=0 sums gradients in bf16"),
    ("offload_needs", D, workload(), {"offload_optimizer": True}, "zero_stage 1"),
    ("offload_needs", D, workload(gpu="cpu"), {"offload_optimizer": True, "zero_stage": 2}, "here there is none"),
    ("offload_needs", D, workload(optimizer="sgd"), {"offload_optimizer": True, "zero_stage": 2}, "Adam"),
    ("offload_needs", D, workload(), {"offload_optimizer": True, "zero_stage": 1, "pp": 2, "dp": 4}, "pp=2"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "engine", "given", "choices", "reason"), CASES, ids=[f"{case[0]}-{case[1]}" for case in CASES])
def test_a_rule_refuses_with_its_reason(rule: str, engine: str, given: Workload, choices: dict[str, Any], reason: str) -> None:
    assert reason in refusals(engine, given, **choices)[rule]


@pytest.mark.parametrize(("rule", "engine", "given", "choices", "reason"), CASES, ids=[f"{case[0]}-{case[1]}" for case in CASES])
def test_a_rule_about_an_option_is_silent_at_the_options_default(
    rule: str, engine: str, given: Workload, choices: dict[str, Any], reason: str
) -> None:
    """The search does not ask it there (`Rule.only_with`)."""
    known = next((one for one in ENGINES[engine].capabilities(given.cluster.software).rules if one.id == rule), None)
    if known is not None and known.only_with:
        assert rule not in refusals(engine, given, **{name: value for name, value in choices.items() if name != known.only_with})


def test_a_schedule_that_does_not_fit_its_chunks_is_refused() -> None:
    capabilities = ENGINES[M].capabilities(Software())
    wrong = replace(candidate(pp=2, dp=4, vpp=2, num_microbatches=16), schedule="1f1b")
    broken = broken_rule(capabilities, wrong, workload())
    assert broken is not None
    assert "interleaved" in broken[1]


@pytest.mark.parametrize("engine", BOTH)
def test_every_rule_has_a_case_that_it_refuses(engine: str) -> None:
    tested = {case[0] for case in CASES}
    assert {rule.id for rule in ENGINES[engine].capabilities(Software()).rules} <= tested


@pytest.mark.parametrize("engine", ENGINES)
def test_the_facts_that_a_rule_forbids_are_known_ones(engine: str) -> None:
    parts = {*megatron_parts.TRAINED, *megatron_parts.OWN_LOOP, *megatron_parts.PLANNED, *hf_config.PARTS}
    known = {*CHOSEN, *FACTS, *Training.__struct_fields__, *Architecture.__struct_fields__, *Cluster.__struct_fields__,
             *NAMED, *parts}  # fmt: skip
    classes = {found.model for found in (*hf_config.DENSE, *hf_config.WITH_EXPERTS, hf_config.BERT, hf_config.T5)}
    for rule in ENGINES[engine].capabilities(Software()).rules:
        if isinstance(rule.check, Refusal):
            facts = [case[0] for case in rule.check.cases if not callable(case)]
            words = " ".join([rule.check.where, *facts]).replace("!", "").split()
            for word in words:
                name, _, values = word.partition("=")
                first, _, field = name.partition(".")
                owner = {"experts": Experts, "release": Release, "software": Software, "gpu": Gpu}.get(first)
                assert first in known, (rule.id, word)
                assert owner is None or not field or hasattr(owner, field), (rule.id, word)
                assert first != "hf" or {*values.split("|")} <= classes, (rule.id, word)


@pytest.mark.parametrize("engine", BOTH)
def test_rules_have_distinct_names_and_name_the_engines_own(engine: str) -> None:
    capabilities = ENGINES[engine].capabilities(Software())
    rules = rules_of(capabilities, workload())
    assert len({rule.id for rule in rules}) == len(rules)
    assert {*capabilities.sources} <= {rule.id for rule in rules}
    for rule in capabilities.rules:
        assert ".py" in rule.engine_rule or ":" in rule.engine_rule, rule.id


@pytest.mark.parametrize("engine", BOTH)
def test_a_rule_needs_only_what_the_tree_decides(engine: str) -> None:
    for rule in rules_of(ENGINES[engine].capabilities(Software()), workload()):
        for name in rule.needs:
            assert name in LEVELS or name in GIVEN or name in FIXED_WITH or name == "zero_shard_size", (rule.id, name)


@pytest.mark.parametrize("engine", BOTH)
@pytest.mark.parametrize(("gpu", "precision"), [("H100-SXM-80GB", "bf16"), ("V100-SXM2-16GB", "fp16"), ("cpu", "fp32"), ("cpu", "bf16")])
def test_plain_data_parallelism_is_always_legal(engine: str, gpu: str, precision: str) -> None:
    for model in (GPT, LLAMA):
        assert refusals(engine, workload(model, gpu=gpu, precision=precision), zero_stage=1) == {}


def test_sequence_parallelism_with_local_norms_is_legal_where_our_shim_makes_it_so() -> None:
    """On a CPU the norm's gradients are reduced by the worker's shim."""
    for engine in BOTH:
        assert refusals(engine, workload(LLAMA, gpu="cpu"), tp=2, dp=4, sequence_parallel=True, zero_stage=1, num_microbatches=16) == {}


def test_more_tensor_parallel_ranks_than_query_groups_are_legal() -> None:
    """Since 0.16 (core/transformer/attention.py:289)."""
    assert refusals(M, workload(LLAMA), tp=8, dp=1, num_microbatches=64) == {}


@pytest.mark.parametrize(
    ("engine", "key", "before", "after"),
    [
        ("megatron", "mixed/0", 18, 18),
        ("megatron", "mixed/1", 18, 6 + 12 / 8),
        ("megatron_deepspeed", "mixed/0", 16, 16),
        ("megatron_deepspeed", "mixed/1", 18, 6 + 12 / 8),
        ("megatron_deepspeed", "mixed/2", 18, 2 + 16 / 8),
        ("megatron_deepspeed", "mixed/3", 18, 18 / 8),
    ],
)
def test_bytes_per_parameter_are_the_published_ones(engine: str, key: str, before: float, after: float) -> None:
    """Resident bytes before and after ZeRO over 8 ranks: theoretical_memory_usage.py:182, ZeRO (arXiv 1910.02054) section 5."""
    states, stage = ENGINES[engine].traits(Software()).states[key], int(key[-1])
    assert states.weight + states.gradient + states.master + states.moments == before
    weight = states.weight / (8 if stage >= 3 else 1)
    gradient = states.gradient / (8 if stage >= 2 else 1)
    optimizer = (states.master + states.moments) / (8 if stage >= 1 else 1)
    assert weight + gradient + optimizer == after


@pytest.mark.parametrize("engine", BOTH)
def test_the_flash_package_alone_saves_no_scores_of_megatron_core(engine: str) -> None:
    """Its local layers have DotProductAttention (core/models/backends.py:113), whatever is installed."""
    without = Software(transformer_engine=False, flash_attention=True)
    assert not ENGINES[engine].traits(without).flash_attention
    assert "recompute_flash" not in refusals(engine, workload(LLAMA, software=without), recompute="core_attn+mlp")
    assert ENGINES["deepspeed"].traits(without).flash_attention
    assert ENGINES[engine].capabilities(without).pinned_recompute == ()
    assert ENGINES[engine].capabilities(Software()).pinned_recompute == ("selective",)


@pytest.mark.parametrize("engine", BOTH)
def test_traits_know_every_stage_that_the_engine_offers(engine: str) -> None:
    capabilities, traits = ENGINES[engine].capabilities(Software()), ENGINES[engine].traits(Software())
    for precision in capabilities.precisions:
        for stage in capabilities.zero_stages:
            assert traits.state_bytes(precision, stage).weight > 0


def test_an_engine_names_the_part_that_it_lacks() -> None:
    experts = Experts(num_experts=8, topk=2, ffn_hidden_size=32, score="sigmoid")
    given = replace(workload(LLAMA), model=describe(replace(LATENT_LLAMA, feed_forward=experts), 64))
    why = unsuited(ENGINES[D].capabilities(Software()), given)
    assert (why or "").startswith(f"{D} has no latent_attention and no experts and no sigmoid_router; of parts of models it has attention")
    assert unsuited(ENGINES[D].capabilities(Software()), workload(LLAMA)) is None


def test_what_cant_be_trained_yet_is_planned_and_said_and_nothing_is_written_that_would_be_another_model() -> None:
    capabilities = ENGINES[M].capabilities(Software())
    capped = replace(MIXTURE, mixer=GroupedQueryAttention(softcap=50.0))
    assert unsuited(capabilities, workload(capped)) is None
    assert plan_only(capabilities, capped)
    assert not plan_only(capabilities, MIXTURE)
    job = ENGINES[M].translate(make_plan(M, capped))
    assert job.without_worker == "plan only: Megatron-core has no soft cap of attention's scores"
    assert [file.path for file in job.files] == []


def test_a_model_that_another_engine_trains_is_said_to_be_trained_there() -> None:
    states = replace(STATES, family="mamba2", position_embedding="none")
    job = ENGINES[M].translate(make_plan(M, states))
    assert job.without_worker.startswith("plan only: Megatron-core's MambaMixer needs mamba-ssm's CUDA kernels")
    assert job.without_worker.endswith("; engine=deepspeed trains it")
    assert job.files == ()


def test_what_a_release_lacks_is_said_of_that_release() -> None:
    old, new = (ENGINES[M].capabilities(Software(megatron_core=version)) for version in ("0.16.1", "0.19.2"))
    full_rank = replace(LLAMA, mixer=replace(LATENT, q_lora_rank=None))
    assert [plan_only(has, full_rank) is not None for has in (old, new)] == [False, True]


def test_all_tokens_go_to_all_ranks_only_where_these_are_fewer_than_a_tokens_experts() -> None:
    """Three of eight experts a token: over two ranks every token to both is less than each of it three times; over four it is not."""
    model = replace(LLAMA, feed_forward=replace(SIX, num_experts=8, topk=3))
    capabilities = ENGINES[M].capabilities(Software())

    def kinds(pins: Pins) -> set[tuple[int, str]]:
        leaves = Tree(capabilities, workload(model), pins).leaves(lambda cut: None)
        return {(leaf.candidate.mesh.ep, leaf.candidate.strategy.moe_token_dispatcher_type) for leaf in leaves}

    everywhere = {(1, "alltoall"), (2, "alltoall"), (2, "allgather"), (4, "alltoall"), (8, "alltoall")}
    assert kinds(Pins(tp=1, pp=1)) == everywhere | {(2, "flex"), (4, "flex"), (8, "flex")}
    capabilities = ENGINES[M].capabilities(Software(deep_ep=False))
    assert kinds(Pins(tp=1, pp=1)) == everywhere
    assert kinds(Pins(tp=1, pp=1, ep=4, moe_token_dispatcher_type="flex")) == {(4, "flex")}


def test_ranks_without_gpus_gather_or_send_tokens_and_have_no_kernels_of_deepep() -> None:
    model = replace(LLAMA, feed_forward=replace(SIX, num_experts=8, topk=3))
    capabilities = ENGINES[M].capabilities(Software())

    def kinds(gpu: str, **pins: Any) -> set[str]:
        leaves = Tree(capabilities, workload(model, gpu=gpu, precision="bf16"), Pins(tp=1, pp=1, ep=2, **pins)).leaves(lambda cut: None)
        return {leaf.candidate.strategy.moe_token_dispatcher_type for leaf in leaves}

    assert kinds("cpu") == {"alltoall", "allgather"}
    assert kinds("cpu", moe_token_dispatcher_type="flex") == set()
    assert kinds("H100-SXM-80GB", moe_token_dispatcher_type="flex") == {"flex"}


def test_shared_experts_are_computed_beside_the_exchange_that_the_release_has() -> None:
    def refused(version: str, kind: str) -> bool:
        given = workload(replace(LLAMA, feed_forward=SHARED), software=Software(megatron_core=version))
        choices = {"ep": 2, "zero_stage": 1, "moe_shared_expert_overlap": True, "moe_token_dispatcher_type": kind}
        return "shared_expert_overlap" in refusals(M, given, **choices)

    kinds = ("alltoall", "flex", "allgather")
    assert [refused("0.16.1", kind) for kind in kinds] == [False, True, True]
    assert [refused("0.19.2", kind) for kind in kinds] == [False, False, True]


def test_the_exchange_goes_beside_another_micro_batch_in_what_each_release_has() -> None:
    """0.16.1 asks for a pipeline where there is a prediction head, and its own FSDP does not know the combined schedule."""

    def refused(version: str, head: int, **choices: Any) -> bool:
        given = workload(replace(MIXTURE, mtp_num_layers=head), software=Software(megatron_core=version))
        return "expert_overlap" in refusals(M, given, **{"ep": 2, "zero_stage": 1, **OVERLAP, **choices})

    fsdp = {"megatron_fsdp": True, "zero_stage": 3}
    old, new = (
        [
            refused(version, 0),
            refused(version, 0, moe_token_dispatcher_type="flex"),
            refused(version, 0, pp=2, vpp=2, dp=4),
            refused(version, 0, recompute="moe_act"),
            refused(version, 1, pp=2, vpp=2, dp=4),
            refused(version, 1),
            refused(version, 0, **fsdp),
        ]
        for version in ("0.16.1", "0.19.2")
    )
    assert old == [False] * 5 + [True, True]
    assert not any(new)


def test_experts_are_divided_as_megatron_core_can_and_no_dense_model_is() -> None:
    """Six experts on eight GPUs: ep of 1 and 2; whole ones, but with ep=1 as attention is, and with ep=2 too: 4 and 8 don't divide 6."""
    capabilities = ENGINES[M].capabilities(Software())

    def degrees(given: Workload, pins: Pins) -> set[tuple[int, ...]]:
        meshes = (leaf.candidate.mesh for leaf in Tree(capabilities, given, pins).leaves(lambda cut: None))
        return {(mesh.tp, mesh.ep, mesh.etp) for mesh in meshes}

    alike = {(1, 1, 1), (2, 1, 2), (4, 1, 4), (8, 1, 8)}
    whole = {(1, 2, 1), (2, 2, 1), (4, 2, 1), (8, 2, 1)}
    assert degrees(workload(MIXTURE), Pins(pp=1)) == alike | whole | {(2, 2, 2), (4, 2, 4)}
    assert degrees(workload(MIXTURE), Pins(pp=1, ep=2, etp=4)) == {(tp, 2, 4) for tp in (1, 2, 4, 8)}
    assert {(ep, etp) for _, ep, etp in degrees(workload(LLAMA), Pins())} == {(1, 1)}


def test_another_order_of_ranks_is_forbidden_only_where_a_pipeline_has_other_copies_of_experts() -> None:
    """With cp=2 a dense layer has twice dp copies."""
    for choices, legal in (({"cp": 2, "dp": 4}, True), ({"pp": 2, "dp": 4}, True), ({"pp": 2, "cp": 2, "dp": 2}, False)):
        assert ("expert_order" not in refusals(M, workload(), order=PP_BEFORE_DP, **choices)) is legal
        assert "expert_order" not in refusals(M, workload(), **choices)


def test_what_tp_must_divide_is_known_with_the_mesh() -> None:
    """A search asks what a mesh's weights take before anything else of it is decided."""
    known = {*GIVEN, *LEVELS[:SHAPE]}
    divided = {
        rule.id: rule for rule in RULES.values() if isinstance(rule.check, Refusal)
        if any(isinstance(case, Undivided) and case.part == "tp" for case in rule.check.cases)
    }  # fmt: skip
    assert {"tower_tp", "mamba_groups"} <= {*divided}
    assert {name: rule.needs for name, rule in divided.items() if not {*rule.needs} <= known} == {}
