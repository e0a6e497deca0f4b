"""transformers' Trainer one step at a time, as a worker's trainer takes them, for who measures them: rehearse=true, orchestrator.profile,
tests of parity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from orchestrator.plan import Plan
from orchestrator.programs import hugging_face
from orchestrator.programs.hugging_face_hooks import Run
from orchestrator.workers.batch import Batch
from orchestrator.workers.runs import PlannedSamples


class Steps:
    """One rank of the run whose files are in the folder that this is called in."""

    def __init__(self, plan: Plan, engine: dict[str, Any], device: torch.device) -> None:
        run = Run(plan, engine, device, None)
        unread: Any = None  # who measures reads the samples
        samples = PlannedSamples(plan, unread, plan.training.steps * plan.global_batch_size)
        self.plan, self.device, self.groups = plan, device, run.groups
        self.trainer: Any = hugging_face.trainer(run, samples, None)
        self.trainer._prepare_for_training(plan.training.steps, self.trainer.get_train_dataloader(), None)
        self.model, self.engine, self.states = self.trainer.model, self.trainer.model_wrapped, self.trainer.states
        # accelerate calls it once the last micro-batch has been backward (utils/deepspeed.py, backward).
        self._step, self.engine.step = self.engine.step, lambda *words, **more: None

    def forward_backward(self, batches: Sequence[Batch]) -> torch.Tensor:
        """Computes the gradients of the micro-batches' mean loss, which it returns."""
        self.trainer.current_gradient_accumulation_steps = len(batches)
        losses: list[torch.Tensor] = []
        for batch in batches:
            self.trainer.accelerator.gradient_state._set_sync_gradients(len(losses) + 1 == len(batches))
            losses.append(self.trainer.training_step(self.engine, batch))
        return torch.stack(losses).sum()

    def update(self, lr: float) -> float | None:
        """Clips, steps and clears; returns the gradients' global norm before clipping, where DeepSpeed tells one."""
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        self._step()
        norm = self.engine.get_global_grad_norm()
        return None if norm is None else float(norm)


build = Steps
