"""Experts divided over ranks in any way compute what one process computes: losses, gradient norms and first gradients."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from test_parity import TOLERANCE, Result, assert_equal, measure
from worker_plans import DEEPSEEK_LIKE, EXPERT_MODELS, MIXTRAL, QWEN3_MOE, make_plan
from worker_pool import Pool

from orchestrator.model.families import describe
from orchestrator.plan import Plan, to_json

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
    """One process, one micro-batch of the whole batch."""
    return {name: measure(pool, corpus, plan_of(model, micro_batch_size=8)) for name, model in EXPERT_MODELS.items()}


@pytest.mark.parametrize("case", CASES)
def test_experts_over_ranks_compute_what_one_process_computes(
    case: str, pool: Pool, corpus: str, expert_references: dict[str, Result]
) -> None:
    model, fields = CASES[case]
    plan = plan_of(model, **fields)
    assert_equal(measure(pool, corpus, plan), expert_references[model.family], model.vocab_size)


def test_a_micro_batchs_balance_is_that_of_one_process_with_as_many_samples(pool: Pool, corpus: str) -> None:
    """The loss of Switch Transformers is a product of means over a micro-batch: as many samples give the same training under any layout,
    and more of them another one, on one process too."""
    model = replace(MIXTRAL, feed_forward=replace(MIXTRAL.feed_forward, aux_loss_coeff=0.5))
    one = measure(pool, corpus, plan_of(model, micro_batch_size=2))
    assert_equal(measure(pool, corpus, plan_of(model, dp=2, ep=2, micro_batch_size=2)), one, model.vocab_size)
    assert_equal(measure(pool, corpus, plan_of(model, **SP, etp=2, micro_batch_size=2)), one, model.vocab_size)
    whole = measure(pool, corpus, plan_of(model, micro_batch_size=8))
    assert abs(whole["norms"][0] / one["norms"][0] - 1) > 10 * TOLERANCE


def test_a_model_of_experts_is_cut_into_the_parameters_that_are_priced(pool: Pool) -> None:
    """Of the first of tp=2 dp=2 ep=2 etp=2: half of an attention, half of each of the two experts that it has of four."""
    plan = plan_of(MIXTRAL, **SP, dp=2, ep=2, etp=2)
    spec = describe(MIXTRAL, 32)
    layers = [run.layer for run in spec.runs for _ in range(run.count)]
    expert = sum(w.local_numel(1) for layer in layers for w in layer.weights if w.kind == "expert")
    dense = sum(w.local_numel(2) for layer in layers for w in layer.weights if w.kind != "expert")
    assert pool.run("count_parameters", 4, to_json(plan)) == [dense + expert // 4] * 4
