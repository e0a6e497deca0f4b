"""Seconds of collective operations over a link, and which link a group of ranks has. Bytes, bytes/s, seconds.

The costs are the ring's and the tree's (Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
MPICH", 2005; the same that NCCL's `busbw` figures assume, nccl-tests doc/PERFORMANCE.md).
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, gcd, log2

from orchestrator.hardware.spec import Cluster
from orchestrator.values import Value


class Link(Value, frozen=True, kw_only=True):
    """What a group of ranks communicates over: bytes/s per rank and direction, the seconds of one hop of the ring (its mean), and those
    from the leaves of a tree over the group to its root (None: hops like the ring's)."""

    bandwidth: float
    latency: float
    climb: float | None = None

    def slower(self, factor: float) -> Link:
        """The link with `factor` times the latency."""
        return Link(bandwidth=self.bandwidth, latency=self.latency * factor, climb=None if self.climb is None else self.climb * factor)


def all_gather(nbytes: float, n: int, link: Link) -> float:
    """Seconds of an all-gather over n ranks; `nbytes` is the gathered tensor. Ring: (n-1)/n of it reaches every rank, in n-1 hops.

    >>> all_gather(800, 4, Link(bandwidth=100, latency=0.5))
    7.5
    """
    return (n - 1) / n * nbytes / link.bandwidth + (n - 1) * link.latency


def reduce_scatter(nbytes: float, n: int, link: Link) -> float:
    """Seconds of a reduce-scatter over n ranks; `nbytes` is the tensor before it is scattered: the all-gather run backwards, same cost."""
    return all_gather(nbytes, n, link)


def all_reduce(nbytes: float, n: int, link: Link) -> float:
    """Seconds of an all-reduce of `nbytes` over n ranks. 2(n-1)/n of the buffer crosses each link (reduce-scatter, then all-gather).
    Latency: the ring's 2(n-1) hops, or up and down the tree, whichever is less (NCCL chooses by size; its double binary tree moves the same
    bytes).

    >>> all_reduce(800, 4, Link(bandwidth=100, latency=0.5)), all_reduce(800, 4, Link(bandwidth=100, latency=0.5, climb=1.25))
    (14.0, 14.5)
    """
    climb = ceil(log2(n)) * link.latency if link.climb is None else link.climb
    return 2 * (n - 1) / n * nbytes / link.bandwidth + min(2 * (n - 1) * link.latency, 2 * climb)


def all_to_all(nbytes: float, n: int, link: Link) -> float:
    """Seconds of an all-to-all over n ranks; `nbytes` is what one rank holds: (n-1)/n of it leaves, in n-1 messages.

    >>> all_to_all(800, 4, Link(bandwidth=100, latency=0.5))
    7.5
    """
    return (n - 1) / n * nbytes / link.bandwidth + (n - 1) * link.latency


def p2p(nbytes: float, link: Link) -> float:
    """Seconds of one message of `nbytes` over `link`.

    >>> p2p(800, Link(bandwidth=100, latency=0.5))
    8.5
    """
    return nbytes / link.bandwidth + link.latency


COLLECTIVES: dict[str, Callable[[float, int, Link], float]] = {
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_reduce": all_reduce,
    "all_to_all": all_to_all,
    "p2p": lambda nbytes, n, link: p2p(nbytes, link),
}
"""Seconds of a collective, as a function of (bytes, ranks, link), by the name that a `Traffic` carries."""


def members_inside(domain: int, size: int, stride: int, num_gpus: int) -> int:
    """How many members of a group of `size` ranks, `stride` apart, share a network domain of `domain` ranks: the fewest over all the
    groups that tile the job. A group that lies across a border (4 ranks in nodes of 6) counts the smaller part.

    >>> members_inside(8, 4, 2, 64), members_inside(8, 16, 1, 64), members_inside(8, 8, 8, 64), members_inside(6, 4, 1, 24)
    (4, 8, 1, 2)
    """
    block = size * stride
    if domain % block == 0 or num_gpus <= domain:
        return size
    return max(1, gcd(domain, block) // stride)


def no_loss(level: int, domains: int) -> float:
    """Share of a level's bandwidth that a group gets, however many of its domains it spans: all of it."""
    return 1.0


def link_for(cluster: Cluster, size: int, stride: int, efficiency: Callable[[int, int], float] = no_loss) -> Link:
    """The link of a group of `size` ranks, `stride` apart.

    Bandwidth per rank: the least over the levels crossed of the level's bandwidth times the members that share its inner domain (each
    brings its own adapter: NCCL opens a ring per adapter), never above the inner link's. Latency: the mean over the ring's hops,
    most of which stay inside. A tree is one of nodes, then of a node's ranks (NCCL: src/graph/trees.cc): it crosses the outer level
    once for each doubling of domains. `efficiency(level, domains)` is the share of the datasheet's bandwidth that a group spanning
    `domains` inner domains gets on that level. Outermost level's size is not checked here.
    """
    bandwidth = float("inf")
    hops: list[tuple[float, float]] = []  # (share of the ring's hops on this level or further out, latency)
    inside, climb = 1, 0.0
    for index, level in enumerate(cluster.levels):
        if inside >= size > 1:
            break
        domains = ceil(size / inside)
        together = max(inside, members_inside(level.size, size, stride, cluster.num_gpus))
        bandwidth = min(bandwidth, level.bandwidth * level.share(min(together, size)) * inside * efficiency(index, domains))
        hops.append((1 / inside, level.latency))
        climb += ceil(log2(min(together, size) / inside)) * level.latency
        inside = together
    latency = 0.0
    for index, (share, seconds) in enumerate(hops):
        further = hops[index + 1][0] if index + 1 < len(hops) else 0.0
        latency += (share - further) * seconds
    return Link(bandwidth=bandwidth, latency=latency, climb=climb)


def exchange_link(cluster: Cluster, size: int, stride: int, efficiency: Callable[[int, int], float] = no_loss) -> Link:
    """The link of an all-to-all over `size` ranks, `stride` apart: every rank sends each of the others as much, so that of n ranks' data
    the share (n - inside) / n leaves a domain that holds `inside` of them, over the rank's own adapter. (A ring crosses a node's border
    once for all of its ranks.) All levels carry their share at once; the slowest one's time is `all_to_all`'s. Latency as `link_for`.

    16 ranks on two nodes of 8, 450 GB/s inside and 50 between: half of the data leave at 50 GB/s, so 15/16 of them take as long as
    over 93.75 GB/s.
    """
    plain = link_for(cluster, size, stride, efficiency)
    slowest, inside = 0.0, 1
    for index, level in enumerate(cluster.levels):
        if inside >= size > 1:
            break
        domains = ceil(size / inside)
        together = max(inside, members_inside(level.size, size, stride, cluster.num_gpus))
        rate = level.bandwidth * level.share(min(together, size)) * efficiency(index, domains)
        slowest, inside = max(slowest, (size - inside) / rate), together
    if not slowest:
        return plain
    return Link(bandwidth=(size - 1) / slowest, latency=plain.latency, climb=plain.climb)
