"""Qwen3's models of experts (arXiv 2505.09388)."""

from __future__ import annotations

from orchestrator.model.architecture import Architecture
from orchestrator.model.families.decoder import balance, decoder
from orchestrator.model.families.hf import Family, HfConfig
from orchestrator.model.parts.attention import GroupedQueryAttention
from orchestrator.model.parts.experts import Experts


def from_hf_config(config: HfConfig, name: str) -> Architecture:
    """The architecture of a config.json of Qwen3-MoE; every layer has experts."""
    config.choice("hidden_act", ("silu",), "silu")
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


FAMILY = Family(name="qwen3_moe", from_hf_config=from_hf_config, hf_model_types=("qwen3_moe",))
