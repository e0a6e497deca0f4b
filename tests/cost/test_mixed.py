"""Prices on two types of GPU: a stage by its own, a transfer by whose stages it joins, and a bound by the better of both."""

from __future__ import annotations

import pytest
from cost_cases import MEGATRON, a100, candidate, describe, gpt
from msgspec.structs import replace

from orchestrator.cost.calibration import Calibration, joined
from orchestrator.cost.mixed import LEAST_OF, MixedCosts, cost_model
from orchestrator.cost.price import CostModel
from orchestrator.cost.states import state_bytes
from orchestrator.hardware.spec import Level, Part
from orchestrator.model.training import Training
from orchestrator.strategy.workload import Workload
from orchestrator.units import GB, US

FIRST = Calibration(p2p_efficiency=0.5, collective_overhead_s=1 * US, latency_factor=1.0, gemm_efficiency=0.8, allocator_slack=0.1)
SECOND = Calibration(p2p_efficiency=0.8, collective_overhead_s=3 * US, latency_factor=2.0, gemm_efficiency=0.4, allocator_slack=0.3)


def levels(inner: float) -> tuple[Level, ...]:
    return Level(name="in", size=2, bandwidth=inner, latency=2 * US), Level(name="out", size=64, bandwidth=5 * GB, latency=7 * US)


def costs() -> MixedCosts:
    """Two nodes of two ranks; the second type is slower, and so is its link."""
    one = a100(4, gpus_per_node=2)
    slow = replace(one.gpu, name="slow", memory_bandwidth=one.gpu.memory_bandwidth / 2)
    parts = Part(gpu=one.gpu, num_gpus=2, levels=levels(100 * GB)), Part(gpu=slow, num_gpus=2, levels=levels(40 * GB))
    both = replace(one, gpu=slow, levels=levels(40 * GB), mixed=True, parts=parts)
    model = describe(gpt(num_layers=8), 2048)
    found = cost_model(
        Workload(model=model, training=Training(global_batch_size=8, seq_length=2048), cluster=both), MEGATRON, joined([FIRST, SECOND])
    )
    assert isinstance(found, MixedCosts)
    return found


def test_a_hop_inside_a_type_is_by_its_link_and_one_between_two_by_what_both_have() -> None:
    """Four stages of a rank: inside the first node, between the nodes, inside the second, and back from the last to the first."""
    model = costs()
    cand = candidate(pp=4)
    nbytes = 2048 * 1024 * 2

    def hop(bandwidth: float, efficiency: float, latency: float, overhead: float) -> float:
        return nbytes / (bandwidth * efficiency) + latency + overhead

    between = hop(5 * GB, 0.5, 2 * 7 * US, 3 * US)
    wanted = hop(100 * GB, 0.5, 2 * US, 1 * US), between, hop(40 * GB, 0.8, 2 * 2 * US, 3 * US), between
    assert model.hop_seconds(cand) == pytest.approx(wanted)
    assert model.hop_seconds(replace(cand, vpp=2, schedule="interleaved")) == pytest.approx(wanted * 2)


def test_a_stage_is_its_own_types_and_what_is_asked_of_none_is_the_least_of_all() -> None:
    model = costs()
    cand = candidate(pp=4)
    first, second = model.types
    assert [model.of_stage(cand, stage) for stage in range(4)] == [first, first, second, second]
    for kind in model.kinds:
        each = [one.layer(cand, kind, "full") for one in model.types]
        found = model.layer(cand, kind, "full")
        assert all(getattr(found, name) == min(getattr(cost, name) for cost in each) for name in LEAST_OF)
        assert model.layer(cand, kind, "full") is found
        states = state_bytes(MEGATRON, model.training, 0)
        floors = [one.layer_floor_seconds(cand, kind, states) for one in model.types]
        assert model.layer_floor_seconds(cand, kind, states) == (min(f for f, _ in floors), min(b for _, b in floors))
        assert model.layer_static_bytes(cand, kind) == min(one.layer_static_bytes(cand, kind) for one in model.types)
    sums = [one.sums(cand) for one in model.types]
    for one, added in zip(model.types, sums, strict=True):
        added.add(one.layer(cand, "decoder", "none"), 2)
    for stage, part in enumerate((0, 0, 1, 1)):
        assert model.stage_cost(cand, sums[part], stage) == model.types[part].stage_cost(cand, sums[part], stage)
        assert model.stage_memory(cand, stage).slack == (0.1, 0.3)[part]
    assert sums[0].forward_s[0] < sums[1].forward_s[0]
    with pytest.raises(NotImplementedError, match="of_stage"):
        model.sums(cand)
    interleaved = candidate(pp=4, vpp=2, num_microbatches=8)
    assert model.busy_seconds(interleaved) <= min(one.busy_seconds(interleaved) for one in model.types)


def test_bounds_reckon_with_the_same_modes_whatever_the_type() -> None:
    model = costs()
    fewer = model.with_modes(("none", "full"))
    assert isinstance(fewer, MixedCosts)
    assert [fewer.modes, *(one.modes for one in fewer.types)] == [("none", "full")] * 3
    assert model.with_modes(model.modes) is model
    assert len(model.types[0].modes) > 2


def test_one_type_has_no_mixed_prices() -> None:
    given = Workload(model=describe(gpt(), 2048), training=Training(global_batch_size=8, seq_length=2048), cluster=a100(8))
    assert type(cost_model(given, MEGATRON, FIRST)) is CostModel
