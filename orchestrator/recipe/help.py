"""What the declarations of the keys say of them: the text of --help (keys with type and default, recipes, clusters, engines, examples), and
the JSON Schema of a recipe, with which an editor completes and checks a YAML."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec

from orchestrator.errors import unknown
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
    """A part of the help: of a group of keys (pin, or pins), of one key with those below it, or the names of recipes, clusters or
    engines. Raises InputError.

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
            found += [_line(key) for key in KEYS.values() if key.name == name or key.name.startswith(f"{name}.")]
        else:
            raise unknown("--help", topic, "is no topic and no key", name, [*groups, *KEYS], groups)
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


DRAFT: Final = "https://json-schema.org/draft/2020-12/schema"
PLAIN: Final[dict[Any, str]] = {int: "integer", float: "number", str: "string", bool: "boolean", dict: "object"}


def recipe_schema() -> dict[str, Any]:
    """Every key by its full name, and the groups as nested mappings."""
    structured = [key.type for key in KEYS.values() if is_structured(key.type)]
    schemas, components = msgspec.json.schema_components(structured, ref_template="#/$defs/{name}")
    of_type = dict(zip(map(str, structured), schemas, strict=True))
    properties: dict[str, Any] = {key.name: _described(key, of_type) for key in KEYS.values()}
    for name_of_group in dict.fromkeys(name.partition(".")[0] for name in KEYS if "." in name):
        members = {name.partition(".")[2]: properties[name] for name in KEYS if name.startswith(f"{name_of_group}.")}
        mapping = {"type": "object", "properties": members, "additionalProperties": False}
        beside = properties.get(name_of_group)
        properties[name_of_group] = mapping if beside is None else {"anyOf": [beside, mapping]}
    properties["cluster"] = {"description": KEYS["cluster"].help, "type": ["string", "object"]}
    for group in OPEN_GROUPS.values():
        properties.setdefault(group.name, {"description": group.help, "type": "object"})
    return {
        "$schema": DRAFT,
        "title": "A recipe of orchestrator",
        "type": "object",
        "properties": properties,
        "patternProperties": {f"^({'|'.join(OPEN_GROUPS)})[.]": {}},
        "additionalProperties": False,
        "$defs": components,
    }


def _described(key: Key, of_type: dict[str, Any]) -> dict[str, Any]:
    text = key.help + (f" ({key.unit})" if key.unit else "")
    return {"description": text, **({"default": key.default} if key.default else {}), **_value(key, of_type)}


def _value(key: Key, of_type: dict[str, Any]) -> dict[str, Any]:
    """What a value of this key may be. Words that are read by rules of their own are any text or list."""
    if is_structured(key.type):
        return dict(of_type[str(key.type)])
    if key.read is not None:
        return {} if key.type is not dict else {"type": "object"}
    options = options_of(key.type)
    kind = next(option for option in options if option is not type(None))
    limits = {"minimum": key.low, "maximum": key.high, "exclusiveMinimum": key.above, "exclusiveMaximum": key.below}
    limits = {name: value for name, value in limits.items() if value is not None}
    if typing.get_origin(kind) is Literal:
        return {"enum": [*typing.get_args(kind), *([None] if type(None) in options else [])]}
    if typing.get_origin(kind) is tuple:
        parts = [{"type": PLAIN[part], **limits} for part in typing.get_args(kind)]
        return {"type": ["array", "string"], "prefixItems": parts, "minItems": len(parts), "maxItems": len(parts)}
    return {"type": [PLAIN[kind], "null"] if type(None) in options else PLAIN[kind], **limits}
