"""One rank under torch's DistributedDataParallel."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from orchestrator.errors import InputError
from orchestrator.plan import Plan
from orchestrator.workers import groups, hugging_face, loop
from orchestrator.workers.batch import Batch, mean_loss
from orchestrator.workers.checkpoint import Saved
from orchestrator.workers.saving import Snapshot

STATES = "states.pt"


class DdpTrainer:
    """The whole model on every rank."""

    def __init__(self, plan: Plan, engine: dict[str, Any], device: torch.device) -> None:
        self.plan, self.device = plan, device
        self.groups = groups.of_plan(plan)
        model = hugging_face.first_model(plan, engine, device)
        self.model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        training, parameters = plan.training, list(model.parameters())
        decayed = {"params": [p for p in parameters if p.dim() > 1], "weight_decay": training.weight_decay}
        free = {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0}
        self.optimizer = torch.optim.AdamW([decayed, free], betas=training.betas, eps=training.eps)

    def _loss(self, batch: Batch) -> torch.Tensor:
        return mean_loss(batch, hugging_face.losses(self.model, self.plan.model.family, batch)[0])

    def forward_backward(self, batches: Sequence[Batch]) -> torch.Tensor:
        """Gradients add up locally until the last micro-batch's backward pass reduces them."""
        self.optimizer.zero_grad(set_to_none=False)
        logs = []
        for index, batch in enumerate(batches):
            last = index + 1 == len(batches)
            with contextlib.nullcontext() if last else self.model.no_sync():
                loss = self._loss(batch)
                (loss / len(batches)).backward()
            logs.append(loss.detach())
        return torch.stack(logs).mean()

    def update(self, lr: float) -> float:
        most = self.plan.training.clip or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), most)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        return float(norm)

    def evaluate(self, batches: Sequence[Batch]) -> torch.Tensor:
        self.model.eval()
        with torch.no_grad():
            logs = [self._loss(batch) for batch in batches]
        self.model.train()
        return torch.stack(logs).mean()

    def snapshot(self, folder: Path, step: int) -> Snapshot:
        """Every rank has the same: rank 0 writes, and nothing is left to write beside the training."""
        if dist.get_rank() == 0:
            torch.save({"model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict()}, folder / STATES)
        return Snapshot()

    def load(self, saved: Saved) -> None:
        states = torch.load(saved.folder / STATES, map_location=self.device, weights_only=True)
        self.model.module.load_state_dict(states["model"])
        self.optimizer.load_state_dict(states["optimizer"])

    def export(self, folder: Path) -> None:
        raise InputError("model.export_to", folder, "this worker writes no checkpoint of Hugging Face's")


if __name__ == "__main__":
    loop.main(DdpTrainer)
