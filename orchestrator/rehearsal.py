"""A plan before its start: the fullest and the slowest stage alone on one device, beside what was predicted of them.

Each is one process of `orchestrator.workers.rehearsal`: the engine's own classes, true shapes, a fake process group. Where this machine
has not the plan's GPU, the first, the middle and the last rank are built without memory, and their parameters counted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, Final

from rich.table import Table

from orchestrator.cost.price import CostModel
from orchestrator.errors import LaunchError
from orchestrator.plan import Plan
from orchestrator.report.after import alone_seconds
from orchestrator.report.measured import WARMUP_STEPS
from orchestrator.report.text import _table
from orchestrator.units import format_bytes, format_seconds
from orchestrator.values import Value

FOLDER: Final = "rehearsal"
LIMIT_S: Final = 900.0
"""Seconds that one rehearsed rank may take: it is to save time."""
STEPS: Final = WARMUP_STEPS + 2
"""Steps of a rehearsal, as many as a run takes until its timers look at its peak: the heap of a process on a CPU grows with its steps, as
freed blocks of many sizes leave holes (most in the first steps; engines/translation.py)."""


class Rehearsed(Value, frozen=True, kw_only=True):
    """A stage of which one rank was taken through some micro-batches. Seconds of a micro-batch, forward and backward, without traffic."""

    stage: int
    rank: int
    why: str
    predicted_bytes: float
    measured_bytes: float
    predicted_s: float
    measured_s: float
    update_s: float
    microbatches: int


def stages_to_rehearse(plan: Plan) -> dict[int, str]:
    """The fullest stage and the one whose micro-batch takes longest, each with why. Raises ValueError for a plan without prediction."""
    fullest, slowest = plan.prediction.fullest, plan.prediction.busiest
    if fullest == slowest:
        return {fullest: "fullest and slowest" if plan.pp > 1 else "the only one"}
    return {fullest: "fullest", slowest: "slowest"}


def rank_of(plan: Plan, stage: int) -> int:
    """The first rank of a stage."""
    return stage * plan.candidate.mesh.stride("pp")


def first_middle_last(plan: Plan) -> list[int]:
    """The ranks of the first stage, the middle one and the last one, each once."""
    stages = dict.fromkeys((0, plan.pp // 2, plan.pp - 1))
    return [rank_of(plan, stage) for stage in stages]


def parameters_of(plan: Plan, cost: CostModel, stage: int) -> int:
    """Predicted parameters of a rank of this stage, before ZeRO."""
    cost = cost.of_stage(plan.candidate, stage)
    return sum(span.count * cost.layer(plan.candidate, span.kind, span.recompute).parameters for span in plan.stages[stage].layers)


def worker(out: Path, module: str, ranks: Sequence[int], environment: dict[str, str], *, meta: bool) -> list[dict[str, Any]]:
    """What the rehearsal's process writes. Raises LaunchError with its last words where it ends badly."""
    folder = out / FOLDER
    folder.mkdir(exist_ok=True)
    name = f"rank-{'-'.join(map(str, ranks))}"
    written, log = folder / f"{name}.json", folder / f"{name}.log"
    words = [sys.executable, "-m", "orchestrator.workers.rehearsal", "--plan", str(out / "plan.json"), "--module", module]
    words += ["--out", str(written), "--steps", str(STEPS), *(word for rank in ranks for word in ("--rank", str(rank)))]
    with log.open("w") as stream:
        try:
            done = subprocess.run(
                [*words, *(["--meta"] if meta else [])], stdout=stream, stderr=subprocess.STDOUT, timeout=LIMIT_S, check=False,
                env={**os.environ, **environment}, cwd=out,
            )  # fmt: skip
            status = done.returncode
        except subprocess.TimeoutExpired:
            raise LaunchError(f"rehearse=true: rank {ranks[0]} was not through after {format_seconds(LIMIT_S)}; log: {log}") from None
    if status or not written.is_file():
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        said = lines[-1] if lines else f"it ended with status {status}"
        raise LaunchError(f"rehearse=true: rank {ranks[0]}: {said}; log: {log}; rehearse=false starts without")
    found: list[dict[str, Any]] = json.loads(written.read_text())
    return found


def check_layers(out: Path) -> None:
    """Raises LaunchError where this machine lacks what the plan's layers are made of."""
    te = "transformer_engine"
    file = out / "engine.json"
    made_of = json.loads(file.read_text()).get("module", {}).get("implementation") if file.is_file() else None
    if made_of == te and find_spec(te) is None:
        why = "the plan's layers are Transformer Engine's, which is not installed here: rehearse where the training will run"
        raise LaunchError(f"rehearse=true: {why}, or say cluster.software.{te}=false; rehearse=false writes all without")


def rehearse(plan: Plan, module: str, environment: dict[str, str], cost: CostModel, out: Path) -> list[Rehearsed]:
    """Rehearses each stage of `stages_to_rehearse` for real, on this machine's first device. Raises LaunchError."""
    check_layers(out)
    found = []
    for stage, why in stages_to_rehearse(plan).items():
        (result,) = worker(out, module, [rank_of(plan, stage)], environment, meta=False)
        found.append(
            Rehearsed(
                stage=stage,
                rank=result["rank"],
                why=why,
                predicted_bytes=plan.prediction.by_stage[stage].peak_memory_bytes,
                measured_bytes=result["peak_memory_bytes"],
                predicted_s=alone_seconds(plan, cost, stage),
                measured_s=median(result["microbatch_s"]),
                update_s=median(result["update_s"]),
                microbatches=result["microbatches"],
            )
        )
    return found


def built(plan: Plan, module: str, environment: dict[str, str], out: Path) -> list[dict[str, Any]]:
    """First, middle and last rank without memory, in one process: Transformer Engine's layers, which need a GPU, as megatron-core's own of
    the same weights. Raises LaunchError."""
    return worker(out, module, first_middle_last(plan), environment, meta=True)


def rehearsed_table(found: Sequence[Rehearsed]) -> Table:
    """A table of predicted and measured peak memory and seconds, a line a stage."""
    table = _table(
        ("stage", True), ("", False), ("peak memory: predicted", True), ("measured", True),
        ("a micro-batch without traffic: predicted", True), ("measured", True), ("update", True),
        title="Rehearsal: one rank alone, a fake process group",
    )  # fmt: skip
    for one in found:
        table.add_row(
            str(one.stage), one.why, format_bytes(one.predicted_bytes), format_bytes(one.measured_bytes), format_seconds(one.predicted_s),
            format_seconds(one.measured_s), format_seconds(one.update_s),
        )  # fmt: skip
    return table


def built_lines(plan: Plan, cost: CostModel, found: Sequence[dict[str, Any]]) -> list[str]:
    """What was built, and whether it has the parameters that were priced. Raises LaunchError where it has not."""
    lines = []
    for one in found:
        stage, rank, has = one["stage"], one["rank"], one["parameters"]
        want = parameters_of(plan, cost, stage)
        what = f"{one['layers']} layers" if "layers" in one else "the whole model"
        what += "".join(f", {name}" for name in ("embedding", "head") if one.get(name))
        if "layers" in one and has != want:
            raise LaunchError(
                f"rehearse=true: rank {rank} (stage {stage}) has {has:,} parameters, {want:,} are priced; rehearse=false starts"
            )
        lines.append(f"rehearsal: rank {rank} (stage {stage}) builds: {what}, {has:,} parameters, as priced")
    return lines
