"""tune=K: K plans run some steps each in one allocation, and the fastest by measurement is trained; of plans that their runs can't tell
apart, the likeliest by runs and price together (likeliest).

The first is the plan that is predicted to be the fastest. What a run's timers say (report/after.py) goes into the prices, and how far
these are off then says what the next one may take (may_take): that which may be the fastest is next, mostly one of another mesh or
micro-batch, of which the prices are less sure than of a plan like one that ran. A run that crashes or runs out of memory is a result: after
that no plan is tried that is predicted to take as much memory. Then they run in turn, there and back in rounds, until one is clearly ahead
(contenders): plans of one round are compared, since the machine of the next may be another one. A user's own program (entry=) is measured
by what it tells of its steps (launch/program_metrics.py); it has no timers, and the prices stay as they were. Everything is in OUT/tune, a
run's folder each, N of plan N's first run and N.2 of its second: a tune that was cut off goes on with what it has, under the same command.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import expm1, log, log1p, sqrt
from pathlib import Path
from statistics import NormalDist, mean, median, stdev
from typing import Any, Final

from msgspec.structs import replace
from rich.console import RenderableType
from rich.text import Text

from orchestrator import pictures, recipe
from orchestrator.cost.calibration import CalibrationFile
from orchestrator.cost.uncertainty import pairs_of
from orchestrator.engine_prices import kept_limit
from orchestrator.engines import ENGINES
from orchestrator.errors import InputError, LaunchError, NoPlanError
from orchestrator.folder import HELD, new_folder, with_outside, write_folder
from orchestrator.job import File
from orchestrator.launch import local, program_metrics, render, slurm
from orchestrator.plan import Plan, RunSettings, from_json, to_json
from orchestrator.planning import Found, Planner
from orchestrator.recipe import Settings
from orchestrator.report import after
from orchestrator.report.budget import budget
from orchestrator.report.measured import measured_peak_memory, measured_step_time, steady_steps
from orchestrator.report.text import _table, choice, rank_name
from orchestrator.search.planner import reprice
from orchestrator.search.question import Kinds
from orchestrator.strategy.spec import twins
from orchestrator.units import format_amount, format_bytes, format_seconds
from orchestrator.values import Value, indented

FOLDER: Final = "tune"
CONFIG: Final = "config.yaml"
STATUS: Final = "status.json"
NOT_WHILE_TUNING: Final = ("save_every", "async_save", "keep_last", "keep_every", "trace_routing", "eval_every", "resume", "init_from",
                           "export_to", "merge_lora", "wandb")  # fmt: skip
"""Settings of a run that its first steps do without."""
MEMORY_WORDS: Final = ("out of memory", "OutOfMemory", "SIGKILL")
"""How a rank ends that ran out of memory (torch.OutOfMemoryError, the kernel)."""


DRIFT, DRIFT_ON_SHARED_CORES = 0.02, 0.3
"""How much longer one plan's run may take than another of it some minutes before, as a share: clocks and neighbours on the network; ranks
that share cores with whatever else runs (measured here: a third)."""
ALIKE: Final = (4.0, 0.6, 0.38, 0.02)
"""The parts of the variance of a price's error, in units of that of a difference between two plans: what is common to all plans (a slower
machine), to those of one mesh, of one micro-batch as well, and a plan's own (the last three about as in the pairs behind `PROFILED`)."""
ANY_MACHINE: Final = 100.0
"""The variance of what all runs' logarithms share, where it is not known: runs say then which plan is faster, and nothing else."""
HALF: Final = 0.6745
"""Standard deviations of a normal distribution that half of all lie within."""
UNPUBLISHED: Final = 0.15
"""Standard deviation of the logarithm of a predicted ratio of two plans on ranks of a CPU that were not profiled: a rule of thumb, where by
the first profiles of two ranks a plan was taken that was 24 to 30% behind another one."""
PROFILED: Final = 0.08
"""Standard deviation of the same logarithm after a profile. In nine runs of tests/benchmarks/unseen_gloo.py (megatron and deepspeed, 2 and
4 ranks, 2026-11-29) it was .098 in 114 pairs of plans of two meshes, .073 in 77 of one mesh and two micro-batches and .038 in 19 that
share both, where one plan under two names was .055 from itself by the same medians of three runs: .08, .05 and nothing by the prices."""
SAME_AGAIN: Final = 0.02
"""Standard deviation of the logarithm of a plan's measured step."""


class Trial(Value, frozen=True, kw_only=True):
    """A plan that ran, as it was predicted when it was chosen. `runs_s`: the median step of each of its runs after the warm-up, in seconds;
    none where one ended badly, which `why` says."""

    number: int
    plan: Plan
    runs_s: tuple[float, ...]
    peak_memory_bytes: float | None
    why: str = ""

    @property
    def measured_s(self) -> float | None:
        """Seconds of its step: the median of its runs; None without."""
        return median(self.runs_s) if self.runs_s else None

    @property
    def predicted_s(self) -> float:
        return self.plan.prediction.step_time_s

    @property
    def out_of_memory(self) -> bool:
        return any(word in self.why for word in MEMORY_WORDS)


def tune_folder(settings: Settings) -> Path:
    """The run's folder: new, empty, or with a tune of the same settings that was cut off. Raises InputError."""
    out = None if settings.out is None else Path(settings.out).resolve()
    kept = None if out is None else out / FOLDER / CONFIG
    if out is None or kept is None or not kept.is_file() or {path.name for path in out.iterdir()} - {HELD} != {FOLDER}:
        return new_folder(settings)
    if kept.read_text(encoding="utf-8") != recipe.resolved_yaml(settings):
        raise InputError("out", settings.out, f"holds a tune of other settings ({kept.relative_to(out)}); name a new folder")
    return out


def check_tunable(settings: Settings, how: str, why: str) -> None:
    """Raises InputError where the plans can't run from here. `how`, `why`: of the start (run.Start)."""
    if how == "slurm":
        said = "runs its plans one after the other in one allocation: salloc one, and give the same command in it"
        raise InputError("tune", settings.tune, said)
    if how == "none":
        ways = ["launch=local", "launch=slurm within salloc"]
        raise InputError("tune", settings.tune, f"measures plans, and nothing starts here: {why}", ways)


def tuned(settings: Settings, how: str, out: Path, without: Collection[str] = ()) -> tuple[Settings, Found]:
    """The fastest of the plans by measurement, priced by what their runs taught, and the settings with it. `how`: "local" or
    "allocation"; `without`: engines that are left out. Raises NoPlanError, LaunchError where no plan ran to its end, KeyboardInterrupt."""
    assert settings.tune is not None
    folder = out / FOLDER
    if not (folder / CONFIG).is_file():
        write_folder(folder, [File(path=CONFIG, content=recipe.resolved_yaml(settings))])
    trials = read_trials(out)
    if trials:
        print(f"tune: {len(trials)} of {settings.tune} plans have run already", flush=True)
    while len(trials) < settings.tune:
        plan = next_plan(learned_settings(settings, folder, trials), trials, without)
        if plan is None:
            print(f"tune: no other plan is legal and fits: {len(trials)} of {settings.tune} were tried", flush=True)
            break
        number = len(trials) + 1
        Planner(settings).job(plan)  # what can't be started as it is to be trained is refused before it runs
        said = f"{plan.engine} {choice(plan)}: predicted {format_seconds(plan.prediction.step_time_s)}"
        print(f"tune {number}/{settings.tune}: {said}; it runs now", flush=True)
        trial = tried(settings, plan, how, folder / str(number), number)
        trials.append(trial)
        print(f"tune {number}/{settings.tune}: {_said(trial)}", flush=True)
    trials = with_rounds(settings, how, folder, trials)
    if not any(trial.runs_s for trial in trials):
        first = f"; the first: {trials[0].why}" if trials else ""
        raise LaunchError(f"tune={settings.tune}: none of {len(trials)} plans ran to its end{first}; see {folder}")
    chosen = learned_settings(settings, folder, trials)
    best = likeliest(chosen, trials, _deviation(settings))
    if learned(settings, best.plan.engine, folder, trials) is None:  # its trials have no timers
        chosen = settings
    prices = Planner(chosen).prices_for(best.plan.engine)
    plan = prices.priced(replace(best.plan, training=settings.training, run=settings.run_of(best.plan), extra=settings.extra))
    return replace(chosen, plan=plan), Found(plan=plan, limit=kept_limit(plan, prices.limits))


def slower(trial: Trial, other: Trial, rounds: int | None = None) -> list[float]:
    """Logarithms of how much longer the trial took than another one, in each of the first `rounds` that both ran in."""
    return [log(mine / its) for mine, its in zip(trial.runs_s[:rounds], other.runs_s, strict=False)]


def ranked(trials: Iterable[Trial], rounds: int | None = None) -> list[Trial]:
    """The trials that ran to their end, fastest first: by the median of the first `rounds`, in each of which a plan is compared with all
    that ran in it, so that one disturbed run of three moves none; those that ran in more rounds before those left behind earlier."""
    of_length: dict[int, list[Trial]] = defaultdict(list)
    for trial in trials:
        of_length[len(trial.runs_s[:rounds])].append(trial)

    def place(trial: Trial) -> tuple[int, float, int]:
        length = len(trial.runs_s[:rounds])
        each = zip(*(slower(trial, other, rounds) for other in of_length[length]), strict=True)
        return -length, median(map(mean, each)), trial.number

    return sorted((trial for length, each in of_length.items() if length for trial in each), key=place)


def contenders(trials: Sequence[Trial], rounds: int) -> list[Trial]:
    """The trials that may be the fastest by the first `rounds` runs of each, fastest first. Behind is a plan that took longer than it
    by more than the median of the rounds may be wrong by: twice a mean's standard error; after one round, what the machine drifts."""
    first, *others = ranked(trials, rounds)
    drift = log1p(DRIFT_ON_SHARED_CORES if first.plan.cluster.is_cpu else DRIFT)

    def behind(trial: Trial) -> bool:
        each = slower(trial, first, rounds)
        return median(each) > (drift if rounds == 1 else 2 * stdev(each) / rounds**0.5)

    return [first, *(trial for trial in others if not behind(trial))]


def likeliest(settings: Settings, trials: Sequence[Trial], deviation: float) -> Trial:
    """The trial of the plan that is likely the fastest: by its runs where these tell it, else by runs and by these settings' prices, whose
    ratios have this deviation (of logarithms) and whose errors are shared as in `may_take`: plans that share much are priced in the right
    order though none of them is priced right. The runs are off by as much as their rounds differ (Rasmussen and Williams, 2006, 2.25)."""
    rounds = max(len(trial.runs_s) for trial in trials)
    close = contenders([trial for trial in trials if len(trial.runs_s) == rounds], rounds)
    if len(close) == 1:
        return close[0]
    import numpy as np  # as in `may_take`

    each = np.array([[mean(ratios) for ratios in zip(*(slower(trial, other) for other in close), strict=True)] for trial in close])
    drift = log1p(DRIFT_ON_SHARED_CORES if settings.cluster.is_cpu else DRIFT)
    error = drift / 2 if rounds == 1 else sqrt(each.var(axis=1, ddof=1).sum() / (len(close) - 1) / rounds)
    prices = np.log([Planner(settings).prices_for(trial.plan.engine).priced(trial.plan).prediction.step_time_s for trial in close])
    alike = np.array([[_alike(one.plan, other.plan) for other in close] for one in close])
    shared = alike / 2 * deviation**2 + ANY_MACHINE
    off = np.median(each, axis=1) - prices
    seconds = prices + shared @ np.linalg.solve(shared + error**2 * np.eye(len(close)), off)
    return close[int(seconds.argmin())]


def with_rounds(settings: Settings, how: str, folder: Path, trials: Sequence[Trial]) -> list[Trial]:
    """The trials with the further runs that it takes until one is clearly ahead: rounds there and back, tune.rounds runs of a plan at most.
    Raises KeyboardInterrupt."""
    now = {trial.number: trial for trial in trials}
    close = [trial for trial in trials if trial.runs_s]
    for round_ in range(2, settings.tune_rounds + 1):
        close = contenders([now[trial.number] for trial in close if now[trial.number].runs_s], round_ - 1) if close else []
        if len(close) < 2:
            break
        left = [trial for trial in (close if round_ % 2 else close[::-1]) if len(trial.runs_s) < round_]
        if left:
            numbers = ", ".join(map(str, sorted(trial.number for trial in close)))
            print(
                f"tune: plans {numbers} are too close to tell; they run again, round {round_} of at most {settings.tune_rounds}", flush=True
            )
        for trial in left:
            again = tried(settings, trial.plan, how, folder / f"{trial.number}.{round_}", trial.number)
            now[trial.number] = together([trial, again])
            print(f"tune {trial.number}/{settings.tune}, run {round_}: {_said(again)}", flush=True)
    return [*now.values()]


def together(runs: Sequence[Trial]) -> Trial:
    """One trial of all runs of one plan: bad where one of them was."""
    why = next((run.why for run in runs if run.why), "")
    peaks = [run.peak_memory_bytes for run in runs if run.peak_memory_bytes is not None]
    every = () if why else tuple(seconds for run in runs for seconds in run.runs_s)
    return replace(runs[0], runs_s=every, peak_memory_bytes=max(peaks, default=None), why=why)


def _said(trial: Trial) -> str:
    return trial.why if trial.measured_s is None else f"measured {format_seconds(trial.measured_s)}"


def next_plan(settings: Settings, trials: Sequence[Trial], without: Collection[str]) -> Plan | None:
    """The plan, of those that were not tried, that may be the fastest (`may_take`), below the memory that one ran out of: of each mesh and
    micro-batch the best, and the best of all; None: there is none."""
    settings = replace(settings, prefer="fastest")  # what is plainer is no matter here: the trials tell
    most = min((trial.plan.prediction.peak_memory_bytes for trial in trials if trial.out_of_memory), default=float("inf"))
    many = 4 * len(trials) + 8
    for filled in (False, True):  # last, what is less sure: the trial shows whether it fits
        plans: list[Plan] = []
        looks: tuple[tuple[Kinds, int], ...] = (("choices", len(trials) + 1), ("batches", many))
        for kinds, top_k in looks if trials else looks[:1]:
            asked = Planner(settings).space(top_k=top_k, without=without, kinds=kinds)
            try:
                found = Planner(settings).fastest(asked.held_to(-1) if filled else asked)
            except NoPlanError:
                if not trials:
                    raise
                return None
            plans += (found.plan, *found.alternatives)
        left = [plan for plan in plans if plan.prediction.peak_memory_bytes < most
                and not any(twins(plan.candidate, trial.plan.candidate) for trial in trials)]  # fmt: skip
        if left:
            seconds = may_take(settings, trials, left)
            chosen = left[seconds.index(min(seconds))]
            return replace(chosen, run=settings.run_of(chosen), extra=settings.extra)
    return None


def may_take(settings: Settings, trials: Sequence[Trial], plans: Sequence[Plan]) -> list[float]:
    """Seconds that each of the plans may take if all goes well: what is predicted by these settings' prices and by how far they are off
    for the plans that ran, less one standard deviation of what is not known of it. The errors' logarithms are a Gaussian process
    (Rasmussen and Williams, 2006, equations 2.25 and 2.26) in which plans are the nearer the more they share (`ALIKE`)."""
    import numpy as np  # 57 ms, which runs without a tune need not wait for

    ran = [trial for trial in trials if trial.measured_s is not None]
    predicted = np.log([plan.prediction.step_time_s for plan in plans])
    if not ran:
        return list(np.exp(predicted))
    again = [Planner(settings).prices_for(trial.plan.engine).priced(trial.plan).prediction for trial in ran]
    off = np.array([log((trial.measured_s or 0.0) / now.step_time_s) for trial, now in zip(ran, again, strict=True)])
    deviation = max(_deviation(settings), float(np.std(off)))
    known = np.array([[_alike(one.plan, other.plan) for other in ran] for one in ran]) + SAME_AGAIN**2 / deviation**2 * np.eye(len(ran))
    near = np.array([[_alike(plan, other.plan) for other in ran] for plan in plans])
    weights = np.linalg.solve(known, near.T).T
    left = np.maximum(sum(ALIKE) - (weights * near).sum(axis=1), 0.0)
    return list(np.exp(predicted + weights @ off - deviation * np.sqrt(left)))


def _deviation(settings: Settings) -> float:
    """The standard deviation of the logarithm of a predicted ratio of two plans' steps."""
    if settings.cluster.is_cpu:
        return UNPUBLISHED if settings.calibration in (None, "shipped", "datasheet") else PROFILED
    return pairs_of(settings.architecture).half / HALF


def proposal(settings: Settings, found: Found, how: str) -> str:
    """A sentence that proposes to measure the plans that prices can't tell apart, with what that costs beside what it may save; "" where it
    may not save more, nothing was searched, or nothing can start. `how`: of the start (run.Start)."""
    plan, deviation = found.plan, _deviation(settings)
    behind = [log(other.prediction.step_time_s / plan.prediction.step_time_s) for other in found.alternatives]
    near = [each for each in behind if each < deviation * HALF]
    if how == "none" or settings.tune is not None or settings.continues is not None or not near:
        return ""
    hours, whole = plan.prediction.step_time_s * plan.world_size / 3600, budget(plan)
    normal = NormalDist()
    saved = max(deviation * normal.pdf(each / deviation) - each * normal.cdf(-each / deviation) for each in near)
    cost = (len(near) + 1) * settings.tune_rounds * settings.tune_steps * hours
    if saved * whole.steps * hours <= cost:
        return ""
    of, where = f"{rank_name(plan)}-hours", " in an salloc" if how == "slurm" else ""
    return (f"Prices can't tell the first {len(near) + 1} plans apart: tune={len(near) + 1}{where} measures them, for "
            f"{format_amount(cost, 2)} {of} and their starts at most; it may save {100 * saved:.1f}% of the training in the mean, "
            f"{format_amount(saved * whole.steps * hours, 2)} {of}")  # fmt: skip


def _alike(one: Plan, other: Plan) -> float:
    """The errors' covariance of two plans, in that of one."""
    a, b = one.candidate, other.candidate
    mesh = one.engine == other.engine and a.mesh == b.mesh
    shared = (True, mesh, mesh and a.micro_batch_size == b.micro_batch_size, twins(a, b))
    return sum(part for part, same in zip(ALIKE, shared, strict=True) if same)


class ReportedSteps:
    """The steps that a program of somebody else's reports: it need not know how many are asked for, may hang, or report none."""

    def __init__(self, steps: int, limit_s: float) -> None:
        self.wanted, self.limit_s = steps, limit_s
        self.steps = 0
        self.silent = False
        """Whether it was ended since it reported none for as long as a step may last."""
        self.began = self.last = time.monotonic()

    def step(self, row: Mapping[str, Any]) -> None:
        """Counts one more step, and notes when it came."""
        self.steps, self.last = self.steps + 1, time.monotonic()

    def enough(self) -> bool:
        """Whether it is to be ended: one that takes just the steps asked for ends by itself."""
        self.silent = 0 < self.limit_s < time.monotonic() - self.last
        return self.steps > self.wanted or self.silent

    def ended(self, outcome: local.Outcome) -> local.Outcome:
        """How it ended. Raises LaunchError for a run without any step times."""
        if outcome.status != "finished":
            return outcome
        if measured_step_time(outcome.rows) is None:
            ran = f"ran {format_seconds(time.monotonic() - self.began)}"
            if self.silent:
                ran += " and was ended (train.step_timeout_s)"
            raise LaunchError(f"{ran}, but its log has no step times: looked for {program_metrics.LOOKED_FOR}")
        if self.steps < self.wanted and self.silent:
            said = f"no step in {format_seconds(self.limit_s)} after step {self.steps} (train.step_timeout_s)"
            return replace(outcome, status="failed", exit_status=1, last_line=said)
        return outcome


def tried(settings: Settings, plan: Plan, how: str, folder: Path, number: int) -> Trial:
    """The plan's steps in a folder of its own. Raises KeyboardInterrupt where they were ended from outside, LaunchError for a program that
    tells of no step times."""
    own = settings.entry is None
    quiet = replace(plan.run, **{name: getattr(RunSettings(), name) for name in NOT_WHILE_TUNING})
    training = replace(plan.training, steps=settings.tune_steps) if own else plan.training
    short = replace(plan, training=training, run=quiet)
    shutil.rmtree(folder, ignore_errors=True)  # a trial that was cut off
    job = with_outside(Planner(settings).job(short, trial_steps=None if own else settings.tune_steps), short, folder)
    options = render.with_whole_nodes(job, settings.slurm, settings.cluster.gpus_per_node)
    python = options.python or (None if settings.container else sys.executable)
    scripts = render.files(job, slurm=replace(options, python=python, planner=sys.executable), container=settings.container)
    write_folder(folder, [File(path="plan.json", content=to_json(short)), *job.files, *scripts])
    starter = local.start if how == "local" else slurm.start_in_allocation
    if job.without_worker and own:
        outcome = local.Outcome(status="failed", exit_status=2, started=local.now(), ended=local.now(), last_line=job.without_worker)
    elif own:
        outcome = starter(job, folder)
    else:
        steps = ReportedSteps(settings.tune_steps, plan.run.step_timeout_s)
        outcome = starter(job, folder, on_step=steps.step, enough=steps.enough)
        try:
            outcome = steps.ended(outcome)
        except LaunchError as error:
            raise LaunchError(f"tune={settings.tune}: plan {number} {error}; see {folder / 'logs'}") from None
    if outcome.status == "interrupted":
        print(f"tune: cut off while plan {number} ran; the same command goes on with out={folder.parents[1]}", file=sys.stderr)
        raise KeyboardInterrupt
    local.write_status(folder, outcome, predicted_step_time_s=plan.prediction.step_time_s,
                       measured_step_time_s=measured_step_time(outcome.rows))  # fmt: skip
    return _trial(folder)


def _trial(folder: Path) -> Trial:
    plan = from_json((folder / "plan.json").read_bytes(), str(folder / "plan.json"))
    status: dict[str, Any] = json.loads((folder / STATUS).read_text())
    rows = program_metrics.rows_of(folder / "metrics.jsonl")
    good = status["status"] == "finished"
    why = "" if good else f"{status['status']}: {status['error'] or 'it said nothing'}"
    steps = steady_steps(rows) if good else ()
    return Trial(number=int(folder.name.partition(".")[0]), plan=plan, runs_s=(median(steps),) if steps else (),
                 peak_memory_bytes=measured_peak_memory(rows), why=why)  # fmt: skip


def read_trials(out: Path) -> list[Trial]:
    """The plans of a run's folder whose first run came to an end, each with all its runs, in order."""
    folder = out / FOLDER
    numbers = sorted(int(path.name) for path in folder.glob("*") if path.name.isdecimal() and (path / STATUS).is_file())
    return [together([_trial(path) for path in _run_folders(folder, number)]) for number in numbers]


def _run_folders(folder: Path, number: int) -> list[Path]:
    """The folders of a plan's runs that came to an end: N, N.2, N.3."""
    again = sorted((path for path in folder.glob(f"{number}.*") if path.suffix[1:].isdecimal()), key=lambda path: int(path.suffix[1:]))
    return [path for path in (folder / str(number), *again) if (path / STATUS).is_file()]


# ------------------------------------------------------------------------------------------------------------ learning


def learned_settings(settings: Settings, folder: Path, trials: Sequence[Trial]) -> Settings:
    """The settings with the prices that the trials' timers ask for, written into the folder as calibration= takes them; unchanged without
    trials."""
    files = [file for engine in ENGINES if (file := learned(settings, engine, folder, trials)) is not None]
    for file in files:
        (folder / f"{file.engine}-{file.gpu}.json").write_text(indented(file))
    return replace(settings, calibration=str(folder)) if files else settings


def learned(settings: Settings, engine: str, folder: Path, trials: Sequence[Trial]) -> CalibrationFile | None:
    """The prices of these settings with each constant times the median of what the engine's trials ask for; None: no timers of it."""
    asked: dict[str, list[float]] = {}
    taught: list[Plan] = []
    for trial in trials:
        rows = pictures.timers(folder / str(trial.number)) if trial.plan.engine == engine and trial.measured_s is not None else ()
        if not rows:
            continue
        taught.append(trial.plan)
        cost = Planner(settings).prices_for(trial.plan.engine).costs(trial.plan)
        plan = reprice(trial.plan, cost.traits, cost.calibration)
        predicted, measured = after.predicted_causes(plan, cost.calibration.step_overhead_s), after.measured_causes(plan, rows)
        for name, (before, now) in after.suggested(plan, cost, rows, predicted, measured).items():
            if before:
                asked.setdefault(name, []).append(now / before)
    if not taught:
        return None
    origin = f"median of what {len(taught)} tuned plans of {settings.recipe} ask for"
    constants = after.own_constants(cost) | {
        name: getattr(cost.calibration, name) * median([*factors, *[1.0] * (len(taught) - len(factors))]) for name, factors in asked.items()
    }
    return after.file_of(taught[0], cost, constants, origin, runs=len(taught))


# -------------------------------------------------------------------------------------------------------------- report


def tune_table(trials: Sequence[Trial], taken: Plan) -> RenderableType:
    """Every plan that ran, fastest first, as predicted when it was chosen and as measured, and which was taken; what ended badly last, with
    why."""
    order = ranked(trials)
    table = _table(("tuned", False), ("plan", False), ("predicted", True), ("measured", True), ("against the fastest", True),
                   ("memory", True))  # fmt: skip
    for trial in [*order, *(trial for trial in trials if not trial.runs_s)]:
        measured, against = trial.why, ""
        if trial.measured_s is not None:
            measured = format_seconds(trial.measured_s) + (f" ({len(trial.runs_s)} runs)" if len(trial.runs_s) > 1 else "")
            against = "" if trial is order[0] else f"{expm1(median(slower(trial, order[0]))):+.0%}"
            if trial.plan.candidate == taken.candidate:
                against = f"{against}, taken: runs can't tell, price does" if against else "taken"
        peak = trial.peak_memory_bytes
        table.add_row(str(trial.number), Text(f"{trial.plan.engine} {choice(trial.plan)}"), format_seconds(trial.predicted_s),
                      Text(measured), against, format_bytes(peak) if peak else "-")  # fmt: skip
    return table
