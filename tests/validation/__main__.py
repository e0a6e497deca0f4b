"""Prices measured runs as they were run, and says how far off the predictions are.

    python -m tests.validation runs=DIR_OR_CSV [report=FILE.json] [calibration=NAME_OR_FILE] [recovery=true] [page=FILE.md]
                                   [recipes=CSV]

`runs`: a table in the schema of published measurements, or a folder of them.
`report`: every figure as JSON. `calibration`: shipped (the default), datasheet, a file or a folder.
`recovery=true`: plans every published production configuration anew, and says how close the published one comes.
`page`: a Markdown page whose tables, between their marks, are written anew from these figures. `recipes`: a table of published recipes
(expert_recipes_bridge.csv's columns), also without `runs`: is each legal, or which rule does it break, does it fit, how near is our best;
with `runs`, whether published runs show our best's division to be the faster one.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import track

from orchestrator.calibrate.pricing import Choose
from orchestrator.commands import arguments, command_of, write_text
from orchestrator.errors import InputError
from tests.validation import accuracy, page, pairs, recipes, recovery
from tests.validation.metrics import Priced, measured_beside, parts_of, report_of
from tests.validation.pricing import named, price_runs
from tests.validation.rows import truth
from tests.validation.runs import Run, Unusable
from tests.validation.tables import load

T = TypeVar("T")
KEYS = ("runs", "report", "calibration", "recovery", "page", "recipes")
TITLES = {
    "all rows": "All rows",
    "kept out": "Rows that no constant was fitted on",
    "datasheets": "All rows from datasheets alone",
    "planned engines": "Planned engines: where their constants are from",
    "pairs": "Two runs of one training: the difference predicted against the one measured",
    "real routing": "Runs whose routers nothing forced to be even",
}
"""The tables by the names of their places on the page, as the screen heads them."""


def show_unused(console: Console, unusable: Sequence[Unusable]) -> None:
    """Why rows were not used, a line a reason."""
    if not unusable:
        return
    console.print(f"{len(unusable)} rows not used:")
    for (table, why), count in sorted(Counter((row.table, row.why) for row in unusable).items()):
        console.print(f"  {count:4d}  {table}: {why}", highlight=False, markup=False)


def run(words: Sequence[str]) -> None:
    """Runs the command with these words. Raises InputError."""
    console = Console(width=None if sys.stdout.isatty() else 200)
    given = arguments(words, KEYS, required=() if any(word.startswith("recipes=") for word in words) else ("runs",))
    recover = truth(given, "recovery")
    choose = named(given.get("calibration"))
    published = recipes.read(given["recipes"]) if "recipes" in given else None
    if published is not None and "runs" not in given:
        for key in ("page", "recovery"):
            if key in given:
                raise InputError(key, given[key], "is about runs, and runs= is not given")
        judged = {"recipes": show_recipes(console, published, choose)}
        if "report" in given:
            write_text(Path(given["report"]), json.dumps(judged, indent=1) + "\n", "report")
        return
    runs, unusable = load(Path(given["runs"]))
    rows, failed = price_all(runs, choose)
    unusable += failed
    report = report_of(rows, unusable)
    unfitted = price_all(runs, named("datasheet"))[0]
    report["planned"] = accuracy.planned(runs)
    report["zero_shot"] = parts_of(unfitted)
    report["pairs"] = pairs.report(rows)
    report["real_routing"] = pairs.real_routing(rows)
    tables = {
        **{name: page.figures_table(parts) for name, parts in
           (("all rows", report), ("kept out", report["held_out"]), ("datasheets", report["zero_shot"]))},
        "planned engines": page.planned_table(report["planned"]),
        "pairs": page.pairs_table(report["pairs"]),
        "real routing": page.routing_table(report["real_routing"]),
    }  # fmt: skip
    for name, title in TITLES.items():
        console.print(tables[name].shown(title))
    if recover:
        report["recovery"] = show_recovery(console, runs, choose)
    if published is not None:
        report["recipes"] = show_recipes(console, published, choose, runs)
    show_unused(console, unusable)
    if "report" in given:
        write_text(Path(given["report"]), json.dumps(report, indent=1) + "\n", "report")
    if "page" in given:
        write_text(Path(given["page"]), page.with_generated(read(given["page"]), tables), "page")


def price_all(runs: Sequence[Run], choose: Choose[Run]) -> tuple[list[Priced], list[Unusable]]:
    """Every run beside its prediction; those that can't be priced with the reason."""
    rows: list[Priced] = []
    failed: list[Unusable] = []
    for run, prediction, why in tracked(price_runs(runs, choose), "pricing", len(runs)):
        if prediction is None:
            failed.append(Unusable(table=run.table, run_id=run.run_id, why=why))
        else:
            rows.append(measured_beside(run, prediction))
    return rows, failed


def tracked(items: Iterable[T], what: str, total: int | None = None) -> Iterable[T]:
    """The items, `total` in number (None: they say it), with a bar on standard error that says how many of them are done."""
    return track(items, what, total, console=Console(stderr=True), transient=True)


def show_recovery(console: Console, runs: Sequence[Run], choose: Choose[Run]) -> dict[str, float | int | None]:
    """Plans every published production configuration anew."""
    found = [recovery.recover(run, choose, runs) for run in tracked(recovery.configurations(runs), "planning published configurations")]
    for one in found:
        console.print(f"  {one.label}: {verdict(one)}", highlight=False, markup=False)
    figures = recovery.figures(found)
    console.print(f"recovery: {figures}", highlight=False, markup=False)
    return figures


def verdict(one: recovery.Recovered | recipes.Judged, needs: str = "") -> str:
    """Whether a published configuration is legal and fits (what it `needs`), and how near it comes to our best plan."""
    ratio = "-" if one.ratio is None else f"{one.ratio:.2f}"
    flags = f"{'legal' if one.legal else 'ILLEGAL ' + one.why}, {'fits' if one.fits else 'DOES NOT FIT'}{needs}"
    slower = f"; measured {one.slower:+.1%} beside a published run divided so" if one.slower is not None else ""
    return f"{flags}, {ratio} of our best ({one.best}){slower}"


def show_recipes(console: Console, rows: Sequence[dict[str, str]], choose: Choose[Run], runs: Sequence[Run] = ()) -> dict[str, Any]:
    """Judges every published recipe, a line each; `runs`: what may show which of two divisions is faster."""
    judge = recipes.Judge(choose, runs)
    each = tracked(rows, "planning published recipes")
    found = [dataclasses.replace(judge.judge(row), copy_of=recipes.copied_from(row, rows)) for row in each]
    for one in found:
        if one.judged:
            more = f"; repeats {one.copy_of}" if one.copy_of else ""
            more += "; with its tower" if one.sees else ""
            said = f"{verdict(one, f' ({one.peak_gib:.0f} GiB)')}{more}"
            console.print(f"  {one.recipe}: {said}", highlight=False, markup=False)
        else:
            console.print(f"  {one.recipe}: not judged: {one.why}", highlight=False, markup=False)
    figures = recipes.figures(found)
    console.print(f"recipes: {figures}", highlight=False, markup=False)
    return figures


def read(path: str) -> str:
    """The page to write tables into. Raises InputError."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError("page", path, f"can't be read: {error.strerror}") from None


main = command_of(__doc__, run)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
