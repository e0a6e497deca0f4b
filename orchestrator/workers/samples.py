"""Samples of a run: the same seed gives the same global batches under every plan.

Sample i is the i-th window of a row of token ids (data.py); the order of samples is a permutation that depends on the seed and the epoch
alone. A blend takes from each source by a fixed pattern. Step s takes samples s * global_batch_size onwards; each data-parallel rank takes
its micro-batches out of them, so neither the layout nor a resume changes what a step sees. No index of samples is built or kept: each one's
place is computed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Final, Protocol

import numpy as np

from orchestrator.errors import InputError
from orchestrator.plan import Plan
from orchestrator.workers.data import BYTES, Part, Specials, check_vocabulary, vocabulary

SPLITMIX = 0x9E3779B97F4A7C15
"""2**64 / golden ratio: the multiplier of SplitMix64."""
PATTERN = 10_000
"""Samples after which a blend's pattern repeats: shares are kept to a hundredth of a percent."""


class Blending:
    """Which source a sample comes from, and the how-many-eth of that source it is: a pattern of PATTERN slots, each source's spread evenly.

    >>> blending = Blending([0.75, 0.25])
    >>> [blending.place(ordinal) for ordinal in range(5)]
    [(0, 0), (0, 1), (1, 0), (0, 2), (0, 3)]
    """

    def __init__(self, weights: Sequence[float]) -> None:
        shares = np.asarray(weights, dtype=np.float64) / math.fsum(weights) * PATTERN
        counts = np.maximum(1, np.floor(shares)).astype(np.int64)
        # The slots that are left go to the largest remainders.
        left = PATTERN - int(counts.sum())
        for index in np.argsort(counts - shares, kind="stable")[: max(0, left)]:
            counts[index] += 1
        counts[int(np.argmax(counts))] += PATTERN - int(counts.sum())
        slots = sorted(((turn + 0.5) / count, source, turn) for source, count in enumerate(counts.tolist()) for turn in range(count))
        self.counts = counts.tolist()
        self.slots = [(source, turn) for _, source, turn in slots]

    def place(self, ordinal: int) -> tuple[int, int]:
        turn, slot = divmod(ordinal, PATTERN)
        source, within = self.slots[slot]
        return source, turn * self.counts[source] + within


def permuted(index: int, size: int, seed: int) -> int:
    """The number to which the seed's permutation of range(size) sends `index`: a four-round Feistel network over the next even power of
    two, walked until it lands inside (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). Nothing of the corpus' size is
    held.

    >>> sorted(permuted(i, 10, seed=1) for i in range(10)) == list(range(10))
    True
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(4):
            mixed = ((right + 1) * SPLITMIX + seed * 0x100000001B3 + turn) & 0xFFFFFFFFFFFFFFFF
            mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
            left, right = right, left ^ ((mixed ^ (mixed >> 27)) & mask)
        index = left << half | right
        if index < size:
            return index


class Sampler(Protocol):
    """How a stack of layers reads the corpus."""

    window: int
    """Tokens of the corpus that one sample takes."""
    stride: int
    """Distance of neighbouring samples: the window, or one less where the last token is only a label."""

    def sample(self, tokens: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]: ...


class NextToken:
    """Samples of gpt and llama: every token predicts the next."""

    def __init__(self, plan: Plan, specials: Specials) -> None:
        self.stride = plan.training.seq_length
        self.window = self.stride + 1
        self.positions = np.arange(self.stride)

    def sample(self, tokens: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
        return {"tokens": tokens[:-1], "labels": tokens[1:], "positions": self.positions}


class Masking:
    """Samples of bert: 15% of the tokens are predicted, of which 80% are masked, 10% replaced and 10% kept (arXiv 1810.04805). Exactly as
    many in every sample, so that the mean loss does not depend on how the batch is cut."""

    SHARE = 0.15

    def __init__(self, plan: Plan, specials: Specials) -> None:
        if specials.mask is None or specials.cls is None or specials.sep is None:
            raise InputError("tokenizer", plan.run.tokenizer, "has no mask, cls and sep tokens, which bert needs")
        self.specials = specials
        self.vocab = BYTES if plan.run.tokenizer is None else vocabulary(plan)
        self.window = self.stride = plan.training.seq_length - 2
        self.count = max(1, round(self.SHARE * self.window))

    def sample(self, tokens: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
        labels = np.concatenate([[self.specials.cls], tokens, [self.specials.sep]]).astype(np.int64)
        chosen = rng.choice(self.window, size=self.count, replace=False) + 1
        kinds = rng.random(self.count)
        ids = labels.copy()
        assert self.specials.mask is not None  # the constructor refuses a tokenizer without one
        ids[chosen[kinds < 0.8]] = self.specials.mask
        replaced = chosen[(kinds >= 0.8) & (kinds < 0.9)]
        ids[replaced] = rng.integers(0, self.vocab, size=len(replaced))
        loss_mask = np.zeros(len(ids), dtype=np.float32)
        loss_mask[chosen] = 1.0
        return {"tokens": ids, "labels": labels, "loss_mask": loss_mask}


class SpanCorruption:
    """Samples of t5: spans of 3 tokens on average, 15% of the text, are replaced by sentinels and predicted (arXiv 1910.10683). The window
    is as long as fills the encoder; the target is padded or cut to the decoder's length."""

    SHARE, MEAN_SPAN = 0.15, 3.0

    def __init__(self, plan: Plan, specials: Specials) -> None:
        self.specials = specials
        self.length = plan.training.seq_length
        self.decoder_length = plan.training.decoder_seq_length or plan.training.seq_length
        self.window = self.stride = next(size for size in range(2 * self.length, 1, -1) if self._corrupted(size) <= self.length)
        self.noise, self.spans = self._noise(self.window)
        if len(specials.sentinels) < self.spans:
            raise InputError(
                "tokenizer", plan.run.tokenizer, f"has {len(specials.sentinels)} sentinels of the {self.spans} that a sample needs"
            )
        self.pad = specials.eod if specials.pad is None else specials.pad

    def _noise(self, size: int) -> tuple[int, int]:
        noise = min(max(1, round(size * self.SHARE)), size - 1)
        return noise, min(max(1, round(noise / self.MEAN_SPAN)), size - noise)

    def _corrupted(self, size: int) -> int:
        noise, spans = self._noise(size)
        return size - noise + spans + 1

    @staticmethod
    def _pieces(total: int, count: int, rng: np.random.Generator) -> np.ndarray:
        """`count` positive integers that sum to `total`, each way of cutting equally likely."""
        cuts = np.sort(rng.choice(total - 1, size=count - 1, replace=False)) + 1
        return np.diff(np.concatenate([[0], cuts, [total]]))

    def sample(self, tokens: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
        kept = self._pieces(self.window - self.noise, self.spans, rng)
        dropped = self._pieces(self.noise, self.spans, rng)
        source: list[np.ndarray] = []
        target: list[np.ndarray] = []
        at = 0
        for keep, drop, sentinel in zip(kept, dropped, self.specials.sentinels, strict=False):
            source += [tokens[at : at + keep], np.asarray([sentinel])]
            target += [np.asarray([sentinel]), tokens[at + keep : at + keep + drop]]
            at += keep + drop
        eod = np.asarray([self.specials.eod])
        encoder = self._fit(np.concatenate([*source, eod]), self.length)
        whole = np.concatenate([*target, eod])
        labels = self._fit(whole, self.decoder_length)
        loss_mask = (np.arange(self.decoder_length) < len(whole)).astype(np.float32)
        return {
            "tokens": encoder,
            "decoder_tokens": np.concatenate([[self.pad], labels[:-1]]),
            "labels": labels,
            "loss_mask": loss_mask,
        }

    def _fit(self, ids: np.ndarray, length: int) -> np.ndarray:
        return np.concatenate([ids[:length], np.full(max(0, length - len(ids)), self.pad)]).astype(np.int64)


SAMPLERS: dict[str, Callable[[Plan, Specials], Sampler]] = {
    "decoder": NextToken,
    "encoder": Masking,
    "encoder_decoder": SpanCorruption,
}


class Samples(ABC):
    """A run's samples by their number, counted over all steps and data-parallel ranks: what a step sees depends neither on the layout nor
    on a resume."""

    joined: Collection[str] = ()
    """Names of arrays that follow each other in a micro-batch, as those of a sample's images do."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @property
    @abstractmethod
    def num_samples(self) -> int:
        """Samples of an epoch."""

    @abstractmethod
    def sample(self, ordinal: int) -> dict[str, np.ndarray]:
        """Arrays of the run's sample number `ordinal`, by name."""

    def scale(self, step: int) -> float | None:
        """Where a step's loss is a mean over tokens of which samples have different numbers: what makes sums over a micro-batch's such that
        their mean over micro-batches and ranks is the mean over the global batch's. None: each sample has as many."""
        return None

    def stack(self, samples: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """Samples as a micro-batch."""
        return {name: (np.concatenate if name in self.joined else np.stack)([each[name] for each in samples]) for name in samples[0]}

    def microbatches(self, step: int, dp_rank: int = 0) -> list[dict[str, np.ndarray]]:
        """The micro-batches [micro_batch_size, ...] of step `step`, counted from 0, on this data-parallel rank; "loss_scale" [1] is
        `scale`'s."""
        plan, scale = self.plan, self.scale(step)
        size, more = plan.micro_batch_size, {} if scale is None else {"loss_scale": np.asarray([scale], dtype=np.float32)}
        starts = [step * plan.global_batch_size + (m * plan.dp + dp_rank) * size for m in range(plan.num_microbatches)]
        return [self.stack([self.sample(start + i) for i in range(size)]) | more for start in starts]


DRAWN: Final = 2048
"""Different samples that are drawn to train on; those after them are evaluated on."""


class Drawn(Samples):
    """Samples that depend on the seed and their number alone; `first`: the number of the first."""

    num_samples = DRAWN

    def __init__(self, plan: Plan, first: int = 0) -> None:
        super().__init__(plan)
        self.first = first

    def generator(self, ordinal: int) -> np.random.Generator:
        """What the run's sample number `ordinal` is drawn from."""
        (epoch, index), seed = divmod(ordinal, DRAWN), self.plan.training.seed
        return np.random.default_rng((seed, self.first + permuted(index, DRAWN, seed + epoch)))


class TextSamples(Samples):
    """Samples out of one row of tokens or a blend of several."""

    def __init__(self, plan: Plan, parts: Sequence[Part], specials: Specials) -> None:
        super().__init__(plan)
        traced = plan.model.traced
        self.sampler = SAMPLERS[(traced and traced.text_stack) or plan.model.stack](plan, specials)
        self.parts = tuple(parts)
        self.sizes = [self._samples(part) for part in self.parts]
        self.blending = Blending([part.weight for part in self.parts]) if len(self.parts) > 1 else None

    def _samples(self, part: Part) -> int:
        """Number of whole samples in a row of tokens. Raises InputError where there is none."""
        count = (len(part.tokens) - (self.sampler.window - self.sampler.stride)) // self.sampler.stride
        if count < 1:
            share = f" in the share of data.split={','.join(f'{s:g}' for s in self.plan.run.split)}" if self.plan.run.split else ""
            why = f"has {len(part.tokens)} tokens{share}, less than the {self.sampler.window} of one sample"
            raise InputError("data", part.name, f"{why} at seq_length={self.plan.training.seq_length}")
        return count

    @property
    def num_samples(self) -> int:
        return sum(self.sizes)

    def sample(self, ordinal: int) -> dict[str, np.ndarray]:
        """Arrays [seq_length] by name. Raises InputError where the vocabulary is too small for them."""
        seed = self.plan.training.seed
        source, turn = self.blending.place(ordinal) if self.blending else (0, ordinal)
        part, size = self.parts[source], self.sizes[source]
        epoch, index = divmod(turn, size)
        start = permuted(index, size, seed=seed + epoch) * self.sampler.stride
        ids = part.tokens[start : start + self.sampler.window].astype(np.int64)
        sample = self.sampler.sample(ids, np.random.default_rng((seed, ordinal)))
        for name in ("tokens", "decoder_tokens", "labels"):
            if name in sample:
                check_vocabulary(self.plan, part, sample[name])
        return sample
