"""What the pool's ranks run of models that are described by their own code."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from msgspec.structs import replace
from worker_cases import make_trainer, open_samples, program, train_by_program

from orchestrator.model.schedule import learning_rate
from orchestrator.plan import RunSettings, from_json
from orchestrator.workers import loop


def trained(plan_json: str, cache: str) -> dict[str, Any]:
    """Losses and gradient norms of all steps; what was scored at the end, where the plan evaluates."""
    with tempfile.TemporaryDirectory() as folder:
        out: list[Any] = [folder]
        dist.broadcast_object_list(out)
        rows = train_by_program(from_json(plan_json), cache, Path(out[0]))
        dist.barrier()
    scored = {name.removeprefix("valid_"): value for name, value in rows[-1].items() if name.startswith("valid_")}
    found = {"losses": [row["loss"] for row in rows], "norms": [row["grad_norm"] for row in rows], **scored}
    return found if dist.get_rank() == 0 else {}


def resumed(plan_json: str, cache: str, folder: str) -> dict[str, list[float]]:
    """Losses of a run that saves and exports as its plan says, and of one that goes on from its second step."""
    plan, out = from_json(plan_json), Path(folder)
    whole = train_by_program(plan, cache, out / "whole")
    saved = str(out / "whole" / "checkpoints" / "step_000002")
    again = train_by_program(replace(plan, run=RunSettings(resume=saved)), cache, out / "again")
    return {"whole": [row["loss"] for row in whole], "again": [row["loss"] for row in again]} if dist.get_rank() == 0 else {}


def exchanged(plan_json: str, cache: str, ids: list[list[int]]) -> dict[str, Any]:
    """Logits of these tokens before the first step and after the last one, whose weights are exported."""
    plan = from_json(plan_json)
    trainer: Any = make_trainer(plan)
    found = {"before": _logits(trainer, ids)}
    samples = open_samples(plan, cache)
    for step in range(plan.training.steps):
        trainer.forward_backward(loop.read(trainer, samples, step))
        trainer.update(learning_rate(plan.training, step))
    found["after"] = _logits(trainer, ids)
    trainer.states.export(Path(plan.run.export_to or ""))
    return found if dist.get_rank() == 0 else {}


def _logits(trainer: Any, ids: list[list[int]]) -> Any:
    trainer.engine.eval()
    with torch.no_grad():
        logits = trainer.engine(input_ids=torch.tensor(ids, device=trainer.device)).logits
    trainer.engine.train()
    return logits.float().cpu().tolist()


def weights_at_the_end(plan_json: str, cache: str, out: str) -> dict[str, Any]:
    """What the module's own parameters are after a run that saves as its plan says."""
    with program(from_json(plan_json), cache, Path(out)) as run:
        run.train(run.trainer)
        dist.barrier()
        return {name: weight.detach().float().cpu().tolist() for name, weight in run.trainer.model.named_parameters()}
