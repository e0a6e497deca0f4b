"""How sure it is that a plan fits into memory, in words."""

from __future__ import annotations

from collections.abc import Collection
from math import ceil

from orchestrator.cost.memory_policy import USUAL_RISK
from orchestrator.strategy.pins import MemoryLimit
from orchestrator.units import format_amount

BY = "by the peaks of all published runs, each predicted without its own source"


def risk_text(
    chance: float,
    limit: MemoryLimit,
    none_cautious: Collection[str] | None = None,
    *,
    own_peaks: bool = False,
) -> str:
    """How sure it is that the plan fits. `none_cautious`: the pins under which no plan has as small a chance of running out as is usual;
    None: one has, or that is not known. `own_peaks`: the reserve is by measured peaks of the user's own runs."""
    said = f"risk: {format_amount(100 * chance, 2)}% chance of running out of memory, {BY}"
    if limit.risk is None and limit.margin is not None:
        whose = "those of your own runs" if own_peaks else "this engine's fitted ones"
        said += f" (the reserve goes by {whose})"
    if none_cautious is not None:
        where = "under these pins" if none_cautious else "on these GPUs"
        said += f"; no plan {where} has at most {100 * USUAL_RISK:g}%, so that the reserve alone is kept free"
    return said


def risk_key(chance: float) -> str:
    """The value of memory.risk= that allows this chance.

    >>> risk_key(0.2725), risk_key(0.0512), risk_key(0.05)
    ('28%', '5.2%', '5%')
    """
    digits = 1 if chance < 0.1 else 0
    return f"{ceil(round(100 * chance * 10**digits, 6)) / 10**digits:g}%"
