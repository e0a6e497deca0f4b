"""A run that is killed at random moments, in steps and in saves, loses nothing that was saved and ends where an undisturbed one does."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engines, pytest.mark.full]

KILLS = int(os.environ.get("KILLS", "50"))
STEPS = 6 * KILLS
RUN = (sys.executable, "-m", "orchestrator.run")
RECIPE = ("recipe=gpt_tiny", "gpus=2", "model.num_layers=2", "train.global_batch_size=4", "train.seq_length=32", f"train.steps={STEPS}")
KEEP = ("train.save_every=1", "train.keep_last=2")


def losses(out: Path) -> dict[int, float]:
    lines = (out / "metrics.jsonl").read_text().splitlines() if (out / "metrics.jsonl").exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return {row["step"]: row["loss"] for row in rows}


def saved(out: Path) -> int:
    marker = out / "checkpoints" / "latest.json"
    return json.loads(marker.read_text())["step"] if marker.exists() else 0


def test_random_kills_lose_nothing_that_was_saved(tmp_path: Path) -> None:
    """KILLS times SIGKILL to all processes of a run; the next run continues the newest checkpoint. No step older than it is taken twice,
    the checkpoint that latest.json names is whole each time, and all losses equal those of a run that nobody disturbed."""
    subprocess.run([*RUN, *RECIPE, f"out={tmp_path / 'whole'}"], check=True, capture_output=True, timeout=1200)
    reference = losses(tmp_path / "whole")
    assert len(reference) == STEPS
    moments = random.Random(17)
    seen: dict[int, float] = {}
    previous: Path | None = None
    kills = done = 0
    while done < STEPS:
        out = tmp_path / f"run{kills}"
        source = RECIPE if previous is None else (f"resume={previous}",)
        with (tmp_path / f"run{kills}.log").open("w") as log:
            process = subprocess.Popen([*RUN, *source, *KEEP, f"out={out}"], stdout=log, stderr=log, start_new_session=True)
            try:
                _wait(lambda out=out, process=process: process.poll() is not None or len(losses(out)) > 1, 180)
                if kills < KILLS:
                    time.sleep(moments.uniform(0, 1.5))
                    _kill(process.pid)
                process.wait(timeout=600)
            finally:
                _kill(process.pid)
        assert losses(out), (tmp_path / f"run{kills}.log").read_text()[-2000:]
        for step, loss in losses(out).items():
            assert step > done, "a step that was saved is taken again"
            seen[step] = loss
        assert saved(out) >= done
        if saved(out):
            previous, done = out, saved(out)
        kills += 1
    assert {step: seen[step] for step in reference} == pytest.approx(reference, abs=1e-4)


def _wait(ready: object, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not ready():  # type: ignore[operator]
        time.sleep(0.05)


def _kill(leader: int) -> None:
    """SIGKILL to the session of this process: the command, its launcher and ranks."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.getsid(int(entry.name)) == leader:
                    os.kill(int(entry.name), signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
