"""Expert parallelism: every rank has num_experts/ep experts; tokens travel to their experts and back (arXiv 2101.03961).

Experts fold over tp x cp x dp: their group is the ep inner part of it, and their data-parallel group what is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import comb

from orchestrator.strategy.axes.traffic import PASSES, Operation, Traffic
from orchestrator.strategy.spec import Strategy

AXIS = "ep"


def visited(domains: int, topk: int, groups: int = 1, group_topk: int = 1) -> float:
    """How many of `domains` equal parts of the experts a token's `topk` experts lie in, where routing is even and all of them are in
    `group_topk` of `groups` equal parts (DeepSeek-V3, arXiv 2412.19437, section 2.1.2: so a token goes to few nodes).

    A domain has several groups, of which j are chosen with the chance of so many hits in `group_topk` draws without replacement; or it is a
    part of one. Where neither divides the other the limit is left out.

    >>> visited(1, 8), visited(2, 2), visited(8, 8, 8, 4) == visited(4, 8)
    (1.0, 1.5, True)
    >>> visited(2, 1000, 4, 1), round(visited(2, 1000, 4, 2), 4)  # of 6 pairs of groups 2 are both in one domain
    (1.0, 1.6667)
    """
    if domains % groups == 0:
        domains = domains // groups * group_topk
        return domains * (1 - (1 - 1 / domains) ** topk)
    if groups % domains:
        return visited(domains, topk)
    size = groups // domains
    draws = ((j, comb(size, j) * comb(groups - size, group_topk - j)) for j in range(1, min(size, group_topk) + 1))
    return domains * sum(ways * (1 - (1 - j / group_topk) ** topk) for j, ways in draws) / comb(groups, group_topk)


def traffic(
    elements: float,
    topk: int,
    strategy: Strategy,
    micro_batch_size: int,
    itemsize: int,
    *,
    together: int | None = None,
    busiest: float = 1.0,
    limit: tuple[int, int] = (1, 1),
) -> Iterator[Traffic]:
    """The exchange of one expert layer in one micro-batch: `elements` (tokens x hidden_size per sample) go to `topk` experts each: an
    all-to-all out and one back in forward, the same in backward (token_dispatcher.py:666). A rank holds its tokens' share of tp and cp.

    "allgather": every rank gets all tokens of the group, and the sums are scattered back (token_dispatcher.py:196). "flex" (DeepEP,
    HybridEP): a token travels once to each network domain that has any of its experts, and there once to each rank that does (`visited`
    of each, with the router's `limit`: groups of experts, and to how many of them a token may go). `together`: ranks of the ep group in
    one innermost domain; None: all. `busiest`: of an even share the multiple that the rank gets which gets most: all wait for it.

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
    exchanges = [(local * topk, mesh.ep, mesh.etp, False)]
    if kind == "flex":
        inside = together or mesh.ep
        domains = mesh.ep // inside
        between = (local * visited(domains, topk, *limit), domains, mesh.etp * inside, inside > 1)
        within = (local * visited(mesh.ep, topk, *limit), inside, mesh.etp, False)
        exchanges = [exchange for exchange in (between, within) if exchange[1] > 1]
    for nbytes, size, stride, handed_on in exchanges:
        for when in PASSES:
            yield Traffic(axis=AXIS, operation="all_to_all", nbytes=nbytes, size=size, stride=stride, when=when, count=2,
                          handed_on=handed_on)  # fmt: skip


def _gathered(local: float, size: int, stride: int) -> Iterator[Traffic]:
    """`local` bytes of each of `size` ranks gathered by all of them, and as many sums scattered; in backward the other way round."""
    operations: tuple[Operation, ...] = ("all_gather", "reduce_scatter")
    for when in PASSES:
        for operation in operations:
            yield Traffic(axis=AXIS, operation=operation, nbytes=local * size, size=size, stride=stride, when=when)
