"""What watches a training beside metrics.jsonl: TensorBoard's event files, and Weights & Biases where asked. Rank 0 alone writes.

A monitor that can't be had is said once in the log; the training goes on.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from orchestrator.plan import Plan

TENSORBOARD = "tensorboard"
"""The folder of the event files, in the run's."""
LOGIN_S = 10.0
GROUPS = {"loss": "train", "grad_norm": "train", "lr": "train", "valid_loss": "valid"}
"""The page of TensorBoard that a number is shown on; "speed" for all others."""


def tag(name: str) -> str:
    """The name of a number of metrics.jsonl on a board, with its group.

    >>> tag("loss"), tag("valid_loss"), tag("step_time_s")
    ('train/loss', 'valid/loss', 'speed/step_time_s')
    """
    return f"{GROUPS.get(name, 'speed')}/{name.removeprefix('valid_')}"


class Monitors:
    """Takes the rows of metrics.jsonl; `plan` and `out` say where they go."""

    def __init__(self, plan: Plan, out: Path) -> None:
        self.board = self._tensorboard(out)
        self.wandb = self._wandb(plan, out) if plan.run.wandb else None

    @staticmethod
    def _tensorboard(out: Path) -> Any:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            print(f"monitors: no {TENSORBOARD}/ is written: {error} (pip install tensorboard)", file=sys.stderr, flush=True)
            return None
        return SummaryWriter(str(out / TENSORBOARD))

    @staticmethod
    def _wandb(plan: Plan, out: Path) -> Any:
        """A run of Weights & Biases. Not logged in, offline or not installed: none, with the reason."""
        try:
            import wandb

            # A question for a key is given up: nobody answers in a job.
            settings = wandb.Settings(silent=True, login_timeout=LOGIN_S)
            return wandb.init(dir=str(out), settings=settings, config={"plan": str(out / "plan.json")}, **plan.run.wandb)
        except Exception as error:  # a monitor is no reason to end a training
            hint = "wandb login, WANDB_API_KEY, or WANDB_MODE=offline"
            print(f"monitors: no Weights & Biases: {type(error).__name__}: {error} ({hint})", file=sys.stderr, flush=True)
            return None

    def write(self, row: dict[str, Any]) -> None:
        """Writes the numbers of one row at its step."""
        numbers = {tag(name): value for name, value in row.items() if name != "step" and isinstance(value, int | float)}
        if self.board is not None:
            for name, value in numbers.items():
                self.board.add_scalar(name, value, row["step"])
            self.board.flush()
        if self.wandb is not None:
            self.wandb.log(numbers, step=row["step"])

    def close(self) -> None:
        if self.board is not None:
            self.board.close()
        if self.wandb is not None:
            self.wandb.finish()
