"""Recipe file and command line become `Settings`, and Settings become a YAML that gives the same plan again.

Order: the recipe's file, then the command line over it. A layer that names `model.hf_config` replaces the model of the layers below it.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from orchestrator.cost.profile import Profile
from orchestrator.detect import Machine
from orchestrator.engines import passthrough
from orchestrator.errors import InputError
from orchestrator.hardware.spec import Cluster
from orchestrator.job import ContainerOptions, SlurmOptions, check_variable
from orchestrator.model import families
from orchestrator.model.spec import Architecture
from orchestrator.model.training import Training
from orchestrator.plan import Plan, RunSettings
from orchestrator.recipe.keys import Launch, Launcher, shown
from orchestrator.recipe.layers import Flat, flatten, group_of, merge, recipe_layers, value_of
from orchestrator.recipe.machine import cluster_of, counted, limit_of
from orchestrator.recipe.model import (
    architecture_of,
    check_positions,
    check_precision,
    label_of,
    padded_for_every_layout,
    training_of,
    with_fp8_recipe,
)
from orchestrator.recipe.profiles import FAMILY, read_profile, stand_in
from orchestrator.recipe.read import read_arguments
from orchestrator.recipe.resuming import (
    CHANGE,
    RESUME,
    Checkpoint,
    change_of,
    check_changes,
    checkpoint_of,
    names_a_model,
    recipe_of,
    with_long_form,
)
from orchestrator.recipe.saved import check_agreement, saved_plan
from orchestrator.recipe.sources import data_settings, existing_folder
from orchestrator.recipe.starting import container_options, slurm_options
from orchestrator.recipe.weights import weight_settings, with_config
from orchestrator.strategy.layerwise import NAME as LAYERWISE
from orchestrator.strategy.pins import MemoryLimit, Pins
from orchestrator.values import Value

OWN_PROGRAM: Final = "is for a program of your own: name it with entry=PATH"


class Settings(Value, frozen=True, kw_only=True):
    """All that a run needs to know. `why_cluster` says in one line which cluster was taken and why. `plan` is set where a saved plan
    takes the place of the search; `budget_s` None: no limit."""

    recipe: str
    architecture: Architecture
    profile: Profile | None = None
    """Measured layers. A model that only they describe has a stand-in for its architecture (family "profile")."""
    training: Training
    cluster: Cluster
    why_cluster: str
    engine: str
    launch: Launch
    out: str | None
    plan: Plan | None
    pins: Pins
    explain: Pins
    """Choices of which the user asks why the plan has others; they don't change it."""
    limit: MemoryLimit
    calibration: str | None
    """What calibration= says; None: the folder in ORCHESTRATOR_CALIBRATIONS, then what is shipped, then datasheets."""
    run: RunSettings
    continues: Checkpoint | None = None
    """What train.resume= names."""
    extra: dict[str, dict[str, Any]]
    budget_s: float | None
    open_batch: bool
    slurm: SlurmOptions
    container: ContainerOptions | None
    env: dict[str, str]
    entry: str | None
    entry_args: tuple[str, ...]
    entry_without: tuple[str, ...]
    entry_launcher: Launcher
    entry_preflight: bool
    wait: bool


def load(words: Sequence[str], machine: Machine, engines: Sequence[str]) -> Settings:
    """Settings of a command line on this machine. `engines`: the names that `engine=` may have besides auto. Raises InputError."""
    given = flatten(read_arguments(words), "")
    given = with_long_form(given)
    continued = checkpoint_of(value_of(given, RESUME, None))
    if continued is not None and not names_a_model(given):
        label, layers = None, [recipe_of(continued, given)]
    else:
        label, layers = recipe_layers(given)
    merged = with_config(merge([*layers, given]))
    label = value_of(merged, "name", label)
    engine = str(value_of(merged, "engine", "auto"))
    if engine not in ("auto", *engines):
        raise InputError("engine", shown(engine), "is not known", ["auto", *engines])
    plan = saved_plan(merged)
    continued = checkpoint_of(value_of(merged, RESUME, None if plan is None else plan.run.resume))
    if continued is not None:
        if engine not in ("auto", continued.engine):
            raise InputError("engine", engine, f"can't continue from train.resume={merged[RESUME]}, which engine={continued.engine} wrote")
        engine = continued.engine
    profile: Profile | None = None
    if plan is None:
        label = label or label_of(merged)
        training = training_of(merged)
        profile = read_profile(merged["profile"], label) if "profile" in merged else None
        if profile is not None and engine != LAYERWISE:
            raise InputError("profile", None, f"is for engine={LAYERWISE}: no other prices measured layers")
        if profile is not None and "model.family" not in merged:
            architecture = stand_in(profile)
        else:
            architecture = architecture_of(merged, label)
            families.describe(architecture, training.seq_length, training.decoder_seq_length)
            check_positions(architecture, training)
        cluster, why = cluster_of(merged, given, machine)
        if architecture.family != FAMILY:
            architecture = padded_for_every_layout(architecture, cluster)
        check_precision(training, cluster)
        training = with_fp8_recipe(training, cluster)
        run = _run(merged, RunSettings(), architecture)
    else:
        check_agreement(merged, plan)
        if engine not in ("auto", plan.engine):
            raise InputError("engine", engine, f"the plan is for engine={plan.engine}; leave engine out, or search anew without plan=")
        label = label or plan.model.name
        architecture, training, cluster, engine = plan.model, plan.training, plan.cluster, plan.engine
        why = f"cluster {cluster.name}, {counted(cluster)}: the plan's"
        run = _run(merged, plan.run, architecture)
        plan = msgspec.structs.replace(plan, run=run, extra=_extra(merged, plan.extra))
    if continued is not None:
        check_changes(continued, architecture, training, run)
    return Settings(
        recipe=label,
        architecture=architecture,
        profile=profile,
        training=training,
        cluster=cluster,
        why_cluster=why,
        engine=engine,
        launch=value_of(merged, "launch", "auto"),
        out=value_of(merged, "out", None),
        plan=plan,
        pins=Pins(**group_of(merged, "pin")),
        explain=Pins(**group_of(merged, "explain")),
        limit=limit_of(merged, cluster),
        calibration=_calibration(merged),
        run=run,
        continues=continued,
        extra=_extra(merged, {}) if plan is None else plan.extra,
        budget_s=value_of(merged, "search.budget_s", None),
        open_batch=_open_batch(merged, engine),
        slurm=slurm_options(_texts(merged, "slurm")),
        container=container_options(_texts(merged, "container")),
        env=_environment(merged),
        entry=_entry(merged),
        entry_args=_words(merged, "entry.args"),
        entry_without=_words(merged, "entry.without"),
        entry_launcher=_of_entry(merged, "entry.launcher", "torchrun"),
        entry_preflight=_of_entry(merged, "entry.preflight", False),
        wait=value_of(merged, "launch.wait", False),
    )


def _texts(flat: Flat, group: str) -> dict[str, str]:
    """Of a group whose members are read elsewhere; null: as if it were not given."""
    return {name: value for name, value in group_of(flat, group).items() if value is not None}


def _environment(flat: Flat) -> dict[str, str]:
    """Texts of `env.NAME` by name. Raises InputError for what is no text, and for names that can't be given to a job."""
    found = {}
    for name, value in flat.items():
        group, _, variable = name.partition(".")
        if group == "env":
            if not isinstance(value, str):
                raise InputError(name, shown(value), "needs one value, not a list or a group of keys")
            check_variable(variable, value)
            found[variable] = value
    return found


def _words(flat: Flat, name: str) -> tuple[str, ...]:
    """Words as a shell splits them. Raises InputError for an open quote, and for words without a program that they are for."""
    text = value_of(flat, name, "")
    if text and "entry" not in flat:
        raise InputError(name, shown(text), OWN_PROGRAM)
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise InputError(name, shown(text), f"can't be split into words: {error}") from None


def _of_entry(flat: Flat, name: str, default: Any) -> Any:
    if name in flat and "entry" not in flat:
        raise InputError(name, shown(flat[name]), OWN_PROGRAM)
    return value_of(flat, name, default)


def _open_batch(flat: Flat, engine: str) -> bool:
    """Whether the batch is searched. Raises InputError for an engine that trains: its batch decides convergence."""
    chosen: str = value_of(flat, "search.global_batch_size", "given")
    if chosen == "auto" and engine != LAYERWISE:
        raise InputError("search.global_batch_size", chosen, f"is for engine={LAYERWISE}; other engines train the batch given", ["given"])
    return chosen == "auto"


def _entry(flat: Flat) -> str | None:
    """Absolute. It need not be on this machine: it may lie in a container, or on the nodes alone."""
    path = value_of(flat, "entry", None)
    return None if path is None else str(Path(path).absolute())


def _run(merged: Flat, base: RunSettings, architecture: Architecture) -> RunSettings:
    """Data, tokenizer, weights and resume must be there: a job that dies for them at its first step is found out here."""
    resume = value_of(merged, RESUME, base.resume)
    change = change_of(value_of(merged, CHANGE, None)) if CHANGE in merged else base.change
    if change and resume is None:
        raise InputError(CHANGE, ",".join(change), f"is for a run that continues another: {RESUME}=RUN")
    save_every = value_of(merged, "train.save_every", base.save_every)
    keep = {name: value_of(merged, f"train.{name}", getattr(base, name)) for name in ("keep_last", "keep_every")}
    for name, value in keep.items():
        if value and not save_every:
            raise InputError(f"train.{name}", value, "keeps of the checkpoints that train.save_every= writes, and that is 0")
    if keep["keep_every"] and not keep["keep_last"]:
        raise InputError("train.keep_every", keep["keep_every"], "is beside train.keep_last=N; without that all are kept")
    wandb = base.wandb | group_of(merged, "wandb")
    if wandb and "project" not in wandb:
        raise InputError("wandb.project", None, "is missing: Weights & Biases is used where a project is named")
    return msgspec.structs.replace(
        base,
        **data_settings(merged, base),
        **weight_settings(merged, base, architecture),
        save_every=save_every,
        **keep,
        step_timeout_s=value_of(merged, "train.step_timeout_s", base.step_timeout_s),
        resume=None if resume is None else existing_folder(RESUME, resume),
        change=change,
        wandb=wandb,
    )


def _extra(merged: Flat, base: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What goes to the engine unchanged, by group; given over the saved plan's. Raises InputError for names that no engine knows."""
    found = {group: dict(values) for group, values in base.items()}
    spelled: dict[tuple[str, str], str] = {}
    for key, value in merged.items():
        group, _, rest = key.partition(".")
        if group in passthrough.GROUPS:
            name, typed = passthrough.read(group, rest, value)
            if (group, name) in spelled:
                raise InputError(key, shown(value), f"is given twice, first as {spelled[group, name]}")
            spelled[group, name] = key
            found.setdefault(group, {})[name] = typed
    return found


def _calibration(merged: Flat) -> str | None:
    """A file's or folder's whole path, so that config.yaml finds it from anywhere; a name as it is."""
    given = value_of(merged, "calibration", None)
    path = Path(str(given))
    return given if given is None or not path.exists() else str(path.resolve())
