"""What a plan's commands print, and the progress of a search on a terminal."""

from __future__ import annotations

import io
import shlex
import sys
import time
from functools import partial
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self, TextIO, cast

import msgspec

from orchestrator.engines import ENGINES
from orchestrator.engines.entry import engine_of_copy
from orchestrator.engines.megatron.capabilities import NAME as MEGATRON
from orchestrator.folder import saved_bytes, stated_failures, training_budget
from orchestrator.job import Job
from orchestrator.launch import render
from orchestrator.model.families import describe_for
from orchestrator.model.training import Training
from orchestrator.plan import Plan
from orchestrator.planning import Found, Planner
from orchestrator.recipe import Settings
from orchestrator.recipe.sources import elsewhere
from orchestrator.recipe.whole_data import is_made_up, passes, trained_on
from orchestrator.search.unasked import seconds_of
from orchestrator.strategy.choices import shown
from orchestrator.strategy.spec import LAST_RESORTS
from orchestrator.units import format_amount, format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


FILE_WIDTH = 120
"""Columns where the output is no terminal: tables of plans want more than the usual 80."""
SHOWN_UNASKED = 3
"""How many of the options that a plan would gain by are named without verbose=true."""
SHOWN_AFTER_S = 1.0
"""Seconds after which a search has a progress bar: one that is done by then needs none."""


class Trimmed(io.TextIOBase):
    """A text stream without the blanks at the end of lines, with which tables fill their width."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.line = stream, ""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Encoding of the stream: rich draws with what it can write."""
        return getattr(self.stream, "encoding", None) or "utf-8"

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *whole, self.line = (self.line + text).split("\n")
        self.stream.write("".join(f"{line.rstrip(' ')}\n" for line in whole))
        return len(text)

    def flush(self) -> None:
        self.stream.write(self.line)
        self.line = ""
        self.stream.flush()


def screen() -> Console:
    """The terminal at its own width; a file or pipe at a fixed one, without blanks at the ends of lines."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(file=cast(TextIO, Trimmed(sys.stdout)), width=FILE_WIDTH)


class SearchProgress:
    """A bar on a terminal once a search has taken SHOWN_AFTER_S; nothing elsewhere."""

    def __init__(self, what: str = "searching") -> None:
        self.what = what
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
            self.bar.add_task(self.what, total=total)
            self.bar.start()
        found = "" if best_s is None else f", best {format_seconds(best_s)}"
        self.bar.update(self.bar.task_ids[0], completed=done, description=f"{self.what}{found}")


MANY_EPOCHS: Final = 10
"""Passes over the same samples above which a screen warns."""
MOST_PASSES: Final = 4
"""Passes over the same text that teach a model nearly as much as new text (N. Muennighoff and others, "Scaling data-constrained language
models", 2023)."""


LEAST_HOST: Final = 0.25
"""Times a GPU's memory that hosts have at least for each: the catalog's least is .87."""
MOST_HOST: Final = 10**12
"""Bytes of host memory for a GPU that hardly any machine has: the catalog's most is 496 GB."""
LONG_WARMUP: Final = 0.25
"""Share of the steps above which a warm-up is said: published trainings warm up for 1 to 5%, tiny recipes for a fifth."""


def data_text(settings: Settings, multiple: int = 1) -> str:
    """What a start of the plan would train on. `multiple`: as `Plan.sample_multiple`."""
    if settings.entry is not None:
        return f"{settings.entry} takes {settings.run.data or 'what its own arguments say'}"
    if settings.training.task == "sft" and settings.run.data is None:
        return "none yet: data=SAMPLES.jsonl before a start"
    said = trained_on(settings.run, settings.architecture)
    training = settings.training
    if training.lengths is not None and settings.run.data is not None:
        epochs = epochs_of(training, multiple)
        said += f"; {'about ' * bool(training.lengths.how)}{format_amount(epochs, 2)} epochs"
    elif training.task == "pretrain" and settings.entry is None and (often := passes(settings.run, training)):
        said += f"; about {', '.join(f'{format_amount(times, 2)} epochs of {Path(path).name}' for path, times in often.items())}"
    asks = is_made_up(settings.run) and not settings.made_up_data and not settings.cluster.is_cpu
    return f"{said}; a start on GPUs asks for {data_key(settings)} or data.made_up=true" if asks else said


def epochs_of(training: Training, multiple: int) -> float:
    """How often a training whose samples' lengths are known sees each of them. `multiple`: as `Plan.sample_multiple`."""
    found = training.lengths
    assert found is not None
    share = found.share(training.seq_length, multiple) if training.packing else 1
    return training.steps * training.global_batch_size * share / max(1, found.samples - found.dropped)


def unusual_lines(plan: Plan) -> list[str]:
    """What stands in the recipe or the cluster's YAML and is hardly meant: host memory of a node in place of a GPU's, a warm-up that is a
    large part of the training, experts that nothing balances."""
    cluster, training, lines = plan.cluster, plan.training, []
    host, gpu = cluster.host_memory, cluster.gpu.memory
    if not cluster.is_cpu and not gpu * LEAST_HOST <= host <= MOST_HOST:
        node = f"{format_bytes(host * cluster.gpus_per_node)} a node of {cluster.gpus_per_node}"
        lines.append(f"cluster.host_memory: {format_bytes(host)} is of one GPU ({node}): hardly any machine has that; offload goes by it")
    if training.warmup > LONG_WARMUP * training.steps:
        share = f"{100 * training.warmup / training.steps:.0f}% of the training"
        lines.append(f"warm-up: the rate rises for {training.warmup:,} of {training.steps:,} steps, {share} (train.warmup=)")
    if training.task == "pretrain" and training.lora is None and any(not part.balanced for part in plan.model.experts):
        lines.append("experts: no loss and no bias balances their load, so a few may get all tokens (model.aux_loss_coeff=0.001)")
    return lines


def data_key(settings: Settings) -> str:
    """The key, with what stands for its value, that says what to train on."""
    return "data=PATH" if settings.architecture.why_drawn is None else "entry=PROGRAM"


def made_up_data(settings: Settings) -> str:
    """What GPUs would train on that nobody chose; empty: nothing."""
    if settings.entry is not None or settings.cluster.is_cpu or settings.made_up_data or not is_made_up(settings.run):
        return ""
    return trained_on(settings.run, settings.architecture)


def show_found(console: Console, settings: Settings, found: Found) -> None:
    """The plan, its price, what its training takes, how sure it is to fit, and what nearly won; with verbose=true each stage and cause
    too."""
    from orchestrator.report import text
    from orchestrator.report.budget import budget_text
    from orchestrator.report.failures import checkpoint_text, elsewhere_text, failures_text
    from orchestrator.report.memory import memory_table, risk_text

    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    plan, brief = found.plan, not settings.verbose
    model = describe_for(plan.model, plan.training)
    console.print(text.plan_table(plan, model, found.limit, brief=brief))
    console.print(text.price_table(plan, found.limit, brief=brief))
    if not plan.cluster.is_cpu and plan.predicted is not None and plan.predicted.by_stage:
        chance, pins = Planner(settings).chance_of_not_fitting(plan), settings.pins.given() if found.none_cautious else None
        own = plan.prices is not None and plan.prices.own_peaks
        say(risk_text(chance, found.limit, pins, own_peaks=own))
    if settings.model_type is not None and (why := ENGINES[plan.engine].why_no_exchange(plan.model, settings.model_type)):
        say(f"weights of model_type={settings.model_type} are another network's: {why}")
    if settings.unseen:
        say("images: what looks at them (vision_config) is left out: weights, bytes and seconds are the text model's alone")
    for resort in LAST_RESORTS:
        if getattr(plan, resort.name) != resort.default and any(resort.name in each.options for each in found.searched):
            assert resort.offered is not None
            say(f"{resort.name}={shown(getattr(plan, resort.name))}: nothing fits without such options; {resort.offered.asks}")
    off = ENGINES[plan.engine].capabilities(plan.cluster.software).off_with.get(plan.training.optimizer)
    if off and off not in settings.pins.given():
        say(f"{off}=false: train.optimizer={plan.training.optimizer} is without it in megatron-core {plan.cluster.software.megatron_core}")
    if plan.training.lengths is not None:
        padded = msgspec.structs.replace(plan, training=msgspec.structs.replace(plan.training, packing=False))
        say(text.samples_text(plan, Planner(settings).prices_of(plan).priced(padded)))
        balance, own = plan.training.balance, settings.entry is not None and not engine_of_copy(ENGINES, settings.entry)
        if own and plan.training.packing and balance != "none":
            say(f"{settings.entry} deals samples to ranks itself: the price has data.balance={balance}, none is as they are drawn")
    if settings.packs_unasked and plan.training.packing is False:
        say("data.packing=false: no plan has several samples in a sequence; data.packing=true says why")
    requires = ENGINES[plan.engine].requirements.versions(plan.cluster)
    if not plan.cluster.is_cpu and (software := text.software_text([plan], requires, assumed=settings.software_unsaid)):
        say(software)
    say(f"training: {budget_text(training_budget(settings, plan), text.rank_name(plan), brief=brief)}")
    if settings.assumed:
        values = " ".join(f"train.{name}={getattr(plan.training, name):g}" for name in settings.assumed)
        say(f"assumed: {values}, as neither the recipe nor you gave them")
    for line in unusual_lines(plan):
        say(line)
    if settings.batch_of_length is not None:
        say(text.batch_text(plan.training, settings.batch_of_length))
    if settings.steps_of_tokens is not None:
        say(text.steps_text(plan.training, settings.steps_of_tokens))
    if random := settings.random_weights:
        say(random)
    say(f"data: {data_text(settings, plan.sample_multiple)}")
    counted = settings.run.data is not None  # of data.lengths= alone nobody knows how many there are
    if counted and plan.training.lengths is not None and (epochs := epochs_of(plan.training, plan.sample_multiple)) > MANY_EPOCHS:
        often = f"{format_amount(epochs, 2)} epochs: samples are seen again and again"
        say(f"warning: {often}, fine-tuning usually takes 1 to 5 (train.epochs=3)")
    if settings.training.task == "pretrain" and settings.entry is None:
        again = {Path(path).name: times for path, times in passes(settings.run, settings.training).items() if times > MOST_PASSES}
        if again:
            listed = ", ".join(f"{name} is passed about {format_amount(times, 2)} times" for name, times in again.items())
            say(f"warning: {listed}: tokens that are seen more than {MOST_PASSES} times teach less and less (Muennighoff and others, 2023)")
    if absent := not_here_text(settings):
        say(absent.rstrip())
    nbytes = saved_bytes(plan)
    reshardable = ENGINES[plan.engine].reshardable(plan)
    if not (brief and reshardable) and (checkpoints := checkpoint_text(plan, nbytes, reshardable)):
        say(f"checkpoints: {checkpoints}")
    if stated := stated_failures(settings):
        say(f"failures: {failures_text(plan, nbytes, stated, settings.steps_done)}")
    if found.elsewhere is not None:
        other = found.elsewhere
        say(elsewhere_text(plan, other.gpus, other.plan, other.why, other.refused, other.chance, partial(training_budget, settings)))
    if not found.complete:
        say(f"search.budget_s={settings.budget_s} ended the search: this is the best plan so far, others may be faster")
    if found.uneven is not None:
        say(text.uneven_text(found.uneven))
    elif plan.ep > 1 and not any(part.pad_to_capacity for part in plan.model.experts):
        say(text.even_text(plan.ep, brief=brief))
    if found.outcomes:
        show_search(console, settings, found)
    for explanation in found.explained:
        risk = Planner(settings).chance_beside(found.limit, explanation.plan)
        say(text.explanation_text(plan, explanation.question, explanation.plan, explanation.why, settings.pins.given(), risk))
        if explanation.refused is not None:
            console.print(memory_table(explanation.refused.choice, explanation.refused.predicted, found.limit))


def show_search(console: Console, settings: Settings, found: Found) -> None:
    """What nearly won, what was not asked for, and how sure it is that nothing is faster."""
    from orchestrator.report import text
    from orchestrator.report.memory import data_parallel_table

    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    plan, brief = found.plan, not settings.verbose
    console.print(text.alternatives_table(plan, found.alternatives, settings.take or 1, brief=brief))
    if found.ahead is not None and (settings.take or 1) == 1:
        say(text.ahead_text(plan, found.ahead.key, found.alternatives[0]))
    if apart := text.difference_text(plan, found.by_price):
        say(apart)
    alone = [(row.engine, row.zero_stage, row.least.predicted if row.least else None, row.why) for row in found.alone]
    if not brief and any(predicted is not None and predicted.peak_memory_bytes > found.limit.usable for _, _, predicted, _ in alone):
        console.print(data_parallel_table(plan, alone, found.limit))
    for other_tp in found.narrower:
        say(text.wide_tp_text(plan, other_tp.plan, other_tp.why, Planner(settings).chance_beside(found.limit, other_tp.plan)))
    fastest = plan if plan.predicted is None else min((plan, *found.alternatives), key=seconds_of)  # another with take=
    gains = [one for one in found.unasked if not brief or one.gains(fastest)]
    for one in gains[: SHOWN_UNASKED if brief else None]:
        say(text.unasked_text(fastest, one.key, one.asks, one.plan, taken=fastest is plan, modes_said=not brief))
    if brief and (more := len(gains) - SHOWN_UNASKED) > 0:
        say(f"Not asked for: {more} more of which each gains less (verbose=true)")
    say(text.proof(fastest, found.at_least_s, found.searched, brief=brief, taken=fastest is plan) + ".")
    if uneven := text.left_over_text(plan):
        say(uneven)
    if found.fewer is not None:
        say(text.fewer_text(plan, found.fewer))
    if brief:
        return
    total, priced = len(found.outcomes), sum(outcome.step_time_s is not None for outcome in found.outcomes)
    say(text.choices_text(total, priced))


def not_here_text(settings: Settings) -> str:
    """A line for each path of the settings that is not on this machine, and was not looked at; one for what a config.json's reader left
    out."""
    found = elsewhere(settings.run)
    lines = [f"note: {key}={path} is not on this machine: taken as it is, not checked\n" for key, path in found]
    lines += [f"note: model.hf_config: {said}\n" for said in settings.not_read]
    return "".join(lines)


def next_text(settings: Settings, start: str = "") -> str:
    """What else can be asked of a plan that was shown, after how it is written or started."""
    tp = 1 << min(3, settings.cluster.num_gpus.bit_length() - 1)
    ways = [start, "take=2 takes another", f"explain.tp={tp} says why not that" if tp > 1 else ""]
    ways += [] if settings.verbose else ["verbose=true shows all"]
    return f"Next: {'; '.join(filter(None, ways))}"


def show_plan(settings: Settings, found: Found, job: Job, out: Path, *, starts: bool) -> None:
    """The plan, and what was written of it; `starts`: whether it is started now."""
    console = screen()
    show_found(console, settings, found)
    console.file.flush()
    what = "; candidates.csv has each choice with its price or reason" if found.outcomes else ""
    print(f"Written to {out}{what}; pictures of the plan: python -m orchestrator report {shlex.quote(str(out))}")
    if not job.unstartable:
        loop, why = Planner(settings).trained_by(found.plan)
        own = "our worker" if loop is None else loop.name if loop.trained_by is None else loop.trained_by(found.plan, job)
        who = job.program or own
        print(f"trained by {who}: {why}")
    print(next_text(settings))
    print(notes_text(settings, found.plan, job, starts=starts), end="", flush=True)


def notes_text(settings: Settings, plan: Plan, job: Job, *, starts: bool = False) -> str:
    """A line for each thing that whoever starts a job by its files should know; `starts`: it is started now."""
    from orchestrator.report.budget import format_time
    from orchestrator.report.failures import unsaved_text

    if job.unstartable:
        return "".join(f"note: {note}\n" for note in (*job.notes, f"job.sbatch and launch.sh were not written: {job.unstartable}"))
    slurm = render.with_whole_nodes(job, settings.slurm, settings.cluster.gpus_per_node)
    by_slurm = settings.launch == "slurm" or (slurm.most_nodes or job.num_nodes) > 1
    notes = [*job.notes, *(render.unsaid(job, slurm) if by_slurm else ())]
    saves = plan.run.save_every or "--save" in job.arguments or (settings.entry is not None and plan.engine != MEGATRON)
    limit = render.limit_s(slurm.time) if by_slurm else None
    takes = plan.training.steps * plan.predicted.step_time_s if plan.predicted else 0.0
    if limit and (again := ceil(takes / limit) - 1) > slurm.requeue:
        often = f" and slurm.requeue={slurm.requeue}" if slurm.requeue else ""
        part = f"{format_time(limit * (slurm.requeue + 1))} of {format_time(takes)} that all steps take"
        saving = "" if saves else " with train.save_every="
        notes.append(f"slurm.time={slurm.time}{often} is {part}: slurm.requeue={again}{saving} goes on to the end")
    if (not saves or plan.run.save_every) and (unsaved := unsaved_text(plan, saved_bytes(plan), stated_failures(settings), slurm.requeue)):
        notes.append(unsaved)
    if not starts and settings.training.task != "sft" and (made_up := made_up_data(settings)):
        notes.append(f"started as it is, this folder trains on {made_up}")
    return "".join(f"note: {note}\n" for note in notes)
