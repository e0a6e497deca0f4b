"""Layer-wise plans of medium instances, far beyond enumeration, against an independent program (layerwise_milp.py)."""

from __future__ import annotations

import math

import pytest
from layerwise_instances import WORSE, medium_of
from layerwise_milp import LayerwiseProgram

from orchestrator.errors import NoPlanError
from orchestrator.search.layerwise import Outer, layerwise
from orchestrator.strategy.tree import divisors

EQUAL = 1e-6
"""Relative: HiGHS's tolerances."""
LIMIT_S = 120.0
"""Of one program; those here take at most some seconds. One that is cut off still has a bound."""


def check(seed: int, pp: int) -> bool:
    """Whether there is a plan; the program has none that is below what ours says that none undercuts, none that is much faster, and none at
    all where we have none."""
    prices, batch, limit = medium_of(seed, pp)
    try:
        found = layerwise(prices, batch, limit, pp=pp)
    except NoPlanError:
        found = None
    unit = found.plan.step_time_s if found else 1.0
    best, bound = math.inf, math.inf
    for m in divisors(batch):
        outer = Outer(pp, m, batch // m, None)
        if all(prices.ways(kind, outer) for kind, _ in prices.runs):
            answer = LayerwiseProgram(prices, outer, limit.usable, unit).solve(LIMIT_S)
            if answer is not None:
                best, bound = min(best, answer[0]), min(bound, answer[1])
    if found is None:
        assert best == math.inf
        return False
    assert bound <= found.plan.step_time_s * (1 + EQUAL)
    assert found.at_least_s <= best * (1 + EQUAL)
    assert found.plan.step_time_s <= best * (1 + WORSE)
    return True


SEED = {1: 0, 2: 1, 4: 0}
"""By pp: an instance with a plan."""


@pytest.mark.parametrize("pp", SEED)
def test_no_plan_is_faster_on_medium_instances(pp: int) -> None:
    assert check(SEED[pp], pp)


@pytest.mark.full
@pytest.mark.parametrize(("seed", "pp"), [(seed, pp) for pp in SEED for seed in range(50) if seed != SEED[pp]])
def test_no_plan_is_faster_on_more_medium_instances(seed: int, pp: int) -> None:
    check(seed, pp)
