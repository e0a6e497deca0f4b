"""What a config.json leaves out is what transformers' own class of the model has: each field alone, of every class that there is a reader
of. (Published files leave fields out, and so does every one that was written by an older class.)"""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from orchestrator.errors import InputError
from orchestrator.model.families import FAMILIES, from_hf_config
from orchestrator.model.spec import Architecture

pytestmark = pytest.mark.engines

NO_CLASS = ("kimi_k2",)
"""Read by code beside the checkpoint."""
SAID: dict[str, dict[str, Any]] = {"deepseek_v2": {"num_experts_per_tok": 6}, "glm4_moe": {"head_dim": 128}}
"""Without which the class's own defaults are no model."""
NOT_BUILT = ("num_nextn_predict_layers",)
"""transformers trains no further heads, whatever its class says: there are some where the file has them."""


def read(config: dict[str, Any]) -> Architecture:
    """With what follows from other fields said."""
    found = from_hf_config(config, "x")
    return replace(found, num_query_groups=found.query_groups, kv_channels=found.head_dim)


@pytest.mark.parametrize("model_type", [name for family in FAMILIES.values() for name in family.hf_model_types if name not in NO_CLASS])
def test_what_is_left_out_is_the_classes_default(model_type: str) -> None:
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type]().to_dict() | SAID.get(model_type, {})
    whole, other = read(config), []
    for field in config.keys() - {"model_type", *NOT_BUILT}:
        try:
            silent = read({name: value for name, value in config.items() if name != field})
        except InputError:  # it has to be there
            continue
        other += [field] if silent != whole else []
    assert not other
