"""How long planning takes from the shell: median CPU seconds, wall, peak RSS of the whole process, imports and files included.

    python tests/benchmarks/search_speed.py [out=FOLDER] [repeats=5] [part_s=150]
        [tables=main,layers,gpus,memory,layerwise,layers_layerwise,kinds]

Each run is `python -m orchestrator.run recipe=… gpus=… launch=none` in a fresh process and folder. Not a test: times depend on the machine
and on what else it does. What was measured is kept in FOLDER/runs.jsonl: a folder that has some of the runs is continued; with part_s no
run is begun after so many seconds, and status 3 says that some are left. When all are there the tables are printed, and written to
FOLDER/search_speed.md; tests/benchmarks/search_speed.md is what the last whole run gave.
"""

from __future__ import annotations

import csv
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.commands import arguments, command, usage

SOME_LEFT = 3
BATCH = "train.global_batch_size=3840"
BUDGETS = (30, 40, 50, 60, 70, 79)
"""GiB of an H100's 79.1."""
KINDS = (1, 2, 4, 8, 16, 32, 48, 96)
"""Divisors of 96 layers."""
LAYERS = (32, 64, 128, 256, 512, 1024)
TITLES = {
    "main": "Engines, recipes at their usual sizes",
    "layers": "Engines, layers of llama2_7b",
    "gpus": "Engines, GPUs",
    "memory": "Engines, memory of llama3_70b",
    "layerwise": "`engine=layerwise`, recipes",
    "layers_layerwise": "`engine=layerwise`, layers of llama2_7b",
    "kinds": "`engine=layerwise`, distinct kinds among 96 layers",
}


class Case(NamedTuple):
    recipe: str
    gpus: int
    more: tuple[str, ...] = ()


TABLES: dict[str, tuple[Case, ...]] = {
    "main": (
        *(Case("t5_large", 16), Case("llama2_7b", 8), Case("llama3_70b", 64), Case("gpt3_175b", 1024)),
        *(Case("llama3_405b", 2048), Case("llama3_405b", 8192), Case("gpt3_1t", 16384)),
        *(Case("qwen3_235b_a22b", 256), Case("deepseek_v3", 2048)),
    ),
    "layers": tuple(Case("llama2_7b", 64, (f"model.num_layers={n}",)) for n in LAYERS),
    "gpus": (
        *(Case("llama2_7b", gpus) for gpus in (8, 64, 512)),
        *(Case("gpt3_175b", gpus) for gpus in (512, 4096)),
        Case("llama2_7b", 24, ("gpus_per_node=3", BATCH)),
        Case("llama2_7b", 20, ("gpus_per_node=5", BATCH)),
        Case("llama2_7b", 48, ("gpus_per_node=6", BATCH)),
        Case("gpt3_1t", 65536, ("train.global_batch_size=65536",)),
    ),
    "memory": tuple(Case("llama3_70b", 64, (f"memory.limit_gib={gib}",)) for gib in BUDGETS),
    "layerwise": (
        Case("llama2_7b", 8, ("engine=layerwise",)),
        Case("llama3_8b", 16, ("engine=layerwise",)),
        *(Case(recipe, 8) for recipe in ("bert_huge_32_measured", "t5_large_32_measured", "swin_huge_48", "vit_huge_32")),
    ),
    "layers_layerwise": tuple(Case("llama2_7b", 64, ("engine=layerwise", f"model.num_layers={n}")) for n in LAYERS),
    "kinds": tuple(Case(f"kinds_{n}.yaml", 8, (f"memory.limit_gib={gib}",)) for gib in (8, 12) for n in KINDS),
}


class Run(NamedTuple):
    """One process. `load`: the machine's, over the minute before it."""

    table: str
    case: int
    cpu_s: float
    wall_s: float
    peak_mb: float
    load: float
    choices: int
    proven: str
    plan: str


def kinds_recipe(kinds: int) -> str:
    """A profile of 96 layers of so many kinds that all differ in time, weights and activations; engine=layerwise."""
    lines = ["cluster: rtx_titan_8", "gpus: 8", "engine: layerwise"]
    lines += ["train: {global_batch_size: 64, seq_length: 512, precision: fp32, steps: 100}", "profile:", "  layers:"]
    for i in range(kinds):
        numbers = f"parameter_bytes: {20 + i % 7} MiB, forward_s: {{1: {2 + 0.05 * (7 * i % 11):.2f} ms}}, output_bytes: 1 MiB"
        saved = f"{{1: {40 + 5 * i % 13} MiB, 2: {22 + 5 * i % 13} MiB, 4: {13 + i % 5} MiB}}"
        lines.append(f"  - {{kind: layer{i}, count: {96 // kinds}, {numbers}, saved_bytes: {saved}}}")
    return "\n".join(lines) + "\n"


def measure(table: str, index: int, folder: Path) -> Run:
    """One process that plans the case into `folder`."""
    case = TABLES[table][index]
    source, out, log = case.recipe, folder / "out", folder / "log"
    if case.recipe.startswith("kinds_"):
        source = str(folder / case.recipe)
        Path(source).write_text(kinds_recipe(int(case.recipe.removeprefix("kinds_").removesuffix(".yaml"))))
    words = [f"recipe={source}", f"gpus={case.gpus}", "launch=none", f"out={out}", *case.more]
    load, started = os.getloadavg()[0], time.perf_counter()
    with log.open("w") as stdout:
        child = subprocess.Popen([sys.executable, "-m", "orchestrator.run", *words], stdout=stdout)
        _, status, usage = os.wait4(child.pid, 0)
    wall = time.perf_counter() - started
    if status:
        raise SystemExit(f"{case.recipe} on {case.gpus}: status {os.waitstatus_to_exitcode(status)}")
    choices, plan = 0, ""
    if (out / "candidates.csv").exists():
        with (out / "candidates.csv").open() as rows:
            choices = sum(1 for _ in csv.DictReader(rows))
        found = json.loads((out / "plan.json").read_text())
        axes = " ".join(f"{axis}={found[axis]}" for axis in ("tp", "pp", "vpp", "dp", "zero_stage", "micro_batch_size"))
        plan = f"{found['engine']} {axes}: {found['predicted']['step_time_s']:.4g} s"
    elif (out / "layerwise.json").exists():
        plan = f"layer-wise: {json.loads((out / 'layerwise.json').read_text())['step_time_s']:.4g} s"
    cpu = usage.ru_utime + usage.ru_stime
    return Run(table, index, cpu, wall, usage.ru_maxrss / 1024, load, choices, proof(log.read_text()), plan)


def proof(printed: str) -> str:
    """What the run says of its plan: proven, or by how much another may be faster."""
    text = " ".join(printed.split())
    gap = re.search(r"may be up to ([0-9.]+%) faster", text)
    return f"to {gap[1]}" if gap else "yes" if "roven the fastest" in text else ""


def line(runs: list[Run]) -> str:
    """A row of the table: medians."""
    case = TABLES[runs[0].table][runs[0].case]
    cpu, wall, peak = (statistics.median(column) for column in zip(*(run[2:5] for run in runs), strict=True))
    name = case.recipe.removesuffix(".yaml") + (f", {' '.join(case.more)}" if case.more else "")
    choices = f"{runs[0].choices:,}" if runs[0].choices else ""
    return f"| {name} | {case.gpus:,} | {cpu:.2f} | {wall:.2f} | {peak:.0f} | {choices} | {runs[0].proven} | {runs[0].plan} |"


def report(runs: list[Run], repeats: int) -> str:
    """All tables as Markdown."""
    most = max(run.load for run in runs)
    where = f"{os.cpu_count()} cores ({platform.machine()}) without GPUs, Python {platform.python_version()}"
    text = ["# How long planning takes", ""]
    text += [f"{time.strftime('%Y-%m-%d')}, {where}: the whole process from the shell with `launch=none`, imports and files included, by"]
    text += [f"`tests/benchmarks/search_speed.py`. Medians of {repeats}; the machine's load was at most {most:.1f}, its own included."]
    text += ["Proven: no legal plan that fits is faster, or by how much one may be."]
    for table, title in TITLES.items():
        mine = [run for run in runs if run.table == table]
        if mine:
            text += ["", f"## {title}", "", "| recipe | GPUs | CPU s | wall s | peak MB | choices | proven | plan |"]
            text += ["|---|--:|--:|--:|--:|--:|---|---|"]
            text += [line([run for run in mine if run.case == case]) for case in sorted({run.case for run in mine})]
    return "\n".join(text) + "\n"


def main(words: Sequence[str]) -> int:
    given = arguments(words, ("out", "repeats", "tables", "part_s"))
    started, part_s, repeats = time.monotonic(), float(given.get("part_s", "inf")), int(given.get("repeats", "5"))
    folder = Path(given.get("out") or tempfile.mkdtemp(prefix="search_speed_"))
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "runs.jsonl"
    runs = [Run(**json.loads(text)) for text in kept.read_text().splitlines()] if kept.is_file() else []
    tables = given["tables"].split(",") if "tables" in given else list(TITLES)
    todo: list[tuple[str, int]] = []
    for _ in range(repeats):  # all cases once, then once more: a busy minute falls on one run of each
        todo += [(table, index) for table in tables for index in range(len(TABLES[table]))]
    done: dict[tuple[Any, ...], int] = {}
    for run in runs:
        done[run.table, run.case] = done.get((run.table, run.case), 0) + 1
    for table, index in todo:
        if done.get((table, index), 0) > 0:
            done[table, index] -= 1
            continue
        if time.monotonic() - started > part_s:
            print(f"{len(todo) - len(runs)} of {len(todo)} runs are left")
            return SOME_LEFT
        here = Path(tempfile.mkdtemp(prefix="run_", dir=folder))
        runs.append(measure(table, index, here))
        shutil.rmtree(here)
        with kept.open("a") as file:
            file.write(json.dumps(runs[-1]._asdict()) + "\n")
    text = report([run for run in runs if run.table in tables], repeats)
    (folder / "search_speed.md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:], lambda: usage(__doc__), main))
