"""When each pass of a step begins and ends, played from nothing but the stages' orders: what a picture of a schedule draws, and the
definition that the schedules' own fast `finish_times` are tested against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from orchestrator.cost.schedule.names import of_chunks
from orchestrator.cost.schedule.order import Action, Pass


class Slot(NamedTuple):
    """One pass (or, where transfers block, one transfer) of a stage, in seconds from the step's begin."""

    action: Action
    microbatch: int
    chunk: int
    begin_s: float
    end_s: float


PEERS: dict[Action, tuple[int, Action]] = {
    "send_activation": (1, "receive_activation"),
    "receive_activation": (-1, "send_activation"),
    "send_gradient": (-1, "receive_gradient"),
    "receive_gradient": (1, "send_gradient"),
    "exchange_next": (1, "exchange_previous"),
    "exchange_previous": (-1, "exchange_next"),
}
"""A transfer's other side: how many stages further on it is, and what it does."""
EXCHANGES: tuple[Action, ...] = ("exchange_next", "exchange_previous")


def timeline(
    schedule: str,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    hops_s: Sequence[float],
    num_microbatches: int,
    vpp: int = 1,
    group: int | None = None,
) -> list[list[Slot]]:
    """What each stage does when. Arguments as `finish_times` takes them, transfers by virtual boundary.

    A pass starts once its stage is free and, where transfers don't block, what it needs has crossed the boundary; where they do, a
    transfer starts once both sides are there, and holds both.

    >>> [(slot.action, slot.begin_s, slot.end_s) for slot in timeline("1f1b", [1, 1], [2, 2], [0.5, 0.5], 1)[0]]
    [('forward', 0.0, 1.0), ('send_activation', 1.0, 1.5), ('receive_gradient', 4.5, 5.0), ('backward', 5.0, 7.0)]
    """
    kind = of_chunks(schedule, vpp, group)
    pp = len(forward_s) // vpp
    last = len(forward_s) - 1
    orders = [list(kind.order(pp, stage, num_microbatches, vpp)) for stage in range(pp)]
    lanes: list[list[Slot]] = [[] for _ in range(pp)]
    clock = [0.0] * pp
    ends: dict[tuple[Action, int, int], float] = {}

    def arrival(action: Action, microbatch: int, place: int) -> float | None:
        """The second when what this pass needs is there; None: it has not been made yet."""
        if action == "forward":
            source, hop = ("forward", place - 1), hops_s[place - 1]
            if place == 0:
                return 0.0
        elif place == last:
            source, hop = ("forward", place), 0.0
        else:
            source, hop = ("backward", place + 1), hops_s[place]
        made = ends.get((source[0], microbatch, source[1]))  # type: ignore[arg-type]
        return None if made is None else made + (0.0 if kind.blocks else hop)

    moving = True
    while moving:
        moving = False
        for stage, order in enumerate(orders):
            while len(lanes[stage]) < len(order):
                action, microbatch, chunk = order[len(lanes[stage])]
                if action in PEERS:
                    step, answer = PEERS[action]
                    other = stage + step
                    theirs = orders[other][len(lanes[other]) :][:1]
                    if theirs != [Pass(answer, microbatch, chunk)]:
                        break
                    begin = max(clock[stage], clock[other])
                    both = kind.half_duplex and action in EXCHANGES
                    end = begin + (2 if both else 1) * hops_s[min(stage, other)]
                    lanes[other].append(Slot(answer, microbatch, chunk, begin, end))
                    clock[other] = end
                else:
                    place = chunk * pp + stage
                    arrived = arrival(action, microbatch, place)
                    if arrived is None:
                        break
                    begin = max(clock[stage], arrived)
                    end = begin + (forward_s if action == "forward" else backward_s)[place]
                    ends[action, microbatch, place] = end
                lanes[stage].append(Slot(action, microbatch, chunk, begin, end))
                clock[stage] = end
                moving = True
    if any(len(lane) < len(order) for lane, order in zip(lanes, orders, strict=True)):
        raise ValueError(f"{schedule}: the stages wait for each other")
    return lanes
