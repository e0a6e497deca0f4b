"""Ends a hang: a thread of each rank sees that its main thread makes no progress, and names the rank that the others wait for.

Each rank says what it does (`phase`). When one phase lasts longer than its limit, the rank writes its stacks to its log (and NCCL's flight
recorder beside it), tells the others over the job's store what its main thread is in, and the first of them to say so collects the
reports, writes the verdict to OUT/logs/hang.json, and all ranks leave with HUNG_STATUS. It works while the main thread sits in a
collective, since it needs neither that thread nor a collective; a rank that can't even report is the first suspect.

The same thread looks for the file by which job.sbatch asks the ranks to save and end, where no signal of Slurm's reaches them.
"""

from __future__ import annotations

import _thread
import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

ASKED_VARIABLE = "ORCHESTRATOR_ASKED"
"""Environment variable with the path of a file that job.sbatch writes to ask the ranks to save after their step and end."""
HUNG_STATUS = 5
"""Exit status of every rank of a job that hung."""
POLLS = 8
"""Times that the clock is looked at before a limit is over."""
LONGEST_POLL_S = 5.0
GRACE_S = 8.0
"""Seconds that the ranks get to report after the first did: their clocks of progress differ by a micro-batch or so, and they look every 5
s."""
STORE_TIMEOUT = timedelta(seconds=10)
LAST_WORD_S = 4 * GRACE_S
"""Seconds after which a rank leaves without a verdict: the store hangs too, since the process that holds it does."""
NOT_WAITING = "working"
WAITING = "waiting for other ranks"
WAITS_IN = (
    f"torch{os.sep}distributed",
    f"torch{os.sep}cuda",
    f"pipeline_parallel{os.sep}p2p_communication",
    f"deepspeed{os.sep}comm",
)
"""Files whose functions wait for other ranks, or for a GPU that does."""
WAITS_FOR = {"synchronise", "item", "cpu", "tolist"}
"""Functions of ours or torch's in which a rank waits for its GPU."""


def host() -> str:
    """This node's name, as Slurm calls it."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def what_main_thread_does() -> tuple[str, str]:
    """(WAITING or NOT_WAITING, the frame that says so: `function (file:line)`), from the main thread's Python frames."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = traceback.extract_stack(frame) if frame else traceback.StackSummary()
    for entry in reversed(stack):
        if any(part in entry.filename for part in WAITS_IN) or entry.name in WAITS_FOR:
            return WAITING, f"{entry.name} ({Path(entry.filename).name}:{entry.lineno})"
    last = stack[-1] if stack else None
    return NOT_WAITING, f"{last.name} ({Path(last.filename).name}:{last.lineno})" if last else "?"


def suspect(reports: Sequence[dict[str, Any] | None]) -> int:
    """The rank that the others wait for: one that does not answer, then one that waits for nobody, then the one that is furthest behind.

    >>> suspect([{"does": WAITING, "progress": 7}, {"does": NOT_WAITING, "progress": 7}, {"does": WAITING, "progress": 6}])
    1
    >>> suspect([{"does": WAITING, "progress": 7}, None])
    1
    """

    def innocence(rank: int) -> tuple[bool, bool, int, int]:
        report = reports[rank]
        if report is None:
            return False, False, 0, rank
        return True, report["does"] == WAITING, int(report["progress"]), rank

    return min(range(len(reports)), key=innocence)


class Watchdog:
    """`with Watchdog(store, rank, world, out, limit_s) as watchdog: watchdog.phase("step 3: forward and backward")`.

    `limit_s`: seconds that a phase may last where it gives no limit of its own; 0: for ever. `store` must be safe to use beside the main
    thread (a clone).
    """

    def __init__(self, store: dist.Store, rank: int, world: int, out: Path, limit_s: float) -> None:
        self.store, self.rank, self.world, self.out, self.limit_s = store, rank, world, out, limit_s
        self.current: tuple[str, float, float] = ("starting", time.monotonic(), 0.0)
        self.progress = 0
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    @classmethod
    def beside(cls, store: dist.Store, rank: int, world: int, out: Path, limit_s: float) -> Watchdog:
        """A watchdog that uses a connection of its own to the job's store: the main thread may hang inside the other."""
        with contextlib.suppress(AttributeError, RuntimeError, NotImplementedError):
            store = store.clone()
        store.set_timeout(STORE_TIMEOUT)
        own = dist.PrefixStore("watchdog", store)
        own.set(f"host/{rank}", host())
        return cls(own, rank, world, out, limit_s)

    def __enter__(self) -> Watchdog:
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.done.set()
        self.thread.join(LONGEST_POLL_S)

    def phase(self, name: str, limit_s: float | None = None) -> None:
        """The main thread begins something that ends within `limit_s` seconds. One assignment: cheap enough for every micro-batch."""
        self.progress += 1
        self.current = (name, time.monotonic(), self.limit_s if limit_s is None else limit_s)

    def _watch(self) -> None:
        while True:
            _, since, limit = self.current
            poll = min(LONGEST_POLL_S, limit / POLLS) if limit else LONGEST_POLL_S / POLLS
            if self.done.wait(poll):
                return
            if os.path.exists(os.environ.get(ASKED_VARIABLE, "")):
                _thread.interrupt_main(signal.SIGUSR1)  # nothing happens before the main thread handles it, and once it does no more
            name, since, limit = self.current
            lasted = time.monotonic() - since
            if limit and lasted > limit:
                self._end(name, lasted)
                return

    def _report(self, name: str, lasted: float) -> dict[str, Any]:
        does, frame = what_main_thread_does()
        return {"rank": self.rank, "host": host(), "phase": name, "seconds": round(lasted, 1), "does": does, "in": frame,
                "progress": self.progress}  # fmt: skip

    def _end(self, name: str, lasted: float) -> None:
        """Report, dump, wait for the verdict, leave. Runs in the watchdog's thread; nothing may keep it from leaving."""
        last_word = threading.Timer(LAST_WORD_S, self._leave_without_verdict, (name, lasted))
        last_word.daemon = True
        last_word.start()
        try:
            report = self._report(name, lasted)
            self.store.set(f"hang/{self.rank}", json.dumps(report))
            first = self.store.add("hang/first", 1) == 1
            print(f"watchdog: {name} lasts {lasted:.0f} s: stacks of rank {self.rank} on {host()}", file=sys.stderr, flush=True)
            faulthandler.dump_traceback(all_threads=True)
            self._dump_nccl()
            if first:
                time.sleep(GRACE_S)
                said = self._verdict(report)
                self.store.set("hang/verdict", said)
            else:
                deadline = time.monotonic() + 2 * GRACE_S
                while not self.store.check(["hang/verdict"]) and time.monotonic() < deadline:
                    time.sleep(0.2)
                said = self.store.get("hang/verdict").decode() if self.store.check(["hang/verdict"]) else f"{name} lasts {lasted:.0f} s"
            print(f"StepTimeoutError: {said}", file=sys.stderr, flush=True)
            time.sleep(1.0)  # the others read the verdict from the store, which may live in a process that ends with this one
        except Exception as error:
            print(f"StepTimeoutError: {name} lasts {lasted:.0f} s ({type(error).__name__}: {error})", file=sys.stderr, flush=True)
        finally:
            sys.stderr.flush()
            os._exit(HUNG_STATUS)

    def _leave_without_verdict(self, name: str, lasted: float) -> None:
        said = f"{name}: no progress for {lasted:.0f} s, and the job's store does not answer"
        print(f"StepTimeoutError: {said}; suspect: rank 0, or the node that holds the store", file=sys.stderr, flush=True)
        os._exit(HUNG_STATUS)

    def _verdict(self, own: dict[str, Any]) -> str:
        """Collect what the ranks said, write hang.json; one line that names the suspect."""
        reports: list[dict[str, Any] | None] = []
        for rank in range(self.world):
            known = self.store.check([f"hang/{rank}"])
            reports.append(json.loads(self.store.get(f"hang/{rank}")) if known else None)
        index = suspect(reports)
        found = reports[index]
        if found is None:
            name, what = self._host_of(index), "does not answer: stopped, or stuck outside Python"
        else:
            name, what = str(found["host"]), f"is {found['does']}, in {found['in']}, at {found['phase']}"
        others = sum(report is not None and report["does"] == WAITING for rank, report in enumerate(reports) if rank != index)
        said = f"{own['phase']}: no progress for {own['seconds']:.0f} s; suspect: rank {index} on {name}, which {what}; "
        said += f"{others} of {self.world} ranks wait"
        verdict = {"status": HUNG_STATUS, "rank": index, "host": name, "said": said, "reports": reports}
        folder = self.out / "logs"
        folder.mkdir(exist_ok=True)
        partial = folder / "hang.json.partial"
        partial.write_text(json.dumps(verdict, indent=1) + "\n")
        partial.replace(folder / "hang.json")
        return said

    def _host_of(self, rank: int) -> str:
        key = f"host/{rank}"
        return self.store.get(key).decode() if self.store.check([key]) else "?"

    def _dump_nccl(self) -> None:
        """NCCL's flight recorder, where this process has one: the last collectives of each group (torch's fr_trace reads them)."""
        dump = getattr(__import__("torch")._C._distributed_c10d, "_dump_nccl_trace", None)
        if dump is None:
            return
        with contextlib.suppress(Exception):
            (self.out / "logs" / f"nccl_trace_rank_{self.rank}").write_bytes(dump())
