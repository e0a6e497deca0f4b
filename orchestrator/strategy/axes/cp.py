"""Context parallelism: every rank has 1/cp of each sequence's tokens; keys and values go around a ring (arXiv 2310.01889;
Transformer Engine's AttnFuncWithCPAndKVP2P)."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.model.spec import Attention, LayerSpec
from orchestrator.strategy.axes.traffic import Traffic
from orchestrator.strategy.spec import Strategy

AXIS = "cp"


def traffic(layer: LayerSpec, strategy: Strategy, micro_batch_size: int, itemsize: int) -> Iterator[Traffic]:
    """Per micro-batch: cp-1 steps that pass on a chunk of K and V, hidden behind the attention of the chunk before; twice that in
    backward (K and V, and their gradients)."""
    mesh = strategy.mesh
    if mesh.cp == 1:
        return
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
