"""plan=PATH: a saved plan in place of a search, and what the other keys may still say beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from orchestrator.engines import passthrough
from orchestrator.errors import InputError
from orchestrator.key import check_range, shown
from orchestrator.model import families
from orchestrator.model.training import Training
from orchestrator.plan import Plan
from orchestrator.recipe.clusters import check_cluster
from orchestrator.recipe.keys import FREE_WITH_PLAN, KEYS
from orchestrator.recipe.layers import Flat, Given, value_of
from orchestrator.recipe.model import architecture_of, check_precision
from orchestrator.recipe.sources import read_text
from orchestrator.recipe.weights import differing
from orchestrator.strategy.spec import CHOICES

FREE: Final = ("recipe", "name", "plan", "memory", "search", "explain", "data", "env", *passthrough.GROUPS)
"""Keys and groups that a saved plan leaves open, beside those of `keys.FREE_WITH_PLAN`; every other one must agree with it."""


def saved_plan(merged: Flat) -> Plan | None:
    path = value_of(merged, "plan", None)
    if path is None:
        return None
    from orchestrator.plan import from_json

    if Path(path).is_dir():
        raise InputError("plan", shown(path), "is a folder; give the path of its plan.json")
    try:
        text = read_text(Path(path), limit=None)
    except InputError as error:
        raise InputError("plan", shown(path), error.why) from None
    plan = from_json(text, shown(path))
    try:
        _check_values(plan)
    except InputError as error:
        raise InputError("plan", shown(path), str(error)) from None
    return msgspec.structs.replace(plan, predicted=None)  # it is priced again; what a hand has changed there counts for nothing


def _check_values(plan: Plan) -> None:
    """What the search is given must be as sound as if it came from a recipe; plan/check.py checks the layout. Raises InputError."""
    if plan.cluster.num_gpus != plan.world_size:
        raise InputError("world_size", plan.world_size, f"its cluster has num_gpus={plan.cluster.num_gpus}")
    for group, values in (("model", plan.model), ("train", plan.training)):
        for name, value in msgspec.structs.asdict(values).items():
            key = KEYS.get(f"{group}.{name}", KEYS.get(name))
            if key is not None and value is not None and not isinstance(value, str | bool):
                check_range(key, str(value), value if isinstance(value, tuple) else (value,))
    check_range(KEYS["gpus"], str(plan.world_size), (plan.world_size,))
    check_range(KEYS["train.save_every"], str(plan.run.save_every), (plan.run.save_every,))
    check_cluster(plan.cluster, "cluster")
    check_precision(plan.training, plan.cluster)
    families.describe_for(plan.model, plan.training)


def check_agreement(merged: Flat, plan: Plan) -> None:
    """Keys given beside plan= must say what the plan says. Raises InputError naming the first that doesn't."""
    for name, (asked, text) in merged.items():
        group, _, short = name.partition(".")
        owner = KEYS[name].owner if name in KEYS else None
        if (group in FREE and owner is not Training) or owner in FREE_WITH_PLAN:
            continue
        if name == "cluster":
            there: Any = plan.cluster.name
            if there == "here" and not isinstance(asked, dict):
                continue
            asked = asked["name"] if isinstance(asked, dict) else Path(str(asked)).stem
        elif name == "model.hf_config":
            _check_config(merged, plan)
            continue
        else:
            there = _in_plan(group, short or name, plan)
            if there is Ellipsis:
                raise InputError(name, shown(text), "is for a search, and plan= takes its place; leave one of them out")
        if asked != there:
            raise InputError(name, shown(text), f"the plan says {there}; edit the plan, or search anew without plan=")


def _check_config(merged: Flat, plan: Plan) -> None:
    """Raises InputError naming the first field in which the Hugging Face config is of another model than the plan's; fields that other
    keys give are theirs to check."""
    path = value_of(merged, "model.hf_config", None)
    theirs = architecture_of({"model.hf_config": Given(path, path)}, plan.model.name)
    for name, here, there in differing(theirs, plan.model):
        if f"model.{name}" not in merged:
            raise InputError("model.hf_config", shown(path), f"its {name} is {here}; the plan says {there}")


def _in_plan(group: str, short: str, plan: Plan) -> Any:
    """What the plan says for a key; Ellipsis where it says nothing that can be compared."""
    if group == "model":
        return getattr(plan.model, short, ...)
    if group == "lora":
        return getattr(plan.training.lora, short, None)
    if group == "task" or short in ("packing", "balance"):
        return getattr(plan.training, short or group)
    if group == "train":
        return getattr(plan.training, short, ...)
    if group == "pin":
        choice = next((choice for choice in CHOICES if choice.pin == short), None)
        value = ... if choice is None else choice.of(plan.candidate)
        return "-".join(value) if isinstance(value, tuple) else value
    mixed = ("stages" if plan.cluster.parts else "slowest") if plan.cluster.mixed else "refuse"
    facts = {"gpus": plan.world_size, "gpus_per_node": plan.cluster.gpus_per_node, "seed": plan.training.seed, "mixed": mixed}
    return facts.get(short, ...)
