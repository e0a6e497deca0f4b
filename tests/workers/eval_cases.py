"""What the pool's ranks run for the tests of evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist
import worker_cases

from orchestrator.plan import from_json
from orchestrator.workers.models import bare


def train_and_evaluate(plan_json: str, cache: str, out: str) -> list[dict[str, Any]]:
    """The real loop; the rows of metrics.jsonl, on rank 0."""
    worker_cases.train_and_save(plan_json, cache, out)
    dist.barrier()
    return [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()] if dist.get_rank() == 0 else []


def reached(plan_json: str) -> dict[str, Any]:
    """What a user's own values have done: the spread of the word embedding, and the DeepSpeed engine's own reading of its configuration."""
    trainer = worker_cases.make_trainer(from_json(plan_json))
    model = bare(getattr(trainer, "model", None) or trainer.chunks[0])
    found: dict[str, Any] = {"std": float(model.embedding.word_embeddings.weight.std())}
    if hasattr(trainer, "engine"):
        found |= {"steps_per_print": trainer.engine.steps_per_print(), "bucket": trainer.engine.zero_reduce_bucket_size()}
    return found
