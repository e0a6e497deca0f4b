"""The keys of weights: a Hugging Face checkpoint to begin with, whose model must be the recipe's, and a folder for the one to write."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

import msgspec

from orchestrator.errors import InputError
from orchestrator.key import shown
from orchestrator.model import families
from orchestrator.model.parts.experts import Experts
from orchestrator.model.spec import Architecture
from orchestrator.plan import RunSettings
from orchestrator.recipe.layers import Flat, Given, value_of
from orchestrator.recipe.sources import existing_folder, is_elsewhere, new_folder, read_object

FROM: Final = "model.init_from"
TO: Final = "model.export_to"
CONFIG: Final = "config.json"
WEIGHTS: Final = tuple(f"{name}{index}" for name in ("model.safetensors", "pytorch_model.bin") for index in ("", ".index.json"))
"""The files of which a checkpoint has one (workers/hf_weights.py reads them)."""

SAID_BY: Final = ("model.hf_config", "model.family", "model.description", "model.code", "model.traced")
"""Keys that say what the model is, beside the checkpoint."""
FREE_WORDS: Final = ("dropout", "token_id", "label", "version", "dtype", "cache", "range", "problem_type", "name_or_path")
"""Words of a configuration's fields that may differ between a checkpoint and a model of the same shapes."""
FREE_FIELDS: Final = ("name", "hidden_dropout", "attention_dropout", "make_vocab_size_divisible_by")
"""What may differ between a checkpoint and its further training; the number of positions too where no table of weights bounds them."""
BALANCE: Final = ("aux_loss_coeff", "aux_loss_over", "bias_update_rate", "routing")
"""Fields of experts that may differ between a checkpoint and its further training."""
COMPUTED: Final = {"kv_channels": "head_dim", "num_query_groups": "query_groups"}
"""Fields that may be left out, by what they are then: two models are the same where these are."""
ROPE: Final = ("rotary_base", "rope_scaling_factor", "rope_scaling_type")
"""Fields that no weight depends on and a training for longer sequences changes: refused all the same, since a recipe's may be a slip."""
UNLIMITED: Final = ("rope", "relative", "none")
"""Positions that no table of weights bounds."""


def differing(ours: Architecture, theirs: Architecture) -> list[tuple[str, Any, Any]]:
    """The fields in which two architectures are different models: (name, our value, theirs)."""
    found = []
    for field in Architecture.__struct_fields__:
        here, there = (getattr(model, COMPUTED.get(field, field)) for model in (ours, theirs))
        free = field in FREE_FIELDS or (field == "max_position_embeddings" and theirs.position_embedding in UNLIMITED)
        if here != there and not free:
            found.append((field, here, there))
    return found


def with_config(merged: Flat) -> Flat:
    """The keys, with the checkpoint's own config.json as the model where nothing else says one."""
    if value_of(merged, FROM, None) is None or any(name in merged for name in SAID_BY):
        return dict(merged)
    folder = existing_folder(FROM, merged[FROM].value)
    _config(Path(folder))  # what is wrong with it is said under the key that was given
    config = str(Path(folder) / CONFIG)
    return {**merged, "model.hf_config": Given(config, config)}


def weight_settings(merged: Flat, base: RunSettings, architecture: Architecture, *, plans_only: bool) -> dict[str, Any]:
    """RunSettings' fields of weights; what is not given stays as in `base`. `plans_only`: nothing is written. Raises InputError."""
    init_from, export_to = value_of(merged, FROM, base.init_from), value_of(merged, TO, base.export_to)
    if init_from is not None and not is_elsewhere(init_from):
        init_from = existing_folder(FROM, init_from)
        _check_checkpoint(Path(init_from), architecture)
    if export_to is not None:
        export_to = os.path.abspath(export_to) if plans_only else str(new_folder(TO, export_to))
    return {"init_from": init_from, "export_to": export_to}


def model_type(folder: str) -> str | None:
    """transformers' name for the kind of model in this checkpoint; None: it is on other machines. Raises InputError."""
    return None if is_elsewhere(folder) else str(_config(Path(folder)).get("model_type"))


def _config(folder: Path) -> dict[str, Any]:
    return read_object(folder / CONFIG, FROM, folder, f"its {CONFIG} ")


def _check_checkpoint(folder: Path, ours: Architecture) -> None:
    """Raises InputError naming the first field in which the checkpoint's model is another, with both values."""
    if ours.traced is not None:
        _check_config(folder, ours.traced.config)
        return
    try:
        theirs = families.from_hf_config(_config(folder), ours.name)
    except InputError as error:
        if error.key == FROM:
            raise
        raise InputError(FROM, shown(str(folder)), f"its {CONFIG} is of no model that we know: {error}") from None
    if not any((folder / name).is_file() for name in WEIGHTS):
        raise InputError(FROM, shown(str(folder)), "holds no weights", WEIGHTS)
    if not ours.mtp_num_layers:
        theirs = msgspec.structs.replace(theirs, mtp_num_layers=0)  # transformers' classes leave them out too, whatever the file says
    for field, here, there in differing(_as_computed(ours), _as_computed(theirs)):
        way = f"; to stretch positions on purpose say it in {CONFIG} of a copy of that folder" if field in ROPE else ""
        raise InputError(f"model.{field}", here, f"the checkpoint {FROM}={shown(str(folder))} has {there}{way}")


def _check_config(folder: Path, text: str) -> None:
    """Raises InputError where fields of the checkpoint's configuration differ from those of a model that was recorded from its own code.
    What heads they have may differ."""
    if not any((folder / name).is_file() for name in WEIGHTS):
        raise InputError(FROM, shown(str(folder)), "holds no weights", WEIGHTS)
    theirs = _config(folder)
    for name, here in (json.loads(text) if text else {}).items():
        there = theirs.get(name, here)
        if isinstance(here, int | float | str) and here != there and not any(word in name for word in FREE_WORDS):
            raise InputError(f"model.hf_config.{name}", here, f"the checkpoint {FROM}={shown(str(folder))} has {there}")


def _as_computed(a: Architecture) -> Architecture:
    """The architecture without what says how the load of experts is balanced, which further training may change."""
    plain = Experts(num_experts=1, topk=1, ffn_hidden_size=1)
    balance = {name: getattr(plain, name) for name in BALANCE}
    return a.with_experts(lambda experts: msgspec.structs.replace(experts, **balance))


def written(folder: str) -> bool:
    """Whether there are files in it."""
    return Path(folder).is_dir() and any(Path(folder).iterdir())
