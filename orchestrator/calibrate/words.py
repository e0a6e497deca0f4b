"""`key=value` words of the two commands, and how they end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from orchestrator.errors import InputError, OrchestratorError, nearest

INTERRUPTED = 130


def command(words: Sequence[str], usage: str, body: Callable[[Sequence[str]], None]) -> int:
    """Its exit status. `--help` prints what the module says of itself; known errors come as one message."""
    if {"-h", "--help"} & {*words}:
        print(usage.replace("`", "").strip())
        return 0
    try:
        body(words)
    except OrchestratorError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


def truth(given: dict[str, str], key: str) -> bool:
    """false where the key is not given. Raises InputError.

    >>> truth({"all": "true"}, "all"), truth({}, "all")
    (True, False)
    """
    value = given.get(key, "false")
    if value not in ("true", "false"):
        raise InputError(key, value, "is neither", ["true", "false"])
    return value == "true"


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
