"""Progress of a training: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from orchestrator.units import format_seconds

STARTING = "starting the ranks"
"""Text until the first step; engines take some seconds to import."""
LINES = 20
"""Plain lines of a whole run: the first step, the last, and about this many between."""
PACE_S = 30.0
"""Seconds of steps after which a plain line comes in any case: a share of a long run is a long silence."""


def describe(row: Mapping[str, Any]) -> str:
    """A row of metrics in one line: loss, seconds a step, tokens a second.

    >>> describe({"loss": 2.3456, "step_time_s": 0.5, "tokens_per_s": 8192.0, "valid_loss": 2.5})
    'loss 2.346  valid 2.5  500 ms/step  8,192 tokens/s'
    """
    parts = []
    if isinstance(row.get("loss"), int | float):
        parts.append(f"loss {row['loss']:.4g}")
    if isinstance(row.get("valid_loss"), int | float):
        parts.append(f"valid {row['valid_loss']:.4g}")
    if isinstance(row.get("step_time_s"), int | float):
        parts.append(f"{format_seconds(row['step_time_s'])}/step")
    if isinstance(row.get("tokens_per_s"), int | float):
        parts.append(f"{row['tokens_per_s']:,.0f} tokens/s")
    return "  ".join(parts)


class TrainingProgress:
    """`with TrainingProgress(console, steps) as progress: start(job, out, on_step=progress.step)`.

    Rows number their steps from 1; a resumed run starts where its first row says.
    """

    def __init__(self, console: Console, steps: int) -> None:
        self.console, self.steps = console, steps
        self.every = max(1, steps // LINES)
        self.bar = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=None), TextColumn("{task.fields[row]}"), TimeRemainingColumn(),
            console=console, expand=True, disable=not console.is_terminal,
        )  # fmt: skip
        self.task = self.bar.add_task("", total=steps, row=STARTING)
        self.seen = 0
        self.silent_s = 0.0
        """Seconds of the steps since the last plain line."""

    def __enter__(self) -> Self:
        self.bar.start()
        if not self.console.is_terminal:
            self.console.print(Text(STARTING))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.bar.stop()

    def step(self, row: Mapping[str, Any]) -> None:
        """Shows one row of metrics.jsonl."""
        number = row.get("step")
        completed = number if isinstance(number, int) else self.seen + 1
        self.bar.update(self.task, completed=completed, row=describe(row))
        seconds = row.get("step_time_s")
        self.silent_s += seconds if isinstance(seconds, int | float) else 0.0
        due = self.seen == 0 or completed % self.every == 0 or completed >= self.steps or "valid_loss" in row or self.silent_s >= PACE_S
        if due and not self.console.is_terminal:
            self.silent_s = 0.0
            self.console.print(Text(f"step {completed}/{self.steps}  {describe(row)}".rstrip()))
        self.seen += 1
