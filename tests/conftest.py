"""How the tests are run: which of them, and on how many processes.

The tests marked `full` run only where they are asked for: by `-m full`, or by their own name. The two halves of the README's command
(`python -m pytest -m "not engines"` and `-m engines`, with or without `tests`) are shared out to processes (pytest-xdist): the planner's to
as many as there are cores, four at most, those that import engines to two, of which one has the pool of ranks. A run of single files or
folders is not. Tests that share a fixture of their module or of the session stay in one process; with engines, those of a file, which
often ask one process of engines together.
"""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("shared", deadline=None)
settings.load_profile("shared")
"""Cores are shared: a deadline in milliseconds measures the neighbours."""

os.environ.setdefault("ORCHESTRATOR_REPORT", "none")  # of a thousand runs nobody looks at: tests/report/test_page.py writes its own
ROOT = Path(__file__).parents[1]
MOST_PROCESSES = 4
OBJECTS = 50_000
"""Made before garbage is looked for among them: collecting the tests makes a million that stay, an import of the engines half as many."""
PLANNER = "not engines"
ENGINES = "engines"
ENGINES_ALONE = re.compile(r"^pytestmark = \[?pytest\.mark\.engines\b", re.MULTILINE)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Before pytest-xdist looks at its own options. Its processes come here too, and share out nothing; they read the command line anew,
    where no `--dist` stands, and would drop the groups."""
    gc.set_threshold(OBJECTS)
    if hasattr(config, "workerinput"):
        config.option.loadgroup = config.workerinput["dist"] == "loadgroup"
        return
    if not config.pluginmanager.hasplugin("xdist"):
        return
    option = config.option
    most = {PLANNER: MOST_PROCESSES, ENGINES: 2}.get(option.markexpr, 0)
    whole = ROOT / "tests" in {(config.invocation_params.dir / word).resolve() for word in config.args}
    asked = option.numprocesses is not None or option.dist != "no"
    if most and whole and not (asked or option.usepdb or option.collectonly or option.capture == "no"):
        option.numprocesses = min(most, len(os.sched_getaffinity(0)))
        option.dist = "loadgroup"


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """What a process of pytest-xdist is told."""
    node.workerinput["dist"] = node.config.option.dist


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _leave_out_full(config, items)
    for item in items:
        group = _shared(item, config.option.markexpr == ENGINES)
        if group and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(group))
        _say_group(item)


def _leave_out_full(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`-m "not engines"` replaces an `-m` that stood in setup.cfg, so that what is too long for the gate is left out here."""
    if "full" in config.option.markexpr or any("::" in word for word in config.args):
        return
    left_out = [item for item in items if item.get_closest_marker("full")]  # keywords are names of folders too
    if left_out:
        items[:] = [item for item in items if not item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=left_out)


def _say_group(item: pytest.Item) -> None:
    """pytest-xdist 3.8 writes the group into an attribute that pytest 9.2 no longer reads, and would scatter every group."""
    marker = item.get_closest_marker("xdist_group")
    if marker is not None and getattr(item.config.option, "loadgroup", False) and hasattr(item, "_id"):
        item._id = type(item._id).parse(f"{item.nodeid}@{marker.args[0]}")


def pytest_collection_finish(session: pytest.Session) -> None:
    """The tests and what they import stay: collections pass over them. Groups that are not in the tests' names are scattered without a
    word."""
    gc.freeze()
    if getattr(session.config.option, "loadgroup", False):
        lost = [
            item.nodeid for item in session.items if item.get_closest_marker("xdist_group") and "@" not in item.nodeid.rsplit("]", 1)[-1]
        ]
        if lost:
            raise pytest.UsageError(f"pytest-xdist would scatter the groups of {len(lost)} tests, {lost[0]} among them (`_say_group`)")


def _shared(item: pytest.Item, by_file: bool) -> str | None:
    """The fixture's folder where a test uses one of the session's, its file where it uses one of the module's, or `by_file`."""
    info = getattr(item, "_fixtureinfo", None)
    ours = [fixtures[-1] for fixtures in info.name2fixturedefs.values() if fixtures[-1].baseid] if info is not None else []
    for scope in ("session", "module"):
        if places := sorted(fixture.baseid for fixture in ours if fixture.scope == scope):
            return places[0]
    return item.nodeid.split("::")[0] if by_file else None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A module beside the tests is imported by those that need it: doctests are looked for only where there are some, since several
    import the engines. Nor are files imported of which no test is in the half that shall run."""
    if collection_path.suffix != ".py":
        return None
    text = collection_path.read_text()
    if not collection_path.name.startswith("test_"):
        return True if ">>> " not in text or config.option.markexpr == ENGINES else None
    other = {PLANNER: ENGINES_ALONE.search(text), ENGINES: "mark.engines" not in text}
    return True if other.get(config.option.markexpr) else None
