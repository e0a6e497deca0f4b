"""Processes: one rank joins the job, gets its device, and leaves."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from orchestrator.errors import InputError
from orchestrator.plan import Plan

TIMEOUT = timedelta(minutes=30)
"""The longest that a collective may take: a first step compiles kernels, a checkpoint of a large model is written between two
collectives."""

LEAVE = timedelta(seconds=60)
"""Time that a rank which is done waits for the others."""


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


class Job(NamedTuple):
    """What a rank has once it has joined: its device and the store that all ranks share."""

    device: torch.device
    store: dist.Store
    rank: int
    world: int

    def leave(self) -> NoReturn:
        """The work of this rank is done and saved: end its process with status 0 once all ranks say so, or after LEAVE. Rank 0, whose
        process may hold the store, goes last. The process groups are left to the kernel (`leave`); what goes wrong with the store
        meanwhile concerns nobody any more."""
        with contextlib.suppress(RuntimeError):  # dist.DistStoreError is one
            for key in ("done", "gone"):
                if self.store.add(f"leave/{key}", 1) == self.world:
                    self.store.set(f"leave/{key}/all", "")
                if key == "done" or self.rank == 0:
                    self.store.wait([f"leave/{key}/all"], LEAVE)
        leave(0)


FREED_AT_ONCE: Final = ("TORCH_NCCL_AVOID_RECORD_STREAMS", "1")
"""A variable without which torch before 2.8 (pytorch 150352) takes the memory of what a collective was given for new tensors only once the
GPU is past it, while the host is up to some thousand kernels ahead: gathered activations pile up under tp (torchtitan 735, pytorch 124260).
Later ones warn that it is the default."""


def join(plan: Plan, before: Callable[[dist.Store, int, int], None] | None = None, *, apart: bool = False) -> Job:
    """Join the job that torchrun or srun describes in the environment. `before(store, rank, world)` is called once the ranks can talk over
    the store, before anything else. `apart`: the store's names are kept from those of a process that joins the same job later.

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
    if torch.__version__ < (2, 8):
        os.environ.setdefault(*FREED_AT_ONCE)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=world,
        timeout=TIMEOUT,
        device_id=device if device.type == "cuda" else None,
    )
    return Job(device, store, rank, world)


LEAVING: Final = threading.Event()
"""Set once this process ends itself, and what it has started."""


def leave(status: int) -> NoReturn:
    """End this process without destroying process groups and without Python's own teardown; to be called while what holds groups is alive.

    A thread of gloo's that lets go of the last collective's tensors asks for the interpreter. Where the main thread joins it, holding the
    interpreter, both wait for ever: seen where a DistributedDataParallel was freed after its last step, in 2 of 24 ends of two ranks on
    one core (torch 2.13). A Python that closes answers by ending the thread inside a C++ destructor: std::terminate, SIGABRT after a
    training that went well, in 8% of such ends.

    Processes of multiprocessing are ended here, as that teardown would: the one that megatron-core starts in its first save
    (dist_checkpointing, filesystem_async.py: a Manager's queue) would stay for ever, and hold this rank's output open."""
    LEAVING.set()
    with contextlib.suppress(ValueError):  # outside the main thread
        signal.signal(
            signal.SIGCHLD, signal.SIG_DFL
        )  # torch's data loaders raise when one of theirs ends (utils/data/_utils/signal_handling.py)
    for child in multiprocessing.active_children():
        child.kill()
        child.join(1.0)
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


def synchronise(device: torch.device) -> None:
    """Waits until a GPU is done with what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


OF_MEGATRON: Final = "megatron.core.tensor_parallel.random"
"""megatron-core's module of generators, where it is in use."""


def generator_states(device: torch.device) -> dict[str, Any]:
    """What dropout on this rank continues from, that of megatron-core's tensor-parallel regions included."""
    states = {"cpu": torch.get_rng_state(), "device": torch.cuda.get_rng_state() if device.type == "cuda" else None}
    core = sys.modules.get(OF_MEGATRON)
    return states if core is None else states | {"tracker": core.get_cuda_rng_tracker().get_states()}


def set_generator_states(states: dict[str, Any], device: torch.device) -> None:
    """Puts back the states that `generator_states` returned."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and states["device"] is not None:
        torch.cuda.set_rng_state(states["device"])
    core = sys.modules.get(OF_MEGATRON)
    if core is not None and "tracker" in states:
        core.get_cuda_rng_tracker().set_states(states["tracker"])


def local_rank_is_first() -> bool:
    """Whether this rank does what a node needs once."""
    return os.environ.get("LOCAL_RANK", "0") == "0"
