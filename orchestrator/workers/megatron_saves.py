"""The checkpoints that Megatron's own training loop writes: what they have beside Megatron's (digests, the run's marker, an end where a
process that writes is killed), and from which a run goes on. Needs nothing of Megatron's."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from orchestrator.errors import NO_ROOM, InputError
from orchestrator.plan import Plan
from orchestrator.workers import checkpoint, distributed, saving

POLL_S: Final = 0.2
ASKED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that end a whole job, its writers with it."""
ITERATION: Final = "iter_"
TRACKER: Final = "latest_checkpointed_iteration.txt"
"""Names that Megatron's checkpoints have (training/checkpointing.py, get_checkpoint_name and get_checkpoint_tracker_filename)."""


def own_checkpoint(out: Path) -> Path | None:
    """The newest checkpoint of the run in this folder that Megatron has finished; None: there is none."""
    try:
        return out / checkpoint.FOLDER / f"{ITERATION}{int((out / checkpoint.FOLDER / TRACKER).read_text()):07d}"
    except (OSError, ValueError):
        return None


def step_of(folder: Path) -> int:
    """How many steps were done when this checkpoint was written."""
    return int(folder.name.removeprefix(ITERATION))


def _children() -> set[BaseProcess]:
    """The processes that this one has started; `multiprocessing.active_children()` forgets those that have ended before it answers."""
    return set(getattr(multiprocessing.process, "_children"))  # noqa: B009


class Writers:
    """The processes by which megatron-core writes this rank's checkpoints. It waits for ever for one that is killed, which an out-of-memory
    killer does first: in the save itself where it forks them (0.16, dist_checkpointing/strategies/filesystem_async.py:308), in a later one
    where one process writes beside the training (0.19, async_utils.py:426)."""

    def __init__(self, out: Path) -> None:
        self.out, self.step = out, 0
        self.others: set[BaseProcess] = set()
        """What runs beside the save that is under way, and is not of it: data loaders."""
        self.seen: set[BaseProcess] = set()
        self.is_saving = False
        self.lock = threading.Lock()
        self.thread = threading.Thread(target=self._watch, name="writers", daemon=True)

    @contextmanager
    def of(self, step: int) -> Iterator[None]:
        """The processes that start in here write the checkpoint of this step. One that is killed, in here or later, ends this rank."""
        with self.lock:
            self.others = _children() - self.seen
            self.step, self.is_saving = step, True
        if not self.thread.is_alive():
            self.thread.start()
        try:
            yield
        finally:
            self._look()
            self.is_saving = False

    def _look(self) -> int | None:
        """Notes the processes that have come; the signal that killed one, None: they write, or have written."""
        with self.lock:
            if self.is_saving:
                self.seen |= _children() - self.others
            codes = {process: process.exitcode for process in self.seen}
            self.seen = {process for process, code in codes.items() if code is None or code < 0}
        return next((-code for code in codes.values() if code is not None and code < 0 and -code not in ASKED), None)

    def _watch(self) -> None:
        while True:
            time.sleep(POLL_S)
            number = self._look()
            if number is not None and not distributed.LEAVING.is_set():
                why = RuntimeError(f"a process that writes it for this rank was ended by signal {number} ({signal.strsignal(number)})")
                print(f"CheckpointError: {saving.failed(self.step, self.out, why)}", file=sys.stderr, flush=True)
                distributed.leave(NO_ROOM)


class Saves:
    """The checkpoints of a run that Megatron's loop writes, perhaps beside the training."""

    def __init__(self, plan: Plan, out: Path) -> None:
        self.plan, self.out, self.writers = plan, out, Writers(out)
        self.listed: Path | None = None
        """The newest checkpoint of which this rank has written its files' digests."""
        self.unmarked: list[Path] = []
        """Finished checkpoints, on rank 0, of which other ranks may not have written digests yet: the run's marker waits."""
        self.saving = 0
        """How many Megatron writes."""

    def resumed(self) -> list[str]:
        """Arguments that name the checkpoint of train.resume=, where this run has none of its own yet; Megatron's marker is moved to the
        newest of its own that is whole. All ranks call this. Raises InputError, also for a checkpoint that is not as it was written."""
        own = own_checkpoint(self.out)
        if own is not None:
            whole = checkpoint.newest_whole(own.parent, step_of(own), ITERATION)
            if dist.get_rank() == 0 and whole != own:
                (own.parent / TRACKER).write_text(str(step_of(whole)))
            dist.barrier()
            self.listed = whole
        if own is not None or self.plan.run.resume is None:
            return []
        saved = checkpoint.find(self.plan.run.resume)
        if not saved.folder.name.startswith(ITERATION):
            why = "was not written by Megatron's own training loop: program=instrument continues it"
            raise InputError("train.resume", saved.folder, why)
        checkpoint.require_as_written(saved)
        # The plan has the schedule: a user may change it on purpose (train.change=).
        return ["--load", str(saved.folder.parent), "--ckpt-step", str(saved.step), "--override-opt_param-scheduler"]

    def source(self) -> Path | None:
        """The checkpoint that Megatron goes on from; None: it begins."""
        own, resume = own_checkpoint(self.out), self.plan.run.resume
        return own if own is not None or resume is None else checkpoint.find(resume).folder

    @contextmanager
    def of(self, step: int) -> Iterator[None]:
        """Around Megatron's writing the checkpoint of this step. Raises CheckpointError."""
        try:
            with self.writers.of(step):
                yield
            self.saving += 1
        except (Exception, CheckpointException) as error:
            raise saving.failed(step, self.out, error) from error

    def mark(self, folder: Path | None = None) -> None:
        """Where Megatron has finished a checkpoint (`folder`, or what its marker names): the digests of this rank's files; and where all
        ranks' are there, the run's marker."""
        folder = folder or (own_checkpoint(self.out) if self.saving else None)
        if folder is not None and folder != self.listed:
            checkpoint.write_digests(folder)
            self.listed, self.saving = folder, self.saving - 1
            self.unmarked += [folder] if dist.get_rank() == 0 else []
        for each in tuple(self.unmarked):
            if len(checkpoint.parts(each)) == self.plan.world_size:
                checkpoint.complete(each, step_of(each), self.plan)
                self.unmarked = self.unmarked[self.unmarked.index(each) + 1 :]

    def close(self) -> None:
        """Marks the last checkpoint, once the training is done. All ranks call this."""
        newest: list[Any] = [own_checkpoint(self.out)]
        dist.broadcast_object_list(newest)
        self.mark(newest[0])
        dist.barrier()
        self.mark()
