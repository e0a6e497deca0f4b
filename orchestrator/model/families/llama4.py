"""Llama 4's text models (Scout and Maverick; Meta's blog of April 5, 2025, and transformers, models/llama4): attention in chunks with
rotary positions, every fourth layer without either; experts in every or every second layer, one of which each token visits beside a
shared one."""

from __future__ import annotations

from typing import Any

from orchestrator.errors import InputError
from orchestrator.model.architecture import Architecture, Layer
from orchestrator.model.families.decoder import decoder, pattern_of
from orchestrator.model.families.hf import Family, HfConfig
from orchestrator.model.parts.attention import GroupedQueryAttention
from orchestrator.model.parts.experts import Experts
from orchestrator.model.parts.mlp import Mlp

NO_ROPE_INTERVAL = 4
CHUNK = 8192
"""Tokens of a chunk of attention; transformers' default, as all the other defaults here."""


def from_hf_config(config: HfConfig, name: str) -> Architecture:
    """The architecture of a config.json of Llama 4, of which `text_config` is planned where it has one: without what looks at images."""
    text = config.section("text_config") if config.fields.get("model_type") == "llama4" else config
    if text is None:
        raise InputError(f"{config.key}.text_config", None, "is missing: a multimodal Llama 4 has one")
    text.refuse_unless("attention_bias", False, "no published Llama 4 has biases")
    text.refuse_unless("router_jitter_noise", 0.0, "no published Llama 4 is trained with it here")
    count, chunk = text.integer("num_hidden_layers", 48), text.fields.get("attention_chunk_size", CHUNK)
    chunk = None if chunk is None else text.integer("attention_chunk_size", CHUNK)
    scale, floor = text.number("attn_scale", 0.1), text.integer("floor_scale", 8192)
    tuned, normed = text.flag("attn_temperature_tuning", True), text.flag("use_qk_norm", True)
    # transformers' Llama 4 never adds the router's loss, whatever its coefficient says.
    experts = Experts(
        num_experts=text.integer("num_local_experts", 16),
        topk=text.integer("num_experts_per_tok", 1),
        ffn_hidden_size=text.integer("intermediate_size", 8192),
        shared_ffn_hidden_size=text.integer("intermediate_size", 8192),
        score="sigmoid",
        normalized=False,
        scores_on_input=True,
    )

    def layer(rotary: bool, routed: bool) -> Layer:
        mixer = GroupedQueryAttention(
            chunk=chunk if rotary else None,
            qk_norm="l2" if normed and rotary else None,
            temperature=(scale, float(floor)) if tuned and not rotary else None,
            rotary=rotary,
        )
        return Layer(mixer=mixer, feed_forward=experts if routed else Mlp())

    routed = set(_routed(text, count))
    layers = [layer(rotary, index in routed) for index, rotary in enumerate(_rotary(text, count))]
    return decoder(
        text,
        "llama4",
        name,
        groups=8,
        base=500_000,
        num_layers=count,
        ffn_hidden_size=text.integer("intermediate_size_mlp", 16384),
        kv_channels=text.optional_integer("head_dim") or 128,
        norm_epsilon=text.number("rms_norm_eps", 1e-5),
        pattern=pattern_of(layers),
    )


def _rotary(text: HfConfig, count: int) -> list[bool]:
    """Which layers have positions, and chunks; their windows are those that transformers makes of `no_rope_layers`."""
    interval = text.integer("no_rope_layer_interval", NO_ROPE_INTERVAL)
    found = _numbers(text, "no_rope_layers", count) or [int((index + 1) % interval != 0) for index in range(count)]
    types: Any = text.fields.get("layer_types")
    named = ["chunked_attention" if rotary else "full_attention" for rotary in found]
    if types is not None and list(types) != named:
        raise InputError(f"{text.key}.layer_types", repr(types)[:60], "must be chunked where no_rope_layers is 1, and full elsewhere")
    return [bool(rotary) for rotary in found]


def _routed(text: HfConfig, count: int) -> list[int]:
    """Indices of the layers with experts."""
    step = text.integer("interleave_moe_layer_step", 1)
    found = text.fields.get("moe_layers")
    return list(range(step - 1, count, step)) if found is None else _numbers(text, "moe_layers", None)


def _numbers(text: HfConfig, field: str, count: int | None) -> list[int]:
    """A list of whole numbers, of this length; [] where it is absent. Raises InputError."""
    found = text.fields.get(field) or []
    if not isinstance(found, list) or not all(isinstance(each, int) for each in found) or (found and count and len(found) != count):
        raise InputError(f"{text.key}.{field}", repr(found)[:60], f"must be a list of {count or 'whole'} numbers")
    return found


FAMILY = Family(name="llama4", from_hf_config=from_hf_config, hf_model_types=("llama4_text", "llama4"))
