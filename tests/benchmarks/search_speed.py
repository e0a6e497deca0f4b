"""How long planning takes from the shell: median CPU seconds, wall, peak RSS of the whole process, imports and files included.

    python tests/benchmarks/search_speed.py [repeats] [main|layers|gpus|memory|kinds|layerwise|layerwise_layers ...]

Each case is `python -m orchestrator.run recipe=… gpus=… launch=none` in a fresh process and folder; medians of 5. Not a test: times depend
on the machine and on what else it does. tests/benchmarks/search_speed.md has what it last printed.
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

CASES = (
    *(("t5_large", 16), ("llama2_7b", 8), ("llama3_70b", 64), ("gpt3_175b", 1024), ("llama3_405b", 2048), ("llama3_405b", 8192)),
    ("gpt3_1t", 16384),
)
"""(recipe, GPUs)"""
Case = tuple[str, int, tuple[str, ...]]
BATCH = "train.global_batch_size=3840"
BUDGETS = (30, 40, 50, 60, 70, 79)
"""GiB of an H100's 79.1."""
KINDS = (1, 2, 4, 8, 16, 32, 48, 96)
"""Divisors of 96 layers."""
LAYERS = (32, 64, 128, 256, 512, 1024)
TABLES: dict[str, tuple[Case, ...]] = {
    "main": tuple((recipe, gpus, ()) for recipe, gpus in CASES),
    "layers": tuple(("llama2_7b", 64, (f"model.num_layers={n}",)) for n in LAYERS),
    "gpus": (
        *(("llama2_7b", gpus, ()) for gpus in (8, 64, 512)),
        *(("gpt3_175b", gpus, ()) for gpus in (512, 4096)),
        ("llama2_7b", 24, ("gpus_per_node=3", BATCH)),
        ("llama2_7b", 20, ("gpus_per_node=5", BATCH)),
        ("llama2_7b", 48, ("gpus_per_node=6", BATCH)),
        ("gpt3_1t", 65536, ("train.global_batch_size=65536",)),
    ),
    "memory": tuple(("llama3_70b", 64, (f"memory.limit_gib={gib}",)) for gib in BUDGETS),
    "kinds": tuple((f"kinds_{n}.yaml", 8, (f"memory.limit_gib={gib}",)) for gib in (8, 12) for n in KINDS),
    "layerwise": (
        ("llama2_7b", 8, ("engine=layerwise",)),
        ("llama3_8b", 16, ("engine=layerwise",)),
        *((recipe, 8, ()) for recipe in ("bert_huge_32_measured", "t5_large_32_measured", "swin_huge_48", "vit_huge_32")),
    ),
    "layerwise_layers": tuple(("llama2_7b", 64, ("engine=layerwise", f"model.num_layers={n}")) for n in LAYERS),
}


def kinds_recipe(kinds: int) -> str:
    """A profile of 96 layers of so many kinds that all differ in time, weights and activations; engine=layerwise."""
    lines = ["cluster: rtx_titan_8", "gpus: 8", "engine: layerwise"]
    lines += ["train: {global_batch_size: 64, seq_length: 512, precision: fp32, steps: 100}", "profile:", "  layers:"]
    for i in range(kinds):
        numbers = f"parameter_bytes: {20 + i % 7} MiB, forward_s: {{1: {2 + 0.05 * (7 * i % 11):.2f} ms}}, output_bytes: 1 MiB"
        saved = f"{{1: {40 + 5 * i % 13} MiB, 2: {22 + 5 * i % 13} MiB, 4: {13 + i % 5} MiB}}"
        lines.append(f"  - {{kind: layer{i}, count: {96 // kinds}, {numbers}, saved_bytes: {saved}}}")
    return "\n".join(lines) + "\n"


def measure(recipe: str, gpus: int, more: tuple[str, ...], out: Path) -> tuple[float, float, float]:
    """(CPU seconds, wall seconds, peak MB) of one process, which writes its files to `out`."""
    started = time.perf_counter()
    words = [f"recipe={recipe}", f"gpus={gpus}", "launch=none", f"out={out}", *more]
    child = subprocess.Popen([sys.executable, "-m", "orchestrator.run", *words], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        raise SystemExit(f"{recipe} on {gpus}: status {os.waitstatus_to_exitcode(status)}")
    return usage.ru_utime + usage.ru_stime, time.perf_counter() - started, usage.ru_maxrss / 1024


def main() -> None:
    words = sys.argv[1:]
    repeats = next((int(word) for word in words if word.isdigit()), 5)
    tables = [word for word in words if not word.isdigit()] or list(TABLES)
    for name in tables:
        print(f"{name:<22}{'GPUs':>7}{'CPU s':>8}{'wall s':>8}{'MB':>6}{'choices':>9}  plan")
        with tempfile.TemporaryDirectory() as folder:
            for index, (recipe, gpus, more) in enumerate(TABLES[name]):
                show(recipe, gpus, more, repeats, Path(folder, str(index)))


def show(recipe: str, gpus: int, more: tuple[str, ...], repeats: int, folder: Path) -> None:
    """A line of the table: medians over the repeats."""
    source = recipe
    if recipe.startswith("kinds_"):
        source = str(folder.with_suffix(".yaml"))
        Path(source).write_text(kinds_recipe(int(recipe.removeprefix("kinds_").removesuffix(".yaml"))))
    runs = [measure(source, gpus, more, folder / str(number)) for number in range(repeats)]
    cpu, wall, rss = (statistics.median(column) for column in zip(*runs, strict=True))
    out = folder / "0"
    choices, plan = 0, "layer-wise"
    if (out / "candidates.csv").exists():
        with (out / "candidates.csv").open() as table:
            choices = sum(1 for _ in csv.DictReader(table))
        found = json.loads((out / "plan.json").read_text())
        axes = " ".join(f"{axis}={found[axis]}" for axis in ("tp", "pp", "vpp", "dp", "zero_stage", "micro_batch_size"))
        plan = f"{found['engine']} {axes}: {found['predicted']['step_time_s']:.3f} s"
    elif (out / "layerwise.json").exists():
        plan = f"layer-wise: {json.loads((out / 'layerwise.json').read_text())['step_time_s']:.3f} s"
    print(f"{recipe:<22}{gpus:>7}{cpu:>8.2f}{wall:>8.2f}{rss:>6.0f}{choices:>9}  {plan} {' '.join(more)}", flush=True)


if __name__ == "__main__":
    main()
