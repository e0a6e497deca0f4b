"""The text of --help: keys with type and default, recipes, clusters, engines, examples."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from typing import Any, Final, Literal

from orchestrator.errors import InputError, nearest
from orchestrator.key import Key, is_structured, options_of
from orchestrator.recipe.clusters import stored
from orchestrator.recipe.keys import KEYS, OPEN_GROUPS, group_of

HEAD = """\
usage: python -m orchestrator.run key=value ...

Finds the fastest plan for a transformer on a cluster, writes everything that training needs, and starts it where it can.

  python -m orchestrator.run recipe=gpt_tiny gpus=4                  trains on 4 ranks, without a GPU
  python -m orchestrator.run recipe=t5_large gpus=16                 plans for the recipe's cluster
  python -m orchestrator.run recipe=llama3_70b gpus=64 cluster=dgx_h100 pin.tp=8 launch=none
  python -m orchestrator.run recipe=my.yaml cluster=my_cluster.yaml out=runs/first
  python -m orchestrator.run model.hf_config=path/config.json train.global_batch_size=512 train.seq_length=4096 cluster=dgx_h100 gpus=32
  python -m orchestrator.run plan=runs/first/plan.json               checks, prices and starts a saved plan

  ORCHESTRATOR_SITE or ~/.config/orchestrator/site.yaml: keys of every run here (cluster, slurm.account, price), over the
  package's recipes and under your own

  --help     this text           --help TOPIC   a part of it: pin, train, model, cluster, recipes ..., or a key
  --json     the answer as JSON on standard output, messages on standard error
  --cfg      prints the resolved configuration and ends
  --schema   prints the JSON Schema of a recipe, with which an editor completes and checks one
  --version  the version         ORCHESTRATOR_DEBUG=1 in the environment: tracebacks
"""

WIDTH = 30


def help_text(engines: Sequence[str]) -> str:
    """The text of --help, with every key."""
    lines = [HEAD, "keys:"]
    group = ""
    for key in KEYS.values():
        if group_of(key, KEYS) != group:
            group = group_of(key, KEYS)
            lines.append(f"{group}.*:")
        lines.append(_line(key))
    lines += [f"{name}.*:\n{_open_line(name)}" for name in OPEN_GROUPS]
    return "\n".join([*lines, "", *(f"{name + ':':<9} {', '.join(listed)}" for name, listed in _names(engines).items())])


def _line(key: Key) -> str:
    default = f" [{key.default}]" if key.default else ""
    what = f"{kind(key.type)}{f' of {key.unit}' if key.unit else ''}"
    return f"  {key.name:<{WIDTH}} {what}: {key.help}{default}"


def _open_line(name: str) -> str:
    return f"  {name + '.NAME':<{WIDTH}} text: {OPEN_GROUPS[name].help}"


def _names(engines: Sequence[str]) -> dict[str, list[str]]:
    return {"recipes": [*stored("models")], "clusters": [*stored("clusters")], "engines": ["auto", *engines]}


GENERAL: Final = "general"
"""The topic of keys that stand in no group."""


def topic_text(topics: Sequence[str], engines: Sequence[str]) -> str:
    """A part of the help: of a group of keys (pin, or pins), of one key, or the names of recipes, clusters or engines. Raises InputError.

    >>> print(topic_text(["memory.limit_gib"], []))
      memory.limit_gib               number of GiB: a rank may use [the GPU's]
    """
    groups: dict[str, list[str]] = {GENERAL: []}
    for key in KEYS.values():
        groups.setdefault(group_of(key, KEYS) or GENERAL, []).append(_line(key))
    for name in OPEN_GROUPS:
        groups.setdefault(name, []).append(_open_line(name))
    for name, listed in _names(engines).items():
        groups[name] = [f"  {one}" for one in listed]
    found: list[str] = []
    for topic in topics:
        name = topic.rstrip(".*=")
        group = next((one for one in (name, name.removesuffix("s"), f"{name}s") if one in groups), None)
        if group is not None:
            found += groups[group]
        elif name in KEYS:
            found.append(_line(KEYS[name]))
        else:
            close = nearest(name, [*groups, *KEYS])
            raise InputError(
                "--help", topic, f"is no topic and no key{f'; did you mean {close}?' if close else ''}", [] if close else groups
            )
    return "\n".join(found)


NAMES = {int: "number", float: "number", str: "text", bool: "true or false"}


def kind(of: Any) -> str:
    """A type as a user reads it.

    >>> kind(int | None), kind(Literal["a", "b"] | None)
    ('number', 'a|b')
    """
    if is_structured(of):
        return "mapping or list (YAML, or JSON)"
    first = next(option for option in options_of(of) if option is not type(None))
    if typing.get_origin(first) is Literal:
        return "|".join(map(str, typing.get_args(first)))
    if typing.get_origin(first) is tuple:
        parts = [NAMES[part] for part in typing.get_args(first) if part is not Ellipsis]
        return ",".join(parts)
    if first is dict or typing.get_origin(first) is dict:
        return "mapping (YAML only)"
    return NAMES[first]
