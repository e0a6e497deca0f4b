"""What a config.json leaves out is what transformers' own class of the model has: each field alone, of every class that there is a reader
of. (Published files leave fields out, and so does every one that was written by an older class.) class_defaults.json has the fields of
transformers' classes that our readers name, by model type."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from orchestrator.errors import InputError
from orchestrator.model.families import FAMILIES, from_hf_config
from orchestrator.model.spec import Architecture

DEFAULTS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "class_defaults.json").read_text())
NO_CLASS = ("kimi_k2",)
"""Read by code beside the checkpoint."""
SECTIONS = ("text_config", "vision_config")


def as_wide_as_its_text(kind: str) -> dict[str, Any]:
    """The tower of one of Qwen's classes, whose own default makes vectors of another width than its text model has."""
    config, out = DEFAULTS[kind], "hidden_size" if kind == "qwen2_vl" else "out_hidden_size"
    return {"vision_config": config["vision_config"] | {out: config["text_config"]["hidden_size"]}}


SAID: dict[str, dict[str, Any]] = {"deepseek_v2": {"num_experts_per_tok": 6}, "glm4_moe": {"head_dim": 128}} | {
    "gemma3": {"vision_config": DEFAULTS["gemma3"]["vision_config"] | {"image_size": 896, "patch_size": 14}},
    **{kind: as_wide_as_its_text(kind) for kind in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")},
}
"""Without which the class's own defaults are no model."""
NEEDED = {"glm4_moe": "head_dim", "nemotron_h": "layers_block_type"}
"""What published files always have, and is refused by another word than "missing"."""
NOT_BUILT = ("num_nextn_predict_layers",)
"""transformers trains no further heads, whatever its class says: there are some where the file has them."""


def read(config: dict[str, Any]) -> Architecture:
    """With what follows from other fields said."""
    found = from_hf_config(config, "x")
    return replace(found, num_query_groups=found.query_groups, kv_channels=found.head_dim)


def without(config: dict[str, Any], field: str) -> Architecture | None:
    """What is read where a field is left out; None where it has to be there."""
    try:
        return read({name: value for name, value in config.items() if name != field})
    except InputError as error:
        if "is missing" not in str(error) and NEEDED.get(config["model_type"]) != field:
            raise  # a default that makes no model is no default of the class
        return None


def other_without(config: dict[str, Any]) -> list[str]:
    """Fields of a configuration that make another model where they are left out."""
    whole = read(config)
    return [field for field in config.keys() - {"model_type", *NOT_BUILT} if without(config, field) not in (None, whole)]


def test_what_is_left_out_is_the_classes_default() -> None:
    assert {*DEFAULTS} == {name for family in FAMILIES.values() for name in family.hf_model_types if name not in NO_CLASS}
    for model_type, config in DEFAULTS.items():
        assert other_without(config | SAID.get(model_type, {})) == [], model_type
        if "text_config" in config:
            kind, whole = config["text_config"]["model_type"], read(config | SAID.get(model_type, {}))
            if kind in DEFAULTS:
                alone = read(DEFAULTS[kind] | SAID.get(kind, {}))
                assert replace(whole, vision=None) == replace(alone, tie_embeddings=whole.tie_embeddings)


@pytest.mark.engines
@pytest.mark.parametrize("model_type", DEFAULTS)
def test_the_defaults_are_those_of_transformers(model_type: str) -> None:
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type]().to_dict()
    for name, value in DEFAULTS[model_type].items():
        theirs = config[name]
        assert value == ({field: theirs[field] for field in value} if name in SECTIONS else json.loads(json.dumps(theirs))), name
    assert other_without(config | SAID.get(model_type, {})) == []
