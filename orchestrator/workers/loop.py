"""The training loop of our own trainers: the least that runs a plan exactly. It knows an engine as a `Trainer`."""

from __future__ import annotations

import argparse
import gc
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np
import torch

from orchestrator.errors import InputError
from orchestrator.model.schedule import learning_rate
from orchestrator.plan import Plan
from orchestrator.workers import checkpoint, metrics, preflight, runs, unpickling
from orchestrator.workers.batch import Batch
from orchestrator.workers.groups import Groups
from orchestrator.workers.samples import Samples
from orchestrator.workers.saving import Saves, Snapshot, limit_s
from orchestrator.workers.watchdog import NoWatchdog, Watchdog


class Trainer(Protocol):
    """One rank's share of the model under an engine."""

    plan: Plan
    device: torch.device
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

    def snapshot(self, folder: Path, step: int) -> Snapshot:
        """A checkpoint, of which what is left to write has copies of the state: it may be written beside the training."""
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
    plan = trainer.plan
    total, steps = 0.0, runs.eval_steps(plan, samples)
    for step in range(steps):
        microbatches = read(trainer, samples, step)
        loss, _, _ = metrics.agree(trainer.evaluate(microbatches), trainer.groups, trainer.device, stop=False)
        total += loss
    return total / steps


def read(trainer: Trainer, samples: Samples, step: int) -> list[Batch]:
    """The micro-batches of a step on this rank."""
    return [to_device(arrays, trainer.device) for arrays in samples.microbatches(step, trainer.groups.rank("dp"))]


def train(
    trainer: Trainer,
    samples: Samples,
    out: Path,
    first_step: int = 0,
    watchdog: Watchdog | NoWatchdog | None = None,
    valid: Samples | None = None,
) -> list[float]:
    """Train from `first_step` (steps done) to plan.training.steps; the losses. Raises NonFiniteLossError. `valid`: what is evaluated on,
    every plan.run.eval_every steps and at the end; the step's row then has a "valid_loss".

    SIGUSR1 on any rank (Slurm's warning before the time limit) makes all ranks save after the step and return.
    """
    plan, device = trainer.plan, trainer.device
    training, save_every = plan.training, plan.run.save_every
    warned: list[int] = []
    signal.signal(signal.SIGUSR1, lambda signum, frame: warned.append(signum))
    eval_every = plan.run.eval_every if valid is not None else 0
    trace: Any = None
    if plan.run.trace_routing:
        if not hasattr(trainer, "trace_routing"):
            raise InputError("train.trace_routing", "true", f"engine={plan.engine} has no routers of megatron-core")
        trace = trainer.trace_routing(out, first_step)
    losses: list[float] = []
    saves, rows = Saves(plan, out), metrics.Rows(plan, device, out, watchdog or NoWatchdog())
    stop = False
    for step in range(first_step, training.steps):
        rows.begin(step)
        microbatches = read(trainer, samples, step)
        rows.phase(f"step {step + 1}: forward and backward")
        rows.timers.phase("passes")
        local_loss = trainer.forward_backward(microbatches)
        rows.phase(f"step {step + 1}: update")
        rows.timers.phase("update")
        lr = learning_rate(training, step)
        grad_norm = trainer.update(lr)
        rows.agree()
        loss, peak, stop = metrics.agree(local_loss, trainer.groups, device, bool(warned))
        done = step + 1
        rows.row = metrics.row(plan, done, loss, grad_norm, lr, rows.end(done), peak)
        losses.append(loss)
        if trace is not None:
            trace.write(done)
        saves.poll()
        if valid is not None and eval_every and (done % eval_every == 0 or done == training.steps):
            rows.phase(f"step {done}: evaluation", plan.run.step_timeout_s * plan.run.eval_steps)
            rows.row["valid_loss"] = metrics.finite(evaluate(trainer, valid))
        rows.write()
        if (save_every and (done % save_every == 0 or done == training.steps)) or stop:
            rows.phase(f"step {done}: checkpoint", limit_s(plan))
            saves.save(trainer, done)
        if stop:
            break
    rows.phase("the last checkpoint", limit_s(plan))
    saves.wait()
    if not stop and plan.run.export_to:
        rows.phase("export", limit_s(plan))
        trainer.export(Path(plan.run.export_to))
    rows.close()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a reminder would end Python in its last moments, when it has no handlers any more
    return losses


def main(build: Callable[[Plan, dict[str, Any], torch.device], Trainer]) -> NoReturn:
    """The main program of a worker: builds, resumes and trains as one rank of the job; ends the process."""
    parser = argparse.ArgumentParser(description="One rank of a training job; started by torchrun.")
    parser.add_argument("--plan", type=Path, required=True, help="plan.json; engine.json lies beside it")
    parser.add_argument("--out", type=Path, required=True, help="where metrics.jsonl and checkpoints/ go")
    parser.add_argument("--continue", action="store_true", dest="continued", help="from the newest checkpoint in --out, if there is one")
    arguments = parser.parse_args()
    gc.freeze()  # what was imported stays: collections pass over it
    out = arguments.out

    def work(plan: Plan, engine: dict[str, Any], device: torch.device, watchdog: Watchdog) -> None:
        limit = plan.run.step_timeout_s
        watchdog.phase("building the model", runs.BUILD_S if limit else 0.0)
        trainer = build(plan, engine, device)
        watchdog.phase("preflight of the groups", preflight.TIMEOUT_S)
        runs.look_at_groups(plan, trainer.groups, device)
        watchdog.phase("reading data and checkpoint", runs.BUILD_S if limit else 0.0)
        samples, valid = runs.open_samples(plan, out / "data")
        saved = runs.saved_before(plan, out, arguments.continued)
        if saved is not None:
            with unpickling.refused(saved.folder):
                trainer.load(saved)
        train(trainer, samples, out, saved.step if saved is not None else 0, watchdog, valid)

    runs.as_rank(work, arguments.plan.parent, out)
