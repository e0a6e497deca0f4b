"""Gemma 2 (arXiv 2408.00118) and Gemma 3's text models (arXiv 2503.19786): windows in most layers, norms around each part."""

from __future__ import annotations

from orchestrator.model.architecture import Architecture, Layer
from orchestrator.model.families.decoder import decoder, pattern_of, windowed
from orchestrator.model.families.hf import Family, HfConfig
from orchestrator.model.parts.attention import GroupedQueryAttention
from orchestrator.model.parts.mlp import Mlp

LOCAL_ROTARY_BASE = 10000
"""Base of the rotary frequencies in Gemma 3's layers with a window (section 2 of its report)."""
UNIT = 6
"""Layers of the pattern that repeats: five with a window, one without."""


def from_hf_config(config: HfConfig, name: str) -> Architecture:
    """The architecture of a config.json of Gemma 2, or of a Gemma 3 without vision."""
    third = config.choice("model_type", ("gemma2", "gemma3_text")) == "gemma3_text"
    config.choice("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    window, width = config.integer("sliding_window", 4096), config.integer("head_dim", 256)
    unit = config.integer("sliding_window_pattern", config.integer("_sliding_window_pattern", UNIT)) if third else 2
    # Scores are divided by the root of this; Gemma 2 cuts them softly.
    scale = config.number("query_pre_attn_scalar", 256)
    cap, logits = (
        None if config.fields.get(field, default) is None else config.number(field, default)
        for field, default in (("attn_logit_softcapping", None if third else 50.0), ("final_logit_softcapping", None if third else 30.0))
    )

    # transformers 5 has a section for the layers with a window, and one for the others.
    sections = config.section("rope_parameters") or config
    nested, windows = sections.section("full_attention"), sections.section("sliding_attention")
    local_base = config.integer("rope_local_base_freq", LOCAL_ROTARY_BASE)
    if windows is not None:
        windows.choice("rope_type", ("default",), "default")
        local_base = windows.integer("rope_theta", local_base)

    def layer(local: bool) -> Layer:
        mixer = GroupedQueryAttention(
            window=window if local else None,
            qk_norm="head" if third else None,
            softcap=cap,
            score_width=scale,
            rotary_base=local_base if local and third else None,
            rotary_scaled=not local,
        )
        return Layer(mixer=mixer, feed_forward=Mlp())

    flat = config if nested is None else HfConfig({**config.fields, "rope_parameters": nested.fields}, config.key)
    return decoder(
        flat,
        "gemma",
        name,
        groups=4,
        base=1_000_000 if third else 10_000,
        kv_channels=width,
        activation="geglu",
        norm_placement="both",
        zero_centered_norm=True,
        embedding_scale=True,
        logits_softcap=logits,
        tie_embeddings=config.flag("tie_word_embeddings", True),
        pattern=pattern_of([layer(local) for local in windowed(config, lambda index: (index + 1) % unit != 0)]),
    )


FAMILY = Family(name="gemma", from_hf_config=from_hf_config, hf_model_types=("gemma2", "gemma3_text"))
