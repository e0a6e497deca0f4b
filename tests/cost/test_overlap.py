"""Traffic: over which link it goes, what hides behind compute, and what hiding costs. Numbers are worked out in each test."""

from __future__ import annotations

from typing import Any

import pytest
from cost_cases import DEEPSPEED, MEGATRON, a100, candidate, cost_model, stages
from msgspec.structs import replace

from orchestrator.cost.calibration import Calibration, datasheet
from orchestrator.cost.network import Network
from orchestrator.cost.price import CostModel
from orchestrator.cost.replicas import ReplicaPrices
from orchestrator.cost.stage import StageSums, exposed_seconds
from orchestrator.strategy.axes.traffic import Hidden, Traffic
from orchestrator.units import GB, GBIT

HALF = Calibration(overlap_efficiency=0.5, overlap_slowdown=0.2, tp_overlap=0.25, user_buffers_overlap=0.75)


def network(calibration: Calibration = HALF, **speeds: float) -> Network:
    return Network(a100(**speeds), calibration, replace(MEGATRON, tp_overlap=0.4))


def item(hidden: Hidden = "compute", *, size: int = 4, stride: int = 1, **fields: Any) -> Traffic:
    return Traffic(axis="tp", operation="all_gather", nbytes=1e9, size=size, stride=stride, **{"when": "forward", **fields}, hidden=hidden)


@pytest.mark.parametrize(
    ("hidden", "seconds", "compute", "exposed", "slowed"),
    [
        ("nothing", 3.0, 10.0, 3.0, 0.0),
        ("compute", 3.0, 10.0, 0.0, 0.6),  # 3 of the 5 s beside which it can hide, a fifth of them lost
        ("compute", 7.0, 10.0, 2.0, 1.0),  # 5 of 7 hide
        ("attention", 7.0, 0.0, 7.0, 0.0),
        ("gemm", 4.0, 0.0, 3.0, 0.2),  # a quarter, however long the products are
        ("user_buffers", 4.0, 0.0, 1.0, 0.6),  # three quarters
        ("product", 2.0, 10.0, 0.0, 0.4),  # beside one of a layer's four products, all of it
        ("product", 4.0, 10.0, 1.5, 0.5),
    ],
)
def test_what_hides_is_not_waited_for_but_slows_the_compute(
    hidden: Hidden, seconds: float, compute: float, exposed: float, slowed: float
) -> None:
    assert network().exposed(seconds, item(hidden), compute) == pytest.approx((exposed, slowed))


def test_the_users_overlap_is_never_less_than_the_engines_own() -> None:
    better = replace(HALF, tp_overlap=0.9)
    assert network(better).exposed(1.0, item("user_buffers"), 0.0)[0] == pytest.approx(0.1)


def test_a_calibration_without_a_share_of_its_own_takes_the_engines() -> None:
    assert network(replace(HALF, tp_overlap=-1.0)).exposed(1.0, item("gemm"), 0.0)[0] == pytest.approx(0.6)
    assert network(replace(HALF, tp_overlap=0.0)).exposed(1.0, item("gemm"), 0.0)[0] == 1.0


@pytest.mark.parametrize(("size", "stride", "inside"), [(8, 1, True), (4, 2, True), (16, 1, False), (8, 2, False), (2, 8, False)])
def test_chunks_pass_beside_products_only_inside_a_node(size: int, stride: int, inside: bool) -> None:
    exposed, slowed = network().exposed(4.0, item("gemm", size=size, stride=stride), 0.0)
    assert (exposed, slowed) == pytest.approx((3.0, 0.2) if inside else (4.0, 0.0))


def test_ranks_without_gpus_send_on_the_cores_that_compute() -> None:
    cluster = replace(a100(4), gpu=replace(a100().gpu, name="cpu", peak_flops={"fp32": 1e11}))
    assert Network(cluster, HALF, MEGATRON).exposed(2.0, item("product"), 10.0) == (2.0, 0.0)


@pytest.mark.parametrize(("sequence_parallel", "hidden", "of"), [(False, 1, 2), (True, 2, 5)])
def test_a_gathered_input_and_its_gradients_sum_hide_beside_products(sequence_parallel: bool, hidden: int, of: int) -> None:
    """Of a region's two all-reduces that of backward; under sequence parallelism of five operations the two of backward around the linear
    whose input is gathered. The products are long enough."""
    c = replace(datasheet(a100(8), MEGATRON), overlap_slowdown=0.0, latency_factor=0.0, collective_overhead_s=0.0)
    cand = candidate(tp=2, micro_batch_size=4, sequence_parallel=sequence_parallel)
    waits = []
    for beside in (False, True):
        model = cost_model(calibration=c, traits=replace(MEGATRON, overlaps_input_gradient=beside), cluster=a100(8))
        waits.append(model.layer(cand, "decoder", "none").by_cause["tp"])
    assert waits[1] / waits[0] == pytest.approx(1 - hidden / of)


def test_a_link_is_as_fast_as_its_level_and_loses_with_scale() -> None:
    """Nodes of 8: NVLink inside; beyond, the fabric's share falls by (n/2)^-0.1 for n nodes."""
    c = replace(HALF, inner_efficiency=0.8, outer_efficiency=0.6, outer_scaling=0.1, latency_factor=3.0)
    net = network(c, inner=100 * GB, outer=80 * GBIT)
    assert net.link(8, 1).bandwidth == pytest.approx(80 * GB)
    assert net.link(8, 1).latency == pytest.approx(3 * 2e-6)
    two, eight = net.link(2, 8), net.link(8, 8)
    assert two.bandwidth == pytest.approx(0.6 * 10 * GB)
    assert two.latency == pytest.approx(3 * 4e-6)
    assert eight.bandwidth == pytest.approx(two.bandwidth * 4**-0.1)


def test_a_pair_talks_over_the_innermost_level_that_holds_it() -> None:
    """Stages of 4 ranks, two to a node of 8: from the first to the second inside a node, from the second to the third between nodes."""
    c = replace(HALF, p2p_efficiency=0.5, latency_factor=2.0)
    net = network(c, inner=100 * GB, outer=80 * GBIT)
    inside, between = net.pair_link(0, 4, 4), net.pair_link(4, 8, 4)
    assert (inside.bandwidth, inside.latency) == pytest.approx((50 * GB, 4e-6))
    assert (between.bandwidth, between.latency) == pytest.approx((5 * GB, 8e-6))
    assert net.pair_link(0, 3, 3).bandwidth == between.bandwidth  # groups of 3 straddle the nodes
    alone = Network(a100(4, inner=100 * GB), c, MEGATRON)
    assert alone.pair_link(0, 3, 3).bandwidth == inside.bandwidth  # one node holds all there are


def test_a_transfer_takes_longer_over_the_fabric_and_wraps_around() -> None:
    model = cost_model(cluster=a100(16))
    hops = model.hop_seconds(candidate(tp=4, pp=4))
    assert hops[0] == hops[2] < hops[1] == hops[3]  # the way back is from the last node to the first
    twice = model.hop_seconds(candidate(tp=4, pp=4, vpp=2))
    assert twice == hops * 2


def test_messages_of_several_layers_share_their_latency_once_a_step_alone() -> None:
    """Of an all-gather over 4 ranks the latency counts 3 times; in messages of 10 layers a layer bears a tenth."""
    c = replace(HALF, layers_per_message=10.0, collective_overhead_s=0.0, latency_factor=1.0)
    one = replace(c, layers_per_message=1.0)
    latency = 3 * 2e-6
    for when, saved in (("step", 0.9 * latency), ("forward", 0.0)):
        assert network(one).seconds(item(when=when)) - network(c).seconds(item(when=when)) == pytest.approx(saved, abs=1e-12)
    counted = replace(HALF, collective_overhead_s=1e-3)
    bare = replace(HALF, collective_overhead_s=0.0)
    assert network(counted).seconds(item(count=3)) - network(bare).seconds(item(count=3)) == pytest.approx(3e-3)


def test_gradients_travel_in_megatrons_buckets_which_grow_with_the_group() -> None:
    """8 ranks: buckets of at least 40 million parameters; 64: one million for each, of experts too, whose own group is smaller. A layer has
    so many of the hops as it fills of a bucket, and its bytes whatever the buckets."""
    c = replace(HALF, collective_overhead_s=0.0)
    for ranks, bucket in ((8, 40e6), (64, 64e6)):
        seconds = {}
        for least in (40_000_000, 400_000_000):
            traits = replace(MEGATRON, message_parameters=(least, 1_000_000))
            model = cost_model(calibration=c, traits=traits, cluster=a100(ranks))
            prices = ReplicaPrices(model.workload, model.network)
            strategy = candidate(dp=ranks, zero_stage=1).strategy
            seconds[least] = prices.of(10_000_000, strategy).sync_s, prices.of(10_000_000, strategy, ranks=8 * ranks).sync_s
        (few, of_experts), (many, _) = seconds[40_000_000], seconds[400_000_000]
        hops = (few - many) / (10e6 / bucket - 10e6 / 400e6)
        assert hops > 0
        assert few - of_experts == pytest.approx(hops * (10e6 / bucket - 10e6 / max(40e6, 8e6 * ranks)))


# ---- once a step


def sums(forward: float, backward: float, sync: float, gather: float, vpp: int = 1) -> StageSums:
    added = StageSums(vpp, 0.0)
    added.forward_s, added.backward_s = [forward / vpp] * vpp, [backward / vpp] * vpp
    added.sync_s, added.gather_s = sync, gather
    return added


def model_with(calibration: Calibration = HALF, **traits: Any) -> CostModel:
    return cost_model(calibration=calibration, traits=replace(MEGATRON, **traits))


@pytest.mark.parametrize(
    ("sync", "gather", "exposed"),
    [
        (2.0, 0.0, 0.4),  # all hides beside half of 6 s of backward; a fifth of it is lost
        (5.0, 0.0, 2 + 0.6),  # 3 s hide
        (0.0, 5.0, 4 + 0.2),  # beside forward, half of 2 s
        (5.0, 5.0, 6 + 0.8),
        (0.0, 0.0, 0.0),
    ],
)
def test_reductions_hide_beside_backward_and_gathers_beside_forward(sync: float, gather: float, exposed: float) -> None:
    found = exposed_seconds(model_with().workload, candidate(dp=8, zero_stage=1), sums(2.0, 6.0, sync, gather))
    assert found == pytest.approx(exposed)


def test_buckets_cost_a_latency_each_and_the_last_one_hides_beside_nothing() -> None:
    """Ten times smaller ones: ten times the hops. Larger ones than the engine's: their surplus over 1e9 parameters is late in both ways."""
    model = model_with(message_parameters=(40_000_000, 1_000_000))
    layers = {
        size: model.layer(candidate(dp=8, zero_stage=1, ddp_bucket_size=size), "decoder", "none") for size in (None, 40_000_000, 4_000_000)
    }
    assert layers[None].sync_s == layers[40_000_000].sync_s
    link = model.network.link(8, 1)
    hops = layers[None].parameters * (1 / 4e6 - 1 / 4e7) * 7 * link.latency
    assert layers[4_000_000].sync_s - layers[None].sync_s == pytest.approx(hops)
    both = sums(2.0, 6.0, 2.0, 1.0)
    both.parameters = 10**9
    for size, late in ((40_000_000, 0.0), (240_000_000, 0.2), (10**10, 1.0)):
        found = exposed_seconds(model.workload, candidate(dp=8, zero_stage=1, ddp_bucket_size=size), both)
        assert found == pytest.approx(3.0 * late + 3.0 * (1 - late) * 0.2)


def test_nothing_hides_where_user_or_engine_says_so() -> None:
    both = sums(2.0, 6.0, 5.0, 5.0)
    for fields, exposed in (({"overlap_grad_reduce": False}, 9.2), ({"overlap_param_gather": False}, 7.6)):
        assert exposed_seconds(model_with().workload, candidate(dp=8, **fields), both) == pytest.approx(exposed)
    for traits, exposed in (({"overlaps_grad_reduce": False}, 9.2), ({"overlaps_param_gather": False}, 7.6)):
        assert exposed_seconds(model_with(**traits).workload, candidate(dp=8), both) == pytest.approx(exposed)


def test_chunks_give_a_reduction_more_passes_to_hide_beside() -> None:
    """With pp=4 and two chunks 1 + 1/2 * 3 = 2.5 times half of 6 s: of 9 s 7.5 hide. One chunk or one stage: 3 s."""
    for fields, hidden in (({"pp": 4, "vpp": 2}, 7.5), ({"pp": 4, "vpp": 3}, 9.0), ({"pp": 4}, 3.0), ({"pp": 1}, 3.0)):
        found = exposed_seconds(model_with().workload, candidate(dp=8, **fields), sums(2.0, 6.0, 9.0, 0.0, fields.get("vpp", 1)))
        assert found == pytest.approx(9.0 - 0.8 * hidden)


def test_hiding_twice_as_much_slows_twice_as_much() -> None:
    """A step of one stage: what is exposed and lost stands in the step's time, and in its cause."""
    quiet = replace(datasheet(a100(), MEGATRON), overlap_slowdown=0.0)
    cand = candidate(dp=8, micro_batch_size=4)
    times = []
    for slowdown in (0.0, 0.3, 0.6):
        model = cost_model(calibration=replace(quiet, overlap_slowdown=slowdown))
        prediction = model.price(cand, stages(model.model, [4]))
        assert prediction.by_cause.get("dp", 0.0) == pytest.approx(model.stage(cand, stages(model.model, [4])[0], 0).exposed_s)
        times.append(prediction.step_time_s)
    assert times[1] - times[0] == pytest.approx(times[2] - times[1])
    assert times[1] > times[0]


def test_traffic_of_a_pass_hides_behind_what_others_left() -> None:
    """ZeRO-3 on a slow fabric: backward gathers weights, then reduces gradients, both longer than the pass. The first hides behind 0.8 of
    its compute, the second behind 0.8 of the rest: 0.96 in all. Forward has one gather."""
    slow = a100(64, inner=1 * GB, outer=1 * GBIT)
    c = replace(datasheet(slow, DEEPSPEED), overlap_efficiency=0.8, overlap_slowdown=0.0, op_overhead_s=0.0, collective_launch_s=0.0)
    model = cost_model(cluster=slow, traits=replace(DEEPSPEED, overlaps_param_gather=True), calibration=c)
    layer = model.layer(candidate(dp=64, zero_stage=3), "decoder", "none")
    alone = model.layer(candidate(dp=1, zero_stage=3), "decoder", "none")
    shown = candidate(dp=64, zero_stage=3, overlap_param_gather=False, overlap_grad_reduce=False)
    waits = model.layer(shown, "decoder", "none")
    assert waits.forward_s - layer.forward_s == pytest.approx(0.8 * alone.forward_s)
    assert waits.backward_s - layer.backward_s == pytest.approx(0.96 * alone.backward_s)
