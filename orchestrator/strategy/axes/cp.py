"""Context parallelism: every rank has 1/cp of each sequence's tokens. Keys and values go around a ring (arXiv 2310.01889; Transformer
Engine's AttnFuncWithCPAndKVP2P), or all ranks exchange sequence shards for heads (DeepSpeed-Ulysses, arXiv 2309.14509)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from orchestrator.model.spec import Attention, LayerSpec
from orchestrator.strategy.axes.traffic import PASSES, Operation, Traffic, When
from orchestrator.strategy.spec import Mesh, Strategy

AXIS = "cp"
COPIED, ADDED = 2, 3
"""Times that each byte of a tensor moves: read and written; or read, and added to one that is read and written."""


def inner_size(mesh: Mesh, domain: int) -> int:
    """Ranks of a context-parallel group inside one innermost network level of `domain` GPUs: those that "a2a+p2p" exchanges heads among
    (Megatron's first --hierarchical-context-parallel-sizes).

    >>> inner_size(Mesh(tp=2, cp=8), 8), inner_size(Mesh(cp=8), 8), inner_size(Mesh(tp=8, cp=4), 8)
    (4, 8, 1)
    """
    return max(size for size in range(1, mesh.cp + 1) if mesh.cp % size == 0 and (size == 1 or size * mesh.stride(AXIS) <= domain))


def cut(strategy: Strategy, kind: Literal["ring", "all_to_all"], domain: int) -> tuple[int, int]:
    """(ranks that exchange heads, steps of the ring between such groups) of a rank's attention; keys that are gathered have no ring.

    >>> [cut(Strategy(mesh=Mesh(cp=16), cp_comm_type=how), "ring", 8) for how in ("p2p", "a2a", "a2a+p2p", "all_gather")]
    [(1, 16), (16, 1), (8, 2), (1, 1)]
    """
    mesh = strategy.mesh
    how = strategy.cp_comm_type if kind == "ring" else "a2a"
    inner = {"p2p": 1, "all_gather": 1, "a2a": mesh.cp}.get(how) or inner_size(mesh, domain)
    return inner, 1 if how == "all_gather" else mesh.cp // inner


def kernel_length(op: Attention, mesh: Mesh, inner: int, steps: int) -> float:
    """Tokens of a sequence, or of a sample in a packed one, that a rank's attention kernel works on, as far as its efficiency goes. The
    whole where all ranks exchanged shards of it for heads. In a step of a ring the rank's part, both of its chunks in one kernel: on the
    diagonal a causal square; beside it all queries with half of the keys that came in, or half of the queries with all of them, unmasked,
    which gives a query as many keys as the square does in the mean, or twice as many (Transformer Engine, context_parallel.py:
    cp_p2p_fwd_prepare_qkv). With gathered keys each of the two chunks has a kernel of its own (AttnFuncWithCPAndKVAllGather).

    >>> op = Attention(name="a", query_len=8192, key_len=8192, heads=8, kv_heads=8, head_dim=128, causal=True)
    >>> [kernel_length(op, Mesh(cp=4), inner, steps) for inner, steps in ((1, 4), (4, 1), (2, 2), (1, 1))]
    [2048.0, 8192.0, 4096.0, 1024.0]
    """
    return min((op.attended or op.query_len) / (steps if inner * steps == mesh.cp else 2 * mesh.cp), op.key_len)


def _local_bytes(op: Attention, mesh: Mesh, micro_batch_size: int, itemsize: int) -> tuple[float, float]:
    """Bytes of a rank's queries, and of its keys, which are as many as its values'."""
    width = op.head_dim * itemsize * micro_batch_size
    queries = op.query_len / mesh.cp * max(1.0, op.heads / mesh.tp) * width
    return queries, op.key_len / mesh.cp * max(1.0, op.kv_heads / mesh.tp) * width


def merged_bytes(op: Attention, strategy: Strategy, micro_batch_size: int, itemsize: int, steps: int) -> tuple[float, float]:
    """Bytes that the last rank, whose steps all have outputs for all of its tokens, moves in memory to add up the results of a ring's
    steps: (forward, backward). Forward: the first output is scaled (read and written), the others are read and added to what is there.
    Backward: the gradients of queries are copied once, then added. Those of keys and values too; where attention is causal a step has them
    for half of the tokens, but for the last one, on the diagonal (Transformer Engine, context_parallel.py: flash_attn_fwd_out_correction;
    dq.copy_, dq.add_; dk[0].copy_, dk[0].add_, dk.add_)."""
    if steps == 1:
        return 0.0, 0.0
    queries, keys = _local_bytes(op, strategy.mesh, micro_batch_size, itemsize)
    copied = COPIED + ADDED * (steps - 1)
    of_keys = (COPIED + ADDED * (steps - 2)) / 2 + ADDED if op.causal else copied
    return copied * queries, copied * queries + 2 * of_keys * keys


def working_bytes(op: Attention, strategy: Strategy, micro_batch_size: int, itemsize: int, inner: int, steps: int) -> float:
    """Bytes that a rank's attention holds while it runs beside those of any attention. A ring, forward: the outputs of all its steps until
    they are added up, and the keys and values of all of them, whose buffers are kept to the end; backward: keys, values and their
    gradients, in use and coming in (Transformer Engine, context_parallel.py: p2p_comm_buffers). Else keys and values that are gathered;
    what is exchanged for heads."""
    queries, keys = _local_bytes(op, strategy.mesh, micro_batch_size, itemsize)
    nbytes = 0.0
    if steps > 1:
        nbytes += max(steps * (queries + 2 * keys), 2 * 4 * keys)
    elif inner == 1:
        nbytes += 2 * strategy.mesh.cp * keys
    if inner > 1:
        nbytes += queries + 2 * keys
    return nbytes


def traffic(
    layer: LayerSpec,
    strategy: Strategy,
    micro_batch_size: int,
    itemsize: int,
    *,
    kind: Literal["ring", "all_to_all"] = "ring",
    domain: int = 1,
) -> Iterator[Traffic]:
    """The exchange of one micro-batch, by the kind of the engine: DeepSpeed's Ulysses, or Megatron's by `Strategy.cp_comm_type`. `domain`:
    GPUs of the innermost network level."""
    mesh = strategy.mesh
    if mesh.cp == 1:
        return
    inner, steps = cut(strategy, kind, domain)
    given = (layer.attentions, strategy, micro_batch_size, itemsize)
    if inner == steps == 1:
        yield from _gathered(*given)
    if inner > 1:
        yield from _ulysses(*given, ranks=inner)
    if steps > 1:
        yield from _ring(*given, inner=inner)


def _gathered(ops: Sequence[Attention], strategy: Strategy, micro_batch_size: int, itemsize: int) -> Iterator[Traffic]:
    """Keys and values of the whole sequence gathered before attention, and again in backward, where their gradients are scattered
    (Transformer Engine's AttnFuncWithCPAndKVAllGather). Nothing hides them."""
    mesh = strategy.mesh
    operations: tuple[tuple[When, Operation], ...] = (("forward", "all_gather"), ("backward", "all_gather"), ("backward", "reduce_scatter"))
    for op in ops:
        whole = 2 * op.key_len * max(1.0, op.kv_heads / mesh.tp) * op.head_dim * itemsize * micro_batch_size
        for when, operation in operations:
            yield Traffic(axis=AXIS, operation=operation, nbytes=whole, size=mesh.cp, stride=mesh.stride(AXIS), when=when)


def _ulysses(ops: Sequence[Attention], strategy: Strategy, micro_batch_size: int, itemsize: int, *, ranks: int) -> Iterator[Traffic]:
    """Among the inner `ranks` of the group, an all-to-all of queries, one each of keys and values, one of the output; the same for their
    gradients. Fewer key heads than ranks are repeated first (ulysses_sp.py, _combine_local_sequences). Nothing hides them."""
    mesh, stride = strategy.mesh, strategy.mesh.stride(AXIS)
    for op in ops:
        kv_heads = max(op.kv_heads / mesh.tp, ranks)
        shards = ((2, op.query_len * op.heads / mesh.tp), (2, op.key_len * kv_heads))
        for when in PASSES:
            for count, rows in shards:
                nbytes = rows / mesh.cp * op.head_dim * itemsize * micro_batch_size
                yield Traffic(axis=AXIS, operation="all_to_all", nbytes=nbytes, size=ranks, stride=stride, when=when, count=count)


def _ring(ops: Sequence[Attention], strategy: Strategy, micro_batch_size: int, itemsize: int, *, inner: int) -> Iterator[Traffic]:
    """Steps that pass on a chunk of K and V around the groups of `inner` ranks, each of which has its share of the heads; hidden behind the
    attention of the chunk before; twice that in backward (K and V, and their gradients)."""
    mesh, steps, stride = strategy.mesh, strategy.mesh.cp // inner, strategy.mesh.stride(AXIS) * inner
    for op in ops:
        kv_heads = max(1.0, op.kv_heads / mesh.tp / inner)
        chunk = 2 * op.key_len / steps * kv_heads * op.head_dim * itemsize * micro_batch_size
        for factor, when in enumerate(PASSES, 1):
            yield Traffic(axis=AXIS, operation="p2p", nbytes=factor * chunk, size=steps, stride=stride, when=when, hidden="attention",
                          count=steps - 1)  # fmt: skip
