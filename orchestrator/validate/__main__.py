"""Prices measured runs as they were run, and says how far off the predictions are.

    python -m orchestrator.validate runs=DIR_OR_CSV [report=FILE.json] [picture=FILE.svg] [calibration=NAME_OR_FILE] [recovery=true]
                                   [page=FILE.md] [recipes=CSV]

`runs`: a table in the schema of published measurements, a folder of them, or a folder of our own runs (plan.json, metrics.jsonl in each).
`report`: every figure as JSON. `picture`: predicted against measured step times. `calibration`: shipped (the default), datasheet, a file
or a folder. `recovery=true`: plans every published production configuration anew, and says how close the published one comes.
`page`: a Markdown page whose tables, between their marks, are written anew from these figures. `recipes`: a table of published recipes
(expert_recipes_bridge.csv's columns), also without `runs`: is each legal, or which rule does it break, does it fit, how near is our best;
with `runs`, whether published runs show our best's division to be the faster one.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from orchestrator.commands import arguments, command, truth, usage
from orchestrator.errors import InputError
from orchestrator.validate import accuracy, own, page, pairs, picture, recipes, recovery
from orchestrator.validate.metrics import Priced
from orchestrator.validate.pricing import Choose, named, price_runs
from orchestrator.validate.report import measured_beside, parts_of, report_of
from orchestrator.validate.runs import Run, Unusable

KEYS = ("runs", "report", "picture", "calibration", "recovery", "page", "recipes")
COLUMNS = (
    ("time_median_ape", "time", "{:.1%}"),
    ("time_within_20", "within 20%", "{:.0%}"),
    ("memory_median_ape", "memory", "{:.1%}"),
    ("memory_p95_under", "mem p95 under", "{:.1%}"),
    ("ran_but_refused", "refused", "{:.1%}"),
    ("spearman", "Spearman", "{:.2f}"),
    ("top1_regret", "top-1", "{:.1%}"),
    ("top3_regret", "top-3", "{:.1%}"),
    ("oom_precision", "oom prec.", "{:.2f}"),
    ("oom_recall", "oom recall", "{:.2f}"),
)


def show(console: Console, title: str, parts: dict[str, dict[str, object]]) -> None:
    """A table with a line a part."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    table.add_column("rows", justify="right")
    for _, heading, _ in COLUMNS:
        table.add_column(heading, justify="right")
    for name, figures in parts.items():
        cells = [form.format(figures[key]) if figures.get(key) is not None else "-" for key, _, form in COLUMNS]
        table.add_row(name, str(figures["rows_used"]), *cells)
    console.print(table)


def show_planned(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    """What a prediction for a planned engine is worth."""
    table = Table(title="Planned engines: where their constants are from", title_justify="left")
    for heading in ("engine", "GPU", "constants"):
        table.add_column(heading)
    for heading in ("runs", "error", "kept out", "90% of measured / predicted"):
        table.add_column(heading, justify="right")
    for row in rows:
        errors = ["-" if row[key] is None else f"{row[key]:.1%}" for key in ("median_error", "held_out_median_error")]
        low, high = row["interval"]
        table.add_row(row["engine"], row["gpu"], row["basis"], str(row["runs"]), *errors, f"{low:.2f} to {high:.2f}")
    console.print(table)


def show_pairs(console: Console, found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    """How far a predicted difference between two plans can be trusted."""
    table = Table(title="Two runs of one training: the difference predicted against the one measured", title_justify="left")
    for heading in page.PAIRS:
        table.add_column(heading, justify="right" if heading != "models" else "left")
    for cells in page.pairs_cells(found):
        table.add_row(*cells)
    console.print(table)


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
        for key in ("picture", "page", "recovery"):
            if key in given:
                raise InputError(key, given[key], "is about runs, and runs= is not given")
        judged = {"recipes": show_recipes(console, published, choose)}
        if "report" in given:
            write(given["report"], json.dumps(judged, indent=1) + "\n", "report")
        return
    runs, unusable = own.measured(Path(given["runs"]))
    rows, failed = price_all(runs, choose)
    unusable += failed
    report = report_of(rows, unusable)
    unfitted = price_all(runs, named("datasheet"))[0]
    report["planned"] = accuracy.planned(runs)
    report["zero_shot"] = parts_of(unfitted)
    report["pairs"] = pairs.report(rows)
    report["real_routing"] = pairs.real_routing(rows)
    show(console, "All rows", {**report["tables"], "all": report["all"]})
    show(console, "Rows that no constant was fitted on", {**report["held_out"]["tables"], "all": report["held_out"]["all"]})
    show(console, "All rows from datasheets alone", {**report["zero_shot"]["tables"], "all": report["zero_shot"]["all"]})
    show_planned(console, report["planned"])
    show_pairs(console, report["pairs"])
    if recover:
        report["recovery"] = show_recovery(console, runs, choose)
    if published is not None:
        report["recipes"] = show_recipes(console, published, choose, runs)
    show_unused(console, unusable)
    if "report" in given:
        write(given["report"], json.dumps(report, indent=1) + "\n", "report")
    if "page" in given:
        tables = {"planned engines": page.planned_table(report["planned"])}
        tables["pairs"] = page.pairs_table(report["pairs"])
        tables["real routing"] = page.routing_table(report["real_routing"])
        for name, parts in (("kept out", report["held_out"]), ("all rows", report), ("datasheets", report["zero_shot"])):
            tables[name] = page.figures_table({**parts["tables"], "all": parts["all"]})
        write(given["page"], page.with_generated(read(given["page"]), tables), "page")
    if "picture" in given:
        points = [(row.run.table, row.run.time_s, row.time_s) for row in rows if row.run.time_s is not None]
        write(given["picture"], picture.scatter(points, f"{len(points)} published runs"), "picture")


def main(words: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    return command(words, lambda: usage(__doc__), run)


def price_all(runs: Sequence[Run], choose: Choose) -> tuple[list[Priced], list[Unusable]]:
    """Every run beside its prediction; those that can't be priced with the reason."""
    rows: list[Priced] = []
    failed: list[Unusable] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("pricing", total=len(runs))
        for run, prediction, why in price_runs(runs, choose):
            if prediction is None:
                failed.append(Unusable(table=run.table, run_id=run.run_id, why=why))
            else:
                rows.append(measured_beside(run, prediction))
            progress.advance(task)
    return rows, failed


def show_recovery(console: Console, runs: Sequence[Run], choose: Choose) -> dict[str, float | int | None]:
    """Plans every published production configuration anew."""
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("planning published configurations")
        found = recovery.recover_all(runs, choose, lambda done, total: progress.update(task, completed=done, total=total))
    for one in found:
        ratio = "-" if one.ratio is None else f"{one.ratio:.2f}"
        flags = f"{'legal' if one.legal else 'ILLEGAL ' + one.why}, {'fits' if one.fits else 'DOES NOT FIT'}"
        shown = f"; measured {one.slower:+.1%} beside a published run divided so" if one.slower is not None else ""
        console.print(f"  {one.label}: {flags}, {ratio} of our best ({one.best}){shown}", highlight=False, markup=False)
    figures = recovery.figures(found)
    console.print(f"recovery: {figures}", highlight=False, markup=False)
    return figures


def show_recipes(console: Console, rows: Sequence[dict[str, str]], choose: Choose, runs: Sequence[Run] = ()) -> dict[str, Any]:
    """Judges every published recipe, a line each; `runs`: what may show which of two divisions is faster."""
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("planning published recipes")
        found = recipes.judge_all(rows, choose, lambda done, total: progress.update(task, completed=done, total=total), runs)
    for one in found:
        if one.judged:
            ratio = "-" if one.ratio is None else f"{one.ratio:.2f}"
            flags = f"{'legal' if one.legal else 'ILLEGAL ' + one.why}, {'fits' if one.fits else 'DOES NOT FIT'} ({one.peak_gib:.0f} GiB)"
            more = f"; measured {one.slower:+.1%} beside a published run divided so" if one.slower is not None else ""
            more += f"; repeats {one.copy_of}" if one.copy_of else ""
            more += "; its text decoder alone" if one.text_alone else ""
            console.print(f"  {one.recipe}: {flags}, {ratio} of our best ({one.best}){more}", highlight=False, markup=False)
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


def write(path: str, text: str, key: str) -> None:
    """A file of the user's choice. Raises InputError."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(key, path, f"can't be written: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
