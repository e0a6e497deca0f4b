"""Settings become a plan: the engines that may be asked, their prices, the search, what a user may want to know beside it, and the job."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from orchestrator import recipe
from orchestrator.cost import calibration
from orchestrator.cost.mixed import cost_model
from orchestrator.cost.price import CostModel
from orchestrator.cost.uncertainty import USUAL_RISK, Situation, cautious_margin, kept_free, situation
from orchestrator.cost.uncertainty import chance_of_not_fitting as chance
from orchestrator.engines import ENGINES, Engine, passthrough
from orchestrator.engines.engine import Entry
from orchestrator.engines.entry import engine_of_entry, entry_job
from orchestrator.errors import InputError, NoPlanError
from orchestrator.job import Job
from orchestrator.launch import render
from orchestrator.model.architecture import Architecture
from orchestrator.model.families import describe
from orchestrator.model.parts import FeedForward
from orchestrator.model.parts.experts import Experts
from orchestrator.model.routing import Routing, Unevenness
from orchestrator.plan import Plan, Prices
from orchestrator.plan.check import check_fits, check_plan, fits
from orchestrator.plan.check import workload_of as planned_workload
from orchestrator.recipe import Settings
from orchestrator.recipe.documents import check_documents
from orchestrator.report.unasked import Unasked, unasked
from orchestrator.search.explain import DataParallel, Explanation, data_parallelism_alone, explain, narrower_tp
from orchestrator.search.planner import UNKNOWN, Bounds, Outcome, reprice, search
from orchestrator.search.question import PlannedEngine, SearchSettings
from orchestrator.strategy.capabilities import Capabilities, Rule, Traits
from orchestrator.strategy.legality import lacking_parts, plan_only
from orchestrator.strategy.pins import MemoryLimit, Pins
from orchestrator.strategy.spec import Candidate
from orchestrator.strategy.workload import Workload
from orchestrator.values import Value

T = TypeVar("T")
SHOWN_ALTERNATIVES = 5


class Elsewhere(Value, frozen=True, kw_only=True):
    """The fastest plan of the same training on `gpus` GPUs at most: there may be none on all of them, because of `why`, or a slower one;
    `plan` None: there is none. `refused`: why that can't go on from a checkpoint of the run's plan; None: it can."""

    gpus: int
    plan: Plan | None = None
    why: str = ""
    refused: str | None = None


class Found(Value, frozen=True, kw_only=True):
    """The plan, the best others, and what became of every outer choice (empty for a saved plan)."""

    plan: Plan
    alternatives: tuple[Plan, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    complete: bool = True
    """False: search.budget_s ended the search."""
    at_least_s: float | None = None
    """Seconds that no plan of the space undercuts, where the search knows."""
    explained: tuple[Explanation, ...] = ()
    narrower: tuple[Explanation, ...] = ()
    """Where tp is wider than the innermost network level: the best plan whose is not."""
    searched: tuple[Capabilities, ...] = ()
    """What the engines that were searched can do: the space of which `at_least_s` is true."""
    unasked: tuple[Unasked, ...] = ()
    """What the user could have asked for, priced on the plan."""
    alone: tuple[DataParallel, ...] = ()
    """Data parallelism alone, where the plan is more than that."""
    elsewhere: Elsewhere | None = None
    """What explain.gpus= asks for."""
    limit: MemoryLimit
    """With what is kept free for the plan's engine."""
    none_cautious: bool = False
    """No plan of the search has a chance of running out of memory of USUAL_RISK at most, or only much slower ones (`safer`)."""
    safer: Plan | None = None
    """The fastest with such a chance, where it is much slower than the plan."""
    fuller: Plan | None = None
    """The fastest plan that fills memory up to the reserve, where somebody asks and it is the faster one."""
    uneven: Unevenness | None = None
    """What model.routing costs, where it is given."""
    bounds: Bounds = UNKNOWN
    """As `SearchResult`."""
    asked: Question | None = None
    """What the search was asked, by the reserve alone where no plan leaves more free; None for a saved plan."""

    @property
    def safer_takes(self) -> float | None:
        """The step of `safer` over the plan's."""
        if self.safer is None or self.safer.predicted is None or self.plan.predicted is None:
            return None
        return self.safer.predicted.step_time_s / self.plan.predicted.step_time_s


def training_first(engines: Sequence[Engine], settings: Settings) -> list[Engine]:
    """Without the engines that could only plan this model, where another has all of its parts and trains it."""
    architecture = settings.architecture
    offers = [(engine, engine.capabilities(settings.cluster.software)) for engine in engines]
    able = [engine for engine, has in offers if not lacking_parts(has, architecture) and not plan_only(has, architecture)]
    return able or list(engines)


def searched_pairs(engines: Sequence[Engine], settings: Settings, *, programs: bool) -> list[tuple[Capabilities, Traits]]:
    """What a search moves in: what the engines' workers run or, with `programs`, what their own programs can be told."""
    software = settings.cluster.software
    able = [engine.program.capabilities if programs and engine.program else engine.capabilities for engine in engines]
    return [(capabilities(software), engine.traits(software)) for capabilities, engine in zip(able, engines, strict=True)]


def prices(settings: Settings, all_traits: Sequence[Traits]) -> list[calibration.Calibrated | None]:
    """The calibration file of each engine: what calibration= says, else the user's folder, else the package's. Raises InputError."""
    folder = os.environ.get("ORCHESTRATOR_CALIBRATIONS")
    return calibration.found(settings.calibration, settings.cluster, all_traits, Path(folder) if folder else None)


def priced(settings: Settings, traits: Traits, file: calibration.Calibrated | None) -> calibration.Calibration:
    """The constants of this file, with as much memory kept free as memory.risk= asks for. Raises InputError for a risk that so many
    measured peaks can't tell."""
    return with_risk(settings, traits, calibration.priced(settings.cluster, traits, file))


def planned_engine(settings: Settings, capabilities: Capabilities, traits: Traits, file: calibration.Calibrated | None) -> PlannedEngine:
    """An engine as a search for these settings sees it. Raises InputError as `priced`."""
    constants = priced(settings, traits, file)
    margin = cautious_margin_for(settings, traits, constants)
    return PlannedEngine(capabilities=capabilities, traits=traits, calibration=constants, cautious_margin=margin)


def cautious_margin_for(settings: Settings, traits: Traits, constants: calibration.Calibration) -> float | None:
    """As `cost.uncertainty.cautious_margin`; None also where the user has said how much memory is kept free."""
    if settings.limit.risk is not None or settings.limit.reserve is not None or settings.cluster.is_cpu:
        return None
    return cautious_margin(situation_of(settings, traits, constants), constants)


def held_to(limit: MemoryLimit, plan: Plan, margin: float, cautious: float | None) -> MemoryLimit:
    """The strictest of both that the plan keeps: with the `cautious` margin, so that its chance of running out is USUAL_RISK at most; else
    with the engine's own `margin`, whether it keeps that or not."""
    if cautious is not None and fits(plan, strict := limit.of(cautious, USUAL_RISK)):
        return strict
    return limit.of(margin)


def layerwise_limits(settings: Settings, traits: Traits, constants: calibration.Calibration) -> list[MemoryLimit]:
    """What a layer-wise plan may take of a GPU's memory, the strictest first: the next where no plan keeps it. With a profile, in which
    the layers' memory was measured, the reserve alone: how far off our formulas were on published runs says nothing of it. Raises
    InputError."""
    if settings.profile is not None:
        if settings.limit.risk is not None:
            why = "goes by published peaks, and the layers of profile= were measured: memory.reserve_gib= says what is kept free"
            raise InputError("memory.risk", f"{settings.limit.risk:g}", why)
        return [settings.limit.of(constants.memory_margin)]
    margin = cautious_margin_for(settings, traits, constants)
    reserve = settings.limit.of(with_risk(settings, traits, constants).memory_margin)
    return [reserve] if margin is None else [settings.limit.of(margin, USUAL_RISK), reserve]


def within(limits: Sequence[MemoryLimit], planned: Callable[[MemoryLimit], T]) -> T:
    """What is planned within the first of the limits that holds a plan. Raises the last one's NoPlanError."""
    *stricter, last = limits
    for limit in stricter:
        try:
            return planned(limit)
        except NoPlanError:
            continue
    return planned(last)


def with_risk(settings: Settings, traits: Traits, constants: calibration.Calibration) -> calibration.Calibration:
    """With as much memory kept free as memory.risk= asks for; as they are where it is not given. Raises InputError."""
    risk = settings.limit.risk
    if risk is None:
        return constants
    try:
        return msgspec.structs.replace(constants, memory_margin=kept_free(risk, situation_of(settings, traits, constants)))
    except ValueError as error:
        raise InputError("memory.risk", f"{risk:g}", str(error)) from None


def situation_of(settings: Settings, traits: Traits, constants: calibration.Calibration) -> Situation:
    """By which the error of a prediction for these settings and this engine is known."""
    transformers = traits.layers == "hugging_face"
    return situation(workload_of(settings).model, settings.training, settings.cluster, constants, transformers=transformers)


def chance_of_not_fitting(settings: Settings, plan: Plan) -> float:
    """That the plan's fullest rank takes more than a GPU has, by how far off published runs' peaks were (cost/uncertainty.py)."""
    assert plan.predicted is not None  # every plan that is found is priced
    traits = ENGINES[plan.engine].traits(plan.cluster.software)
    constants, _ = constants_of(settings, plan, traits)
    now = situation_of(settings, traits, constants)
    if not plan.cluster.parts:
        return chance(plan.predicted.peak_memory_bytes, settings.limit.limit, now)
    parts = [plan.cluster.part_of(index, plan.pp) for index in range(plan.pp)]
    stages = zip(plan.predicted.by_stage, parts, strict=True)
    return max(chance(stage.peak_memory_bytes, settings.limit.parts[part], now) for stage, part in stages)


def chance_at(peak_bytes: float, settings: Settings, traits: Traits, constants: calibration.Calibration) -> float:
    """As `chance_of_not_fitting` of a rank with this peak on GPUs of one type."""
    return chance(peak_bytes, settings.limit.limit, situation_of(settings, traits, constants))


def chance_beside(settings: Settings, limit: MemoryLimit, plan: Plan | None) -> float | None:
    """The chance of running out of memory of a plan that is compared with one held to `limit`, where that is as cautious as usual and this
    one is not; None elsewhere."""
    if plan is None or limit.risk is None or settings.limit.risk is not None or settings.cluster.is_cpu:
        return None
    risk = chance_of_not_fitting(settings, plan)
    return risk if risk > USUAL_RISK else None


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


class Question(Value, frozen=True, kw_only=True):
    """What a search is asked for these settings: the workload, the engines that may be used, their calibration files, and the settings."""

    workload: Workload
    engines: tuple[Engine, ...]
    planned: tuple[PlannedEngine, ...]
    files: tuple[calibration.Calibrated | None, ...]
    asked: SearchSettings


def question(
    settings: Settings, top_k: int = SHOWN_ALTERNATIVES, without: Collection[str] = (), prunings: tuple[Rule, ...] = ()
) -> Question:
    """`without`: engines that are left out; `prunings`: further rules that a plan must keep. Raises InputError where no engine can be
    asked."""
    engines = [engine for engine in usable_engines(settings) if engine.name not in without]
    pairs = searched_pairs(engines, settings, programs=settings.entry is not None)
    files = prices(settings, [traits for _, traits in pairs])
    planned = [planned_engine(settings, *pair, file) for pair, file in zip(pairs, files, strict=True)]
    return Question(
        workload=workload_of(settings),
        engines=tuple(engines),
        planned=tuple(planned),
        files=tuple(files),
        asked=SearchSettings(pins=settings.pins, limit=settings.limit, top_k=top_k, prunings=prunings),
    )


def by_reserve(asked: Question) -> Question:
    """The same question where plans may fill memory up to the reserve, though others leave more free. What was priced for the one is not
    priced again for the other."""
    return msgspec.structs.replace(asked, planned=tuple(engine.keeping_free() for engine in asked.planned))


def cautious_alone(asked: Question) -> Question:
    """The same question where no plan may leave less free than is usual."""
    planned = tuple(engine.keeping_free(engine.cautious_margin) for engine in asked.planned)
    return msgspec.structs.replace(asked, planned=planned)


def unproven(asked: Question) -> Question:
    """The same question, without a proof at its end that what was left out of the search is slower."""
    return msgspec.structs.replace(asked, asked=msgspec.structs.replace(asked.asked, most_further=0))


Progress = Callable[[int, int, float | None], None]
"""Called while a search goes on: outer choices done, in all, and seconds of the best plan so far."""


def fastest(
    settings: Settings,
    asked: Question | None = None,
    progress: Progress | None = None,
    *,
    any_plan: bool = False,
    with_fuller: bool = False,
) -> Found:
    """The fastest plan of all engines that may be used, without an answer to any other question; `with_fuller`: but `Found.fuller`.
    `any_plan`: the first that is found will do. Raises NoPlanError, and InputError where ds.* or megatron.* say otherwise than the plan."""
    asked = asked or question(settings, top_k=1)
    stop = (lambda: True) if any_plan else out_of_time(settings)
    with without_gc():
        result = search(asked.workload, asked.planned, asked.asked, progress=progress, stop=stop, with_fuller=with_fuller)
    plan = completed(settings, asked, result.plan)
    engine = next(engine for engine in asked.planned if engine.name == plan.engine)
    cautious = engine.cautious_margin
    limit = held_to(settings.limit, plan, engine.calibration.memory_margin, cautious)
    return Found(
        plan=plan,
        alternatives=result.alternatives,
        outcomes=result.outcomes,
        complete=result.complete,
        at_least_s=result.at_least_s,
        searched=tuple(engine.capabilities for engine in asked.planned),
        limit=limit,
        bounds=result.bounds,
        none_cautious=cautious is not None and limit.risk is None,
        safer=result.too_slow,
        fuller=the_fuller(settings, asked, result.fuller, plan),
        asked=by_reserve(asked) if cautious is not None and limit.risk is None else asked,
    )


def explained(settings: Settings, questions: Pins, limit: MemoryLimit) -> tuple[Explanation, ...]:
    """The best plan that has each of these choices, or why there is none. `limit`: what the plan is held to that they are compared with."""
    asked = question(settings) if limit.risk is not None else by_reserve(question(settings))
    with without_gc():
        return explain(questions, asked.workload, asked.planned, asked.asked)


def searched_plan(
    settings: Settings, progress: Progress | None = None, without: Collection[str] = (), *, with_fuller: bool = False
) -> Found:
    """The fastest plan of all engines that may be used but those `without` names, and what a user may want to know beside it
    (`with_fuller`: also `Found.fuller`). Raises NoPlanError."""
    asked = question(settings, without=without)
    found = fastest(settings, asked, progress, with_fuller=with_fuller and settings.budget_s is None)
    asked = found.asked or asked
    plan, planned = found.plan, asked.planned

    def why_not(questions: Pins) -> tuple[Explanation, ...]:
        return explain(questions, asked.workload, planned, asked.asked)

    engine = next(engine for engine in planned if engine.name == plan.engine)
    inside = narrower_tp(plan) if settings.pins.tp is None else None
    with without_gc():
        return msgspec.structs.replace(
            found,
            explained=why_not(settings.explain),
            narrower=why_not(Pins(tp=inside)) if inside is not None else (),
            alone=data_parallelism_alone(asked.workload, planned) if divided(plan) else (),
            unasked=unasked(plan, engine.capabilities, engine.traits, engine.calibration),
            uneven=unevenness(plan, engine.traits, engine.calibration),
            elsewhere=elsewhere(settings, plan),
        )


def completed(settings: Settings, asked: Question, plan: Plan) -> Plan:
    """A search's plan with what else the user said. Raises InputError where ds.* or megatron.* say otherwise than the plan."""
    index = [engine.name for engine in asked.planned].index(plan.engine)
    plan = msgspec.structs.replace(plan, run=settings.run, extra=settings.extra, prices=kept_prices(asked.files[index]))
    passthrough.check(plan, ENGINES[plan.engine].passes)
    return plan


SHOWN_FASTER = 1e-3
"""Share of a step below which a plan that may run out of memory is not worth showing."""


def the_fuller(settings: Settings, asked: Question, fuller: Plan | None, plan: Plan) -> Plan | None:
    """The plan that fills memory further where it is faster by enough to be shown, and what the user said does not contradict it."""
    if fuller is None or fuller.predicted is None or plan.predicted is None:
        return None
    if fuller.predicted.step_time_s >= plan.predicted.step_time_s * (1 - SHOWN_FASTER):
        return None
    try:
        return completed(settings, asked, fuller)
    except InputError:
        return None


def elsewhere(settings: Settings, plan: Plan) -> Elsewhere | None:
    """The best plan of the same engine, whose checkpoints it can go on from, on explain.gpus= GPUs; None: nobody asks."""
    cluster = settings.asked_cluster
    if cluster is None:
        return None
    asked = msgspec.structs.replace(settings, plan=None, engine=plan.engine)
    step = cluster.gpus_per_node if cluster.num_gpus > cluster.gpus_per_node else 1
    found, why = on_fewer(
        lambda gpus: fastest(msgspec.structs.replace(asked, cluster=recipe.resized(cluster, gpus))), range(cluster.num_gpus, 0, -step)
    )
    if found is None:
        return Elsewhere(gpus=cluster.num_gpus, why=why)
    return Elsewhere(gpus=cluster.num_gpus, plan=found.plan, why=why, refused=ENGINES[plan.engine].why_no_resume(plan, found.plan))


TRIED = 4
"""Numbers of GPUs of which the one with the fastest plan is taken, where a plan is for so many at most: 13 nodes may divide a batch worse
than 12 do. Where none of them has a plan the search goes on to the first that has."""


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
    best = min(found, key=lambda one: one.plan.predicted.step_time_s if one.plan.predicted else 0.0, default=None)
    return best, next(iter(why), "")


def unevenness(plan: Plan, traits: Traits, constants: calibration.Calibration) -> Unevenness | None:
    """What the routing of the plan's model costs it; None where it is even."""
    found = next((part.routing for part in plan.model.experts if part.routing is not None), None)
    if found is None or plan.predicted is None:
        return None

    def seconds(change: Callable[[Routing], Routing | None]) -> float:
        other = reprice(msgspec.structs.replace(plan, model=with_routing(plan.model, change)), traits, constants)
        assert other.predicted is not None
        return other.predicted.step_time_s

    return Unevenness(
        routing=found,
        parts=plan.ep,
        step_s=plan.predicted.step_time_s,
        even_s=seconds(lambda _: None),
        copied_s=seconds(lambda routing: msgspec.structs.replace(routing, busiest=routing.copied)),
    )


def with_routing(architecture: Architecture, change: Callable[[Routing], Routing | None]) -> Architecture:
    """Its experts with another routing in place of the one that they have."""

    def part(found: FeedForward | None) -> FeedForward | None:
        if not isinstance(found, Experts) or found.routing is None:
            return found
        return msgspec.structs.replace(found, routing=change(found.routing))

    pattern = tuple(msgspec.structs.replace(run, feed_forward=part(run.feed_forward)) for run in architecture.pattern)
    return msgspec.structs.replace(architecture, feed_forward=part(architecture.feed_forward), pattern=pattern)


def said_plan(best: Found, settings: Settings) -> Plan | None:
    """The fastest plan that an engine's own program can be told, where it can't be told the best one; None: it can, or none, or there was
    no search."""
    plan, asked = best.plan, best.asked
    if asked is None or settings.entry is not None:
        return None
    alone = msgspec.structs.replace(asked.asked, top_k=1, most_further=0)
    for engine, planned in zip(asked.engines, asked.planned, strict=True):
        program = engine.program
        if program is None or (engine.name == plan.engine and program.why_not(plan) is None):
            continue
        if program.why_never(settings.architecture, settings.training, settings.cluster.software) is not None:
            continue
        ((capabilities, _),) = searched_pairs([engine], settings, programs=True)
        try:
            able = [planned.able_to(capabilities)]
            with without_gc():
                found = search(asked.workload, able, alone, stop=out_of_time(settings), known=best.bounds).plan
        except NoPlanError:
            continue
        found = msgspec.structs.replace(found, run=settings.run, extra=plan.extra)
        if program.why_not(found) is None:
            return found
    return None


def workload_of(settings: Settings) -> Workload:
    """What is to be planned for."""
    training = settings.training
    model = describe(settings.architecture, training.seq_length, training.decoder_seq_length)
    return Workload(model=model, training=training, cluster=settings.cluster)


def out_of_time(settings: Settings) -> Callable[[], bool]:
    """Whether search.budget_s have passed since this was called."""
    budget_s, started = settings.budget_s, time.monotonic()
    return lambda: budget_s is not None and time.monotonic() - started > budget_s


def cost_of(plan: Plan, settings: Settings) -> CostModel:
    """What prices the plan."""
    traits = ENGINES[plan.engine].traits(settings.cluster.software)
    (file,) = prices(settings, [traits])
    return cost_model(workload_of(settings), traits, calibration.priced(settings.cluster, traits, file))


def kept_prices(known: calibration.Calibrated | None) -> Prices | None:
    """What plan.json keeps of a calibration of the user's own."""
    if known is None or not known.source:
        return None
    file = known.file
    return Prices(source=known.source, fitted_on=file.fitted_on, constants=file.values(), interval=file.interval, measured=file.measured)


def divided(plan: Plan) -> bool:
    """Whether the plan divides the model, or its weights, over ranks."""
    return plan.tp * plan.pp * plan.cp > 1 or plan.zero_stage == 3


def exchanging(engines: Sequence[Engine], settings: Settings) -> list[Engine]:
    """Those that can load model.init_from and write model.export_to. Raises InputError where there are none."""
    run = settings.run
    if run.init_from is None and run.export_to is None:
        return list(engines)
    key, folder = ("model.init_from", run.init_from) if run.init_from is not None else ("model.export_to", run.export_to)
    if settings.entry is not None:
        raise InputError(key, folder, f"is for our workers; entry={settings.entry} loads and writes weights itself")
    kind = None if run.init_from is None else recipe.model_type(run.init_from)
    reasons = {engine.name: engine.why_no_exchange(settings.architecture, kind) for engine in engines}
    able = [engine for engine in engines if reasons[engine.name] is None]
    if not able:
        raise InputError(key, folder, "; ".join(dict.fromkeys(filter(None, reasons.values()))))
    return able


def asked_engines(settings: Settings) -> list[Engine]:
    """Those that engine= leaves, or the one of plan=. Raises InputError where it lacks what some of the user's keys are for."""
    name = settings.engine if settings.plan is None else settings.plan.engine
    if settings.entry is not None and name == "auto":
        name = engine_of_entry(ENGINES)
    if name != "auto":
        if name in ENGINES and not passthrough.reaches(ENGINES[name].passes, settings.extra):
            passthrough.check_reached(name, settings.extra, {other: engine.passes for other, engine in ENGINES.items()})
        return [ENGINES[name]] if name in ENGINES else []
    return [engine for engine in ENGINES.values() if passthrough.reaches(engine.passes, settings.extra)]


def usable_engines(settings: Settings) -> list[Engine]:
    """Those of them that a search is over: they exchange weights as asked, and train the model where any does. Raises InputError."""
    return training_first(exchanging(asked_engines(settings), settings), settings)


def saved_plan(settings: Settings) -> Found:
    """The plan of plan=PATH, checked and priced again. Raises InputError where it is not legal or does not fit."""
    assert settings.plan is not None
    engine = settings.plan.engine
    if engine not in ENGINES:
        raise InputError("engine", engine, "of the plan is not known", ENGINES)
    exchanging([ENGINES[engine]], settings)
    plan, limit = priced_again(settings, settings.plan)
    check_fits(plan, limit)
    passthrough.check(plan, ENGINES[engine].passes)
    why_not = explained(settings, settings.explain, limit) if settings.explain.given() else ()
    traits = ENGINES[engine].traits(settings.cluster.software)
    uneven = unevenness(plan, traits, constants_of(settings, settings.plan, traits)[0])
    return Found(plan=plan, limit=limit, explained=why_not, elsewhere=elsewhere(settings, plan), uneven=uneven)


def costs_of(settings: Settings, plan: Plan) -> CostModel:
    """The prices that this plan was made with. Raises InputError."""
    traits = ENGINES[plan.engine].traits(plan.cluster.software)
    return cost_model(planned_workload(plan), traits, constants_of(settings, plan, traits)[0])


def memory_floors(asked: Question) -> Callable[[Candidate], float]:
    """Bytes that the fullest rank of a choice can't go below; what the search has priced is not priced again."""
    by_engine = {engine.name: engine.costs(asked.workload) for engine in asked.planned}
    return lambda candidate: by_engine[candidate.engine].memory_floor(candidate)


def constants_of(settings: Settings, plan: Plan, traits: Traits) -> tuple[calibration.Calibration, Prices | None]:
    """What a plan is priced with, and what it keeps of that: the prices that it was made with, unless calibration= says others."""
    saved = plan.prices
    if saved is not None and settings.calibration is None:
        base = calibration.datasheet(settings.cluster, traits)
        kept = calibration.kept(base, plan.calibration, saved.fitted_on, saved.constants, saved.interval, saved.measured)
        return with_risk(settings, traits, kept), saved
    (file,) = prices(settings, [traits])
    return priced(settings, traits, file), kept_prices(file)


def priced_again(settings: Settings, plan: Plan) -> tuple[Plan, MemoryLimit]:
    """The plan with a fresh prediction, and the memory that it may use, whether it fits or not. Raises InputError."""
    traits = ENGINES[plan.engine].traits(settings.cluster.software)
    constants, saved = constants_of(settings, plan, traits)
    check_plan(plan, ENGINES[plan.engine].capabilities(settings.cluster.software))
    again = msgspec.structs.replace(reprice(plan, traits, constants), prices=saved)
    return again, held_to(settings.limit, again, constants.memory_margin, cautious_margin_for(settings, traits, constants))


def found_plan(settings: Settings, progress: Progress | None = None, without: Collection[str] = (), *, with_fuller: bool = False) -> Found:
    """The plan of plan=PATH, or the fastest of the engines but those `without` names. `with_fuller`: as `searched_plan`. Raises InputError,
    NoPlanError."""
    return saved_plan(settings) if settings.plan is not None else searched_plan(settings, progress, without, with_fuller=with_fuller)


def the_job(settings: Settings, plan: Plan, said: Plan | None = None, *, trial_steps: int | None = None) -> Job:
    """The plan as the job of our worker, or of the user's own program, with the user's variables. `trial_steps`: of a user's own program
    that is only measured (Entry). Raises InputError."""
    job = ENGINES[plan.engine].translate(plan)
    if said is not None and (program := ENGINES[said.engine].program) is not None:
        job = program.beside(job, plan, said)
    if settings.entry is not None:
        entry = Entry(program=settings.entry, arguments=settings.entry_args, without=settings.entry_without,
                      launcher=settings.entry_launcher, exit_minutes=render.exit_minutes(settings.slurm.time),
                      trial_steps=trial_steps)  # fmt: skip
        job = entry_job(ENGINES, plan, job, entry)
        job = msgspec.structs.replace(job, preflight=settings.entry_preflight)
    return render.with_environment(with_enough_documents(settings, plan, job), settings.env)


def with_enough_documents(settings: Settings, plan: Plan, job: Job) -> Job:
    """The job of an engine's own program that divides its data by whole documents, of which there are enough. Raises InputError where not;
    beside our worker, which cuts anywhere in a text, a note says so of the file with the program's arguments."""
    program = ENGINES[plan.engine].program
    arguments = None if program is None else program.of_documents(plan)
    if program is None or arguments is None:
        return job
    try:
        check_documents(arguments if settings.entry is None else job.arguments, plan.training.seq_length)
    except InputError as error:
        if settings.entry is not None:
            raise
        return msgspec.structs.replace(job, notes=(*job.notes, f"{program.arguments} can't be started: {error}"))
    return job
