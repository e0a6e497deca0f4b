"""task=sft: how long the samples of a jsonl are, before anything is planned, and what follows from it: packing and the sequence length.

Samples are written and counted as the ranks will (orchestrator/chats.py) where tokenizer.json, the chat template and the packages that read
them are here; else they are estimated. Of a large file lines are drawn, by a seed, and the longest lines looked at beside them.
"""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Iterator, Sequence
from functools import lru_cache
from heapq import nlargest
from math import ceil
from pathlib import Path
from typing import Any, Final, NamedTuple

from orchestrator import chats
from orchestrator.chats import ANSWERS, KINDS, MOST_BYTES, REASONING, Chat, Encoded, Pair, sample_of
from orchestrator.errors import InputError
from orchestrator.key import shown
from orchestrator.model.packing import loads, pack
from orchestrator.model.parts.vision import IMAGE_KEYS
from orchestrator.model.training import Lengths
from orchestrator.recipe.lengths import said_lengths
from orchestrator.rl.job import Responses
from orchestrator.rl.lengths import drawn

FIRST: Final = 2_000
"""Lines of a file that are looked at; of more so many are drawn."""
LONGEST_LINES: Final = 64
"""Lines of the most bytes that are looked at beside those drawn."""
PER_MESSAGE: Final = 5
"""Tokens that a chat template puts around a message: begin, role, line break, end, line break."""
BYTES_PER_TOKEN: Final = 4
"""Bytes of a token in English text under a vocabulary of 32,000 or more ids, about."""
MULTIPLES: Final = tuple(2**n for n in range(8))
"""Tokens to a multiple of which context parallelism pads packed samples (`Plan.sample_multiple`)."""
LONGEST: Final = 1 << 24
"""Tokens of the longest sample that is drawn."""
ROUNDED: Final = 64
"""A sequence length that is chosen here is a multiple of it."""


class Sample(NamedTuple):
    """A sample's tokens, and the runs of them that are an answer's, each from, to; the largest id among them, 0 where only their number is
    known."""

    tokens: int
    answers: tuple[tuple[int, int], ...]
    largest_id: int = 0

    @classmethod
    def of(cls, encoded: Encoded) -> Sample:
        ids, answer = encoded
        edges = [at for at in range(len(ids) + 1) if (at < len(ids) and answer[at]) != (at > 0 and answer[at - 1])]
        return cls(len(ids), tuple(zip(edges[::2], edges[1::2], strict=True)), max(ids, default=0))

    def learnt(self, length: int) -> int:
        """Tokens of its answers among the first `length`; nothing predicts the first of all."""
        return sum(max(0, min(last, length) - max(first, 1)) for first, last in self.answers)


class Counted(NamedTuple):
    """What was counted of a file: samples, of all or of lines that were drawn. `longest`: tokens of the longest of those looked at;
    `whole`: samples of the whole file."""

    samples: list[Sample]
    longest: int
    whole: int
    how: str = ""
    """What the numbers are, if not exact ones of all lines."""
    unlearnt: int = 0
    """Answers of weight 0."""
    merged: int = 0
    """Prompts that end inside a token."""
    unused: tuple[str, ...] = ()
    """Columns and fields that nothing is done with."""


def lines_of(path: str) -> Iterator[tuple[str, bytes]]:
    """The lines of a file that are not blank, each with its place, path:number; of a line that is too long the beginning (`texts_of`)."""
    with Path(path).open("rb") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(MOST_BYTES + 1), b""), start=1):
            if line.strip():
                yield f"{path}:{number}", line


def texts_of(line: bytes, where: str, *, chats: bool = True) -> list[str]:
    """The texts of one sample, in order: prompt and completion, or a chat's tools and messages with all that a template may write of them.
    Raises InputError for what is no sample, or has nothing to learn, with its place `where`.

    >>> texts_of(b'{"prompt": "2+2=", "completion": "4"}', "a.jsonl:1")
    ['2+2=', '4']
    """
    sample = sample_of(line, where)
    if isinstance(sample, Pair):
        return [*sample]
    if not chats:
        raise InputError("tokenizer", None, f"is missing: {where} is a chat, which takes a tokenizer's chat template")
    tools = sample.keywords.get("tools")
    return [*([json.dumps(tools)] if tools else []), *map(_text_of, sample.messages)]


def _text_of(message: dict[str, Any]) -> str:
    """The text of a message, of whose content parts may be images."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    text = "".join(part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str))
    more = [message[name] for name in ("tool_calls", *REASONING) if message.get(name)]
    return text + "".join(one if isinstance(one, str) else json.dumps(one) for one in more)


def images_in(line: bytes) -> tuple[int, list[str]]:
    """How many images a sample has, by the places for them in its messages, else by what it lists; and the paths of those in files.

    >>> images_in(b'{"messages": [{"role": "user", "content": [{"type": "image"}]}], "images": ["a.png"]}')
    (1, ['a.png'])
    """
    if b'"image' not in line:
        return 0, []
    sample: dict[str, Any] = json.loads(line)
    contents = [message.get("content") for message in sample.get("messages", ()) if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    places = [part for part in parts if part.get("type") == "image"]
    several, one = sample.get("images"), sample.get("image")
    listed = several if isinstance(several, list) else [] if one is None else [one]
    given = [*listed, *(value for part in places for name, value in part.items() if name in IMAGE_KEYS)]
    paths = [one.get("path") if isinstance(one, dict) and not one.get("bytes") else one for one in given]
    return len(places) or len(listed), [path for path in paths if isinstance(path, str)]


def most_images(path: str) -> int:
    """The most images of a sample of the file, whose lines are samples."""
    return max((images_in(line)[0] for _, line in lines_of(path)), default=0)


def counted(path: str, tokenizer: str | None, per_image: int = 0) -> Counted:
    """What is known of a file's samples; `per_image`: tokens of an image. Raises InputError."""
    status = Path(path).stat()
    return _counted(path, tokenizer, per_image, (status.st_size, status.st_mtime_ns))


@lru_cache(maxsize=8)
def _counted(path: str, tokenizer: str | None, per_image: int, _: tuple[int, int]) -> Counted:
    places, number, sizes = array("q"), array("q"), array("q")
    at, line_number = 0, 0
    with Path(path).open("rb") as file:
        for line_number, line in enumerate(iter(lambda: file.readline(MOST_BYTES + 1), b""), start=1):
            if line.strip():
                places.append(at)
                number.append(line_number)
                sizes.append(len(line))
            at += len(line)
        if not places:
            raise InputError("data", shown(path), "has no sample")
        every = range(len(places))
        chosen = every if len(places) <= FIRST else sorted(random.Random(0).sample(every, FIRST))
        longest = [] if len(chosen) == len(places) else nlargest(LONGEST_LINES, every, key=sizes.__getitem__)
        known = None if tokenizer is None else chats.reader(tokenizer)
        estimated = False

        def samples_at(index: int) -> tuple[list[Sample], int, bool, set[str]]:
            nonlocal estimated
            file.seek(places[index])
            line, where = file.readline(MOST_BYTES + 1), f"{path}:{number[index]}"
            texts, sample = texts_of(line, where, chats=tokenizer is not None), sample_of(line, where)
            images = images_in(line)[0]
            exact = tokenizer is None if known is None else isinstance(sample, Pair) or known.render is not None
            estimated |= not exact or bool(per_image)
            if not exact:
                found = [_estimate(sample, texts)]
            else:
                if per_image and isinstance(sample, Chat):
                    sample = sample._replace(messages=[_in_parts(message) for message in sample.messages])
                render, tokens, mark = (None, None, None) if known is None else (known.render, known.tokens, known.mark)
                found = [Sample.of(one) for one in chats.encoded(sample, render, tokens, 0, where, mark)]
            more = per_image * images
            moved = [one._replace(tokens=one.tokens + more, answers=tuple((a + more, b + more) for a, b in one.answers)) for one in found]
            weights = (
                0 if isinstance(sample, Pair) else sum(each["role"] == ANSWERS and each.get("weight") == 0 for each in sample.messages)
            )
            merged = known is not None and isinstance(sample, Pair) and chats.ends_inside_token(sample, known.tokens)
            return moved, weights, merged, chats.unused(line, None if known is None else known.source)

        looked_at = [samples_at(index) for index in chosen]
        most = max(one.tokens for found, *_ in (*looked_at, *(samples_at(index) for index in longest)) for one in found)
    samples = [one for found, *_ in looked_at for one in found]
    why = "an estimate, as the tokenizer's own files or the packages tokenizers and jinja2 are not here" if not per_image else "an estimate"
    drawn_by = f"of {len(chosen):,} of {len(places):,} lines, drawn, and the {len(longest)} longest"
    return Counted(
        samples=samples,
        longest=most,
        whole=round(len(places) * len(samples) / len(chosen)),
        how="; ".join([why] * estimated + [drawn_by] * bool(longest)),
        unlearnt=sum(weights for _, weights, *_ in looked_at),
        merged=sum(merged for *_, merged, _ in looked_at),
        unused=tuple(sorted({name for *_, names in looked_at for name in names})),
    )


def _estimate(sample: Chat | Pair, texts: Sequence[str]) -> Sample:
    """A sample at `BYTES_PER_TOKEN`, with `PER_MESSAGE` around each text."""
    sizes = [-(-len(text.encode()) // BYTES_PER_TOKEN) + PER_MESSAGE for text in texts]
    first = len(texts) - len(sample.messages) if isinstance(sample, Chat) else 0
    learnt = [first + turn for turn in sample.learnt] if isinstance(sample, Chat) else [1]
    return Sample(sum(sizes), tuple((sum(sizes[:turn]), sum(sizes[: turn + 1])) for turn in learnt))


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """A message as templates of models that look at images take it, without its images, which are counted by themselves."""
    return message | {"content": [{"type": "text", "text": _text_of({"content": message.get("content")})}]}


def drawn_counts(said: str) -> Sequence[int]:
    """Tokens of each sample as data.lengths= says them: a file's, or a draw that is the same every time. Raises InputError."""
    found = said_lengths("data.lengths", said)
    if isinstance(found, list):
        return found
    mean, spread = found
    return drawn(Responses(mean=mean, spread=spread, longest=LONGEST), FIRST, seed=0)


def lengths(counts: Sequence[int], seq_length: int, found: Counted | None = None) -> Lengths:
    """How long samples of so many tokens each are, how many sequences of `seq_length` they fill, and what that cuts off. `found`: the rest
    that is known of them.

    >>> found = lengths([2, 4, 10], 8)
    >>> found.mean_square, found.longest, found.cut, found.sequences
    (28.0, 10, 1, (2, 2, 2, 3, 3, 3, 3, 3))
    """
    kept = [min(count, seq_length) for count in counts]
    samples = [] if found is None else found.samples
    left = [one.learnt(seq_length) for one in samples]
    whole = [one.learnt(one.tokens) for one in samples]
    packed = kept if not samples else [size for size, answers in zip(kept, left, strict=True) if answers]
    padded = [[min(-(-size // unit) * unit, seq_length) for size in packed] for unit in MULTIPLES]
    times = 1.0 if found is None else found.whole / len(counts)
    each = [pack(sizes, seq_length) for sizes in padded]
    return Lengths(
        samples=round(times * len(counts)),
        mean=sum(kept) / len(kept),
        mean_square=sum(count * count for count in kept) / len(kept),
        longest=max(counts) if found is None else found.longest,
        cut=round(times * sum(count > seq_length for count in counts)),
        lost=1 - sum(kept) / sum(counts),
        sequences=tuple(max(1, round(times * len(sequences))) for sequences in each),
        dropped=round(times * (len(kept) - len(packed))),
        answers=round(times * sum(whole)),
        answers_lost=round(times * (sum(whole) - sum(left))),
        how="" if found is None else found.how,
        unlearnt=0 if found is None else round(times * found.unlearnt),
        merged=0 if found is None else ceil(times * found.merged),
        unused=() if found is None else found.unused,
        loads=loads([[packed[index] for index in sequence] for sequence in each[0]]),
    )


def steps_of(epochs: float, found: Lengths, batch: int, *, packing: bool) -> int:
    """Steps of `batch` sequences in which every sample is seen so often; the last may begin another epoch.

    >>> steps_of(3, lengths([35] * 40, 64), 8, packing=True)
    15
    """
    return max(1, ceil(epochs * found.epoch(packing=packing) / batch))


def chosen_length(counts: Sequence[int], longest_position: int) -> int:
    """A sequence length for samples of these lengths: the longest fits, if the model's positions reach that far.

    >>> chosen_length([10, 100, 70], 4096), chosen_length([10, 9000], 4096)
    (128, 4096)
    """
    return min(longest_position, -(-max(counts) // ROUNDED) * ROUNDED)


def missing() -> InputError:
    """The error that says that there are no samples."""
    return InputError("data", None, "is missing: task=sft needs a jsonl of samples (launch=none plans without)", KINDS)


def check_data(data: dict[str, Any]) -> str | None:
    """The file of samples; None where there is none yet, which a plan can do without and a start can't. Raises InputError for what task=sft
    does not take."""
    if data["blend"]:
        raise InputError("data.blend", "", "is for task=pretrain; task=sft takes data=SAMPLES.jsonl")
    if data["split"]:
        raise InputError("data.split", "", "is for task=pretrain; task=sft takes data.valid=SAMPLES.jsonl")
    if data["data"] is None:
        return None
    if not str(data["data"]).endswith((".jsonl", ".json")):
        raise InputError("data", shown(data["data"]), "is not a .jsonl of samples, one a line", KINDS)
    return str(data["data"])
