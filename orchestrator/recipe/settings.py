"""Recipe file and command line become `Settings`, and Settings become a YAML that gives the same plan again.

Order: the recipe's file, then the command line over it. A layer that names `model.hf_config` replaces the model of the layers below it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from orchestrator.cost.profile import Profile
from orchestrator.detect import Machine
from orchestrator.engines import passthrough
from orchestrator.errors import InputError
from orchestrator.hardware.spec import Cluster
from orchestrator.job import ContainerOptions, SlurmOptions
from orchestrator.key import shown
from orchestrator.model import families
from orchestrator.model.lora import check_targets
from orchestrator.model.spec import Architecture
from orchestrator.model.training import Training
from orchestrator.plan import LONG_S, Plan, RunSettings
from orchestrator.recipe.clusters import resized
from orchestrator.recipe.described import SOURCES, with_description
from orchestrator.recipe.keys import Actions, Largest, Targets
from orchestrator.recipe.layers import (
    Flat,
    Given,
    fields_of,
    filled,
    flatten,
    group_of,
    is_shipped,
    merge,
    recipe_layers,
    site_layer,
    value_of,
)
from orchestrator.recipe.machine import cluster_of, counted, limit_of
from orchestrator.recipe.model import (
    architecture_of,
    check_ids,
    check_positions,
    check_precision,
    label_of,
    leaves_images_out,
    model_of,
    model_type,
    padded_for_every_layout,
    read_otherwise,
    training_of,
    with_balance,
    with_epochs,
    with_fp8_recipe,
    with_images,
    with_routing,
    with_samples,
    with_sequence_length,
)
from orchestrator.recipe.profiles import FAMILY, stand_in
from orchestrator.recipe.read import Tree, read_arguments
from orchestrator.recipe.reinforcement import at_length, not_here, rl_job, with_task
from orchestrator.recipe.resuming import (
    RESUME,
    Checkpoint,
    check_changes,
    check_names,
    checkpoint_of,
    frozen_base,
    names_a_model,
    recipe_of,
    with_long_form,
)
from orchestrator.recipe.saved import check_agreement, saved_plan
from orchestrator.recipe.sources import check_here, data_settings, existing_folder
from orchestrator.recipe.starting import container_options, slurm_options
from orchestrator.recipe.weights import FROM, weight_settings, with_config
from orchestrator.rl.job import RlJob
from orchestrator.strategy.layerwise import NAME as LAYERWISE
from orchestrator.strategy.pins import MemoryLimit, Pins

ASSUMED: Final = ("lr", "min_lr", "warmup", "steps")
"""Fields of the training that a screen names where nobody gave them."""
OWN_PROGRAM: Final = "is for a program of your own: name it with entry=PATH"


class Settings(Actions, frozen=True, kw_only=True):
    """All that a run needs to know. `why_cluster` says in one line which cluster was taken and why. `plan` is set where a saved plan
    takes the place of the search; `budget_s` None: no limit. `calibration` None: the folder in ORCHESTRATOR_CALIBRATIONS, then what is
    shipped, then datasheets."""

    recipe: str
    architecture: Architecture
    profile: Profile | None = None
    """The measured layers of a profile; None: there is no profile. A model that only they describe has a stand-in for its architecture
    (family "profile")."""
    training: Training
    cluster: Cluster
    why_cluster: str
    plan: Plan | None
    pins: Pins
    explain: Pins
    """Choices of which the user asks why the plan has others; they don't change it."""
    limit: MemoryLimit
    targets: Targets = Targets()
    largest: Largest | None = None
    reinforcement: RlJob | None = None
    """What task=rl asks, whose training half `training` is."""
    assumed: tuple[str, ...] = ()
    """The keys of ASSUMED that nobody gave."""
    batch_of_length: int | None = None
    """Tokens of a sequence where the batch was said, if the length was changed over that and the batch wasn't."""
    steps_of_tokens: int | None = None
    """Tokens of a step where train.steps was said, if batch or length was changed over that and the steps weren't."""
    run: RunSettings
    saves_unsaid: bool = False
    """Whether nobody said train.save_every of a run of our own programs."""
    continues: Checkpoint | None = None
    """What train.resume= names."""
    extra: dict[str, dict[str, Any]]
    open_batch: bool
    lengths: str | None = None
    """What data.lengths= says of supervised samples."""
    epochs: float | None = None
    """What train.epochs= says."""
    packs_unasked: bool = False
    """Whether samples are packed though data.packing= says nothing: a plan may pad them where none fits with them packed."""
    unseen: bool = False
    """Whether the model looks at images, and its text model alone is planned."""
    not_read: tuple[str, ...] = ()
    """What model.hf_config= says that was not read, in sentences."""
    model_type: str | None = None
    """The model_type of model.hf_config=."""
    software_unsaid: bool = False
    """Whether nobody said which releases the image of container.image= has."""
    explain_cluster: Cluster | None = None
    """The cluster with the GPUs of explain.gpus=; None: nobody asks."""
    slurm: SlurmOptions
    container: ContainerOptions | None
    env: dict[str, str]

    @property
    def steps_done(self) -> int:
        """Steps of the training that the checkpoint of train.resume= has done; 0 without one."""
        return 0 if self.continues is None else self.continues.step

    @property
    def random_weights(self) -> str:
        """What fine-tuning on GPUs, other than by entry=, begins with where no weights are named, in a sentence; "" elsewhere."""
        run, training = self.run, self.training
        if self.cluster.is_cpu or self.entry is not None or run.init_from is not None or run.resume is not None:
            return ""
        if training.lora is not None:
            return f"weights: none named ({FROM}=CHECKPOINT), so they are random: adapters beside frozen random weights learn nothing"
        return f"weights: none named ({FROM}=CHECKPOINT), so they are random" if training.task == "sft" else ""

    @property
    def reads_texts(self) -> bool:
        """Whether our workers read texts to pretrain on."""
        return self.training.task == "pretrain" and self.entry is None and self.architecture.why_drawn is None

    def run_of(self, plan: Plan) -> RunSettings:
        """What a run of the plan does: with a checkpoint at the end of a training of more than an hour where nobody said whether any."""
        long = plan.predicted is not None and plan.training.steps * plan.predicted.step_time_s > LONG_S
        unsaid = self.saves_unsaid and self.reinforcement is None
        return msgspec.structs.replace(self.run, save_every=plan.training.steps) if long and unsaid else self.run


def load(words: Sequence[str], machine: Machine, engines: Sequence[str]) -> Settings:
    """Settings of a command line on this machine. `engines`: the names that `engine=` may have besides auto. Raises InputError."""
    return load_tree(read_arguments(words), machine, engines)


def load_tree(tree: Tree, machine: Machine, engines: Sequence[str], *, plans_only: bool = False) -> Settings:
    """Settings of keys that are a tree of texts already. `plans_only`: who asks starts nothing, and knows task=rl, which is refused
    otherwise; data, tokenizer and weights may then be on other machines. Raises InputError."""
    given = with_long_form(flatten(tree, ""))
    merged, site, label, said_beside = _layered(given, with_generation=plans_only)
    if not plans_only:
        check_here(merged)
    actions = filled(merged, Actions)
    if actions.engine not in ("auto", *engines):
        raise InputError("engine", shown(actions.engine), "is not known", ["auto", *engines])
    plan = saved_plan(merged)
    resume = value_of(merged, RESUME, None if plan is None else plan.run.resume)
    continued = checkpoint_of(resume)
    engine = actions.engine
    if continued is not None:
        if engine == LAYERWISE:
            raise InputError("engine", engine, f"trains nothing: it can't continue {RESUME}={resume}")
        # Another engine only where the command line says so: the recipe's may be that of before.
        engine = given["engine"].value if "engine" in given and engine != "auto" else continued.engine
    chosen_here = {**site, **given}
    if plan is None:
        trained = _searched(merged, label, engine, chosen_here, machine, plans_only=plans_only)
    else:
        trained = _saved(merged, label, engine, plan, plans_only=plans_only)
    plan = trained.plan
    merged = {**trained.own, **merged}
    actions = filled(merged, Actions)
    if continued is not None:
        check_changes(continued, trained.architecture, trained.training, trained.run)
    explain_cluster = None
    if actions.explain_gpus is not None:
        explain_cluster = _explain_cluster(actions.explain_gpus, trained.cluster)
    _check_failures(actions)
    if actions.take is not None:
        beside = next((name for name in ("plan", "tune", "largest", *(f"target.{field}" for field in Targets.__struct_fields__))
                       if value_of(merged, name, None) is not None), None)  # fmt: skip
        if beside is not None:
            raise InputError("take", actions.take, f"names one of a search's plans, and {beside}= takes its own: leave one of them out")
    _check_tune(actions, trained.engine, merged, has_plan=plan is not None)
    _check_entry(merged)
    entry = None if actions.entry is None else str(Path(actions.entry).absolute())  # it may lie in a container, or on the nodes alone
    of_training = {name: value for name, value in trained._asdict().items() if name != "own"}
    done = {**msgspec.structs.asdict(actions), "entry": entry, "calibration": _whole_path(actions.calibration)}
    return Settings(
        **{**done, **of_training},
        pins=Pins(**group_of(merged, "pin")),
        explain=Pins(**{name: value for name, value in group_of(merged, "explain").items() if name != "gpus"}),
        limit=limit_of(merged, trained.cluster),
        targets=_targets(merged),
        largest=value_of(merged, "largest", None),
        assumed=_assumed(merged) if plan is None else (),
        batch_of_length=said_beside[0] if plan is None else None,
        steps_of_tokens=said_beside[1] if plan is None else None,
        saves_unsaid="train.save_every" not in merged and plan is None and continued is None and entry is None,
        continues=continued,
        extra=_extra(merged, {}) if plan is None else plan.extra,
        open_batch=_open_batch(merged, trained.engine),
        lengths=value_of(merged, "data.lengths", None),
        epochs=value_of(merged, "train.epochs", None),
        packs_unasked=bool(trained.training.packing) and "data.packing" not in merged and plan is None and continued is None,
        unseen=plan is None and leaves_images_out(merged, trained.architecture),
        not_read=read_otherwise(merged, trained.architecture) if plan is None else (),
        model_type=model_type(merged, trained.architecture) if plan is None else None,
        software_unsaid=plan is None and _is_software_unsaid(merged),
        explain_cluster=explain_cluster,
        slurm=slurm_options(merged, trained.cluster),
        container=container_options(merged),
        env=group_of(merged, "env"),
    )


def _layered(given: Flat, *, with_generation: bool) -> tuple[Flat, Flat, str | None, tuple[int | None, int | None]]:
    """All layers in one, the site's alone, the run's name where one is said, and `Settings.batch_of_length` and `steps_of_tokens`: what is
    given over the site over the recipe that it names, which may be that of a run to continue. `with_generation`: whether who asks knows
    task=rl. Raises InputError."""
    from_run = value_of(given, RESUME, None)
    continued = checkpoint_of(from_run)
    if from_run is not None and continued is None and not names_a_model(given):
        raise InputError(RESUME, shown(from_run), "is no folder here, and it is what would say what is trained")
    if continued is not None and not names_a_model(given):
        label, layers = None, [recipe_of(continued, given)]
    else:
        label, layers = recipe_layers(given)
    site = site_layer(with_plan="plan" in given)
    of_package = int(label is not None and is_shipped(given, layers))
    merged = with_config(merge([*layers[:of_package], site, *layers[of_package:], given]))
    label = value_of(merged, "name", label)
    if label is None and any(name in merged for name in SOURCES):
        label = label_of(merged)
    merged = with_task(with_description(merged), [*layers, given], known=with_generation)
    return merged, site, label, _said_beside([*layers, given])


def _said_beside(layers: Sequence[Flat]) -> tuple[int | None, int | None]:
    """The sequence length beside which the last batch was said, and the tokens of a step beside which the last number of steps was, where a
    later layer has another; None: there is none such."""
    length = batch = tokens = of_batch = of_steps = None
    decoder = 0
    for layer in layers:
        length, batch = value_of(layer, "train.seq_length", length), value_of(layer, "train.global_batch_size", batch)
        decoder = value_of(layer, "train.decoder_seq_length", decoder)
        tokens = None if batch is None or length is None else batch * (length + decoder)
        of_batch = length if "train.global_batch_size" in layer else of_batch
        if AMOUNTS & {*layer}:
            of_steps = tokens if "train.steps" in layer else None
    return None if of_batch == length else of_batch, None if of_steps == tokens else of_steps


AMOUNTS = frozenset(("train.steps", "train.tokens", "train.epochs"))
"""The keys that say how much is trained on, of which a later layer's stands in place of an earlier one's."""


class _Trained(NamedTuple):
    """What is trained, where and how: Settings' fields of these names."""

    recipe: str
    architecture: Architecture
    profile: Profile | None
    training: Training
    cluster: Cluster
    why_cluster: str
    run: RunSettings
    plan: Plan | None
    engine: str
    own: Flat
    """Keys of a run that the cluster's YAML has, which no field of Settings is called after."""
    reinforcement: RlJob | None = None


def _searched(merged: Flat, label: str | None, engine: str, chosen_here: Flat, machine: Machine, *, plans_only: bool) -> _Trained:
    """What is trained where by the keys, for a search. `chosen_here`: those of the command line and the site, which go before what the
    machine has. Raises InputError."""
    label = label or label_of(merged)
    merged = with_epochs(with_sequence_length(merged, label), label)
    training = with_samples(training_of(merged, chosen_here), merged)
    job: RlJob | None = None
    profile: Profile | None = value_of(merged, "profile", None)
    profile = profile and msgspec.structs.replace(profile, name=label)
    if profile is not None and engine != LAYERWISE:
        raise InputError("profile", None, f"is for engine={LAYERWISE}: no other prices measured layers")
    if profile is not None and "model.family" not in merged:
        architecture = stand_in(profile)
    else:
        architecture = with_balance(architecture_of(merged, label), value_of(merged, "model.aux_loss_coeff", None))
        architecture = with_routing(architecture, value_of(merged, "model.routing", None))
        job = rl_job(merged, architecture, model_of)
        training = with_images(at_length(job, training), architecture, merged)
        check_ids(architecture, training, merged)
        families.describe_for(architecture, training)
        check_positions(architecture, training)
        if training.lora is not None and architecture.traced is None:
            check_targets(architecture, training.lora)
    cluster, why, own = cluster_of(merged, chosen_here, machine)
    if architecture.family != FAMILY and architecture.traced is None:
        architecture = padded_for_every_layout(architecture, cluster)
    check_precision(training, cluster, value_of(merged, "train.precision", None))
    training = with_fp8_recipe(training, cluster)
    run = _run(merged, RunSettings(), architecture, plans_only=plans_only)
    return _Trained(label, architecture, profile, training, cluster, why, run, None, engine, own, job)


def _saved(merged: Flat, label: str | None, engine: str, plan: Plan, *, plans_only: bool) -> _Trained:
    """What is trained where by a saved plan, with which the keys must agree. Raises InputError."""
    check_agreement(merged, plan)
    if engine not in ("auto", plan.engine):
        raise InputError("engine", engine, f"the plan is for engine={plan.engine}; leave engine out, or search anew without plan=")
    why = f"cluster {plan.cluster.name}, {counted(plan.cluster)}: the plan's"
    run = _run(merged, plan.run, plan.model, plans_only=plans_only)
    plan = msgspec.structs.replace(plan, run=run, extra=_extra(merged, plan.extra))
    return _Trained(label or plan.model.name, plan.model, None, plan.training, plan.cluster, why, run, plan, plan.engine, {})


def check_no_question(settings: Settings) -> None:
    """Raises InputError for a question (target.*, largest=, task=rl) where one plan is made: only the command `plan` answers it."""
    if settings.reinforcement is not None:
        raise not_here()
    for name, value in [*((f"target.{name}", value) for name, value in settings.targets.given().items()), ("largest", settings.largest)]:
        if value is not None:
            raise InputError(name, value, "is a question that python -m orchestrator plan answers; then give the number that it finds here")


def _is_software_unsaid(merged: Flat) -> bool:
    said = isinstance(value_of(merged, "cluster", None), dict) or any(name.startswith("cluster.software") for name in merged)
    return "container.image" in merged and not said


def _assumed(merged: Flat) -> tuple[str, ...]:
    given = {*merged, *(["train.steps"] if {"train.tokens", "train.epochs"} & {*merged} else [])}
    return tuple(name for name in ASSUMED if f"train.{name}" not in given)


def _targets(merged: Flat) -> Targets:
    targets = filled(merged, Targets)
    if targets.cost is not None and value_of(merged, "cluster.price_per_gpu_hour", None) is None:
        raise InputError("target.cost", merged["target.cost"].text, "needs cluster.price_per_gpu_hour beside it")
    if targets.given() and value_of(merged, "largest", None) is not None:
        raise InputError("largest", merged["largest"].text, f"is another question than target.{next(iter(targets.given()))}; ask one")
    return targets


def _explain_cluster(gpus: int, cluster: Cluster) -> Cluster:
    """The run's cluster with so many GPUs. Raises InputError."""
    try:
        return resized(cluster, gpus)
    except InputError as error:
        raise InputError("explain.gpus", gpus, error.why) from None


def _check_tune(actions: Actions, engine: str, merged: Flat, *, has_plan: bool) -> None:
    """Raises InputError where there is nothing to try, or nothing that can be tried."""
    if actions.tune is None:
        for name, value in (("tune.steps", actions.tune_steps), ("tune.rounds", actions.tune_rounds)):
            if name in merged:
                raise InputError(name, value, "is of the plans that tune=K tries: say how many beside it")
        return
    if has_plan:
        raise InputError("tune", actions.tune, "tries several plans, and plan= names one: leave one of them out")
    if engine == LAYERWISE:
        raise InputError("tune", actions.tune, f"runs plans, and engine={LAYERWISE} starts nothing")
    if actions.launch == "none":
        raise InputError("tune", actions.tune, "measures plans, and launch=none starts nothing", ["launch=local", "launch=auto"])


def _check_failures(actions: Actions) -> None:
    """Raises InputError where what failures cost can't be said: without the storage's bandwidth nobody knows what a save takes."""
    if actions.mtbf_hours is not None and actions.storage_bandwidth is None:
        raise InputError("cluster.mtbf", f"{actions.mtbf_hours:g}", "needs cluster.storage= beside it: what a save takes follows from that")
    if actions.restart_s != Actions().restart_s and actions.mtbf_hours is None:
        raise InputError("cluster.restart_s", f"{actions.restart_s:g}", "counts where failures do: cluster.mtbf= beside it")


def _check_entry(flat: Flat) -> None:
    """Raises InputError for what is said of a program that is not named, and for two programs."""
    if "program" in flat and value_of(flat, "entry", None) is not None and flat["program"].value != "auto":
        raise InputError("program", flat["program"].value, "is one program, and entry= names another: leave one of them out")
    for name in flat if value_of(flat, "entry", None) is None else ():
        if name.startswith("entry."):
            raise InputError(name, shown(flat[name].text), OWN_PROGRAM)


def _open_batch(flat: Flat, engine: str) -> bool:
    """Whether the batch is searched. Raises InputError for an engine that trains: its batch decides convergence."""
    chosen: str = value_of(flat, "search.global_batch_size", "given")
    if chosen == "auto" and engine != LAYERWISE:
        raise InputError("search.global_batch_size", chosen, f"is for engine={LAYERWISE}; other engines train the batch given", ["given"])
    return chosen == "auto"


def _run(merged: Flat, base: RunSettings, architecture: Architecture, *, plans_only: bool = False) -> RunSettings:
    """Data, tokenizer, weights and resume must be there: a job that dies for them at its first step is found out here."""
    wandb = base.wandb | group_of(merged, "wandb")
    run = msgspec.structs.replace(base, **{**fields_of(merged, RunSettings), "wandb": wandb})
    check_names(run.change, run.resume)
    for name in ("async_save", "keep_last", "keep_every"):
        if getattr(run, name) and not run.save_every:
            raise InputError(
                f"train.{name}",
                shown(getattr(run, name)),
                "is about checkpoints that train.save_every= writes: say train.save_every= beside it",
            )
    if run.keep_every and not run.keep_last:
        raise InputError("train.keep_every", run.keep_every, "is beside train.keep_last=N; without that all are kept")
    if "lora.merge" in merged and run.merge_lora and value_of(merged, "lora.rank", None) is None and "plan" not in merged:
        raise InputError("lora.merge", True, "is of adapters: give lora.rank= beside it")
    own_program = value_of(merged, "entry", None) is not None
    if run.trace_routing and not architecture.experts:
        raise InputError("train.trace_routing", "true", "is of experts, and the model has none")
    if run.trace_routing and own_program:
        raise InputError("train.trace_routing", "true", "is written by our worker; entry= starts another program")
    if not run.step_timers and "train.step_timers" in merged and own_program:
        raise InputError("train.step_timers", "false", "is about our worker; entry= starts another program")
    if not run.step_timers and value_of(merged, "tune", None) is not None:
        raise InputError("train.step_timers", "false", "leaves tune= nothing to learn from: leave one of them out")
    if wandb and "project" not in wandb:
        raise InputError("wandb.project", None, "is missing: Weights & Biases is used where a project is named")
    resume = None if run.resume is None else existing_folder(RESUME, run.resume)
    if resume is not None and run.init_from is None and (frozen := frozen_base(resume)) is not None:
        merged = {**merged, FROM: Given(frozen if plans_only else existing_folder(FROM, frozen), frozen)}
    data, weights = data_settings(merged, base, architecture), weight_settings(merged, base, architecture, plans_only=plans_only)
    return msgspec.structs.replace(run, **data, **weights, resume=resume)


def _extra(merged: Flat, base: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What goes to the engine unchanged, by group; given over the saved plan's. Raises InputError for one name spelled in two ways."""
    found = {group: dict(values) for group, values in base.items()}
    spelled: dict[tuple[str, str], str] = {}
    for key, given in merged.items():
        group = key.partition(".")[0]
        if group in passthrough.GROUPS:
            name, value = given.value
            if (group, name) in spelled:
                raise InputError(key, shown(given.text), f"is given twice, first as {spelled[group, name]}")
            spelled[group, name] = key
            found.setdefault(group, {})[name] = value
    return found


def _whole_path(calibration: str | None) -> str | None:
    """A file's or folder's whole path, so that config.yaml finds it from anywhere; a name as it is."""
    path = Path(str(calibration))
    return calibration if calibration is None or not path.exists() else str(path.resolve())
