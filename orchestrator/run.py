"""The main path: load, choose the cluster, search (or check a saved plan), write everything, start, report.

    python -m orchestrator.run recipe=gpt_tiny gpus=4

Exit status: 0; 2 for bad input, no plan, or no way to start; 75 where the training saved and stopped before its end, as a first Ctrl-C
asks it to; its own where it failed; 130 where Ctrl-C ended it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import yaml

import orchestrator
from orchestrator import detect, pictures, recipe, tuning
from orchestrator.asking.answer import Answer
from orchestrator.commands import INTERRUPTED, alone, by_name, command, say_json, without_json
from orchestrator.cost import calibration
from orchestrator.cost.memory_policy import within
from orchestrator.cost.mixed import cost_model
from orchestrator.engine_prices import EnginePrices
from orchestrator.engines import ENGINES, Engine, tools
from orchestrator.engines.engine import OwnLoop
from orchestrator.errors import InputError, LaunchError, NoPlanError, no_room
from orchestrator.folder import all_files, clear_folder, held, new_folder, with_outside, write_folder
from orchestrator.hardware.catalog import by_driver_name
from orchestrator.health import rising
from orchestrator.job import File, Job
from orchestrator.launch import render, schedulers
from orchestrator.launch.stopped import saved_step, stopped
from orchestrator.model.spec import ModelSpec
from orchestrator.plan import Plan, RunSettings, to_json
from orchestrator.plan.check import bound_to_layout
from orchestrator.planning import Found, Planner, planned
from orchestrator.recipe import Settings, resuming, supervised
from orchestrator.recipe.sources import has_tokenizer
from orchestrator.recipe.whole_data import check_bytes, check_first_texts, check_whole, is_made_up
from orchestrator.screen import SearchProgress, data_key, made_up_data, screen, show_plan
from orchestrator.strategy.layerwise import NAME as LAYERWISE
from orchestrator.strategy.workload import Workload
from orchestrator.units import format_bytes
from orchestrator.values import Value, indented

STATUS: Final = "status.json"
"""How a run ended (launch.local.write_status)."""
SAVING: Final = "Saving and ending; Ctrl-C or SIGTERM once more ends at once."
"""What a first Ctrl-C, SIGTERM, SIGHUP or SIGUSR1 is answered."""
MOCK: Final = "--mock-data"
"""Megatron-LM's random tokens in place of data."""


def main(words: Sequence[str]) -> int:
    """Runs the command and returns its exit status. Known errors come as one message, without a traceback."""
    engines = list(ENGINES)
    return command(words, lambda: recipe.help_text(engines), run, topic=lambda topics: recipe.topic_text(topics, engines))


def run(words: Sequence[str]) -> int:
    """Plans, writes, starts. With --json standard output has the answer alone, and what is said on the way goes to standard error."""
    words, as_json = without_json(words)
    if not as_json or "--schema" in words:
        return through(words)
    answer: dict[str, Any] = {}
    with contextlib.redirect_stdout(sys.stderr):
        status = through(words, answer)
    say_json({**answer, "exit_status": status})
    return status


def through(words: Sequence[str], answer: dict[str, Any] | None = None) -> int:
    """Reads the keys, plans, writes, starts; returns the exit status. `answer` gets what --json prints; None: it prints nothing."""
    if "--version" in words:
        add_to(answer, version=orchestrator.__version__)
        print(orchestrator.__version__)
        return 0
    if "--schema" in words:
        print(json.dumps(recipe.recipe_schema(), indent=1))
        return 0
    machine = detect.machine()
    settings = recipe.load([word for word in words if word != "--cfg"], machine, [*ENGINES, LAYERWISE])
    if "--cfg" in words:
        resolved = recipe.resolved_yaml(settings)
        add_to(answer, config=yaml.safe_load(resolved))
        print(resolved, end="")
        return 0
    recipe.check_no_question(settings)
    check_entry(settings)
    print(settings.why_cluster, flush=True)
    if settings.continues is not None:
        resuming.check_whole(settings.continues)
        print(resuming.said(settings.continues, settings.training), flush=True)
    with held(settings, new_folder if settings.tune is None else tuning.tune_folder) as out:
        return in_folder(settings, machine, out, answer)


def in_folder(settings: Settings, machine: detect.Machine, out: Path, answer: dict[str, Any] | None) -> int:
    """Plans, writes and runs what the settings ask for, in a folder that is this run's alone; returns the exit status."""
    if settings.engine == LAYERWISE:
        add_to(answer, out=str(out))
        return layerwise_run(settings, out, answer)
    start = choose_start(settings, machine)
    if start.how != "none":
        check_data_given(settings)
    check_whole(settings.run, supervised=settings.training.task == "sft" and settings.entry is None)
    architecture = settings.architecture
    if settings.reads_texts:
        check_first_texts(settings.run)
        if architecture.traced is None or not is_made_up(settings.run):  # else its batches are drawn
            check_bytes(settings.run, architecture.vocab_size)
    absent = left_out(start, settings, machine)
    for name, why in absent.items():
        print(f"engine={name} is left out: {why}; launch=none plans for it too", flush=True)
    if settings.tune is not None:
        tuning.check_tunable(settings, start.how, start.why)
        settings, found = tuning.tuned(settings, start.how, out, absent)
        screen().print(tuning.tune_table(tuning.read_trials(out), found.plan))
    else:
        with SearchProgress() as progress:
            try:
                settings, found = planned(settings, lambda planner: planner.plan(progress.show, absent))
            except NoPlanError as error:
                raise resuming.with_inherited_pins(error, settings.continues, settings.pins) from None
    if settings.continues is not None:
        check_route(settings.continues, found.plan, Planner(settings).trained_by(found.plan)[0])
    check_range(settings, found.plan)
    check_async(settings, found.plan)
    check_routed(found.plan)
    planner = Planner(settings)
    job = with_outside(planner.job(found.plan, planner.for_program(found)), found.plan, out)
    loop, why_worker = planner.trained_by(found.plan)
    if found.plan.run.wandb and loop is None and job.program is None:
        why = f"is for the engines' own training loops, and our worker trains this plan ({why_worker}): its numbers are in metrics.jsonl"
        raise InputError("wandb.project", found.plan.run.wandb["project"], why)
    lacks = lacks_packages(ENGINES[found.plan.engine], machine) or lacks_own_loop(loop, settings)
    start = startable(start, settings, job, lacks)
    if start.how != "none" and MOCK in job.arguments and not (settings.cluster.is_cpu or settings.made_up_data):
        choices = ["data=PREFIX", "data.made_up=true (a trial on just that)", "launch=none (the plan alone)"]
        raise InputError("data", None, f"is missing, and {settings.entry} would train on {MOCK}", choices)
    python = None if lacks or settings.container else sys.executable
    write_folder(out, all_files(settings, found, job, out, python))
    if (slurm := settings.slurm).least_nodes is not None and (named := [name for name in settings.write if name in schedulers.WRITERS]):
        asked = f"{slurm.most_nodes} nodes of slurm.nodes={slurm.least_nodes}-{slurm.most_nodes}"
        print(f"write={','.join(named)}: for the {asked}, a range that job.sbatch alone keeps", flush=True)
    show_plan(settings, found, job, out, starts=start.how != "none")
    if proposed := tuning.proposal(settings, found, start.how):
        print(proposed, flush=True)
    if answer is not None:
        add_to(answer, **Answer(settings=settings, found=found).summary(), out=str(out), start=start.how, why_not_started=start.why)
        add_to(answer, notes=[*job.notes], plan=json.loads(to_json(found.plan)))
    if is_rehearsed(start, settings, job, machine):
        if start.how != "none":
            print("a rehearsal first, then the training: launch=none rehearses alone", flush=True)
        rehearse_first(settings, found.plan, job, out, machine)
    try:
        status = follow(start, settings, found, job, out)
        if answer is not None and (out / STATUS).is_file():
            answer["run"] = json.loads((out / STATUS).read_text(encoding="utf-8"))
        return status
    except LaunchError:  # nothing was started (Slurm refuses the job, say): leave nothing behind
        clear_folder(out)
        raise


def add_to(answer: dict[str, Any] | None, **more: Any) -> None:
    """Adds more to what --json prints."""
    if answer is not None:
        answer |= more


def is_rehearsed(start: Start, settings: Settings, job: Job, machine: detect.Machine) -> bool:
    """Whether the plan's worst stages go through some micro-batches first. Raises InputError where no worker of ours can."""
    if settings.rehearse != "auto":
        if settings.rehearse == "true" and (job.program is not None or job.without_worker):
            raise InputError("rehearse", "true", job.without_worker or f"is for our workers, and entry={settings.entry} is another program")
        return settings.rehearse == "true"
    same = machine.catalog_name == settings.cluster.gpu.name
    return start.how == "slurm" and same and job.program is None and settings.container is None


def rehearse_first(settings: Settings, plan: Plan, job: Job, out: Path, machine: detect.Machine) -> None:
    """Rehearses the plan, for real where this machine has what it is for, else without memory; says what was found. Raises LaunchError for
    what does not run or does not fit."""
    from orchestrator import rehearsal

    cost = Planner(settings).prices_for(plan.engine).costs(plan)
    environment, worker = dict(job.environment), ENGINES[plan.engine].translate(plan).module
    if not (settings.cluster.is_cpu or machine.catalog_name == settings.cluster.gpu.name):
        for line in rehearsal.built_lines(plan, cost, rehearsal.built(plan, worker, environment, out)):
            print(line, flush=True)
        return
    stages = ", ".join(f"{stage} ({why})" for stage, why in rehearsal.stages_to_rehearse(plan).items())
    print(f"rehearsing stage {stages}: one rank of it alone, on this machine", flush=True)
    found = rehearsal.rehearse(plan, worker, environment, cost, out)
    screen().print(rehearsal.rehearsed_table(found))
    over = [one for one in found if one.measured_bytes > settings.limit.limit]
    if over:
        most = f"{format_bytes(over[0].measured_bytes)} of {format_bytes(settings.limit.limit)}"
        raise LaunchError(f"rehearse=true: stage {over[0].stage} takes {most}; memory.reserve_gib=N plans with more room")


def check_route(checkpoint: resuming.Checkpoint, plan: Plan, loop: OwnLoop | None = None) -> None:
    """Says how the checkpoint is read into the plan's layout. `loop`: the engine's own that reads it; None: our worker does. Raises
    InputError where it can't."""
    if plan.engine != checkpoint.engine:
        reason = (
            f"reads its own checkpoints, and {resuming.SHORT}={checkpoint.folder} is of engine={checkpoint.engine}, whose weights alone "
        )
        reason += "go over: write them with that engine and model.export_to=FOLDER, and begin a run with model.init_from=FOLDER"
        raise InputError("engine", plan.engine, reason, [checkpoint.engine])
    own = ENGINES[checkpoint.engine].own_loop
    its = own is not None and own.checkpoints is not None and checkpoint.folder.name.startswith(own.checkpoints)
    if its and loop is None:
        raise InputError(resuming.RESUME, checkpoint.folder, f"was written by {own.name}, which alone reads it: program=own" if own else "")
    if loop is not None and loop.checkpoints is not None and not its:
        raise InputError(resuming.RESUME, checkpoint.folder, f"was not written by {loop.name}, which reads its own alone",
                         ["program=instrument"])  # fmt: skip
    if checkpoint.plan is None:
        return
    why = (loop or ENGINES[plan.engine]).why_no_resume(checkpoint.plan, plan)
    if why is not None:
        raise InputError(resuming.RESUME, checkpoint.folder, why)
    changes = resuming.layout_changes(checkpoint.plan, plan)
    how = f"{changes}: weights and the optimizer's states are read into the new layout" if changes else "the same layout"
    print(f"From the checkpoint to this plan: {how}")


def check_entry(settings: Settings) -> None:
    """Raises InputError for what a user's own program can't be asked."""
    if settings.entry is None:
        return
    if settings.slurm.least_nodes is not None:
        why = f"plans again by itself for our workers; entry={settings.entry} has one plan: name one number"
        raise InputError("slurm.nodes", f"{settings.slurm.least_nodes}-{settings.slurm.most_nodes}", why)
    if settings.run.async_save:
        raise InputError("train.async_save", "true", f"is for our workers; entry={settings.entry} has flags of its own (entry.args=)")


def check_data_given(settings: Settings) -> None:
    """Raises InputError where GPUs would train on what nobody chose."""
    if made_up := made_up_data(settings):
        why = f"is missing, and {settings.cluster.types} would train on {made_up}"
        raise InputError(
            "data", None, why, [data_key(settings), "data.made_up=true (a trial on just that)", "launch=none (the plan alone)"]
        )


def check_range(settings: Settings, plan: Plan) -> None:
    """Raises InputError where a job with a range of nodes could not go on under another plan."""
    slurm = settings.slurm
    if slurm.least_nodes is None:
        return
    asked = f"{slurm.least_nodes}-{slurm.most_nodes}"
    if not plan.run.save_every:
        raise InputError("slurm.nodes", asked, "goes on from checkpoints on other nodes, and there are none: train.save_every=")
    if not ENGINES[plan.engine].reshardable(plan):
        why = f"goes on in another layout, and this plan's checkpoints are read in their own only ({bound_to_layout(plan)})"
        raise InputError("slurm.nodes", asked, why, ["engine=megatron", "pin.zero_stage=1"])


def check_async(settings: Settings, plan: Plan) -> None:
    """Raises InputError where checkpoints can't be written beside the training."""
    if not plan.run.async_save:
        return
    if not ENGINES[plan.engine].saves_beside(plan):
        why = f"engine={plan.engine} has no copy to write from under this plan ({bound_to_layout(plan)})"
        raise InputError("train.async_save", "true", why, ["false", "pin.zero_stage=1"])


def check_routed(plan: Plan) -> None:
    """Raises InputError where what routers do shall be written, and they are transformers'."""
    if plan.run.trace_routing and ENGINES[plan.engine].traits(plan.cluster.software).layers == "hugging_face":
        why = f"engine={plan.engine} has no routers of megatron-core, whose choices are written"
        raise InputError("train.trace_routing", "true", why, ["false", "engine=megatron"])


def layerwise_run(settings: Settings, out: Path, answer: dict[str, Any] | None = None) -> int:
    """engine=layerwise: the paper's full space beside the best engine plan, and the file for the runtime that can run it; nothing starts.

    `pin.pp` fixes the stages; the other pins are the engines'.
    """
    from orchestrator.report.layerwise import layerwise_table
    from orchestrator.report.memory import risk_text
    from orchestrator.search.layerwise import AnalyticPrices, ProfilePrices, layerwise, open_batches
    from orchestrator.search.layerwise import Prices as LayerPrices
    from orchestrator.strategy.layerwise import TRAITS, galvatron_json

    training, cluster, profile = settings.training, settings.cluster, settings.profile
    if cluster.parts:
        raise InputError("engine", LAYERWISE, f"plans GPUs of one type, and the cluster has {cluster.types}; cluster.mixed=slowest is one")
    if profile is not None and settings.architecture.family == "profile":
        model = ModelSpec(architecture=settings.architecture, seq_length=training.seq_length, runs=())
        workload = Workload(model=model, training=training, cluster=cluster)
        best = None
    else:
        workload = Planner(settings).workload
        try:
            best = Planner(msgspec.structs.replace(settings, engine="auto", profile=None)).searched().plan
        except NoPlanError as error:
            print(f"engines: {error}")
            best = None
    software = cluster.software
    traits = msgspec.structs.replace(TRAITS, flash_attention=software.flash_attention or software.transformer_engine)
    # The constants of the engine it is compared with, so that the difference is the plan's.
    compared = traits if best is None else ENGINES[best.engine].traits(software)
    constants = calibration.calibrated(cluster, compared)
    prices = EnginePrices(settings, compared, constants)
    limits = prices.limits
    costs = cost_model(workload, traits, constants)
    layer_prices: LayerPrices = AnalyticPrices(costs) if profile is None else ProfilePrices(profile, costs)
    most = training.global_batch_size
    batches = open_batches(most, cluster.num_gpus) if settings.open_batch else (most,)
    result = within(limits, lambda limit: layerwise(layer_prices, batches, limit, pp=settings.pins.pp))
    plan = result.plan
    files = [
        File(path="config.yaml", content=recipe.resolved_yaml(settings)),
        File(path="galvatron.json", content=json.dumps(galvatron_json(plan), indent=1) + "\n"),
        File(path="layerwise.json", content=indented(plan)),
    ]
    if best is not None:
        files.append(File(path="plan.json", content=to_json(best)))
    write_folder(out, files)
    add_to(answer, layerwise=json.loads(msgspec.json.encode(plan)))
    screen().print(layerwise_table(plan, best, result.at_least_s))
    if profile is None and not cluster.is_cpu:
        chance = prices.chance(plan.peak_memory_bytes)
        kept = next((limit for limit in limits if plan.peak_memory_bytes <= limit.usable), limits[-1])
        print(risk_text(chance, kept, settings.pins.given() if len(limits) > 1 and kept is limits[-1] else None))
    print(f"Written to {out}; galvatron.json is for Hetu-Galvatron's runtime")
    return 0


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
    if settings.training.task == "sft" and settings.run.data is None and settings.launch != "none" and settings.entry is None:
        raise supervised.missing()
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
    why = job.unstartable
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
        needs = f"the plan needs {cluster.types}"
        if not machine.num_gpus:
            return f"{needs}, and this machine has no GPU"
        types = [by_driver_name(name) for name in machine.gpu_types]
        if cluster.parts:
            lacking_types = {part.gpu.name for part in cluster.parts} - {gpu.name for gpu in types if gpu is not None}
            if lacking_types or machine.num_gpus < cluster.num_gpus:
                return f"{needs}, and this machine has {machine.num_gpus} x {', '.join(machine.gpu_types)}"
            return lacking_packages(settings, machine)
        mixed = cluster.mixed and types and all(gpu is not None and gpu.covers(cluster.gpu) for gpu in types)
        if machine.catalog_name != cluster.gpu.name and not mixed:
            several = "" if machine.gpu_name else "; cluster.mixed=slowest plans for what all of them can do"
            return f"{needs}, and this machine has {machine.gpu_name or ', '.join(machine.gpu_types)}{several}"
        if machine.num_gpus < cluster.num_gpus:
            return f"{needs}, and this machine has {machine.num_gpus}"
    return lacking_packages(settings, machine)


def lacking_packages(settings: Settings, machine: detect.Machine) -> str | None:
    """What no engine that is asked for has here; None: one has all."""
    lacking = [lacks_packages(engine, machine) for engine in Planner(settings).requested_engines]
    return lacking[0] if lacking and None not in lacking else None


def left_out(start: Start, settings: Settings, machine: detect.Machine) -> dict[str, str]:
    """The engines that are not searched, since the job is to start on this machine and it lacks their packages, with what it lacks; none
    where no engine would be left."""
    if start.how != "local" or settings.plan is not None:
        return {}
    lacks = {engine.name: lacks_packages(engine, machine) for engine in Planner(settings).engines}
    absent = {name: why for name, why in lacks.items() if why is not None}
    return absent if len(absent) < len(lacks) else {}


def lacks_packages(engine: Engine, machine: detect.Machine) -> str | None:
    """What this engine needs and this machine has not; None: all is there."""
    missing = engine.requirements.lacking(machine.missing)
    if not missing:
        return None
    return f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed (pip install -e '.[engines]')"


def lacks_own_loop(loop: OwnLoop | None, settings: Settings) -> str | None:
    """What the engine's own training loop needs and this machine has not; None: all is there."""
    if loop is None or (loop.checkout is not None and (loop.checkout in settings.env or loop.checkout in os.environ)):
        return None
    missing = ", ".join(name for name in loop.modules if not detect.installed(name))
    return f"{loop.name} needs {missing}, which is not installed here: {loop.install}" if missing else None


def follow(start: Start, settings: Settings, found: Found, job: Job, out: Path) -> int:
    """Start, show progress, compare prediction and measurement; the exit status."""
    plan = found.plan
    if start.how == "none":
        how = "" if start.why.startswith("plan only") else f" To start it: {start_command(settings, job, out)}"
        print(f"Not started: {start.why}.{how}")
        return 0
    from orchestrator.launch import local, slurm
    from orchestrator.report.after import after_table
    from orchestrator.report.measured import comparison_table, measured_step_time
    from orchestrator.report.progress import TrainingProgress

    console = screen()
    submitted: slurm.Submitted | None = None
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
            if start.how == "local":
                outcome = local.start(job, out, on_step=progress.step, saving=lambda: console.print(SAVING))
            else:
                outcome = slurm.start_in_allocation(job, out, on_step=progress.step)
            outcome = stopped(out, outcome)
    predicted = plan.predicted.step_time_s if plan.predicted else None
    measured = measured_step_time(outcome.rows)
    after, said = None, list[str]()
    with reporting_full_disk("what the steps were made of"):
        after = pictures.after_run(settings, plan, out)
        said = [] if after is None else pictures.after_lines(settings, plan, out, after)
        said += pictures.stack_lines(settings, plan, outcome.rows)
    said += filter(None, [rising(outcome.rows)])
    local.write_status(out, outcome, predicted_step_time_s=predicted, measured_step_time_s=measured, after=said)
    if pictures.wanted():
        with reporting_full_disk("the report"):
            for file in pictures.report_files(settings, found, outcome.rows, after):
                (out / file.path).write_text(file.content, encoding="utf-8")
    if outcome.status in ("finished", "stopped"):
        console.print(comparison_table(plan, outcome.rows))
        if after is not None:
            console.print(after_table(after))
        for line in said:
            print(f"after the run: {line}")
        for note in local.preflight_notes(out):
            print(f"preflight: {note}")
        goes_on = str(outcome.last_line).capitalize() + (f"; resume={shlex.quote(str(out))} goes on" if saved_step(out) else "")
        if plan.run.export_to and outcome.status == "finished":
            print(f"Exported: {plan.run.export_to}, {exported_tokenizer(plan.run)}")
        print(f"Finished: {out}" if outcome.status == "finished" else goes_on)
    else:
        host = f" on {outcome.host}" if outcome.host else ""
        rank = "" if outcome.rank is None else f"rank {outcome.rank}{host}: "
        print(f"error: training {outcome.status}: {rank}{outcome.last_line}\nlog: {outcome.log}", file=sys.stderr)
        if (step := saved_step(out)) and outcome.exit_status not in render.SAME_AGAIN and "resume=" not in str(outcome.last_line):
            print(f"resume={shlex.quote(str(out))} goes on from step {step}", file=sys.stderr)
    return outcome.exit_status


def exported_tokenizer(settings: RunSettings) -> str:
    """Which tokenizer lies in a finished run's model.export_to=.

    >>> exported_tokenizer(RunSettings(export_to="/w", tokenizer="/tok", init_from="/base"))
    'with the tokenizer of /tok'
    >>> exported_tokenizer(RunSettings(export_to="/w", data="/a.txt"))
    'without a tokenizer: tokenizer= was not given'
    """
    source = settings.tokenizer or settings.init_from
    if source and (settings.tokenizer or has_tokenizer(source)):
        return f"with the tokenizer of {source}"
    return f"without a tokenizer: tokenizer= was not given{f', and {source} has none' if source else ''}"


@contextlib.contextmanager
def reporting_full_disk(what: str) -> Iterator[None]:
    """Prints an error where a full disk keeps something from being written: the training has ended, and that does not change how."""
    try:
        yield
    except OSError as error:
        if not no_room(error):
            raise
        print(f"error: {what} can't be written: {error.strerror}", file=sys.stderr)


def start_command(settings: Settings, job: Job, out: Path) -> str:
    """What a user types on the machine where the job can run."""
    if job.unstartable:
        return "the same with that entry"
    folder = shlex.quote(str(out))
    if tool := [path.name for name in settings.write if name in tools.NAMES for path in sorted(out.glob(f"{name}.*"))]:
        ours = start_command(msgspec.structs.replace(settings, write=()), job, out)
        return f"as the first lines of {', '.join(tool)} in {folder} say (or, without that program, {ours})"
    if named := [schedulers.submit(name) for name in settings.write if name in schedulers.WRITERS]:
        return f"cd {folder} && {named[0]}" + "".join(f" (or {other})" for other in named[1:])
    if job.num_nodes > 1:
        return f"cd {folder} && sbatch job.sbatch"
    if settings.container is not None:
        return render.container_command(job, settings.container, str(out))
    return f"bash {shlex.quote(str(out / 'launch.sh'))}"


if __name__ == "__main__":
    typed = sys.argv[2:] if sys.argv[1:2] == ["run"] else sys.argv[1:]

    def status() -> int:
        other = by_name(typed)  # python -m orchestrator.run plan ... is what python -m orchestrator plan ... is
        return main(typed) if other is None else other

    sys.exit(alone(status))
