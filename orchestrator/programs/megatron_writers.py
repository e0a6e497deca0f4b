"""Ends a rank whose checkpoint waits for a process that is gone."""

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
from typing import Final

from orchestrator.errors import NO_ROOM
from orchestrator.workers import distributed, saving

POLL_S: Final = 0.2
ASKED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that end a whole job, its writers with it."""


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
