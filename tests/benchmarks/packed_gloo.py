"""A benchmark, not a test: is what packing gains on 2 gloo ranks what the planner says, for six draws of lengths under two engines?

    python tests/benchmarks/packed_gloo.py [out=FOLDER] [steps=6] [rounds=2]

Log-normal lengths, prompts and completions in bytes. Packed and padded runs of a case alternate, so that other work beside them falls on
both; the median of a kind's steps counts, and the gain is in samples a second: sequences hold several when packed. A folder that has some
of the runs already is continued.

On 2026-11-27, 2 cores with a load of 7 to 12 beside it, rounds=2 and steps=5: predicted gains off by -1.5%, +2.2% and -13.4% under
megatron, by +6.5%, -26.9% and -22.1% under deepspeed, while steps of one plan differed by up to 3.5 times: no judgement. Run it on an
idle machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

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


def keys(engine: str, seq_length: int, data: Path, steps: int, *, packing: bool) -> dict[str, str]:
    model = {"hidden_size": 256, "ffn_hidden_size": 768, "num_attention_heads": 8, "max_position_embeddings": seq_length}
    found = {"recipe": "llama_tiny", "cluster": "cpu", "gpus": 2, "task": "sft", "engine": engine, "data": data, "train.steps": steps,
             "train.seq_length": seq_length, "train.global_batch_size": 8, "pin.tp": 1, "pin.pp": 1, "pin.cp": 1, "pin.micro_batch_size": 1,
             "pin.zero_stage": 1, "pin.recompute": "none", "data.packing": str(packing).lower()}  # fmt: skip
    return {name: str(value) for name, value in (found | {f"model.{name}": value for name, value in model.items()}).items()}


def main(words: Sequence[str]) -> None:
    given = arguments(words, ("out", "steps", "rounds"))
    steps, folder = int(given.get("steps", "6")), Path(given.get("out") or tempfile.mkdtemp(prefix="packed_gloo_"))
    folder.mkdir(parents=True, exist_ok=True)
    print("engine      lengths    sequence  gain: measured  predicted  off   steps of each run, packed | padded", flush=True)
    for engine, mean, spread, seq_length in CASES:
        counts = [max(4, count) for count in drawn(Responses(mean=mean, spread=spread, longest=seq_length), SAMPLES, seed=0)]
        data = folder / f"{mean}_{seq_length}.jsonl"
        data.write_text("".join(json.dumps({"prompt": "ab", "completion": "c" * (count - 3)}) + "\n" for count in counts))
        runs: dict[bool, list[list[float]]] = {True: [], False: []}
        for number in range(int(given.get("rounds", "2"))):
            for packing in (True, False) if number % 2 == 0 else (False, True):
                asked = keys(engine, seq_length, data, steps, packing=packing)
                out = folder / f"{engine}_{mean}_{seq_length}_{packing}_{number}"
                if not (out / "metrics.jsonl").is_file():
                    said = [f"{name}={value}" for name, value in asked.items()]
                    subprocess.run([sys.executable, "-m", "orchestrator.run", *said, f"out={out}"], check=True, stdout=subprocess.DEVNULL)
                runs[packing].append(steady_steps(program_metrics.rows_of(out / "metrics.jsonl")))
        price = {packing: so.plan(**keys(engine, seq_length, data, steps, packing=packing)).step_time_s for packing in (True, False)}
        each = seq_length / lengths(counts, seq_length).mean
        step = {packing: median(second for run in found for second in run) for packing, found in runs.items()}
        measured, predicted = (each * seconds[False] / seconds[True] for seconds in (step, price))
        said_steps = " | ".join(" ".join(f"{median(run):.3f}" for run in runs[packing]) for packing in (True, False))
        off = f"{measured:14.2f}  {predicted:9.2f}  {predicted / measured - 1:+5.1%}"
        print(f"{engine:10s}  {mean:4d}+{spread:<4d}  {seq_length:7d}  {off}  {said_steps}", flush=True)


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:], lambda: usage(__doc__), main))
