"""Galvatron's own tree (VLDB 2023, arXiv 2211.13878, section 3.2), to be counted and compared: what a layer-wise runtime could be given.

A strategy is PP's degree and then an ordered sequence of distinct axes from {DP, SDP, TP} with degrees that are powers of two: the first
axis has the slowest links of the stage. The paper's insights are rules here, each of which can be left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

from orchestrator.strategy.capabilities import Rule
from orchestrator.strategy.spec import Candidate
from orchestrator.strategy.workload import Workload
from orchestrator.values import Value

AXES = ("pp", "tp", "dp", "sdp")
"""`sdp`: data parallelism with sharded states (ZeRO-3)."""

PaperStrategy = tuple[tuple[str, int], ...]
"""((axis, degree), ...), outermost first; degrees above 1."""


class PaperRule(Value, frozen=True, kw_only=True):
    """One of the paper's insights as a predicate over axis sequences."""

    id: str
    claim: str
    forbids: tuple[str, ...]
    """Two axes that may not meet, or ("pp",): PP anywhere but outermost."""

    def allows(self, strategy: PaperStrategy) -> bool:
        names = [axis for axis, _ in strategy]
        if self.forbids == ("pp",):
            return "pp" not in names[1:]
        return not set(self.forbids) <= set(names)


PP_FIRST = PaperRule(
    id="pp_first",
    claim="takeaway 1: PP moves the least and prefers the slowest links, so it divides the devices first",
    forbids=("pp",),
)
"""Loses where many micro-batches cross the border of small stages: 6% in tests/search/test_prunings.py, nothing with larger weights."""
NO_DP_WITH_SDP = PaperRule(
    id="no_dp_with_sdp",
    claim="takeaway 3: mixing DP and SDP is never better than SDP alone: it sends as much and keeps more",
    forbids=("dp", "sdp"),
)
"""True where DP reduces whole gradients. Where it reduces the shard that a rank has (hpZ, Megatron's optimizer instances), mixing sends up
to a sixth less over equal links, and over a slower outer level several times less (tests/search/test_prunings.py)."""
PAPER_RULES = (PP_FIRST, NO_DP_WITH_SDP)


def powers_of_two(product: int, axes: int) -> Iterator[tuple[int, ...]]:
    """Every way to write a power of two as a product of `axes` powers of two, each above 1.

    >>> list(powers_of_two(8, 2))
    [(2, 4), (4, 2)]
    """
    if axes == 0:
        if product == 1:
            yield ()
        return
    degree = 2
    while degree <= product:
        if product % degree == 0:
            for rest in powers_of_two(product // degree, axes - 1):
                yield (degree, *rest)
        degree *= 2


def paper_strategies(world: int, rules: tuple[PaperRule, ...] = PAPER_RULES) -> Iterator[PaperStrategy]:
    """The leaves of the paper's tree for `world` = 2^k devices.

    >>> [sum(1 for s in paper_strategies(8) if dict(s).get("pp", 1) == pp) for pp in (1, 2, 4, 8)]
    [11, 7, 3, 1]
    """
    if world < 1 or world & (world - 1):
        raise ValueError(f"the paper's tree is for powers of two, not {world} devices")
    for size in range(len(AXES) + 1):
        for axes in permutations(AXES, size):
            for degrees in powers_of_two(world, size):
                strategy = tuple(zip(axes, degrees, strict=True))
                if all(rule.allows(strategy) for rule in rules):
                    yield strategy


def count(world: int, rules: tuple[PaperRule, ...] = PAPER_RULES, *, recompute: bool = False) -> int:
    """How many strategies a layer may choose from; activation checkpointing doubles them.

    >>> count(8, (PP_FIRST,)), count(8), count(8, recompute=True)
    (34, 22, 44)
    """
    return sum(1 for _ in paper_strategies(world, rules)) * (2 if recompute else 1)


def _pp_outermost(candidate: Candidate, _: Workload) -> str | None:
    order = candidate.mesh.order
    inside = [axis for axis in order[order.index("pp") + 1 :] if candidate.mesh.degree(axis) > 1]
    if candidate.mesh.pp == 1 or not inside:
        return None
    return f"pp={candidate.mesh.pp} has faster links than {', '.join(inside)} in rank order {'-'.join(order)}"


PP_OUTERMOST = Rule(
    id="pp_outermost",
    engine_rule="arXiv 2211.13878 takeaway 1",
    check=_pp_outermost,
    needs=("pp", "tp", "cp", "dp", "rank_order"),
)
"""Takeaway 1 for an engine that offers several rank orders: only those that put PP over the slowest level. Not applied unless it is
asked for: which order wins is priced."""
