"""The schedules by name. To add one: its file, and its line here."""

from __future__ import annotations

from typing import Final

from orchestrator.cost.schedule.deepspeed import DeepSpeed1F1B
from orchestrator.cost.schedule.interleaved import Interleaved
from orchestrator.cost.schedule.one_f_one_b import HalfDuplex1F1B, OneFOneB
from orchestrator.cost.schedule.order import Schedule

SCHEDULES: Final[dict[str, Schedule]] = {
    schedule.name: schedule for schedule in (OneFOneB(), HalfDuplex1F1B(), Interleaved(), DeepSpeed1F1B())
}


def named(name: str) -> Schedule:
    """Raises ValueError for a schedule that is not known."""
    schedule = SCHEDULES.get(name)
    if schedule is None:
        raise ValueError(f"schedule={name}: choose one of {', '.join(SCHEDULES)}")
    return schedule


def of_chunks(name: str, vpp: int, group: int | None = None) -> Schedule:
    """The schedule of a pipeline with so many chunks a stage: interleaving a single one is 1F1B. `group`: micro-batches of interleaving's
    groups, if not pp. Raises ValueError as `named`, and for groups of a schedule that has none."""
    if group is not None:
        if name != Interleaved.name or vpp == 1:
            raise ValueError(f"schedule={name} with vpp={vpp} has no groups of micro-batches")
        return Interleaved(group)
    return named(OneFOneB.name if name == Interleaved.name and vpp == 1 else name)
