"""The folder of a run: where it is, all that it holds before the start, written whole or not at all."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, get_args

import msgspec

from orchestrator import recipe
from orchestrator.cost.states import EIGHT_BIT_MOMENTS
from orchestrator.engines import ENGINES, tools
from orchestrator.engines.deepspeed.trainer_files import around
from orchestrator.engines.megatron.capabilities import NAME as MEGATRON
from orchestrator.errors import InputError, NoPlanError
from orchestrator.job import File, Job, Mount, all_or_none
from orchestrator.launch import render, schedulers
from orchestrator.model.families import describe_for
from orchestrator.model.freezing import trained_parameters
from orchestrator.plan import Plan, schema_text, to_json
from orchestrator.planning import Found, Planner
from orchestrator.recipe import Settings, resuming, sources
from orchestrator.rl.job import ProgramName
from orchestrator.units import format_seconds

if TYPE_CHECKING:
    from orchestrator.report.budget import Budget
    from orchestrator.report.failures import Failures

HELD: Final = ".held"
"""The file in a run's folder that is locked while a command has the folder, with the process and its host."""


def new_folder(settings: Settings, out_key: str | None = None) -> Path:
    """The folder to write to: absolute, new or empty, below a folder that can be written, and one that a container can mount. `out_key`:
    over the settings' own. Raises InputError; makes nothing."""
    asked = settings.out if out_key is None else out_key
    if asked is None:
        name = re.sub(r"[^A-Za-z0-9._-]+", "_", settings.recipe).strip(".") or "run"
        base = out = Path("runs").absolute() / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        for number in range(2, 1000):  # two runs within a second
            if not out.exists():
                break
            out = base.with_name(f"{base.name}-{number}")
        asked = str(out)
    folder = sources.new_folder("out", asked, HELD)
    if settings.container:
        render.check_mountable("out", str(folder))
    return folder


@contextmanager
def held(settings: Settings, choose: Callable[[Settings], Path] = new_folder) -> Iterator[Path]:
    """The run's folder, made at once and held until the end: no other run gets it meanwhile, by its own name or by the same `out=`. What
    ends without having written anything leaves nothing behind. `choose`: says which folder. Raises InputError."""
    while True:
        out = choose(settings)
        made = [folder for folder in (out, *out.parents) if not folder.exists()]
        try:
            out.mkdir(parents=True, exist_ok=settings.out is not None)
            break
        except FileExistsError:
            continue  # another run took the name meanwhile
        except OSError as error:
            raise InputError("out", settings.out or out, f"can't be made: {error.strerror or error}") from None
    path = out / HELD
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise InputError("out", settings.out or out, f"is taken by another run ({file.read().strip()}); name a new folder") from None
        except OSError:
            pass  # a file system without locks: what the folder was made for is protection enough
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        try:
            yield out
        finally:
            path.unlink(missing_ok=True)
            for folder in made:
                if folder.is_dir() and not any(folder.iterdir()):
                    folder.rmdir()


def all_files(settings: Settings, found: Found, job: Job, out: Path, python: str | None) -> list[File]:
    """Everything that the folder holds before the start."""
    from orchestrator.report.candidates import candidates_csv

    saved = str(out / "plan.json") if settings.plan else None
    files = [
        File(path="config.yaml", content=recipe.resolved_yaml(settings, saved)),
        File(path="plan.json", content=to_json(found.plan)),
        File(path="plan.schema.json", content=schema_text()),
    ]
    if found.outcomes:
        files.append(File(path="candidates.csv", content=candidates_csv(found.outcomes, found.plan)))
    files += job.files
    options = render.with_whole_nodes(job, settings.slurm, settings.cluster.gpus_per_node)
    if found.plan.predicted is not None:
        rate = settings.storage_bandwidth or render.WRITE_PER_NODE * found.plan.cluster.num_nodes
        options = render.with_warning(options, found.plan.predicted.step_time_s, saved_bytes(found.plan) / rate)
    options = msgspec.structs.replace(options, python=options.python or python, planner=sys.executable)

    def written_for(name: str) -> Iterable[File]:
        if name in tools.NAMES:
            return tool_files(settings, found, name)
        if job.unstartable:
            ways = f"entry=PROGRAM starts one that trains it, and write= with one of {', '.join(tools.NAMES)} says the plan to another"
            raise InputError("write", name, f"is of a job that starts the training: {job.unstartable}; {ways} program")
        return schedulers.files((name,), job, str(out.absolute()), options, settings.container, settings.cluster.gpu.name)

    written = all_or_none(settings.write, written_for)
    taken = {file.path for file in written}
    starting = [] if job.unstartable else render.files(job, slurm=options, container=settings.container)
    files += [file for file in starting if file.path not in taken]
    return files + written


def with_outside(job: Job, plan: Plan, out: Path) -> Job:
    """The job with what its ranks read and write outside the folder `out`: data, tokenizer, weights, a checkpoint, modules, the export. Of
    folders also where their links lead, as in Hugging Face's cache."""
    run, checkpoint = plan.run, resuming.checkpoint_of(plan.run.resume)
    found: dict[str, Mount] = {}

    def add(path: str, *, read_only: bool = True) -> None:
        path = os.path.abspath(path)
        if Path(path).exists() and not Path(path).is_relative_to(out):
            found.setdefault(path, Mount(path=path, is_file=Path(path).is_file(), read_only=read_only))

    if run.export_to:
        parents = Path(os.path.abspath(run.export_to)).parents
        add(str(next(parent for parent in parents if parent.exists())), read_only=False)
    for path in filter(None, (run.data, run.valid, *(source.path for source in run.blend))):
        prefix = path.removesuffix(".bin").removesuffix(".idx")
        pair = [f"{prefix}{suffix}" for suffix in (".bin", ".idx")]
        for each in pair if all(Path(part).is_file() for part in pair) else [path]:
            add(each)
    for path in filter(None, (run.tokenizer, run.init_from, str(checkpoint.run) if checkpoint else None, job.python_path)):
        add(path)
        links = [each for each in Path(path).iterdir() if each.is_symlink()] if Path(path).is_dir() else []
        for link in links:
            add(str(link.parent / link.readlink().parent))
    for _, path in sources.elsewhere(run):
        parent = os.path.dirname(path)
        found.setdefault(parent, Mount(path=parent, is_file=False, read_only=True))
    return msgspec.structs.replace(job, outside=tuple(found[path] for path in sorted(found)))


def tool_files(settings: Settings, found: Found, name: str) -> list[File]:
    """The plan as files of the program of this name, or the fastest that one recompute setting can say where the plan's differ by stage.
    What can't be said is priced by a search that is held to what can. Raises InputError."""
    if (balance := found.plan.training.balance) != "step":
        raise InputError("write", name, f"deals packed samples to ranks by itself: data.balance={balance} is of this package's programs")
    if tools.is_around(found.plan, name):
        return [around(found.plan, name)]
    training = found.plan.training
    by_flags = training.task == "pretrain" and training.lora is None  # which Megatron-LM's own program can be told
    plan = (Planner(settings).for_program(found, by_flags=by_flags) if found.plan.engine == MEGATRON else None) or found.plan
    written = tools.written(plan, name)
    more = []
    if name in get_args(ProgramName) and plan.training.task == "pretrain":
        rl = f"python -m orchestrator plan task=rl recipe=... gpus=... write={name} out=FOLDER"
        more.append(f"Learning rate, schedule, steps and batch are of the recipe's pretraining; an update after rollouts: {rl}.")
    if plan != found.plan and plan.predicted is not None and found.plan.predicted is not None:
        ours, there = found.plan.predicted.step_time_s, plan.predicted.step_time_s
        more.append(f"plan.json's plan, {format_seconds(ours)} a step, can't be said in flags: this is the fastest that can, "
                    f"{format_seconds(there)}.")  # fmt: skip
    if written.pins and plan.predicted is not None:
        pins = msgspec.structs.replace(settings.pins, **written.pins)
        named = " ".join(f"pin.{pin}={str(value).lower()}" for pin, value in written.pins.items())
        with suppress(NoPlanError, InputError):
            there = Planner(msgspec.structs.replace(settings, pins=pins)).fastest().plan.prediction.step_time_s
            off = 100 * (there / plan.predicted.step_time_s - 1)
            more.append(f"{named} plans without: {format_seconds(there)} a step, {off:+.1f}%.")
    return tools.files(plan, written, more)


def stated_failures(settings: Settings) -> Failures | None:
    """What the user states of the cluster's failures; None: nothing."""
    from orchestrator.report.failures import Failures

    if settings.mtbf_hours is None or settings.storage_bandwidth is None:
        return None
    return Failures(mtbf_hours=settings.mtbf_hours, storage_bandwidth=settings.storage_bandwidth, restart_s=settings.restart_s)


def training_budget(settings: Settings, plan: Plan) -> Budget:
    """What the training takes under these settings, or what is left of it, with failures where the user states them."""
    from orchestrator.report.budget import budget
    from orchestrator.report.failures import goodput_of, steps_between_saves

    of, stated = budget(plan, settings.price_per_gpu_hour, settings.steps_done), stated_failures(settings)
    if stated is None:
        return of
    nbytes = saved_bytes(plan)
    every = steps_between_saves(plan, nbytes, stated)
    return msgspec.structs.replace(of, goodput=goodput_of(plan, nbytes, stated, every), save_every=every)


def saved_bytes(plan: Plan) -> float:
    """Bytes that a checkpoint of the plan holds at most. The frozen weights beside adapters are in none (workers/deepspeed_states.py)."""
    from orchestrator.report.failures import checkpoint_bytes

    training, model = plan.training, describe_for(plan.model, plan.training)
    traits = ENGINES[plan.engine].traits(plan.cluster.software)
    trained = trained_parameters(model, training, modules=traits.layers == "hugging_face")
    states = traits.state_bytes(training.precision, plan.zero_stage)
    if training.optimizer != "adamw":
        kept = {"sgd": 0.0, "muon": states.moments}.get(training.optimizer, EIGHT_BIT_MOMENTS)
        states = msgspec.structs.replace(states, moments=kept)
    frozen = 0 if training.lora is not None else model.parameters - trained
    matrices = sum(run.count * run.layer.parameters for run in model.runs if run.layer.recomputable) if training.optimizer == "muon" else 0
    return checkpoint_bytes(trained, states) + frozen * states.weight - matrices * states.moments / 2  # Muon's have momentum alone


def write_folder(out: Path, files: Sequence[File]) -> None:
    """All files or none: written beside `out` (inside it where it exists already) and moved when complete. Raises InputError."""
    made = [parent for parent in out.parents if not parent.exists()]
    existed = out.exists()
    temporary: Path | None = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".writing-", dir=out if existed else out.parent))
        for file in files:
            file.write(temporary / file.path)
        if existed:
            for path in sorted(temporary.iterdir()):
                path.rename(out / path.name)
            temporary.rmdir()
        else:
            temporary.chmod(0o755)
            temporary.rename(out)
    except BaseException as error:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        for parent in made:
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()
        if isinstance(error, OSError):
            raise InputError("out", out, f"can't be written: {error.strerror or error}") from None
        raise


def clear_folder(out: Path) -> None:
    """Take back what `write_folder` wrote: `out` was new or empty before."""
    shutil.rmtree(out, ignore_errors=True)
