from __future__ import annotations

import contextlib
import math
import random
from itertools import combinations, product
from operator import le

import pytest
from msgspec.structs import replace
from small_models import cluster, gpt, training

from orchestrator.cost.price import CostModel
from orchestrator.cost.profile import LayerProfile, Profile
from orchestrator.errors import NoPlanError
from orchestrator.model.spec import LayerRun, ModelSpec
from orchestrator.search import layerwise as lw
from orchestrator.search import layerwise_stage
from orchestrator.search.layerwise import (
    AnalyticPrices,
    LayerwiseResult,
    Outer,
    Prices,
    ProfilePrices,
    layerwise,
    plan_price,
    stage_price,
)
from orchestrator.strategy.layerwise import BEHAVIOUR, LayerwiseStage, galvatron_json
from orchestrator.strategy.pins import MemoryLimit
from orchestrator.units import GB, MIB

from instances import CALIBRATION  # isort: skip


def two_kinds(layers: int, hidden: int) -> ModelSpec:
    """Decoder layers, then as many with a wider MLP under another name."""
    model = gpt(layers, hidden=hidden, seq=64, vocab=512)
    wide = gpt(1, hidden=2 * hidden, seq=64, vocab=512).runs[1].layer
    ends = model.runs[0], model.runs[2]
    return replace(model, runs=(ends[0], model.runs[1], LayerRun(layer=replace(wide, kind="encoder"), count=1), ends[1]))


def prices_of(seed: int) -> tuple[Prices, int, MemoryLimit]:
    """Analytic prices of a tiny model, its batch, and a limit between the leanest plan's bytes and ample."""
    rng = random.Random(seed)
    hidden = rng.choice([64, 128])
    model = two_kinds(rng.choice([1, 2]), hidden) if rng.random() < 0.5 else gpt(rng.choice([2, 3]), hidden=hidden, seq=64, vocab=512)
    batch = rng.choice([4, 8])
    where = cluster(rng.choice([2, 4]), bandwidth=rng.choice([1, 20, 300]) * GB)
    calibration = replace(CALIBRATION, overlap_efficiency=rng.choice([0.0, 0.8]), op_overhead_s=0.0)
    prices = AnalyticPrices(CostModel(model, training(batch, seq=64), where, BEHAVIOUR, calibration))
    low, high = 1 * MIB, 200 * MIB
    while high - low > MIB // 64:
        middle = (low + high) // 2
        try:
            layerwise(prices, batch, MemoryLimit(limit=middle, reserve=0), pp=1)
            high = middle
        except NoPlanError:
            low = middle
    return prices, batch, MemoryLimit(limit=int(high * rng.choice([1.0, 1.1, 1.3, 1.6, 10.0])), reserve=0)


def exhaustive(prices: Prices, batch: int, limit: MemoryLimit, pp: int = 1) -> float:
    """Every layer in every way, every split, every micro-batch size, every size of embedding and head."""
    best = math.inf
    kinds = [kind for kind, count in prices.runs for _ in range(count)]
    for m in lw.divisors(batch):
        for ends in prices.end_choices(Outer(pp, m, batch // m, None)):
            outer = Outer(pp, m, batch // m, ends)
            for cuts in combinations(range(2, len(kinds) - 1), pp - 1):  # a layer at least beside embedding and head
                borders = [0, *cuts, len(kinds)]
                stages = [stages_of(prices, outer, p, kinds[borders[p] : borders[p + 1]], limit) for p in range(pp)]
                best = min([best, *(plan_price(prices, outer, chosen) for chosen in product(*stages))])
    return best


def stages_of(prices: Prices, outer: Outer, p: int, kinds: list[str], limit: MemoryLimit) -> list[LayerwiseStage]:
    """All ways to compute these layers that fit and that no other one covers."""
    made = (
        stage_price(prices, outer, p, [(kind, way, 1) for kind, way in zip(kinds, ways, strict=True)])
        for ways in product(*(prices.ways(kind, outer) for kind in kinds))
    )
    kept: dict[tuple[float, ...], LayerwiseStage] = {}
    for stage in made:
        numbers = (stage.forward_s, stage.backward_s, stage.exposed_s, stage.optimizer_s)
        if stage.peak_bytes <= limit.usable and not any(all(map(le, other, numbers)) for other in kept):
            kept[numbers] = stage
    return list(kept.values())


@pytest.mark.parametrize("seed", range(6))
def test_one_stage_is_the_best_of_all_assignments(seed: int) -> None:
    prices, batch, limit = prices_of(seed)
    found = layerwise(prices, batch, limit, pp=1).plan
    assert math.isclose(found.step_time_s, exhaustive(prices, batch, limit), rel_tol=1e-9)
    assert found.peak_memory_bytes <= limit.usable


@pytest.mark.full
@pytest.mark.parametrize("seed", range(6, 80))
def test_one_stage_is_the_best_of_all_assignments_on_more_instances(seed: int) -> None:
    prices, batch, limit = prices_of(seed)
    found = layerwise(prices, batch, limit, pp=1).plan
    assert math.isclose(found.step_time_s, exhaustive(prices, batch, limit), rel_tol=1e-9)


def check_two_stages(seed: int) -> LayerwiseResult | None:
    """No plan of two stages is below what the search says none is below, and its own is (nearly) the best of all."""
    prices, batch, limit = prices_of(seed)
    limit = replace(limit, limit=int(limit.limit * random.Random(seed).choice([0.7, 1.0, 1.5])))
    best = exhaustive(prices, batch, limit, pp=2)
    try:
        found = layerwise(prices, batch, limit, pp=2)
    except NoPlanError:
        assert best == math.inf
        return None
    assert found.at_least_s <= best * (1 + 1e-9)
    assert best * (1 - 1e-9) <= found.plan.step_time_s <= best * 1.005
    assert found.plan.peak_memory_bytes <= limit.usable
    assert not found.exact or math.isclose(found.plan.step_time_s, best, rel_tol=1e-8)
    return found


def test_two_stages_are_the_best_of_all_plans_or_as_near_as_is_said() -> None:
    found = [result for seed in range(16) if (result := check_two_stages(seed)) is not None]
    assert len(found) >= 5
    assert sorted(result.plan.step_time_s / result.at_least_s - 1 for result in found)[len(found) // 2] < 0.05


@pytest.mark.full
@pytest.mark.parametrize("seed", range(16, 100))
def test_two_stages_are_the_best_on_more_instances(seed: int) -> None:
    check_two_stages(seed)


@pytest.mark.parametrize("seed", range(0, 6, 2))
def test_the_batch_with_most_samples_a_second_is_found(seed: int) -> None:
    prices, _, limit = prices_of(seed)
    batches = (2, 4, 6, 8, 12)
    rates = {}
    for batch in batches:
        with contextlib.suppress(NoPlanError):
            rates[batch] = batch / layerwise(prices, batch, limit, pp=1).plan.step_time_s
    together = layerwise(prices, batches, limit, pp=1)
    assert together.exact
    assert math.isclose(together.plan.global_batch_size / together.plan.step_time_s, max(rates.values()), rel_tol=1e-9)


def test_instances_mix_ways() -> None:
    """Some plan has layers of one kind that are computed differently."""
    mixed = 0
    for seed in range(6):
        prices, batch, limit = prices_of(seed)
        (stage,) = layerwise(prices, batch, limit, pp=1).plan.stages
        mixed += len({run.kind for run in stage.runs}) < len(stage.runs)
    assert mixed


def test_a_planted_bound_that_is_too_high_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = layerwise_stage._Front._dual

    def unsound(self: layerwise_stage._Front, share: float, upper: float) -> tuple[float, float, float, float] | None:
        found = honest(self, share, upper)
        return found and (1.5 * found[0], *found[1:])

    monkeypatch.setattr(layerwise_stage._Front, "_dual", unsound)

    def wrong(seed: int) -> bool:
        prices, batch, limit = prices_of(seed)
        try:
            return not math.isclose(layerwise(prices, batch, limit, pp=1).plan.step_time_s, exhaustive(prices, batch, limit), rel_tol=1e-9)
        except NoPlanError:
            return True

    assert any(wrong(seed) for seed in range(6))


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
    return ProfilePrices(profile(), CostModel(gpt(2), training(batch), cluster(num_gpus, bandwidth=5 * GB), BEHAVIOUR, CALIBRATION))


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
