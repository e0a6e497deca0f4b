"""Labelled texts for classifiers that are recorded from their own code: a jsonl of {"text": ..., "label": ...} for a label a sequence (with
"pair" for a second text), of {"tokens": [...], "labels": [...]} for a label a word; or a .csv with the columns text and label (and pair).
Labels are numbers, or names of the configuration's label2id. Texts are cut at the sequence length and padded to it; padding is masked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.errors import InputError
from orchestrator.model.labelled import KINDS, label_ids, labels_tokens, rows_of, text_and_labels
from orchestrator.model.traced import Traced
from orchestrator.tracing import build
from orchestrator.tracing.feeds import IGNORED
from orchestrator.workers.data import load_tokenizer

Sample = dict[str, np.ndarray]


class Texts:
    """The samples of a file of texts, as token ids."""

    def __init__(self, traced: Traced, path: Path, tokenizer_folder: str | None) -> None:
        if tokenizer_folder is None:
            raise InputError("tokenizer", None, f"is missing: {path} is text, which {traced.model_class} takes as its tokenizer's ids")
        self.tokenizer, _ = load_tokenizer(tokenizer_folder)
        self.length = next(feed.shape[0] for feed in traced.feeds if feed.name == "input_ids")
        self.vocab = next(feed.high for feed in traced.feeds if feed.name == "input_ids")
        self.ids = label_ids(traced)
        config = build.config_of(traced.config)
        pad = getattr(config, "pad_token_id", None)
        if pad is None:  # decoders find the last token of a sequence by it (transformers/modeling_layers.py:170)
            why = "has no pad_token_id, which padded texts need; write it into the config.json"
            raise InputError("model.hf_config", traced.model_class, why)
        self.pad = int(pad)
        self.samples = self._read(path, traced)

    def _read(self, path: Path, traced: Traced) -> list[Sample]:
        with path.open(newline="", encoding="utf-8") as lines:
            try:
                found = [self._sample(row, where, traced) for where, row in rows_of(str(path), lines)]
            except UnicodeDecodeError as error:
                raise InputError("data", path, f"is no text: {error}") from None
        if not found:
            raise InputError("data", path, "has no sample", [KINDS[labels_tokens(traced)]])
        return found

    def _sample(self, row: Mapping[str, Any], where: str, traced: Traced) -> Sample:
        texts, numbers = text_and_labels(where, row, traced, self.ids)
        words = labels_tokens(traced)
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
