"""Ranks of a job without launch.sh and without the seconds that each would import: forked from a server that has everything imported."""

from __future__ import annotations

import multiprocessing as mp
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from fork_servers import fork_server
from ports import free_port

HERE = str(Path(__file__).parent)
LIMIT_S = 120.0
MORE: dict[str, str] = {}
"""What ranks have in their environment beside their places."""


def _rank(module: str, words: Sequence[str], folder: str, environment: dict[str, str], log: str) -> None:
    """One rank, from its command to its end."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    mp.set_start_method("fork", force=True)  # as in a program that was not forked by a server: torch's data loaders start processes
    os.chdir(folder)
    os.environ |= environment
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def start_server(imports: str = "own_imports") -> mp.context.ForkServerContext:
    """With everything imported that the module `imports` does; as tests/workers/worker_pool.py does."""
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return fork_server([imports], HERE)


def run(
    context: mp.context.ForkServerContext,
    module: str,
    words: Sequence[str],
    folder: Path,
    world: int,
    meanwhile: Callable[[int], None] = lambda process: None,
) -> list[int | None]:
    """The exit codes of all ranks of `python -m module words` in the folder; their output is in logs/rank-N.log. `meanwhile` is called with
    the first rank's process id once all have started."""
    (folder / "logs").mkdir(exist_ok=True)
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    ranks = [
        context.Process(
            target=_rank,
            args=(
                module,
                words,
                str(folder),
                meet | MORE | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                str(folder / "logs" / f"rank-{rank}.log"),
            ),
        )
        for rank in range(world)
    ]
    for rank in ranks:
        rank.start()
    meanwhile(ranks[0].pid or 0)
    for rank in ranks:
        rank.join(LIMIT_S)
        if rank.is_alive():
            rank.kill()
    return [rank.exitcode for rank in ranks]
