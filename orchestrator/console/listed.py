"""The list of the commands of python -m orchestrator. A command's module is imported when it is run, not before."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Final, NamedTuple


class Command(NamedTuple):
    """The module and function of a command, and what it does."""

    module: str
    function: str
    help: str


COMMANDS: Final = {
    "run": Command("orchestrator.run", "main", "plan, write everything that training needs, and start it where it can"),
    "plan": Command("orchestrator.console.plans", "plan", "plan only: time, memory, cost; the least GPUs for a target; the most that fits"),
    "sweep": Command("orchestrator.console.plans", "sweep", "plan for every combination of keys that have several values: gpus=8,16,32"),
    "compare": Command("orchestrator.console.plans", "compare", "two plans or settings side by side, cause by cause"),
    "report": Command("orchestrator.console.report", "main", "a run's plan in pictures, in one page: ranks, timeline, memory, candidates"),
    "audit": Command("orchestrator.audit.__main__", "main", "is it any good? a Megatron-LM script, a ds_config.json, YAML of others"),
    "completion": Command("orchestrator.console.completion", "main", "words for bash or zsh to complete commands and keys"),
    "data": Command("orchestrator.data", "main", "text becomes Megatron's .bin and .idx"),
    "describe": Command("orchestrator.describe", "main", "any Hugging Face architecture, or your own, becomes a file that plans"),
    "health": Command("orchestrator.health", "main", "is this node fit to train, does a run go on, is a checkpoint as it was written"),
    "calibrate": Command("orchestrator.calibrate.__main__", "main", "fit the prices to runs that were measured"),
    "profile": Command("orchestrator.profile.__main__", "main", "measure this cluster, for a cluster= and a calibration= of its own"),
    "validate": Command("orchestrator.validate.__main__", "main", "predictions against measured runs"),
}


def by_name(words: Sequence[str]) -> int | None:
    """Runs the command that the first word names, on the others; its exit status. None where it names none."""
    if not words or words[0] not in COMMANDS:
        return None
    chosen = COMMANDS[words[0]]
    status: int = getattr(importlib.import_module(chosen.module), chosen.function)(words[1:])
    return status
