"""Labelled texts for classifiers that are recorded from their own code: a jsonl of {"text": ..., "label": ...} for a label a sequence (with
"pair" for a second text), of {"tokens": [...], "labels": [...]} for a label a word; or a .csv with the columns text and label (and pair).
Labels are numbers, or names of the configuration's label2id. Texts are cut at the sequence length and padded to it; padding is masked."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from orchestrator.errors import InputError
from orchestrator.model.traced import Traced
from orchestrator.workers.data import load_tokenizer
from orchestrator.workers.tracing import build
from orchestrator.workers.tracing.feeds import IGNORED

Sample = dict[str, np.ndarray]
KINDS: Final = {False: '{"text": "...", "label": 0}', True: '{"tokens": ["..."], "labels": [0]}'}


def labels_tokens(traced: Traced) -> bool:
    """Whether each token has a label."""
    return any(feed.name == "labels" and feed.shape for feed in traced.feeds)


def _of_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """(where, line) of each line that is not empty."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield f"{path}:{number}", line


def _of_table(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, row) of a .csv, whose first line names its columns. A label of digits is a number. Raises InputError."""
    try:
        with path.open(newline="", encoding="utf-8") as stream:
            rows = csv.DictReader(stream)
            for row in rows:
                label = row.get("label") or ""
                yield f"{path}:{rows.line_num}", {**row, "label": int(label) if label.isdecimal() else label} if label else row
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError("data", path, f"is no table of texts: {error}") from None


class Texts:
    """All samples of a file."""

    def __init__(self, traced: Traced, path: Path, tokenizer_folder: str | None) -> None:
        if tokenizer_folder is None:
            raise InputError("tokenizer", None, f"is missing: {path} is text, which {traced.model_class} takes as its tokenizer's ids")
        self.tokenizer, _ = load_tokenizer(tokenizer_folder)
        self.length = next(feed.shape[0] for feed in traced.feeds if feed.name == "input_ids")
        self.classes = next(feed.high for feed in traced.feeds if feed.name == "labels")
        self.vocab = next(feed.high for feed in traced.feeds if feed.name == "input_ids")
        config = build.config_of(traced.config)
        self.names = {str(name): int(index) for name, index in (getattr(config, "label2id", None) or {}).items()}
        pad = getattr(config, "pad_token_id", None)
        if pad is None:  # decoders find the last token of a sequence by it (transformers/modeling_layers.py:170)
            why = "has no pad_token_id, which padded texts need; write it into the config.json"
            raise InputError("model.hf_config", traced.model_class, why)
        self.pad = int(pad)
        self.samples = self._read(path, words=labels_tokens(traced))

    def _read(self, path: Path, *, words: bool) -> list[Sample]:
        rows = _of_table(path) if path.suffix == ".csv" else _of_lines(path)
        found = [self._sample(row, where, words=words) for where, row in rows]
        if not found:
            raise InputError("data", path, "has no sample", [KINDS[words]])
        return found

    def _sample(self, said: bytes | dict[str, Any], where: str, *, words: bool) -> Sample:
        try:
            row = json.loads(said) if isinstance(said, bytes) else said
            texts, labels = (row["tokens"], row["labels"]) if words else (row["text"], [row["label"]])
        except (ValueError, KeyError, TypeError) as error:
            raise InputError("data", where, f"is no labelled text ({error})", [KINDS[words]]) from None
        if not isinstance(texts, list if words else str) or not isinstance(labels, list) or (words and len(texts) != len(labels)):
            raise InputError("data", where, f"is no labelled text{', with as many labels as words' if words else ''}", [KINDS[words]])
        numbers = [self._label(label, where) for label in labels]
        if words:
            encoded = self.tokenizer(texts, is_split_into_words=True, truncation=True, max_length=self.length)
            of_word = encoded.word_ids()
            first = [word is not None and (not place or of_word[place - 1] != word) for place, word in enumerate(of_word)]
            labelled = [numbers[word] if begins else IGNORED for word, begins in zip(of_word, first, strict=True)]
        else:
            encoded = self.tokenizer(texts, row.get("pair"), truncation=True, max_length=self.length)
        ids = list(encoded["input_ids"])
        if not ids or max(ids) >= self.vocab:
            raise InputError("data", where, f"has token id {max(ids, default=None)} of the model's {self.vocab}")
        sample = {"input_ids": self._padded(ids, self.pad), "attention_mask": self._padded([1] * len(ids), 0)}
        return sample | {"labels": self._padded(labelled, IGNORED) if words else np.asarray(numbers[0], dtype=np.int64)}

    def _padded(self, values: Sequence[int], with_: int) -> np.ndarray:
        return np.asarray([*values, *[with_] * (self.length - len(values))], dtype=np.int64)

    def _label(self, label: Any, where: str) -> int:
        number = label if isinstance(label, int) and not isinstance(label, bool) else self.names.get(str(label), -1)
        if not 0 <= number < self.classes:
            known = [*self.names] or [f"0 to {self.classes - 1}"]
            raise InputError("data", where, f"has label {label}; the model has num_labels={self.classes}", known)
        return number
