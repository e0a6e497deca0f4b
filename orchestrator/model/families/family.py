"""What a model family says of itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from orchestrator.model.families.hf import HfConfig
from orchestrator.model.spec import Architecture, ModelSpec
from orchestrator.values import Value


class Family(Value, frozen=True, kw_only=True):
    """One file in this folder makes one of these; the registry in `families/__init__.py` lists them.

    `describe` gets an architecture that was checked against `choices`, and the sequence lengths in tokens. `from_hf_config` reads a
    Hugging Face config.json whose `model_type` is in `hf_model_types`.
    """

    name: str
    describe: Callable[[Architecture, int, int | None], ModelSpec]
    from_hf_config: Callable[[HfConfig, str], Architecture]
    hf_model_types: tuple[str, ...]
    choices: Mapping[str, tuple[object, ...]] = {}
    """Fields of Architecture that this family restricts, with what it takes."""
    has_decoder: bool = False
    """An encoder-decoder: needs `decoder_num_layers` and `decoder_seq_length`; the others refuse them."""
