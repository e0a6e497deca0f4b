"""Labelled texts: which label has which number, and what is no sample."""

from __future__ import annotations

import json
from typing import Any

import pytest

from orchestrator.errors import InputError
from orchestrator.model.labelled import label_ids, labels_tokens, num_labels, rows_of, text_and_labels
from orchestrator.model.traced import Feed, Traced


def classifier(*, tokens: bool = False, most: int = 3, **config: Any) -> Traced:
    """Of a text, or of each of its eight tokens."""
    feeds = (
        Feed(name="input_ids", shape=(8,), dtype="int64", high=100),
        Feed(name="labels", shape=(8,) if tokens else (), dtype="int64", high=most),
    )
    return Traced(
        model_class="X", config=json.dumps(config) if config else "", seq_length=8, itemsize=2, hidden_size=4, ffn_hidden_size=8,
        max_position_embeddings=8, feeds=feeds, runs=(),
    )  # fmt: skip


def test_a_label_has_the_number_that_the_configuration_says_or_its_place() -> None:
    assert label_ids(classifier(label2id={"bad": 0, "good": "2"}, id2label={"1": "other"})) == {"bad": 0, "good": 2}
    assert label_ids(classifier(id2label={"0": "bad", "2": "good"})) == {"bad": 0, "good": 2}
    assert label_ids(classifier(hidden_size=4)) == label_ids(classifier()) == {"LABEL_0": 0, "LABEL_1": 1, "LABEL_2": 2}
    assert [num_labels(classifier(most=most)) for most in (2, 5)] == [2, 5]
    assert [labels_tokens(classifier(tokens=tokens)) for tokens in (False, True)] == [False, True]


def test_numbers_and_names_of_labels_are_read_and_no_others() -> None:
    traced, ids = classifier(), {"bad": 0, "good": 2}
    for label, number in ((0, 0), (2, 2), ("good", 2), ("bad", 0)):
        assert text_and_labels("a:1", {"text": "x", "label": label}, traced, ids) == ("x", [number])
    for label in (3, -1, "fair", True, 1.0, None):
        with pytest.raises(InputError, match=r"has label .*; the model has num_labels=3; choose one of bad, good"):
            text_and_labels("a:1", {"text": "x", "label": label}, traced, ids)
    with pytest.raises(InputError, match="choose one of 0 to 2"):
        text_and_labels("a:1", {"text": "x", "label": 3}, traced, {})


@pytest.mark.parametrize("row", [{"text": "x"}, {"label": 1}, {"text": ["x"], "label": 1}, {"tokens": ["x"], "labels": [1]}, ["x"], 3])
def test_what_is_no_labelled_text_is_refused(row: Any) -> None:
    with pytest.raises(InputError, match="is no labelled text") as error:
        text_and_labels("a:1", row, classifier(), {})
    assert (error.value.key, error.value.value) == ("data", "a:1")


@pytest.mark.parametrize(
    "row", [{"text": "x", "label": 1}, {"tokens": "x", "labels": [1]}, {"tokens": ["x"], "labels": 1}, {"tokens": ["x"], "labels": [1, 1]}]
)
def test_each_word_has_a_label(row: Any) -> None:
    traced = classifier(tokens=True)
    assert text_and_labels("a:1", {"tokens": ["x", "y"], "labels": [1, "c"]}, traced, {"c": 2}) == (["x", "y"], [1, 2])
    with pytest.raises(InputError, match="is no labelled text"):
        text_and_labels("a:1", row, traced, {})


def test_rows_are_named_by_their_line() -> None:
    assert list(rows_of("a.jsonl", ["\n", '{"text": "x"}', " ", "3"])) == [("a.jsonl:2", {"text": "x"}), ("a.jsonl:4", 3)]
    with pytest.raises(InputError, match=r"a\.jsonl:2: is no labelled text"):
        list(rows_of("a.jsonl", ["{}", "{"]))
    rows = list(rows_of("a.csv", ["text,label", '"two, words",good', "x,12", "y,"]))
    assert rows == [
        ("a.csv:2", {"text": "two, words", "label": "good"}),
        ("a.csv:3", {"text": "x", "label": 12}),
        ("a.csv:4", {"text": "y", "label": ""}),
    ]
