"""The same seed gives the same global batches; bad data is named."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from worker_plans import BERT, GPT, LLAMA, T5, make_plan, samples_of

from orchestrator.errors import InputError
from orchestrator.plan import Plan, RunSettings, Source
from orchestrator.workers import data
from orchestrator.workers.samples import PATTERN, Blending, SpanCorruption, TextSamples, permuted

pytestmark = pytest.mark.engines


def global_batch(plan: Plan, cache: Path, step: int) -> list[dict[str, np.ndarray]]:
    """Samples of a step, sorted by their tokens."""
    samples = []
    for dp_rank in range(plan.dp):
        for batch in samples_of(plan, cache).microbatches(step, dp_rank):
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
    first, second = (samples_of(make_plan(seed=seed), tmp_path).microbatches(0)[0]["tokens"] for seed in (7, 8))
    assert (first != second).any()


@pytest.mark.parametrize("size", [1, 2, 3, 17, 1000])
def test_the_order_of_samples_is_a_permutation(size: int) -> None:
    for seed in (0, 7, 2**40):
        assert sorted(permuted(i, size, seed) for i in range(size)) == list(range(size))


def test_the_order_looks_random() -> None:
    order = [permuted(i, 1000, seed=3) for i in range(1000)]
    assert abs(np.corrcoef(order, range(1000))[0, 1]) < 0.1
    assert sum(b - a == 1 for a, b in pairwise(order)) < 20


def test_labels_are_the_next_tokens(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(256)) * 4)
    plan = make_plan(run=RunSettings(data=str(text)))
    batch = samples_of(plan, tmp_path).microbatches(0)[0]
    np.testing.assert_array_equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
    assert ((batch["labels"] - batch["tokens"]) % 256 == 1).mean() > 0.9


def test_the_default_corpus_is_the_standard_library(tmp_path: Path) -> None:
    tokens = samples_of(make_plan(), tmp_path).parts[0].tokens
    assert len(tokens) > 1_000_000
    start = data.standard_library()[0].read_bytes()[:40]
    assert bytes(tokens[:40].astype(np.uint8)) == start


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
    tokens = data.indexed_tokens(str(tmp_path / "corpus"))
    assert len(tokens) == len(row)
    for start, length in ((0, 10), (45, 20), (50, 1), (700, 84), (0, 784)):
        np.testing.assert_array_equal(tokens[start : start + length], row[start : start + length])
    for name in ("corpus", "corpus.bin", "corpus.idx"):
        plan = make_plan(run=RunSettings(data=str(tmp_path / name)), micro_batch_size=1)
        assert samples_of(plan, tmp_path).microbatches(0)[0]["tokens"].shape == (1, 32)


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
    corpus = data.open_corpus(plan, tmp_path, build=True, wait=lambda: None)
    tokens = corpus.train[0].tokens
    assert corpus.specials.eod == 1
    assert tokens[:4].tolist() == [2, 3, 2, 3]
    assert tokens[-1:].tolist() == [1]


def test_a_token_above_the_vocabulary_is_refused_with_both_numbers(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("z" * 100)
    plan = make_plan(replace(GPT, vocab_size=122), run=RunSettings(data=str(text)))
    with pytest.raises(InputError, match=r"model.vocab_size=122.*token id 122"):
        samples_of(plan, tmp_path).microbatches(0)


@pytest.mark.parametrize(
    ("content", "why"),
    [(None, "is not there"), ("short", "less than the 33 of one sample"), ('{"no": 1}\n', r"jsonl:1: is not a JSON object")],
)
def test_bad_data_is_named(content: str | None, why: str, tmp_path: Path) -> None:
    path = tmp_path / ("text.jsonl" if content and content.startswith("{") else "text.txt")
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=why):
        samples_of(make_plan(run=RunSettings(data=str(path))), tmp_path)


def test_bert_masks_15_percent_and_predicts_the_text(tmp_path: Path) -> None:
    plan = make_plan(BERT, seq_length=32, micro_batch_size=8)
    batch = samples_of(plan, tmp_path).microbatches(0)[0]
    assert set(batch["loss_mask"].sum(axis=1)) == {round(0.15 * 30)}
    changed = batch["tokens"] != batch["labels"]
    assert not changed[batch["loss_mask"] == 0].any()
    assert 0.7 < changed[batch["loss_mask"] == 1].mean() <= 1


def test_t5_spans_put_together_give_the_text_back(tmp_path: Path) -> None:
    plan = make_plan(T5, seq_length=128, decoder_seq_length=64)
    sampler = SpanCorruption(plan, data.Specials.of_bytes())
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


# ------------------------------------------------------------------------------------------------------- blends and splits


def sources(tmp_path: Path, *letters: str, size: int = 5000) -> tuple[Source, ...]:
    """One file a letter, weights 3, 2, 1 ..."""
    found = []
    for index, letter in enumerate(letters):
        (tmp_path / f"{letter}.txt").write_text(letter * size)
        found.append(Source(weight=float(len(letters) - index), path=str(tmp_path / f"{letter}.txt")))
    return tuple(found)


def corpus_of(plan: Plan, cache: Path) -> data.Corpus:
    return data.open_corpus(plan, cache, build=True, wait=lambda: None)


def test_a_blend_takes_its_shares_evenly_under_every_plan(tmp_path: Path) -> None:
    run = RunSettings(blend=sources(tmp_path, "a", "b", "c"))
    one, many = make_plan(run=run, global_batch_size=24), make_plan(run=run, global_batch_size=24, dp=2, micro_batch_size=3)
    seen = []
    for plan in (one, many):
        corpus = corpus_of(plan, tmp_path / "cache")
        letters = []
        for step in range(5):
            for rank in range(plan.dp):
                for batch in TextSamples(plan, corpus.train, corpus.specials).microbatches(step, rank):
                    letters += [(step, chr(row[0])) for row in batch["tokens"]]
        seen.append(sorted(letters))
    assert seen[0] == seen[1]
    for step in range(5):
        counts = [sum(1 for s, letter in seen[0] if s == step and letter == name) for name in "abc"]
        assert counts == pytest.approx([12, 8, 4], abs=1)


@pytest.mark.parametrize("weights", [[0.7, 0.3], [1.0, 1e-9], [1.0] * 7, [5.0, 3.0, 1.0, 1.0]])
def test_a_blends_places_use_every_sample_of_a_source_in_turn(weights: list[float]) -> None:
    blending = Blending(weights)
    assert len(blending.slots) == sum(blending.counts) == PATTERN
    turns: dict[int, list[int]] = {}
    for ordinal in range(2 * PATTERN):
        source, turn = blending.place(ordinal)
        turns.setdefault(source, []).append(turn)
    for source, weight in enumerate(weights):
        assert turns[source] == list(range(len(turns[source])))
        assert len(turns[source]) / (2 * PATTERN) == pytest.approx(weight / sum(weights), abs=2 / PATTERN)


def test_held_out_tokens_are_never_trained_on(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes(bytes(97 + index * 10 // 4000 for index in range(4000)))
    plan = make_plan(run=RunSettings(data=str(tmp_path / "t.txt"), split=(80.0, 10.0, 10.0), eval_every=1))
    corpus = corpus_of(plan, tmp_path / "cache")
    (train,), (valid,) = corpus.train, corpus.valid
    assert set(train.tokens.tolist()) == set(range(97, 105))
    assert set(valid.tokens.tolist()) <= {104, 105}
    assert len(train.tokens) + len(valid.tokens) == 3600


def test_what_is_evaluated_may_be_a_source_of_its_own_and_is_not_opened_without_evaluation(tmp_path: Path) -> None:
    (a, b) = sources(tmp_path, "a", "b")
    plan = make_plan(run=RunSettings(data=a.path, valid=b.path, eval_every=1))
    (valid,) = corpus_of(plan, tmp_path / "cache").valid
    assert valid.tokens[:3].tolist() == [98, 98, 98]
    assert not corpus_of(replace(plan, run=RunSettings(data=a.path, valid=b.path)), tmp_path / "cache").valid


def test_a_share_too_small_for_a_sample_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("x" * 1000)
    plan = make_plan(run=RunSettings(data=str(tmp_path / "t.txt"), split=(99.0, 1.0), eval_every=1))
    corpus = corpus_of(plan, tmp_path)
    with pytest.raises(InputError, match=r"has 11 tokens in the share of data.split=99,1, less than the 33 of one sample"):
        TextSamples(plan, corpus.valid, corpus.specials)


def test_the_index_of_text_is_kept(tmp_path: Path) -> None:
    plan = make_plan(run=RunSettings(blend=sources(tmp_path, "a", "b")))
    corpus_of(plan, tmp_path / "cache")
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    assert len(before) == 2
    data.open_corpus(plan, tmp_path / "cache", build=False, wait=lambda: None)
    assert before == {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
