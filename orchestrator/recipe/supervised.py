"""task=sft: how long the samples of a jsonl are, before anything is planned, and what follows from it: packing and the sequence length.

Lengths are counted by the tokenizer's own tokenizer.json where the package `tokenizers` is installed, else reckoned at four bytes a token;
a chat template is reckoned at a few tokens a message, and of a large file the first samples stand for all. The worker counts exactly.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, Final

from orchestrator.errors import InputError
from orchestrator.key import NO_TEXT, is_text, shown
from orchestrator.model.parts.vision import IMAGE_KEYS
from orchestrator.model.training import Lengths
from orchestrator.recipe.lengths import said_lengths
from orchestrator.rl.job import Responses
from orchestrator.rl.lengths import drawn

FIRST: Final = 5_000
"""Samples of a file that are looked at."""
MOST_BYTES: Final = 5_000_000
"""Bytes that a line may have. A tokenizer takes some 190 bytes of memory for each."""
PER_MESSAGE: Final = 5
"""Tokens that a chat template puts around a message: begin, role, line break, end, line break."""
BYTES_PER_TOKEN: Final = 4
"""Bytes of a token in English text under a vocabulary of 32,000 or more ids, about."""
LONGEST: Final = 1 << 24
"""Tokens of the longest sample that is drawn."""
ROUNDED: Final = 64
"""A sequence length that is chosen here is a multiple of it."""
ANSWERS: Final = "assistant"
KINDS: Final = ('{"messages": [{"role": "user", "content": "..."}, ...]}', '{"prompt": "...", "completion": "..."}')


def lines_of(path: str) -> Iterator[tuple[str, bytes]]:
    """The lines of a file that are not blank, each with its place, path:number; of a line that is too long the beginning (`texts_of`)."""
    with Path(path).open("rb") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(MOST_BYTES + 1), b""), start=1):
            if line.strip():
                yield f"{path}:{number}", line


def samples_of(path: str, *, chats: bool, first: int = FIRST) -> Iterator[tuple[list[str], int]]:
    """The texts of each sample, of its messages or of prompt and completion, and how many images it has. `chats`: whether messages can be
    told apart by a template. Raises InputError with file and line."""
    return ((texts_of(line, where, chats=chats), images_in(line)[0]) for where, line in islice(lines_of(path), first))


def texts_of(line: bytes, where: str, *, chats: bool = True) -> list[str]:
    """The texts of one sample, in order: prompt and completion, or a chat's messages. Raises InputError for what is no sample, or has
    nothing to learn, with its place `where`.

    >>> texts_of(b'{"prompt": "2+2=", "completion": "4"}', "a.jsonl:1")
    ['2+2=', '4']
    """
    if len(line) > MOST_BYTES:
        raise InputError("data", where, f"is a line of more than {MOST_BYTES:,} bytes; a sample of a million tokens has fewer")
    try:
        sample = json.loads(line)
        whole = json.dumps(sample, ensure_ascii=False)
    except (ValueError, RecursionError) as error:
        raise InputError("data", where, f"is not JSON: {error}") from None
    if not is_text(whole):
        raise InputError("data", where, NO_TEXT)
    if isinstance(sample, dict) and isinstance(sample.get("messages"), list) and sample["messages"]:
        messages = sample["messages"]
        if not chats:
            raise InputError("tokenizer", None, f"is missing: {where} is a chat, which takes a tokenizer's chat template")
        if all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages):
            _check_answers(messages, where)
            return [_text_of(message.get("content")) for message in messages]
    if isinstance(sample, dict) and all(isinstance(sample.get(name), str) for name in ("prompt", "completion")):
        return [sample["prompt"], sample["completion"]]
    raise InputError("data", where, "is no sample of task=sft", KINDS)


def _text_of(content: Any) -> str:
    """The text of a message, of which parts may be images."""
    parts = content if isinstance(content, list) else [{"text": content}]
    return "".join(part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str))


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
    return max((images_in(line)[0] for _, line in islice(lines_of(path), FIRST)), default=0)


def _check_answers(messages: Sequence[dict[str, Any]], where: str) -> None:
    """Raises InputError for a chat with nothing to learn, and for an answer of nothing, of which a template would write None."""
    if not any(message["role"] == ANSWERS for message in messages):
        raise InputError("data", where, "has no message of the assistant: nothing to learn")
    for number, message in enumerate(messages, 1):
        if message["role"] == ANSWERS and all(value is None for name, value in message.items() if name != "role"):
            raise InputError("data", where, f"message {number} is the assistant's and says nothing")


def counter(tokenizer: str | None) -> Callable[[str], int]:
    """A function that counts the tokens of a text: with the tokenizer's own tokenizer.json, else reckoned at `BYTES_PER_TOKEN`; bytes
    without a tokenizer. Raises InputError for a tokenizer.json that can't be read."""
    if tokenizer is None:
        return lambda text: len(text.encode())
    path = Path(tokenizer) / "tokenizer.json"
    if find_spec("tokenizers") is None or not path.is_file():
        return lambda text: -(-len(text.encode()) // BYTES_PER_TOKEN)
    from tokenizers import Tokenizer

    try:
        known = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises a bare Exception
        raise InputError("tokenizer", shown(tokenizer), f"its tokenizer.json can't be read: {error}") from None
    return lambda text: len(known.encode(text, add_special_tokens=False).ids)


def token_counts(path: str, tokenizer: str | None, per_image: int = 0) -> list[int]:
    """Tokens of each sample, template included; `per_image`: those of an image. Raises InputError."""
    count = counter(tokenizer)
    around = PER_MESSAGE if tokenizer else 0
    samples = samples_of(path, chats=tokenizer is not None)
    found = [sum(count(text) + around for text in texts) + per_image * images for texts, images in samples]
    if not found:
        raise InputError("data", shown(path), "has no sample")
    return found


def drawn_counts(said: str) -> Sequence[int]:
    """Tokens of each sample as data.lengths= says them: a file's, or a draw that is the same every time. Raises InputError."""
    found = said_lengths("data.lengths", said)
    if isinstance(found, list):
        return found
    mean, spread = found
    return drawn(Responses(mean=mean, spread=spread, longest=LONGEST), FIRST, seed=0)


def lengths(counts: Sequence[int], seq_length: int) -> Lengths:
    """How long samples of so many tokens each are, and how much of them a sequence length of `seq_length` tokens cuts off.

    >>> lengths([2, 4, 10], 8)
    Lengths(samples=3, mean=4.666666666666667, mean_square=28.0, longest=10, cut=1, lost=0.125)
    """
    kept = [min(count, seq_length) for count in counts]
    return Lengths(
        samples=len(counts),
        mean=sum(kept) / len(kept),
        mean_square=sum(count * count for count in kept) / len(kept),
        longest=max(counts),
        cut=sum(count > seq_length for count in counts),
        lost=1 - sum(kept) / sum(counts),
    )


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
