"""1F1B: Megatron's `forward_backward_pipelining_without_interleaving` (schedules.py:2093; arXiv 2104.04473, section 2.2.1): min(m,
pp - stage - 1) forwards of warm-up, then one forward, one backward. A stage frees what it has sent (deallocate_output_tensor).

A transfer blocks both of its sides until it is over: `P2PCommunicator._communicate` waits for every request of a call before it returns
(p2p_communication.py: wait_on_reqs, and torch.cuda.synchronize by batch_p2p_sync), and a send is over when the other side has received.
Between warm-up and drain an activation and the gradient of an earlier micro-batch cross a border in one such call, in both directions at
once. Only interleaving may overlap transfers (overlap_p2p_comm is refused here in 0.16 and 0.19).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from orchestrator.cost.schedule.order import Pass, Schedule
from orchestrator.cost.schedule.periods import RELATIVE_TOLERANCE


class OneFOneB(Schedule):
    """Megatron's 1F1B without virtual stages."""

    name = "1f1b"
    blocks = True

    def order(self, pp: int, stage: int, num_microbatches: int, vpp: int = 1) -> Iterator[Pass]:
        """The passes of Megatron's loop: an exchange is send_forward_recv_backward on the one side, send_backward_recv_forward on the
        other.

        >>> ", ".join(f"{action} {n}" for action, n, _ in OneFOneB().order(2, 0, 2))
        'forward 0, send_activation 0, forward 1, exchange_next 1, backward 0, receive_gradient 1, backward 1'
        """
        m, first, last = num_microbatches, stage == 0, stage == pp - 1
        warm_up = min(m, pp - stage - 1)
        for n in range(m):
            if not first and n <= warm_up:
                yield Pass("receive_activation", n)
            yield Pass("forward", n)
            if n < warm_up:
                yield Pass("send_activation", n)
                continue
            if not last:
                yield Pass("exchange_next", n)
            yield Pass("backward", n - warm_up)
            if not first:
                yield Pass("exchange_previous", n + 1) if n + 1 < m else Pass("send_gradient", n - warm_up)
        for n in range(m - warm_up, m):
            yield Pass("receive_gradient", n)
            yield Pass("backward", n)
            if not first:
                yield Pass("send_gradient", n)

    def transfers(self, pp: int, stage: int, num_microbatches: int) -> tuple[int, int]:
        """Transfers of a stage with the stage above and with the one below. Each of m micro-batches takes an activation and a gradient over
        a border, and all but those of the upper side's warm-up in one transfer.

        >>> OneFOneB().transfers(2, 0, 2), OneFOneB().transfers(4, 1, 8)
        ((0, 3), (11, 10))
        """
        m, behind = num_microbatches, pp - 1 - stage
        if self.half_duplex:
            return 2 * m * (stage > 0), 2 * m * (behind > 0)
        return (m + min(m, behind + 1)) * (stage > 0), (m + min(m, behind)) * (behind > 0)

    def telling(self, pp: int, num_microbatches: int) -> int:
        return min(num_microbatches, pp)

    def finish_times(
        self, forward: Sequence[float], backward: Sequence[float], hops: Sequence[float], num_microbatches: int, pp: int, *, jump: bool
    ) -> list[float]:
        """When the last pass of each stage ends, in seconds. Round n: forward n on every stage from the first to the last, and on stage i
        backward n - (pp-1-i). Between the two a stage meets the next one, which is through with its round before: forward n goes down, and
        that one's backward comes up. The clocks behind a round are the whole state."""
        m, last = num_microbatches, pp - 1
        clock = [0.0] * pp
        history: list[list[float]] = []
        odd_one = 0  # the stage that moved on unlike the others when that was last looked at
        n, end, skipped = 0, m, 0.0
        exchange = 2 if self.half_duplex else 1
        while n < end:
            done = clock[0]
            for i in range(last):
                done += forward[i]
                met = clock[i + 1]
                if met > done:  # noqa: PLR1730 - max() costs a call in the innermost loop
                    done = met
                if n + i >= last:
                    done += exchange * hops[i]
                    clock[i] = done + backward[i]
                else:
                    clock[i] = done = done + hops[i]
            clock[last] = done + forward[last] + backward[last]
            n += 1
            if jump and n >= pp:
                state = clock[:]
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
                        skipped += periods * moved
                        end -= periods * period
                        jump = False
                        break
                history.append(state)
        # From here on the rounds are counted as if nothing had been skipped: only the shift of the clock differs.
        for n in range(m, m + last):
            for i in range(last):
                if n + i >= last and n + i - last < m:
                    clock[i + 1] = done = max(clock[i], clock[i + 1]) + hops[i]
                    clock[i] = done + backward[i]
        return [time + skipped for time in clock]


class HalfDuplex1F1B(OneFOneB):
    """1F1B over gloo. A receiver tells the sender that it is ready (gloo/transport/tcp/pair.cc, sendNotifyRecvReady), and Megatron asks for
    the send of an exchange first (`_batched_p2p_ops`): the stage that comes later sends at once, as the other one is ready, and its own
    message of being ready goes behind those bytes. Measured over 8 Mbit/s and 5 ms (torch 2.13, two pairs of ranks, the second side .3 s
    later): .84 to .95 s where one direction takes .53, and .53 where both sides come at the same time."""

    name = "1f1b_half_duplex"
    half_duplex = True
