"""Medium instances, far beyond enumeration, against an independent program (milp.py)."""

from __future__ import annotations

import math
import random
from functools import cache
from typing import Any, NamedTuple

import pytest
from instances import CALIBRATION, TRAITS, planned_engines
from milp import Program, outer_choices
from msgspec.structs import replace
from small_engines import HEADS, INTERLEAVED, deepspeed_like, megatron_like
from small_models import block, cluster, gpt, training

from orchestrator.cost.price import CostModel
from orchestrator.errors import NoPlanError
from orchestrator.hardware.spec import Cluster
from orchestrator.model.spec import LayerRun, ModelSpec
from orchestrator.model.training import Training
from orchestrator.search.partition import Partitions, Way
from orchestrator.search.planner import SearchResult, search
from orchestrator.search.question import SearchSettings
from orchestrator.strategy.capabilities import Capabilities, Traits
from orchestrator.strategy.pins import MemoryLimit
from orchestrator.strategy.workload import Workload
from orchestrator.units import GB, KIB

pytestmark = pytest.mark.xdist_group("milp")  # one `medium`

QUICK, ALL = (1, 6, 20, 22), range(50)
UNEVEN = 2
"""Of this one the best plan is no even split, which needs no bound to be found."""
EQUAL = 1e-6
"""Relative: HiGHS's tolerances."""


class Medium(NamedTuple):
    model: ModelSpec
    training: Training
    cluster: Cluster
    capabilities: Capabilities
    traits: Traits
    calibration: Any
    limit: MemoryLimit

    @property
    def workload(self) -> Workload:
        return Workload(model=self.model, training=self.training, cluster=self.cluster)


@cache
def medium(seed: int) -> Medium:
    """8 to 16 layers, a third of them in two kinds, 4 to 12 GPUs, and memory between the least that any plan needs and ample."""
    rng = random.Random(1000 + seed)
    hidden, seq = rng.choice([64, 128, 256]), rng.choice([64, 128])
    layers = rng.randint(8, 16)
    model = gpt(layers, hidden=hidden, heads=4, seq=seq, vocab=rng.choice([512, 4096, 16384]))
    if rng.random() < 0.33:
        first, inside, last = model.runs
        wide = replace(block("wide", 2 * hidden, 4, seq), input_elements=seq * hidden, output_elements=seq * hidden)
        half = rng.randint(2, 5)
        model = replace(model, runs=(first, replace(inside, count=half), LayerRun(layer=wide, count=rng.randint(2, 5)), last))
    gpus = rng.choice([4, 6, 8, 8, 12])
    where = cluster(gpus, gpus_per_node=rng.choice([d for d in (2, 3, 4, 6, 8) if gpus % d == 0]), bandwidth=rng.choice([5, 50, 300]) * GB)
    changes: dict[str, Any] = {"recompute": rng.choice([("none", "full"), ("none", "selective", "full")]), "rules": (HEADS, INTERLEAVED)}
    capabilities = megatron_like(**changes)
    if rng.random() < 0.2:
        capabilities = deepspeed_like(**changes, offload_optimizer=False, zero_stages=(0, 1, 2, 3), zero_stages_with_pipeline=(0, 1))
    traits = replace(TRAITS, engine=capabilities.engine, flash_attention=rng.random() < 0.5)
    calibration = replace(CALIBRATION, op_overhead_s=rng.choice([0.0, 1e-6]), overlap_efficiency=rng.choice([0.0, 0.8]))
    batch = rng.choice([8, 12, 16])
    if gpus % 3 == 0 and batch % 3:
        batch = 24  # so that some plan is legal
    given = model, training(batch, seq=seq), where, capabilities, traits, calibration
    low, high = 0, 1 << 20
    while high - low > max(1, high // 100):  # the least, to a percent
        middle = (low + high) // 2
        try:
            planned(Medium(*given, MemoryLimit(limit=middle * KIB, reserve=0)))
            high = middle
        except NoPlanError:
            low = middle
    return Medium(*given, MemoryLimit(limit=int(high * KIB * rng.choice([1.0, 1.05, 1.1, 1.2, 1.4, 2.0, 10.0])), reserve=0))


def planned(m: Medium) -> SearchResult:
    engines = planned_engines([(m.capabilities, m.traits)], m.calibration)
    return search(m.workload, engines, SearchSettings(limit=m.limit, top_k=1))


def optimum(m: Medium, result: SearchResult) -> tuple[float, float]:
    """(seconds of the best plan that the program finds, seconds that it proves none undercuts), over all outer choices. Of those that the
    search did not take only plans that are faster than the search's are looked for."""
    assert result.plan.predicted is not None
    ours = result.plan.predicted.step_time_s
    costs = CostModel(m.workload, m.traits, m.calibration)
    best = bound = math.inf
    seen = False
    for candidate, modes in outer_choices(m.capabilities, m.workload):
        chosen = candidate.label() == result.plan.candidate.label()
        seen = seen or chosen
        for some in [[mode] for mode in modes] if m.capabilities.recompute_varies == "never" else [modes]:
            answer = Program(costs, m.model, m.capabilities, candidate, some, m.limit.usable).solve(ours, only_faster=not chosen)
            best, bound = min(best, answer.best), min(bound, answer.bound)
    assert seen, f"{result.plan.candidate.label()} is none of the program's outer choices"
    return best, bound


def agrees(m: Medium) -> bool:
    """Whether the plan is proven and the program's optimum."""
    result = planned(m)
    assert result.plan.predicted is not None
    ours = result.plan.predicted.step_time_s
    best, bound = optimum(m, result)
    return result.proven and bound * (1 - EQUAL) <= ours <= best * (1 + EQUAL)


@pytest.mark.parametrize("seed", QUICK)
def test_the_optimum_is_the_programs(seed: int) -> None:
    assert agrees(medium(seed))


@pytest.mark.full
@pytest.mark.parametrize("seed", [seed for seed in ALL if seed not in QUICK])
def test_the_optimum_is_the_programs_on_more_instances(seed: int) -> None:
    assert agrees(medium(seed))


def test_medium_instances_are_worth_their_name() -> None:
    """Some plans have several stages, some virtual ones, some recompute in part, some two kinds of layers."""
    plans = [planned(medium(seed)).plan for seed in QUICK]
    assert any(plan.pp > 2 for plan in plans)
    assert any(plan.vpp > 1 for plan in plans)
    assert any(len({span.recompute for _, span in plan.spans() if span.kind == "decoder"}) > 1 for plan in plans)
    assert any(span.kind == "wide" for plan in plans for _, span in plan.spans())


def test_a_planted_pruning_bug_is_caught_by_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Partitions._own

    def unsound(self: Partitions, p: int, way: Way) -> tuple[float, float, float]:
        work, first, last = honest(self, p, way)
        return 1.3 * work, first, last

    instance = medium(UNEVEN)
    monkeypatch.setattr(Partitions, "_own", unsound)
    assert not agrees(instance)
