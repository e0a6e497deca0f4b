"""When a pipeline's step ends: the schedules as the engines order them, walked operation by operation.

* "1f1b": Megatron's `forward_backward_pipelining_without_interleaving` (schedules.py:2093): min(m, pp-rank-1) forwards of warm-up,
  then one forward, one backward.
* "interleaved": Megatron's with a micro-batch group of pp (schedules.py:773): 2(pp-rank-1) + (vpp-1)pp chunk forwards of warm-up.
* "deepspeed_1f1b": DeepSpeed's TrainSchedule (runtime/pipe/schedule.py:189) orders a stage's passes as 1F1B does, in steps in which every
  second stage runs forward and the others backward. Between two steps neighbours exchange a gradient, then an activation, by send and
  recv that wait for each other (runtime/pipe/p2p.py:46,69): nothing runs beside a transfer, and both sides start when the later is there.

With constant stage times such a schedule is a max-plus linear system and turns periodic (Baccelli et al., "Synchronization and
Linearity", 1992, theorem 3.112): as soon as the state repeats up to a shift, the remaining periods are jumped over.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from operator import sub

MANY = 2**62
"""More periods than any step has."""
RELATIVE_TOLERANCE = 1e-12
"""Two shifts are the same period when they differ by less than this share of the time so far (rounding of sums)."""


def simulate(
    schedule: str,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    p2p_s: float | Sequence[float],
    num_microbatches: int,
    vpp: int = 1,
) -> float:
    """Seconds until the last stage is through. `forward_s`, `backward_s`: one micro-batch on each (virtual) stage, in the order in which
    the micro-batch meets them: index chunk * pp + stage. `p2p_s`: a transfer over one boundary, or one per boundary (the entry after a
    chunk's last stage is the way back to stage 0).

    >>> simulate("1f1b", [1, 1], [2, 2], 0.0, 4)  # (m + p - 1) * (f + b)
    15.0
    >>> simulate("interleaved", [0.5] * 4, [1] * 4, 0.0, 4, 2)  # m + (p-1)/v stage times
    13.5
    """
    return max(finish_times(schedule, forward_s, backward_s, p2p_s, num_microbatches, vpp))


def finish_times(
    schedule: str,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    p2p_s: float | Sequence[float],
    num_microbatches: int,
    vpp: int = 1,
    *,
    jump: bool = True,
) -> list[float]:
    """Seconds until each stage is through with its last backward. `jump` False walks every micro-batch (the reference for tests).
    Raises ValueError for a schedule that is not known or that this number of micro-batches can't fill."""
    virtual = len(forward_s)
    if virtual % vpp or len(backward_s) != virtual:
        raise ValueError(f"{virtual} forward and {len(backward_s)} backward times for vpp={vpp}")
    if num_microbatches < 1:
        raise ValueError("num_microbatches must be at least 1")
    pp = virtual // vpp
    hops = [float(p2p_s)] * virtual if isinstance(p2p_s, int | float) else [float(hop) for hop in p2p_s]
    forward, backward = [float(f) for f in forward_s], [float(b) for b in backward_s]
    if pp == 1:
        return [num_microbatches * (sum(forward) + sum(backward))]
    if schedule == "interleaved" and vpp > 1:
        if num_microbatches % pp:
            raise ValueError(f"interleaved: num_microbatches={num_microbatches} is not a multiple of pp={pp}")
        return _interleaved(forward, backward, hops, num_microbatches, pp, vpp, jump)
    if vpp > 1:
        raise ValueError(f"{schedule} has no virtual stages")
    if schedule == "deepspeed_1f1b":
        return _deepspeed(forward, backward, hops, num_microbatches, pp, jump)
    if schedule not in ("1f1b", "interleaved"):
        raise ValueError(f"schedule={schedule}: choose one of 1f1b, interleaved, deepspeed_1f1b")
    return _one_f_one_b(forward, backward, hops, num_microbatches, pp, jump)


def _shift(new: list[float], old: list[float]) -> float | None:
    """The constant by which the state moved on, or None."""
    shift = new[0] - old[0]
    tolerance = RELATIVE_TOLERANCE * new[0]
    if abs(new[-1] - old[-1] - shift) > tolerance:
        return None
    for a, b in zip(new, old, strict=True):
        if abs(a - b - shift) > tolerance:
            return None
    return shift


def _deepspeed(forward: list[float], backward: list[float], hops: list[float], m: int, pp: int, jump: bool) -> list[float]:
    """Step k: stages of its parity run forward (micro-batch k//2 - s//2), the others backward (k//2 - (pp-1) + s//2). Before it, each of
    the others meets the stage behind it: that one's last gradient goes up, its own last activation down."""
    clock = [0.0] * pp
    history: list[list[float]] = []
    step, end, skipped = 0, m, 0.0
    while step < 2 * (end + pp - 1):
        half, odd = divmod(step, 2)
        earlier = half - 1 + odd  # of the step before
        for s in range(1 - odd, pp - 1, 2):
            moved = (0 <= half - pp + 1 + s // 2 < end) + (0 <= earlier - s // 2 < end)
            if moved:
                clock[s] = clock[s + 1] = max(clock[s], clock[s + 1]) + moved * hops[s]
        for s in range(pp):
            if s % 2 == odd:
                if 0 <= half - s // 2 < end:
                    clock[s] += forward[s]
            elif 0 <= half - pp + 1 + s // 2 < end:
                clock[s] += backward[s]
        step += 1
        # From step 2 pp to 2 end all stages have both passes in every two steps.
        if jump and not odd and 2 * pp <= step <= 2 * end - 2:
            for period in range(1, min(len(history), pp) + 1):
                shift = _shift(clock, history[-period])
                if shift is not None:
                    periods = (2 * end - 2 - step) // (2 * period)
                    skipped += periods * shift
                    end -= periods * period
                    jump = False
                    break
            history.append(clock[:])
    return [time + skipped for time in clock]


def _one_f_one_b(forward: list[float], backward: list[float], hops: list[float], m: int, pp: int, jump: bool) -> list[float]:
    """Round n: forward n on every stage from the first to the last, and on stage i backward n - (pp-1-i), which needs stage i+1's
    backward of the round before. Once all stages run backwards, the ends of a round are the whole state."""
    last = pp - 1
    ready = [0.0] * (pp + 1)  # end of a stage's latest pass; the entry beyond the last stage never delays anything
    history: list[list[float]] = []
    odd_one = 0  # the stage that moved on unlike the others when that was last looked at
    n, end, skipped = 0, m, 0.0
    while n < end:
        arrived = 0.0
        for i in range(pp):
            done = ready[i]
            if arrived > done:  # noqa: PLR1730 - max() costs a call in the innermost loop
                done = arrived
            done += forward[i]
            arrived = done + hops[i]
            if n + i >= last:
                back = ready[i + 1] + hops[i] if i < last else 0.0
                if back > done:  # noqa: PLR1730
                    done = back
                done += backward[i]
            ready[i] = done
        n += 1
        if jump and n >= pp:
            state = ready[:pp]
            first, final = state[0], state[-1]
            tolerance = RELATIVE_TOLERANCE * first
            for period in range(1, min(len(history), pp) + 1):
                old = history[-period]
                shift = first - old[0]
                if abs(final - old[-1] - shift) > tolerance or abs(state[odd_one] - old[odd_one] - shift) > tolerance:
                    continue
                odd_one = next((i for i in range(pp) if abs(state[i] - old[i] - shift) > tolerance), -1)
                if odd_one < 0:
                    periods = (end - n) // period
                    skipped = periods * shift
                    end -= periods * period
                    jump = False
                    break
            history.append(state)
    # From here on the rounds are counted as if nothing had been skipped: only the shift of the clock differs.
    for n in range(m, m + last):
        for i in range(last):
            if n + i >= last and n + i - last < m:
                back = ready[i + 1] + hops[i]
                ready[i] = (back if back > ready[i] else ready[i]) + backward[i]
    return [time + skipped for time in ready[:pp]]


@lru_cache(maxsize=64)
def _slot_indices(pp: int, vpp: int) -> tuple[list[list[int]], list[list[int]]]:
    """For each slot of a period (pp * vpp slots) the virtual stages whose forward, and whose backward, the ranks run in it."""
    period = pp * vpp
    forward = [[(slot - rank) % period // pp * pp + rank for rank in range(pp)] for slot in range(period)]
    first = [(pp - 1 - rank) + (pp - 1) + (vpp - 1) * pp for rank in range(pp)]
    backward = [[(vpp - 1 - (slot - first[rank]) % period // pp) * pp + rank for rank in range(pp)] for slot in range(period)]
    return forward, backward


def _interleaved(forward: list[float], backward: list[float], hops: list[float], m: int, pp: int, vpp: int, jump: bool) -> list[float]:
    """Slot t: rank r runs chunk forward t - r, then chunk backward t - first(r), first(r) = (pp-1-r) + (pp-1) + (vpp-1)pp. With
    Megatron's warm-up of 2(pp-1-r) + (vpp-1)pp every pass then needs only its own rank and the slot before of a neighbour."""
    period, total = pp * vpp, m * vpp
    never = float("-inf")
    forward_index, backward_index = _slot_indices(pp, vpp)
    incoming = [never, *hops[:-1]]  # transfer into virtual stage i
    outgoing = [*hops[:-1], never]  # transfer of a gradient into virtual stage i
    f_cost = [[forward[i] for i in row] for row in forward_index]
    f_hop = [[incoming[i] for i in row] for row in forward_index]
    b_cost = [[backward[i] for i in row] for row in backward_index]
    b_hop = [[outgoing[i] for i in row] for row in backward_index]
    full = 2 * (pp - 1) + (vpp - 1) * pp  # first(0): from this slot on all ranks run both passes
    f_end, b_end = [0.0] * pp, [0.0] * pp
    history: dict[int, list[float]] = {}
    margins: list[float] = []  # by how much a rank waits for itself rather than for a transfer, in every pass of a period
    blocks: list[tuple[list[float], list[float]]] = []  # (state, margins) at the ends of the latest periods
    slot, end, skipped = 0, total, 0.0
    while slot < end + full:
        phase = slot % period
        watched = jump and full <= slot < end
        # The ranks that have a forward, and a backward, in this slot: both ranges are contiguous. The others stay where they are.
        low, high = max(0, slot - end + 1), min(pp, slot + 1)
        came = [time + hop for time, hop in zip([f_end[-1], *f_end[:-1]], f_hop[phase], strict=True)]
        if watched:
            margins.extend(map(sub, b_end, came))
        rows = zip(b_end[low:high], came[low:high], f_cost[phase][low:high], strict=True)
        f_end = b_end[:]
        f_end[low:high] = [(own if own > other else other) + cost for own, other, cost in rows]
        low, high = max(0, full - slot), min(pp, full - slot + end)
        if low < high:
            came = [time + hop for time, hop in zip([*b_end[1:], b_end[0]], b_hop[phase], strict=True)]
            if watched:
                margins.extend(map(sub, f_end, came))
            rows = zip(f_end[low:high], came[low:high], b_cost[phase][low:high], strict=True)
            b_end = f_end[:]
            b_end[low:high] = [(own if own > other else other) + cost for own, other, cost in rows]
        else:
            b_end = f_end[:]
        if watched:
            state = f_end + b_end
            for back in range(period, pp * period + 1, period):
                old = history.get(slot - back)
                if old is None:
                    break
                shift = _shift(state, old)
                if shift is not None:
                    periods = (end - 1 - slot) // back
                    skipped += periods * shift
                    end -= periods * back
                    jump = False
                    break
            history[slot] = state
            if len(margins) == 2 * pp * period:
                blocks.append((state, margins))
                margins = []
                periods, steps = _drift(blocks)
                periods = min(periods, (end - 1 - slot) // period) if jump else 0
                if periods > 0:
                    state = [time + periods * step for time, step in zip(state, steps, strict=True)]
                    f_end, b_end = state[:pp], state[pp:]
                    end -= periods * period
                    history.clear()
                    blocks.clear()
        slot += 1
    return [time + skipped for time in b_end]


def _drift(blocks: list[tuple[list[float], list[float]]]) -> tuple[int, list[float]]:
    """(periods that may be jumped over, by how much each rank's state moves in one) where the ranks move at different but constant speeds.

    While every pass keeps waiting for the same thing, all times grow linearly: that lasts until the first margin changes its sign.
    """
    if len(blocks) < 3:
        return 0, []
    (s0, _), (s1, m1), (s2, m2) = blocks[-3:]
    steps = list(map(sub, s2, s1))
    tolerance = RELATIVE_TOLERANCE * s2[0]
    if any(abs(new - old) > tolerance for new, old in zip(steps, map(sub, s1, s0), strict=True)):
        return 0, []
    periods = MANY
    for before, now in zip(m1, m2, strict=True):
        if before * now < 0:
            return 0, []
        change = now - before
        if abs(change) > tolerance and change * now < 0:
            periods = min(periods, int(-now / change) - 1)
    return periods, steps


def in_flight(schedule: str, pp: int, stage: int, num_microbatches: int, vpp: int = 1) -> int:
    """The most micro-batches whose saved activations a stage holds at once; with `vpp` > 1 counted in chunks of the stage.

    1F1B: min(m, pp-stage), DeepSpeed's as well: it has a buffer more on the last stage, which we empty (workers/deepspeed_pipeline.py).
    Interleaved: min(m vpp, 2(pp-stage-1) + (vpp-1)pp + 1) (schedules.py:773).

    >>> [in_flight("1f1b", 4, stage, 8) for stage in range(4)], in_flight("interleaved", 4, 0, 8, 2), in_flight("deepspeed_1f1b", 4, 3, 8)
    ([4, 3, 2, 1], 11, 1)
    """
    if vpp > 1:
        return min(num_microbatches * vpp, 2 * (pp - stage - 1) + (vpp - 1) * pp + 1)
    return min(num_microbatches, pp - stage)


def in_flight_by_chunk(schedule: str, pp: int, stage: int, num_microbatches: int, vpp: int = 1) -> tuple[tuple[int, ...], ...]:
    """Every combination of micro-batches in flight by chunk that no other combination covers: the stage's saved bytes peak in one of
    them, whatever the chunks weigh.

    >>> in_flight_by_chunk("1f1b", 4, 1, 8)
    ((3,),)
    >>> in_flight_by_chunk("interleaved", 2, 0, 4, 2)
    ((3, 2), (4, 1))
    """
    if vpp == 1:
        return ((in_flight(schedule, pp, stage, num_microbatches, vpp),),)
    return _interleaved_in_flight(pp, stage, min(num_microbatches, 4 * pp), vpp)  # warm-up and two periods: after that the order repeats


@lru_cache(maxsize=4096)
def _interleaved_in_flight(pp: int, stage: int, num_microbatches: int, vpp: int) -> tuple[tuple[int, ...], ...]:
    """Once the warm-up is through, a forward follows each backward: all peaks hold as many chunks, so that none covers another. While both
    stay in their chunks, what is held moves along a line: only its ends can be the most."""
    period = pp * vpp
    total = num_microbatches * vpp
    warm_up = min(total, 2 * (pp - stage - 1) + (vpp - 1) * pp)
    counts = [0] * vpp
    peaks: dict[tuple[int, ...], None] = {}
    for n in range(total):
        counts[n % period // pp] += 1
        if n >= warm_up:
            back = n - warm_up
            turns = n == warm_up or n % pp in (0, pp - 1) or back % pp in (0, pp - 1)
            if turns or n == total - 1:
                peaks[tuple(counts)] = None
            counts[vpp - 1 - back % period // pp] -= 1
        elif n == total - 1:
            peaks[tuple(counts)] = None
    return tuple(peaks)


@lru_cache(maxsize=4096)
def fewest_in_flight(schedule: str, pp: int, stage: int, num_microbatches: int, vpp: int = 1) -> int:
    """Micro-batches in flight of whichever chunk holds fewest, at the time when that is most: each layer holds as many, wherever it is.

    >>> fewest_in_flight("1f1b", 4, 1, 8), fewest_in_flight("interleaved", 2, 0, 4, 2)
    (3, 2)
    """
    return max(map(min, in_flight_by_chunk(schedule, pp, stage, num_microbatches, vpp)))
