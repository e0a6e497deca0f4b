"""Real text as samples: the same seed gives the same global batches under every plan.

A source is one long row of token ids, documents joined by an end-of-document token. Sample i is the i-th window of it; the order of
samples is a permutation that depends on the seed and the epoch alone. A blend takes from each source by a fixed pattern. Step s takes
samples s * global_batch_size onwards; each data-parallel rank takes its micro-batches out of them, so neither the layout nor a resume
changes what a step sees. No index of samples is built or kept: each one's place is computed.
"""

from __future__ import annotations

import hashlib
import json
import math
import sysconfig
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from orchestrator.errors import InputError
from orchestrator.model.shared import SENTINELS
from orchestrator.plan import Plan

TEXT_SUFFIXES = (".txt", ".md", ".py", ".rst", ".text")
BYTES = 256
SPLITMIX = 0x9E3779B97F4A7C15
"""2**64 / golden ratio: the multiplier of SplitMix64."""


@dataclass(frozen=True, kw_only=True)
class Specials:
    """Ids beside the text's own; None where the tokenizer has none."""

    eod: int
    mask: int | None = None
    cls: int | None = None
    sep: int | None = None
    pad: int | None = None
    sentinels: tuple[int, ...] = ()

    @classmethod
    def of_bytes(cls) -> Specials:
        """The special ids of a vocabulary of bytes: after the 256 bytes end of document, mask, cls, sep, pad, then the sentinels."""
        first = BYTES + 5
        return cls(eod=BYTES, mask=BYTES + 1, cls=BYTES + 2, sep=BYTES + 3, pad=BYTES + 4, sentinels=tuple(range(first, first + SENTINELS)))


class Tokens(Protocol):
    """Token ids in a row."""

    def __len__(self) -> int: ...

    def window(self, start: int, length: int) -> np.ndarray:
        """The int64 ids [length] from `start` on."""
        ...


class ArrayTokens:
    """Ids in an array, usually a memory map."""

    def __init__(self, ids: np.ndarray) -> None:
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def window(self, start: int, length: int) -> np.ndarray:
        return self.ids[start : start + length].astype(np.int64)


class IndexedTokens:
    """Megatron's .bin/.idx, read by megatron-core; its sequences joined to one row."""

    def __init__(self, prefix: str) -> None:
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        self.dataset = IndexedDataset(prefix)
        self.ends = np.cumsum(self.dataset.sequence_lengths, dtype=np.int64)

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def window(self, start: int, length: int) -> np.ndarray:
        index = int(np.searchsorted(self.ends, start, side="right"))
        parts, missing = [], length
        offset = start - (int(self.ends[index - 1]) if index else 0)
        while missing:
            size = min(missing, int(self.dataset.sequence_lengths[index]) - offset)
            if size:
                parts.append(self.dataset.get(index, offset=offset, length=size))
            missing, index, offset = missing - size, index + 1, 0
        return np.concatenate(parts).astype(np.int64)


class PartOfTokens:
    """Tokens `first` to `last` (exclusive) of a row."""

    def __init__(self, tokens: Tokens, first: int, last: int) -> None:
        self.tokens, self.first, self.last = tokens, first, last

    def __len__(self) -> int:
        return self.last - self.first

    def window(self, start: int, length: int) -> np.ndarray:
        return self.tokens.window(self.first + start, length)


@dataclass(frozen=True, kw_only=True)
class Part:
    """A source of a blend: its share, its name in messages, its row."""

    weight: float
    name: str
    tokens: Tokens


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """What a run reads: the parts it trains on, those it evaluates on (none: it doesn't), and the special ids."""

    train: tuple[Part, ...]
    valid: tuple[Part, ...]
    specials: Specials


def standard_library() -> list[Path]:
    """The modules of Python's own standard library, in the order of their names: text that every machine has."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py"))
    if not files:
        raise InputError("data", folder, "holds no sources of the standard library: give data=PATH")
    return files


def text_files(path: Path) -> list[Path]:
    """A text or jsonl file, or all of them in a folder, sorted."""
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file() and file.suffix in (*TEXT_SUFFIXES, ".jsonl"))
        if not files:
            raise InputError("data", path, "holds no text", [f"*{suffix}" for suffix in (*TEXT_SUFFIXES, ".jsonl")])
        return files
    if not path.is_file():
        raise InputError("data", path, "is not there", ["a text file", "a .jsonl", "a folder of them", "a .bin/.idx prefix"])
    return [path]


def documents(files: list[Path]) -> Iterator[bytes]:
    """One document a text file, one a line of a .jsonl (its field "text"). Raises InputError with file and line."""
    for file in files:
        if file.suffix != ".jsonl":
            yield file.read_bytes()
            continue
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    yield json.loads(line)["text"].encode()
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    raise InputError("data", f"{file}:{number}", f'is not a JSON object with a string in "text" ({error})') from None


def encode(files: list[Path], tokenizer: Any | None, specials: Specials) -> np.ndarray:
    """All documents as ids, each followed by the end-of-document id; uint16 where that holds them, else int32."""
    parts: list[np.ndarray] = []
    for text in documents(files):
        if tokenizer is None:
            ids = np.frombuffer(text, dtype=np.uint8).astype(np.uint16)
        else:
            ids = np.asarray(tokenizer(text.decode(errors="replace"), add_special_tokens=False)["input_ids"], dtype=np.int32)
        parts += [ids, np.asarray([specials.eod], dtype=ids.dtype)]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.uint16)


def load_tokenizer(folder: str) -> tuple[Any, Specials]:
    """A Hugging Face tokenizer from a local folder, and its special ids."""
    from transformers import AutoTokenizer

    if not Path(folder).is_dir():
        raise InputError("tokenizer", folder, "is not a folder with a Hugging Face tokenizer")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise InputError("tokenizer", folder, f"can't be loaded: {str(error).splitlines()[0]}") from None
    sentinels = tokenizer.convert_tokens_to_ids([f"<extra_id_{i}>" for i in range(SENTINELS)])
    unknown = tokenizer.unk_token_id
    eod = next((i for i in (tokenizer.eos_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id) if i is not None), None)
    if eod is None:
        raise InputError("tokenizer", folder, "has no token that ends a document (eos, sep or pad)")
    return tokenizer, Specials(
        eod=eod,
        mask=tokenizer.mask_token_id,
        cls=tokenizer.cls_token_id,
        sep=tokenizer.sep_token_id,
        pad=tokenizer.pad_token_id,
        sentinels=tuple(i for i in sentinels if i is not None and i != unknown),
    )


def is_indexed(data: str) -> bool:
    """Whether this names a Megatron .bin/.idx pair: the prefix, or one of the two files."""
    prefix = indexed_prefix(data)
    return Path(prefix + ".bin").is_file() and Path(prefix + ".idx").is_file()


def indexed_prefix(data: str) -> str:
    return data[:-4] if data.endswith((".bin", ".idx")) else data


def open_source(data: str | None, tokenizer_folder: str | None, cache: Path, *, build: bool, wait: Callable[[], None]) -> Tokens:
    """The row of one source. Text is encoded once, by the rank with `build`, into `cache`; the others `wait` and map it."""
    if data and is_indexed(data):
        return IndexedTokens(indexed_prefix(data))
    files = text_files(Path(data)) if data else standard_library()
    name = hashlib.blake2b(repr([(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files] + [tokenizer_folder]).encode())
    path = cache / f"tokens-{name.hexdigest()[:16]}.npy"
    if build and not path.exists():
        tokenizer, specials = load_tokenizer(tokenizer_folder) if tokenizer_folder else (None, Specials.of_bytes())
        cache.mkdir(parents=True, exist_ok=True)
        # Each node's first rank may do this in one shared folder: whoever is last replaces the same content.
        with tempfile.NamedTemporaryFile(dir=cache, suffix=".tmp", delete=False) as file:
            np.save(file, encode(files, tokenizer, specials))
        Path(file.name).replace(path)
    wait()
    return ArrayTokens(np.load(path, mmap_mode="r"))


def cut(tokens: Tokens, split: tuple[float, ...], index: int) -> Tokens:
    """The index-th share of a row, front to back; all of it where there is no split. Shares don't overlap."""
    if not split:
        return tokens
    total = sum(split)
    first, last = (math.floor(len(tokens) * sum(split[:end]) / total) for end in (index, index + 1))
    return PartOfTokens(tokens, first, last)


def open_corpus(plan: Plan, cache: Path, *, build: bool, wait: Callable[[], None]) -> Corpus:
    """All that this plan reads. Every rank calls this; `wait` is a barrier."""
    run = plan.run

    def opened(path: str | None) -> Tokens:
        return open_source(path, run.tokenizer, cache, build=build, wait=wait)

    rows = [(source.weight, source.path, opened(source.path)) for source in run.blend]
    rows = rows or [(1.0, run.data or "the standard library", opened(run.data))]

    def parts(index: int) -> tuple[Part, ...]:
        return tuple(Part(weight=weight, name=name, tokens=cut(tokens, run.split, index)) for weight, name, tokens in rows)

    valid: tuple[Part, ...] = ()
    if run.eval_every:
        valid = (Part(weight=1.0, name=run.valid, tokens=opened(run.valid)),) if run.valid else parts(1)
    specials = load_tokenizer(run.tokenizer)[1] if run.tokenizer else Specials.of_bytes()
    return Corpus(train=parts(0), valid=valid, specials=specials)


PIECE = 2**22
"""Tokens that are held in memory while a corpus is written."""


def write_indexed(plan: Plan, folder: Path, prefixes: Sequence[str]) -> None:
    """Writes what this plan trains on, and then what it evaluates on, as Megatron's .bin/.idx under these prefixes in the folder, with a
    document behind each end-of-document token. Every rank calls this; each node's first writes, and nobody where all is there. Raises
    InputError where the vocabulary is too small."""
    import torch.distributed as dist
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    from orchestrator.workers import distributed

    first = distributed.local_rank_is_first()
    if not all((folder / f"{prefix}.idx").is_file() for prefix in prefixes):
        corpus = open_corpus(plan, folder / "data", build=first, wait=dist.barrier)
        for prefix, part in zip(prefixes, (*corpus.train, *corpus.valid), strict=True) if first else ():
            # Nodes may do this in one shared folder: whoever is last replaces the same content.
            partial = folder / f"{prefix}.{dist.get_rank()}"
            builder = IndexedDatasetBuilder(f"{partial}.bin", dtype=DType.optimal_dtype(vocabulary(plan)))
            for start in range(0, len(part.tokens), PIECE):
                ids = part.tokens.window(start, min(PIECE, len(part.tokens) - start))
                check_vocabulary(plan, part, ids)
                for document in np.split(ids, np.flatnonzero(ids == corpus.specials.eod) + 1):
                    if len(document):
                        builder.add_document(document, [len(document)])
            builder.finalize(f"{partial}.idx")
            for suffix in (".bin", ".idx"):
                Path(f"{partial}{suffix}").replace(folder / f"{prefix}{suffix}")
    dist.barrier()


def check_vocabulary(plan: Plan, part: Part, ids: np.ndarray) -> None:
    """Raises InputError where the vocabulary is too small for these ids."""
    if (largest := int(ids.max())) >= vocabulary(plan):
        tokenizer = f"tokenizer {plan.run.tokenizer}" if plan.run.tokenizer else "the byte tokenizer"
        why = f"is too small: data {part.name} by {tokenizer} has token id {largest}"
        raise InputError("model.vocab_size", vocabulary(plan), why)


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


def vocabulary(plan: Plan) -> int:
    """Number of ids that the model takes."""
    return plan.model.vocab_size if plan.model.traced is None else plan.model.traced.token_ids


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
        return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}

    def microbatches(self, step: int, dp_rank: int = 0) -> list[dict[str, np.ndarray]]:
        """The micro-batches [micro_batch_size, ...] of step `step`, counted from 0, on this data-parallel rank; "loss_scale" [1] is
        `scale`'s."""
        plan, scale = self.plan, self.scale(step)
        size, more = plan.micro_batch_size, {} if scale is None else {"loss_scale": np.asarray([scale], dtype=np.float32)}
        starts = [step * plan.global_batch_size + (m * plan.dp + dp_rank) * size for m in range(plan.num_microbatches)]
        return [self.stack([self.sample(start + i) for i in range(size)]) | more for start in starts]


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
        sample = self.sampler.sample(part.tokens.window(start, self.sampler.window), np.random.default_rng((seed, ordinal)))
        for name in ("tokens", "decoder_tokens", "labels"):
            if name in sample:
                check_vocabulary(self.plan, part, sample[name])
        return sample
