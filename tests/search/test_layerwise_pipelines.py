"""Layer-wise plans with pipelines against every plan of small instances."""

from __future__ import annotations

import math

import pytest
from layerwise_instances import exhaustive, pipeline_of

from orchestrator.errors import NoPlanError
from orchestrator.search import layerwise_splits
from orchestrator.search.layerwise import LayerwiseResult, layerwise


def check(seed: int, pp: int) -> LayerwiseResult | None:
    """The plan is the fastest of all, and said to be."""
    prices, batch, limit = pipeline_of(seed, pp)
    best = exhaustive(prices, batch, limit, pp)
    try:
        found = layerwise(prices, batch, limit, pp=pp)
    except NoPlanError:
        assert best == math.inf
        return None
    assert found.plan.step_time_s == pytest.approx(best, rel=1e-9)
    assert found.plan.peak_memory_bytes <= limit.usable
    assert found.exact
    return found


@pytest.mark.parametrize("few", [layerwise_splits.FEW_WAYS, 0])
@pytest.mark.parametrize("pp", [2, 4])
def test_a_pipeline_is_the_best_of_all_plans(pp: int, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`few` 0: no stage's ways are all at hand, as with many layers."""
    monkeypatch.setattr(layerwise_splits, "FEW_WAYS", few)
    assert sum(check(seed, pp) is not None for seed in range(20)) >= 10


@pytest.mark.full
@pytest.mark.parametrize("few", [layerwise_splits.FEW_WAYS, 0])
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("seed", range(20, 320))
def test_a_pipeline_is_the_best_of_all_plans_on_more_instances(seed: int, pp: int, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layerwise_splits, "FEW_WAYS", few)
    check(seed, pp)
