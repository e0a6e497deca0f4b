"""Layer-wise plans with pipelines against every plan of small instances."""

from __future__ import annotations

import math

import pytest
from layerwise_instances import exhaustive, pipeline_of

from orchestrator.errors import NoPlanError
from orchestrator.search import layerwise_splits
from orchestrator.search.layerwise import layerwise


def check(seed: int, pp: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether there is a plan: the fastest of all, and said to be; also where no stage's ways are all at hand, as with many layers."""
    prices, batch, limit = pipeline_of(seed, pp)
    best = exhaustive(prices, batch, limit, pp)
    for few in (layerwise_splits.FEW_WAYS, 0):
        monkeypatch.setattr(layerwise_splits, "FEW_WAYS", few)
        try:
            found = layerwise(prices, batch, limit, pp=pp)
        except NoPlanError:
            assert best == math.inf
            continue
        assert found.plan.step_time_s == pytest.approx(best, rel=1e-9)
        assert found.plan.peak_memory_bytes <= limit.usable
        assert found.exact
    return best < math.inf


@pytest.mark.parametrize(("pp", "many"), [(2, 24), (4, 10)])
def test_a_pipeline_is_the_best_of_all_plans(pp: int, many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for seed in range(many):
        with monkeypatch.context() as patch:
            found.append(check(seed, pp, patch))
    assert sum(found) > many / 2


@pytest.mark.full
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("seed", range(10, 320))
def test_a_pipeline_is_the_best_of_all_plans_on_more_instances(seed: int, pp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check(seed, pp, monkeypatch)
