"""A strategy orchestrator for DeepSpeed and Megatron: search, translate, start.

    import orchestrator as so
    plan = so.plan(recipe="llama3_70b", gpus=64)

The names of `orchestrator.api` are here too, loaded when the first of them is asked for: importing the package alone costs nothing.
"""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from orchestrator.api import *  # noqa: F403 (of the names below alone)
    from orchestrator.audit.audit import Audit

__version__ = "0.1.0"
__all__ = [  # noqa: F405
    "Answer",
    "Audit",
    "Comparison",
    "InputError",
    "LaunchError",
    "NoPlanError",
    "OrchestratorError",
    "Plan",
    "Point",
    "RlAnswer",
    "Sweep",
    "audit",
    "compare",
    "ds_config_for",
    "explain",
    "plan",
    "plan_rl",
    "sweep",
]
LAZY: Final = frozenset(__all__)
HOMES: Final = {"Audit": "orchestrator.audit.audit"}
"""Modules of names that `orchestrator.api` loads when it audits: what reads others' files takes a twentieth of a small plan's time."""


def __getattr__(name: str) -> Any:
    if name not in LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(HOMES.get(name, "orchestrator.api")), name)


def __dir__() -> list[str]:
    return ["__version__", *__all__]


class _Package(types.ModuleType):
    """Keeps `orchestrator.plan` the function: importing the module of that name would set the attribute to the module."""

    def __setattr__(self, name: str, value: object) -> None:
        if name not in LAZY:
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
