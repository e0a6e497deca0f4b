"""A benchmark, not a test: on a lopsided model the uneven pipeline split is faster than the even one, as predicted.

    python tests/benchmarks/lopsided.py [out=FOLDER] [steps=6]

A GPT whose head weighs as much as ten of its layers, so that two stages with five layers each are no balance. Megatron engine, two gloo
ranks on this machine, one core each: run it where two cores are idle. The last line is the split that the search takes itself.

On 2026-11-20, 2 cores of an AMD EPYC, gloo, torch 2.13.0+cpu, nothing else running. The last two lines are the same plan, so that 6% is
noise; two runs under load had 10 + 0 first and 7 + 3 anywhere.

    layers       predicted           measured
    5 + 5           3.35 s     +0%     1.27 s     +0%
    7 + 3           3.06 s     -8%     1.19 s     -6%
    9 + 1           2.78 s    -17%     1.05 s    -17%
    10 + 0          2.64 s    -21%     1.07 s    -15%
    10 + 0          2.64 s    -21%     1.01 s    -20%

The order is as predicted within that noise; the seconds are those of constants that nobody fitted to this machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from orchestrator.commands import arguments, command, usage

CONFIG = {"model_type": "gpt2", "n_layer": 10, "n_embd": 256, "n_head": 4, "n_positions": 128, "vocab_size": 32768, "n_inner": 1024}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
LAYOUTS = ("Et*5|t*5L", "Et*7|t*3L", "Et*9|tL", "Et*10|L")
"""Layers of the two stages: 5 and 5, then more and more in the first."""


def run(folder: Path, config: Path, layout: str | None, steps: int) -> tuple[str, float, float]:
    """(layers of each stage, predicted seconds, the fastest of the measured ones without the first step: other load only adds)."""
    out = folder / ("searched" if layout is None else layout.replace("*", "").replace("|", "_"))
    if not (out / "metrics.jsonl").is_file():
        words = [f"model.hf_config={config}", "recipe=gpt_tiny", "gpus=2", "engine=megatron", "train.seq_length=128"]
        words += ["train.global_batch_size=8", f"train.steps={steps}", "pin.tp=1", "pin.pp=2", "pin.vpp=1", "pin.micro_batch_size=1"]
        words += ["pin.zero_stage=0", "pin.recompute=none", "env.OMP_NUM_THREADS=1", f"out={out}"]
        words += [] if layout is None else [f"pin.layout={layout}"]
        subprocess.run([sys.executable, "-m", "orchestrator.run", *words], check=True, stdout=subprocess.DEVNULL)
    plan = json.loads((out / "plan.json").read_text())
    layers = [sum(span["count"] for span in stage["layers"] if span["kind"] not in ("embedding", "head")) for stage in plan["stages"]]
    steps_s = [json.loads(line)["step_time_s"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    return " + ".join(map(str, layers)), plan["predicted"]["step_time_s"], min(steps_s[1:])


def main(words: Sequence[str]) -> None:
    given = arguments(words, ("out", "steps"))
    folder = Path(given.get("out") or tempfile.mkdtemp(prefix="lopsided_"))
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "config.json"
    config.write_text(json.dumps({**CONFIG, **NO_DROPOUT}))
    print(f"{'layers':<10}{'predicted':>12}{'':>8}{'measured':>11}")
    even: tuple[float, float] | None = None
    for layout in (*LAYOUTS, None):
        layers, predicted, measured = run(folder, config, layout, int(given.get("steps", "6")))
        even = even or (predicted, measured)
        against = f"{predicted / even[0] - 1:>+8.0%}", f"{measured / even[1] - 1:>+8.0%}"
        print(f"{layers:<10}{predicted:>10.2f} s{against[0]}{measured:>9.2f} s{against[1]}", flush=True)


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:], lambda: usage(__doc__), main))
