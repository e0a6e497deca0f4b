"""Llama (megatron-core's GPTModel with rotary positions, RMSNorm, a gated MLP, grouped queries), and the models that differ from it in a
fact or two: Mistral, Mixtral, OLMo 2, Phi-3 and Phi-4-mini, Qwen3 with and without experts."""

from __future__ import annotations

from orchestrator.errors import InputError
from orchestrator.model.architecture import Architecture
from orchestrator.model.families.decoder import balance, decoder
from orchestrator.model.families.hf import KEY, Family, HfConfig
from orchestrator.model.parts.attention import GroupedQueryAttention
from orchestrator.model.parts.experts import Experts

MISTRAL_WINDOW = 4096
"""Tokens that a token sees in transformers' MistralConfig, where a config.json says nothing."""
QWEN3_HEAD_DIM = 128
"""Width of a head in transformers' Qwen3Config, where a config.json says nothing."""


def llama(config: HfConfig, name: str) -> Architecture:
    """The architecture of a config.json of Llama, or of Qwen2 and Qwen2.5 without a window (biases on Q, K, V)."""
    model_type = config.choice("model_type", LLAMA.hf_model_types)
    config.refuse_unless("use_sliding_window", False, "the llama family attends to the whole sequence")
    config.refuse_unless("partial_rotary_factor", 1.0, "the llama family rotates whole heads")
    attention_bias, mlp_bias = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    if attention_bias != mlp_bias:
        why = f"megatron-core has a bias on all linears or none, and mlp_bias={mlp_bias}"
        raise InputError(f"{KEY}.attention_bias", attention_bias, why, [mlp_bias])
    return decoder(config, "llama", name, add_bias_linear=attention_bias, add_qkv_bias=model_type == "qwen2")


def mistral(config: HfConfig, name: str) -> Architecture:
    """Mistral 7B (arXiv 2310.06825), without experts: a llama whose tokens see a window of those before."""
    window = config.optional_integer("sliding_window") if "sliding_window" in config.fields else MISTRAL_WINDOW
    return decoder(config, "mistral", name, groups=8, mixer=GroupedQueryAttention(window=window) if window else None)


def mixtral(config: HfConfig, name: str) -> Architecture:
    """Mixtral (arXiv 2401.04088): a llama whose MLPs are experts."""
    config.refuse_unless("sliding_window", None, "no published Mixtral has windows")
    experts = Experts(
        num_experts=config.integer("num_local_experts"),
        topk=config.integer("num_experts_per_tok", 2),
        ffn_hidden_size=config.integer("intermediate_size"),
        **balance(config, 0.001),
    )
    return decoder(config, "mixtral", name, groups=8, epsilon=1e-5, base=1_000_000, feed_forward=experts)


def olmo2(config: HfConfig, name: str) -> Architecture:
    """OLMo 2 (arXiv 2501.00656): norms after attention and MLP, and of all queries and keys together."""
    config.refuse_unless("attention_bias", False, "no published OLMo 2 has biases")
    return decoder(config, "olmo2", name, epsilon=1e-5, norm_placement="post", mixer=GroupedQueryAttention(qk_norm="hidden"))


def phi3(config: HfConfig, name: str) -> Architecture:
    """Phi-3 and Phi-4-mini (arXiv 2404.14219): a llama whose projections are fused in its checkpoints, with a window in some."""
    dropout = config.number("resid_pdrop", 0.0)
    config.refuse_unless("embd_pdrop", dropout, "the embedding's dropout must be resid_pdrop")
    window = config.optional_integer("sliding_window")
    share = (config.section("rope_parameters") or config).number("partial_rotary_factor", 1.0)
    mixer = GroupedQueryAttention(window=window) if window else None
    return decoder(config, "phi3", name, epsilon=1e-5, rotary_percent=share, hidden_dropout=dropout, mixer=mixer)


def qwen3(config: HfConfig, name: str) -> Architecture:
    """Qwen3's dense models (arXiv 2505.09388): a llama with a norm of each head's queries and keys, and heads of their own width."""
    config.refuse_unless("use_sliding_window", False, "no published Qwen3 has windows")
    config.refuse_unless("attention_bias", False, "no published Qwen3 has biases")
    width = config.optional_integer("head_dim") or QWEN3_HEAD_DIM
    return decoder(config, "qwen3", name, groups=32, kv_channels=width, mixer=GroupedQueryAttention(qk_norm="head"))


def qwen3_moe(config: HfConfig, name: str) -> Architecture:
    """Qwen3's models of experts (arXiv 2505.09388); every layer has them."""
    config.refuse_unless("use_sliding_window", False, "no published Qwen3 has windows")
    config.refuse_unless("attention_bias", False, "no published Qwen3 has biases")
    config.refuse_unless("mlp_only_layers", [], "every layer of a published Qwen3-MoE has experts")
    config.refuse_unless("decoder_sparse_step", 1, "every layer of a published Qwen3-MoE has experts")
    experts = Experts(
        num_experts=config.integer("num_experts", config.optional_integer("num_local_experts")),
        topk=config.integer("num_experts_per_tok"),
        ffn_hidden_size=config.integer("moe_intermediate_size"),
        normalized=config.flag("norm_topk_prob", False),
        **balance(config, 0.001),
    )
    return decoder(config, "qwen3_moe", name, groups=4, mixer=GroupedQueryAttention(qk_norm="head"), feed_forward=experts)


LLAMA = Family(
    name="llama",
    from_hf_config=llama,
    hf_model_types=("llama", "qwen2"),
    choices={"position_embedding": ("rope",), "normalization": ("RMSNorm",), "activation": ("swiglu", "geglu"), "num_token_types": (0,)},
)
MISTRAL = Family(name="mistral", from_hf_config=mistral, hf_model_types=("mistral",))
MIXTRAL = Family(name="mixtral", from_hf_config=mixtral, hf_model_types=("mixtral",))
OLMO2 = Family(name="olmo2", from_hf_config=olmo2, hf_model_types=("olmo2",))
PHI3 = Family(name="phi3", from_hf_config=phi3, hf_model_types=("phi3",))
QWEN3 = Family(name="qwen3", from_hf_config=qwen3, hf_model_types=("qwen3",))
QWEN3_MOE = Family(name="qwen3_moe", from_hf_config=qwen3_moe, hf_model_types=("qwen3_moe",))
