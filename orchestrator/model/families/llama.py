"""Llama and its like: a decoder with rotary positions, RMSNorm, gated MLP, grouped queries (megatron-core's GPTModel, other options)."""

from __future__ import annotations

from orchestrator.errors import InputError
from orchestrator.model.architecture import Architecture
from orchestrator.model.families.decoder import decoder
from orchestrator.model.families.family import Family
from orchestrator.model.families.hf import KEY, HfConfig

MISTRAL_WINDOW, MISTRAL_GROUPS = 4096, 8
"""Defaults of transformers' MistralConfig, where a config.json says nothing."""


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
    groups = config.optional_integer("num_key_value_heads")
    if model_type == "mistral" and "num_key_value_heads" not in config.fields:
        groups = MISTRAL_GROUPS
    return decoder(config, "llama", name, num_query_groups=groups, add_bias_linear=attention_bias, add_qkv_bias=model_type == "qwen2")


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
