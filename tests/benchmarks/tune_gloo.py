"""A benchmark, not a test: is what tune=5 takes the fastest of all legal plans of a small GPT on 4 gloo ranks, or within 2% of it?

    python tests/benchmarks/tune_gloo.py [out=FOLDER] [steps=6] [k=5] [limit_s=480]

On an idle machine: python tests/benchmarks/tune_gloo.py out=/tmp/tune_gloo

The model of calibrate_gloo.py; the legal plans are its eighteen of tp, pp and micro-batch, and those between (other choices are pinned).
First the tune, from the datasheet's prices, then every plan, those first that are nearest to the one it took. No run is begun
after `limit_s` seconds: what has run by then is judged, and the same command with the same out= goes on with the rest. Two runs of one plan
differ by more than 2% where others work too.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from math import log2
from pathlib import Path

from calibrate_gloo import CONFIG, NO_DROPOUT, SOME_LEFT, concluded, run, run_folder

from orchestrator.commands import arguments, command, usage
from orchestrator.tuning import read_trials
from orchestrator.validate import own

LEGAL = [(tp, pp, mbs) for tp in (1, 2, 4) for pp in (1, 2, 4) if tp * pp <= 4
         for mbs in (1, 2, 4, 8, 16, 32) if mbs * pp <= 32 and mbs <= 32 * tp * pp // 4]  # fmt: skip
"""(tp, pp, micro-batch): at least as many micro-batches as stages."""


def main(words: Sequence[str]) -> int:
    given = arguments(words, ("out", "steps", "k", "limit_s"))
    began, limit_s = time.monotonic(), float(given.get("limit_s", "480"))
    folder = Path(given.get("out") or tempfile.mkdtemp(prefix="tune_gloo_"))
    (folder / "all").mkdir(parents=True, exist_ok=True)
    config = folder / "config.json"
    config.write_text(json.dumps({**CONFIG, **NO_DROPOUT}))
    steps = given.get("steps", "6")
    print(f"in {folder}: a tune, then {len(LEGAL)} plans; nothing is begun after {limit_s:.0f} s", flush=True)
    out = folder / "tuned"
    if not (out / "status.json").is_file():
        keys = [f"model.hf_config={config}", "recipe=gpt_tiny", "gpus=4", "engine=megatron", "train.seq_length=128",
                "train.global_batch_size=32", f"train.steps={steps}", "pin.vpp=1", "pin.recompute=none", "pin.zero_stage=0", "pin.cp=1",
                "pin.sequence_parallel=false", "calibration=datasheet"]  # fmt: skip
        keys += [f"tune={given.get('k', '5')}", f"tune.steps={steps}", f"out={out}"]
        subprocess.run([sys.executable, "-m", "orchestrator.run", *keys], check=True)
    trials = {(t.plan.tp, t.plan.pp, t.plan.micro_batch_size): t.measured_s for t in read_trials(out)}
    taken = min((seconds, plan) for plan, seconds in trials.items() if seconds is not None)
    measured: dict[tuple[int, int, int], float] = {}
    for plan in nearest_first(taken[1]):
        if time.monotonic() - began > limit_s and not (run_folder(folder / "all", plan) / "metrics.jsonl").is_file():
            continue
        (found,) = own.load(run(folder / "all", config, plan, int(steps)))
        measured[plan] = found.time_s or 0.0
        was = trials.get(plan)
        at = f"{time.monotonic() - began:.0f} s, {len(measured)} of {len(LEGAL)}: tp={plan[0]} pp={plan[1]} mbs={plan[2]}"
        print(f"{at}: {measured[plan]:.3f} s" + (f", tuned {was:.3f} s" if was else ""), flush=True)
    if taken[1] not in measured:
        print(f"the plan that the tune took has not run again in {limit_s:.0f} s; the same command with out={folder} goes on")
        return SOME_LEFT
    fastest = min(measured, key=lambda plan: measured[plan])
    print("\nplan                   measured   in the tune")
    for plan, seconds in sorted(measured.items(), key=lambda one: one[1]):
        was = trials.get(plan)
        print(f"tp={plan[0]} pp={plan[1]} mbs={plan[2]:<11d} {seconds:8.3f} s" + (f" {was:11.3f} s" if was else ""))
    named = {
        "tried by the tune": str(len(trials)),
        "tune took": "tp={} pp={} mbs={}".format(*taken[1]),
        "that, against the fastest": f"+{measured[taken[1]] / measured[fastest] - 1:.1%} (goal: 2%)",
    }
    return concluded(named, len(measured), len(LEGAL), folder)


def nearest_first(taken: tuple[int, int, int]) -> list[tuple[int, int, int]]:
    """The legal plans by how many doublings of tp, pp and micro-batch they are from the one that the tune took."""
    return sorted(LEGAL, key=lambda plan: sum(abs(log2(mine / its)) for mine, its in zip(plan, taken, strict=True)))


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:], lambda: usage(__doc__), main))
