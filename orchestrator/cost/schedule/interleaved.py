"""Interleaved 1F1B: Megatron's `forward_backward_pipelining_with_interleaving` (schedules.py:828; arXiv 2104.04473, section 2.2.2).

Groups of N micro-batches (--microbatch-group-size-per-virtual-pipeline-stage; pp by default) go through one chunk after the other. Warm-up
is 2(pp - stage - 1) + (vpp - 1) N chunk forwards, then one forward, one backward. The last group has what is left, pp at least.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from operator import add, gt, itemgetter, sub

from orchestrator.cost.schedule.order import Pass, Schedule
from orchestrator.cost.schedule.periods import drift, shift

FULL_GROUPS = 3
"""Full groups that show all of an order: a warm-up is less than vpp + 1 of the vpp rounds of N passes that each group takes."""


class Interleaved(Schedule):
    """Megatron's interleaved 1F1B, with vpp chunks a stage. `group`: micro-batches of a group; None: pp."""

    name = "interleaved"
    has_chunks = True

    def __init__(self, group: int | None = None) -> None:
        self.group = group

    def why_not(self, pp: int, num_microbatches: int, vpp: int) -> str | None:
        group = self.group or pp
        last = num_microbatches % group
        if self.group is not None and not pp <= group <= num_microbatches:
            return f"interleaved: groups of {group} micro-batches are not of pp={pp} to num_microbatches={num_microbatches}"
        if 0 < last < pp:
            if self.group is None:
                return f"interleaved: num_microbatches={num_microbatches} is not a multiple of pp={pp}"
            return f"interleaved: num_microbatches={num_microbatches} leaves {last} to the last group of {group}, fewer than pp={pp}"
        return super().why_not(pp, num_microbatches, vpp)

    def order(self, pp: int, stage: int, num_microbatches: int, vpp: int = 1) -> Iterator[Pass]:
        """Each group goes forward through the chunks from the first on, and backward from the last (get_schedule_table, schedules.py:798).

        >>> [f"{action[0]}{n}{'ab'[chunk]}" for action, n, chunk in Interleaved().order(2, 1, 2, 2)]
        ['f0a', 'f1a', 'f0b', 'b0b', 'f1b', 'b1b', 'b0a', 'b1a']
        >>> [f"{action[0]}{n}{'ab'[chunk]}" for action, n, chunk in Interleaved(3).order(2, 1, 5, 2)][:9]
        ['f0a', 'f1a', 'f2a', 'f0b', 'b0b', 'f1b', 'b1b', 'f2b', 'b2b']
        """
        group = self.group or pp
        table = [
            (n, chunk)
            for first in range(0, num_microbatches, group)
            for chunk in range(vpp)
            for n in range(first, min(first + group, num_microbatches))
        ]
        warm_up = min(len(table), 2 * (pp - stage - 1) + (vpp - 1) * group)
        for k in range(len(table) + warm_up):
            if k < len(table):
                yield Pass("forward", *table[k])
            if k >= warm_up:
                n, chunk = table[k - warm_up]
                yield Pass("backward", n, vpp - 1 - chunk)

    def telling(self, pp: int, num_microbatches: int) -> int:
        full, last = divmod(num_microbatches, self.group or pp)
        return min(full, FULL_GROUPS) * (self.group or pp) + last

    def finish_times(
        self,
        forward: Sequence[float],
        backward: Sequence[float],
        hops: Sequence[float],
        num_microbatches: int,
        pp: int,
        *,
        jump: bool,
        limits: Sequence[float] = (),
    ) -> list[float]:
        """When the last pass of each rank ends, in seconds. Slot t: rank r runs chunk forward t - r, then chunk backward t - first(r),
        first(r) = (pp-1-r) + (pp-1) + (vpp-1)N. With Megatron's warm-up of 2(pp-1-r) + (vpp-1)N every pass then needs only its own rank and
        the slot before of a neighbour; where a micro-batch comes around to its next chunk, the slot N - pp further back. `limits`: seconds
        of each rank; once it is clear that one of them ends later, what no rank's end undercuts is the answer."""
        m, vpp, group = num_microbatches, len(forward) // pp, self.group or pp
        period, total = group * vpp, m * vpp
        body = m // group * period  # passes of the groups that are full
        rows = _Rows(forward, backward, hops, pp, group)
        last_rows = _Rows(forward, backward, hops, pp, m % group) if body < total else None
        full = 2 * (pp - 1) + (vpp - 1) * group  # first(0): from this slot on all ranks run both passes
        late = group - pp
        around: tuple[list[float], list[float]] = ([], [])  # ends of the last rank's forward passes, and of the first's backward ones
        f_end, b_end = [0.0] * pp, [0.0] * pp
        history: dict[int, list[float]] = {}
        margins: list[float] = []  # by how much a rank waits for itself rather than for a transfer, in every pass of a period
        blocks: list[tuple[list[float], list[float]]] = []  # (state, margins) at the ends of the latest periods
        slot, end, skipped = 0, total, 0.0
        while slot < end + full:
            f_cost, f_hop = rows.forward(slot)
            waited = late
            if last_rows is not None and slot >= body:
                many = slot - body + 1  # ranks that have come to the last group
                costs, transfers = last_rows.forward(slot - body)
                f_cost, f_hop = costs[:many] + f_cost[many:], transfers[:many] + f_hop[many:]
                waited = last_rows.group - pp
            watched = jump and full <= slot < body
            # The ranks that have a forward, and a backward, in this slot: both ranges are contiguous. The others stay where they are.
            low, high = max(0, slot - end + 1), min(pp, slot + 1)
            from_last = f_end[-1] if not late else around[0][-1 - waited] if slot > waited else 0.0
            before = [from_last, *f_end[:-1]]
            if watched:
                margins.extend(map(sub, b_end, map(add, before, f_hop)))
            f_end = _ended(b_end, before, f_hop, f_cost, low, high)
            low, high = max(0, full - slot), min(pp, full - slot + end)
            if low < high:
                b_cost, b_hop = rows.backward(slot - full)
                waited = late
                if last_rows is not None and slot - full + pp > body:
                    many = max(0, body + full - slot)  # ranks that have not come to the last group
                    costs, transfers = last_rows.backward(slot - full - body)
                    b_cost, b_hop = b_cost[:many] + costs[many:], b_hop[:many] + transfers[many:]
                    waited = last_rows.group - pp
                from_first = b_end[0] if not late else around[1][-1 - waited]
                before = [*b_end[1:], from_first]
                if watched:
                    margins.extend(map(sub, f_end, map(add, before, b_hop)))
                b_end = _ended(f_end, before, b_hop, b_cost, low, high)
            else:
                b_end = f_end[:]
            if late:
                around[0].append(f_end[-1])
                around[1].append(b_end[0])
            if watched:
                state = f_end + b_end + around[0][-1 - late : -1] + around[1][-1 - late : -1]
                for back in range(period, pp * period + 1, period):
                    old = history.get(slot - back)
                    if old is None:
                        break
                    moved = shift(state, old)
                    if moved is not None:
                        periods = (body - 1 - slot) // back
                        skipped += periods * moved
                        end, body = end - periods * back, body - periods * back
                        jump = False
                        break
                history[slot] = state
                if len(margins) == 2 * pp * period:
                    blocks.append((state, margins))
                    margins = []
                    periods, steps = drift(blocks)
                    periods = min(periods, (body - 1 - slot) // period) if jump else 0
                    if periods > 0:
                        state = [time + periods * step for time, step in zip(state, steps, strict=True)]
                        f_end, b_end = state[:pp], state[pp : 2 * pp]
                        if late:
                            around = ([*state[2 * pp : 2 * pp + late], f_end[-1]], [*state[2 * pp + late :], b_end[0]])
                        end, body = end - periods * period, body - periods * period
                        history.clear()
                        blocks.clear()
            if limits and jump and slot >= full and (slot - full) % period == 0 and slot < body:
                least = rows.least_ends(b_end, slot - full, full, m)
                if any(map(gt, least, limits)):
                    return least
            slot += 1
        return [time + skipped for time in b_end]


_Row = tuple[float, ...]
"""A number for each rank of a pipeline."""


def _ended(own: list[float], before: list[float], hops: _Row, costs: _Row, low: int, high: int) -> list[float]:
    """The seconds at which the passes of ranks `low` to `high` end, behind their own last pass and behind the neighbour's and a transfer;
    the other ranks' stay as they are."""
    if low == 0 and high == len(own):
        passes = zip(own, before, hops, costs, strict=True)
        return [(mine if mine > (other := end + hop) else other) + cost for mine, end, hop, cost in passes]
    found = own[:]
    passes = zip(own[low:high], before[low:high], hops[low:high], costs[low:high], strict=True)
    found[low:high] = [(mine if mine > (other := end + hop) else other) + cost for mine, end, hop, cost in passes]
    return found


class _Rows:
    """Seconds of each rank's pass by slot, and of the transfer that it waits for, in groups of so many micro-batches."""

    def __init__(self, forward: Sequence[float], backward: Sequence[float], hops: Sequence[float], pp: int, group: int) -> None:
        never = float("-inf")
        incoming = [never, *hops[:-1]]  # transfer into virtual stage i
        outgoing = [*hops[:-1], never]  # transfer of a gradient into virtual stage i
        self.group, self.period = group, group * (len(forward) // pp)
        self._times = forward, backward, hops
        of_forward, of_backward = _by_slot(pp, len(forward) // pp, group)
        self._forward = [(row(forward), row(incoming)) for row in of_forward]
        self._backward = [(row(backward), row(outgoing)) for row in of_backward]

    def least_ends(self, ends: Sequence[float], turn: int, full: int, num_microbatches: int) -> list[float]:
        """What no rank's end undercuts, from the ends of its passes after `turn` slots in which all ranks run both: its work that is left,
        and the way of the last gradient from rank to rank."""
        times, pp = self._times, len(ends)
        found = [0.0] * pp
        for rank in range(pp - 1, -1, -1):
            forward, backward = times[0][rank::pp], times[1][rank::pp]
            work = num_microbatches * (sum(forward) + sum(backward))
            done = self._first(forward, full + turn + 1 - rank) + self._first(backward[::-1], turn + 1 + rank)
            found[rank] = ends[rank] + work - done
            if rank < pp - 1:
                found[rank] = max(found[rank], found[rank + 1] + times[2][rank] + backward[0])
        return found

    def _first(self, costs: Sequence[float], passes: int) -> float:
        """Seconds of so many of a rank's passes, in groups through these chunks."""
        periods, passes = divmod(passes, self.period)
        chunks, passes = divmod(passes, self.group)
        return self.group * (periods * sum(costs) + sum(costs[:chunks])) + (passes * costs[chunks] if passes else 0.0)

    def forward(self, slot: int) -> tuple[_Row, _Row]:
        """(seconds, transfers) where rank r runs forward `slot - r` of these groups."""
        return self._forward[slot % self.period]

    def backward(self, slot: int) -> tuple[_Row, _Row]:
        """(seconds, transfers) where rank r runs backward `slot + r` of these groups."""
        return self._backward[slot % self.period]


_Of = Callable[[Sequence[float]], _Row]
"""Picks from values by virtual stage those of one slot's ranks."""


@lru_cache(maxsize=64)
def _by_slot(pp: int, vpp: int, group: int) -> tuple[list[_Of], list[_Of]]:
    """For each slot of a period (group * vpp slots) the virtual stages whose forward (`slot - rank`), and whose backward (`slot + rank`),
    the ranks run."""
    period = group * vpp
    forward = [[(slot - rank) % period // group * pp + rank for rank in range(pp)] for slot in range(period)]
    backward = [[(vpp - 1 - (slot + rank) % period // group) * pp + rank for rank in range(pp)] for slot in range(period)]
    return [itemgetter(*row) for row in forward], [itemgetter(*row) for row in backward]
