"""A benchmark, not a test: a host that is slowed down on purpose, and ten steps of a run that say so.

    python tests/benchmarks/slow_host.py [out=FOLDER] [us=40] [rounds=2]

Two gloo ranks of a small and narrow GPT, whose Python takes `us` microseconds longer for every operation that it asks torch for (a profile
hook in each rank's interpreter, which spins), before and after alike: a host that decides how long a step takes. The datasheet's constants
know nothing of that. The first ten steps of a run of thirty are handed to python -m orchestrator.calibrate; what it writes prices the
other twenty, and three plans that it has not seen, of which each round has a run behind it. Load shows in the numbers: give the ranks a
priority (echo -12 > /proc/$$/autogroup), and read the ratios of each round apart.

On 2026-11-28, 2 cores of an AMD EPYC shared with other work (load 8 to 11, then 4 to 6), two rounds: of the run itself, predicted over
measured seconds went from .04 to .98 and from .17 to 1.06 on the steps after the ten, with steps that differ by half among themselves.
Before fits began from slower hosts too it ended at .41. Plans not seen are nearer, not near: mbs=4 .08 to .56 and .27 to .51, tp=2 .07
to .86 and .17 to .57, pp=2 .18 to 2.17 and .20 to .68. One plan's seconds don't say what of the host's is for each micro-batch and what
once a step.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from calibrate_gloo import CONFIG, NO_DROPOUT

from orchestrator.calibrate.pricing import Pricer, zero_shot
from orchestrator.calibrate.runs import Run, load
from orchestrator.commands import arguments, command, usage
from orchestrator.cost.calibration import read_file

HOOK = """
import os, sys, time
if "RANK" in os.environ:
    longer = float(os.environ["SLOW_HOST_US"]) * 1e-6
    def slow(frame, event, arg):
        if event == "c_call":
            owner = getattr(arg, "__module__", None) or type(getattr(arg, "__self__", None)).__module__
            until = time.perf_counter() + longer * str(owner).startswith("torch")
            while time.perf_counter() < until:
                pass
    sys.setprofile(slow)
"""
"""sitecustomize.py of the ranks."""
NARROW = {"n_embd": 64, "n_head": 4, "n_inner": 256}
SEEN, OTHERS = (1, 1, 1), ((1, 1, 4), (2, 1, 2), (1, 2, 2))
"""(tp, pp, micro_batch_size) on two ranks: the run that is calibrated on, and those that are priced with what it says."""
TEN, ALL = 10, 30


def run(out: Path, config: Path, plan: tuple[int, int, int], steps: int, slowed: dict[str, str]) -> Run:
    """A run of the plan under the hook."""
    tp, pp, mbs = plan
    words = [f"model.hf_config={config}", "recipe=gpt_tiny", "gpus=2", "engine=megatron", "train.seq_length=128",
             "train.global_batch_size=8", f"train.steps={steps}", f"pin.tp={tp}", f"pin.pp={pp}", f"pin.micro_batch_size={mbs}",
             "pin.vpp=1", "pin.recompute=none", "pin.zero_stage=0", "pin.sequence_parallel=false", f"out={out}"]  # fmt: skip
    subprocess.run([sys.executable, "-m", "orchestrator.run", *words], check=True, stdout=subprocess.DEVNULL, env=os.environ | slowed)
    (found,) = load(out)
    return found


def seconds_of(folder: Path) -> list[float]:
    return [json.loads(line)["step_time_s"] for line in (folder / "metrics.jsonl").read_text().splitlines() if '"step_time_s"' in line]


def main(words: Sequence[str]) -> int:
    given = arguments(words, ("out", "us", "rounds"))
    folder = Path(given.get("out") or tempfile.mkdtemp(prefix="slow_host_"))
    hook, config = folder / "hook", folder / "config.json"
    hook.mkdir(parents=True, exist_ok=True)
    (hook / "sitecustomize.py").write_text(HOOK)
    config.write_text(json.dumps({**CONFIG, **NO_DROPOUT, **NARROW}))
    path = os.pathsep.join(filter(None, (str(hook), os.environ.get("PYTHONPATH"))))
    slowed = {"PYTHONPATH": path, "SLOW_HOST_US": given.get("us", "40")}
    print("round  plan                  measured  before  after  (predicted over measured)", flush=True)
    for number in range(int(given.get("rounds", "2"))):
        here = folder / f"round-{number + 1}"
        whole, ten, constants = here / "whole", here / "ten", here / "constants.json"
        runs = {SEEN: run(whole, config, SEEN, ALL, slowed)}
        ten.mkdir()
        shutil.copy(whole / "plan.json", ten)
        (ten / "metrics.jsonl").write_text("".join((whole / "metrics.jsonl").read_text().splitlines(keepends=True)[:TEN]))
        fit = [sys.executable, "-m", "orchestrator.calibrate", f"runs={ten}", f"out={constants}"]
        subprocess.run(fit, check=True, stdout=subprocess.DEVNULL)
        file = read_file(constants)
        pricers = Pricer(zero_shot), Pricer(lambda one, file=file: file.calibration(zero_shot(one)))  # type: ignore[misc]
        measured = {SEEN: median(seconds_of(whole)[TEN:])}
        for plan in OTHERS:
            runs[plan] = run(here / "-".join(map(str, plan)), config, plan, TEN, slowed)
            measured[plan] = runs[plan].time_s or 0.0
        for (tp, pp, mbs), found in measured.items():
            before, after = ((pricer.score(runs[tp, pp, mbs]) or (0.0, 0.0))[0] / found for pricer in pricers)
            what = "steps 11 to 30" if (tp, pp, mbs) == SEEN else "not seen"
            print(f"{number + 1:5d}  tp={tp} pp={pp} mbs={mbs:<10d} {found:8.3f} s {before:7.2f} {after:6.2f}  {what}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:], lambda: usage(__doc__), main))
