"""Where checkpoints lie: OUT/checkpoints/step_000020 with the plan.json that wrote it, and latest.json, written last, which names the
newest whole one."""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch.distributed as dist

from orchestrator import digests
from orchestrator.errors import InputError
from orchestrator.plan import Plan, to_json

FOLDER = "checkpoints"
MARKER = "latest.json"
PLAN = "plan.json"
STEP = "step_"


@dataclass(frozen=True)
class Saved:
    """A whole checkpoint: its folder, the steps done, and the layout it was written in."""

    folder: Path
    step: int
    layout: dict[str, object]


def layout(plan: Plan) -> dict[str, object]:
    """What a checkpoint's files depend on."""
    return {
        "engine": plan.engine,
        "tp": plan.tp,
        "pp": plan.pp,
        "vpp": plan.vpp,
        "dp": plan.dp,
        "zero_stage": plan.zero_stage,
        "stages": [sum(span.count for span in stage.layers) for stage in plan.stages],
        **({"cp": plan.cp} if plan.cp > 1 else {}),
        **({"ep": plan.ep, "etp": plan.etp} if plan.model.experts else {}),
    }


def begin(out: Path, step: int) -> Path:
    """An empty folder for step `step`, made by rank 0. All ranks call this."""
    folder = out / FOLDER / f"{STEP}{step:06d}"
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    dist.barrier()
    return folder


def write_digests(folder: Path) -> None:
    """Writes the digests of what this rank wrote into the folder, beside it. Touches no other rank."""
    rank = dist.get_rank()
    found = digests.digests(folder, digests.written_by(folder, rank))
    partial = folder / f"partial-{digests.LISTING}.{rank:06d}"
    partial.write_text(json.dumps(found))
    partial.replace(folder / f"{digests.LISTING}.{rank:06d}")  # in one step: another rank may be waiting for it


def commit(folder: Path, step: int, plan: Plan) -> None:
    """Everything is written, and every rank's digests: put these together, move the marker to this checkpoint, in one rename, then remove
    what `plan.run` does not keep. All ranks call this."""
    dist.barrier()
    if dist.get_rank() == 0:
        complete(folder, step, plan)
    dist.barrier()


def parts(folder: Path) -> list[Path]:
    """The ranks' digests in a checkpoint that is still to be completed."""
    return sorted(folder.glob(f"{digests.LISTING}.*"))


def complete(folder: Path, step: int, plan: Plan) -> None:
    """Rank 0's part once a checkpoint, of our worker's or of an engine's own program, has all ranks' files and digests: these put together,
    the marker moved to it in one rename, and what `plan.run` does not keep removed."""
    (folder / PLAN).write_text(to_json(plan))
    found = digests.digests(folder, digests.written_by(folder, None))
    for part in parts(folder):
        found |= json.loads(part.read_text())
        part.unlink()
    (folder / digests.LISTING).write_text(json.dumps(found, indent=1))
    (folder / MARKER).write_text(json.dumps({"step": step, "folder": folder.name, "layout": layout(plan)}, indent=1))
    point_at(folder)
    prefix = folder.name.rstrip("0123456789")
    for old in superseded(folder.parent, step, plan.run.keep_last, plan.run.keep_every, prefix):
        (old / MARKER).unlink(missing_ok=True)  # first, so that what is removed by half is nobody's checkpoint
        shutil.rmtree(old, ignore_errors=True)


def point_at(folder: Path) -> None:
    """Moves the marker of a run to this checkpoint, in one rename."""
    partial = folder.parent / (MARKER + ".tmp")
    partial.write_text((folder / MARKER).read_text())
    partial.replace(folder.parent / MARKER)


def numbered(folder: Path, prefix: str = STEP) -> dict[int, Path]:
    """The checkpoints in a folder of them, whole or not, by their steps."""
    return {int(path.name.removeprefix(prefix)): path for path in folder.glob(f"{prefix}*") if path.name.removeprefix(prefix).isdigit()}


def superseded(folder: Path, step: int, keep_last: int, keep_every: int, prefix: str = STEP) -> list[Path]:
    """The checkpoints in `folder` before `step` that may go now that `step` is whole: all but the newest `keep_last` (that of `step` is one
    of them; 0: all are kept) and those of every `keep_every`-th step. What an interrupted save left goes in any case."""
    steps = numbered(folder, prefix)
    before = sorted(number for number in steps if number < step)
    whole = [number for number in before if (steps[number] / MARKER).is_file()]
    gone = set(before) - set(whole)
    if keep_last:
        newest = whole[len(whole) - (keep_last - 1) :] if keep_last > 1 else []
        gone |= {number for number in whole if number not in newest and not (keep_every and number % keep_every == 0)}
    return [steps[number] for number in sorted(gone)]


def newest(out: Path) -> str:
    """The newest whole checkpoint of a run, in words, and how to go on from it."""
    try:
        return f"the newest whole checkpoint is {find(str(out)).folder}: resume={shlex.quote(str(out.resolve()))} goes on from it"
    except InputError:
        return "this run has no whole checkpoint yet"


def find(resume: str) -> Saved:
    """The checkpoint that `train.resume` means: a run folder, its checkpoints folder, or one checkpoint. Raises InputError."""
    start = Path(resume)
    for folder in (start / FOLDER, start):
        marker = folder / MARKER
        if not marker.is_file():
            continue
        try:
            content = json.loads(marker.read_text())
            name, step, written = content["folder"], int(content["step"]), dict(content["layout"])
        except (ValueError, KeyError, TypeError) as error:
            raise InputError("train.resume", marker, f"is not a checkpoint's marker: {error}") from None
        where = folder if folder.name == name else folder / name
        if not where.is_dir():
            raise InputError("train.resume", resume, f"names {where}, which is not there")
        return Saved(where, step, written)
    raise InputError("train.resume", resume, f"holds no finished checkpoint ({FOLDER}/{MARKER})")


def damage(folder: Path) -> str | None:
    """What of a checkpoint is not as it was written, in words that name the file; None: nothing. Each rank looks at some of its files, and
    all get the same answer: all call this. One without digests, of an earlier version, is taken as it is."""
    found = None
    try:
        if (folder / MARKER).is_file():
            find(str(folder))
        written = digests.listed(folder) or {}
        found = next(digests.damages(folder, written, dist.get_rank(), dist.get_world_size()), None)
    except InputError as error:
        found = str(error)
    every = [found] * dist.get_world_size()
    dist.all_gather_object(every, found)
    return next((one for one in every if one is not None), None)


def require_as_written(saved: Saved) -> None:
    """Every file of the checkpoint has the digest that it was written with. All ranks call this. Raises InputError that names a damaged
    file."""
    if (found := damage(saved.folder)) is not None:
        raise InputError("train.resume", saved.folder, f"is damaged: {found}; an older one beside it is resumed by its folder")


def newest_whole(folder: Path, newest: int | None = None, prefix: str = STEP) -> Path:
    """The checkpoint from which a run goes on that nobody attends: the newest in its folder of them that is as it was written, of step
    `newest` at most. Newer ones are damaged: rank 0 says of each which file, and renames it to damaged_..., which no run takes, counts or
    removes. All ranks call this. Raises InputError where none is whole."""
    found = {step: path for step, path in numbered(folder, prefix).items() if newest is None or step <= newest}
    ordered = [path for step, path in sorted(found.items(), reverse=True) if step == newest or (path / MARKER).is_file()]
    paths = [ordered]
    dist.broadcast_object_list(paths)  # what rank 0 sees: another node may see less yet
    damaged: dict[Path, str] = {}
    for path in paths[0]:
        if (why := damage(path)) is None:
            break
        damaged[path] = why
    else:
        raise InputError("train.resume", folder, f"has no whole checkpoint: {'; '.join(damaged.values()) or 'none is there'}")
    if damaged and dist.get_rank() == 0:
        for old, why in damaged.items():
            aside = next(to for n in count(1) if not (to := old.with_name(f"damaged_{old.name}{f'_{n}' * (n > 1)}")).exists())
            old.rename(aside)
            print(f"DAMAGED CHECKPOINT {old.name}, skipped and kept as {aside}: {why}", flush=True)
        print(f"going on from {path.name}, the newest that is whole", flush=True)
        point_at(path)
    dist.barrier()
    return path


def going_on(out: Path) -> Saved:
    """The newest whole checkpoint of a run, as `newest_whole`."""
    try:
        newest = find(str(out)).step
    except InputError:  # the marker is damaged itself, or names one that is gone
        newest = None
    return find(str(newest_whole(out / FOLDER, newest)))
