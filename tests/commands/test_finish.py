"""status.json of a run that nobody of ours supervised."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.finish import main


def folder(out: Path) -> None:
    (out / "logs").mkdir()
    (out / "plan.json").write_text('{"predicted": {"step_time_s": 0.5}}')
    rows = "".join(json.dumps({"step": step, "loss": 4.0 - step, "step_time_s": 0.6}) + "\n" for step in (1, 2, 3))
    (out / "metrics.jsonl").write_text(rows + '{"step": 4, "lo')
    (out / "logs" / "rank-9.log").write_text("Traceback (most recent call last):\n  File\nValueError: no\n")
    (out / "slurm-7.log").write_text("srun: x\n  rank      : 9 (local_rank: 1)\n  exitcode  : 3 (pid: 50)\n")


@pytest.mark.parametrize(
    ("code", "status", "error", "rank"),
    [
        (0, "finished", None, None),
        (1, "failed", "ValueError: no", 9),
        (143, "interrupted", "ended by SIGTERM: cancelled, or out of time", None),
    ],
)
def test_the_folder_says_what_happened(tmp_path: Path, code: int, status: str, error: str | None, rank: int | None) -> None:
    folder(tmp_path)
    more = ["0", "0", "slurm"] if status == "interrupted" else []
    assert main([str(tmp_path), "slurm-7.log", str(code), "2026-01-01T00:00:00+00:00", *more]) == 0
    written = json.loads((tmp_path / "status.json").read_text())
    assert (written["status"], written["error"], written["failed_rank"]) == (status, error, rank)
    assert written["exit_status"] == {0: 0, 1: 3, 143: 143}[code], "a failed rank's own status, not torchrun's"
    assert (written["steps"], written["last_loss"], written["started"]) == (3, 1.0, "2026-01-01T00:00:00+00:00")
    assert (written["predicted_step_time_s"], written["measured_step_time_s"]) == (0.5, 0.6)


def test_a_risen_loss_is_in_the_status(tmp_path: Path) -> None:
    folder(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": step, "loss": 2.0 * step}) + "\n" for step in range(1, 41)))
    assert main([str(tmp_path), "slurm-7.log", "0", "t"]) == 0
    (said,) = json.loads((tmp_path / "status.json").read_text())["after"]
    assert said.startswith("the loss is 71 in the last 10 steps, and was 4")


def test_an_empty_folder_gets_a_status_too(tmp_path: Path) -> None:
    assert main([str(tmp_path), "slurm-7.log", "1", "t"]) == 0
    written = json.loads((tmp_path / "status.json").read_text())
    assert (written["status"], written["exit_status"], written["error"]) == ("failed", 1, "launch.sh ended with status 1")
    assert written["predicted_step_time_s"] is None
    assert main(["x"]) == 2
    assert main([str(tmp_path / "nowhere"), "slurm-7.log", "1", "t"]) == 2
