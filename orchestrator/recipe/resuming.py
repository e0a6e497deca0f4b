"""train.resume=: the checkpoint that a run continues, and what the run would change of what it was trained with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from orchestrator import digests
from orchestrator.errors import InputError, NoPlanError, nearest
from orchestrator.key import shown
from orchestrator.model.lora import Lora
from orchestrator.model.schedule import learning_rate
from orchestrator.model.spec import Architecture
from orchestrator.model.training import Training
from orchestrator.plan import Plan, RunSettings, Source, from_json
from orchestrator.recipe.keys import FREE_WITH_PLAN, KEYS
from orchestrator.recipe.layers import Flat, flatten
from orchestrator.recipe.read import read_yaml
from orchestrator.recipe.saved import FREE
from orchestrator.recipe.sources import read_text
from orchestrator.recipe.weights import TO, differing, written
from orchestrator.strategy.pins import Pins
from orchestrator.units import GIB
from orchestrator.values import Value

RESUME: Final = "train.resume"
SHORT: Final = "resume"
CHANGE: Final = "train.change"
FOLDER: Final = "checkpoints"
MARKER: Final = "latest.json"
CONFIG: Final = "config.yaml"
PLAN: Final = "plan.json"
"""Files that workers/checkpoint.py and the command write."""

DATA_ORDER: Final = ("global_batch_size", "seq_length", "decoder_seq_length", "seed", "task", "packing", "balance")
"""Step k takes the samples from k * global_batch_size on of an order that these fix: another value repeats some and leaves others out."""
STATES: Final = ("optimizer", "lora", "freeze", "precision_aware_optimizer", "exp_avg_dtype", "exp_avg_sq_dtype")
"""What the optimizer's states in the checkpoint are of."""
RATE_JUMP: Final = 0.01
"""Share by which a continued run's learning rate may differ from the one that its former schedule would have there, unsaid."""
UNGROUPED: Final = {"seed": "seed", "lora": "lora", "task": "task", "packing": "data.packing", "balance": "data.balance"}
"""Keys of fields of the training that are not called train.*."""
MEASURED: Final = ("lengths",)
"""What is no setting: it follows from the data."""
MASTER_WEIGHTS: Final = {"fp32": "none", "bf16": "fp32", "fp8": "fp32", "nvfp4": "fp32", "fp16": "fp32 and a loss scale"}
"""What an optimizer keeps beside the weights, by precision: a checkpoint has it or not."""
MODEL_CHOICES: Final = ("hidden_dropout", "attention_dropout")
DATA_CHOICES: Final = {"data": {"data": "data", "blend": "data.blend", "split": "data.split"}, "tokenizer": {"tokenizer": "tokenizer"}}
"""Fields of RunSettings and their keys, by the name that train.change= takes."""


class Checkpoint(Value, frozen=True, kw_only=True):
    """A whole checkpoint: `folder` holds it, `run` is the folder of the run that wrote it after `step` steps. `plan`: what it was trained
    with; None where neither of the two folders says."""

    folder: Path
    run: Path
    step: int
    engine: str
    plan: Plan | None


def checkpoint_of(resume: str | None) -> Checkpoint | None:
    """What train.resume= names: a run's folder, its folder of checkpoints, or one checkpoint. None: nothing, or there is no such
    folder, which `existing_folder` says. Raises InputError."""
    if resume is None:
        return None
    start = Path(resume)
    if not start.is_dir():
        return None
    for folder in (start / FOLDER, start):
        marker = folder / MARKER
        if not marker.is_file():
            continue
        try:
            content = json.loads(read_text(marker))
            engine, name, step = str(content["layout"]["engine"]), str(content["folder"]), int(content["step"])
        except (ValueError, KeyError, TypeError):
            raise InputError(RESUME, shown(resume), f"{marker} is not a checkpoint's marker") from None
        where = (folder if folder.name == name else folder / name).resolve()
        if not where.is_dir():
            raise InputError(RESUME, shown(resume), f"{marker} names {name}, which is not there; {_newest_whole(folder)}")
        run = where.parent.parent
        written = next((path for path in (where / PLAN, run / PLAN) if path.is_file()), None)
        try:
            plan = None if written is None else from_json(read_text(written, limit=None), str(written))
        except InputError as error:
            raise InputError(RESUME, shown(resume), f"is damaged: {error}; {_newest_whole(where.parent, where)}") from None
        return Checkpoint(folder=where, run=run, step=step, engine=engine, plan=plan)
    written = start / PLAN
    saves = not written.is_file() or from_json(read_text(written, limit=None), str(written)).run.save_every
    why = "" if saves else ": its run was not asked to save (train.save_every=0)"
    raise InputError(RESUME, shown(resume), f"holds no finished checkpoint ({FOLDER}/{MARKER}){why}")


READ_BYTES: Final = 4 * GIB
"""Bytes of a checkpoint up to which it is read before anything is planned, some seconds. Of a larger one the sizes of its files are looked
at, and the ranks read it."""


def check_whole(checkpoint: Checkpoint) -> None:
    """Raises InputError for a checkpoint that is not as it was written, with the newest of its run that is."""
    if (why := _damage(checkpoint.folder)) is not None:
        older = _newest_whole(checkpoint.folder.parent, checkpoint.folder)
        raise InputError(RESUME, shown(str(checkpoint.folder)), f"is damaged: {why}; {older}")


def _damage(folder: Path) -> str | None:
    """What of a checkpoint is not as it was written; None: nothing, or nobody wrote down what was."""
    try:
        of = digests.listed(folder) or {}
    except InputError as error:
        return str(error)
    small = sum(int(each["bytes"]) for each in of.values()) <= READ_BYTES
    return next(digests.damages(folder, of, read=small), None)


def _newest_whole(folder: Path, but: Path | None = None) -> str:
    """What says which checkpoint in this folder is the newest that is as it was written."""
    found: dict[Path, int] = {}
    for marker in folder.glob(f"*/{MARKER}"):
        with suppress(InputError, ValueError, KeyError, TypeError):
            found[marker.parent] = int(json.loads(read_text(marker))["step"])
    for path in sorted(found, key=lambda path: found[path], reverse=True):
        if path != but and _damage(path) is None:
            return f"the newest whole one is {SHORT}={path}"
    return "its run has no other that is whole"


def with_long_form(given: Flat) -> Flat:
    """`resume` as `train.resume`. Raises InputError where both are given."""
    if SHORT not in given:
        return given
    if RESUME in given:
        raise InputError(RESUME, shown(given[RESUME].text), f"{SHORT}={shown(given[SHORT].text)} is given too, which is its short form")
    return {RESUME if name == SHORT else name: value for name, value in given.items()}


# ----------------------------------------------------------------------------------------------------------------- recipe

NOT_TAKEN_OVER: Final = (RESUME, CHANGE, "model.init_from", "take")
"""Keys that are not taken from the recipe of the run that is continued: they began that run."""


def recipe_of(checkpoint: Checkpoint, given: Mapping[str, Any]) -> Flat:
    """The keys of the run that is continued, for a command line that names no model: `train.resume=RUN` knows its recipe. A saved plan that
    was started is taken over with the rest, unless something is given that a plan would have to agree with. Raises InputError."""
    path = checkpoint.run / CONFIG
    if not path.is_file():
        why = f"has no {CONFIG} that says what is trained; name it: recipe=, or model.* keys"
        raise InputError(RESUME, shown(str(checkpoint.run)), why)
    keys = {name: value for name, value in flatten(read_yaml(path), str(path)).items() if name not in NOT_TAKEN_OVER}
    if TO in keys and TO not in given and written(keys[TO].value):
        _exported(checkpoint, keys, given)
    if any(name.partition(".")[0] not in FREE and KEYS[name].owner not in FREE_WITH_PLAN for name in given):
        keys.pop("plan", None)
    return keys


def _exported(checkpoint: Checkpoint, keys: Flat, given: Mapping[str, Any]) -> None:
    """The run has written its weights to model.export_to= of these keys. Raises InputError where it would go on, since they need another
    folder then; else the key is left out: what is said is that there is nothing left to train."""
    folder = keys[TO].text
    goes_on = checkpoint.plan is not None and checkpoint.step < checkpoint.plan.training.steps
    if goes_on or any(f"train.{name}" in given for name in ("steps", "tokens", "epochs")):
        why = "has the weights of the run that is continued, whose recipe names it; give a new folder"
        raise InputError(TO, shown(folder), why)
    del keys[TO]


def frozen_base(resume: str) -> str | None:
    """The folder of the weights that the run to continue did not train, and has in no checkpoint: its model.init_from=. None: it trained
    all of them, or began with none."""
    found = checkpoint_of(resume)
    if found is None or found.plan is None or not (found.plan.training.lora is not None or found.plan.training.freeze):
        return None
    return found.plan.run.init_from


def names_a_model(given: Mapping[str, Any]) -> bool:
    """Whether these keys say what is to be trained."""
    models = ("family", "hf_config", "description", "code", "traced", "init_from")
    return any(name in given for name in ("recipe", "plan", "profile", *(f"model.{name}" for name in models)))


# ---------------------------------------------------------------------------------------------------------------- in words


def said(checkpoint: Checkpoint, training: Training) -> str:
    """Which checkpoint is continued, in one line, whether its steps are done with it already, and how the learning rate jumps there."""
    step, steps, before = checkpoint.step, training.steps, checkpoint.plan
    line = f"continues {checkpoint.folder} after step {checkpoint.step}, written by {checkpoint.engine}"
    if checkpoint.plan is None:
        line += f"; no {PLAN} says what it was trained with, so that nothing can be compared"
    if step >= steps:
        line += f"; train.steps={steps} are done with it, so that nothing is left to train: train.steps=N train.change=steps goes on"
    elif before is not None and step > 0:
        old, last, new = learning_rate(before.training, step), learning_rate(before.training, step - 1), learning_rate(training, step)
        if abs(new - old) > RATE_JUMP * max(new, old):
            rates = f"step {step} had {last:.3g} and the next would have {old:.3g}, by this run's schedule it has {new:.3g}"
            line += f"; THE LEARNING RATE JUMPS: {rates} (train.schedule, train.lr, train.min_lr, train.warmup say another)"
    return line


def with_inherited_pins(error: NoPlanError, checkpoint: Checkpoint | None, pins: Pins) -> NoPlanError:
    """The error where a run is continued: with how pins, of which it may have taken over some, are left out on the command line."""
    if checkpoint is None or not pins.given():
        return error
    words = " ".join(f"pin.{name}=null" for name in pins.given())
    return NoPlanError(f"{error}; the pins of the run that is continued are kept: {words} leaves them out", error.refused)


LAYOUT: Final = ("world_size", "tp", "cp", "ep", "etp", "pp", "vpp", "dp", "zero_stage", "zero_shard_size", "rank_order")


def layout_changes(before: Plan, now: Plan) -> str:
    """What of the layout differs, as "tp 2 -> 1, dp 1 -> 2"; empty where nothing does."""
    pairs = [(name, getattr(before, name), getattr(now, name)) for name in LAYOUT]
    changes = [f"{name} {_short(old)} -> {_short(new)}" for name, old, new in pairs if old != new]
    stages = [[sum(span.count for span in stage.layers) for stage in plan.stages] for plan in (before, now)]
    if not changes and stages[0] != stages[1]:
        changes.append(f"layers of the stages {stages[0]} -> {stages[1]}")
    return ", ".join(changes)


# ---------------------------------------------------------------------------------------------------------------- changes


def check_changes(checkpoint: Checkpoint, architecture: Architecture, training: Training, run: RunSettings) -> None:
    """Nothing that decides convergence differs from the checkpoint's but what `run.change` names. Raises InputError that lists all that
    does: what can't be changed, then what has to be named."""
    if checkpoint.plan is not None:
        _check_against(checkpoint, checkpoint.plan, architecture, training, run)
    if checkpoint.step >= training.steps and run.export_to is None:
        more = f"name more (with {CHANGE}=steps), or model.export_to= to write its weights"
        raise InputError("train.steps", training.steps, f"{checkpoint.folder} has done {checkpoint.step} already; {more}")


def _check_against(checkpoint: Checkpoint, before: Plan, architecture: Architecture, training: Training, run: RunSettings) -> None:
    different = tuple(field for field, _, _ in differing(architecture, before.model))
    refused = [
        *_differences("model", before.model, architecture, different, "the checkpoint is of another model"),
        *_differences("train", before.training, training, DATA_ORDER, "the data would not go on where it stopped"),
        *_differences("train", before.training, training, STATES, "the optimizer's states in the checkpoint are of the other"),
    ]
    old, new = before.training.precision, training.precision
    if MASTER_WEIGHTS[old] != MASTER_WEIGHTS[new]:
        why = f"the checkpoint's optimizer keeps as master weights: {MASTER_WEIGHTS[old]}, this one: {MASTER_WEIGHTS[new]}"
        refused.append(f"train.precision={new} (was {old}): {why}")
    if refused:
        new_run = "A new run can begin with its weights: model.init_from=, written by model.export_to="
        raise InputError(RESUME, shown(str(checkpoint.folder)), f"can't continue with {'; '.join(refused)}. {new_run}")
    changed = _choices(before, architecture, training, run)
    for name in run.change:
        if name not in changed:
            raise InputError(CHANGE, name, "does not differ from the checkpoint's", list(changed) or ["nothing: leave it out"])
    unnamed = {name: text for name, text in changed.items() if name not in run.change}
    if unnamed:
        name_them = f"{CHANGE}={','.join(changed)}"
        raise InputError(
            RESUME, shown(str(checkpoint.folder)), f"was trained otherwise: {'; '.join(unnamed.values())}. If that is meant: {name_them}"
        )


def _differences(group: str, before: Any, now: Any, names: tuple[str, ...], why: str) -> list[str]:
    """A sentence for those of the fields that differ; none where none does."""
    found = _changed({name: UNGROUPED.get(name, f"{group}.{name}") for name in names}, before, now)
    return [f"{found}: {why}"] if found else []


def _changed(keys: Mapping[str, str], before: Any, now: Any) -> str:
    """The fields that differ, under these keys, with both values."""
    pairs = [(key, getattr(before, name), getattr(now, name)) for name, key in keys.items()]
    return ", ".join(f"{key}={_short(new)} (was {_short(old)})" for key, old, new in pairs if old != new)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Lora):
        return f"rank {value.rank}, alpha {value.scaling * value.rank:g}, dropout {value.dropout:g}, on {','.join(value.targets)}"
    if isinstance(value, Source):
        return f"{value.weight:g} {value.path}"
    return ",".join(_short(item) for item in value) if isinstance(value, tuple) else shown(value)


def _choices(before: Plan, architecture: Architecture, training: Training, run: RunSettings) -> dict[str, str]:
    """What differs and may, by the name that train.change= takes."""
    changed: dict[str, str] = {}
    for name in choices():
        if name == "dropout":
            text = _changed({field: f"model.{field}" for field in MODEL_CHOICES}, before.model, architecture)
        elif name in DATA_CHOICES:
            text = _changed(DATA_CHOICES[name], before.run, run)
        elif name == "steps" and before.training.schedule == training.schedule == "constant":
            text = ""  # with a constant rate the number of steps only says when to stop
        else:
            text = _changed({name: f"train.{name}"}, before.training, training)
        if text:
            changed[name] = text
    return changed


def choices() -> tuple[str, ...]:
    """What train.change= may name: every setting of the training that is neither the model, nor the order of the data, nor the kind of the
    optimizer's states."""
    fixed = {*DATA_ORDER, *STATES, *MEASURED}
    return (*(name for name in Training.__struct_fields__ if name not in fixed), "dropout", *DATA_CHOICES)


def check_names(change: tuple[str, ...], resume: str | None) -> None:
    """Raises InputError for a name that train.change= can't have, and for one without a checkpoint."""
    if change and resume is None:
        raise InputError(CHANGE, ",".join(change), f"is for a run that continues another: {RESUME}=RUN")
    for name in change:
        if name not in choices():
            close = nearest(name, choices())
            raise InputError(CHANGE, name, f"can't be changed on the way{f'; did you mean {close}?' if close else ''}", choices())
