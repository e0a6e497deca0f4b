"""Our own runs as measured runs: a run folder has its plan.json and, a line a step, metrics.jsonl; a file of several runs, as
tests/benchmarks/first_gpu.py writes it, has {"runs": [{"name", "plan", "metrics"}, ...]}."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

from orchestrator.engines import ENGINES
from orchestrator.errors import InputError
from orchestrator.model.families import describe
from orchestrator.plan import Plan, from_json
from orchestrator.validate.engines.engine import MeasuredEngine
from orchestrator.validate.runs import Run, Unusable
from orchestrator.validate.tables import load as load_tables

PLAN, METRICS = "plan.json", "metrics.jsonl"
WARM_UP: Final = 2
"""First steps that are left out: allocator, autotuning, file caches."""


class Written(NamedTuple):
    """A run as it was written: `plan` as JSON, `metrics` a JSON object a line, `where` for messages."""

    name: str
    plan: bytes
    metrics: str
    where: str


def run_folders(where: Path) -> list[Path]:
    """The folder itself, or those in it, that hold a plan and its measurements."""
    candidates = [where, *sorted(path for path in where.iterdir() if path.is_dir())] if where.is_dir() else []
    return [path for path in candidates if (path / PLAN).is_file() and (path / METRICS).is_file()]


def written(where: Path) -> list[Written]:
    """The runs of our own run folders, or of a file of several; none where there is neither. Raises InputError."""
    if where.suffix != ".json" or not where.is_file():
        return [
            Written(path.name, (path / PLAN).read_bytes(), (path / METRICS).read_text(encoding="utf-8"), str(path))
            for path in run_folders(where)
        ]
    try:
        return [
            Written(
                str(one["name"]),
                json.dumps(one["plan"]).encode(),
                "\n".join(json.dumps(row) for row in one["metrics"]),
                f"{where}: {one['name']}",
            )
            for one in json.loads(where.read_text(encoding="utf-8"))["runs"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError("runs", where, f"is no file of runs: {type(error).__name__}: {error}") from None


def measured(where: Path) -> tuple[list[Run], list[Unusable]]:
    """The runs of our own folders, or those of tables; the tables' rows that can't be used. Raises InputError."""
    return (load(where), []) if where.suffix == ".json" or run_folders(where) else load_tables(where)


def load(where: Path) -> list[Run]:
    """Every run folder's run. Raises InputError, also where an engine had other traits in one run than in another (another version of
    it, say): they can't be one calibration."""
    runs: list[Run] = []
    engines: dict[str, tuple[MeasuredEngine, str]] = {}
    for one in written(where):
        plan = from_json(one.plan, f"{one.where}/{PLAN}")
        if plan.engine not in ENGINES:
            raise InputError("runs", one.where, f"engine {plan.engine} is not known", ENGINES)
        if plan.cluster.parts:
            raise InputError("runs", one.where, f"ran on GPUs of several types ({plan.cluster.types}); constants are fitted for one")
        engine = MeasuredEngine(traits=ENGINES[plan.engine].traits(plan.cluster.software))
        first, first_where = engines.setdefault(plan.engine, (engine, one.where))
        if first.traits != engine.traits:
            raise InputError("runs", one.where, f"{plan.engine} has other traits there than in {first_where}: its software differs")
        run = run_of(plan, first, one)
        if run is not None:
            runs.append(run)
    return runs


def run_of(plan: Plan, engine: MeasuredEngine, one: Written) -> Run | None:
    """The median step after the warm-up; None: too few steps. Raises InputError for lines that are none."""
    try:
        lines = [json.loads(line) for line in one.metrics.splitlines() if line.strip()]
        seconds = [float(line["step_time_s"]) for line in lines][WARM_UP:]
        peaks = [float(line["peak_memory_bytes"]) for line in lines if line.get("peak_memory_bytes")]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError("runs", f"{one.where}/{METRICS}", f"is not what a run writes: {error}") from None
    if not seconds:
        return None
    training = plan.training
    return Run(
        table="own",
        run_id=one.name,
        sweep_id=f"{plan.model.name}-{plan.world_size}",
        engine=engine,
        gpu=plan.cluster.gpu.name,
        precision=training.precision,
        kind="dense",
        model=describe(plan.model, training.seq_length, training.decoder_seq_length),
        training=training,
        cluster=plan.cluster,
        candidate=plan.candidate,
        stages=plan.stages,
        time_s=median(seconds),
        memory_bytes=max(peaks) if peaks and plan.cluster.gpu.name != "cpu" else None,
        memory_kind="allocated",
        fits=True,
    )
