"""Llama and its like: a decoder with rotary positions, RMSNorm, gated MLP, grouped queries (megatron-core's GPTModel, other options)."""

from __future__ import annotations

from orchestrator.errors import InputError
from orchestrator.model.architecture import Architecture
from orchestrator.model.families.decoder import decoder
from orchestrator.model.families.hf import KEY, Family, HfConfig


def from_hf_config(config: HfConfig, name: str) -> Architecture:
    """The architecture of a config.json of Llama, or of Qwen2 and Qwen2.5 without a window (biases on Q, K, V)."""
    model_type = config.choice("model_type", FAMILY.hf_model_types)
    config.choice("hidden_act", ("silu",), "silu")
    config.refuse_unless("use_sliding_window", False, "the llama family attends to the whole sequence")
    config.refuse_unless("partial_rotary_factor", 1.0, "the llama family rotates whole heads")
    attention_bias, mlp_bias = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    if attention_bias != mlp_bias:
        raise InputError(
            f"{KEY}.attention_bias", attention_bias, f"megatron-core has a bias on all linears or none, and mlp_bias={mlp_bias}", [mlp_bias]
        )
    return decoder(config, "llama", name, add_bias_linear=attention_bias, add_qkv_bias=model_type == "qwen2")


FAMILY = Family(
    name="llama",
    from_hf_config=from_hf_config,
    hf_model_types=("llama", "qwen2"),
    choices={"position_embedding": ("rope",), "normalization": ("RMSNorm",), "activation": ("swiglu", "geglu"), "num_token_types": (0,)},
)
