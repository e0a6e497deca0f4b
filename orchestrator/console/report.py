"""usage: python -m orchestrator report RUN [out=FILE.html] [--json]

The plan of a run's folder in pictures, in one file that needs no network: which rank is what, the pipeline's timeline, memory over the
step, where it goes, all candidates, and predicted against measured once the run has steps. trace.json beside it has the timeline for
Perfetto and chrome://tracing. Of a run of our workers it says first where two of its steps went, which rank or link is slow, and which
calibration would have predicted it (written into RUN/calibration); of a tune=K, how the plans that it tried did.

  python -m orchestrator report runs/first                     writes runs/first/report.html and trace.json
  python -m orchestrator report plan.json out=plan.html        a plan alone, also one that does not fit

  --json     the files' names and the step's seconds as JSON on standard output

RUN: a folder that `run`, or `plan out=`, wrote, or a plan.json. Extra: pip install -e '.[report]'
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from orchestrator import api, detect, recipe, tuning
from orchestrator.commands import arguments, command_of, say_json, without_json, write_text
from orchestrator.engines import ENGINES
from orchestrator.errors import InputError, NoPlanError
from orchestrator.launch.program_metrics import rows_of
from orchestrator.pictures import PAGE, TRACE, after_lines, after_run, check_drawable, report_files, stack_lines
from orchestrator.plan import from_json
from orchestrator.planning import Found, Planner
from orchestrator.recipe import Settings
from orchestrator.report.kept import Drawn, drawn_in
from orchestrator.screen import screen


def _report(words: Sequence[str]) -> None:
    words, as_json = without_json(words)
    runs = [word for word in words if "=" not in word]
    if len(runs) != 1:
        raise InputError("report", " ".join(runs) or None, "needs one RUN: a run's folder or a plan.json")
    given = arguments([word for word in words if "=" in word], ["out"])
    run = Path(runs[0])
    folder = run if run.is_dir() else run.parent
    page = Path(given["out"]) if "out" in given else folder / PAGE
    if page.suffix != ".html":
        raise InputError("out", page, "is no .html")
    settings, found, drawn = of_run(run)
    after = after_run(settings, found.plan, folder) if run.is_dir() else None
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        if after is not None:
            for line in after_lines(settings, found.plan, folder, after):
                print(line)
        for line in stack_lines(settings, found.plan, rows_of(folder / "metrics.jsonl")):
            print(line)
        trials = tuning.read_trials(folder) if run.is_dir() else []
        if trials:
            screen().print(tuning.tune_table(trials, found.plan))
    check_drawable()
    files = report_files(settings, found, rows_of(folder / "metrics.jsonl"), after, drawn)
    trace = page.with_name(TRACE) if page.name == PAGE else page.with_suffix(".trace.json")
    for path, file in zip((page, trace), files, strict=True):
        write_text(path, file.content, "out")
    if as_json:
        predicted = found.plan.prediction
        lacking = max(0.0, predicted.peak_memory_bytes - found.limit.usable)
        say_json({"page": str(page), "trace": str(trace), "step_time_s": predicted.step_time_s, "interval_s": predicted.interval,
                  "lacking_bytes": lacking})  # fmt: skip
    else:
        print(f"Written: {page} and {trace}")


def of_run(run: Path) -> tuple[Settings, Found, Drawn | None]:
    """The run's plan priced again, fit or not, with what its search says of all candidates, or what the run's own page keeps of it.
    Raises InputError."""
    path = api.plan_file(run)
    try:
        plan = from_json(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("report", path, f"can't be read: {getattr(error, 'strerror', None) or 'is no text'}") from None
    if plan.engine not in ENGINES:
        raise InputError("engine", plan.engine, "of the plan is not known", ENGINES)
    machine, engines = detect.machine(), list(ENGINES)
    settings = recipe.load_tree({"plan": str(path)}, machine, engines, plans_only=True)
    plan, limit = Planner(settings).priced_again(plan)
    found = Found(plan=plan, limit=limit)
    config = path.with_name("config.yaml")
    if not config.is_file():
        return settings, found, None
    asked = recipe.load_tree({"recipe": str(config.resolve())}, machine, engines, plans_only=True)
    same = (asked.architecture, asked.training, asked.cluster) == (plan.model, plan.training, plan.cluster)
    if asked.plan is not None or not same:
        return settings, found, None
    page = path.with_name(PAGE)
    drawn = drawn_in(page.read_text(encoding="utf-8", errors="replace"), plan) if page.is_file() else None
    if drawn is not None:
        return asked, found, drawn
    try:
        outcomes = Planner(asked).fastest(Planner(asked).space()).outcomes
    except NoPlanError:
        return settings, found, None
    return asked, msgspec.structs.replace(found, outcomes=outcomes), None


main = command_of(__doc__, _report)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
