"""What the pool's ranks run for test_step_timers.py: trainings in which one rank, or the way between some, is slow on purpose."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from worker_cases import make_trainer, open_samples, program

from orchestrator.plan import from_json
from orchestrator.workers import loop

LAYERS = ("TransformerLayer", "LlamaDecoderLayer")


@contextmanager
def slow_between(ranks: tuple[int, ...], seconds: float) -> Iterator[None]:
    """Every operation of a group of exactly these ranks, and every message between them, takes so much longer on its way."""
    kind = torch._C._distributed_c10d.ProcessGroup
    before = {name: vars(kind)[name] for name in ("allreduce", "_allgather_base", "all_gather_single", "send") if name in vars(kind)}

    def slow(name: str, original: Any) -> Any:
        def operation(group: Any, *arguments: Any, **named: Any) -> Any:
            members = dist.get_process_group_ranks(group)
            mine = members if name != "send" else sorted((members[group.rank()], members[arguments[1]]))
            if tuple(mine) == ranks:
                time.sleep(seconds)
            return original(group, *arguments, **named)

        return operation

    for name in before:
        setattr(kind, name, slow(name, getattr(kind, name)))
    try:
        yield
    finally:
        for name, descriptor in before.items():
            setattr(kind, name, descriptor)


def train(plan_json: str, cache: str, out: str, slow_rank: int | None, slow_link: tuple[int, ...], seconds: float) -> list[float]:
    """The loop's own steps; OUT/timers.jsonl is the worker's."""
    plan = from_json(plan_json)

    def slow_down(trainer: Any) -> None:
        chunks = getattr(trainer, "chunks", None) or [trainer.model]
        layers = [layer for chunk in chunks for layer in chunk.modules() if type(layer).__name__ in LAYERS]
        assert layers
        for layer in layers if dist.get_rank() == slow_rank else ():
            layer.register_forward_pre_hook(lambda *_: time.sleep(seconds))

    Path(out).mkdir(exist_ok=True)
    if plan.engine == "deepspeed":
        with program(plan, cache, Path(out)) as run, slow_between(slow_link, seconds):
            slow_down(run.trainer)
            run.train(run.trainer)
        return []
    trainer = make_trainer(plan)
    slow_down(trainer)
    with slow_between(slow_link, seconds):
        return loop.train(trainer, open_samples(plan, cache), Path(out))
