"""What is drawn and said of a plan and its run: report.html and trace.json, where the extra `[report]` is installed, after a run with what
was measured, or when `orchestrator report` asks; where the run's step went, and the calibration that it suggests."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from orchestrator.errors import InputError
from orchestrator.folder import training_budget
from orchestrator.hardware.spec import Stack
from orchestrator.job import File
from orchestrator.launch.program_metrics import rows_of
from orchestrator.plan import Plan
from orchestrator.planning import Found, Planner
from orchestrator.recipe import Settings
from orchestrator.report.kept import Drawn
from orchestrator.values import indented

if TYPE_CHECKING:
    from orchestrator.report.after import After, RankTimes

PAGE: Final = "report.html"
TRACE: Final = "trace.json"
SUGGESTED: Final = "calibration"
"""Folder of a run with the calibration that its timers suggest."""
VARIABLE: Final = "ORCHESTRATOR_REPORT"
"""Environment variable; with "none" no report is written after a run (it takes a second or two)."""


def wanted() -> bool:
    """Whether a report is written after a run here."""
    return os.environ.get(VARIABLE) != "none" and drawable()


def drawable() -> bool:
    """Whether the extra is installed."""
    return importlib.util.find_spec("bokeh") is not None


def check_drawable() -> None:
    """Raises InputError where the extra is not installed."""
    if not drawable():
        raise InputError("report", None, "needs bokeh: pip install -e '.[report]'")


def report_files(
    settings: Settings, found: Found, rows: Sequence[Mapping[str, Any]] = (), after: After | None = None, drawn: Drawn | None = None
) -> list[File]:
    """The page and the trace. `rows`: of metrics.jsonl; `drawn`: candidates of an earlier page, in place of the search's. Raises
    InputError."""
    from orchestrator.report.page import Shown, report_html
    from orchestrator.report.trace import trace_json

    plan, costs = found.plan, Planner(settings).prices_of(found.plan).costs(found.plan)
    page = report_html(
        Shown(
            plan=plan,
            model=Planner(settings).workload.model,
            limit=found.limit,
            costs=costs,
            outcomes=found.outcomes,
            drawn=drawn,
            floor=(found.space or Planner(settings).space()).memory_floor if found.outcomes else None,
            rows=rows,
            after=after,
            budget=training_budget(settings, plan),
            chance=None if plan.cluster.is_cpu else Planner(settings).chance_of_not_fitting(plan),
        )
    )
    return [File(path=PAGE, content=page), File(path=TRACE, content=trace_json(plan, costs.played(plan.candidate, plan.stages)))]


def after_run(settings: Settings, plan: Plan, out: Path) -> After | None:
    """Where two steps of the run in this folder went, by its ranks' timers; None: it has none (another program's, an unfinished run)."""
    from orchestrator.report import after

    rows = timers(out)
    return after.after(plan, Planner(settings).prices_of(plan).costs(plan), rows) if rows else None


def stack_lines(settings: Settings, plan: Plan, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line that says that the steps in these rows of metrics.jsonl are those of the other stack than was planned for; no line where they
    are not. Raises InputError."""
    from orchestrator.report.measured import measured_step_time, stack_said

    measured = measured_step_time(rows)
    if measured is None or plan.predicted is None or plan.cluster.is_cpu:
        return []
    other: Stack = "tuned" if plan.cluster.stack == "stock" else "stock"
    cluster = msgspec.structs.replace(plan.cluster, stack=other)
    there = msgspec.structs.replace(plan, cluster=cluster)
    prices = Planner(msgspec.structs.replace(settings, cluster=cluster)).prices_of(there)
    seconds = prices.priced(there).prediction.step_time_s
    said = stack_said(plan.cluster.stack, plan.predicted.step_time_s, other, seconds, measured)
    return [said] if said else []


def timers(out: Path) -> tuple[RankTimes, ...]:
    """What the ranks of the run in this folder timed; nothing where they did not, or not all of them."""
    from orchestrator.report import after

    try:
        return after.read(rows_of(out / after.FILE))
    except msgspec.ValidationError:
        return ()


def after_lines(settings: Settings, plan: Plan, out: Path, found: After) -> list[str]:
    """Where two steps of the run went, in lines of text; the calibration that the run suggests is written into its folder, and named."""
    from orchestrator.report import after
    from orchestrator.report.measured import steady_steps

    lines, suggests = found.lines(), found.suggests()
    if suggests and (why := found.unusual(steady_steps(rows_of(out / "metrics.jsonl")))):
        lines.append(f"it suggests no constants: {why}")
    elif suggests:
        file = after.calibration_file(plan, Planner(settings).prices_of(plan).costs(plan), found)
        folder = out / SUGGESTED
        folder.mkdir(exist_ok=True)
        path = folder / f"{file.engine}-{file.gpu}.json"
        path.write_text(indented(file))
        lines.append(f"it suggests {suggests}: calibration={folder} plans with that")
    return lines
