"""Experts divided over ranks in any way compute what one process computes: losses, gradient norms and first gradients."""

from __future__ import annotations

from typing import Any

import pytest
from test_parity import Result, assert_equal, measure
from worker_plans import DEEPSEEK_LIKE, EXPERT_MODELS, MIXTRAL, QWEN3_MOE, make_plan
from worker_pool import Pool

from orchestrator.plan import Plan

pytestmark = pytest.mark.engines

SP = {"tp": 2, "sequence_parallel": True}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "mixtral dp2 ep2": (MIXTRAL, {"dp": 2, "ep": 2}),
    "mixtral tp2 sp ep2": (MIXTRAL, {**SP, "ep": 2, "micro_batch_size": 2}),
    "mixtral tp2 sp dp2 ep2 etp2": (MIXTRAL, {**SP, "dp": 2, "ep": 2, "etp": 2}),
    "mixtral pp2 dp2 ep2 zero1": (MIXTRAL, {"pp": 2, "dp": 2, "ep": 2, "zero_stage": 1}),
    "mixtral dp4 ep2 zero1 recompute of modules": (MIXTRAL, {"dp": 4, "ep": 2, "zero_stage": 1, "recompute": ["mlp"]}),
    "mixtral dp2 ep2 allgather recompute": (MIXTRAL, {"dp": 2, "ep": 2, "moe_token_dispatcher_type": "allgather", "recompute": ["full"]}),
    "qwen3_moe tp2 sp etp2": (QWEN3_MOE, {**SP, "etp": 2, "micro_batch_size": 2}),
    "qwen3_moe tp2 sp pp2 dp2 ep4 zero1": (QWEN3_MOE, {**SP, "pp": 2, "dp": 2, "ep": 4, "zero_stage": 1}),
    "qwen3_moe tp2 sp dp2 ep2 zero1": (QWEN3_MOE, {**SP, "dp": 2, "ep": 2, "zero_stage": 1, "recompute": ["core_attn+layernorm+mlp"]}),
    "qwen3_moe dp4 ep2 etp2": (QWEN3_MOE, {"dp": 4, "ep": 2, "etp": 2}),
    "qwen3_moe pp2 vpp2 dp2 ep2": (QWEN3_MOE, {"pp": 2, "vpp": 2, "dp": 2, "ep": 2, "zero_stage": 1}),
    "deepseek dp2 ep2": (DEEPSEEK_LIKE, {"dp": 2, "ep": 2}),
    "deepseek pp2 uneven dp2 ep2 zero1": (DEEPSEEK_LIKE, {"pp": 2, "split": [[3], [1]], "dp": 2, "ep": 2, "zero_stage": 1}),
    "deepseek tp2 sp dp2 ep4": (DEEPSEEK_LIKE, {**SP, "dp": 2, "ep": 4, "recompute": ["layernorm+mlp"]}),
}


def plan_of(model: Any, **fields: Any) -> Plan:
    return make_plan(model, clip=2.0, lr=3e-3, **fields)


@pytest.fixture(scope="module")
def expert_references(pool: Pool, corpus: str) -> dict[str, Result]:
    """One process, micro-batches of one sample and of two."""
    return {name: measure(pool, corpus, plan_of(model, micro_batch_size=8)) for name, model in EXPERT_MODELS.items()}


@pytest.mark.parametrize("case", CASES)
def test_experts_over_ranks_compute_what_one_process_computes(
    case: str, pool: Pool, corpus: str, expert_references: dict[str, Result]
) -> None:
    model, fields = CASES[case]
    plan = plan_of(model, **fields)
    assert_equal(measure(pool, corpus, plan), expert_references[model.family], model.vocab_size)
