"""Fits the cost model's constants to your own measured runs, or says how far off predictions are on them.

    python -m orchestrator.calibrate runs=FOLDER_OR_FILE [out=FILE_OR_DIR]
    python -m orchestrator.calibrate runs=FOLDER_OR_FILE calibration=NAME_OR_FILE

`runs`: a run's folder (plan.json, metrics.jsonl), a folder of such, or a file of several runs:
{"runs": [{"name": NAME, "plan": plan.json's object, "metrics": [metrics.jsonl's lines]}, ...]}
`out`: where the calibration goes, a file for each engine and GPU; without it they are printed. `calibration`: nothing is fitted; every run
beside its prediction by these constants: shipped (the package's), datasheet, a file or a folder.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import Progress

from orchestrator.calibrate.files import OWN, error, files_of, margins, off, show_fit, with_margin, write
from orchestrator.calibrate.fit import ANY_HOST, CPU_BOUNDS, SLOWER_HOSTS, fit
from orchestrator.calibrate.pricing import one_value
from orchestrator.calibrate.runs import METRICS, PLAN, SEVERAL, WARM_UP, Run, left_out, load
from orchestrator.commands import arguments, command_of
from orchestrator.cost.calibration import CalibrationFile, found, priced
from orchestrator.errors import InputError
from orchestrator.hardware.spec import is_cpu
from orchestrator.units import format_seconds

KEYS = ("runs", "out", "calibration")
DEFAULT_NAMES: Final = (
    "gemm_efficiency",
    "pointwise_factor",
    "inner_efficiency",
    "outer_efficiency",
    "op_overhead_s",
    "microbatch_overhead_s",
)
"""Constants that are fitted for an engine on a GPU: few, so that ten runs settle them."""
CPU_NAMES: Final = (
    "gemm_efficiency",
    "memory_efficiency",
    "op_overhead_s",
    "microbatch_overhead_s",
    "collective_overhead_s",
    "inner_efficiency",
    "core_share",
)
"""Constants that are fitted for gloo ranks on the CPU: few, so that ten runs settle them."""


def calibrate(runs: Sequence[Run], console: Console) -> list[CalibrationFile]:
    """Fits the constants of every engine on every GPU that has runs, and says how well."""
    made: list[CalibrationFile] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for engine, gpu in sorted({(run.traits.engine, run.gpu) for run in runs}):
            mine = [run for run in runs if (run.traits.engine, run.gpu) == (engine, gpu)]
            names, bounds = (CPU_NAMES, CPU_BOUNDS) if is_cpu(gpu) else (DEFAULT_NAMES, ANY_HOST)
            task = progress.add_task(f"{engine} on {gpu}", total=None)
            shown = lambda done, task=task: progress.update(task, completed=done)  # noqa: E731
            fitted = fit(mine, names, progress=shown, bounds=bounds, hosts=SLOWER_HOSTS)
            made += files_of(fitted, mine, (), OWN)
            progress.remove_task(task)
            show_fit(console, f"{engine} on {gpu}", fitted, made[-1], len(mine), len(names))
    return made


def judge(runs: Sequence[Run], calibration: str, console: Console) -> None:
    """Says of every run how long a step took and how long it should have by these constants. Raises InputError."""
    choose = one_value(lambda run: priced(run.cluster, run.traits, found(calibration, run.cluster, [run.traits], None)[0]))
    refused: dict[str, InputError] = {}
    for run in runs:
        try:
            choose(run)
        except InputError as refusal:  # a file is for one engine on one GPU
            refused[run.run_id] = refusal
    if len(refused) == len(runs):
        raise next(iter(refused.values()))
    judged = off([run for run in runs if run.run_id not in refused], choose)
    for run, ratio in judged:
        seconds = run.time_s or 0.0
        said = f"{run.run_id}: measured {format_seconds(seconds)}, predicted {format_seconds(seconds / ratio)} ({1 / ratio - 1:+.1%})"
        console.print(said, highlight=False, markup=False)
    for why in dict.fromkeys(map(str, refused.values())):
        names = ", ".join(name for name, one in refused.items() if str(one) == why)
        console.print(f"{names}: not priced: {why}", highlight=False, markup=False)
    median = error([ratio for _, ratio in judged])
    console.print(f"{len(judged)} of {len(runs)} runs priced" + ("" if median is None else f", median error {median:.1%}"), highlight=False)


def run(words: Sequence[str]) -> None:
    """Runs the command with these words. Raises InputError."""
    console = Console(width=None if sys.stdout.isatty() else 200)
    given = arguments(words, KEYS, required=("runs",))
    runs = load(Path(given["runs"]))
    if not runs:
        holds = f"a run's folder has {PLAN} and {METRICS}, a file of several runs (.json) is {SEVERAL}"
        raise InputError("runs", given["runs"], f"holds no run with a step time; {holds}")
    if without := left_out(Path(given["runs"]), runs):
        console.print(f"left out, without a step after the first {WARM_UP} (warm-up): {', '.join(without)}", highlight=False, markup=False)
    if "calibration" in given:
        if "out" in given:
            raise InputError("out", given["out"], "has no part in calibration=, which fits nothing")
        judge(runs, given["calibration"], console)
        return
    out, of = given.get("out"), sorted({f"{run.traits.engine} on {run.gpu}" for run in runs})
    if out is not None and out.endswith(".json") and len(of) > 1:  # before minutes of fitting
        why = f"is one file, and the runs are of {len(of)} kinds: {', '.join(of)}; out={out.removesuffix('.json')} takes a file for each"
        raise InputError("out", out, why)
    files = calibrate(runs, console)
    free = margins(runs, files, lambda run: run.traits.engine)
    write([with_margin(file, free) for file in files], out, console)
    if out is not None:
        console.print(f"Written to {out}: {', '.join(of)}. Next: plan with calibration={out}", highlight=False, markup=False)


main = command_of(__doc__, run)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
