from __future__ import annotations

import contextlib
import math

import pytest
from layerwise_instances import WORSE, exhaustive, prices_of, within
from msgspec.structs import replace
from small_models import cluster, gpt, training

from orchestrator.cost.price import CostModel
from orchestrator.cost.profile import LayerProfile, Profile
from orchestrator.errors import NoPlanError
from orchestrator.hardware.collectives import COLLECTIVES
from orchestrator.search.layerwise import AnalyticPrices, Outer, ProfilePrices, Splits, layerwise
from orchestrator.search.layerwise_stage import StageSolver, _Sequence
from orchestrator.strategy.layerwise import TRAITS, LayerChoice, galvatron_json
from orchestrator.strategy.pins import MemoryLimit
from orchestrator.strategy.workload import Workload
from orchestrator.units import GB, MIB

from instances import CALIBRATION  # isort: skip


@pytest.mark.parametrize("seed", range(6))
def test_one_stage_is_the_best_of_all_assignments(seed: int) -> None:
    prices, batch, limit = prices_of(seed)
    found = layerwise(prices, batch, limit, pp=1)
    assert within(found, exhaustive(prices, batch, limit))
    assert found.plan.peak_memory_bytes <= limit.usable


@pytest.mark.full
@pytest.mark.parametrize("seed", range(6, 80))
def test_one_stage_is_the_best_of_all_assignments_on_more_instances(seed: int) -> None:
    prices, batch, limit = prices_of(seed)
    assert within(layerwise(prices, batch, limit, pp=1), exhaustive(prices, batch, limit))


@pytest.mark.parametrize("seed", range(0, 6, 2))
def test_the_batch_with_most_samples_a_second_is_found(seed: int) -> None:
    prices, _, limit = prices_of(seed)
    batches = (2, 4, 6, 8, 12)
    rates = {}
    for batch in batches:
        with contextlib.suppress(NoPlanError):
            rates[batch] = batch / layerwise(prices, batch, limit, pp=1).plan.step_time_s
    together = layerwise(prices, batches, limit, pp=1)
    assert math.isclose(together.plan.global_batch_size / together.plan.step_time_s, max(rates.values()), rel_tol=WORSE)


def test_instances_mix_ways() -> None:
    """Some plan has layers of one kind that are computed differently."""
    mixed = 0
    for seed in range(6):
        prices, batch, limit = prices_of(seed)
        (stage,) = layerwise(prices, batch, limit, pp=1).plan.stages
        mixed += len({run.kind for run in stage.runs}) < len(stage.runs)
    assert mixed


def test_a_planted_bound_that_is_too_high_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = StageSolver._dual

    def unsound(self: StageSolver, share: float, leanest: _Sequence) -> tuple[float, float, float]:
        value, price, tilt = honest(self, share, leanest)
        return 3 * value, price, tilt

    monkeypatch.setattr(StageSolver, "_dual", unsound)

    def wrong(seed: int) -> bool:
        prices, batch, limit = prices_of(seed)
        try:
            return not within(layerwise(prices, batch, limit, pp=1), exhaustive(prices, batch, limit))
        except NoPlanError:
            return True

    assert any(wrong(seed) for seed in range(12))


def profile(**changes: object) -> Profile:
    layer = LayerProfile(
        kind="layer",
        count=8,
        parameter_bytes=20 * MIB,
        forward_s={1: 2e-3},
        saved_bytes={1: 40 * MIB, 2: 22 * MIB, 4: 13 * MIB},
        output_bytes=1 * MIB,
    )
    return replace(Profile(name="measured", layers=(layer,), other_state_bytes=100 * MIB, other_saved_bytes=10 * MIB), **changes)


def measured(num_gpus: int = 4, batch: int = 16) -> ProfilePrices:
    workload = Workload(model=gpt(2), training=training(batch), cluster=cluster(num_gpus, bandwidth=5 * GB))
    return ProfilePrices(profile(), CostModel(workload, TRAITS, CALIBRATION))


def test_more_memory_is_never_slower_layer_by_layer() -> None:
    times = []
    for size in (200, 300, 400, 600, 900, 1400, 4000):
        try:
            times.append(layerwise(measured(), 16, MemoryLimit(limit=size * MIB, reserve=0)).plan.step_time_s)
        except NoPlanError:
            times.append(math.inf)
    assert times == sorted(times, reverse=True)
    assert math.inf in times
    assert len(set(times)) > 3


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_bounds_of_one_micro_batch_are_its_way_through_all_stages_and_back(pp: int) -> None:
    """Eight layers of 6 ms a sample, forward and backward, on a rank a stage: nothing waits, so no bound leaves anything out."""
    prices, outer = measured(pp), Outer(pp=pp, num_microbatches=1, samples=16, ends=None)
    wanted = 16 * 8 * 3 * 2e-3 + 2 * (pp - 1) * prices.hop_s(outer)
    splits = Splits(prices, outer, float(1 << 40))
    assert splits.least == pytest.approx(wanted)
    splits.estimate(math.inf)
    assert splits._table(math.inf)[0] == pytest.approx(wanted)
    found = splits.finish(math.inf)
    assert found is not None
    assert found.seconds == splits.least == pytest.approx(wanted)


def test_a_profile_is_what_is_priced() -> None:
    """One rank, ample memory: eight layers forward and twice that backward, for each sample."""
    alone = layerwise(measured(num_gpus=1), 16, MemoryLimit(limit=1 << 40, reserve=0)).plan
    assert math.isclose(alone.step_time_s, 16 * 8 * 3 * 2e-3)
    assert alone.peak_memory_bytes == 8 * 20 * MIB * 4 + 100 * MIB + alone.global_batch_size / alone.num_microbatches * (8 * 40 + 10) * MIB


def test_the_file_for_galvatron_has_an_entry_for_every_layer() -> None:
    plan = layerwise(measured(), 16, MemoryLimit(limit=600 * MIB, reserve=0)).plan
    file = galvatron_json(plan)
    lists = ("tp_sizes_enc", "tp_consecutive_flags", "dp_types_enc", "use_sp", "checkpoint")
    assert all(len(str(file[name]).split(",")) == 8 for name in lists)
    assert sum(map(int, str(file["pp_division"]).split(","))) == 8
    assert len(str(file["pp_division"]).split(",")) == file["pp_deg"] == plan.pp
    assert (file["world_size"], file["global_bsz"], file["chunks"]) == (4, 16, plan.num_microbatches)
    assert file["embed_sdp"] == file["vocab_sdp"]


def test_a_measured_layer_is_divided_as_its_choice_says() -> None:
    """Of 4 ranks with 8 samples: 20 MiB of weights and four times that of states; 2 ms a sample forward, twice that backward; 1 MiB of
    output; 40, 22 and 13 MiB kept a sample at tp 1, 2 and 4. All-reduces over a link of 5 GB/s."""
    prices = measured()
    ways = {way.choice: way for way in prices.ways("layer", Outer(pp=1, num_microbatches=2, samples=8, ends=None))}
    assert {choice.tp for choice in ways} == {1, 2, 4}
    one, two, four = (ways[LayerChoice(tp=tp)] for tp in (1, 2, 4))
    assert [way.static_bytes / MIB for way in (one, two, four)] == [80, 40, 20]
    assert [way.saved_bytes / MIB for way in (one, two, four)] == [2 * 40, 4 * 22, 8 * 13]
    assert (one.forward_s, one.backward_s) == pytest.approx((2 * 2e-3, 2 * 4e-3)), "without traffic: two samples a rank"
    reduced = 2 * COLLECTIVES["all_reduce"](8 * MIB, 4, prices.costs.link(4, 1))
    assert (four.forward_s, four.backward_s) == pytest.approx((8 * 2e-3 / 4 + reduced, 8 * 4e-3 / 4 + reduced))
    assert one.sync_s == pytest.approx(COLLECTIVES["all_reduce"](20 * MIB, 4, prices.costs.link(4, 1)))
    assert two.sync_s == pytest.approx(COLLECTIVES["all_reduce"](10 * MIB, 2, prices.costs.link(2, 2)))
    assert four.sync_s == 0.0, "nobody else has its weights"

    again = ways[LayerChoice(tp=2, recompute=True)]
    assert (again.forward_s, again.backward_s) == pytest.approx((two.forward_s, two.backward_s + two.forward_s))
    assert (again.saved_bytes, again.transient_bytes) == (4 * MIB, two.saved_bytes), "its input is kept, the rest lives in backward"
    sharded = ways[LayerChoice(tp=2, zero3=True)]
    assert sharded.static_bytes == two.static_bytes / 2
    assert sharded.transient_bytes == 10 * MIB
    gather = COLLECTIVES["all_gather"](10 * MIB, 2, prices.costs.link(2, 2))
    scatter = COLLECTIVES["reduce_scatter"](10 * MIB, 2, prices.costs.link(2, 2))
    assert sharded.forward_s == pytest.approx(two.forward_s + gather)
    assert sharded.backward_s == pytest.approx(two.backward_s + gather + scatter)
    assert sharded.sync_s == 0.0
    both = ways[LayerChoice(tp=2, zero3=True, recompute=True)]
    assert both.transient_bytes == two.saved_bytes + 10 * MIB
    assert all(way.optimizer_s == 0.0 for way in ways.values())


def test_what_stands_at_the_ends_and_passes_between_stages_of_a_profile() -> None:
    """Two stages of 2 ranks, 8 samples: half of 100 MiB of states, and of 10 MiB a sample of each rank's 4 in flight, at either end."""
    prices, outer = measured(), Outer(pp=2, num_microbatches=2, samples=8, ends=None)
    assert [prices.fixed_bytes(outer, stage, flight) / MIB for stage, flight in ((0, 2), (1, 1))] == [(100 + 80) / 2, (100 + 40) / 2]
    alone = Outer(pp=1, num_microbatches=2, samples=8, ends=None)
    assert prices.fixed_bytes(alone, 0, 1) / MIB == 100 + 20
    assert prices.hop_s(alone) == 0.0
    assert prices.hop_s(outer) == pytest.approx(COLLECTIVES["p2p"](4 * MIB, 2, prices.costs.pair_link(0, 2, 2)))
    middle = Outer(pp=4, num_microbatches=2, samples=8, ends=None)
    assert [prices.fixed_bytes(middle, stage, 1) > 0 for stage in range(4)] == [True, False, False, True]


def test_a_change_of_tp_gathers_samples_on_the_way_in_and_gradients_on_the_way_back() -> None:
    """From tp 1 to 4 each rank takes the samples of 4: 8 of 1 MiB; from 4 to 1 it keeps its own, and their gradients come together."""
    prices, outer = measured(), Outer(pp=1, num_microbatches=2, samples=8, ends=None)
    seconds = COLLECTIVES["all_gather"](8 * MIB, 4, prices.costs.link(4, 1))
    assert prices.switch("layer", 1, 4, outer) == (pytest.approx(seconds), 0.0)
    assert prices.switch("layer", 4, 1, outer) == (0.0, pytest.approx(seconds))
    assert prices.switch("layer", 2, 2, outer) == (0.0, 0.0)
    narrow = COLLECTIVES["all_gather"](4 * MIB, 2, prices.costs.link(2, 1))
    assert prices.switch("layer", 1, 2, outer) == (pytest.approx(narrow), 0.0)


def test_a_change_of_tp_exchanges_tokens_inside_the_larger_group() -> None:
    """Analytic layers: of 4 ranks with 8 samples each holds its quarter of their inputs, and changes it for another, both ways."""
    workload = Workload(model=gpt(2), training=training(16), cluster=cluster(4, bandwidth=5 * GB))
    costs = CostModel(workload, TRAITS, CALIBRATION)
    prices, outer = AnalyticPrices(costs), Outer(pp=1, num_microbatches=2, samples=8, ends=None)
    kind = gpt(2).runs[1].layer.kind
    quarter = gpt(2).runs[1].layer.input_elements * costs.itemsize * 8 / 4
    seconds = COLLECTIVES["all_to_all"](quarter, 4, costs.link(4, 1)) + CALIBRATION.collective_overhead_s
    assert prices.switch(kind, 1, 4, outer) == prices.switch(kind, 4, 1, outer) == pytest.approx((seconds, seconds))
    assert prices.switch(kind, 2, 2, outer) == (0.0, 0.0)
    two = Outer(pp=2, num_microbatches=2, samples=8, ends=None)
    half = COLLECTIVES["all_to_all"](2 * quarter, 2, costs.link(2, 1)) + CALIBRATION.collective_overhead_s
    assert prices.switch(kind, 1, 2, two) == pytest.approx((half, half)), "a stage of two ranks holds as many samples"
    nothing = COLLECTIVES["all_to_all"](0, 4, costs.link(4, 1)) + CALIBRATION.collective_overhead_s
    assert prices.switch("embedding", 1, 4, outer) == pytest.approx((nothing, nothing)), "ids are everywhere"
