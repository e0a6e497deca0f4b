"""A benchmark, not a test: is what tune=5 takes the fastest of all legal plans of a small GPT on 4 gloo ranks, or within 2% of it?

    python tests/benchmarks/tune_gloo.py [out=FOLDER] [steps=6] [k=5] [rounds=3] [limit_s=480]

On an idle machine: python tests/benchmarks/tune_gloo.py out=/tmp/tune_gloo

The model of calibrate_gloo.py; the legal plans are its eighteen of tp, pp and micro-batch, and those between (other choices are pinned).
First the tune, from the datasheet's prices, then every plan, those first that are nearest to the one it took; of those within CLOSE of the
fastest (later within CLOSER), and of the one that the tune took, more runs there and back until each has `rounds`; the median of all steps
counts, as in a tune: two runs of one plan differ by 10% and more here. No run is begun after `limit_s` seconds: what has run by then is
judged, and the same command with the same out= goes on with the rest.

On 2026-11-23, 2 cores of an AMD EPYC, nothing else running, rounds=8 and steps=12 after a first rounds=3 with 6: two tunes took tp=1 pp=2
mbs=16, the fastest of the 29: 1.094 s over eight runs, before 1.101 with mbs=8 (whose best run is 2.5% before the other's best).
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
from statistics import median

from calibrate_gloo import CONFIG, NO_DROPOUT, SOME_LEFT, concluded, run, run_folder

from orchestrator.commands import arguments, command, usage
from orchestrator.launch import program_metrics
from orchestrator.report.measured import steady_steps
from orchestrator.tuning import read_trials

CLOSE, CLOSER = 1.25, 1.1  # from the fourth run on
LEGAL = [(tp, pp, mbs) for tp in (1, 2, 4) for pp in (1, 2, 4) if tp * pp <= 4
         for mbs in (1, 2, 4, 8, 16, 32) if mbs * pp <= 32 and mbs <= 32 * tp * pp // 4]  # fmt: skip
"""(tp, pp, micro-batch): at least as many micro-batches as stages."""
Runs = dict[tuple[int, int, int], list[list[float]]]
"""By plan and run, the seconds of each step after warm-up."""


def main(words: Sequence[str]) -> int:
    given = arguments(words, ("out", "steps", "k", "rounds", "limit_s"))
    began, limit_s, rounds = time.monotonic(), float(given.get("limit_s", "480")), int(given.get("rounds", "3"))
    folder = Path(given.get("out") or tempfile.mkdtemp(prefix="tune_gloo_"))
    folder.mkdir(parents=True, exist_ok=True)
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
    taken = min((seconds, plan) for plan, seconds in trials.items() if seconds is not None)[1]
    measured: Runs = {}
    wanted = 0
    for number in range(1, rounds + 1):
        plans = nearest_first(taken) if number == 1 else close_to_fastest(measured, taken, CLOSE if number <= 3 else CLOSER)
        for plan in plans if number % 2 else plans[::-1]:
            wanted += 1
            runs = folder / f"run{number}"
            if time.monotonic() - began > limit_s and not (run_folder(runs, plan) / "metrics.jsonl").is_file():
                continue
            runs.mkdir(exist_ok=True)
            rows = program_metrics.rows_of(run(runs, config, plan, int(steps)) / "metrics.jsonl")
            measured.setdefault(plan, []).append(steady_steps(rows))
            was = trials.get(plan)
            at = f"{time.monotonic() - began:.0f} s, run {number} of tp={plan[0]} pp={plan[1]} mbs={plan[2]}"
            print(f"{at}: {median(measured[plan][-1]):.3f} s" + (f", tuned {was:.3f} s" if was else ""), flush=True)
    if taken not in measured:
        print(f"the plan that the tune took has not run again in {limit_s:.0f} s; the same command with out={folder} goes on")
        return SOME_LEFT
    step = {plan: of_all(runs) for plan, runs in measured.items()}
    fastest = min(step, key=lambda plan: step[plan])
    print("\nplan                      step   in the tune   each run")
    for plan, seconds in sorted(step.items(), key=lambda one: one[1]):
        was = trials.get(plan)
        tuned_s = f"{was:11.3f} s" if was else f"{'':13s}"
        each = " ".join(f"{median(run):.3f}" for run in measured[plan])
        print(f"tp={plan[0]} pp={plan[1]} mbs={plan[2]:<11d} {seconds:6.3f} s {tuned_s}   {each}")
    named = {
        "tried by the tune": str(len(trials)),
        "tune took": "tp={} pp={} mbs={}".format(*taken),
        "that, against the fastest": f"+{step[taken] / step[fastest] - 1:.1%} (goal: 2%)",
    }
    return concluded(named, sum(map(len, measured.values())), wanted, folder)


def of_all(runs: Sequence[Sequence[float]]) -> float:
    """Seconds: the median of the steps of all runs."""
    return median(seconds for run in runs for seconds in run)


def close_to_fastest(measured: Runs, taken: tuple[int, int, int], close: float) -> list[tuple[int, int, int]]:
    """Those whose step took at most `close` times the fastest's, and the one taken."""
    limit = close * min(map(of_all, measured.values()), default=0.0)
    return [plan for plan, runs in measured.items() if plan == taken or of_all(runs) <= limit]


def nearest_first(taken: tuple[int, int, int]) -> list[tuple[int, int, int]]:
    """The legal plans by how many doublings of tp, pp and micro-batch they are from the one that the tune took."""
    return sorted(LEGAL, key=lambda plan: sum(abs(log2(mine / its)) for mine, its in zip(plan, taken, strict=True)))


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:], lambda: usage(__doc__), main))
