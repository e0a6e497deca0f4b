"""Expert parallelism: every rank has num_experts/ep experts; tokens travel to their experts and back (arXiv 2101.03961).

Experts fold over tp x cp x dp: their group is the ep inner part of it, and their data-parallel group what is left.
"""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.strategy.axes.traffic import Operation, Traffic, When
from orchestrator.strategy.spec import Strategy

AXIS = "ep"


def visited(domains: int, topk: int) -> float:
    """Of `domains` equal parts of the experts, how many a token's `topk` experts lie in, where routing is even.

    >>> visited(1, 8), visited(2, 2)
    (1.0, 1.5)
    """
    return domains * (1 - (1 - 1 / domains) ** topk)


def traffic(
    elements: float,
    topk: int,
    strategy: Strategy,
    micro_batch_size: int,
    itemsize: int,
    *,
    together: int | None = None,
    busiest: float = 1.0,
) -> Iterator[Traffic]:
    """Per micro-batch, for one expert layer: `elements` (tokens x hidden_size per sample) go to `topk` experts each: an all-to-all out
    and one back in forward, the same in backward (token_dispatcher.py:666). A rank holds its tokens' share of tp and cp.

    "allgather": every rank gets all tokens of the group, and the sums are scattered back (token_dispatcher.py:196). "flex" (DeepEP,
    HybridEP): a token travels once to each network domain that has any of its experts, and there once to each rank that does (`visited`
    of each). `together`: ranks of the ep group in one innermost domain; None: all. `busiest`: of an even share the multiple that the rank
    gets which gets most: all wait for it.

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
        yield from _gathered(local * topk * busiest, mesh.etp, 1)
    if mesh.ep == 1:
        return
    local *= busiest
    exchanges = [(local * topk, mesh.ep, mesh.etp)]
    if kind == "flex":
        inside = together or mesh.ep
        domains = mesh.ep // inside
        between = (local * visited(domains, topk), domains, mesh.etp * inside)
        within = (local * visited(mesh.ep, topk), inside, mesh.etp)
        exchanges = [exchange for exchange in (between, within) if exchange[1] > 1]
    for nbytes, size, stride in exchanges:
        for when in ("forward", "backward"):
            yield Traffic(
                axis=AXIS,
                operation="all_to_all",
                nbytes=nbytes,
                size=size,
                stride=stride,
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
