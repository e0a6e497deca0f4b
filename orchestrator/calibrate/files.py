"""The calibration files that a fit makes: constants, how far off they are on the runs, and the interval that follows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
from msgspec.structs import replace
from rich.console import Console

from orchestrator.calibrate.fit import Fitted, chooser
from orchestrator.calibrate.pricing import Choose, Pricer
from orchestrator.calibrate.runs import Run
from orchestrator.commands import write_text
from orchestrator.cost.calibration import CalibrationFile, Constant, digest, unit
from orchestrator.cost.uncertainty import ADAPTERS, LINEAR, is_linear, trained_as
from orchestrator.errors import InputError
from orchestrator.strategy.layout import FittedOn
from orchestrator.values import indented

R = TypeVar("R", bound=Run)
ENOUGH = 20
"""Runs kept out from which on they alone make the interval; below it all runs do."""
LOW, HIGH = 0.05, 0.95


def off(runs: Iterable[R], choose: Choose[R]) -> list[tuple[R, float]]:
    """The timed runs that can be priced, each with its measured over its predicted seconds."""
    pricer = Pricer(choose)
    scores = [(run, pricer.score(run)) for run in runs if run.time_s is not None]
    return [(run, run.time_s / score[0]) for run, score in scores if score is not None and run.time_s is not None]


def ratios(runs: Sequence[Run], constants: Mapping[str, float]) -> list[float]:
    """Measured over predicted seconds of the runs that have both."""
    return [ratio for _, ratio in off(runs, chooser({(run.traits.engine, run.gpu): constants for run in runs}))]


def error(measured_over_predicted: Sequence[float]) -> float | None:
    """Median of the relative error; None without runs."""
    if not measured_over_predicted:
        return None
    return float(f"{np.median([abs(1 / ratio - 1) for ratio in measured_over_predicted]):.4g}")


def interval_of(train: Sequence[float], kept: Sequence[float], names: int = 0) -> tuple[float, float] | None:
    """5% and 95% quantile of measured over predicted seconds, of the runs kept out where there are `ENOUGH`, widened to 1 where all of them
    were slower, or faster, than predicted: the prediction is never outside of its own interval. None: too few runs. `names`: constants
    that were fitted to `train`, which lie nearer to it than to other runs: as residuals of a regression do, by sqrt(1 - names / runs).

    >>> interval_of([], [1.1] * 20), interval_of([0.5, 2.0] * 5, []), interval_of([1.0], [1.0])
    ((1.0, 1.1), (0.5, 2.0), None)
    >>> interval_of([0.99, 1.01] * 6, [], 9), interval_of([0.99, 1.01] * 6, [], 12)
    ((0.98, 1.02), None)
    """
    judged, free = (kept, 1.0) if len(kept) >= ENOUGH else ([*train, *kept], 1 - names / max(1, len(train) + len(kept)))
    if len(judged) < ENOUGH // 2 or free <= 0:
        return None
    low, high = (1 + (float(np.quantile(judged, share)) - 1) / free**0.5 for share in (LOW, HIGH))
    low = max(low, 0.0)
    return min(1.0, float(f"{low:.4g}")), max(1.0, float(f"{high:.4g}"))


def files_of(
    fitted: Fitted, train: Sequence[Run], kept: Sequence[Run], source: str, origin: Callable[[str], str] | None = None
) -> list[CalibrationFile]:
    """A file for every (engine, GPU) of the runs that the constants were fitted to, and of those kept out. `source`: whose runs they are;
    `origin`: how a constant came to its value."""
    on_train, on_kept = ratios(train, fitted.constants), ratios(kept, fitted.constants)
    constants = {
        name: Constant(value=float(f"{value:.6g}"), unit=unit(name), origin=(origin or fitted.origin)(name))
        for name, value in fitted.constants.items()
    }
    return [
        CalibrationFile(
            engine=engine,
            gpu=gpu,
            traits=digest(traits),
            fitted_on=f"{len(train)} runs of {source}",
            constants=constants,
            fitted_runs=len(on_train),
            fitted_median_error=error(on_train) or 0.0,
            held_out_runs=len(on_kept),
            held_out_median_error=error(on_kept),
            interval=interval_of(on_train, on_kept, len(fitted.constants)),
            measured=measured_of(train, sizes=source == OWN),
        )
        for (engine, gpu), traits in sorted({(run.traits.engine, run.gpu): run.traits for run in (*train, *kept)}.items())
    ]


OWN: Final = "own"
"""The source of a user's own runs."""


def measured_of(runs: Sequence[Run], *, sizes: bool = False) -> FittedOn:
    """The kinds, the most GPUs and the longest samples of these runs, beyond which a prediction is extrapolation; `sizes`: their models'
    parameters too."""
    parameters = [run.model.parameters for run in runs]
    linear = {LINEAR} if any(is_linear(run.model.architecture) for run in runs) else set()
    adapters = {ADAPTERS} if any(run.training.lora is not None for run in runs) else set()
    return FittedOn(
        kinds=tuple(sorted({trained_as(run.has_experts, run.training.precision) for run in runs} | linear | adapters)),
        num_gpus=max(run.num_gpus for run in runs),
        seq_length=max(run.training.seq_length for run in runs),
        parameters=(min(parameters), max(parameters)) if sizes else None,
    )


def margins(runs: Sequence[R], files: Sequence[CalibrationFile], planned: Callable[[R], str]) -> dict[str, Constant]:
    """What `Calibration.memory_margin` says, from the runs whose peak was measured, by the planned engine that they are of;
    "" for all engines together."""
    pricer: Pricer[R] = Pricer(chooser({(file.engine, file.gpu): file.values() for file in files}))
    lacking: dict[str, list[float]] = {"": []}
    for run in runs:
        prediction = pricer.price(run).prediction
        if run.memory_bytes is None or prediction is None:
            continue
        share = max(0.0, 1 - run.peak_bytes(prediction) / run.memory_bytes)
        lacking[""].append(share)
        lacking.setdefault(planned(run), []).append(share)
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


def show_fit(console: Console, of: str, fitted: Fitted, file: CalibrationFile, train: int, names: int, kept: int = 0) -> None:
    """How well constants fit, in a line; `of`: what was fitted; how many runs, constants and runs kept out there are."""
    held = "" if file.held_out_median_error is None else f", {file.held_out_median_error:.1%} on {kept} kept out"
    few = "" if train >= names else f" for {names} constants, too few to tell them apart"
    console.print(f"{of}: {train} run{'s' * (train != 1)}{few}, median error {file.fitted_median_error:.1%}{held}", highlight=False)
    if fitted.at_bound:
        console.print(f"  at the bound: {', '.join(sorted(fitted.at_bound))}: some cost is missing there", highlight=False)


def write(files: Sequence[CalibrationFile], out: str | None, console: Console, key: str = "out") -> None:
    """Writes the files into a folder, one each; into a .json file where there is one only; or on the screen. Raises InputError for several
    files and a .json file."""
    for file in files:
        text = indented(file)
        if out is None:
            console.print(text, highlight=False, markup=False)
            continue
        single = out.endswith(".json")
        if single and len(files) > 1:
            raise InputError(key, out, f"must be a folder: there are {len(files)} calibrations")
        write_text(Path(out) if single else Path(out) / f"{file.engine}-{file.gpu}.json", text, key, with_folders=True)
