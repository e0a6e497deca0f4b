"""Where checkpoints lie: OUT/checkpoints/step_000020 with the plan.json that wrote it, and latest.json, written last, which names the
newest whole one."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
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
    content = json.dumps({"step": step, "folder": folder.name, "layout": layout(plan)}, indent=1)
    (folder / MARKER).write_text(content)
    partial = folder.parent / (MARKER + ".tmp")
    partial.write_text(content)
    partial.replace(folder.parent / MARKER)
    prefix = folder.name.rstrip("0123456789")
    for old in superseded(folder.parent, step, plan.run.keep_last, plan.run.keep_every, prefix):
        (old / MARKER).unlink(missing_ok=True)  # first, so that what is removed by half is nobody's checkpoint
        shutil.rmtree(old, ignore_errors=True)


def superseded(folder: Path, step: int, keep_last: int, keep_every: int, prefix: str = STEP) -> list[Path]:
    """The checkpoints in `folder` before `step` that may go now that `step` is whole: all but the newest `keep_last` (that of `step` is one
    of them; 0: all are kept) and those of every `keep_every`-th step. What an interrupted save left goes in any case."""
    steps = {int(path.name.removeprefix(prefix)): path for path in folder.glob(f"{prefix}*") if path.name.removeprefix(prefix).isdigit()}
    before = sorted(number for number in steps if number < step)
    whole = [number for number in before if (steps[number] / MARKER).is_file()]
    gone = set(before) - set(whole)
    if keep_last:
        newest = whole[len(whole) - (keep_last - 1) :] if keep_last > 1 else []
        gone |= {number for number in whole if number not in newest and not (keep_every and number % keep_every == 0)}
    return [steps[number] for number in sorted(gone)]


def newest(out: Path) -> str:
    """The newest whole checkpoint of a run, in words."""
    try:
        return f"the newest whole checkpoint is {find(str(out)).folder}"
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


def require_as_written(saved: Saved) -> None:
    """Every file of the checkpoint has the digest that it was written with; each rank looks at some. One without digests, of an earlier
    version, is taken as it is. Raises InputError that names the first damaged file."""
    written = digests.listed(saved.folder)
    if written is not None:
        for damage in digests.damages(saved.folder, written, dist.get_rank(), dist.get_world_size()):
            raise InputError("train.resume", saved.folder, f"is damaged: {damage}; an older one beside it is resumed by its folder")
