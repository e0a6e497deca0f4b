"""CPU seconds of a sweep over six cluster sizes and three clusters, imports included; the goal is six.

    python tests/benchmarks/sweep_speed.py [recipe=llama3_8b] [repeats=3]

Each run is a fresh process. Prints each and the least; not a test, since times depend on the machine and on what else it does.
2026-11-22, 2 cores AMD EPYC, beside two other programs: 3.8 to 4.3 CPU s.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from orchestrator.commands import arguments, command, usage

SIZES, CLUSTERS = "8,16,32,64,128,256", "dgx_h100,dgx_b200,dgx_a100_80gb"


def run(words: Sequence[str]) -> None:
    asked = {"recipe": "llama3_8b", "repeats": "3"} | arguments(words, ("recipe", "repeats"))
    taken = []
    for _ in range(int(asked["repeats"])):
        before = os.times()
        program = [sys.executable, "-m", "orchestrator", "sweep", f"recipe={asked['recipe']}", f"gpus={SIZES}", f"cluster={CLUSTERS}"]
        subprocess.run(program, check=True, stdout=subprocess.DEVNULL)
        after = os.times()
        taken.append(after.children_user + after.children_system - before.children_user - before.children_system)
        print(f"{taken[-1]:.2f} CPU s")
    print(f"least of {len(taken)}: {min(taken):.2f} CPU s for 18 points")


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:], lambda: usage(__doc__), run))
