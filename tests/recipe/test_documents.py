"""A corpus with too few documents for Megatron-LM's --split is refused before it is started."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from orchestrator.errors import InputError
from orchestrator.recipe.documents import HEADER, check_documents, sequence_lengths


def indexed(prefix: Path, *lengths: int) -> str:
    """An .idx as megatron-core writes it (pointers and document numbers are not read), and a .bin."""
    head = struct.pack("<QBQQ", 1, 8, len(lengths), len(lengths) + 1)
    prefix.with_suffix(".idx").write_bytes(HEADER + head + struct.pack(f"<{len(lengths)}i", *lengths))
    prefix.with_suffix(".bin").write_bytes(b"\0\0" * sum(lengths))
    return str(prefix)


@pytest.mark.parametrize(
    ("lengths", "words", "why"),
    [
        ([1000], "--data-path {} --split 99,1,0", "has 1 document; Megatron-LM divides whole documents by --split 99,1,0, and evaluation"),
        ([500, 500], "--data-path {} --split=8,1,1", "whole documents by --split 8,1,1, and evaluation gets none"),
        ([100] * 10, "--data-path 0.5 {} 0.5 {} --split 90,10,0 --split 90,9,1", "and the test gets none"),
        ([500, 20], "--data-path {} --split 50,50,0", "and evaluation gets 20 tokens, less than the 33 of one sample"),
        ([20], "--train-data-path {}", "has 1 document; training gets 20 tokens, less than the 33 of one sample"),
        ([], "--train-data-path {}", "has 0 documents; training gets none"),
    ],
)  # fmt: skip
def test_too_few_documents_for_the_split_are_refused(lengths: list[int], words: str, why: str, tmp_path: Path) -> None:
    prefix = indexed(tmp_path / "corpus", *lengths)
    with pytest.raises(InputError) as caught:
        check_documents(words.replace("{}", prefix).split(), seq_length=32)
    assert why in str(caught.value)
    assert prefix in str(caught.value)


@pytest.mark.parametrize(
    "words",
    ["--data-path {} --split 100,0,0", "--data-path {}", "--data-path {} --split 50,50", "--mock-data --split 99,1,0",
     "--data-path /not/here --split 99,1,0", "--train-data-path {} --valid-data-path {}"],
)  # fmt: skip
def test_enough_documents_are_taken(words: str, tmp_path: Path) -> None:
    check_documents(words.replace("{}", indexed(tmp_path / "corpus", 100, 100)).split(), seq_length=32)


@pytest.mark.engines
def test_the_lengths_are_those_that_megatron_writes(tmp_path: Path) -> None:
    import numpy as np
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "a.bin"), dtype=np.uint16)
    for length in (3, 5):
        builder.add_document(np.zeros(length, np.uint16), [length])
    builder.finalize(str(tmp_path / "a.idx"))
    found = sequence_lengths(str(tmp_path / "a"))
    assert found is not None
    assert found.tolist() == [3, 5]
