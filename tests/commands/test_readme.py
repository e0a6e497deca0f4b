"""What the README shows is what happens: its output is a run's, its recipe loads, and every question in its table has the answer that it
promises, by just the command that stands there."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from orchestrator.__main__ import main

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ANSWERS = {
    "days and dollars?": (r"training: .* days \(90%: .* GPU-hours \(90%: .* cost \d",),
    "16 or 32 GPUs? which cluster?": ("6 of 6 have a plan",),
    "the least GPUs for ten days?": (r"gpus=\d+: the least that reaches the target",),
    "the longest sequence that fits?": (r"train\.seq_length=\d+: the most that fits",),
    "why not tp 1? one node less?": (r"Why not tp=1\?", "With gpus=56: "),
    "will it fit for sure?": (r"risk: 0\.\d+% chance of running out of memory",),
    "how often to save?": (r"failures: .* best is train\.save_every=\d+",),
}
"""What the command of a question says."""
LONG = (
    "the least GPUs for ten days?",
    "the longest sequence that fits?",
    "why not tp 1? one node less?",
)
"""Left to .ci/full: 17 and 13 CPU seconds."""


WITH_FILES = {
    "is my command line any good?": ("1. alone: .*", r"--- train\.sh", "together: "),
    "what is this plan like?": (r"Written: runs/first/report\.html and runs/first/trace\.json",),
    "does it really fit on this GPU?": ("Rehearsal: one rank alone",),
    "which plan is really the fastest here?": (r"tune 1/5: .*tune 5/5: ",),
}
"""What the command of a question says that is asked of the user's own files: a small script, recipe and plan."""
STARTED = ("does it really fit on this GPU?", "which plan is really the fastest here?")
"""Left to .ci/full: they start ranks, for 15 and for 50 CPU seconds."""
SMALL = "recipe: gpt_tiny\ngpus: 1\ntrain: {steps: 4, warmup: 1}\n"


def commands() -> dict[str, list[str]]:
    """The first command of each question."""
    rows = re.findall(r"^\| ([^|]+\?) \| `orchestrator ([^`]+)`", README, re.MULTILINE)
    return {question: shlex.split(words) for question, words in rows}


def test_it_is_read_in_ten_minutes_on_any_screen() -> None:
    assert len(README.split()) <= 1500
    assert [line for line in README.splitlines() if len(line) > 120] == []


def test_every_question_is_asked_here() -> None:
    assert commands().keys() == ANSWERS.keys() | WITH_FILES.keys()


@pytest.mark.parametrize(
    "question",
    [pytest.param(name, marks=[pytest.mark.full, pytest.mark.engines] if name in STARTED else ()) for name in WITH_FILES],
)
def test_a_question_of_the_users_files_is_answered_by_its_command(
    question: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "tests/audit/samples/pretrain_gpt.sh", "train.sh")
    Path("my.yaml").write_text(SMALL)
    words = commands()[question]
    if "runs/first" in words:
        assert main(["recipe=my.yaml", "launch=none", "out=runs/first"]) == 0
    assert main(words) == 0
    said = " ".join(capsys.readouterr().out.split())
    for pattern in WITH_FILES[question]:
        assert re.search(pattern, said), said


@pytest.mark.parametrize("question", [pytest.param(name, marks=pytest.mark.full if name in LONG else ()) for name in ANSWERS])
def test_a_question_of_the_table_is_answered_by_its_command(question: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(commands()[question]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for words in ANSWERS[question]:
        assert re.search(words, said), said


def test_the_output_on_the_first_screen_is_the_commands(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Columns may stand elsewhere; words and figures may not."""
    shown = README.split("    $ python -m orchestrator.run ", 1)[1].split("\n\n", 1)[0].splitlines()
    assert main(["run", *shown[0].split(), "launch=none", f"out={tmp_path / 'run'}"]) == 0
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    for line in shown[1:]:
        if not line.strip().startswith("..."):
            assert line.split() in said, line


def test_the_recipe_that_is_shown_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"\n\n((?:    (?:recipe|train|cluster): .*\n)+)", README)
    path = tmp_path / "my.yaml"
    path.write_text("\n".join(line[4:] for line in block.splitlines()))
    assert main(["plan", f"recipe={path}", "gpus=64"]) == 0
    assert "1T tokens" in capsys.readouterr().out
