"""The deepspeed engine computes what one process computes, and that is what transformers alone computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from worker_plans import BERT, GPT, LLAMA, T5, make_plan
from worker_pool import Pool

from orchestrator.model.spec import Architecture
from orchestrator.plan import Plan, to_json

pytestmark = pytest.mark.engines

TOLERANCE = 1e-4
Result = dict[str, Any]

HF_T5 = replace(T5, activation="relu", normalization="RMSNorm", position_embedding="relative", add_bias_linear=False)
MODELS = {"gpt": GPT, "llama": LLAMA, "bert": BERT, "t5": HF_T5}
CASES: dict[str, tuple[Architecture, dict[str, Any]]] = {
    "gpt dp2 zero0": (GPT, {"dp": 2}),
    "gpt dp4 zero1": (GPT, {"dp": 4, "zero_stage": 1}),
    "gpt dp2 zero2 checkpointing": (GPT, {"dp": 2, "zero_stage": 2, "recompute": ["full"]}),
    "gpt dp4 zero3": (GPT, {"dp": 4, "zero_stage": 3}),
    "llama tp2 zero0": (LLAMA, {"tp": 2}),
    "llama tp2 dp2 zero1": (LLAMA, {"tp": 2, "dp": 2, "zero_stage": 1}),
    "llama tp2 dp2 zero2 checkpointing": (LLAMA, {"tp": 2, "dp": 2, "zero_stage": 2, "recompute": ["full"]}),
    "llama tp2 dp2 zero3": (LLAMA, {"tp": 2, "dp": 2, "zero_stage": 3}),
    "llama dp2 zero2 offload": (LLAMA, {"dp": 2, "zero_stage": 2, "offload_optimizer": True}),
    "llama dp2 zero3 offload": (LLAMA, {"dp": 2, "zero_stage": 3, "offload_optimizer": True}),
    "llama dp8 zero3 checkpointing": (LLAMA, {"dp": 8, "zero_stage": 3, "recompute": ["full"]}),
    "llama dp4 zero3 hpz2": (LLAMA, {"dp": 4, "zero_stage": 3, "zero_shard_size": 2}),
    "llama ulysses2 zero2": (LLAMA, {"cp": 2, "zero_stage": 2, "micro_batch_size": 2}),
    "llama ulysses4 dp2 zero3": (LLAMA, {"cp": 4, "dp": 2, "zero_stage": 3}),
    "llama tied tp2": (replace(LLAMA, tie_embeddings=True), {"tp": 2, "zero_stage": 1}),
    "qwen2 dp2 zero1": (replace(LLAMA, add_qkv_bias=True), {"dp": 2, "zero_stage": 1}),
    "bert dp2 zero3": (BERT, {"dp": 2, "zero_stage": 3}),
    "bert tp2 dp2 zero1": (BERT, {"tp": 2, "dp": 2, "zero_stage": 1}),
    "t5 dp4 zero2": (HF_T5, {"dp": 4, "zero_stage": 2}),
    "t5 dp2 zero3 checkpointing": (HF_T5, {"dp": 2, "zero_stage": 3, "recompute": ["full"]}),
    "t5 tp2 dp2 zero1": (HF_T5, {"tp": 2, "dp": 2, "zero_stage": 1}),
    "t5 tp2 zero3": (HF_T5, {"tp": 2, "zero_stage": 3}),
}


def hf_plan(model: Architecture, *, cp: int = 1, zero_shard_size: int | None = None, **fields: Any) -> Plan:
    plan = make_plan(model, "deepspeed", **({"clip": 2.0, "lr": 3e-3} | fields))
    full = fields.get("recompute") == ["full"]
    stages = tuple(
        replace(s, layers=tuple(replace(x, recompute="full") if full and x.kind in ("encoder", "decoder") else x for x in s.layers))
        for s in plan.stages
    )
    return replace(plan, cp=cp, world_size=plan.world_size * cp, zero_shard_size=zero_shard_size, stages=stages)


def measure(pool: Pool, corpus: str, plan: Plan) -> Result:
    return pool.run("hf_cases.hf_parity", plan.world_size, to_json(plan), corpus)[0]


class References(dict[str, Result]):
    """One process, one micro-batch of the whole batch; by the model's fields, made when first asked for."""

    def __init__(self, pool: Pool, corpus: str) -> None:
        self.pool, self.corpus = pool, corpus

    def of(self, model: Architecture) -> Result:
        key = repr(model)
        if key not in self:
            self[key] = measure(self.pool, self.corpus, hf_plan(model, micro_batch_size=8))
        return self[key]


@pytest.fixture(scope="module")
def references(pool: Pool, corpus: str) -> References:
    return References(pool, corpus)


def assert_equal(found: Result, expected: Result) -> None:
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(found["norms"], expected["norms"], rtol=TOLERANCE, atol=TOLERANCE)
    assert found["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        # A bias of the keys moves all scores of a query alike: its gradient is rounding.
        scale = max(np.abs(gradient).max(), 1e-3)
        np.testing.assert_allclose(found["gradients"][name], gradient, rtol=0, atol=TOLERANCE * scale, err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_a_plan_computes_what_one_process_computes(case: str, pool: Pool, corpus: str, references: References) -> None:
    model, fields = CASES[case]
    found = measure(pool, corpus, hf_plan(model, **fields))
    expected = references.of(model)
    for name, weight in expected["weights"].items():
        np.testing.assert_array_equal(found["weights"][name], weight, err_msg=name)
    assert_equal(found, expected)
