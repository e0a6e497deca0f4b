"""Experts divided over ranks in any way compute what one process computes: losses, gradient norms and first gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace
from test_parity import TOLERANCE, Result, assert_equal, measure
from worker_plans import (
    DEEPSEEK,
    DEEPSEEK_LIKE,
    EXPERT_MODELS,
    GPT_OSS_LIKE,
    LATENT,
    LATENT_DENSE,
    MIXTRAL,
    PREDICTING,
    PREDICTING_TWICE,
    QWEN3_MOE,
    WINDOWED,
    make_plan,
    samples_of,
)
from worker_pool import Pool

from orchestrator.engines.megatron_parts import plan_only
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
    "deepseek dp4 ep4 shared experts beside the exchange": (DEEPSEEK_LIKE, {"dp": 4, "ep": 4, "moe_shared_expert_overlap": True}),
    "deepseek pp2 uneven dp2 ep2 zero1": (DEEPSEEK_LIKE, {"pp": 2, "split": [[3], [1]], "dp": 2, "ep": 2, "zero_stage": 1}),
    "latent dp2 zero1 recompute": (LATENT_DENSE, {"dp": 2, "zero_stage": 1, "recompute": ["selective"]}),
    "latent tp4 sp": (LATENT_DENSE, {"tp": 4, "sequence_parallel": True, "recompute": ["mla_up_proj"]}),
    "latent deepseek tp2 sp pp2 dp2 ep2 zero1": (DEEPSEEK, {**SP, "pp": 2, "dp": 2, "ep": 2, "zero_stage": 1}),
    "latent deepseek tp2 sp dp2 ep2 etp2": (DEEPSEEK, {**SP, "dp": 2, "ep": 2, "etp": 2, "recompute": ["layernorm+mlp"]}),
    "latent deepseek pp2 vpp2 dp2 ep2": (DEEPSEEK, {"pp": 2, "vpp": 2, "dp": 2, "ep": 2}),
    "prediction tp2 sp pp2 uneven dp2 ep2 zero1": (PREDICTING, {**SP, "pp": 2, "split": [[3], [1]], "dp": 2, "ep": 2, "zero_stage": 1}),
    "prediction pp2 vpp2 head alone dp2 ep2": (PREDICTING, {"pp": 2, "vpp": 2, "split": [[1, 1], [2, 0]], "dp": 2, "ep": 2}),
    "prediction pp2 even zero1": (PREDICTING, {"pp": 2, "dp": 2, "zero_stage": 1, "recompute": ["full", "none"]}),
    "prediction dp2 ep2 recompute": (PREDICTING, {"dp": 2, "ep": 2, "recompute": ["mla_up_proj+mlp"]}),
    "two predictions tp2 pp2 uneven": (PREDICTING_TWICE, {"tp": 2, "pp": 2, "split": [[3], [1]], "micro_batch_size": 4}),
    "windows and sinks tp2 sp pp2 uneven": (WINDOWED, {**SP, "pp": 2, "split": [[3], [1]], "recompute": ["core_attn+layernorm+mlp"] * 2}),
    "windows and sinks dp2 zero1": (WINDOWED, {"dp": 2, "zero_stage": 1}),
    "latent deepseek tp2 sp cp2 ep2": (DEEPSEEK, {**SP, "cp": 2, "ep": 2}),
    "windows and sinks cp2 dp2": (WINDOWED, {"cp": 2, "dp": 2}),
    "gpt_oss pp2 dp2 ep2 zero1": (GPT_OSS_LIKE, {"pp": 2, "dp": 2, "ep": 2, "zero_stage": 1}),
    "gpt_oss dp2": (GPT_OSS_LIKE, {"dp": 2}),
    "deepseek tp2 sp dp2 ep4": (DEEPSEEK_LIKE, {**SP, "dp": 2, "ep": 4, "recompute": ["layernorm+mlp"]}),
}

LONG = (
    "mixtral dp2 ep2",
    "mixtral tp2 sp ep2",
    "mixtral pp2 dp2 ep2 zero1",
    "qwen3_moe tp2 sp etp2",
    "qwen3_moe tp2 sp pp2 dp2 ep4 zero1",
    "gpt_oss pp2 dp2 ep2 zero1",
    "deepseek pp2 uneven dp2 ep2 zero1",
    "mixtral dp4 ep2 zero1 recompute of modules",
    "qwen3_moe dp4 ep2 etp2",
    "two predictions tp2 pp2 uneven",
    "gpt_oss dp2",
    "deepseek dp2 ep2",
    "latent dp2 zero1 recompute",
    "latent deepseek tp2 sp pp2 dp2 ep2 zero1",
    "latent deepseek tp2 sp dp2 ep2 etp2",
    "latent deepseek pp2 vpp2 dp2 ep2",
    "prediction pp2 even zero1",
    "windows and sinks dp2 zero1",
    "windows and sinks cp2 dp2",
    "latent deepseek tp2 sp cp2 ep2",
    "prediction dp2 ep2 recompute",
)
"""Left to .ci/full: their parts are in other cases."""


class References(dict[str, Result]):
    """Each made when it is first asked for."""

    def __init__(self, make: Callable[[str], Result]) -> None:
        super().__init__()
        self.make = make

    def __missing__(self, name: str) -> Result:
        self[name] = self.make(name)
        return self[name]


def trainable(plan: Plan) -> Plan:
    """Skips a case that the installed release does not train."""
    why = plan_only(plan.model, plan.cluster.software.megatron_core)
    if why is not None:
        pytest.skip(why)
    return plan


def plan_of(model: Any, **fields: Any) -> Plan:
    return make_plan(model, clip=2.0, lr=3e-3, **fields)


@pytest.fixture(scope="module")
def expert_references(pool: Pool, corpus: str) -> dict[str, Result]:
    """One process, one micro-batch of the whole batch."""
    return References(lambda name: measure(pool, corpus, plan_of(EXPERT_MODELS[name], micro_batch_size=8)))


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.full if case in LONG else ()) for case in CASES])
def test_experts_over_ranks_compute_what_one_process_computes(
    case: str, pool: Pool, corpus: str, expert_references: dict[str, Result]
) -> None:
    model, fields = CASES[case]
    plan = trainable(plan_of(model, **fields))
    assert_equal(measure(pool, corpus, plan), expert_references[model.name], model.vocab_size)


BESIDE: dict[str, tuple[Any, dict[str, Any]]] = {
    "dp2 ep2 zero1": (QWEN3_MOE, {"dp": 2, "ep": 2, "zero_stage": 1}),
    "pp2 vpp2 dp2 ep2": (DEEPSEEK_LIKE, {"pp": 2, "vpp": 2, "dp": 2, "ep": 2}),
    "tp2 sp dp2 ep2 layernorm": (MIXTRAL, {**SP, "dp": 2, "ep": 2, "recompute": ["layernorm"]}),
}


@pytest.mark.parametrize("case", [pytest.param(case, marks=() if "pp2" in case else pytest.mark.full) for case in BESIDE])
def test_the_exchange_beside_another_micro_batch_changes_no_number(case: str, pool: Pool, corpus: str) -> None:
    """Megatron-core has it for 16-bit models alone, so that the same layout without is what it is compared with."""
    model, fields = BESIDE[case]
    plain = trainable(plan_of(model, precision="bf16", **fields))
    beside = replace(plain, overlap_moe_expert_parallel_comm=True)
    assert_equal(measure(pool, corpus, beside), measure(pool, corpus, plain), model.vocab_size)


def test_beside_another_micro_batch_each_layer_is_given_back_when_it_is_passed(pool: Pool, corpus: str) -> None:
    """What a second micro-batch is priced at: before Megatron-core 0.16 memory grew with each layer until the chunk's end, to a third more
    at these sizes (tests/validation/engines/megatron.py, HeldUntilTheChunksEnd)."""
    model = replace(QWEN3_MOE, num_layers=6)
    plan = trainable(plan_of(model, dp=2, ep=2, precision="bf16", overlap_moe_expert_parallel_comm=True))
    for live in pool.run("live_behind_layers", plan.world_size, to_json(plan), corpus):
        pairs = plan.num_microbatches - 1
        assert len(live) == 6 * pairs
        assert max(live) < 1.05 * live[0]


@pytest.mark.parametrize(
    "model", [LATENT_DENSE, replace(LATENT_DENSE, mixer=LATENT), PREDICTING_TWICE, WINDOWED], ids=lambda model: model.name
)
def test_one_process_computes_what_plain_torch_computes(model: Any, pool: Pool, corpus: str) -> None:
    import plain_torch

    plan = trainable(plan_of(model, micro_batch_size=8))
    found = measure(pool, corpus, plan, with_weights=True)
    expected = plain_torch.train(plan, found["weights"], samples_of(plan, corpus))
    assert_equal(found, expected, model.vocab_size)


def test_a_micro_batchs_balance_is_that_of_one_process_with_as_many_samples(pool: Pool, corpus: str) -> None:
    """The loss of Switch Transformers is a product of means over a micro-batch: as many samples give the same training under any layout,
    and more of them another one, on one process too."""
    model = replace(MIXTRAL, feed_forward=replace(MIXTRAL.feed_forward, aux_loss_coeff=0.5))
    one = measure(pool, corpus, plan_of(model, micro_batch_size=2))
    assert_equal(measure(pool, corpus, plan_of(model, dp=2, ep=2, micro_batch_size=2)), one, model.vocab_size)
    assert_equal(measure(pool, corpus, plan_of(model, **SP, etp=2, micro_batch_size=2)), one, model.vocab_size)
    whole = measure(pool, corpus, plan_of(model, micro_batch_size=8))
    assert abs(whole["norms"][0] / one["norms"][0] - 1) > 10 * TOLERANCE


def test_an_expert_with_a_capacity_drops_what_it_drops_on_one_process_with_as_many_samples(pool: Pool, corpus: str) -> None:
    """Dropped is by the tokens of one rank's micro-batch: ep and dp change nothing, padding changes no number, and more samples or half a
    sequence (tp) on a rank make another choice."""
    tight = replace(MIXTRAL, feed_forward=replace(MIXTRAL.feed_forward, capacity_factor=1.0))
    one = measure(pool, corpus, plan_of(tight, micro_batch_size=2))
    assert_equal(measure(pool, corpus, plan_of(tight, dp=2, ep=2, micro_batch_size=2)), one, tight.vocab_size)
    padded = replace(tight, feed_forward=replace(tight.feed_forward, pad_to_capacity=True))
    assert_equal(measure(pool, corpus, plan_of(padded, dp=2, ep=2, zero_stage=1, micro_batch_size=2)), one, tight.vocab_size)
    for plan in (plan_of(MIXTRAL, micro_batch_size=2), plan_of(tight, **SP, etp=2, micro_batch_size=2)):
        other = measure(pool, corpus, plan)["gradients"]
        assert (
            max(abs(other[name] - gradient).max() / abs(gradient).max() for name, gradient in one["gradients"].items() if "mlp" in name)
            > 0.05
        )


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        # Half of an attention, half of each of the two experts of four.
        (MIXTRAL, {**SP, "dp": 2, "ep": 2, "etp": 2}),
        # Whole down projections; the last stage has a prediction layer and a copy of the embedding.
        (PREDICTING, {**SP, "pp": 2, "split": [[3], [1]], "ep": 2}),
    ],
    ids=lambda given: getattr(given, "name", ""),
)
def test_a_model_of_experts_is_cut_into_the_parameters_that_are_priced(model: Any, fields: dict[str, Any], pool: Pool) -> None:
    plan = plan_of(model, **fields)
    layers = list(describe(model, 32).layers())
    first = 1 + sum(span.count for span in plan.stages[0].layers if span.kind == "decoder") if plan.pp > 1 else len(layers)
    counts = []
    for stage in (layers[:first], layers[first:]) if plan.pp > 1 else (layers,):
        weights = [weight for layer in stage for weight in layer.weights if plan.pp > 1 or not weight.tied]
        expert = sum(weight.local_numel(1) for weight in weights if weight.kind == "expert")
        dense = sum(weight.local_numel(plan.tp) for weight in weights if weight.kind != "expert")
        counts += [dense + expert // (plan.ep * plan.etp)] * (plan.world_size // plan.pp)
    assert pool.run("count_parameters", 4, to_json(plan)) == counts


@pytest.mark.full
def test_latent_attention_over_tp_without_sequence_parallelism_is_what_the_rules_refuse_it_for(
    pool: Pool, corpus: str, expert_references: dict[str, Result]
) -> None:
    """The keys' rotary part is shared by all heads, and each rank's heads know a part of its gradient: these rows of the keys' down
    projection get another one."""
    found, expected = measure(pool, corpus, trainable(plan_of(LATENT_DENSE, tp=2))), expert_references[LATENT_DENSE.name]
    name = next(name for name in expected["gradients"] if name.endswith("linear_kv_down_proj.weight"))
    mine, whole = found["gradients"][name], expected["gradients"][name]
    wrong = abs(mine - whole).max(axis=(0, 2)) / abs(whole).max(axis=(0, 2))
    assert wrong[: LATENT.kv_lora_rank].max() < 100 * TOLERANCE < wrong[LATENT.kv_lora_rank :].min()
