"""What `job.sbatch` calls at its end, where no launcher of ours is watching: writes `status.json` of the run folder.

python -m orchestrator.finish FOLDER LOG EXIT_STATUS STARTED [RESTARTS ALLOWED CAUSE]
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from orchestrator.commands import command_of
from orchestrator.errors import InputError
from orchestrator.health import rising
from orchestrator.launch import program_metrics
from orchestrator.launch.local import DISK_FULL, Outcome, Row, by_step, describe_failure, hang, now, of_full_disk, write_status
from orchestrator.launch.render import SAME_AGAIN, TRY_AGAIN
from orchestrator.launch.slurm import ENDED_FROM_OUTSIDE, REASONS, why_ended
from orchestrator.launch.stopped import in_plan, stopped
from orchestrator.report.measured import measured_step_time

SIGNALLED = "ended by SIGTERM: cancelled, or out of time"
"""The reason that is given where Slurm ended the job and can't say why."""


def _ended(out: Path, log: Path, exit_status: int, rows: Sequence[Row], cause: str) -> Outcome:
    """How the ranks ended, by exit status, logs, metrics and Slurm's own word."""
    outcome = Outcome(status="finished", exit_status=exit_status, started="", ended=now(), log=str(log), rows=tuple(rows))
    job = os.environ.get("SLURM_JOB_ID")
    if exit_status == 0:
        ended = stopped(out, outcome)
        if ended.status == "stopped" and job and (known := why_ended(job)) is not None and known[0] == "CANCELLED":
            return replace(ended, status="interrupted", last_line=f"{known[1]}, {ended.last_line}")
        return ended
    known = why_ended(job) if job and (cause == "slurm" or hang(out) is None) else None
    if known is not None:
        name, said = known
        how: Literal["failed", "interrupted"] = "interrupted" if name in ENDED_FROM_OUTSIDE else "failed"
        return replace(outcome, status=how, last_line=said)
    if cause == "slurm":
        return replace(outcome, status="interrupted", last_line=SIGNALLED)
    return of_full_disk(out, describe_failure(out, log, exit_status)).ending(outcome)


def _worth_a_restart(outcome: Outcome) -> bool:
    """Whether to go on from the newest checkpoint may help. Not after scancel."""
    if outcome.status == "interrupted":
        return outcome.last_line in (REASONS["TIMEOUT"], REASONS["PREEMPTED"])
    same = outcome.exit_status in SAME_AGAIN or str(outcome.last_line).startswith(DISK_FULL)
    return outcome.status == "stopped" or (outcome.status == "failed" and not same)


def finish(out: Path, log: Path, exit_status: int, started: str, restarts: int = 0, allowed: int = 0, cause: str = "ranks") -> Outcome:
    """Write status.json from the logs and metrics; returns how the run ended: "requeued" where the caller is to requeue the job.
    `restarts` of `allowed` have been used. `cause`: who ended the job first, "ranks" or "slurm"."""
    program_metrics.Follower(out).poll(ended=True)  # the engine's own program prints its metrics
    rows = by_step(program_metrics.rows_of(out / "metrics.jsonl"))
    outcome = replace(_ended(out, log, exit_status, rows, cause), started=started, restarts=restarts)
    if restarts < allowed and _worth_a_restart(outcome):
        outcome = replace(outcome, status="requeued", exit_status=TRY_AGAIN)
    predicted = in_plan(out / "plan.json", "predicted", "step_time_s")
    after = [*filter(None, [rising(rows)])]
    write_status(out, outcome, predicted_step_time_s=predicted, measured_step_time_s=measured_step_time(rows), after=after)
    return outcome


def _run(words: Sequence[str]) -> int:
    if len(words) not in (4, 7) or not all(word.isdecimal() for word in (words[2], *words[4:6])):
        asked = "FOLDER LOG EXIT_STATUS STARTED [RESTARTS ALLOWED CAUSE]"
        raise InputError(asked, " ".join(words) or None, "usage: python -m orchestrator.finish, four words or seven")
    out = Path(words[0])
    if not out.is_dir():
        raise InputError("FOLDER", out, "no such folder")
    restarts, allowed, cause = words[4:] or ("0", "0", "ranks")
    outcome = finish(out, out / words[1], int(words[2]), words[3], int(restarts), int(allowed), cause)
    print(f"{outcome.status}: {outcome.last_line or f'{len(outcome.rows)} steps'}", flush=True)
    return TRY_AGAIN if outcome.status in ("stopped", "requeued") else 0


main = command_of(__doc__, _run)
"""Runs the command. Returns 0; TRY_AGAIN where the job stopped before its end or is to be requeued; 2 for a call that is not ours."""

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
