"""Fits the constants that come with the package to published runs.

    python -m tests.validation.fitting runs=DIR_OR_CSV [out=DIR] [all=true] [planned=DIR]
    python -m tests.validation.fitting runs=DIR_OR_CSV errors=FILE

`runs`: a table in the schema of published measurements, or a folder of them. `out`: where the files of measured engines go; without it they
are printed. `all=true` also fits on the runs that are otherwise kept out.
`planned`: where the files of the planned engines go that carry constants over from measured ones (`groups.CARRIED`).
`errors`: leaves every table out in turn, predicts its runs by constants that were fitted without it, and writes how far off they are
(cost/errors.json, which intervals are made of); says how often the interval made without a table holds that table's runs, and how far
behind the fastest of its sweep is the run that is ranked first.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace
from rich.console import Console
from rich.progress import Progress, TaskID

from orchestrator.calibrate.__main__ import DEFAULT_NAMES
from orchestrator.calibrate.files import error, files_of, margins, ratios, show_fit, with_margin, write
from orchestrator.calibrate.fit import Fitted, Group, fit
from orchestrator.commands import arguments, command_of, write_text
from orchestrator.cost.calibration import ANY_ENGINE, CalibrationFile
from orchestrator.cost.uncertainty import BITS
from orchestrator.errors import InputError
from orchestrator.strategy.layout import FittedOn
from tests.validation.engines import ENGINES
from tests.validation.groups import CARRIED, GROUPS, CarryOver, FitGroup
from tests.validation.left_out import errors_of, judged, left_out
from tests.validation.rows import truth
from tests.validation.runs import Run, counts, doubted, held_out
from tests.validation.tables import load

KEYS = ("runs", "out", "all", "planned", "errors")


def groups_of(runs: Sequence[Run]) -> list[FitGroup]:
    """The published groups that these runs have, and one for every other (engine, GPU), but for measured engines that have a planned
    one's constants."""
    groups = [group for group in GROUPS if any(group.has(run) and run.time_s is not None for run in runs)]
    for engine, gpu in sorted({(run.engine.name, run.gpu) for run in runs if run.time_s is not None and run.kind == "dense"}):
        if ENGINES[engine].constants_of:
            continue
        if not any(engine in group.engines and gpu in group.gpus and group.kind == "dense" for group in groups):
            groups.append(FitGroup(engines=(engine,), gpus=(gpu,), names=DEFAULT_NAMES))
    return groups


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
    return fitted.origin(name) if name in group.names else "as in runs without experts"


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

            in_8_bits = all(run.training.precision in BITS for run in train)
            fitted = fit(train, [name for name in group.names if not (in_8_bits and name in group.in_16_bits)], read, evaluated)
            source = ", ".join(sorted({run.table for run in train}))
            files = files_of(fitted, train, kept, source, lambda name, group=group, fitted=fitted: origin_of(name, group, fitted))  # type: ignore[misc]
            progress.remove_task(task)
            for file in files:
                old = before.get((file.engine, file.gpu))
                if old is None:
                    made.append(replace(file, interval=None))
                    continue
                own = (*group.names, *group.read)
                added = {name: constant for name, constant in file.constants.items() if name not in old.constants and name in own}
                made[made.index(old)] = replace(
                    old,
                    constants={**old.constants, **added},
                    fitted_on=f"{old.fitted_on}; experts: {file.fitted_on}",
                    measured=together(old.measured, file.measured),
                )
            of = f"{'/'.join(group.engines)} on {', '.join(sorted({run.gpu for run in mine}))}"
            show_fit(console, of, fitted, files[0], len(train), len(group.names), len(kept))
    return made


def run(words: Sequence[str]) -> None:
    """Runs the command with these words. Raises InputError."""
    console = Console(width=None if sys.stdout.isatty() else 200)
    given = arguments(words, KEYS, required=("runs",))
    everything = truth(given, "all")
    where = Path(given["runs"])
    runs, unusable = load(where)
    if unusable:
        console.print(f"{len(runs)} runs, {len(unusable)} rows that can't be used (python -m tests.validation says why)")
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
    if "planned" in given:
        trusted = [run for run in runs if not doubted(run) and counts(run)]
        kept_free = margins(trusted, files, lambda run: run.engine.resembles or run.engine.name)
        carried = [file if file.engine == ANY_ENGINE else with_margin(file, kept_free) for file in carried_over(runs, files)]
        write(carried, given["planned"], console, "planned")
    write(files, given.get("out"), console)


main = command_of(__doc__, run)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
