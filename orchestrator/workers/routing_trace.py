"""Which experts the tokens of a training go to: OUT/routing.jsonl, which model.routing= of a later plan takes (model/routing.py).

A row is a layer of a micro-batch as one group of ranks computed it that shares the layer's experts (Megatron's expert tensor and model
parallel group): the tokens of all its ranks by expert, after a capacity has dropped what it drops.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from orchestrator.cpu import eager  # noqa: F401  # isort: skip  (before megatron-core)
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter

FILE = "routing.jsonl"


class RoutingTrace:
    """Listens to the routers of this rank's chunks."""

    def __init__(self, chunks: Iterable[torch.nn.Module], out: Path, first_step: int) -> None:
        """Rank 0 writes. A run that resumes in its own folder keeps the steps before."""
        self._routers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)]
        self._seen: dict[int, list[tuple[bool, torch.Tensor]]] = {}
        for router in self._routers:
            router.register_forward_hook(self._count)
        self.path = out / FILE
        if dist.get_rank() == 0:
            old = self.path.read_text().splitlines() if self.path.exists() else []
            self.path.write_text("".join(f"{line}\n" for line in old if json.loads(line)["step"] <= first_step))

    def _count(self, router: torch.nn.Module, inputs: object, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        if router.training:
            sent = output[1].detach()
            self._seen.setdefault(id(router), []).append((torch.is_grad_enabled(), sent.reshape(-1, sent.shape[-1]).sum(0)))

    def write(self, step: int) -> None:
        """The rows of a step that is done. All ranks call this."""
        group = parallel_state.get_expert_tensor_and_model_parallel_group()
        first = dist.get_process_group_ranks(group)[0]
        rows: list[dict[str, Any]] = []
        for router in self._routers:
            seen = self._seen.pop(id(router), [])
            # A layer that is recomputed passes twice: without gradients in forward, and with them in backward.
            tokens = torch.stack([sent for grad, sent in seen if not grad] or [sent for _, sent in seen]).long()
            dist.all_reduce(tokens, group=group)
            if dist.get_rank() == first:
                where = {"step": step, "layer": int(router.layer_number) - 1, "group": first}
                rows += [{**where, "micro_batch": index, "tokens": sent} for index, sent in enumerate(tokens.tolist())]
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, rows)
        if dist.get_rank() == 0:
            with self.path.open("a") as stream:
                stream.writelines(f"{json.dumps(row)}\n" for found in everywhere for row in found)
