"""What job.sbatch's end makes of a run: its status, and whether Slurm is asked to start it again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from orchestrator.finish import finish, main
from orchestrator.launch import slurm
from orchestrator.launch.slurm import why_ended

LOG = Path("slurm-7.log")


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of 10 steps that has done 6 and saved 4; rank 1 says why it ended."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    (tmp_path / "logs").mkdir()
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "plan.json").write_text(json.dumps({"training": {"steps": 10}, "predicted": {"step_time_s": 0.5}}))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": step, "loss": 1 / step}) + "\n" for step in range(1, 7)))
    (tmp_path / "checkpoints" / "latest.json").write_text('{"step": 4}')
    (tmp_path / "logs" / "rank-1.log").write_text("=== rank 1 on n0, now ===\nOSError: disk\n")
    (tmp_path / LOG).write_text("job 7 on n0 n1, rendezvous at x:1, one task of srun a rank, restart 0 of 1\n")
    return tmp_path


def failed(out: Path, line: str) -> None:
    with (out / LOG).open("a") as file:
        file.write(f"srun: error: n0: task 1: {line}\n")


def test_a_run_that_saved_and_left_before_its_end_is_stopped_and_goes_on_where_it_may(out: Path) -> None:
    outcome = finish(out, out / LOG, 0, "then")
    assert (outcome.status, outcome.exit_status, outcome.last_line) == ("stopped", 75, "stopped as asked, saved after step 4 of 10")
    assert finish(out, out / LOG, 0, "then", 0, 1).status == "requeued"
    assert finish(out, out / LOG, 0, "then", 1, 1).status == "stopped", "no restart is left"
    written = json.loads((out / "status.json").read_text())
    assert (written["restarts"], written["steps"], written["predicted_step_time_s"]) == (1, 6, 0.5)


def test_a_whole_run_is_finished(out: Path) -> None:
    (out / "checkpoints" / "latest.json").write_text('{"step": 10}')
    assert finish(out, out / LOG, 0, "then", 0, 1).status == "finished"


@pytest.mark.parametrize(
    ("line", "code", "again"), [("Killed", 137, True), ("Exited with exit code 137", 137, True), ("Exited with exit code 1", 1, True),
                                ("Exited with exit code 3", 3, False), ("Exited with exit code 4", 4, False),
                                ("Exited with exit code 5", 5, True)]
)  # fmt: skip
def test_what_would_happen_again_is_not_tried_again(out: Path, line: str, code: int, again: bool) -> None:
    """3: a loss that is no number; 4: nodes that are not as planned."""
    failed(out, line)
    outcome = finish(out, out / LOG, 1, "then", 0, 1)
    assert (outcome.status, outcome.exit_status) == (("requeued", 75) if again else ("failed", code))
    assert (outcome.rank, outcome.host) == (1, "n0")
    said = "ended by SIGKILL (out of memory, or killed by someone)" if code == 137 else "OSError: disk"
    assert outcome.last_line == said


SAVING = "step 6: the checkpoint can't be written: {}; the newest whole checkpoint is checkpoints/step_000004"
TORCH = SAVING.format("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")


@pytest.mark.parametrize(
    ("other", "partial", "cause"),
    [
        (SAVING.format("[Errno 28] No space left on device"), 100, 0),  # of two ranks that fail one says why
        (TORCH, 10, None),  # neither does, and a whole checkpoint is larger than what the disk holds
        (TORCH, 100, ""),  # there is room for the rest: the restart may help
    ],
)
def test_a_full_disk_is_said_and_not_tried_again(
    out: Path, monkeypatch: pytest.MonkeyPatch, other: str, partial: int, cause: int | str | None
) -> None:
    for name, size in (("step_000004", 1 << 20), ("step_000006", partial * (1 << 20) // 100)):
        (out / "checkpoints" / name).mkdir()
        (out / "checkpoints" / name / "0.distcp").write_bytes(bytes(size))
    (out / "checkpoints" / "step_000004" / "latest.json").write_text('{"step": 4}')
    for rank, said in enumerate((other, TORCH)):
        (out / "logs" / f"rank-{rank}.log").write_text(f"=== rank {rank} on n0, now ===\nCheckpointError: {said}\n")
    disk = shutil.disk_usage(out)._replace(free=1 << 19)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: disk)
    failed(out, "Exited with exit code 5")
    outcome = finish(out, out / LOG, 1, "then", 0, 1)
    if cause == "":
        assert outcome.status == "requeued"
        return
    assert (outcome.status, outcome.exit_status, outcome.rank) == ("failed", 5, 1 if cause is None else cause)
    assert str(outcome.last_line).startswith("the disk is full")
    assert "the newest whole checkpoint is checkpoints/step_000004" in str(outcome.last_line)


@pytest.mark.parametrize(
    ("shown", "status", "said"),
    [
        ("JobState=COMPLETING Reason=TimeLimit ", "requeued", "Slurm: the time limit was reached"),
        ("JobState=COMPLETING Reason=None ", "interrupted", "Slurm: cancelled"),
        ("JobState=CANCELLED Reason=None ", "interrupted", "Slurm: cancelled"),
        ("JobState=COMPLETING Reason=NodeDown FailedNode=n1 ", "requeued", "Slurm: a node failed: n1"),
        ("JobState=OUT_OF_MEMORY Reason=OutOfMemory ", "requeued", "Slurm: out of host memory"),
        ("", "interrupted", "ended by SIGTERM: cancelled, or out of time"),
    ],
)
def test_slurm_is_asked_why_it_ended_the_job(out: Path, monkeypatch: pytest.MonkeyPatch, shown: str, status: str, said: str) -> None:
    """scontrol is a program that says this; the real one is asked in test_slurm_training.py."""
    (out / "bin").mkdir()
    for name, text in (("scontrol", shown), ("sinfo", "")):
        (out / "bin" / name).write_text(f"#!/bin/sh\necho '{text}'\n")
        (out / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{out / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    outcome = finish(out, out / LOG, 143, "then", 0, 1, "slurm")
    assert (outcome.status, outcome.last_line) == (status, said)
    saved = finish(out, out / LOG, 0, "then", 0, 1)  # asked to, by the TERM that ends them
    assert saved.status == ("interrupted" if said == "Slurm: cancelled" else "requeued")
    assert saved.last_line == (f"{said}, " if said == "Slurm: cancelled" else "") + "stopped as asked, saved after step 4 of 10"


def test_a_node_that_slurm_can_not_reach_is_named(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (out / "bin").mkdir()
    for name, text in (("scontrol", "JobState=RUNNING NodeList=n[0-1] "), ("sinfo", "n0 allocated\nn1 down*")):
        (out / "bin" / name).write_text(f"#!/bin/sh\necho '{text}'\n")
        (out / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{out / 'bin'}:/usr/bin:/bin")
    assert why_ended("7") == ("NODE_FAIL", "Slurm: a node failed: n1")
    assert slurm.REASONS["NODE_FAIL"] == "Slurm: a node failed"


def test_the_command_says_by_its_status_whether_to_go_on(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(out), LOG.name, "0", "then", "0", "1", "ranks"]) == 75
    assert capsys.readouterr().out == "requeued: stopped as asked, saved after step 4 of 10\n"
    failed(out, "Exited with exit code 3")
    assert main([str(out), LOG.name, "1", "then", "0", "1", "ranks"]) == 0
    assert main([str(out), LOG.name, "x", "then"]) == 2
