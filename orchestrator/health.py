"""Is this node fit to train, and does the run on it go on? Looks beside a training: no engine is imported, no GPU memory taken.

    python -m orchestrator.health [FOLDER]

FOLDER: of a run; its disk, loss and last step are looked at too, and standard error says how far it is. Or a checkpoint
(runs/RUN/checkpoints/step_000100): every file is read, and compared with the digest that it was written with. A line for each
thing that is wrong; exit status 1 where there is one, 0 where nothing is found (said on standard error).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final
from xml.etree import ElementTree

from rich.console import Console
from rich.progress import track

from orchestrator import digests
from orchestrator.commands import command_of
from orchestrator.errors import InputError
from orchestrator.launch.program_metrics import rows_of
from orchestrator.launch.stopped import in_plan
from orchestrator.units import format_bytes, format_seconds

UNFIT: Final = 1
METRICS: Final = "metrics.jsonl"
STATUS: Final = "status.json"
NVIDIA_SMI_S: Final = 30.0
"""A driver that hangs is a broken GPU; on a loaded node of eight GPUs the whole query takes seconds."""
SLOWDOWNS: Final = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")
"""Reasons of low clocks that mean heat or power supply; a power cap, and no work, are no defects (nvidia-smi's manual)."""
LEAST_DISK: Final = 0.02
LEAST_MEMORY: Final = 0.03
"""Shares that must be free: below them the next checkpoint, or the next allocation, is in danger."""
LEAST_WINDOW: Final = 10
"""Steps at least whose losses' median is compared."""
RISEN: Final = 1.2
"""Times its least, from which on a loss is said to rise."""
RISEN_BY: Final = 0.5
"""How far above its least a loss must be for that: batches differ by less."""
STALLED: Final = 20.0
"""Times its usual step that a run's last step may be ago: saves and evaluations take longer than a step."""
STALLED_S: Final = 120.0
"""Seconds that a run's last step may be ago at least, however short its steps are."""


def _run(words: Sequence[str]) -> int:
    if len(words) > 1:
        raise InputError("FOLDER", " ".join(words), "usage: python -m orchestrator.health, one folder at most")
    folder = Path(words[0]) if words else None
    if folder is not None and not folder.is_dir():
        raise InputError("FOLDER", folder, "no such folder")
    if folder is not None and (folder / digests.LISTING).is_file():
        return checkpoint(folder)
    found = [*gpus(), *ports(Path("/sys/class/infiniband")), *memory(Path("/proc/meminfo").read_text())]
    if folder is not None:
        found += [*disk(folder), *progress(folder, time.time())]
        if said := where(folder, time.time()):
            print(f"health: {folder}: {said}", file=sys.stderr)
    for line in found:
        print(f"health: {line}")
    if not found:
        print("health: nothing wrong was found", file=sys.stderr)
    return UNFIT if found else 0


def checkpoint(folder: Path) -> int:
    """Says which files of a checkpoint are not as they were written, and the exit status. Raises InputError."""
    listed = digests.listed(folder) or {}
    found = 0
    for number in track(range(len(listed)), "reading", console=Console(stderr=True), transient=True):
        for damage in digests.damages(folder, listed, number, len(listed)):
            found += 1
            print(f"health: {damage}")
    if not found:
        size = format_bytes(sum(int(of["bytes"]) for of in listed.values()))
        print(f"health: all {len(listed)} files ({size}) are as they were written", file=sys.stderr)
    return UNFIT if found else 0


def gpus() -> Iterator[str]:
    """What the driver says of the GPUs; nothing where there is no driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return
    try:
        done = subprocess.run([program, "-q", "-x"], capture_output=True, text=True, timeout=NVIDIA_SMI_S, check=False)
    except subprocess.TimeoutExpired:
        yield f"nvidia-smi gives no answer in {NVIDIA_SMI_S:.0f} s: the driver hangs, or a GPU has fallen off the bus"
        return
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        yield f"nvidia-smi fails: {said[-1] if said else f'exit status {done.returncode}'}"
        return
    yield from gpu_faults(done.stdout)


def gpu_faults(text: str) -> Iterator[str]:
    """Faults of GPUs by the XML that `nvidia-smi -q -x` prints: uncorrected errors since the driver was loaded, rows that can't be replaced
    or wait for a reset, and clocks held down by heat or power."""
    for number, gpu in enumerate(ElementTree.fromstring(text).iter("gpu")):
        name = f"GPU {number} ({gpu.findtext('product_name')}, {gpu.get('id')})"
        errors = {
            entry.tag: int(entry.text)
            for entry in gpu.findall("ecc_errors/volatile/*")
            if "uncorrectable" in entry.tag and entry.text and entry.text.strip().isdecimal()
        }
        if any(errors.values()):
            yield f"{name}: uncorrected memory errors: {', '.join(f'{tag} {count}' for tag, count in errors.items() if count)}"
        if gpu.findtext("remapped_rows/remapped_row_failure") == "Yes":
            yield f"{name}: a row of its memory could not be replaced: the GPU is to be exchanged"
        if gpu.findtext("remapped_rows/remapped_row_pending") == "Yes":
            yield f"{name}: a row of its memory waits to be replaced: reset the GPU when nothing runs on it"
        for word in ("event", "throttle"):  # before driver 535
            for reason in SLOWDOWNS:
                if gpu.findtext(f"clocks_{word}_reasons/clocks_{word}_reason_{reason}") == "Active":
                    heat = gpu.findtext("temperature/gpu_temp")
                    yield f"{name}: its clocks are held down: {reason.replace('_', ' ')}, at {heat}"


def ports(folder: Path) -> Iterator[str]:
    """InfiniBand's and RoCE's ports that are not up, of adapters that have one which is: an adapter without a cable is nobody's fault."""
    states = {path: path.read_text().strip() for path in sorted(folder.glob("*/ports/*/state"))}
    if any("ACTIVE" in state for state in states.values()):
        for path, state in states.items():
            if "ACTIVE" not in state:
                yield f"{path.parts[-4]} port {path.parts[-2]} is {state.partition(':')[2].strip() or state}, and other ports are active"


def memory(meminfo: str) -> Iterator[str]:
    """A fault where /proc/meminfo shows that little host memory is left."""
    lines = (line.partition(":") for line in meminfo.splitlines())
    values = {name: int(value.split()[0]) * 1024 for name, _, value in lines if value.split()[:1]}
    free, total = values.get("MemAvailable"), values.get("MemTotal")
    if free is not None and total and free < LEAST_MEMORY * total:
        yield f"host memory: {format_bytes(free)} of {format_bytes(total)} are available"


def disk(folder: Path) -> Iterator[str]:
    """A fault where little room is left on the run's disk: for data, or for names of files."""
    state = os.statvfs(folder)
    free, total = state.f_bavail * state.f_frsize, state.f_blocks * state.f_frsize
    if free < LEAST_DISK * total:
        yield f"the disk of {folder}: {format_bytes(free)} of {format_bytes(total)} are free"
    if state.f_files and state.f_favail < LEAST_DISK * state.f_files:
        yield f"the disk of {folder} has names for {state.f_favail:,} more files"


def rising(rows: Iterable[Mapping[str, Any]]) -> str:
    """What is wrong with the loss of a run's steps, in order: it is none, or well above what it was; "" where neither is so, or of few
    steps.

    >>> rising({"loss": loss} for loss in [5.5, 5.5, 26, 307] + 36 * [25.8])
    'the loss is 25.8 in the last 10 steps, and was 5.5: the training may diverge (a lower train.lr=, or train.clip=)'
    >>> rising({"loss": 5.5 - step / 100} for step in range(100)), rising({"loss": loss} for loss in (5.5, 307, 25.8))
    ('', '')
    """
    losses = [float(row["loss"]) for row in rows if isinstance(row.get("loss"), int | float)]
    if losses and not math.isfinite(losses[-1]):
        return f"the loss is {losses[-1]}: the training has diverged"
    size = max(LEAST_WINDOW, len(losses) // 20)
    if len(losses) < 3 * size:
        return ""
    parts = [losses[:3], *(losses[start : start + size] for start in range(0, len(losses) - size + 1, size))]
    least, last = min(map(median, parts)), median(losses[-size:])
    if last < least * RISEN or last - least < RISEN_BY:
        return ""
    what = f"the loss is {last:.3g} in the last {size} steps, and was {least:.3g}"
    return f"{what}: the training may diverge (a lower train.lr=, or train.clip=)"


def progress(folder: Path, now: float) -> Iterator[str]:
    """A run that makes no steps, though it has not ended, or whose loss rises. `now`: seconds, as the files' times."""
    metrics = folder / METRICS
    if not metrics.is_file():
        return
    rows = rows_of(metrics)
    if said := rising(rows):
        yield f"{folder}: {said}"
    if (folder / STATUS).is_file():
        return
    times = recent_times(rows)
    ago = now - metrics.stat().st_mtime
    if times and ago > max(STALLED * median(times), STALLED_S):
        yield f"{folder}: step {rows[-1]['step']} was {ago:.0f} s ago, and a step takes {median(times):.3g} s"


def recent_times(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Seconds of each of the last 50 steps."""
    return [row["step_time_s"] for row in rows[-50:] if row.get("step_time_s")]


def where(folder: Path, now: float) -> str:
    """A line on how far the run in this folder is: its step, loss, speed and when it ends, or how it ended; "" for a folder that no plan is
    in. `now`: seconds since 1970."""
    steps, predicted = (in_plan(folder / "plan.json", *names) for names in (("training", "steps"), ("predicted", "step_time_s")))
    if steps is None:
        return ""
    rows = rows_of(folder / METRICS)
    last, times = next(reversed(rows), {}), recent_times(rows)
    step = last.get("step", 0)
    parts = [f"step {step:,} of {steps:,.0f}"]
    if isinstance(last.get("loss"), int | float):
        parts.append(f"loss {last['loss']:.4g}")
    if times:
        parts.append(f"{format_seconds(median(times))} a step" + (f" (predicted {format_seconds(predicted)})" if predicted else ""))
    if (folder / STATUS).is_file():
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            status = json.loads((folder / STATUS).read_text())
            parts.append(f"{status['status']}: {error}" if (error := status.get("error")) else str(status["status"]))
    elif times and step < steps:
        ends = time.localtime(now + (steps - step) * median(times))
        parts.append(f"ends about {time.strftime('%Y-%m-%d %H:%M', ends)}, saves and evaluations apart")
    return ", ".join(parts)


main = command_of(__doc__, _run)
"""Runs the command. Returns 0 where nothing is wrong, 1 where something is, 2 for a call that is not ours."""

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
