"""Samples of models that are described by their own code, by the names of their forward's arguments: drawn, or text as the readers' models
read it."""

from __future__ import annotations

import numpy as np

from orchestrator.plan import Plan
from orchestrator.tracing.feeds import IGNORED, sample
from orchestrator.workers.samples import Drawn, TextSamples


class DrawnSamples(Drawn):
    """Samples that are drawn for the arguments of the model's forward."""

    def __init__(self, plan: Plan, first: int = 0) -> None:
        super().__init__(plan, first)
        assert plan.model.traced is not None
        self.feeds = plan.model.traced.feeds
        self.joined = [feed.name for feed in self.feeds if feed.joined]

    def sample(self, ordinal: int) -> dict[str, np.ndarray]:
        return sample(self.feeds, self.generator(ordinal))


class LanguageSamples(TextSamples):
    """Text for a language model: the samples of our own models of this kind, as its forward takes them."""

    def sample(self, ordinal: int) -> dict[str, np.ndarray]:
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
