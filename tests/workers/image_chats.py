"""Processors of small models that look at images, and chats with pictures, as files: made here, nothing is fetched."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any, Final

import numpy as np

TEMPLATE: Final = (
    "{{% for message in messages %}}<{{{{ message.role }}}}>{{% for part in message.content %}}"
    "{{% if part.type == 'image' %}}{place}{{% else %}}{{{{ part.text }}}}{{% endif %}}{{% endfor %}}</s>{{% endfor %}}"
    "{{% if add_generation_prompt %}}<assistant>{{% endif %}}"
)
IMAGE: Final = 255
"""The id of an image's tokens in the small models."""
SIDE: Final = 28


def tokenizer(place: dict[int, str], names: dict[str, str], merge: str = "") -> Any:
    """A byte-level tokenizer of 256 ids, of which a few letters are left out for special ones. `place`: further ones by id, `names`: by
    the attribute that a processor asks for. `merge`: a letter that is one token with a space before it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    merges = [("\u0120", merge)] if merge else []
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet())[: 199 - len(merges)], "\u0120", *map("".join, merges)]  # with the space
    made = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=merges))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), decoders.ByteLevel()
    words = ["</s>", "<pad>", "<user>", "<assistant>", *(f"<{i}>" for i in range(204, 256))]
    for number, word in place.items():
        words[number - 200] = word
    made.add_special_tokens([AddedToken(word, special=True) for word in words])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", pad_token="<pad>", extra_special_tokens=names)


def write_processor(kind: str, folder: Path, merge: str = "") -> str:
    """The folder of the processor of LLaVA's or Gemma 3's small model; `merge` as `tokenizer` has it, of LLaVA's."""
    from transformers import Gemma3Processor, LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    size = {"height": SIDE, "width": SIDE}
    if kind == "llava":
        made: Any = LlavaProcessor(
            CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=size), tokenizer({IMAGE: "<image>"}, {}, merge), patch_size=7,
            vision_feature_select_strategy="default", num_additional_image_tokens=1, image_token="<image>",
            chat_template=TEMPLATE.format(place="<image>"),
        )  # fmt: skip
    else:
        names = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
        text = tokenizer(dict(zip((253, 254, IMAGE), names.values(), strict=True)), names)
        made = Gemma3Processor(
            Gemma3ImageProcessorPil(size=size), text, chat_template=TEMPLATE.format(place="<start_of_image>"), image_seq_length=4
        )
    made.save_pretrained(folder)
    return str(folder)


def write_chats(folder: Path, count: int = 24) -> str:
    """Chats about one or two pictures of different sizes, which stand in files or in the line, at places of their own or not."""
    from PIL import Image

    folder.mkdir(exist_ok=True)
    draw, rng, rows = random.Random(1), np.random.default_rng(1), []
    for number in range(count):
        pictures: list[Any] = []
        for index in range(1 + number % 2):
            name = f"{number}_{index}.png"
            Image.fromarray(rng.integers(0, 255, (30 + number, 50, 3), dtype=np.uint8)).save(folder / name)
            pictures.append(name)
        if number % 3 == 0:
            pictures[0] = {"bytes": base64.b64encode((folder / pictures[0]).read_bytes()).decode()}
        asked: Any = "What is it" + "?" * draw.randrange(6)
        if number % 4:
            asked = [*({"type": "image"} for _ in pictures), {"type": "text", "text": asked}]
        answer = {"role": "assistant", "content": "A cat" + ", a dog" * draw.randrange(3) + "."}
        rows.append({"messages": [{"role": "user", "content": asked}, answer], "images": pictures})
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
