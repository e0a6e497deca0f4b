"""Megatron's pipeline layout string: "Et*7|t*9|t*9|t*7L" is four chunks, E the embedding, t a transformer layer, L the loss.

The grammar is that of megatron/core/transformer/pipeline_parallel_layer_layout.py:279-318 (0.16.1): `|` between chunks, `x*n` repeats a
letter, `(...)*n` repeats a group, commas are decoration. Chunks stand vpp-major: chunk v of stage p is number v*pp + p.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

from orchestrator.errors import InputError

KEY = "pin.layout"
LETTERS = {"E": "embedding", "t": "transformer layer", "L": "loss (head)"}
"""Megatron's `m` (multi-token prediction) is not here: no model of ours has such layers."""
MOST_LETTERS = 1_000_000
"""Longer than any model: `t*99999999999` is refused before it fills the memory."""

_GROUP = re.compile(r"\(([^()]+)\)\*(\d+)")
_REPEAT = re.compile(r"([A-Za-z|])\*(\d+)")


def expand(text: str) -> tuple[str, ...]:
    """One string of letters for each chunk, in the order of the text. Raises InputError for what Megatron can't read.

    >>> expand("Et*3|(tt|)*2t*2L")
    ('Ettt', 'tt', 'tt', 'ttL')
    """
    flat = text.replace(",", "").replace(" ", "")
    for pattern in (_GROUP, _REPEAT):
        flat = _unroll(pattern, flat, text)
    for letter in flat:
        if letter not in "|EtL":
            known = ", ".join(f"{key} ({name})" for key, name in LETTERS.items())
            raise InputError(KEY, text, f"{letter!r} is no part of a layout; known are {known}, |, *n and (...)*n")
    return tuple(flat.split("|"))


def _unroll(pattern: re.Pattern[str], flat: str, text: str) -> str:
    size = len(flat) + sum(len(body) * min(int(count[:9]), MOST_LETTERS) for body, count in pattern.findall(flat))
    if size > MOST_LETTERS:
        raise InputError(KEY, text, f"unrolls to more than {MOST_LETTERS} letters")
    return pattern.sub(lambda match: match.group(1) * int(match.group(2)), flat)


def compress(chunks: Sequence[str]) -> str:
    """The shortest plain form of these chunks: repeated letters as `x*n`.

    >>> compress(("E" + 7 * "t", 9 * "t", "t", "tL"))
    'Et*7|t*9|t|tL'
    """
    return "|".join("".join(_run(letter, len(list(group))) for letter, group in groupby(chunk)) for chunk in chunks)


def _run(letter: str, count: int) -> str:
    return letter if count == 1 else f"{letter}*{count}"
