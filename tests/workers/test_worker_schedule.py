"""The learning rate by step."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from orchestrator.model.training import Training
from orchestrator.workers.schedule import learning_rate

pytestmark = pytest.mark.engines


def rates(**fields: Any) -> list[float]:
    training = Training(global_batch_size=1, seq_length=1, lr=1.0, **fields)
    return [learning_rate(training, step) for step in range(training.steps)]


def test_warmup_is_linear_and_reaches_the_rate() -> None:
    assert rates(warmup=4, steps=5, schedule="constant") == [0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_decay_falls_towards_the_least_rate(schedule: str) -> None:
    found = rates(warmup=2, steps=50, schedule=schedule, min_lr=0.1)
    after = found[2:]
    assert after[0] == 1.0
    assert all(a > b for a, b in pairwise(after))
    assert 0.1 < after[-1] < 0.13


def test_cosine_is_half_way_in_the_middle() -> None:
    assert rates(steps=10, schedule="cosine", min_lr=0.2)[5] == pytest.approx(0.6)


def test_a_warmup_longer_than_the_run_never_divides_by_zero() -> None:
    assert rates(warmup=10, steps=2) == [0.1, 0.2]
    assert rates(warmup=2, steps=2) == [0.5, 1.0]
