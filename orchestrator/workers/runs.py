"""What each rank of a run has, whichever program trains: its place in the job, exit statuses, preflight, samples, and the checkpoint that
it goes on from."""

from __future__ import annotations

import gc
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import Dataset

from orchestrator.errors import NO_ROOM, InputError, no_room
from orchestrator.plan import Plan, from_json, trl
from orchestrator.workers import checkpoint, data, distributed, orphans, preflight
from orchestrator.workers.groups import Groups
from orchestrator.workers.metrics import NonFiniteLossError
from orchestrator.workers.samples import DRAWN, Drawn, Samples, TextSamples
from orchestrator.workers.saving import CheckpointError
from orchestrator.workers.watchdog import Watchdog

OUT = Path()
"""Ranks run in the run's folder."""

BUILD_S = 1800.0
"""Seconds that building the model, and reading data and a checkpoint, may last."""

STATUSES = {NonFiniteLossError: 3, CheckpointError: NO_ROOM, preflight.PreflightError: preflight.MISMATCH_STATUS}
"""Exit statuses of a rank by what is known to go wrong: loss or gradient norm is no number (to try again gives the same), its part of a
checkpoint can't be written, the nodes are otherwise than planned."""


def read_plan(folder: Path = OUT) -> Plan:
    """The plan of a run, or of a checkpoint."""
    path = folder / checkpoint.PLAN
    return from_json(path.read_bytes(), str(path))


def read_engine(folder: Path) -> dict[str, Any]:
    """The content of engine.json. Raises InputError."""
    path = folder / "engine.json"
    try:
        engine: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError("plan", path, f"engine.json must lie beside plan.json: {error}") from None
    return engine


def as_rank(
    work: Callable[[Plan, dict[str, Any], torch.device, Watchdog], None], folder: Path = OUT, out: Path = OUT, *, of_another: bool = False
) -> NoReturn:
    """Calls `work` with plan and engine.json (empty where there is none: our worker has none for what it can't train), device and watchdog
    as one rank of the job that torchrun or srun describes, after preflight of the node; ends the process. What is known to go wrong ends it
    with one line and its own status, all else under torch's error recorder, so that torchrun knows the first failure. `of_another`: before
    the rank becomes another's program, which may want other versions of packages, the same on all nodes."""

    def program() -> None:
        gc.freeze()  # what was imported stays: collections pass over it, of which DeepSpeed makes some for each engine
        distributed.quiet()
        distributed.end_at_once_on_signals()
        orphans.end_with_launcher()
        plan, engine = read_plan(folder), read_engine(folder) if (folder / "engine.json").exists() else {}

        def before(store: dist.Store, rank: int, world: int) -> None:
            needed = engine.get("requires", {})
            places = preflight.check_nodes(plan, out, store, rank, world, *(({}, needed) if of_another else (needed,)))
            if rank == 0:
                print(places, flush=True)

        try:
            job = distributed.join(plan, before, apart=of_another)
            with Watchdog.beside(job.store, job.rank, job.world, out, plan.run.step_timeout_s) as watchdog:
                building(plan, watchdog)
                work(plan, engine, job.device, watchdog)
            job.leave()
        except (*STATUSES,) as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            sys.exit(STATUSES[type(error)])
        except OSError as error:
            if not no_room(error):
                raise
            print(f"DiskFullError: {full_disk(error, out)}", file=sys.stderr, flush=True)
            sys.exit(NO_ROOM)

    try:
        record(program)()
    except SystemExit as end:
        distributed.leave(end.code if isinstance(end.code, int) else int(end.code is not None))
    except BaseException:
        traceback.print_exc()
        distributed.leave(1)
    distributed.leave(0)


def full_disk(error: OSError, out: Path) -> str:
    """What a rank says that has no room to write something else than a checkpoint."""
    return f"nothing more can be written to {error.filename or out}: {error.strerror}; {checkpoint.newest(out)}"


def building(plan: Plan, watchdog: Watchdog) -> None:
    watchdog.phase("building the model, reading data and checkpoint", BUILD_S if plan.run.step_timeout_s else 0.0)


def look_at_groups(plan: Plan, groups: Groups, device: torch.device, watchdog: Watchdog) -> None:
    """Preflight of the process groups; rank 0 prints what is slower than planned. All ranks call this. Raises PreflightError."""
    watchdog.phase("preflight of the groups", preflight.TIMEOUT_S)
    for line in preflight.bandwidth_report(plan, preflight.check_groups(groups.several(), device)):
        if dist.get_rank() == 0:
            print(f"preflight: {line}", flush=True)
    building(plan, watchdog)


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


def open_samples(plan: Plan, cache: Path) -> tuple[Samples, Samples | None]:
    """The samples of a plan, to train on and to evaluate on or None. All ranks call this; `cache`: a folder for what is made of data."""
    here: dict[str, Any] = {"build": distributed.local_rank_is_first(), "wait": dist.barrier}
    if plan.training.task == "sft":
        if plan.model.vision is None:
            from orchestrator.workers.sft import opened
        else:
            from orchestrator.workers.seeing_chats import opened  # imports DeepSpeed
        train, held_out = opened(plan, cache, **here)
        if dist.get_rank() == 0:
            print(train.said(), flush=True)
        return train, held_out
    drawn: type[Drawn] | None = None
    kind = TextSamples
    if plan.model.vision is not None:
        from orchestrator.workers import seeing

        drawn = seeing.ImageSamples
    elif plan.model.traced is not None:
        from orchestrator.workers import traced_data

        kind = traced_data.LanguageSamples
        if plan.model.traced.text_stack is None or (plan.run.data is None and not plan.run.blend):
            drawn = traced_data.DrawnSamples
    if drawn is not None:
        return drawn(plan), drawn(plan, DRAWN) if plan.run.eval_every else None
    corpus = data.open_corpus(plan, cache, **here)
    return kind(plan, corpus.train, corpus.specials), kind(plan, corpus.valid, corpus.specials) if corpus.valid else None


def model_kind(plan: Plan) -> type[Any]:
    """What a plan's model is under DeepSpeed (workers/hf_model.py), or one of what others are: described by their own code, or that look at
    images."""
    if plan.model.vision is not None:
        from orchestrator.workers.seeing import SeeingModel

        return SeeingModel
    if plan.model.traced is not None:
        from orchestrator.workers.traced import DescribedModel

        return DescribedModel
    from orchestrator.workers.hf_model import HuggingFaceModel

    return HuggingFaceModel


def trains_by_trl(plan: Plan) -> bool:
    """Whether TRL's SFTTrainer trains this run's chats: it is asked for, and installed on every rank; rank 0 says so. All ranks call this.
    Raises InputError."""
    if trl.FLAG not in sys.argv:
        return False
    if why := trl.why_not_trl(plan):
        raise InputError("entry.args", trl.FLAG, why)
    found: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, trl.absent())
    absent = next(filter(None, found), None)
    if dist.get_rank() == 0:
        print(f"trained by {trl.who(absent)}", flush=True)
    return absent is None


def eval_steps(plan: Plan, samples: Samples) -> int:
    """How many global batches are evaluated on: as many as there are, at most plan.run.eval_steps."""
    return min(plan.run.eval_steps, max(1, samples.num_samples // plan.global_batch_size))


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


def planned_samples(plan: Plan, count: int | None = None, valid: int | None = None) -> tuple[PlannedSamples, PlannedSamples | None]:
    """What a run is trained on, `count` of them, and what is evaluated on or None, `valid`: those of one evaluation over and over. As many
    as the steps, and as one evaluation takes, where a loop asks for no number. Raises InputError."""
    training, held_out = open_samples(plan, OUT / "data")
    mine = PlannedSamples(plan, training, count or plan.training.steps * plan.global_batch_size)
    if held_out is None:
        return mine, None
    once = eval_steps(plan, held_out) * plan.global_batch_size
    return mine, PlannedSamples(plan, held_out, valid or once, once)
