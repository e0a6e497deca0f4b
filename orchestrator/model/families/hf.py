"""A Hugging Face config.json read field by field, offline. What is missing, of the wrong type or inexpressible is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from orchestrator.errors import InputError
from orchestrator.model.architecture import Architecture
from orchestrator.model.shared import MOST_LAYERS
from orchestrator.values import Value

KEY = "model.hf_config"
MISSING = object()
MOST = 10**9
"""Largest whole number that a config.json's field may have, but for numbers of layers; a number with decimals (rope_theta) may be a
thousand times as large."""


class HfConfig:
    """Typed access to the fields of a config.json; `default` None means that the field must be there."""

    def __init__(self, fields: Mapping[str, Any], key: str = KEY) -> None:
        self.fields, self.key = fields, key

    def _get(self, field: str, default: object, kind: str) -> Any:
        value = self.fields.get(field, MISSING)
        if value is MISSING and default is None:
            raise InputError(f"{self.key}.{field}", None, f"is missing; it is {kind}")
        return default if value is MISSING else value

    def integer(self, field: str, default: int | None = None) -> int:
        """A whole number above 0; 500000.0 is one."""
        value = self._get(field, default, "an integer above 0")
        most = MOST_LAYERS if "layer" in field else 1000 * MOST if field == "rope_theta" else MOST
        if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= most or value != int(value):
            raise InputError(f"{self.key}.{field}", repr(value), f"must be an integer above 0, at most {most:,}")
        return int(value)

    def optional_integer(self, field: str, default: int | None = None) -> int | None:
        """The integer; None where the field is null, `default` where it is absent."""
        return None if self.fields.get(field, default) is None else self.integer(field, default)

    def number(self, field: str, default: float | None = None) -> float:
        """The field as a number that is not negative. Raises InputError for another value."""
        value = self._get(field, default, "a number")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1000 * MOST:
            raise InputError(f"{self.key}.{field}", repr(value), f"must be a number of at least 0, at most {1000 * MOST:,}")
        return float(value)

    def flag(self, field: str, default: bool) -> bool:
        value = self._get(field, default, "true or false")
        if not isinstance(value, bool):
            raise InputError(f"{self.key}.{field}", repr(value), "must be a truth value", ["true", "false"])
        return value

    def choice(self, field: str, choices: Iterable[object], default: object = None) -> Any:
        """The field, which must be one of `choices`. Raises InputError for another value."""
        known = list(choices)
        value = self._get(field, default, f"one of {', '.join(map(str, known))}")
        if not any(type(value) is type(choice) and value == choice for choice in known):
            raise InputError(f"{self.key}.{field}", repr(value), "can't be expressed", known)
        return value

    def refuse_unless(self, field: str, expected: object, why: str) -> None:
        """The field is absent, null or `expected`."""
        value = self.fields.get(field)
        if value is not None and value != expected:
            raise InputError(f"{self.key}.{field}", repr(value), f"{why}; only {expected!r} can be expressed")

    def section(self, field: str) -> HfConfig | None:
        """A nested object, or None where it is absent or null."""
        value = self.fields.get(field)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise InputError(f"{self.key}.{field}", repr(value), "must be an object")
        return HfConfig(value, f"{self.key}.{field}")


class Family(Value, frozen=True, kw_only=True):
    """A reader: `from_hf_config` makes an architecture of a Hugging Face config.json whose `model_type` is in `hf_model_types`. One in a
    file of this folder is found by itself."""

    name: str
    from_hf_config: Callable[[HfConfig, str], Architecture]
    hf_model_types: tuple[str, ...]
    choices: Mapping[str, tuple[object, ...]] = {}
    """Fields of Architecture that this family restricts, with what it takes."""
