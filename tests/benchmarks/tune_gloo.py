"""A benchmark, not a test: is what tune=5 takes the fastest of all legal plans of a small GPT on 4 gloo ranks, or within 2% of it?

    python tests/benchmarks/tune_gloo.py [out=FOLDER] [steps=8] [k=5]

The model of calibrate_gloo.py; the legal plans are its eighteen of tp, pp and micro-batch, and those between (other choices are pinned).
First the tune, from the datasheet's prices, then every plan that it did not try. A folder that has some of it already is continued. Run it
on an idle machine: two runs of one plan differ by more than 2% where others work too.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from calibrate_gloo import CONFIG, NO_DROPOUT, run

from orchestrator.commands import arguments, command, usage
from orchestrator.tuning import read_trials
from orchestrator.validate import own

LEGAL = [(tp, pp, mbs) for tp in (1, 2, 4) for pp in (1, 2, 4) if tp * pp <= 4
         for mbs in (1, 2, 4, 8, 16, 32) if mbs * pp <= 32 and mbs <= 32 * tp * pp // 4]  # fmt: skip
"""(tp, pp, micro-batch): at least as many micro-batches as stages."""


def main(words: Sequence[str]) -> int:
    given = arguments(words, ("out", "steps", "k"))
    folder = Path(given.get("out") or tempfile.mkdtemp(prefix="tune_gloo_"))
    (folder / "all").mkdir(parents=True, exist_ok=True)
    config = folder / "config.json"
    config.write_text(json.dumps({**CONFIG, **NO_DROPOUT}))
    steps = given.get("steps", "8")
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
    for plan in LEGAL:
        (found,) = own.load(run(folder / "all", config, plan, int(steps)))
        measured[plan] = found.time_s or 0.0
        was = trials.get(plan)
        print(f"tp={plan[0]} pp={plan[1]} mbs={plan[2]}: {measured[plan]:.3f} s" + (f", tuned {was:.3f} s" if was else ""), flush=True)
    fastest = min(measured, key=lambda plan: measured[plan])
    again = measured.get(taken[1], taken[0])
    print(f"of {len(measured)} plans the fastest is {fastest}, {measured[fastest]:.3f} s;", end=" ")
    print(f"tune took {taken[1]}, there {again:.3f} s, {again / measured[fastest] - 1:.1%} longer")
    return 0


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:], lambda: usage(__doc__), main))
