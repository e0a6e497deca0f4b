"""GLM-4.5 (arXiv 2508.06471): grouped queries that rotate half of each head, experts after the first dense layers."""

from __future__ import annotations

from orchestrator.model.architecture import Architecture
from orchestrator.model.families.decoder import balance, decoder, first_dense, router_groups
from orchestrator.model.families.hf import Family, HfConfig
from orchestrator.model.parts.attention import GroupedQueryAttention
from orchestrator.model.parts.experts import Experts


def from_hf_config(config: HfConfig, name: str) -> Architecture:
    """The architecture of a config.json of GLM-4.5 or GLM-4.5-Air. Raises InputError for what can't be expressed."""
    width = config.integer("moe_intermediate_size")
    experts = Experts(
        num_experts=config.integer("n_routed_experts"),
        topk=config.integer("num_experts_per_tok"),
        ffn_hidden_size=width,
        shared_ffn_hidden_size=width * config.integer("n_shared_experts", 1),
        score="sigmoid",
        normalized=config.flag("norm_topk_prob", True),
        scaling=config.number("routed_scaling_factor", 1.0),
        **router_groups(config),
        **balance(config),
        expert_bias=True,
    )
    mixer = GroupedQueryAttention(qk_norm="head" if config.flag("use_qk_norm", False) else None)
    share = (config.section("rope_parameters") or config).number("partial_rotary_factor", 0.5)
    return decoder(
        config,
        "glm4_moe",
        name,
        groups=8,
        epsilon=1e-5,
        rotary_percent=share,
        add_qkv_bias=config.flag("attention_bias", False),
        pattern=first_dense(config, mixer, experts, 1),
        mtp_num_layers=int(config.number("num_nextn_predict_layers", 0)),
    )


FAMILY = Family(name="glm4_moe", from_hf_config=from_hf_config, hf_model_types=("glm4_moe",))
