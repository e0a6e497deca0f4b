"""The table of the design as a test: who may import whom."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("imports")  # one `nodes_of`
PACKAGE = Path(__file__).parents[2] / "orchestrator"
EVERYWHERE = {"units", "errors", "values", "digests", "key", "extensions", "commands", "__init__", "__version__"}
WORLDLY = {"commands"}
"""Of those, what the pure side must not touch: it prints."""
PURE = {"model", "hardware", "strategy", "words", "cost", "plan", "search", "engines", "job", "report", "rl"}
COMMANDS = PURE | {
    *(
        "recipe",
        "detect",
        "launch",
        "planning",
        "engine_prices",
        "describe",
        "folder",
        "screen",
        "asking",
        "audit",
        "pictures",
        "api",
        "console",
        "run",
    ),
}
"""What the commands and the Python interface may import: anything but workers, programs and tracing, which import the engines' packages."""
MAY_IMPORT: dict[str, set[str]] = {
    "model": set(),
    "hardware": set(),
    "strategy": {"model", "hardware"},
    "words": {"model", "strategy"},
    "cost": {"model", "hardware", "strategy"},
    "plan": {"strategy", "model", "hardware"},
    "search": {"model", "hardware", "strategy", "cost", "plan"},
    "rl": {"model", "hardware", "strategy", "cost", "plan"},
    "job": set(),
    "chats": set(),
    "engines": {"plan", "job", "strategy", "model", "hardware", "words"},
    "launch": {"job", "words"},
    "report": {"plan", "strategy", "cost", "model", "hardware"},
    "calibrate": {"cost", "model", "hardware", "strategy", "plan", "engines"},
    "profile": COMMANDS | {"calibrate"},
    "tracing": {"model"},
    "cpu": {"workers"},
    "workers": {"plan", "strategy", "model", "hardware", "tracing", "cpu", "chats"},
    "programs": {"plan", "model", "workers", "cpu"},
    "describe": {"model"},
    "recipe": PURE | {"detect", "describe", "chats"},
    "detect": PURE,
    "finish": {"launch", "report", "health"},
    "health": {"launch"},
    "engine_prices": PURE | {"recipe"},
    "planning": PURE | {"recipe", "detect", "launch", "engine_prices"},
    "folder": COMMANDS,
    "screen": COMMANDS,
    "rehearsal": PURE,
    "tuning": COMMANDS,
    "run": COMMANDS | {"rehearsal", "tuning", "health"},
    "replan": COMMANDS,
    "asking": COMMANDS,
    "pictures": COMMANDS,
    "audit": COMMANDS,
    "api": COMMANDS,
    "console": COMMANDS | {"tuning"},
    "__main__": COMMANDS,
    "data": {"recipe"},
    "versions": {"detect"},
}
ENGINE_PACKAGES = {"torch", "megatron", "deepspeed", "transformers"}


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse(path.read_text()))]


@cache
def imports(path: Path) -> set[str]:
    """Every module that a file imports, wherever in the file it does so."""
    found: set[str] = set()
    for node in nodes_of(path):
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


def test_rooms_import_only_what_the_design_allows() -> None:
    for path in FILES:
        here = room(path)
        if here in EVERYWHERE:
            continue
        allowed = MAY_IMPORT[here] | EVERYWHERE | {here}
        used = {name.split(".")[1] for name in imports(path) if name.startswith("orchestrator.")}
        assert used <= allowed, f"{path} ({here}) imports {sorted(used - allowed)}"
        assert here not in PURE or not used & WORLDLY, f"{path} ({here}) is pure: it ends no command"


def test_only_what_ranks_run_and_tracing_import_the_engines_and_only_audit_imports_omegaconf() -> None:
    for path in FILES:
        used = {name.split(".")[0] for name in imports(path)}
        if room(path) not in ("cpu", "workers", "programs", "tracing"):
            assert not used & ENGINE_PACKAGES, path
        if path.relative_to(PACKAGE).as_posix() != "audit/document.py":
            assert "omegaconf" not in used, path


def test_a_start_waits_for_no_package_that_most_plans_do_without() -> None:
    """numpy alone takes 57 ms of the half second of a small model's plan."""
    code = "import sys, orchestrator.run; print(*sys.modules)"
    loaded = {*subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()}
    assert "msgspec" in loaded
    assert not loaded & {*ENGINE_PACKAGES, "numpy", "jinja2", "bokeh", "omegaconf", "orchestrator.api"}


def test_the_pure_side_touches_no_world() -> None:
    """No process, clock, printing or environment left of the Job."""
    pure = [path for path in FILES if room(path) in PURE - {"report"}]
    assert len(pure) > 100
    for path in pure:
        assert not imports(path) & {"subprocess", "time", "os", "sys", "random", "datetime", "socket"}, path
        calls = {node.func.id for node in nodes_of(path) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
        assert not {"print", "open", "input"} & calls, path


def module(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def imported_files(path: Path, modules: set[str]) -> set[str]:
    """The package's own modules that a file imports, for its types and inside functions too: of `from a import b` a.b where that is one."""
    found: set[str] = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            below = {f"{node.module}.{alias.name}" for alias in node.names} & modules
            found |= below if len(below) == len(node.names) else below | {node.module}
    return found & modules


def circle(arrows: dict[str, set[str]]) -> list[str]:
    """One way from a name back to itself along the arrows; empty where there is none."""
    done: set[str] = set()

    def follow(way: list[str]) -> list[str]:
        for name in sorted(arrows[way[-1]] - done):
            if name in way:
                return [*way[way.index(name) :], name]
            if found := follow([*way, name]):
                return found
        done.add(way[-1])
        return []

    return next((found for name in sorted(arrows) if name not in done and (found := follow([name]))), [])


def test_no_file_imports_itself_by_way_of_others() -> None:
    """Not for types alone either: two files that need each other are one file, or three."""
    modules = {module(path) for path in FILES}
    assert circle({module(path): imported_files(path, modules) for path in FILES}) == []


def test_a_circle_of_imports_is_found() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert circle({"a": {"b"}, "b": set()}) == []


COST = PACKAGE / "cost"
TESTS = PACKAGE.parent / "tests"


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names(path: Path) -> set[str]:
    """Every name with an underscore before it that a file defines: functions, classes, values of a module, attributes of self."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node):
            found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return {name for name in found if private(name) and name != "_"}


def is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def looks_inside_cost(source: str, names: set[str]) -> list[str]:
    """What a file outside cost touches of `names`: imported, asked of another object, or of itself in a class that is made from one of
    cost's."""
    if "orchestrator.cost" not in source:
        return []
    tree = ast.parse(source)
    from_cost = [
        node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("orchestrator.cost")
    ]
    imported = {alias.name for node in from_cost for alias in node.names}
    found = [name for name in imported if private(name)]
    inherits = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and any(isinstance(base, ast.Name) and base.id in imported for base in node.bases)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in names and (not is_own(node) or node in inherits):
            found.append(node.attr)
    return found


def test_nobody_looks_inside_cost() -> None:
    names = set[str]().union(*map(private_names, sorted(COST.rglob("*.py"))))
    assert {"_setting_of", "_corners", "_workload"} <= names  # a method, a function, an attribute
    for path in sorted({*PACKAGE.rglob("*.py"), *TESTS.rglob("*.py")} - {*COST.rglob("*.py")}):
        assert not looks_inside_cost(path.read_text(), names), path


def test_looking_inside_cost_is_found_however_it_is_done() -> None:
    door = "from orchestrator.cost.price import CostModel\n"
    assert looks_inside_cost(door + "def f(costs): return costs._layers", {"_layers"}) == ["_layers"]
    assert looks_inside_cost("from orchestrator.cost.stage import _hidden\n", set()) == ["_hidden"]
    assert looks_inside_cost(door + "class Mine(CostModel):\n    def f(self): return self._layers", {"_layers"}) == ["_layers"]
    assert looks_inside_cost(door + "class Mine:\n    def f(self): return self._layers", {"_layers"}) == []
