"""The samples of a run under any engine's own training loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from orchestrator.plan import Plan
from orchestrator.workers import loop
from orchestrator.workers.samples import Samples


class PlannedSamples(Dataset[dict[str, Any]]):
    """`count` of a run's samples, by number; the first `again` of them over and over."""

    def __init__(self, plan: Plan, samples: Samples, count: int, again: int | None = None) -> None:
        self.plan, self.samples, self.count, self.again = plan, samples, count, again or count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = index % self.again
        scale = self.samples.scale(number // self.plan.global_batch_size)
        return self.samples.sample(number) | ({} if scale is None else {"loss_scale": np.float32(scale)})

    def collate(self, samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Samples as a micro-batch, with transformers' label for what is outside of the loss."""
        found = self.samples.stack(samples)
        if "loss_mask" in found:
            found["labels"] = np.where(found["loss_mask"] > 0, found["labels"], -100)
        return {name: torch.as_tensor(array) for name, array in found.items()}


def planned_samples(plan: Plan) -> tuple[PlannedSamples, PlannedSamples | None]:
    """What a run is trained on, and what is evaluated on or None: as much as one evaluation takes. Raises InputError."""
    train, valid = loop.open_samples(plan, loop.OUT / "data")
    training = PlannedSamples(plan, train, plan.training.steps * plan.global_batch_size)
    if valid is None or not plan.run.eval_every:
        return training, None
    return training, PlannedSamples(plan, valid, loop.eval_steps(plan, valid) * plan.global_batch_size)
