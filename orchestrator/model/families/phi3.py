"""Phi-3 and Phi-4-mini (arXiv 2404.14219): a llama whose projections are fused in its checkpoints, with a window in some."""

from __future__ import annotations

from orchestrator.model.architecture import Architecture
from orchestrator.model.families.decoder import decoder
from orchestrator.model.families.hf import Family, HfConfig
from orchestrator.model.parts.attention import GroupedQueryAttention


def from_hf_config(config: HfConfig, name: str) -> Architecture:
    """The architecture of Phi-3's config.json. Raises InputError for what can't be expressed."""
    config.choice("hidden_act", ("silu",), "silu")
    dropout = config.number("resid_pdrop", 0.0)
    config.refuse_unless("embd_pdrop", dropout, "the embedding's dropout must be resid_pdrop")
    window = config.optional_integer("sliding_window")
    section = config.section("rope_parameters")
    share = (section or config).number("partial_rotary_factor", 1.0)
    mixer = GroupedQueryAttention(window=window) if window else None
    return decoder(config, "phi3", name, epsilon=1e-5, rotary_percent=share, hidden_dropout=dropout, mixer=mixer)


FAMILY = Family(name="phi3", from_hf_config=from_hf_config, hf_model_types=("phi3",))
