"""1F1B: Megatron's `forward_backward_pipelining_without_interleaving` (schedules.py:2093; arXiv 2104.04473, section 2.2.1): min(m,
pp - stage - 1) forwards of warm-up, then one forward, one backward. A stage frees what it has sent (deallocate_output_tensor)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from orchestrator.cost.schedule.order import Pass, Schedule
from orchestrator.cost.schedule.periods import RELATIVE_TOLERANCE


def passes(pp: int, stage: int, num_microbatches: int) -> Iterator[Pass]:
    """The order of a stage's passes.

    >>> [f"{action[0]}{microbatch}" for action, microbatch, _ in passes(2, 0, 3)]
    ['f0', 'f1', 'b0', 'f2', 'b1', 'b2']
    """
    warm_up = min(num_microbatches, pp - stage - 1)
    for n in range(warm_up):
        yield Pass("forward", n)
    for n in range(warm_up, num_microbatches):
        yield Pass("forward", n)
        yield Pass("backward", n - warm_up)
    for n in range(num_microbatches - warm_up, num_microbatches):
        yield Pass("backward", n)


class OneFOneB(Schedule):
    """Megatron's, without chunks."""

    name = "1f1b"

    def order(self, pp: int, stage: int, num_microbatches: int, vpp: int = 1) -> Iterator[Pass]:
        return passes(pp, stage, num_microbatches)

    def telling(self, pp: int, num_microbatches: int) -> int:
        return min(num_microbatches, pp)

    def finish_times(
        self, forward: Sequence[float], backward: Sequence[float], hops: Sequence[float], num_microbatches: int, pp: int, *, jump: bool
    ) -> list[float]:
        """Round n: forward n on every stage from the first to the last, and on stage i backward n - (pp-1-i), which needs stage i+1's
        backward of the round before. Once all stages run backwards, the ends of a round are the whole state."""
        m, last = num_microbatches, pp - 1
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
                    moved = first - old[0]
                    if abs(final - old[-1] - moved) > tolerance or abs(state[odd_one] - old[odd_one] - moved) > tolerance:
                        continue
                    odd_one = next((i for i in range(pp) if abs(state[i] - old[i] - moved) > tolerance), -1)
                    if odd_one < 0:
                        periods = (end - n) // period
                        skipped = periods * moved
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
