"""What the Trainer's and accelerate's files share: DeepSpeed's, FSDP's and DDP's settings read as a ds_config, files that they name, and
LoRA's."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from orchestrator.audit import deepspeed
from orchestrator.audit.document import AUTO, Content, Given, content_of, leaves
from orchestrator.audit.reading import LISTS, Reading, listed
from orchestrator.errors import InputError
from orchestrator.recipe.sources import read_text
from orchestrator.words import deepspeed as words
from orchestrator.words.terms import Kind, kind_in, kinds, nested

SHARDED: Final = {
    "full_shard": 3, "hybrid_shard": 3, "1": 3, "4": 3, "shard_grad_op": 2, "hybrid_shard_zero2": 2, "_hybrid_shard_zero2": 2, "2": 2,
    "5": 2, "no_shard": 0, "3": 0,
}  # fmt: skip
"""ZeRO stages that share the same things as FSDP's strategies, by torch's names and numbers (torch/distributed/fsdp/api.py)."""


def zero(stage: int, offload: bool = False) -> Content:
    """A ds_config of this ZeRO stage, with the optimizer's states on the host or not."""
    return {"zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu" if offload else "none"}}}


RESHARDS: Final = ("fsdp_reshard_after_forward", "reshard_after_forward")
"""Whether FSDP frees weights after forward, or the first version's strategy, in a section fsdp_config: accelerate's name, and the Trainer's
and Axolotl's."""
OFFLOADS: Final = ("fsdp_offload_params", "offload_params", "fsdp_cpu_offload", "cpu_offload")
"""FSDP's CPU offload in a section fsdp_config: accelerate's and Axolotl's names, and the Trainer's (transformers 5)."""
CHECKPOINTS: Final = ("fsdp_activation_checkpointing", "activation_checkpointing")
"""Recompute of every wrapped layer there."""


def fsdp(given: Given, strategy: Any, words: Iterable[str] = ()) -> tuple[Content, tuple[str, ...], str]:
    """(The ds_config that shares what FSDP shares; settings that keep parameters, gradients and optimizer states on the host, as the file
    says them; what is said of FSDP). The section comes before the `strategy` that stands elsewhere (transformers'
    _apply_legacy_fsdp_to_config); `words`: the Trainer's `fsdp`. The price has gradients and states on the host and the weights' shards on
    the GPU, which is said: the setting isn't priced whole. Raises InputError."""
    said = next((value for name in RESHARDS if (value := given.get(f"fsdp_config.{name}")) is not None), strategy)
    word = str("true" if said is None else said).lower()
    if word not in SHARDED and word not in ("true", "false"):
        raise InputError("fsdp_sharding_strategy", word, "is not known", SHARDED)
    stage = SHARDED.get(word, 3 if word == "true" else 2)
    host = [f"{path}=true" for name in OFFLOADS if given.truth(path := f"fsdp_config.{name}")]
    host += [f'fsdp="{" ".join(words)}"'] if "offload" in words else []
    given.assumed += [f"{one}: gradients and optimizer states are on the host, the weights' shards priced as on the GPU" for one in host]
    word = word if word in SHARDED else f"reshard_after_forward={word}"  # the second version's
    return zero(stage, bool(host)), tuple(host), f"FSDP's {word} is priced as DeepSpeed's ZeRO-{stage}, which shares the same between ranks"


AS_PRICED: Final = {
    "auto_wrap_policy": ("transformer_based_wrap",), "backward_prefetch": ("backward_pre",), "forward_prefetch": ("false",),
    "limit_all_gathers": ("true",),
}  # fmt: skip
"""Values of FSDP's settings with which it is priced: one layer is gathered ahead (torch/distributed/fsdp/api.py, BackwardPrefetch)."""
ON: Final = ("limit_all_gathers", "cpu_offload_pin_memory")
"""FSDP settings that are on where nothing is said, so that false says something."""
WRAPPED, LAYERS = "transformer_layer_cls_to_wrap", re.compile(r"\w+(Layer|Block)")
"""FSDP's setting of the class that it wraps, and a class of layers that transformers' models consist of."""
FSDP: Final = kinds("fsdp")
"""FSDP's settings in a section fsdp_config without the prefix fsdp_ (transformers' TrainingArguments and Axolotl take both, accelerate the
longer), with what each does."""


def beside_file(named: str, file: str) -> Path | None:
    """A file that another names: beside it, or below one of the folders above it; None: it is nowhere there."""
    path = Path(named).expanduser()
    if path.is_absolute():
        return path if path.is_file() else None
    for folder in (*Path(file).absolute().parents, Path.cwd()):
        if (folder / path).is_file():
            return folder / path
    return None


def named_ds_config(value: Any, key: str, file: str) -> tuple[Content, str | None, tuple[str, str] | None]:
    """A ds_config given by its content, or by a path: (content, path; None: it stands in this file, key and path of a file that is not
    here). Raises InputError."""
    if isinstance(value, dict):
        return value, None, None
    path = beside_file(str(value), file)
    if path is None:
        return {}, str(value), (key, str(value))
    try:
        text = read_text(path)
    except InputError as error:
        raise InputError(key, str(value), error.why) from None
    return content_of(text, str(path)), str(path), None


def as_ds(
    ds: Mapping[str, Any], by_path: Mapping[str, Any], kind: str, named: str | None, assumed: Iterable[str], inside: str = ""
) -> Reading:
    """The reading of a file of this kind by the ds_config whose `auto` values, and what it leaves out, its program fills: by `by_path`,
    which is of this file and not listed twice. `named`: the other file in which the ds_config is; its settings are said with it. `inside`:
    where it stands in this one. Raises InputError."""
    given = {**dict.fromkeys(by_path, AUTO), **dict(leaves(ds))}
    whole = {path: by_path[path] if value == AUTO and path in by_path else value for path, value in given.items()}
    reading = deepspeed.reading_of(nested({path: value for path, value in whole.items() if value is not None}))

    def said(lines: Iterable[str]) -> tuple[str, ...]:
        return tuple(f"{f'{Path(named).name}: ' if named else inside}{line}" for line in lines)

    lists = {name: said(getattr(reading, name)) for name in LISTS.values()}
    stage, _, offload = words.ZERO
    elsewhere = {term.ours: f"{term.theirs} in {Path(named).name}" for term in (stage, offload)} if named else {}
    return replace(reading, format=kind, assumed=(*assumed, *reading.assumed), elsewhere=elsewhere, **lists)


def sorted_out(given: Given, known: Mapping[str, Kind], reading: Reading, beside: tuple[str, ...] = ()) -> Reading:
    """The reading with what is left of the file in its lists. `known`: settings that the tools have; those in a group that costs cost.
    `beside`: sections of which what isn't known is of data, logs and checkpoints."""

    def kind(path: str) -> Kind | None:
        group, *parts = path.split(".")
        if group == "fsdp_config" and parts:
            name, value = parts[0].removeprefix("fsdp_"), given.values[path]
            value = str(value[0] if isinstance(value, list) and len(value) == 1 and name == WRAPPED else value)
            as_priced = LAYERS.fullmatch(value) if name == WRAPPED else value.lower() in AS_PRICED.get(name, ())
            return "harmless" if as_priced else kind_in(FSDP, name)
        found = [of for name in (path, group, *parts) if (of := kind_in(known, name)) is not None]
        if not found and path.startswith(tuple(f"{section}." for section in beside)):
            return "harmless"
        return "cost" if "cost" in found else next(iter(found), None)

    lists = listed((said, kind(path), path.endswith(ON) or given.values[path]) for path, said in given.left())
    return replace(reading, assumed=(*given.assumed, *reading.assumed),
                   **{name: (*lines, *getattr(reading, name)) for name, lines in lists.items()})  # fmt: skip
