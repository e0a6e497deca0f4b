"""Samples of models that are described by their own code, by the names of their forward's arguments: drawn, labelled texts, or text as the
readers' models read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from orchestrator.errors import InputError
from orchestrator.model.labelled import labels_tokens
from orchestrator.model.traced import Feed, Traced
from orchestrator.plan import Plan
from orchestrator.tracing.feeds import IGNORED, sample, stacked
from orchestrator.workers import traced_text
from orchestrator.workers.samples import Samples, TextSamples, permuted

Sample = dict[str, np.ndarray]
Take = Callable[[int, int], Sample]
"""A function of (a sample's number, the epoch's) that returns the sample."""
HELD_OUT: Final = 10
"""Samples of which the first one is evaluated on, where nothing else is said."""
DRAWN: Final = 2048
"""Different samples that are drawn where there are no data."""
NOISE: Final = 0.3
"""Standard deviation of what is added to a class's picture."""


class FedSamples(Samples):
    """Samples by the names of the forward's arguments. `take` gives sample `index` of `num_samples` as an epoch has it."""

    num_samples = 0

    def __init__(self, plan: Plan, feeds: tuple[Feed, ...], num_samples: int, take: Take) -> None:
        super().__init__(plan)
        self.feeds, self.num_samples, self.take = feeds, num_samples, take
        traced = plan.model.traced
        texts = plan.run.data is not None and traced is not None and traced.reads == "labelled_texts"
        self.weighted = texts and traced is not None and labels_tokens(traced)
        """Whether samples have labels in different numbers."""

    def scale(self, step: int) -> float | None:
        if not self.weighted:
            return None
        plan = self.plan
        labels = (self.sample(step * plan.global_batch_size + i)["labels"] for i in range(plan.global_batch_size))
        return plan.dp * plan.num_microbatches / max(1, sum(int((each != IGNORED).sum()) for each in labels))

    def stack(self, samples: Sequence[Sample]) -> Sample:
        return stacked(self.feeds, samples)

    def sample(self, ordinal: int) -> Sample:
        epoch, index = divmod(ordinal, self.num_samples)
        return self.take(permuted(index, self.num_samples, self.plan.training.seed + epoch), epoch)


class LanguageSamples(TextSamples):
    """Text for a language model: the samples of our own models of this kind, as its forward takes them."""

    def sample(self, ordinal: int) -> Sample:
        """Arrays [seq_length] by argument; labels outside the loss are -100. A forward that is not fed the tokens ahead predicts each label
        from the place before it."""
        traced, found = self.plan.model.traced, super().sample(ordinal)
        named = {"input_ids": found["tokens"]}
        if "decoder_tokens" in found:
            named["decoder_input_ids"] = found["decoder_tokens"]
        if "loss_mask" in found:
            return named | {"labels": np.where(found["loss_mask"] > 0, found["labels"], IGNORED)}
        ahead = traced is not None and any(feed.ahead for feed in traced.feeds)
        return named | {"labels": found["labels" if ahead else "tokens"]}


def reads_text(plan: Plan) -> bool:
    """Whether the plan's model is trained on text, as language models are."""
    traced = plan.model.traced
    return traced is None or (traced.reads == "text" and (plan.run.data is not None or bool(plan.run.blend)))


def opened(plan: Plan) -> tuple[FedSamples, FedSamples | None]:
    """Labelled or drawn samples to train on, and with train.eval_every every tenth to evaluate on. Raises InputError."""
    traced = plan.model.traced
    assert traced is not None
    if plan.run.data is None:
        take, count = drawn(traced, plan.training.seed), DRAWN
    elif traced.reads == "labelled_texts":
        texts = traced_text.Texts(traced, Path(plan.run.data), plan.run.tokenizer)
        take, count = (lambda index, epoch: texts.samples[index]), len(texts.samples)
    else:
        raise InputError("data", plan.run.data, traced.why_drawn)
    if not plan.run.eval_every:
        return FedSamples(plan, traced.feeds, count, take), None
    kept = [index for index in range(count) if index % HELD_OUT]
    held = list(range(0, count, HELD_OUT))
    return (
        FedSamples(plan, traced.feeds, len(kept), lambda index, epoch: take(kept[index], epoch)),
        FedSamples(plan, traced.feeds, len(held), lambda index, epoch: take(held[index], epoch)),
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
