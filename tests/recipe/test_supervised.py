"""task=sft at the door: samples are looked at before anything is planned, and what can't be meant is one error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator import recipe
from orchestrator.detect import Machine
from orchestrator.errors import InputError
from orchestrator.units import GIB

NO_GPU = Machine(host_memory=16 * GIB)
ENGINES = ("megatron", "deepspeed")


def settings(*words: str) -> recipe.Settings:
    return recipe.load(words, NO_GPU, ENGINES)


@pytest.fixture
def pairs(tmp_path: Path) -> str:
    """Ten samples of 20 to 200 bytes."""
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps({"prompt": "p" * (10 * n), "completion": "c" * (10 * n)}) + "\n" for n in range(1, 11)))
    return str(path)


def test_lengths_are_counted_and_packing_is_chosen(pairs: str) -> None:
    found = settings("recipe=llama_tiny", "task=sft", f"data={pairs}").training
    assert (found.task, found.packing, found.seq_length) == ("sft", True, 128)
    assert found.lengths is not None
    assert (found.lengths.samples, found.lengths.longest, found.lengths.cut) == (10, 200, 4)


def test_divided_sequences_are_padded(pairs: str) -> None:
    assert settings("recipe=llama_tiny", "task=sft", f"data={pairs}", "pin.cp=2").training.packing is False


def test_the_longest_sample_says_the_length_where_nothing_else_does(pairs: str, tmp_path: Path) -> None:
    text = Path("recipes/models/llama_tiny.yaml").read_text().replace("  seq_length: 128\n", "")
    mine = tmp_path / "mine.yaml"
    mine.write_text(text.replace("max_position_embeddings: 128", "max_position_embeddings: 4096"))
    assert settings(f"recipe={mine}", "task=sft", f"data={pairs}").training.seq_length == 256


@pytest.mark.parametrize(
    ("words", "key", "why"),
    [
        (["data.packing=true"], "data.packing", "task=sft"),
        (["task=sft", "data=README.md"], "data", "is not a .jsonl of samples"),
        (["task=sft", "data.blend=0.5 README.md 0.5 setup.cfg"], "data.blend", "is for task=pretrain"),
        (["task=sft", "data.split=90,10"], "data.split", "data.valid="),
        (["lora.alpha=4"], "lora.alpha", "give lora.rank= beside it"),
        (["lora.merge=true"], "lora.merge", "give lora.rank= beside it"),
        (["lora.rank=4", "lora.targets=q_prj"], "lora.targets", "did you mean q_proj"),
    ],
)
def test_what_can_not_be_meant_is_refused(words: list[str], key: str, why: str) -> None:
    with pytest.raises(InputError, match=why) as error:
        settings("recipe=llama_tiny", *words)
    assert error.value.key == key


def test_a_chat_needs_a_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}) + "\n")
    with pytest.raises(InputError, match="is a chat, which takes a tokenizer's chat template"):
        settings("recipe=llama_tiny", "task=sft", f"data={path}")
