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
import time
from collections.abc import Iterable
from pathlib import Path

import torch.distributed as dist

from orchestrator.plan import Plan, from_json
from orchestrator.workers import distributed, groups, orphans, preflight

LEAVE_S = 10.0
"""What the others get to leave before the process that holds the store does."""


def check(plan: Plan, out: Path, shared: Iterable[str]) -> None:
    """Every rank. `shared`: the distributions that are compared. Raises PreflightError."""
    kept: list[dist.Store] = []

    def before(store: dist.Store, rank: int, world: int) -> None:
        places = preflight.check_nodes(plan, out, store, rank, world, shared=shared)
        kept.append(store)
        if rank == 0:
            print(places, flush=True)

    with distributed.joined(plan, before, apart=True) as device:
        lines = preflight.bandwidth_report(plan, preflight.check_groups(groups.of_plan(plan).several(), device))
        rank, world = dist.get_rank(), dist.get_world_size()
        if rank == 0:
            print("".join(f"preflight: {line}\n" for line in lines), end="", flush=True)
        distributed.leave_within()
    kept[0].add("left", 1)
    deadline = time.monotonic() + LEAVE_S
    while rank == 0 and kept[0].add("left", 0) < world and time.monotonic() < deadline:
        time.sleep(0.05)


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
    distributed.leave(0)


if __name__ == "__main__":
    main()
