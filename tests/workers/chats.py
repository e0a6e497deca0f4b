"""A byte-level tokenizer with a chat template, and chats, as files: made here, nothing is fetched."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETFUL = (
    "{% for message in messages %}{% if message.role == 'assistant' and not loop.last %}<|im_start|>old\n{% else %}"
    "<|im_start|>{{ message.role }}\n{% endif %}{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Writes earlier answers otherwise, as templates do that leave out old reasoning."""
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCABULARY = 256 + len(SPECIALS)


def write_tokenizer(folder: Path, template: str = TEMPLATE, merge: str = "") -> str:
    """One token a byte, the specials, and a space with the letter `merge` behind it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("\u0120", merge)] if merge else []
    tokenizer = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate([*letters, *map("".join, merges)])}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIALS[0], additional_special_tokens=list(SPECIALS[1:]))
    fast.chat_template = template
    fast.save_pretrained(folder)
    return str(folder)


def write_chats(path: Path, count: int = 50, seed: int = 1) -> str:
    """Sums, with answers of some length: between about 60 and 160 tokens a chat."""
    draw = random.Random(seed)
    rows: list[dict[str, Any]] = []
    for _ in range(count):
        a, b = draw.randrange(50), draw.randrange(50)
        messages = [
            {"role": "user", "content": f"{a}+{b}?"},
            {"role": "assistant", "content": f"It is {a + b}." + " Yes." * draw.randrange(12)},
        ]
        rows.append({"messages": messages})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
