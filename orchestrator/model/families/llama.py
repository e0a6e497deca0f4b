"""Llama and its like: a decoder with rotary positions, RMSNorm, gated MLP, grouped queries (megatron-core's GPTModel, other options)."""

from __future__ import annotations

from orchestrator.errors import InputError
from orchestrator.model.architecture import Architecture
from orchestrator.model.families.family import Family
from orchestrator.model.families.hf import KEY, HfConfig

LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Fixed in megatron-core (rotary_pos_embedding.py, _apply_scaling); only the factor can be chosen."""


MISTRAL_WINDOW, MISTRAL_GROUPS = 4096, 8
"""Defaults of transformers' MistralConfig, where a config.json says nothing."""


def _rope(config: HfConfig) -> tuple[int, float | None]:
    """Base and Llama-3 scaling factor, from `rope_theta` and `rope_scaling` or from transformers 5's `rope_parameters`."""
    for field in ("rope_parameters", "rope_scaling"):
        section = config.section(field)
        if section is None:
            continue
        base = section.integer("rope_theta", config.integer("rope_theta", 10000))
        kind = section.choice("type" if "type" in section.fields else "rope_type", ("default", "llama3"), "default")
        if kind == "default":
            return base, None
        for name, expected in LLAMA3_ROPE.items():
            section.refuse_unless(name, expected, "megatron-core's llama3 scaling fixes it")
        return base, section.number("factor")
    return config.integer("rope_theta", 10000), None


def from_hf_config(config: HfConfig, name: str) -> Architecture:
    """A config.json of Llama, of a Mistral without a sliding window, or of Qwen2 (biases on Q, K, V)."""
    model_type = config.choice("model_type", FAMILY.hf_model_types)
    config.choice("hidden_act", ("silu",), "silu")
    if model_type == "mistral" or config.flag("use_sliding_window", False):
        # What MistralConfig has where nothing is said is a window of 4096 tokens and 8 groups.
        window = config.fields.get("sliding_window", MISTRAL_WINDOW)
        if window is not None:
            raise InputError(f"{KEY}.sliding_window", window, "the llama family attends to the whole sequence", ["null"])
    config.refuse_unless("partial_rotary_factor", 1.0, "the llama family rotates whole heads")
    attention_bias, mlp_bias = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    if attention_bias != mlp_bias:
        raise InputError(
            f"{KEY}.attention_bias", attention_bias, f"megatron-core has a bias on all linears or none, and mlp_bias={mlp_bias}", [mlp_bias]
        )
    rotary_base, factor = _rope(config)
    groups = config.optional_integer("num_key_value_heads")
    if model_type == "mistral" and "num_key_value_heads" not in config.fields:
        groups = MISTRAL_GROUPS
    return Architecture(
        family="llama",
        name=name,
        num_layers=config.integer("num_hidden_layers"),
        hidden_size=config.integer("hidden_size"),
        num_attention_heads=config.integer("num_attention_heads"),
        num_query_groups=groups,
        kv_channels=config.optional_integer("head_dim"),
        ffn_hidden_size=config.integer("intermediate_size"),
        vocab_size=config.integer("vocab_size"),
        max_position_embeddings=config.integer("max_position_embeddings"),
        activation="swiglu",
        normalization="RMSNorm",
        norm_epsilon=config.number("rms_norm_eps", 1e-6),
        position_embedding="rope",
        rotary_base=rotary_base,
        rope_scaling_factor=factor,
        add_bias_linear=attention_bias,
        add_qkv_bias=model_type == "qwen2",
        tie_embeddings=config.flag("tie_word_embeddings", False),
        attention_dropout=config.number("attention_dropout", 0.0),
    )


FAMILY = Family(
    name="llama",
    from_hf_config=from_hf_config,
    hf_model_types=("llama", "mistral", "qwen2"),
    choices={
        "position_embedding": ("rope",),
        "normalization": ("RMSNorm",),
        "activation": ("swiglu", "geglu"),
        "num_token_types": (0,),
    },
)
