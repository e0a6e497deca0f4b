"""What a reader says of the models that it reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from orchestrator.model.architecture import Architecture
from orchestrator.model.families.hf import HfConfig
from orchestrator.values import Value


class Family(Value, frozen=True, kw_only=True):
    """One file in this folder makes one of these, its `FAMILY`. `from_hf_config` makes an architecture of a Hugging Face config.json whose
    `model_type` is in `hf_model_types`."""

    name: str
    from_hf_config: Callable[[HfConfig, str], Architecture]
    hf_model_types: tuple[str, ...]
    choices: Mapping[str, tuple[object, ...]] = {}
    """Fields of Architecture that this family restricts, with what it takes."""
