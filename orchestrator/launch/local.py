"""Starts a job on this machine: runs its `launch.sh` (torchrun), follows the metrics, ends all ranks when one dies or on Ctrl-C.

The ranks get this process's environment and the job's (launch.sh exports it); three variables tell launch.sh what to do (PYTHON, NNODES,
RANKS_PER_NODE) and one marks the processes (RUN_VARIABLE), so that none is left behind. Nothing else is changed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from orchestrator.errors import LaunchError
from orchestrator.job import Job
from orchestrator.launch.render import RUN_VARIABLE
from orchestrator.values import Value

Row = dict[str, Any]

POLL_S = 0.1
"""As often as torchrun looks at its ranks (its --monitor-interval)."""
GRACE_S = 10.0
"""What ranks get to end after SIGTERM before SIGKILL."""
REPORT_S = 3.0
"""What torchrun gets to end and report after its ranks were killed."""
LAST_WORDS_S = 1.0
"""What is left once torchrun has ended gets this long to write its last output."""
TAIL_BYTES = 256 * 1024
"""How much of a log's end is read for its last traceback."""
PR_SET_PDEATHSIG = 1
"""linux/prctl.h: the signal a process gets when the thread that started it ends."""
FAILURE = re.compile(r"rank +: (\d+) \(local_rank: \d+\)\s+exitcode +: (-?\d+) \(pid: (\d+)\)")
"""One entry of torchrun's closing report (torch/distributed/elastic/multiprocessing/errors/__init__.py)."""
CLOSING = re.compile(r"Sending process (\d+) closing signal")
"""torchrun logs this for each rank that it ends after another one died (torch/distributed/elastic/multiprocessing/api.py)."""
STARTED = re.compile(r"^=== rank \d+ on .* ===$\n?", re.MULTILINE)
"""launch.sh puts this before the output of each start."""
RANK_PREFIX = re.compile(r"^\[rank\d+\]:(?: |$)")
"""torch.distributed puts this before each line of an uncaught traceback."""
SECONDARY = re.compile(
    r"connection (closed|reset|refused)|broken pipe|remote process exited|recv .* timed? ?out|TCPStore|ncclRemoteError", re.IGNORECASE
)
"""What a rank says when another one has died before it."""


class Outcome(Value, frozen=True, kw_only=True):
    """How a run ended. `last_line` of the traceback of the rank that failed first, and that rank's `log`; `exit_status` is its own
    (128 + signal where a signal ended it). `rows` are the lines of metrics.jsonl that this run wrote. Times are ISO 8601 in UTC."""

    status: Literal["finished", "failed", "interrupted"]
    exit_status: int
    started: str
    ended: str
    last_line: str | None = None
    log: str | None = None
    rank: int | None = None
    rows: tuple[Row, ...] = ()


class Metrics:
    """Follows a file of JSON lines that another process appends to. Lines that were there before are not reported; a run that resumes in
    its own folder first writes those that it keeps again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.before = frozenset(path.read_bytes().splitlines()) if path.exists() else frozenset()
        self.offset = 0

    def new_rows(self) -> list[Row]:
        """The complete lines since the last call; lines that are no JSON object are passed over."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self.offset)
            text = file.read()
        end = text.rfind(b"\n") + 1
        rows = []
        for line in text[:end].splitlines():
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict) and line not in self.before:
                    rows.append(row)
        if rows or not self.before:  # from its first new line on, the file only grows
            self.offset += end
        return rows


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


def traceback_line(log: str) -> str | None:
    """The end of the last traceback; None without one.

    >>> traceback_line("start\\nTraceback (most recent call last):\\n  File ...\\nValueError: no\\nwarning: leaked semaphore\\n")
    'ValueError: no'
    """
    lines = _lines(log)
    starts = [index for index, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    return next((line for line in lines[starts[-1] + 1 :] if line and not line.startswith(" ")), None) if starts else None


def last_line(log: str) -> str | None:
    """The line that says what went wrong: the end of the last traceback, or the last line that says anything.

    >>> last_line("Killed\\n\\n")
    'Killed'
    """
    said = [line.strip() for line in _lines(log) if line.strip()]
    return traceback_line(log) or (said[-1] if said else None)


def _log(out: Path, rank: int) -> Path:
    return out / "logs" / f"rank-{rank}.log"


def _first_failure(out: Path, report: str) -> tuple[int, int] | None:
    """(rank, exit code) of the rank that failed first among those in torchrun's report. Ranks that torchrun ended itself don't count;
    ranks that only complain of a lost peer come last; of the others it is the one whose log ended first."""
    closed = set(CLOSING.findall(report))
    entries = FAILURE.findall(report)
    failures = {int(rank): int(code) for rank, code, pid in entries if pid not in closed}

    def order(rank: int) -> tuple[bool, int]:
        log = _log(out, rank)
        killed = failures[rank] == -signal.SIGKILL
        secondary = not killed and bool(SECONDARY.search(last_line(_tail(log)) or ""))
        return secondary, log.stat().st_mtime_ns if log.exists() else 0

    first = min(failures, key=order, default=None)
    return None if first is None else (first, failures[first])


def describe_failure(out: Path, launch_log: Path, returncode: int) -> tuple[int, str, Path, int | None]:
    """(exit status, what happened, log, rank) from torchrun's report in `launch_log` and the ranks' logs; `returncode` is torchrun's."""
    failure = _first_failure(out, _tail(launch_log))
    if failure is None:
        status = 128 - returncode if returncode < 0 else returncode
        said = f"torchrun was ended by {signal.Signals(-returncode).name}" if returncode < 0 else last_line(_tail(launch_log))
        return status, said or f"launch.sh ended with status {status}", launch_log, None
    rank, code = failure
    raised = traceback_line(_tail(_log(out, rank)))
    if code < 0 and (raised is None or code == -signal.SIGKILL):
        hint = " (out of memory, or killed by someone)" if code == -signal.SIGKILL else ""
        return 128 - code, f"ended by {signal.Signals(-code).name}{hint}", _log(out, rank), rank
    status = 128 - code if code < 0 else code  # gloo's threads abort a process that leaves with an exception
    return status, raised or last_line(_tail(_log(out, rank))) or f"ended with status {code} and said nothing", _log(out, rank), rank


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
    """SIGKILL for every process of the run but `spare`, which may be torchrun."""
    for pid in processes_of(run):
        if pid != spare:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _leave_none(run: str) -> None:
    """Wait until the last output is written (rank 0's goes through a pipe), then end what is left."""
    deadline = time.monotonic() + LAST_WORDS_S
    while processes_of(run) and time.monotonic() < deadline:
        time.sleep(POLL_S / 2)
    _kill(run)
    deadline += LAST_WORDS_S
    while processes_of(run) and time.monotonic() < deadline:  # SIGKILL takes a moment
        time.sleep(POLL_S / 10)


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
def _caught(signals: list[int]) -> Iterator[None]:
    """While inside, SIGINT, SIGTERM and SIGHUP are noted in `signals` (only Python's main thread can do that)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(number: int, frame: FrameType | None) -> None:
        signals.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
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
    python: str = sys.executable,
    grace_s: float = GRACE_S,
) -> Outcome:
    """Run all ranks of the job on this machine until they end; `out` holds the job's files and launch.sh. Call it from the main thread.

    `on_step` gets each new row of metrics.jsonl. Ctrl-C, SIGTERM and SIGHUP end the ranks (SIGTERM, SIGKILL after `grace_s`; a second
    Ctrl-C at once) and come back as "interrupted". Raises LaunchError where nothing could be started.
    """
    placement = {"PYTHON": python, "NNODES": "1", "RANKS_PER_NODE": str(job.world_size)}
    return run_script(out, "launch.sh", environment=placement, on_step=on_step, grace_s=grace_s)


def run_script(
    out: Path, script: str, *, environment: dict[str, str], on_step: Callable[[Row], None] = lambda row: None, grace_s: float = GRACE_S
) -> Outcome:
    """Run a script of the folder, which starts torchrun, with these variables beside this process's; as `start` says."""
    out = out.resolve()
    bash = shutil.which("bash")
    if bash is None:
        raise LaunchError("there is no bash on the PATH")
    if not (out / script).is_file():
        raise LaunchError(f"there is no {script} in {out}")
    (out / "logs").mkdir(exist_ok=True)
    run = uuid.uuid4().hex
    launch_log = out / "logs" / "launch.log"
    metrics = Metrics(out / "metrics.jsonl")
    rows: list[Row] = []
    started = now()
    signals: list[int] = []

    def follow() -> None:
        for row in metrics.new_rows():
            rows.append(row)
            on_step(row)

    try:
        with launch_log.open("wb") as log, _caught(signals):
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
            returncode = _supervise(process, launch_log, follow, signals=signals, grace_s=grace_s, run=run)
    finally:
        _leave_none(run)
    follow()
    ended = now()
    if signals:
        name = signal.Signals(signals[0]).name
        return Outcome(
            status="interrupted", exit_status=128 + signals[0], started=started, ended=ended, last_line=f"ended by {name}",
            log=str(launch_log), rows=tuple(rows),
        )  # fmt: skip
    if returncode == 0:
        return Outcome(status="finished", exit_status=0, started=started, ended=ended, log=str(_log(out, 0)), rows=tuple(rows))
    status, said, where, rank = describe_failure(out, launch_log, returncode)
    return Outcome(
        status="failed", exit_status=status, started=started, ended=ended, last_line=said, log=str(where), rank=rank, rows=tuple(rows)
    )


def now() -> str:
    """ISO 8601 in UTC, whole seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _supervise(
    process: subprocess.Popen[bytes], launch_log: Path, follow: Callable[[], None], *, signals: list[int], grace_s: float, run: str
) -> int:
    """Wait for torchrun; returns its return code. Ranks that live on `grace_s` after the first signal, or after torchrun saw a dead rank,
    are killed, at once on a second signal; torchrun gets REPORT_S more for its report."""
    deadline = float("inf")
    told = False
    while process.poll() is None:
        follow()
        clock = time.monotonic()
        if (signals and not told) or CLOSING.search(_tail(launch_log)):
            deadline = min(deadline, clock + grace_s)
        if signals and not told:
            process.terminate()
            told = True
        if len(signals) > 1:
            deadline = min(deadline, clock)
        if clock >= deadline:
            _kill(run, spare=process.pid if clock < deadline + REPORT_S else None)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(POLL_S)
    return process.wait()


def write_status(
    out: Path, outcome: Outcome, *, predicted_step_time_s: float | None = None, measured_step_time_s: float | None = None
) -> None:
    """`status.json`: how the run ended, whole or not at all."""
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
        "log": outcome.log,
        "predicted_step_time_s": predicted_step_time_s,
        "measured_step_time_s": measured_step_time_s,
    }
    partial = out / "status.json.partial"
    partial.write_text(json.dumps(status, indent=1) + "\n")
    partial.replace(out / "status.json")
