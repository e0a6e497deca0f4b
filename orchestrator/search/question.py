"""What a search is asked: for which engines it may plan, and what the user has fixed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from orchestrator.cost.calibration import Calibration
from orchestrator.cost.memory_policy import MemoryPolicy, reserve_alone
from orchestrator.cost.mixed import cost_model
from orchestrator.cost.price import CostModel
from orchestrator.strategy.capabilities import Capabilities, Rule, Traits
from orchestrator.strategy.pins import MemoryLimit, Pins
from orchestrator.strategy.spec import RECOMPUTE_ORDER, Recompute
from orchestrator.strategy.workload import Workload
from orchestrator.values import Value


class PlannedEngine:
    """An engine as a search sees it: what it can do, how it behaves, and the constants of its prices. It keeps its latest cost model, so
    that one search after another for the same workload prices each layer once.

    `policy`: how much of a GPU's memory its plans may use; None: all but what the calibration keeps free."""

    def __init__(self, *, capabilities: Capabilities, traits: Traits, calibration: Calibration, policy: MemoryPolicy | None = None) -> None:
        self.capabilities, self.traits, self.calibration = capabilities, traits, calibration
        self.policy = policy or reserve_alone(calibration)
        self._latest: list[tuple[Workload, CostModel]] = []

    @property
    def name(self) -> str:
        return self.capabilities.engine

    def able_to(self, capabilities: Capabilities) -> PlannedEngine:
        """The engine with other capabilities and the same prices, as its own program has them."""
        return self._costing_the_same(capabilities, self.policy)

    def held_to(self, level: int) -> PlannedEngine:
        """The engine with the same prices under one of the policy's limits alone (`MemoryPolicy.alone`)."""
        return self._costing_the_same(self.capabilities, self.policy.alone(level))

    def _costing_the_same(self, capabilities: Capabilities, policy: MemoryPolicy) -> PlannedEngine:
        other = PlannedEngine(capabilities=capabilities, traits=self.traits, calibration=self.calibration, policy=policy)
        other._latest = self._latest
        return other

    def shares_prices(self, other: PlannedEngine) -> bool:
        """Whether one of the two was made of the other, which keeps its prices."""
        return self._latest is other._latest

    def costs(self, workload: Workload, modes: tuple[Recompute, ...] = RECOMPUTE_ORDER) -> CostModel:
        """The engine's prices for this workload. `modes`: the recompute modes that bounds reckon with."""
        if not self._latest or self._latest[0][0] is not workload:
            self._latest[:] = [(workload, cost_model(workload, self.traits, self.calibration))]
        return self._latest[0][1].with_modes(modes)


Engines = Sequence[PlannedEngine]


Kinds = Literal["choices", "meshes", "batches"]
"""In what each of the best plans is to differ from the others: in any choice; in engine or mesh or, of fewer meshes than plans, in
micro-batch; in one of these three."""


class SearchSettings(Value, frozen=True, kw_only=True):
    """`pins` fix choices; `top_k` best plans are wanted, one for each outer choice; `prunings` are further rules that a plan must
    keep."""

    pins: Pins = Pins()
    limit: MemoryLimit | None = None
    """The bytes that a plan may use; None: all that the GPU has, less what each engine keeps free."""
    top_k: int = 5
    kinds: Kinds = "choices"
    prunings: tuple[Rule, ...] = ()
    continues: bool = False
    """Whether a checkpoint is continued, whose batch, packing and optimizer no advice may change."""
    most_further: int = 1_500_000
    """Passes simulated at the end, or what takes as long (a second), to prove that no partition that was left out is the fastest."""

    def limits_for(self, engine: PlannedEngine, workload: Workload) -> tuple[MemoryLimit, ...]:
        """What the engine's plans may take of a GPU's memory, the strictest first."""
        parts = tuple(part.gpu.memory for part in workload.cluster.parts)
        limit = self.limit or MemoryLimit(limit=max(parts, default=workload.cluster.gpu.memory), reserve=None, parts=parts)
        return engine.policy.limits(limit)


DEFAULTS = SearchSettings()
