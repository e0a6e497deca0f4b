"""A benchmark, not a test: are twelve gloo plans of a small GPT ranked right by a profile of this machine, without a training run?

    python tests/benchmarks/profile_gloo.py [out=FOLDER] [steps=6]

The model and the twelve plans of calibrate_gloo.py, on 4 ranks that share this machine's cores. First python -m orchestrator.profile, then
the plans. A folder that has some of it already is continued. Run it on an idle machine: load shows in the numbers, and what is predicted is
the machine as it was while it was profiled.

On 2026-11-22, 2 cores of an AMD EPYC under a load of 20 from other work: the profile took 141 s; the plan ranked first was the fastest of
the twelve (by datasheets 41% slower than that); Spearman .6, where the steps of a single plan spread by a factor of two; predictions were
1.6 times too long in the median, within 11% of that factor. Not yet run on an idle machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from calibrate_gloo import CONFIG, JUDGED, NO_DROPOUT, run

from orchestrator.commands import arguments, command, usage
from orchestrator.cost.calibration import read_file
from orchestrator.recipe.clusters import load_cluster
from orchestrator.validate import own
from orchestrator.validate.metrics import spearman
from orchestrator.validate.pricing import Pricer, zero_shot


def main(words: Sequence[str]) -> int:
    given = arguments(words, ("out", "steps"))
    folder = Path(given.get("out") or tempfile.mkdtemp(prefix="profile_gloo_"))
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    config = folder / "config.json"
    config.write_text(json.dumps({**CONFIG, **NO_DROPOUT}))
    profile = folder / "profile"
    if not (profile / "profile.json").is_file():
        keys = ["recipe=gpt_tiny", "gpus=4", "engine=megatron", "train.seq_length=128", "train.global_batch_size=32"]
        subprocess.run([sys.executable, "-m", "orchestrator.profile", f"model.hf_config={config}", *keys, f"out={profile}"], check=True)
    print(f"the profile took {json.loads((profile / 'profile.json').read_text())['seconds']:.0f} s of the ranks", flush=True)
    file, cluster = read_file(profile / "megatron-cpu.json"), load_cluster(str(profile / "cluster.yaml"), 4)
    pricer = Pricer(lambda measured: file.calibration(zero_shot(measured)))
    rows = []
    for plan in JUDGED:
        (measured,) = own.load(run(folder / "runs", config, plan, int(given.get("steps", "6"))))
        predicted = (pricer.score(replace(measured, cluster=cluster)) or (0.0, 0.0))[0]
        rows.append((plan, measured.time_s or 0.0, predicted))
        print(f"tp={plan[0]} pp={plan[1]} mbs={plan[2]}: {rows[-1][1]:.2f} s a step, predicted {predicted:.2f} s", flush=True)
    best, fastest = min(rows, key=lambda row: row[2]), min(rows, key=lambda row: row[1])
    errors = sorted(abs(predicted / seconds - 1) for _, seconds, predicted in rows)
    rank = spearman([row[2] for row in rows], [row[1] for row in rows])
    print(f"Spearman {rank:.2f}, ranked first takes {best[1] / fastest[1] - 1:.1%} longer than the fastest", end=", ")
    print(f"median error {errors[len(errors) // 2]:.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:], lambda: usage(__doc__), main))
