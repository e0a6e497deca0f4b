"""The flags of Megatron-LM's parser, for the tables of a new version.

MEGATRON_LM=CHECKOUT python tests/megatron_lm/flags.py CSV    # flag, type, nargs, choices, as tests/engines/megatron_flags*.csv
MEGATRON_LM=CHECKOUT python tests/megatron_lm/flags.py KINDS  # JSON: kind -> destinations, as "flags" of engines/known.json
MEGATRON_LM=CHECKOUT python tests/megatron_lm/flags.py DEFAULTS  # JSON: destination -> default
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import sys
import warnings
from enum import Enum
from pathlib import Path
from signal import Signals
from typing import Any


def parser_of(checkout: str) -> argparse.ArgumentParser:
    """The checkout's own, with everything that `parse_args` adds."""
    warnings.filterwarnings("ignore")
    from thousand import Megatron

    megatron = Megatron(checkout)
    found: list[argparse.ArgumentParser] = []

    class SeenError(Exception):
        pass

    def stop(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        found.append(self)
        raise SeenError

    read, argparse.ArgumentParser.parse_args = argparse.ArgumentParser.parse_args, stop  # type: ignore[method-assign]
    with contextlib.suppress(SeenError):
        megatron.arguments.parse_args()
    argparse.ArgumentParser.parse_args = read  # type: ignore[method-assign]
    return found[0]


def kind(action: argparse.Action) -> str:
    """As engines/known.json has it: "true" and "false" take no value and set that; "both" has a --no- form; a|b is one of these."""
    if isinstance(action, argparse.BooleanOptionalAction):
        return "both"
    if action.nargs == 0:
        return "true" if getattr(action, "const", None) is True else "false" if getattr(action, "const", None) is False else "str"
    if action.nargs in ("+", "*") or isinstance(action.nargs, int):
        return "list"
    choices = [choice.name if isinstance(choice, Enum) and not isinstance(choice, Signals) else choice for choice in action.choices or ()]
    if len(choices) > 1 and all(isinstance(choice, str) for choice in choices):
        return "|".join(choices)
    return {int: "int", float: "float"}.get(action.type, "str")  # type: ignore[call-overload,no-any-return]


def rows(parser: argparse.ArgumentParser) -> list[tuple[str, str, str, str]]:
    found = []
    for action in parser._actions:
        if not action.option_strings:
            continue
        nargs = "0" if isinstance(action, argparse.BooleanOptionalAction) or action.nargs == 0 else str(action.nargs or "")
        choices = str(tuple(action.choices)) if action.choices is not None else ""
        of = type(action).__name__ if nargs == "0" else getattr(action.type, "__name__", "")
        found.append(("|".join(action.option_strings), of, nargs, choices))
    return found


def kinds(parser: argparse.ArgumentParser) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    for action in parser._actions:
        if not action.option_strings or action.dest == "help":
            continue
        flag = action.option_strings[0]
        usual = "--" + action.dest.replace("_", "-")
        found.setdefault(kind(action), []).append(action.dest if flag == usual else f"{action.dest}={flag}")
    return {name: " ".join(found[name]) for name in sorted(found)}


def main(what: str) -> None:
    parser = parser_of(str(Path(os.environ["MEGATRON_LM"]).resolve()))
    if what == "CSV":
        table = csv.writer(sys.stdout, lineterminator="\n")
        table.writerow(("flag", "type", "nargs", "choices"))
        table.writerows(rows(parser))
    elif what == "KINDS":
        print(json.dumps(kinds(parser), indent=1))
    else:
        print(json.dumps({action.dest: repr(action.default) for action in parser._actions}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1])
