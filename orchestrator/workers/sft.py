"""Supervised samples: chats and prompts with completions become token ids of which the answers alone have a loss, then sequences.

A sequence holds one sample, or packed ones: each counts its positions from 0, by which transformers builds the mask that keeps them apart
(masking_utils.py, find_packed_sequence_indices; flash attention the same of one sequence at a time). A step's loss is the mean over all
answer tokens of its global batch, however they lie in sequences: so packed and padded samples give the same.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.chats import KINDS, Chat, Encoded, Pair, Tokens, encoded, marked, overlapping, sample_of
from orchestrator.errors import InputError
from orchestrator.model.packing import dealt, pack
from orchestrator.plan import Plan
from orchestrator.workers import samples
from orchestrator.workers.data import Specials, tokenizer_of
from orchestrator.workers.samples import permuted

SORTED = 50
"""Steps within which data.balance=epoch sorts sequences, as many as transformers' group_by_length does."""
ENCODING = 4
"""Number of the way in which lines are encoded: another encodes anew where a folder has samples of an earlier one."""


@dataclass(frozen=True)
class Samples:
    """All samples one behind the other: `ids` and whether each is of an answer, [tokens]; sample i is from `starts[i]` to
    `starts[i + 1]`."""

    ids: np.ndarray
    answer: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.starts) - 1

    def sample(self, index: int, most: int) -> tuple[np.ndarray, np.ndarray]:
        """The first `most` ids of a sample, and which of them are of an answer."""
        first, last = int(self.starts[index]), int(self.starts[index + 1])
        inside = slice(first, min(last, first + most))
        return self.ids[inside].astype(np.int64), self.answer[inside]


def encode_chat(tokenizer: Any, chat: Chat, where: str, tokens: Tokens | None = None) -> list[Encoded]:
    """A conversation in the chat template of a tokenizer or a processor, by `tokens` where they are not the tokenizer's alone."""
    said = tokenizer.chat_template
    templates = said if isinstance(said, dict) else {"default": said}
    mark = partial(marked, templates, getattr(tokenizer, "tokenizer", tokenizer).special_tokens_map)
    return encoded(chat, partial(tokenizer.apply_chat_template, tokenize=False), tokens or partial(tokens_of, tokenizer), 0, where, mark)


def tokens_of(tokenizer: Any, text: str, answers: Sequence[tuple[int, int]]) -> Encoded:
    """Ids of the whole text; a token is of an answer where it has a character of one (from, to)."""
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return list(found["input_ids"]), overlapping(found["offset_mapping"], answers)


def encode(path: Path, tokenizer: Any | None, specials: Specials) -> Samples:
    """All samples of a jsonl. Raises InputError with file and line."""
    if tokenizer is not None and not tokenizer.is_fast:
        raise InputError("tokenizer", tokenizer.name_or_path, "has no tokenizer.json: where its tokens begin in the text can't be told")
    arrays = arrays_of(path, lambda line, where: [(one, 0) for one in _encode_line(line, where, tokenizer, specials)], KINDS)
    return Samples(arrays["ids"], arrays["answer"], arrays["starts"])


def arrays_of(path: Path, encode: Callable[[bytes, str], list[tuple[Encoded, int]]], kinds: Sequence[str]) -> dict[str, np.ndarray]:
    """The arrays of `Samples` of a jsonl, and "lines": of each sample where its line begins and how many of its images it has. `encode`
    makes of a line, and of its place in messages, samples with that number. Raises InputError with file and line."""
    ids: list[np.ndarray] = []
    answer: list[np.ndarray] = []
    lines: list[tuple[int, int]] = []
    with path.open("rb") as file:
        start = 0
        for number, line in enumerate(file, start=1):
            for (sample_ids, sample_answer), images in encode(line, f"{path}:{number}") if line.strip() else ():
                ids.append(np.asarray(sample_ids, dtype=np.int32))
                answer.append(np.asarray(sample_answer, dtype=bool))
                lines.append((start, images))
            start += len(line)
    if not ids:
        raise InputError("data", path, "has no sample", kinds)
    starts = np.cumsum([0, *map(len, ids)], dtype=np.int64)
    return {"ids": np.concatenate(ids), "answer": np.concatenate(answer), "starts": starts, "lines": np.asarray(lines, dtype=np.int64)}


def _encode_line(line: bytes, where: str, tokenizer: Any | None, specials: Specials) -> list[Encoded]:
    sample = sample_of(line, where)
    if isinstance(sample, Pair):
        return encoded(sample, None, None if tokenizer is None else partial(tokens_of, tokenizer), specials.eod, where)
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise InputError("tokenizer", getattr(tokenizer, "name_or_path", None), f"has no chat template, which {where} needs")
    return encode_chat(tokenizer, sample, where)


def open_samples(
    path: str, tokenizer_folder: str | None, cache: Path, *, build: bool, wait: Callable[[], None]
) -> tuple[Samples, Specials]:
    """The samples of a file, and the special ids. `build`, `wait`: as of `kept`."""
    tokenizer, specials = tokenizer_of(tokenizer_folder)
    arrays = kept(path, (tokenizer_folder,), cache, lambda: vars(encode(Path(path), tokenizer, specials)), build=build, wait=wait)
    return Samples(**arrays), specials


def kept(
    path: str, of: tuple[Any, ...], cache: Path, make: Callable[[], dict[str, Any]], *, build: bool, wait: Callable[[], None]
) -> dict[str, np.ndarray]:
    """The arrays that are made of a file, and of what `of` says, once: by the rank with `build`, into a .npz of `cache` that is there whole
    or not at all; the others `wait` and read it."""
    status = Path(path).stat()
    name = hashlib.blake2b(repr((path, status.st_size, status.st_mtime_ns, *of, ENCODING)).encode()).hexdigest()[:16]
    file = cache / f"samples-{name}.npz"
    if build and not file.exists():
        arrays = make()
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=cache, suffix=".tmp", delete=False) as unfinished:
            np.savez(unfinished, **arrays)
        Path(unfinished.name).replace(file)
    wait()
    with np.load(file) as stored:
        return dict(stored)


class SupervisedSamples(samples.Samples):
    """A run's sequences. They are the same in every epoch, their order is not; neither depends on the layout, but for the tokens that pad
    each sample of a packed sequence under context parallelism (`Plan.sample_multiple`)."""

    def __init__(self, plan: Plan, samples: Samples, specials: Specials) -> None:
        super().__init__(plan)
        self.samples = samples
        self.length, self.multiple = plan.training.seq_length, plan.sample_multiple
        self._step, self._places = -1, list[int]()
        """The last step that was asked for, and its sequences."""
        self._epoch = (-1, list[int]())
        """The last epoch that was sorted."""
        # A tokenizer's own padding may be an id that was added to it, and not to the model.
        self.pad = specials.eod if specials.pad is None or specials.pad >= plan.model.vocab_size else specials.pad
        largest = int(samples.ids.max())
        if largest >= plan.model.vocab_size:
            tokenizer = f"tokenizer {plan.run.tokenizer}" if plan.run.tokenizer else "the byte tokenizer"
            raise InputError("model.vocab_size", plan.model.vocab_size, f"is too small: {tokenizer} has token id {largest}")
        sizes = np.minimum(np.diff(samples.starts), self.length)
        # The first token of a sample is predicted by nothing.
        answers = np.asarray([int(samples.sample(i, self.length)[1][1:].sum()) for i in range(len(samples))])
        learnt = [i for i in range(len(samples)) if answers[i]]
        if not learnt:
            raise InputError("train.seq_length", self.length, "cuts off every answer of the data")
        alone = [[i] for i in range(len(learnt))]
        packed = pack([self._room(int(sizes[i])) for i in learnt], self.length) if plan.training.packing else alone
        self.sequences = [[learnt[i] for i in inside] for inside in packed]
        self.answers = [int(sum(answers[i] for i in inside)) for inside in self.sequences]
        self.work = [sum(self._room(int(sizes[i])) ** 2 for i in inside) for inside in self.sequences]
        """What attention has to compute in each sequence, in pairs of tokens."""
        self.cut = int((np.diff(samples.starts) > self.length).sum())
        self.dropped = len(samples) - len(learnt)
        """Samples of which the cut leaves no answer."""

    def _room(self, tokens: int) -> int:
        """Tokens that a sample of so many takes in a packed sequence."""
        return -(-tokens // self.multiple) * self.multiple

    @property
    def num_samples(self) -> int:
        """Sequences of an epoch, packed ones counted once."""
        return len(self.sequences)

    def said(self) -> str:
        """What became of the data, in a line."""
        tokens = sum(min(int(n), self.length) for n in np.diff(self.samples.starts))
        line = f"data: {len(self.samples)} samples in {self.num_samples} sequences of {self.length}, "
        line += f"{100 * (1 - tokens / (self.num_samples * self.length)):.0f}% of them padding"
        if self.cut:
            line += f"; {self.cut} samples are cut at train.seq_length={self.length}, {self.dropped} of them before any answer"
        return line

    def scale(self, step: int) -> float:
        return self.plan.dp * self.plan.num_microbatches / sum(self.answers[place] for place in self.places(step))

    def sample(self, ordinal: int) -> dict[str, np.ndarray]:
        step, at = divmod(ordinal, self.plan.global_batch_size)
        return self.sequence(self.places(step)[at])

    def places(self, step: int) -> list[int]:
        """The sequences of a step in the order in which its ranks read them. Which ones they are depends on no layout."""
        if step != self._step:
            plan, balance = self.plan, self.plan.training.balance if self.plan.training.packing else "none"
            size = plan.global_batch_size
            found = [self._place(step * size + index, by_work=balance == "epoch") for index in range(size)]
            if balance != "none":
                found = [found[index] for index in dealt([self.work[place] for place in found], plan.dp, plan.micro_batch_size)]
            self._step, self._places = step, found
        return self._places

    def _place(self, ordinal: int, *, by_work: bool) -> int:
        """Which sequence is the run's number `ordinal` before ranks have their shares."""
        epoch, index = divmod(ordinal, len(self.sequences))
        if by_work:
            return self._by_work(epoch)[index]
        return permuted(index, len(self.sequences), seed=self.plan.training.seed + epoch)

    def _by_work(self, epoch: int) -> list[int]:
        """The sequences of an epoch, drawn and then sorted by their work within `SORTED` steps each, the steps in an order that is drawn
        (as transformers' group_by_length sorts by length, trainer_pt_utils.py, get_length_grouped_indices)."""
        if epoch != self._epoch[0]:
            size, rng = self.plan.global_batch_size, np.random.default_rng((self.plan.training.seed, epoch))
            drawn = rng.permutation(len(self.sequences))
            parts = [drawn[first : first + SORTED * size] for first in range(0, len(drawn), SORTED * size)]
            found = np.concatenate([part[np.argsort(-np.asarray(self.work)[part], kind="stable")] for part in parts])
            steps = [found[first : first + size] for first in range(0, len(found) - size + 1, size)]
            rest = found[len(steps) * size :]
            order = np.concatenate([*(steps[step] for step in rng.permutation(len(steps))), rest])
            self._epoch = (epoch, order.tolist())
        return self._epoch[1]

    def sequence(self, index: int) -> dict[str, np.ndarray]:
        """Arrays [seq_length] of one sequence; "real" is 1 where it has tokens, 0 where it is padding."""
        tokens = np.full(self.length, self.pad, dtype=np.int64)
        labels = tokens.copy()
        positions = np.arange(self.length)
        loss_mask, real = (np.zeros(self.length, dtype=np.float32) for _ in range(2))
        at = 0
        for sample in self.sequences[index]:
            ids, answer = self.samples.sample(sample, self.length)
            end = at + len(ids)
            tokens[at:end], labels[at : end - 1] = ids, ids[1:]
            loss_mask[at : end - 1] = answer[1:]
            real[at:end] = 1.0
            if self.plan.training.packing:  # what is left behind the last is a sample of its own
                room = self._room(len(ids))
                positions[at : at + room], at = np.arange(room), at + room
                positions[at:] = np.arange(self.length - at)
        return {"tokens": tokens, "labels": labels, "positions": positions, "loss_mask": loss_mask, "real": real}


def opened(plan: Plan, cache: Path, *, build: bool, wait: Callable[[], None]) -> tuple[SupervisedSamples, SupervisedSamples | None]:
    """What a run trains on, and what it evaluates on if it does. Every rank calls this; `wait` is a barrier, `build` whether this rank
    encodes text for its node."""

    def of(path: str | None) -> SupervisedSamples:
        if path is None:
            raise InputError("data", None, "is missing: task=sft needs a jsonl of samples", KINDS)
        return SupervisedSamples(plan, *open_samples(path, plan.run.tokenizer, cache, build=build, wait=wait))

    return of(plan.run.data), of(plan.run.valid) if plan.run.eval_every else None
