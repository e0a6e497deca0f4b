"""The workers' doctests, which need no ranks. Apart from the others, because these modules import the engines' packages."""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path

import pytest

import orchestrator

WORKERS = Path(orchestrator.__file__).parent / "workers"
MODULES = sorted(path.stem for path in WORKERS.glob("*.py") if ">>> " in path.read_text())

pytestmark = pytest.mark.engines


@pytest.mark.parametrize("name", MODULES)
def test_doctests_hold(name: str) -> None:
    failed, tried = doctest.testmod(import_module(f"orchestrator.workers.{name}"))
    assert tried
    assert not failed


def test_there_are_some() -> None:
    assert "groups" in MODULES
