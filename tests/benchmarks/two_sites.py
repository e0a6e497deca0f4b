"""Plans for two sites with a slow link between them: predicted and measured steps; the link is made here (tests/launch/slow_link.py).

    nice python tests/benchmarks/two_sites.py [MBIT_PER_S [DELAY_MS]]       # root; a table

Four gloo ranks, two on each side. What a plan sends over the link takes most of its step, so that ranks which share cores matter little.

8 Mbit/s and 5 ms, 2 cores at load 2, torch 2.13, 2026-11-22, seconds predicted / measured: pp over the link with dp inside 5.26 / 4.79;
with tp inside, mbs 4, 4.91 / 5.02; the search's plan (pp with tp, one micro-batch) 4.83 / 5.10; dp over the link with tp inside, ZeRO-0,
7.27 / 8.68; dp everywhere 10.5 / 11.2.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "launch"))

from slow_link import SlowLink, train

from orchestrator.commands import command, usage
from orchestrator.errors import InputError

RECIPE = ("recipe=gpt_tiny", "model.num_layers=2", "model.hidden_size=256", "model.ffn_hidden_size=1024", "train.warmup=1")
STEPS = 4
CHOSEN = "the search's"
PINS = {
    CHOSEN: (),
    "pp over the link, tp inside": ("pin.pp=2", "pin.tp=2", "pin.dp=1", "pin.micro_batch_size=4"),
    "pp over the link, dp inside": ("pin.pp=2", "pin.tp=1", "pin.dp=2", "pin.micro_batch_size=2"),
    "dp over the link, tp inside": ("pin.pp=1", "pin.tp=2", "pin.dp=2", "pin.micro_batch_size=4"),
    "dp over the link and inside": ("pin.pp=1", "pin.tp=1", "pin.dp=4", "pin.micro_batch_size=4"),
}


class Step(NamedTuple):
    """Seconds, and bytes over the link a step in the direction that has most."""

    label: str
    predicted_s: float
    measured_s: float
    carried: float


def cluster(rate: float, delay_s: float, ranks_of_site: int = 2) -> str:
    """The two sites, as a cluster's YAML. The link is shared by a site's ranks. `rate`: bytes/s."""
    return f"""
name: two_sites
gpu: cpu
gpus_per_node: {ranks_of_site}
levels:
- {{name: loopback, size: node, bandwidth: 1 GB/s, latency: 200 us}}
- {{name: wan, size: unlimited, bandwidth: {rate / ranks_of_site:.0f} B/s, latency: {delay_s * 1e3:g} ms}}
host_bandwidth: 3 GB/s
host_memory: 4 GB
software: {{transformer_engine: false, flash_attention: false, apex: false}}
"""


def compare(rate: float, delay_s: float, folder: Path, names: list[str], steps: int = STEPS) -> dict[str, Step]:
    """Each plan's step as predicted and as measured over a link of `rate` bytes/s and `delay_s`. Raises CalledProcessError."""
    (folder / "sites.yaml").write_text(cluster(rate, delay_s))
    found = {}
    for index, name in enumerate(names):
        out = folder / f"plan{index}"
        command = [sys.executable, "-m", "orchestrator.run", *RECIPE, f"train.steps={steps}", "gpus=4", "engine=megatron"]
        command += ["cluster=sites.yaml", "launch=none", *PINS[name], f"out={out}"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=300)
        plan = json.loads((out / "plan.json").read_text())
        with SlowLink(rate, delay_s) as link:
            train(link, out)
            carried = max(link.carried) / steps
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        label = " ".join(f"{axis}={plan[axis]}" for axis in ("pp", "tp", "dp", "vpp")) + f" mbs={plan['micro_batch_size']}"
        measured = median(row["step_time_s"] for row in rows[1:])
        found[name] = Step(label, plan["predicted"]["step_time_s"], measured, carried)
    return found


def main(words: Sequence[str]) -> None:
    try:
        mbit, delay_ms = (*map(float, words), *(16.0, 5.0)[len(words) :])
    except ValueError:
        raise InputError("MBIT_PER_S DELAY_MS", " ".join(words), "must be at most two numbers") from None
    print(f"{mbit:g} Mbit/s, {delay_ms:g} ms one way; {' '.join(RECIPE)}")
    print(f"{'':30}{'plan':30}{'predicted':>10}{'measured':>10}{'ratio':>7}{'MB over the link':>18}")
    with tempfile.TemporaryDirectory() as folder:
        for name, step in compare(mbit * 1e6 / 8, delay_ms / 1e3, Path(folder), list(PINS)).items():
            times = f"{step.predicted_s:>9.3g}s{step.measured_s:>9.3g}s{step.measured_s / step.predicted_s:>7.2f}"
            print(f"{name:30}{step.label:30}{times}{step.carried / 1e6:>18.1f}", flush=True)


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:], lambda: usage(__doc__), main))
