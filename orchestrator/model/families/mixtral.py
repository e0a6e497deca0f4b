"""Mixtral (arXiv 2401.04088): a llama whose MLPs are experts."""

from __future__ import annotations

from orchestrator.model.architecture import Architecture
from orchestrator.model.families.decoder import balance, decoder
from orchestrator.model.families.hf import Family, HfConfig
from orchestrator.model.parts.experts import Experts


def from_hf_config(config: HfConfig, name: str) -> Architecture:
    """The architecture of Mixtral's config.json. Raises InputError for what can't be expressed."""
    config.choice("hidden_act", ("silu",), "silu")
    config.refuse_unless("sliding_window", None, "no published Mixtral has windows")
    experts = Experts(
        num_experts=config.integer("num_local_experts"),
        topk=config.integer("num_experts_per_tok", 2),
        ffn_hidden_size=config.integer("intermediate_size"),
        **balance(config, 0.001),
    )
    return decoder(config, "mixtral", name, groups=8, epsilon=1e-5, base=1_000_000, feed_forward=experts)


FAMILY = Family(name="mixtral", from_hf_config=from_hf_config, hf_model_types=("mixtral",))
