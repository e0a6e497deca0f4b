"""Prices measured runs with the cost model: the calibration that an (engine, GPU) has, and one cost model for the rows that share it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from orchestrator.calibrate.runs import Run
from orchestrator.cost.behaviours import BEHAVIOURS
from orchestrator.cost.calibration import Calibration, datasheet
from orchestrator.cost.price import CostModel
from orchestrator.errors import OrchestratorError
from orchestrator.strategy.capabilities import Behaviour
from orchestrator.strategy.layout import Prediction

Choose = Callable[[Run, Behaviour], Calibration]


class Outcome(NamedTuple):
    """A run with its prediction, or without one and why."""

    run: Run
    prediction: Prediction | None
    why: str = ""


class Pricer:
    """Keeps a cost model for every (model, training, cluster, behaviour, constants)."""

    def __init__(self, choose: Choose, behaviours: dict[str, Behaviour] = BEHAVIOURS) -> None:
        self._choose, self._behaviours = choose, behaviours
        self._models: dict[tuple[int, int, int, str, int], CostModel] = {}
        self._kept: list[object] = []

    def model(self, run: Run) -> CostModel:
        """The cost model of this run. Rows share the values that the loader interned, so identity is enough."""
        behaviour = self._behaviours[run.behaviour]
        calibration = self._choose(run, behaviour)
        key = (id(run.model), id(run.training), id(run.cluster), run.behaviour, id(calibration))
        if key not in self._models:
            self._kept.append((run, calibration))
            self._models[key] = CostModel(run.model, run.training, run.cluster, behaviour, calibration)
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


def zero_shot() -> Choose:
    """Datasheet constants for every GPU."""
    known: dict[tuple[str, str], Calibration] = {}

    def choose(run: Run, behaviour: Behaviour) -> Calibration:
        key = (run.gpu, behaviour.engine)
        if key not in known:
            known[key] = datasheet(run.cluster, behaviour)
        return known[key]

    return choose


def price_runs(runs: Iterable[Run], choose: Choose) -> Iterator[Outcome]:
    """Every run in order."""
    pricer = Pricer(choose)
    for run in runs:
        yield pricer.price(run)
