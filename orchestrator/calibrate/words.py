"""`key=value` words of the two commands."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.errors import InputError, nearest


def arguments(words: Sequence[str], keys: Sequence[str], required: Sequence[str] = ()) -> dict[str, str]:
    """The words as a dict. Raises InputError for an unknown key, a key twice, no value, or a missing key.

    >>> arguments(["runs=a.csv"], ["runs", "out"])
    {'runs': 'a.csv'}
    """
    given: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if key not in keys:
            close = nearest(key, keys)
            raise InputError(key, value if equals else None, f"is not known{f', did you mean {close}' if close else ''}", keys)
        if not value:
            raise InputError(key, None, "needs a value: key=value")
        if key in given:
            raise InputError(key, value, f"is given twice (first {given[key]})")
        given[key] = value
    for key in required:
        if key not in given:
            raise InputError(key, None, "is missing")
    return given
