"""Prices measured runs with the cost model: the calibration that an (engine, GPU) has, and one cost model for the rows that share it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from orchestrator.cost.calibration import CHOICES, Calibration, CalibrationFile, calibrated, datasheet, read_file
from orchestrator.cost.measured_traits import MEASURED_TRAITS
from orchestrator.cost.price import CostModel
from orchestrator.errors import InputError, OrchestratorError
from orchestrator.strategy.capabilities import Traits
from orchestrator.strategy.layout import Prediction
from orchestrator.validate.runs import Run

OUTSIDE_TENSORS: dict[str, tuple[str, ...]] = {"allocated": ("context", "fragmentation"), "reserved": ("context",), "process": ()}
"""Causes of memory that a kind of measurement doesn't see: max_memory_allocated only tensors, a reservation not the context."""
Choose = Callable[[Run, Traits], Calibration]


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


class Pricer:
    """Keeps a cost model for every (model, training, cluster, traits, constants)."""

    def __init__(self, choose: Choose, all_traits: dict[str, Traits] = MEASURED_TRAITS) -> None:
        self._choose, self._all_traits = choose, all_traits
        self._models: dict[tuple[int, int, int, str, int], CostModel] = {}
        self._kept: list[object] = []  # what the identities in the keys belong to

    def model(self, run: Run) -> CostModel:
        """The cost model of this run. Rows share the values that the loader interned, so identity is enough."""
        traits = self._all_traits[run.traits]
        calibration = self._choose(run, traits)
        key = (id(run.model), id(run.training), id(run.cluster), run.traits, id(calibration))
        if key not in self._models:
            self._kept.append((run, calibration))
            self._models[key] = CostModel(run.model, run.training, run.cluster, traits, calibration)
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


_DATASHEETS: dict[tuple[str, str], Calibration] = {}
_SHIPPED: dict[tuple[str, str], Calibration] = {}
"""One value for all rows of an engine on a GPU, so that they share a cost model."""


def zero_shot(run: Run, traits: Traits) -> Calibration:
    """Datasheet constants: no run of this GPU or engine was seen."""
    key = (run.gpu, traits.engine)
    if key not in _DATASHEETS:
        _DATASHEETS[key] = datasheet(run.cluster, traits)
    return _DATASHEETS[key]


def shipped(run: Run, traits: Traits) -> Calibration:
    """The constants that come with the package for this engine and GPU, else the datasheet's."""
    key = (run.gpu, traits.engine)
    if key not in _SHIPPED:
        _SHIPPED[key] = calibrated(run.cluster, traits)
    return _SHIPPED[key]


def from_files(where: Path) -> Choose:
    """Calibrations of a file or of a folder's .json files; what they don't have is the datasheet's. Raises InputError."""
    paths = sorted(where.glob("*.json")) if where.is_dir() else [where]
    found: dict[tuple[str, str], CalibrationFile] = {}
    for path in paths:
        file = read_file(path)
        found[file.engine, file.gpu] = file
    if not found:
        raise InputError("calibration", where, "holds no calibration", CHOICES)
    made: dict[tuple[str, str], Calibration] = {}

    def choose(run: Run, traits: Traits) -> Calibration:
        key = (traits.engine, run.cluster.gpu.name)
        if key not in made:
            base = datasheet(run.cluster, traits)
            made[key] = found[key].calibration(base) if key in found else base
        return made[key]

    return choose


def named(calibration: str | None) -> Choose:
    """What `calibration=` means: the package's constants, the datasheet's, or a file or folder. Raises InputError."""
    if calibration in (None, "shipped"):
        return shipped
    if calibration == "datasheet":
        return zero_shot
    return from_files(Path(str(calibration)))


def price_runs(runs: Iterable[Run], choose: Choose, all_traits: dict[str, Traits] = MEASURED_TRAITS) -> Iterator[Outcome]:
    """Every run in order."""
    pricer = Pricer(choose, all_traits)
    for run in runs:
        yield pricer.price(run)
