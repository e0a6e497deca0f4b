"""The twelve errors that the engines make without a word (engines README, "Silently wrong"), where it is a worker that prevents them.
tests/engines/test_silent_errors.py has what plans and files do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from test_hf_parity import hf_plan
from worker_plans import GPT, LLAMA, make_plan
from worker_pool import Pool

from orchestrator.plan import Plan, to_json

pytestmark = pytest.mark.engines

OVER_MEGATRON, ALONE = "megatron_deepspeed", "deepspeed"
STRICT = {"clip": 0.1, "lr": 3e-3, "steps": 3}
"""Clips in every step: a wrong norm shows in the next loss."""
TOLERANCE = 1e-4


def curve(pool: Pool, corpus: str, plan: Plan) -> np.ndarray:
    """Losses and norms."""
    found = pool.run("parity", plan.world_size, to_json(plan), corpus)[0]
    return np.array([found["losses"], found["norms"]])


@pytest.fixture(scope="module")
def alone(pool: Pool, corpus: str) -> np.ndarray:
    """One process."""
    return curve(pool, corpus, make_plan(GPT, micro_batch_size=8, **STRICT))


def says(pool: Pool, plan: Plan, edits: dict[str, Any] | None = None) -> set[str]:
    """What the ranks' workers say to this plan and ds_config."""
    return set(pool.run("silent_cases.build", plan.world_size, to_json(plan), edits))


def test_1_interleaving_over_two_stages_is_exact(pool: Pool, corpus: str, alone: np.ndarray) -> None:
    found = curve(pool, corpus, make_plan(GPT, pp=2, vpp=2, **STRICT))
    np.testing.assert_allclose(found, alone, rtol=TOLERANCE)


def test_2_what_ranks_hold_whole_gets_the_gradients_of_all_parts_of_a_sequence(pool: Pool, corpus: str, alone: np.ndarray) -> None:
    found = curve(pool, corpus, make_plan(GPT, OVER_MEGATRON, tp=2, zero_stage=1, sequence_parallel=True, micro_batch_size=4, **STRICT))
    np.testing.assert_allclose(found, alone, rtol=TOLERANCE)


def test_3_a_second_copy_of_the_weights_is_built_as_planned_or_not_at_all(pool: Pool) -> None:
    plan = hf_plan(LLAMA, dp=2, zero_stage=3, zero_shard_size=2)
    assert says(pool, plan) == {""}
    assert says(pool, hf_plan(LLAMA, dp=2, zero_stage=3), {"zero_optimization.zero_hpz_partition_size": 2}) == {
        "zero_shard_size=1: DeepSpeed took 2 in its place"
    }


def test_4_a_pipeline_under_deepspeed_never_clips_by_a_stages_own_norm(pool: Pool, corpus: str, alone: np.ndarray) -> None:
    """DeepSpeed's pipeline over ZeRO-0 is clipped by the worker; megatron-core's schedule is refused there."""
    plan = make_plan(GPT, OVER_MEGATRON, pp=2, micro_batch_size=2, **STRICT)
    (message,) = says(pool, plan)
    assert message.startswith("pin.zero_stage=0: ")
    found = curve(pool, corpus, replace(plan, schedule="deepspeed_1f1b"))
    np.testing.assert_allclose(found, alone, rtol=TOLERANCE)


def test_5_autotp_is_built_with_the_plans_batches(pool: Pool) -> None:
    plan = hf_plan(LLAMA, tp=2, micro_batch_size=2)
    assert says(pool, plan) == {""}
    # The product over all ranks is what DeepSpeed takes; half of the samples would be trained on twice.
    (taken,) = says(pool, plan, {"train_batch_size": 8, "gradient_accumulation_steps": 2})
    assert "ds gradient_accumulation_steps=2 vs hf gradient_accumulation_steps=4" in taken


def test_6_zero_divides_over_the_ranks_of_a_sequence_too(pool: Pool, corpus: str) -> None:
    plan = hf_plan(LLAMA, cp=2, zero_stage=1, micro_batch_size=2, steps=2)
    whole = hf_plan(LLAMA, zero_stage=1, micro_batch_size=2, steps=2)
    (one,) = pool.run("hf_cases.state_bytes", 1, to_json(whole), corpus)
    for held in pool.run("hf_cases.state_bytes", 2, to_json(plan), corpus):
        assert held["optimizer"] == pytest.approx(one["optimizer"] / 2, rel=0.02)
    (message,) = says(pool, replace(make_plan(LLAMA, OVER_MEGATRON, dp=1, zero_stage=1), cp=2, world_size=2))
    assert message.startswith("pin.cp=2: ")


@pytest.mark.parametrize("engine", [OVER_MEGATRON, ALONE])
def test_8_gradients_in_bf16_are_summed_in_fp32(engine: str, pool: Pool) -> None:
    plan = make_plan(GPT, engine, dp=2, zero_stage=1, precision="bf16")
    assert says(pool, plan) == {""}
    refused = says(pool, plan, {"data_types": None})
    assert refused == {"training.grad_accum_dtype=torch.float32: DeepSpeed took torch.bfloat16 in its place"}


def test_10_an_auto_never_reaches_deepspeed(pool: Pool) -> None:
    """The Trainer fills them in."""
    (message,) = says(pool, make_plan(GPT, OVER_MEGATRON, zero_stage=1), {"zero_optimization.reduce_bucket_size": "auto"})
    assert message.startswith("ds_config.zero_optimization.reduce_bucket_size=auto: ")


@pytest.mark.parametrize("engine", [OVER_MEGATRON, ALONE])
def test_11_a_rank_without_the_others_trains_nothing(engine: str, pool: Pool) -> None:
    """Neither without a process group, nor in one that is not the plan's."""
    plan = to_json(make_plan(GPT, engine, dp=2, zero_stage=1))
    (message,) = pool.run("silent_cases.build_alone", 1, plan)
    assert message == "world_size=2: there is no process group: DeepSpeed would train as if it were alone"
    (message,) = pool.run("silent_cases.build", 1, plan)
    assert message == "world_size=2: the process group has 1 ranks: DeepSpeed would train as if it were alone"


@pytest.mark.parametrize(("engine", "why"), [(OVER_MEGATRON, "has no gradient_clipping"), (ALONE, "training.clip=0.5: DeepSpeed took 1.0")])
def test_12_without_a_bound_of_clipping_nothing_is_trained(engine: str, why: str, pool: Pool) -> None:
    (message,) = says(pool, make_plan(GPT, engine, zero_stage=1, clip=0.5), {"gradient_clipping": None})
    assert why in message
