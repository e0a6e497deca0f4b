"""Many plans as a table: a row a combination of keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.text import Text

from orchestrator.report.budget import Budget, format_time
from orchestrator.report.text import _table
from orchestrator.units import format_amount, format_count, format_seconds
from orchestrator.values import Value

WRITTEN: Final = (("step_s", format_seconds), ("tokens_per_s", format_count), ("seconds", format_time), ("gpu_hours", format_count),
                  ("cost", format_count))  # fmt: skip
"""Figures of a budget, in the order of their columns."""


class Row(Value, frozen=True, kw_only=True):
    """`plan` in one line with its figures; without `budget` there is none, and `why` says so."""

    keys: dict[str, str]
    plan: str = ""
    budget: Budget | None = None
    memory_free: float = 0.0
    chance: float | None = None
    """The chance of running out of memory, 0 to 1; None: nothing is known of it."""
    on_front: bool = False
    why: str = ""


def sweep_table(names: Sequence[str], rows: Sequence[Row]) -> RenderableType:
    """The keys that vary, then the figures, each above its 90% interval, cost where there is a price; the plans are lines below."""
    priced = any(row.budget is not None and row.budget.cost is not None for row in rows)
    figures = ["step", "tokens/s", "training", "GPU-hours", *(["cost"] if priced else [])]
    beside = ["memory free", *(["runs out"] if any(row.chance is not None for row in rows) else [])]
    table = _table(*((name, False) for name in names), *((name, True) for name in (*figures, *beside)), ("", False))
    plans = []
    for row in rows:
        plan, shown, of = row.plan, [""] * (len(figures) + len(beside) + 1), row.budget
        if of is None:
            plan = f"none: {row.why}"
        else:
            shown = ["\n".join(of.words(*figure)) if getattr(of, figure[0]) is not None else "" for figure in WRITTEN[: len(figures)]]
            chance = "" if row.chance is None else f"{format_amount(100 * row.chance, 2)}%"
            shown += [*[f"{100 * row.memory_free:.1f}%", chance][: len(beside)], "*" if row.on_front else ""]
        table.add_row(*(Text(row.keys[name], no_wrap=True) for name in names), *shown)
        plans.append(Text(f"{' '.join(f'{name}={row.keys[name]}' for name in names)}: {plan}"))
    return Group(table, *plans)
