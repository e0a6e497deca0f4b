"""Layer-wise plans with pipelines against every plan of small instances."""

from __future__ import annotations

import math

import pytest
from layerwise_instances import exhaustive, pipeline_of, within

from orchestrator.errors import NoPlanError
from orchestrator.search.layerwise import layerwise


def check(seed: int, pp: int) -> tuple[bool, bool]:
    """Whether there is a plan, which then is within what the search says of it, and whether it is said to be the fastest."""
    prices, batch, limit = pipeline_of(seed, pp)
    best = exhaustive(prices, batch, limit, pp)
    try:
        found = layerwise(prices, batch, limit, pp=pp)
    except NoPlanError:
        assert best == math.inf
        return False, False
    assert within(found, best)
    assert max(stage.peak_bytes for stage in found.plan.stages) == found.plan.peak_memory_bytes <= limit.usable
    return True, found.exact


SEEDS = {2: [*range(8), *range(10, 24)], 4: [0, 1, 3, 6, 7, 8, 9]}
"""By pp. Those between, of which two of ours take as long as all these, are left to .ci/full."""


@pytest.mark.parametrize("pp", SEEDS)
def test_the_best_of_all_pipelines_is_within_what_is_said(pp: int) -> None:
    found = [check(seed, pp) for seed in SEEDS[pp]]
    assert sum(plan for plan, _ in found) > len(found) / 2
    assert sum(exact for _, exact in found) > len(found) / 3


@pytest.mark.full
@pytest.mark.parametrize(("seed", "pp"), [(seed, pp) for pp in SEEDS for seed in range(320) if seed not in SEEDS[pp]])
def test_the_best_of_all_pipelines_is_within_what_is_said_on_more_instances(seed: int, pp: int) -> None:
    check(seed, pp)
