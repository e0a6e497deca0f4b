"""Megatron's language: settings by the names of TransformerConfig's fields, or of a flag's destination where it has no field (training/
arguments.py and transformer/transformer_config.py, core_v0.16.1 and core_v0.19.0). What follows from several of a plan's choices at once is
beside them in engines/transformer_config.py."""

from __future__ import annotations

from typing import Any, Final

from orchestrator.words import terms
from orchestrator.words.terms import LONG_TYPES, NOTHING, Table, Term, flags, named, short_type, switch

ACTIVATION: Final[Table] = (
    switch("swiglu", "model.activation", "swiglu"),
    switch("squared_relu", "model.activation", "relu2"),
    switch("quick_geglu", "model.activation", "clamped_swiglu"),
)
"""Switches for a model's activation. Without any of them it is gelu."""
FUNCTION: Final = {
    "gelu": "gelu", "geglu": "gelu", "swiglu": "silu", "reglu": "relu", "relu": "relu",
    "relu2": "squared_relu", "clamped_swiglu": "quick_gelu", "quick_gelu": "quick_gelu",
}  # fmt: skip
"""What TransformerConfig has as activation_func for a model's activation, beside gated_linear_unit: names of torch, or Megatron's own."""
WITHOUT_SWITCH: Final = ("gelu",)
"""What is trained where none stands."""
OTHER_ACTIVATION: Final[Table] = (
    switch("geglu", "model.activation", "geglu"),
    switch("reglu", "model.activation", "reglu"),
    switch("relu", "model.activation", "relu"),
    switch("quick_gelu", "model.activation", "quick_gelu"),
    switch("openai_gelu", "model.activation", "gelu"),
)
"""Switches for a model's activation in Megatron-LM before 0.16, NeMo and Bridge."""

SIZES: Final = named("tensor_model_parallel_size=tp pipeline_model_parallel_size=pp context_parallel_size=cp", default=1, back=int)
"""Sizes of the parallel groups of a plan or a setup."""
HYBRID_CP: Final = "hybrid_context_parallel"
NO_HYBRID_CP: Final = "stops Megatron-LM 0.16.1 and 0.19 before their first step, and no loop but its own has its scheduler"
"""The field that gives every sample as many ranks as its length needs, and what is wrong with it in the releases: its iterator is none that
a step takes (training/training.py:2496 and core/rerun_state_machine.py:921, core_v0.16.1; :3479 and :950, core_v0.19.0), and its samples
have not the dimensions of 0.19's get_batch (core/utils.py:2205). Mended in Megatron-LM's pull requests 6820, 6821 and 6822, after 0.19."""
EXPERT_PARALLEL: Final[Table] = (
    Term("expert_model_parallel_size", "ep", default=1, back=int),
    Term("expert_tensor_parallel_size", "etp", back=int),
    Term("moe_token_dispatcher_type", "moe_token_dispatcher_type", default="allgather", back=str),
    *flags("moe_shared_expert_overlap overlap_moe_expert_parallel_comm delay_wgrad_compute moe_permute_fusion"),
)
"""Settings of a plan or a setup for a model with experts."""
OPTIONS: Final[Table] = (
    *flags("sequence_parallel"),
    Term("cp_comm_type", "cp_comm_type", default="p2p", back=lambda said: str(said[0] if isinstance(said, list) else said)),
    *flags("tp_comm_overlap reduce_scatter_with_fp32_accumulation fp8_param=fp8_param_gather overlap_grad_reduce overlap_param_gather"),
    *flags("optimizer_cpu_offload=offload_optimizer cross_entropy_loss_fusion"),
    Term("bucket_size", "ddp_bucket_size", unless=None, back=lambda said: said if said is None else int(said)),
    *flags("keep_fp8_transpose_cache"),
)
BATCH: Final = named("micro_batch_size", default=1, back=int)

SHAPE: Final = named("max_position_embeddings=model.max_position_embeddings hidden_size=model.hidden_size "
                     "ffn_hidden_size=model.ffn_hidden_size num_attention_heads=model.num_attention_heads", back=int)  # fmt: skip
NORMS: Final = {"layernorm": "LayerNorm", "layernorm1p": "LayerNorm", "low_precision_layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
"""Norms of plans by the words of Megatron, NeMo and Megatron-DeepSpeed."""
NORM: Final[Table] = (
    Term("normalization", "model.normalization", default="LayerNorm", back=lambda said: NORMS.get(str(said).lower(), said)),
    Term("layernorm_epsilon", "model.norm_epsilon", default=1e-5, back=float),
    Term("position_embedding_type", "model.position_embedding", default="learned_absolute", back=str),
)
ROPE: Final[Table] = (
    Term("rotary_base", "model.rotary_base", default=10000, back=int),
    Term("rotary_percent", "model.rotary_percent", unless=1.0, default=1.0, back=float),
)
BIASES: Final[Table] = (
    Term("add_bias_linear", "model.add_bias_linear", default=True, back=bool),
    Term("add_qkv_bias", "model.add_qkv_bias", default=False, back=bool),
)
TIED: Final[Table] = (
    Term(
        "untie_embeddings_and_output_weights", "model.tie_embeddings", default=False, to=lambda tied: not tied, back=lambda said: not said
    ),
    Term("share_embeddings_and_output_weights", "model.tie_embeddings", back=bool, when=lambda plan: False),
)
"""Settings for tied embeddings; the second is NeMo's and Bridge's."""
DROPOUT: Final = named("attention_dropout=model.attention_dropout hidden_dropout=model.hidden_dropout", default=0.1, back=float)

BETAS: Final[Table] = (
    Term("adam_beta1", "training.betas", default=0.9, to=lambda betas: betas[0], back=float),
    Term("adam_beta2", "training.betas", default=0.999, to=lambda betas: betas[1], back=float),
)
"""Settings of a training's Adam. Two settings make one pair of betas, which whoever reads puts together."""
EPSILON: Final[Table] = (Term("adam_eps", "training.eps", default=1e-8, back=float),)
OPTIMIZERS: Final = {"adam": "adamw", "sgd": "sgd", "muon": "muon", "dist_muon": "muon"}
"""Optimizers of plans by Megatron's names; the last is the older one of Muon with the distributed optimizer."""
MUON: Final[Table] = (
    Term("muon_momentum", "training.muon_momentum", default=0.9, back=float),
    Term("muon_num_ns_steps", "training.muon_num_ns_steps", default=5, back=int),
    Term("muon_tp_mode", "training.muon_tp_mode", default="blockwise", back=str),
)
STYLES: Final = {"inverse_square_root": "inverse-square-root", "wsd": "WSD"}
"""Schedules of plans that Megatron calls otherwise."""
SCHEDULE: Final[Table] = (
    Term("lr", "training.lr", back=lambda rate: float(rate) or NOTHING),
    Term("min_lr", "training.min_lr", default=0.0, back=float),
    Term("lr_decay_style", "training.schedule", default="linear", to=lambda ours: STYLES.get(ours, ours),
         back=lambda said: next((ours for ours, theirs in STYLES.items() if theirs == said), str(said))),
    Term("lr_wsd_decay_style", "training.decay", back=str, when=lambda plan: plan.training.schedule == "wsd"),
    Term("lr_wsd_decay_iters", "training.decay_steps", back=int, of=lambda plan: plan.training.decay_length,
         when=lambda plan: plan.training.schedule == "wsd"),
    Term("lr_decay_iters", "training.steps", back=lambda said: NOTHING),
    Term("lr_warmup_iters", "training.warmup", default=0, back=lambda said: NOTHING),
    Term("weight_decay", "training.weight_decay", default=0.01, back=float),
    Term("clip_grad", "training.clip", default=1.0, back=float),
    Term("seed", "training.seed", default=1234, back=int),
)  # fmt: skip
"""The rate decays until the last step; another end, and a warm-up said in samples, are the reader's to judge."""
PRECISION_AWARE: Final[Table] = (
    *flags("use_precision_aware_optimizer=training.precision_aware_optimizer"),
    Term("main_grads_dtype", "training.grad_reduce_dtype", back=lambda said: NOTHING,
         of=lambda plan: LONG_TYPES[plan.training.grad_reduce_dtype if plan.training.precision_aware_optimizer else "fp32"]),
    Term("exp_avg_dtype", "training.exp_avg_dtype", to=LONG_TYPES.get, back=short_type),
    Term("exp_avg_sq_dtype", "training.exp_avg_sq_dtype", to=LONG_TYPES.get, back=short_type),
)  # fmt: skip

FSDP_STRATEGIES: Final = ("no_shard", "optim", "optim_grads", "optim_grads_params")
"""What Megatron-FSDP shards (--data-parallel-sharding-strategy) by ZeRO stage."""

DELTA_NET: Final[Table] = (
    Term("linear_conv_kernel_dim", "conv_kernel", default=4, back=int),
    Term("linear_key_head_dim", "key_head_dim", default=128, back=int),
    Term("linear_value_head_dim", "value_head_dim", default=128, back=int),
    Term("linear_num_key_heads", "num_key_heads", default=16, back=int),
    Term("linear_num_value_heads", "num_value_heads", default=32, back=int),
)
"""Settings of a gated delta net; its defaults are transformer_config.py's."""

MAMBA: Final[Table] = (
    Term("mamba_num_heads", "num_heads", back=int),
    Term("mamba_head_dim", "head_dim", default=64, back=int),
    Term("mamba_state_dim", "state_size", default=128, back=int),
    Term("mamba_num_groups", "num_groups", default=8, back=int),
)
"""Settings of a Mamba-2 mixer; its defaults are transformer_config.py's."""
LETTERS: Final = {"M": ("mamba2", "none"), "*": ("attention", "none"), "-": ("none", "mlp"), "E": ("none", "experts")}
"""The kinds of mixer and feed-forward of layers that have one part, by their letter (Symbols of ssm/mamba_hybrid_layer_allocation.py)."""

LATENT_ATTENTION: Final[Table] = (
    Term("q_lora_rank", "q_lora_rank", back=int),
    Term("kv_lora_rank", "kv_lora_rank", default=32, back=int),
    Term("qk_head_dim", "qk_head_dim", default=128, back=int),
    Term("qk_pos_emb_head_dim", "qk_rope_head_dim", default=64, back=int),
    Term("v_head_dim", "v_head_dim", default=128, back=int),
)

EXPERTS: Final[Table] = (
    Term("num_moe_experts", "num_experts", back=int),
    Term("moe_router_topk", "topk", default=2, back=int),
    Term("moe_ffn_hidden_size", "ffn_hidden_size", back=int),
)
ROUTING: Final[Table] = (
    Term("moe_shared_expert_intermediate_size", "shared_ffn_hidden_size", unless=0, back=int),
    Term("moe_shared_expert_gate", "shared_gate", unless=False, back=bool, when=lambda experts: bool(experts.shared_ffn_hidden_size)),
    Term("moe_router_topk_scaling_factor", "scaling", unless=1.0, back=float),
    Term("moe_router_num_groups", "groups", unless=None, back=int),
    Term("moe_router_group_topk", "group_topk", unless=None, back=int, when=lambda experts: experts.groups is not None),
    Term("moe_expert_capacity_factor", "capacity_factor", unless=None, back=float),
    Term("moe_pad_expert_input_to_capacity", "pad_to_capacity", unless=False, back=bool,
         when=lambda experts: experts.capacity_factor is not None),
    Term("moe_expert_rank_capacity_factor", "rank_capacity_factor", unless=None, back=float),
    *flags("moe_router_enable_expert_bias=expert_bias"),
    Term("moe_router_bias_update_rate", "bias_update_rate", back=float, when=lambda experts: experts.expert_bias),
)  # fmt: skip

ALIASES: Final = {
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank", "apply_layernorm_1p": "layernorm_zero_centered_gamma",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers", "rope_scaling": "use_rope_scaling",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers", "use_custom_fsdp": "use_megatron_fsdp",
    "num_experts": "num_moe_experts",
}  # fmt: skip
"""Other names of settings, in TransformerConfig, older releases and other tools."""

BALANCED_OVER: Final = {"micro_batch": "aux_loss", "sequence": "seq_aux_loss", "global_batch": "global_aux_loss"}
"""moe_router_load_balancing_type by the tokens among which the loss balances experts (`Experts.balanced_over`)."""
EXPERT_SETTINGS: Final = terms.names(EXPERTS, ROUTING) | {
    "moe_layer_freq", "moe_router_score_function", "moe_router_pre_softmax", "moe_router_load_balancing_type", "moe_aux_loss_coeff",
}  # fmt: skip
"""Settings that say what a model's experts are and which layers have them."""


def activation(given: dict[str, Any]) -> str | None:
    """A recipe's model.activation of switches by name, in any release's spelling; None: no switch stands."""
    found: str | None = terms.read((*OTHER_ACTIVATION, *ACTIVATION), given).get("model.activation")
    return found
