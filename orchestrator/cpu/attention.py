"""Attention under context parallelism on a machine without a GPU: megatron-core's own refuses cp > 1
(transformer/dot_product_attention.py:57), only Transformer Engine's has it.

It keeps the contract of Transformer Engine's "all_gather" kind: a rank's queries are its zigzag part of a causal sequence
(context_parallel.py), keys and values of all ranks are gathered, and their gradients summed back. It takes no places from the caller, so
a worker that cuts in another order computes another loss.

Packed samples, which Transformer Engine's alone has too (dot_product_attention.py:153), attend one after the other, each cut for itself.
"""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_config import TransformerConfig

from orchestrator.workers.context_parallel import zigzag


class _Gather(torch.autograd.Function):
    """The group's parts of a sequence one after the other along the first axis; backward sums what all ranks have for this rank's part."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.chunk(ctx.group.size())[ctx.group.rank()].contiguous(), None


class AllGatherAttention(DotProductAttention):
    """megatron-core's attention, causal, of this rank's queries and all keys. With cp = 1 it is megatron-core's own."""

    def __init__(
        self, config: TransformerConfig, *args: Any, cp_comm_type: str | None = None, pg_collection: Any = None, **more: Any
    ) -> None:
        pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        alone = copy.copy(config)
        alone.context_parallel_size = 1
        super().__init__(alone, *args, pg_collection=pg_collection, **more)
        self.config, self.cp_group = config, pg_collection.cp
        self.window = self.scale_mask_softmax.window_size
        if config.context_parallel_size > 1:
            self.scale_mask_softmax.window_size = None  # it would take the queries to be the last of the keys: `_hidden` has it

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None, *args: Any,
        packed_seq_params: PackedSeqParams | None = None, **more: Any,
    ) -> torch.Tensor:  # fmt: skip
        """[s / cp, b, heads, head_dim] each -> [s / cp, b, heads * head_dim]; of packed samples [s, heads, head_dim] -> [s, 1, ...]."""
        size, attend = self.cp_group.size(), super().forward
        bounds = [0, len(key) * size] if packed_seq_params is None else packed_seq_params.cu_seqlens_q.tolist()
        if size > 1:
            order = torch.cat([zigzag(rank, size, bounds) for rank in range(size)]).argsort()
            key, value = (_Gather.apply(part, self.cp_group)[order] for part in (key, value))
        lengths = [end - begin for begin, end in pairwise(bounds)]
        parts = query.split([length // size for length in lengths]), key.split(lengths), value.split(lengths)
        outputs = []
        for length, of_sample in zip(lengths, zip(*parts, strict=True), strict=True):
            if packed_seq_params is not None:
                of_sample, attention_mask = tuple(part[:, None] for part in of_sample), None
            if size > 1:
                attention_mask = self._hidden(zigzag(self.cp_group.rank(), size, (0, length)), torch.arange(length))
            outputs.append(attend(*of_sample, attention_mask, *args, **more))
        return torch.cat(outputs)

    def _hidden(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """A mask [queries, keys], True where a query doesn't see a key: a later one, or one outside of the window."""
        behind = queries[:, None] - keys[None, :]
        hidden = behind < 0
        if self.window is not None and self.window[0] >= 0:
            hidden |= behind > self.window[0]
        return hidden
