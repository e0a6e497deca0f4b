"""What a launch through us costs beside the same arguments by hand: seconds of the whole run, and of a step, alternating in one run.

    python tests/benchmarks/launch_overhead.py [repeats] [worker|program ...]

Seconds are the least of all, ratios the median of the pairs with its bootstrap interval.

Both start the same folder (a copy each): through us `launch.sh` with its supervision, metrics and logs (`local.start`), by hand torchrun
with the arguments that launch.sh gives. "worker" is ours on gpt_tiny; "program" is a stand-in for pretrain_gpt.py under `entry=`. Not a
test: times depend on the machine and on what else it does.

On 2 cores of an AMD EPYC, torch 2.13, nothing else running, 2026-11-20, 12 pairs of the worker and 10 of the program:

              through us s   by hand s   ratio   90% interval     step: through us ms, by hand ms, ratio
    worker            6.52        6.67   0.998   0.982 to 1.012   128.6, 133.0, 0.973
    program           2.62        2.61   0.989   0.955 to 1.072

Single runs differ by several percent: with 6 pairs and the least of each, the worker's ratio was 1.02 and 1.03 on the same day.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from orchestrator.commands import command as ended
from orchestrator.commands import usage
from orchestrator.errors import InputError
from orchestrator.job import Job
from orchestrator.launch.local import start

HERE = Path(__file__).parent
RANKS = 2
PLAN = ("recipe=gpt_tiny", f"gpus={RANKS}", "engine=megatron", "pin.tp=2", "train.steps=20", "train.warmup=1", "launch=none")
STAND_IN = HERE.parent / "launch" / "megatron_stand_in.py"
FLAGS = HERE.parent / "engines" / "megatron_flags.csv"
CASES = {"worker": (), "program": (f"entry={STAND_IN}", f"env.T_FLAGS={FLAGS}")}


def command(out: Path) -> list[str]:
    """What launch.sh gives to torchrun, read from it by a bash that stops there: the program and its arguments."""
    script = (out / "launch.sh").read_text().partition('\nif [[ "${STARTER')[0] + "\nprintf '%s\\0' \"${command[@]}\"\n"
    environment = os.environ | {"PYTHON": sys.executable}
    said = subprocess.run(["bash", "-c", script, str(out / "launch.sh")], capture_output=True, check=True, env=environment)
    return said.stdout.decode().split("\0")[1:-1]


def through_us(out: Path, job: Job) -> float:
    begin = time.perf_counter()
    outcome = start(job, out)
    seconds = time.perf_counter() - begin
    if outcome.status != "finished":
        raise SystemExit(f"{outcome.status}: {outcome.last_line}")
    return seconds


def by_hand(out: Path, environment: dict[str, str]) -> float:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", f"--nproc-per-node={RANKS}"]
    with (out / "said").open("w") as said:
        words = [*torchrun, *command(out)]
        begin = time.perf_counter()
        subprocess.run(words, cwd=out, env=os.environ | environment, stdout=said, stderr=said, check=True)
        return time.perf_counter() - begin


def step_time(out: Path) -> float | None:
    """Median seconds of a step by our worker's own clock; None for a program that prints them."""
    path = out / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return statistics.median(row["step_time_s"] for row in rows[len(rows) // 2 :]) if rows else None


def paired(us: Sequence[float], hand: Sequence[float]) -> tuple[float, float, float]:
    """Median ratio of runs that followed each other, between the ends of its 90% bootstrap interval."""
    ratios = [a / b for a, b in zip(us, hand, strict=True)]
    draw = random.Random(1)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[100], statistics.median(ratios), medians[-100]


def main(words: Sequence[str]) -> None:
    repeats = next((int(word) for word in words if word.isdigit()), 4)
    cases = [word for word in words if not word.isdigit()] or list(CASES)
    for case in cases:
        if case not in CASES:
            raise InputError("case", case, "is not known", CASES)
    threads = str(max(1, (os.cpu_count() or 1) // RANKS))
    environment = {"OMP_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "T_FLAGS": str(FLAGS)}
    print(f"{'':<10}{'through us s':>14}{'by hand s':>12}{'ratio':>8}   90% interval     step: through us ms, by hand ms, ratio")
    for name in cases:
        more = CASES[name]
        with tempfile.TemporaryDirectory() as folder:
            planned = Path(folder, "planned")
            words = [*PLAN, *more, f"out={planned}"]
            subprocess.run([sys.executable, "-m", "orchestrator.run", *words], check=True, stdout=subprocess.DEVNULL)
            job = Job(name=name, module="", arguments=(), environment={}, files=(), num_nodes=1, ranks_per_node=RANKS, backend="gloo",
                      program=str(STAND_IN) if more else None)  # fmt: skip
            seconds: dict[str, list[float]] = {"us": [], "hand": []}
            steps: dict[str, list[float]] = {"us": [], "hand": []}
            for number in range(repeats):
                for how in ("us", "hand") if number % 2 else ("hand", "us"):
                    out = shutil.copytree(planned, Path(folder, f"{how}-{number}"))
                    seconds[how].append(through_us(out, job) if how == "us" else by_hand(out, environment))
                    step = step_time(out) if not more else None
                    if step is not None:
                        steps[how].append(step)
            us, hand = (min(seconds[how]) for how in ("us", "hand"))
            low, middle, high = paired(seconds["us"], seconds["hand"])
            line = f"{name:<10}{us:>14.2f}{hand:>12.2f}{middle:>8.3f}   {low:.3f} to {high:.3f}"
            if steps["us"] and steps["hand"]:
                us, hand = (1000 * min(steps[how]) for how in ("us", "hand"))
                line += f"   {us:.1f}, {hand:.1f}, {paired(steps['us'], steps['hand'])[1]:.3f}"
            print(line, flush=True)


if __name__ == "__main__":
    sys.exit(ended(sys.argv[1:], lambda: usage(__doc__), main))
