"""Sequences divided over ranks compute what one process computes: losses, gradient norms and first gradients."""

from __future__ import annotations

from typing import Any

import pytest
from test_expert_parity import expert_references  # noqa: F401  (a fixture)
from test_parity import TOLERANCE, Result, assert_equal, measure
from worker_plans import GPT, LLAMA, MIXTRAL, QWEN3_MOE, make_plan
from worker_pool import Pool

from orchestrator.plan import Plan, to_json

pytestmark = pytest.mark.engines

SP = {"tp": 2, "sequence_parallel": True}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "megatron llama cp4": (LLAMA, {"cp": 4}),
    "megatron llama tp2 sp cp2 pp2 zero1": (LLAMA, {**SP, "cp": 2, "pp": 2, "zero_stage": 1}),
    "megatron gpt cp2 dp2 zero1 recompute": (GPT, {"cp": 2, "dp": 2, "zero_stage": 1, "recompute": ["full"]}),
    "megatron gpt tp2 cp2 mbs2": (GPT, {"tp": 2, "cp": 2, "micro_batch_size": 2}),
    "megatron llama cp2 pp2 vpp2 dp2 zero1 selective": (
        LLAMA,
        {"cp": 2, "pp": 2, "vpp": 2, "dp": 2, "zero_stage": 1, "recompute": ["selective", "selective"]},
    ),
    "megatron llama tp2 cp4": (LLAMA, {"tp": 2, "cp": 4}),
    "megatron llama cp4 dp2 zero1 in two instances": (LLAMA, {"cp": 4, "dp": 2, "zero_stage": 1, "zero_shard_size": 4}),
    "megatron gpt cp2 pp2 uneven": (GPT, {"cp": 2, "pp": 2, "split": [[1], [3]]}),
}
LONG = (
    "megatron gpt tp2 cp2 mbs2",
    "megatron llama cp2 pp2 vpp2 dp2 zero1 selective",
    "megatron llama tp2 cp4",
    "megatron llama cp4 dp2 zero1 in two instances",
    "megatron gpt cp2 pp2 uneven",
)
EXPERTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "mixtral cp2 dp2 ep4 zero1": (MIXTRAL, {"cp": 2, "dp": 2, "ep": 4, "zero_stage": 1}),
    "mixtral cp2 ep2": (MIXTRAL, {"cp": 2, "ep": 2}),
    "qwen3_moe tp2 sp cp2 pp2 ep2 etp2": (QWEN3_MOE, {**SP, "cp": 2, "pp": 2, "ep": 2, "etp": 2}),
}
"""Their balance is a mean over a micro-batch of all samples, as the reference has it: coefficients are zero."""
LONG_EXPERTS = ("mixtral cp2 ep2", "qwen3_moe tp2 sp cp2 pp2 ep2 etp2")


def plan_of(model: Any, **fields: Any) -> Plan:
    return make_plan(model, clip=2.0, lr=3e-3, cp_comm_type="all_gather", **fields)


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.full if case in LONG else ()) for case in CASES])
def test_sequences_over_ranks_compute_what_one_process_computes(case: str, pool: Pool, corpus: str, references: dict[str, Result]) -> None:
    model, fields = CASES[case]
    plan = plan_of(model, **fields)
    assert_equal(measure(pool, corpus, plan), references[model.family], model.vocab_size)


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.full if case in LONG_EXPERTS else ()) for case in EXPERTS])
def test_experts_fold_over_the_ranks_of_a_sequence(
    case: str,
    pool: Pool,
    corpus: str,
    expert_references: dict[str, Result],  # noqa: F811  (the fixture)
) -> None:
    model, fields = EXPERTS[case]
    assert_equal(measure(pool, corpus, plan_of(model, **fields)), expert_references[model.name], model.vocab_size)


def test_tokens_without_a_loss_may_lie_anywhere_in_a_sequence(pool: Pool, corpus: str) -> None:
    """Ranks then have different numbers of predicted tokens: a mean of each rank's own mean would be another loss."""
    one = measure(pool, corpus, plan_of(LLAMA, micro_batch_size=1), masked=True)
    divided = plan_of(LLAMA, cp=2, dp=2, zero_stage=1, micro_batch_size=1)
    assert_equal(measure(pool, corpus, divided, masked=True), one, LLAMA.vocab_size)
    whole = measure(pool, corpus, plan_of(LLAMA, micro_batch_size=1))
    assert abs(whole["losses"][0] - one["losses"][0]) > 10 * TOLERANCE


def test_context_parallel_ranks_lie_as_far_apart_as_the_plan_says(pool: Pool) -> None:
    plan = plan_of(LLAMA, tp=2, cp=2, dp=2)
    for rank, groups in enumerate(pool.run("groups", plan.world_size, to_json(plan))):
        first = rank - rank // 2 % 2 * 2
        assert groups["cp"] == [first, first + 2]
