"""Prices on a cluster of several types of GPU: a pipeline stage by the type that computes it, with that type's constants and links.

What is asked of no stage is a bound: the least of all types. So whatever a search leaves out for a bound is slower or larger on any type.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from orchestrator.cost.calibration import Calibration
from orchestrator.cost.layer import LayerCost
from orchestrator.cost.memory import StageMemory
from orchestrator.cost.price import CostModel
from orchestrator.cost.stage import StageCost, StageSums
from orchestrator.strategy.capabilities import StateBytes, Traits
from orchestrator.strategy.layout import LayerSpan
from orchestrator.strategy.spec import RECOMPUTE_ORDER, Candidate, Recompute
from orchestrator.strategy.workload import Workload

LEAST_OF = tuple(name for name in LayerCost.__struct_fields__ if name != "by_cause")
"""The seconds and bytes of a layer of which a bound takes the least over all types of GPU."""


def cost_model(workload: Workload, traits: Traits, calibration: Calibration, modes: tuple[Recompute, ...] = RECOMPUTE_ORDER) -> CostModel:
    """The prices of this workload, whose cluster may have several types of GPU."""
    return (MixedCosts if workload.cluster.parts else CostModel)(workload, traits, calibration, modes)


class MixedCosts(CostModel):
    """A cost model for each type of GPU (`types`, in the order of the cluster's parts), and this one over them: what is asked of a stage is
    its own type's, what is asked of none is the least of all. `calibration.parts` has the constants of each type."""

    def __init__(
        self, workload: Workload, traits: Traits, calibration: Calibration, modes: tuple[Recompute, ...] = RECOMPUTE_ORDER
    ) -> None:
        views = zip(workload.cluster.views(), calibration.parts, strict=True)
        self.types = tuple(
            CostModel(msgspec.structs.replace(workload, cluster=view), traits, constants, modes) for view, constants in views
        )
        self._least: dict[tuple[int, ...], LayerCost] = {}
        super().__init__(workload, traits, calibration, modes)

    def with_modes(self, modes: tuple[Recompute, ...]) -> CostModel:
        other = super().with_modes(modes)
        if isinstance(other, MixedCosts) and other is not self:
            other.types = tuple(each.with_modes(modes) for each in self.types)
        return other

    def of_stage(self, candidate: Candidate, index: int) -> CostModel:
        return self.types[self.cluster.part_of(index, candidate.mesh.pp)]

    def stage_cost(self, candidate: Candidate, sums: StageSums, index: int) -> StageCost:
        return self.of_stage(candidate, index).stage_cost(candidate, sums, index)

    def stage_memory(self, candidate: Candidate, index: int) -> StageMemory:
        return self.of_stage(candidate, index).stage_memory(candidate, index)

    def hop_seconds(self, candidate: Candidate) -> tuple[float, ...]:
        """Seconds of a transfer behind each chunk: between stages of one GPU type by that type's links, between stages of two types by what
        both have."""
        pp = candidate.mesh.pp
        between = super().hop_seconds(candidate)[:pp]
        parts = [self.cluster.part_of(stage, pp) for stage in range(pp)]
        inside = [each.hop_seconds(candidate) for each in self.types]
        hops = [inside[part][stage] if part == parts[(stage + 1) % pp] else between[stage] for stage, part in enumerate(parts)]
        return tuple(hops) * candidate.vpp

    def busy_seconds(self, candidate: Candidate) -> float:
        return min(super().busy_seconds(candidate), *(each.busy_seconds(candidate) for each in self.types))

    def layer(self, candidate: Candidate, kind: str, recompute: Recompute) -> LayerCost:
        """The least of all types in everything: a bound."""
        each = [one.layer(candidate, kind, recompute) for one in self.types]
        key = tuple(map(id, each))  # each type keeps its own
        found = self._least.get(key)
        if found is None:
            least = {name: min(getattr(cost, name) for cost in each) for name in LEAST_OF}
            found = self._least[key] = LayerCost(**least, by_cause=each[0].by_cause)
        return found

    def layer_floor_seconds(self, candidate: Candidate, kind: str, states: StateBytes) -> tuple[float, float]:
        each = [one.layer_floor_seconds(candidate, kind, states) for one in self.types]
        return min(forward for forward, _ in each), min(backward for _, backward in each)

    def _alike(self, candidate: Candidate, states: StateBytes) -> tuple[object, ...]:
        return tuple(one._alike(candidate, states) for one in self.types)

    def layer_static_bytes(self, candidate: Candidate, kind: str) -> float:
        return min(one.layer_static_bytes(candidate, kind) for one in self.types)

    def sums(self, candidate: Candidate, spans: Iterable[LayerSpan] = ()) -> StageSums:
        raise NotImplementedError("sums are of a stage: of_stage(candidate, index).sums")
