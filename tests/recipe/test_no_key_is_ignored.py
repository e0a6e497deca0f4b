"""Whatever key is given, alone and with a saved plan: it changes the settings, or it is refused."""

from __future__ import annotations

import typing
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from orchestrator import recipe, run
from orchestrator.detect import Machine
from orchestrator.errors import InputError
from orchestrator.key import Key, options_of
from orchestrator.recipe.keys import KEYS
from orchestrator.strategy.choices import shown
from orchestrator.strategy.spec import CHOICES
from orchestrator.units import GIB

NO_GPU = Machine(host_memory=16 * GIB)
ENGINES = ("megatron", "megatron_deepspeed", "deepspeed", "layerwise")
SPECIAL = {
    "recipe": "llama_tiny", "cluster": "dgx_h100", "engine": "megatron_deepspeed", "train.betas": "0.8,0.9", "data.split": "90,10",
    "plan": None, "profile": None, "pin.layout": "Et|t|t|tL", "explain.layout": "Et|t|t|tL", "slurm.extra": "--hold", "data.blend": None,
}  # fmt: skip
"""Values that a type does not suggest; None: made in the tests of these keys."""


def other(key: Key) -> str | None:
    """A value of the key's type that is hardly anybody's default."""
    if key.name in SPECIAL:
        return SPECIAL[key.name]
    kind = next(option for option in options_of(key.type) if option is not type(None))
    if typing.get_origin(kind) is typing.Literal:
        choices = [str(choice) for choice in typing.get_args(kind)]
        return next((choice for choice in reversed(choices) if choice != key.default), choices[-1])
    if kind is bool:
        return "false" if key.default in ("true", "True") else "true"
    if kind is int:
        return "2" if key.default != "2" else "3"
    if kind is float:
        return "0.375"
    return "words" if kind is str else None


def settings(*words: str) -> recipe.Settings:
    return recipe.load(words, NO_GPU, ENGINES)


base_of = cache(settings)
"""Without the key, once for all keys."""


@pytest.mark.parametrize("key", [key for key in KEYS.values() if other(key) is not None], ids=lambda key: key.name)
def test_a_key_changes_the_settings_or_is_refused(key: Key) -> None:
    base: Any = base_of("recipe=gpt_tiny")
    try:
        found = settings(*(("recipe=gpt_tiny", f"{key.name}={other(key)}") if key.name != "recipe" else (f"recipe={other(key)}",)))
    except InputError:
        return
    assert found != base, f"{key.name}={other(key)} is ignored"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("saved") / "run"
    assert run.main(["recipe=gpt_tiny", "gpus=4", "launch=none", f"out={out}"]) == 0
    return out / "plan.json"


@pytest.mark.parametrize("key", [key for key in KEYS.values() if other(key) is not None and key.name != "recipe"], ids=lambda key: key.name)
def test_beside_a_saved_plan_too(key: Key, saved: Path) -> None:
    base: Any = base_of(f"plan={saved}")
    try:
        found = settings(f"plan={saved}", f"{key.name}={other(key)}")
    except InputError:
        return
    assert found != base, f"{key.name}={other(key)} is ignored"


BESIDE = ("pin.recompute=full", "pin.layout=Et|t|t|tL", "pin.rank_order=tp-cp-ep-pp-dp", "pin.dp=3")


@pytest.mark.parametrize("word", BESIDE)
def test_another_choice_beside_a_saved_plan_is_refused(word: str, saved: Path) -> None:
    with pytest.raises(InputError) as refused:
        settings(f"plan={saved}", word)
    assert refused.value.key == word.partition("=")[0]


def test_what_the_plan_says_may_be_said_beside_it(saved: Path) -> None:
    plan = settings(f"plan={saved}").plan
    assert plan is not None
    words = [f"pin.{choice.pin}={shown(choice.of(plan.candidate))}" for choice in CHOICES if choice.of(plan.candidate) is not None]
    assert len(words) > 15
    assert settings(f"plan={saved}", *words).plan == plan
