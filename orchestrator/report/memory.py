"""How sure it is that a plan fits into memory, and why it divides the model: the memory of choices side by side, by cause, against what a
GPU has."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from math import ceil

from rich.console import Group, RenderableType
from rich.text import Text

from orchestrator.cost.memory_policy import USUAL_RISK
from orchestrator.plan import Plan, Prediction
from orchestrator.report.text import Fitting, _table, cause_name
from orchestrator.strategy.pins import MemoryLimit
from orchestrator.units import format_amount, format_bytes

BY = "by the peaks of all published runs, each predicted without its own source"


def risk_text(chance: float, limit: MemoryLimit, none_cautious: Collection[str] | None = None, *, own_peaks: bool = False) -> str:
    """How sure it is that the plan fits. `none_cautious`: the pins under which no plan has as small a chance of running out as is usual;
    None: one has, or that is not known. `own_peaks`: the reserve is by measured peaks of the user's own runs."""
    said = f"risk: {format_amount(100 * chance, 2)}% chance of running out of memory, {BY}"
    if limit.risk is None and limit.margin is not None:
        whose = "those of your own runs" if own_peaks else "this engine's fitted ones"
        said += f" (the reserve goes by {whose})"
    if none_cautious is not None:
        where = "under these pins" if none_cautious else "on these GPUs"
        said += f"; no plan searched {where} has at most {100 * USUAL_RISK:g}%, so that the reserve alone is kept free"
    return said


def risk_key(chance: float) -> str:
    """The value of memory.risk= that allows this chance.

    >>> risk_key(0.2725), risk_key(0.0512), risk_key(0.05)
    ('28%', '5.2%', '5%')
    """
    digits = 1 if chance < 0.1 else 0
    return f"{ceil(round(100 * chance * 10**digits, 6)) / 10**digits:g}%"


STATES = ("weights", "gradients", "optimizer", "activations")
"""Causes that have a column of their own; the rest is one."""


def verdict(nbytes: float, limit: MemoryLimit) -> str:
    """Whether so many bytes fit, or how many bytes they are too many.

    >>> verdict(50 * 2**30, MemoryLimit(limit=42 * 2**30, reserve=2 * 2**30)), verdict(1, MemoryLimit(limit=2, reserve=0))
    ('lacks 10.0 GiB', 'fits')
    """
    return "fits" if nbytes <= limit.usable else f"lacks {format_bytes(nbytes - limit.usable)}"


def memory_table(refused: str, predicted: Prediction, limit: MemoryLimit) -> RenderableType:
    """The memory of one choice that does not fit, cause by cause, at its fullest stage."""
    stage = predicted.by_stage[predicted.fullest]
    table = _table((f"memory of {refused}", False), ("", True))
    for name, nbytes in sorted(stage.memory_by_cause.items(), key=lambda item: -item[1]):
        if nbytes > 0:
            table.add_row(Text(cause_name(name)), format_bytes(nbytes))
    table.add_section()
    table.add_row("needs", format_bytes(stage.peak_memory_bytes))
    table.add_row("usable", format_bytes(limit.usable))
    table.add_row("", verdict(stage.peak_memory_bytes, limit))
    return table


def data_parallel_table(plan: Plan, rows: Iterable[tuple[str, int, Prediction | None, str]], limit: MemoryLimit) -> RenderableType:
    """The plan's memory beside that of data parallelism alone; `rows`: engine, ZeRO stage, its price (None: refused, because of the last).
    Raises ValueError for a plan without prediction."""
    title = f"Data parallelism alone (tp=1 pp=1 dp={plan.world_size}, mbs=1, all recomputed) against {format_bytes(limit.usable)} usable"
    names = (*STATES, "rest", "needs", "over")
    table = _table(("", False), *((name, True) for name in names), title=title)
    narrow = _table(("", False), *((name, True) for name in names[-2:]), title=title)

    def add(name: str, row: Sequence[str]) -> None:
        table.add_row(Text(name, no_wrap=True), *row)
        narrow.add_row(Text(name, no_wrap=True), *row[-2:])

    add("the plan", _row(plan.prediction, limit))
    illegal = []
    for engine, stage, predicted, why in rows:
        if predicted is None:
            illegal.append(Text(f"{engine} ZeRO-{stage}: {why}"))
        else:
            add(f"{engine} ZeRO-{stage}", _row(predicted, limit))
    return Group(Fitting(table, narrow), *illegal)


def _row(predicted: Prediction, limit: MemoryLimit) -> Sequence[str]:
    stage = predicted.by_stage[predicted.fullest]
    peak = stage.peak_memory_bytes
    shown = [stage.memory_by_cause.get(name, 0.0) for name in STATES]
    return [*(format_bytes(value) for value in (*shown, peak - sum(shown), peak)), verdict(peak, limit).removeprefix("lacks ")]
