"""The base of every value: frozen, keyword-only, strict when read from JSON."""

from __future__ import annotations

from typing import Any

import msgspec


class Value(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A frozen value; copy it with `msgspec.structs.replace(value, field=...)`."""


class Printed(Value, frozen=True, kw_only=True):
    """A value whose text a notebook shows as it stands."""

    def _repr_html_(self) -> str:
        import html

        return f"<pre>{html.escape(str(self))}</pre>"


def indented(value: Any) -> str:
    """A value as JSON for people to read: indented, its last line ended."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1).decode() + "\n"


def defaults_of(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """A struct's fields with their defaults, NODEFAULT where there is none or a new one each time. `msgspec.structs.fields` says this too,
    and evaluates all annotations for it.

    >>> defaults_of(msgspec.defstruct("Run", [("name", str), ("steps", int, 20), ("tags", dict, msgspec.field(default_factory=dict))]))
    {'name': NODEFAULT, 'steps': 20, 'tags': NODEFAULT}
    """
    names, given = struct.__struct_fields__, struct.__struct_defaults__
    whole = [msgspec.NODEFAULT] * (len(names) - len(given)) + [msgspec.NODEFAULT if hasattr(each, "factory") else each for each in given]
    return dict(zip(names, whole, strict=True))
