"""Drawn configurations of Hugging Face's classes that can be planned come back from what is written of them for transformers."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import asdict

from orchestrator.engines.hf_config import class_of, config_keywords, inexpressible
from orchestrator.errors import InputError
from orchestrator.model.architecture import Architecture
from orchestrator.model.families import from_hf_config

sys.path.append(str(Path(__file__).parents[1] / "engines"))
from test_hf_config import CONFIGS, whole


def varied(config: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """Every third number another, every fourth truth value turned."""
    found = {}
    for name, value in config.items():
        if isinstance(value, bool):
            found[name] = value ^ (draw.random() < 0.25)
        elif isinstance(value, int) and value:
            found[name] = draw.choice([value, value, value, value * 2, value * 4, max(1, value // 2)])
        elif isinstance(value, float):
            found[name] = draw.choice([value, value, value / 2])
        else:
            found[name] = value
    return found


def drawn(name: str, number: int) -> list[tuple[str, Architecture]]:
    """Model types and models that transformers' class for the configuration has, and is written for."""
    draw, (model_type, config) = random.Random(name), CONFIGS[name]
    found: list[tuple[str, Architecture]] = []
    written_for = class_of(from_hf_config(config | {"model_type": model_type}, "x"))
    for _ in range(100 * number):
        try:
            read = from_hf_config(varied(config, draw) | {"model_type": model_type}, "x")
        except InputError:
            continue
        if inexpressible(read) is None and class_of(read) is written_for:
            found.append((model_type, read))
        if len(found) == number:
            break
    return found


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("number", [3, pytest.param(45, marks=pytest.mark.full)])
def test_a_drawn_model_is_read_back_from_its_configuration(name: str, number: int) -> None:
    models = drawn(name, number)
    assert len(models) == number
    for model_type, read in models:
        again = from_hf_config(config_keywords(read) | {"model_type": model_type}, "x")
        one, other = (asdict(whole(found)) for found in (read, again))
        assert {field: (value, other[field]) for field, value in one.items() if other[field] != value} == {}
