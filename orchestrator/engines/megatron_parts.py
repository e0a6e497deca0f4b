"""Which parts of models megatron-core 0.16.1's layers have and our workers train, in the words of `Architecture.features`; and how a part
is said in TransformerConfig's words and in Megatron-LM's flags."""

from __future__ import annotations

from typing import Any, Final

from orchestrator.model.architecture import Architecture
from orchestrator.model.parts.attention import GroupedQueryAttention

TRAINED: Final = ("attention", "mlp", "llama3_rope", "encoder", "encoder_decoder", "relative_bias", "qk_norm")
"""Each with a test of parity against one process (tests/workers)."""


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
