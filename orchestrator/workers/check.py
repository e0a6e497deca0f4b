"""Preflight alone, which each rank of a program that is not ours runs before it becomes that program (entry.preflight=true):

    python -m orchestrator.workers.check --plan plan.json --out .

Versions of the engine's packages are compared between nodes only: which ones the program wants is its own affair. The ranks meet apart
from where the program's will: in torchrun's store under a prefix, without torchrun at the next port.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch

from orchestrator.plan import Plan
from orchestrator.workers import groups, runs


def look(plan: Plan, engine: dict[str, Any], device: torch.device, watchdog: Any) -> None:
    """Looks at the groups that the plan has. Raises PreflightError."""
    runs.look_at_groups(plan, groups.of_plan(plan), device, watchdog)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Preflight of one rank, for a program of another's.")
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    runs.as_rank(look, arguments.plan.parent, arguments.out, of_another=True)
