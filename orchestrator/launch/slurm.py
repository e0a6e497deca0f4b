"""Slurm: hand in `job.sbatch`, or run it inside the allocation that this process is in."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from orchestrator.errors import LaunchError
from orchestrator.job import Job
from orchestrator.launch.local import GRACE_S, POLL_S, Metrics, Outcome, Row, _caught, _log, _now, _tail, last_line

SBATCH_S = 60.0
"""sbatch answers in well under a second; a controller that is busy may take Slurm's own message timeout (10 s) a few times."""


def submit(out: Path) -> str:
    """Have Slurm check the script, hand it in, and say how to watch and cancel it. Raises LaunchError with Slurm's own message."""
    _sbatch(out, "--test-only", "job.sbatch")
    job_id = _sbatch(out, "--parsable", "job.sbatch").split(";")[0]
    folder = shlex.quote(str(out))
    return f"Submitted as job {job_id}. Watch: squeue -j {job_id}; tail -F {folder}/slurm-{job_id}.log. Cancel: scancel {job_id}"


def _sbatch(out: Path, *arguments: str) -> str:
    """Its output. Raises LaunchError."""
    program = shutil.which("sbatch")
    if program is None:
        raise LaunchError("launch=slurm: there is no sbatch on the PATH")
    try:
        done = subprocess.run([program, *arguments], cwd=out, capture_output=True, text=True, timeout=SBATCH_S, check=False)
    except subprocess.TimeoutExpired:
        raise LaunchError(f"launch=slurm: sbatch did not answer within {SBATCH_S:.0f} s") from None
    if done.returncode:
        said = last_line(done.stderr or done.stdout) or f"status {done.returncode}"
        raise LaunchError(f"launch=slurm: sbatch refuses {out / 'job.sbatch'}: {said}")
    return done.stdout.strip()


def start_in_allocation(job: Job, out: Path, *, on_step: Callable[[Row], None] = lambda row: None, grace_s: float = GRACE_S) -> Outcome:
    """Run `job.sbatch` as a program: its srun starts the ranks on the nodes of this allocation. Ctrl-C and SIGTERM end them (srun
    passes SIGTERM on; SIGKILL after `grace_s`). `on_step` gets each new row of metrics.jsonl. Raises LaunchError."""
    out = out.resolve()
    for program in ("bash", "srun", "scontrol"):
        if shutil.which(program) is None:
            raise LaunchError(f"inside a Slurm allocation, but there is no {program} on the PATH")
    (out / "logs").mkdir(exist_ok=True)
    launch_log = out / "logs" / "launch.log"
    metrics = Metrics(out / "metrics.jsonl")
    rows: list[Row] = []
    signals: list[int] = []
    started = _now()

    def follow() -> None:
        for row in metrics.new_rows():
            rows.append(row)
            on_step(row)

    with launch_log.open("wb") as log, _caught(signals):
        process = subprocess.Popen(
            ["bash", "job.sbatch"], cwd=out, env=_environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        deadline = float("inf")
        while process.poll() is None:
            follow()
            if signals and deadline == float("inf"):
                process.terminate()
                deadline = time.monotonic() + grace_s
            if time.monotonic() > deadline:
                process.kill()
            time.sleep(POLL_S)
    follow()
    returncode = process.returncode
    fields: dict[str, Any] = {"started": started, "ended": _now(), "rows": tuple(rows)}
    if signals:
        return Outcome(status="interrupted", exit_status=128 + signals[0], last_line="ended by a signal", log=str(launch_log), **fields)
    if returncode == 0:
        return Outcome(status="finished", exit_status=0, log=str(_log(out, 0)), **fields)
    status = 128 - returncode if returncode < 0 else returncode
    return Outcome(status="failed", exit_status=status, last_line=last_line(_tail(launch_log)), log=str(launch_log), **fields)


def _environment() -> dict[str, str]:
    """This process's; salloc's shell lacks the count of cores that job.sbatch gives srun, and has it in another form ("64(x2)")."""
    cores = re.match(r"\d+", os.environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
    return ({"SLURM_CPUS_ON_NODE": cores.group()} if cores else {}) | os.environ
