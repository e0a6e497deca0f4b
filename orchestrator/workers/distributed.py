"""Processes: one rank joins the job, gets its device, and leaves."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from orchestrator.errors import InputError
from orchestrator.plan import Plan

TIMEOUT = timedelta(minutes=30)
"""Of a collective: a first step compiles kernels, a checkpoint of a large model is written between two collectives."""

LEAVE_S = 60.0
"""What a rank gets to leave its process groups in when its work is done."""


def quiet() -> None:
    """The engines log and warn at import and at every build ("Apex is not installed", a page of configuration): only errors pass."""
    warnings.filterwarnings("ignore")
    for name in ("megatron", "megatron.core", "DeepSpeed", "torch.distributed", "torch.distributed.checkpoint", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)


def end_at_once_on_signals() -> None:
    """A rank that waits inside a collective never returns to Python, so handlers written in Python would not run: let the kernel end the
    process. Checkpoints stay whole, because their marker is written last (checkpoint.py)."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def joined(plan: Plan, before: Callable[[dist.Store, int, int], None] | None = None, *, apart: bool = False) -> Iterator[torch.device]:
    """Join the job that torchrun or srun describes in the environment; yields this rank's device. `before(store, rank, world)` is called
    once the ranks can talk over the store, before anything else. `apart`: the store's names are kept from those of a process that joins
    the same job later. The groups are left after success alone: after an error nothing may keep the rank from ending, since the others
    wait for it.

    Raises InputError where the world is not the plan's.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != plan.world_size:
        raise InputError("gpus", world, f"the job has {world} ranks, the plan {plan.world_size}")
    store, rank, world = next(iter(rendezvous("env://", timeout=TIMEOUT)))
    store.set_timeout(TIMEOUT)
    if apart:
        store = dist.PrefixStore("apart", store)
    if before is not None:
        before(store, rank, world)
    device = prepare_device(plan)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=world,
        timeout=TIMEOUT,
        device_id=device if device.type == "cuda" else None,
    )
    yield device
    dist.destroy_process_group()


def leave_within(seconds: float = LEAVE_S) -> None:
    """The rank's work is done and saved: whatever comes before `leave` may take so long. Then the process ends all the same, with status 0
    and its stacks on stderr; one job would otherwise hold its GPUs for nothing (one gloo rank of two was seen to stay for five minutes
    after its last step). A second limit at twice that ends a process whose interpreter is held too, with status 1."""

    def end() -> None:
        said = f"the work of this rank is done, but it did not leave its process groups within {seconds:g} s: it ends without. Stacks:"
        print(said, file=sys.stderr, flush=True)
        faulthandler.dump_traceback(all_threads=True)
        os._exit(0)

    faulthandler.dump_traceback_later(2 * seconds, exit=True)
    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def leave(status: int) -> NoReturn:
    """End this process without Python's own teardown. A thread of gloo's that lets go of the last collective's tensors then asks for the
    interpreter, which a closing Python answers by ending the thread inside a C++ destructor: std::terminate, SIGABRT after a training that
    went well (seen in 8% of the ends of two ranks on one core, torch 2.13). destroy_process_group doesn't join such a thread where an
    engine still holds the group."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def prepare_device(plan: Plan) -> torch.device:
    """The device of this rank. A plan for the cpu cluster runs on the CPU; any other needs a GPU."""
    if plan.cluster.is_cpu:
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.device_count() <= local_rank:
        why = f"local rank {local_rank} needs a GPU, {torch.cuda.device_count()} are visible"
        raise InputError("cluster", plan.cluster.name, why)
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def generator_states(device: torch.device) -> dict[str, Any]:
    """What dropout on this rank continues from."""
    return {"cpu": torch.get_rng_state(), "device": torch.cuda.get_rng_state() if device.type == "cuda" else None}


def set_generator_states(states: dict[str, Any], device: torch.device) -> None:
    """Put back what `generator_states` said."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and states["device"] is not None:
        torch.cuda.set_rng_state(states["device"])


def local_rank_is_first() -> bool:
    """Whether this rank does what a node needs once."""
    return os.environ.get("LOCAL_RANK", "0") == "0"
