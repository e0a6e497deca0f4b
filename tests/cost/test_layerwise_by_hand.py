"""What a layer, a change between layers and a stage cost under Galvatron's choices, by hand from a measured profile and the links."""

from __future__ import annotations

from typing import Any

import pytest
from cost_cases import MEGATRON, a100, cost_model, gpt
from msgspec.structs import replace

from orchestrator.cost.calibration import datasheet
from orchestrator.cost.layerwise import AnalyticPrices, Outer, ProfilePrices, Way, choices, stage_price
from orchestrator.cost.profile import LayerProfile, Profile
from orchestrator.hardware.collectives import COLLECTIVES
from orchestrator.strategy.layerwise import LayerChoice
from orchestrator.strategy.spec import Candidate, Mesh, Strategy
from orchestrator.units import MB

WEIGHTS, OUTPUT = 64 * MB, 8 * MB
LAYER = LayerProfile(
    kind="decoder", count=4, parameter_bytes=WEIGHTS, forward_s={1: 8e-3, 2: 5e-3}, saved_bytes={1: 40 * MB, 2: 24 * MB, 4: 6 * MB},
    output_bytes=OUTPUT, reductions=3,
)  # fmt: skip
PROFILE = Profile(
    name="x", layers=(LAYER, replace(LAYER, kind="encoder", output_bytes=2 * OUTPUT)), other_state_bytes=100 * MB, other_saved_bytes=MB,
    backward_of_forward=2.5, states_per_weight=4.0,
)  # fmt: skip
ZERO_3 = replace(MEGATRON, states={**MEGATRON.states, "mixed/3": MEGATRON.states["mixed/1"]})
COSTS = cost_model(cluster=a100(8, gpus_per_node=4))


def outer(pp: int = 1, samples: int = 8, **fields: Any) -> Outer:
    return Outer(**{"pp": pp, "num_microbatches": 4, "samples": samples, "ends": None, **fields})


def way(prices: ProfilePrices, tp: int, **fields: bool) -> Way:
    (found,) = [one for one in prices.ways("decoder", outer()) if one.choice == LayerChoice(tp=tp, **fields)]
    return found


@pytest.mark.parametrize("group", [1, 2, 6, 8])
def test_zero_3_divides_among_more_than_one_rank_and_every_layer_may_be_recomputed(group: int) -> None:
    found = choices(group)
    sizes = [tp for tp in range(1, group + 1) if group % tp == 0]
    assert len({*found}) == len(found) == 4 * len(sizes) - 2
    assert {choice.tp for choice in found} == {*sizes}
    assert {choice.tp for choice in found if choice.zero3} == {*sizes} - {group}
    assert sum(choice.recompute for choice in found) == len(found) / 2


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_measured_layer_takes_its_seconds_a_sample_and_its_reductions_forward_and_backward(tp: int) -> None:
    """A rank has tp of the 8 samples; a degree that was not measured takes its part of a single rank's seconds."""
    prices, dp = ProfilePrices(PROFILE, COSTS), 8 // tp
    compute = {1: 8e-3, 2: 5e-3, 4: 8e-3 / 4}[tp] * tp
    reduced = 3 * COLLECTIVES["all_reduce"](OUTPUT * tp, tp, COSTS.link(tp, 1))
    plain = way(prices, tp)
    assert plain.forward_s == pytest.approx(compute + reduced)
    assert plain.backward_s == pytest.approx(2.5 * compute + reduced)
    assert plain.saved_bytes == pytest.approx({1: 40, 2: 24, 4: 6}[tp] * MB * tp)
    assert plain.static_bytes == pytest.approx(4 * WEIGHTS / tp)
    assert plain.sync_s == pytest.approx(COLLECTIVES["all_reduce"](WEIGHTS / tp, dp, COSTS.link(dp, tp)))
    assert (plain.transient_bytes, plain.optimizer_s) == (0.0, 0.0)
    again = way(prices, tp, recompute=True)
    assert again.backward_s == pytest.approx(plain.backward_s + plain.forward_s)
    assert (again.forward_s, again.sync_s, again.static_bytes) == (plain.forward_s, plain.sync_s, plain.static_bytes)
    assert again.saved_bytes == pytest.approx(min(plain.saved_bytes, OUTPUT * tp)), "the input, or less where it keeps less"
    assert again.transient_bytes == plain.saved_bytes, "one layer at a time"
    sharded = way(prices, tp, zero3=True)
    gather, scatter = (COLLECTIVES[name](WEIGHTS / tp, dp, COSTS.link(dp, tp)) for name in ("all_gather", "reduce_scatter"))
    assert sharded.forward_s == pytest.approx(plain.forward_s + gather)
    assert sharded.backward_s == pytest.approx(plain.backward_s + gather + scatter)
    assert sharded.static_bytes == pytest.approx(plain.static_bytes / dp)
    assert (sharded.sync_s, sharded.transient_bytes) == pytest.approx((0.0, WEIGHTS / tp))
    both = way(prices, tp, zero3=True, recompute=True)
    assert both.transient_bytes == pytest.approx(plain.saved_bytes + WEIGHTS / tp)
    assert both.backward_s == pytest.approx(sharded.backward_s + plain.forward_s)


def test_degrees_that_were_not_measured_or_leave_a_rank_no_whole_sample_are_none() -> None:
    prices = ProfilePrices(PROFILE, COSTS)
    assert {one.choice.tp for one in prices.ways("decoder", outer())} == {1, 2, 4}, "8 was not measured"
    assert {one.choice.tp for one in prices.ways("decoder", outer(samples=2))} == {4}, "8 / tp ranks share two samples"
    assert {one.choice.tp for one in prices.ways("decoder", outer(pp=4, samples=2))} == {1, 2}, "two ranks a stage"
    assert prices.ways("decoder", outer()) is prices.ways("decoder", outer())


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (1, 8), (8, 2)])
@pytest.mark.parametrize("pp", [1, 2])
def test_a_larger_degree_gathers_its_samples_on_the_way_in_or_their_gradients_on_the_way_back(before: int, after: int, pp: int) -> None:
    """Of the 8 samples over a stage's ranks each rank of degree t has t of 8 pp / 8; between, the ranks of the larger group that are a
    smaller one apart gather."""
    large, small = max(before, after), min(before, after)
    link = COSTS.link(large // small, small)
    seconds = COLLECTIVES["all_gather"](OUTPUT * pp * large, large // small, link)
    found = ProfilePrices(PROFILE, COSTS).switch("decoder", before, after, outer(pp=pp))
    assert found == pytest.approx((seconds, 0.0) if after > before else (0.0, seconds))
    analytic = AnalyticPrices(COSTS).switch("decoder", before, after, outer(pp=pp))
    moved = COSTS.kinds["decoder"].input_elements * COSTS.itemsize * pp  # of a rank's sample
    exchange = COLLECTIVES["all_to_all"](moved, large, COSTS.link(large, 1)) + COSTS.calibration.collective_overhead_s
    assert analytic == pytest.approx((exchange, exchange))
    tokens = AnalyticPrices(COSTS).switch("embedding", before, after, outer(pp=pp))
    empty = COLLECTIVES["all_to_all"](0.0, large, COSTS.link(large, 1)) + COSTS.calibration.collective_overhead_s
    assert tokens == pytest.approx((empty, empty)), "token ids are everywhere"


@pytest.mark.parametrize(("pp", "stage", "ends"), [(1, 0, 2), (2, 0, 1), (2, 1, 1), (4, 0, 1), (4, 1, 0), (4, 2, 0), (4, 3, 1)])
def test_a_profiles_embedding_and_head_are_half_each_at_the_ends(pp: int, stage: int, ends: int) -> None:
    local = pp  # of 8 samples over 8 / pp ranks
    found = ProfilePrices(PROFILE, COSTS).fixed_bytes(outer(pp=pp), stage, 3)
    assert found == pytest.approx(ends / 2 * (100 * MB + 3 * local * MB))


def test_a_hop_carries_the_widest_output_of_a_ranks_samples() -> None:
    cluster = a100(16)
    costs = cost_model(cluster=cluster)
    for pp, bandwidth in ((2, cluster.levels[1].bandwidth), (4, cluster.levels[0].bandwidth)):
        group = 16 // pp
        found = ProfilePrices(PROFILE, costs).hop_s(outer(pp=pp))
        link = costs.pair_link(0, group, group)
        assert link.bandwidth == pytest.approx(bandwidth * costs.calibration.p2p_efficiency)
        assert found == pytest.approx(2 * OUTPUT * 8 / group / link.bandwidth + link.latency)


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_every_rank_pays_for_the_groups_of_the_largest_division(pp: int) -> None:
    """Tensor parallelism as large as it may be beside two data-parallel ranks: communicators of both, of the pipeline and of all."""
    costs = cost_model(gpt(num_layers=8), cluster=a100(8))
    group, c = 8 // pp, costs.calibration
    tp = group // 2
    mesh = Mesh(tp=tp, dp=2, pp=pp)
    communicators = (tp > 1) + (pp > 1) + 2
    boundary = costs.boundary_bytes(
        Candidate(engine="x", strategy=Strategy(mesh=mesh, sequence_parallel=tp > 1), micro_batch_size=4, num_microbatches=4)
    )
    buffers = c.workspace_bytes + (2 * boundary if pp > 1 else 0.0)
    expected = c.context_bytes + communicators * c.communicator_bytes + buffers
    assert AnalyticPrices(costs).fixed_bytes(outer(pp=pp), 0, 1) == pytest.approx(expected)


@pytest.mark.parametrize("choice", [LayerChoice(tp=2), LayerChoice(tp=1, zero3=True), LayerChoice(tp=4, zero3=True, recompute=True)])
def test_an_analytic_way_is_megatrons_layer_with_sequence_parallelism(choice: LayerChoice) -> None:
    costs = cost_model(gpt(num_layers=8), cluster=a100(8), traits=ZERO_3)
    (found,) = [one for one in AnalyticPrices(costs).ways("decoder", outer()) if one.choice == choice]
    mesh = Mesh(tp=choice.tp, dp=8 // choice.tp)
    strategy = Strategy(mesh=mesh, zero_stage=3 if choice.zero3 else 0, sequence_parallel=choice.tp > 1)
    cand = Candidate(engine="x", strategy=strategy, micro_batch_size=choice.tp, num_microbatches=4)
    cost = costs.layer(cand, "decoder", "full" if choice.recompute else "none")
    assert found[1:5] == (cost.forward_s, cost.backward_s, cost.sync_s, cost.optimizer_s)
    assert found.saved_bytes == cost.saved_bytes
    assert found.static_bytes == cost.weight_bytes + cost.gradient_bytes + cost.optimizer_bytes
    assert found.transient_bytes == max(cost.transient_forward_bytes, cost.transient_backward_bytes + cost.backward_bytes)


def test_ends_are_priced_for_each_of_their_choices_and_layers_once_for_all() -> None:
    prices = AnalyticPrices(cost_model(cluster=a100(8), traits=ZERO_3))
    one, two = (outer(ends=LayerChoice(tp=tp)) for tp in (1, 2))
    for kind in ("embedding", "head"):
        assert [[way.choice.tp for way in prices.ways(kind, some)] for some in (one, two, outer())] == [[1], [2], []]
    assert prices.ways("decoder", one) is prices.ways("decoder", two)


class Made(ProfilePrices):
    """Numbers that can be added up in the head."""

    def switch(self, kind: str, before: int, after: int, outer: Outer) -> tuple[float, float]:
        return (0.5, 0.25) if before != after else (0.0, 0.0)

    def overheads_s(self) -> tuple[float, float]:
        return 0.1, 0.0


@pytest.mark.parametrize(("sync", "exposed"), [(10.0, 0.25 * 10.0), (40.0, 40.0 - 14.15 + 0.25 * 14.15)])
def test_a_stage_is_the_sum_of_its_layers_its_changes_and_its_overhead(sync: float, exposed: float) -> None:
    """Half of the overhead in each pass; a change where two neighbours differ; gradients hide beside half of backward, and a quarter of
    what hides is lost; a stage holds what its micro-batches in flight save, and the largest of what its layers need besides."""
    calibration = replace(datasheet(a100(8), MEGATRON), overlap_efficiency=0.5, overlap_slowdown=0.25)
    prices = Made(PROFILE, cost_model(cluster=a100(8), calibration=calibration))
    one = Way(LayerChoice(tp=1), 1.0, 3.0, 1.0, 0.5, 10.0, 2.0, 7.0)
    two = Way(LayerChoice(tp=2), 2.0, 5.0, (sync - 6) / 2, 0.25, 20.0, 3.0, 5.0)
    found = stage_price(prices, outer(pp=4), 1, [("decoder", one, 4), ("decoder", one, 2), ("decoder", two, 2)])
    assert found.forward_s == pytest.approx(6 * 1.0 + 2 * 2.0 + 0.5 + 0.05)
    assert found.backward_s == pytest.approx(6 * 3.0 + 2 * 5.0 + 0.25 + 0.05)
    assert found.exposed_s == pytest.approx(exposed)
    assert found.optimizer_s == pytest.approx(6 * 0.5 + 2 * 0.25)
    assert found.peak_bytes == pytest.approx(6 * 10.0 + 2 * 20.0 + 3 * (6 * 2.0 + 2 * 3.0) + 7.0), "three micro-batches of four stages"
    assert [(run.kind, run.count, run.choice.tp) for run in found.runs] == [("decoder", 4, 1), ("decoder", 2, 1), ("decoder", 2, 2)]
