"""What an architecture must be before it is described. Refused by key, value and choices; nothing is repaired."""

from __future__ import annotations

from orchestrator.errors import InputError
from orchestrator.model.families.family import Family
from orchestrator.model.spec import Architecture

ABOVE_ZERO = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "ffn_hidden_size",
    "vocab_size",
    "max_position_embeddings",
    "num_query_groups",
    "kv_channels",
    "norm_epsilon",
    "rotary_base",
    "rope_scaling_factor",
    "make_vocab_size_divisible_by",
)
NOT_NEGATIVE = ("decoder_num_layers", "num_token_types")
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
    if family.has_decoder:
        if not a.decoder_num_layers:
            raise InputError("model.decoder_num_layers", 0, f"must be above 0: the {family.name} family has a decoder")
        if a.query_groups != heads:
            # mcore transformer/attention.py:1636
            raise InputError("model.num_query_groups", a.query_groups, f"cross-attention takes num_attention_heads={heads} groups only")
    elif a.decoder_num_layers:
        raise InputError("model.decoder_num_layers", a.decoder_num_layers, f"must be 0: the {family.name} family has one stack, num_layers")


def check_lengths(a: Architecture, family: Family, seq_length: int, decoder_seq_length: int | None) -> None:
    """Raises InputError with a key `train.<field>`."""
    if family.has_decoder and decoder_seq_length is None:
        raise InputError("train.decoder_seq_length", None, f"is missing: the {family.name} family has a decoder")
    if not family.has_decoder and decoder_seq_length is not None:
        raise InputError("train.decoder_seq_length", decoder_seq_length, f"the {family.name} family has no decoder; leave it out")
    for key, value in (("seq_length", seq_length), ("decoder_seq_length", decoder_seq_length)):
        if value is None:
            continue
        if value < 1:
            raise InputError(f"train.{key}", value, "must be above 0")
        if a.position_embedding == "learned_absolute" and value > a.max_position_embeddings:
            raise InputError(f"train.{key}", value, f"is beyond the learned positions, max_position_embeddings={a.max_position_embeddings}")
