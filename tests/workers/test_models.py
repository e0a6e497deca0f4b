"""The workers build the models that the planner counts."""

from __future__ import annotations

from typing import Any

import pytest
from worker_plans import BERT, GPT, LLAMA, T5, make_plan
from worker_pool import Pool

from orchestrator.model.families import describe
from orchestrator.model.spec import Architecture
from orchestrator.plan import Plan, to_json

pytestmark = pytest.mark.engines

DEEPSPEED = "megatron_deepspeed"
CASES: dict[str, tuple[Architecture, dict[str, Any]]] = {
    "gpt tp2": (GPT, {"tp": 2}),
    "gpt pp2 tied": (GPT, {"pp": 2}),
    "llama tp2 pp2": (LLAMA, {"tp": 2, "pp": 2}),
    "bert": (BERT, {}),
    "bert tp2 pp2": (BERT, {"tp": 2, "pp": 2}),
    "t5": (T5, {}),
    "t5 tp2": (T5, {"tp": 2}),
    "t5 under deepspeed": (T5, {"engine": DEEPSPEED}),
    "bert under deepspeed": (BERT, {"engine": DEEPSPEED, "tp": 2}),
}


def expected(plan: Plan) -> list[int]:
    """Parameters of each rank by ModelSpec; a tied head counts where it is not on the embedding's stage."""
    model = describe(plan.model, plan.training.seq_length, plan.training.decoder_seq_length)
    by_stage = []
    for stage in plan.stages:
        kinds = [span.kind for span in stage.layers]
        copies = "embedding" not in kinds
        by_stage.append(sum(model.kind(span.kind).local_parameters(plan.tp, with_tied=copies) * span.count for span in stage.layers))
    return [by_stage[rank // (plan.tp * plan.dp)] for rank in range(plan.world_size)]


@pytest.mark.parametrize("case", CASES)
def test_each_rank_has_the_parameters_that_the_planner_counts(case: str, pool: Pool) -> None:
    architecture, fields = CASES[case]
    plan = make_plan(architecture, **fields)
    assert pool.run("count_parameters", plan.world_size, to_json(plan)) == expected(plan)
