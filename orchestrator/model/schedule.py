"""The learning rate by step, as Megatron-LM counts it (core/optimizer_param_scheduler.py, get_lr)."""

from __future__ import annotations

from collections.abc import Callable
from math import cos, pi, sqrt
from typing import Final

from orchestrator.model.training import Training

LEFT: Final[dict[str, Callable[[float], float]]] = {
    "cosine": lambda done: (1 + cos(pi * done)) / 2,
    "linear": lambda done: 1 - done,
    "minus_sqrt": lambda done: 1 - sqrt(done),
    "exponential": lambda done: 2 * 0.5**done - 1,
}
"""What is left of lr - min_lr after a share of the decay, by its shape."""


def learning_rate(training: Training, step: int) -> float:
    """The rate of step `step`, counted from 0: it rises linearly from 0 in the first step to `lr` in step `warmup`, then follows the
    schedule, which would be at `min_lr` in the step after the last.

    >>> t = Training(global_batch_size=1, seq_length=1, lr=1.0, warmup=2, steps=6, schedule="linear")
    >>> [learning_rate(t, step) for step in range(6)]
    [0.0, 0.5, 1.0, 0.75, 0.5, 0.25]
    >>> t = Training(global_batch_size=1, seq_length=1, lr=1.0, warmup=1, steps=6, schedule="wsd", decay_steps=2)
    >>> [learning_rate(t, step) for step in range(6)]
    [0.0, 1.0, 1.0, 1.0, 1.0, 0.5]
    """
    if step < training.warmup:
        return training.lr * step / training.warmup
    span = training.lr - training.min_lr
    done = (step - training.warmup) / max(1, training.steps - training.warmup)
    done = min(1.0, done)
    if training.schedule == "inverse_square_root":
        return max(training.min_lr, training.lr * sqrt(max(1, training.warmup) / max(1, step)))
    if training.schedule == "wsd":
        in_decay = max(0, step - (training.steps - training.decay_length)) / training.decay_length
        return training.min_lr + span * LEFT[training.decay](in_decay)
    if training.schedule == "constant":
        return training.lr
    return training.min_lr + span * LEFT[training.schedule](done)
