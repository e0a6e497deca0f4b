"""Gives a run of transformers' Trainer what every run has: checkpoints with marker and digests, resume, metrics and timers, the stop before
the time limit, preflight, watchdog, and the exit statuses of known failures."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from orchestrator.workers import deepspeed_states  # isort: skip  (before DeepSpeed)
import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainingArguments
from transformers.integrations import is_tensorboard_available
from transformers.trainer_callback import TrainerState

from orchestrator.errors import InputError
from orchestrator.plan import Plan
from orchestrator.workers import checkpoint, groups, hf_model, runs, saving, unpickling
from orchestrator.workers.metrics import Rows, finite, peak_memory, row
from orchestrator.workers.runs import OUT
from orchestrator.workers.watchdog import NoWatchdog, Watchdog


def run(trainer: Callable[..., Any]) -> NoReturn:
    """Trains with the Trainer that this makes of a run and its samples, as one rank of the job; ends the process."""

    def train(*rank: Any) -> None:
        run = Run(*rank)
        runs.look_at_groups(run.plan, run.groups, run.device)
        run.rows.phase("building the model", runs.BUILD_S)
        run.train(trainer(run, *runs.planned_samples(run.plan)))

    runs.as_rank(train)


class Run(TrainerCallback):
    """One rank of the run: what its plan says beside the Trainer's own arguments. Writes a row of metrics.jsonl for every step, times two
    steps by cause, and stops where Slurm warns of the time limit."""

    def __init__(self, plan: Plan, engine: dict[str, Any], device: torch.device, watchdog: Watchdog | NoWatchdog) -> None:
        self.plan, self.engine, self.device, self.rows = plan, engine, device, Rows(plan, device, OUT, watchdog)
        if plan.run.trace_routing:
            raise InputError("train.trace_routing", "true", "engine=deepspeed has no routers of megatron-core")
        deepspeed_states.join(plan, device)
        self.groups = groups.of_plan(plan)
        self.saved, self.saves = runs.saved_before(plan, OUT, "--continue" in sys.argv), saving.Saves(plan, OUT)
        self.warned: list[int] = []
        self.stopped = False
        """Whether the run was asked to end before its last step."""
        self.kind = runs.model_kind(plan)

    def complete(self, arguments: TrainingArguments, *, evaluates: bool) -> None:
        """Sets what trainer.yaml says otherwise, for use by hand. `evaluates`: whether there are samples to evaluate on."""
        run, traced = self.plan.run, self.plan.model.traced
        arguments.output_dir = str(OUT / checkpoint.FOLDER)
        arguments.activation_checkpointing = arguments.gradient_checkpointing = False  # two names of what the model has already
        arguments.remove_unused_columns, arguments.logging_nan_inf_filter, arguments.disable_tqdm = False, False, True
        arguments.report_to = ["tensorboard"] * is_tensorboard_available() + ["wandb"] * bool(run.wandb)
        os.environ |= {f"WANDB_{name.upper()}": value for name, value in run.wandb.items()}
        os.environ["TENSORBOARD_LOGGING_DIR"] = str(OUT / "tensorboard")
        if self.plan.cp > 1:
            arguments.parallelism_config = hf_model.ulysses(self.plan, self.engine["model"]["attn_implementation"])
        if traced is not None:
            names = [feed.name for feed in traced.feeds]
            arguments.label_names = ["labels"] if "labels" in names else names[:1]  # by which the Trainer knows that there is a loss
        if evaluates:
            arguments.eval_strategy, arguments.eval_steps = "steps", run.eval_every
            arguments.per_device_eval_batch_size = self.plan.micro_batch_size

    def train(self, trainer: Any) -> None:
        """Trains from the first step or the checkpoint's, and exports. Raises NonFiniteLossError, CheckpointError."""
        self.trainer = trainer
        if self.saved is None:
            trainer.train()
        else:
            with unpickling.refused(self.saved.folder), tempfile.TemporaryDirectory() as folder:
                state = TrainerState(global_step=self.saved.step, train_batch_size=self.plan.micro_batch_size)
                state.compute_steps(trainer.args, self.plan.training.steps)
                state.save_to_json(str(Path(folder, "trainer_state.json")))  # trainer.py, TRAINER_STATE_NAME
                trainer.train(resume_from_checkpoint=folder)
        self.saves.wait()
        if self.plan.run.export_to and not self.stopped:
            self.rows.phase("export", saving.limit_s(self.plan))
            trainer.save_model(self.plan.run.export_to)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Looks on where the Trainer has no hooks: it reads a step's micro-batches before it tells that the step begins (trainer.py,
        _run_epoch), and accelerate calls DeepSpeed's step once the last of them has been backward (utils/deepspeed.py, backward)."""
        signal.signal(signal.SIGUSR1, lambda signum, frame: self.warned.append(signum))
        trainer = self.trainer
        read, step = trainer.get_batch_samples, trainer.model_wrapped.step

        def reading(*words: Any, **more: Any) -> Any:
            self.rows.begin(state.global_step)
            return read(*words, **more)

        def updating(*words: Any, **more: Any) -> Any:
            self.rows.timers.phase("update")
            return step(*words, **more)

        trainer.get_batch_samples, trainer.model_wrapped.step = reading, updating

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The micro-batches are read."""
        self.rows.timers.phase("passes")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Agrees with the other ranks whether one was warned of the time limit."""
        self.rows.agree()
        values = torch.tensor([len(self.warned), peak_memory(args.device)], dtype=torch.float64, device=args.device)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        self.seconds = self.rows.end(state.global_step)
        warned, self.peak = values.tolist()
        self.saves.poll()
        last = state.global_step >= state.max_steps
        if warned and not last:
            self.stopped = control.should_training_stop = control.should_save = True
        if last and args.eval_strategy != "no":
            control.should_evaluate = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Keeps the row of a step. Raises NonFiniteLossError on every rank."""
        if "loss" in logs and state.global_step != self.rows.row.get("step"):
            norm = None if logs.get("grad_norm") is None else float(logs["grad_norm"])
            self.rows.row = row(self.plan, state.global_step, logs["loss"], norm, logs["learning_rate"], self.seconds, self.peak)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Adds the loss of what was held out, and what compute_metrics= makes of it, to the step's row."""
        for name, value in metrics.items():
            if isinstance(value, float) and name.startswith("eval_") and not name.endswith(("_runtime", "_per_second")):
                self.rows.row[f"valid_{name.removeprefix('eval_')}"] = finite(value)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A reminder of the time limit would end Python in its last moments, when it has no handlers any more."""
        self.rows.close()
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
