"""Whether an indexed corpus has the documents that Megatron-LM's --split asks for, read from the .idx before anything is started.

Megatron divides whole documents over training, evaluation and test. A share above 0 that gets none is no error there: rank 0 counts epochs
of nothing for ever, and the others wait for it (core/datasets/gpt_dataset.py, _get_num_epochs).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Final

from orchestrator.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

HEADER: Final = b"MMIDIDX\x00\x00"
"""First bytes of an .idx file; behind them stand the version and the code of the type, and how many sequences and documents there are
(core/datasets/indexed_dataset.py)."""
FIELDS: Final = struct.Struct("<QBQQ")
SHARES: Final = ("training", "evaluation", "the test")
CUT: Final = "python -m orchestrator.data documents=blank_lines cuts a text into more"


def sequence_lengths(prefix: str) -> npt.NDArray[np.int32] | None:
    """Tokens of each sequence of PREFIX.bin, which the corpora of language models call documents; None: no index that can be read here."""
    try:
        with open(f"{prefix}.idx", "rb") as file:
            if file.read(len(HEADER)) != HEADER:
                return None
            _, _, sequences, _ = FIELDS.unpack(file.read(FIELDS.size))
            import numpy as np  # 57 ms, which most plans need not wait for

            left = os.fstat(file.fileno()).st_size - file.tell()
            return np.fromfile(file, dtype=np.int32, count=sequences) if 4 * sequences <= left else None
    except (OSError, struct.error):
        return None


def bounds(shares: Sequence[float], count: int) -> list[tuple[int, int]]:
    """The first document of each share and the one after its last, rounded as Megatron does (blended_megatron_dataset_builder.py).

    >>> bounds([99, 1, 0], 100), bounds([99, 1, 0], 10)
    ([(0, 99), (99, 100), (100, 100)], [(0, 10), (10, 10), (10, 10)])
    """
    total = sum(shares)
    ends = [0, *(round(end * float(count)) for end in accumulate(share / total for share in shares))]
    return list(pairwise(ends))


def check_documents(arguments: Sequence[str], seq_length: int) -> None:
    """Raises InputError where Megatron-LM's pretrain_gpt.py would find too little in its data. `arguments`: its own. Data that is not on
    this machine is not looked at."""
    given = _flags(arguments)
    split = [float(share) for share in given.get("--split", ["100,0,0"])[0].split(",")]
    for prefix in _prefixes(given.get("--data-path", [])):
        _check(prefix, split, given.get("--split", [""])[0], seq_length)
    for index, flag in enumerate(("--train-data-path", "--valid-data-path", "--test-data-path")):
        for prefix in _prefixes(given.get(flag, [])):
            _check(prefix, [float(at == index) for at in range(len(SHARES))], "", seq_length)


def _flags(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Values by flag; of a flag that is given twice the last, as argparse takes it."""
    found: dict[str, list[str]] = {}
    flag = ""
    for word in arguments:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            found[flag] = [value] if equals else []
        elif flag:
            found[flag].append(word)
    return found


def _prefixes(words: Sequence[str]) -> Sequence[str]:
    """The prefixes in "PREFIX ..." or "WEIGHT PREFIX WEIGHT PREFIX ..." (core/datasets/utils.py, get_blend_from_list)."""
    if len(words) % 2:
        return words
    try:
        [float(weight) for weight in words[::2]]
    except ValueError:
        return words
    return words[1::2]


def _check(prefix: str, shares: Sequence[float], said: str, seq_length: int) -> None:
    lengths = sequence_lengths(prefix)
    if lengths is None:
        return
    for name, share, (first, last) in zip(SHARES, shares, bounds(shares, len(lengths)), strict=False):
        if share <= 0:
            continue
        by = f"Megatron-LM divides whole documents by --split {said}, and {name}" if said else name
        have = f"has {len(lengths)} document{'s' if len(lengths) != 1 else ''}"
        if first >= last:
            raise InputError("data", prefix, f"{have}; {by} gets none. {CUT}; or give data.valid=PATH, or shares that fit")
        tokens = int(lengths[first:last].sum(dtype="int64"))
        if tokens <= seq_length:
            raise InputError("data", prefix, f"{have}; {by} gets {tokens} tokens, less than the {seq_length + 1} of one sample")
