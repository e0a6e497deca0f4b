"""python -m orchestrator COMMAND ...: the list of commands, and the way to each. The console script `orchestrator` is the same."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Final, NamedTuple

from orchestrator import __version__
from orchestrator.commands import command
from orchestrator.errors import InputError, nearest


class Command(NamedTuple):
    """Where its function of the words is, and what it does."""

    module: str
    function: str
    help: str


COMMANDS: Final = {
    "run": Command("orchestrator.run", "main", "plan, write everything that training needs, and start it where it can"),
    "plan": Command("orchestrator.console.asked", "plan", "plan only: time, memory, cost; the least GPUs for a target; the most that fits"),
    "sweep": Command("orchestrator.console.asked", "sweep", "plan for every combination of keys that have several values: gpus=8,16,32"),
    "compare": Command("orchestrator.console.asked", "compare", "two plans or settings side by side, cause by cause"),
    "report": Command("orchestrator.console.report", "main", "a run's plan in pictures, in one page: ranks, timeline, memory, candidates"),
    "audit": Command("orchestrator.audit.__main__", "main", "is what you have any good? a script of Megatron-LM, a ds_config.json"),
    "data": Command("orchestrator.data", "main", "text becomes Megatron's .bin and .idx"),
    "describe": Command("orchestrator.describe", "main", "any Hugging Face architecture, or your own, becomes a file that plans"),
    "calibrate": Command("orchestrator.calibrate.__main__", "main", "fit the prices to runs that were measured"),
    "profile": Command("orchestrator.profile.__main__", "main", "measure this cluster, for a cluster= and a calibration= of its own"),
    "validate": Command("orchestrator.validate.__main__", "main", "predictions against measured runs"),
}


def help_text() -> str:
    """The commands, a line each."""
    lines = [f"  {name:<10} {each.help}" for name, each in COMMANDS.items()]
    head = "usage: python -m orchestrator COMMAND key=value ...   (or: orchestrator COMMAND ...)"
    foot = "COMMAND --help says more. Words without a command are those of run: python -m orchestrator recipe=gpt_tiny gpus=4"
    return "\n".join([head, "", *lines, "", foot])


def main(words: Sequence[str]) -> int:
    """Runs the command that the first word names; its exit status."""
    if words and words[0] in COMMANDS:
        chosen = COMMANDS[words[0]]
        status: int = getattr(importlib.import_module(chosen.module), chosen.function)(words[1:])
        return status
    if words and ("=" in words[0] or words[0] in ("--cfg", "--schema")):
        return main(["run", *words])
    return command(words, help_text, _listed)


def _listed(words: Sequence[str]) -> None:
    if "--version" in words:
        print(__version__)
    elif not words:
        print(help_text())
    else:
        close = nearest(words[0], COMMANDS)
        raise InputError(words[0], None, f"is no command{f'; did you mean {close}?' if close else ''}", [] if close else COMMANDS)


def console() -> int:
    """The console script."""
    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
