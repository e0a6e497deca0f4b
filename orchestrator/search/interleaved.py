"""A lower bound of one partition's interleaved schedule, so that most are never simulated."""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul


def interleaved_floor(forward: Sequence[float], backward: Sequence[float], hops: Sequence[float], m: int, pp: int, vpp: int) -> float:
    """Seconds that stage 0 of an interleaved pipeline is not through before, at a hundredth of what simulating takes.

    `forward`, `backward`: of a virtual stage, index chunk * pp + stage, as `schedule.simulate` takes them; `hops` likewise.

    Stage i begins its first backward pass once the first micro-batch has gone down through all chunks of all stages, and back up to it;
    until then it has done its warm-up and one forward pass more (Megatron's order, schedules.py:773). From the end of its last forward pass
    on, the last micro-batch goes the same way. Between the two it works on the rest. On its way down the micro-batch waits where a stage
    still works on the chunks before: pp micro-batches of each.
    """
    total = m * vpp

    def way(seconds: Sequence[float]) -> float:
        ready = 0.0
        own = [0.0] * pp  # when the stage is through with pp micro-batches of the chunks before
        for index, here in enumerate(seconds):
            stage = index % pp
            if index < pp:
                own[stage] = ready
            elif own[stage] > ready:
                ready = own[stage]
            own[stage] += pp * here
            ready += here + hops[index]
        return ready - hops[len(seconds) - 1]

    down, up = way(forward), way(backward)
    lead_f = lead_b = floor = 0.0
    behind_f, behind_b = (sum(times[-pp + 1 :]) + sum(hops[: pp - 1]) for times in (forward, backward))
    for stage in range(pp):
        f, b = forward[stage::pp], backward[stage::pp]
        work_f, work_b = m * sum(f), m * sum(b)
        passes = 2 * (pp - 1 - stage) + (vpp - 1) * pp + 1
        if passes < total:
            turns, some = divmod(passes, pp * vpp)
            early = [turns * pp + min(pp, max(0, some - chunk * pp)) for chunk in range(vpp)]
            spent = sum(map(mul, early, f)) + sum(map(mul, early, b))
            floor = max(floor, down + behind_b + work_f + work_b - spent + up + behind_f)
        else:  # all forward passes come first
            floor = max(floor, down + behind_b + work_b + lead_b, lead_f + work_f + behind_f + up)
        floor = max(floor, lead_f + work_f + work_b + lead_b)
        if stage < pp - 1:
            lead_f, lead_b = lead_f + f[0] + hops[stage], lead_b + b[0] + hops[stage]
            behind_f -= forward[(vpp - 1) * pp + stage + 1] + hops[stage]
            behind_b -= backward[(vpp - 1) * pp + stage + 1] + hops[stage]
    return floor
