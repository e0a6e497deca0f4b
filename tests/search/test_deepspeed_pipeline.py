"""DeepSpeed's own pipeline among the choices: searched exactly, with recompute by layer, proposed where it is what there is."""

from __future__ import annotations

import math

import oracle
import pytest
from instances import Instance, planned_engines
from msgspec.structs import replace
from small_engines import HEADS, deepspeed_like
from small_models import cluster, gpt, training

from orchestrator.cost.calibration import datasheet
from orchestrator.engines import ENGINES
from orchestrator.errors import InputError, NoPlanError
from orchestrator.plan import LayerSpan, Stage
from orchestrator.plan.check import check_plan
from orchestrator.search.planner import search
from orchestrator.search.question import SearchSettings
from orchestrator.strategy.capabilities import Capabilities, Rule, Traits
from orchestrator.strategy.pins import MemoryLimit, Pins
from orchestrator.strategy.spec import Candidate, Recompute
from orchestrator.strategy.workload import Workload
from orchestrator.units import GIB

OURS = "deepspeed_1f1b"
FLAT = ("1f1b", OURS)
MODES: tuple[tuple[Recompute, ...], ...] = (
    ("none",),
    ("none", "full"),
    ("none", "selective", "full"),
    ("none", "selective", "mlp", "full"),
)
AMPLE = MemoryLimit(limit=80 * GIB, reserve=0)


def engine(seed: int, asked: tuple[str, ...] = FLAT) -> Capabilities:
    """With both pipelines, plans only with the schedules that are asked for."""

    def other(candidate: Candidate, _: Workload) -> str | None:
        return None if candidate.schedule in asked else "not asked for"

    return deepspeed_like(
        zero_stages=(0, 1),
        zero_stages_with_pipeline=(0, 1),
        offload_optimizer=False,
        recompute=MODES[seed % len(MODES)],
        recompute_varies="stage",
        recompute_by_layer=(OURS,),
        uneven_stages=True,
        schedules=FLAT,
        rules=(HEADS, Rule(id="asked", engine_rule="the test", check=other, needs=("pp", "vpp", "schedule"))),
    )


def agrees(seed: int, schedules: tuple[str, ...], pins: Pins) -> bool | None:
    """None where there is nothing to plan."""
    given = Instance(seed)
    traits = replace(given.traits, engine="deepspeed")
    asked: list[tuple[Capabilities, Traits]] = [(engine(seed, schedules), traits)]
    expected = oracle.best(given.model, given.training, given.cluster, asked, given.limit, given.calibration)
    offered = planned_engines([(engine(seed), traits)], given.calibration)
    try:
        found = search(given.workload, offered, replace(given.settings, pins=pins))
    except (NoPlanError, InputError):
        return None if expected is None else False
    assert expected is not None
    assert found.plan.predicted is not None
    return found.proven and math.isclose(found.plan.predicted.step_time_s, expected[0], rel_tol=1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_its_plans_are_the_oracles(seed: int) -> None:
    assert agrees(seed, (OURS,), Pins(schedule=OURS)) is not False


@pytest.mark.parametrize("seed", range(0, 40, 3))
def test_beside_megatrons_pipeline_the_best_of_both_is_found(seed: int) -> None:
    assert agrees(seed, FLAT, Pins()) is not False


def test_most_of_these_instances_have_such_a_plan() -> None:
    assert sum(agrees(seed, (OURS,), Pins(schedule=OURS)) is True for seed in range(20)) >= 8


def test_the_engine_proposes_it_and_takes_each_layer_in_a_mode_of_its_own() -> None:
    spec = ENGINES["megatron_deepspeed"]
    where = cluster(4)
    traits = spec.traits(where.software)
    capabilities = spec.capabilities(where.software)
    pins = Pins(pp=2, schedule=OURS)
    workload = Workload(model=gpt(4), training=training(8), cluster=where)
    found = search(
        workload, planned_engines([(capabilities, traits)], datasheet(where, traits)), SearchSettings(pins=pins, limit=AMPLE, top_k=1)
    )
    plan = found.plan
    assert (plan.pp, plan.schedule, plan.zero_stage, plan.vpp) == (2, OURS, 1, 1)
    modes: tuple[Recompute, ...] = ("none", "full", "selective")
    embedding, head = plan.stages[0].layers[0], plan.stages[-1].layers[-1]
    kind = plan.stages[1].layers[0].kind
    layers = tuple(LayerSpan(kind=kind, first=n, count=1, recompute=mode) for n, mode in enumerate(modes))
    by_hand = (Stage(layers=(embedding, *layers)), Stage(layers=(LayerSpan(kind=kind, first=3, count=1), head)))
    check_plan(replace(plan, stages=by_hand), capabilities)
    with pytest.raises(InputError, match="one stage either recomputes the same modules of all its layers"):
        check_plan(replace(plan, stages=by_hand, schedule="1f1b"), capabilities)
    with pytest.raises(InputError, match="zero_stage=0 with schedule=deepspeed_1f1b is offered in fp32 only"):
        check_plan(replace(plan, zero_stage=0), capabilities)
    with pytest.raises(InputError, match="megatron_deepspeed has zero_stage 0, 1 with a pipeline"):
        check_plan(replace(plan, zero_stage=2), capabilities)
