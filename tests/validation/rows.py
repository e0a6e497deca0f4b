"""Fields of a table's row as numbers, and the reason why a row can't be used."""

from __future__ import annotations

from orchestrator.errors import InputError


class SkipError(Exception):
    """The reason why a row can't be used."""


def whole(row: dict[str, str], key: str, default: int | None = None) -> int:
    """A positive whole number; `default` for a blank. Raises SkipError for a blank without one, and for what is none."""
    text = row.get(key, "").strip()
    if not text:
        if default is None:
            raise SkipError(f"{key} is not stated")
        return default
    try:
        value = float(text)
    except ValueError:
        raise SkipError(f"{key}={text} is no number") from None
    if value != int(value) or value < 1:
        raise SkipError(f"{key}={text} is no positive whole number")
    return int(value)


def number(row: dict[str, str], key: str) -> float | None:
    """A number above zero; None for a blank. Raises SkipError for what is none."""
    text = row.get(key, "").strip()
    try:
        value = float(text) if text else None
    except ValueError:
        raise SkipError(f"{key}={text} is no number") from None
    if value is not None and not 0 < value < float("inf"):
        raise SkipError(f"{key}={text} is not above zero")
    return value


def truth(given: dict[str, str], key: str) -> bool:
    """The truth value of a key; False where it is not given. Raises InputError.

    >>> truth({"all": "true"}, "all"), truth({}, "all")
    (True, False)
    """
    value = given.get(key, "false")
    if value not in ("true", "false"):
        raise InputError(key, value, "is neither", ["true", "false"])
    return value == "true"
