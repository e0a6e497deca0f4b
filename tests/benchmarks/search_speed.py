"""How long planning takes from the shell: median CPU seconds, wall, peak RSS of the whole process, imports and files included.

    python tests/benchmarks/search_speed.py [repeats]

Each case is `python -m orchestrator.run recipe=… gpus=… launch=none` in a fresh process and folder. Not a test: times depend on the
machine and on what else it does.
"""

from __future__ import annotations

import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CASES = (("t5_large", 16), ("llama2_7b", 8), ("llama3_70b", 64), ("gpt3_175b", 1024), ("llama3_405b", 2048), ("gpt3_1t", 16384))
"""(recipe, GPUs)"""


def measure(recipe: str, gpus: int, out: Path) -> tuple[float, float, float]:
    """(CPU seconds, wall seconds, peak MB) of one process, which writes its files to `out`."""
    started = time.perf_counter()
    words = [f"recipe={recipe}", f"gpus={gpus}", "launch=none", f"out={out}"]
    child = subprocess.Popen([sys.executable, "-m", "orchestrator.run", *words], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        raise SystemExit(f"{recipe} on {gpus}: status {os.waitstatus_to_exitcode(status)}")
    return usage.ru_utime + usage.ru_stime, time.perf_counter() - started, usage.ru_maxrss / 1024


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    print(f"{'recipe':<14}{'GPUs':>7}{'CPU s':>8}{'wall s':>8}{'MB':>6}{'choices':>9}  plan")
    with tempfile.TemporaryDirectory() as folder:
        for recipe, gpus in CASES:
            runs = [measure(recipe, gpus, Path(folder, f"{recipe}-{number}")) for number in range(repeats)]
            cpu, wall, rss = (statistics.median(column) for column in zip(*runs, strict=True))
            out = Path(folder, f"{recipe}-0")
            plan = json.loads((out / "plan.json").read_text())
            with (out / "candidates.csv").open() as table:
                choices = sum(1 for _ in csv.DictReader(table))
            axes = " ".join(f"{axis}={plan[axis]}" for axis in ("tp", "pp", "vpp", "dp", "zero_stage", "micro_batch_size"))
            plans = f"{plan['engine']} {axes}: {plan['predicted']['step_time_s']:.3f} s"
            print(f"{recipe:<14}{gpus:>7}{cpu:>8.2f}{wall:>8.2f}{rss:>6.0f}{choices:>9}  {plans}", flush=True)


if __name__ == "__main__":
    main()
