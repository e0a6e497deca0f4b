"""What the pool's ranks run of models that are described by their own code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from worker_cases import make_trainer

from orchestrator.plan import from_json
from orchestrator.workers import loop
from orchestrator.workers.schedule import learning_rate


def trained(plan_json: str, cache: str) -> dict[str, Any]:
    """Losses and gradient norms of all steps; what was scored at the end, where the plan evaluates."""
    plan = from_json(plan_json)
    trainer = make_trainer(plan)
    batches, valid = trainer.open_batches(Path(cache))
    found: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(plan.training.steps):
        microbatches = [loop.to_device(arrays, trainer.device) for arrays in batches.microbatches(step)]
        local = trainer.forward_backward(microbatches)
        found["norms"].append(trainer.update(learning_rate(plan.training, step)))
        loss, _, _ = loop.agree(local, trainer.groups, trainer.device, stop=False)
        found["losses"].append(loss)
    if valid is not None:
        found["valid"] = loop.evaluate(trainer, valid)
        found |= trainer.scores()
    return found if dist.get_rank() == 0 else {}


def exchanged(plan_json: str, cache: str, ids: list[list[int]]) -> dict[str, Any]:
    """Logits of these tokens before the first step and after the last one, whose weights are exported."""
    plan = from_json(plan_json)
    trainer: Any = make_trainer(plan)
    found = {"before": _logits(trainer, ids)}
    batches, _ = trainer.open_batches(Path(cache))
    for step in range(plan.training.steps):
        trainer.forward_backward([loop.to_device(arrays, trainer.device) for arrays in batches.microbatches(step)])
        trainer.update(learning_rate(plan.training, step))
    found["after"] = _logits(trainer, ids)
    trainer.export(Path(plan.run.export_to or ""))
    return found if dist.get_rank() == 0 else {}


def _logits(trainer: Any, ids: list[list[int]]) -> Any:
    trainer.engine.eval()
    with torch.no_grad():
        logits = trainer.engine(input_ids=torch.tensor(ids, device=trainer.device)).logits
    trainer.engine.train()
    return logits.float().cpu().tolist()
