"""Many plans as a table: a row a combination of keys."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from orchestrator.report.budget import Budget, format_amount, format_time
from orchestrator.report.text import _table
from orchestrator.units import format_seconds
from orchestrator.values import Value


class Row(Value, frozen=True, kw_only=True):
    """`plan` in one line with its figures; without `budget` there is none, and `why` says so."""

    keys: dict[str, str]
    plan: str = ""
    budget: Budget | None = None
    step_time_s: float = 0.0
    tokens_per_s: float = 0.0
    headroom: float = 0.0
    on_front: bool = False
    why: str = ""


def sweep_table(names: Sequence[str], rows: Sequence[Row]) -> RenderableType:
    """The keys that vary, then the figures; cost where there is a price."""
    priced = any(row.budget is not None and row.budget.cost is not None for row in rows)
    figures = ["step", "tokens/s", "training", "GPU-hours", *(["cost"] if priced else []), "memory free"]
    table = _table(*((name, False) for name in names), *((name, True) for name in figures), ("", False), ("plan", False))
    for row in rows:
        keys = [Text(row.keys[name]) for name in names]
        of = row.budget
        if of is None:
            table.add_row(*keys, *([""] * (len(figures) + 1)), Text(f"none: {row.why}"))
            continue
        cost = [format_amount(of.cost) if of.cost is not None else ""] if priced else []
        table.add_row(
            *keys, format_seconds(row.step_time_s), format_amount(row.tokens_per_s), format_time(of.seconds), format_amount(of.gpu_hours),
            *cost, f"{100 * row.headroom:.1f}%", "*" if row.on_front else "", Text(row.plan),
        )  # fmt: skip
    return table
