"""Micro-batches in flight: those whose saved activations a stage holds, counted along its order of passes."""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from itertools import accumulate, takewhile
from operator import ge, sub

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
    of_chunks(schedule, vpp, group)  # raises
    if vpp == 1:
        return min(num_microbatches, pp - stage)
    return min(num_microbatches * vpp, 2 * (pp - stage - 1) + (vpp - 1) * (group or pp) + 1)


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


@lru_cache(maxsize=8192)
def most_in_flight(
    schedule: str, pp: int, stage: int, num_microbatches: int, vpp: int = 1, group: int | None = None
) -> tuple[int, int, int]:
    """The micro-batches in flight in all chunks together when saved bytes may peak, as many each time, and the most of the first and of the
    last chunk.

    >>> most_in_flight("interleaved", 2, 0, 4, 2)
    (5, 4, 2)
    """
    peaks = in_flight_by_chunk(schedule, pp, stage, num_microbatches, vpp, group)
    return sum(peaks[0]), max(counts[0] for counts in peaks), max(counts[-1] for counts in peaks)


@lru_cache(maxsize=4096)
def in_flight_by_stage(schedule: str, pp: int, num_microbatches: int, vpp: int = 1, group: int | None = None) -> tuple[int, ...]:
    """`in_flight` of each stage."""
    return tuple(in_flight(schedule, pp, stage, num_microbatches, vpp, group) for stage in range(pp))


@lru_cache(maxsize=4096)
def lead_of_chunks(schedule: str, pp: int, num_microbatches: int, vpp: int, group: int | None = None) -> tuple[tuple[float, float], ...]:
    """For each stage, at a time when most micro-batches are in flight and no chunk has more than one before it: how many more the first
    chunk has than the mean, and all chunks together that have more.

    >>> in_flight_by_chunk("interleaved", 2, 0, 4, 2), lead_of_chunks("interleaved", 2, 4, 2)
    (((3, 2), (4, 1)), ((0.5, 0.5), (0.5, 0.5)))
    """
    found = []
    for stage in range(pp):
        peaks = in_flight_by_chunk(schedule, pp, stage, num_microbatches, vpp, group)
        counts = min(counts for counts in peaks if all(map(ge, counts, counts[1:])))
        mean = sum(counts) / vpp
        found.append((counts[0] - mean, sum([count - mean for count in counts if count > mean])))
    return tuple(found)


def fewest_by_stage(schedule: str, pp: int, num_microbatches: int, vpp: int = 1, group: int | None = None) -> tuple[int, ...]:
    """For each stage the micro-batches in flight of whichever chunk holds fewest, at the time when that is most: each layer holds as many,
    wherever it is.

    With `vpp` > 1 that chunk is always the last one: forward passes come to it last in each group, and backward passes first. It holds most
    when a group's last forward pass or first backward pass has just been, or at either end of the order.

    >>> fewest_by_stage("1f1b", 4, 8), fewest_by_stage("interleaved", 2, 4, 2)[0]
    ((4, 3, 2, 1), 2)
    """
    kind = of_chunks(schedule, vpp, group)
    if vpp == 1:
        return tuple(in_flight(schedule, pp, stage, num_microbatches) for stage in range(pp))
    return _fewest_in_flight(pp, kind.telling(pp, num_microbatches), vpp, group or pp)


@lru_cache(maxsize=4096)
def _fewest_in_flight(pp: int, count: int, vpp: int, group: int) -> tuple[int, ...]:
    """The fewest micro-batches in flight of each stage, where it interleaves so many micro-batches."""
    total = count * vpp

    def done(passes: int, chunk: int) -> int:
        """Passes of this chunk among the first `passes` of a stage."""
        whole, inside = divmod(passes, group * vpp)
        size = min(group, count - whole * group)
        return whole * group + min(max(inside - chunk * size, 0), size)

    found = []
    for stage in range(pp):
        warm_up = 2 * (pp - stage - 1) + (vpp - 1) * group
        turns = {end for first in range(0, total, group * vpp) for end in (first + warm_up, min(first + group * vpp, total) - 1)}
        held = [done(k + 1, vpp - 1) - done(k - warm_up, 0) for k in {*turns, total - 1} if warm_up <= k < total]
        found.append(max(held, default=count))
    return tuple(found)


@lru_cache(maxsize=8192)
def _corners(schedule: str, pp: int, stage: int, num_microbatches: int, vpp: int, group: int | None) -> tuple[tuple[int, ...], ...]:
    """The peaks of the order, each a forward pass that a backward one follows, without those between two others on a line. All have as
    many micro-batches in flight over all chunks, so that none covers another."""
    if vpp == 1:  # never more than when the first backward pass begins: from then on each one goes before a forward pass
        order = of_chunks(schedule, vpp).order(pp, stage, num_microbatches)
        return ((sum(step.action == "forward" for step in takewhile(lambda step: step.action != "backward", order)),),)
    return tuple(_interleaved_corners(pp, stage, num_microbatches, vpp, group or pp))


def _interleaved_corners(pp: int, stage: int, num_microbatches: int, vpp: int, group: int) -> dict[tuple[int, ...], None]:
    """The peaks at which the order turns to another chunk, and the first and the last: the others lie between two of them on a line.

    After its forward pass k >= w, w passes of warm-up, a stage holds what the first k + 1 forward and k - w backward passes leave; both
    go in runs of a group through one chunk (schedule/interleaved.py).
    """
    sizes = [group] * (num_microbatches // group) + [num_microbatches % group] * (num_microbatches % group > 0)
    runs = [(chunk, size) for size in sizes for chunk in range(vpp)]
    starts = [0, *accumulate(size for _, size in runs)]
    total, counts, before = starts[-1], [0] * vpp, list[list[int]]()
    for chunk, size in runs:
        before.append(counts[:])
        counts[chunk] += size
    warm_up = 2 * (pp - stage - 1) + (vpp - 1) * group
    if warm_up >= total:
        return {tuple(counts): None}

    def done(passes: int) -> list[int]:
        """Passes of each chunk among the first `passes`."""
        run = min(bisect_right(starts, passes) - 1, len(runs) - 1)
        found = before[run][:]
        found[runs[run][0]] += passes - starts[run]
        return found

    def peak(k: int) -> tuple[int, ...]:
        return tuple(map(sub, done(k + 1), reversed(done(k - warm_up))))

    def turn(k: int) -> tuple[int, int] | None:
        """The chunk that has one more at the peak k than at the one before, and the one that has one less; None: that is the same."""
        more, less = (runs[bisect_right(starts, passes) - 1][0] for passes in (k, k - warm_up - 1))
        return None if more + less == vpp - 1 else (more, less)

    corners = {peak(warm_up): None}
    for k in sorted({start - 1 for start in starts} | {start + warm_up for start in starts}):
        if warm_up < k < total - 1 and turn(k) != turn(k + 1):
            corners[peak(k)] = None
    corners[peak(total - 1)] = None
    return corners
