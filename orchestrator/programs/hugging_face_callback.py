"""The hooks that a run's files need in the Trainer's loop."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from orchestrator.programs.hugging_face_hooks import Run
from orchestrator.workers import loop, saving
from orchestrator.workers.step_timers import NoTimers, StepTimers


class RunCallback(TrainerCallback):
    """Writes a row of metrics.jsonl for every step, times two steps by cause, and stops where Slurm warns of the time limit."""

    def __init__(self, run: Run) -> None:
        self.run, self.plan, run.write_row = run, run.plan, self.write
        self.row: dict[str, Any] = {}
        """The row of the last step, as long as its evaluation may follow."""
        self.warned: list[int] = []
        self.begun = time.perf_counter()
        self.seconds = 0.0
        self.timers: StepTimers | NoTimers = NoTimers()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Opens metrics.jsonl at the step that the run goes on from."""
        signal.signal(signal.SIGUSR1, lambda signum, frame: self.warned.append(signum))
        self.metrics = loop.Metrics(Path(), state.global_step)
        if self.plan.run.step_timers:
            self.timers = StepTimers(self.plan, self.run.device, Path(), state.global_step, loop.peak_memory)
        trainer = self.run.trainer
        read, step = trainer.get_batch_samples, trainer.model_wrapped.step

        def reading(*words: Any, **more: Any) -> Any:
            """The Trainer reads a step's micro-batches before it tells that the step begins (trainer.py, _run_epoch)."""
            self.write()
            self.run.watchdog.phase(f"step {state.global_step + 1}")
            self.timers.begin(state.global_step)
            self.begun = time.perf_counter()
            return read(*words, **more)

        def updating(*words: Any, **more: Any) -> Any:
            """accelerate calls DeepSpeed's step once the last micro-batch has been backward (utils/deepspeed.py, backward)."""
            self.timers.phase("update")
            return step(*words, **more)

        trainer.get_batch_samples, trainer.model_wrapped.step = reading, updating

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The micro-batches are read."""
        self.run.trainer.states.set_generators()
        self.timers.phase("passes")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Agrees with the other ranks whether one was warned of the time limit."""
        loop.synchronise(self.run.device)
        self.timers.phase("agree")
        values = torch.tensor([len(self.warned), loop.peak_memory(self.run.device)], dtype=torch.float64, device=self.run.device)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        self.seconds = time.perf_counter() - self.begun
        self.timers.end(state.global_step - 1)
        warned, self.peak = values.tolist()
        self.run.saves.poll()
        last = state.global_step >= state.max_steps
        if warned and not last:
            self.run.stopped = control.should_training_stop = control.should_save = True
        if last and args.eval_strategy != "no":
            control.should_evaluate = True
        limit = max(saving.limit_s(self.plan), self.plan.run.step_timeout_s * self.plan.run.eval_steps)
        self.run.watchdog.phase(f"step {state.global_step}: evaluation and checkpoint", limit)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Keeps the row of a step. Raises NonFiniteLossError on every rank."""
        if "loss" not in logs or state.global_step == self.row.get("step"):
            return
        norm = logs.get("grad_norm")
        norm = None if norm is None else float(norm)
        self.row = loop.row(self.plan, state.global_step, logs["loss"], norm, logs["learning_rate"], self.seconds, self.peak)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Adds the loss of what was held out, and what compute_metrics= makes of it, to the step's row."""
        for name, value in metrics.items():
            if isinstance(value, float) and name.startswith("eval_") and not name.endswith(("_runtime", "_per_second")):
                self.row[f"valid_{name.removeprefix('eval_')}"] = loop.finite(value)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Closes metrics.jsonl; a reminder of the time limit would end Python in its last moments, when it has no handlers any more."""
        self.write()
        self.metrics.close()
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    def write(self) -> None:
        """Writes the row that is kept, if there is one."""
        row, self.row = self.row, {}
        if row:
            self.metrics.write(**row)
