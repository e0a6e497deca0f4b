"""Models that no family reads: a description file, a Hugging Face configuration of another architecture, or the user's own code become
`model.traced`, the layers that were recorded from the model's own code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from orchestrator.describe import COMMAND, cached, config_text, read_descriptions, recorded_itemsize
from orchestrator.errors import InputError
from orchestrator.key import shown
from orchestrator.model import families
from orchestrator.model.traced import Traced
from orchestrator.model.training import Training
from orchestrator.recipe.layers import Flat, Given, fields_of, value_of
from orchestrator.recipe.sources import read_text

SOURCES: Final = ("model.description", "model.code", "model.hf_config")
TRACED: Final = "model.traced"


def with_description(merged: Flat) -> Flat:
    """The keys, with the model's recorded layers in place of what names it where no family reads that. Raises InputError."""
    if "plan" in merged and value_of(merged, "plan", None) is not None:
        return merged
    named = [key for key in SOURCES if value_of(merged, key, None) is not None]
    if len(named) > 1:
        raise InputError(named[0], shown(merged[named[0]].text), f"says what the model is, and {named[1]} does too; give one")
    if not named or (named == ["model.hf_config"] and not _unread(merged["model.hf_config"].value)):
        return merged
    key = named[0]
    value = str(merged[key].value)
    seq_length, decoder = value_of(merged, "train.seq_length", None), value_of(merged, "train.decoder_seq_length", None)
    itemsize = recorded_itemsize(fields_of(merged, Training).get("precision", "bf16"))
    if key == "model.description":
        found = read_descriptions(value).of(seq_length, decoder, itemsize)
        if found is None:
            raise InputError(key, shown(value), f"is not of {_asked(seq_length, decoder, itemsize)}; write it anew with {COMMAND}")
    else:
        source = {"code": value} if key == "model.code" else {"config": config_text(value)}
        found = cached(source, seq_length, decoder, itemsize)
    kept = {name: given for name, given in merged.items() if name not in SOURCES}
    if found.fixed_length:
        kept.setdefault("train.seq_length", Given(found.seq_length, str(found.seq_length)))
    return {**kept, TRACED: Given(found, f"(layers of {found.model_class})")}


def _asked(seq_length: int | None, decoder: int | None, itemsize: int) -> str:
    lengths = f"train.seq_length={seq_length}" + (f" train.decoder_seq_length={decoder}" if decoder else "")
    return f"{lengths} in {8 * itemsize} bits"


def _unread(path: str) -> bool:
    """Whether this is the configuration of an architecture that no family reads; what is wrong with the file is said by its reader."""
    try:
        found = json.loads(read_text(Path(path)))
    except (InputError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and isinstance(found.get("model_type"), str) and not families.has_reader(found)


def check_untouched(fields: dict[str, Any], traced: Traced, name: str) -> None:
    """Raises InputError for a fact of the model that is given beside its recorded layers and says otherwise."""
    base = families.of_traced(traced, name)
    for field, value in fields.items():
        if field not in ("name", "traced") and value != getattr(base, field):
            why = f"the layers of {traced.model_class} are recorded, with {getattr(base, field)}"
            raise InputError(f"model.{field}", value, f"{why}; a config.json that says another is recorded anew")
