"""Tensor parallelism, and Megatron's sequence parallelism that rides on it (arXiv 1909.08053 section 3; 2205.05198 section 4.2)."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.model.spec import Enter, Exchange, Exit, LayerSpec
from orchestrator.strategy.axes.traffic import PASSES, Hidden, Operation, Traffic, When
from orchestrator.strategy.spec import Strategy

AXIS = "tp"
BORDERS = (Enter, Exit, Exchange)
"""Operations at the borders of a tensor-parallel region, and between an adapter's ranks."""


def share(shard: str, strategy: Strategy) -> int:
    """Ranks over which a tensor of this shard is divided on this axis; 1: each has it whole."""
    if shard == "tp" or (shard == "sequence" and strategy.sequence_parallel):
        return strategy.mesh.tp
    return 1


def traffic(
    layer: LayerSpec,
    strategy: Strategy,
    micro_batch_size: int,
    itemsize: int,
    gathered: tuple[float, float] | None = None,
    *,
    beside_products: bool = False,
) -> Iterator[Traffic]:
    """The exchange of a layer in one micro-batch. Without sequence parallelism: an all-reduce after a region in forward, before it in
    backward (tensor_parallel/mappings.py). With it: all-gather in and reduce-scatter out, the other way round in backward, and one more
    all-gather of the input for the weight gradient (layers.py:478-549). `gathered`: bytes of an element of a region's input, and of its
    output's gradient, when they are gathered, where products take them in a narrower type; None: `itemsize`. `beside_products`:
    `Traits.overlaps_input_gradient`."""
    mesh, stride = strategy.mesh, strategy.mesh.stride(AXIS)
    if mesh.tp == 1:
        return
    for op in layer.borders:
        elements = op.elements * micro_batch_size / mesh.cp
        if isinstance(op, Exchange):
            for when, operation in _of_adapter(op, strategy):
                nbytes = elements * itemsize
                yield Traffic(axis=AXIS, operation=operation, nbytes=nbytes, size=mesh.tp, stride=stride, when=when)
            continue
        for when, operation in _operations(op, sequence_parallel=strategy.sequence_parallel):
            beside = beside_products and when == "backward" and isinstance(op, Enter)
            hidden: Hidden = "user_buffers" if strategy.tp_comm_overlap else "product" if beside else "gemm"
            nbytes = elements * (itemsize if gathered is None or operation != "all_gather" else gathered[isinstance(op, Exit)])
            yield Traffic(axis=AXIS, operation=operation, nbytes=nbytes, size=mesh.tp, stride=stride, when=when, hidden=hidden)


def query_groups(layer: LayerSpec, strategy: Strategy, micro_batch_size: int, itemsize: int) -> Iterator[Traffic]:
    """The exchange in one micro-batch of engines that gather queries, keys and values where there are fewer query groups than ranks: a
    group's heads are divided over several, so that each takes its own out of all of them. Nothing runs beside it."""
    mesh = strategy.mesh
    for op in layer.attentions:
        if op.kv_heads < mesh.tp:
            nbytes = op.elements * itemsize * micro_batch_size / mesh.cp
            operations: tuple[Operation, ...] = ("all_gather", "reduce_scatter")
            for when, operation in zip(PASSES, operations, strict=True):
                yield Traffic(axis=AXIS, operation=operation, nbytes=nbytes, size=mesh.tp, stride=mesh.stride(AXIS), when=when)


def _operations(op: Enter | Exit, *, sequence_parallel: bool) -> tuple[tuple[When, Operation], ...]:
    """(when, operation) of one border of a tensor-parallel region."""
    if isinstance(op, Enter):
        if sequence_parallel:
            return ("forward", "all_gather"), ("backward", "all_gather"), ("backward", "reduce_scatter")
        return (("backward", "all_reduce"),)
    if sequence_parallel:
        return ("forward", "reduce_scatter"), ("backward", "all_gather")
    return (("forward", "all_reduce"),)


def _of_adapter(op: Exchange, strategy: Strategy) -> tuple[tuple[When, Operation], ...]:
    """(when, operation) of what an adapter of Megatron-Bridge's sends (067f987, peft/utils.py, ParallelLinearAdapter; its linears know
    nothing of sequence parallelism). Beside columns each rank has a part of the first matrix's rows: what they give is gathered, and the
    second matrix's gradient of it summed; beside rows partial sums of the first are added up, and the columns of the second are gathered
    into an output that sequence parallelism then takes its part of, whose gradient it gathers. Transformer Engine's linear with a norm
    hands over the gathered input under sequence parallelism, but from user buffers (get_adapter_attributes_from_linear)."""
    if op.of == "columns":
        return ("forward", "all_gather"), ("backward", "all_reduce")
    if op.of == "rows":
        return ("forward", "all_reduce"), ("backward", "all_reduce")
    if op.of == "output":
        return (("forward", "all_gather"), *((("backward", "all_gather"),) if strategy.sequence_parallel else ()))
    if not strategy.sequence_parallel:
        return (("backward", "all_reduce"),)
    return () if op.shared and not strategy.tp_comm_overlap else (("forward", "all_gather"), ("backward", "reduce_scatter"))
