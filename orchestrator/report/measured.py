"""Predicted against measured, from the lines of metrics.jsonl."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import log
from statistics import median
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from orchestrator.plan import Plan
from orchestrator.report.budget import budget
from orchestrator.report.text import _table, rank_name
from orchestrator.units import format_bytes, format_seconds

Row = Mapping[str, Any]

WARMUP_STEPS = 3
"""The first steps build buffers, communicators and kernels; where there are fewer than twice as many, the first half is left out."""


def _numbers(rows: Iterable[Row], key: str) -> list[float]:
    values = [row.get(key) for row in rows]
    return [float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool) and value > 0]


def steady(values: list[float]) -> list[float]:
    """What is left after the warm-up.

    >>> steady([9.0, 5.0, 1.0, 1.0, 1.0, 1.0]), steady([9.0, 1.0]), steady([9.0])
    ([1.0, 1.0, 1.0], [1.0], [9.0])
    """
    return values[min(WARMUP_STEPS, len(values) // 2) :]


def steady_steps(rows: Iterable[Row]) -> list[float]:
    """Seconds of each step after warm-up."""
    return steady(_numbers(rows, "step_time_s"))


def measured_step_time(rows: Iterable[Row]) -> float | None:
    """Median seconds of the steps after warm-up; None without steps."""
    values = steady_steps(rows)
    return median(values) if values else None


TOLD_APART = 0.1
"""How far the predictions of two stacks must lie apart, as a share, for a run to say which of them it had: twice what steps scatter by."""


def stack_said(stack: str, predicted_s: float, other: str, other_s: float, measured_s: float) -> str:
    """A line that says that a step of so many seconds is the `other` stack's, where it is nearer to that one's prediction; "" where it is
    not, or where the two can't be told apart.

    >>> stack_said("tuned", 2.9, "stock", 4.9, 5.0)
    'a step of 5 s is that of a stock stack (predicted 4.9 s; tuned 2.9 s): plan with cluster.stack=stock'
    >>> stack_said("tuned", 2.9, "stock", 4.9, 3.0), stack_said("stock", 5.0, "tuned", 4.9, 4.9)
    ('', '')
    """
    off, other_off = abs(log(measured_s / predicted_s)), abs(log(measured_s / other_s))
    if abs(log(other_s / predicted_s)) < TOLD_APART or off <= other_off:
        return ""
    predicted = f"predicted {format_seconds(other_s)}; {stack} {format_seconds(predicted_s)}"
    return f"a step of {format_seconds(measured_s)} is that of a {other} stack ({predicted}): plan with cluster.stack={other}"


def measured_peak_memory(rows: Iterable[Row]) -> float | None:
    """Bytes of the highest peak in the rows; None where the worker can't tell (no GPU)."""
    return max(_numbers(rows, "peak_memory_bytes"), default=None)


def comparison_table(plan: Plan, rows: Iterable[Row]) -> RenderableType:
    """Step time, speed and memory: predicted, measured, and measured over predicted."""
    kept = list(rows)
    step_time = measured_step_time(kept)
    if step_time is None:
        return Text("No step was measured.")
    predicted, of = plan.predicted, budget(plan) if plan.predicted else None
    speeds = steady(_numbers(kept, "tokens_per_s"))
    speed = median(speeds) / plan.world_size if speeds else None
    memory = measured_peak_memory(kept)
    table = _table(("", False), ("predicted", True), ("measured", True), ("measured / predicted", True))
    entries: list[tuple[str, str, float | None, Callable[[float], str]]] = [
        ("step time", "step_s", step_time, format_seconds),
        (f"tokens/s/{rank_name(plan)}", "tokens_per_s_per_gpu", speed, "{:,.0f}".format),
    ]
    for name, figure, found, write in entries:
        if found is not None:
            table.add_row(name, of.said(figure, write) if of else "-", write(found), f"{found / getattr(of, figure):.2f}" if of else "-")
    if memory is not None:
        peak = predicted.peak_memory_bytes if predicted else None
        table.add_row("peak memory", format_bytes(peak) if peak else "-", format_bytes(memory), f"{memory / peak:.2f}" if peak else "-")
    count = len(steady_steps(kept))
    table.caption = f"median of {count} step{'s' if count != 1 else ''} after warm-up"
    table.caption_justify = "left"
    return table
