"""Garbage is looked for seldom while a rank imports its worker, and as ever in any other program that imports one."""

from __future__ import annotations

import gc
import importlib
import sys
from types import SimpleNamespace

import pytest

from orchestrator.workers import garbage


@pytest.mark.parametrize(
    ("program", "seldom"),
    [("orchestrator.workers.megatron", True), ("orchestrator.workers.profiler", True), ("pytest.__main__", False), (None, False)],
)
def test_only_our_own_programs_look_for_garbage_seldom_while_they_import(
    program: str | None, seldom: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = gc.get_threshold()
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", program and SimpleNamespace(name=program))
    try:
        importlib.reload(garbage)
        assert (gc.get_threshold() != before) is seldom
        garbage.freeze_imported()
        assert gc.get_threshold() == before
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
