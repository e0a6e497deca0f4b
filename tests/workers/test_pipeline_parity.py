"""DeepSpeed's PipelineModule over megatron-core's layers computes what one process and plain torch compute."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from test_parity import BF16_TOLERANCE, Result, assert_equal, measure
from worker_plans import BERT, GPT, LLAMA, make_plan
from worker_pool import Pool

from orchestrator.plan import LayerSpan, Plan, Stage

pytestmark = pytest.mark.engines

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "gpt pp2 zero0": (GPT, {"pp": 2, "micro_batch_size": 2}),
    "gpt tp2 pp2 zero1": (GPT, {"tp": 2, "pp": 2, "zero_stage": 1, "micro_batch_size": 2}),
    "gpt tp2 pp2 dp2 zero1 sp": (GPT, {"tp": 2, "pp": 2, "dp": 2, "zero_stage": 1, "sequence_parallel": True}),
    "gpt tp2 pp2 zero0 tied": (GPT, {"tp": 2, "pp": 2, "micro_batch_size": 4}),
    "gpt pp4 tied embedding and head alone": (GPT, {"pp": 4, "zero_stage": 1, "split": [[0], [2], [2], [0]]}),
    "llama pp2 dp2 zero1 uneven recompute by layer": (LLAMA, {"pp": 2, "dp": 2, "zero_stage": 1, "split": [[3], [1]]}),
    "llama pp4 zero0 one micro-batch": (LLAMA, {"pp": 4, "micro_batch_size": 8}),
    "llama pp2 dp2 zero1 offload": (LLAMA, {"pp": 2, "dp": 2, "zero_stage": 1, "offload_optimizer": True}),
    "bert tp2 pp2 zero1": (BERT, {"tp": 2, "pp": 2, "zero_stage": 1, "sequence_parallel": True, "micro_batch_size": 2}),
}
BY_LAYER = {"llama pp2 dp2 zero1 uneven recompute by layer": ("layernorm", "full", "selective", "mlp")}


def with_recompute(plan: Plan, modes: Any) -> Plan:
    """Each layer in a mode of its own."""
    at = iter(modes)
    stages = []
    for stage in plan.stages:
        spans: list[LayerSpan] = []
        for span in stage.layers:
            if span.kind in ("embedding", "head"):
                spans.append(span)
            else:
                spans += [replace(span, first=span.first + n, count=1, recompute=next(at)) for n in range(span.count)]
        stages.append(Stage(layers=tuple(spans)))
    return replace(plan, stages=tuple(stages))


def plan_of(case: str) -> Plan:
    model, fields = CASES[case]
    plan = make_plan(model, "megatron_deepspeed", pipeline_schedule="deepspeed_1f1b", clip=2.0, lr=3e-3, **fields)
    return with_recompute(plan, BY_LAYER[case]) if case in BY_LAYER else plan


LONG = ("gpt pp2 zero0", "gpt tp2 pp2 zero1")
"""Left to .ci/full: their parts are in other cases."""


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.full if case in LONG else ()) for case in CASES])
def test_deepspeeds_pipeline_computes_what_one_process_computes(case: str, pool: Pool, corpus: str, references: dict[str, Result]) -> None:
    plan = plan_of(case)
    assert_equal(measure(pool, corpus, plan), references[plan.model.family], plan.model.vocab_size)


def test_in_bf16_it_follows_the_curve_of_fp32(pool: Pool, corpus: str, references: dict[str, Result]) -> None:
    fields = {"precision": "bf16", "clip": 2.0, "lr": 3e-3, "pp": 2, "dp": 2, "zero_stage": 1}
    found = measure(pool, corpus, make_plan(GPT, "megatron_deepspeed", pipeline_schedule="deepspeed_1f1b", **fields))
    expected = references["gpt"]
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=0, atol=BF16_TOLERANCE)
    np.testing.assert_allclose(found["norms"], expected["norms"], rtol=2 * BF16_TOLERANCE)
