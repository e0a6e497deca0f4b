"""What a run has under any engine's own training loop: its place among the ranks, its samples, metrics.jsonl and timers.jsonl, and the exit
statuses of known failures."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np
import torch
from torch.utils.data import Dataset

from orchestrator.plan import Plan, from_json
from orchestrator.workers import data, distributed, loop, saving
from orchestrator.workers.step_timers import NoTimers, StepTimers
from orchestrator.workers.watchdog import NoWatchdog, Watchdog

OUT: Final = Path()
"""Ranks run in the run's folder."""


def read_plan(folder: Path = OUT) -> Plan:
    """The plan of a run, or of a checkpoint."""
    path = folder / "plan.json"
    return from_json(path.read_bytes(), str(path))


def as_rank(train: Callable[[Plan, dict[str, Any], torch.device, Watchdog], None]) -> NoReturn:
    """Calls `train` with plan, engine.json, device and watchdog as one rank of the job; ends the process."""

    def program() -> None:
        plan = read_plan()
        engine = loop.read_engine(OUT) if (OUT / "engine.json").exists() else {}  # our worker has none for what it can't train

        def body(job: distributed.Job, watchdog: Watchdog) -> None:
            train(plan, engine, job.device, watchdog)

        loop.as_rank(plan, OUT, engine.get("requires", {}), body)

    loop.recorded(program)


class PlannedSamples(Dataset[dict[str, Any]]):
    """So many of a run's samples, by number; the first `again` of them over and over."""

    def __init__(self, plan: Plan, samples: data.Samples, count: int, again: int | None = None) -> None:
        self.plan, self.samples, self.count, self.again = plan, samples, count, again or count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = index % self.again
        scale = self.samples.scale(number // self.plan.global_batch_size)
        return self.samples.sample(number) | ({} if scale is None else {"loss_scale": np.float32(scale)})

    def collate(self, samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Samples as a micro-batch, with transformers' label for what is outside of the loss."""
        found = self.samples.stack(samples)
        if "loss_mask" in found:
            found["labels"] = np.where(found["loss_mask"] > 0, found["labels"], -100)
        return {name: torch.as_tensor(array) for name, array in found.items()}


def planned_samples(plan: Plan) -> tuple[PlannedSamples, PlannedSamples | None]:
    """What a run is trained on, and what is evaluated on or None: as much as one evaluation takes. Raises InputError."""
    train, valid = loop.open_samples(plan, OUT / "data")
    training = PlannedSamples(plan, train, plan.training.steps * plan.global_batch_size)
    if valid is None or not plan.run.eval_every:
        return training, None
    return training, PlannedSamples(plan, valid, loop.eval_steps(plan, valid) * plan.global_batch_size)


class Rows:
    """A run's metrics.jsonl, of which a step's row waits for its evaluation, and timers.jsonl."""

    def __init__(self, plan: Plan, device: torch.device, watchdog: Watchdog | NoWatchdog) -> None:
        self.plan, self.device, self.watchdog = plan, device, watchdog
        self.metrics: loop.Metrics | None = None
        self.timers: StepTimers | NoTimers = NoTimers()
        self.row: dict[str, Any] = {}
        """The row that waits."""

    def phase(self, name: str, limit_s: float | None = None) -> None:
        """Tells the watchdog what begins, and how long it may last where the plan has a limit."""
        self.watchdog.phase(name, limit_s if limit_s is None or self.plan.run.step_timeout_s else 0.0)

    def begin(self, done: int) -> None:
        """A step begins, behind so many."""
        self.write()
        if self.metrics is None:
            self.metrics = loop.Metrics(OUT, done)
            if self.plan.run.step_timers:
                self.timers = StepTimers(self.plan, self.device, OUT, done, loop.peak_memory)
        self.timers.begin(done)
        self.phase(f"step {done + 1}")
        self.begun = time.perf_counter()

    def agree(self) -> None:
        """This rank's update is done; the ranks agree on the step's numbers."""
        loop.synchronise(self.device)
        self.timers.phase("agree")

    def end(self, done: int) -> float:
        """A step, by which so many are done, has ended: its seconds. What follows may last as long as an evaluation and a checkpoint."""
        seconds, run = time.perf_counter() - self.begun, self.plan.run
        self.timers.end(done - 1)
        evaluation = run.step_timeout_s * (run.eval_steps if run.eval_every else 0)
        self.phase(f"step {done}: evaluation and checkpoint", saving.limit_s(self.plan) + evaluation)
        return seconds

    def write(self) -> None:
        """Writes the row that waits, if there is one."""
        row, self.row = self.row, {}
        if row and self.metrics is not None:
            self.metrics.write(**row)

    def close(self) -> None:
        """Ends metrics.jsonl."""
        self.write()
        if self.metrics is not None:
            self.metrics.close()
