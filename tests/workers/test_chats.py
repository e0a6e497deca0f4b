"""What a line of chats says beside its words: tools, weights, arguments of the template; and that lengths are counted as ranks encode."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chats import FORGETFUL, TEMPLATE, write_tokenizer

from orchestrator.chats import sample_of, unused
from orchestrator.errors import InputError
from orchestrator.model.packing import sample_notes
from orchestrator.recipe import supervised
from orchestrator.workers import sft
from orchestrator.workers.data import load_tokenizer

pytestmark = pytest.mark.engines

FULL = (
    "{{ bos_token }}{%- if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
    "{% if m.reasoning_content and thinks is not false %}<think>{{ m.reasoning_content }}</think>\n{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool>{{ c.function | tojson }}</tool>{% endfor %}<|im_end|>\n{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{%- generation -%}\n{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\nSo: {% endif %}"
)
"""Marks the words alone; and its generation prompt is no beginning of an answer, which nobody needs then."""
TOOLS = [{"type": "function", "function": {"name": "w\u00e9ther", "parameters": {"city": "<b>"}}}]
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "w\u00e9ther", "arguments": {"city": "\u6771"}}}]}
ASKS = {"role": "user", "content": "Hi"}
SAYS = {"role": "assistant", "content": "Yes.", "reasoning": "hm"}


def encoded(tmp_path: Path, row: dict[str, Any], template: str = FULL) -> list[tuple[str, str]]:
    """The text of each sample, and what of it is learnt."""
    tokenizer, specials = load_tokenizer(write_tokenizer(tmp_path / "tokenizer", template))
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps(row) + "\n")
    found = sft.encode(path, tokenizer, specials)
    whole = [found.sample(i, 10**6) for i in range(len(found))]
    return [(tokenizer.decode(ids), tokenizer.decode(ids[answer])) for ids, answer in whole]


@pytest.mark.parametrize("as_text", [False, True])
def test_tools_and_arguments_of_the_template_are_given_to_it(as_text: bool, tmp_path: Path) -> None:
    row = {"messages": [ASKS, CALL, ASKS, SAYS], "tools": json.dumps(TOOLS) if as_text else TOOLS}
    [(text, learnt)] = encoded(tmp_path, row)
    assert text.startswith(f"<|im_start|>system\n{json.dumps(TOOLS[0], ensure_ascii=False)}\n<|im_end|>\n<|im_start|>user\nHi")
    assert learnt.startswith('<tool>{"name": "w\u00e9ther"')
    assert learnt.endswith("<think>hm</think>\nYes.<|im_end|>\n")
    [(text, _)] = encoded(tmp_path, row | {"tools": [], "chat_template_kwargs": {"thinks": False}})
    assert "system" not in text
    assert "<think>" not in text


def test_an_answer_of_weight_0_has_no_loss(tmp_path: Path) -> None:
    wrong = {"role": "assistant", "content": "Wrong.", "weight": 0}
    [(text, learnt)] = encoded(tmp_path, {"messages": [ASKS, wrong, ASKS, SAYS | {"weight": 1}]}, TEMPLATE)
    assert "Wrong." in text
    assert learnt == "Yes.<|im_end|>\n"
    assert [learnt for _, learnt in encoded(tmp_path, {"messages": [ASKS, wrong, ASKS, SAYS]}, FORGETFUL)] == ["Yes.<|im_end|>\n"]
    prompted = {"prompt": [ASKS, SAYS | {"content": "Before."}, ASKS], "completion": [SAYS]}
    [(text, learnt)] = encoded(tmp_path, prompted, TEMPLATE)
    assert "Before." in text
    assert learnt == "Yes.<|im_end|>\n"


def test_what_a_template_marks_is_learnt_as_transformers_masks_it(tmp_path: Path) -> None:
    """TRL's assistant_only_loss: by apply_chat_template(return_assistant_tokens_mask=True)."""
    messages = [ASKS, SAYS | {"content": "One."}, ASKS, SAYS]
    [(_, learnt)] = encoded(tmp_path, {"messages": messages}, MARKED)
    assert learnt == "One.Yes."
    tokenizer, _ = load_tokenizer(str(tmp_path / "tokenizer"))
    theirs = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    assert tokenizer.decode([one for one, mask in zip(theirs["input_ids"], theirs["assistant_masks"], strict=True) if mask]) == learnt
    [(_, learnt)] = encoded(tmp_path, {"messages": [ASKS, SAYS | {"content": "One.", "weight": 0}, ASKS, SAYS]}, MARKED)
    assert learnt == "Yes."
    forgets = MARKED.replace("{{ m.role }}\n{% if", "{{ 'old' if m.role == 'assistant' and not loop.last else m.role }}\n{% if")
    rows = encoded(tmp_path, {"messages": messages}, forgets)
    assert [learnt for _, learnt in rows] == ["One.", "Yes."], "each behind what the model would have seen then"


def test_a_template_that_marks_no_answer_is_refused(tmp_path: Path) -> None:
    never = MARKED.replace("m.role == 'assistant'", "m.role == 'model'")
    with pytest.raises(InputError, match=r"marks nothing of the answers by \{% generation %\}: nothing to learn"):
        encoded(tmp_path, {"messages": [ASKS, SAYS]}, never)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"messages": [ASKS, SAYS | {"weight": 0}]}, "has weight 0 at every answer: nothing to learn"),
        ({"messages": [ASKS, SAYS | {"weight": 0.5}]}, r"message 2 has weight 0\.5; 0 \(no loss\) and 1 are taken"),
        ({"messages": [ASKS | {"weight": 1}, SAYS]}, "message 1 has weight 1 and is the user's: answers alone have a loss"),
        ({"messages": [ASKS, {"role": "assistant", "content": None, "weight": 1}]}, "message 2 is the assistant's and says nothing"),
        ({"messages": [ASKS, SAYS], "tools": "[{"}, "its tools are no JSON"),
        ({"messages": [ASKS, SAYS], "tools": {"name": "a"}}, "its tools are no list of JSON objects"),
        ({"messages": [ASKS, SAYS], "chat_template_kwargs": ["a"]}, "its chat_template_kwargs is no JSON object"),
        ({"prompt": [ASKS, SAYS], "completion": [ASKS]}, "no message of the assistant"),
    ],
)
def test_what_a_chat_says_and_can_t_be_done_is_named(row: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why) as error:
        sample_of(json.dumps(row).encode(), "a.jsonl:3")
    assert error.value.value == "a.jsonl:3"


def test_what_nothing_is_done_with_is_named_and_labels_are_not() -> None:
    row = {
        "messages": [ASKS, SAYS | {"loss": False}, CALL],
        "tools": TOOLS,
        "functions": [1],
        "id": 1,
        "source": "x",
        "sample_id": 2,
        "empty": None,
    }
    line = json.dumps(row).encode()
    assert unused(line, FULL) == {"functions", "messages.loss"}
    assert unused(line, TEMPLATE) == {"functions", "messages.loss", "messages.reasoning", "messages.tool_calls", "tools"}
    assert unused(line, None) == {"functions"}
    assert unused(json.dumps({"prompt": "a", "completion": "b", "tools": TOOLS, "system": "c"}).encode(), FULL) == {"tools", "system"}
    assert unused(json.dumps({"prompt": [ASKS], "completion": [SAYS], "chat_template_kwargs": {"x": 1}}).encode(), FULL) == {"x"}


ROWS = [
    {"messages": [ASKS, CALL, {"role": "tool", "content": "3"}, SAYS], "tools": TOOLS},
    {"messages": [ASKS, SAYS | {"reasoning": "step " * 50}]},
    {"messages": [ASKS, SAYS | {"weight": 0}, ASKS, SAYS], "chat_template_kwargs": {"thinks": False}, "functions": [1]},
    {"prompt": "2+2=", "completion": "\u00e4"},
    {"prompt": [ASKS], "completion": [SAYS]},
]


def test_a_token_that_begins_before_an_answer_is_learnt_with_it(tmp_path: Path) -> None:
    """A generation prompt or a prompt that ends in a space, which the tokenizer takes into the answer's first token."""
    folder = write_tokenizer(tmp_path / "tokenizer", TEMPLATE.replace("role }}\n", "role }}: ").replace("assistant\n", "assistant: "), "Y")
    path = tmp_path / "all.jsonl"
    path.write_text("\n".join(map(json.dumps, ({"messages": [ASKS, SAYS]}, {"prompt": "Is it? ", "completion": "Yes."}))))
    tokenizer, specials = load_tokenizer(folder)
    trained = sft.encode(path, tokenizer, specials)
    learnt = [(ids[answer], answer) for ids, answer in (trained.sample(i, 10**6) for i in range(2))]
    assert [tokenizer.decode(ids) for ids, _ in learnt] == [" Yes.<|im_end|>\n", " Yes.<|endoftext|>"]
    assert len(learnt[1][0]) == 5, "the space is of the first token, and none by itself"
    assert [one.learnt(10**6) for one in supervised.counted(str(path), folder).samples] == [int(answer.sum()) for _, answer in learnt]


@pytest.mark.parametrize("template", [FULL, TEMPLATE, FORGETFUL, MARKED])
def test_lengths_and_answers_are_those_that_ranks_encode(template: str, tmp_path: Path) -> None:
    """Before a plan there is no transformers: jinja2 and tokenizers write and count the same."""
    folder, path = write_tokenizer(tmp_path / "tokenizer", template), tmp_path / "all.jsonl"
    rows = ROWS if template is FULL else [row for row in ROWS if CALL not in row.get("messages", ())]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trained = sft.encode(path, *load_tokenizer(folder))
    found = supervised.counted(str(path), folder)
    assert [one.tokens for one in found.samples] == [len(trained.sample(i, 10**6)[0]) for i in range(len(trained))]
    for length in (20, 60, 10**6):
        left = [int(trained.sample(i, length)[1][1:].sum()) for i in range(len(trained))]
        assert [one.learnt(length) for one in found.samples] == left
        assert supervised.lengths([one.tokens for one in found.samples], length, found).dropped == left.count(0)
    assert (found.how, found.unlearnt, found.whole) == ("", 1, len(trained))
    notes = "\n".join(sample_notes(supervised.lengths([one.tokens for one in found.samples], 20, found), 20, packing=True))
    assert "tokens of answers" in notes
    assert "data: 1 answers have weight 0 and no loss." in notes
    assert "nothing is done with functions" in notes


def test_prompts_that_end_inside_a_token_are_counted_and_said(tmp_path: Path) -> None:
    """Trained is the token of a space and its letter; generation from such a prompt begins behind that of the space."""
    folder, path = write_tokenizer(tmp_path / "tokenizer", merge="r"), tmp_path / "pairs.jsonl"
    rows = [("Colour: ", "red"), ("Colour:", " red"), ("Colour: ", "blue"), ("Sky: ", "reddish")]
    path.write_text("".join(json.dumps({"prompt": prompt, "completion": completion}) + "\n" for prompt, completion in rows))
    found = supervised.counted(str(path), folder)
    assert found.merged == 2
    notes = sample_notes(supervised.lengths([one.tokens for one in found.samples], 64, found), 64, packing=False)
    assert any(note.startswith("data: 2 prompts end inside a token that their completion goes on") for note in notes)
    assert supervised.counted(str(path), None).merged == 0, "bytes have no such tokens"


def test_without_a_template_s_tools_all_fields_are_estimated_and_that_is_said(tmp_path: Path) -> None:
    path = tmp_path / "all.jsonl"
    path.write_text(json.dumps({"messages": [ASKS, SAYS | {"reasoning": "step " * 50}], "tools": TOOLS}) + "\n")
    found = supervised.counted(str(path), str(tmp_path))
    words = (json.dumps(TOOLS), "Hi", "Yes." + "step " * 50)
    assert found.samples[0].tokens == sum(-(-len(text) // 4) + 5 for text in words)
    assert found.how.startswith("an estimate, as the tokenizer's own files")
    assert "(an estimate, as" in sample_notes(supervised.lengths([found.samples[0].tokens], 99, found), 99, packing=True)[0]


def test_of_a_large_file_lines_are_drawn_and_the_longest_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "many.jsonl"
    rows = [json.dumps({"prompt": "p" * (1 + at % 10), "completion": "c"}) for at in range(3 * supervised.FIRST)]
    rows[-7] = json.dumps({"prompt": "p" * 500, "completion": "c"})
    path.write_text("\n".join(rows))
    found = supervised.counted(str(path), None)
    assert (len(found.samples), found.longest, found.whole) == (supervised.FIRST, 502, 3 * supervised.FIRST)
    assert found.how == "of 2,000 of 6,000 lines, drawn, and the 64 longest"
    known = supervised.lengths([one.tokens for one in found.samples], 64, found)
    assert (known.samples, known.longest) == (6_000, 502)
    assert known.mean == pytest.approx(7.5, abs=0.3)
    assert known.sequences[0] == pytest.approx(6_000 * 7.5 / 64, rel=0.05)


def test_samples_of_a_sequence_are_those_of_the_packing(tmp_path: Path) -> None:
    found = supervised.lengths([35] * 40, 64)
    assert (found.share(64), found.epoch(packing=True), found.epoch(packing=False)) == (1.0, 40, 40)
    assert "1.0 samples share a sequence of 64" in "\n".join(sample_notes(found, 64, packing=True))
    assert supervised.lengths([32] * 40, 64).share(64) == 2.0
