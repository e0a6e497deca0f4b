"""A docstring says what a value is to who reads it alone: no fragment that the line before it completes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
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
WORD = re.compile(r"[^\W_][\w'./:`=-]*")


def documented(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of each docstring of a module, a class, a function and an attribute."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str):
                yield statement.lineno, statement.value.value


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
