"""What the config.json of most of transformers' decoders have in common: rotary positions, RMSNorm, a gated MLP, grouped queries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from orchestrator.model.architecture import Architecture, Layer, Run
from orchestrator.model.families.hf import HfConfig
from orchestrator.model.parts.mlp import Mlp

LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Llama 3's scaling of rotary positions, fixed in megatron-core (rotary_pos_embedding.py, _apply_scaling); only the factor can be
chosen."""
BY_ITS_CODE = "engine=deepspeed takes the model's own code: python -m orchestrator.describe, then model.description="
SCALINGS = ("default", "llama3", "linear", "yarn", "longrope")
"""transformers' names of the ways to stretch rotary positions that an Architecture can have."""


def rope(config: HfConfig, default_base: int = 10000) -> dict[str, Any]:
    """Fields of Architecture that rotary positions have, from `rope_theta` and `rope_scaling` or from transformers 5's `rope_parameters`.
    `default_base`: of a config.json without `rope_theta`. Raises InputError for a scaling that an Architecture can't have."""
    for field in ("rope_parameters", "rope_scaling"):
        section = config.section(field)
        if section is None:
            continue
        base = section.integer("rope_theta", config.integer("rope_theta", default_base))
        kind = section.choice("type" if "type" in section.fields else "rope_type", SCALINGS, "default")
        if kind == "default":
            return {"rotary_base": base}
        if kind == "llama3":
            for name, expected in LLAMA3_ROPE.items():
                section.refuse_unless(name, expected, f"megatron-core's llama3 scaling fixes it ({BY_ITS_CODE})")
        if kind == "longrope" and "factor" not in section.fields:
            # modeling_rope_utils.py: how much longer the longest sequence is than what the frequencies were made for.
            trained = section.optional_integer("original_max_position_embeddings") or config.integer("original_max_position_embeddings")
            return {
                "rotary_base": base,
                "rope_scaling_type": kind,
                "rope_scaling_factor": config.integer("max_position_embeddings") / trained,
            }
        return {"rotary_base": base, "rope_scaling_type": kind, "rope_scaling_factor": section.number("factor")}
    return {"rotary_base": config.integer("rope_theta", default_base)}


def decoder(
    config: HfConfig, family: str, name: str, *, groups: int | None = None, epsilon: float = 1e-6, base: int = 10000, **more: Any
) -> Architecture:
    """The architecture of these fields; `more` stands in their place or beside them. `groups`, `epsilon`, `base`: the key-value heads, the
    norms' epsilon and the rotary base of a config.json that does not say them, as transformers' own class of the model has them. Without an
    `activation` in `more` it is SwiGLU, and a `hidden_act` that isn't its is refused."""
    if "activation" not in more:
        config.choice("hidden_act", ("silu",), "silu")
    fields: dict[str, Any] = {
        "num_layers": config.integer("num_hidden_layers"),
        "hidden_size": config.integer("hidden_size"),
        "num_attention_heads": config.integer("num_attention_heads"),
        "num_query_groups": config.optional_integer("num_key_value_heads", groups),
        "kv_channels": config.optional_integer("head_dim"),
        "vocab_size": config.integer("vocab_size"),
        "max_position_embeddings": config.integer("max_position_embeddings"),
        "activation": "swiglu",
        "normalization": "RMSNorm",
        "norm_epsilon": config.number("rms_norm_eps", epsilon),
        "position_embedding": "rope",
        "add_bias_linear": False,
        "tie_embeddings": config.flag("tie_word_embeddings", False),
        "attention_dropout": config.number("attention_dropout", 0.0),
    }
    if "ffn_hidden_size" not in more:
        fields["ffn_hidden_size"] = config.integer("intermediate_size")
    return Architecture(family=family, name=name, **(fields | rope(config, base) | more))


def pattern_of(layers: Sequence[Layer]) -> tuple[Run, ...]:
    """The shortest pattern that gives these layers when it is repeated.

    >>> from orchestrator.model.parts.attention import GroupedQueryAttention
    >>> from orchestrator.model.parts.mlp import Mlp
    >>> local, full = (Layer(mixer=GroupedQueryAttention(window=window), feed_forward=Mlp()) for window in (128, None))
    >>> [run.layers for run in pattern_of([local, local, full, local, local, full, local])]
    [2, 1]
    """
    period = next(size for size in range(1, len(layers) + 1) if all(layer == layers[i % size] for i, layer in enumerate(layers)))
    runs = groupby(layers[:period])
    return tuple(Run(layers=len(list(run)), mixer=layer.mixer, feed_forward=layer.feed_forward) for layer, run in runs)


def windowed(config: HfConfig, is_local: Callable[[int], bool]) -> list[bool]:
    """Which layers have a window: as `layer_types` says, or by their number where a config.json has none."""
    count, types = config.integer("num_hidden_layers"), config.fields.get("layer_types")
    return [is_local(index) for index in range(count)] if types is None else [kind == "sliding_attention" for kind in types]


def router_groups(config: HfConfig, groups: int | None = None, topk: int | None = None) -> dict[str, Any]:
    """Fields of Experts, from `n_group` and `topk_group`, or these where it does not say them; one group is none."""
    groups = config.optional_integer("n_group", groups)
    return {} if groups is None or groups == 1 else {"groups": groups, "group_topk": config.integer("topk_group", topk)}


def balance(config: HfConfig, default: float = 0.0) -> dict[str, Any]:
    """Fields of Experts, from `router_aux_loss_coef`, which transformers' models of experts add where they return the router's logits."""
    return {"aux_loss_coeff": config.number("router_aux_loss_coef", default)}


def first_dense(config: HfConfig, mixer: Any, experts: Any, default: int = 0) -> tuple[Run, ...]:
    """The first `first_k_dense_replace` layers have an MLP, the others experts."""
    dense, count = int(config.number("first_k_dense_replace", default)), config.integer("num_hidden_layers")
    layers = [Layer(mixer=mixer, feed_forward=Mlp() if index < dense else experts) for index in range(count)]
    return pattern_of(layers)
