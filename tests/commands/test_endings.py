"""How every command ends."""

from __future__ import annotations

import errno
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from orchestrator.commands import DEBUG, INTERRUPTED, UNEXPECTED, command
from orchestrator.errors import InputError, LaunchError

BENCHMARKS = sorted(path for path in (Path(__file__).parents[1] / "benchmarks").glob("*.py") if "__main__" in path.read_text())
MODULES = ("run", "data", "finish", "calibrate", "profile")


def raising(error: BaseException) -> int:
    def body(words: Sequence[str]) -> None:
        raise error

    return command([], lambda: "", body)


def test_an_error_of_the_users_is_one_message_and_its_own_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert raising(InputError("runs", "x", "no such file")) == 2
    assert raising(LaunchError("ended", status=7)) == 7
    assert capsys.readouterr().err == "error: runs=x: no such file\nerror: ended\n"


def test_a_full_disk_is_no_defect_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert raising(OSError(errno.ENOSPC, "No space left on device", "runs/a/plan.json")) == 5
    assert capsys.readouterr().err == "error: nothing more can be written to runs/a/plan.json: No space left on device\n"


def test_ctrl_c_and_defects_have_a_status_of_their_own(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert raising(KeyboardInterrupt()) == INTERRUPTED
    monkeypatch.delenv(DEBUG, raising=False)
    assert raising(ZeroDivisionError("of ours")) == UNEXPECTED
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert "a defect of ours: ZeroDivisionError: of ours" in said
    monkeypatch.setenv(DEBUG, "1")
    raising(ZeroDivisionError("of ours"))
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("module", MODULES)
def test_help_is_answered_in_words(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", f"orchestrator.{module}", "--help"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.split()) > 10


def test_ctrl_c_while_modules_are_imported_is_no_traceback() -> None:
    script = "import sys; from orchestrator.commands import alone\ndef cut(): raise KeyboardInterrupt\nsys.exit(alone(cut))"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (INTERRUPTED, "", "interrupted\n")


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.name)
def test_a_benchmark_answers_help_in_words(path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As a program, but in this process."""
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    monkeypatch.setattr(sys, "path", [str(path.parent), *sys.path])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    said = capsys.readouterr()
    assert (ended.value.code or 0, said.err) == (0, "")
    assert len(said.out.split()) > 10
