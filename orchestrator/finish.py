"""What `job.sbatch` calls at its end, where no launcher of ours is watching: writes `status.json` of the run folder.

    python -m orchestrator.finish FOLDER LOG EXIT_STATUS STARTED
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from orchestrator.launch.local import Outcome, Row, describe_failure, now, write_status
from orchestrator.report.measured import measured_step_time

SIGNALLED = {130: "ended by SIGINT", 143: "ended by SIGTERM: cancelled, or out of time"}
"""Exit statuses of a batch script that a signal ended: 128 + number."""


def _json_lines(path: Path) -> list[Row]:
    rows = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # the last line of a run that was cut off
        if isinstance(row, dict):
            rows.append(row)
    return rows


def _predicted(path: Path) -> float | None:
    """Seconds of a step as plan.json has them; read as plain JSON, so that a plan of another version still gets its status."""
    try:
        plan: Any = json.loads(path.read_text())
        return float(plan["predicted"]["step_time_s"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def finish(out: Path, log: Path, exit_status: int, started: str) -> Outcome:
    """Write status.json from the logs and metrics; returns how the run ended."""
    rows = tuple(_json_lines(out / "metrics.jsonl"))
    said: str | None = None
    where, rank = log, None
    how: Literal["finished", "failed", "interrupted"] = "finished"
    if exit_status in SIGNALLED:
        how, said = "interrupted", SIGNALLED[exit_status]
    elif exit_status:
        how = "failed"
        exit_status, said, where, rank = describe_failure(out, log, exit_status)
    outcome = Outcome(
        status=how, exit_status=exit_status, started=started, ended=now(), last_line=said, log=str(where), rank=rank, rows=rows
    )
    write_status(out, outcome, predicted_step_time_s=_predicted(out / "plan.json"), measured_step_time_s=measured_step_time(rows))
    return outcome


def main(words: Sequence[str]) -> int:
    """Returns 2 for a call that is not ours."""
    if len(words) != 4 or not words[2].isdecimal():
        print("usage: python -m orchestrator.finish FOLDER LOG EXIT_STATUS STARTED", file=sys.stderr)
        return 2
    out = Path(words[0])
    outcome = finish(out, out / words[1], int(words[2]), words[3])
    print(f"{outcome.status}: {outcome.last_line or f'{len(outcome.rows)} steps'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
