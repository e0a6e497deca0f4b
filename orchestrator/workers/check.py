"""Preflight alone, which each rank of a program that is not ours runs before it becomes that program (entry.preflight=true):

    python -m orchestrator.workers.check --plan plan.json --out .

Versions of the engine's packages are compared between nodes only: which ones the program wants is its own affair. The ranks meet apart
from where the program's will: in torchrun's store under a prefix, without torchrun at the next port.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from orchestrator.plan import Plan, from_json
from orchestrator.workers import distributed, groups, orphans, preflight


def check(plan: Plan, out: Path, shared: Iterable[str]) -> NoReturn:
    """Checks every rank, and ends the process. `shared`: the distributions that are compared. Raises PreflightError."""

    def before(store: dist.Store, rank: int, world: int) -> None:
        places = preflight.check_nodes(plan, out, store, rank, world, shared=shared)
        if rank == 0:
            print(places, flush=True)

    job = distributed.join(plan, before, apart=True)
    lines = preflight.bandwidth_report(plan, preflight.check_groups(groups.of_plan(plan).several(), job.device))
    if job.rank == 0:
        print("".join(f"preflight: {line}\n" for line in lines), end="", flush=True)
    job.leave()


def engine_packages(folder: Path) -> list[str]:
    """The distributions that the plan's engine counts on; none without an engine.json there: no worker of ours can run the plan."""
    path = folder / "engine.json"
    return list(json.loads(path.read_text()).get("requires", {})) if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description="Preflight of one rank, for a program of another's.")
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    distributed.quiet()
    distributed.end_at_once_on_signals()
    orphans.end_with_launcher()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    plan = from_json(arguments.plan.read_bytes(), str(arguments.plan))
    try:
        check(plan, arguments.out, engine_packages(arguments.plan.parent))
    except preflight.PreflightError as error:
        print(f"PreflightError: {error}", file=sys.stderr, flush=True)
        distributed.leave(preflight.MISMATCH_STATUS)


if __name__ == "__main__":
    main()
