"""Which parts of models megatron-core 0.16.1's layers have and our workers train, in the words of `Architecture.features`; and how a part
is said in TransformerConfig's words and in Megatron-LM's flags."""

from __future__ import annotations

from typing import Any, Final

from orchestrator.model.architecture import Architecture
from orchestrator.model.parts.attention import GroupedQueryAttention

TRAINED: Final = ("attention", "mlp", "llama3_rope", "encoder", "encoder_decoder", "relative_bias", "qk_norm")
"""Each with a test of parity against one process (tests/workers)."""

PLANNED: Final = {
    "experts": "our worker does not train experts yet, which Megatron-core has",
    "shared_experts": "our worker does not train shared experts yet, which Megatron-core has",
    "shared_expert_gate": "our worker does not train shared experts yet, which Megatron-core has",
    "sigmoid_router": "our worker does not train experts yet, which Megatron-core has",
    "grouped_router": "our worker does not train experts yet, which Megatron-core has",
    "expert_bias": "our worker does not train experts yet, which Megatron-core has",
    "router_bias": "our worker does not train experts yet, which Megatron-core has",
    "latent_attention": "our worker does not train latent attention yet, which Megatron-core has",
    "mtp": "our worker does not train heads of multi-token prediction yet, which Megatron-core has",
    "window": "our worker does not set attention windows yet, which Megatron-core has",
    "sinks": "our worker does not set attention sinks yet, which Megatron-core has",
    "partial_rotary": "our worker rotates whole heads; Megatron-core has --rotary-percent",
    "yarn_rope": "our worker does not set YaRN's frequencies yet, which Megatron-core has with latent attention",
    "linear_rope": "our worker does not scale rotary positions linearly, which Megatron-core does by --rotary-seq-len-interpolation-factor",
    "clamped_swiglu": "our worker does not set GPT-OSS's clamped activation yet, which Megatron-core has",
    "zero_centered_norm": "Megatron-core's local norms are not zero-centered; with Transformer Engine they can be",
    "longrope_rope": "Megatron-core has no LongRoPE",
    "qk_norm_hidden": "Megatron-core has no norm of all queries and keys together",
    "attention_softcap": "Megatron-core has no soft cap of attention's scores",
    "score_width": "our worker does not scale scores otherwise than by the head's width",
    "mixed_rope": "Megatron-core has one set of rotary frequencies for all layers",
    "post_norm": "Megatron-core's layers norm before attention and MLP, not after",
    "sandwich_norm": "Megatron-core's layers norm before attention and MLP, not after",
    "embedding_scale": "Megatron-core does not scale token vectors",
    "logits_softcap": "Megatron-core has no soft cap of logits",
}
"""Parts that are priced as Megatron-core would run them, and what is lacking to train them."""


def plan_only(a: Architecture) -> str | None:
    """One line, where a plan for this model can't be trained here; None: it can."""
    whys = [PLANNED[word] for word in a.features() if word in PLANNED]
    return f"plan only: {'; '.join(dict.fromkeys(whys))}" if whys else None


def _attentions(a: Architecture) -> list[GroupedQueryAttention]:
    """Of each layer in order."""
    return [layer.mixer for layer in a.each_layer() if isinstance(layer.mixer, GroupedQueryAttention)]


def config_fields(a: Architecture) -> dict[str, Any]:
    """TransformerConfig's arguments of parts beyond plain attention and an MLP."""
    fields: dict[str, Any] = {}
    if any(attention.qk_norm == "head" for attention in _attentions(a)):
        fields["qk_layernorm"] = True
    return fields


def flags(a: Architecture) -> list[tuple[str, ...]]:
    """The same for Megatron-LM's programs."""
    return [("--qk-layernorm",)] if "qk_layernorm" in config_fields(a) else []
