"""CPU seconds of planning a step of reinforcement learning from the shell, imports included: the least of several runs.

    python tests/benchmarks/rl_speed.py [runs=3]

The four jobs of issue 36, 512 prompts x 16 samples each. Not a test: times depend on the machine and on what else it does (with .pyc files
written, which PYTHONDONTWRITEBYTECODE prevents). On 2 cores of a Xeon at a load of 25 to 40 by others, 2026-11-27: 0.84, 2.6, 2.6 and 5.7 s
(0.8, 12, 12 and 15 s before micro-batches of several long sequences were left out and divisions were tried by what is known of training).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

from orchestrator.commands import arguments, command, usage

JOBS: Final = {("qwen3_8b", 8): 8192, ("qwen3_30b_a3b", 32): 8192, ("qwen3_30b_a3b", 64): 8192, ("deepseek_v3", 512): 3584}
"""Recipes, GPUs, and the longest response in tokens."""
WORDS: Final = "rl.prompts=512 rl.samples=16 rl.prompt_length=512 rl.response_length=2000+1500 rl.algorithm=grpo cluster=dgx_h100"


def seconds(recipe: str, gpus: int, longest: int) -> float:
    """CPU seconds of one plan, in a process of its own."""
    words = [f"recipe={recipe}", f"gpus={gpus}", f"rl.max_response_length={longest}", *WORDS.split()]
    before = os.times()
    subprocess.run([sys.executable, "-m", "orchestrator", "plan", "task=rl", *words], check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    return after.children_user - before.children_user + after.children_system - before.children_system


def main(words: Sequence[str]) -> None:
    runs = int(arguments(words, ["runs"]).get("runs", "3"))
    for (recipe, gpus), longest in JOBS.items():
        print(f"{recipe} on {gpus} GPUs: {min(seconds(recipe, gpus, longest) for _ in range(runs)):.2f} CPU s", flush=True)


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:], lambda: usage(__doc__), main))
