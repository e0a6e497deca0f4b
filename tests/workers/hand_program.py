"""A user's program: the lines of BY_HAND.md, on CPU ranks, from the plan's first weights and with its samples in its order.

Usage, in a run's folder: hand_program.py WEIGHTS PROGRAM; PROGRAM: trainer, plain, accelerate. Prints the loss of each step.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist

import orchestrator
from orchestrator.plan import Plan, from_json
from orchestrator.workers import data, distributed
from orchestrator.workers.samples import TextSamples

# Only to save the minute in which DeepSpeed compiles an all-reduce over shared memory.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

PAGE = Path(orchestrator.__file__).parent / "engines" / "BY_HAND.md"
PROGRAMS = {"trainer": (0, 1), "plain": (0, 2, 3), "accelerate": (0, 2, 4)}
"""Blocks of its first section; the first is of ranks without GPUs."""


def blocks() -> list[str]:
    section = PAGE.read_text().split("\n## ")[1]
    found: list[list[str]] = [[]]
    for line in section.splitlines():
        if line.startswith("    ") or (not line and found[-1]):
            found[-1].append(line)
        elif found[-1]:
            found.append([])
    return [textwrap.dedent("\n".join(lines)) for lines in found if lines]


def run(number: int, space: dict[str, Any]) -> None:
    """Runs a block, whose names come into `space`."""
    exec(compile(blocks()[number], f"BY_HAND.md, block {number + 1}", "exec"), space)


class Samples(torch.utils.data.Dataset[Any]):
    """The plan's, by their number in the run."""

    def __init__(self, plan: Plan) -> None:
        corpus = data.open_corpus(plan, Path("data"), build=dist.get_rank() == 0, wait=dist.barrier)
        self.batches = TextSamples(plan, corpus.train, corpus.specials)
        self.count = plan.training.steps * plan.global_batch_size

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = self.batches.sample(index)
        labels = torch.tensor(sample["labels"])
        return {"input_ids": torch.tensor(sample["tokens"]), "labels": labels, "shift_labels": labels}


def batches(plan: Plan, samples: Samples) -> Any:
    """This rank's, under DeepSpeed's own loop."""
    size, replica = plan.micro_batch_size, dist.get_rank() // plan.tp
    for first in range(replica * size, len(samples), plan.dp * size):
        rows = [samples[first + at] for at in range(size)]
        yield {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def main() -> None:
    weights, program = sys.argv[1:]
    first, *others = PROGRAMS[program]
    run(first, {})
    plan = from_json(Path("plan.json").read_bytes())
    samples = Samples(plan)
    space: dict[str, Any] = {"weights": weights, "samples": samples, "loader": batches(plan, samples)}
    for number in others:
        run(number, space)
    if program == "trainer":
        losses = [row["loss"] for row in space["trainer"].state.log_history if "loss" in row]
    else:
        micro = torch.tensor(space["losses"], dtype=torch.float64)
        dist.all_reduce(micro)
        losses = (micro / dist.get_world_size()).view(-1, plan.num_microbatches).mean(1).tolist()
    if dist.get_rank() == 0:
        print("RESULT", json.dumps(losses), flush=True)
    dist.barrier()


if __name__ == "__main__":
    main()
    distributed.leave(0)
