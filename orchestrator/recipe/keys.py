"""Every key that a recipe or the command line may have: its type, its range, and the parser that turns its text into a value."""

from __future__ import annotations

import json
import math
import re
import types
import typing
from typing import Any, Final, Literal, Union

import msgspec

from orchestrator.errors import InputError
from orchestrator.model.spec import Architecture
from orchestrator.model.training import Training
from orchestrator.strategy.choices import Choice
from orchestrator.strategy.choices import shown as shown_choice
from orchestrator.strategy.pins import LAYOUT
from orchestrator.strategy.spec import CHOICES
from orchestrator.values import Value

Launch = Literal["auto", "none", "local", "slurm"]
Launcher = Literal["torchrun", "deepspeed"]
Mixed = Literal["refuse", "slowest"]

MAX_GPUS: Final = 1_000_000

SLURM_KEYS: Final = {
    "partition": "partition to submit to",
    "account": "account to charge",
    "qos": "quality of service",
    "time": "limit, as sbatch takes it (12:30:00)",
    "nodes": "number of nodes; default: what the plan needs",
    "nodelist": "hosts to use",
    "exclude": "hosts to leave out",
    "constraint": "node features",
    "gres": "generic resources in place of --gpus-per-node; none: ask for none (sites that hand out whole nodes)",
    "cpus_per_task": "cores of a task",
    "mem": "host memory of a node",
    "exclusive": "true: whole nodes",
    "reservation": "reservation name",
    "dependency": "as sbatch takes it (afterok:1234)",
    "switches": "leaf switches at most",
    "segment": "nodes per block (topology/block)",
    "extra": "more options of sbatch, in quotes (--comment=x --nice)",
    "style": "torchrun: one task a node, default; srun: one task a rank",
    "python": "the ranks' interpreter; default: this one where it has the engines, else the PATH's",
    "requeue": "times to go back into the queue and on from the newest checkpoint; default: 0",
}
CONTAINER_KEYS: Final = {
    "image": "that ranks run in under Slurm: pyxis' name or .sqsh, or apptainer's .sif",
    "mounts": "HOST:CONTAINER[:ro],... beside the run's folder",
    "workdir": "in the container; default: the run's folder",
    "runtime": "pyxis or apptainer; default: apptainer for .sif",
}
OPEN_GROUPS: Final = {
    "env": "variable of the job's environment, beside what the plan needs",
    "megatron": "a field of Megatron-core's configurations or a flag of Megatron-LM (init_method_std, --log-throughput)",
    "ds": "a path of the ds_config (zero_optimization.overlap_comm)",
}
"""Groups whose members the user names: env.NCCL_DEBUG=INFO."""


class Key(Value, frozen=True, kw_only=True):
    """One key: the type that parses it, and the range that it may have. `default` is shown by --help."""

    name: str
    type: Any
    help: str
    default: str = ""
    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None


# --------------------------------------------------------------------------------------------------------------- keys


def _keys() -> dict[str, Key]:
    """Every key by its full name, in the order of --help."""
    architecture = typing.get_type_hints(Architecture)
    training = typing.get_type_hints(Training)
    defaults = {info.name: info.default for info in msgspec.structs.fields(Training) if info.default is not msgspec.NODEFAULT}

    def train(name: str, text: str, **limits: float) -> Key:
        default = defaults.get(name, "")
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else str(default) if default is not None else ""
        return Key(name=f"train.{name}", type=training[name], help=text, default=shown, **limits)

    keys = [
        Key(name="recipe", type=str, help="name or path of a YAML; --help lists the names; in a YAML: the recipe that it builds on"),
        Key(name="name", type=str, help="how the run is called", default="the recipe's"),
        Key(name="cluster", type=str, help="name or path of a YAML", default="GPUs found here, else the recipe's"),
        Key(name="cluster.mixed", type=Mixed, help="GPUs of several types; slowest: plan for what all of them can do", default="refuse"),
        Key(name="gpus", type=int, help="how many", default="the recipe's, else all found here", low=1, high=MAX_GPUS),
        Key(name="gpus_per_node", type=int, help="GPUs of a node", default="the cluster's", low=1, high=MAX_GPUS),
        Key(name="engine", type=str, help="auto or an engine's name", default="auto"),
        Key(name="out", type=str, help="folder to write; must be new or empty", default="runs/<recipe>-<time>"),
        Key(name="launch", type=Launch, help="whether and how to start", default="auto"),
        Key(name="launch.wait", type=bool, help="follow a job submitted with launch=slurm, and return its status", default="false"),
        Key(name="entry", type=str, help="a program to start in place of our worker: a pretrain_gpt.py, or a DeepSpeed script"),
        Key(name="entry.args", type=str, help="more arguments for it, in quotes"),
        Key(
            name="entry.launcher",
            type=Launcher,
            help="of a DeepSpeed script's ranks; deepspeed: its own, with a hostfile",
            default="torchrun",
        ),
        Key(name="entry.preflight", type=bool, help="check nodes and groups before it starts, as our worker does", default="false"),
        Key(name="entry.without", type=str, help="flags of ours that it shall not get (--async-save --log-straggler)"),
        Key(name="seed", type=int, help="of weights and data", default=str(defaults["seed"]), low=0, high=2**31 - 1),
        Key(name="data", type=str, help="text, jsonl or a Megatron .bin/.idx prefix", default="Python's own sources, byte by byte"),
        Key(name="data.train", type=str, help="the same as data"),
        Key(name="data.blend", type=str, help="weighted sources in its place: 0.7 a.txt 0.3 b.jsonl"),
        Key(name="data.valid", type=str, help="a source to evaluate on"),
        Key(name="data.split", type=str, help="shares of each source to train on, to evaluate on and to leave alone: 99,1,0"),
        Key(name="data.tokenizer", type=str, help="the same as tokenizer"),
        Key(name="tokenizer", type=str, help="folder of a Hugging Face tokenizer", default="bytes"),
        Key(name="plan", type=str, help="a plan.json to check, price and start in place of a search"),
        Key(name="resume", type=str, help="the same as train.resume"),
        Key(name="profile", type=dict, help="measured layers in place of the analytic model (a mapping in a recipe; engine=layerwise)"),
        Key(name="model.hf_config", type=str, help="config.json of a Hugging Face model of a family we know"),
        Key(name="model.init_from", type=str, help="folder of a Hugging Face checkpoint to begin with", default="weights of the seed"),
        Key(name="model.export_to", type=str, help="new folder for a Hugging Face checkpoint of the last weights", default="none"),
        Key(name="model.dropout", type=float, help="hidden and attention dropout together", low=0, below=1),
    ]
    keys += [_architecture_key(info.name, architecture[info.name]) for info in msgspec.structs.fields(Architecture)]
    keys += [
        train("global_batch_size", "sequences of one step", low=1, high=10**9),
        train("seq_length", "tokens of a sequence (an encoder's)", low=1, high=10**9),
        train("decoder_seq_length", "tokens of a decoder's sequence (t5)", low=1, high=10**9),
        train("precision", "of the matrix products"),
        train("fp8_recipe", "how FP8 tensors are scaled; default: tensorwise before Blackwell, mxfp8 on it"),
        train("optimizer", "which"),
        train("lr", "peak learning rate", above=0),
        train("min_lr", "at the end of the schedule", low=0),
        train("schedule", "after the warm-up"),
        train("warmup", "steps in which the rate rises from 0 (in the first step) to lr", low=0, high=10**12),
        train("betas", "of adamw", low=0, below=1),
        train("eps", "of adamw", above=0),
        train("weight_decay", "decoupled", low=0),
        train("clip", "global gradient norm; 0: none", low=0),
        train("grad_reduce_dtype", "what crosses the data-parallel network"),
        train("grad_accum_dtype", "what micro-batches are summed in"),
        train("precision_aware_optimizer", "Transformer Engine's Adam, whose states take fewer bytes (megatron)"),
        train("exp_avg_dtype", "of Adam's first moment, with precision_aware_optimizer"),
        train("exp_avg_sq_dtype", "of its second moment"),
        train("steps", "to train", low=1, high=10**12),
        Key(name="train.eval_every", type=int, help="steps between evaluations; 0: none", default="0", low=0, high=10**12),
        Key(name="train.eval_steps", type=int, help="global batches of an evaluation, at most", default="10", low=1, high=10**9),
        Key(name="train.save_every", type=int, help="steps between checkpoints; 0: none", default="0", low=0, high=10**12),
        Key(name="train.step_timeout_s", type=float, help="seconds after which a part of a step has hung; 0: never", default="1800", low=0),
        Key(name="train.keep_last", type=int, help="newest checkpoints to keep; 0: all", default="0", low=0, high=10**9),
        Key(name="train.keep_every", type=int, help="keep those of every so many steps beside them", default="0", low=0, high=10**12),
        Key(name="train.resume", type=str | None, help="run or checkpoint folder to continue from; alone it brings its run's recipe"),
        Key(name="train.change", type=str | None, help="settings that shall differ from the checkpoint's: lr,steps"),
    ]
    keys += [_pin_key(choice, group) for group in ("pin", "explain") for choice in (*CHOICES, LAYOUT)]
    keys += [
        Key(name="memory.limit_gib", type=float, help="GiB a rank may use", default="the GPU's", above=0),
        Key(name="memory.reserve_gib", type=float, help="GiB of it kept free", default="by the engine's measured peaks", low=0),
        Key(
            name="calibration",
            type=str,
            help="prices: a file or folder that orchestrator.calibrate wrote, a shipped file's name, shipped, or datasheet",
            default="shipped, or the folder in ORCHESTRATOR_CALIBRATIONS",
        ),
        Key(name="search.budget_s", type=float, help="seconds after which the search ends with the best so far", default="none", above=0),
        Key(
            name="search.global_batch_size",
            type=Literal["given", "auto"],
            help="auto: engine=layerwise takes the batch with most samples/s, up to train.global_batch_size",
            default="given",
        ),
    ]
    keys += [Key(name=f"wandb.{name}", type=str, help=f"{name} of Weights & Biases") for name in ("project", "entity", "name")]
    keys += [Key(name=f"slurm.{name}", type=str, help=text) for name, text in SLURM_KEYS.items()]
    keys += [Key(name=f"container.{name}", type=str, help=text) for name, text in CONTAINER_KEYS.items()]
    return {key.name: key for key in keys}


_MODEL_HELP = {
    "family": "gpt, llama, t5 or bert",
    "name": "how the model is called",
    "num_layers": "of the decoder (gpt, llama) or encoder (bert, t5)",
    "decoder_num_layers": "of a t5's decoder",
    "num_query_groups": "key/value heads",
    "kv_channels": "width of one head",
    "max_position_embeddings": "longest sequence",
    "vocab_size": "unpadded",
    "num_token_types": "segment embeddings (bert)",
    "mixer": "what mixes a layer's tokens: {kind: attention, window: 4096}, {kind: latent_attention, ...}",
    "feed_forward": "what works on each token: {kind: mlp}, {kind: experts, num_experts: 8, topk: 2, ...}",
    "pattern": "runs of layers that differ, repeated until num_layers: [{layers: 3}, {layers: 58, feed_forward: ...}]",
    "mtp_num_layers": "layers of multi-token prediction",
}
_MAY_BE_ZERO = ("decoder_num_layers", "num_token_types", "mtp_num_layers")


def _architecture_key(name: str, kind: Any) -> Key:
    """Counts are at least 1, dropout is a probability, the rest is above 0."""
    text = _MODEL_HELP.get(name, name.replace("_", " "))
    default = next(info.default for info in msgspec.structs.fields(Architecture) if info.name == name)
    shown = "" if default is msgspec.NODEFAULT or default is None else str(default)
    options = _options(kind)
    if is_structured(kind):
        return Key(name=f"model.{name}", type=kind, help=text)
    if name.endswith("dropout"):
        return Key(name=f"model.{name}", type=kind, help=text, default=shown, low=0, below=1)
    if int in options:
        return Key(name=f"model.{name}", type=kind, help=text, default=shown, low=0 if name in _MAY_BE_ZERO else 1, high=10**9)
    if float in options:
        return Key(name=f"model.{name}", type=kind, help=text, default=shown, above=0)
    return Key(name=f"model.{name}", type=kind, help=text, default=shown)


def _pin_key(choice: Choice, group: str = "pin") -> Key:
    """Fixes a choice, or asks why the plan has another."""
    degree = int in _options(choice.pin_type)
    text, default = choice.doc, "searched" if choice.searched or choice.fixed_with else shown_choice(choice.default)
    if group == "explain":
        text, default = f"why the plan is not that with pin.{choice.pin}=", "nothing is asked"
    low, high = (1, MAX_GPUS) if degree else (None, None)
    return Key(name=f"{group}.{choice.pin}", type=choice.pin_type | None, help=text, default=default, low=low, high=high)


def _options(kind: Any) -> tuple[Any, ...]:
    """The members of an optional or union type; (kind,) otherwise."""
    return typing.get_args(kind) if isinstance(kind, types.UnionType) or typing.get_origin(kind) is Union else (kind,)


# ------------------------------------------------------------------------------------------------------------- parsing

_INTEGER = re.compile(r"[+-]?[0-9]+(_[0-9]{3})*\Z")
_FLOAT = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\Z")
_NULL = ("null", "~")
MAX_DIGITS: Final = 18
"""An integer of more digits is a slip of the keyboard: nothing here counts beyond 10^18."""


def parse(key: Key, text: Any) -> Any:
    """The value that `text` stands for. Raises InputError that names key, value and choices.

    >>> parse(Key(name="gpus", type=int, help=""), "16"), parse(Key(name="train.lr", type=float, help=""), "3e-4")
    (16, 0.0003)
    >>> parse(Key(name="train.betas", type=tuple[float, float], help=""), "[0.9, 0.95]")
    (0.9, 0.95)
    """
    options = _options(key.type)
    if is_structured(key.type):
        return _parse_structure(key, text)
    if text is None or (type(None) in options and str(text).lower() in _NULL):
        if type(None) in options:
            return None
        raise InputError(key.name, "null", "needs a value")
    kind = next(option for option in options if option is not type(None))
    value = _parse_as(key, kind, text)
    check_range(key, text, value if isinstance(value, tuple) else (value,))
    return value


def is_structured(kind: Any) -> bool:
    """Whether values of this type are groups of keys, or lists of them: parts of layers."""
    members = [inner for option in _options(kind) for inner in (typing.get_args(option) or (option,))]
    return any(isinstance(member, type) and issubclass(member, msgspec.Struct) for member in members)


def _parse_structure(key: Key, tree: Any) -> Any:
    """What YAML's tree of strings, or JSON on a command line, stands for."""
    if isinstance(tree, str) and tree.lower() not in _NULL:
        try:
            tree = json.loads(tree)
        except ValueError:
            raise InputError(key.name, shown(tree), "is not JSON; write it in a recipe, as YAML, or here as JSON") from None
    try:
        return msgspec.convert(tree, key.type, strict=False)
    except msgspec.ValidationError as error:
        raise InputError(key.name, shown(tree), str(error)) from None


def _parse_as(key: Key, kind: Any, text: Any) -> Any:
    origin = typing.get_origin(kind)
    if origin is tuple:
        return _parse_tuple(key, typing.get_args(kind), text)
    if not isinstance(text, str):
        raise InputError(key.name, shown(text), "needs one value, not a list or a group of keys")
    if not text.strip():
        raise InputError(key.name, repr(text), "is empty")
    if origin is Literal:
        choices = typing.get_args(kind)
        for choice in choices:
            if text == str(choice):
                return choice
        raise InputError(key.name, shown(text), "is not known", choices)
    if kind is bool:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise InputError(key.name, shown(text), "is neither", ["true", "false"])
    if kind is int:
        if not _INTEGER.match(text) or len(text) > MAX_DIGITS:
            raise InputError(key.name, shown(text), "is not a whole number" if len(text) <= MAX_DIGITS else "is too long for a number")
        return int(text.replace("_", ""))
    if kind is float:
        value = float(text) if _FLOAT.match(text) else math.nan
        if not math.isfinite(value):
            raise InputError(key.name, shown(text), "is not a finite number")
        return value
    return text


def _parse_tuple(key: Key, kinds: tuple[Any, ...], text: Any) -> tuple[Any, ...]:
    """ "0.9,0.95", "[0.9, 0.95]" or a YAML list."""
    parts = [part.strip() for part in text.strip().removeprefix("[").removesuffix("]").split(",")] if isinstance(text, str) else text
    if not isinstance(parts, list) or len(parts) != len(kinds):
        raise InputError(key.name, shown(text), f"needs {len(kinds)} numbers with a comma between them")
    return tuple(_parse_as(key, kind, part) for kind, part in zip(kinds, parts, strict=True))


def check_range(key: Key, text: Any, values: tuple[Any, ...]) -> None:
    """Raises InputError where one of the values is outside the key's range; `text` is what the message shows."""
    for value in values:
        if key.low is not None and value < key.low:
            raise InputError(key.name, shown(text), f"must be at least {key.low:g}")
        if key.above is not None and value <= key.above:
            raise InputError(key.name, shown(text), f"must be above {key.above:g}")
        if key.high is not None and value > key.high:
            raise InputError(key.name, shown(text), f"must be at most {key.high:.10g}")
        if key.below is not None and value >= key.below:
            raise InputError(key.name, shown(text), f"must be below {key.below:g}")


LONGEST_SHOWN: Final = 200


def shown(value: Any) -> str:
    """A value in a message: one short line."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= LONGEST_SHOWN else text[: LONGEST_SHOWN - 3] + "..."


KEYS: Final = _keys()
"""Every key that a recipe or the command line may have."""
