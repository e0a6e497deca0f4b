"""Many plans as a table: a row a combination of keys."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from orchestrator.report.budget import Budget, format_time
from orchestrator.report.text import Fitting, _table
from orchestrator.units import format_amount, format_seconds
from orchestrator.values import Value


class Row(Value, frozen=True, kw_only=True):
    """`plan` in one line with its figures; without `budget` there is none, and `why` says so."""

    keys: dict[str, str]
    plan: str = ""
    budget: Budget | None = None
    step_time_s: float = 0.0
    tokens_per_s: float = 0.0
    memory_free: float = 0.0
    on_front: bool = False
    why: str = ""


def sweep_table(names: Sequence[str], rows: Sequence[Row]) -> RenderableType:
    """The keys that vary, then the figures, cost where there is a price, then the plan; in a narrow terminal the plans are lines below."""
    priced = any(row.budget is not None and row.budget.cost is not None for row in rows)
    figures = ["step", "tokens/s", "training", "GPU-hours", *(["cost"] if priced else []), "memory free"]
    columns = [*((name, False) for name in names), *((name, True) for name in figures), ("", False)]
    table, narrow, plans = _table(*columns, ("plan", False)), _table(*columns), []
    for row in rows:
        keys = [Text(row.keys[name], no_wrap=True) for name in names]
        plan, shown, of = row.plan, [""] * (len(figures) + 1), row.budget
        if of is None:
            plan = f"none: {row.why}"
        else:
            cost = [format_amount(of.cost) if of.cost is not None else ""] if priced else []
            shown = [format_seconds(row.step_time_s), format_amount(row.tokens_per_s), format_time(of.seconds), format_amount(of.gpu_hours)]
            shown += [*cost, f"{100 * row.memory_free:.1f}%", "*" if row.on_front else ""]
        table.add_row(*keys, *shown, Text(plan))
        narrow.add_row(*keys, *shown)
        plans.append(Text(f"{' '.join(f'{name}={row.keys[name]}' for name in names)}: {plan}"))
    return Fitting(table, Group(narrow, *plans))
