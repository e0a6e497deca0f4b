"""What an architecture must be before it is described. Refused by key, value and choices; nothing is repaired."""

from __future__ import annotations

from orchestrator.errors import InputError
from orchestrator.model.architecture import Architecture
from orchestrator.model.families.hf import Family
from orchestrator.model.parts.attention import GroupedQueryAttention
from orchestrator.model.parts.experts import Experts
from orchestrator.model.parts.gated_delta_net import GatedDeltaNet
from orchestrator.model.parts.mamba2 import Mamba2
from orchestrator.model.parts.mlp import Mlp

ABOVE_ZERO = (
    "num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "vocab_size", "max_position_embeddings", "num_query_groups",
    "kv_channels", "norm_epsilon", "rotary_base", "rope_scaling_factor", "make_vocab_size_divisible_by",
)  # fmt: skip
NOT_NEGATIVE = ("decoder_num_layers", "num_token_types", "mtp_num_layers")
MAY_BE_ZERO = ("shared_ffn_hidden_size", "aux_loss_coeff")
"""Fields of a layer's parts in which 0 is allowed and means that there is none."""
PROBABILITIES = ("hidden_dropout", "attention_dropout")


def check_architecture(a: Architecture, family: Family) -> None:
    """Raises InputError with a key `model.<field>`."""
    for field in ABOVE_ZERO:
        value = getattr(a, field)
        if value is not None and not value > 0:
            raise InputError(f"model.{field}", value, "must be above 0")
    for field in NOT_NEGATIVE:
        if getattr(a, field) < 0:
            raise InputError(f"model.{field}", getattr(a, field), "must not be negative")
    for field in PROBABILITIES:
        if not 0 <= getattr(a, field) < 1:
            raise InputError(f"model.{field}", getattr(a, field), "must be a probability below 1")
    for field, choices in family.choices.items():
        if getattr(a, field) not in choices:
            raise InputError(f"model.{field}", getattr(a, field), f"is not in the {family.name} family", choices)
    heads = a.num_attention_heads
    if a.kv_channels is None and a.hidden_size % heads:
        raise InputError("model.num_attention_heads", heads, f"does not divide hidden_size={a.hidden_size}; give kv_channels")
    if heads % a.query_groups:
        raise InputError("model.num_query_groups", a.query_groups, f"does not divide num_attention_heads={heads}")
    two_stacks = a.stack == "encoder_decoder"
    if two_stacks:
        if not a.decoder_num_layers:
            raise InputError("model.decoder_num_layers", 0, f"must be above 0: the {family.name} family has a decoder")
        if a.query_groups != heads:
            # mcore transformer/attention.py:1636
            raise InputError("model.num_query_groups", a.query_groups, f"cross-attention takes num_attention_heads={heads} groups only")
    elif a.decoder_num_layers:
        raise InputError("model.decoder_num_layers", a.decoder_num_layers, f"must be 0: the {family.name} family has one stack, num_layers")
    _check_layers(a)


def _check_layers(a: Architecture) -> None:
    """Raises InputError for parts that don't fit together."""
    if a.stack != "decoder":
        for name, value, plain in (("pattern", a.pattern, ()), ("mixer", a.mixer, None), ("mtp_num_layers", a.mtp_num_layers, 0)):
            if value != plain:
                raise InputError(f"model.{name}", value, f"is for decoders; the {a.family} family has other layers")
        if not isinstance(a.common_layer.feed_forward, Mlp):
            raise InputError("model.feed_forward", a.common_layer.feed_forward.label, f"is for decoders; the {a.family} family has an MLP")
    if not 0 < a.rotary_percent <= 1:
        raise InputError("model.rotary_percent", a.rotary_percent, "must be above 0 and at most 1")
    for index, run in enumerate(a.pattern):
        if run.layers < 1:
            raise InputError(f"model.pattern[{index}].layers", run.layers, "must be above 0")
    for layer in a.kinds_of_layers():
        for part in (layer.mixer, layer.feed_forward):
            for field in part.__struct_fields__:
                value = getattr(part, field)
                number = isinstance(value, int | float) and not isinstance(value, bool)
                if number and (value < 0 or (value == 0 and field not in MAY_BE_ZERO)):
                    raise InputError(f"model.{part.__struct_config__.tag}.{field}", value, "must be above 0")
        if isinstance(layer.feed_forward, Experts):
            _check_experts(layer.feed_forward)
        if layer.mixer == layer.feed_forward:
            raise InputError("model.mixer", "none", "with feed_forward none: a layer has at least one part")
        if isinstance(layer.mixer, Mamba2) and layer.mixer.num_heads % layer.mixer.num_groups:
            raise InputError("model.mamba2.num_groups", layer.mixer.num_groups, f"does not divide num_heads={layer.mixer.num_heads}")
        if isinstance(layer.mixer, GatedDeltaNet) and layer.mixer.num_value_heads % layer.mixer.num_key_heads:
            keys, values = layer.mixer.num_key_heads, layer.mixer.num_value_heads
            raise InputError("model.gated_delta_net.num_key_heads", keys, f"does not divide num_value_heads={values}")
        if isinstance(layer.mixer, GroupedQueryAttention) and layer.mixer.window and layer.mixer.chunk:
            raise InputError("model.attention.chunk", layer.mixer.chunk, f"with window={layer.mixer.window}: a layer has one of them")


def _check_experts(experts: Experts) -> None:
    if experts.topk > experts.num_experts:
        raise InputError("model.experts.topk", experts.topk, f"is above num_experts={experts.num_experts}")
    if (experts.groups is None) != (experts.group_topk is None):
        raise InputError("model.experts.group_topk", experts.group_topk, f"goes with groups={experts.groups}: give both or none")
    factor = experts.capacity_factor
    if factor is not None and not 0 < factor <= experts.num_experts / experts.topk:
        most = f"num_experts/topk={experts.num_experts / experts.topk:g}, with which an expert can take every token"
        raise InputError("model.experts.capacity_factor", factor, f"must be above 0 and at most {most}")
    if (rows := experts.rank_capacity_factor) is not None and rows <= 0:
        raise InputError("model.experts.rank_capacity_factor", rows, "must be above 0")
    if experts.pad_to_capacity and factor is None:
        raise InputError("model.experts.pad_to_capacity", "true", "needs capacity_factor")
    if experts.groups and experts.num_experts % experts.groups:
        raise InputError("model.experts.groups", experts.groups, f"does not divide num_experts={experts.num_experts}")
    if experts.groups and experts.group_topk:
        if experts.group_topk > experts.groups:
            raise InputError("model.experts.group_topk", experts.group_topk, f"is above groups={experts.groups}")
        each = experts.num_experts // experts.groups
        if experts.topk > experts.group_topk * each:
            why = f"leaves {experts.group_topk * each} experts, {each} in a group, of which a token takes topk={experts.topk}"
            raise InputError("model.experts.group_topk", experts.group_topk, why)


def check_lengths(a: Architecture, seq_length: int, decoder_seq_length: int | None) -> None:
    """Raises InputError with a key `train.<field>`."""
    two_stacks = a.stack == "encoder_decoder"
    if two_stacks and decoder_seq_length is None:
        raise InputError("train.decoder_seq_length", None, f"is missing: the {a.family} family has a decoder")
    if not two_stacks and decoder_seq_length is not None:
        raise InputError("train.decoder_seq_length", decoder_seq_length, f"the {a.family} family has no decoder; leave it out")
    for key, value in (("seq_length", seq_length), ("decoder_seq_length", decoder_seq_length)):
        if value is None:
            continue
        if value < 1:
            raise InputError(f"train.{key}", value, "must be above 0")
        if a.position_embedding == "learned_absolute" and value > a.max_position_embeddings:
            raise InputError(f"train.{key}", value, f"is beyond the learned positions, max_position_embeddings={a.max_position_embeddings}")
