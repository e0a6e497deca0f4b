"""What a job with a range of nodes (slurm.nodes=8-16) calls on its first node: the run folder gets a plan for the nodes that there are.

    python -m orchestrator.replan FOLDER NODES LEAST RANKS_PER_NODE

Prints how many of NODES the plan takes, LEAST at least. Where the folder's plan is for NODES already nothing is written.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from orchestrator import detect, recipe
from orchestrator.commands import command_of
from orchestrator.engines import ENGINES
from orchestrator.errors import InputError, NoPlanError
from orchestrator.job import File
from orchestrator.launch import render
from orchestrator.plan import Plan, from_json, to_json
from orchestrator.planning import Found, Planner, on_fewer
from orchestrator.recipe import Settings, resuming
from orchestrator.report.candidates import candidates_csv
from orchestrator.report.text import choice
from orchestrator.units import format_seconds

FORMER: Final = "plans"
"""The folder to which what is replaced goes."""


def _run(words: Sequence[str]) -> int:
    if len(words) != 4 or not all(word.isdecimal() for word in words[1:]):
        asked = "FOLDER NODES LEAST RANKS_PER_NODE"
        raise InputError(asked, " ".join(words) or None, "usage: python -m orchestrator.replan, four words")
    nodes, least, ranks_per_node = map(int, words[1:])
    print(replan(Path(words[0]).resolve(), nodes, least, ranks_per_node))
    return 0


def replan(folder: Path, nodes: int, least: int, ranks_per_node: int) -> int:
    """The number of nodes that the folder's plan now takes. Says on standard error what changed. Raises InputError, NoPlanError."""
    began = time.monotonic()
    former = from_json((folder / "plan.json").read_bytes(), str(folder / "plan.json"))
    if former.world_size == nodes * ranks_per_node:
        return nodes
    before = former
    with contextlib.suppress(InputError):  # no whole checkpoint yet: the run begins anew
        checkpoint = resuming.checkpoint_of(str(folder))
        before = (checkpoint and checkpoint.plan) or former

    def plan_on(gpus: int) -> Found:
        planner = Planner(_settings(folder, former, gpus))
        result = planner.fastest(planner.space())
        refused = ENGINES[former.engine].why_no_resume(before, result.plan)
        if refused is not None:
            raise NoPlanError(f"the checkpoint {refused}")
        return result

    best, why = on_fewer(plan_on, range(nodes * ranks_per_node, (least - 1) * ranks_per_node, -ranks_per_node))
    if best is None:
        raise NoPlanError(f"there is no plan for {nodes} to {least} nodes of {ranks_per_node} ranks: {why}")
    count = best.plan.world_size // ranks_per_node
    settings = _settings(folder, former, best.plan.world_size)
    plan = replace(best.plan, run=former.run)
    _write(folder, settings, replace(best, plan=plan), former)
    changes = resuming.layout_changes(former, plan) or "the same layout"
    took = format_seconds(time.monotonic() - began)
    step = format_seconds(plan.prediction.step_time_s)
    print(f"replan: {count} of {nodes} nodes, {choice(plan)} ({changes}): {step} a step predicted, planned in {took}", file=sys.stderr)
    return count


def _settings(folder: Path, former: Plan, gpus: int) -> Settings:
    """The run's own, on so many GPUs, with the engine that wrote its checkpoints."""
    words = [f"recipe={folder / 'config.yaml'}", "plan=null", f"engine={former.engine}", f"gpus={gpus}"]
    return replace(recipe.load(words, detect.machine(), list(ENGINES)), take=None)


def _write(folder: Path, settings: Settings, found: Found, former: Plan) -> None:
    """The plan's files over the former's, each whole; the former's are kept in a folder of FORMER. The job's script stays: it runs."""
    job = Planner(settings).job(found.plan, Planner(settings).for_program(found))
    files = [
        File(path="plan.json", content=to_json(found.plan)),
        File(path="candidates.csv", content=candidates_csv(found.outcomes, found.plan)),
        *job.files,
        File(path="launch.sh", content=render.launch_sh(job), executable=True),
    ]
    kept = folder / FORMER
    kept.mkdir(exist_ok=True)
    kept = kept / f"{len(list(kept.iterdir()))}-{former.world_size}-ranks"
    for file in sorted(files, key=lambda file: file.path == "plan.json"):  # last: what is cut off before is planned again
        path, partial = folder / file.path, folder / f"{file.path}.partial"
        file.write(partial)
        if path.exists():
            (kept / file.path).parent.mkdir(parents=True, exist_ok=True)
            (kept / file.path).write_bytes(path.read_bytes())
        partial.replace(path)


main = command_of(__doc__, _run)
"""Runs the command. Returns 0; 2 where no number of nodes has a plan, or for a call that is not ours."""

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
