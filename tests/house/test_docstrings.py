"""A docstring says what a value is to who reads it alone: no fragment that the line before it completes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "orchestrator"
FEWEST_WORDS = 3
LEANING = re.compile(
    r"(of|as|and|or|but|by|with|without|at|from|to|per|until|above|below|before|after|behind|beside|besides|between|over|under|within"
    r"|that|those|they|them|their|it|its|whose|both|so|not|also|else|otherwise|then|again|once|likewise|more|less|one more"
    r"|the same|the others|in words|in full|(none|true|false|\d+) where|(any|all|none) of (it|them)|where (it|they)|at least)\b",
    re.IGNORECASE,
)
"""Openings that lean on a neighbour: a preposition, a conjunction or a pronoun without the word that it belongs to."""
UNITS = {"_s": "second", "_seconds": "second", "_bytes": "byte"}
"""What a docstring has to name where the value's own name ends so; a share or a ratio of them says that."""
WORD = re.compile(r"[^\W_][\w'./:`=-]*")


def documented(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of each docstring of a module, a class, a function and an attribute."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str):
                yield statement.lineno, statement.value.value


def with_names(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """(line, name, text) of each docstring of a function and an attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)) is not None:
            yield node.lineno, node.name, text
        body = getattr(node, "body", None)
        for statement, after in pairwise(body) if isinstance(body, list) else ():
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
                targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
                yield from ((after.lineno, ast.unparse(target), after.value.value) for target in targets if target is not None)


def lacking_unit(name: str, text: str) -> str | None:
    """The unit that a docstring of a value of this name does not say; None: it says it, or needs none."""
    unit = next((unit for end, unit in UNITS.items() if name.lower().endswith(end)), None)
    return None if unit is None or re.search(rf"{unit}|share|ratio", text, re.IGNORECASE) else unit


def why_fragment(text: str) -> str | None:
    """Why a docstring can't be read alone; None: it can."""
    said = text.strip().split("\n\n")[0].split(">>>")[0]
    opening = LEANING.match(said.lstrip("("))
    if opening is not None:
        return f"opens with {opening.group()!r}"
    words = len(WORD.findall(said))
    return None if words >= FEWEST_WORDS else f"has {words} words before its first blank line or doctest"


@pytest.mark.parametrize("room", sorted({path.relative_to(PACKAGE).parts[0] for path in PACKAGE.rglob("*.py")}))
def test_a_docstring_needs_no_neighbour(room: str) -> None:
    paths = [PACKAGE / room] if room.endswith(".py") else sorted((PACKAGE / room).rglob("*.py"))
    found = [
        f"orchestrator/{path.relative_to(PACKAGE)}:{line} {why}: {text.strip()[:60]!r}"
        for path in paths
        for line, text in documented(ast.parse(path.read_text()))
        if (why := why_fragment(text)) is not None
    ]
    assert not found, "say what is returned, or what the value is, and in which unit:\n" + "\n".join(found)


def test_seconds_and_bytes_are_called_so() -> None:
    found = [
        f"orchestrator/{path.relative_to(PACKAGE)}:{line} {name} lacks the word {unit}: {text.strip()[:60]!r}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line, name, text in with_names(ast.parse(path.read_text()))
        if (unit := lacking_unit(name, text)) is not None
    ]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    "text",
    ["Of all GPUs together.", "As `open_batches`.", "Bytes.", "By source and situation.", "The same of containers.",
     "That there are no samples.", "None where it does.", "Exit status.", "\n    >>> powers(9)\n    [1, 2, 4, 8]\n"],
)  # fmt: skip
def test_fragments_are_found(text: str) -> None:
    assert why_fragment(text) is not None


def test_docstrings_of_attributes_are_read() -> None:
    source = '"""A module."""\nWIDTH = 3\n"""Bytes."""\nclass A:\n    size: int\n    """Of a GPU."""\n'
    assert list(documented(ast.parse(source))) == [(1, "A module."), (3, "Bytes."), (6, "Of a GPU.")]


def test_a_unit_that_is_not_said_is_found() -> None:
    assert lacking_unit("save_s", "What a save takes.") == "second"
    assert lacking_unit("least_bytes", "What the smallest split needs.") == "byte"
    assert lacking_unit("save_s", "Seconds of a save.") is lacking_unit("pieces", "How many there are.") is None
