"""The deepspeed engine with its experts divided over ranks computes what one process with all of them computes, and that is what
transformers alone computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import plain_transformers
import pytest
from msgspec.structs import replace
from test_hf_parity import References, assert_equal, hf_plan, measure
from worker_plans import DEEPSEEK, MIXTRAL, QWEN3_MOE
from worker_pool import Pool

from orchestrator.model.architecture import Run
from orchestrator.model.parts.experts import Experts
from orchestrator.plan import RunSettings, to_json

pytestmark = pytest.mark.engines

ROUTED = Experts(
    num_experts=8, topk=4, ffn_hidden_size=24, shared_ffn_hidden_size=48, score="sigmoid", scaling=2.5, groups=4, group_topk=2,
    expert_bias=True,
)  # fmt: skip
LATENT_EXPERTS = replace(DEEPSEEK, name="deepseek_v3_test", norm_epsilon=1e-6, pattern=(Run(layers=1), Run(layers=3, feed_forward=ROUTED)))
MODELS = {"mixtral": MIXTRAL, "qwen3_moe": QWEN3_MOE, "deepseek_v3": LATENT_EXPERTS}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "mixtral dp2 ep2 zero1": (MIXTRAL, {"dp": 2, "ep": 2, "zero_stage": 1}),
    "mixtral ulysses2 ep2 zero1": (MIXTRAL, {"cp": 2, "ep": 2, "zero_stage": 1}),
    "mixtral dp4 ep4 zero3": (MIXTRAL, {"dp": 4, "ep": 4, "zero_stage": 3}),
    "qwen3_moe dp4 ep2 zero2 checkpointing": (QWEN3_MOE, {"dp": 4, "ep": 2, "zero_stage": 2, "recompute": ["full"]}),
    "deepseek_v3 dp4 ep2 zero3": (LATENT_EXPERTS, {"dp": 4, "ep": 2, "zero_stage": 3}),
}
MORE: dict[str, tuple[Any, dict[str, Any]]] = {
    "mixtral ulysses2 zero3": (MIXTRAL, {"cp": 2, "zero_stage": 3}),
    "qwen3_moe ulysses2 dp2 ep4 zero2 checkpointing": (
        QWEN3_MOE,
        {"cp": 2, "dp": 2, "ep": 4, "zero_stage": 2, "recompute": ["full"]},
    ),
    "qwen3_moe ulysses2 dp2 ep2 zero1": (QWEN3_MOE, {"cp": 2, "dp": 2, "ep": 2, "zero_stage": 1}),
    "mixtral dp4 ep2 zero3": (MIXTRAL, {"dp": 4, "ep": 2, "zero_stage": 3}),
    "mixtral dp2 zero0": (MIXTRAL, {"dp": 2}),
    "mixtral dp2 zero3": (MIXTRAL, {"dp": 2, "zero_stage": 3}),
    "qwen3_moe dp4 ep4 zero1": (QWEN3_MOE, {"dp": 4, "ep": 4, "zero_stage": 1}),
    "qwen3_moe dp4 ep4 zero3 checkpointing": (QWEN3_MOE, {"dp": 4, "ep": 4, "zero_stage": 3, "recompute": ["full"]}),
    "deepseek_v3 dp2 ep2 zero2": (LATENT_EXPERTS, {"dp": 2, "ep": 2, "zero_stage": 2}),
    "deepseek_v3 dp4 ep4 zero1 checkpointing": (LATENT_EXPERTS, {"dp": 4, "ep": 4, "zero_stage": 1, "recompute": ["full"]}),
}
ALL = CASES | MORE


@pytest.fixture(scope="module")
def references(pool: Pool, corpus: str) -> References:
    return References(pool, corpus)


LONG = ({*MORE} - {"deepseek_v3 dp2 ep2 zero2"}) | {"mixtral dp4 ep4 zero3", "deepseek_v3 dp4 ep2 zero3"}
"""Left to .ci/full: a run that goes on has experts under ZeRO-3, too."""


@pytest.mark.parametrize("case", [pytest.param(name, marks=pytest.mark.full if name in LONG else ()) for name in ALL])
def test_experts_over_ranks_compute_what_one_process_computes(case: str, pool: Pool, corpus: str, references: References) -> None:
    model, fields = ALL[case]
    found, expected = measure(pool, corpus, hf_plan(model, **fields)), references.of(model)
    for name, weight in expected["weights"].items():
        np.testing.assert_array_equal(found["weights"][name], weight, err_msg=name)
    assert_equal(found, expected)


@pytest.mark.parametrize("family", list(MODELS))
def test_one_process_computes_what_transformers_alone_computes(family: str, corpus: str, references: References) -> None:
    plan = hf_plan(MODELS[family], micro_batch_size=8)
    found = references.of(plan.model)
    assert_equal(found, plain_transformers.train(plan, found["weights"], corpus))


RESUMED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ep2 zero1 to ep4 zero3": ({"dp": 2, "ep": 2, "zero_stage": 1}, {"dp": 4, "ep": 4, "zero_stage": 3}),
    "dp4 ep2 zero3 to dp2 zero2": ({"dp": 4, "ep": 2, "zero_stage": 3}, {"dp": 2, "zero_stage": 2}),
}


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.full if "dp4" in case else ()) for case in RESUMED])
def test_a_run_goes_on_with_its_experts_divided_otherwise(case: str, pool: Pool, corpus: str, tmp_path: Path) -> None:
    before, after = (hf_plan(QWEN3_MOE, **fields) for fields in RESUMED[case])
    first = replace(before, run=RunSettings(save_every=2))
    whole = pool.run("train_and_save", first.world_size, to_json(first), corpus, str(tmp_path / "first"))[0]
    second = replace(after, run=RunSettings(resume=str(tmp_path / "first" / "checkpoints" / "step_000002")))
    rest = pool.run("train_and_save", second.world_size, to_json(second), corpus, str(tmp_path / "second"))[0]
    np.testing.assert_allclose(rest, whole[2:], rtol=0, atol=1e-4)


def test_the_models_own_loss_of_balance_is_trained_with_and_not_reported(pool: Pool, corpus: str) -> None:
    """It is of a rank's micro-batch: the same where experts are divided, and transformers' own with the whole batch on one process."""
    balanced = replace(MIXTRAL, feed_forward=replace(MIXTRAL.feed_forward, aux_loss_coeff=0.5))
    divided, together = (measure(pool, corpus, hf_plan(balanced, dp=2, zero_stage=1, micro_batch_size=4, ep=ep)) for ep in (2, 1))
    assert_equal(divided, together)
    one = measure(pool, corpus, hf_plan(balanced, micro_batch_size=8))
    alone = plain_transformers.train(hf_plan(balanced, micro_batch_size=8), one["weights"], corpus)
    assert alone["losses"][0] > one["losses"][0] + 0.4
    assert_equal(one, alone | {"losses": one["losses"]})
