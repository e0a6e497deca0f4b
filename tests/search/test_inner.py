"""Inside one outer choice: how many layers are recomputed, where splits are no choice, and why there is no answer."""

from __future__ import annotations

import math
import random
from itertools import accumulate, combinations, pairwise, product
from typing import Any

import pytest
from instances import CALIBRATION, TRAITS
from layerwise_instances import two_kinds
from msgspec.structs import replace
from oracle import compositions
from small_engines import deepspeed_like, megatron_like
from small_models import cluster, gpt, training

from orchestrator.cost.price import CostModel
from orchestrator.model.spec import LayerRun, ModelSpec
from orchestrator.search.inner import MOST_SIMULATED, Effort, Inner, Way, beats
from orchestrator.search.partition import INFINITE
from orchestrator.strategy.capabilities import Capabilities
from orchestrator.strategy.legality import why_not_stages
from orchestrator.strategy.megatron_layout import stages_of
from orchestrator.strategy.pins import MemoryLimit
from orchestrator.strategy.spec import Candidate, Mesh, Recompute, Strategy
from orchestrator.strategy.tree import Leaf
from orchestrator.strategy.workload import Workload
from orchestrator.units import GIB


def inner_of(
    model: ModelSpec,
    capabilities: Capabilities,
    modes: tuple[Recompute, ...] = ("none",),
    limit: float = 80 * GIB,
    *,
    pp: int = 2,
    m: int = 4,
    **candidate: Any,
) -> Inner:
    workload = Workload(model=model, training=training(m, seq=64), cluster=cluster(pp))
    strategy = Strategy(mesh=Mesh(pp=pp), recompute=modes[-1])
    schedule = "interleaved" if candidate.get("vpp", 1) > 1 else "1f1b"
    one = Candidate(engine="megatron", strategy=strategy, micro_batch_size=1, num_microbatches=m, schedule=schedule, **candidate)  # type: ignore[arg-type]
    costs = CostModel(workload, TRAITS, CALIBRATION)
    return Inner(costs, model, capabilities, Leaf(one, modes), MemoryLimit(limit=math.ceil(limit), reserve=0))


@pytest.mark.parametrize("seed", range(30))
def test_the_fewest_layers_that_make_room_are_recomputed(seed: int) -> None:
    """Bytes fall with each layer more, by as much or by more or less of it; where they fall evenly a handful of tries is enough."""
    rng = random.Random(seed)
    inner, most, even = inner_of(gpt(2), megatron_like()), rng.randint(2, 40), seed % 2 == 0
    falls = list(accumulate([0, *(4 if even else rng.randint(1, 9) for _ in range(most))]))
    tried: list[int] = []

    def peak(n: int) -> float:
        tried.append(n)
        return 1000.0 - falls[n]

    for room in (peak(1), peak(most), peak(most) - 1, peak(0), *(rng.randint(1000 - falls[most], 1000) for _ in range(8))):
        tried.clear()
        enough = [n for n in range(1, most + 1) if 1000 - falls[n] <= room]
        assert inner._fewest(most, peak, room) == enough[:1]
        assert not even or len(tried) <= 4, (tried, most)


def heavy_last(light: int, heavy: int) -> ModelSpec:
    """Decoder layers, then some of another kind that take much longer."""
    plain = two_kinds(light, 64)
    first, decoder, encoder, last = plain.runs
    wide = gpt(1, hidden=512, seq=64, vocab=512).runs[1].layer
    assert decoder.count == light
    return replace(plain, runs=(first, decoder, LayerRun(layer=replace(wide, kind=encoder.layer.kind), count=heavy), last))


@pytest.mark.parametrize("pp", [2, 3])
def test_layers_of_several_kinds_are_split_by_what_they_take(pp: int) -> None:
    """Without chunks any split may be; the fastest of all, one by one."""
    model = heavy_last(4, 3)
    inner = inner_of(model, megatron_like(), pp=pp)
    answer = inner.solve()
    assert answer.solution is not None
    best = INFINITE
    for cuts in combinations(range(8), pp - 1):
        sizes = [b - a for a, b in pairwise((0, *cuts, 7))]
        if 0 not in sizes[1:-1]:
            best = min(best, inner.costs.score(inner.candidate, stages_of(model, sizes, pp, [("none", 0)] * pp))[0])
    assert answer.solution.step_time_s == pytest.approx(best, rel=1e-12)
    layers = [sum(span.count for span in stage.layers if span.kind not in ("embedding", "head")) for stage in answer.solution.stages]
    assert layers[0] > layers[-1], "the light ones come first"


@pytest.mark.parametrize("pp", [2, 3, 4, 5, 9])
@pytest.mark.parametrize("layers", [(9, 0), (5, 4)])
def test_stages_that_must_be_even_between_the_ends_are_the_fastest_of_those_splits(pp: int, layers: tuple[int, int]) -> None:
    """Of all splits with a layer in each stage, and as many in those between the first and the last, one by one."""
    model = gpt(9, seq=64) if not layers[1] else heavy_last(*layers)
    able = megatron_like(even_between={"attention": "all"})
    inner = inner_of(model, able, pp=pp)
    assert why_not_stages(able, model.architecture, inner.even_sizes()) is None
    assert max(inner.even_sizes()) - min(inner.even_sizes()) <= 2
    found = inner.solve().solution
    assert found is not None
    sizes = [sum(span.count for span in stage.layers if span.kind not in ("embedding", "head")) for stage in found.stages]
    assert why_not_stages(able, model.architecture, sizes) is None

    def seconds(sizes: tuple[int, ...]) -> float:
        return inner.costs.score(inner.candidate, stages_of(model, sizes, pp, [("none", 0)] * pp))[0]

    best = min(seconds(sizes) for sizes in compositions(9, [1] * pp) if len({*sizes[1:-1]}) <= 1)
    assert found.step_time_s == pytest.approx(best, rel=1e-12)
    free = inner_of(model, megatron_like(), pp=pp).solve().solution
    assert free is not None
    assert free.step_time_s <= found.step_time_s * (1 + 1e-12)


def test_where_chunks_or_even_stages_leave_no_choice_there_is_one_split() -> None:
    alike, several, early = gpt(8, seq=64), heavy_last(5, 3), heavy_last(4, 4)
    uneven, even = megatron_like(), megatron_like(uneven_stages=False)
    assert inner_of(alike, uneven)._fixed is None
    assert inner_of(several, uneven)._fixed is None
    assert inner_of(alike, uneven, vpp=2)._fixed is None
    assert inner_of(several, uneven, vpp=2)._fixed == (2, 2, 2, 2), "the light ones go on behind first chunks"
    assert inner_of(early, uneven, vpp=2)._fixed is None
    assert inner_of(alike, even)._fixed == (4, 4)
    assert inner_of(alike, even, vpp=2)._fixed == (2, 2, 2, 2)
    assert inner_of(alike, uneven, pp=1)._fixed == (8,)


def test_of_modes_that_exclude_each_other_each_is_tried_and_a_slow_one_fits_all_the_same() -> None:
    """Full recompute alone fits: with no time for it there is an answer, and it is not that nothing fits."""
    able = deepspeed_like(engine="megatron", recompute=("none", "full"), recompute_varies="never", uneven_stages=False)
    both: tuple[Recompute, ...] = ("none", "full")
    plain, again = (inner_of(gpt(4, seq=64), able, (mode,)).solve().solution for mode in both)
    assert plain is not None
    assert again is not None
    assert plain.peak_memory_bytes > again.peak_memory_bytes
    assert plain.step_time_s < again.step_time_s
    fits = inner_of(gpt(4, seq=64), able, both).solve()
    assert fits.solution is not None
    assert fits.solution.step_time_s == plain.step_time_s
    room = again.peak_memory_bytes
    short = inner_of(gpt(4, seq=64), able, both, room).solve()
    assert short.solution is not None
    assert short.solution.step_time_s == again.step_time_s
    assert {span.recompute for stage in short.solution.stages for span in stage.layers if span.kind == "decoder"} == {"full"}
    slow = inner_of(gpt(4, seq=64), able, both, room).solve(again.step_time_s * 0.9)
    assert (slow.solution, slow.fits) == (None, True)
    assert slow.bound_s <= again.step_time_s
    bounds = [inner_of(gpt(4, seq=64), able, both, limit).bound(0.0, INFINITE).bound_s for limit in (80 * GIB, room)]
    assert 0.8 * plain.step_time_s <= bounds[0] <= plain.step_time_s * (1 + 1e-9)
    assert bounds[0] <= bounds[1] <= again.step_time_s * (1 + 1e-9)
    none = inner_of(gpt(4, seq=64), able, both, room * 0.5).solve()
    assert (none.solution, none.fits) == (None, False)


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_an_answer_within_a_limit_of_seconds_is_the_answer_without(share: float) -> None:
    """Or there is none: a bound above it instead. The bound that is asked for first is below both."""
    model = gpt(9, hidden=128, seq=64)
    ample = inner_of(model, megatron_like(), ("none", "full"), pp=3, m=6).solve().solution
    least = inner_of(model, megatron_like(), ("full",), pp=3, m=6).solve().solution
    assert ample is not None
    assert least is not None
    room = least.peak_memory_bytes + share * (ample.peak_memory_bytes - least.peak_memory_bytes)
    inner = inner_of(model, megatron_like(), ("none", "full"), room, pp=3, m=6)
    best = inner.solve(INFINITE, Effort(10_000)).solution
    assert best is not None
    assert inner.left == INFINITE
    assert best.peak_memory_bytes <= math.ceil(room)
    for factor, found in ((1 - 1e-6, False), (1 + 1e-6, True), (1.5, True)):
        answer = inner_of(model, megatron_like(), ("none", "full"), room, pp=3, m=6).solve(best.step_time_s * factor, Effort(10_000))
        assert (answer.solution is not None) == found
        assert answer.fits
        if found:
            assert answer.bound_s == best.step_time_s
    bound = inner_of(model, megatron_like(), ("none", "full"), room, pp=3, m=6).bound(0.0, 10 * best.step_time_s)
    assert 0.8 * best.step_time_s <= bound.bound_s <= best.step_time_s
    few = inner_of(model, megatron_like(), ("none", "full"), room, pp=3, m=6)
    answer = few.solve(INFINITE, Effort(1))
    assert answer.bound_s >= best.step_time_s >= min(few.left, answer.bound_s) * (1 - 1e-9)
    assert few.spent <= inner.spent <= MOST_SIMULATED * inner.pipeline.passes * 10


def test_larger_groups_of_micro_batches_are_taken_only_where_they_are_faster() -> None:
    """Where the link alone sets the pace all end alike, and the smallest hold least; where it has nothing to do, too."""
    for bandwidth, taken in ((1e7, None), (1e8, 4), (1e30, None)):
        model, hop = gpt(8, seq=64), cluster(2)
        levels = tuple(replace(level, bandwidth=bandwidth, latency=0.0) for level in hop.levels)
        workload = Workload(model=model, training=training(8, seq=64), cluster=replace(hop, levels=levels))
        costs = CostModel(workload, TRAITS, replace(CALIBRATION, collective_overhead_s=0.0))
        one = Candidate(
            engine="megatron", strategy=Strategy(mesh=Mesh(pp=2)), micro_batch_size=1, num_microbatches=8, vpp=2, schedule="interleaved"
        )
        leaf = Leaf(one, ("none",), (4, 8))
        answer = Inner(costs, model, megatron_like(microbatch_groups=True), leaf, MemoryLimit(limit=80 * GIB, reserve=0)).solve()
        assert answer.solution is not None
        assert answer.solution.candidate.microbatch_group_size_per_vp_stage == taken


def test_a_way_beats_another_only_where_it_is_no_slower_in_anything() -> None:
    one = Way((1.0, 2.0), (3.0, 4.0), 5.0, 6.0, 7.0, None)
    assert beats(one, one)
    slower = [
        one._replace(forward_s=(1.0, 2.5)), one._replace(forward_s=(1.5, 2.0)), one._replace(backward_s=(3.5, 4.0)),
        one._replace(backward_s=(3.0, 4.5)), one._replace(exposed_s=5.5), one._replace(optimizer_s=6.5),
    ]  # fmt: skip
    assert all(beats(one, other) and not beats(other, one) for other in slower)
    assert beats(one._replace(peak_bytes=99.0), one), "what fits, fits"
    assert not beats(slower[0], slower[2])
    assert one.work_s == 10.0


@pytest.mark.parametrize("pp", [2, 3])
@pytest.mark.parametrize("vpp", [1, 2])
def test_without_recompute_a_stage_of_layers_that_are_alike_is_what_its_capacity_says(pp: int, vpp: int) -> None:
    """Bytes and seconds of every stage with every number of layers that its chunks share evenly."""
    inner = inner_of(gpt(12, hidden=128, seq=64), megatron_like(), pp=pp, vpp=vpp)
    capacity, costs, cand = inner.capacity, inner.costs, inner.candidate
    assert capacity is not None
    for p in range(pp):
        memory = costs.stage_memory(cand, p)
        for n in range(0, 13, vpp):
            sums = costs.sums(cand)
            if p == 0:
                sums.add(costs.layer(cand, "embedding", "none"), 1)
            for chunk in range(vpp):
                sums.add(costs.layer(cand, "decoder", "none"), n // vpp, chunk) if n else None
            if p == pp - 1:
                sums.add(costs.layer(cand, "head", "none"), 1, vpp - 1)
            assert capacity.peak(p, n) == pytest.approx(memory.peak_bytes(sums), rel=1e-12)
            assert capacity.seconds(p, n) == pytest.approx(sum(sums.forward_s) + sum(sums.backward_s), rel=1e-12)


@pytest.mark.parametrize("share", [0.3, 0.6, 1.0, 50.0])
def test_the_most_layers_for_a_time_are_the_most_and_no_split_within_it_is_out_of_range(share: float) -> None:
    """Where memory is short too, with layers that may be recomputed; and the ranges are those of some split at their ends."""
    model, modes = gpt(9, hidden=128, seq=64), ("none", "full")
    ample = inner_of(model, megatron_like(), modes, pp=3, m=6).solve().solution
    lean = inner_of(model, megatron_like(), ("full",), pp=3, m=6).solve().solution
    assert ample is not None
    assert lean is not None
    room = lean.peak_memory_bytes + share * (ample.peak_memory_bytes - lean.peak_memory_bytes)
    inner = inner_of(model, megatron_like(), modes, room, pp=3, m=6)
    capacity = inner.capacity
    assert capacity is not None
    for p in range(3):
        times = [capacity.seconds(p, n) for n in range(10)]
        assert times == sorted(times)
        for seconds in (0.0, *times, *(1.01 * time for time in times), times[-1] / 2, INFINITE):
            most = max((n for n in range(10) if times[n] <= min(seconds, 1e300) * (1 + 1e-9)), default=-1)
            assert inner_of(model, megatron_like(), modes, room, pp=3, m=6).capacity.most(p, seconds) == most  # type: ignore[union-attr]
    found = []
    for first, second in combinations(range(10), 2):
        borders = (0, first, second, 9)
        ways = [inner.ways(p, a, (b - a,)) for p, (a, b) in enumerate(pairwise(borders))]
        if all(ways):
            found.append((min(inner.pipeline.score(some, INFINITE) for some in product(*ways)), [b - a for a, b in pairwise(borders)]))
    fastest = min(found)[0]
    for upper in (fastest * (1 + 1e-9), fastest * 1.05, fastest * 1.3, INFINITE):
        ranges = capacity.ranges(upper)
        assert ranges is not None
        for seconds, sizes in found:
            if seconds <= upper:
                assert all(low <= size <= high for low, size, high in zip(ranges[0], sizes, ranges[1], strict=True))
        assert sum(ranges[0]) <= 9 <= sum(ranges[1])
    assert capacity.ranges(fastest * 0.5) is None
    least = capacity.least(0.0, 2 * fastest)
    assert 0.8 * fastest <= least <= fastest
    assert capacity.ranges(least) is None or least == 0.0
    assert capacity.ranges(least * 1.0041) is not None, "within .4%"
