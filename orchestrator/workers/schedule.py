"""The learning rate by step, as Megatron-LM counts it (core/optimizer_param_scheduler.py, get_lr)."""

from __future__ import annotations

from math import cos, pi

from orchestrator.model.training import Training


def learning_rate(training: Training, step: int) -> float:
    """The rate of step `step`, counted from 0: it rises linearly from 0 in the first step to `lr` in step `warmup`, then follows the
    schedule, which would be at `min_lr` in the step after the last.

    >>> t = Training(global_batch_size=1, seq_length=1, lr=1.0, warmup=2, steps=6, schedule="linear")
    >>> [learning_rate(t, step) for step in range(6)]
    [0.0, 0.5, 1.0, 0.75, 0.5, 0.25]
    """
    if step < training.warmup:
        return training.lr * step / training.warmup
    span = training.lr - training.min_lr
    done = (step - training.warmup) / max(1, training.steps - training.warmup)
    done = min(1.0, done)
    if training.schedule == "cosine":
        return training.min_lr + span * (1 + cos(pi * done)) / 2
    if training.schedule == "linear":
        return training.min_lr + span * (1 - done)
    return training.lr
