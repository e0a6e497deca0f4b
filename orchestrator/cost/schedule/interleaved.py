"""Interleaved 1F1B: Megatron's `forward_backward_pipelining_with_interleaving` with a micro-batch group of pp (schedules.py:773; arXiv
2104.04473, section 2.2.2): 2(pp - stage - 1) + (vpp - 1) pp chunk forwards of warm-up, then one forward, one backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from operator import sub

from orchestrator.cost.schedule.order import Pass, Schedule
from orchestrator.cost.schedule.periods import drift, shift


class Interleaved(Schedule):
    """Megatron's, with vpp chunks a stage."""

    name = "interleaved"
    has_chunks = True

    def why_not(self, pp: int, num_microbatches: int, vpp: int) -> str | None:
        if num_microbatches % pp:
            return f"interleaved: num_microbatches={num_microbatches} is not a multiple of pp={pp}"
        return super().why_not(pp, num_microbatches, vpp)

    def order(self, pp: int, stage: int, num_microbatches: int, vpp: int = 1) -> Iterator[Pass]:
        """Groups of pp micro-batches go through one chunk after the other, forward from the first and backward from the last.

        >>> [f"{action[0]}{n}{'ab'[chunk]}" for action, n, chunk in Interleaved().order(2, 1, 2, 2)]
        ['f0a', 'f1a', 'f0b', 'b0b', 'f1b', 'b1b', 'b0a', 'b1a']
        """
        period, total = pp * vpp, num_microbatches * vpp
        warm_up = min(total, 2 * (pp - stage - 1) + (vpp - 1) * pp)
        for k in range(total + warm_up):
            if k < total:
                yield Pass("forward", k // period * pp + k % pp, k % period // pp)
            if k >= warm_up:
                back = k - warm_up
                yield Pass("backward", back // period * pp + back % pp, vpp - 1 - back % period // pp)

    def repeats_from(self, pp: int) -> int:
        return 3 * pp  # a warm-up of less than (vpp + 1) pp passes, and a period of vpp pp

    def finish_times(
        self, forward: Sequence[float], backward: Sequence[float], hops: Sequence[float], num_microbatches: int, pp: int, *, jump: bool
    ) -> list[float]:
        """Slot t: rank r runs chunk forward t - r, then chunk backward t - first(r), first(r) = (pp-1-r) + (pp-1) + (vpp-1)pp. With
        Megatron's warm-up of 2(pp-1-r) + (vpp-1)pp every pass then needs only its own rank and the slot before of a neighbour."""
        m, vpp = num_microbatches, len(forward) // pp
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
                    moved = shift(state, old)
                    if moved is not None:
                        periods = (end - 1 - slot) // back
                        skipped += periods * moved
                        end -= periods * back
                        jump = False
                        break
                history[slot] = state
                if len(margins) == 2 * pp * period:
                    blocks.append((state, margins))
                    margins = []
                    periods, steps = drift(blocks)
                    periods = min(periods, (end - 1 - slot) // period) if jump else 0
                    if periods > 0:
                        state = [time + periods * step for time, step in zip(state, steps, strict=True)]
                        f_end, b_end = state[:pp], state[pp:]
                        end -= periods * period
                        history.clear()
                        blocks.clear()
            slot += 1
        return [time + skipped for time in b_end]


@lru_cache(maxsize=64)
def _slot_indices(pp: int, vpp: int) -> tuple[list[list[int]], list[list[int]]]:
    """For each slot of a period (pp * vpp slots) the virtual stages whose forward, and whose backward, the ranks run in it."""
    period = pp * vpp
    forward = [[(slot - rank) % period // pp * pp + rank for rank in range(pp)] for slot in range(period)]
    first = [(pp - 1 - rank) + (pp - 1) + (vpp - 1) * pp for rank in range(pp)]
    backward = [[(vpp - 1 - (slot - first[rank]) % period // pp) * pp + rank for rank in range(pp)] for slot in range(period)]
    return forward, backward
