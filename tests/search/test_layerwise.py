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
from orchestrator.search.layerwise import ProfilePrices, layerwise
from orchestrator.search.layerwise_stage import StageSolver, _Sequence
from orchestrator.strategy.layerwise import TRAITS, galvatron_json
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
