"""What can go wrong, as values: every error says the key, the value and the choices, and has an exit status."""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable
from typing import Final

LONGEST: Final = 1000
"""Characters of a value in a message."""


class OrchestratorError(Exception):
    """Something that the user can act on; `run` prints it without a traceback and exits with `status`."""

    status = 2


class InputError(OrchestratorError):
    """A key that can't be taken.

    >>> print(InputError("engine", "foo", "is not known", ["megatron", "deepspeed"]))
    engine=foo: is not known; choose one of megatron, deepspeed
    >>> print(InputError("train.lr", "-1", "must be above 0"))
    train.lr=-1: must be above 0
    """

    def __init__(self, key: str, value: object, why: str, choices: Iterable[object] = ()) -> None:
        self.key, self.value, self.why = key, value, why
        self.choices = [str(choice) for choice in choices]
        text = f"{key}={_one_line(value)}: {why}" if value is not None else f"{key}: {why}"
        if self.choices:
            text += f"; choose one of {', '.join(self.choices)}"
        super().__init__(text)

    def __reduce__(self) -> tuple[type[InputError], tuple[object, ...]]:
        """What pickle makes the error of again in another process."""
        return InputError, (self.key, self.value, self.why, tuple(self.choices))


def _one_line(value: object) -> str:
    text = str(value)
    text = text if len(text) <= LONGEST else text[:LONGEST] + "..."
    return text if text.isprintable() else repr(text)


class NoPlanError(OrchestratorError):
    """Nothing legal fits: the message says what was missing, the nearest plan, and what to relax. `refused`: that plan with its price
    (search.refuse.Refused), where there is a legal one."""

    def __init__(self, message: str, refused: object | None = None) -> None:
        super().__init__(message)
        self.refused = refused


class LaunchError(OrchestratorError):
    """The job can't be started here, or it ended with `status`."""

    def __init__(self, message: str, status: int = 2) -> None:
        super().__init__(message)
        self.status = status


NO_ROOM = 5
"""Exit status where a disk is full, of a command and of a rank."""


def no_room(error: OSError) -> bool:
    """Whether a write failed for lack of room: the disk is full, or a quota or a limit on the size of files is reached."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that looks most like this one, or None.

    >>> nearest("gpu", ["gpus", "engine"])
    'gpus'
    >>> nearest("xyz", ["gpus", "engine"]) is None
    True
    """
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return close[0] if close else None


def unknown(key: str, value: object, why: str, name: str, known: Iterable[str], choices: Iterable[object] | None = None) -> InputError:
    """The error for a name that is not known: with the one that looks most like it or, where none does, with the choices (all that are
    known).

    >>> print(unknown("gpu", "4", "is no key", "gpu", ["gpus", "engine"]))
    gpu=4: is no key; did you mean gpus?
    """
    known = list(known)
    close = nearest(name, known)
    if close is not None:
        return InputError(key, value, f"{why}; did you mean {close}?")
    return InputError(key, value, why, known if choices is None else choices)
