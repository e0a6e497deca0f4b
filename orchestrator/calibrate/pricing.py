"""Prices measured runs with the cost model, one cost model for the runs that share it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from orchestrator.calibrate.runs import Run
from orchestrator.cost.calibration import Calibration, datasheet
from orchestrator.cost.price import CostModel
from orchestrator.errors import OrchestratorError
from orchestrator.strategy.layout import Prediction

R = TypeVar("R", bound=Run)
Choose = Callable[[R], Calibration]
"""The constants that a run is priced with."""


class Outcome(NamedTuple, Generic[R]):
    """A run with its prediction, or without one and why."""

    run: R
    prediction: Prediction | None
    why: str = ""


class Pricer(Generic[R]):
    """Keeps a cost model for every (model, training, cluster, engine, constants)."""

    def __init__(self, choose: Choose[R]) -> None:
        self._choose = choose
        self._models: dict[tuple[int, int, int, str, type[CostModel], Calibration], CostModel] = {}
        self._kept: list[object] = []  # what the identities in the keys belong to

    def model(self, run: R) -> CostModel:
        """The cost model of this run. Those of one source share their values, so identity is enough."""
        calibration = run.constants(self._choose(run))
        key = (id(run.model), id(run.training), id(run.cluster), run.traits.engine, run.cost, calibration)
        if key not in self._models:
            self._kept.append(run)
            self._models[key] = run.cost(run.workload, run.traits, calibration)
        return self._models[key]

    def price(self, run: R) -> Outcome[R]:
        """What the cost model says of the run as it was run."""
        try:
            return Outcome(run, self.model(run).price(run.candidate, run.stages))
        except (OrchestratorError, ValueError) as error:
            return Outcome(run, None, f"not priced: {error}")

    def score(self, run: R) -> tuple[float, float] | None:
        """(seconds, bytes) alone, faster than `price`; None where it can't be priced."""
        try:
            return self.model(run).score(run.candidate, run.stages)
        except (OrchestratorError, ValueError):
            return None


def one_value(make: Choose[R]) -> Choose[R]:
    """One calibration for all runs of an engine on a GPU under a stack, so that they share a cost model."""
    made: dict[tuple[str, str, str], Calibration] = {}

    def choose(run: R) -> Calibration:
        key = (run.traits.engine, run.gpu, run.cluster.stack)
        if key not in made:
            made[key] = make(run)
        return made[key]

    return choose


def zero_shot(run: Run) -> Calibration:
    """Datasheet constants: no run of this GPU or engine was seen."""
    return datasheet(run.cluster, run.traits)
