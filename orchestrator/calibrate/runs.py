"""Measured runs as the cost model prices them. A run folder has its plan.json and, a line a step, metrics.jsonl; a file of several runs, as
tests/benchmarks/first_gpu.py writes it, has {"runs": [{"name", "plan", "metrics"}, ...]}."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

from orchestrator.cost.calibration import Calibration
from orchestrator.cost.price import CostModel
from orchestrator.engines import ENGINES
from orchestrator.errors import InputError
from orchestrator.hardware.spec import Cluster
from orchestrator.model.families import describe_for
from orchestrator.model.spec import ModelSpec
from orchestrator.model.training import Training
from orchestrator.plan import Plan, from_json
from orchestrator.strategy.capabilities import Traits
from orchestrator.strategy.layout import Prediction, Stage, StagePrediction
from orchestrator.strategy.spec import Candidate
from orchestrator.strategy.workload import Workload

PLAN, METRICS = "plan.json", "metrics.jsonl"
SEVERAL: Final = '{"runs": [{"name": NAME, "plan": plan.json\'s object, "metrics": [metrics.jsonl\'s lines]}, ...]}'
WARM_UP: Final = 2
"""First steps that are left out: allocator, autotuning, file caches."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A measured run. `time_s`, `memory_bytes`: of the median step and the highest peak, None where not measured."""

    run_id: str
    traits: Traits
    """What the cost model knows of the engine that trained; `traits.engine` is its name."""
    gpu: str
    model: ModelSpec
    training: Training
    cluster: Cluster
    candidate: Candidate
    stages: tuple[Stage, ...]
    time_s: float | None
    memory_bytes: float | None

    @property
    def workload(self) -> Workload:
        """What was trained where."""
        return Workload(model=self.model, training=self.training, cluster=self.cluster)

    @property
    def num_gpus(self) -> int:
        return self.candidate.mesh.world_size

    @property
    def has_experts(self) -> bool:
        return bool(self.model.architecture.experts)

    @property
    def cost(self) -> type[CostModel]:
        """The class that prices it."""
        return CostModel

    def constants(self, calibration: Calibration) -> Calibration:
        """The constants of this run, of those of its engine on its GPU."""
        return calibration

    def peak_bytes(self, prediction: Prediction) -> float:
        """Bytes of the predicted peak as `memory_bytes` was measured: tensors alone, on the fullest rank."""
        return peak_without(prediction.by_stage, ("context", "fragmentation"))


def peak_without(stages: Sequence[StagePrediction], causes: Sequence[str]) -> float:
    """The highest peak of these stages in bytes, without what these causes take."""
    return max(stage.peak_memory_bytes - sum(stage.memory_by_cause.get(cause, 0.0) for cause in causes) for stage in stages)


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
    if not where.exists():
        raise InputError("runs", where, "no such file or folder")
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
        raise InputError("runs", where, f"is no file of runs, {SEVERAL}: {type(error).__name__}: {error}") from None


def load(where: Path) -> list[Run]:
    """Every run folder's run. Raises InputError, also where an engine had other traits in one run than in another (another version of
    it, say): they can't be one calibration."""
    runs: list[Run] = []
    known: dict[str, tuple[Traits, str]] = {}
    for one in written(where):
        plan = from_json(one.plan, f"{one.where}/{PLAN}")
        if plan.engine not in ENGINES:
            raise InputError("runs", one.where, f"engine {plan.engine} is not known", ENGINES)
        if plan.cluster.parts:
            raise InputError("runs", one.where, f"ran on GPUs of several types ({plan.cluster.types}); constants are fitted for one")
        traits = ENGINES[plan.engine].traits(plan.cluster.software)
        first, first_where = known.setdefault(plan.engine, (traits, one.where))
        if first != traits:
            why = f"{plan.engine} has other traits there than in {first_where}: its software differs"
            raise InputError("runs", one.where, f"{why}; put the runs of each into a folder of their own, and say runs= for each")
        run = run_of(plan, first, one)
        if run is not None:
            runs.append(run)
    return runs


def left_out(where: Path, runs: Sequence[Run]) -> list[str]:
    """Names of the runs there that are none of these: too short, or without a step measured. Raises InputError."""
    names = {run.run_id for run in runs}
    unmeasured = [path.parent.name for path in sorted(where.glob(f"*/{PLAN}")) if not path.with_name(METRICS).is_file()]
    return [*(one.name for one in written(where) if one.name not in names), *unmeasured]


def run_of(plan: Plan, traits: Traits, one: Written) -> Run | None:
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
        run_id=one.name,
        traits=traits,
        gpu=plan.cluster.gpu.name,
        model=describe_for(plan.model, training),
        training=training,
        cluster=plan.cluster,
        candidate=plan.candidate,
        stages=plan.stages,
        time_s=median(seconds),
        memory_bytes=max(peaks) if peaks and plan.cluster.gpu.name != "cpu" else None,
    )
