"""Context parallelism: every rank has 1/cp of each sequence's tokens. Keys and values go around a ring (arXiv 2310.01889; Transformer
Engine's AttnFuncWithCPAndKVP2P), or all ranks exchange sequence shards for heads (DeepSpeed-Ulysses, arXiv 2309.14509)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from orchestrator.model.spec import Attention, LayerSpec
from orchestrator.strategy.axes.traffic import Traffic
from orchestrator.strategy.spec import Strategy

AXIS = "cp"


def traffic(
    layer: LayerSpec, strategy: Strategy, micro_batch_size: int, itemsize: int, *, kind: Literal["ring", "all_to_all"] = "ring"
) -> Iterator[Traffic]:
    """Per micro-batch, by the kind of the engine."""
    if strategy.mesh.cp > 1:
        yield from (_ring if kind == "ring" else _ulysses)(layer, strategy, micro_batch_size, itemsize)


def _ulysses(layer: LayerSpec, strategy: Strategy, micro_batch_size: int, itemsize: int) -> Iterator[Traffic]:
    """An all-to-all of queries, one each of keys and values, one of the output; the same for their gradients. Fewer key heads than ranks
    are repeated first (ulysses_sp.py, _combine_local_sequences). Nothing hides them."""
    mesh = strategy.mesh
    for op in layer.ops:
        if not isinstance(op, Attention):
            continue
        kv_heads = max(op.kv_heads, mesh.cp)
        shards = ((2, op.query_len * op.heads), (2, op.key_len * kv_heads))
        for when in ("forward", "backward"):
            for count, rows in shards:
                yield Traffic(
                    axis=AXIS,
                    operation="all_to_all",
                    nbytes=rows / mesh.cp * op.head_dim * itemsize * micro_batch_size,
                    size=mesh.cp,
                    stride=mesh.stride(AXIS),
                    when=when,
                    count=count,
                    repeats_with_recompute=when == "forward",
                )


def _ring(layer: LayerSpec, strategy: Strategy, micro_batch_size: int, itemsize: int) -> Iterator[Traffic]:
    """cp-1 steps that pass on a chunk of K and V, hidden behind the attention of the chunk before; twice that in
    backward (K and V, and their gradients)."""
    mesh = strategy.mesh
    for op in layer.ops:
        if not isinstance(op, Attention):
            continue
        kv_heads = max(1.0, op.kv_heads / mesh.tp)
        chunk = 2 * op.key_len / mesh.cp * kv_heads * op.head_dim * itemsize * micro_batch_size
        for when, factor in (("forward", 1), ("backward", 2)):
            yield Traffic(
                axis=AXIS,
                operation="p2p",
                nbytes=factor * chunk,
                size=mesh.cp,
                stride=mesh.stride(AXIS),
                when=when,  # type: ignore[arg-type]
                hidden="attention",
                count=mesh.cp - 1,
                repeats_with_recompute=when == "forward",
            )
