"""Seconds of traffic: which link a group of ranks has, what an operation takes over it, and how much of that compute hides."""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.cost.calibration import Calibration
from orchestrator.hardware.collectives import COLLECTIVES, Link, exchange_link, link_for, members_inside
from orchestrator.hardware.spec import Cluster
from orchestrator.strategy.axes.traffic import Traffic
from orchestrator.strategy.capabilities import Traits

PRODUCT = 0.25
"""Share of the compute of a layer's backward pass that one product takes: two linears have a gathered input, with two products each."""


class Network:
    """The cluster's links at the shares of their bandwidth that the calibration says."""

    def __init__(self, cluster: Cluster, calibration: Calibration, traits: Traits) -> None:
        self.cluster, self.calibration = cluster, calibration
        self._on_cpus = cluster.is_cpu
        self.domain = cluster.levels[0].size
        """Ranks in the innermost level."""
        self.tp_overlap = traits.tp_overlap if calibration.tp_overlap < 0 else calibration.tp_overlap
        self._links: dict[tuple[int, int, bool], Link] = {}

    def link(self, size: int, stride: int) -> Link:
        """What a collective over `size` ranks that are `stride` apart has for each of them."""
        return self._kept_link(size, stride, link_for)

    def exchange(self, size: int, stride: int) -> Link:
        """The link that an all-to-all over `size` ranks that are `stride` apart has for each of them."""
        return self._kept_link(size, stride, exchange_link)

    def _kept_link(self, size: int, stride: int, found: Callable[..., Link]) -> Link:
        key = (size, stride, found is exchange_link)
        link = self._links.get(key)
        if link is None:
            c = self.calibration

            def efficiency(level: int, domains: int) -> float:
                if level == 0:
                    return c.inner_efficiency
                return c.outer_efficiency * float((max(domains, 2) / 2) ** -c.outer_scaling)

            link = self._links[key] = found(self.cluster, size, stride, efficiency).slower(c.latency_factor)
        return link

    def together(self, size: int, stride: int) -> int:
        """How many of a group's ranks share an innermost domain."""
        return min(size, members_inside(self.domain, size, stride, self.cluster.num_gpus))

    def pair_link(self, first: int, second: int, width: int) -> Link:
        """The link between ranks `first + i` and `second + i`, i < `width`: the innermost level that holds all these pairs."""
        c, levels = self.calibration, self.cluster.levels
        level = next(
            (
                level
                for level in levels
                if self.cluster.num_gpus <= level.size or (level.size % width == 0 and first // level.size == second // level.size)
            ),
            levels[-1],
        )
        return Link(bandwidth=level.bandwidth * level.share(2) * c.p2p_efficiency, latency=level.latency * c.latency_factor)

    def seconds(self, item: Traffic, messages: float | None = None) -> float:
        """Seconds of all operations of `item`. What travels once a step does so in messages of several layers, each with one latency:
        `messages` of them (a share of one, where layers travel together). gloo scatters sums by an all-reduce (measured with torch 2.13:
        2(n-1)/n of the buffer leave a rank)."""
        link = self.exchange(item.size, item.stride) if item.operation == "all_to_all" else self.link(item.size, item.stride)
        c = self.calibration
        if item.when == "step":
            link = link.slower(1 / c.layers_per_message if messages is None else messages)
        operation = "all_reduce" if item.operation == "reduce_scatter" and self._on_cpus else item.operation
        overhead = c.collective_overhead_s + (c.handed_on_s if item.handed_on else 0.0)
        return item.count * (COLLECTIVES[operation](item.nbytes, item.size, link) + overhead)

    def exposed(self, seconds: float, item: Traffic, compute_s: float) -> tuple[float, float]:
        """(seconds of this traffic that nothing hides, seconds of compute lost to what is hidden) where there are `compute_s` to hide it.

        Chunks of a product's input or output are passed on beside the product, over the innermost level alone; other traffic runs beside
        the share `overlap_efficiency` of the compute, or no longer than the one product that it is launched before; and each second of it
        slows that down by `overlap_slowdown`.
        """
        c = self.calibration
        if item.hidden == "nothing":
            return seconds, 0.0
        if item.hidden in ("gemm", "user_buffers"):
            share = self.tp_overlap if item.hidden == "gemm" else max(self.tp_overlap, c.user_buffers_overlap)
            hidden = seconds * share if item.size * item.stride <= self.domain else 0.0
        elif item.hidden == "product":
            hidden = 0.0 if self._on_cpus else min(seconds, PRODUCT * compute_s)
        else:
            hidden = min(seconds, c.overlap_efficiency * compute_s)
        return seconds - hidden, hidden * c.overlap_slowdown
