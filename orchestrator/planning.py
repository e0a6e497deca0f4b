"""Settings become a plan: the engines that may be asked, their prices, the search, what a user may want to know beside it, and the job."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from orchestrator import recipe
from orchestrator.cost import calibration
from orchestrator.cost.memory_policy import USUAL_RISK
from orchestrator.cost.uncertainty import pairs_of
from orchestrator.engine_prices import EnginePrices, kept_limit
from orchestrator.engines import ENGINES, Engine, passthrough
from orchestrator.engines.engine import Entry, OwnLoop
from orchestrator.engines.entry import engine_of_copy, engine_of_entry, entry_job, own_loop
from orchestrator.engines.transformer_config import common_recompute
from orchestrator.errors import InputError, NoPlanError, OrchestratorError
from orchestrator.job import Job
from orchestrator.launch import render, schedulers
from orchestrator.model.families import describe_for
from orchestrator.model.routing import Unevenness
from orchestrator.plan import Plan, Prices
from orchestrator.plan.check import check_fits, check_plan
from orchestrator.recipe import Settings
from orchestrator.recipe.documents import check_documents
from orchestrator.recipe.supervised import steps_of
from orchestrator.search.explain import DataParallel, Explanation, data_parallelism_alone, explain, narrower_tp
from orchestrator.search.planner import UNKNOWN, Bounds, Outcome, Progress, plainest, search
from orchestrator.search.question import Kinds, PlannedEngine, SearchSettings
from orchestrator.search.unasked import WORTH_S, Unasked, seconds_of, unasked
from orchestrator.strategy.capabilities import Capabilities, Rule
from orchestrator.strategy.divisible import fewer
from orchestrator.strategy.legality import lacking_parts, plan_only
from orchestrator.strategy.pins import MemoryLimit, Pins
from orchestrator.strategy.spec import Candidate
from orchestrator.strategy.workload import Workload
from orchestrator.units import format_seconds
from orchestrator.values import Value

SHOWN_PLANS = 4
"""The fastest, and three that differ from it, and from each other, in kind."""
SHOWN_FASTER = 1e-3
"""Share of a step below which a plan that may run out of memory is not worth showing."""
AHEAD = 1.05
"""Times the seconds of a plan with an option that the engine's own program has, above which no plan without is taken instead."""
TRIED = 4
"""Numbers of GPUs of which the one with the fastest plan is taken, where a plan is for so many at most: 13 nodes may divide a batch worse
than 12 do. Where none of them has a plan the search goes on to the first that has."""


class Elsewhere(Value, frozen=True, kw_only=True):
    """The fastest plan of the same training on `gpus` GPUs at most: there may be none on all of them, because of `why`, or a slower one;
    `plan` None: there is none. `refused`: why that can't go on from a checkpoint of the run's plan; None: it can."""

    gpus: int
    plan: Plan | None = None
    why: str = ""
    refused: str | None = None
    chance: float | None = None
    """The chance that the plan runs out of memory there, 0 to 1; None: there is no plan, or no GPU."""


class Found(Value, frozen=True, kw_only=True):
    """The plan, the best others, and what became of every outer choice (empty for a saved plan)."""

    plan: Plan
    alternatives: tuple[Plan, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    complete: bool = True
    """Whether the search came to its end; False: search.budget_s ended it."""
    at_least_s: float | None = None
    """Seconds that no plan of the space undercuts, where the search knows."""
    explained: tuple[Explanation, ...] = ()
    narrower: tuple[Explanation, ...] = ()
    """The best plan with tp within the innermost network level, where the plan's tp is wider than that; else none."""
    searched: tuple[Capabilities, ...] = ()
    """What the engines that were searched can do: the space of which `at_least_s` is true."""
    unasked: tuple[Unasked, ...] = ()
    """What the user could have asked for, priced on the plan."""
    alone: tuple[DataParallel, ...] = ()
    """Data parallelism alone, where the plan is more than that."""
    elsewhere: Elsewhere | None = None
    """What explain.gpus= asks for."""
    limit: MemoryLimit
    """Bytes that the plan could use, with what is kept free for its engine."""
    none_cautious: bool = False
    """No plan of the search has a chance of running out of memory of USUAL_RISK at most."""
    by_price: Plan | None = None
    """The fastest plan by price, where a plainer one that prices can't tell from it was taken (search.prefer=plain)."""
    ahead: Unasked | None = None
    """The option that was taken though nobody asked for it, as no plan without comes near (`AHEAD`)."""
    fuller: Plan | None = None
    """The fastest plan under the last of the memory policy's limits, where somebody asks and it is the faster one."""
    fewer: Plan | None = None
    """The plan on fewer GPUs where that is faster (`Planner.on_fewer`)."""
    uneven: Unevenness | None = None
    """What model.routing costs, where it is given."""
    bounds: Bounds = UNKNOWN
    """Seconds that no plan undercuts by the search, by what was left out (`SearchResult.bounds`)."""
    space: Space | None = None
    """What was searched, under the last of the memory policy's limits alone where no plan keeps the first; None for a saved plan and
    one that was pickled, which has neither engines nor priced layers."""

    def __eq__(self, other: object) -> bool:
        """Whether all is the same that was found: what was searched, of which prices are kept, doesn't count."""
        names = [name for name in self.__struct_fields__ if name != "space"]
        return isinstance(other, Found) and all(getattr(self, name) == getattr(other, name) for name in names)

    __hash__ = None  # type: ignore[assignment]  # plans have dictionaries

    def __reduce__(self) -> str | tuple[Any, ...]:
        return Value.__reduce__(self if self.space is None else msgspec.structs.replace(self, space=None))


class Space(Value, frozen=True, kw_only=True):
    """What a search looks through: the workload, the engines that may be used with their prices, and what the user fixed."""

    workload: Workload
    engines: tuple[Engine, ...]
    prices: tuple[EnginePrices, ...]
    planned: tuple[PlannedEngine, ...]
    settings: SearchSettings

    def held_to(self, level: int) -> Space:
        """The space under one limit of the memory policy alone (`MemoryPolicy.alone`). No layer is priced again."""
        return msgspec.structs.replace(self, planned=tuple(engine.held_to(level) for engine in self.planned))

    def with_one_recompute(self) -> Space:
        """The space of plans whose stages are recomputed alike, which is all that programs around the engines can be told."""
        able = (engine.capabilities for engine in self.planned)
        alike = [each if each.recompute_varies == "never" else msgspec.structs.replace(each, recompute_varies="job") for each in able]
        return msgspec.structs.replace(self, planned=tuple(map(PlannedEngine.able_to, self.planned, alike)))

    def unproven(self) -> Space:
        """The space without a proof at the search's end that what was left out is slower."""
        return msgspec.structs.replace(self, settings=msgspec.structs.replace(self.settings, most_further=0))

    def index(self, plan: Plan) -> int:
        """Index of the plan's engine in `engines`."""
        return [engine.name for engine in self.planned].index(plan.engine)

    def memory_floor(self, candidate: Candidate) -> float:
        """Bytes that the fullest rank of a choice can't go below; layers that a search has priced are not priced again."""
        engine = next(engine for engine in self.planned if engine.name == candidate.engine)
        return engine.costs(self.workload).memory_floor(candidate)


class Planner:
    """Plans for one user's settings: what plans, prices, refuses or starts for them is asked here."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    # ------------------------------------------------------------------------------------------------------ what is searched

    @cached_property
    def workload(self) -> Workload:
        """What is to be planned for."""
        training = self.settings.training
        model = describe_for(self.settings.architecture, training)
        return Workload(model=model, training=training, cluster=self.settings.cluster)

    @cached_property
    def requested_engines(self) -> list[Engine]:
        """The engines that engine= leaves, or the one of plan=. Raises InputError where it lacks what some of the user's keys are for."""
        settings = self.settings
        name = settings.engine if settings.plan is None else settings.plan.engine
        if settings.entry is not None and name == "auto":
            name = engine_of_entry(ENGINES, settings.entry)
        if name != "auto":
            if name in ENGINES and not passthrough.reaches(ENGINES[name].passes, settings.extra):
                passthrough.check_reached(name, settings.extra, {other: engine.passes for other, engine in ENGINES.items()})
            return [ENGINES[name]] if name in ENGINES else []
        asked = [engine for engine in ENGINES.values() if engine.own_loop is not None or settings.program != "own"]
        return [engine for engine in asked if passthrough.reaches(engine.passes, settings.extra)]

    @cached_property
    def engines(self) -> list[Engine]:
        """The engines that a search is over: they exchange weights as asked, and train the model where any does. Raises InputError."""
        architecture, training = self.settings.architecture, self.settings.training
        precision = training.precision
        engines = self._exchanging(self.requested_engines)
        offers = [(engine, engine.capabilities(self.settings.cluster.software)) for engine in engines]
        able = [
            engine
            for engine, has in offers
            if precision in has.precisions
            and not lacking_parts(has, architecture)
            and not plan_only(has, architecture, self.settings.training)
        ]
        return able or engines

    def _exchanging(self, engines: Sequence[Engine]) -> list[Engine]:
        """The engines that can load model.init_from and write model.export_to. Raises InputError where there are none."""
        settings, run = self.settings, self.settings.run
        if run.init_from is None and run.export_to is None:
            return list(engines)
        key, folder = ("model.init_from", run.init_from) if run.init_from is not None else ("model.export_to", run.export_to)
        if settings.entry is not None and not engine_of_copy(ENGINES, settings.entry):
            why = "loads and writes weights itself, unless it is a copy of a program in orchestrator/programs"
            raise InputError(key, folder, f"is for our workers; entry={settings.entry} {why}")
        kind = None if run.init_from is None else recipe.model_type(run.init_from)
        reasons = {engine.name: engine.why_no_exchange(settings.architecture, kind) for engine in engines}
        able = [engine for engine in engines if reasons[engine.name] is None]
        if not able:
            raise InputError(key, folder, "; ".join(dict.fromkeys(filter(None, reasons.values()))))
        return able

    def _capabilities(self, engine: Engine, *, program: bool) -> Capabilities:
        """What the engine's worker runs or, with `program`, what its own program can be told."""
        able = engine.program.capabilities if program and engine.program else engine.capabilities
        return able(self.settings.cluster.software)

    def prices(self, engines: Sequence[Engine]) -> tuple[EnginePrices, ...]:
        """The prices of each engine by what calibration= says, else the user's folder, else the package's files. Raises InputError."""
        settings, folder = self.settings, os.environ.get("ORCHESTRATOR_CALIBRATIONS")
        traits = [engine.traits(settings.cluster.software) for engine in engines]
        files = calibration.found(settings.calibration, settings.cluster, traits, Path(folder) if folder else None)
        return tuple(
            EnginePrices(settings, each, calibration.priced(settings.cluster, each, file), _kept(file))
            for each, file in zip(traits, files, strict=True)
        )

    def prices_for(self, engine: str) -> EnginePrices:
        """The prices of the engine with this name, by which a search over all engines has it: calibration= may be for another of them."""
        return self.prices([ENGINES[engine], *(other for other in self.engines if other.name != engine)])[0]

    def prices_of(self, plan: Plan) -> EnginePrices:
        """The prices that the plan was made with, unless calibration= says others. Raises InputError."""
        saved = plan.prices
        if saved is None or self.settings.calibration is not None:
            return self.prices_for(plan.engine)
        traits = ENGINES[plan.engine].traits(plan.cluster.software)
        base = calibration.datasheet(self.settings.cluster, traits)
        fitted = calibration.kept(base, plan.calibration, saved.fitted_on, saved.constants, saved.interval, saved.measured)
        return EnginePrices(self.settings, traits, fitted, saved)

    def space(
        self, top_k: int | None = None, without: Collection[str] = (), prunings: tuple[Rule, ...] = (), *, kinds: Kinds = "choices"
    ) -> Space:
        """The space of the settings. `top_k`: how many of the best plans are wanted, which differ in `kinds`; None: those that are shown,
        each of another mesh, if there are so many. `without`: engines that are left out; `prunings`: further rules that a plan must keep.
        Raises InputError where no engine is left."""
        settings = self.settings
        engines = [engine for engine in self.engines if engine.name not in without]
        able = [self._capabilities(engine, program=settings.entry is not None) for engine in engines]
        prices = self.prices(engines)
        return Space(
            workload=self.workload,
            engines=tuple(engines),
            prices=prices,
            planned=tuple(each.engine(capabilities) for each, capabilities in zip(prices, able, strict=True)),
            settings=SearchSettings(
                pins=settings.pins,
                limit=settings.limit,
                top_k=top_k or SHOWN_PLANS,
                kinds=kinds if top_k else "meshes",
                prunings=prunings,
                continues=settings.continues is not None,
            ),
        )

    # -------------------------------------------------------------------------------------------------------------- plans

    def plan(self, progress: Progress | None = None, without: Collection[str] = (), *, with_fuller: bool = False) -> Found:
        """The plan of plan=PATH, or as `searched`. Raises InputError, NoPlanError."""
        return self.saved() if self.settings.plan is not None else self.searched(progress, without, with_fuller=with_fuller)

    def fastest(
        self,
        space: Space | None = None,
        progress: Progress | None = None,
        *,
        any_plan: bool = False,
        with_fuller: bool = False,
        known: Bounds = UNKNOWN,
    ) -> Found:
        """The fastest plan of the space (with take=N the N-th), by default of all engines that may be used, without an answer to any other
        question;
        `with_fuller`: but `Found.fuller`. `any_plan`: the first that is found will do. `known`: bounds of a search with as much memory or
        more. Raises NoPlanError, and InputError where ds.* or megatron.* say otherwise than the plan."""
        space = space or self.space(top_k=1 if self.settings.take is None else None)
        stop = (lambda: True) if any_plan else self._out_of_time()
        with without_gc():
            result = search(
                space.workload, space.planned, space.settings, progress=progress, stop=stop, with_fuller=with_fuller, known=known
            )
            plain = None if any_plan else self._plainer(space, result.plan)
        plans, take = [result.plan, *result.alternatives], self.settings.take or 1
        if plain is not None:
            plans = [plain, *(other for other in plans if other.candidate != plain.candidate)][: max(len(plans), take)]
        if take > len(plans):
            raise InputError("take", take, f"is more than the {len(plans)} that a search shows: the fastest, and those of other kinds")
        plan = self._completed(space, plans.pop(take - 1))
        planned = (engine.able_to(able) for engine, able in zip(space.planned, result.searched, strict=True))
        space = msgspec.structs.replace(space, planned=tuple(planned))
        engine = space.planned[space.index(plan)]
        limit = kept_limit(plan, space.settings.limits_for(engine, space.workload))
        none_cautious = len(engine.policy.kept) > 1 and limit.risk is None
        return Found(
            plan=plan,
            alternatives=tuple(plans),
            outcomes=result.outcomes,
            complete=result.complete,
            at_least_s=result.at_least_s,
            searched=result.searched,
            limit=limit,
            bounds=result.bounds,
            none_cautious=none_cautious,
            by_price=result.plan if plain and take == 1 else None,
            fuller=self._shown_fuller(space, result.fuller, min((plan, *plans), key=seconds_of)),
            space=space.held_to(-1) if none_cautious else space,
        )

    def searched(self, progress: Progress | None = None, without: Collection[str] = (), *, with_fuller: bool = False) -> Found:
        """The fastest plan of all engines that may be used but those `without` names, and what a user may want to know beside it
        (`with_fuller`: also `Found.fuller`). Raises InputError, NoPlanError."""
        with without_gc():
            return self._searched(progress, without, with_fuller=with_fuller and self.settings.budget_s is None)

    def _searched(self, progress: Progress | None, without: Collection[str], *, with_fuller: bool) -> Found:
        settings = self.settings
        try:
            found = self.fastest(self.space(without=without), progress, with_fuller=with_fuller)
        except NoPlanError as error:
            raise self._else_planned(error) from None
        space, plans = found.space, sorted((found.plan, *found.alternatives), key=seconds_of)
        assert space is not None
        offers = unasked(plans, found.bounds, space.workload, space.planned, space.settings)
        rows, take = [*found.alternatives], settings.take or 1
        rows.insert(take - 1, found.plan)
        if (ahead := self._ahead(space, rows[0], offers)) is not None:
            offers = tuple(one for one in offers if seconds_of(one.plan) < seconds_of(ahead.plan) * (1 - WORTH_S))
            rows = [ahead.plan, *rows][: max(2, len(rows))]
            plan = self._completed(space, rows.pop(take - 1))
            found = msgspec.structs.replace(found, plan=plan, alternatives=tuple(rows), by_price=None, fuller=None, ahead=ahead)
        plan = found.plan
        index = space.index(plan)
        inside = narrower_tp(plan) if settings.pins.tp is None else None
        return msgspec.structs.replace(
            found,
            explained=self._explained(space, settings.explain),
            narrower=self._explained(space, Pins(tp=inside)) if inside is not None else (),
            alone=data_parallelism_alone(space.workload, space.planned) if divided(plan) else (),
            unasked=(*self._only_planned(plan), *offers),
            uneven=space.prices[index].unevenness(plan),
            elsewhere=self.elsewhere(plan),
            fewer=self.on_fewer(plan),
        )

    def _ahead(self, space: Space, plan: Plan, offers: Sequence[Unasked]) -> Unasked | None:
        """The first offer that is far enough ahead of the plan, if the engine's own program has it and would train it; None: there is none,
        or the plan is to go on from a checkpoint, or is for another program."""
        settings = self.settings
        if settings.continues is not None or {*settings.write} - {*schedulers.WRITERS}:
            return None
        far = (one for one in offers if one.own_program and seconds_of(one.plan) * AHEAD < seconds_of(plan))
        return next((one for one in far if settings.entry or self.trained_by(self._completed(space, one.plan))[0] is not None), None)

    def _only_planned(self, plan: Plan) -> Iterator[Unasked]:
        """The fastest plans of engines that were not searched, as others train this model and these plan it for other programs alone, where
        they are faster than `plan`."""
        for other, asks in self._not_searched():
            if other.prediction.step_time_s < plan.prediction.step_time_s:
                yield Unasked(key=f"engine={other.engine}", asks=asks, plan=other)

    def _not_searched(self) -> Iterator[tuple[Plan, str]]:
        """(fastest plan, what it is for and why) of each engine that has one of this model for other programs alone, and is left out as
        others train it."""
        settings = self.settings
        for engine in self._exchanging(self.requested_engines):
            has = engine.capabilities(settings.cluster.software)
            if engine not in self.engines and (why := plan_only(has, settings.architecture, settings.training)):
                with suppress(OrchestratorError):
                    there = Planner(msgspec.structs.replace(settings, engine=engine.name, take=None))
                    yield there.fastest().plan, f"for programs of your own or of write= alone: {why}"

    def _else_planned(self, error: NoPlanError) -> NoPlanError:
        """The error of a search, with the engines that have a plan for other programs alone: engine= takes it."""
        said = (
            f"; engine={plan.engine} has a plan ({format_seconds(plan.prediction.step_time_s)} a step) {asks}"
            for plan, asks in self._not_searched()
        )
        return NoPlanError(f"{error}{''.join(said)}", refused=error.refused)

    def saved(self) -> Found:
        """The plan of plan=PATH, checked and priced again. Raises InputError where it is not legal or does not fit."""
        settings = self.settings
        assert settings.plan is not None
        engine = settings.plan.engine
        if engine not in ENGINES:
            raise InputError("engine", engine, "of the plan is not known", ENGINES)
        self._exchanging([ENGINES[engine]])
        plan, limit = self.priced_again(settings.plan)
        check_fits(plan, limit)
        passthrough.check(plan, ENGINES[engine].passes)
        why_not = self.explained(settings.explain, limit) if settings.explain.given() else ()
        uneven = self.prices_of(settings.plan).unevenness(plan)
        return Found(plan=plan, limit=limit, explained=why_not, elsewhere=self.elsewhere(plan), uneven=uneven)

    def priced_again(self, plan: Plan) -> tuple[Plan, MemoryLimit]:
        """The plan with a fresh prediction, and the memory that it may use, whether it fits or not. Raises InputError."""
        prices = self.prices_of(plan)
        check_plan(plan, ENGINES[plan.engine].capabilities(self.settings.cluster.software))
        plan = prices.priced(plan)
        return plan, kept_limit(plan, prices.limits)

    def _completed(self, space: Space, plan: Plan) -> Plan:
        """A search's plan with what else the user said. Raises InputError where ds.* or megatron.* say otherwise than the plan."""
        settings, prices = self.settings, space.prices[space.index(plan)]
        plan = msgspec.structs.replace(plan, run=settings.run_of(plan), extra=settings.extra, prices=prices.kept)
        passthrough.check(plan, ENGINES[plan.engine].passes)
        return plan

    def _plainer(self, space: Space, plan: Plan) -> Plan | None:
        """A plainer plan that prices can't tell from the fastest one, where the user prefers that; None: there is none."""
        if self.settings.prefer == "fastest":
            return None
        level = 0 if kept_limit(plan, limits := self.prices_for(plan.engine).limits) == limits[0] else -1
        engines = [engine.held_to(level) for engine in space.planned]
        return plainest(space.workload, engines, space.settings, plan, pairs_of(plan.model).half)

    def _shown_fuller(self, space: Space, fuller: Plan | None, plan: Plan) -> Plan | None:
        """The plan that fills memory further where it is faster by enough to be shown, and what the user said does not contradict it."""
        if fuller is None or fuller.prediction.step_time_s >= plan.prediction.step_time_s * (1 - SHOWN_FASTER):
            return None
        try:
            return self._completed(space, fuller)
        except InputError:
            return None

    def _out_of_time(self) -> Callable[[], bool]:
        """Whether search.budget_s have passed since this was called."""
        budget_s, started = self.settings.budget_s, time.monotonic()
        return lambda: budget_s is not None and time.monotonic() - started > budget_s

    # --------------------------------------------------------------------------------------------------------- beside a plan

    def chance_of_not_fitting(self, plan: Plan) -> float:
        """The chance, 0 to 1, that the plan's fullest rank takes more than a GPU has, by how far off published runs' peaks were."""
        return self.prices_of(plan).chance_of(plan)

    def chance_beside(self, limit: MemoryLimit, plan: Plan | None) -> float | None:
        """The chance of running out of memory of a plan that is compared with one held to `limit`, where that is as cautious as usual and
        this one is not; None elsewhere."""
        if plan is None or limit.risk is None or self.settings.limit.risk is not None or self.settings.cluster.is_cpu:
            return None
        risk = self.chance_of_not_fitting(plan)
        return risk if risk > USUAL_RISK else None

    def explained(self, pins: Pins, limit: MemoryLimit) -> tuple[Explanation, ...]:
        """What `pins` would bring, of plans held to the same `limit` as the plan that they are compared with."""
        space = self.space()
        return self._explained(space if limit.risk is not None else space.held_to(-1), pins)

    def _explained(self, space: Space, pins: Pins) -> tuple[Explanation, ...]:
        """The plan that each of these choices gives where it is pinned, or why there is none."""

        def plainer(settings: SearchSettings, plan: Plan) -> Plan | None:
            return self._plainer(msgspec.structs.replace(space, settings=settings), plan)

        with without_gc():
            return explain(pins, space.workload, space.planned, space.settings, plainer)

    def elsewhere(self, plan: Plan) -> Elsewhere | None:
        """The best plan of the same engine, whose checkpoints it can go on from, on explain.gpus= GPUs; None: nobody asks."""
        cluster = self.settings.explain_cluster
        if cluster is None:
            return None
        others = msgspec.structs.replace(self.settings, plan=None, engine=plan.engine)
        step = cluster.gpus_per_node if cluster.num_gpus > cluster.gpus_per_node else 1
        found, why = on_fewer(
            lambda gpus: Planner(msgspec.structs.replace(others, cluster=recipe.resized(cluster, gpus))).fastest(),
            range(cluster.num_gpus, 0, -step),
        )
        if found is None:
            return Elsewhere(gpus=cluster.num_gpus, why=why)
        there = Planner(msgspec.structs.replace(others, cluster=recipe.resized(cluster, found.plan.world_size)))
        chance = None if cluster.is_cpu else there.chance_of_not_fitting(found.plan)
        refused = ENGINES[plan.engine].why_no_resume(plan, found.plan)
        return Elsewhere(gpus=cluster.num_gpus, plan=found.plan, why=why, refused=refused, chance=chance)

    def on_fewer(self, plan: Plan) -> Plan | None:
        """This plan's engine's fastest plan on fewer GPUs, where it is faster: on the next fewer that the batch divides better, and, of one
        domain of the network (a site, a rack, a node) and the half, the quarter and so on, those that compute for less than this plan's
        step. None: it isn't. A search of its own for each, until they get slower."""
        cluster, cost, world = plan.cluster, plan.prediction, plan.world_size
        if self.settings.take is not None:
            return None
        numbers = {fewer(world, cluster.gpus_per_node, plan.global_batch_size, plan.model.num_layers) or 0}
        computing = sum(cost.by_cause.get(cause, 0.0) for cause in ("gemm", "attention", "memory_bound"))
        numbers |= {
            number
            for number in (*(level.whole for level in cluster.levels), *(world >> power for power in range(1, world.bit_length())))
            if number < world and computing * world < cost.step_time_s * number
        }
        best: Plan | None = None
        for gpus in sorted(numbers - {0}, reverse=True):
            try:
                there = msgspec.structs.replace(self.settings, engine=plan.engine, cluster=recipe.resized(cluster, gpus))
                found = Planner(there).fastest().plan
            except (InputError, NoPlanError):
                continue
            if best is not None and seconds_of(found) >= seconds_of(best):
                break
            best = found
        return best if best is not None and seconds_of(best) < cost.step_time_s * (1 - SHOWN_FASTER) else None

    def for_program(self, best: Found, *, by_flags: bool = True) -> Plan | None:
        """The fastest plan that an engine's own program can be told, where it can't be told the best one; None: it can, or none, or there
        was no search. Without `by_flags`: that a program can be told which trains what the engine's own can't, and has one recompute."""
        settings, plan, space = self.settings, best.plan, best.space
        if space is None or settings.entry is not None:
            return None
        alone = msgspec.structs.replace(space.settings, top_k=1, most_further=0)
        for engine, planned in zip(space.engines, space.planned, strict=True):
            program = engine.program
            if program is None:
                continue
            why_not = program.why_not if by_flags else _why_uncommon
            if engine.name == plan.engine and why_not(plan) is None:
                continue
            if by_flags and program.why_never(settings.architecture, settings.training, settings.cluster.software) is not None:
                continue
            able = self._capabilities(engine, program=by_flags)
            able = able if by_flags else msgspec.structs.replace(able, recompute_varies="job")
            try:
                with without_gc():
                    given = space.workload, [planned.able_to(able)], alone
                    told = search(*given, stop=self._out_of_time(), known=best.bounds, with_outcomes=False).plan
            except NoPlanError:
                continue
            told = msgspec.structs.replace(told, run=settings.run_of(told), extra=plan.extra)
            if why_not(told) is None:
                return told
        return None

    # ---------------------------------------------------------------------------------------------------------------- the job

    def job(self, plan: Plan, told: Plan | None = None, *, trial_steps: int | None = None) -> Job:
        """The plan as the job of our worker, or of the user's own program, with the user's variables. `told`: what the engine's own program
        is told in the plan's place; `trial_steps`: of a user's own program that is only measured (Entry). Raises InputError."""
        settings = self.settings
        job = ENGINES[plan.engine].translate(plan)
        if told is not None and (program := ENGINES[told.engine].program) is not None:
            job = program.beside(job, plan, told)
        if settings.entry is not None:
            entry = Entry(program=settings.entry, arguments=settings.entry_args, without=settings.entry_without,
                          launcher=settings.entry_launcher, exit_minutes=render.exit_minutes(settings.slurm.time),
                          trial_steps=trial_steps)  # fmt: skip
            job = entry_job(ENGINES, plan, job, entry)
            job = msgspec.structs.replace(job, preflight=settings.entry_preflight)
        elif settings.program != "instrument" and (loop := self.trained_by(plan)[0]) is not None:
            job = loop.job(plan, job, render.exit_minutes(settings.slurm.time), trial_steps)
        if plan.model.traced is not None and plan.model.traced.code:
            job = with_code(job, plan.model.traced.code)
        if random := settings.random_weights:
            job = msgspec.structs.replace(job, notes=(*job.notes, random))
        return render.with_environment(self._with_enough_documents(plan, job), self._checkout(plan) | settings.env)

    def trained_by(self, plan: Plan) -> tuple[OwnLoop | None, str]:
        """(the engine's own training loop where it trains the plan, None: another program does; why). Raises InputError where
        program=own can't be."""
        settings = self.settings
        if settings.entry is not None:
            return None, f"entry={settings.entry}"
        engine, saved = ENGINES[plan.engine], settings.continues
        loop = engine.own_loop
        if loop is None:
            return own_loop(engine, plan, settings.program)
        of_worker = loop.checkpoints is not None and saved is not None and not saved.folder.name.startswith(loop.checkpoints)
        if settings.program == "auto" and of_worker:
            return None, "it wrote the checkpoint that is continued"
        return own_loop(engine, plan, settings.program, checkout=loop.checkout in {*settings.env, *os.environ})

    def _checkout(self, plan: Plan) -> dict[str, str]:
        """The variable of this environment that names the code of the engine's own loop, where that trains the plan: a batch job has not
        this environment. Empty where nothing is named here, and in a container, whose image names its own."""
        loop = self.trained_by(plan)[0]
        if loop is None or loop.checkout is None or self.settings.container is not None or not os.environ.get(loop.checkout):
            return {}
        return {loop.checkout: str(Path(os.environ[loop.checkout]).absolute())}

    def _with_enough_documents(self, plan: Plan, job: Job) -> Job:
        """The job of an engine's own program that divides its data by whole documents, of which there are enough. Raises InputError where
        not; beside our worker, which cuts anywhere in a text, a note says so of the file with the program's arguments."""
        program = ENGINES[plan.engine].program
        arguments = None if program is None else program.of_documents(plan)
        if program is None or arguments is None:
            return job
        is_started = self.settings.entry is not None or self.trained_by(plan)[0] is not None
        try:
            check_documents(job.arguments if is_started else arguments, plan.training.seq_length)
        except InputError as error:
            if is_started:
                raise
            return msgspec.structs.replace(job, notes=(*job.notes, f"{program.arguments} can't be started: {error}"))
        return job


def planned(settings: Settings, ask: Callable[[Planner], Found]) -> tuple[Settings, Found]:
    """What `ask` finds for these settings, and the settings as they are then: samples that nobody asked to pack are padded where nothing
    fits with them packed. Raises InputError, NoPlanError."""
    try:
        return settings, ask(Planner(settings))
    except NoPlanError:
        if not settings.packs_unasked:
            raise
        training = msgspec.structs.replace(settings.training, packing=False)
        if settings.epochs is not None and training.lengths is not None:
            steps = steps_of(settings.epochs, training.lengths, training.global_batch_size, packing=False)
            training = msgspec.structs.replace(training, steps=steps)
        padded = msgspec.structs.replace(settings, training=training)
        try:
            return padded, ask(Planner(padded))
        except NoPlanError:
            pass
        raise


def with_code(job: Job, code: str) -> Job:
    """The job whose ranks find the module of model.code=, in the folder where it is found from here; a note where it is found nowhere."""
    top = code.partition(":")[0].partition(".")[0]
    for folder in (Path.cwd(), *map(Path, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))):
        if (folder / f"{top}.py").is_file() or (folder / top).is_dir():
            return msgspec.structs.replace(job, python_path=str(folder.resolve()))
    if find_spec(top) is not None:  # installed
        return job
    why = f"model.code={code}: {top} is found neither here nor installed; env.PYTHONPATH=FOLDER says where it is where the ranks run"
    return msgspec.structs.replace(job, notes=(*job.notes, why))


@contextmanager
def without_gc() -> Iterator[None]:
    """What a search makes is needed to its end: looking for garbage in it takes a tenth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def on_fewer(plan_on: Callable[[int], Found], numbers: Iterable[int]) -> tuple[Found | None, str]:
    """The fastest plan that `plan_on` finds on one of these numbers of GPUs, which fall; why there is none on the first, if so."""
    found: list[Found] = []
    why: list[str] = []
    for tried, number in enumerate(numbers):
        if found and tried >= TRIED:
            break
        try:
            found.append(plan_on(number))
        except (NoPlanError, InputError) as error:
            why.append(str(error) if not tried else "")
    best = min(found, key=lambda one: one.plan.prediction.step_time_s, default=None)
    return best, next(iter(why), "")


def _why_uncommon(plan: Plan) -> str | None:
    """Why one recompute setting can't say this plan; None: it can."""
    return None if common_recompute(plan) is not None else "the stages' recompute differs"


def _kept(known: calibration.Calibrated | None) -> Prices | None:
    """What plan.json keeps of a calibration of the user's own; None: it is the package's."""
    if known is None or not known.source:
        return None
    file = known.file
    return Prices(source=known.source, fitted_on=file.fitted_on, constants=file.values(), interval=file.interval, measured=file.measured)


def divided(plan: Plan) -> bool:
    """Whether the plan divides the model, or its weights, over ranks."""
    return plan.tp * plan.pp * plan.cp > 1 or plan.zero_stage == 3
