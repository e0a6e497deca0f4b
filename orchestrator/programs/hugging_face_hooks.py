"""Gives a run of transformers' Trainer what every run has: checkpoints with marker and digests, resume, metrics and timers, the stop before
the time limit, preflight, watchdog, and the exit statuses of known failures."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from orchestrator.workers import deepspeed_states  # isort: skip  (before DeepSpeed)
import torch
from transformers import TrainerCallback
from transformers.trainer_callback import TrainerState

from orchestrator.plan import Plan
from orchestrator.workers import groups, runs, saving, unpickling
from orchestrator.workers.metrics import Rows, finite
from orchestrator.workers.runs import OUT
from orchestrator.workers.watchdog import Watchdog


def run(trainer: Callable[..., Any]) -> NoReturn:
    """Trains with the Trainer that this makes of a run and its samples, as one rank of the job; ends the process."""

    def train(*rank: Any) -> None:
        run = Run(*rank)
        runs.look_at_groups(run.plan, run.groups, run.device, rank[-1])
        run.train(trainer(run, *runs.planned_samples(run.plan)))

    runs.as_rank(train)


class Run(TrainerCallback):
    """One rank of the run: what its plan says beside the Trainer's own arguments. Writes a row of metrics.jsonl for every step, times two
    steps by cause, and stops where Slurm warns of the time limit."""

    def __init__(self, plan: Plan, engine: dict[str, Any], device: torch.device, watchdog: Watchdog | None) -> None:
        self.plan, self.engine, self.device = plan, engine, device
        self.rows, self.saves = Rows(plan, device, OUT, watchdog, warned=True), saving.Saves(plan, OUT)
        deepspeed_states.join(plan, device)
        self.groups, self.kind = groups.of_plan(plan), runs.model_kind(plan)
        self.saved = runs.saved_before(plan, OUT, "--continue" in sys.argv)

    def train(self, trainer: Any) -> None:
        """Trains from the first step or the checkpoint's, and exports. Raises NonFiniteLossError, CheckpointError."""
        if self.saved is None:
            trainer.train()
        else:
            with unpickling.refused(self.saved.folder), tempfile.TemporaryDirectory() as folder:
                state = TrainerState(global_step=self.saved.step, train_batch_size=self.plan.micro_batch_size)
                state.compute_steps(trainer.args, self.plan.training.steps)
                state.save_to_json(str(Path(folder, "trainer_state.json")))  # trainer.py, TRAINER_STATE_NAME
                trainer.train(resume_from_checkpoint=folder)
        self.saves.wait()
        if (to := self.rows.exports(trainer.state.global_step)) is not None:
            trainer.save_model(str(to))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The micro-batches are read."""
        self.rows.timers.phase("passes")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ends the run where a rank was warned of the time limit."""
        self.rows.end(state.global_step, None)
        self.saves.poll()
        last = state.global_step >= state.max_steps
        if self.rows.stops and not last:
            control.should_training_stop = control.should_save = True
        if last and args.eval_strategy != "no":
            control.should_evaluate = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Keeps the row of a step. Raises NonFiniteLossError on every rank."""
        if "loss" in logs and state.global_step != self.rows.row.get("step"):
            norm = None if logs.get("grad_norm") is None else float(logs["grad_norm"])
            self.rows.keep(state.global_step, logs["loss"], norm, logs["learning_rate"])

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Adds the loss of what was held out, and what compute_metrics= makes of it, to the step's row."""
        for name, value in metrics.items():
            if isinstance(value, float) and name.startswith("eval_") and not name.endswith(("_runtime", "_per_second")):
                self.rows.row[f"valid_{name.removeprefix('eval_')}"] = finite(value)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.rows.close()
