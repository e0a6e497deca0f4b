"""task=sft at the door: samples are looked at before anything is planned, and what can't be meant is one error."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from orchestrator import recipe
from orchestrator.detect import Machine
from orchestrator.errors import InputError
from orchestrator.recipe import supervised
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


def test_each_kind_of_sample_has_its_texts() -> None:
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": None}], "prompt": 3}
    assert supervised.texts_of(json.dumps(chat).encode(), "x") == ["a", ""]
    both = {"messages": [], "prompt": "p", "completion": "c"}
    assert supervised.texts_of(json.dumps(both).encode(), "x", chats=False) == ["p", "c"], "an empty chat is none"
    assert supervised.texts_of(json.dumps({"messages": ["a"], "prompt": "p", "completion": "c"}).encode(), "x") == ["p", "c"]
    for wrong in ({"prompt": "p"}, {"prompt": "p", "completion": 1}, {"completion": "c"}, {"messages": "a"}, [1], "p", 3):
        with pytest.raises(InputError, match="is no sample of task=sft"):
            supervised.texts_of(json.dumps(wrong).encode(), "x")
    with pytest.raises(InputError, match="x:7: is not JSON"):
        supervised.texts_of(b"{", "x:7")


def test_samples_are_counted_up_to_the_first_so_many_and_blank_lines_are_none(pairs: str, tmp_path: Path) -> None:
    assert len(list(supervised.samples_of(pairs, chats=False))) == 10
    for first in (1, 3, 10):
        assert [len(text[0]) for text in supervised.samples_of(pairs, chats=False, first=first)] == [10 * n for n in range(1, first + 1)]
    path = tmp_path / "gaps.jsonl"
    path.write_text('\n{"prompt": "p", "completion": "c"}\n  \n{"prompt": "p"}\n')
    with pytest.raises(InputError, match=r"gaps\.jsonl:4: is no sample"):
        list(supervised.samples_of(str(path), chats=False))
    assert len(list(supervised.samples_of(str(path), chats=False, first=1))) == 1
    path.write_text("\n\n")
    with pytest.raises(InputError, match="has no sample"):
        supervised.token_counts(str(path), None)


def test_tokens_are_bytes_or_with_an_unread_tokenizer_a_quarter_of_them_and_the_templates(pairs: str) -> None:
    assert supervised.token_counts(pairs, None) == [20 * n for n in range(1, 11)]
    assert supervised.token_counts(pairs, "nowhere") == [2 * (math.ceil(10 * n / 4) + 5) for n in range(1, 11)]
    assert supervised.counter(None)("\u00e4b") == 3


def test_a_length_that_is_chosen_is_the_least_round_one_that_holds_all() -> None:
    for longest in (1, 63, 64, 65, 128, 1000):
        chosen = supervised.chosen_length([1, longest], 4096)
        assert longest <= chosen < longest + 64
        assert chosen % 64 == 0
    found = supervised.lengths([4, 8, 16], 8)
    assert (found.samples, found.mean, found.mean_square, found.longest, found.cut) == (3, 20 / 3, (16 + 64 + 64) / 3, 16, 1)
    assert found.lost == pytest.approx(8 / 28)
