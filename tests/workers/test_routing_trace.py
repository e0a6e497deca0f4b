"""What a training writes of its routing is what a plan takes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from worker_plans import MIXTRAL, make_plan
from worker_pool import Pool

from orchestrator.model.parts.experts import Experts
from orchestrator.model.routing import times, trace
from orchestrator.plan import RunSettings, to_json

pytestmark = pytest.mark.engines


def test_every_token_of_every_layer_and_micro_batch_is_counted_once(pool: Pool, corpus: str, tmp_path: Path) -> None:
    """Two groups of two expert ranks on two stages, one of which is recomputed; evaluation is no part of the trace."""
    run = RunSettings(trace_routing=True, eval_every=1, eval_steps=1, split=(0.9, 0.1, 0.0))
    plan = make_plan(MIXTRAL, pp=2, dp=2, ep=2, recompute=["full", "none"], steps=2, run=run)
    pool.run("eval_cases.train_and_evaluate", plan.world_size, to_json(plan), corpus, str(tmp_path / "out"))
    text = (tmp_path / "out" / "routing.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    experts = plan.model.common_layer.feed_forward
    assert isinstance(experts, Experts)
    layers = Counter(row["layer"] for row in rows)
    assert layers == dict.fromkeys(range(plan.model.num_layers), plan.training.steps * plan.num_microbatches)
    assert {row["step"] for row in rows} == {1, 2}
    tokens = plan.dp * plan.micro_batch_size * plan.training.seq_length * experts.topk
    assert all(sum(row["tokens"]) == tokens for row in rows)
    assert len({row["group"] for row in rows}) == plan.pp
    found = trace(text, "routing.jsonl", experts.num_experts)
    assert 1.0 <= times(found.busiest, 2) <= times(found.busiest, experts.num_experts) <= experts.num_experts / experts.topk
