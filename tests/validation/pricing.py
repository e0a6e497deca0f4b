"""Prices published runs with the constants that their engine has on their GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Final

import msgspec

from orchestrator.calibrate.pricing import Choose, Outcome, Pricer, one_value, zero_shot
from orchestrator.cost.calibration import CHOICES, Calibration, CalibrationFile, digest, held, packaged, read_file
from orchestrator.errors import InputError
from tests.validation.engines import ENGINES
from tests.validation.runs import Run

FOLDER: Final = "calibrations"


@cache
def shipped_file(engine: str, gpu: str) -> CalibrationFile | None:
    """The package's constants of a measured engine on this GPU; None: there are none. Raises InputError where they were fitted for other
    traits of it than it has now."""
    file = Path(__file__).parent.joinpath(FOLDER, f"{engine}-{gpu}.json")
    return _fitting(msgspec.json.decode(file.read_bytes(), type=CalibrationFile)) if file.is_file() else None


def _fitting(file: CalibrationFile) -> CalibrationFile:
    """The file, if it was fitted for the traits that its measured engine has. Raises InputError."""
    engine = ENGINES.get(file.engine)
    if engine is not None and digest(engine.traits) != file.traits:
        why = f"was fitted for other traits ({file.traits}, now {digest(engine.traits)}): calibrate again"
        raise InputError("calibration", f"{file.engine}-{file.gpu}", why)
    return file


def _shipped(run: Run) -> Calibration:
    """The constants that come with the package: those fitted to a measured engine, or those of the planned one that is the same program."""
    base = zero_shot(run)
    if run.engine.constants_of:
        package = packaged(run.engine.constants_of, run.cluster.gpu)
        return base if package is None else package.file.calibration(base)
    file = shipped_file(run.engine.name, run.gpu)
    return base if file is None else file.calibration(base)


def from_files(where: Path) -> Choose[Run]:
    """Calibrations of a file or of a folder's .json files; what they don't have is the datasheet's. Raises InputError."""
    paths = sorted(where.glob("*.json")) if where.is_dir() else [where]
    known: dict[tuple[str, str], CalibrationFile] = {}
    for path in paths:
        file = _fitting(read_file(path))
        known[file.engine, file.gpu] = file
    if not known:
        raise InputError("calibration", where, "holds no calibration", CHOICES)

    def make(run: Run) -> Calibration:
        base = zero_shot(run)
        file = known.get((run.engine.name, run.gpu))
        return base if file is None else held(file, run.engine.traits).calibration(base)

    return one_value(make)


def named(calibration: str | None) -> Choose[Run]:
    """What `calibration=` means: the package's constants, the datasheet's, or a file or folder. Raises InputError."""
    if calibration in (None, "shipped"):
        return one_value(_shipped)
    if calibration == "datasheet":
        return one_value(zero_shot)
    return from_files(Path(str(calibration)))


def price_runs(runs: Iterable[Run], choose: Choose[Run]) -> Iterator[Outcome[Run]]:
    """The predictions of all runs, in order."""
    pricer = Pricer(choose)
    for run in runs:
        yield pricer.price(run)
