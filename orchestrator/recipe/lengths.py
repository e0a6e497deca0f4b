"""Lengths of samples as a user says them: a mean, a mean and a deviation, or a file."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from orchestrator.errors import InputError
from orchestrator.key import shown
from orchestrator.recipe.sources import read_text

SPREAD: Final = 0.75
"""Standard deviation of lengths over their mean, where only the mean is said."""


def said_lengths(name: str, text: str) -> list[int] | tuple[float, float]:
    """The lengths of a file, or their (mean, standard deviation), in tokens, as the key `name` says. Raises InputError.

    >>> said_lengths("data.lengths", "1000+200"), said_lengths("data.lengths", "1000")
    ((1000.0, 200.0), (1000.0, 750.0))
    """
    mean_text, plus, spread_text = text.partition("+")
    try:
        mean = float(mean_text)
        spread = float(spread_text) if plus else SPREAD * mean
    except ValueError:
        return read_lengths(name, text)
    if not (0 < mean < float("inf") and 0 <= spread < float("inf")):
        raise InputError(name, shown(text), "needs a mean above 0, and a standard deviation of 0 or more")
    return mean, spread


def read_lengths(name: str, path: str) -> list[int]:
    """The lengths of a file, a number a line; of lines with commas the last one's; words in the first line are a heading. Raises
    InputError."""
    found = []
    try:
        text = read_text(Path(path))
    except InputError as error:
        raise InputError(name, shown(path), f"is no mean, no mean+deviation, and as a file: {error.why}") from None
    for number, line in enumerate(text.splitlines(), start=1):
        last = line.strip().rpartition(",")[2].strip()
        if not last:
            continue
        if not last.isdecimal() or not int(last):
            if number == 1:
                continue
            raise InputError(name, f"{path}:{number}", f"is {shown(last)}: a length is a whole number of tokens above 0")
        found.append(int(last))
    if not found:
        raise InputError(name, shown(path), "has no length")
    return found
