"""python -m orchestrator COMMAND ...: the list of commands, and the way to each. The console script `orchestrator` is the same."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from orchestrator import __version__
from orchestrator.commands import COMMANDS, alone, by_name, command
from orchestrator.errors import unknown


def help_text() -> str:
    """The text of --help: the commands, a line each."""
    lines = [f"  {name:<10} {each.help}" for name, each in COMMANDS.items()]
    head = "usage: python -m orchestrator COMMAND key=value ...   (or: orchestrator COMMAND ...)"
    foot = "COMMAND --help says more. Words without a command are those of run: python -m orchestrator recipe=gpt_tiny gpus=4"
    return "\n".join([head, "", *lines, "", foot])


def main(words: Sequence[str]) -> int:
    """Runs the command that the first word names; its exit status."""
    if words and ("=" in words[0] or words[0] in ("--cfg", "--schema")):
        words = ["run", *words]
    status = by_name(words)
    return command(words, help_text, _listed, topic=_topic) if status is None else status


def _topic(words: Sequence[str]) -> str:
    """What --help says of topics of run, before any command."""
    from orchestrator.console.plans import topic

    return topic(words)


def _listed(words: Sequence[str]) -> None:
    if "--version" in words:
        print(__version__)
    elif not words:
        print(help_text())
    else:
        raise unknown(words[0], None, "is no command", words[0], COMMANDS)


def console() -> int:
    """Runs the command line of the installed script `orchestrator` and returns its exit status."""
    return alone(lambda: main(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(console())
