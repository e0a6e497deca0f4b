"""The table of the design as a test: who may import whom."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "orchestrator"
EVERYWHERE = {"units", "errors", "values", "extensions", "commands", "__init__", "__version__"}
WORLDLY = {"commands"}
"""Of those, what the pure side must not touch: it prints."""
PURE = {"model", "hardware", "strategy", "cost", "plan", "search", "engines", "job", "report"}
MAY_IMPORT: dict[str, set[str]] = {
    "model": set(),
    "hardware": set(),
    "strategy": {"model", "hardware"},
    "cost": {"model", "hardware", "strategy"},
    "plan": {"strategy", "model", "hardware"},
    "search": {"model", "hardware", "strategy", "cost", "plan"},
    "job": set(),
    "engines": {"plan", "job", "strategy", "model", "hardware"},
    "launch": {"job"},
    "report": {"plan", "strategy", "cost", "model", "hardware"},
    "calibrate": {"cost", "model", "hardware", "strategy", "plan", "engines", "validate"},
    "validate": {"cost", "model", "hardware", "strategy", "plan", "search", "engines"},
    "workers": {"plan", "strategy", "model", "hardware"},
    "recipe": PURE | {"detect"},
    "detect": PURE,
    "finish": {"launch", "report"},
    "run": PURE | {"recipe", "detect", "launch"},
    "data": {"recipe"},
}
ENGINE_PACKAGES = {"torch", "megatron", "deepspeed", "transformers"}


def imports(path: Path) -> set[str]:
    """Every module that a file imports, wherever in the file it does so."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            module = node.module or ""
            found.add(module)
            if module == "orchestrator":
                found |= {f"orchestrator.{alias.name}" for alias in node.names}
    return found


def room(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_rooms_import_only_what_the_design_allows(path: Path) -> None:
    here = room(path)
    if here in EVERYWHERE:
        return
    allowed = MAY_IMPORT[here] | EVERYWHERE | {here}
    used = {name.split(".")[1] for name in imports(path) if name.startswith("orchestrator.")}
    assert used <= allowed, f"{path.name} ({here}) imports {sorted(used - allowed)}"
    assert here not in PURE or not used & WORLDLY, f"{path.name} ({here}) is pure: it ends no command"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_workers_import_the_engines_and_only_recipe_imports_omegaconf(path: Path) -> None:
    used = {name.split(".")[0] for name in imports(path)}
    if room(path) != "workers":
        assert not used & ENGINE_PACKAGES
    if room(path) != "recipe":
        assert "omegaconf" not in used


@pytest.mark.parametrize("path", [p for p in FILES if room(p) in PURE - {"report"}], ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_pure_side_touches_no_world(path: Path) -> None:
    """No process, clock, printing or environment left of the Job."""
    assert not imports(path) & {"subprocess", "time", "os", "sys", "random", "datetime", "socket"}
    nodes = ast.walk(ast.parse(path.read_text()))
    calls = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert not {"print", "open", "input"} & calls
