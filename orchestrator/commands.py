"""The commands of python -m orchestrator, and how each takes its `key=value` words and ends: with one message and an exit status."""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from orchestrator.errors import NO_ROOM, InputError, OrchestratorError, no_room, unknown
from orchestrator.key import put_once, shown
from orchestrator.values import indented

UNEXPECTED: Final = 1
INTERRUPTED: Final = 130
DEBUG: Final = "ORCHESTRATOR_DEBUG"
"""Environment variable under which a defect shows its traceback."""
JSON: Final = "--json"
HELP: Final = frozenset({"-h", "--help"})
OBJECTS: Final = 2_000_000
"""Objects that are made before garbage is looked for among them: a search makes half of that, and needs them to its end."""


def alone(status: Callable[[], int]) -> int:
    """A command that has the process for itself. What it has made is looked for garbage seldom, and not once more when the process ends:
    that takes up to half a second."""
    gc.set_threshold(OBJECTS)
    try:
        found = status()
    except KeyboardInterrupt:  # before the command itself listens: while its modules are imported
        print("interrupted", file=sys.stderr)
        found = INTERRUPTED
    gc.freeze()
    return found


def command(
    words: Sequence[str],
    help_text: Callable[[], str],
    body: Callable[[Sequence[str]], int | None],
    *,
    interrupted: str = "interrupted",
    topic: Callable[[Sequence[str]], str] | None = None,
) -> int:
    """Runs a command; its exit status: what `body` returns (None is 0), an error's own, 130 on Ctrl-C, 1 for a defect of ours.
    `--help` anywhere among the words prints `help_text` instead, or what `topic` says of the words behind it, and the help of those that
    are commands; `interrupted` is said on Ctrl-C."""
    try:
        if HELP & {*words}:
            behind = [*words][next(index for index, word in enumerate(words) if word in HELP) + 1 :]
            if topic is None or not behind:
                print(help_text(), flush=True)
                return 0
            for word in behind:
                with suppress(*([InputError] if word in COMMANDS else [])):
                    print(topic([word]), flush=True)
                by_name([word, "--help"])
            return 0
        return body(words) or 0
    except OrchestratorError as error:
        said = {"key": error.key, "value": error.value, "why": error.why, "choices": error.choices} if isinstance(error, InputError) else {}
        return failed(words, str(error), error.status, **said)
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone (| head)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNEXPECTED
    except Exception as error:
        if isinstance(error, OSError) and no_room(error):
            where = f" to {error.filename}" if error.filename else ""
            return failed(words, f"nothing more can be written{where}: {error.strerror}", NO_ROOM)
        if os.environ.get(DEBUG):
            traceback.print_exc()
        return failed(words, f"a defect of ours: {type(error).__name__}: {error}\n{DEBUG}=1 in the environment shows where", UNEXPECTED)


def failed(words: Sequence[str], message: str, status: int, **said: Any) -> int:
    """Says an error on standard error and, with --json among the words, as one object on standard output; returns `status`."""
    print(f"error: {message}", file=sys.stderr)
    if JSON in words:
        print(json.dumps({"error": {"message": message, **said}, "exit_status": status}, indent=1, default=str))
    return status


def command_of(module_docstring: str | None, body: Callable[[Sequence[str]], int | None]) -> Callable[[Sequence[str]], int]:
    """A module's command: what takes its words, helps with the module's own docstring, runs `body` and returns the exit status."""
    return lambda words: command(words, lambda: usage(module_docstring), body)


def without_json(words: Sequence[str]) -> tuple[list[str], bool]:
    """The words without --json, and whether it was there."""
    return [word for word in words if word != JSON], JSON in words


def say_json(value: Any) -> None:
    """Prints a value as JSON on standard output."""
    print(indented(value), end="")


def usage(module_docstring: str | None) -> str:
    """A module's own words as the help text of its command."""
    return (module_docstring or "").replace("`", "").strip()


def arguments(words: Sequence[str], keys: Sequence[str], required: Sequence[str] = ()) -> dict[str, str]:
    """The words as a dict. Raises InputError for an unknown key, a key twice, no value, or a missing key.

    >>> arguments(["runs=a.csv"], ["runs", "out"])
    {'runs': 'a.csv'}
    """
    given: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise InputError(shown(word), None, "is not key=value", keys)
        if key not in keys:
            raise unknown(shown(key), shown(value), "is no key", key, keys)
        if not value:
            raise InputError(key, None, "needs a value: key=value")
        put_once(given, key, value)
    for key in required:
        if key not in given:
            raise InputError(key, None, "is missing; --help says what it is")
    return given


def write_text(path: Path, text: str, key: str, *, with_folders: bool = False) -> None:
    """Writes a file of the user's choice, `with_folders` also the folders above it. Raises InputError."""
    try:
        if with_folders:
            path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(key, path, f"can't be written: {error.strerror or error}") from None


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
    "calibrate": Command("orchestrator.calibrate.__main__", "main", "fit the prices to your measured runs, or judge them"),
    "profile": Command("orchestrator.profile.__main__", "main", "measure this cluster, for a cluster= and a calibration= of its own"),
}


def by_name(words: Sequence[str]) -> int | None:
    """Runs the command that the first word names, on the others; its exit status. None where it names none."""
    if not words or words[0] not in COMMANDS:
        return None
    chosen = COMMANDS[words[0]]
    status: int = getattr(importlib.import_module(chosen.module), chosen.function)(words[1:])
    return status
