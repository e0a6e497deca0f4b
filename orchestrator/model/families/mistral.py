"""Mistral 7B (arXiv 2310.06825): a llama whose tokens see a window of those before."""

from __future__ import annotations

from orchestrator.model.architecture import Architecture
from orchestrator.model.families.decoder import decoder
from orchestrator.model.families.hf import Family, HfConfig
from orchestrator.model.parts.attention import GroupedQueryAttention

WINDOW, GROUPS = 4096, 8
"""Defaults of transformers' MistralConfig, where a config.json says nothing."""


def from_hf_config(config: HfConfig, name: str) -> Architecture:
    """The architecture of a Mistral's config.json without experts. Raises InputError for what can't be expressed."""
    config.choice("hidden_act", ("silu",), "silu")
    said = "sliding_window" in config.fields
    window = config.optional_integer("sliding_window") if said else WINDOW
    return decoder(config, "mistral", name, groups=GROUPS, mixer=GroupedQueryAttention(window=window) if window else None)


FAMILY = Family(name="mistral", from_hf_config=from_hf_config, hf_model_types=("mistral",))
