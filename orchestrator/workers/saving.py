"""Checkpoints: written while the training waits, or beside it from a copy in host memory. Whole or not at all either way: the marker moves
when all ranks have written (checkpoint.py)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from orchestrator.plan import Plan
from orchestrator.plan.check import workload_of
from orchestrator.workers import checkpoint

STATE_BYTES = 14
"""Bytes of a parameter in a checkpoint at most: 16-bit weights with fp32 ones and Adam's two moments beside (ZeRO, arXiv 1910.02054)."""
SLOWEST = 200e6
"""Bytes that a node writes and reads again in a second at least: a file system that several share over 10 Gbit/s."""


def limit_s(plan: Plan) -> float:
    """Seconds after which writing a checkpoint or an export of this plan has hung: those that any part of a step may last
    (train.step_timeout_s), and what a slow file system takes for the states that a node writes; 0: never."""
    if not plan.run.step_timeout_s:
        return 0.0
    writers = plan.world_size if plan.zero_stage else plan.world_size // plan.dp  # without ZeRO each copy has all, and one writes
    nodes = -(-writers // plan.cluster.gpus_per_node)
    return plan.run.step_timeout_s + STATE_BYTES * workload_of(plan).model.parameters / nodes / SLOWEST


class CheckpointError(Exception):
    """A checkpoint could not be written: the disk is full, say. Those before it are as they were."""


@dataclass(frozen=True)
class Snapshot:
    """What is left to do once the state has been copied. `write` touches neither the model nor other ranks: it may run in a thread beside
    the training. `finish` is collective, after `write` is done on all ranks."""

    write: Callable[[], None] = lambda: None
    finish: Callable[[], None] = lambda: None


class Saver(Protocol):
    """The part of a `Trainer` that saves."""

    plan: Plan
    device: torch.device

    def snapshot(self, folder: Path, step: int) -> Snapshot:
        """A checkpoint, of which what is left to write has copies of the state: it may be written beside the training. Collective."""
        ...


def failed(step: int, out: Path, error: BaseException) -> CheckpointError:
    # torch's holds the tracebacks of the ranks that failed: the last line says why.
    said = next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
    return CheckpointError(f"step {step}: the checkpoint can't be written: {said}; {checkpoint.newest(out)}")


class Save:
    """One checkpoint, written by a thread of its own: begun after `step` steps; `poll` after each step that follows commits it once all
    ranks have written, `wait` at once. Raises CheckpointError from any of them, on all ranks alike."""

    def __init__(self, trainer: Saver, out: Path, step: int) -> None:
        self.trainer, self.out, self.step, self.thread = trainer, out, step, ThreadPoolExecutor(1, f"checkpoint of step {step}")
        self.written = False
        """Whether all ranks have written: what is left is the digests of what they wrote."""
        try:
            self.folder = checkpoint.begin(out, step)
            self.snapshot = trainer.snapshot(self.folder, step)
        except (Exception, CheckpointException) as error:
            raise failed(step, out, error) from error
        self.work = self.thread.submit(self.snapshot.write)

    def poll(self) -> bool:
        """Whether it is whole now. Collective."""
        is_done = self.work.done()
        error = self.work.exception() if is_done else None
        state = torch.tensor([not is_done, error is not None], dtype=torch.int32, device=self.trainer.device)
        dist.all_reduce(state, op=dist.ReduceOp.MAX)
        writing, lost = state.tolist()
        if writing:
            return False
        if lost:
            raise failed(self.step, self.out, error or OSError("another rank could not write its part")) from error
        try:
            if not self.written:
                self.written = True
                self.snapshot.finish()
                self.work = self.thread.submit(checkpoint.write_digests, self.folder)
                return False
            checkpoint.commit(self.folder, self.step, self.trainer.plan)
        except (Exception, CheckpointException) as error:
            raise failed(self.step, self.out, error) from error
        return True

    def wait(self) -> None:
        """Waits until the checkpoint is whole. Collective."""
        done = False
        while not done:
            futures.wait([self.work])
            done = self.poll()


class Saves:
    """The checkpoints of a run, one after the other, beside the training with train.async_save. Each method is collective, and raises
    CheckpointError."""

    def __init__(self, plan: Plan, out: Path) -> None:
        self.beside_training, self.out = plan.run.async_save, out
        self.running: Save | None = None

    def save(self, trainer: Saver, step: int) -> None:
        """Writes the state after `step` steps, or begins to."""
        self.wait()
        self.running = Save(trainer, self.out, step)
        if not self.beside_training:
            self.wait()

    def poll(self) -> None:
        """Ends what has been written beside the training; called after each step."""
        if self.running is not None and self.running.poll():
            self.running = None

    def wait(self) -> None:
        """Waits until the last is whole."""
        if self.running is not None:
            self.running.wait()
        self.running = None
