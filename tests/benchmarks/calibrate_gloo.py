"""A benchmark, not a test: six gloo runs of a small GPT settle the constants of this machine; are twelve other plans ranked right?

    python tests/benchmarks/calibrate_gloo.py [out=FOLDER] [steps=5] [part_s=150]

8 layers, hidden 256, sequence 128, batch 32, on 4 ranks that share this machine's cores. About ten minutes on two cores; run it on an
idle machine, load shows in the numbers. A folder that has some of the runs already is continued; with part_s no run is begun after so
many seconds, and status 3 says that some are left.

On 2026-11-20, 2 cores of an AMD EPYC, torch 2.13, nothing else running: from the datasheet's constants Spearman .92 and a median error of
20%; with the six runs' Spearman .94, the plan ranked first is the fastest (tp=1 pp=2 mbs=16, 1.16 s; the slowest took 2.92 s), median error
6.1%. What is off is tp=2 with small micro-batches (+29 to +38%): a collective of 2 of 4 ranks on 2 cores is priced as one of all 4. Earlier
the same day, other work beside it, 18 other runs gave .95 and the fastest as well.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from scipy.stats import spearmanr

from orchestrator.calibrate.__main__ import CPU_NAMES
from orchestrator.calibrate.fit import chooser, fit
from orchestrator.calibrate.pricing import Pricer
from orchestrator.calibrate.runs import load
from orchestrator.commands import arguments, command, usage

CONFIG = {"model_type": "gpt2", "n_layer": 8, "n_embd": 256, "n_head": 8, "n_positions": 128, "vocab_size": 260, "n_inner": 1024}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
FITTED = ((1, 1, 1), (1, 1, 8), (4, 1, 1), (4, 1, 32), (1, 4, 1), (1, 4, 8))
"""(tp, pp, micro_batch_size) on 4 ranks: dp, tp and pp alone, each with the smallest micro-batch and with a large one."""
JUDGED = (
    *((1, 1, 2), (4, 1, 8), (1, 4, 2), (2, 1, 1), (2, 1, 2), (2, 1, 8)),
    *((1, 2, 1), (1, 2, 4), (1, 2, 16), (2, 2, 1), (2, 2, 4), (2, 2, 16)),
)
SOME_LEFT = 3


def run_folder(folder: Path, plan: tuple[int, int, int]) -> Path:
    tp, pp, mbs = plan
    return folder / f"tp{tp}_pp{pp}_mbs{mbs}"


def run(folder: Path, config: Path, plan: tuple[int, int, int], steps: int) -> Path:
    """A run folder of this plan; an existing one is taken as it is."""
    tp, pp, mbs = plan
    out = run_folder(folder, plan)
    if not (out / "metrics.jsonl").is_file():
        words = [
            f"model.hf_config={config}",
            "recipe=gpt_tiny",
            "gpus=4",
            "engine=megatron",
            "train.seq_length=128",
            "train.global_batch_size=32",
        ]
        words += [f"train.steps={steps}", f"pin.tp={tp}", f"pin.pp={pp}", f"pin.micro_batch_size={mbs}", "pin.vpp=1", "pin.recompute=none"]
        words += ["pin.zero_stage=0", "pin.sequence_parallel=false", f"out={out}"]
        subprocess.run([sys.executable, "-m", "orchestrator.run", *words], check=True, stdout=subprocess.DEVNULL)
    return out


def concluded(named: Mapping[str, str], ran: int, plans: int, folder: Path) -> int:
    """Prints figures by name; the exit status, SOME_LEFT where not all plans have run."""
    for name, value in {"plans": f"{ran} of {plans}", **named}.items():
        print(f"{name:36s}{value}")
    if ran == plans:
        return 0
    print(f"the same command with out={folder} goes on with the rest")
    return SOME_LEFT


def main(words: Sequence[str]) -> int:
    given = arguments(words, ("out", "steps", "part_s"))
    started, part_s = time.monotonic(), float(given.get("part_s", "inf"))
    folder = Path(given.get("out") or tempfile.mkdtemp(prefix="calibrate_gloo_"))
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "config.json"
    config.write_text(json.dumps({**CONFIG, **NO_DROPOUT}))
    measured = {}
    for plan in (*FITTED, *JUDGED):
        if time.monotonic() - started > part_s and not (run_folder(folder, plan) / "metrics.jsonl").is_file():
            print(f"{len(FITTED) + len(JUDGED) - len(measured)} runs are left")
            return SOME_LEFT
        runs = load(run(folder, config, plan, int(given.get("steps", "5"))))
        measured[plan] = runs[0]
        print(f"tp={plan[0]} pp={plan[1]} mbs={plan[2]}: {runs[0].time_s:.2f} s a step", flush=True)
    found = fit([measured[plan] for plan in FITTED], CPU_NAMES, prior=0.05)
    print(f"fitted on {found.runs} runs, median error {found.median_error:.1%}: {found.constants}")
    rows = []
    for name, constants in (("datasheet", {}), ("calibrated", found.constants)):
        pricer = Pricer(chooser({("megatron", "cpu"): constants}))
        rows = [(plan, measured[plan].time_s or 0.0, (pricer.score(measured[plan]) or (0.0, 0.0))[0]) for plan in JUDGED]
        best = min(rows, key=lambda row: row[2])
        fastest = min(rows, key=lambda row: row[1])
        rank = spearmanr([row[2] for row in rows], [row[1] for row in rows]).statistic
        errors = sorted(abs(predicted / seconds - 1) for _, seconds, predicted in rows)
        print(f"{name}: Spearman {rank:.2f}, ranked first takes {best[1] / fastest[1] - 1:.1%} longer than the fastest,", end=" ")
        print(f"median error {errors[len(errors) // 2]:.1%}")
    for (tp, pp, mbs), seconds, predicted in rows:
        print(f"  tp={tp} pp={pp} mbs={mbs}: measured {seconds:.2f} s, predicted {predicted:.2f} s ({predicted / seconds - 1:+.0%})")
    return 0


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:], lambda: usage(__doc__), main))
