"""tests/benchmarks/first_gpu.py starts, goes on where it was and refuses what it does not know, tried on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.calibrate.runs import load
from orchestrator.errors import InputError

FILE = Path(__file__).parent.parent / "benchmarks" / "first_gpu.py"


def first_gpu(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(FILE), *words], capture_output=True, text=True, check=False)


@pytest.mark.engines
def test_it_measures_and_goes_on_where_it_was(tmp_path: Path) -> None:
    words = ("device=cpu", f"out={tmp_path}", "only=kernels,dense_bf16_32_2")
    begun = first_gpu(*words)
    assert begun.returncode == 0, begun.stdout + begun.stderr
    found = json.loads((tmp_path / "first_gpu.json").read_text())
    assert all(row["seconds"] > 0 for row in found["kernels"]["kernels"]["rows"] if "seconds" in row)
    (run,) = load(tmp_path / "first_gpu.json")
    assert run.time_s > 0
    again = first_gpu(*words)
    assert "measured" not in again.stdout
    assert again.returncode == 0


@pytest.mark.parametrize(
    ("word", "said"), [("device=tpu", "device=tpu"), ("only=nothing", "only=nothing"), ("minutes=soon", "minutes=soon"), ("mins=1", "mins")]
)
def test_what_it_does_not_know_is_refused(word: str, said: str, tmp_path: Path) -> None:
    ended = first_gpu(f"out={tmp_path}", *([] if word.startswith("device") else ["device=cpu"]), word)
    assert ended.returncode == InputError("a", "b", "c").status
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
