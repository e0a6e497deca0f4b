"""A user's keys from all that gives them: a recipe's YAML, the recipe that this one is built on, the command line. Each text is read into a
typed value here; of a key that is given more than once the last source counts, the command line after all files. What every run on this
cluster has in common (partition, account, image, price of a GPU-hour) the site's file says once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar, get_args

import msgspec

from orchestrator.errors import InputError
from orchestrator.key import declared, parse, shown
from orchestrator.recipe.cluster_fields import OF_A_CLUSTER
from orchestrator.recipe.clusters import SUFFIXES, read_named, stored
from orchestrator.recipe.keys import FREE_WITH_PLAN, GROUPS, KEYS, OPEN_GROUPS, PRINTED
from orchestrator.recipe.read import Tree, check_key, read_yaml
from orchestrator.recipe.sources import check_layer, check_path, without_replaced
from orchestrator.rl.job import Algorithm

Struct = TypeVar("Struct", bound=msgspec.Struct)


class Given(NamedTuple):
    """What a user gave for a key: its value, and the text that it was read from, for messages."""

    value: Any
    text: Any


Flat = dict[str, Given]
"""What is given, by full key name."""

MAPPINGS: Final = ("cluster", "profile")
"""Keys whose value may be a mapping of its own."""

OTHERWISE_CALLED: Final = {"distillation": "distill", "gkd": "distill", "rlhf": "ppo"}
"""Algorithms of task=rl by other names."""


def flatten(tree: Tree, where: str) -> Flat:
    """The tree's values by full key name. A cluster may be a mapping; any other group must hold known keys. Raises InputError."""
    prefix = f"{where}: " if where else ""
    flat: Flat = {}

    for full, value in leaves(tree):
        try:
            if full in flat:
                raise InputError(full, shown(value), f"is given twice, first as {full}={shown(flat[full].text)}")
            check_key(full, value)
            main = PRINTED.get(full, full)
            if main in flat:
                raise InputError(full, shown(value), f"is given twice, first as {main}={shown(flat[main].text)}")
            flat[main] = Given(typed(full, value), value)
        except InputError as error:
            why = error.why
            if full == "task" and (algorithm := OTHERWISE_CALLED.get(str(value), str(value))) in get_args(Algorithm):
                why += f"; task=rl rl.algorithm={algorithm} plans it"
            raise InputError(f"{prefix}{error.key}", error.value, why, error.choices) from None
    return flat


def leaves(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Full names and values; a mapping that is a value of its own (a cluster's, a layer's part) stays whole, without what a cluster's has
    of a run's own keys.

    >>> dict(leaves({"gpus": "4", "train": {"lr": "1"}, "train.steps": "2"}))
    {'gpus': '4', 'train.lr': '1', 'train.steps': '2'}
    >>> dict(leaves({"cluster": {"gpu": "H100-SXM-80GB", "mtbf": "2000"}}))
    {'cluster.mtbf': '2000', 'cluster': {'gpu': 'H100-SXM-80GB'}}
    """
    for name, value in tree.items():
        full = f"{above}.{name}" if above else name
        if full == "cluster" and isinstance(value, dict) and (own := {*value}.intersection(OF_A_CLUSTER)):
            yield from leaves({one: value[one] for one in value if one in own}, full)
            value = {one: value[one] for one in value if one not in own}
            if not value:
                continue
        if isinstance(value, dict) and value and full not in MAPPINGS and (full not in KEYS or full in GROUPS):
            yield from leaves(value, full)
        else:
            yield full, value


def typed(name: str, text: Any) -> Any:
    """The value of a known key's text. Raises InputError."""
    key = KEYS.get(name)
    if key is None:
        group, _, member = name.partition(".")
        return OPEN_GROUPS[group].read(group, member, text)
    if key.path:
        check_path(name, text)
    return parse(key, text)


def recipe_layers(given: Flat) -> tuple[str | None, list[Flat]]:
    """(short name, its keys) of the recipe that the command line names; (None, []) without one.

    A recipe may name another as its base (`recipe: llama3_8b` in the YAML, or a path from the YAML's own folder): the base's keys come
    first, then its own over them.
    """
    layers: list[Flat] = []
    label: str | None = None
    seen: list[str] = []
    name = value_of(given, "recipe", None)
    while name is not None:
        if seen and name.endswith(SUFFIXES):
            name = str(Path(seen[-1]).parent / name)
        if name in seen:
            raise InputError(f"{seen[-1]}: recipe", shown(name), f"is built on itself: {' on '.join([*seen, name])}")
        short, tree = read_named("recipe", name, "profiles" if name in stored("profiles") else "models")
        flat = flatten(tree, name)
        layers.insert(0, expand_dropout({key: value for key, value in flat.items() if key != "recipe"}))
        label = label or short
        seen.append(name)
        name = value_of(flat, "recipe", None)
    return label, layers


def expand_dropout(flat: Flat) -> Flat:
    """`model.dropout` stands for both dropouts; giving one of them beside it is a contradiction."""
    if "model.dropout" not in flat:
        return flat
    given = flat["model.dropout"]
    both = ("model.hidden_dropout", "model.attention_dropout")
    for name in both:
        if name in flat:
            raise InputError("model.dropout", shown(given.text), f"stands for {both[0]} and {both[1]}, and {name} is given too")
    return {name: value for name, value in flat.items() if name != "model.dropout"} | dict.fromkeys(both, given)


def merge(layers: Sequence[Flat]) -> Flat:
    """One layer of keys, in which later layers win; what names a whole model (model.hf_config, say) drops the model below. Raises
    InputError."""
    merged: Flat = {}
    for layer in layers:
        if any(name in layer for name in ("model.hf_config", "model.description", "model.code", "model.traced")):
            merged = {name: value for name, value in merged.items() if not name.startswith("model.")}
        check_layer(layer)
        merged = without_replaced(merged, layer) | expand_dropout(layer)
    return merged


def value_of(flat: Flat, name: str, default: Any) -> Any:
    """The value of a key, or the default where it is not given."""
    return flat[name].value if name in flat else default


def group_of(flat: Flat, group: str, *, declared: bool = True) -> dict[str, Any]:
    """Values of `<group>.*` by their short names; what is not given stays out. `declared` False: only those that an open group has beside
    its declared keys."""
    names = [name for name in flat if name.startswith(f"{group}.") and (declared or name not in KEYS)]
    return {name.partition(".")[2]: flat[name].value for name in names}


def fields_of(flat: Flat, struct: type[msgspec.Struct]) -> dict[str, Any]:
    """The values of a struct's own keys by field; what is not given stays out."""
    return {key.field: flat[key.name].value for key in declared(struct) if key.name in flat}


def filled(flat: Flat, struct: type[Struct]) -> Struct:
    """A struct (Training, say) with every value that is given, else its own defaults."""
    return struct(**fields_of(flat, struct))


VARIABLE: Final = "ORCHESTRATOR_SITE"
USUAL: Final = "~/.config/orchestrator/site.yaml"
OF_A_RUN: Final = ("recipe", "name", "plan", "model", "train", "pin", "explain", "profile", "seed", "target", "largest", "out")
"""Keys and groups that say what is trained, which no site decides."""


def is_shipped(given: Flat, layers: Sequence[Flat]) -> bool:
    """Whether the lowest layer is a recipe of the package, over which the site's file stands; a user's own recipe stands over it."""
    return len(layers) > 1 or str(given["recipe"].value) in (*stored("models"), *stored("profiles"))


def site_layer(*, with_plan: bool = False) -> Flat:
    """The keys of the site's file; none where there is no file. `with_plan`: without the cluster and engine, which a saved plan has. Raises
    InputError for a file that is named and not there, and for keys of a run."""
    named = os.environ.get(VARIABLE)
    path = Path(named or USUAL).expanduser()
    if not path.is_file():
        if named:
            raise InputError(VARIABLE, shown(named), "no such file")
        return {}
    flat = flatten(read_yaml(path), str(path))
    for name, given in flat.items():
        if name.partition(".")[0] in OF_A_RUN:
            raise InputError(f"{path}: {name}", shown(given.text), "is a run's own: say it in a recipe or on the command line")
    of_plan = [name for name in flat if with_plan and name in KEYS and KEYS[name].owner not in FREE_WITH_PLAN]
    of_plan += [name for name in flat if with_plan and ((name not in KEYS and name.startswith("cluster.")) or name == "engine")]
    return {name: given for name, given in flat.items() if name not in of_plan}
