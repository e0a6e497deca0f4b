"""The learning rate by step."""

from __future__ import annotations

from math import cos, pi

from orchestrator.model.training import Training


def learning_rate(training: Training, step: int) -> float:
    """The rate of step `step`, counted from 0: linear warmup over `warmup` steps, then the schedule down to `min_lr` at the last step.

    >>> t = Training(global_batch_size=1, seq_length=1, lr=1.0, warmup=2, steps=6, schedule="linear")
    >>> [learning_rate(t, step) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step < training.warmup:
        return training.lr * (step + 1) / training.warmup
    span = training.lr - training.min_lr
    done = (step - training.warmup) / max(1, training.steps - training.warmup)
    done = min(1.0, done)
    if training.schedule == "cosine":
        return training.min_lr + span * (1 + cos(pi * done)) / 2
    if training.schedule == "linear":
        return training.min_lr + span * (1 - done)
    return training.lr
