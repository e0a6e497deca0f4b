"""DeepSpeed's PipelineModule in the real loop: it saves, resumes in other layouts, and evaluates as every plan does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_checkpoint import run
from test_evaluation import RUN, rows_of
from worker_plans import GPT, LLAMA, make_plan
from worker_pool import Pool

from orchestrator.plan import from_json

pytestmark = pytest.mark.engines

ENGINE: dict[str, Any] = {"engine": "megatron_deepspeed"}
PIPELINE = ENGINE | {"pipeline_schedule": "deepspeed_1f1b"}
RESUMED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "pp2 dp2 zero1 to the same": (PIPELINE | {"pp": 2, "dp": 2, "zero_stage": 1}, PIPELINE | {"pp": 2, "dp": 2, "zero_stage": 1}),
    "llama pp2 zero1 to tp2 pp2 zero0": (
        PIPELINE | {"model": LLAMA, "pp": 2, "zero_stage": 1},
        PIPELINE | {"model": LLAMA, "tp": 2, "pp": 2, "split": [[3], [1]]},
    ),
    "zero2 to pp4 zero1, the embedding alone": (
        ENGINE | {"dp": 2, "zero_stage": 2},
        PIPELINE | {"pp": 4, "zero_stage": 1, "split": [[0], [2], [1], [1]]},
    ),
    "bf16 from megatron-core's pipeline": (
        ENGINE | {"pp": 2, "zero_stage": 1, "precision": "bf16"},
        PIPELINE | {"pp": 2, "dp": 2, "zero_stage": 1, "precision": "bf16"},
    ),
    "from megatron-core's pipeline, the embedding alone": (
        ENGINE | {"model": LLAMA, "pp": 4, "zero_stage": 1, "split": [[0], [2], [2], [0]]},
        PIPELINE | {"model": LLAMA, "pp": 2, "zero_stage": 1},
    ),
    "sgd pp2 zero0 in DeepSpeed's own files": (PIPELINE | {"pp": 2, "optimizer": "sgd"}, PIPELINE | {"pp": 2, "optimizer": "sgd"}),
}


LONG = ("llama pp2 zero1 to tp2 pp2 zero0", "bf16 from megatron-core's pipeline", "sgd pp2 zero0 in DeepSpeed's own files")
"""Left to .ci/full."""


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.full if case in LONG else ()) for case in RESUMED])
def test_a_resumed_pipeline_continues_the_curve(case: str, pool: Pool, corpus: str, tmp_path: Path) -> None:
    before, after = RESUMED[case]
    whole = run(pool, corpus, tmp_path / "first", save_every=2, **before)
    resumed = run(pool, corpus, tmp_path / "second", resume=tmp_path / "first" / "checkpoints" / "step_000002", **after)
    tolerance = 1e-6 if before == after else 5e-3 if after.get("precision") == "bf16" else 1e-4
    np.testing.assert_allclose(resumed, whole[2:], rtol=0, atol=tolerance)


@pytest.mark.full
def test_the_command_plans_it_and_trains_it_on_four_ranks(tmp_path: Path) -> None:
    asked = ["recipe=gpt_tiny", "gpus=4", "engine=megatron_deepspeed", "pin.pp=2", "pin.schedule=deepspeed_1f1b", "train.steps=5"]
    command = [sys.executable, "-m", "orchestrator.run", *asked, f"out={tmp_path / 'run'}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    plan = from_json((tmp_path / "run" / "plan.json").read_bytes())
    assert (plan.engine, plan.pp, plan.schedule) == ("megatron_deepspeed", 2, "deepspeed_1f1b")
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 5
    assert losses[-1] < losses[0]


def test_it_evaluates_to_what_one_process_does_and_trains_on_as_before(pool: Pool, corpus: str, tmp_path: Path) -> None:
    """Evaluations stand between the steps: whatever they left behind would show in the next loss."""
    one = rows_of(pool, make_plan(GPT, run=RUN, steps=5), corpus, tmp_path / "one")
    plan = make_plan(GPT, run=RUN, steps=5, **PIPELINE, pp=2, dp=2, zero_stage=1)
    many = rows_of(pool, plan, corpus, tmp_path / "many")
    assert [row["step"] for row in many if "valid_loss" in row] == [2, 4, 5]
    for alone, row in zip(one, many, strict=True):
        assert row["loss"] == pytest.approx(alone["loss"], abs=1e-4)
        assert row["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-4)
        assert row.get("valid_loss") == pytest.approx(alone.get("valid_loss"), abs=1e-4)
