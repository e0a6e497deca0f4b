"""Whether ranks that ended well did so before the last step, as a warning of the time limit asks them to."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from orchestrator.launch.local import Outcome
from orchestrator.launch.render import TRY_AGAIN


def in_plan(path: Path, group: str, name: str) -> float | None:
    """A number of plan.json; read as plain JSON, so that a plan of another version still gets its status."""
    try:
        plan: Any = json.loads(path.read_text())
        return float(plan[group][name])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def saved_step(out: Path) -> int | None:
    """Steps done in the newest whole checkpoint of the folder, our worker's or Megatron-LM's."""
    with contextlib.suppress(OSError, ValueError):
        return int((out / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    try:
        return int(json.loads((out / "checkpoints" / "latest.json").read_text())["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def stopped(out: Path, outcome: Outcome) -> Outcome:
    """The outcome of ranks that ended well: "stopped" where they saved before the plan's last step, as SIGUSR1 asks them to; "finished"
    where they were asked to after it."""
    steps, done, rows = in_plan(out / "plan.json", "training", "steps"), saved_step(out), outcome.rows
    if outcome.status not in ("finished", "stopped") or steps is None:
        return outcome
    if rows and rows[-1].get("step", steps) >= steps:
        return replace(outcome, status="finished", exit_status=0, last_line=None)
    if done is None or done >= steps or not rows:
        return outcome
    return replace(outcome, status="stopped", exit_status=TRY_AGAIN, last_line=f"stopped as asked, saved after step {done} of {int(steps)}")
