"""A run that is killed at random moments, in steps and in saves, or finds its disk full, loses nothing that was saved and ends where an
undisturbed one does."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engines, pytest.mark.full]

KILLS = int(os.environ.get("KILLS", "50"))
STEPS = 10 * KILLS
RUN = (sys.executable, "-m", "orchestrator.run")
RECIPE = ("recipe=gpt_tiny", "gpus=2", "model.num_layers=2", "train.global_batch_size=4", "train.seq_length=32", f"train.steps={STEPS}")
KEEP = ("train.save_every=1", "train.keep_last=2")
ENDINGS = ("step", "save", "step", "save", "disk")
"""In turn: killed at a random moment, killed while a checkpoint is written, no file can grow beyond FULL bytes."""
FULL = 16 * 1024
"""More than metrics and logs of a few steps, less than a checkpoint's file of weights."""


def losses(out: Path) -> dict[int, float]:
    lines = (out / "metrics.jsonl").read_text().splitlines() if (out / "metrics.jsonl").exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return {row["step"]: row["loss"] for row in rows}


def saved(out: Path) -> int:
    marker = out / "checkpoints" / "latest.json"
    return json.loads(marker.read_text())["step"] if marker.exists() else 0


def writing(out: Path) -> bool:
    """Whether a checkpoint is begun and not whole."""
    return any(not (folder / "latest.json").exists() for folder in (out / "checkpoints").glob("step_*"))


@pytest.mark.parametrize("saving", ["waiting", "beside"])
@pytest.mark.parametrize("engine", ["megatron", "deepspeed"])
def test_random_kills_lose_nothing_that_was_saved(engine: str, saving: str, tmp_path: Path) -> None:
    """KILLS times an end from outside, by ENDINGS; the next run continues the newest checkpoint. No step older than it is taken twice, the
    checkpoint that latest.json names is whole each time, a full disk is said in words, and all losses equal those of a run that nobody
    disturbed. Saving: the training waits for it, or goes on beside it."""
    recipe = (*RECIPE, f"engine={engine}", *(("pin.zero_stage=1",) if engine == "deepspeed" else ()))
    keep = (*KEEP, f"train.async_save={'true' if saving == 'beside' else 'false'}")
    subprocess.run([*RUN, *recipe, f"out={tmp_path / 'whole'}"], check=True, capture_output=True, timeout=1200)
    reference = losses(tmp_path / "whole")
    assert len(reference) == STEPS
    moments = random.Random(17)
    seen: dict[int, float] = {}
    previous: Path | None = None
    kills = done = 0
    in_saves = 0
    while done < STEPS:
        out = tmp_path / f"run{kills}"
        source = recipe if previous is None else (f"resume={previous}",)
        path = tmp_path / f"run{kills}.log"
        with path.open("w") as log:
            process = subprocess.Popen([*RUN, *source, *keep, f"out={out}"], stdout=log, stderr=log)
            try:
                _wait(lambda out=out, process=process: process.poll() is not None or len(losses(out)) > 1, 180)
                ending = ENDINGS[kills % len(ENDINGS)] if kills < KILLS else None
                if ending is not None:
                    time.sleep(moments.uniform(0, 1.5))
                if ending == "save":
                    _wait(lambda out=out, process=process: process.poll() is not None or writing(out), 60, every=0.002)
                    time.sleep(moments.uniform(0, 0.03))
                if ending == "disk":
                    for member in _processes(process.pid, out):
                        with contextlib.suppress(ProcessLookupError):
                            resource.prlimit(member, resource.RLIMIT_FSIZE, (FULL, FULL))
                elif ending is not None:
                    _kill(process.pid, out)
                process.wait(timeout=600)
            finally:
                _kill(process.pid, out)
        in_saves += writing(out)
        assert losses(out), path.read_text()[-2000:]
        if ending == "disk" and saved(out) < STEPS:
            assert "the checkpoint can't be written" in path.read_text()
            assert "the newest whole checkpoint is" in path.read_text()
        for step, loss in losses(out).items():
            assert step > done, "a step that was saved is taken again"
            seen[step] = loss
        assert saved(out) >= done
        if saved(out):
            previous, done = out, saved(out)
        kills += 1
    print(f"{engine}: {min(kills, KILLS)} ends from outside, {in_saves} with a checkpoint half written, {STEPS} steps")
    assert in_saves or len(ENDINGS) > KILLS
    assert {step: seen[step] for step in reference} == pytest.approx(reference, abs=1e-4)


def _wait(ready: object, seconds: float, every: float = 0.05) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not ready():  # type: ignore[operator]
        time.sleep(every)


def _processes(leader: int, out: Path) -> list[int]:
    """The command, and what works in its run's folder: launcher and ranks, which have sessions of their own."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (int(entry.name) == leader or (entry / "cwd").readlink() == out):
                found.append(int(entry.name))
    return found


def _kill(leader: int, out: Path) -> None:
    """SIGKILL to all of them, the ranks with their launcher."""
    while alive := [member for member in _processes(leader, out) if member != leader or not _zombie(member)]:
        for member in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member, signal.SIGKILL)
        time.sleep(0.01)


def _zombie(process: int) -> bool:
    return "State:\tZ" in Path(f"/proc/{process}/status").read_text()
