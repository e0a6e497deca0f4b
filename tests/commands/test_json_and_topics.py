"""--json of run and report: the answer alone on standard output. --help TOPIC: a part of the help."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator import recipe, run
from orchestrator.__main__ import main
from orchestrator.pictures import drawable

TINY = ("recipe=gpt_tiny", "gpus=4", "cluster=cpu")


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, Any], str]:
    assert main(words) == 0
    said = capsys.readouterr()
    answer: dict[str, Any] = json.loads(said.out)
    return answer, said.err


def test_a_run_tells_its_plan_and_how_it_was_started(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer, beside = told(capsys, "run", *TINY, "launch=none", "out=here", "--json")
    kept = json.loads((folder / "here" / "plan.json").read_text())
    assert answer["plan"] == kept
    assert answer["step_time_s"] == kept["predicted"]["step_time_s"]
    assert (answer["start"], answer["why_not_started"], answer["exit_status"]) == ("none", "launch=none", 0)
    assert Path(answer["out"]) == folder / "here"
    assert "Not started: launch=none." in beside
    assert "predicted" in beside


def test_the_configuration_is_json_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer, _ = told(capsys, "run", *TINY, "train.lr=0.5", "--cfg", "--json")
    assert answer["config"]["train"]["lr"] == 0.5
    assert "$defs" in told(capsys, "run", "--schema", "--json")[0]


def test_a_command_behind_the_module_of_run_is_that_command() -> None:
    """README: `orchestrator` is short for `python -m orchestrator.run`."""
    words = [sys.executable, "-m", "orchestrator.run", "compare", "--help"]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert "python -m orchestrator compare" in said


def test_a_topic_before_any_command_is_one_of_run(capsys: pytest.CaptureFixture[str]) -> None:
    """README: `--help pin` says one group."""
    assert main(("--help", "pin")) == 0
    said = capsys.readouterr().out
    assert "pin.tp " in said
    assert "model.num_layers" not in said
    assert main(("--help", "pni")) == 2
    assert "did you mean pin?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "key", "value", "choice"),
    [
        (("run", *TINY, "pin.tp=3", "launch=none"), None, None, ""),
        (("plan", *TINY, "engine=tensorflow"), "engine", "tensorflow", "megatron"),
        (("sweep", *TINY, "pin.recompute=some,none"), "pin.recompute", "some", "full"),
        (("compare", "nothing", "none"), "plan", "nothing", ""),
    ],
)
def test_an_error_is_one_object_on_standard_output_with_its_exit_status(
    words: tuple[str, ...], key: str | None, value: str | None, choice: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main((*words, "--json"))
    said = capsys.readouterr()
    answer = json.loads(said.out)
    assert (status, answer["exit_status"]) == (2, 2)
    assert said.err.endswith(f"error: {answer['error']['message']}\n")
    assert (answer["error"].get("key"), answer["error"].get("value")) == (key, value)
    assert choice in "".join(answer["error"].get("choices", ()))
    assert main(words) == 2
    assert capsys.readouterr().out.startswith("{") is False


@pytest.mark.skipif(not drawable(), reason="no bokeh")
def test_a_report_tells_its_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main((*TINY, "launch=none", "out=here")) == 0
    capsys.readouterr()
    answer, _ = told(capsys, "report", "here", "--json")
    assert (folder / answer["page"]).is_file()
    assert (folder / answer["trace"]).is_file()
    assert answer["lacking_bytes"] == 0


@pytest.mark.parametrize("command", ["run", "plan", "sweep", "compare", "audit"])
def test_help_by_topic_has_the_topic_s_keys_and_no_others(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main((command, "--help", "pins")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines} == {name for name in recipe.KEYS if name.startswith("pin.")}


def test_a_key_that_others_stand_below_is_a_topic_with_them() -> None:
    assert {"data", "data.blend", "data.lengths", "data.made_up"} <= {
        line.split()[0] for line in recipe.topic_text(["data"], []).splitlines()
    }


def test_every_key_is_in_one_topic(capsys: pytest.CaptureFixture[str]) -> None:
    groups = ["general", *dict.fromkeys(name.partition(".")[0] for name in recipe.KEYS if "." in name)]
    shown = [line.split()[0] for group in groups for line in recipe.topic_text([group], []).splitlines()]
    assert {name for name in shown if not name.endswith(".NAME")} == {*recipe.KEYS}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["memory.limit_gib"], "memory.limit_gib"),
        (["recipes"], "llama3_8b"),
        (["clusters"], "dgx_h100"),
        (["engines"], "auto"),
        (["compare"], "compare runs/first runs/second"),
        (["pin.tp", "sweep"], "python -m orchestrator sweep"),
        (["data"], "orchestrator.data input=PATH"),
    ],
)
def test_other_topics(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("run", "--help", *words)) == 0
    assert message in capsys.readouterr().out


@pytest.mark.parametrize(("topic", "message"), [("pinz", "did you mean pins"), ("qqq", "choose one of general")])
def test_another_topic_is_one_error(topic: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("plan", "--help", topic)) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("error:") == 1
    assert message.rsplit(maxsplit=1)[-1].rstrip("s") in said.err
