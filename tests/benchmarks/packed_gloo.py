"""A benchmark, not a test: is what packing gains on 2 gloo ranks what the planner says, for six draws of lengths under two engines?

    python tests/benchmarks/packed_gloo.py [out=FOLDER] [steps=6] [rounds=2] [rules=no|yes]

Log-normal lengths, prompts and completions in bytes. Each engine and length is profiled once, and priced by that. Packed and padded runs
of a case alternate, so that other work beside them falls on both; a run counts by the mean of its steps, since packed ones differ in what
attention has to compute, and of the rounds the median of their ratios. The gain is in samples a second: sequences hold several when packed.
A folder that has some of the runs already is continued. rules=yes trains megatron's last case under the three rules of data.balance in
turn instead, and holds their seconds against the prices.

On 2026-11-29, 2 cores of an AMD EPYC, ranks at nice -20 without autogroups, others below (load 9), rounds=4 and steps=8: predicted gains
off by +9.9, +1.6 and +5.5% under megatron and +2.7, -0.6 and -7.6% under deepspeed, by what profiles of that noon measured, concluded
anew by 319b1050 (deepspeed's runs are of the night before and that morning); the first case with rounds=10 by +7.2%. Rounds of one case
differ by a fifth. Before, all by causes that were missing: -21.3% where glibc mapped each tensor of 32 MiB anew and +20.1% where it gave
back what lay free above 4 GiB (`translation.environment`); +24.9% where nothing knew that a rank waits for the one with the longest
samples; -15.2% where a profile did not fit attention on CPUs and took it for products; +26.4% where launches were hidden behind computing
on cores too, a step's own overhead was in the profile's prices and not in its measurements, and its case of shorter sequences had fewer
tokens. rules=yes with rounds=2 and steps=12: none 2.65 and 2.84 s, step 2.34 and 2.60, epoch 2.17 and 2.49, in the order of the prices
(1.99, 1.89, 1.86), whose differences are less.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

import orchestrator as so
from orchestrator.commands import arguments, command, usage
from orchestrator.launch import program_metrics
from orchestrator.recipe.supervised import lengths
from orchestrator.report.measured import steady_steps
from orchestrator.rl.job import Responses
from orchestrator.rl.lengths import drawn

CASES = [(engine, *lengths) for lengths in ((60, 40, 512), (200, 150, 512), (250, 200, 1024)) for engine in ("megatron", "deepspeed")]
"""(engine, mean and standard deviation of samples in tokens, length of a sequence)."""
SAMPLES = 400


def work(engine: str, seq_length: int) -> dict[str, str]:
    """The model and its batches, as keys of a recipe."""
    model = {"hidden_size": 256, "ffn_hidden_size": 768, "num_attention_heads": 8, "max_position_embeddings": seq_length}
    found = {"recipe": "llama_tiny", "gpus": 2, "engine": engine, "train.seq_length": seq_length, "train.global_batch_size": 8}
    return {name: str(value) for name, value in (found | {f"model.{name}": value for name, value in model.items()}).items()}


def profiled(engine: str, seq_length: int, folder: Path) -> dict[str, str]:
    """The keys that price by what this machine takes for this work, measured if the folder has it not yet."""
    out = folder / f"profile_{engine}_{seq_length}"
    if not (out / "profile.json").is_file():
        shutil.rmtree(out, ignore_errors=True)  # of a profile that was ended
        said = [f"{name}={value}" for name, value in work(engine, seq_length).items()]
        subprocess.run([sys.executable, "-m", "orchestrator.profile", *said, f"out={out}"], check=True, stdout=subprocess.DEVNULL)
    return {"cluster": str(out / "cluster.yaml"), "calibration": str(out / f"{engine}-cpu.json")}


def fine_tuning(data: Path, steps: int, *, packing: bool, balance: str = "step") -> dict[str, str]:
    pins = {"tp": "1", "pp": "1", "cp": "1", "micro_batch_size": "1", "zero_stage": "1", "recompute": "none"}
    found = {"task": "sft", "data": str(data), "train.steps": str(steps), "data.packing": str(packing).lower()}
    rule = {"data.balance": balance} if packing else {}
    return found | rule | {f"pin.{name}": value for name, value in pins.items()}


def steps_of(asked: dict[str, str], out: Path) -> list[float]:
    """Steady seconds of each step of a run, which is started where the folder has none."""
    if not (out / "metrics.jsonl").is_file():
        said = [f"{name}={value}" for name, value in asked.items()]
        subprocess.run([sys.executable, "-m", "orchestrator.run", *said, f"out={out}"], check=True, stdout=subprocess.DEVNULL)
    return steady_steps(program_metrics.rows_of(out / "metrics.jsonl"))


def samples_of(mean: int, spread: int, seq_length: int, folder: Path) -> tuple[list[int], Path]:
    """Lengths of samples in tokens, and a file of them."""
    counts = [max(4, count) for count in drawn(Responses(mean=mean, spread=spread, longest=seq_length), SAMPLES, seed=0)]
    data = folder / f"{mean}_{seq_length}.jsonl"
    data.write_text("".join(json.dumps({"prompt": "ab", "completion": "c" * (count - 3)}) + "\n" for count in counts))
    return counts, data


def rules(steps: int, rounds: int, folder: Path) -> None:
    """Measured and predicted seconds of packed steps under each rule."""
    engine, mean, spread, seq_length = [case for case in CASES if case[0] == "megatron"][-1]
    _, data = samples_of(mean, spread, seq_length, folder)
    machine = work(engine, seq_length) | profiled(engine, seq_length, folder)
    asked = {rule: machine | fine_tuning(data, steps, packing=True, balance=rule) for rule in ("none", "step", "epoch")}
    runs: dict[str, list[float]] = {rule: [] for rule in asked}
    for number in range(rounds):
        for rule, keys in asked.items():
            runs[rule].append(fmean(steps_of(keys, folder / f"rule_{rule}_{number}")))
    for rule, keys in asked.items():
        each = " ".join(f"{seconds:.3f}" for seconds in runs[rule])
        predicted = so.plan(**keys).step_time_s
        print(f"data.balance={rule:5s}  measured {median(runs[rule]):.3f} s  predicted {predicted:.3f} s   {each}", flush=True)


def main(words: Sequence[str]) -> None:
    given = arguments(words, ("out", "steps", "rounds", "rules"))
    steps, rounds, folder = int(given.get("steps", "6")), int(given.get("rounds", "2")), Path(given.get("out") or tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    if given.get("rules") == "yes":
        rules(steps, rounds, folder)
        return
    print("engine      lengths    sequence  gain: measured  predicted  off   steps of each run, packed | padded", flush=True)
    for engine, mean, spread, seq_length in CASES:
        counts, data = samples_of(mean, spread, seq_length, folder)
        machine = work(engine, seq_length) | profiled(engine, seq_length, folder)
        runs: dict[bool, list[list[float]]] = {True: [], False: []}
        for number in range(rounds):
            for packing in (True, False) if number % 2 == 0 else (False, True):
                asked = machine | fine_tuning(data, steps, packing=packing)
                runs[packing].append(steps_of(asked, folder / f"{engine}_{mean}_{seq_length}_{packing}_{number}"))
        price = {packing: so.plan(**machine, **fine_tuning(data, steps, packing=packing)).step_time_s for packing in (True, False)}
        each = seq_length / lengths(counts, seq_length).mean
        pairs = [fmean(padded) / fmean(packed) for packed, padded in zip(runs[True], runs[False], strict=True)]
        measured, predicted = each * median(pairs), each * price[False] / price[True]
        said_steps = " | ".join(" ".join(f"{fmean(run):.3f}" for run in runs[packing]) for packing in (True, False))
        off = f"{measured:14.2f}  {predicted:9.2f}  {predicted / measured - 1:+5.1%}"
        print(f"{engine:10s}  {mean:4d}+{spread:<4d}  {seq_length:7d}  {off}  {said_steps}", flush=True)


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:], lambda: usage(__doc__), main))
