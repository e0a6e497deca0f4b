"""Measured layers in a recipe: the group `profile`, with quantities as people write them ("76.98 MiB", "2.29 ms")."""

from __future__ import annotations

import math
import re
from typing import Any, Final

import msgspec

from orchestrator.cost.profile import Profile
from orchestrator.errors import InputError
from orchestrator.key import shown
from orchestrator.model.spec import Architecture
from orchestrator.units import GIB, MIB

UNITS: Final = {"GiB": GIB, "MiB": MIB, "KiB": 1024, "s": 1.0, "ms": 1e-3, "us": 1e-6}
FAMILY: Final = "profile"
"""Family of a model that is known by its measured layers alone."""
_QUANTITY = re.compile(r"([0-9.eE+-]+) *(" + "|".join(UNITS) + r")\Z")


def read_profile(key: str, tree: Any) -> Profile:
    """The value of the group, still without a name. Raises InputError that says where it is wrong."""
    if not isinstance(tree, dict):
        raise InputError(key, shown(tree), "must be a mapping with layers, as in recipes/profiles")
    try:
        found = msgspec.convert({"name": "", **_base_units(tree)}, Profile, strict=False)
    except (msgspec.ValidationError, ValueError) as error:
        raise InputError("profile", None, f"is not a profile: {error}") from None
    if not found.layers:
        raise InputError("profile", None, "has no layers")
    for name in ("other_state_bytes", "other_saved_bytes", "backward_of_forward", "states_per_weight"):
        number = getattr(found, name)
        if not math.isfinite(number) or number < 0:
            raise InputError(f"profile.{name}", number, "must be a number of at least 0")
    for layer in found.layers:
        numbers = (*layer.forward_s.values(), *layer.saved_bytes.values(), layer.parameter_bytes, layer.output_bytes)
        sound = all(math.isfinite(number) and number > 0 for number in numbers)
        if layer.count < 1 or layer.reductions < 0 or not sound or 1 not in layer.forward_s or not layer.saved_bytes:
            why = "needs a count of at least 1, forward_s of degree 1, saved_bytes, and figures above 0"
            raise InputError(f"profile.layers.{layer.kind}", None, why)
    return found


def _base_units(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _base_units(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_base_units(entry) for entry in value]
    match = _QUANTITY.match(value) if isinstance(value, str) else None
    return float(match.group(1)) * UNITS[match.group(2)] if match else value


def stand_in(profile: Profile) -> Architecture:
    """An architecture for a model that only a profile describes: its name and number of layers are all that is read."""
    layers = sum(layer.count for layer in profile.layers)
    return Architecture(
        family=FAMILY,
        name=profile.name,
        num_layers=layers,
        hidden_size=1,
        num_attention_heads=1,
        ffn_hidden_size=1,
        vocab_size=1,
        max_position_embeddings=1,
    )
