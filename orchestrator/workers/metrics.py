"""What a run says of its steps: metrics.jsonl, what the ranks agree on in it, and which numbers end the training."""

from __future__ import annotations

import json
import math
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

from orchestrator.plan import Plan
from orchestrator.workers import distributed
from orchestrator.workers.groups import REPLICAS, Groups
from orchestrator.workers.saving import limit_s
from orchestrator.workers.step_timers import StepTimers, timed_steps
from orchestrator.workers.watchdog import Watchdog

METRICS = "metrics.jsonl"


class NonFiniteLossError(Exception):
    """Raised where the loss or the gradient norm is NaN or infinite."""


def peak_memory(device: torch.device) -> int:
    """Bytes of the allocator's peak on a GPU, or of the process' resident peak on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return host_peak()


def host_peak() -> int:
    """Bytes of host memory that this program has had at most. getrusage's, which on Linux keeps through exec what the process had that
    started it, only where the kernel doesn't say."""
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.is_file() else ():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def agree(loss: torch.Tensor | None, groups: Groups | None, device: torch.device, stop: bool) -> tuple[float, int, bool]:
    """(loss of the global batch, largest peak memory, whether a rank wants to stop), the same on every rank, in one small all-reduce.
    `groups`: None where `loss` is the mean over all replicas already.

    Maxima: the loss is known on the last stage alone, and a NaN is told by a flag, since a maximum may hide it.
    """
    values = torch.tensor([-math.inf, 0.0, peak_memory(device), stop], dtype=torch.float64, device=device)
    if loss is not None:
        mean = loss.detach().double()
        if groups is not None:
            groups.mean(REPLICAS, mean)
        finite = torch.isfinite(mean)
        values[0] = torch.where(finite, mean, values[0])
        values[1] = (~finite).double()
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    common = values.tolist()
    return (math.nan if common[1] else common[0]), int(common[2]), bool(common[3])


def norm_is_usable(grad_norm: float | None, precision: str) -> bool:
    """Whether training can go on from this gradient norm; DeepSpeed says -1 for one that is no number. In fp16 such steps are left out, and
    the loss scale is lowered: they belong to it."""
    return precision == "fp16" or grad_norm is None or (math.isfinite(grad_norm) and grad_norm >= 0)


def finite(value: float | None) -> float | None:
    """The value; None, which JSON has for it, where it is no number."""
    return value if value is not None and math.isfinite(value) else None


def row(plan: Plan, step: int, loss: float, grad_norm: float | None, lr: float, seconds: float, peak: float) -> dict[str, Any]:
    """The row of metrics.jsonl of a step. Raises NonFiniteLossError where the training can't go on from its loss and gradient norm."""
    training = plan.training
    if not (math.isfinite(loss) and norm_is_usable(grad_norm, training.precision)):
        numbers = f"loss {loss:g}, gradient norm {grad_norm}, lr {lr:g}"
        raise NonFiniteLossError(f"step {step}: {numbers}; nothing was saved in this step")
    tokens = plan.global_batch_size * (training.seq_length + (training.decoder_seq_length or 0))
    return {"step": step, "loss": loss, "grad_norm": finite(grad_norm), "lr": lr, "step_time_s": seconds,
            "tokens_per_s": tokens / seconds, "peak_memory_bytes": int(peak)}  # fmt: skip


class Rows:
    """OUT/metrics.jsonl, one flushed line a step, written by rank 0, and OUT/timers.jsonl. A run that resumes in its own folder keeps the
    lines before. The last step's row waits: its evaluation may follow. `warned`: whether SIGUSR1 on any rank, Slurm's warning before the
    time limit, shall be known to all (`stops`)."""

    def __init__(self, plan: Plan, device: torch.device, out: Path, watchdog: Watchdog | None, *, warned: bool = False) -> None:
        self.plan, self.device, self.out, self.watchdog = plan, device, out, watchdog
        self.begun: float | None = None
        self.file: IO[str] | None = None
        self.timers = StepTimers(plan, device, out, peak_memory)
        self.row: dict[str, Any] = {}
        """The row that waits."""
        self.seconds, self.peak, self.stops = 0.0, 0, False
        """The step that has ended: how long it took, the largest peak memory, and whether a rank was warned."""
        self._heeds = warned
        self._warnings: list[int] = []

    def phase(self, name: str, limit_s: float | None = None) -> None:
        """Tells the watchdog what begins, and how long it may last where the plan has a limit."""
        if self.watchdog is not None:
            self.watchdog.phase(name, limit_s if limit_s is None or self.plan.run.step_timeout_s else 0.0)

    def begin(self, done: int) -> None:
        """A step begins, behind so many."""
        self.write()
        if self.begun is None:
            self._open(done)
        self.timers.begin(done)
        self.phase(f"step {done + 1}")
        self.begun = time.perf_counter()

    def _open(self, done: int) -> None:
        if self._heeds:
            signal.signal(signal.SIGUSR1, lambda signum, frame: self._warnings.append(signum))
        if dist.get_rank() == 0:
            path = self.out / METRICS
            lines = path.read_text().splitlines() if path.exists() else []
            path.write_text("".join(line + "\n" for line in lines if json.loads(line)["step"] <= done))
            self.file = path.open("a")
        if self.plan.run.step_timers:
            self.timers.look_at(timed_steps(done, self.plan.training.steps))

    def end(self, done: int, loss: torch.Tensor | None, groups: Groups | None = None) -> float:
        """A step, by which so many are done, has ended on this rank. The ranks agree on its numbers, of which the loss is returned, by
        `agree`. What follows may last as long as an evaluation and a checkpoint."""
        distributed.synchronise(self.device)
        self.timers.phase("agree")
        mean, self.peak, self.stops = agree(loss, groups, self.device, bool(self._warnings))
        self.seconds, run = time.perf_counter() - (self.begun or 0.0), self.plan.run
        self.timers.end(done - 1)
        evaluation = run.step_timeout_s * (run.eval_steps if run.eval_every else 0)
        self.phase(f"step {done}: evaluation and checkpoint", limit_s(self.plan) + evaluation)
        return mean

    def keep(self, step: int, loss: float, grad_norm: float | None, lr: float) -> None:
        """The row of the step that has ended waits from now on. Raises NonFiniteLossError where the training can't go on from it."""
        self.row = row(self.plan, step, loss, grad_norm, lr, self.seconds, self.peak)

    def timed(self, function: Callable[..., Any], part: str, after: str | None = None) -> Callable[..., Any]:
        """The function, whose call begins this part of a step for the timers, and whose end the one after."""

        def run(*words: Any, **more: Any) -> Any:
            self.timers.phase(part)
            result = function(*words, **more)
            if after is not None:
                self.timers.phase(after)
            return result

        return run

    def exports(self, done: int) -> Path | None:
        """Where the weights are exported to behind so many steps; None: nowhere, or there are more to come."""
        if not self.plan.run.export_to or done < self.plan.training.steps:
            return None
        self.phase("export", limit_s(self.plan))
        return Path(self.plan.run.export_to)

    def write(self) -> None:
        """Writes the row that waits, if there is one."""
        row, self.row = self.row, {}
        if row and self.file is not None:
            self.file.write(json.dumps(row) + "\n")
            self.file.flush()

    def close(self) -> None:
        """Writes the row that waits and closes metrics.jsonl. A reminder of the time limit would end Python in its last moments, when it
        has no handlers any more."""
        self.write()
        if self.file is not None:
            self.file.close()
        if self._heeds:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
