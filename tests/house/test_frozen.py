"""What recipes, scripts and saved plans of users rest on: the keys, and the fields of plan.json.

Both lists are edited by hand, in the commit that changes the declaration; nothing writes them anew. What a change means for whoever has
recipes and plans already stands at the head of CHANGELOG.md, where it is said too.
"""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path

import orchestrator
from orchestrator.plan.plan import VERSION, json_schema, schema_text
from orchestrator.recipe.keys import KEYS
from orchestrator.values import indented

HERE = Path(__file__).with_name("frozen")
CHANGELOG = (Path(__file__).parents[2] / "CHANGELOG.md").read_text(encoding="utf-8")


def listed(name: str) -> set[str]:
    lines = (HERE / name).read_text(encoding="utf-8").splitlines()
    assert lines == sorted(set(lines)), f"{name} is sorted, each line once"
    return set(lines)


def changes(now: set[str], name: str) -> str:
    """What to do where a list is not what is declared; "" where it is."""
    gone, new = sorted(listed(name) - now), sorted(now - listed(name))
    said = [f"gone: {', '.join(gone)} (files of users that say it are refused: see CHANGELOG.md)"] if gone else []
    said += [f"new: {', '.join(new)}"] if new else []
    return "; ".join([*said, f"edit tests/house/frozen/{name} by hand"]) if said else ""


def fields() -> set[str]:
    """Every field of plan.json as Struct.field, with a "!" behind one without default, which every plan.json must have."""
    found = set()
    for name, definition in json_schema()["$defs"].items():
        required = definition.get("required", ())
        found |= {f"{name}.{field}{'!' if field in required else ''}" for field in definition.get("properties", ())}
    return found


def test_the_keys_are_those_that_users_know() -> None:
    """explain.* follows pin.*."""
    assert changes({name for name in KEYS if not name.startswith("explain.")}, "keys.txt") == ""


def test_the_fields_of_a_plan_are_those_that_saved_plans_have() -> None:
    assert changes(fields(), f"plan_{VERSION}.txt") == ""


def test_the_schema_that_is_written_beside_a_plan_is_its_own() -> None:
    """`UPDATE_GOLDEN=1 python -m pytest tests/house/test_frozen.py` writes the file anew."""
    if os.environ.get("UPDATE_GOLDEN"):
        (Path(str(files("orchestrator.plan"))) / "plan.schema.json").write_text(indented(json_schema()))
    assert schema_text() == indented(json_schema())


def test_the_changelog_has_this_version() -> None:
    """A heading for what is not released yet, and one for the version that the package says."""
    headings = [line for line in CHANGELOG.splitlines() if line.startswith("## ")]
    assert any(line.startswith(f"## {orchestrator.__version__}") for line in headings), headings
    assert f"version {VERSION}" in CHANGELOG, "which version plan.json has"
