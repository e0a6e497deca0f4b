"""Expert parallelism: every rank has num_experts/ep experts; tokens travel to their experts and back (arXiv 2101.03961).

Experts fold over tp x cp x dp: their group is the ep inner part of it, and their data-parallel group what is left.
"""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.strategy.axes.traffic import Operation, Traffic, When
from orchestrator.strategy.spec import Strategy

AXIS = "ep"


def traffic(elements: float, topk: int, strategy: Strategy, micro_batch_size: int, itemsize: int) -> Iterator[Traffic]:
    """Per micro-batch, for one expert layer: `elements` (tokens x hidden_size per sample) go to `topk` experts each: an all-to-all out
    and one back in forward, the same in backward (token_dispatcher.py:666). A rank holds its tokens' share of tp and cp.

    "allgather": every rank gets all tokens of the group, and the sums are scattered back (token_dispatcher.py:196). "flex" (DeepEP): a
    token travels once to each rank that has any of its experts, of which ep (1 - (1 - 1/ep)^topk) are different where routing is even.

    Ranks that share an expert (etp) gather each other's tokens before its first product and scatter the sums behind its second, in place
    of sending them where ep is 1 (token_dispatcher.py:700).
    """
    mesh, kind = strategy.mesh, strategy.moe_token_dispatcher_type
    if mesh.ep * mesh.etp == 1:
        return
    local = elements * itemsize * micro_batch_size / (mesh.tp * mesh.cp)
    if kind == "allgather":
        yield from _gathered(local, mesh.ep * mesh.etp, 1)
        return
    if mesh.etp > 1:
        yield from _gathered(local * topk, mesh.etp, 1)
    if mesh.ep == 1:
        return
    nbytes = local * (topk if kind == "alltoall" else mesh.ep * (1 - (1 - 1 / mesh.ep) ** topk))
    for when in ("forward", "backward"):
        yield Traffic(
            axis=AXIS,
            operation="all_to_all",
            nbytes=nbytes,
            size=mesh.ep,
            stride=mesh.etp,
            when=when,
            count=2,
            repeats_with_recompute=when == "forward",
        )


def _gathered(local: float, size: int, stride: int) -> Iterator[Traffic]:
    """`local` bytes of each of `size` ranks gathered by all of them, and as many sums scattered; in backward the other way round."""
    operations: tuple[tuple[When, Operation], ...]
    operations = (("forward", "all_gather"), ("forward", "reduce_scatter"), ("backward", "all_gather"), ("backward", "reduce_scatter"))
    for when, operation in operations:
        yield Traffic(
            axis=AXIS,
            operation=operation,
            nbytes=local * size,
            size=size,
            stride=stride,
            when=when,
            repeats_with_recompute=when == "forward",
        )
