"""The model families, and the two ways in: an architecture or a Hugging Face config becomes layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from orchestrator.errors import InputError
from orchestrator.model.families import bert, gpt, llama, t5
from orchestrator.model.families.check import check_architecture, check_lengths
from orchestrator.model.families.family import Family
from orchestrator.model.families.hf import KEY, HfConfig
from orchestrator.model.spec import Architecture, ModelSpec

FAMILIES: Final[dict[str, Family]] = {family.name: family for family in (gpt.FAMILY, llama.FAMILY, t5.FAMILY, bert.FAMILY)}
"""A new family is a file with a `FAMILY` and its name in this line."""


def describe(architecture: Architecture, seq_length: int, decoder_seq_length: int | None = None) -> ModelSpec:
    """The layers of this architecture for sequences of these lengths, in tokens.

    Raises InputError for an unknown family, an architecture that is not one, or a length that it can't take.
    """
    family = _family(architecture.family)
    check_architecture(architecture, family)
    check_lengths(architecture, family, seq_length, decoder_seq_length)
    return family.describe(architecture, seq_length, decoder_seq_length)


def from_hf_config(config: Mapping[str, Any], name: str) -> Architecture:
    """The architecture of a Hugging Face config.json. Raises InputError that names the field, its value and the choices.

    >>> config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 128, "vocab_size": 260}
    >>> from_hf_config(config, "tiny").ffn_hidden_size
    256
    """
    if not isinstance(config, Mapping):
        raise InputError(KEY, name, f"must be a JSON object, not {type(config).__name__}")
    by_type = {model_type: family for family in FAMILIES.values() for model_type in family.hf_model_types}
    fields = HfConfig(config)
    family = by_type[fields.choice("model_type", by_type)]
    architecture = family.from_hf_config(fields, name)
    try:
        check_architecture(architecture, family)
    except InputError as error:
        raise InputError(KEY, name, f"makes {error}") from None
    return architecture


def _family(name: str) -> Family:
    if name not in FAMILIES:
        raise InputError("model.family", name, "is not known", FAMILIES)
    return FAMILIES[name]
