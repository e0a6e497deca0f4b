"""What the paper's pruning rules cost: each against the same search without it."""

from __future__ import annotations

import math

import pytest
from instances import CALIBRATION, TRAITS, Instance, planned_engines
from msgspec.structs import replace
from paper import PP_OUTERMOST
from small_engines import megatron_like
from small_models import cluster, gpt, training

from orchestrator.errors import NoPlanError
from orchestrator.hardware.collectives import Link, all_gather, all_reduce, reduce_scatter
from orchestrator.search.planner import search
from orchestrator.search.question import PlannedEngine, SearchSettings
from orchestrator.strategy.capabilities import Rule
from orchestrator.strategy.pins import MemoryLimit
from orchestrator.strategy.workload import Workload
from orchestrator.units import GIB

ORDERS = (("tp", "cp", "ep", "dp", "pp"), ("tp", "cp", "ep", "pp", "dp"))


def lost(workload: Workload, engines: list[PlannedEngine], limit: MemoryLimit) -> float | None:
    """By how much the best plan with PP over the slowest level is slower than the best of both rank orders; None where nothing fits."""

    def seconds(*prunings: Rule) -> float:
        try:
            plan = search(workload, engines, SearchSettings(limit=limit, prunings=prunings, top_k=1)).plan
        except NoPlanError:
            return math.inf
        assert plan.predicted is not None
        return plan.predicted.step_time_s

    free, pruned = seconds(), seconds(PP_OUTERMOST)
    return None if free == math.inf else pruned / free - 1


def test_pp_outermost_loses_nothing_on_small_instances() -> None:
    """Random instances of two nodes: of 150 seeds those with more GPUs than a node has."""
    losses = []
    for seed in range(150):
        i = Instance(seed)
        if i.cluster.gpus_per_node < i.cluster.num_gpus:
            engines = planned_engines([(replace(i.capabilities, rank_orders=ORDERS), i.traits)], i.calibration)
            losses.append(lost(i.workload, engines, i.limit))
    assert len([loss for loss in losses if loss is not None]) >= 15
    assert not any(losses)


@pytest.mark.parametrize(("hidden", "batch", "least", "most"), [(256, 32, 0.02, 0.1), (64, 8, 0.0, 0.04), (1024, 8, 0.0, 0.0)])
def test_pp_outermost_loses_where_activations_outweigh_weights(hidden: int, batch: int, least: float, most: float) -> None:
    """2 x 4 GPUs, sequences of 512. Many micro-batches over the border of small stages weigh more than one reduction of their weights:
    there the rule loses 6%. With larger weights it loses nothing."""
    workload = Workload(
        model=gpt(8, hidden=hidden, heads=4, seq=512, vocab=1024),
        training=training(batch, seq=512),
        cluster=cluster(8, gpus_per_node=4),
    )
    engines = planned_engines([(megatron_like(rank_orders=ORDERS, recompute=("none", "full")), TRAITS)], CALIBRATION)
    loss = lost(workload, engines, MemoryLimit(limit=80 * GIB, reserve=0))
    assert loss is not None
    assert least <= loss <= most


def sdp(nbytes: float, ranks: int, link: Link) -> float:
    """Sharded data parallelism: weights gathered in forward and backward, gradients scattered (ZeRO-3)."""
    return 2 * all_gather(nbytes, ranks, link) + reduce_scatter(nbytes, ranks, link)


MIXES = [(shards, 2**k // shards) for k in range(2, 11) for shards in (2**j for j in range(1, k))]
"""(SDP, DP) of all mixed strategies on 4 to 1024 ranks."""


def test_mixing_dp_and_sdp_sends_more_by_the_papers_count() -> None:
    """Takeaway 3 counts data parallelism's all-reduce as that of whole gradients."""
    link = Link(bandwidth=1.0, latency=0.0)
    assert all(sdp(1, shards, link) + all_reduce(1, dp, link) > sdp(1, shards * dp, link) for shards, dp in MIXES)


def test_mixing_dp_and_sdp_sends_a_sixth_less_where_only_the_shard_is_reduced() -> None:
    """As runtimes do it: each rank reduces the shard that it has. Over equal links the rule then costs up to 1/6 of the traffic; the
    states take dp times the memory. So engines with shard groups are searched without it."""
    link = Link(bandwidth=1.0, latency=0.0)
    shares = [(sdp(1, s, link) + all_reduce(1 / s, dp, link)) / sdp(1, s * dp, link) for s, dp in MIXES]
    assert all(share < 1 for share in shares)
    assert 5 / 6 - 0.01 < min(shares) < 5 / 6 + 0.01


def test_mixing_dp_and_sdp_is_several_times_faster_over_a_slow_level() -> None:
    """Eight shards inside a node of 300 GB/s, data parallelism over 25 GB/s between nodes, against 16 shards over both."""
    fast, slow = Link(bandwidth=300.0, latency=0.0), Link(bandwidth=25.0, latency=0.0)
    assert sdp(1, 16, slow) / (sdp(1, 8, fast) + all_reduce(1 / 8, 2, slow)) > 8
