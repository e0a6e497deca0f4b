"""A model that a user's own training script has already (a module of transformers, or its configuration), as keys that a plan is asked for
with: what `ds_config_for` of the Python interface needs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from orchestrator.errors import InputError

ALONE: Final = {"pin.tp": "1", "pin.cp": "1"}
"""The script's sampler gives every rank data of its own, unless its writer says otherwise."""


def config_of(model: Any) -> dict[str, Any]:
    """A model's configuration as config.json has it: of a module of transformers, of its configuration, of a mapping, or of a folder or
    config.json. Raises InputError for anything else.

    >>> config_of({"model_type": "gpt2"})
    {'model_type': 'gpt2'}
    """
    if isinstance(model, str | Path):
        path = Path(model) / "config.json" if Path(model).is_dir() else Path(model)
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError("model", path, f"can't be read: {getattr(error, 'strerror', None) or 'is no JSON'}") from None
        if not isinstance(found, dict):
            raise InputError("model", path, "is no configuration")
        return found
    config = model if isinstance(model, Mapping) else getattr(model, "config", model)
    if isinstance(config, Mapping):
        return dict(config)
    to_dict = getattr(config, "to_dict", None)
    if not callable(to_dict):
        why = "has no configuration of transformers; python -m orchestrator.describe makes a file of it, for model.description="
        raise InputError("model", type(model).__name__, why)
    written: dict[str, Any] = json.loads(json.dumps(to_dict(), default=str))
    return written


def recompute_of(model: Any) -> str:
    """Whether a module recomputes its layers now (`gradient_checkpointing_enable()`), as pin.recompute has it."""
    name = next((one for one in ("is_activation_checkpointing", "is_gradient_checkpointing") if hasattr(type(model), one)), "")
    return "full" if name and getattr(model, name) is True else "none"
