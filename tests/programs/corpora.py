"""One corpus in the orders of two readers, so that Megatron-LM's program and our worker train on the same batches.

A document is as long as a sample and begins with the same token, so that a sample (one token longer) is the same whatever document follows.
Megatron draws documents in an order of its own; ours has them where our permutation of samples finds them in that order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np

FIRST = 7
"""The token that every document begins with."""


@dataclass(frozen=True)
class Reading:
    """What decides which samples a run takes: their length, those of training, of evaluation, of a batch, and the seed."""

    seq_length: int
    samples: int
    seed: int
    vocab_size: int


def write(prefix: Path, documents: Sequence[np.ndarray]) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for document in documents:
        builder.add_document(document, [len(document)])
    builder.finalize(f"{prefix}.idx")


def megatrons_order(prefix: Path, reading: Reading, split: int) -> list[int]:
    """The number of the document that each sample of Megatron's GPTDataset holds, by its own code. `split`: 0 training, 1 evaluation."""
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import Split

    tokenizer = SimpleNamespace(eod=reading.vocab_size - 1, pad=-1, vocab_size=reading.vocab_size, unique_identifiers={"name": "none"})
    config = GPTDatasetConfig(
        random_seed=reading.seed, sequence_length=reading.seq_length, split="1,0,0", reset_position_ids=False, reset_attention_mask=False,
        eod_mask_loss=False, create_attention_mask=False, tokenizer=tokenizer, path_to_cache=str(prefix.parent / f"order-{prefix.name}"),
    )  # fmt: skip
    low = GPTDataset.build_low_level_dataset(str(prefix), config)
    every = np.arange(len(low.sequence_lengths), dtype=np.int32)
    dataset = GPTDataset(low, str(prefix), every, reading.samples, (Split.train, Split.valid)[split], config)
    document = {low.get(number).tobytes(): number for number in every}
    return [document[dataset[at]["tokens"].numpy().astype(np.uint16).tobytes()] for at in range(reading.samples)]


def ours(documents: Sequence[np.ndarray], order: Sequence[int], seed: int) -> np.ndarray:
    """The row in which our worker's i-th sample is document order[i]."""
    from orchestrator.workers.samples import permuted

    size = len(documents)
    rest = [number for number in range(size) if number not in set(order)]
    row: list[np.ndarray | None] = [None] * size
    for turn, number in enumerate([*order, *rest]):
        row[permuted(turn, size, seed=seed)] = documents[number]
    assert all(document is not None for document in row), "a document is drawn twice: more documents than samples are needed"
    return np.concatenate([*row, [FIRST]]).astype(np.uint16)


def make(folder: Path, name: str, number: int, reading: Reading, split: int = 0) -> tuple[Path, Path]:
    """Two prefixes: Megatron's and our worker's."""
    drawn = np.random.default_rng(split)
    documents = [drawn.integers(8, reading.vocab_size - 2, reading.seq_length, dtype=np.uint16) for _ in range(number)]
    for document in documents:
        document[0] = FIRST
    theirs, mine = folder / f"{name}-megatron", folder / f"{name}-ours"
    write(theirs, documents)
    write(mine, [ours(documents, megatrons_order(theirs, reading, split), reading.seed)])
    return theirs, mine


def sentences(folder: Path) -> tuple[Path, Path]:
    """A prefix with documents of six sentences of twelve words, and a WordPiece vocabulary, for BERT's and T5's programs."""
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{number}" for number in range(155))]
    vocabulary, prefix = folder / "vocab.txt", folder / "sentences"
    vocabulary.write_text("".join(f"{word}\n" for word in words))
    drawn = np.random.default_rng(0)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for _ in range(40):
        for _ in range(6):
            builder.add_item(torch.from_numpy(drawn.integers(5, len(words), 12)))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return prefix, vocabulary
