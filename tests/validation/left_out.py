"""Leaves every source out in turn: its runs predicted by constants that were fitted without it, and how often an interval that knows
nothing of it holds them. What comes of it, cost/errors.json, is what intervals are made of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from math import exp, log
from statistics import median
from typing import Final, NamedTuple

from orchestrator.calibrate.pricing import Choose, Pricer, one_value
from orchestrator.cost.calibration import ANY_ENGINE, Calibration, CalibrationFile, datasheet, fitted_gpus, moved, packaged, shipped
from orchestrator.cost.memory_policy import USUAL_RISK
from orchestrator.cost.uncertainty import Cell, Errors, Situation, chance_of_not_fitting, interval, situation
from orchestrator.hardware.catalog import GPUS, nearest
from tests.validation.groups import GROUPS
from tests.validation.metrics import WITHIN, Priced, sweeps
from tests.validation.pricing import named
from tests.validation.runs import Run, counts, doubted, small_experts

DIGITS: Final = 3
"""Decimals of the ratios that are kept."""
MANY: Final = 10
"""Runs above which a table's own share of held runs is judged."""
RISK: Final = 0.01
"""The chance of not fitting up to which a plan counts as fitting here."""


class LeftOut(NamedTuple):
    """A run predicted without its source. `seconds`, `bytes`: measured over predicted; None: not measured. `needed_bytes`: the predicted
    peak of its fullest rank."""

    run: Run
    situation: Situation
    seconds: float | None
    bytes: float | None
    needed_bytes: float


def left_out(runs: Sequence[Run], fit: Callable[[Sequence[Run]], Sequence[CalibrationFile]]) -> list[LeftOut]:
    """Every run, predicted by constants that `fit` makes of the other tables' runs, as the package has them (calibration.packaged): of its
    engine and GPU, else the package's for any engine there, if the table had no part in them, else either of the nearest GPU, else the
    datasheet's.
    Runs that nobody trusts (validate.runs.doubted) and tests of small experts are on neither side; tables that nothing is fitted on are
    predicted by the package's constants."""
    trusted = [run for run in runs if not (doubted(run) or small_experts(run))]
    timed = [run for run in trusted if run.time_s is not None and counts(run)]
    found: list[LeftOut] = []
    for table in sorted({run.table for run in trusted}):
        mine = [run for run in trusted if run.table == table]
        choose = named(None)
        if any(counts(run) for run in mine):
            others = [run for run in timed if run.table != table]
            wanted = {(run.engine.name, run.gpu) for run in mine}
            wanted |= {(engine, near.name) for engine, gpu in wanted if (near := nearest(GPUS[gpu], {run.gpu for run in others}))}
            for group in GROUPS:
                ours = {(engine, gpu) for engine in group.engines for gpu in group.gpus}
                wanted |= ours if wanted & ours else set()
            rest = [run for run in others if (run.engine.name, run.gpu) in wanted]
            choose = constants_of([*(fit(rest) if rest else ()), *products_without(table)])
        found += predicted(mine, choose, {run.gpu for run in timed if run.table != table})
    return found


def products_without(table: str) -> list[CalibrationFile]:
    """The package's matrix products for any engine, by GPU, where no run of this table was fitted."""
    files = (shipped(ANY_ENGINE, gpu) for gpu in fitted_gpus(ANY_ENGINE))
    return [file for file in files if file is not None and table not in file.fitted_on]


def constants_of(files: Sequence[CalibrationFile]) -> Choose[Run]:
    """The constants for a run: of its engine's file, of a file of an engine that shares its constants with the run's (a fit's group), or of
    the GPU's products; of the nearest GPU's; elsewhere the datasheet's."""
    known = {(file.engine, file.gpu): file for file in files}
    shared = {
        (engine, gpu): known[other, gpu]
        for group in GROUPS
        for gpu in group.gpus
        for other in group.engines
        if (other, gpu) in known
        for engine in group.engines
    }

    def constants(run: Run) -> Calibration:
        base = datasheet(run.cluster, run.engine.traits)
        if run.engine.constants_of:
            package = packaged(run.engine.constants_of, run.cluster.gpu)
            return base if package is None else package.file.calibration(base)
        pair = (run.engine.name, run.gpu)
        file = known.get(pair) or shared.get(pair) or known.get((ANY_ENGINE, run.gpu))
        for engine in () if file is not None else (run.engine.name, ANY_ENGINE):
            found = {gpu: of for (name, gpu), of in (shared | known).items() if name == engine}
            if (near := nearest(run.cluster.gpu, found)) is not None:
                file = moved(found[near.name], near, run.cluster.gpu)
                break
        return base if file is None else file.calibration(base)

    return one_value(constants)


def predicted(runs: Sequence[Run], choose: Choose[Run], gpus: set[str]) -> Iterator[LeftOut]:
    """The runs beside their predictions; `gpus`: what the other sources were measured on."""
    pricer = Pricer(choose)
    for run in runs:
        prediction = pricer.price(run).prediction
        if prediction is not None:
            yield LeftOut(
                run=run,
                situation=situation(run.model, run.training, run.cluster, choose(run), gpus, transformers=run.engine.transformers),
                seconds=None if run.time_s is None else run.time_s / prediction.step_time_s,
                bytes=None if run.memory_bytes is None else run.memory_bytes / run.peak_bytes(prediction),
                needed_bytes=prediction.peak_memory_bytes,
            )


def cells_of(found: Sequence[LeftOut]) -> tuple[Cell, ...]:
    """The ratios of measured to predicted, sorted, by source and situation. Peaks of stock stacks are left out: those published
    are of three models, near their predictions, and would let every plan on Hopper keep 13% free for a risk of 5%, where 16% stand now."""
    grouped: dict[tuple[str, Situation], list[LeftOut]] = defaultdict(list)
    for one in found:
        grouped[one.run.table, one.situation].append(one)
    cells = []
    for (_, now), ones in grouped.items():
        seconds = sorted(round(one.seconds, DIGITS) for one in ones if one.seconds is not None)
        peaks = sorted(round(one.bytes, DIGITS) for one in ones if one.bytes is not None and not now.stock)
        if seconds or peaks:
            cells.append(Cell(situation=now, seconds=tuple(seconds), bytes=tuple(peaks)))
    return tuple(cells)


def errors_of(found: Sequence[LeftOut]) -> Errors:
    """What the package keeps."""
    gpus = sorted({one.run.gpu for one in found if one.seconds is not None and counts(one.run)})
    return Errors(gpus=tuple(gpus), cells=cells_of(found))


class Held(NamedTuple):
    """How many timed runs a table has, the share of them inside of an interval that was made without the table, and the median of log(high
    / low)."""

    runs: int
    share: float
    width: float


def coverage(found: Sequence[LeftOut]) -> dict[str, Held]:
    """How the intervals hold for the runs of each table, by table, and "" for all runs together."""
    result: dict[str, Held] = {}
    inside: list[bool] = []
    widths: list[float] = []
    for table in sorted({one.run.table for one in found if one.seconds is not None}):
        cells = cells_of([one for one in found if one.run.table != table])
        made: dict[Situation, tuple[float, float]] = {}
        mine: list[tuple[bool, float]] = []
        for one in found:
            if one.run.table == table and one.seconds is not None:
                if one.situation not in made:
                    made[one.situation] = interval(one.situation, Calibration(), cells) or (1.0, 1.0)
                low, high = made[one.situation]
                mine.append((low <= one.seconds <= high, log(high / low)))
        result[table] = _held(mine)
        inside += [held for held, _ in mine]
        widths += [width for _, width in mine]
    return {**result, "": _held(list(zip(inside, widths, strict=True)))}


def _held(ones: Sequence[tuple[bool, float]]) -> Held:
    return Held(len(ones), sum(held for held, _ in ones) / len(ones), median(width for _, width in ones))


def chances(found: Sequence[LeftOut]) -> Iterator[tuple[LeftOut, float]]:
    """Every run with its chance of not fitting, by peaks of other tables alone; 1.0 where they have none."""
    for table in sorted({one.run.table for one in found}):
        cells = cells_of([one for one in found if one.run.table != table])
        for one in (one for one in found if one.run.table == table):
            limits = one.needed_bytes, one.run.cluster.gpu.memory
            yield one, chance_of_not_fitting(*limits, one.situation, cells) if any(cell.bytes for cell in cells) else 1.0


def ran_out(found: Sequence[LeftOut], risk: float = RISK) -> tuple[int, int]:
    """How many runs ran out of memory, and how many there are, of those that would have been said to fit at this risk by peaks of other
    tables alone."""
    said = [one.run.fits for one, chance in chances(found) if one.run.fits is not None and not one.run.illegal and chance <= risk]
    return said.count(False), len(said)


def regrets(found: Sequence[LeftOut]) -> tuple[float, float, int]:
    """By how much the run ranked first is behind the fastest of its sweep, and the best of the first three, in the mean of sweeps; how
    many there are. 0.0 without any."""
    timed = [(one.run, one.run.time_s / one.seconds, one) for one in found if one.seconds and one.run.time_s is not None]
    needs = [(run, seconds, one.needed_bytes, float(run.cluster.gpu.memory)) for run, seconds, one in timed]
    ranked = sweeps([Priced(run=run, time_s=s, memory_bytes=need, needed_bytes=need, limit_bytes=most) for run, s, need, most in needs])
    top = [sum(sweep.regrets[f"top{n}_regret"] for sweep in ranked) / max(len(ranked), 1) for n in (1, 3)]
    return top[0], top[1], len(ranked)


def off(found: Sequence[LeftOut]) -> str:
    """How far off the predicted seconds of these runs are, in words."""
    errors = [abs(1 / one.seconds - 1) for one in found if one.seconds]
    return f"{median(errors):.2%} off in the median, {sum(error <= WITHIN for error in errors) / len(errors):.0%} within {WITHIN:.0%}"


def judged(found: Sequence[LeftOut]) -> Iterator[str]:
    """How near the predictions are, and how well the intervals and the chances of fitting hold, in a line for each table; how far behind
    the fastest of its sweep is what is ranked first, of those that a plan may be (`USUAL_RISK`) and of all that count."""
    held = coverage(found)
    for table, (runs, share, width) in held.items():
        mine = [one for one in found if table in ("", one.run.table)]
        yield f"{table or 'all'}: {runs} runs, {off(mine)}, {share:.1%} inside; high / low {exp(width):.2f} in the median"
    if stock := [one for one in found if one.situation.stock and one.seconds]:
        yield f"stock: {len(stock)} runs, {off(stock)}"
    out, accepted = ran_out(found)
    yield f"said to fit with a chance of {RISK:.0%} or less: {accepted} runs, of which {out} ran out ({out / max(accepted, 1):.1%})"
    cautious = [one for one, chance in chances(found) if chance <= USUAL_RISK]
    for of, ones in ((f"those with a chance of {USUAL_RISK:.0%} or less", cautious), ("all", found)):
        first, three, many = regrets([one for one in ones if counts(one.run)])
        yield f"ranked among {of}: the first {first:.2%} behind the fastest, the best of three {three:.2%}, in the mean of {many} sweeps"
