"""What a search is asked: for which engines it may plan, and what the user has fixed."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.cost.calibration import Calibration
from orchestrator.cost.price import CostModel
from orchestrator.strategy.capabilities import Capabilities, Rule, Traits
from orchestrator.strategy.pins import MemoryLimit, Pins
from orchestrator.strategy.spec import RECOMPUTE_ORDER, Recompute
from orchestrator.strategy.workload import Workload
from orchestrator.values import Value


class PlannedEngine(Value, frozen=True, kw_only=True):
    """An engine as a search sees it: what it can do, how it behaves, and the constants of its prices."""

    capabilities: Capabilities
    traits: Traits
    calibration: Calibration

    @property
    def name(self) -> str:
        return self.capabilities.engine

    def costs(self, workload: Workload, modes: tuple[Recompute, ...] = RECOMPUTE_ORDER) -> CostModel:
        """Its prices. `modes`: the recompute modes that bounds reckon with."""
        return CostModel(workload, self.traits, self.calibration, modes)


Engines = Sequence[PlannedEngine]


class SearchSettings(Value, frozen=True, kw_only=True):
    """`pins` fix choices; `top_k` best plans are wanted, one for each outer choice; `prunings` are further rules to cut branches by, such
    as the paper's (strategy/paper.py)."""

    pins: Pins = Pins()
    limit: MemoryLimit | None = None
    """None: all that the GPU has, less what each engine keeps free."""
    top_k: int = 5
    prunings: tuple[Rule, ...] = ()

    def limit_for(self, engine: PlannedEngine, workload: Workload) -> MemoryLimit:
        """With what is kept free for this engine."""
        limit = self.limit or MemoryLimit(limit=workload.cluster.gpu.memory, reserve=None)
        return limit.of(engine.calibration.memory_margin)


DEFAULTS = SearchSettings()
