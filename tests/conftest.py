"""Tests marked `full` run only where they are asked for: by `-m full`, or by their own name."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`-m "not engines"` replaces an `-m` that stood in setup.cfg, so that what is too long for the gate is left out here."""
    if "full" in config.option.markexpr or any("::" in word for word in config.args):
        return
    left_out = [item for item in items if "full" in item.keywords]
    if left_out:
        items[:] = [item for item in items if "full" not in item.keywords]
        config.hook.pytest_deselected(items=left_out)
