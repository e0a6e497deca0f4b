"""Supervised samples with images: chats as TRL's vision format has them, by the model's own processor of transformers.

A line is `{"messages": [...], "images": ["a.png", ...]}`. A message's content is text, or parts `{"type": "image"}` and `{"type": "text",
"text": ...}`; without such a place the images stand before the first user's text. An image is a path (from the data's folder), or
`{"path": ...}` or `{"bytes": ...}` of base64; a part may have its own under "image" or "path". Samples are not packed, and one that is
longer than a sequence is left out: cut tokens of an image would leave pixels without a place.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator import chats
from orchestrator.errors import InputError
from orchestrator.model.parts.vision import IMAGE_KEYS
from orchestrator.plan import Plan
from orchestrator.workers import seeing, sft
from orchestrator.workers.data import Specials, load_tokenizer

KINDS = ('{"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "..."}]}, ...], "images": ["a.png"]}',)


def chat_of(line: bytes, where: str) -> tuple[chats.Chat, list[Any]]:
    """The chat of a sample, each content as parts, and its images in order. Raises InputError."""
    chat = chats.sample_of(line, where)
    if isinstance(chat, chats.Pair):
        raise InputError("data", where, "is no chat, which a model that looks at images is tuned on", KINDS)
    sample = json.loads(line)
    given = sample.get("images", [sample["image"]] if sample.get("image") is not None else [])
    images, places, messages = list(given), 0, []
    for message in chat.messages:
        content = message.get("content")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
        for number, part in enumerate(parts):
            if part.get("type") == "image":
                if own := [part[name] for name in IMAGE_KEYS if part.get(name) is not None]:
                    images.insert(places, own[0])
                parts[number] = {"type": "image"}
                places += 1
        messages.append(message | {"content": parts})
    users = [message for message in messages if message.get("role") == "user"]
    if not places and users:
        users[0]["content"], places = [{"type": "image"}] * len(images) + users[0]["content"], len(images)
    if not images or places != len(images):
        why = f"has {len(images)} images and {places} places for them" if images else "has no image: the tower would have nothing to do"
        raise InputError("data", where, why, KINDS)
    return chat._replace(messages=messages), images


def opened_image(given: Any, folder: Path, where: str) -> Any:
    """An image of a sample in RGB. Raises InputError."""
    from PIL import Image

    path = given.get("path") if isinstance(given, dict) else given
    raw = given.get("bytes") if isinstance(given, dict) else None
    try:
        with Image.open(io.BytesIO(base64.b64decode(raw)) if raw else folder / str(path)) as image:
            return image.convert("RGB")
    except (OSError, ValueError) as error:
        raise InputError("data", where, f"its image {'of bytes' if raw else path} can't be read: {error}") from None


class Eye:
    """A processor: what a chat becomes by it. Raises InputError for a folder without one."""

    def __init__(self, folder: str | None, image_token_id: int) -> None:
        from transformers import AutoProcessor

        if folder is None:
            raise InputError("tokenizer", None, "is missing: chats with images take the folder of the model's processor")
        try:
            self.processor: Any = AutoProcessor.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, ImportError, AttributeError) as error:
            raise InputError("tokenizer", folder, f"has no processor that can be read here: {error}") from None
        if not hasattr(self.processor, "image_processor"):
            raise InputError("tokenizer", folder, "has a tokenizer alone: chats with images take the model's processor_config.json too")
        self.folder, self.image_token_id = folder, image_token_id
        self.place: str = getattr(self.processor, "boi_token", None) or self.processor.image_token  # Gemma 3's begins an image

    def given(self, text: str, images: Sequence[Any]) -> dict[str, np.ndarray]:
        """The arguments of the model for a text and the images that it has places for."""
        seen = images[: text.count(self.place)]
        found: dict[str, np.ndarray] = dict(self.processor(text=[text], images=[list(seen)] if seen else None, return_tensors="np"))
        return found

    def encode(self, chat: chats.Chat, images: Sequence[Any], where: str) -> list[tuple[chats.Encoded, int]]:
        """The samples of a chat, each with how many images it has. A token is of an answer where it has a character of one."""
        counts: list[int] = []

        def ids(text: str) -> list[int]:
            return [int(token) for token in self.given(text, images)["input_ids"][0]] if text else []

        def tokens(text: str, answers: Sequence[tuple[int, int]]) -> chats.Encoded:
            whole = ids(text)
            inside = np.zeros(len(whole), dtype=bool)
            for begin, end in answers:
                (first, _), (_, last) = (self._ended(ids(text[:at]), whole) for at in (begin, end))
                inside[first:last] = True
            counts.append(text.count(self.place))
            if whole.count(self.image_token_id) == 0:
                raise InputError("tokenizer", self.folder, f"makes of an image no token {self.image_token_id}, by which the model knows it")
            return whole, inside.tolist()

        return list(zip(sft.encode_chat(self.processor, chat, where, tokens), counts, strict=True))

    @staticmethod
    def _ended(part: list[int], whole: list[int]) -> tuple[int, int]:
        """How many tokens of the whole end in its first part, which may end inside of one, and how many begin there."""
        same = next((i for i, (one, other) in enumerate(zip(part, whole, strict=False)) if one != other), min(len(part), len(whole)))
        return same, same + (same < len(part))

    def pixels(self, images: Sequence[Any]) -> dict[str, np.ndarray]:
        """What the tower is given of a sample's images."""
        found = self.given(self.place * len(images), images)
        return {name: np.asarray(found[name]) for name in seeing.JOINED if name in found}


class ChatsWithImages(sft.SupervisedSamples):
    """A run's chats, a sample a sequence. `lines`: where each sample's line begins in the file, and how many of its images it has."""

    joined = seeing.JOINED

    def __init__(self, plan: Plan, path: str, eye: Eye, samples: sft.Samples, lines: np.ndarray, specials: Specials) -> None:
        length = plan.training.seq_length
        kept = np.flatnonzero(np.diff(samples.starts) <= length)
        if not len(kept):
            shortest = int(np.diff(samples.starts).min())
            raise InputError("train.seq_length", length, f"is shorter than every sample of {path}, of which the shortest has {shortest}")
        self.path, self.eye, self.lines, self.left_out = Path(path), eye, lines[kept], len(samples) - len(kept)
        cut = [slice(int(samples.starts[i]), int(samples.starts[i + 1])) for i in kept]
        ids, answer = (np.concatenate([array[inside] for inside in cut]) for array in (samples.ids, samples.answer))
        super().__init__(plan, sft.Samples(ids, answer, np.cumsum([0, *(inside.stop - inside.start for inside in cut)])), specials)

    def said(self) -> str:
        longer = f"; {self.left_out} are longer than train.seq_length={self.length} and left out" if self.left_out else ""
        images = int(self.lines[:, 1].sum())
        return f"{super().said()}; {images} images{longer}"

    def sequence(self, index: int) -> dict[str, np.ndarray]:
        [number] = self.sequences[index]
        start, count = map(int, self.lines[number])
        with self.path.open("rb") as file:
            file.seek(start)
            where = f"{self.path} at byte {start}"
            _, images = chat_of(file.readline(), where)
        seen = [opened_image(image, self.path.parent, where) for image in images[:count]]
        found = super().sequence(index)
        vision = self.plan.model.vision
        assert vision is not None
        types = (found["tokens"] == vision.image_token_id).astype(np.int64)
        return found | seeing.types_for(vision, types) | self.eye.pixels(seen)


def encoded(path: Path, eye: Eye) -> dict[str, np.ndarray]:
    """The arrays of a file (`sft.arrays_of`). Raises InputError with file and line."""

    def samples_of(line: bytes, where: str) -> list[tuple[chats.Encoded, int]]:
        chat, images = chat_of(line, where)
        return eye.encode(chat, [opened_image(image, path.parent, where) for image in images], where)

    return sft.arrays_of(path, samples_of, KINDS)


def opened(plan: Plan, cache: Path, *, build: bool, wait: Callable[[], None]) -> tuple[ChatsWithImages, ChatsWithImages | None]:
    """What a run trains on, and what it evaluates on if it does. Every rank calls this; `wait` is a barrier, `build` whether this rank
    reads the data for its node."""
    vision, folder = plan.model.vision, plan.run.tokenizer
    assert vision is not None
    eye = Eye(folder, vision.image_token_id)
    _, specials = load_tokenizer(eye.folder)

    def of(path: str | None) -> ChatsWithImages:
        if path is None:
            raise InputError("data", None, "is missing: task=sft needs a jsonl of samples", KINDS)
        arrays = sft.kept(path, (folder, "images"), cache, lambda: encoded(Path(path), eye), build=build, wait=wait)
        lines = arrays.pop("lines")
        return ChatsWithImages(plan, path, eye, sft.Samples(**arrays), lines, specials)

    return of(plan.run.data), of(plan.run.valid) if plan.run.eval_every else None
