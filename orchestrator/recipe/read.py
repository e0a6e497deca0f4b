"""key=value words and YAML files as trees of strings: nothing is typed, filled in, repaired or left out here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import yaml

from orchestrator.errors import InputError, nearest
from orchestrator.key import NO_TEXT, is_text, put_once, shown
from orchestrator.recipe.keys import GROUPS, KEYS, OPEN_GROUPS
from orchestrator.recipe.sources import read_text

Tree = dict[str, Any]
"""Nested keys; the leaves are strings, None, or (in YAML) lists."""

AXES: Final = {"tensor": "tp", "pipeline": "pp", "context": "cp", "expert": "ep", "expert_tensor": "etp", "data": "dp"}
SAME: Final = {"slurm.image": "container.image", "slurm.mounts": "container.mounts", "pin.engine": "engine", "explain.engine": "engine"} | {
    f"{group}{axis}{ending}": f"{group or 'pin.'}{short}"
    for axis, short in AXES.items()
    for ending in ("_parallel", "_parallel_size", "_model_parallel_size")
    for group in ("", "pin.", "explain.")
}
"""Keys that people look for in another group or by a longer name."""
MAX_DEPTH: Final = 8
"""Levels of nesting that a YAML may have; ours needs four."""


def read_arguments(words: Sequence[str]) -> Tree:
    """key=value words as a tree of strings. Raises InputError.

    >>> read_arguments(["slurm.time=12:30:00", "gpus=4"])
    {'slurm': {'time': '12:30:00'}, 'gpus': '4'}
    """
    tree: Tree = {}
    seen: dict[str, str] = {}
    for word in words:
        name, value = key_and_value(word)
        check_key(name, value)
        put_once(seen, name, value)
        _check_text(name, value)
        if any(parent in KEYS for parent in parents(name)):  # launch.wait beside launch: no tree has both
            tree[name] = value
            continue
        for other in seen:
            if name.startswith(f"{other}."):
                raise InputError(name, shown(value), f"is below {other}, which is given as a value too")
            if other.startswith(f"{name}.") and other not in tree:
                raise InputError(name, shown(value), f"is given as a value, and {other} below it too")
        here = tree
        *groups, last = name.split(".")
        for group in groups:
            here = here.setdefault(group, {})
        here[last] = value
    return tree


def key_and_value(word: str) -> tuple[str, str]:
    """A word of the command line, divided. Raises InputError.

    >>> key_and_value("data.env=A=1")
    ('data.env', 'A=1')
    """
    name, equals, value = word.partition("=")
    if not equals:
        hint = nearest(name, ["--help", "--cfg", "--schema", "--version"]) if name.startswith("-") else None
        if (key := name.removeprefix("--").replace("-", "_")) in KEYS:
            hint = f"{key}=..., one word"
        raise InputError(shown(word), None, f"is not key=value{f'; did you mean {hint}?' if hint else ''}")
    return name, value


def as_texts(value: Any) -> Any:
    """A Python value as a user would type it: the leaves are texts, or None.

    >>> as_texts({"gpus": 8, "train": {"betas": (0.9, 0.95), "precision_aware_optimizer": True}})
    {'gpus': '8', 'train': {'betas': ['0.9', '0.95'], 'precision_aware_optimizer': 'true'}}
    """
    if isinstance(value, dict):
        return {str(name): as_texts(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_texts(item) for item in value]
    if value is None:
        return None
    return str(value).lower() if isinstance(value, bool) else str(value)


def parents(name: str) -> list[str]:
    """The names of all groups that this key is in, from the outermost.

    >>> parents("cluster.levels.nvlink.size")
    ['cluster', 'cluster.levels', 'cluster.levels.nvlink']
    """
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def check_key(name: str, value: Any) -> None:
    """Raises InputError unless `name` is a key; names the nearest one."""
    if name in KEYS or (name.partition(".")[0] in OPEN_GROUPS and name.partition(".")[2]):
        return
    if name in OPEN_GROUPS:
        raise InputError(name, shown(value), f"is a group of keys; write {name}.NAME=value")
    if name in GROUPS:
        members = [key.partition(".")[2] for key in KEYS if key.startswith(f"{name}.")]
        raise InputError(name, shown(value), f"is a group of keys; write {name}.KEY=value", members)
    group, _, short = name.rpartition(".")
    ending = (key for key in KEYS if "." in key and key.rpartition(".")[2] == short)
    same = SAME.get(name) or min(ending, key=lambda key: not key.startswith(("pin.", "train.")), default=None)
    close = same if (group not in GROUPS or name in SAME) and same else nearest(name, [*KEYS, *GROUPS])
    members = [key for key in KEYS if key.startswith(f"{group}.")]
    choices = members or [key for key in KEYS if "." not in key] + [f"{name}.*" for name in GROUPS]
    raise InputError(shown(name), shown(value), f"is no key{f'; did you mean {close}?' if close else ''}", [] if close else choices)


def _check_text(name: str, value: str) -> None:
    if not is_text(value):
        raise InputError(name, shown(value), NO_TEXT)
    if "${" in value:
        raise InputError(name, shown(value), "has ${...}: values are taken as they are, nothing is filled in")


class _Loader(yaml.SafeLoader):
    """A YAML loader of which only the composer is used: scalars stay as they were typed, and aliases are refused."""

    depth = -1

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self.depth += 1
        if self.check_event(yaml.AliasEvent):
            self.refuse("YAML aliases are not taken; write the value out")
        if self.depth > MAX_DEPTH:
            self.refuse(f"is nested deeper than {MAX_DEPTH} levels")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def refuse(self, why: str) -> NoReturn:
        line = self.peek_event().start_mark.line + 1  # type: ignore[no-untyped-call]
        raise InputError(str(self.name), None, f"line {line}: {why}")


def read_yaml(path: Path) -> Tree:
    """A YAML file as a tree whose scalars are strings. Raises InputError that names the file, the line and the key."""
    text = read_text(path)
    try:
        loader = _Loader(text)
        loader.name = str(path)
        node = loader.get_single_node()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        said = " ".join(str(getattr(error, "problem", None) or error).split())
        raise InputError(str(path), None, f"{where}is not YAML: {said}") from None
    if node is None:
        raise InputError(str(path), None, "is empty")
    tree = _plain(node, path, "")
    if not isinstance(tree, dict):
        raise InputError(str(path), None, "is not a YAML mapping (key: value lines)")
    return tree


def _plain(node: yaml.Node, path: Path, where: str) -> Any:
    """Strings, None, lists and dicts; duplicate keys and interpolations refused."""
    if isinstance(node, yaml.ScalarNode):
        text = str(node.value)
        if node.style is None and text in ("", "~", "null", "Null", "NULL"):
            return None
        _check_text(f"{path}: {where}", text)
        return text
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, path, f"{where}[{index}]") for index, item in enumerate(node.value)]
    assert isinstance(node, yaml.MappingNode)
    found: Tree = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise InputError(str(path), None, f"line {key_node.start_mark.line + 1}: a key must be a plain word")
        name = f"{where}.{key_node.value}" if where else str(key_node.value)
        if key_node.value in found:
            raise InputError(f"{path}: {shown(name)}", None, f"line {key_node.start_mark.line + 1}: is given twice")
        found[str(key_node.value)] = _plain(value_node, path, name)
    return found
