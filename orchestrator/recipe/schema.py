"""The JSON Schema of a recipe, from the declarations of its keys: an editor completes and checks a YAML with it."""

from __future__ import annotations

import typing
from typing import Any, Final, Literal

import msgspec

from orchestrator.key import Key, is_structured, options_of
from orchestrator.recipe.keys import KEYS, OPEN_GROUPS

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
