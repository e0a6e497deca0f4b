"""OLMo 2 (arXiv 2501.00656): norms after attention and MLP, and of all queries and keys together."""

from __future__ import annotations

from orchestrator.model.architecture import Architecture
from orchestrator.model.families.decoder import decoder
from orchestrator.model.families.hf import Family, HfConfig
from orchestrator.model.parts.attention import GroupedQueryAttention


def from_hf_config(config: HfConfig, name: str) -> Architecture:
    """The architecture of OLMo 2's config.json. Raises InputError for what can't be expressed."""
    config.choice("hidden_act", ("silu",), "silu")
    config.refuse_unless("attention_bias", False, "no published OLMo 2 has biases")
    return decoder(config, "olmo2", name, epsilon=1e-5, norm_placement="post", mixer=GroupedQueryAttention(qk_norm="hidden"))


FAMILY = Family(name="olmo2", from_hf_config=from_hf_config, hf_model_types=("olmo2",))
