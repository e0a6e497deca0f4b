"""What a search is asked: for which engines it may plan, and what the user has fixed."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from orchestrator.cost.calibration import Calibration
from orchestrator.cost.mixed import cost_model
from orchestrator.cost.price import CostModel
from orchestrator.cost.uncertainty import memory_limits
from orchestrator.strategy.capabilities import Capabilities, Rule, Traits
from orchestrator.strategy.pins import MemoryLimit, Pins
from orchestrator.strategy.spec import RECOMPUTE_ORDER, Recompute
from orchestrator.strategy.workload import Workload
from orchestrator.values import Value


class PlannedEngine:
    """An engine as a search sees it: what it can do, how it behaves, and the constants of its prices. It keeps its latest cost model, so
    that one search after another for the same workload prices each layer once.

    `cautious_margin`: the share of a GPU's memory that its plans leave free where any plan of the search does, more than the
    calibration's `memory_margin`, which holds where none does; None: that one alone."""

    def __init__(
        self, *, capabilities: Capabilities, traits: Traits, calibration: Calibration, cautious_margin: float | None = None
    ) -> None:
        self.capabilities, self.traits, self.calibration = capabilities, traits, calibration
        self.cautious_margin = cautious_margin
        self._latest: list[tuple[Workload, CostModel]] = []

    @property
    def name(self) -> str:
        return self.capabilities.engine

    def able_to(self, capabilities: Capabilities) -> PlannedEngine:
        """The engine with other capabilities and the same prices, as its own program has them."""
        return self._costing_the_same(capabilities, self.calibration, self.cautious_margin)

    def keeping_free(self, margin: float | None = None) -> PlannedEngine:
        """The engine with the same prices where this share of memory is kept free whether any plan does or not; None: the calibration's."""
        constants = self.calibration if margin is None else replace(self.calibration, memory_margin=margin)
        return self._costing_the_same(self.capabilities, constants, None)

    def _costing_the_same(self, capabilities: Capabilities, calibration: Calibration, cautious: float | None) -> PlannedEngine:
        other = PlannedEngine(capabilities=capabilities, traits=self.traits, calibration=calibration, cautious_margin=cautious)
        other._latest = self._latest
        return other

    def costs(self, workload: Workload, modes: tuple[Recompute, ...] = RECOMPUTE_ORDER) -> CostModel:
        """The engine's prices for this workload. `modes`: the recompute modes that bounds reckon with."""
        if not self._latest or self._latest[0][0] is not workload:
            self._latest[:] = [(workload, cost_model(workload, self.traits, self.calibration))]
        return self._latest[0][1].reckoning_with(modes)


Engines = Sequence[PlannedEngine]


class SearchSettings(Value, frozen=True, kw_only=True):
    """`pins` fix choices; `top_k` best plans are wanted, one for each outer choice; `prunings` are further rules that a plan must
    keep."""

    pins: Pins = Pins()
    limit: MemoryLimit | None = None
    """The bytes that a plan may use; None: all that the GPU has, less what each engine keeps free."""
    top_k: int = 5
    of_other_kinds: bool = False
    """Whether each of the `top_k` is to have another engine or mesh or, of fewer meshes, another micro-batch, not other chunks alone."""
    prunings: tuple[Rule, ...] = ()
    most_further: int = 1_500_000
    """Passes simulated at the end, or what takes as long (a second), to prove that no partition that was left out is the fastest."""

    def limits_for(self, engine: PlannedEngine, workload: Workload) -> list[MemoryLimit]:
        """What the engine's plans may take of a GPU's memory (`cost.uncertainty.memory_limits`)."""
        parts = tuple(part.gpu.memory for part in workload.cluster.parts)
        limit = self.limit or MemoryLimit(limit=max(parts, default=workload.cluster.gpu.memory), reserve=None, parts=parts)
        return memory_limits(limit, engine.calibration.memory_margin, engine.cautious_margin)


DEFAULTS = SearchSettings()
