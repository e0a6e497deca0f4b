"""Batches of models that are described by their own code, by the names of their forward's arguments: drawn, labelled texts, or text as the
readers' models read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist

from orchestrator.errors import InputError
from orchestrator.model.labelled import labels_tokens
from orchestrator.model.traced import Feed, Traced
from orchestrator.plan import Plan
from orchestrator.tracing.feeds import IGNORED, sample, stacked
from orchestrator.workers import data, distributed, sft, traced_text
from orchestrator.workers.batch import Batch
from orchestrator.workers.data import permuted

Sample = dict[str, np.ndarray]
Take = Callable[[int, int], Sample]
"""A function of (a sample's number, the epoch's) that returns the sample."""
HELD_OUT: Final = 10
"""Samples of which the first one is evaluated on, where nothing else is said."""
DRAWN: Final = 2048
"""Different samples that are drawn where there are no data."""
NOISE: Final = 0.3
"""Standard deviation of what is added to a class's picture."""


class Batches:
    """The micro-batches of one data-parallel rank. `take` gives sample `index` of `num_samples` as an epoch has it."""

    def __init__(self, plan: Plan, feeds: tuple[Feed, ...], num_samples: int, take: Take, dp_rank: int) -> None:
        self.plan, self.feeds, self.num_samples, self.take, self.dp_rank = plan, feeds, num_samples, take, dp_rank
        traced = plan.model.traced
        texts = plan.run.data is not None and traced is not None and traced.reads == "labelled_texts"
        self.weighted = texts and traced is not None and labels_tokens(traced)
        """Whether samples have labels in different numbers: "loss_scale" [1] then makes sums over a micro-batch's labels such that their
        mean over micro-batches and ranks is the mean over the global batch's."""

    def microbatches(self, step: int) -> list[Sample]:
        """The micro-batches of a step on this data-parallel rank: what a step sees depends neither on the layout nor on a resume
        (workers/data.py, Batches)."""
        plan = self.plan
        first, wide = step * plan.global_batch_size, plan.micro_batch_size * plan.dp
        starts = [first + m * wide + self.dp_rank * plan.micro_batch_size for m in range(plan.num_microbatches)]
        found = [self._stack(range(start, start + plan.micro_batch_size)) for start in starts]
        if self.weighted:
            labels = [self._sample(first + i)["labels"] for i in range(plan.global_batch_size)]
            total = sum(int((each != IGNORED).sum()) for each in labels)
            scale = np.asarray([plan.dp * plan.num_microbatches / max(1, total)], dtype=np.float32)
            found = [batch | {"loss_scale": scale} for batch in found]
        return found

    def _stack(self, ordinals: range) -> Sample:
        samples = [self._sample(ordinal) for ordinal in ordinals]
        known = {feed.name for feed in self.feeds}
        found = stacked(self.feeds, [{name: each[name] for name in known} for each in samples])
        return found | {name: np.stack([each[name] for each in samples]) for name in samples[0] if name not in known}

    def _sample(self, ordinal: int) -> Sample:
        epoch, index = divmod(ordinal, self.num_samples)
        return self.take(permuted(index, self.num_samples, self.plan.training.seed + epoch), epoch)


class TextBatches(data.Batches):
    """Text for a language model: the samples of our own models of this kind, as its forward takes them."""

    def __init__(self, plan: Plan, tokens: Sequence[data.Part], specials: data.Specials, dp_rank: int) -> None:
        super().__init__(plan, tokens, specials, dp_rank)
        traced = plan.model.traced
        self.shifts = traced is not None and not any(feed.ahead for feed in traced.feeds)
        """Whether its forward predicts each label from the place before it."""

    def sample(self, ordinal: int) -> Sample:
        """Arrays [seq_length] by argument; labels outside the loss are -100."""
        found = super().sample(ordinal)
        named = {"input_ids": found["tokens"]}
        if "decoder_tokens" in found:
            named["decoder_input_ids"] = found["decoder_tokens"]
        if "loss_mask" in found:
            return named | {"labels": np.where(found["loss_mask"] > 0, found["labels"], IGNORED)}
        return named | {"labels": found["tokens"] if self.shifts else found["labels"]}


AnyBatches = Batches | TextBatches | sft.SupervisedBatches


def opened(plan: Plan, dp_rank: int, cache: Path) -> tuple[AnyBatches, AnyBatches | None]:
    """What is trained on, and with train.eval_every what is evaluated on: of text and supervised samples data.valid or a share of
    data.split, else every tenth sample. Every rank calls this. Raises InputError."""
    traced = plan.model.traced
    assert traced is not None
    reads, here = traced.reads, {"build": distributed.local_rank_is_first(), "wait": dist.barrier}
    if plan.training.task == "sft":
        return sft.open_batches(plan, cache, dp_rank, **here)
    if reads == "text" and (plan.run.data is not None or plan.run.blend):
        corpus = data.open_corpus(plan, cache, **here)
        valid = TextBatches(plan, corpus.valid, corpus.specials, dp_rank) if corpus.valid else None
        return TextBatches(plan, corpus.train, corpus.specials, dp_rank), valid
    if plan.run.data is None:
        take, count = drawn(traced, plan.training.seed), DRAWN
    elif reads == "labelled_texts":
        texts = traced_text.Texts(traced, Path(plan.run.data), plan.run.tokenizer)
        take, count = (lambda index, epoch: texts.samples[index]), len(texts.samples)
    else:
        raise InputError("data", plan.run.data, traced.why_drawn)
    if not plan.run.eval_every:
        return Batches(plan, traced.feeds, count, take, dp_rank), None
    kept = [index for index in range(count) if index % HELD_OUT]
    held = list(range(0, count, HELD_OUT))
    return (
        Batches(plan, traced.feeds, len(kept), lambda index, epoch: take(kept[index], epoch), dp_rank),
        Batches(plan, traced.feeds, len(held), lambda index, epoch: take(held[index], epoch), dp_rank),
    )


def drawn(traced: Traced, seed: int) -> Take:
    """Samples that depend on the seed and their number. Of labelled images each class has a picture of its own, under noise and shifted:
    something that can be learnt."""

    def take(index: int, epoch: int) -> Sample:
        found = sample(traced.feeds, np.random.default_rng((seed, index)))
        if traced.classifies_images:
            found["pixel_values"] = _picture(int(found["labels"]), found["pixel_values"], index)
        return found

    return take


def _picture(label: int, noise: np.ndarray, index: int) -> np.ndarray:
    """Coarse squares [c, h, w] of the class, moved by up to an eighth of the side, plus noise."""
    c, h, w = noise.shape
    coarse = np.random.default_rng(label).standard_normal((c, 4, 4)).astype(np.float32)
    rows, columns = np.arange(h) * 4 // h, np.arange(w) * 4 // w
    picture = coarse[:, rows][:, :, columns]
    moved = np.random.default_rng((label, index)).integers(-(h // 8), h // 8 + 1, size=2)
    return np.roll(picture, tuple(moved), axis=(1, 2)) + NOISE * noise


def scores(batch: Batch, logits: torch.Tensor) -> dict[str, torch.Tensor]:
    """Sums over the samples of a micro-batch, "samples" among them: right labels of a classification."""
    labels: Any = batch.get("labels")
    if labels is None or labels.dim() != 1 or logits.dim() != 2:
        return {}
    return {"accuracy": (logits.argmax(-1) == labels).sum(), "samples": torch.tensor(len(labels), device=logits.device)}
