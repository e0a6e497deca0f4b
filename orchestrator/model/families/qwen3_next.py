"""Qwen3-Next (transformers, models/qwen3_next) and Qwen3.5's text models (models/qwen3_5, models/qwen3_5_moe): three layers with a gated
delta net, then one of gated attention that rotates a quarter of each head; experts with a shared one, or an MLP."""

from __future__ import annotations

from typing import Any

from orchestrator.errors import InputError
from orchestrator.model.architecture import Architecture, Layer
from orchestrator.model.families.decoder import balance, decoder, pattern_of
from orchestrator.model.families.hf import Family, HfConfig
from orchestrator.model.parts.attention import GroupedQueryAttention
from orchestrator.model.parts.experts import Experts
from orchestrator.model.parts.gated_delta_net import GatedDeltaNet
from orchestrator.model.parts.mlp import Mlp

KINDS = ("linear_attention", "full_attention")
INTERVAL = 4
"""Layers of which one has attention, the last of them; transformers' default, as all the other defaults here."""


def from_hf_config(config: HfConfig, name: str) -> Architecture:
    """The architecture of a config.json of Qwen3-Next or of Qwen3.5's text. Where all tokens are text, rotary positions in three sections
    are the plain ones."""
    text, kind = config, config.choice("model_type", TYPES)
    text.refuse_unless("attention_bias", False, "no published model has biases")
    text.refuse_unless("attn_output_gate", True, "every published model has gates")
    text.refuse_unless("mlp_only_layers", [], "every layer of a published model has the same feed-forward")
    text.refuse_unless("decoder_sparse_step", 1, "every layer of a published model has the same feed-forward")
    text.refuse_unless("mtp_use_dedicated_embeddings", False, "prediction layers share the embedding")
    delta = GatedDeltaNet(
        num_key_heads=text.integer("linear_num_key_heads", 16),
        num_value_heads=text.integer("linear_num_value_heads", 32),
        key_head_dim=text.integer("linear_key_head_dim", 128),
        value_head_dim=text.integer("linear_value_head_dim", 128),
        conv_kernel=text.integer("linear_conv_kernel_dim", 4),
    )
    attention = GroupedQueryAttention(qk_norm="head", output_gate=True)
    dense = kind == "qwen3_5_text"
    part = Mlp() if dense else _experts(text)
    layers = [Layer(mixer=attention if each == KINDS[1] else delta, feed_forward=part) for each in _kinds(text)]
    # Where every layer has experts, none has the MLP of `intermediate_size`.
    more: dict[str, Any] = {"ffn_hidden_size": part.ffn_hidden_size} if isinstance(part, Experts) else {}
    return decoder(
        text,
        "qwen3_next",
        name,
        groups=4 if dense else 2,
        kv_channels=text.integer("head_dim", 256),
        rotary_percent=(text.section("rope_parameters") or text).number("partial_rotary_factor", 0.25),
        zero_centered_norm=True,
        tie_embeddings=text.flag("tie_word_embeddings", False),
        pattern=pattern_of(layers),
        mtp_num_layers=int(text.number("mtp_num_hidden_layers", 0)),
        **more,
    )


def _kinds(text: HfConfig) -> list[str]:
    """The kind of each layer, in order: as `layer_types` lists them, else by the layer's number. Raises InputError for an unknown kind or a
    wrong length."""
    count, listed = text.integer("num_hidden_layers"), text.fields.get("layer_types")
    if listed is None:
        interval = text.integer("full_attention_interval", INTERVAL)
        return [KINDS[(index + 1) % interval == 0] for index in range(count)]
    if not isinstance(listed, list | tuple) or len(listed) != count or not set(listed) <= {*KINDS}:
        raise InputError(f"{text.key}.layer_types", repr(listed)[:60], f"must be a list of {count} kinds of layers", KINDS)
    return list(listed)


def _experts(text: HfConfig) -> Experts:
    """The experts of a layer. Qwen3.5 always makes the chosen experts' scores sum to one."""
    return Experts(
        num_experts=text.integer("num_experts"),
        topk=text.integer("num_experts_per_tok"),
        ffn_hidden_size=text.integer("moe_intermediate_size", 512),
        shared_ffn_hidden_size=text.integer("shared_expert_intermediate_size", 512),
        shared_gate=True,
        normalized=text.flag("norm_topk_prob", True),
        **balance(text, 0.001),
    )


TYPES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
FAMILY = Family(name="qwen3_next", from_hf_config=from_hf_config, hf_model_types=TYPES)
