"""No constant but those of `Calibration` is a time: on hardware that is 2**40 times as fast everything takes 1/2**40 as long, to the last
bit. A power of two changes no rounding; a second that stands anywhere in the code, or a product in place of a quotient, does."""

from __future__ import annotations

import random

import msgspec
import pytest
from msgspec.structs import replace
from real_spaces import WORDS, asked, candidates, name_of

from orchestrator.cost.bounds import Floors
from orchestrator.cost.calibration import Calibration
from orchestrator.cost.price import CostModel
from orchestrator.cost.profile import LayerProfile, Profile
from orchestrator.hardware.spec import Cluster
from orchestrator.search.layerwise import AnalyticPrices, Prices, ProfilePrices, layerwise
from orchestrator.search.planner import search
from orchestrator.search.question import PlannedEngine
from orchestrator.strategy.capabilities import Capabilities
from orchestrator.strategy.layerwise import TRAITS
from orchestrator.strategy.megatron_layout import even_chunks, stages_of
from orchestrator.strategy.pins import MemoryLimit
from orchestrator.strategy.spec import Candidate
from orchestrator.strategy.workload import Workload
from orchestrator.units import MIB

FASTER = 2.0**40


def faster_cluster(cluster: Cluster) -> Cluster:
    gpu = cluster.gpu
    peaks = {precision: FASTER * peak for precision, peak in gpu.peak_flops.items()}
    levels = tuple(replace(one, bandwidth=FASTER * one.bandwidth, latency=one.latency / FASTER) for one in cluster.levels)
    fast = replace(gpu, peak_flops=peaks, memory_bandwidth=FASTER * gpu.memory_bandwidth)
    return replace(cluster, gpu=fast, levels=levels, host_bandwidth=FASTER * cluster.host_bandwidth)


def faster_constants(c: Calibration) -> Calibration:
    seconds = {name: getattr(c, name) / FASTER for name in Calibration.__struct_fields__ if name.endswith("_s")}
    return replace(c, **seconds, host_adam_bandwidth=FASTER * c.host_adam_bandwidth)


def faster(workload: Workload, engine: PlannedEngine) -> tuple[Workload, PlannedEngine]:
    constants = faster_constants(engine.calibration)
    fields = {"capabilities": engine.capabilities, "traits": engine.traits, "policy": engine.policy}
    return replace(workload, cluster=faster_cluster(workload.cluster)), PlannedEngine(**fields, calibration=constants)


def seconds_of(costs: CostModel, capabilities: Capabilities, leaf: Candidate) -> tuple[dict[str, float], dict[str, float]]:
    """(all seconds that a candidate is priced and bounded with, its bytes), by name."""
    seconds, nbytes = {}, {}
    for kind in costs.kinds:
        for mode in capabilities.recompute:
            cost = msgspec.to_builtins(costs.layer(leaf, kind, mode))
            seconds |= {f"{kind} {mode} {cause}": value for cause, value in cost.pop("by_cause").items()}
            seconds |= {f"{kind} {mode} {name}": value for name, value in cost.items() if name.endswith("_s")}
            nbytes |= {f"{kind} {mode} {name}": value for name, value in cost.items() if not name.endswith("_s")}
    floors = Floors(costs, capabilities, 60e9, pinned_layout=False)
    seconds |= {
        "floor": costs.time_floor(leaf),
        "shape": floors.shape(leaf, 4, [leaf.strategy.sequence_parallel]),
        "group": floors.group(leaf, leaf.vpp),
    }
    seconds |= {"leaf": floors.leaf(leaf), "busy": costs.busy_seconds(leaf), "once": costs.once_seconds(leaf)}
    nbytes |= {"floor": costs.memory_floor(leaf), "shape": floors.shape_bytes(leaf)}
    split = stages_of(costs.model, even_chunks(costs.model, leaf.mesh.pp * leaf.vpp), leaf.mesh.pp, [("full", 1)] * leaf.mesh.pp)
    price = costs.price(leaf, split)
    seconds |= price.by_cause | {"step": price.step_time_s}
    for index, stage in enumerate(split):
        cost = costs.stage(leaf, stage, index)
        seconds |= {f"{index} exposed": cost.exposed_s, f"{index} update": cost.optimizer_s, f"{index} forward": sum(cost.forward_s)}
        nbytes[f"{index}"] = cost.peak_bytes
    return seconds, nbytes


@pytest.mark.parametrize("words", WORDS, ids=name_of)
def test_prices_and_bounds_have_no_second_of_their_own(words: tuple[str, ...]) -> None:
    space, priced = asked(*words), 0
    for engine in space.planned:
        there = faster(space.workload, engine)
        costs = engine.costs(space.workload), there[1].costs(there[0])
        for chosen in candidates(space, engine, words):
            (seconds, nbytes), (fewer, same) = (seconds_of(one, engine.capabilities, chosen) for one in costs)
            assert {name: value / FASTER for name, value in seconds.items()} == fewer
            assert nbytes == same
            priced += 1
    assert priced >= 8


@pytest.mark.parametrize(
    "words",
    [
        ("recipe=llama3_8b", "gpus=16"),
        ("recipe=mixtral_tiny", "cluster=cpu", "gpus=8"),
        ("recipe=t5_tiny", "gpus=8"),
        ("recipe=llama3_8b", "cluster=dgx_h100", "gpus=32", "train.global_batch_size=48"),
    ],
)
def test_the_search_finds_the_same_plans_whatever_the_unit_of_time(words: tuple[str, ...]) -> None:
    space = asked(*words)
    both = [faster(space.workload, engine) for engine in space.planned]
    plain = search(space.workload, space.planned, space.settings)
    fast = search(both[0][0], [engine for _, engine in both], space.settings)
    assert plain.at_least_s is not None
    assert fast.at_least_s == plain.at_least_s / FASTER
    for ours, theirs in zip((plain.plan, *plain.alternatives), (fast.plan, *fast.alternatives), strict=True):
        assert (ours.candidate, ours.stages) == (theirs.candidate, theirs.stages)
        assert ours.predicted is not None
        assert theirs.predicted is not None
        assert theirs.predicted.step_time_s == ours.predicted.step_time_s / FASTER
        assert theirs.predicted.by_stage[0].memory_by_cause == ours.predicted.by_stage[0].memory_by_cause
    assert [outcome.reason for outcome in plain.outcomes] == [outcome.reason for outcome in fast.outcomes]


def measured(unit: float) -> Profile:
    """Layers of two kinds, with seconds in this unit."""
    rng = random.Random(1)
    layers = [
        LayerProfile(
            kind=kind,
            count=count,
            parameter_bytes=rng.uniform(10, 30) * MIB,
            forward_s={tp: rng.uniform(1e-3, 2e-3) / tp / unit for tp in (1, 2, 4)},
            saved_bytes={tp: rng.uniform(30, 60) * MIB / tp for tp in (1, 2, 4)},
            output_bytes=rng.uniform(1, 2) * MIB,
        )
        for kind, count in (("a", 5), ("b", 3))
    ]
    return Profile(name="measured", layers=tuple(layers), other_state_bytes=40 * MIB, other_saved_bytes=4 * MIB)


@pytest.mark.parametrize(("analytic", "size"), [(True, 20 * MIB), (True, 60 * MIB), (False, 700 * MIB), (False, 1500 * MIB)])
def test_layer_wise_plans_are_the_same_whatever_the_unit_of_time(analytic: bool, size: int) -> None:
    space = asked("recipe=gpt_tiny", "gpus=4", "cluster=v100_16gb_x4", "engine=megatron")
    plain = replace(space.planned[0].calibration, context_bytes=0.0, communicator_bytes=0.0, workspace_bytes=0.0)
    found = []
    for unit, workload, constants in (
        (1.0, space.workload, plain),
        (FASTER, replace(space.workload, cluster=faster_cluster(space.workload.cluster)), faster_constants(plain)),
    ):
        costs = CostModel(workload, TRAITS, constants)
        prices: Prices = AnalyticPrices(costs) if analytic else ProfilePrices(measured(unit), costs)
        found.append(layerwise(prices, 16, MemoryLimit(limit=size, reserve=0)))
    ours, theirs = found
    assert theirs.plan.step_time_s == ours.plan.step_time_s / FASTER
    assert theirs.at_least_s == ours.at_least_s / FASTER
    assert [stage.runs for stage in theirs.plan.stages] == [stage.runs for stage in ours.plan.stages]
    assert [stage.peak_bytes for stage in theirs.plan.stages] == [stage.peak_bytes for stage in ours.plan.stages]
