"""Evaluation gives every plan the same numbers and changes nothing of the training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from worker_plans import GPT, LLAMA, T5, make_plan
from worker_pool import Pool

from orchestrator.plan import Plan, RunSettings, to_json

pytestmark = pytest.mark.engines

RUN = RunSettings(split=(90.0, 10.0), eval_every=2, eval_steps=3)
DEEPSPEED = "megatron_deepspeed"
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "megatron gpt tp2 pp2 vpp2": (GPT, {"tp": 2, "pp": 2, "vpp": 2, "micro_batch_size": 2}),
    "megatron llama dp2 zero1 pp2": (LLAMA, {"dp": 2, "pp": 2, "zero_stage": 1}),
    "megatron t5 dp2": (T5, {"dp": 2}),
    "megatron_deepspeed gpt dp2 zero3": (GPT, {"engine": DEEPSPEED, "dp": 2, "zero_stage": 3}),
    "megatron_deepspeed gpt pp2 zero1": (GPT, {"engine": DEEPSPEED, "pp": 2, "zero_stage": 1}),
    "deepspeed llama dp2 zero3": (LLAMA, {"engine": "deepspeed", "dp": 2, "zero_stage": 3}),
}
LONG = ("megatron t5 dp2", "megatron_deepspeed gpt dp2 zero3")
"""Left to .ci/full: Hugging Face's model under the same engine evaluates over ZeRO-3."""
TOLERANCE = 1e-4


def rows_of(pool: Pool, plan: Plan, corpus: str, out: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pool.run("eval_cases.train_and_evaluate", plan.world_size, to_json(plan), corpus, str(out))[0]
    return rows


@pytest.fixture(scope="module")
def references() -> dict[str, list[dict[str, Any]]]:
    return {}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.full if name in LONG else ()) for name in CASES])
def test_every_plan_evaluates_to_what_one_process_does(
    name: str, pool: Pool, corpus: str, tmp_path: Path, references: dict[str, list[dict[str, Any]]]
) -> None:
    model, fields = CASES[name]
    # Hugging Face's models draw their weights in their own way.
    engine = "deepspeed" if fields.get("engine") == "deepspeed" else "megatron"
    key = f"{engine} {model.family}"
    if key not in references:
        references[key] = rows_of(pool, make_plan(model, engine, run=RUN, steps=5), corpus, tmp_path / "one")
    rows = rows_of(pool, make_plan(model, run=RUN, steps=5, **fields), corpus, tmp_path / "many")
    assert [row["step"] for row in rows if "valid_loss" in row] == [2, 4, 5]
    for one, many in zip(references[key], rows, strict=True):
        assert many["loss"] == pytest.approx(one["loss"], abs=TOLERANCE)
        assert many.get("valid_loss") == pytest.approx(one.get("valid_loss"), abs=TOLERANCE)


def test_evaluation_changes_nothing_of_the_training(pool: Pool, corpus: str, tmp_path: Path) -> None:
    """Dropout on: an evaluation that took numbers from its generator, or stayed in evaluation mode, would show."""
    plan = make_plan(replace(GPT, hidden_dropout=0.2, attention_dropout=0.2), run=RUN, steps=5)
    without = replace(plan, run=RunSettings(split=RUN.split))
    one, other = rows_of(pool, plan, corpus, tmp_path / "with"), rows_of(pool, without, corpus, tmp_path / "without")
    assert [row["loss"] for row in one] == [row["loss"] for row in other]
    assert not any("valid_loss" in row for row in other)
