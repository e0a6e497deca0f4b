"""report.html and trace.json of a plan: written beside it where the extra `[report]` is installed, and again after a run with what was
measured."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from orchestrator import planning
from orchestrator.errors import InputError
from orchestrator.job import File
from orchestrator.planning import Found
from orchestrator.recipe import Settings

PAGE: Final = "report.html"
TRACE: Final = "trace.json"
VARIABLE: Final = "ORCHESTRATOR_REPORT"
"""none in the environment: no report is written beside plans (it takes a second)."""


def wanted() -> bool:
    """Whether reports are written beside plans here."""
    return os.environ.get(VARIABLE) != "none" and drawable()


def drawable() -> bool:
    """Whether the extra is installed."""
    return importlib.util.find_spec("bokeh") is not None


def check_drawable() -> None:
    """Raises InputError where the extra is not installed."""
    if not drawable():
        raise InputError("report", None, "needs bokeh: pip install -e '.[report]'")


def report_files(settings: Settings, found: Found, rows: Sequence[Mapping[str, Any]] = ()) -> list[File]:
    """The page and the trace. `rows`: of metrics.jsonl. Raises InputError."""
    from orchestrator.report.page import Shown, report_html
    from orchestrator.report.trace import trace_json

    plan, costs = found.plan, planning.costs_of(settings, found.plan)
    page = report_html(
        Shown(
            plan=plan,
            model=planning.workload_of(settings).model,
            limit=found.limit,
            costs=costs,
            outcomes=found.outcomes,
            floor=planning.memory_floors(settings) if found.outcomes else None,
            rows=rows,
            price_per_gpu_hour=settings.price_per_gpu_hour,
        )
    )
    return [File(path=PAGE, content=page), File(path=TRACE, content=trace_json(plan, costs.played(plan.candidate, plan.stages)))]


def measured_rows(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; none where there is none. A line that was cut off ends it."""
    rows = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                break
            if isinstance(row, dict):
                rows.append(row)
    return rows
