"""The learning rate by step: one meaning in our workers, Megatron-LM and transformers."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import yaml
from worker_plans import make_plan

from orchestrator.engines import ENGINES
from orchestrator.model.schedule import learning_rate
from orchestrator.model.training import Training
from orchestrator.plan import Plan
from orchestrator.words.megatron import STYLES

pytestmark = pytest.mark.engines

LR = 3e-4
SCHEDULES: list[dict[str, Any]] = (
    [
        {"schedule": schedule, "warmup": warmup, "steps": steps, "min_lr": min_lr}
        for schedule in ("constant", "linear", "cosine")
        for warmup, steps in ((0, 12), (1, 12), (2, 12), (3, 12), (7, 50), (100, 1000))
        for min_lr in (0.0, 3e-5, LR)
    ]
    + [{"schedule": "inverse_square_root", "warmup": warmup, "steps": 50, "min_lr": min_lr} for warmup in (1, 7) for min_lr in (0.0, 1e-4)]
    + [
        {"schedule": "wsd", "warmup": warmup, "steps": 50, "min_lr": min_lr, "decay_steps": length, "decay": decay}
        for warmup in (0, 7)
        for min_lr in (0.0, 3e-5)
        for length, decay in ((None, "linear"), (12, "cosine"), (20, "minus_sqrt"), (1, "exponential"), (43, "exponential"))
    ]
)


def rates(**fields: Any) -> list[float]:
    training = Training(global_batch_size=1, seq_length=1, lr=1.0, **fields)
    return [learning_rate(training, step) for step in range(training.steps)]


def ours(plan: Plan) -> list[float]:
    return [learning_rate(plan.training, step) for step in range(plan.training.steps)]


def test_warmup_is_linear_from_nothing_and_reaches_the_rate() -> None:
    assert rates(warmup=4, steps=6, schedule="constant") == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]


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
    assert rates(warmup=10, steps=2) == [0.0, 0.1]
    assert rates(warmup=2, steps=2) == [0.0, 0.5]


@pytest.mark.parametrize("fields", SCHEDULES, ids=str)
def test_every_step_has_megatrons_rate(fields: dict[str, Any]) -> None:
    """Its scheduler as training.py makes and steps it: in samples, once after each step."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    plan = make_plan(lr=LR, **fields)
    training, batch = plan.training, plan.global_batch_size
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    scheduler = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=training.lr, min_lr=training.min_lr, lr_warmup_steps=training.warmup * batch,
        lr_decay_steps=training.steps * batch, lr_decay_style=STYLES.get(training.schedule, training.schedule), start_wd=0.0, end_wd=0.0,
        wd_incr_steps=training.steps * batch, wd_incr_style="constant", wsd_decay_steps=training.decay_length * batch,
        lr_wsd_decay_style=training.decay,
    )  # fmt: skip
    found = []
    for _ in range(training.steps):
        found.append(optimizer.param_groups[0]["lr"])
        scheduler.step(increment=batch)
    assert found == pytest.approx(ours(plan), rel=1e-9, abs=1e-9 * LR)


@pytest.mark.parametrize("fields", SCHEDULES, ids=str)
def test_every_step_has_the_rate_of_trainer_yaml(fields: dict[str, Any]) -> None:
    """By transformers' own schedule, for all that transformers has."""
    from transformers import get_scheduler

    plan = make_plan(engine="deepspeed", lr=LR, **fields)
    files = {file.path: file.content for file in ENGINES["deepspeed"].translate(plan).files}
    said = yaml.safe_load(files["trainer.yaml"])
    ends_above_0 = fields["schedule"] not in ("constant", "cosine") and 0 < fields["min_lr"] < LR
    if ends_above_0 or fields.get("decay") == "exponential":
        assert "lr_scheduler_type" not in said, "the program has the plan's"
        return
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=said["learning_rate"])
    schedule = get_scheduler(said["lr_scheduler_type"], optimizer, said["warmup_steps"], said["max_steps"], said["lr_scheduler_kwargs"])
    found = []
    for _ in range(plan.training.steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert found == pytest.approx(ours(plan), rel=1e-9, abs=1e-9 * LR)
