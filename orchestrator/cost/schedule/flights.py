"""Micro-batches in flight: those whose saved activations a stage holds, counted along its order of passes."""

from __future__ import annotations

from functools import lru_cache
from itertools import takewhile
from operator import le

from orchestrator.cost.schedule.names import of_chunks


@lru_cache(maxsize=8192)
def in_flight(schedule: str, pp: int, stage: int, num_microbatches: int, vpp: int = 1, group: int | None = None) -> int:
    """The most micro-batches whose saved activations a stage holds at once; with `vpp` > 1 counted in chunks of the stage.

    1F1B: min(m, pp-stage), DeepSpeed's as well. Interleaved in groups of N micro-batches (`group`; None: pp):
    min(m vpp, 2(pp-stage-1) + (vpp-1)N + 1).

    >>> [in_flight("1f1b", 4, stage, 8) for stage in range(4)], in_flight("interleaved", 4, 0, 8, 2), in_flight("deepspeed_1f1b", 4, 3, 8)
    ([4, 3, 2, 1], 11, 1)
    >>> in_flight("interleaved", 4, 0, 12, 2, 6)
    13
    """
    return max(map(sum, in_flight_by_chunk(schedule, pp, stage, num_microbatches, vpp, group)))


@lru_cache(maxsize=8192)
def in_flight_by_chunk(
    schedule: str, pp: int, stage: int, num_microbatches: int, vpp: int = 1, group: int | None = None
) -> tuple[tuple[int, ...], ...]:
    """Every combination of micro-batches in flight by chunk that no other combination covers: the stage's saved bytes peak in one of
    them, whatever the chunks weigh.

    >>> in_flight_by_chunk("1f1b", 4, 1, 8)
    ((3,),)
    >>> in_flight_by_chunk("interleaved", 2, 0, 4, 2)
    ((3, 2), (4, 1))
    """
    kind = of_chunks(schedule, vpp, group)
    return _corners(kind.name, pp, stage, kind.telling(pp, num_microbatches), vpp, group)


@lru_cache(maxsize=4096)
def fewest_in_flight(schedule: str, pp: int, stage: int, num_microbatches: int, vpp: int = 1, group: int | None = None) -> int:
    """Micro-batches in flight of whichever chunk holds fewest, at the time when that is most: each layer holds as many, wherever it is.

    >>> fewest_in_flight("1f1b", 4, 1, 8), fewest_in_flight("interleaved", 2, 0, 4, 2)
    (3, 2)
    """
    return max(map(min, in_flight_by_chunk(schedule, pp, stage, num_microbatches, vpp, group)))


@lru_cache(maxsize=4096)
def fewest_by_stage(schedule: str, pp: int, num_microbatches: int, vpp: int = 1, group: int | None = None) -> tuple[int, ...]:
    """`fewest_in_flight` of each stage."""
    return tuple(fewest_in_flight(schedule, pp, stage, num_microbatches, vpp, group) for stage in range(pp))


@lru_cache(maxsize=8192)
def _corners(
    schedule: str, pp: int, stage: int, num_microbatches: int, vpp: int, group: int | None
) -> tuple[tuple[int, ...], ...]:
    """The peaks of the order, each a forward pass that a backward one follows, without those between two others on a line."""
    order = of_chunks(schedule, vpp, group).order(pp, stage, num_microbatches, vpp)
    if vpp == 1:  # never more than when the first backward pass begins: from then on each one goes before a forward pass
        return ((sum(step.action == "forward" for step in takewhile(lambda step: step.action != "backward", order)),),)
    counts = [0] * vpp
    peaks: list[tuple[int, ...]] = []
    rising = False
    for action, _, chunk in order:
        if action == "forward":
            counts[chunk] += 1
            rising = True
        elif action == "backward":
            if rising:
                peaks.append(tuple(counts))
            counts[chunk] -= 1
            rising = False
    corners: dict[tuple[int, ...], None] = {}
    for i, peak in enumerate(peaks):
        if 0 < i < len(peaks) - 1:
            before, behind = peaks[i - 1], peaks[i + 1]
            if all(a + b == 2 * n for a, b, n in zip(before, behind, peak, strict=True)):
                continue
        corners[peak] = None
    return tuple(peak for peak in corners if not any(other != peak and all(map(le, peak, other)) for other in corners))
