"""The same seed gives the same global batches; bad data is named."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from worker_plans import BERT, GPT, LLAMA, T5, make_plan

from orchestrator.errors import InputError
from orchestrator.plan import Plan, RunSettings
from orchestrator.workers import data

pytestmark = pytest.mark.engines


def open_batches(plan: Plan, cache: Path, dp_rank: int = 0) -> data.Batches:
    tokens, specials = data.open_tokens(plan, cache, build=True, wait=lambda: None)
    return data.Batches(plan, tokens, specials, dp_rank)


def global_batch(plan: Plan, cache: Path, step: int) -> list[dict[str, np.ndarray]]:
    """Samples of a step, sorted by their tokens."""
    samples = []
    for dp_rank in range(plan.dp):
        for batch in open_batches(plan, cache, dp_rank).microbatches(step):
            samples += [{name: array[i] for name, array in batch.items()} for i in range(plan.micro_batch_size)]
    return sorted(samples, key=lambda sample: sample["tokens"].tobytes())


@pytest.mark.parametrize("model", [GPT, LLAMA, BERT, T5], ids=lambda model: model.family)
def test_every_plan_sees_the_same_global_batches(model: Any, tmp_path: Path) -> None:
    one = make_plan(model)
    many = make_plan(model, dp=2, micro_batch_size=2)
    for step in (0, 3):
        for a, b in zip(global_batch(one, tmp_path, step), global_batch(many, tmp_path, step), strict=True):
            for name in a:
                np.testing.assert_array_equal(a[name], b[name])


def test_another_seed_gives_other_batches(tmp_path: Path) -> None:
    first, second = (open_batches(make_plan(seed=seed), tmp_path).microbatches(0)[0]["tokens"] for seed in (7, 8))
    assert (first != second).any()


@pytest.mark.parametrize("size", [1, 2, 3, 17, 1000])
def test_the_order_of_samples_is_a_permutation(size: int) -> None:
    for seed in (0, 7, 2**40):
        assert sorted(data.permuted(i, size, seed) for i in range(size)) == list(range(size))


def test_the_order_looks_random() -> None:
    order = [data.permuted(i, 1000, seed=3) for i in range(1000)]
    assert abs(np.corrcoef(order, range(1000))[0, 1]) < 0.1
    assert sum(b - a == 1 for a, b in pairwise(order)) < 20


def test_labels_are_the_next_tokens(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(256)) * 4)
    plan = make_plan(run=RunSettings(data=str(text)))
    batch = open_batches(plan, tmp_path).microbatches(0)[0]
    np.testing.assert_array_equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
    assert ((batch["labels"] - batch["tokens"]) % 256 == 1).mean() > 0.9


def test_the_default_corpus_is_the_standard_library(tmp_path: Path) -> None:
    tokens, _ = data.open_tokens(make_plan(), tmp_path, build=True, wait=lambda: None)
    assert len(tokens) > 1_000_000
    start = data.standard_library()[0].read_bytes()[:40]
    assert bytes(tokens.window(0, 40).astype(np.uint8)) == start


def test_jsonl_and_folders_are_read_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "b.jsonl").write_text(json.dumps({"text": "bb"}) + "\n\n" + json.dumps({"text": "ccc"}) + "\n")
    (folder / "a.txt").write_text("aaaa")
    ids = data.encode(data.text_files(folder), None, data.Specials.of_bytes())
    assert ids.tolist() == [97] * 4 + [256] + [98] * 2 + [256] + [99] * 3 + [256]


def test_megatron_indexed_data_is_one_row_of_tokens(tmp_path: Path) -> None:
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 250, size=size) for size in (50, 1, 700, 33)]
    builder = IndexedDatasetBuilder(str(tmp_path / "corpus.bin"), dtype=np.uint16)
    for document in documents:
        builder.add_document(torch.from_numpy(document), [len(document)])
    builder.finalize(str(tmp_path / "corpus.idx"))
    row = np.concatenate(documents)
    tokens = data.IndexedTokens(str(tmp_path / "corpus"))
    assert len(tokens) == len(row)
    for start, length in ((0, 10), (45, 20), (50, 1), (700, 84), (0, 784)):
        np.testing.assert_array_equal(tokens.window(start, length), row[start : start + length])
    for name in ("corpus", "corpus.bin", "corpus.idx"):
        plan = make_plan(run=RunSettings(data=str(tmp_path / name)))
        assert open_batches(plan, tmp_path).microbatches(0)[0]["tokens"].shape == (1, 32)


def test_a_local_tokenizer_is_used(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "<eos>": 1, "hello": 2, "world": 3}
    raw = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>", unk_token="<unk>").save_pretrained(tmp_path / "tokenizer")
    text = tmp_path / "text.txt"
    text.write_text("hello world " * 100)
    plan = make_plan(run=RunSettings(data=str(text), tokenizer=str(tmp_path / "tokenizer")))
    tokens, specials = data.open_tokens(plan, tmp_path, build=True, wait=lambda: None)
    assert specials.eod == 1
    assert tokens.window(0, 4).tolist() == [2, 3, 2, 3]
    assert tokens.window(len(tokens) - 1, 1).tolist() == [1]


def test_a_token_above_the_vocabulary_is_refused_with_both_numbers(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("z" * 100)
    plan = make_plan(replace(GPT, vocab_size=122), run=RunSettings(data=str(text)))
    with pytest.raises(InputError, match=r"model.vocab_size=122.*token id 122"):
        open_batches(plan, tmp_path).microbatches(0)


@pytest.mark.parametrize(
    ("content", "why"),
    [(None, "is not there"), ("short", "less than the 33 of one sample"), ('{"no": 1}\n', r"jsonl:1: is not a JSON object")],
)
def test_bad_data_is_named(content: str | None, why: str, tmp_path: Path) -> None:
    path = tmp_path / ("text.jsonl" if content and content.startswith("{") else "text.txt")
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=why):
        open_batches(make_plan(run=RunSettings(data=str(path))), tmp_path)


def test_bert_masks_15_percent_and_predicts_the_text(tmp_path: Path) -> None:
    plan = make_plan(BERT, seq_length=32, micro_batch_size=8)
    batch = open_batches(plan, tmp_path).microbatches(0)[0]
    assert set(batch["loss_mask"].sum(axis=1)) == {round(0.15 * 30)}
    changed = batch["tokens"] != batch["labels"]
    assert not changed[batch["loss_mask"] == 0].any()
    assert 0.7 < changed[batch["loss_mask"] == 1].mean() <= 1


def test_t5_spans_put_together_give_the_text_back(tmp_path: Path) -> None:
    plan = make_plan(T5, seq_length=128, decoder_seq_length=64)
    sampler = data.SpanCorruption(plan, data.Specials.of_bytes())
    text = np.arange(sampler.window) % 250
    sample = sampler.sample(text, np.random.default_rng(0))
    assert len(sample["tokens"]) == 128
    assert len(sample["labels"]) == len(sample["decoder_tokens"]) == 64
    sentinels = set(sampler.specials.sentinels)
    spans: dict[int, list[int]] = {}
    for token in sample["labels"][sample["loss_mask"] == 1][:-1].tolist():
        if token in sentinels:
            spans[token] = current = []
        else:
            current.append(token)
    whole: list[int] = []
    for token in sample["tokens"].tolist():
        if token == sampler.specials.eod:
            break
        whole += spans[token] if token in sentinels else [token]
    assert whole == text.tolist()
    np.testing.assert_array_equal(sample["decoder_tokens"][1:], sample["labels"][:-1])
