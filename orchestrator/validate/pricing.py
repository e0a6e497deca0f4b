"""Prices measured runs with the cost model: the calibration that an (engine, GPU) has, and one cost model for the rows that share it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from orchestrator.cost.calibration import CHOICES, Calibration, CalibrationFile, datasheet, digest, found, held, priced, read_file, shipped
from orchestrator.cost.price import CostModel
from orchestrator.errors import InputError, OrchestratorError
from orchestrator.strategy.layout import Prediction
from orchestrator.validate.engines import ENGINES
from orchestrator.validate.runs import ExpertsRun, Run

OUTSIDE_TENSORS: dict[str, tuple[str, ...]] = {"allocated": ("context", "fragmentation"), "reserved": ("context",), "process": ()}
"""Causes of memory that a kind of measurement doesn't see: max_memory_allocated only tensors, a reservation not the context."""
Choose = Callable[[Run], Calibration]
"""The constants that a run is priced with."""


class Outcome(NamedTuple):
    """A run with its prediction, or without one and why."""

    run: Run
    prediction: Prediction | None
    why: str = ""


def seen_peak(run: Run, prediction: Prediction) -> float:
    """Bytes of the predicted peak as the run's source measured it: its rank, and the kind of memory that it looked at."""
    stages = {"first": prediction.by_stage[:1], "last": prediction.by_stage[-1:], "max": prediction.by_stage}[run.memory_of]
    unseen = OUTSIDE_TENSORS[run.memory_kind]
    return max(stage.peak_memory_bytes - sum(stage.memory_by_cause.get(cause, 0.0) for cause in unseen) for stage in stages)


@cache
def _of_experts(experts: ExpertsRun, calibration: Calibration) -> Calibration:
    return experts.constants(calibration)


class Pricer:
    """Keeps a cost model for every (model, training, cluster, engine, constants)."""

    def __init__(self, choose: Choose) -> None:
        self._choose = choose
        self._models: dict[tuple[int, int, int, str, type[CostModel], Calibration], CostModel] = {}
        self._kept: list[object] = []  # what the identities in the keys belong to

    def model(self, run: Run) -> CostModel:
        """The cost model of this run. Rows share the values that the loader interned, so identity is enough."""
        engine = run.engine
        calibration = self._choose(run)
        if engine.constants_in is not None:
            calibration = engine.constants_in(run.candidate, run.cluster, calibration)
        if run.kind == "moe":
            calibration = _of_experts(run.experts, calibration)
        key = (id(run.model), id(run.training), id(run.cluster), engine.name, engine.cost, calibration)
        if key not in self._models:
            self._kept.append(run)
            self._models[key] = engine.cost(run.workload, engine.traits, calibration)
        return self._models[key]

    def price(self, run: Run) -> Outcome:
        """What the cost model says of the run as it was run."""
        try:
            return Outcome(run, self.model(run).price(run.candidate, run.stages))
        except (OrchestratorError, ValueError) as error:
            return Outcome(run, None, f"not priced: {error}")

    def score(self, run: Run) -> tuple[float, float] | None:
        """(seconds, bytes) alone, faster than `price`; None where it can't be priced."""
        try:
            return self.model(run).score(run.candidate, run.stages)
        except (OrchestratorError, ValueError):
            return None


FOLDER: Final = "calibrations"


@cache
def shipped_file(engine: str, gpu: str) -> CalibrationFile | None:
    """The package's constants of a measured engine on this GPU; None: there are none. Raises InputError where they were fitted for other
    traits of it than it has now."""
    file = files("orchestrator.validate").joinpath(FOLDER, f"{engine}-{gpu}.json")
    return _fitting(msgspec.json.decode(file.read_bytes(), type=CalibrationFile)) if file.is_file() else None


def _fitting(file: CalibrationFile) -> CalibrationFile:
    """The file, if it was fitted for the traits that its measured engine has. Raises InputError."""
    engine = ENGINES.get(file.engine)
    if engine is not None and digest(engine.traits) != file.traits:
        why = f"was fitted for other traits ({file.traits}, now {digest(engine.traits)}): calibrate again"
        raise InputError("calibration", f"{file.engine}-{file.gpu}", why)
    return file


def one_value(make: Choose) -> Choose:
    """One calibration for all runs of an engine on a GPU under a stack, so that they share a cost model."""
    made: dict[tuple[str, str, str], Calibration] = {}

    def choose(run: Run) -> Calibration:
        key = (run.engine.name, run.gpu, run.cluster.stack)
        if key not in made:
            made[key] = make(run)
        return made[key]

    return choose


def zero_shot(run: Run) -> Calibration:
    """Datasheet constants: no run of this GPU or engine was seen."""
    return datasheet(run.cluster, run.engine.traits)


def _shipped(run: Run) -> Calibration:
    """The constants that come with the package: those fitted to a measured engine, those that a planned one of our own runs, or a measured
    one that is the same program, is planned with."""
    if run.engine.name not in ENGINES:
        return priced(run.cluster, run.engine.traits, found("shipped", run.cluster, [run.engine.traits], None)[0])
    file = shipped(run.engine.constants_of, run.gpu) if run.engine.constants_of else shipped_file(run.engine.name, run.gpu)
    base = zero_shot(run)
    return base if file is None else file.calibration(base)


def from_files(where: Path) -> Choose:
    """Calibrations of a file or of a folder's .json files; what they don't have is the datasheet's. Raises InputError."""
    paths = sorted(where.glob("*.json")) if where.is_dir() else [where]
    known: dict[tuple[str, str], CalibrationFile] = {}
    for path in paths:
        file = _fitting(read_file(path))
        known[file.engine, file.gpu] = file
    if not known:
        raise InputError("calibration", where, "holds no calibration", CHOICES)

    def make(run: Run) -> Calibration:
        base = zero_shot(run)
        file = known.get((run.engine.name, run.gpu))
        return base if file is None else held(file, run.engine.traits).calibration(base)

    return one_value(make)


def named(calibration: str | None) -> Choose:
    """What `calibration=` means: the package's constants, the datasheet's, or a file or folder. Raises InputError."""
    if calibration in (None, "shipped"):
        return one_value(_shipped)
    if calibration == "datasheet":
        return one_value(zero_shot)
    return from_files(Path(str(calibration)))


def price_runs(runs: Iterable[Run], choose: Choose) -> Iterator[Outcome]:
    """The predictions of all runs, in order."""
    pricer = Pricer(choose)
    for run in runs:
        yield pricer.price(run)
