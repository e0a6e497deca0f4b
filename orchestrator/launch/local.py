"""Starts a job on this machine: runs its `launch.sh` (torchrun), follows the metrics, ends all ranks when one dies. On Ctrl-C they save and
end, on a second one they end.

The ranks get this process's environment and the job's (launch.sh exports it); three variables tell launch.sh what to do (PYTHON, NNODES,
RANKS_PER_NODE) and one marks the processes (RUN_VARIABLE), so that none is left behind. Nothing else is changed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any, Final, Literal

from msgspec.structs import replace

from orchestrator.errors import NO_ROOM, LaunchError
from orchestrator.job import RUN_VARIABLE, Job
from orchestrator.launch import program_metrics
from orchestrator.launch.render import SRUN_STYLE, STARTED, TRY_AGAIN
from orchestrator.values import Value

Row = dict[str, Any]

POLL_S = 0.1
"""Seconds between two looks at the ranks, as many as torchrun takes (its --monitor-interval)."""
GRACE_S = 10.0
"""Seconds that ranks get to end after SIGTERM before SIGKILL."""
REPORT_S = 3.0
"""Seconds that torchrun gets to end and report after its ranks were killed."""
LAST_WORDS_S = 1.0
"""Seconds that what is left once torchrun has ended gets to write its last output."""
TAIL_BYTES = 256 * 1024
"""Bytes of a log's end that are read for its last traceback."""
PR_SET_PDEATHSIG = 1
"""The prctl of linux/prctl.h that sets the signal a process gets when the thread that started it ends."""
FAILURE = re.compile(r"rank +: (\d+) \(local_rank: \d+\)\s+exitcode +: (-?\d+) \(pid: (\d+)\)")
"""One entry of torchrun's closing report (torch/distributed/elastic/multiprocessing/errors/__init__.py)."""
CLOSING = re.compile(r"Sending process (\d+) closing signal")
"""What torchrun logs for each rank that it ends after another one died (torch/distributed/elastic/multiprocessing/api.py)."""
DEEPSPEED_ENDS = re.compile(r"Killing subprocess \d+")
DEEPSPEED_CODE = re.compile(r"exits with return code = (-?\d+)")
"""What DeepSpeed's launcher logs when a rank has died: that it ends the others, and with what the first ended
(deepspeed/launcher/launch.py, sigkill_handler). It doesn't say which rank."""
DEAD = re.compile(f"{CLOSING.pattern}|{DEEPSPEED_ENDS.pattern}")
STARTED_ON = re.compile(r"^=== rank \d+ on (\S+), .* ===$", re.MULTILINE)
"""The line that launch.sh puts before the output of each start."""
JOB_STARTED = re.compile(r"^job \d+ on .*, restart \d+ of \d+$", re.MULTILINE)
"""The line that job.sbatch prints at each start; the log of a job that was requeued has several."""
TASK = re.compile(r"^srun: error: (\S+): tasks? ([\d,-]+): (.+)$", re.MULTILINE)
"""One message of srun about tasks that ended badly (slurm/src/srun/libsrun/launch.c, task_state)."""
RANK_PREFIX = re.compile(r"^\[rank\d+\]:(?: |$)")
"""What torch.distributed puts before each line of an uncaught traceback."""
SECONDARY = re.compile(
    r"connection (closed|reset|refused)|broken pipe|remote process exited|recv .* timed? ?out|TCPStore|ncclRemoteError", re.IGNORECASE
)
"""What a rank says when another one has died before it."""
CHAINED = re.compile(r"The above exception was the direct cause|During handling of the above exception")
"""Lines between the tracebacks of one exception (Lib/traceback.py)."""
NO_ROOM_SAID = re.compile(r"\S*(Error|Exception): .*(No space left on device|Disk quota exceeded|File too large)")
"""What a rank says for which there is no room to write (`errors.no_room`)."""
DISK_FULL: Final = "the disk is full"
"""How the cause of a run begins for which there was no room."""
CONSEQUENCE = re.compile(r"SignalException: Process \d+ got signal|ChildFailedError|KeyboardInterrupt")
"""How torchrun ends when it is ended, or when a rank has failed (torch/distributed/elastic/multiprocessing/api.py, errors/__init__.py)."""
PORT_TAKEN = re.compile(r"port: (\d+),.*EADDRINUSE")
"""What the store that the ranks meet at says when its port is taken (torch/csrc/distributed/c10d/socket.cpp)."""
CRASHED = re.compile(r'^Current thread .*\n  File "(.+)", line (\d+) in (\S+)$', re.MULTILINE)
"""What faulthandler writes of a process that ends by its own fault (Python/traceback.c); torch's error recorder turns it on."""
SAID_ERROR = re.compile(r"^[A-Z]\w*Error: .+")
"""How our programs end for a known cause, without a traceback (PreflightError)."""
OWN_ERROR = re.compile(r"^orchestrator(\.\w+)+: ")
"""The class that a traceback names before the words of an error of ours, which the user can act on."""
PREFLIGHT = "preflight: "
"""What rank 0 prints before each line of preflight's report (workers/runs.py)."""
HANG = Path("logs") / "hang.json"
"""The file that the watchdog of the workers writes when a rank hangs."""


class Outcome(Value, frozen=True, kw_only=True):
    """How a run ended. `last_line` of the traceback of the rank that failed first, and that rank's `log`; `exit_status` is its own
    (128 + signal where a signal ended it). `rows` are the lines of metrics.jsonl that this run wrote. Times are ISO 8601 in UTC.

    "stopped": the ranks saved and ended before the last step, as they were asked to; "requeued": Slurm starts the job again, and it goes on
    from its newest checkpoint. `host`: where the rank that failed ran, if known. `restarts`: how often Slurm had started the job again."""

    status: Literal["finished", "failed", "interrupted", "stopped", "requeued"]
    exit_status: int
    started: str
    ended: str
    last_line: str | None = None
    log: str | None = None
    rank: int | None = None
    rows: tuple[Row, ...] = ()
    host: str | None = None
    restarts: int = 0


class Metrics:
    """Follows a file of JSON lines that another process appends to. Lines that were there before are not reported; a run that resumes in
    its own folder first writes those that it keeps again, which are not reported again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known = set(path.read_bytes().splitlines()) if path.exists() else set()
        self.offset = 0
        self.last = b""
        """The end of what was read: where it has changed, the file was written anew."""

    def new_rows(self) -> list[Row]:
        """The complete lines since the last call; lines that are no JSON object are passed over."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self.offset - len(self.last))
            text = file.read()
            if not text.startswith(self.last):
                file.seek(0)
                text, self.offset, self.last = file.read(), 0, b""
        text = text[len(self.last) :]
        end = text.rfind(b"\n") + 1
        rows = []
        for line in text[:end].splitlines():
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict) and line not in self.known:
                    rows.append(row)
                    self.known.add(line)
        if end:
            self.offset += end
            self.last = text[:end].splitlines(keepends=True)[-1]
        return rows


class Steps:
    """The rows that a run writes to metrics.jsonl, of which `on_step` gets each. `own`: our worker's run, which writes them itself; another
    program's are made of what it prints."""

    def __init__(self, out: Path, on_step: Callable[[Row], None], *, own: bool) -> None:
        self.metrics, self.on_step = Metrics(out / "metrics.jsonl"), on_step
        self.printed = None if own else program_metrics.Follower(out)
        self.rows: list[Row] = []

    def follow(self, *, ended: bool = False) -> None:
        """Reads what is new; once the run has `ended`, to its last step."""
        if self.printed is not None:
            self.printed.poll(ended=ended)
        for row in self.metrics.new_rows():
            self.rows.append(row)
            self.on_step(row)


def by_step(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Steps that were taken again after a restart count once, as they were taken last.

    >>> by_step([{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.5}, {"step": 2, "loss": 2.0}])
    ({'step': 1, 'loss': 3.0}, {'step': 2, 'loss': 2.0})
    """
    found: dict[Any, Row] = {}
    for index, row in enumerate(rows):
        found[row.get("step", f"row {index}")] = row
    return tuple(found.values())


def _tail(path: Path) -> str:
    """The end of a log, from the last start of a rank in it."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        text = file.read().decode(errors="replace")
    return STARTED.split(text)[-1]


def _lines(log: str) -> list[str]:
    return [RANK_PREFIX.sub("", line).rstrip() for line in log.splitlines()]


def traceback_ends(log: str) -> list[str]:
    """What each traceback ends with, in order; the tracebacks of one exception (its causes first) count as one, and those that Python
    prints for exceptions that it ignores don't count.

    >>> traceback_ends("Traceback (most recent call last):\\n  File ...\\nValueError: no\\nwarning: leaked semaphore\\n")
    ['ValueError: no']
    """
    ends: list[str] = []
    inside = chained = ignored = False
    for line in _lines(log):
        if line.startswith("Traceback (most recent call last)"):
            inside = True
        elif inside and line and not line.startswith(" "):
            if chained:
                ends.pop()
            if not ignored:
                ends.append(line)
            inside = chained = ignored = False
        elif CHAINED.match(line):
            chained = bool(ends)
        elif line and not inside:
            ignored = line.startswith("Exception ignored in")
    return ends


def traceback_line(log: str) -> str | None:
    """The end of a rank's last traceback, as far as it doesn't only say that something else has ended before; None without one.

    >>> said = "Traceback (most recent call last):\\n  File ...\\n"
    >>> traceback_line(said + "KeyError: 'a'\\n" + said + "SignalException: Process 7 got signal: 15\\n")
    "KeyError: 'a'"
    """
    ends = traceback_ends(log)
    causes = [end for end in ends if not CONSEQUENCE.search(end) and not SECONDARY.search(end)]
    return next(reversed(causes or ends), None)


def last_line(log: str) -> str | None:
    """The line that says what went wrong: the end of the last traceback, or the last line that says anything.

    >>> last_line("Killed\\n\\n")
    'Killed'
    """
    said = [line.strip() for line in _lines(log) if line.strip()]
    return traceback_line(log) or (said[-1] if said else None)


def _log(out: Path, rank: int) -> Path:
    return out / "logs" / f"rank-{rank}.log"


def _order(out: Path, rank: int, code: int | None) -> tuple[bool, int]:
    """(whether a rank that ended with this code only complains of a lost peer, when its log ended): of several the least failed first."""
    log = _log(out, rank)
    secondary = code != -signal.SIGKILL and bool(SECONDARY.search(last_line(_tail(log)) or ""))
    return secondary, log.stat().st_mtime_ns if log.exists() else 0


def _first_failure(out: Path, report: str) -> tuple[int, int] | None:
    """(rank, exit code) of the rank that failed first among those in torchrun's report. Ranks that torchrun ended itself don't count;
    ranks that only complain of a lost peer come last; of the others it is the one whose log ended first."""
    closed = set(CLOSING.findall(report))
    entries = FAILURE.findall(report)
    failures = {int(rank): int(code) for rank, code, pid in entries if pid not in closed}

    first = min(failures, key=lambda rank: _order(out, rank, failures[rank]), default=None)
    return None if first is None else (first, failures[first])


class Failure(Value, frozen=True, kw_only=True):
    """What ended a run: exit status, what happened, the log that tells, and where known the rank and its host."""

    status: int
    said: str
    log: Path
    rank: int | None = None
    host: str | None = None

    def ending(self, outcome: Outcome) -> Outcome:
        """The outcome of a run that ended with this."""
        return replace(outcome, status="failed", exit_status=self.status, last_line=self.said, log=str(self.log), rank=self.rank,
                       host=self.host)  # fmt: skip


def hang(out: Path) -> Failure | None:
    """The watchdog's verdict (workers/watchdog.py); None where nothing hung."""
    try:
        written = json.loads((out / HANG).read_text())
        rank, host = int(written["rank"]), str(written["host"])
        return Failure(status=int(written["status"]), said=str(written["said"]), log=_log(out, rank), rank=rank, host=host)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def describe_failure(out: Path, launch_log: Path, returncode: int) -> Failure:
    """Why the run failed, from the watchdog's verdict, torchrun's or srun's report in `launch_log` and the ranks' logs; `returncode` is
    that of the script."""
    hung = hang(out)
    if hung is not None:
        return hung
    report = _tail(launch_log)
    report = report[max((start.start() for start in JOB_STARTED.finditer(report)), default=0) :]
    failure = _first_failure(out, report) or _first_task(out, report)
    if failure is None:
        return _of_deepspeed(out, launch_log, report) or _of_launcher(launch_log, report, returncode)
    rank, code = failure
    log = _log(out, rank)
    raised = traceback_line(_tail(log))
    if code < 0 and (raised is None or code == -signal.SIGKILL):
        return Failure(status=128 - code, said=_ended_by(code) + crashed_in(_tail(log)), log=log, rank=rank, host=_host(log))
    status = 128 - code if code < 0 else code  # gloo's threads abort a process that leaves with an exception
    said = raised or last_line(_tail(log)) or f"ended with status {code} and said nothing"
    return Failure(status=status, said=_advised(said), log=log, rank=rank, host=_host(log))


def of_full_disk(out: Path, failure: Failure) -> Failure:
    """The failure, as that of a full disk where it is one: a rank says so, or one that could not write its part of a checkpoint has no room
    for the rest of it (torch's own words, "[enforce fail at inline_container.cc", name no cause). A restart would meet it again."""
    if hang(out) is not None:
        return failure
    if NO_ROOM_SAID.match(failure.said):
        return replace(failure, status=NO_ROOM, said=f"{DISK_FULL}: {failure.said}")
    for log in sorted((out / "logs").glob("rank-*.log")) if failure.status == NO_ROOM else ():
        said = next(filter(NO_ROOM_SAID.match, _lines(_tail(log))), None)
        if said is not None:
            rank = int(log.stem.removeprefix("rank-"))
            return replace(failure, said=f"{DISK_FULL}: {said}", log=log, rank=rank, host=_host(log))
    if shutil.disk_usage(out).free < (_left_to_write(out) if failure.status == NO_ROOM else ROOM):
        return replace(failure, status=NO_ROOM, said=f"{DISK_FULL} ({out}); the last that was said is: {failure.said}")
    return failure


def _left_to_write(out: Path) -> int:
    """Bytes that the newest checkpoint still wants to be as large as the newest whole one, ROOM at least."""
    sizes = {True: 0, False: 0}
    for folder in sorted((out / "checkpoints").glob("*_*/"), key=lambda folder: folder.name):
        with contextlib.suppress(OSError):  # one that is being removed
            sizes[(folder / "latest.json").exists()] = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return max(ROOM, sizes[True] - sizes[False])


def crashed_in(log: str) -> str:
    """The place of the fault that ended a rank, as text to follow what ended it; "" where the log doesn't say.

    >>> said = 'Fatal Python error: Aborted\\n\\nCurrent thread 0x7f (most recent call first):\\n  File "/a/b.py", line 3 in step\\n'
    >>> crashed_in(said)
    ', in step (b.py:3)'
    """
    found = CRASHED.search(log)
    return f", in {found[3]} ({Path(found[1]).name}:{found[2]})" if found else ""


def _ended_by(code: int) -> str:
    hint = " (out of memory, or killed by someone)" if code == -signal.SIGKILL else ""
    return f"ended by {signal.Signals(-code).name}{hint}"


def _of_deepspeed(out: Path, launch_log: Path, report: str) -> Failure | None:
    """The failure of the first rank that raised something of its own under DeepSpeed's launcher; else that of the status it ended with.
    None for another launcher's report."""
    found = DEEPSPEED_CODE.search(report)
    if found is None:
        return None
    code = int(found.group(1))
    status = 128 - code if code < 0 else code
    for log in sorted((out / "logs").glob("rank-*.log"), key=lambda log: log.stat().st_mtime_ns):
        tail = _tail(log)
        raised = traceback_line(tail) or next(iter(SAID_ERROR.findall(last_line(tail) or "")), None)
        if raised is not None and not CONSEQUENCE.search(raised) and (not SECONDARY.search(raised) or PORT_TAKEN.search(raised)):
            rank = int(log.stem.removeprefix("rank-"))
            return Failure(status=status, said=_advised(raised), log=log, rank=rank, host=_host(log))
    said = f"a rank was {_ended_by(code)}" if code < 0 else f"a rank ended with status {code}; logs/rank-*.log have its last words"
    return Failure(status=status, said=said, log=launch_log)


def _of_launcher(launch_log: Path, report: str, returncode: int) -> Failure:
    """The failure where no rank failed: torchrun itself did, on one node, and srun ended it on the others. The first that failed says
    why."""
    status = 128 - returncode if returncode < 0 else returncode
    host = None
    for place, code, _ in _ended_tasks(report):
        if code is not None:
            host, status = place, 128 - code if code < 0 else code
            break
    ends = [end for end in traceback_ends(report) if not CONSEQUENCE.search(end)]
    causes = [end for end in ends if not SECONDARY.search(end) or PORT_TAKEN.search(end)]
    first = next(iter(causes or ends), None)
    if first is None and returncode < 0:
        first = f"torchrun was ended by {signal.Signals(-returncode).name}"
    said = first or last_line(report) or f"launch.sh ended with status {status}"
    return Failure(status=status, said=_advised(said), log=launch_log, host=host)


def _advised(said: str) -> str:
    """What was said, or, where something is to be done about it, that."""
    said = OWN_ERROR.sub("", said)
    taken = PORT_TAKEN.search(said)
    if taken is None:
        return said
    what = "start it again: job.sbatch looks for a free one; by hand, MASTER_PORT=N on every node chooses another"
    return f"the rendezvous port {taken.group(1)} on node 0 is taken by another program; {what}"


def _host(log: Path) -> str | None:
    """The host where the rank of this log was started last; None: the log doesn't say."""
    if not log.exists():
        return None
    found = STARTED_ON.findall(log.read_text(errors="replace"))
    return str(found[-1]) if found else None


def _ended_tasks(report: str) -> Iterator[tuple[str, int | None, list[int]]]:
    """(node, exit code, tasks) of srun's messages about tasks that ended badly, in order; None: a message of another kind."""
    for host, tasks, what in TASK.findall(report):
        exited = re.match(r"Exited with exit code (\d+)", what)
        number = next((n for n in signal.valid_signals() if what.startswith(str(signal.strsignal(n)))), None)
        code = int(exited.group(1)) if exited else -int(number) if number else None
        if code is not None and code - 128 in signal.valid_signals():  # as bash says what a signal has ended (on_a_node.sh)
            code = 128 - code
        yield host, code, [task for part in tasks.split(",") for task in range(int(part.split("-")[0]), int(part.split("-")[-1]) + 1)]


def _first_task(out: Path, report: str) -> tuple[int, int] | None:
    """(rank, exit code) of the rank that failed first by srun's messages, where srun starts the ranks themselves. Tasks that srun ended
    after it are Terminated in later lines; a rank that only complains of a lost peer may be named before the peer that was killed."""
    if SRUN_STYLE not in report:
        return None
    first = None
    for _, code, ranks in _ended_tasks(report.rsplit(SRUN_STYLE, 1)[-1]):
        if code is None or (first is not None and code == -signal.SIGTERM):
            continue
        secondary, _, rank = min((*_order(out, rank, code), rank) for rank in ranks)
        if not secondary:
            return rank, code
        first = first or (rank, code)
    return first


def processes_of(run: str) -> list[int]:
    """Ids of the processes that carry this run's mark in their environment, from /proc; empty where there is no /proc."""
    mark = f"{RUN_VARIABLE}={run}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return [pid for pid in found if pid != os.getpid()]


def _kill(run: str, spare: int | None = None) -> None:
    """Sends SIGKILL to every process of the run but `spare`, which may be torchrun."""
    for pid in processes_of(run):
        if pid != spare:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _end_leftovers(run: str) -> None:
    """Wait until the last output is written (rank 0's goes through a pipe), then end what is left."""
    deadline = time.monotonic() + LAST_WORDS_S
    while (left := processes_of(run)) and time.monotonic() < deadline:
        time.sleep(POLL_S / 10)
    if not left:
        return
    _kill(run)
    deadline += LAST_WORDS_S
    while processes_of(run) and time.monotonic() < deadline:  # SIGKILL takes a moment
        time.sleep(POLL_S / 10)


def ask_to_save(run: str) -> bool:
    """Sends SIGUSR1, on which ranks save after their step and end, to the processes of the run that listen to it, as /proc says; False
    where none does: the ranks have not begun to train, or their program knows no such signal."""
    asked = False
    for pid in processes_of(run):
        with contextlib.suppress(OSError):
            caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
            if caught and int(caught[1], 16) >> (signal.SIGUSR1 - 1) & 1:
                os.kill(pid, signal.SIGUSR1)
                asked = True
    return asked


def _end_with_parent() -> Callable[[], None] | None:
    """Run in the child before exec: it gets SIGTERM when this process is gone, kill -9 included; torchrun then ends its ranks.
    None where the system has no prctl."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def child() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(128 + signal.SIGTERM)

    return child


@contextlib.contextmanager
def _caught(signals: list[int], *more: signal.Signals) -> Iterator[None]:
    """While inside, SIGINT, SIGTERM, SIGHUP and `more` are noted in `signals` (only Python's main thread can do that)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(number: int, frame: FrameType | None) -> None:
        signals.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *more)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def start(
    job: Job,
    out: Path,
    *,
    on_step: Callable[[Row], None] = lambda row: None,
    enough: Callable[[], bool] = lambda: False,
    saving: Callable[[], None] | None = None,
    python: str = sys.executable,
    grace_s: float = GRACE_S,
) -> Outcome:
    """Run all ranks of the job on this machine until they end; `out` holds the job's files and launch.sh. Call it from the main thread.

    `on_step` gets each new row of metrics.jsonl. Ctrl-C, SIGTERM and SIGHUP end the ranks (SIGTERM, SIGKILL after `grace_s`; a second
    Ctrl-C at once) and come back as "interrupted". With `saving` the first of them, or SIGUSR1, asks ranks that train to save and end,
    and it is called; they come back as "stopped" (launch/stopped.py knows what was saved), and the second ends them. Once `enough`,
    which is asked often, says so, they are ended in the same way, and the run has "finished". Raises LaunchError where nothing could be
    started.
    """
    require_loopback()
    placement = {"PYTHON": python, "NNODES": "1", "RANKS_PER_NODE": str(job.world_size)}
    return run_script(out, "launch.sh", environment=placement, on_step=on_step, enough=enough, saving=saving, grace_s=grace_s,
                      own=job.program is None)  # fmt: skip


def require_loopback() -> None:
    """Ranks on one machine meet at 127.0.0.1. Raises LaunchError where nothing gets through there: they would wait in silence."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=LOOPBACK_S).close()
    except OSError as error:
        why = f"127.0.0.1 can't be reached on this machine ({error.strerror or error}), and ranks meet there; ip link set lo up"
        raise LaunchError(why) from None


def run_script(
    out: Path, script: str, *, environment: dict[str, str], on_step: Callable[[Row], None] = lambda row: None,
    enough: Callable[[], bool] = lambda: False, saving: Callable[[], None] | None = None, grace_s: float = GRACE_S, own: bool = True,
) -> Outcome:  # fmt: skip
    """Run a script of the folder, which starts torchrun, with these variables beside this process's; as `start` says. `own`: our worker,
    which writes its metrics; another program's are read from what it prints."""
    out = out.resolve()
    bash = shutil.which("bash")
    if bash is None:
        raise LaunchError("there is no bash on the PATH")
    if not (out / script).is_file():
        raise LaunchError(f"there is no {script} in {out}")
    try:
        (out / "logs").mkdir(exist_ok=True)
        (out / PARTIAL).write_text(" " * ROOM, encoding="utf-8")
    except OSError as error:
        raise LaunchError(f"{out} can't be written: {error.strerror}", NO_ROOM) from None
    (out / HANG).unlink(missing_ok=True)
    run = uuid.uuid4().hex
    launch_log = out / "logs" / "launch.log"
    steps = Steps(out, on_step, own=own)
    started = now()
    signals: list[int] = []
    try:
        with launch_log.open("wb") as log, _caught(signals, *((signal.SIGUSR1,) if saving else ())):
            process = subprocess.Popen(
                [bash, script],
                cwd=out,
                env={**os.environ, **environment, RUN_VARIABLE: run},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # rank 0's output, which is in its log
                stderr=log,
                start_new_session=True,
                preexec_fn=_end_with_parent(),  # noqa: PLW1509 (calls one function of the C library that is already loaded)
            )
            returncode, was_enough, was_asked = _supervise(process, launch_log, steps.follow, signals=signals, enough=enough, saving=saving,
                                                           grace_s=grace_s, run=run)  # fmt: skip
    finally:
        _end_leftovers(run)
    steps.follow(ended=True)
    outcome = Outcome(status="finished", exit_status=0, started=started, ended=now(), log=str(_log(out, 0)), rows=by_step(steps.rows))
    if was_asked and returncode == 0:
        return replace(outcome, status="stopped", exit_status=TRY_AGAIN, last_line="ended as asked, nothing saved")
    if len(signals) > was_asked:
        said = f"ended by {signal.Signals(signals[0]).name}"
        return replace(outcome, status="interrupted", exit_status=128 + signals[0], last_line=said, log=str(launch_log))
    if returncode == 0 or was_enough:
        return outcome
    return of_full_disk(out, describe_failure(out, launch_log, returncode)).ending(outcome)


PARTIAL: Final = "status.json.partial"
LOOPBACK_S: Final = 5.0
ROOM: Final = 1 << 16
"""Bytes that are kept for status.json while a run lasts: how it ended can be written on a full disk too."""


def now() -> str:
    """The time in UTC as ISO 8601, in whole seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _supervise(
    process: subprocess.Popen[bytes], launch_log: Path, follow: Callable[[], None], *, signals: list[int], enough: Callable[[], bool],
    saving: Callable[[], None] | None, grace_s: float, run: str,
) -> tuple[int, bool, bool]:  # fmt: skip
    """Wait for torchrun; returns its return code, whether it was `enough` before it ended, and whether ranks were asked to save.
    Ranks that live on `grace_s` after that, the first signal (those that save: the second), or torchrun's sight of a dead rank, are killed,
    at once on a second signal; torchrun gets REPORT_S more for its report."""
    deadline = float("inf")
    told = was_enough = was_asked = False
    while process.poll() is None:
        follow()
        clock = time.monotonic()
        dead = DEAD.search(_tail(launch_log)) is not None
        was_enough = was_enough or (not dead and enough())
        if len(signals) == 1 and saving is not None and not told and not was_asked and ask_to_save(run):
            was_asked = True
            saving()
        asked = len(signals) > was_asked or was_enough
        if (asked and not told) or dead:
            deadline = min(deadline, clock + grace_s)
        if asked and not told:
            process.terminate()
            told = True
        if len(signals) > 1:
            deadline = min(deadline, clock)
        if clock >= deadline:
            _kill(run, spare=process.pid if clock < deadline + REPORT_S else None)
        _await(process, POLL_S)
    return process.wait(), was_enough, was_asked


def _await(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Waits until the process ends, `seconds` at most. Popen.wait with a limit looks only every 50 ms; Linux tells at once
    (pidfd_open(2))."""
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError):  # it is gone, or a kernel before 5.3
            descriptor = os.pidfd_open(process.pid)
            try:
                select.select([descriptor], [], [], seconds)
            finally:
                os.close(descriptor)
            return
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def preflight_notes(out: Path) -> list[str]:
    """What preflight found slower than planned in the last start (workers/preflight.py, bandwidth_report), a line a group."""
    log = _log(out, 0)
    last = STARTED.split(log.read_text(errors="replace"))[-1] if log.exists() else ""
    return [line.removeprefix(PREFLIGHT) for line in last.splitlines() if line.startswith(PREFLIGHT)]


def write_status(
    out: Path,
    outcome: Outcome,
    *,
    predicted_step_time_s: float | None = None,
    measured_step_time_s: float | None = None,
    after: Sequence[str] = (),
) -> None:
    """`status.json`: how the run ended, whole or not at all. `after`: where its step went, in words."""
    last = outcome.rows[-1] if outcome.rows else {}
    status = {
        "status": outcome.status,
        "exit_status": outcome.exit_status,
        "started": outcome.started,
        "ended": outcome.ended,
        "steps": len(outcome.rows),
        "last_loss": last.get("loss"),
        "error": None if outcome.status == "finished" else outcome.last_line,
        "failed_rank": outcome.rank,
        "failed_host": outcome.host,
        "restarts": outcome.restarts,
        "log": outcome.log,
        "preflight": preflight_notes(out),
        "predicted_step_time_s": predicted_step_time_s,
        "measured_step_time_s": measured_step_time_s,
        "after": list(after),
    }
    partial = out / PARTIAL
    with partial.open("r+" if partial.exists() else "w", encoding="utf-8") as file:  # into the room that was kept for it
        file.write(json.dumps(status, indent=1) + "\n")
        file.truncate()
    partial.replace(out / "status.json")
