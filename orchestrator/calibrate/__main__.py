"""Fits the cost model's constants to measured runs.

    python -m orchestrator.calibrate runs=DIR_OR_CSV [out=FILE_OR_DIR] [all=true] [planned=DIR]
    python -m orchestrator.calibrate runs=DIR_OR_CSV errors=FILE

`runs`: a table in the schema of published measurements, a folder of them, or a folder of our own runs (plan.json, metrics.jsonl in each).
`out`: where the calibration files go; without it they are printed. `all=true` also fits on the runs that are otherwise kept out.
`planned`: where the files of the planned engines go that carry constants over from measured ones (`groups.CARRIED`).
`errors`: leaves every table out in turn, predicts its runs by constants that were fitted without it, and writes how far off they are
(cost/errors.json, which intervals are made of); says how often the interval made without a table holds that table's runs.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
from msgspec.structs import replace
from rich.console import Console
from rich.progress import Progress, TaskID

from orchestrator.calibrate.fit import Fitted, Group, chooser, fit
from orchestrator.calibrate.groups import CARRIED, CPU_NAMES, DEFAULT_NAMES, GROUPS, CarryOver, FitGroup, unit
from orchestrator.calibrate.left_out import errors_of, judged, left_out
from orchestrator.commands import arguments, command_of, truth, write_text
from orchestrator.cost.calibration import ANY_ENGINE, CalibrationFile, Constant, digest
from orchestrator.cost.uncertainty import LINEAR, is_linear, trained_as
from orchestrator.errors import InputError
from orchestrator.strategy.layout import FittedOn
from orchestrator.validate import own
from orchestrator.validate.engines import ENGINES as MEASURED_ENGINES
from orchestrator.validate.pricing import Pricer, seen_peak
from orchestrator.validate.runs import Run, counts, doubted, held_out

KEYS = ("runs", "out", "all", "planned", "errors")
ENOUGH = 20
"""Runs kept out from which on they alone make the interval; below it all runs do."""
LOW, HIGH = 0.05, 0.95


def groups_of(runs: Sequence[Run]) -> list[FitGroup]:
    """The published groups that these runs have, and one for every other (engine, GPU), but for measured engines that have a planned
    one's constants."""
    groups = [group for group in GROUPS if any(group.has(run) and run.time_s is not None for run in runs)]
    for engine, gpu in sorted({(run.engine.name, run.gpu) for run in runs if run.time_s is not None and run.kind == "dense"}):
        if engine in MEASURED_ENGINES and MEASURED_ENGINES[engine].constants_of:
            continue
        if not any(engine in group.engines and gpu in group.gpus and group.kind == "dense" for group in groups):
            groups.append(FitGroup(engines=(engine,), gpus=(gpu,), names=CPU_NAMES if gpu == "cpu" else DEFAULT_NAMES))
    return groups


def ratios(runs: Sequence[Run], constants: Mapping[str, float]) -> list[float]:
    """Measured over predicted seconds of the runs that have both."""
    pricer = Pricer(chooser({(run.engine.name, run.gpu): constants for run in runs}))
    found = []
    for run in runs:
        score = pricer.score(run)
        if score is not None and run.time_s is not None:
            found.append(run.time_s / score[0])
    return found


def error(measured_over_predicted: Sequence[float]) -> float | None:
    """Median of the relative error; None without runs."""
    if not measured_over_predicted:
        return None
    return float(f"{np.median([abs(1 / ratio - 1) for ratio in measured_over_predicted]):.4g}")


def interval_of(train: Sequence[float], kept: Sequence[float]) -> tuple[float, float] | None:
    """5% and 95% quantile of measured over predicted seconds, of the runs kept out where there are `ENOUGH`, widened to 1 where all of them
    were slower, or faster, than predicted: the prediction is never outside of its own interval. None: too few runs.

    >>> interval_of([], [1.1] * 20), interval_of([0.5, 2.0] * 5, []), interval_of([1.0], [1.0])
    ((1.0, 1.1), (0.5, 2.0), None)
    """
    judged = kept if len(kept) >= ENOUGH else [*train, *kept]
    if len(judged) < ENOUGH // 2:
        return None
    low, high = float(np.quantile(judged, LOW)), float(np.quantile(judged, HIGH))
    return min(1.0, float(f"{low:.4g}")), max(1.0, float(f"{high:.4g}"))


def files_of(group: FitGroup, fitted: Fitted, train: Sequence[Run], kept: Sequence[Run]) -> list[CalibrationFile]:
    """A file for every (engine, GPU) of the group that has runs."""
    on_train, on_kept = ratios(train, fitted.constants), ratios(kept, fitted.constants)
    constants = {
        name: Constant(value=float(f"{value:.6g}"), unit=unit(name), origin=origin_of(name, group, fitted))
        for name, value in fitted.constants.items()
    }
    tables = ", ".join(sorted({run.table for run in train}))
    engines = {run.engine.name: run.engine for run in (*train, *kept)}
    return [
        CalibrationFile(
            engine=engine,
            gpu=gpu,
            traits=digest(engines[engine].traits),
            fitted_on=f"{len(train)} runs of {tables}",
            constants=constants,
            fitted_runs=len(on_train),
            fitted_median_error=error(on_train) or 0.0,
            held_out_runs=len(on_kept),
            held_out_median_error=error(on_kept),
            interval=None if engine in MEASURED_ENGINES else interval_of(on_train, on_kept),
            measured=measured_of(train),
        )
        for engine, gpu in sorted({(run.engine.name, run.gpu) for run in (*train, *kept)})
    ]


def measured_of(runs: Sequence[Run]) -> FittedOn:
    """The kinds, the most GPUs and the longest samples of these runs, beyond which a prediction is extrapolation."""
    linear = {LINEAR} if any(is_linear(run.model.architecture) for run in runs) else set()
    return FittedOn(
        kinds=tuple(sorted({trained_as(run.kind == "moe", run.training.precision) for run in runs} | linear)),
        num_gpus=max(run.num_gpus for run in runs),
        seq_length=max(run.training.seq_length for run in runs),
    )


def together(dense: FittedOn | None, experts: FittedOn | None) -> FittedOn | None:
    """The kinds, the most GPUs and the longest samples of both; None: neither has any."""
    if dense is None or experts is None:
        return dense or experts
    return FittedOn(
        kinds=tuple(sorted({*dense.kinds, *experts.kinds})),
        num_gpus=max(dense.num_gpus, experts.num_gpus),
        seq_length=max(dense.seq_length, experts.seq_length),
    )


def origin_of(name: str, group: FitGroup, fitted: Fitted) -> str:
    """How a constant came to its value."""
    if name in group.read:
        return group.read[name][1]
    if name not in group.names:
        return "as in runs without experts"
    return "fitted, at its bound" if name in fitted.at_bound else "fitted"


def margins(runs: Sequence[Run], files: Sequence[CalibrationFile]) -> dict[str, Constant]:
    """What `Calibration.memory_margin` says, from the runs whose peak was measured, by the planned engine that the measured one resembles;
    "" for all engines together."""
    pricer = Pricer(chooser({(file.engine, file.gpu): file.values() for file in files}))
    lacking: dict[str, list[float]] = {"": []}
    for run in runs:
        prediction = pricer.price(run).prediction
        if run.memory_bytes is None or prediction is None:
            continue
        share = max(0.0, 1 - seen_peak(run, prediction) / run.memory_bytes)
        lacking[""].append(share)
        lacking.setdefault(run.engine.resembles or run.engine.name, []).append(share)
    return {
        engine: Constant(
            value=float(f"{np.quantile(shares, HIGH):.3g}"), unit="share", origin=f"95% of {len(shares)} measured peaks lack no more"
        )
        for engine, shares in lacking.items()
        if len(shares) >= ENOUGH
    }


def with_margin(file: CalibrationFile, found: Mapping[str, Constant]) -> CalibrationFile:
    """The file with its engine's margin, or that of all engines."""
    margin = found.get(file.engine, found.get(""))
    return file if margin is None else replace(file, constants={**file.constants, "memory_margin": margin})


def carried_over(runs: Sequence[Run], files: Sequence[CalibrationFile]) -> list[CalibrationFile]:
    """The files of planned engines (`groups.CARRIED`): what carries over of a measured engine's constants, judged on that engine's runs
    with these constants alone."""
    made = []
    for carry in CARRIED:
        for file in files:
            if file.engine == carry.source and file.gpu in carry.gpus:
                made.append(_carried(carry, file, runs))
    return made


def _carried(carry: CarryOver, file: CalibrationFile, runs: Sequence[Run]) -> CalibrationFile:
    constants = {
        name: replace(constant, origin=f"{constant.origin} ({carry.source}); carried over: {carry.why[name]}")
        for name, constant in file.constants.items()
        if name in carry.why
    }
    values = {name: constant.value for name, constant in constants.items()}
    group = next(group for group in GROUPS if carry.source in group.engines and file.gpu in group.gpus and group.kind == "dense")
    mine = [run for run in runs if run.engine.name in group.engines and run.gpu in group.gpus and run.time_s is not None and counts(run)]
    mine = [run for run in mine if run.kind == "dense" and run.gpu == file.gpu] or [run for run in mine if run.gpu == file.gpu]
    train, kept = ratios([run for run in mine if not held_out(run)], values), ratios([run for run in mine if held_out(run)], values)
    return replace(
        file,
        engine=carry.to,
        carried_from=carry.source,
        constants=constants,
        fitted_runs=len(train),
        fitted_median_error=error(train) or 0.0,
        held_out_runs=len(kept),
        held_out_median_error=error(kept),
        interval=None,
        measured=None if carry.to == ANY_ENGINE else file.measured,
    )


def calibrate(runs: Sequence[Run], console: Console, *, everything: bool) -> list[CalibrationFile]:
    """Fits every group and says how well."""
    timed = [run for run in runs if run.time_s is not None and counts(run)]
    made: list[CalibrationFile] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for group in groups_of(timed):
            mine = [run for run in timed if group.has(run)]
            train = [run for run in mine if everything or not held_out(run)] or mine
            kept = [run for run in mine if held_out(run)]
            task = progress.add_task(f"{'/'.join(group.engines)} on {'/'.join(group.gpus)}", total=None)
            read = {name: value for name, (value, _) in group.read.items()}
            before: dict[Group, CalibrationFile] = {(file.engine, file.gpu): file for file in made}
            if group.kind == "moe" and (
                dense := next((file for file in made if file.engine in group.engines and file.gpu in (*group.gpus, *group.base)), None)
            ):
                read = {name: constant.value for name, constant in dense.constants.items()} | read

            def evaluated(done: int, task: TaskID = task) -> None:
                progress.update(task, completed=done)

            fitted = fit(train, group.names, read, evaluated)
            files = files_of(group, fitted, train, kept)
            progress.remove_task(task)
            for file in files:
                old = before.get((file.engine, file.gpu))
                if old is None:
                    made.append(file)
                    continue
                own = (*group.names, *group.read)
                added = {name: constant for name, constant in file.constants.items() if name not in old.constants and name in own}
                made[made.index(old)] = replace(
                    old,
                    constants={**old.constants, **added},
                    fitted_on=f"{old.fitted_on}; experts: {file.fitted_on}",
                    measured=together(old.measured, file.measured),
                )
            held = "" if files[0].held_out_median_error is None else f", {files[0].held_out_median_error:.1%} on {len(kept)} kept out"
            few = "" if len(train) >= len(group.names) else f" for {len(group.names)} constants, too few to tell them apart"
            console.print(f"{'/'.join(group.engines)} on {', '.join(sorted({run.gpu for run in mine}))}: {len(train)} runs{few}", end="")
            console.print(f", median error {files[0].fitted_median_error:.1%}{held}", highlight=False)
            if fitted.at_bound:
                console.print(f"  at the bound: {', '.join(sorted(fitted.at_bound))}: some cost is missing there", highlight=False)
    return made


def run(words: Sequence[str]) -> None:
    """Runs the command with these words. Raises InputError."""
    console = Console(width=None if sys.stdout.isatty() else 200)
    given = arguments(words, KEYS, required=("runs",))
    everything = truth(given, "all")
    where = Path(given["runs"])
    runs, unusable = own.measured(where)
    if unusable:
        console.print(f"{len(runs)} runs, {len(unusable)} rows that can't be used (python -m orchestrator.validate says why)")
    if "errors" in given:
        for key in ("out", "all", "planned"):
            if key in given:
                raise InputError(key, given[key], "has no part in errors=, which fits all but one table, table after table")
        found = left_out(runs, lambda rest: calibrate(rest, console, everything=True))
        for line in judged(found):
            console.print(line, highlight=False, markup=False)
        errors = msgspec.json.format(msgspec.json.encode(errors_of(found)), indent=0).decode() + "\n"
        write_text(Path(given["errors"]), errors, "errors", with_folders=True)
        return
    files = calibrate(runs, console, everything=everything)
    if not files:
        raise InputError("runs", where, "holds no run with a step time")
    kept_free = margins([run for run in runs if not doubted(run) and counts(run)], files)
    if "planned" in given:
        carried = carried_over(runs, files)
        carried = [file if file.engine == ANY_ENGINE else with_margin(file, kept_free) for file in carried]
        write(carried, given["planned"], console, "planned")
    ours = [
        file if file.engine in MEASURED_ENGINES else with_margin(file, kept_free) for file in files
    ]  # a plan needs it, a published run not
    write(ours, given.get("out"), console, "out")


def write(files: Sequence[CalibrationFile], out: str | None, console: Console, key: str) -> None:
    """Writes the files into a folder, one each; into a .json file where there is one only; or on the screen. Raises InputError for several
    files and a .json file."""
    for file in files:
        text = msgspec.json.format(msgspec.json.encode(file), indent=1).decode() + "\n"
        if out is None:
            console.print(text, highlight=False, markup=False)
            continue
        single = out.endswith(".json")
        if single and len(files) > 1:
            raise InputError(key, out, f"must be a folder: there are {len(files)} calibrations")
        write_text(Path(out) if single else Path(out) / f"{file.engine}-{file.gpu}.json", text, key, with_folders=True)


main = command_of(__doc__, run)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
