"""Recipe file and command line become `Settings`, and Settings become a YAML that gives the same plan again.

Order: the recipe's file, then the command line over it. A layer that names `model.hf_config` replaces the model of the layers below it.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from math import gcd, lcm
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml

from orchestrator.cost.profile import Profile
from orchestrator.detect import Machine
from orchestrator.engines import passthrough
from orchestrator.errors import InputError
from orchestrator.hardware.catalog import GPUS, by_driver_name
from orchestrator.hardware.spec import Cluster, Gpu, Level, Software, slowest
from orchestrator.job import ContainerOptions, SlurmOptions, check_variable
from orchestrator.model import families
from orchestrator.model.spec import Architecture
from orchestrator.model.training import Training
from orchestrator.plan import Plan, RunSettings
from orchestrator.recipe.clusters import check_cluster, cluster_from, read_named, stored, to_tree
from orchestrator.recipe.keys import KEYS, Launch, Launcher, check_range, parse, shown
from orchestrator.recipe.profiles import FAMILY, read_profile, stand_in
from orchestrator.recipe.read import GROUPS, PATHS, Tree, check_key, check_path, read_arguments, read_text
from orchestrator.recipe.sources import check_layer, data_settings, existing_folder, without_replaced
from orchestrator.recipe.starting import container_options, container_tree, slurm_options, slurm_tree
from orchestrator.recipe.weights import weight_settings, with_config
from orchestrator.strategy.layerwise import NAME as LAYERWISE
from orchestrator.strategy.pins import MemoryLimit, Pins
from orchestrator.strategy.spec import CHOICES
from orchestrator.units import GIB, US, format_bytes
from orchestrator.values import Value

Flat = dict[str, Any]
"""Full key names; the values are text still, or a cluster's mapping."""

FREE_WITH_PLAN: Final = (
    *("recipe", "plan", "out", "launch", "data", "tokenizer", "model.init_from", "model.export_to"),
    *(f"train.{name}" for name in ("save_every", "eval_every", "eval_steps", "step_timeout_s", "resume")),
)
FREE_GROUPS: Final = ("slurm", "memory", "search", "launch", "env", "container", "entry", "data", "wandb", *passthrough.GROUPS)
"""Keys that a saved plan leaves open; every other key that is given with `plan=` must agree with it."""

MAPPINGS: Final = ("cluster", "profile")
"""Keys whose value may be a mapping of its own."""
NOT_ARCHITECTURE: Final = ("hf_config", "init_from", "export_to")
"""Keys of the group "model" that are not facts of it."""
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
    label, recipe = _recipe(given)
    merged = with_config(_merge([recipe, given]))
    engine = str(_value(merged, "engine", "auto"))
    if engine not in ("auto", *engines):
        raise InputError("engine", shown(engine), "is not known", ["auto", *engines])
    plan = _plan(merged)
    saved = _engine_of_checkpoint(_value(merged, "train.resume", None))
    if saved is not None and engine not in ("auto", saved):
        raise InputError("engine", engine, f"can't continue from train.resume={merged['train.resume']}, which engine={saved} wrote")
    engine = saved or engine
    profile: Profile | None = None
    if plan is None:
        label = label or _label_of(merged)
        training = _training(merged)
        profile = read_profile(merged["profile"], label) if "profile" in merged else None
        if profile is not None and engine != LAYERWISE:
            raise InputError("profile", None, f"is for engine={LAYERWISE}: no other prices measured layers")
        if profile is not None and "model.family" not in merged:
            architecture = stand_in(profile)
        else:
            architecture = _architecture(merged, label)
            families.describe(architecture, training.seq_length, training.decoder_seq_length)
            _check_positions(architecture, training)
        cluster, why = _cluster(merged, given, machine)
        if architecture.family != FAMILY:
            architecture = padded_for_every_layout(architecture, cluster)
        _check_precision(training, cluster)
        training = _with_fp8_recipe(training, cluster)
        run = _run(merged, RunSettings(), architecture)
    else:
        _check_agreement(merged, plan)
        if engine not in ("auto", plan.engine):
            raise InputError("engine", engine, f"the plan is for engine={plan.engine}; leave engine out, or search anew without plan=")
        label = label or plan.model.name
        architecture, training, cluster, engine = plan.model, plan.training, plan.cluster, plan.engine
        why = f"cluster {cluster.name}, {_counted(cluster)}: the plan's"
        run = _run(merged, plan.run, architecture)
        plan = msgspec.structs.replace(plan, run=run, extra=_extra(merged, plan.extra))
    return Settings(
        recipe=label,
        architecture=architecture,
        profile=profile,
        training=training,
        cluster=cluster,
        why_cluster=why,
        engine=engine,
        launch=_value(merged, "launch", "auto"),
        out=_value(merged, "out", None),
        plan=plan,
        pins=Pins(**_group(merged, "pin")),
        explain=Pins(**_group(merged, "explain")),
        limit=_limit(merged, cluster),
        calibration=_calibration(merged),
        run=run,
        extra=_extra(merged, {}) if plan is None else plan.extra,
        budget_s=_value(merged, "search.budget_s", None),
        open_batch=_open_batch(merged, engine),
        slurm=slurm_options(_texts(merged, "slurm")),
        container=container_options(_texts(merged, "container")),
        env=_environment(merged),
        entry=_entry(merged),
        entry_args=_words(merged, "entry.args"),
        entry_without=_words(merged, "entry.without"),
        entry_launcher=_of_entry(merged, "entry.launcher", "torchrun"),
        entry_preflight=_of_entry(merged, "entry.preflight", False),
        wait=_value(merged, "launch.wait", False),
    )


# -------------------------------------------------------------------------------------------------------------- layers


def flatten(tree: Tree, where: str) -> Flat:
    """Full key names. A cluster may be a mapping; any other group must hold known keys. Raises InputError."""
    prefix = f"{where}: " if where else ""
    flat: Flat = {}

    def visit(branch: Mapping[str, Any], above: str) -> None:
        for name, value in branch.items():
            full = f"{above}.{name}" if above else name
            if isinstance(value, dict) and value and full not in MAPPINGS and (full not in KEYS or full in GROUPS):
                visit(value, full)
                continue
            try:
                check_key(full, value)
                if full in PATHS:
                    check_path(full, value)
            except InputError as error:
                raise InputError(f"{prefix}{error.key}", error.value, error.why, error.choices) from None
            flat[full] = value

    visit(tree, "")
    return flat


def _recipe(given: Flat) -> tuple[str | None, Flat]:
    """(label, keys) of the recipe that the command line names; (None, {}) without one."""
    if "recipe" not in given:
        return None, {}
    name = _value(given, "recipe", None)
    label, tree = read_named("recipe", str(name), "profiles" if str(name) in stored("profiles") else "models")
    flat = flatten(tree, str(name))
    label = str(flat.pop("recipe", None) or label)
    return label, _expand_dropout(flat)


def _expand_dropout(flat: Flat) -> Flat:
    """`model.dropout` stands for both dropouts; giving one of them beside it is a contradiction."""
    if "model.dropout" not in flat:
        return flat
    text = flat["model.dropout"]
    parse(KEYS["model.dropout"], text)
    both = ("model.hidden_dropout", "model.attention_dropout")
    for name in both:
        if name in flat:
            raise InputError("model.dropout", shown(text), f"stands for {both[0]} and {both[1]}, and {name} is given too")
    return {name: value for name, value in flat.items() if name != "model.dropout"} | dict.fromkeys(both, text)


def _merge(layers: Sequence[Flat]) -> Flat:
    """Later layers win; model.hf_config drops the model below."""
    merged: Flat = {}
    for layer in layers:
        if "model.hf_config" in layer:
            merged = {name: value for name, value in merged.items() if not name.startswith("model.")}
        check_layer(layer)
        merged = without_replaced(merged, layer) | _expand_dropout(layer)
    return merged


def _value(flat: Flat, name: str, default: Any) -> Any:
    """The parsed value of a key, or the default where it is not given."""
    return parse(KEYS[name], flat[name]) if name in flat else default


def _group(flat: Flat, group: str) -> dict[str, Any]:
    """Parsed values of `<group>.*` by their short names; what is not given stays out."""
    return {name.partition(".")[2]: parse(KEYS[name], value) for name, value in flat.items() if name.startswith(f"{group}.")}


def _texts(flat: Flat, group: str) -> dict[str, str]:
    """Of a group whose members are read elsewhere; null: as if it were not given."""
    return {name: value for name, value in _group(flat, group).items() if value is not None}


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
    text = _value(flat, name, "")
    if text and "entry" not in flat:
        raise InputError(name, shown(text), OWN_PROGRAM)
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise InputError(name, shown(text), f"can't be split into words: {error}") from None


def _of_entry(flat: Flat, name: str, default: Any) -> Any:
    if name in flat and "entry" not in flat:
        raise InputError(name, shown(flat[name]), OWN_PROGRAM)
    return _value(flat, name, default)


def _open_batch(flat: Flat, engine: str) -> bool:
    """Whether the batch is searched. Raises InputError for an engine that trains: its batch decides convergence."""
    chosen: str = _value(flat, "search.global_batch_size", "given")
    if chosen == "auto" and engine != LAYERWISE:
        raise InputError("search.global_batch_size", chosen, f"is for engine={LAYERWISE}; other engines train the batch given", ["given"])
    return chosen == "auto"


def _entry(flat: Flat) -> str | None:
    """Absolute. It need not be on this machine: it may lie in a container, or on the nodes alone."""
    path = _value(flat, "entry", None)
    return None if path is None else str(Path(path).absolute())


# --------------------------------------------------------------------------------------------------- model and training


def _label_of(merged: Flat) -> str:
    """A name for a run without a recipe: the folder of the Hugging Face config, or model.name."""
    if "model.name" in merged:
        return str(_value(merged, "model.name", ""))
    if "model.hf_config" in merged:
        return Path(str(merged["model.hf_config"])).resolve().parent.name or "model"
    if "model.family" in merged:
        return str(_value(merged, "model.family", ""))
    raise InputError("recipe", None, "is missing: name one, or give model.hf_config=path/to/config.json", stored("models"))


def _architecture(merged: Flat, label: str) -> Architecture:
    fields = {name: value for name, value in _group(merged, "model").items() if name not in NOT_ARCHITECTURE}
    path = _value(merged, "model.hf_config", None)
    if path is not None:
        base = families.from_hf_config(_json(path), label)
        return msgspec.structs.replace(base, **fields)
    fields.setdefault("name", label)
    for info in msgspec.structs.fields(Architecture):
        if info.default is msgspec.NODEFAULT and info.name not in fields:
            raise InputError(f"model.{info.name}", None, "is missing: the recipe has none, so give it (or model.hf_config)")
    return Architecture(**fields)


def _json(path: str) -> dict[str, Any]:
    if Path(path).is_dir():
        raise InputError("model.hf_config", shown(path), "is a folder; give the path of its config.json")
    try:
        found = json.loads(read_text(Path(path)))
    except InputError as error:
        raise InputError("model.hf_config", shown(path), error.why) from None
    except (ValueError, RecursionError) as error:
        raise InputError("model.hf_config", shown(path), f"is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise InputError("model.hf_config", shown(path), "is not a JSON object")
    return found


def _training(merged: Flat) -> Training:
    fields = {name: value for name, value in _group(merged, "train").items() if name in Training.__struct_fields__}
    for name in ("global_batch_size", "seq_length"):
        if name not in fields:
            raise InputError(f"train.{name}", None, "is missing: the recipe has none, so give it")
    if "seed" in merged:
        fields["seed"] = _value(merged, "seed", None)
    training = Training(**fields)
    if training.min_lr > training.lr:
        raise InputError("train.min_lr", training.min_lr, f"is above train.lr={training.lr}")
    if training.warmup > training.steps:
        raise InputError("train.warmup", training.warmup, f"is longer than the training, train.steps={training.steps}")
    return training


def padded_for_every_layout(architecture: Architecture, cluster: Cluster) -> Architecture:
    """With one size of the padded vocabulary under every tensor-parallel size that a search on this cluster compares: they divide the GPUs
    and the attention heads. Nothing changes where those are powers of two and the vocabulary is padded to a multiple of 128."""
    unit = lcm(max(1, architecture.make_vocab_size_divisible_by), gcd(cluster.num_gpus, architecture.num_attention_heads))
    return msgspec.structs.replace(architecture, make_vocab_size_divisible_by=unit)


def _check_positions(architecture: Architecture, training: Training) -> None:
    """Rotary positions have a stated range too: beyond it the model is another one. (Learned ones: model/families/check.py.)"""
    longest = architecture.max_position_embeddings
    if architecture.position_embedding == "rope" and training.seq_length > longest:
        raise InputError(
            "train.seq_length", training.seq_length, f"is beyond model.max_position_embeddings={longest}; raise that if it is meant"
        )


def _check_precision(training: Training, cluster: Cluster) -> None:
    fast = [name for name in ("bf16", "fp16", "fp8", "fp32") if name in cluster.gpu.peak_flops]
    if training.precision not in fast:
        raise InputError("train.precision", training.precision, f"{cluster.gpu.name} has no fast path for it", fast)


def _with_fp8_recipe(training: Training, cluster: Cluster) -> Training:
    """FP8's scaling where it is left open: what NVIDIA's recipes take, mxfp8 on Blackwell and tensorwise before it."""
    if training.precision != "fp8":
        if training.fp8_recipe is not None:
            raise InputError("train.fp8_recipe", training.fp8_recipe, f"is for train.precision=fp8, not {training.precision}")
        return training
    if training.fp8_recipe is not None:
        return training
    return msgspec.structs.replace(training, fp8_recipe="mxfp8" if cluster.gpu.has_mxfp8 else "tensorwise")


def _run(merged: Flat, base: RunSettings, architecture: Architecture) -> RunSettings:
    """Data, tokenizer, weights and resume must be there: a job that dies for them at its first step is found out here."""
    resume = _value(merged, "train.resume", base.resume)
    wandb = base.wandb | _group(merged, "wandb")
    if wandb and "project" not in wandb:
        raise InputError("wandb.project", None, "is missing: Weights & Biases is used where a project is named")
    return msgspec.structs.replace(
        base,
        **data_settings(merged, base),
        **weight_settings(merged, base, architecture),
        save_every=_value(merged, "train.save_every", base.save_every),
        step_timeout_s=_value(merged, "train.step_timeout_s", base.step_timeout_s),
        resume=None if resume is None else existing_folder("train.resume", resume),
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


def _engine_of_checkpoint(resume: str | None) -> str | None:
    """Which engine wrote the checkpoint (its marker is written by workers/checkpoint.py); no other engine reads it. Raises InputError."""
    if resume is None or not Path(resume).is_dir():
        return None  # _run says what is wrong
    for marker in (Path(resume) / "checkpoints" / "latest.json", Path(resume) / "latest.json"):
        if marker.is_file():
            try:
                return str(json.loads(read_text(marker))["layout"]["engine"])
            except (ValueError, KeyError, TypeError):
                raise InputError("train.resume", shown(resume), f"{marker} is not a checkpoint's marker") from None
    raise InputError("train.resume", shown(resume), "holds no finished checkpoint (checkpoints/latest.json)")



# ------------------------------------------------------------------------------------------------------ cluster, memory


def _cluster(merged: Flat, given: Flat, machine: Machine) -> tuple[Cluster, str]:
    """The cluster, and why. Asked for on the command line, or written out in a resolved recipe: that one. Else the GPUs of this machine
    if they are enough and known; else the recipe's."""
    gpus = _value(merged, "gpus", None)
    node = _value(merged, "gpus_per_node", None)
    raw = merged.get("cluster")
    mixed = _value(merged, "cluster.mixed", None)
    here = _gpu_here(machine, mixed)
    fixed = "cluster" in given or isinstance(raw, dict)
    if not fixed and here is not None and machine.num_gpus >= (gpus or 1):
        cluster = _cluster_here(here, gpus or machine.num_gpus, machine, mixed == "slowest")
        return cluster, f"cluster here, {_counted(cluster)}: this machine has {machine.num_gpus} ({', '.join(_types(machine))})"
    if raw is None:
        from orchestrator.recipe.clusters import names

        raise InputError("cluster", None, f"is missing: the recipe has none, and {_not_here(machine, here is not None, gpus)}", names())
    if gpus is None:
        raise InputError(
            "gpus", None, f"is missing: neither the recipe nor this machine says how many, and {_not_here(machine, False, None)}"
        )
    if isinstance(raw, dict):
        cluster = cluster_from(raw, "cluster", "cluster", gpus, node, mixed)
        why = "written out in the recipe"
    else:
        name = str(parse(KEYS["cluster"], raw))
        short, tree = read_named("cluster", name, "clusters")
        cluster = cluster_from(tree, short, name, gpus, node, mixed)
        why = "asked for" if fixed else f"the recipe's, as {_not_here(machine, here is not None, gpus)}"
    return cluster, f"cluster {cluster.name}, {_counted(cluster)}: {why}"


def _types(machine: Machine) -> tuple[str, ...]:
    return machine.gpu_types or ((machine.gpu_name,) if machine.gpu_name else ())


def _gpu_here(machine: Machine, mixed: str | None) -> Gpu | None:
    """The type of this machine's GPUs, with cluster.mixed=slowest what all of them can do; None: several, none, or not in the catalog."""
    if machine.catalog_name:
        return GPUS[machine.catalog_name]
    if mixed != "slowest":
        return None
    found = [by_driver_name(name) for name in machine.gpu_types]
    known = [gpu for gpu in found if gpu is not None]
    return slowest(known) if known and len(known) == len(found) else None


def _not_here(machine: Machine, known: bool, gpus: int | None) -> str:
    if not machine.num_gpus:
        return "this machine has no GPU"
    if machine.gpu_name is None:
        types = ", ".join(machine.gpu_types)
        unknown = [name for name in machine.gpu_types if by_driver_name(name) is None]
        what = f"{unknown[0]} is not in the catalog" if unknown else "cluster.mixed=slowest plans for what all of them can do"
        return f"the {machine.num_gpus} GPUs of this machine are of several types ({types}; {what})"
    if not known:
        return f"{machine.gpu_name}, of this machine, is not in the catalog"
    return f"this machine has {machine.num_gpus} of the {gpus} GPUs"


def _counted(cluster: Cluster) -> str:
    """`4 x H200` or `2 nodes of 8 x H100-SXM-80GB`; ranks on a machine without GPUs."""
    what = "gloo ranks" if cluster.is_cpu else f"x {cluster.gpu.name}"
    if cluster.num_nodes == 1:
        return f"{cluster.num_gpus} {what}"
    return f"{cluster.num_nodes} nodes of {cluster.gpus_per_node} {what}"


def _cluster_here(gpu: Gpu, num_gpus: int, machine: Machine, mixed: bool) -> Cluster:
    """The GPUs of this machine as one node; the link between them from what the driver says of NVLink. Bridged pairs of PCIe cards count
    as PCIe: a job over all cards crosses it."""
    linked = machine.nvlink and gpu.nvlink > 0
    name, bandwidth, latency = ("nvlink", gpu.nvlink, NVLINK_LATENCY) if linked else ("pcie", gpu.pcie, PCIE_LATENCY)
    return Cluster(
        name="here",
        gpu=gpu,
        num_gpus=num_gpus,
        gpus_per_node=machine.num_gpus,
        levels=(Level(name=name, size=machine.num_gpus, bandwidth=bandwidth, latency=latency, source="nvidia-smi, NVIDIA datasheets"),),
        host_bandwidth=gpu.pcie,
        host_memory=machine.host_memory // machine.num_gpus,
        software=Software(
            transformer_engine=machine.transformer_engine and gpu.has_fused_attention,
            flash_attention=machine.flash_attention and gpu.has_fused_attention,
            apex=machine.apex,
        ),
        mixed=mixed,
    )


NVLINK_LATENCY, PCIE_LATENCY = 1.9 * US, 2.5 * US
"""A hop's: NCCL's own tuning constants (src/graph/tuning.cc, ring, LL128)."""


def _calibration(merged: Flat) -> str | None:
    """A file's or folder's whole path, so that config.yaml finds it from anywhere; a name as it is."""
    given = _value(merged, "calibration", None)
    path = Path(str(given))
    return given if given is None or not path.exists() else str(path.resolve())


def _limit(merged: Flat, cluster: Cluster) -> MemoryLimit:
    has = cluster.gpu.memory
    limit = has if "memory.limit_gib" not in merged else round(_value(merged, "memory.limit_gib", None) * GIB)
    if limit > has and not cluster.is_cpu:
        raise InputError("memory.limit_gib", merged["memory.limit_gib"], f"is more than a {cluster.gpu.name} has, {has / GIB:.2f}")
    reserve = round(_value(merged, "memory.reserve_gib", None) * GIB) if "memory.reserve_gib" in merged else None
    if reserve is not None and reserve >= limit:
        raise InputError("memory.reserve_gib", merged["memory.reserve_gib"], f"leaves nothing of {format_bytes(limit)}")
    return MemoryLimit(limit=limit, reserve=reserve)


# ---------------------------------------------------------------------------------------------------------- saved plans


def _plan(merged: Flat) -> Plan | None:
    path = _value(merged, "plan", None)
    if path is None:
        return None
    from orchestrator.plan import from_json

    if Path(path).is_dir():
        raise InputError("plan", shown(path), "is a folder; give the path of its plan.json")
    try:
        text = read_text(Path(path), limit=None)
    except InputError as error:
        raise InputError("plan", shown(path), error.why) from None
    plan = from_json(text, shown(path))
    try:
        _check_values(plan)
    except InputError as error:
        raise InputError("plan", shown(path), str(error)) from None
    return msgspec.structs.replace(plan, predicted=None)  # it is priced again; what a hand has changed there counts for nothing


def _check_values(plan: Plan) -> None:
    """What the search is given must be as sound as if it came from a recipe; search/check.py checks the layout. Raises InputError."""
    if plan.cluster.num_gpus != plan.world_size:
        raise InputError("world_size", plan.world_size, f"its cluster has num_gpus={plan.cluster.num_gpus}")
    for group, values in (("model", plan.model), ("train", plan.training)):
        for name, value in msgspec.structs.asdict(values).items():
            key = KEYS.get(f"{group}.{name}", KEYS.get(name))
            if key is not None and value is not None and not isinstance(value, str | bool):
                check_range(key, str(value), value if isinstance(value, tuple) else (value,))
    check_range(KEYS["gpus"], str(plan.world_size), (plan.world_size,))
    check_range(KEYS["train.save_every"], str(plan.run.save_every), (plan.run.save_every,))
    check_cluster(plan.cluster, "cluster")
    _check_precision(plan.training, plan.cluster)
    families.describe(plan.model, plan.training.seq_length, plan.training.decoder_seq_length)


def _check_agreement(merged: Flat, plan: Plan) -> None:
    """Keys given beside plan= must say what the plan says. Raises InputError naming the first that doesn't."""
    for name, text in merged.items():
        group, _, short = name.partition(".")
        if name in FREE_WITH_PLAN or group in FREE_GROUPS or name == "engine":
            continue
        if name == "cluster":
            there: Any = plan.cluster.name
            asked = text["name"] if isinstance(text, dict) else Path(str(text)).stem
            if there == "here" and not isinstance(text, dict):
                continue
        else:
            asked = parse(KEYS[name], text)
            there = _in_plan(group, short or name, plan)
            if there is Ellipsis:
                continue
        if asked != there:
            raise InputError(name, shown(text), f"the plan says {there}; edit the plan, or search anew without plan=")


def _in_plan(group: str, short: str, plan: Plan) -> Any:
    """What the plan says for a key; Ellipsis where it says nothing that can be compared."""
    if group == "model":
        return getattr(plan.model, short, ...)
    if group == "train":
        return getattr(plan.training, short)
    if group == "pin":
        return getattr(plan, next((choice.name for choice in CHOICES if choice.pin == short), short), ...)
    mixed = "slowest" if plan.cluster.mixed else "refuse"
    facts = {"gpus": plan.world_size, "gpus_per_node": plan.cluster.gpus_per_node, "seed": plan.training.seed, "mixed": mixed}
    return facts.get(short, ...)


# ---------------------------------------------------------------------------------------------------------- written out


def resolved_yaml(settings: Settings, plan_path: str | None = None) -> str:
    """The settings as a recipe: `recipe=config.yaml` gives the same plan on any machine. `plan_path`: the saved plan that was started."""
    training = msgspec.structs.asdict(settings.training)
    seed = training.pop("seed")
    training["betas"] = list(training["betas"])
    reserve = settings.limit.reserve
    run = {name: getattr(settings.run, name) for name in ("save_every", "eval_every", "eval_steps", "step_timeout_s", "resume")}
    tree: dict[str, Any] = {
        "recipe": settings.recipe,
        "engine": settings.engine,
        "gpus": settings.cluster.num_gpus,
        "seed": seed,
        "data": settings.run.data,
        "data.blend": [[source.weight, source.path] for source in settings.run.blend] or None,
        "data.valid": settings.run.valid,
        "data.split": list(settings.run.split) or None,
        "tokenizer": settings.run.tokenizer,
        "plan": plan_path,
        "profile": None if settings.profile is None else _profile_tree(settings.profile),
        "model": _model_tree(settings),
        "train": training | run,
        "pin": msgspec.structs.asdict(settings.pins),
        "memory": {"limit_gib": settings.limit.limit / GIB, "reserve_gib": reserve if reserve is None else reserve / GIB},
        "calibration": settings.calibration,
        "search": {"budget_s": settings.budget_s, "global_batch_size": "auto" if settings.open_batch else None},
        "entry": settings.entry,
        "entry.args": shlex.join(settings.entry_args) or None,
        "entry.without": shlex.join(settings.entry_without) or None,
        "entry.launcher": settings.entry_launcher if settings.entry else None,
        "entry.preflight": settings.entry_preflight if settings.entry else None,
        "wandb": settings.run.wandb,
        **{group: {name: "null" if value is None else value for name, value in values.items()} for group, values in settings.extra.items()},
        "slurm": slurm_tree(settings.slurm),
        "container": container_tree(settings.container),
        "env": settings.env,
        "cluster": to_tree(settings.cluster),
    }
    kept = {name: value for name, value in _without_none(tree).items() if value != {}}
    head = f"# {settings.why_cluster}\n# Run it again: python -m orchestrator.run recipe=THIS_FILE\n"
    return head + yaml.dump(kept, Dumper=_Dumper, sort_keys=False, width=10**6, allow_unicode=True)


def _model_tree(settings: Settings) -> dict[str, Any]:
    """The architecture and where weights come from and go to; nothing for a model that only a profile describes."""
    if settings.architecture.family == FAMILY:
        return {}
    tree: dict[str, Any] = msgspec.to_builtins(settings.architecture)
    return tree | {name: getattr(settings.run, name) for name in ("init_from", "export_to")}


def _profile_tree(profile: Profile) -> dict[str, Any]:
    """In seconds and bytes, without the name, which is the recipe's."""
    tree: dict[str, Any] = msgspec.to_builtins(profile, str_keys=True)
    del tree["name"]
    return tree


def _without_none(tree: dict[str, Any]) -> dict[str, Any]:
    return {name: _without_none(value) if isinstance(value, dict) else value for name, value in tree.items() if value is not None}


class _Dumper(yaml.SafeDumper):
    """Numbers exact and readable by parse()."""


def _exact(value: float) -> str:
    """repr, with the point without which YAML takes it for a word.

    >>> _exact(1e-05), _exact(0.25)
    ('1.0e-05', '0.25')
    """
    text = repr(value)
    return text if "." in text else text.replace("e", ".0e")


_Dumper.add_representer(float, lambda dumper, value: dumper.represent_scalar("tag:yaml.org,2002:float", _exact(value)))
