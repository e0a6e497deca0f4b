"""The training loop that all engines share: steps, metrics, checkpoints. It knows an engine as a `Trainer`."""

from __future__ import annotations

import argparse
import gc
import json
import math
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn, Protocol, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import Dataset

from orchestrator.errors import NO_ROOM, InputError, no_room
from orchestrator.plan import Plan, from_json
from orchestrator.workers import checkpoint, data, distributed, orphans, preflight, unpickling
from orchestrator.workers.batch import Batch
from orchestrator.workers.groups import REPLICAS, Groups
from orchestrator.workers.samples import Samples, TextSamples
from orchestrator.workers.saving import CheckpointError, Saves, Snapshot, limit_s
from orchestrator.workers.schedule import learning_rate
from orchestrator.workers.step_timers import NoTimers, StepTimers
from orchestrator.workers.watchdog import NoWatchdog, Watchdog

METRICS = "metrics.jsonl"
OUT = Path()
"""Ranks run in the run's folder."""

BUILD_S = 1800.0
"""Seconds that building the model, and reading data and a checkpoint, may last."""


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


class Trace(Protocol):
    """What looks on while steps are computed."""

    def write(self, step: int) -> None:
        """What it saw of the step, which is done. All ranks call this."""
        ...


@runtime_checkable
class HasExperts(Protocol):
    """A trainer whose routing can be traced."""

    def trace_routing(self, out: Path, first_step: int) -> Trace: ...


class NonFiniteLossError(Exception):
    """Raised where the loss or the gradient norm is NaN or infinite."""


STATUSES = {NonFiniteLossError: 3, CheckpointError: NO_ROOM, preflight.PreflightError: preflight.MISMATCH_STATUS}
"""Exit statuses of a rank by what is known to go wrong: loss or gradient norm is no number (to try again gives the same), its part of a
checkpoint can't be written, the nodes are otherwise than planned."""


def to_device(arrays: dict[str, np.ndarray], device: torch.device) -> Batch:
    return {name: torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True) for name, array in arrays.items()}


def peak_memory(device: torch.device) -> int:
    """Bytes of the allocator's peak on a GPU, or of the process' resident peak on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return host_peak()


def host_peak() -> int:
    """Bytes of host memory that this program has had at most. getrusage's, which on Linux keeps through exec what the process had that
    started it, only where the kernel doesn't say."""
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.is_file() else ():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def agree(loss: torch.Tensor | None, groups: Groups, device: torch.device, stop: bool) -> tuple[float, int, bool]:
    """(loss of the global batch, largest peak memory, whether a rank wants to stop), the same on every rank, in one small all-reduce.

    Maxima: the loss is known on the last stage alone, and a NaN is told by a flag, since a maximum may hide it.
    """
    values = torch.tensor([-math.inf, 0.0, peak_memory(device), stop], dtype=torch.float64, device=device)
    if loss is not None:
        mean = loss.detach().double()
        groups.mean(REPLICAS, mean)
        finite = torch.isfinite(mean)
        values[0] = torch.where(finite, mean, values[0])
        values[1] = (~finite).double()
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    common = values.tolist()
    return (math.nan if common[1] else common[0]), int(common[2]), bool(common[3])


def norm_is_usable(grad_norm: float | None, precision: str) -> bool:
    """Whether training can go on from this gradient norm; DeepSpeed says -1 for one that is no number. In fp16 such steps are left out, and
    the loss scale is lowered: they belong to it."""
    return precision == "fp16" or grad_norm is None or (math.isfinite(grad_norm) and grad_norm >= 0)


def finite(value: float | None) -> float | None:
    """The value; None, which JSON has for it, where it is no number."""
    return value if value is not None and math.isfinite(value) else None


def row(plan: Plan, step: int, loss: float, grad_norm: float | None, lr: float, seconds: float, peak: float) -> dict[str, Any]:
    """The row of metrics.jsonl of a step. Raises NonFiniteLossError where the training can't go on from its loss and gradient norm."""
    training = plan.training
    if not (math.isfinite(loss) and norm_is_usable(grad_norm, training.precision)):
        numbers = f"loss {loss:g}, gradient norm {grad_norm}, lr {lr:g}"
        raise NonFiniteLossError(f"step {step}: {numbers}; nothing was saved in this step")
    tokens = plan.global_batch_size * (training.seq_length + (training.decoder_seq_length or 0))
    return {"step": step, "loss": loss, "grad_norm": finite(grad_norm), "lr": lr, "step_time_s": seconds,
            "tokens_per_s": tokens / seconds, "peak_memory_bytes": int(peak)}  # fmt: skip


class Rows:
    """OUT/metrics.jsonl, one flushed line a step, written by rank 0, and OUT/timers.jsonl. A run that resumes in its own folder keeps the
    lines before. The last step's row waits: its evaluation may follow."""

    def __init__(self, plan: Plan, device: torch.device, out: Path, watchdog: Watchdog | NoWatchdog) -> None:
        self.plan, self.device, self.out, self.watchdog = plan, device, out, watchdog
        self.begun: float | None = None
        self.file: IO[str] | None = None
        self.timers: StepTimers | NoTimers = NoTimers()
        self.row: dict[str, Any] = {}
        """The row that waits."""

    def phase(self, name: str, limit_s: float | None = None) -> None:
        """Tells the watchdog what begins, and how long it may last where the plan has a limit."""
        self.watchdog.phase(name, limit_s if limit_s is None or self.plan.run.step_timeout_s else 0.0)

    def begin(self, done: int) -> None:
        """A step begins, behind so many."""
        self.write()
        if self.begun is None:
            self._open(done)
        self.timers.begin(done)
        self.phase(f"step {done + 1}")
        self.begun = time.perf_counter()

    def _open(self, done: int) -> None:
        if dist.get_rank() == 0:
            path = self.out / METRICS
            lines = path.read_text().splitlines() if path.exists() else []
            path.write_text("".join(line + "\n" for line in lines if json.loads(line)["step"] <= done))
            self.file = path.open("a")
        if self.plan.run.step_timers:
            self.timers = StepTimers(self.plan, self.device, self.out, done, peak_memory)

    def agree(self) -> None:
        """This rank's update is done; the ranks agree on the step's numbers."""
        distributed.synchronise(self.device)
        self.timers.phase("agree")

    def end(self, done: int) -> float:
        """A step, by which so many are done, has ended: its seconds. What follows may last as long as an evaluation and a checkpoint."""
        seconds, run = time.perf_counter() - (self.begun or 0.0), self.plan.run
        self.timers.end(done - 1)
        evaluation = run.step_timeout_s * (run.eval_steps if run.eval_every else 0)
        self.phase(f"step {done}: evaluation and checkpoint", limit_s(self.plan) + evaluation)
        return seconds

    def write(self) -> None:
        """Writes the row that waits, if there is one."""
        row, self.row = self.row, {}
        if row and self.file is not None:
            self.file.write(json.dumps(row) + "\n")
            self.file.flush()

    def close(self) -> None:
        """Writes the row that waits and closes metrics.jsonl."""
        self.write()
        if self.file is not None:
            self.file.close()


def evaluate(trainer: Trainer, samples: Samples) -> float:
    """The mean loss over the first global batches of the held-out samples: as many as there are, at most plan.run.eval_steps. The same ones
    every time, under every plan."""
    plan = trainer.plan
    total, steps = 0.0, eval_steps(plan, samples)
    for step in range(steps):
        microbatches = read(trainer, samples, step)
        loss, _, _ = agree(trainer.evaluate(microbatches), trainer.groups, trainer.device, stop=False)
        total += loss
    return total / steps


def eval_steps(plan: Plan, samples: Samples) -> int:
    """How many global batches are evaluated on: as many as there are, at most plan.run.eval_steps."""
    return min(plan.run.eval_steps, max(1, samples.num_samples // plan.global_batch_size))


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
    if sys.platform != "win32":
        signal.signal(signal.SIGUSR1, lambda signum, frame: warned.append(signum))
    eval_every = plan.run.eval_every if valid is not None else 0
    trace: Trace | None = None
    if plan.run.trace_routing:
        if not isinstance(trainer, HasExperts):
            raise InputError("train.trace_routing", "true", f"engine={plan.engine} has no routers of megatron-core")
        trace = trainer.trace_routing(out, first_step)
    losses: list[float] = []
    saves, rows = Saves(plan, out), Rows(plan, device, out, watchdog or NoWatchdog())
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
        loss, peak, stop = agree(local_loss, trainer.groups, device, bool(warned))
        done = step + 1
        rows.row = row(plan, done, loss, grad_norm, lr, rows.end(done), peak)
        losses.append(loss)
        if trace is not None:
            trace.write(done)
        saves.poll()
        if valid is not None and eval_every and (done % eval_every == 0 or done == training.steps):
            rows.phase(f"step {done}: evaluation", plan.run.step_timeout_s * plan.run.eval_steps)
            rows.row["valid_loss"] = finite(evaluate(trainer, valid))
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
    if sys.platform != "win32":
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
        watchdog.phase("building the model", BUILD_S if limit else 0.0)
        trainer = build(plan, engine, device)
        watchdog.phase("preflight of the groups", preflight.TIMEOUT_S)
        look_at_groups(plan, trainer.groups, device)
        watchdog.phase("reading data and checkpoint", BUILD_S if limit else 0.0)
        samples, valid = open_samples(plan, out / "data")
        saved = saved_before(plan, out, arguments.continued)
        if saved is not None:
            with unpickling.refused(saved.folder):
                trainer.load(saved)
        train(trainer, samples, out, saved.step if saved is not None else 0, watchdog, valid)

    as_rank(work, arguments.plan.parent, out)


def saved_before(plan: Plan, out: Path, continued: bool) -> checkpoint.Saved | None:
    """The checkpoint to go on from, whose files are as they were written: with `continued` this run's newest whole one if it has any, else
    train.resume's. All ranks call this. Raises InputError."""
    if continued and (out / checkpoint.FOLDER / checkpoint.MARKER).exists():
        return checkpoint.going_on(out)
    if not plan.run.resume:
        return None
    saved = checkpoint.find(plan.run.resume)
    if saved.layout["engine"] != plan.engine:
        raise InputError("train.resume", saved.folder, f"was written by engine={saved.layout['engine']}, which alone continues it")
    checkpoint.require_as_written(saved)
    return saved


def look_at_groups(plan: Plan, groups: Groups, device: torch.device) -> None:
    """Preflight of the process groups; rank 0 prints what is slower than planned. All ranks call this. Raises PreflightError."""
    for line in preflight.bandwidth_report(plan, preflight.check_groups(groups.several(), device)):
        if dist.get_rank() == 0:
            print(f"preflight: {line}", flush=True)


def read_plan(folder: Path = OUT) -> Plan:
    """The plan of a run, or of a checkpoint."""
    path = folder / checkpoint.PLAN
    return from_json(path.read_bytes(), str(path))


def as_rank(work: Callable[[Plan, dict[str, Any], torch.device, Watchdog], None], folder: Path = OUT, out: Path = OUT) -> NoReturn:
    """Calls `work` with plan and engine.json (empty where there is none: our worker has none for what it can't train), device and watchdog
    as one rank of the job that torchrun or srun describes, after preflight of the node; ends the process. What is known to go wrong ends it
    with one line and its own status, all else under torch's error recorder, so that torchrun knows the first failure."""

    def program() -> None:
        distributed.quiet()
        distributed.end_at_once_on_signals()
        orphans.end_with_launcher()
        plan, engine = read_plan(folder), read_engine(folder) if (folder / "engine.json").exists() else {}

        def before(store: dist.Store, rank: int, world: int) -> None:
            places = preflight.check_nodes(plan, out, store, rank, world, engine.get("requires", {}))
            if rank == 0:
                print(places, flush=True)

        try:
            job = distributed.join(plan, before)
            with Watchdog.beside(job.store, job.rank, job.world, out, plan.run.step_timeout_s) as watchdog:
                work(plan, engine, job.device, watchdog)
            job.leave()
        except (*STATUSES,) as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            sys.exit(STATUSES[type(error)])
        except OSError as error:
            if not no_room(error):
                raise
            print(f"DiskFullError: nothing more can be written to {error.filename or out}: {error.strerror}", file=sys.stderr, flush=True)
            sys.exit(NO_ROOM)

    try:
        record(program)()
    except SystemExit as end:
        distributed.leave(end.code if isinstance(end.code, int) else int(end.code is not None))
    except BaseException:
        traceback.print_exc()
        distributed.leave(1)
    distributed.leave(0)


def open_samples(plan: Plan, cache: Path) -> tuple[Samples, Samples | None]:
    """The samples of a plan, to train on and to evaluate on or None. All ranks call this; `cache`: a folder for what is made of data."""
    here: dict[str, Any] = {"build": distributed.local_rank_is_first(), "wait": dist.barrier}
    if plan.training.task == "sft":
        from orchestrator.workers import sft

        train, held_out = sft.opened(plan, cache, **here)
        if dist.get_rank() == 0:
            print(train.said(), flush=True)
        return train, held_out
    kind = TextSamples
    if plan.model.traced is not None:
        from orchestrator.workers import traced_data

        if plan.model.traced.text_stack is None or (plan.run.data is None and not plan.run.blend):
            drawn = traced_data.DrawnSamples(plan, plan.model.traced)
            return drawn, traced_data.DrawnSamples(plan, plan.model.traced, traced_data.DRAWN) if plan.run.eval_every else None
        kind = traced_data.LanguageSamples
    corpus = data.open_corpus(plan, cache, **here)
    return kind(plan, corpus.train, corpus.specials), kind(plan, corpus.valid, corpus.specials) if corpus.valid else None


class PlannedSamples(Dataset[dict[str, Any]]):
    """`count` of a run's samples, by number; the first `again` of them over and over."""

    def __init__(self, plan: Plan, samples: Samples, count: int, again: int | None = None) -> None:
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
    train, valid = open_samples(plan, OUT / "data")
    training = PlannedSamples(plan, train, plan.training.steps * plan.global_batch_size)
    if valid is None or not plan.run.eval_every:
        return training, None
    return training, PlannedSamples(plan, valid, eval_steps(plan, valid) * plan.global_batch_size)


def read_engine(folder: Path) -> dict[str, Any]:
    """The content of engine.json. Raises InputError."""
    path = folder / "engine.json"
    try:
        engine: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError("plan", path, f"engine.json must lie beside plan.json: {error}") from None
    return engine
