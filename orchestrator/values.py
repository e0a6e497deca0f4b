"""The base of every value: frozen, keyword-only, strict when read from JSON."""

from __future__ import annotations

import msgspec


class Value(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A frozen value; copy it with `msgspec.structs.replace(value, field=...)`."""
