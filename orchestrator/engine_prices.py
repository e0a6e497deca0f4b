"""What one engine's plans cost for a user's settings, and how much of a GPU's memory they leave free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

from msgspec.structs import replace

from orchestrator.cost import memory_policy, uncertainty
from orchestrator.cost.calibration import Calibration
from orchestrator.cost.memory_policy import MemoryPolicy
from orchestrator.cost.mixed import cost_model
from orchestrator.cost.price import CostModel
from orchestrator.errors import InputError
from orchestrator.model.families import describe_for
from orchestrator.model.routing import Routing, Unevenness
from orchestrator.plan import Plan, Prices
from orchestrator.plan.check import fits, workload_of
from orchestrator.recipe import Settings
from orchestrator.search.planner import reprice
from orchestrator.search.question import PlannedEngine
from orchestrator.strategy.capabilities import Capabilities, Traits
from orchestrator.strategy.pins import MemoryLimit


def kept_limit(plan: Plan, limits: Sequence[MemoryLimit]) -> MemoryLimit:
    """The first of the limits that the plan's predicted peaks keep, else the last one."""
    return next((limit for limit in limits if fits(plan, limit)), limits[-1])


class EnginePrices:
    """One engine's constants for these settings. `fitted`: the datasheet's and the calibration file's; `kept`: what plan.json keeps of a
    file of the user's own."""

    def __init__(self, settings: Settings, traits: Traits, fitted: Calibration, kept: Prices | None = None) -> None:
        self.settings, self.traits, self.fitted, self.kept = settings, traits, fitted, kept

    @cached_property
    def situation(self) -> uncertainty.Situation:
        """The situation by which the error of these prices is known."""
        training = self.settings.training
        model = describe_for(self.settings.architecture, training)
        transformers = self.traits.layers == "hugging_face"
        return uncertainty.situation(model, training, self.settings.cluster, self.fitted, transformers=transformers)

    @cached_property
    def policy(self) -> MemoryPolicy:
        """How much of a GPU's memory plans may use. With profile=, in which the layers' memory was measured, all but the reserve: published
        runs say nothing of its error. Raises InputError."""
        asked = self.settings.limit
        if self.settings.profile is None:
            return memory_policy.policy(asked, self.situation, self.fitted)
        if asked.risk is not None:
            why = "goes by published peaks, and the layers of profile= were measured: memory.reserve_gib= says what is kept free"
            raise InputError("memory.risk", f"{asked.risk:g}", why)
        return memory_policy.reserve_alone(self.fitted)

    @property
    def limits(self) -> tuple[MemoryLimit, ...]:
        """What plans may use of a GPU's memory in bytes, the strictest first. Raises InputError."""
        return self.policy.limits(self.settings.limit)

    def chance(self, peak_bytes: float) -> float:
        """The chance, 0 to 1, that a rank with this predicted peak runs out of memory, on GPUs of one type."""
        return memory_policy.chance([peak_bytes], [self.settings.limit.limit], self.situation)

    def chance_of(self, plan: Plan) -> float:
        """The chance, 0 to 1, that the plan's fullest rank runs out of memory."""
        if not plan.cluster.parts:
            return self.chance(plan.prediction.peak_memory_bytes)
        rooms = [self.settings.limit.parts[plan.cluster.part_of(index, plan.pp)] for index in range(plan.pp)]
        return memory_policy.chance([stage.peak_memory_bytes for stage in plan.prediction.by_stage], rooms, self.situation)

    def engine(self, capabilities: Capabilities) -> PlannedEngine:
        """The engine as a search sees it, if this is what it can do. Raises InputError as `policy`."""
        return PlannedEngine(capabilities=capabilities, traits=self.traits, calibration=self.fitted, policy=self.policy)

    def costs(self, plan: Plan) -> CostModel:
        """The prices of plans for the same model, training and cluster as this one's."""
        return cost_model(workload_of(plan), self.traits, self.fitted)

    def priced(self, plan: Plan) -> Plan:
        """The plan with a fresh prediction and what it keeps of these prices."""
        return replace(reprice(plan, self.traits, self.fitted), prices=self.kept)

    def unevenness(self, plan: Plan) -> Unevenness | None:
        """What the routing of the plan's model costs it; None where it is even."""
        routing = next((part.routing for part in plan.model.experts if part.routing is not None), None)
        if routing is None or plan.predicted is None:
            return None

        def seconds(change: Callable[[Routing], Routing | None]) -> float:
            """Seconds of the step with another routing in place of each one that the model's experts have."""
            model = plan.model.with_experts(lambda part: part if part.routing is None else replace(part, routing=change(part.routing)))
            return self.priced(replace(plan, model=model)).prediction.step_time_s

        return Unevenness(
            routing=routing,
            parts=plan.ep,
            step_s=plan.predicted.step_time_s,
            even_s=seconds(lambda _: None),
            copied_s=seconds(lambda routing: replace(routing, busiest=routing.copied)),
        )
