"""task=rl from the command line and from Python."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import orchestrator as so
from orchestrator.__main__ import main

WORDS = ("task=rl", "recipe=qwen3_8b", "gpus=8", "cluster=dgx_h100", "rl.prompts=32", "rl.samples=8", "rl.prompt_length=200")
LENGTHS = ("rl.response_length=800+500", "rl.max_response_length=4096")


def test_the_screen_says_who_has_which_gpus_and_what_the_next_node_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *WORDS, *LENGTHS]) == 0
    said = capsys.readouterr().out
    for word in ("placement: colocated on 8 GPUs", "why: ", "split, ", "generation: ", "sequences at once", "training: megatron ", "step: ",
                 "tokens/s (90%: ", "update ", "the next node: ", "rl.staleness=1"):  # fmt: skip
        assert word in said, word


def test_json_has_the_phases_and_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *WORDS, *LENGTHS, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    found = so.plan_rl(recipe="qwen3_8b", gpus=8, cluster="dgx_h100", rl={
        "prompts": 32, "samples": 8, "prompt_length": 200, "response_length": "800+500", "max_response_length": 4096})  # fmt: skip
    assert answer["seconds"] == found.step_time_s
    assert [phase["name"] for phase in answer["phases"]] == [phase.name for phase in found.step.phases]
    assert answer["plan"]["training"]["packing"] is True
    assert answer["tokens_per_s_90"][0] < answer["tokens_per_s"] < answer["tokens_per_s_90"][1]


def test_lengths_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("sample,length\n" + "\n".join(f"{index},{400 + index}" for index in range(800)))
    found = so.plan_rl(recipe="qwen3_8b", gpus=8, cluster="dgx_h100", rl={
        "prompts": 32, "samples": 8, "prompt_length": 200, "response_length": str(path)})  # fmt: skip
    assert found.step.tokens / 256 == pytest.approx(200 + 800, rel=0.05)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ((*WORDS, "rl.response_length=800", "rl.max_response_length=50000"), "rl.max_response_length=50000: is beyond the 40760 that"),
        ((*WORDS, "rl.response_length=5000", "rl.max_response_length=4096"), "is a mean above rl.max_response_length, 4096"),
        ((*WORDS, *LENGTHS, "rl.updates=257"), "rl.updates=257: is more than the 256 samples of a step"),
        ((*WORDS, "rl.response_length=none.csv"), "rl.response_length=none.csv: is no mean, no mean+deviation, and as a file"),
        (WORDS, "rl.response_length: is missing"),
        ((*WORDS, *LENGTHS, "train.global_batch_size=64"), "train.global_batch_size=64: follows from rl.prompts"),
        ((*WORDS[1:4], "rl.prompts=32"), "rl.prompts=32: is of reinforcement learning: task=rl beside it"),
        ((*WORDS, *LENGTHS, "rl.generation_gpus=4"), "rl.placement=split beside it"),
        ((*WORDS, *LENGTHS, "rl.staleness=1", "rl.placement=colocated"), "rl.staleness=1: needs generation beside training"),
        ((*WORDS, *LENGTHS, "rl.tp=3"), "rl.tp=3: is refused for generation: an engine of 3 does not divide 8 GPUs"),
        ((*WORDS, *LENGTHS, "rl.measured=7ms,9ms,4", "rl.tp=1"), "rl.measured=7ms,9ms,4: is not three numbers"),
        ((*WORDS, *LENGTHS, "rl.measured=7ms,9ms@64,40000"), "rl.measured: is of one engine: say its rl.tp= beside it"),
        ((*WORDS, *LENGTHS, "explain.tp=8"), "explain.tp=8: is not answered beside task=rl"),
        ((*WORDS, *LENGTHS, "largest=seq_length"), "largest=seq_length: is not answered beside task=rl"),
        ((*WORDS[:3], "cluster=cpu", *WORDS[4:], *LENGTHS), "cluster=cpu: has no GPU"),
        ((*WORDS, *LENGTHS, "out=here"), "out=here: is for files of a run"),
    ],
)
def test_what_can_not_be_is_one_error(words: tuple[str, ...], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    said = capsys.readouterr()
    assert error in said.err
    assert said.err.count("\n") == 1
    assert not said.out


def test_no_room_for_one_sequence_is_said_with_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("recipe=llama3_70b", "gpus=1", "cluster=dgx_h100", *WORDS[4:], *LENGTHS, "rl.max_response_length=4096")
    assert main(["plan", "task=rl", *dict.fromkeys(words)]) == 2
    assert "no placement fits llama3_70b on 1 x H100-SXM-80GB" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "sweep", "compare"])
def test_what_starts_or_compares_does_not_know_it(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    several = ("gpus=8",) if command == "run" else ("gpus=8,16",)
    words = [word for word in (*WORDS, *LENGTHS) if not word.startswith("gpus=")]
    assert main([command, *words, *several]) == 2
    assert "task=rl: is planned by python -m orchestrator plan" in capsys.readouterr().err


def test_numbers_of_ones_own_take_the_place_of_constants(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = []
    for measured in ("5ms,10ms@64,40000", "10ms,20ms@64,40000"):
        assert main(["plan", *WORDS, *LENGTHS, "rl.tp=1", f"rl.measured={measured}", "--json"]) == 0
        seconds.append(json.loads(capsys.readouterr().out)["generation"]["seconds"])
    assert seconds[1] > 1.6 * seconds[0]
