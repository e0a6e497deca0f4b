"""Qwen3's dense models (arXiv 2505.09388): a llama with a norm of each head's queries and keys, and heads of their own width."""

from __future__ import annotations

from orchestrator.model.architecture import Architecture
from orchestrator.model.families.decoder import decoder
from orchestrator.model.families.hf import Family, HfConfig
from orchestrator.model.parts.attention import GroupedQueryAttention

HEAD_DIM = 128
"""Width of a head in transformers' Qwen3Config, where a config.json says nothing."""


def from_hf_config(config: HfConfig, name: str) -> Architecture:
    """The architecture of a Qwen3's config.json without experts. Raises InputError for what can't be expressed."""
    config.choice("hidden_act", ("silu",), "silu")
    config.refuse_unless("use_sliding_window", False, "no published Qwen3 has windows")
    config.refuse_unless("attention_bias", False, "no published Qwen3 has biases")
    width = config.optional_integer("head_dim") or HEAD_DIM
    return decoder(config, "qwen3", name, groups=32, kv_channels=width, mixer=GroupedQueryAttention(qk_norm="head"))


FAMILY = Family(name="qwen3", from_hf_config=from_hf_config, hf_model_types=("qwen3",))
