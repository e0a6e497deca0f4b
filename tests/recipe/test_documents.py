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


def test_weights_stand_before_their_paths_and_paths_without_weights_are_all_looked_at(tmp_path: Path) -> None:
    """An even number of words is weights and paths where every other word is a number, and else paths."""
    many, one = indexed(tmp_path / "many", *[100] * 10), indexed(tmp_path / "7", 1000)
    split = ["--split", "90,10,0"]
    for words, refused in (
        ([many, one], True), ([one, many], True), ([many, many], False), (["1", one], True), (["1", many, "3", one], True),
        (["1", many, "3", many], False), ([many, many, "3", one], True), (["1", many, one, many], True), ([many, one, many], True),
    ):  # fmt: skip
        if refused:
            with pytest.raises(InputError, match=r"has 1 document;"):
                check_documents(["--data-path", *words, *split], seq_length=32)
        else:
            check_documents(["--data-path", *words, *split], seq_length=32)


@pytest.mark.parametrize(("lengths", "enough"), [([33], True), ([32], False), ([16, 17], True), ([16, 16], False)])
def test_a_sample_is_one_token_longer_than_its_sequence(lengths: list[int], enough: bool, tmp_path: Path) -> None:
    words = ["--train-data-path", indexed(tmp_path / "corpus", *lengths)]
    if enough:
        check_documents(words, seq_length=32)
        return
    with pytest.raises(InputError, match="gets 32 tokens, less than the 33 of one sample"):
        check_documents(words, seq_length=32)


def test_each_of_the_three_paths_is_all_of_its_share(tmp_path: Path) -> None:
    fine, short = indexed(tmp_path / "fine", 100), indexed(tmp_path / "short", 20)
    flags = {"--train-data-path": "training", "--valid-data-path": "evaluation", "--test-data-path": "the test"}
    check_documents([word for flag in flags for word in (flag, fine)], seq_length=32)
    for flag, name in flags.items():
        words = [word for other in flags for word in (other, short if other == flag else fine)]
        with pytest.raises(InputError, match=f"short: has 1 document; {name} gets 20 tokens"):
            check_documents(words, seq_length=32)


def test_what_is_no_index_is_not_looked_at(tmp_path: Path) -> None:
    prefix = indexed(tmp_path / "corpus", 3, 5)
    whole = (tmp_path / "corpus.idx").read_bytes()
    found = sequence_lengths(prefix)
    assert found is not None
    assert found.tolist() == [3, 5]
    for content in (b"", b"x" * len(whole), whole[: len(HEADER) + 3], b"X" + whole[1:]):
        (tmp_path / "corpus.idx").write_bytes(content)
        assert sequence_lengths(prefix) is None


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
