"""The main path: load, choose the cluster, search (or check a saved plan), write everything, start, report.

    python -m orchestrator.run recipe=gpt_tiny gpus=4

Exit status: 0; 2 for bad input, no plan, or no way to start; the training's own; 130 on Ctrl-C.
"""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

import msgspec

import orchestrator
from orchestrator import detect, recipe
from orchestrator.commands import INTERRUPTED, command
from orchestrator.cost import calibration
from orchestrator.cost.price import CostModel
from orchestrator.engines import ENGINES, Engine, passthrough
from orchestrator.engines.entry import ENGINE_OF_ENTRY, entry_job
from orchestrator.engines.megatron_args import megatron_flags, program_of, why_not
from orchestrator.errors import InputError, LaunchError, NoPlanError
from orchestrator.hardware.catalog import by_driver_name
from orchestrator.job import File, Job
from orchestrator.launch import render
from orchestrator.model.families import describe
from orchestrator.model.spec import ModelSpec
from orchestrator.plan import Plan, Prices, json_schema, to_json
from orchestrator.recipe import Settings
from orchestrator.recipe.documents import check_documents
from orchestrator.search.explain import DataParallel, Explanation, data_parallelism_alone, explain, narrower_tp
from orchestrator.search.planner import Outcome, check_plan, reprice, search
from orchestrator.search.question import PlannedEngine, SearchSettings
from orchestrator.search.unasked import Unasked, unasked
from orchestrator.strategy.capabilities import Capabilities, Traits
from orchestrator.strategy.layerwise import NAME as LAYERWISE
from orchestrator.strategy.legality import lacking_parts, plan_only
from orchestrator.strategy.pins import MemoryLimit, Pins
from orchestrator.strategy.workload import Workload
from orchestrator.units import format_seconds
from orchestrator.values import Value

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

SHOWN_ALTERNATIVES = 5
FILE_WIDTH = 120
"""Columns where the output is no terminal: tables of plans want more than the usual 80."""
SHOWN_AFTER_S = 1.0
"""A search that is done by then needs no progress bar."""


def main(words: Sequence[str]) -> int:
    """The command; returns its exit status. Known errors come as one message, without a traceback."""
    return command(words, lambda: recipe.help_text(list(ENGINES)), run)


def console() -> int:
    """The console script `orchestrator`: the same as `python -m orchestrator.run`."""
    return main(sys.argv[1:])


def run(words: Sequence[str]) -> int:
    """The way through the house."""
    if "--version" in words:
        print(orchestrator.__version__)
        return 0
    if "--schema" in words:
        print(json.dumps(recipe.recipe_schema(), indent=1))
        return 0
    machine = detect.machine()
    settings = recipe.load([word for word in words if word != "--cfg"], machine, [*ENGINES, LAYERWISE])
    if "--cfg" in words:
        print(recipe.resolved_yaml(settings), end="")
        return 0
    print(settings.why_cluster, flush=True)
    out = new_folder(settings)
    if settings.engine == LAYERWISE:
        return layerwise_run(settings, out)
    start = choose_start(settings, machine)
    found = saved_plan(settings) if settings.plan else searched_plan(settings)
    job = the_job(settings, found.plan, found.said)
    lacks = lacks_packages(ENGINES[found.plan.engine], machine)
    start = startable(start, settings, job, lacks)
    python = None if lacks or settings.container else sys.executable
    write_folder(out, all_files(settings, found, job, out, python))
    show_plan(settings, found, job, out)
    try:
        return follow(start, settings, found.plan, job, out)
    except LaunchError:  # nothing was started (Slurm refuses the job, say): leave nothing behind
        clear_folder(out)
        raise


# ---------------------------------------------------------------------------------------------------------------- plan


class Found(Value, frozen=True, kw_only=True):
    """The plan, the best others, and what became of every outer choice (empty for a saved plan)."""

    plan: Plan
    alternatives: tuple[Plan, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
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
    said: Plan | None = None
    """Where an engine's own program can't be told the plan: the fastest that it can."""
    limit: MemoryLimit
    """With what is kept free for the plan's engine."""


def engine_pairs(engines: Sequence[Engine], settings: Settings) -> list[tuple[Capabilities, Traits]]:
    software = settings.cluster.software
    return [(engine.capabilities(software), engine.traits(software)) for engine in engines]


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


@contextmanager
def without_gc() -> Iterator[None]:
    """What a search makes is needed to its end: looking for garbage in it takes a tenth of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def searched_plan(settings: Settings) -> Found:
    """The fastest plan of all engines that may be used. Raises NoPlanError."""
    engines = training_first(exchanging(asked_engines(settings), settings), settings)
    workload = workload_of(settings)
    pairs = searched_pairs(engines, settings, programs=settings.entry is not None)
    files = prices(settings, [traits for _, traits in pairs])
    calibrations = [calibration.priced(settings.cluster, traits, file) for (_, traits), file in zip(pairs, files, strict=True)]
    planned = [PlannedEngine(capabilities=c, traits=t, calibration=k) for (c, t), k in zip(pairs, calibrations, strict=True)]
    asked = SearchSettings(pins=settings.pins, limit=settings.limit, top_k=SHOWN_ALTERNATIVES)
    with without_gc():
        with SearchProgress() as progress:
            result = search(workload, planned, asked, progress=progress.show, stop=out_of_time(settings))
        if not result.complete:
            print(f"search.budget_s={settings.budget_s} ended the search: this is the best plan so far, others may be faster")
        index = [engine.name for engine in planned].index(result.plan.engine)
        plan = msgspec.structs.replace(result.plan, run=settings.run, extra=settings.extra, prices=kept_prices(files[index]))
        said = None if settings.entry is not None else said_plan(plan, workload, engines, settings, calibrations)

        def why_not(questions: Pins) -> tuple[Explanation, ...]:
            return explain(questions, workload, planned, asked)

        explained = why_not(settings.explain)
        inside = narrower_tp(plan) if settings.pins.tp is None else None
        narrower = why_not(Pins(tp=inside)) if inside is not None else ()
        alone = data_parallelism_alone(workload, planned) if divided(plan) else ()
    return Found(
        plan=plan,
        alternatives=result.alternatives,
        outcomes=result.outcomes,
        at_least_s=result.at_least_s,
        explained=explained,
        narrower=narrower,
        searched=tuple(capabilities for capabilities, _ in pairs),
        unasked=unasked(plan, planned[index]),
        alone=alone,
        said=said,
        limit=settings.limit.of(calibrations[index].memory_margin),
    )


def said_plan(
    plan: Plan, workload: Workload, engines: Sequence[Engine], settings: Settings, calibrations: Sequence[calibration.Calibration]
) -> Plan | None:
    """The fastest plan that an engine's own program can be told, where it can't be told this one; None: it can, or none."""
    asked = SearchSettings(pins=settings.pins, limit=settings.limit, top_k=1)
    for engine, constants in zip(engines, calibrations, strict=True):
        program = engine.program
        if program is None or program.why_not(plan) is None:
            continue
        if program.why_never(settings.architecture, settings.training, settings.cluster.software) is not None:
            continue
        ((capabilities, traits),) = searched_pairs([engine], settings, programs=True)
        told = PlannedEngine(capabilities=capabilities, traits=traits, calibration=constants)
        try:
            found = search(workload, [told], asked, stop=out_of_time(settings)).plan
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


def kept_prices(known: calibration.Calibrated | None) -> Prices | None:
    """What plan.json keeps of a calibration of the user's own."""
    if known is None or not known.source:
        return None
    file = known.file
    return Prices(source=known.source, fitted_on=file.fitted_on, constants=file.values(), interval=file.interval)


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


def layerwise_run(settings: Settings, out: Path) -> int:
    """engine=layerwise: the paper's full space beside the best engine plan, and the file for the runtime that can run it; nothing starts.

    `pin.pp` fixes the stages; the other pins are the engines'.
    """
    from orchestrator.report.layerwise import layerwise_table
    from orchestrator.search.layerwise import AnalyticPrices, ProfilePrices, layerwise, open_batches
    from orchestrator.search.layerwise import Prices as LayerPrices
    from orchestrator.strategy.layerwise import TRAITS, galvatron_json

    training, cluster, profile = settings.training, settings.cluster, settings.profile
    if profile is not None and settings.architecture.family == "profile":
        model = ModelSpec(architecture=settings.architecture, seq_length=training.seq_length, runs=())
        workload = Workload(model=model, training=training, cluster=cluster)
        best = None
    else:
        workload = workload_of(settings)
        try:
            best = searched_plan(msgspec.structs.replace(settings, engine="auto", profile=None)).plan
        except NoPlanError as error:
            print(f"engines: {error}")
            best = None
    software = cluster.software
    traits = msgspec.structs.replace(TRAITS, flash_attention=software.flash_attention or software.transformer_engine)
    # The constants of the engine it is compared with, so that the difference is the plan's.
    constants = calibration.calibrated(cluster, traits if best is None else ENGINES[best.engine].traits(software))
    costs = CostModel(workload, traits, constants)
    layer_prices: LayerPrices = AnalyticPrices(costs) if profile is None else ProfilePrices(profile, costs)
    most = training.global_batch_size
    batches = open_batches(most, cluster.num_gpus) if settings.open_batch else (most,)
    result = layerwise(layer_prices, batches, settings.limit.of(constants.memory_margin), pp=settings.pins.pp)
    plan = result.plan
    files = [
        File(path="config.yaml", content=recipe.resolved_yaml(settings)),
        File(path="galvatron.json", content=json.dumps(galvatron_json(plan), indent=1) + "\n"),
        File(path="layerwise.json", content=msgspec.json.format(msgspec.json.encode(plan), indent=1).decode() + "\n"),
    ]
    if best is not None:
        files.append(File(path="plan.json", content=to_json(best)))
    write_folder(out, files)
    screen().print(layerwise_table(plan, best, result.at_least_s))
    print(f"Written to {out}; galvatron.json is for Hetu-Galvatron's runtime")
    return 0


class SearchProgress:
    """A bar on a terminal once a search has taken SHOWN_AFTER_S; nothing elsewhere."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.bar: Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def show(self, done: int, total: int, best_s: float | None) -> None:
        """What the search calls: outer choices done, in all, and seconds of the best plan so far."""
        if self.bar is None:
            if time.monotonic() - self.started < SHOWN_AFTER_S or not sys.stdout.isatty():
                return
            from rich.progress import Progress

            self.bar = Progress(transient=True)
            self.bar.add_task("searching", total=total)
            self.bar.start()
        found = "" if best_s is None else f", best {format_seconds(best_s)}"
        self.bar.update(self.bar.task_ids[0], completed=done, description=f"searching{found}")


def saved_plan(settings: Settings) -> Found:
    """The plan of plan=PATH, checked and priced again. Raises InputError where it is not legal or does not fit."""
    assert settings.plan is not None
    engine = settings.plan.engine
    if engine not in ENGINES:
        raise InputError("engine", engine, "of the plan is not known", ENGINES)
    exchanging([ENGINES[engine]], settings)
    traits = ENGINES[engine].traits(settings.cluster.software)
    saved = settings.plan.prices
    if saved is not None and settings.calibration is None:  # the prices that the plan was made with
        base = calibration.datasheet(settings.cluster, traits)
        constants = calibration.kept(base, settings.plan.calibration, saved.fitted_on, saved.constants, saved.interval)
    else:
        (file,) = prices(settings, [traits])
        constants, saved = calibration.priced(settings.cluster, traits, file), kept_prices(file)
    limit = settings.limit.of(constants.memory_margin)
    check_plan(settings.plan, engine_pairs([ENGINES[engine]], settings), limit, constants)
    plan = msgspec.structs.replace(reprice(settings.plan, traits, constants), prices=saved)
    return Found(plan=plan, limit=limit)


def the_job(settings: Settings, plan: Plan, said: Plan | None = None) -> Job:
    """The plan as the job of our worker, or of the user's own program, with the user's variables. `said`: as `Found`. Raises InputError."""
    job = ENGINES[plan.engine].translate(plan)
    if said is not None and (program := ENGINES[said.engine].program) is not None:
        job = program.beside(job, plan, said)
    if settings.entry is not None:
        job = entry_job(plan, job, settings.entry, settings.entry_args, settings.entry_without,
                        render.exit_minutes(settings.slurm.time), settings.entry_launcher)  # fmt: skip
        job = msgspec.structs.replace(job, preflight=settings.entry_preflight)
    return render.with_environment(with_enough_documents(settings, plan, job), settings.env)


def with_enough_documents(settings: Settings, plan: Plan, job: Job) -> Job:
    """The job of Megatron-LM's program, whose data has what its --split asks for. Raises InputError where not; beside our worker, which
    cuts anywhere in a text, a note says so of megatron_args.sh."""
    if plan.engine != "megatron" or program_of(plan) != "pretrain_gpt.py":
        return job
    if settings.entry is not None:
        check_documents(job.arguments, plan.training.seq_length)
        return job
    flags = megatron_flags(plan) if why_not(plan) is None else ()
    try:
        check_documents([word for flag in flags for word in flag], plan.training.seq_length)
    except InputError as error:
        return msgspec.structs.replace(job, notes=(*job.notes, f"megatron_args.sh can't be started: {error}"))
    return job


# --------------------------------------------------------------------------------------------------------------- start


class Start(Value, frozen=True, kw_only=True):
    """How the job is started; `why` where it isn't."""

    how: Literal["none", "local", "allocation", "slurm"]
    why: str = ""


def choose_start(settings: Settings, machine: detect.Machine) -> Start:
    """What `launch=` means on this machine. Raises LaunchError where it can't be done."""
    blocked = None
    if settings.entry is not None and not settings.container and not Path(settings.entry).is_file():
        blocked = f"there is no entry={settings.entry} on this machine"
    here = blocked or not_here(settings, machine)
    if settings.launch == "none":
        return Start(how="none", why="launch=none")
    if settings.launch == "local":
        if here:
            raise LaunchError(f"launch=local: {here}; launch=none writes everything without starting it")
        if settings.container:
            image = settings.container.image
            raise InputError("container.image", image, "is not started by launch=local",
                             ["launch=slurm", "launch=none (prints the line for docker, enroot or apptainer)"])  # fmt: skip
        return Start(how="local")
    if settings.launch == "slurm":
        if blocked or not machine.sbatch:
            why = blocked or "there is no sbatch on the PATH of this machine"
            raise LaunchError(f"launch=slurm: {why}; launch=none writes everything without starting it")
        if machine.slurm_job and machine.slurm_nodes >= settings.cluster.num_nodes:
            return Start(how="allocation")
        return Start(how="slurm")
    if machine.slurm_job and not blocked:
        if machine.slurm_nodes >= settings.cluster.num_nodes:
            return Start(how="allocation")
        nodes = f"{machine.slurm_nodes} node{'s' if machine.slurm_nodes != 1 else ''}"
        return Start(how="none", why=f"this Slurm allocation has {nodes} of {settings.cluster.num_nodes}")
    if settings.container:
        here = here or "container.image is for the nodes of a Slurm job, or by hand"
    return Start(how="none", why=here) if here else Start(how="local")


def startable(start: Start, settings: Settings, job: Job, lacks: str | None) -> Start:
    """The start, or why there is none: only the engine's own program can run some plans, and of several engines the one that was chosen may
    lack packages here (`lacks`). Raises LaunchError where a start was asked for."""
    why = job.without_worker if job.program is None else ""
    if start.how == "local":
        why = why or lacks or ""
    if not why:
        return start
    if settings.launch in ("local", "slurm"):
        raise LaunchError(f"launch={settings.launch}: {why}; launch=none writes everything without starting it")
    return Start(how="none", why=why)


def not_here(settings: Settings, machine: detect.Machine) -> str | None:
    """Why the job can't be started on this machine; None: it can."""
    cluster = settings.cluster
    if cluster.is_cpu and machine.num_gpus:
        return "the plan is for gloo ranks on a machine without GPUs, and this one has some"
    if not cluster.is_cpu:
        needs = f"the plan needs {cluster.num_gpus} x {cluster.gpu.name}"
        if not machine.num_gpus:
            return f"{needs}, and this machine has no GPU"
        types = [by_driver_name(name) for name in machine.gpu_types]
        mixed = cluster.mixed and types and all(gpu is not None and gpu.covers(cluster.gpu) for gpu in types)
        if machine.catalog_name != cluster.gpu.name and not mixed:
            several = "" if machine.gpu_name else "; cluster.mixed=slowest plans for what all of them can do"
            return f"{needs}, and this machine has {machine.gpu_name or ', '.join(machine.gpu_types)}{several}"
        if machine.num_gpus < cluster.num_gpus:
            return f"{needs}, and this machine has {machine.num_gpus}"
    lacking = [lacks_packages(engine, machine) for engine in asked_engines(settings)]
    return lacking[0] if lacking and None not in lacking else None


def lacks_packages(engine: Engine, machine: detect.Machine) -> str | None:
    """What this engine needs and this machine has not; None: all is there."""
    missing = engine.requirements.lacking(machine.missing)
    if not missing:
        return None
    return f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed (pip install -e '.[engines]')"


def asked_engines(settings: Settings) -> list[Engine]:
    """Those that engine= leaves, or the one of plan=."""
    name = settings.engine if settings.plan is None else settings.plan.engine
    if settings.entry is not None and name == "auto":
        name = ENGINE_OF_ENTRY
    if name != "auto":
        return [ENGINES[name]] if name in ENGINES else []
    return [engine for engine in ENGINES.values() if passthrough.reaches(engine.name, settings.extra)]


def follow(start: Start, settings: Settings, plan: Plan, job: Job, out: Path) -> int:
    """Start, show progress, compare prediction and measurement; the exit status."""
    from orchestrator.launch import local, slurm
    from orchestrator.report.measured import comparison_table, measured_step_time
    from orchestrator.report.progress import TrainingProgress

    console = screen()
    submitted: slurm.Submitted | None = None
    if start.how == "none":
        how = "" if start.why.startswith("plan only") else f" To start it: {start_command(settings, job, out)}"
        print(f"Not started: {start.why}.{how}")
        return 0
    if start.how == "slurm":
        submitted = slurm.submit(out, settings.slurm)
        print(submitted, flush=True)
        if not settings.wait:
            return 0
    with TrainingProgress(console, plan.training.steps) as progress:
        if submitted is not None:
            try:
                outcome = slurm.follow(submitted, out, on_step=progress.step, own=job.program is None)
            except KeyboardInterrupt:
                print(f"no longer followed; the job goes on. Watch: {submitted.watch}. Cancel: {submitted.cancel}", file=sys.stderr)
                return INTERRUPTED
        else:
            starter = local.start if start.how == "local" else slurm.start_in_allocation
            outcome = starter(job, out, on_step=progress.step)
    predicted = plan.predicted.step_time_s if plan.predicted else None
    measured = measured_step_time(outcome.rows)
    local.write_status(out, outcome, predicted_step_time_s=predicted, measured_step_time_s=measured)
    if outcome.status == "finished":
        console.print(comparison_table(plan, outcome.rows))
        for note in local.preflight_notes(out):
            print(f"preflight: {note}")
        print(f"Finished: {out}")
    else:
        host = f" on {outcome.host}" if outcome.host else ""
        rank = "" if outcome.rank is None else f"rank {outcome.rank}{host}: "
        print(f"error: training {outcome.status}: {rank}{outcome.last_line}\nlog: {outcome.log}", file=sys.stderr)
    return outcome.exit_status


def start_command(settings: Settings, job: Job, out: Path) -> str:
    """What a user types on the machine where the job can run."""
    import shlex

    if job.without_worker and job.program is None:
        return "the same with that entry"
    folder = shlex.quote(str(out))
    if job.num_nodes > 1:
        return f"cd {folder} && sbatch job.sbatch"
    if settings.container is not None:
        return render.container_command(settings.container, str(out), job.backend == "nccl")
    return f"bash {shlex.quote(str(out / 'launch.sh'))}"


# -------------------------------------------------------------------------------------------------------------- screen


def screen() -> Console:
    """The terminal at its own width; a file or pipe at a fixed one."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=FILE_WIDTH)


def show_plan(settings: Settings, found: Found, job: Job, out: Path) -> None:
    """The plan, its price, the alternatives, and what the files are."""
    from orchestrator.report import text
    from orchestrator.report.memory import data_parallel_table, memory_table

    console = screen()
    plan = found.plan
    model = describe(plan.model, plan.training.seq_length, plan.training.decoder_seq_length)
    console.print(text.plan_table(plan, model, found.limit))
    console.print(text.price_table(plan, found.limit))
    if found.outcomes:
        console.print(text.alternatives_table(plan, found.alternatives))
        for line in text.close_engines(plan, found.alternatives):
            print(line)
        alone = [(row.engine, row.zero_stage, row.least.predicted if row.least else None, row.why) for row in found.alone]
        if any(predicted is not None and predicted.peak_memory_bytes > found.limit.usable for _, _, predicted, _ in alone):
            console.print(data_parallel_table(plan, alone, found.limit))
        total, priced = len(found.outcomes), sum(outcome.step_time_s is not None for outcome in found.outcomes)
        for explanation in found.explained:
            print(text.explanation_text(plan, explanation.question, explanation.plan, explanation.why))
            if explanation.refused is not None:
                console.print(memory_table(explanation.refused.choice, explanation.refused.predicted, found.limit))
        for other_tp in found.narrower:
            print(text.wide_tp_text(plan, other_tp.plan, other_tp.why))
        for other in found.unasked:
            print(text.unasked_text(plan, other.key, other.predicted, found.limit))
        print(text.proof(plan, found.at_least_s, found.searched) + ".")
        print(f"{total} choices: {priced} priced, {total - priced} not taken; candidates.csv has each with its price or reason")
    print(f"Written to {out}")
    for note in job.notes:
        print(f"note: {note}")
    sys.stdout.flush()


# ----------------------------------------------------------------------------------------------------------- the folder


def new_folder(settings: Settings) -> Path:
    """Where to write: absolute, new or empty, below a folder that can be written. Raises InputError; makes nothing."""
    if settings.out is None:
        name = re.sub(r"[^A-Za-z0-9._-]+", "_", settings.recipe).strip(".") or "run"
        base = Path("runs").absolute() / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        out = base
        for number in range(2, 1000):  # two runs within a second
            if not out.exists():
                break
            out = base.with_name(f"{base.name}-{number}")
        shown = str(out)
    else:
        shown = settings.out
        out = Path(settings.out)
    try:
        out = out.resolve()
        if out.is_symlink():  # Python 3.13 leaves a link to itself as it is; before, resolve() says so
            raise InputError("out", shown, "can't be made: is a link that leads to itself")
        if out.exists() and not out.is_dir():
            raise InputError("out", shown, "is a file; a folder that is new or empty is needed")
        if out.is_dir() and any(out.iterdir()):
            raise InputError("out", shown, "is a folder with files in it; name a new one")
        parent = next(parent for parent in (out, *out.parents) if parent.exists())
        if not parent.is_dir():
            raise InputError("out", shown, f"can't be made: {parent} is a file")
        if not os.access(parent, os.W_OK | os.X_OK):
            raise InputError("out", shown, f"can't be made: {parent} can't be written")
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError("out", shown, f"can't be made: {getattr(error, 'strerror', None) or error}") from None
    return out


def all_files(settings: Settings, found: Found, job: Job, out: Path, python: str | None) -> list[File]:
    """Everything that the folder holds before the start."""
    from orchestrator.report.candidates import candidates_csv

    schema = msgspec.json.format(msgspec.json.encode(json_schema()), indent=1).decode() + "\n"
    saved = str(out / "plan.json") if settings.plan else None
    files = [
        File(path="config.yaml", content=recipe.resolved_yaml(settings, saved)),
        File(path="plan.json", content=to_json(found.plan)),
        File(path="plan.schema.json", content=schema),
    ]
    if found.outcomes:
        files.append(File(path="candidates.csv", content=candidates_csv(found.outcomes)))
    files += job.files
    options = msgspec.structs.replace(settings.slurm, python=settings.slurm.python or python, planner=sys.executable)
    files += render.files(job, slurm=options, container=settings.container)
    return files


def write_folder(out: Path, files: Sequence[File]) -> None:
    """All files or none: written beside `out` (inside it where it exists already) and moved when complete. Raises InputError."""
    made = [parent for parent in out.parents if not parent.exists()]
    existed = out.exists()
    temporary: Path | None = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".writing-", dir=out if existed else out.parent))
        for file in files:
            path = temporary / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(file.content, encoding="utf-8")
            if file.executable:
                path.chmod(0o755)
        if existed:
            for path in sorted(temporary.iterdir()):
                path.rename(out / path.name)
            temporary.rmdir()
        else:
            temporary.chmod(0o755)
            temporary.rename(out)
    except BaseException as error:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        for parent in made:
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()
        if isinstance(error, OSError):
            raise InputError("out", out, f"can't be written: {error.strerror or error}") from None
        raise


def clear_folder(out: Path) -> None:
    """Take back what `write_folder` wrote: `out` was new or empty before."""
    shutil.rmtree(out, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
