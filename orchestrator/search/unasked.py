"""What the user could have asked for: the options that the search leaves out, where a plan with one is faster or smaller."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from operator import itemgetter
from typing import Any

from msgspec.structs import replace

from orchestrator.cost.mixed import cost_model
from orchestrator.key import declared
from orchestrator.model.training import Training
from orchestrator.plan import Plan
from orchestrator.search.planner import Bounds, faster, fastest_with
from orchestrator.search.question import Engines, PlannedEngine, SearchSettings
from orchestrator.strategy.choices import Choice, shown
from orchestrator.strategy.legality import legal_modes, overlaps_unasked, rules_of
from orchestrator.strategy.offloading import without_use
from orchestrator.strategy.spec import OFFERED, Candidate
from orchestrator.strategy.workload import Workload
from orchestrator.values import Value

WORTH_S, WORTH_BYTES = 0.02, 0.02
"""Share of the step or of the peak that is worth a line."""
NAMED_S = 0.005
"""Share of the step that is worth a line of what other pins may bring in unasked (`Offered.own_program`): none is to look faster."""
HOPEFUL_S = 0.01
"""Share of the step that an option must bring to a plan that was found, be it legal there or not, for others to be searched with it."""
OTHERS_GAIN, FURTHER_S = 2.0, 0.05
"""What it is taken to bring to any other choice at most: so many times that share, and no more than that share of the step beyond it."""


class Unasked(Value, frozen=True, kw_only=True):
    """A key with its value, what it asks for, and a plan with it: the one that was found, or another."""

    key: str
    asks: str
    plan: Plan
    own_program: bool = False
    """Whether the engine's own program has it (`Offered.own_program`)."""

    def gains(self, plan: Plan) -> bool:
        """Whether it takes so much less than this plan that it is worth a line."""
        return seconds_of(self.plan) < seconds_of(plan) * (1 - (NAMED_S if self.own_program else WORTH_S))


def unasked(plans: Sequence[Plan], bounds: Bounds, workload: Workload, engines: Engines, settings: SearchSettings) -> tuple[Unasked, ...]:
    """Options that nobody asked for and with which a plan takes so much less than the first of these `plans` (WORTH_S), largest gain first;
    then those with which that plan itself needs less memory and no more time. `plans`: the fastest that a search over these engines found
    with these settings, fastest first; `bounds`: what it knows of its choices.

    Each option is priced on these plans as they are. Where it brings something to one of them, but not enough to one that may have it and
    fits, other choices with bounds near by are searched with it. One that makes room alone is looked at where that is what lacks."""
    if not plans or plans[0].predicted is None:
        return ()
    asked = _Asked(plans, bounds, workload, engines, settings)
    found = [*asked.options(), *asked.trainings()]
    return tuple(sorted(found, key=lambda one: seconds_of(one.plan)))


class _Asked:
    """The arguments of `unasked`."""

    def __init__(self, plans: Sequence[Plan], bounds: Bounds, workload: Workload, engines: Engines, settings: SearchSettings) -> None:
        self.plans, self.bounds, self.workload, self.engines, self.settings = plans, bounds, workload, engines, settings
        self.by_name = {engine.name: engine for engine in engines}
        self.rules = {engine.name: rules_of(engine.capabilities, workload) for engine in engines}
        self.plan = plans[0]
        self.ascending: dict[str, list[tuple[Candidate, float]]] = {}
        """What is known of each engine's choices, by seconds."""
        for candidate, bound in sorted(bounds.usual.items(), key=itemgetter(1)):
            self.ascending.setdefault(candidate.engine, []).append((candidate, bound))

    def options(self) -> Iterator[Unasked]:
        """For each choice the value with which a plan is fastest, where that is worth it."""
        best: dict[str, Unasked] = {}
        for choice, value in OFFERED:
            if getattr(self.settings.pins, choice.pin) is not None or getattr(self.plan, choice.name) == value:
                continue
            found = self.option(choice, value)
            if found is not None and (choice.name not in best or seconds_of(found.plan) < seconds_of(best[choice.name].plan)):
                best[choice.name] = found
        yield from best.values()

    def option(self, choice: Choice, value: Any) -> Unasked | None:
        """The fastest plan with this value that is known or found, where that is worth it."""
        assert choice.offered is not None
        worth_s = self.worth_s(choice)
        engines = [engine for engine in self.engines if _has(engine, choice, value, self.workload)]
        if choice.offered.frees:
            roomy = self.near_by(choice, value, engines, 0.0)
            return None if roomy is None else Unasked(key=f"pin.{choice.pin}={shown(value)}", asks=choice.offered.asks, plan=roomy)
        known, later, hoped = self.as_they_are(choice, value, {engine.name for engine in engines})
        seconds, peak, best = min(known, key=itemgetter(0), default=(worth_s, float("inf"), None))
        best, asks = self.priced(best) if best is not None and self.worth(seconds, peak, worth_s) else None, choice.offered.asks
        if best is None or seconds_of(best) >= worth_s:
            beside = any(plan.engine == engine.name for plan in self.plans for engine in engines)
            kinds = (engine.capabilities.pinned_values.get(choice.name, ()) for engine in engines)
            other_mesh = any(value in kind for kind in kinds)  # a kind whose best meshes the search of the other kinds leaves out
            if choice.offered.saves_memory or other_mesh or not beside:  # also where what did not fit may, or no engine of the plans has it
                pinned = replace(self.settings, pins=replace(self.settings.pins, **{choice.pin: value}), top_k=1)
                best = (faster(self.workload, engines, pinned, worth_s) if engines else None) or best
            else:
                least = max(1 - OTHERS_GAIN * (1 - hoped), hoped * (1 - FURTHER_S)) if hoped < 1 - HOPEFUL_S else 1.0
                if choice.searched or not known:  # the plans have what is the best without it
                    least = min(least, 1 - OTHERS_GAIN * FURTHER_S)
                best = (self.near_by(choice, value, engines, least) if least < 1 else None) or best
        if (best is None or seconds_of(best) >= worth_s) and later:
            _, release, newer = min(later, key=itemgetter(0))
            best = self.priced(newer)
            asks = f"{asks}; needs Megatron-core {release} (cluster.software.megatron_core={release})"
        if best is None or not self.worth(seconds_of(best), best.prediction.peak_memory_bytes, worth_s):
            return None
        return Unasked(key=f"pin.{choice.pin}={shown(value)}", asks=asks, plan=best, own_program=choice.offered.own_program)

    def as_they_are(
        self, choice: Choice, value: Any, able: Container[str]
    ) -> tuple[list[tuple[float, float, Plan]], list[tuple[float, str, Plan]], float]:
        """(the plans with this value that are legal and fit, behind their seconds and peak bytes; those that are legal in a later release
        alone, behind their seconds and that; the least share of its time that any takes with it, legal or not). Their predictions are
        those without it."""
        known: list[tuple[float, float, Plan]] = []
        later: list[tuple[float, str, Plan]] = []
        hoped = 1.0
        for plan in self.plans:
            if plan.engine not in able:
                continue
            engine = self.by_name[plan.engine]
            costs, other = engine.costs(self.workload), choice.set_on(plan, value)
            legal = self.legal(other, self.workload, choice)
            if not legal and choice.unit:  # there is no price of pieces that don't divide a sequence
                continue
            by_stage = [costs.stage(other.candidate, stage, index) for index, stage in enumerate(other.stages)]
            seconds, peak = costs.score_stages(other.candidate, by_stage)
            hoped, limit = min(hoped, seconds / seconds_of(plan)), self.settings.limits_for(engine, self.workload)[0]
            if any(stage.peak_bytes > limit.usable_of(plan.cluster.part_of(index, plan.pp)) for index, stage in enumerate(by_stage)):
                continue
            if legal:
                known.append((seconds, peak, other))
            else:
                newer = (item for item in engine.capabilities.later_releases if self.legal(other, self.with_megatron(item)))
                later += [(seconds, release, other) for release in newer][:1]
        return known, later, hoped

    def worth_s(self, choice: Choice | None = None) -> float:
        """Seconds below which a plan, with this choice, is worth a line."""
        own_program = choice is not None and choice.offered is not None and choice.offered.own_program
        return seconds_of(self.plan) * (1 - (NAMED_S if own_program else WORTH_S))

    def worth(self, seconds: float, peak_bytes: float, worth_s: float) -> bool:
        """Whether such a plan is worth a line: faster, or in less memory no slower."""
        known = self.plan.prediction
        return seconds < worth_s or (peak_bytes < known.peak_memory_bytes * (1 - WORTH_BYTES) and seconds <= known.step_time_s)

    def priced(self, plan: Plan) -> Plan:
        """The plan with its own prediction."""
        costs = self.by_name[plan.engine].costs(self.workload)
        return replace(plan, predicted=costs.price(plan.candidate, plan.stages))

    def near_by(self, choice: Choice, value: Any, engines: Engines, least: float) -> Plan | None:
        """The fastest plan with this value, of choices that might be worth it if it takes `least` times as long with it; 0: of those that
        divide GPUs as the plan does, which may fit, or recompute less, with it."""
        best = None
        for engine in engines:
            known: Sequence[tuple[Candidate, float]] = self.ascending.get(engine.name, ())
            if not least:
                known = [(candidate, 0.0) for candidate, _ in known if candidate.mesh == self.plan.mesh]
            below_s = self.worth_s(choice) if best is None else seconds_of(best)
            given = self.bounds.modes, self.workload, engine, self.settings, below_s, self.bounds.paths
            best = fastest_with((choice, value), least, known, *given) or best
        return best

    def with_megatron(self, version: str) -> Workload:
        """The question's workload with this version of Megatron-core."""
        return replace(self.workload, cluster=self.workload.cluster.with_megatron(version))

    def legal(self, plan: Plan, workload: Workload, changed: Choice | None = None) -> bool:
        """Whether the plan breaks none of its engine's rules. `changed`: the choice alone in which it differs from a legal one."""
        rules = self.rules[plan.engine]
        if changed is not None:
            rules = tuple(rule for rule in rules if changed.name in rule.needs or changed.instead_of in rule.needs)
        fixed = workload.model.fixed_kinds
        modes = list(dict.fromkeys(span.recompute for _, span in plan.spans() if span.kind not in fixed)) or ["none"]
        return len(legal_modes(rules, plan.candidate, workload, modes)) == len(modes)

    def trainings(self) -> Iterator[Unasked]:
        """The plan with each of the settings that train the same model."""
        plan, engine = self.plan, self.by_name[self.plan.engine]
        for key in declared(Training):
            if key.offered is None or getattr(plan.training, key.field) == key.offered:
                continue
            training = replace(plan.training, **{key.field: key.offered})
            other, given = replace(plan, training=training), replace(self.workload, training=training)
            if self.legal(other, given):
                price = cost_model(given, engine.traits, engine.calibration).price(other.candidate, other.stages)
                if self.worth(price.step_time_s, price.peak_memory_bytes, self.worth_s()):
                    yield Unasked(key=f"{key.name}={shown(key.offered)}", asks=key.asks, plan=replace(other, predicted=price))


def _has(engine: PlannedEngine, choice: Choice, value: Any, workload: Workload) -> bool:
    """Whether the engine takes this value of the choice by a pin, and by that alone."""
    capabilities = engine.capabilities
    if choice.name == "zero_shard_size":
        return bool(capabilities.zero_shard_stages) and not capabilities.zero_shard_groups
    if choice.name == "tp_comm_overlap":
        return choice.name in capabilities.options and not overlaps_unasked(capabilities, workload.cluster, workload.model.architecture)
    if choice.name == "offload_modules" and without_use(tuple(run.layer for run in workload.model.runs), value):
        return False
    if choice.searched:
        return value in capabilities.pinned_values.get(choice.name, ())
    return choice.name in capabilities.pinned_options


def seconds_of(plan: Plan) -> float:
    """Seconds of the plan's predicted step."""
    return plan.prediction.step_time_s
