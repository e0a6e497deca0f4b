"""The schedules by name, and when a step ends under one by constant seconds of each stage's passes. To add one: its file, and its line
here."""

from __future__ import annotations

from collections.abc import Sequence
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


def finish_times(
    schedule: str,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    p2p_s: float | Sequence[float],
    num_microbatches: int,
    vpp: int = 1,
    group: int | None = None,
    *,
    jump: bool = True,
    limits: Sequence[float] = (),
) -> list[float]:
    """Seconds until each stage is through with its last backward. `forward_s`, `backward_s`: one micro-batch on each (virtual) stage, in
    the order in which the micro-batch meets them: index chunk * pp + stage. `p2p_s`: a transfer over one boundary, or one per boundary
    (the entry after a chunk's last stage is the way back to stage 0). `group`: micro-batches that interleaving takes through a chunk at a
    time; None: pp. `jump` False walks every micro-batch (the reference for tests). `limits`: seconds of each stage; where one ends later,
    the answer may be any seconds above them that no stage undercuts.
    Raises ValueError for a schedule that is not known or that this number of micro-batches can't fill.

    >>> finish_times("1f1b", [1, 1], [2, 2], 0.0, 4)[0]  # (m + p - 1) * (f + b)
    15.0
    >>> finish_times("interleaved", [0.5] * 4, [1] * 4, 0.0, 4, 2)[0]  # m + (p-1)/v stage times
    13.5
    """
    virtual = len(forward_s)
    if virtual % vpp or len(backward_s) != virtual:
        raise ValueError(f"{virtual} forward and {len(backward_s)} backward times for vpp={vpp}")
    pp = virtual // vpp
    kind = of_chunks(schedule, vpp, group)
    why = kind.why_not(pp, num_microbatches, vpp)
    if why is not None and (pp > 1 or num_microbatches < 1):
        raise ValueError(why)
    if pp == 1:
        return [num_microbatches * (sum(forward_s) + sum(backward_s))]
    hops = [float(p2p_s)] * virtual if isinstance(p2p_s, int | float) else [float(hop) for hop in p2p_s]
    forward, backward = [float(f) for f in forward_s], [float(b) for b in backward_s]
    if limits and isinstance(kind, Interleaved):
        return kind.finish_times(forward, backward, hops, num_microbatches, pp, jump=jump, limits=limits)
    return kind.finish_times(forward, backward, hops, num_microbatches, pp, jump=jump)
