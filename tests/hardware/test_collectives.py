"""Ring volumes, and the link that a group of ranks gets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.hardware.catalog import GPUS
from orchestrator.hardware.collectives import (
    COLLECTIVES,
    Link,
    all_gather,
    all_reduce,
    all_to_all,
    exchange_link,
    link_for,
    members_inside,
    p2p,
    reduce_scatter,
)
from orchestrator.hardware.spec import Cluster, Level

FREE = Link(bandwidth=1.0, latency=0.0)


def cluster(num_gpus: int, *levels: tuple[int, float, float]) -> Cluster:
    return Cluster(
        name="test",
        gpu=GPUS["A100-SXM-80GB"],
        num_gpus=num_gpus,
        gpus_per_node=levels[0][0],
        levels=tuple(Level(name=str(i), size=size, bandwidth=speed, latency=hop) for i, (size, speed, hop) in enumerate(levels)),
        host_bandwidth=1.0,
        host_memory=1,
    )


@given(n=st.integers(2, 4096), nbytes=st.floats(1, 1e12))
def test_a_ring_moves_n_minus_1_nths_and_an_all_reduce_twice_that(n: int, nbytes: float) -> None:
    assert all_gather(nbytes, n, FREE) == pytest.approx((n - 1) / n * nbytes)
    assert reduce_scatter(nbytes, n, FREE) == pytest.approx((n - 1) / n * nbytes)
    assert all_to_all(nbytes, n, FREE) == pytest.approx((n - 1) / n * nbytes)
    assert all_reduce(nbytes, n, FREE) == pytest.approx(reduce_scatter(nbytes, n, FREE) + all_gather(nbytes, n, FREE))


def test_a_group_of_one_moves_nothing() -> None:
    assert [cost(1e9, 1, Link(bandwidth=1, latency=1)) for name, cost in COLLECTIVES.items() if name != "p2p"] == [0, 0, 0, 0]


def test_latency_is_paid_by_hop() -> None:
    link = Link(bandwidth=1e30, latency=1.0)
    assert all_gather(1, 5, link) == pytest.approx(4)
    assert all_reduce(1, 2, link) == pytest.approx(2)  # ring and tree agree
    assert all_reduce(1, 64, link) == pytest.approx(12)  # the tree: 2 log2 n
    assert p2p(1, link) == pytest.approx(1)


@given(n=st.integers(1, 512), nbytes=st.floats(0, 1e12), bandwidth=st.floats(1e6, 1e12), faster=st.floats(1, 100))
def test_a_faster_link_is_never_slower(n: int, nbytes: float, bandwidth: float, faster: float) -> None:
    slow, fast = Link(bandwidth=bandwidth, latency=1e-5), Link(bandwidth=bandwidth * faster, latency=1e-5)
    for cost in COLLECTIVES.values():
        assert cost(nbytes, n, fast) <= cost(nbytes, n, slow)


NODES_OF_8 = cluster(64, (8, 300.0, 1.0), (10_000, 25.0, 5.0))


def test_a_group_inside_a_node_has_the_inner_link() -> None:
    assert link_for(NODES_OF_8, 8, 1) == Link(bandwidth=300.0, latency=1.0, climb=3.0)
    assert link_for(NODES_OF_8, 2, 4) == Link(bandwidth=300.0, latency=1.0, climb=1.0)


def test_a_tree_crosses_the_network_once_for_each_doubling_of_nodes() -> None:
    """Four nodes of 8: two doublings at 5 s outside, three at 1 s inside; the ring's mean hop is 1.5 s, twenty-five of 31 hops at 1 s."""
    link = link_for(NODES_OF_8, 32, 1)
    assert link.climb == 2 * 5.0 + 3 * 1.0
    assert all_reduce(0.0, 32, link) == 2 * link.climb
    assert link.slower(2.0).climb == 2 * link.climb
    assert link.slower(2.0).bandwidth == link.bandwidth


def test_one_member_a_node_has_one_adapter() -> None:
    assert link_for(NODES_OF_8, 8, 8) == Link(bandwidth=25.0, latency=5.0, climb=15.0)


def test_members_of_a_node_share_their_adapters_up_to_the_inner_link() -> None:
    link = link_for(NODES_OF_8, 16, 1)
    assert link.bandwidth == 200.0  # 8 adapters of 25
    assert link.latency == pytest.approx(7 / 8 * 1.0 + 1 / 8 * 5.0)
    assert link_for(NODES_OF_8, 16, 4).bandwidth == 50.0
    assert link_for(cluster(64, (8, 100.0, 1.0), (10_000, 25.0, 5.0)), 64, 1).bandwidth == 100.0


def test_nodes_of_six_and_odd_counts_work() -> None:
    six = cluster(24, (6, 300.0, 1.0), (10_000, 25.0, 5.0))
    assert link_for(six, 3, 1).bandwidth == 300.0
    assert link_for(six, 4, 1).bandwidth == 50.0  # groups 4..7 lie across the border, two and two
    assert link_for(six, 6, 2).bandwidth == 75.0  # ranks 0 2 4 and 6 8 10
    assert link_for(cluster(5, (8, 300.0, 1.0), (10_000, 25.0, 5.0)), 5, 1).bandwidth == 300.0
    assert members_inside(8, 5, 1, 40) == 1


def test_three_levels_are_the_narrowest_of_those_crossed() -> None:
    rack = cluster(288, (72, 900.0, 1.0), (144, 100.0, 2.0), (100_000, 10.0, 9.0))
    assert link_for(rack, 72, 1).bandwidth == 900.0
    assert link_for(rack, 144, 1).bandwidth == 900.0
    assert link_for(rack, 4, 72).bandwidth == 20.0  # two members on each side of the outermost border
    assert link_for(rack, 2, 72) == Link(bandwidth=100.0, latency=2.0, climb=2.0)


def test_efficiency_is_asked_by_level_and_domains() -> None:
    asked = []

    def efficiency(level: int, domains: int) -> float:
        asked.append((level, domains))
        return 0.5

    assert link_for(NODES_OF_8, 32, 2, efficiency).bandwidth == 0.5 * 4 * 25.0
    assert asked == [(0, 32), (1, 8)]


@given(
    size=st.integers(1, 64),
    stride=st.sampled_from([1, 2, 3, 4, 6, 8]),
    node=st.sampled_from([4, 6, 8, 72]),
    faster=st.floats(1, 10),
    level=st.integers(0, 1),
)
def test_a_faster_level_never_gives_a_slower_link(size: int, stride: int, node: int, faster: float, level: int) -> None:
    speeds = [300.0, 25.0]
    slow = link_for(cluster(size * stride * node, (node, speeds[0], 1.0), (10**6, speeds[1], 5.0)), size, stride)
    speeds[level] *= faster
    fast = link_for(cluster(size * stride * node, (node, speeds[0], 1.0), (10**6, speeds[1], 5.0)), size, stride)
    assert fast.bandwidth >= slow.bandwidth
    assert fast.latency == slow.latency


def test_an_exchange_is_as_slow_as_the_level_that_most_of_it_leaves_over() -> None:
    """16 ranks, 8 a node: 15 of 16 parts leave a rank at 300, of which 8 leave the node at 25."""
    link = exchange_link(NODES_OF_8, 16, 1)
    assert link.bandwidth == pytest.approx(15 / (8 / 25.0))
    plain = link_for(NODES_OF_8, 16, 1)
    assert (link.latency, link.climb) == (plain.latency, plain.climb)
    assert exchange_link(NODES_OF_8, 8, 1).bandwidth == 300.0, "inside a node"
    assert exchange_link(NODES_OF_8, 4, 8).bandwidth == 25.0, "one rank a node"
    assert exchange_link(NODES_OF_8, 1, 1) == link_for(NODES_OF_8, 1, 1)
    fast_outside = cluster(64, (8, 10.0, 1.0), (10_000, 1000.0, 5.0))
    assert exchange_link(fast_outside, 16, 1).bandwidth == pytest.approx(10.0), "all 15 parts leave the rank"


def test_an_exchange_asks_for_the_efficiency_of_each_level_by_the_domains_that_it_spans() -> None:
    asked = []

    def efficiency(level: int, domains: int) -> float:
        asked.append((level, domains))
        return 0.5 if level else 1.0

    assert exchange_link(NODES_OF_8, 32, 1, efficiency).bandwidth == pytest.approx(31 / (24 / 12.5))
    assert set(asked) == {(0, 32), (1, 4)}


@given(nbytes=st.floats(1, 1e12), n=st.integers(2, 1024), latency=st.floats(0, 1e-3), climb=st.floats(0, 1e-2))
def test_an_all_reduce_takes_the_cheaper_of_ring_and_tree(nbytes: float, n: int, latency: float, climb: float) -> None:
    link = Link(bandwidth=1e9, latency=latency, climb=climb)
    assert all_reduce(nbytes, n, link) == pytest.approx(2 * (n - 1) / n * nbytes / 1e9 + min(2 * (n - 1) * latency, 2 * climb))


def test_bytes_and_messages_are_paid_by_each_operation() -> None:
    """Four ranks, 800 bytes at 100 a second, half a second a hop: 6 and 3 hops; a message 8 and one hop; a ring of two 4 and one."""
    link = Link(bandwidth=100.0, latency=0.5)
    assert {name: cost(800, 4, link) for name, cost in COLLECTIVES.items()} == {
        "all_gather": 7.5, "reduce_scatter": 7.5, "all_to_all": 7.5, "all_reduce": 14.0, "p2p": 8.5,
    }  # fmt: skip
    assert [COLLECTIVES[name](800, 2, link) for name in ("all_gather", "all_to_all", "all_reduce")] == [4.5, 4.5, 9.0]
    assert [members_inside(*given) for given in ((8, 8, 1, 8), (8, 16, 1, 16), (8, 3, 1, 64), (4, 2, 4, 64), (6, 4, 3, 48))] == [
        8,
        8,
        1,
        1,
        2,
    ]
