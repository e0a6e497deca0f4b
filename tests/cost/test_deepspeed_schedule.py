"""DeepSpeed's pipeline, step by step: our closed walk against its own lists of instructions."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from orchestrator.cost.schedule import finish_times, in_flight
from orchestrator.cost.schedule.names import SCHEDULES

pytestmark = pytest.mark.engines

Instruction = tuple[str, str]
SIZES = [(2, 1), (2, 7), (3, 2), (3, 9), (4, 3), (4, 16), (5, 4), (6, 20), (8, 8)]


def instructions(pp: int, m: int, stage: int) -> list[str]:
    """What DeepSpeed's engine does on one stage, in its order."""
    from deepspeed.runtime.pipe.schedule import TrainSchedule

    return [type(command).__name__ for step in TrainSchedule(m, pp, stage).steps() for command in step]


def walked(pp: int, m: int, forward: list[float], backward: list[float], hops: list[float]) -> list[float]:
    """Each stage's end where a send and its recv begin together, when both are there, and end together."""
    todo: list[Iterator[str]] = [iter(instructions(pp, m, stage)) for stage in range(pp)]
    now = [next(commands) for commands in todo]
    clock = [0.0] * pp
    meet = {("SendActivation", "RecvActivation"), ("RecvGrad", "SendGrad")}
    moving = True
    while moving:
        moving = False
        for stage in range(pp):
            while now[stage] and not now[stage].startswith(("Send", "Recv")):
                clock[stage] += {"ForwardPass": forward, "BackwardPass": backward}.get(now[stage], [0.0] * pp)[stage]
                now[stage] = next(todo[stage], "")
                moving = True
        for stage in range(pp - 1):
            if (now[stage], now[stage + 1]) in meet:
                clock[stage] = clock[stage + 1] = max(clock[stage : stage + 2]) + hops[stage]
                now[stage], now[stage + 1] = next(todo[stage], ""), next(todo[stage + 1], "")
                moving = True
    assert not any(now), "a stage waits for ever"
    return clock


@pytest.mark.parametrize(("pp", "m"), SIZES)
def test_the_walk_is_deepspeeds_own_with_transfers_that_wait_for_both_sides(pp: int, m: int) -> None:
    rng = random.Random(pp * 100 + m)
    forward, backward = [rng.uniform(1, 2) for _ in range(pp)], [rng.uniform(2, 4) for _ in range(pp)]
    hops = [rng.choice([0.0, 0.1, 1.0]) for _ in range(pp)]
    expected = walked(pp, m, forward, backward, hops)
    assert finish_times("deepspeed_1f1b", forward, backward, hops, m) == pytest.approx(expected, rel=1e-12)
    assert finish_times("deepspeed_1f1b", forward, backward, hops, m, jump=False) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("pp", "m"), SIZES)
def test_a_stage_holds_what_deepspeeds_own_order_holds(pp: int, m: int) -> None:
    for stage in range(pp):
        held = most = 0
        for name in instructions(pp, m, stage):
            held += {"ForwardPass": 1, "BackwardPass": -1}.get(name, 0)
            most = max(most, held)
        assert in_flight("deepspeed_1f1b", pp, stage, m) == most


@pytest.mark.parametrize(("pp", "m"), SIZES)
def test_the_order_is_deepspeeds_own_list_of_passes_and_transfers(pp: int, m: int) -> None:
    names = {"forward": "ForwardPass", "backward": "BackwardPass", "receive_activation": "RecvActivation", "send_gradient": "SendGrad"}
    names |= {"receive_gradient": "RecvGrad", "send_activation": "SendActivation"}
    for stage in range(pp):
        theirs = [name for name in instructions(pp, m, stage) if name in names.values()]
        assert [names[action] for action, _, _ in SCHEDULES["deepspeed_1f1b"].order(pp, stage, m)] == theirs


def test_nothing_runs_beside_a_transfer() -> None:
    """A middle stage meets both neighbours twice a micro-batch; Megatron's 1F1B hides the transfers of all but the slowest chain."""
    hidden = max(finish_times("1f1b", [1.0] * 4, [2.0] * 4, 0.1, 64))
    shown = max(finish_times("deepspeed_1f1b", [1.0] * 4, [2.0] * 4, 0.1, 64))
    assert shown > hidden
    assert shown >= 64 * (3.0 + 4 * 0.1)
