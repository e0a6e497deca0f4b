"""The language of transformers' configurations (models/*/configuration_*.py of transformers 5): names of an architecture's fields and of
its parts', by class. What follows from several fields at once is beside them in engines/hf_config.py."""

from __future__ import annotations

from typing import Final

from orchestrator.words.megatron import FUNCTION
from orchestrator.words.terms import Table, Term, named

T5_ACTIVATIONS: Final = {"relu": "relu", "geglu": "gated-gelu"}

GPT2: Final[Table] = (
    # Not transformers' own is num_key_value_heads: DeepSpeed's Ulysses asks for it.
    *named("n_layer=num_layers n_embd=hidden_size n_head=num_attention_heads num_key_value_heads=num_attention_heads"),
    *named("n_inner=ffn_hidden_size n_positions=max_position_embeddings"),
    Term("activation_function", "activation", to=FUNCTION.get),
    *named("layer_norm_epsilon=norm_epsilon resid_pdrop=hidden_dropout embd_pdrop=hidden_dropout attn_pdrop=attention_dropout"),
)
SIZES: Final[Table] = (
    *named("hidden_size num_attention_heads num_key_value_heads=query_groups head_dim intermediate_size=ffn_hidden_size"),
    *named("max_position_embeddings attention_dropout"),
)
"""Sizes that transformers' decoders with query groups call by the same names."""
ROTARY: Final[Table] = (
    *SIZES,
    Term("num_hidden_layers", "num_layers"),
    Term("hidden_act", "activation", to=FUNCTION.get),
    Term("rms_norm_eps", "norm_epsilon"),
)
"""Decoders with rotary positions."""
BERT: Final[Table] = (
    *named("num_hidden_layers=num_layers hidden_size num_attention_heads intermediate_size=ffn_hidden_size max_position_embeddings"),
    Term("type_vocab_size", "num_token_types", to=lambda types: max(1, types)),
    Term("hidden_act", "activation", to=FUNCTION.get),
    *named("layer_norm_eps=norm_epsilon hidden_dropout_prob=hidden_dropout attention_probs_dropout_prob=attention_dropout"),
)
T5: Final[Table] = (
    *named("num_layers num_decoder_layers=decoder_num_layers d_model=hidden_size num_heads=num_attention_heads d_kv=head_dim"),
    *named("d_ff=ffn_hidden_size n_positions=max_position_embeddings"),
    Term("feed_forward_proj", "activation", to=T5_ACTIVATIONS.get),
    *named("layer_norm_epsilon=norm_epsilon dropout_rate=hidden_dropout"),
)

ROUTED: Final = named("num_experts_per_tok=topk router_aux_loss_coef=aux_loss_coeff")
"""What configurations of models of experts have in common; like the tables below, of the experts of a layer."""
MIXTRAL: Final = named("intermediate_size=ffn_hidden_size num_local_experts=num_experts")
QWEN3_MOE: Final = named("num_experts moe_intermediate_size=ffn_hidden_size norm_topk_prob=normalized")
ROUTER: Final[Table] = (
    *named("norm_topk_prob=normalized routed_scaling_factor=scaling"),
    Term("n_group", "groups", to=lambda groups: groups or 1),
    Term("topk_group", "group_topk", to=lambda groups: groups or 1),
)
"""The router of DeepSeek-V3, which GLM-4.5 and Nemotron-H have too."""
SIGMOID: Final[Table] = (
    *named("n_routed_experts=num_experts moe_intermediate_size=ffn_hidden_size"),
    Term("n_shared_experts", "shared_ffn_hidden_size", of=lambda experts: experts.shared_ffn_hidden_size // experts.ffn_hidden_size),
    *ROUTER,
)
"""GLM-4.5's and DeepSeek-V3's experts."""
NEMOTRON_EXPERTS: Final = (
    *named("n_routed_experts=num_experts num_experts_per_tok=topk moe_intermediate_size=ffn_hidden_size"),
    *named("moe_shared_expert_intermediate_size=shared_ffn_hidden_size"),
    *ROUTER,
)

LATENT_ATTENTION: Final = named("q_lora_rank kv_lora_rank qk_nope_head_dim=qk_head_dim qk_rope_head_dim v_head_dim")
STATE_SPACE: Final = named("n_groups=num_groups conv_kernel use_conv_bias=conv_bias chunk_size")
MAMBA2: Final = (*named("num_heads head_dim state_size"), *STATE_SPACE)
NEMOTRON_MAMBA: Final = (*named("mamba_num_heads=num_heads mamba_head_dim=head_dim ssm_state_size=state_size"), *STATE_SPACE)

STILL: Final[Table] = (
    *named("hidden_size intermediate_size=ffn_hidden_size num_hidden_layers=num_layers num_attention_heads num_channels"),
    *named("patch_size image_size hidden_act layer_norm_eps=norm_epsilon"),
)
"""Towers for images of one size: CLIP's, SigLIP's and InternViT."""
SIGLIP: Final[Table] = (*STILL, *named("vision_use_head=pooling_head"))
INTERN: Final[Table] = (
    *STILL,
    *named("attention_bias=qkv_bias use_qk_norm=qk_norm"),
    Term("norm_type", "normalization", to={"LayerNorm": "layer_norm", "RMSNorm": "rms_norm"}.get),
    Term("use_absolute_position_embeddings", "num_position_embeddings", to=bool),
    Term("use_mean_pooling", "final_norm", to=lambda last: not last),
)
MOVING: Final[Table] = (
    *named("depth=num_layers hidden_size num_heads=num_attention_heads intermediate_size=ffn_hidden_size hidden_act patch_size"),
    *named("in_channels=num_channels temporal_patch_size spatial_merge_size"),
)
"""Qwen's towers, for images of any size and for films."""
