"""Python that sets the fields of a recipe's configuration (`cfg.model.tensor_model_parallel_size = 2`), as Megatron-Bridge's and NeMo 2's
recipes have it: read by its syntax, never run, and changed where the values stand."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from orchestrator.audit.bridge_recipe import UNKNOWN
from orchestrator.audit.document import Content
from orchestrator.errors import InputError
from orchestrator.words import terms


def called(text: str) -> tuple[str, ...]:
    """The functions that are called by their names, of what `content_of` has read.

    >>> called("cfg = recipes.qwen3_8b_sft_config()\\ncfg.comm = Comm()")
    ('qwen3_8b_sft_config', 'Comm')
    """
    calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    return tuple(ast.unparse(node.func).rpartition(".")[2] for node in calls)


class Set(NamedTuple):
    """An assignment, with the function that has it and the field's path below its object."""

    function: str
    path: str
    node: ast.Assign


def content_of(text: str, name: str) -> tuple[Content, list[str]]:
    """(Settings by nested sections, what can't be read without running it). Raises InputError for what is no Python, and for a file in
    which several functions set fields."""
    content: Content = {}
    notes = []
    for one in _sets(text, name):
        found = _plain(one.node.value)
        if found is UNKNOWN:
            notes.append(f"{one.path} is {ast.unparse(one.node.value)[:60]}, which only running it tells: taken as if it were not there")
            continue
        *above, _ = one.path.split(".")
        within: Any = content
        for part in above:
            if isinstance(within.get(part), str):  # a configuration by its name, of which a field is set
                within[part] = {"_target_": within[part]}
            within = within.setdefault(part, {})
        terms.put(content, one.path, found)
    return content, notes


OF_A_CLASS: Final = ("Config", "Partial")
"""Calls of nemo_run that make a configuration of the class that they are given."""


def _plain(node: ast.expr) -> Any:
    """A literal, a type of torch as its name, or of what a call makes: its one text, or what it calls with its arguments by name."""
    if isinstance(node, ast.Attribute):
        return ast.unparse(node) if ast.unparse(node).startswith("torch.") else UNKNOWN
    if isinstance(node, ast.Call):
        called = ast.unparse(node.func).rpartition(".")[2]
        named = {word.arg: _plain(word.value) for word in node.keywords if word.arg}
        known = {key: value for key, value in named.items() if value is not UNKNOWN}
        if called in OF_A_CLASS and node.args:  # run.Config(CosineAnnealingScheduler)
            return {"_target_": ast.unparse(node.args[0]), **known}
        texts = [one.value if isinstance(one, ast.Constant) else UNKNOWN for one in node.args]
        if texts and (len(texts) > 1 or not isinstance(texts[0], str)):
            return UNKNOWN
        return {"_target_": called, **known} if known else texts[0] if texts else called
    try:
        return ast.literal_eval(node)
    except ValueError:
        return UNKNOWN


def _sets(text: str, name: str) -> list[Set]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError("audit", name, f"is no Python: {error}") from None
    found = [*_in(tree, "")]
    functions = {one.function for one in found}
    if len(functions) > 1:
        raise InputError("audit", name, f"sets fields of a recipe in {', '.join(sorted(map(repr, functions)))}: keep one of them")
    return found


def _in(node: ast.AST, function: str) -> Iterator[Set]:
    for child in ast.iter_child_nodes(node):
        inside = child.name if isinstance(child, ast.FunctionDef) else function
        if isinstance(child, ast.Assign) and len(child.targets) == 1 and isinstance(child.targets[0], ast.Attribute):
            subject, _, path = ast.unparse(child.targets[0]).partition(".")
            if subject.isidentifier() and subject != "self" and all(part.isidentifier() for part in path.split(".")):
                yield Set(inside, path, child)
        yield from _in(child, inside)


def changed(text: str, name: str, changes: Mapping[str, Any]) -> str | None:
    """The text with these values by path, each where it stands or behind the last that is set; None: a path's value is no literal."""
    lines = text.splitlines(keepends=True)
    found = _sets(text, name)
    for path, value in changes.items():
        there = next((one.node for one in reversed(found) if one.path == path), None)
        if there is None:
            last = found[-1].node
            subject = ast.unparse(last.targets[0]).partition(".")[0]
            row = (last.end_lineno or 0) - 1
            lines[row] += f"{' ' * last.col_offset}{subject}.{path} = {value!r}\n"
            continue
        node = there.value
        if node.lineno != node.end_lineno or node.end_col_offset is None or _plain(node) is UNKNOWN:
            return None
        line = lines[node.lineno - 1].encode()
        lines[node.lineno - 1] = (line[: node.col_offset] + repr(value).encode() + line[node.end_col_offset :]).decode()
        found = _sets("".join(lines), name)
        lines = "".join(lines).splitlines(keepends=True)
    return "".join(lines)
