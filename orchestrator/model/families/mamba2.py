"""Mamba-2 (Dao and Gu, arXiv 2405.21060): layers whose only part is a state space."""

from __future__ import annotations

from typing import Any

from orchestrator.errors import InputError
from orchestrator.model.architecture import Architecture
from orchestrator.model.families.hf import Family, HfConfig
from orchestrator.model.parts.mamba2 import Mamba2
from orchestrator.model.parts.part import Nothing

UNBOUNDED = 2**20
"""Positions that a model without any may have: the recurrence alone tells them, and any length can be trained."""


def from_hf_config(config: HfConfig, name: str) -> Architecture:
    """The architecture of a config.json of Mamba-2 as transformers has it. Its attention heads, and its feed-forward's width, are the state
    space's."""
    config.choice("hidden_act", ("silu",), "silu")
    config.refuse_unless("use_bias", False, "no published Mamba-2 has biases in its projections")
    config.refuse_unless("residual_in_fp32", True, "published models add up their layers in fp32")
    limit: Any = config.fields.get("time_step_limit")
    if limit is not None and list(limit) != [0.0, float("inf")]:
        raise InputError(f"{config.key}.time_step_limit", repr(limit), "published models have [0, Infinity]")
    hidden = config.integer("hidden_size", 4096)
    heads, width = config.integer("num_heads", 128), config.integer("head_dim", 64)
    if heads * width != hidden * config.integer("expand", 2):
        raise InputError(f"{config.key}.num_heads", heads, f"times head_dim={width} is not expand times hidden_size={hidden}")
    mixer = Mamba2(
        num_heads=heads,
        head_dim=width,
        state_size=config.integer("state_size", 128),
        num_groups=config.integer("n_groups", 8),
        conv_kernel=config.integer("conv_kernel", 4),
        conv_bias=config.flag("use_conv_bias", True),
        chunk_size=config.integer("chunk_size", 256),
    )
    return Architecture(
        family="mamba2",
        name=name,
        num_layers=config.integer("num_hidden_layers", 64),
        hidden_size=hidden,
        num_attention_heads=heads,
        kv_channels=width,
        ffn_hidden_size=heads * width,
        vocab_size=config.integer("vocab_size", 32768),
        max_position_embeddings=UNBOUNDED,
        activation="swiglu",
        normalization="RMSNorm",
        norm_epsilon=config.number("layer_norm_epsilon", 1e-5),
        position_embedding="none",
        add_bias_linear=False,
        tie_embeddings=config.flag("tie_word_embeddings", False),
        mixer=mixer,
        feed_forward=Nothing(),
    )


FAMILY = Family(name="mamba2", from_hf_config=from_hf_config, hf_model_types=("mamba2",))
