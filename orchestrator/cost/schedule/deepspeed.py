"""DeepSpeed's pipeline: TrainSchedule (runtime/pipe/schedule.py:189) orders a stage's passes as 1F1B does, in steps in which every second
stage runs forward and the others backward. Between two steps neighbours exchange a gradient, then an activation, by send and recv that wait
for each other (runtime/pipe/p2p.py:46,69): nothing runs beside a transfer, and both sides start when the later is there.

A stage keeps its output until its backward (pipe_buffers["outputs"]) and its input, of which the layers get a copy
(runtime/pipe/engine.py, _exec_forward_pass). Its one buffer more on the last stage is emptied by ours (workers/deepspeed_pipeline.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from orchestrator.cost.schedule.order import Pass, Schedule
from orchestrator.cost.schedule.periods import shift


class DeepSpeed1F1B(Schedule):
    """DeepSpeed's TrainSchedule as a schedule: orders, transfers and times of its passes."""

    name = "deepspeed_1f1b"
    blocks = True
    half_duplex = True
    keeps_borders = True

    def order(self, pp: int, stage: int, num_microbatches: int, vpp: int = 1) -> Iterator[Pass]:
        """The passes of TrainSchedule.steps: before each pass the transfers of the step.

        >>> ", ".join(f"{action} {n}" for action, n, _ in DeepSpeed1F1B().order(2, 1, 1))
        'receive_activation 0, forward 0, backward 0, send_gradient 0'
        """
        m = num_microbatches
        before = -1
        for step in range(2 * (m + pp - 1)):
            forward = step % 2 == stage % 2
            if forward:
                n = step // 2 - stage // 2
                if 0 <= before < m and stage > 0:
                    yield Pass("send_gradient", before)
                if 0 <= n < m and stage > 0:
                    yield Pass("receive_activation", n)
                if 0 <= n < m:
                    yield Pass("forward", n)
            else:
                n = step // 2 - (pp - 1) + stage // 2
                if 0 <= n < m and stage < pp - 1:
                    yield Pass("receive_gradient", n)
                if 0 <= before < m and stage < pp - 1:
                    yield Pass("send_activation", before)
                if 0 <= n < m:
                    yield Pass("backward", n)
            before = n

    def transfers(self, pp: int, stage: int, num_microbatches: int) -> tuple[int, int]:
        """An activation and a gradient of each micro-batch, one after the other.

        >>> DeepSpeed1F1B().transfers(2, 0, 4)
        (0, 8)
        """
        return 2 * num_microbatches * (stage > 0), 2 * num_microbatches * (stage < pp - 1)

    def telling(self, pp: int, num_microbatches: int) -> int:
        return min(num_microbatches, pp)

    def finish_times(
        self, forward: Sequence[float], backward: Sequence[float], hops: Sequence[float], num_microbatches: int, pp: int, *, jump: bool
    ) -> list[float]:
        """When the last pass of each stage ends, in seconds. Step k: stages of its parity run forward (micro-batch k//2 - s//2), the others
        backward (k//2 - (pp-1) + s//2). Before it, each of the others meets the stage behind it: that one's last gradient goes up, its own
        last activation down."""
        clock = [0.0] * pp
        history: list[list[float]] = []
        step, end, skipped = 0, num_microbatches, 0.0
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
                    later = shift(clock, history[-period])
                    if later is not None:
                        periods = (2 * end - 2 - step) // (2 * period)
                        skipped += periods * later
                        end -= periods * period
                        jump = False
                        break
                history.append(clock[:])
        return [time + skipped for time in clock]
