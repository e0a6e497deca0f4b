"""KEYS: every key that a recipe or the command line may have. Each is declared once, in the annotation of the field that its value goes to:
of the model, the training, the run, Slurm's and containers' options, or of the two structs here. `pin.*` and `explain.*` come from the
choices of strategy/spec.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Final, Literal, get_args

import msgspec

from orchestrator.cost.profile import Profile
from orchestrator.engines import passthrough
from orchestrator.engines.tools import NAMES
from orchestrator.errors import InputError
from orchestrator.job import ContainerOptions, Scheduler, SlurmOptions, check_variable, listed
from orchestrator.key import RATES, Key, amount, count, declared, one_text, options_of, quantity, share, words
from orchestrator.model.lora import Lora
from orchestrator.model.spec import Architecture
from orchestrator.model.training import Training
from orchestrator.plan import RunSettings, Source
from orchestrator.recipe.cluster_fields import cluster_field
from orchestrator.recipe.profiles import read_profile
from orchestrator.recipe.sources import blend_of, split_of
from orchestrator.rl.job import RlKeys
from orchestrator.strategy.choices import Choice
from orchestrator.strategy.choices import shown as shown_choice
from orchestrator.strategy.pins import LAYOUT
from orchestrator.strategy.spec import CHOICES
from orchestrator.values import Value

Launch = Literal["auto", "none", "local", "slurm"]
Launcher = Literal["torchrun", "deepspeed"]
Prefer = Literal["fastest", "plain"]
Mixed = Literal["refuse", "slowest", "stages"]
TrainedBy = Literal["auto", "own", "instrument"]
Largest = Literal["seq_length", "global_batch_size", "num_layers"]

MAX_GPUS: Final = 1_000_000


def name_or_mapping(name: str, text: Any) -> str | dict[str, Any]:
    """A cluster's name or path, or (in a recipe) its content, which recipe/clusters.py reads. Raises InputError."""
    return text if isinstance(text, dict) and text else one_text(name, text)


def rate(name: str, text: Any) -> float:
    """Bytes/s of a number and a unit. Raises InputError."""
    return quantity(name, text, RATES)


def written_for(name: str, text: Any) -> tuple[str, ...]:
    """The schedulers and programs of a list with commas, each once. Raises InputError.

    >>> written_for("write", "pbs,verl,pbs")
    ('pbs', 'verl')
    """
    choices = (*get_args(Scheduler), *NAMES)
    for part in listed(name, text):
        if part not in choices:
            raise InputError(name, part, "is no scheduler or program that is written for; Slurm's job.sbatch always is", choices)
    return tuple(dict.fromkeys(listed(name, text)))


class Inputs(Value, frozen=True, kw_only=True):
    """Where model, cluster and plan come from: what is read, looked up or converted before it is a setting."""

    recipe: Annotated[
        str | None, Key("recipe", "name or path of a YAML; --help lists the names; in a YAML: the recipe that it builds on", path=True)
    ] = None
    name: Annotated[str | None, Key("name", "how the run is called", default="the recipe's")] = None
    cluster: Annotated[
        str | dict[str, Any] | None,
        Key("cluster", "name or path of a YAML", default="GPUs found here, else the recipe's", read=name_or_mapping, path=True, type=str),
    ] = None
    mixed: Annotated[Mixed | None, Key(
        "cluster.mixed", "GPUs of several types; slowest: plan for what all of them can do; stages: each pipeline stage for its own type",
        type=Mixed, default="refuse; stages with cluster.gpu='8 x H100-SXM-80GB + 16 x A100-SXM-80GB'")] = None  # fmt: skip
    gpus: Annotated[int | None, Key("gpus", "how many", type=int, default="the recipe's, else all found here", low=1, high=MAX_GPUS)] = None
    gpus_per_node: Annotated[
        int | None, Key("gpus_per_node", "GPUs of a node", type=int, default="the cluster's", low=1, high=MAX_GPUS)
    ] = None
    plan: Annotated[str | None, Key("plan", "a plan.json to check, price and start in place of a search", path=True)] = None
    profile: Annotated[Profile | None, Key(
        "profile", "measured layers in place of the analytic model (a mapping in a recipe; engine=layerwise)", type=dict,
        read=read_profile)] = None  # fmt: skip
    hf_config: Annotated[
        str | None,
        Key("model.hf_config", "config.json of a Hugging Face model; one that no reader knows is described by its own code", path=True),
    ] = None
    description: Annotated[
        str | None, Key("model.description", "a file of python -m orchestrator.describe: a model by its own code", path=True)
    ] = None
    code: Annotated[str | None, Key("model.code", "package.module:factory of a model of your own, as orchestrator.describe takes it")] = (
        None
    )
    routing: Annotated[str | None, Key(
        "model.routing", "how unevenly tokens go to experts: a trace (JSON lines), or the multiple of an even share that the busiest gets",
        type=str, default="even")] = None  # fmt: skip
    aux_loss_coeff: Annotated[float | None, Key(
        "model.aux_loss_coeff", "weight of the loss that balances experts' load; 0: none", type=float, default="the model's own", low=0,
        below=1)] = None  # fmt: skip
    dropout: Annotated[float | None, Key("model.dropout", "hidden and attention dropout together", type=float, low=0, below=1)] = None
    blend: Annotated[
        tuple[Source, ...], Key("data.blend", "weighted sources in place of data: 0.7 a.txt 0.3 b.jsonl", type=str, read=blend_of)
    ] = ()
    split: Annotated[
        tuple[float, ...],
        Key("data.split", "shares of each source to train on, to evaluate on and to leave alone: 99,1,0", type=str, read=split_of),
    ] = ()
    lengths: Annotated[str | None, Key(
        "data.lengths",
        "of task=sft before there is data=: tokens of samples, as a mean (900), a mean and a standard deviation (900+600), or a file "
        "with a length a line", type=str, path=True)] = None  # fmt: skip
    tokens: Annotated[
        int | None,
        Key("train.tokens", "to train, in place of train.steps: 1T, 300B", type=int, read=count, unit="tokens", low=1, high=10**18),
    ] = None
    epochs: Annotated[float | None, Key(
        "train.epochs", "to train, in place of train.steps: passes over the samples of data= (task=sft)", type=float, unit="epochs",
        above=0, high=10**6)] = None  # fmt: skip
    largest: Annotated[
        Largest | None,
        Key("largest", "plan for the most of it that fits in memory; global_batch_size: that needs no gradient accumulation", type=Largest),
    ] = None
    limit_gib: Annotated[float | None, Key("memory.limit_gib", "a rank may use", type=float, unit="GiB", default="the GPU's", above=0)] = (
        None
    )
    reserve_gib: Annotated[
        float | None, Key("memory.reserve_gib", "of it kept free", type=float, unit="GiB", default="what memory.risk asks for", low=0)
    ] = None
    risk: Annotated[float | None, Key(
        "memory.risk", "chance of running out of memory that a plan may have, by how far off measured peaks were: 1%", type=float,
        read=share, default="5% where a plan is so sure; else the engine's reserve, by its own measured peaks")] = None  # fmt: skip
    batch: Annotated[
        Literal["given", "auto"],
        Key("search.global_batch_size", "auto: engine=layerwise takes the batch with most samples/s, up to train.global_batch_size"),
    ] = "given"


class Actions(Value, frozen=True, kw_only=True):
    """How the search goes and what is done with the plan: none of it changes what the plan is for."""

    engine: Annotated[str, Key("engine", "auto or an engine's name")] = "auto"
    out: Annotated[str | None, Key("out", "folder to write; must be new or empty", type=str, default="runs/<recipe>-<time>")] = None
    launch: Annotated[Launch, Key("launch", "whether and how to start")] = "auto"
    take: Annotated[
        int | None,
        Key("take", "plan, or start, the one with this number among the alternatives", type=int, default="1, the fastest", low=1, high=64),
    ] = None
    verbose: Annotated[bool, Key("verbose", "print each stage and cause, and all that was searched and not asked for")] = False
    made_up_data: Annotated[
        bool, Key("data.made_up", "start on GPUs without data=, on Python's own sources or drawn batches: a trial, no training")
    ] = False
    write: Annotated[tuple[str, ...], Key(
        "write", f"files for these schedulers too, beside job.sbatch ({', '.join(get_args(Scheduler))}), and for these programs in place "
        f"of our worker ({', '.join(NAMES)})", type=str, default="none", read=written_for)] = ()  # fmt: skip
    wait: Annotated[bool, Key("launch.wait", "follow a job submitted with launch=slurm, and return its status")] = False
    rehearse: Annotated[Literal["auto", "true", "false"], Key(
        "rehearse",
        "take the plan's fullest and slowest stage through some micro-batches alone, before the training, which follows unless "
        "launch=none; auto: before a Slurm job, where this machine has its GPU. Without its GPU: build its first, middle and last rank "
        "without memory")] = "auto"  # fmt: skip
    tune: Annotated[int | None, Key(
        "tune", "so many of the plans that may be best run some steps each, where this command runs, and the fastest is trained; what our "
        "workers' timers teach goes into the prices, and entry='s program runs without saving; the same command with the same out= "
        "goes on with a tune that was cut off", type=int, default="none", unit="plans", low=1, high=64)] = None  # fmt: skip
    tune_steps: Annotated[int, Key("tune.steps", "of each plan that tune= tries", unit="steps", low=2, high=10**6)] = 10
    tune_rounds: Annotated[int, Key(
        "tune.rounds", "of the plans that tune= tried, those too close to tell apart run so often at most; plans of one round are compared",
        unit="runs", low=1, high=64)] = 3  # fmt: skip
    program: Annotated[TrainedBy, Key(
        "program",
        "what trains; own: the engine's own training loop (orchestrator/programs); instrument: our worker, where the engine has one; auto: "
        "own where that can run the plan")] = "auto"  # fmt: skip
    entry: Annotated[
        str | None, Key("entry", "a program to start in place of our worker: a pretrain_gpt.py, or a DeepSpeed script", path=True)
    ] = None
    entry_args: Annotated[tuple[str, ...], Key("entry.args", "more arguments for it, in quotes", type=str, read=words)] = ()
    entry_launcher: Annotated[Launcher, Key("entry.launcher", "of a DeepSpeed script's ranks; deepspeed: its own, with a hostfile")] = (
        "torchrun"
    )
    entry_preflight: Annotated[bool, Key("entry.preflight", "check nodes and groups before it starts, as our worker does")] = False
    entry_without: Annotated[
        tuple[str, ...], Key("entry.without", "flags of ours that it shall not get (--async-save --log-straggler)", type=str, read=words)
    ] = ()
    price_per_gpu_hour: Annotated[float | None, Key(
        "cluster.price_per_gpu_hour", "what an hour of a GPU costs, in any currency: plans say what the training costs; a cluster's YAML "
        "may have it too", type=float, above=0)] = None  # fmt: skip
    mtbf_hours: Annotated[
        float | None,
        Key("cluster.mtbf", "mean time between failures of one node: plans say what failures cost", type=float, unit="hours", above=0),
    ] = None
    storage_bandwidth: Annotated[
        float | None, Key("cluster.storage", "at which all ranks together write a checkpoint, and read it (40 GB/s)", type=str, read=rate)
    ] = None
    restart_s: Annotated[
        float, Key("cluster.restart_s", "from a failure to the first step, less the reading of the checkpoint", unit="s", low=0)
    ] = 300.0
    calibration: Annotated[str | None, Key(
        "calibration", "prices: a file or folder that orchestrator.calibrate wrote, a shipped file's name, shipped, or datasheet",
        default="shipped, or the folder in ORCHESTRATOR_CALIBRATIONS", path=True)] = None  # fmt: skip
    explain_gpus: Annotated[int | None, Key(
        "explain.gpus", "what the training would be on so many: when a node is lost, say", type=int, default="nothing is asked", low=1,
        high=MAX_GPUS)] = None  # fmt: skip
    budget_s: Annotated[
        float | None,
        Key("search.budget_s", "after which the search ends with the best so far", type=float, unit="s", default="none", above=0),
    ] = None
    prefer: Annotated[Prefer, Key(
        "search.prefer",
        "which plan is taken: the fastest by price, or of those that prices don't tell from it the plain one, with the fewest choices "
        "that hardly any published run has")] = "plain"  # fmt: skip


class Targets(Value, frozen=True, kw_only=True):
    """What the training must reach: the answer is the least GPUs, `gpus=` at most; of a cost alone those that end soonest within it."""

    days: Annotated[float | None, Key("target.days", "the training may take", type=float, unit="days", above=0)] = None
    tokens_per_s: Annotated[float | None, Key(
        "target.tokens_per_s", "all GPUs together do: 2.5M", type=float, read=amount, unit="tokens/s", above=0
    )] = None  # fmt: skip
    cost: Annotated[float | None, Key(
        "target.cost", "the training may cost, as 10M (cluster.price_per_gpu_hour=); alone it asks for the soonest end", type=float,
        read=amount, above=0
    )] = None  # fmt: skip

    @property
    def of_cost_alone(self) -> bool:
        """Whether nothing but a cost is asked for."""
        return [*self.given()] == ["cost"]

    def given(self) -> dict[str, float]:
        """The targets that are set, by name."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}


FREE_WITH_PLAN: Final = (RunSettings, Actions, SlurmOptions, ContainerOptions)
"""Structs whose keys may be said beside a saved plan, whatever it says: they change no plan."""


class OpenGroup(Value, frozen=True, kw_only=True):
    """A group whose members the user names: env.NCCL_DEBUG=INFO. `read` takes group, name and text."""

    name: str
    help: str
    read: Any


def variable(group: str, name: str, text: Any) -> str:
    """The value of an environment variable. Raises InputError for what is no text, and for names that can't be given to a job."""
    full = f"{group}.{name}"
    if text != "":  # a variable may be empty
        one_text(full, text)
    check_variable(name, text)
    return str(text)


OPEN_GROUPS: Final = {
    group.name: group
    for group in (
        OpenGroup(
            name="cluster",
            help="a field of the cluster over its YAML's: host_memory, levels.infiniband.bandwidth (200 Gbit/s), gpu.memory, software.apex",
            read=cluster_field,
        ),
        OpenGroup(name="env", help="variable of the job's environment, beside what the plan needs", read=variable),
        OpenGroup(
            name="megatron",
            help="a field of Megatron-core's configurations or a flag of Megatron-LM (init_method_std, --log-throughput)",
            read=passthrough.read,
        ),
        OpenGroup(name="ds", help="a path of the ds_config (zero_optimization.overlap_comm)", read=passthrough.read),
    )
}


def pin_key(choice: Choice, group: str = "pin") -> Key:
    """Fixes a choice, or asks why the plan has another."""
    degree = int in options_of(choice.pin_type)
    text, default = choice.doc, "searched" if choice.searched or choice.fixed_with else shown_choice(choice.default)
    if group == "explain":
        text, default = f"why the plan is not that with pin.{choice.pin}=", "nothing is asked"
    low, high = (1, 10**12 if choice.unit == "parameters" else MAX_GPUS) if degree else (None, None)
    aliases = (f"{group}.{choice.short}",) if choice.short and choice.short != choice.pin else ()  # as it is printed
    return Key(
        f"{group}.{choice.pin}", text, type=choice.pin_type | None, default=default, unit=choice.unit, low=low, high=high, aliases=aliases,
        read=choice.read, field=choice.pin,
    )  # fmt: skip


def in_groups(keys: Iterable[Key]) -> list[Key]:
    """Keys of a group together, those of none first; else as they come."""
    found = list(keys)
    names = {key.name for key in found}
    groups = [group_of(key, names) for key in found]
    order = ["", *dict.fromkeys(groups)]
    return [key for _, key in sorted(zip(groups, found, strict=True), key=lambda pair: order.index(pair[0]))]


def group_of(key: Key, names: Iterable[str]) -> str:
    """The group of a key: "train" of train.lr; "" for a key of no group, and for one that stands beside the key it is named after
    (launch.wait)."""
    first = key.name.partition(".")[0]
    return "" if first in names else first


def _with_aliases(keys: Iterable[Key]) -> Iterable[Key]:
    for key in keys:
        yield key
        for alias in key.aliases:
            yield msgspec.structs.replace(key, name=alias, help=f"the same as {key.name}", default="", aliases=())


DECLARED: Final = in_groups(
    _with_aliases(
        [
            *declared(Inputs, Actions, Targets, RlKeys, RunSettings, Architecture, Training, Lora),
            *(pin_key(choice, group) for group in ("pin", "explain") for choice in (*CHOICES, LAYOUT)),
            *declared(SlurmOptions, ContainerOptions),
        ]
    )
)
KEYS: Final = {key.name: key for key in DECLARED}
"""Every key by its full name, in the order of --help."""
PRINTED: Final = {alias: key.name for key in DECLARED if key.name.startswith(("pin.", "explain.")) for alias in key.aliases}
"""Choices by the names that screens print them under: pin.mbs."""
GROUPS: Final = tuple(dict.fromkeys([*(name.partition(".")[0] for name in KEYS if "." in name), *OPEN_GROUPS]))
