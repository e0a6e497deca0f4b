"""A user's own values are those that the engines work with."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from worker_plans import GPT, make_plan
from worker_pool import Pool

from orchestrator.plan import to_json

pytestmark = pytest.mark.engines


@pytest.mark.parametrize("engine", ["megatron", "megatron_deepspeed"])
def test_a_field_of_megatron_reaches_the_model(engine: str, pool: Pool) -> None:
    plan = make_plan(GPT, engine, tp=2)
    for std in (0.02, 0.3):
        changed = replace(plan, extra={"megatron": {"init_method_std": std}})
        for rank in pool.run("eval_cases.reached", 2, to_json(changed)):
            assert rank["std"] == pytest.approx(std, rel=0.05)


def test_a_path_of_the_ds_config_reaches_deepspeed(pool: Pool) -> None:
    plan = make_plan(GPT, "megatron_deepspeed", dp=2, zero_stage=2)
    changed = replace(plan, extra={"ds": {"steps_per_print": 7, "zero_optimization.reduce_bucket_size": 1234}})
    for rank in pool.run("eval_cases.reached", 2, to_json(changed)):
        assert (rank["steps_per_print"], rank["bucket"]) == (7, 1234)
