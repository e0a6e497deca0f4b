"""A cluster of two types of GPU: each pipeline stage is planned for the type that computes it, with layers by its speed and memory."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import oracle
import pytest
from instances import Instance, planned_engines
from msgspec.structs import replace

import orchestrator as so
from orchestrator.asking import grid
from orchestrator.cost.calibration import Calibration, joined
from orchestrator.cost.mixed import cost_model
from orchestrator.errors import InputError, NoPlanError
from orchestrator.hardware.spec import Cluster, Gpu, Part
from orchestrator.plan import from_json, to_json
from orchestrator.plan.check import check_plan
from orchestrator.recipe.clusters import cluster_from, to_tree
from orchestrator.recipe.machine import counted
from orchestrator.recipe.read import as_texts as texts
from orchestrator.search.planner import search
from orchestrator.strategy.pins import MemoryLimit
from orchestrator.units import MIB

TWO = "8 x H100-SXM-80GB + 8 x A100-SXM-80GB"


def two_types(gpu: object = TWO, **more: object) -> dict[str, Any]:
    """Nodes of eight; each type has its own NVLink, all the same network between nodes."""
    nvlink = {"name": "nvlink", "size": 8, "bandwidth": "nvlink", "latency": "1.9 us"}
    ib = {"name": "ib", "size": "unlimited", "bandwidth": "200 Gbit/s", "latency": "4 us"}
    tree = {"name": "two", "gpu": gpu, "gpus_per_node": 8, "host_bandwidth": "pcie", "host_memory": "256 GB", "levels": [nvlink, ib]}
    return {**tree, **more}


def planned(gpu: object = TWO, gpus: int = 16, **more: Any) -> Any:
    return so.plan(recipe="llama3_8b", gpus=gpus, cluster=two_types(gpu), engine="megatron", train={"global_batch_size": 128}, **more)


class TwoTypes(Instance):
    """An instance of four GPUs, of which some are slower or smaller, and have other constants."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        rng = random.Random(seed + 1000)
        while self.cluster.num_gpus != 4:
            seed += 1000
            super().__init__(seed)
        one = self.cluster.gpu
        slow, small = rng.choice([1.5, 2.0, 3.0]), rng.choice([0.5, 1.0, 1.5])
        other = replace(
            one,
            name="other",
            memory_bandwidth=one.memory_bandwidth / rng.choice([1.0, slow]),
            peak_flops={name: value / slow for name, value in one.peak_flops.items()},
        )
        levels = tuple(replace(level, bandwidth=level.bandwidth / rng.choice([1.0, 2.0])) for level in self.cluster.levels)
        first, second = Part(gpu=one, num_gpus=2, levels=self.cluster.levels), Part(gpu=other, num_gpus=2, levels=levels)
        parts = (first, second) if rng.random() < 0.5 else (second, first)
        self.cluster = replace(self.cluster, gpu=other, levels=levels, mixed=True, parts=parts)
        theirs = replace(self.calibration, gemm_efficiency=rng.choice([0.5, 0.9]), overlap_efficiency=0.5, microbatch_overhead_s=5e-6)
        self.calibration: Calibration = joined([self.calibration if part.gpu is one else theirs for part in parts])
        whole = self.limit.limit
        rooms = tuple(whole if part.gpu is one else int(whole * small) + MIB for part in parts)
        self.limit = MemoryLimit(limit=max(rooms), reserve=0, parts=rooms)


@cache
def best_of(seed: int) -> Any:
    """Of every plan of this instance, by enumeration."""
    one = TwoTypes(seed)
    return oracle.best(one.model, one.training, one.cluster, one.engines, one.limit, one.calibration)


@pytest.mark.parametrize("seed", range(40))
def test_the_plan_is_the_best_of_all_that_can_be_enumerated(seed: int) -> None:
    """Every mesh, split and recompute of a small instance, priced one by one: the search finds the fastest, or that none fits; no bound
    of it is above."""
    instance = TwoTypes(seed)
    expected = best_of(seed)
    engines = planned_engines(instance.engines, instance.calibration)
    if expected is None:
        with pytest.raises(NoPlanError):
            search(instance.workload, engines, instance.settings)
        return
    found = search(instance.workload, engines, instance.settings)
    assert found.plan.predicted is not None
    assert found.plan.predicted.step_time_s == pytest.approx(expected[0], rel=1e-9)
    costs = cost_model(instance.workload, instance.traits, instance.calibration)
    for plan in (found.plan, *found.alternatives):
        assert costs.time_floor(plan.candidate) <= plan.predicted.step_time_s * (1 + 1e-9)  # type: ignore[union-attr]
        assert costs.memory_floor(plan.candidate) <= plan.predicted.peak_memory_bytes * (1 + 1e-9)  # type: ignore[union-attr]
    check_plan(found.plan, instance.capabilities)
    for index, stage in enumerate(found.plan.predicted.by_stage):  # by the instance's own model, which is not the described one in all
        assert stage.peak_memory_bytes <= instance.limit.usable_of(instance.cluster.part_of(index, found.plan.pp))


def test_enumeration_meets_both_plans_and_refusals() -> None:
    """The instances above are no empty test: at least three have no plan, and eight have one with stages of different length. As many are
    looked at as it takes."""
    kinds: list[bool | None] = []
    for best in map(best_of, range(40)):
        kinds.append(None if best is None else len({sum(span.count for span in stage.layers) for stage in best[2]}) > 1)
        if kinds.count(None) >= 3 and kinds.count(True) >= 8:
            return
    raise AssertionError(kinds)


def test_the_faster_type_has_more_layers_and_no_group_has_two_types() -> None:
    answer = planned()
    first, second = answer.plan.stages
    count = [sum(span.count for span in stage.layers if span.kind == "decoder") for stage in (first, second)]
    assert sum(count) == 32
    assert count[0] > 2 * count[1], "an H100 computes about three times as fast as an A100"
    assert [answer.plan.cluster.gpu_of(stage, answer.plan.pp).name for stage in range(2)] == ["H100-SXM-80GB", "A100-SXM-80GB"]
    busy = [stage.forward_s + stage.backward_s for stage in answer.plan.predicted.by_stage]
    assert max(busy) / min(busy) < 1.1, "both are nearly equally busy"


def test_a_slower_part_is_worth_having_and_even_stages_would_waste_the_faster_one() -> None:
    """Faster than the H100s alone and than the plan for what both can do; slower than if all were H100s."""
    alone = so.plan(recipe="llama3_8b", gpus=8, cluster=two_types("H100-SXM-80GB"), engine="megatron", train={"global_batch_size": 128})
    every = so.plan(recipe="llama3_8b", gpus=16, cluster=two_types("H100-SXM-80GB"), engine="megatron", train={"global_batch_size": 128})
    slowest = so.plan(
        recipe="llama3_8b", gpus=16, cluster=two_types(TWO, mixed="slowest"), engine="megatron", train={"global_batch_size": 128}
    )
    both = planned().step_time_s
    assert every.step_time_s < both < alone.step_time_s
    assert both < 0.8 * slowest.step_time_s


def test_each_type_has_its_own_memory() -> None:
    """Stages on the GPUs of 40 GB keep to them, those of 80 GB may take more."""
    answer = planned("8 x H100-SXM-80GB + 8 x A100-SXM-40GB", pin={"tp": 2, "cp": 1, "pp": 2})
    limit, plan = answer.found.limit, answer.plan
    peaks = [stage.peak_memory_bytes for stage in plan.predicted.by_stage]
    assert all(peak <= limit.usable_of(stage) for stage, peak in enumerate(peaks))
    assert peaks[0] > limit.usable_of(1), "the first stage would not fit the smaller GPU"


def test_meshes_that_would_mix_types_are_refused_with_the_reason() -> None:
    with pytest.raises((InputError, NoPlanError), match=r"GPUs of two types \(8 x H100-SXM-80GB \+ 8 x A100-SXM-80GB\)"):
        planned(pin={"pp": 1})
    with pytest.raises(NoPlanError, match="a stage, with its tp, cp, ep and dp groups, has one"):
        so.plan(recipe="t5_large", gpus=16, cluster=two_types(), engine="megatron")
    with pytest.raises(NoPlanError, match="has GPUs of two types"):
        planned("8 x H100-SXM-80GB + 16 x A100-SXM-80GB", 24, pin={"pp": 2})


def test_the_plan_and_its_cluster_come_back_from_their_files() -> None:
    answer = planned()
    plan = answer.plan
    assert from_json(to_json(plan), "plan.json") == plan
    assert cluster_from(texts(to_tree(plan.cluster)), plan.cluster.name, "cluster", 16) == plan.cluster
    large = replace(plan, cluster=replace(plan.cluster, gpus_per_node=16))
    points = [grid.Point(keys={}, answer=replace(answer, found=replace(answer.found, plan=one))) for one in (plan, large)]
    apart, shared = (row.plan for row in grid.Sweep(points=tuple(points)).rows())
    assert shared == f"{apart}, one node of 8 x H100-SXM-80GB + 8 x A100-SXM-80GB", "a sweep says so too"


def test_one_type_counted_is_that_type() -> None:
    assert planned("16 x H100-SXM-80GB").plan == planned("H100-SXM-80GB").plan


@pytest.mark.parametrize(
    ("gpu", "more", "said"),
    [
        (["H100-SXM-80GB", "A100-SXM-80GB"], {}, "plans pipeline stages for the type that computes them"),
        (["H100-SXM-80GB", "A100-SXM-80GB"], {"mixed": "stages"}, "needs how many there are of each type"),
        ("8 x H100-SXM-80GB + A100-SXM-80GB", {}, "is not such as 8 x H100"),
        ("8 x H100-SXM-80GB + 8 x A100-SXM-81GB", {}, "did you mean A100-SXM-80GB"),
        ("8 x H100-SXM-80GB + 8 x H100-SXM-80GB", {}, "has a type twice"),
        ("8 x H100-SXM-80GB + 0 x A100-SXM-80GB", {}, "0"),
        ("8 x H100-SXM-80GB + 16 x A100-SXM-80GB", {}, r"8 x H100-SXM-80GB \+ 16 x A100-SXM-80GB = 24 GPUs"),
        ("8 x H100-SXM-80GB + 8 x A100-SXM-80GB", {"mixed": "refuse"}, "mixed=refuse was said"),
        ("8 x H100-SXM-80GB + 8 x cpu", {}, "with and without a GPU"),
        ([{"type": "H100-SXM-80GB", "gpus": 8}, "A100-SXM-80GB"], {}, "must be a mapping with type, gpus"),
        ([{"type": "H100-SXM-80GB", "gpu": 8}], {}, "did you mean gpus"),
    ],
)
def test_what_can_not_be_meant_is_said(gpu: object, more: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        cluster_from(texts(two_types(gpu, **more)), "two", "two", 16)


def test_a_level_may_have_a_bandwidth_for_each_type() -> None:
    levels = [*two_types()["levels"][:1], {"name": "ib", "size": "unlimited", "bandwidth": ["400 Gbit/s", "200 Gbit/s"], "latency": "4 us"}]
    found: Cluster = cluster_from(texts(two_types(levels=levels)), "two", "two", 16)
    assert [part.levels[1].bandwidth for part in found.parts] == [50e9, 25e9]
    assert found.levels[1].bandwidth == 25e9
    with pytest.raises(InputError, match="is a list of 2 for 1 type of GPU"):
        cluster_from(texts(two_types("H100-SXM-80GB", levels=levels)), "two", "two", 16)


def test_which_type_a_rank_has() -> None:
    found: Cluster = cluster_from(texts(two_types("8 x H100-SXM-80GB + 16 x A100-SXM-80GB")), "two", "two", 24)
    names: list[Gpu] = [found.gpu_of_rank(rank) for rank in (0, 7, 8, 23)]
    assert [gpu.name for gpu in names] == ["H100-SXM-80GB"] * 2 + ["A100-SXM-80GB"] * 2
    assert found.peak_flops("bf16") == pytest.approx((8 * 989.4e12 + 16 * 312e12) / 24, rel=1e-3)
    assert found.peak_flops("fp8") is None
    assert counted(found) == found.types == "8 x H100-SXM-80GB + 16 x A100-SXM-80GB"


def test_a_node_of_several_types_is_said() -> None:
    """12 + 12 GPUs at 8 a node were planned, and nobody was told that the second node has four of each."""
    of = [("H100-SXM-80GB", 12), ("A100-SXM-80GB", 12)]
    shared = "4 x H100-SXM-80GB + 4 x A100-SXM-80GB"
    for first, more, nodes in ((12, (), "3 nodes of 8"), (4, (), "one node of 8"), (12, (("H200", 8),), "4 nodes of 8")):
        types = [(of[0][0], first), (of[1][0], first), *more]
        said = " + ".join(f"{count} x {name}" for name, count in types)
        found: Cluster = cluster_from(texts(two_types(said)), "two", "two", sum(count for _, count in types))
        assert counted(found) == f"{said} ({nodes}, and one node has {shared}; gpus_per_node=4 plans each type on nodes of its own)"
        assert counted(cluster_from(texts(two_types(said)), "two", "two", found.num_gpus, 4)) == said
    three = "4 x H100-SXM-80GB + 6 x A100-SXM-80GB + 6 x H200"
    found = cluster_from(texts(two_types(three)), "two", "two", 16)
    assert found.shared_nodes == [shared, "2 x A100-SXM-80GB + 6 x H200"]
