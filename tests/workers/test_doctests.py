"""The workers' and tracing's doctests, which need no ranks. Apart from the others, because these modules import the engines' packages."""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path

import pytest

import orchestrator

PACKAGE = Path(orchestrator.__file__).parent
FILES = [path for room in ("workers", "tracing") for path in sorted((PACKAGE / room).glob("*.py"))]
MODULES = [f"{path.parent.name}.{path.stem}" for path in FILES if ">>> " in path.read_text()]


pytestmark = pytest.mark.engines


@pytest.mark.parametrize("name", MODULES)
def test_doctests_hold(name: str) -> None:
    failed, tried = doctest.testmod(import_module(f"orchestrator.{name}"))
    assert tried
    assert not failed


def test_there_are_some() -> None:
    assert "workers.samples" in MODULES
