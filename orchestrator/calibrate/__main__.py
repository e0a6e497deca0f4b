"""`python -m orchestrator.calibrate runs=DIR_OR_CSV [out=FILE_OR_DIR] [all=true]`: fits the cost model's constants to measured runs.

`runs`: a table in the schema of published measurements, a folder of them, or a folder of our own runs (plan.json, metrics.jsonl in each).
`out`: where the calibration files go; without it they are printed. `all=true` also fits on the runs that are otherwise kept out.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from msgspec.structs import replace
from rich.console import Console
from rich.progress import Progress, TaskID

from orchestrator.calibrate.fit import Fitted, chooser, fit
from orchestrator.calibrate.groups import CPU_NAMES, DEFAULT_NAMES, GROUPS, FitGroup, unit
from orchestrator.commands import arguments, command, truth, usage
from orchestrator.cost.calibration import CalibrationFile, Constant
from orchestrator.cost.measured_traits import ENGINE_OF
from orchestrator.errors import InputError
from orchestrator.strategy.capabilities import Traits
from orchestrator.validate import own
from orchestrator.validate.pricing import Pricer, seen_peak
from orchestrator.validate.runs import Run, held_out

KEYS = ("runs", "out", "all")
DOUBTED_GPUS = 512
"""nanotron's runs on this many GPUs are not fitted on (measurements README)."""
ENOUGH = 20
"""Runs kept out from which on they alone make the interval; below it all runs do."""
LOW, HIGH = 0.05, 0.95


def groups_of(runs: Sequence[Run]) -> list[FitGroup]:
    """The published groups that these runs have, and one for every other (traits, GPU)."""
    groups = [group for group in GROUPS if any(group.has(run) and run.time_s is not None for run in runs)]
    for traits, gpu in sorted({(run.traits, run.gpu) for run in runs if run.time_s is not None and run.kind == "dense"}):
        if not any(traits in group.all_traits and gpu in group.gpus and group.kind == "dense" for group in groups):
            groups.append(FitGroup(all_traits=(traits,), gpus=(gpu,), names=CPU_NAMES if gpu == "cpu" else DEFAULT_NAMES))
    return groups


def ratios(runs: Sequence[Run], constants: dict[str, float], all_traits: dict[str, Traits]) -> list[float]:
    """Measured over predicted seconds."""
    pricer = Pricer(chooser({(run.traits, run.gpu): constants for run in runs}), all_traits)
    found = []
    for run in runs:
        score = pricer.score(run)
        if score is not None and run.time_s is not None:
            found.append(run.time_s / score[0])
    return found


def files_of(
    group: FitGroup, fitted: Fitted, train: Sequence[Run], kept: Sequence[Run], all_traits: dict[str, Traits]
) -> list[CalibrationFile]:
    """A file for every (traits, GPU) of the group that has runs, and for the planner's engines that it stands for."""
    on_train, on_kept = ratios(train, fitted.constants, all_traits), ratios(kept, fitted.constants, all_traits)
    judged = on_kept if len(on_kept) >= ENOUGH else on_train + on_kept
    interval = (float(np.quantile(judged, LOW)), float(np.quantile(judged, HIGH))) if len(judged) >= ENOUGH // 2 else None
    constants = {
        name: Constant(value=float(f"{value:.6g}"), unit=unit(name), origin=group.read[name][1] if name in group.read else "fitted")
        for name, value in fitted.constants.items()
    }
    tables = ", ".join(sorted({run.table for run in train}))
    made = []
    for traits, gpu in sorted({(run.traits, run.gpu) for run in (*train, *kept)}):
        made.append((traits, gpu, constants))
        if traits == group.all_traits[0]:
            taken = {name: constant for name, constant in constants.items() if name not in group.not_for_planner}
            made += [(engine, gpu, taken) for engine in group.planner]
    return [
        CalibrationFile(
            engine=engine,
            gpu=gpu,
            fitted_on=f"{len(train)} runs of {tables}",
            constants=values,
            fitted_runs=len(on_train),
            fitted_median_error=float(f"{np.median([abs(1 / ratio - 1) for ratio in on_train]):.4g}"),
            held_out_runs=len(on_kept),
            held_out_median_error=float(f"{np.median([abs(1 / ratio - 1) for ratio in on_kept]):.4g}") if on_kept else None,
            interval=None if interval is None else (float(f"{interval[0]:.4g}"), float(f"{interval[1]:.4g}")),
        )
        for engine, gpu, values in made
    ]


def margins(runs: Sequence[Run], files: Sequence[CalibrationFile], all_traits: dict[str, Traits]) -> dict[str, Constant]:
    """By engine, what `Calibration.memory_margin` says, from the runs whose peak was measured; "" for all engines together."""
    found = {(file.engine, file.gpu): file.values() for file in files}
    pricer = Pricer(chooser(found), all_traits)
    lacking: dict[str, list[float]] = {"": []}
    for run in runs:
        prediction = pricer.price(run).prediction
        if run.memory_bytes is None or prediction is None:
            continue
        share = max(0.0, 1 - seen_peak(run, prediction) / run.memory_bytes)
        lacking[""].append(share)
        lacking.setdefault(ENGINE_OF.get(run.traits, run.traits), []).append(share)
    return {
        engine: Constant(
            value=float(f"{np.quantile(shares, HIGH):.3g}"), unit="share", origin=f"95% of {len(shares)} measured peaks lack no more"
        )
        for engine, shares in lacking.items()
        if len(shares) >= ENOUGH
    }


def with_margin(file: CalibrationFile, found: dict[str, Constant]) -> CalibrationFile:
    """The file with its engine's margin, or that of all engines."""
    margin = found.get(ENGINE_OF.get(file.engine, file.engine), found.get(""))
    return file if margin is None else replace(file, constants={**file.constants, "memory_margin": margin})


def calibrate(runs: Sequence[Run], all_traits: dict[str, Traits], console: Console, *, everything: bool) -> list[CalibrationFile]:
    """Fits every group and says how well."""
    doubted = [run.traits == "nanotron" and run.num_gpus >= DOUBTED_GPUS for run in runs]
    timed = [run for run, doubt in zip(runs, doubted, strict=True) if run.time_s is not None and not doubt]
    made: list[CalibrationFile] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for group in groups_of(timed):
            mine = [run for run in timed if group.has(run)]
            train = [run for run in mine if everything or not held_out(run)] or mine
            kept = [run for run in mine if held_out(run)]
            task = progress.add_task(f"{'/'.join(group.all_traits)} on {'/'.join(group.gpus)}", total=None)
            read = {name: value for name, (value, _) in group.read.items()}
            before = {(file.engine, file.gpu): file for file in made}
            if group.kind == "moe" and (
                dense := next((file for file in made if file.engine in group.all_traits and file.gpu in group.gpus), None)
            ):
                read = {name: constant.value for name, constant in dense.constants.items()}

            def evaluated(done: int, task: TaskID = task) -> None:
                progress.update(task, completed=done)

            fitted = fit(train, group.names, read, all_traits, evaluated)
            files = files_of(group, fitted, train, kept, all_traits)
            progress.remove_task(task)
            for file in files:
                old = before.get((file.engine, file.gpu))
                if old is None:
                    made.append(file)
                    continue
                added = {name: constant for name, constant in file.constants.items() if name not in old.constants and name in group.names}
                made[made.index(old)] = replace(
                    old, constants={**old.constants, **added}, fitted_on=f"{old.fitted_on}; experts: {file.fitted_on}"
                )
            held = "" if files[0].held_out_median_error is None else f", {files[0].held_out_median_error:.1%} on {len(kept)} kept out"
            few = "" if len(train) >= len(group.names) else f" for {len(group.names)} constants, too few to tell them apart"
            console.print(f"{'/'.join(group.all_traits)} on {', '.join(sorted({run.gpu for run in mine}))}: {len(train)} runs{few}", end="")
            console.print(f", median error {files[0].fitted_median_error:.1%}{held}", highlight=False)
    kept_free = margins([run for run, doubt in zip(runs, doubted, strict=True) if not doubt], made, all_traits)
    return [with_margin(file, kept_free) for file in made]


def run(words: Sequence[str]) -> None:
    """The command. Raises InputError."""
    console = Console(width=None if sys.stdout.isatty() else 200)
    given = arguments(words, KEYS, required=("runs",))
    everything = truth(given, "all")
    where = Path(given["runs"])
    runs, unusable, all_traits = own.measured(where)
    if unusable:
        console.print(f"{len(runs)} runs, {len(unusable)} rows that can't be used (python -m orchestrator.validate says why)")
    files = calibrate(runs, all_traits, console, everything=everything)
    if not files:
        raise InputError("runs", where, "holds no run with a step time")
    write(files, given.get("out"), console)


def main(words: Sequence[str]) -> int:
    """Exit status."""
    return command(words, lambda: usage(__doc__), run)


def write(files: Sequence[CalibrationFile], out: str | None, console: Console) -> None:
    """Into a folder, one file each; into a .json file where there is one only; or on the screen."""
    for file in files:
        text = msgspec.json.format(msgspec.json.encode(file), indent=1).decode() + "\n"
        if out is None:
            console.print(text, highlight=False, markup=False)
            continue
        single = out.endswith(".json")
        if single and len(files) > 1:
            raise InputError("out", out, f"must be a folder: there are {len(files)} calibrations")
        path = Path(out) if single else Path(out) / f"{file.engine}-{file.gpu}.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise InputError("out", out, f"can't be written: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
