"""Labelled texts: what a line of a .jsonl, or a row of a .csv with the columns text and label (and pair), says, and whether its labels are
the model's. Lines and rows in, checked values out; no file is opened here."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from orchestrator.errors import InputError
from orchestrator.model.traced import Traced

KINDS: Final = {False: '{"text": "...", "label": 0}', True: '{"tokens": ["..."], "labels": [0]}'}
"""A sample, by whether each of its words has a label."""


def labels_tokens(traced: Traced) -> bool:
    """Whether each token has a label."""
    return any(feed.name == "labels" and feed.shape for feed in traced.feeds)


def label_ids(traced: Traced) -> dict[str, int]:
    """Numbers of the labels by name: the configuration's label2id or id2label, else LABEL_0 and so on, as transformers calls them."""
    fields = json.loads(traced.config) if traced.config else {}
    if fields.get("label2id"):
        return {str(name): int(number) for name, number in fields["label2id"].items()}
    if fields.get("id2label"):
        return {str(name): int(number) for number, name in fields["id2label"].items()}
    return {f"LABEL_{number}": number for number in range(num_labels(traced))}


def num_labels(traced: Traced) -> int:
    return next(feed.high for feed in traced.feeds if feed.name == "labels")


def rows_of(name: str, lines: Iterable[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(name:line, what it says) of each sample in the lines of the file of this name. In a .csv, whose first line names its columns, a
    label of digits is a number. Raises InputError.

    >>> list(rows_of("a.csv", ["text,label", "good,1"])), list(rows_of("a.jsonl", ['{"text": "good", "label": 1}']))
    ([('a.csv:2', {'text': 'good', 'label': 1})], [('a.jsonl:1', {'text': 'good', 'label': 1})])
    """
    if not name.endswith(".csv"):
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield f"{name}:{number}", json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise InputError("data", f"{name}:{number}", f"is no labelled text ({error})", KINDS.values()) from None
        return
    try:
        table = csv.DictReader(lines)
        for row in table:
            label = row.get("label") or ""
            yield f"{name}:{table.line_num}", {**row, "label": int(label) if label.isdecimal() else label} if label else row
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError("data", name, f"is no table of texts: {error}") from None


def text_and_labels(where: str, row: Mapping[str, Any], traced: Traced, ids: Mapping[str, int]) -> tuple[Any, list[int]]:
    """The text of a sample with its label's number in a list, or its words with a number for each. `ids`: the labels' numbers by name.
    Raises InputError that names `where`."""
    words = labels_tokens(traced)
    try:
        text, labels = (row["tokens"], row["labels"]) if words else (row["text"], [row["label"]])
    except (KeyError, TypeError) as error:
        raise InputError("data", where, f"is no labelled text ({error})", [KINDS[words]]) from None
    if not isinstance(text, list if words else str) or not isinstance(labels, list) or (words and len(text) != len(labels)):
        raise InputError("data", where, f"is no labelled text{', with as many labels as words' if words else ''}", [KINDS[words]])
    most, numbers = num_labels(traced), []
    for label in labels:
        number = label if isinstance(label, int) and not isinstance(label, bool) else ids.get(str(label), -1)
        if not 0 <= number < most:
            raise InputError("data", where, f"has label {label}; the model has num_labels={most}", [*ids] or [f"0 to {most - 1}"])
        numbers.append(number)
    return text, numbers
