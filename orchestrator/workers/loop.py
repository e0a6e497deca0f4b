"""The training loop of our own trainers: the least that runs a plan exactly. It knows an engine as a `Trainer`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np
import torch

from orchestrator.model.schedule import learning_rate
from orchestrator.plan import Plan
from orchestrator.workers import checkpoint, metrics, runs, unpickling
from orchestrator.workers.batch import Batch
from orchestrator.workers.groups import Groups
from orchestrator.workers.samples import Samples
from orchestrator.workers.saving import Saver, Saves, limit_s
from orchestrator.workers.watchdog import Watchdog


class Trainer(Saver, Protocol):
    """One rank's share of the model under an engine."""

    groups: Groups

    def forward_backward(self, batches: Sequence[Batch]) -> torch.Tensor | None:
        """Computes and reduces the gradients of the mean loss over the micro-batches; returns the loss over this data-parallel rank's
        micro-batches on the last pipeline stage, None elsewhere."""
        ...

    def update(self, lr: float) -> float | None:
        """Clips, steps and clears; returns the gradients' global norm before clipping."""
        ...

    def evaluate(self, batches: Sequence[Batch]) -> torch.Tensor | None:
        """The loss of these micro-batches, without gradients and dropout, where `forward_backward` gives one; leaves weights, gradients and
        generators as they are."""
        ...

    def export(self, folder: Path) -> None:
        """A Hugging Face checkpoint of the weights."""
        ...

    def load(self, saved: checkpoint.Saved) -> None: ...


def to_device(arrays: dict[str, np.ndarray], device: torch.device) -> Batch:
    return {name: torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True) for name, array in arrays.items()}


def evaluate(trainer: Trainer, samples: Samples) -> float:
    """The mean loss over the first global batches of the held-out samples: as many as there are, at most plan.run.eval_steps. The same ones
    every time, under every plan."""
    steps = runs.eval_steps(trainer.plan, samples)
    losses = (trainer.evaluate(read(trainer, samples, step)) for step in range(steps))
    return sum(metrics.agree(loss, trainer.groups, trainer.device, stop=False)[0] for loss in losses) / steps


def read(trainer: Trainer, samples: Samples, step: int) -> list[Batch]:
    """The micro-batches of a step on this rank."""
    return [to_device(arrays, trainer.device) for arrays in samples.microbatches(step, trainer.groups.rank("dp"))]


def train(
    trainer: Trainer,
    samples: Samples,
    out: Path,
    first_step: int = 0,
    watchdog: Watchdog | None = None,
    valid: Samples | None = None,
) -> list[float]:
    """Train from `first_step` (steps done) to plan.training.steps; the losses. Raises NonFiniteLossError. `valid`: what is evaluated on,
    every plan.run.eval_every steps and at the end; the step's row then has a "valid_loss".

    SIGUSR1 on any rank (Slurm's warning before the time limit) makes all ranks save after the step and return.
    """
    plan = trainer.plan
    training, save_every, eval_every = plan.training, plan.run.save_every, plan.run.eval_every
    trace: Any = None
    if plan.run.trace_routing:
        trace = trainer.trace_routing(out, first_step)  # type: ignore[attr-defined]  # megatron's alone, others refuse it
    losses: list[float] = []
    saves, rows = Saves(plan, out), metrics.Rows(plan, trainer.device, out, watchdog, warned=True)
    done = first_step
    for step in range(first_step, training.steps):
        done = step + 1
        rows.begin(step)
        microbatches = read(trainer, samples, step)
        rows.phase(f"step {step + 1}: forward and backward")
        rows.timers.phase("passes")
        local_loss = trainer.forward_backward(microbatches)
        rows.phase(f"step {step + 1}: update")
        rows.timers.phase("update")
        lr = learning_rate(training, step)
        grad_norm = trainer.update(lr)
        loss = rows.end(done, local_loss, trainer.groups)
        rows.keep(done, loss, grad_norm, lr)
        losses.append(loss)
        if trace is not None:
            trace.write(done)
        saves.poll()
        if valid is not None and eval_every and (done % eval_every == 0 or done == training.steps):
            rows.phase(f"step {done}: evaluation", plan.run.step_timeout_s * plan.run.eval_steps)
            rows.row["valid_loss"] = metrics.finite(evaluate(trainer, valid))
        rows.write()
        if (save_every and (done % save_every == 0 or done == training.steps)) or rows.stops:
            rows.phase(f"step {done}: checkpoint", limit_s(plan))
            saves.save(trainer, done)
        if rows.stops:
            break
    rows.phase("the last checkpoint", limit_s(plan))
    saves.wait()
    if (folder := rows.exports(done)) is not None:
        trainer.export(folder)
    rows.close()
    return losses


def main(build: Callable[[Plan, dict[str, Any], torch.device], Trainer]) -> NoReturn:
    """The main program of a worker: builds, resumes and trains as one rank of the job; ends the process."""
    parser = argparse.ArgumentParser(description="One rank of a training job; started by torchrun.")
    parser.add_argument("--plan", type=Path, required=True, help="plan.json; engine.json lies beside it")
    parser.add_argument("--out", type=Path, required=True, help="where metrics.jsonl and checkpoints/ go")
    parser.add_argument("--continue", action="store_true", dest="continued", help="from the newest checkpoint in --out, if there is one")
    arguments = parser.parse_args()
    out = arguments.out

    def work(plan: Plan, engine: dict[str, Any], device: torch.device, watchdog: Watchdog) -> None:
        trainer = build(plan, engine, device)
        runs.look_at_groups(plan, trainer.groups, device, watchdog)
        samples, valid = runs.open_samples(plan, out / "data")
        saved = runs.saved_before(plan, out, arguments.continued)
        if saved is not None:
            with unpickling.refused(saved.folder):
                trainer.load(saved)
        train(trainer, samples, out, saved.step if saved is not None else 0, watchdog, valid)

    runs.as_rank(work, arguments.plan.parent, out)
