"""What a search is told of its engines: which memory they may use, and prices that are made once."""

from __future__ import annotations

import pytest
from instances import CALIBRATION, TRAITS
from msgspec.structs import replace
from small_engines import megatron_like
from small_models import cluster, gpt, training

from orchestrator.cost.memory_policy import USUAL_RISK, MemoryPolicy
from orchestrator.hardware.spec import Part
from orchestrator.search.question import PlannedEngine, SearchSettings
from orchestrator.strategy.pins import MemoryLimit
from orchestrator.strategy.workload import Workload
from orchestrator.units import GIB

ENGINE = PlannedEngine(
    capabilities=megatron_like(),
    traits=TRAITS,
    calibration=replace(CALIBRATION, memory_margin=0.1),
    policy=MemoryPolicy(kept=((0.25, USUAL_RISK), (0.1, None))),
)


def workload(*memories: int) -> Workload:
    """Of GPUs with so many bytes each; of several types where there are several."""
    given = cluster(4)
    gpus = [replace(given.gpu, memory=memory) for memory in memories]
    parts = tuple(Part(gpu=gpu, num_gpus=2, levels=given.levels) for gpu in gpus) if len(gpus) > 1 else ()
    return Workload(model=gpt(4), training=training(4), cluster=replace(given, gpu=gpus[0], parts=parts))


def test_without_a_limit_all_memory_counts_but_what_the_engine_keeps_free() -> None:
    """.1 of it, or .25 where plans are to be cautious; of several types each has its own, and the largest counts for all."""
    settings = SearchSettings()
    assert settings.limits_for(ENGINE, workload(80 * GIB))[-1].usable == pytest.approx(0.9 * 80 * GIB)
    cautious = settings.limits_for(ENGINE, workload(80 * GIB))[0]
    assert cautious.usable == pytest.approx(0.75 * 80 * GIB)
    assert cautious.risk == USUAL_RISK
    plain = PlannedEngine(capabilities=ENGINE.capabilities, traits=TRAITS, calibration=ENGINE.calibration)
    assert settings.limits_for(plain, workload(80 * GIB)) == settings.limits_for(ENGINE, workload(80 * GIB))[1:]
    for memories in ((40 * GIB, 80 * GIB), (80 * GIB, 40 * GIB)):
        limit = settings.limits_for(ENGINE, workload(*memories))[-1]
        assert limit.usable == pytest.approx(0.9 * 80 * GIB)
        assert [limit.usable_of(part) for part in (0, 1)] == pytest.approx([0.9 * memory for memory in memories])
    given = SearchSettings(limit=MemoryLimit(limit=10 * GIB, reserve=1 * GIB))
    assert given.limits_for(ENGINE, workload(80 * GIB))[-1].usable == 9 * GIB, "the user's own"


def test_prices_are_made_once_for_a_workload_whatever_else_changes() -> None:
    one, other = workload(80 * GIB), workload(40 * GIB)
    costs = ENGINE.costs(one)
    assert ENGINE.costs(one) is costs
    able = ENGINE.able_to(megatron_like(axes=("dp",)))
    free = ENGINE.held_to(-1)
    assert able.costs(one) is costs
    assert free.costs(one) is costs
    fewer = able.costs(one, ("none",))
    assert fewer.modes == ("none",)
    assert fewer.workload is costs.workload
    assert (able.capabilities.axes, able.policy) == (("dp",), ENGINE.policy)
    assert [ENGINE.held_to(level).policy.kept for level in (0, -1)] == [((0.25, USUAL_RISK),), ((0.1, None),)]
    assert ENGINE.costs(other) is not costs
    assert ENGINE.costs(one) is not costs, "the latest alone is kept"
