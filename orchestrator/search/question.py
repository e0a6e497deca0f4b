"""What a search is asked: for which engines it may plan, and what the user has fixed."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.cost.calibration import Calibration
from orchestrator.cost.mixed import cost_model
from orchestrator.cost.price import CostModel
from orchestrator.strategy.capabilities import Capabilities, Rule, Traits
from orchestrator.strategy.pins import MemoryLimit, Pins
from orchestrator.strategy.spec import RECOMPUTE_ORDER, Recompute
from orchestrator.strategy.workload import Workload
from orchestrator.values import Value


class PlannedEngine:
    """An engine as a search sees it: what it can do, how it behaves, and the constants of its prices. It keeps its latest cost model, so
    that one search after another for the same workload prices each layer once."""

    def __init__(self, *, capabilities: Capabilities, traits: Traits, calibration: Calibration) -> None:
        self.capabilities, self.traits, self.calibration = capabilities, traits, calibration
        self._latest: list[tuple[Workload, CostModel]] = []

    @property
    def name(self) -> str:
        return self.capabilities.engine

    def costing_the_same(self, *, capabilities: Capabilities | None = None, calibration: Calibration | None = None) -> PlannedEngine:
        """The same engine where it can do something else (as its own program does), or keeps other memory free."""
        both = capabilities or self.capabilities, calibration or self.calibration
        other = PlannedEngine(capabilities=both[0], traits=self.traits, calibration=both[1])
        other._latest = self._latest
        return other

    def costs(self, workload: Workload, modes: tuple[Recompute, ...] = RECOMPUTE_ORDER) -> CostModel:
        """Its prices. `modes`: the recompute modes that bounds reckon with."""
        if not self._latest or self._latest[0][0] is not workload:
            self._latest[:] = [(workload, cost_model(workload, self.traits, self.calibration))]
        return self._latest[0][1].reckoning_with(modes)


Engines = Sequence[PlannedEngine]


class SearchSettings(Value, frozen=True, kw_only=True):
    """`pins` fix choices; `top_k` best plans are wanted, one for each outer choice; `prunings` are further rules that a plan must
    keep."""

    pins: Pins = Pins()
    limit: MemoryLimit | None = None
    """None: all that the GPU has, less what each engine keeps free."""
    top_k: int = 5
    prunings: tuple[Rule, ...] = ()
    most_further: int = 1_500_000
    """Passes simulated at the end, or what takes as long (a second), to prove that no partition that was left out is the fastest."""

    def limit_for(self, engine: PlannedEngine, workload: Workload) -> MemoryLimit:
        """With what is kept free for this engine."""
        parts = tuple(part.gpu.memory for part in workload.cluster.parts)
        limit = self.limit or MemoryLimit(limit=max(parts, default=workload.cluster.gpu.memory), reserve=None, parts=parts)
        return limit.of(engine.calibration.memory_margin)


DEFAULTS = SearchSettings()
