"""Eight ranks that stay: imports are done once, in a fork server, and every case is one message to as many ranks as it needs."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import signal
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fork_servers import fork_server

RANKS = 8
OURS = [
    "orchestrator.workers.megatron",
    "orchestrator.workers.megatron_deepspeed",
    "orchestrator.programs.hugging_face_steps",
    "worker_cases",
    "hf_cases",
    "traced_cases",
    "eval_cases",
    "timed_cases",
    "silent_cases",
]
THEIRS = [
    "deepspeed",
    # What the engines import at a first use, each rank anew, where these versions have it.
    "torch._dynamo",
    "torch._subclasses.schema_check_mode",
    "deepspeed.ops.op_builder.all_ops",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.sequence_parallel.ulysses_sp",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.module_inject.tp_plan_converter",
    "peft",
    "torch.utils.tensorboard",
    "transformers.integrations.deepspeed",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "llama", "qwen3", "bert", "t5", "mixtral", "qwen3_moe")),
]
PRELOAD = ["unhindered_imports", *OURS, *THEIRS]
HERE = str(Path(__file__).parent)
TIMEOUT_S = 120.0
MOST_THREADS = 80
"""Of a rank. Each group has three threads of gloo's, one of which wakes all the time, and some cases leave a group or two behind (the
others go with their trainer, worker_cases.py). A hundred in each of eight ranks take a quarter of a core; new ranks, forked with everything
imported, cost two CPU seconds."""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
    "DS_SKIP_CUDA_CHECK": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "MASTER_ADDR": "127.0.0.1",
}


def _serve(rank: int, connection: Connection, stacks: str) -> None:
    """One rank: run (function name, world size, store, arguments) messages until the pipe closes. SIGUSR2 writes its stacks to a file."""
    faulthandler.register(signal.SIGUSR2, file=Path(stacks).open("w"))  # noqa: SIM115  (open as long as the rank lives)
    gc.freeze()  # a case ends with a collection: 0.24 CPU seconds in each rank with the modules
    missing = [name for name in OURS if name not in sys.modules]
    while True:
        try:
            name, world_size, store, arguments = connection.recv()
        except EOFError:
            return
        try:
            assert not missing, f"the fork server did not import {', '.join(missing)}: every rank would for itself"
            import torch.distributed as dist

            cases = importlib.import_module("worker_cases")
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
            with cases.group(rank, world_size, store):
                module, _, function = name.rpartition(".")
                answer = getattr(importlib.import_module(module) if module else cases, function)(*arguments)
                dist.barrier()
            connection.send((True, answer))
        except BaseException:
            connection.send((False, traceback.format_exc()))


class Pool:
    """Start the ranks with the first use; `close` ends them."""

    def __init__(self) -> None:
        os.environ |= ENVIRONMENT
        context = fork_server(PRELOAD, HERE)
        self.folder = tempfile.TemporaryDirectory()
        self.count = 0
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(RANKS):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, there, str(self._stacks(rank))))
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def _stacks(self, rank: int) -> Path:
        return Path(self.folder.name) / f"rank-{rank}.stacks"

    def _threads(self, rank: int) -> int:
        tasks = Path(f"/proc/{self.processes[rank].pid}/task")
        return len(list(tasks.iterdir())) if tasks.exists() else 0

    def _renew(self) -> None:
        """New ranks, forked from the server that has all imports."""
        self.close()
        self.__init__()

    def where(self, rank: int) -> str:
        """The stacks of a rank that does not answer."""
        os.kill(self.processes[rank].pid, signal.SIGUSR2)
        time.sleep(0.5)
        return self._stacks(rank).read_text()

    def run(self, name: str, world_size: int, *arguments: Any) -> list[Any]:
        """`worker_cases.<name>(*arguments)`, or `<module>.<function>`, on ranks 0..world_size-1; their answers. Raises AssertionError with
        the first traceback."""
        if max(map(self._threads, range(RANKS))) > MOST_THREADS:
            self._renew()
        self.count += 1
        store = str(Path(self.folder.name) / f"store-{self.count}")
        for pipe in self.pipes[:world_size]:
            pipe.send((name, world_size, store, arguments))
        failures, answers = [], []
        for rank, pipe in enumerate(self.pipes[:world_size]):
            if not pipe.poll(TIMEOUT_S if not failures else 5.0):
                failures.append(f"rank {rank} does not answer\n{self.where(rank)}")
                continue
            good, answer = pipe.recv()
            (answers if good else failures).append(answer)
        if failures:
            # The others may wait for ever in a collective.
            self._renew()
            raise AssertionError("\n".join(failures))
        return answers

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()
