"""The base of every value: frozen, keyword-only, strict when read from JSON."""

from __future__ import annotations

import msgspec


class Value(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A frozen value; copy it with `msgspec.structs.replace(value, field=...)`."""


class Printed(Value, frozen=True, kw_only=True):
    """A value whose text a notebook shows as it stands."""

    def _repr_html_(self) -> str:
        import html

        return f"<pre>{html.escape(str(self))}</pre>"
