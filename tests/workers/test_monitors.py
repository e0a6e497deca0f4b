"""TensorBoard's event files hold what metrics.jsonl holds; a monitor that can't be had ends nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from worker_plans import make_plan

from orchestrator.plan import RunSettings
from orchestrator.workers.monitors import Monitors

pytestmark = pytest.mark.engines

ROWS = [{"step": 1, "loss": 3.0, "lr": 0.1, "grad_norm": None}, {"step": 2, "loss": 2.5, "lr": 0.05, "grad_norm": 1.0, "valid_loss": 2.75}]


def test_event_files_hold_the_numbers_by_step(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monitors = Monitors(make_plan(), tmp_path)
    for row in ROWS:
        monitors.write(row)
    events = EventAccumulator(str(tmp_path / "tensorboard"))  # before the end: a training is watched while it runs
    events.Reload()
    found = {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}
    assert found["train/loss"] == [(1, 3.0), (2, 2.5)]
    assert found["train/grad_norm"] == [(2, 1.0)]
    assert found["valid/loss"] == [(2, 2.75)]
    assert "train/lr" in found
    monitors.close()


def test_without_its_package_a_monitor_is_said_to_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    monitors = Monitors(make_plan(run=RunSettings(wandb={"project": "p"})), tmp_path)
    monitors.write(ROWS[0])
    monitors.close()
    said = capsys.readouterr().err
    assert "monitors: no tensorboard/ is written" in said
    assert "monitors: no Weights & Biases" in said


def test_weights_and_biases_is_left_alone_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert Monitors(make_plan(), tmp_path).wandb is None
