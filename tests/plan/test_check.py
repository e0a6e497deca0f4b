"""A plan that somebody wrote or edited: legal, or refused by the key that is wrong."""

from __future__ import annotations

import pytest
from instances import CALIBRATION, TRAITS, planned_engines
from msgspec.structs import replace
from small_engines import megatron_like
from small_models import cluster, gpt, training

from orchestrator.errors import InputError
from orchestrator.model.families import describe
from orchestrator.plan import Plan, from_json, to_json
from orchestrator.plan.check import check_fits, check_plan
from orchestrator.search.planner import search
from orchestrator.search.question import SearchSettings
from orchestrator.strategy.megatron_layout import stages_of
from orchestrator.strategy.pins import MemoryLimit, Pins
from orchestrator.strategy.workload import Workload
from orchestrator.units import GIB, MIB

AMPLE = MemoryLimit(limit=80 * GIB, reserve=0)


def tiny_plan(**pins: object) -> Plan:
    """The fastest, of a model that the families room describes, so that a plan alone is enough to check it."""
    model = describe(gpt(8, hidden=256, seq=128, vocab=1024).architecture, 128)
    chosen = Pins(**({"tp": 2, "pp": 2, "recompute": None} | pins))  # type: ignore[arg-type]
    workload = Workload(model=model, training=training(16, seq=128), cluster=cluster(8))
    engines = planned_engines([(megatron_like(), TRAITS)], CALIBRATION)
    return search(workload, engines, SearchSettings(pins=chosen, limit=AMPLE)).plan


def test_a_found_plan_is_legal_and_survives_json() -> None:
    plan = tiny_plan()
    again = from_json(to_json(plan))
    assert again == plan
    check_plan(again, megatron_like())
    check_fits(again, AMPLE)


def edited(plan: Plan, stage: int, layer: int, **changes: object) -> Plan:
    spans = list(plan.stages[stage].layers)
    spans[layer] = replace(spans[layer], **changes)
    stages = list(plan.stages)
    stages[stage] = replace(stages[stage], layers=tuple(spans))
    return replace(plan, stages=tuple(stages))


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("engine", lambda p: replace(p, engine="foo")),
        ("world_size", lambda p: replace(p, world_size=16)),
        ("world_size", lambda p: replace(p, dp=4)),
        ("global_batch_size", lambda p: replace(p, micro_batch_size=p.micro_batch_size + 1)),
        ("global_batch_size", lambda p: replace(p, global_batch_size=32)),
        ("num_microbatches", lambda p: replace(p, num_microbatches=0)),
        ("zero_stage", lambda p: replace(p, zero_stage=3)),
        ("stages", lambda p: replace(p, stages=p.stages[:1])),
        ("stages", lambda p: replace(p, stages=(p.stages[0], replace(p.stages[1], layers=p.stages[1].layers[:-1])))),
        ("stages[0].layers[1].count", lambda p: edited(p, 0, 1, count=0)),
        ("stages[0].layers[1].count", lambda p: edited(p, 0, 1, count=99)),
        ("stages[1].layers[0].first", lambda p: edited(p, 0, 1, count=2)),
        ("stages[0].layers[1].kind", lambda p: edited(p, 0, 1, kind="conv")),
        ("stages[0].layers[0].kind", lambda p: replace(p, stages=p.stages[::-1])),
        ("stages[0].layers[1].chunk", lambda p: edited(p, 0, 1, chunk=1)),
        ("stages[0].layers[0].recompute", lambda p: edited(p, 0, 0, recompute="full")),
    ],
)
def test_an_illegal_plan_is_refused_by_its_key(key: str, change: object) -> None:
    assert callable(change)
    plan = change(tiny_plan(layout="Et*4|t*4L", recompute="none"))
    with pytest.raises(InputError) as caught:
        check_plan(plan, megatron_like())
    assert caught.value.key == key


def test_a_plan_that_no_longer_fits_is_refused() -> None:
    with pytest.raises(InputError, match=r"of 4\.0 MiB"):
        check_fits(tiny_plan(), MemoryLimit(limit=4 * MIB, reserve=0))


def test_recompute_beyond_the_engine_is_refused() -> None:
    plan = tiny_plan(layout="Et*4|t*4L", recompute="full")
    check_plan(plan, megatron_like())
    with pytest.raises(InputError, match="recompute"):
        check_plan(plan, megatron_like(recompute=("none",)))
    one_stage = edited(plan, 0, 1, recompute="none")
    check_plan(one_stage, megatron_like())
    with pytest.raises(InputError, match="same way"):
        check_plan(one_stage, megatron_like(recompute_varies="never"))


def first_layers(*counts: int) -> Plan:
    """A plan of two stages of four layers, the first so many of each recomputed in full."""
    plan = tiny_plan(layout="Et*4|t*4L", recompute="full")
    return replace(plan, stages=stages_of(gpt(8, hidden=256, seq=128, vocab=1024), (4, 4), 2, [("full", count) for count in counts]))


def test_one_setting_for_the_job_is_the_same_first_layers_of_every_chunk() -> None:
    for_job = megatron_like(recompute_varies="job")
    same = first_layers(2, 2)
    check_plan(same, for_job)
    other = first_layers(2, 1)
    check_plan(other, megatron_like())
    with pytest.raises(InputError, match="recomputes 1 layers of a chunk and 2 of another: the number is one for all stages"):
        check_plan(other, for_job)
    with pytest.raises(InputError, match="same way"):
        check_plan(same, megatron_like(recompute_varies="never"))


def test_uneven_stages_are_refused_where_the_engine_has_none() -> None:
    plan = tiny_plan(layout="Et*3|t*5L", tp=None, pp=2)
    check_plan(plan, megatron_like())
    with pytest.raises(InputError, match="as many layers in every stage"):
        check_plan(plan, megatron_like(uneven_stages=False))
