"""A ds_config.json of DeepSpeed: read into a setup, and written again. The model, the GPUs and the sequence are keys beside it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final

from msgspec.structs import replace

from orchestrator.audit.document import AUTO, File, Given, changed, leaves
from orchestrator.audit.reading import Reading, Setup, Source, changes, listed, recipe_keys
from orchestrator.engines.deepspeed.capabilities import NAME
from orchestrator.engines.passthrough import OPEN_SECTIONS, paths
from orchestrator.errors import InputError, nearest
from orchestrator.words import deepspeed as words
from orchestrator.words.terms import NOTHING, Kind, kind, kinds

SIGNS: Final = ("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
"""A JSON object with one of these is DeepSpeed's."""


def is_ds_config(value: object) -> bool:
    """Whether a JSON value is a ds_config."""
    return isinstance(value, dict) and any(name in value for name in SIGNS)


def by_hjson(text: str) -> dict[str, Any] | None:
    """A ds_config with comments, or commas behind the last of a list, as DeepSpeed reads it (runtime/config.py:444); None: it is none, or
    hjson is not installed."""
    with suppress(ImportError, ValueError, RecursionError):
        import hjson

        if is_ds_config(found := hjson.loads(text)):
            return dict(found)
    return None


def repeated(text: str) -> list[str]:
    """Names that some section of this JSON text has twice. DeepSpeed refuses them (runtime/config_utils.py,
    dict_raise_error_on_duplicate_keys)."""
    found: list[str] = []

    def noted(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found.extend(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
        return dict(pairs)

    with suppress(ValueError, RecursionError):
        json.loads(text, object_pairs_hook=noted)
    return found


def read(file: File) -> Source:
    """Raises InputError for a value that is none."""
    reading = reading_of(file.content)
    if twice := repeated(file.text):
        reading = replace(reading, broken=(*reading.broken, f"{', '.join(twice)} twice in one section: DeepSpeed refuses that"))
    return Source(file.text, reading, partial(_changes, file.content), partial(changed, file.text, "ds_config.json"))


def kind_of(path: str, value: Any) -> Kind | None:
    """What a setting of this value does of which no plan says anything; None: DeepSpeed has none such."""
    if words.DEFAULTS.get(path, NOTHING) == value:
        return "harmless"
    short = path.replace("zero_optimization.", "zero_optimization.stage3_", 1)  # runtime/zero/config.py takes both names
    known = path in paths() or short in paths() or any(path == section or path.startswith(f"{section}.") for section in OPEN_SECTIONS)
    return kind("ds_config", path) if known else None


BESIDE_STATES: Final = ("buffers", "fragmentation")
"""Causes of memory that communication and the update have beside the states."""
FREED: Final[Mapping[str, tuple[str, ...]]] = {
    "offload_param": ("weights",), "offload_params": ("weights",), "fsdp_offload_params": ("weights",), "fsdp_cpu_offload": ("weights",),
    "activation_checkpointing": ("activations", "fragmentation"), "aio": (),
}  # fmt: skip
"""Causes of memory of which a setting of this name, or of this section, frees something at most."""


def freed_by(said: str) -> tuple[str, ...] | None:
    """The causes of memory that a setting, as a reading lists it, could free; None: any.

    >>> freed_by("deepspeed.zero_optimization.overlap_comm=true"), freed_by("aio.block_size=1"), freed_by("--nccl-ub")
    (('buffers', 'fragmentation'), (), None)
    """
    path = said.partition("=")[0].rpartition(" ")[2]
    if any(f".{path}".endswith(f".{name}") for name, kind in kinds("ds_config").items() if kind == "buffers"):
        return BESIDE_STATES
    return next((FREED[name] for name in path.split(".") if name in FREED), None)


PRECISIONS: Final = {"bf16.enabled": "bf16", "fp16.enabled": "fp16"}
"""Precisions by the switches that turn them on; without either DeepSpeed trains in fp32."""
BY_THE_MODEL: Final = dict.fromkeys(
    ("recompute", "recompute_layers", "stage_recompute"),
    "the model's code (gradient_checkpointing=true of a Trainer, else model.gradient_checkpointing_enable())",
)
"""What a ds_config has no words for, with what says it."""
GRADIENTS: Final = ("train.grad_reduce_dtype", "train.grad_accum_dtype")
CHOSEN: Final = {term.ours for term in (*words.ZERO, *words.OWN_PARALLELISM)}
"""What of a setup a ds_config says, beside the micro-batch."""


def reading_of(content: Mapping[str, Any]) -> Reading:
    """The reading of a ds_config.json. Raises InputError."""
    given = Given(content)
    said = given.read(*words.PLAN)
    micro, steps, batch = (said.pop(name, None) for name in ("micro_batch_size", "num_microbatches", "global_batch_size"))
    stage = said["zero_stage"]
    if stage not in (0, 1, 2, 3):
        raise InputError("zero_optimization.stage", stage, "is not known", (0, 1, 2, 3))
    filled = "" if "training.precision" in said else next((path for path in PRECISIONS if given.values.get(path) == AUTO), "")
    given.assumed = [line for line in given.assumed if not line.startswith(tuple(PRECISIONS))]
    precision = said.setdefault("training.precision", PRECISIONS.get(filled, "fp32"))
    broken = _refused(content)
    following = frozenset(name for name in GRADIENTS if f"training.{name.removeprefix('train.')}" not in said)
    keys = recipe_keys(said) | dict.fromkeys(following, precision)
    if batch is not None:
        keys["train.global_batch_size"] = batch
    if micro and batch:
        replicas = batch // (micro * (steps or 1))
        if steps and replicas * micro * steps == batch:
            keys["gpus"] = replicas * said["tp"] * said["cp"]
    optimizer = str(given.get("optimizer.type", "AdamW")).lower()
    if optimizer not in ("adam", "adamw", "sgd"):
        given.assumed.append(f"optimizer.type={optimizer} is priced as Adam")
    for name in ("cycle_max_lr", "warmup_max_lr"):  # the optimizer's own rate is then another step's
        if peak := given.number(f"scheduler.params.{name}", float):
            keys["train.lr"] = peak
    given.take("scheduler", "optimizer.params.momentum", "zero_optimization.reduce_scatter", "zero_optimization.contiguous_gradients")
    given.assumed.append("recompute=none: a ds_config does not say whether the model checkpoints its activations; pin.recompute=full does")
    left = ((f"{path}={json.dumps(value)}", kind_of(path, value), True) for path, value in given.values.items() if path not in given.used)
    lists = listed(left)
    if given.values.get(ON_NVME) == "nvme":
        lists["slower"] += (f'{ON_NVME}="nvme"',)
    lists["unknown"] = _with_meant(lists["unknown"])
    if micro is None and batch is None:
        given.assumed.append("micro-batches of 1: the file does not say; pin.micro_batch_size= does")
    return Reading(
        format="ds_config of DeepSpeed",
        keys=keys,
        setup=Setup(engine=NAME, micro_batch_size=micro or 1, **{name: value for name, value in said.items() if name in CHOSEN}),
        accumulation=(steps or 1) if batch is None and micro else None,
        steps=None if batch is None or (micro and not steps) else steps or 1,
        divided=bool(batch and not micro),
        filled=filled,
        following=following,
        elsewhere=BY_THE_MODEL,
        broken=tuple(broken),
        assumed=tuple(given.assumed),
        **lists,  # type: ignore[arg-type]
    )


STRICT: Final = ("zero_optimization", "fp16", "bf16")
"""Sections in which DeepSpeed refuses what it does not know (runtime/config_utils.py, DeepSpeedConfigModel)."""
ON_NVME: Final = "zero_optimization.offload_optimizer.device"
"""Where a ds_config says "nvme", an offload whose reads and writes of a disk have no price."""


def _refused(content: Mapping[str, Any]) -> list[str]:
    """Why DeepSpeed refuses a ds_config of these values, whatever the GPUs."""
    said, found = dict(leaves(content)), list[str]()
    if all(said.get(path) is True for path in PRECISIONS):
        found.append("fp16 and bf16 are both enabled: DeepSpeed takes one")
    found += [f'{name}="{said[name]}": a text, and DeepSpeed divides numbers' for name in SIGNS[1:] if isinstance(said.get(name), str)
              and said[name] != AUTO]  # fmt: skip
    found += [f"{name}={json.dumps(said[name])}: is a section, with `enabled`" for name in STRICT if isinstance(said.get(name), bool)]
    for path in said:
        section, _, name = path.partition(".")
        if section in STRICT and name and kind_of(path, None) is None:
            meant = nearest(name, [known.partition(".")[2] for known in paths() if known.startswith(f"{section}.")])
            found.append(f"{path}: DeepSpeed refuses what it does not know there{f'; did you mean {meant}?' if meant else ''}")
    return found


def _with_meant(lines: Iterable[str]) -> tuple[str, ...]:
    """Settings that nobody knows, each with the known one that it looks like."""
    known = [path.rpartition(".") for path in paths()]
    found = []
    for line in lines:
        section, _, name = line.partition("=")[0].rpartition(".")
        beside = [one for of, _, one in known if of == section]
        close = nearest(name, beside) if beside else nearest(section.partition(".")[0], {of.partition(".")[0] for of, *_ in known if of})
        found.append(f"{line} (did you mean {close}?)" if close else line)
    return tuple(found)


# -------------------------------------------------------------------------------------------------------------------- editing

CHANGED: Final = [term for term in words.PLAN if term.ours in {"micro_batch_size", *CHOSEN} - {"ep"} and term not in words.OTHERWISE]
"""AutoEP has more to say than its size."""
STAGE_3_ALONE: Final = {"zero_optimization.offload_param.device": "none", "zero_optimization.offload_optimizer.ratio": 1.0}
"""Settings for stage 3 alone (partition_parameters.py:1160; zero/config.py, offload_ratio_check), with their values elsewhere."""


def without_stage_3(content: Mapping[str, Any], before: Setup, after: Setup) -> dict[str, Any]:
    """What a ds_config that leaves stage 3 must say otherwise, by path."""
    if not before.zero_stage == 3 != after.zero_stage:
        return {}
    said = dict(leaves(content))
    on_nvme = {ON_NVME: "cpu"} if said.get(ON_NVME) == "nvme" else {}  # no offload to other stages (engine.py, zero_cpu_offload)
    return on_nvme | {path: value for path, value in STAGE_3_ALONE.items() if said.get(path, value) != value}


def _changes(content: Mapping[str, Any], before: Setup, after: Setup, gpus: int) -> dict[str, Any] | None:
    """New values of the file for another setup, by path; None: it can't say them. Where accumulation is said it follows: from the batch
    over all GPUs, or else from what a step was."""
    values = changes(CHANGED, before, after)
    if values is None:
        return None
    values |= without_stage_3(content, before, after)
    steps, batch = content.get("gradient_accumulation_steps"), content.get("train_batch_size")
    if isinstance(batch, int) and "train_micro_batch_size_per_gpu" not in content and (after.tp, after.cp) != (before.tp, before.cp):
        values["train_micro_batch_size_per_gpu"] = after.micro_batch_size
    if isinstance(steps, int) and steps > 0:
        if isinstance(batch, int):
            samples, shared = batch, after.micro_batch_size * (gpus // (after.tp * after.cp))
        else:
            samples, shared = steps * before.micro_batch_size * after.tp * after.cp, after.micro_batch_size * before.tp * before.cp
        if samples % shared:
            return None
        if samples // shared != steps:
            values["gradient_accumulation_steps"] = samples // shared
    return values
