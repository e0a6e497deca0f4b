"""Stands in for a fork's pretrain_gpt.py: takes exactly Megatron-LM's flags (the parser's dump of tag core_v0.16.1), trains a line of
numbers with gloo, the slower the larger its micro-batch, and prints as Megatron does. Writes what it was given to argv.json and
parsed.json."""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

FLAGS = "T_FLAGS"
"""The variable that names the parser's dump."""
TYPES = {"int": int, "float": float, "str": str}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(allow_abbrev=False)
    with Path(os.environ[FLAGS]).open() as file:
        for row in csv.DictReader(file):
            if row["flag"] == "--help":
                continue
            names = row["flag"].split("|")
            if row["nargs"] == "0":
                made.add_argument(*names, action="store_true")
            else:
                nargs = int(row["nargs"]) if row["nargs"].isdecimal() else row["nargs"] or None
                made.add_argument(*names, type=TYPES.get(row["type"], str), nargs=nargs)
    return made


def main() -> None:
    arguments = parser().parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        Path("argv.json").write_text(json.dumps(sys.argv[1:]))
        Path("parsed.json").write_text(json.dumps({name: value for name, value in vars(arguments).items() if value}))
    if rank == world - 1:
        print(f"[Rank {rank}] (after 1 iterations) memory (MB) | allocated: 10.5 | max allocated: 20.5 | reserved: 30.0", flush=True)
    for step in range(1, arguments.train_iters + 1):
        begin = time.perf_counter()
        value = torch.ones(1) / step
        dist.all_reduce(value)
        work = 0.02 * arguments.micro_batch_size
        seconds = time.perf_counter() - begin + work
        time.sleep(work)
        if rank == world - 1:
            print(
                f" [2026-01-01 00:00:00.000000] iteration {step:8d}/{arguments.train_iters:8d} | consumed samples: {step * 16:12d} | "
                f"elapsed time per iteration (ms): {1000 * seconds:.1f} | throughput per GPU (TFLOP/s/GPU): 0.1 | "
                f"learning rate: {arguments.lr:.6E} | global batch size: {arguments.global_batch_size:5d} | "
                f"lm loss: {value.item():.6E} | loss scale: 1.0 | grad norm: 1.000 | number of skipped iterations:   0 | "
                f"number of nan iterations:   0 |",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
