"""What the pool's ranks run of models that are described by their own code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from hf_cases import forget
from worker_cases import make_trainer

from orchestrator.plan import from_json
from orchestrator.workers import checkpoint, loop
from orchestrator.workers.schedule import learning_rate


def trained(plan_json: str, cache: str) -> dict[str, Any]:
    """Losses and gradient norms of all steps; what was scored at the end, where the plan evaluates."""
    plan = from_json(plan_json)
    trainer = make_trainer(plan)
    try:
        batches, valid = trainer.open_batches(Path(cache))
        found: dict[str, Any] = {"losses": [], "norms": []}
        for step in range(plan.training.steps):
            microbatches = [loop.to_device(arrays, trainer.device) for arrays in batches.microbatches(step)]
            local = trainer.forward_backward(microbatches)
            found["norms"].append(trainer.update(learning_rate(plan.training, step)))
            loss, _, _ = loop.agree(local, trainer.groups, trainer.device, stop=False)
            found["losses"].append(loss)
        if valid is not None:
            loop.evaluate(trainer, valid)
            found |= trainer.scores()
        return found if dist.get_rank() == 0 else {}
    finally:
        forget(trainer)


def run(plan_json: str, cache: str, out: str) -> list[float]:
    """The real loop with its checkpoints, continued where the plan says so; losses."""
    plan = from_json(plan_json)
    trainer = make_trainer(plan)
    try:
        batches, _ = trainer.open_batches(Path(cache))
        first_step = 0
        if plan.run.resume:
            saved = checkpoint.find(plan.run.resume)
            trainer.load(saved)
            first_step = saved.step
        Path(out).mkdir(parents=True, exist_ok=True)
        return loop.train(trainer, batches, Path(out), first_step)
    finally:
        forget(trainer)
