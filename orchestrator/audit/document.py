"""A YAML or JSON text of settings by path, and the same text with some of them changed.

A YAML value is changed where it stands, by the places that PyYAML's composer gives every node: of 308 published configurations a load and
dump by ruamel.yaml's round trip gives 160 back with other lines too (blanks before comments, indents of lists, empty values), and a diff
shall show the change alone. The changed text is read again and must be what was meant.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from orchestrator.errors import InputError
from orchestrator.key import NO_TEXT, is_text
from orchestrator.recipe.sources import read_text
from orchestrator.words import terms
from orchestrator.words.terms import Term

Content = dict[str, Any]
Change = Callable[[Mapping[str, Any]], str | None]
"""The text of a file with other values by path; None: they can't be said there."""
MOST_DEPTH: Final = 100
MOST_VALUES: Final = 100_000
"""Values that a document may have, aliases written out: the longest published one has 1,400."""
INTERPOLATION: Final = "${"
MOST_BASES: Final = 8
"""Files upon files of which a configuration may be made."""
NAMES_A_MODEL: Final = (
    "actor_rollout_ref.model.path", "policy.model_name", "model.path", "model.partial_pretrain", "model_name_or_path", "model",
    "hf_checkpoint",
)  # fmt: skip
"""Settings of verl, NeMo-RL, LLaMA-Factory, ms-swift and slime for a model of Hugging Face's, which they don't describe."""
RESOLVERS: Final = {
    "multiply": lambda a, b: a * b,
    "divide_ceil": lambda a, b: -(-a // b),
    "divide_floor": lambda a, b: a // b,
}
"""Functions that NeMo's launcher has in its configurations (launcher_scripts/main.py)."""
AUTO: Final = "auto"
TRUTHS: Final = {"true": True, "yes": True, "1": True, "on": True, "false": False, "no": False, "0": False, "off": False}


class File(NamedTuple):
    """The file `name` with the settings that were found in its text. `notes`: what is assumed of them; `command`: the words in front of
    them, or what a Python file calls."""

    text: str
    name: str
    content: Content
    change: Change
    notes: Sequence[str] = ()
    command: Sequence[str] = ()


def is_json(text: str, name: str) -> bool:
    """Whether the text is JSON, by its ending, or by its first character."""
    return name.endswith(".json") or (not name.endswith((".yaml", ".yml")) and text.lstrip().startswith("{"))


def content_of(text: str, name: str) -> Content:
    """What the text says. Raises InputError for what is no mapping."""
    kind = "JSON" if is_json(text, name) else "YAML"
    try:
        found = json.loads(text) if kind == "JSON" else yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:  # PyYAML's own of "!!int ''"
        raise InputError("audit", name, f"is not {kind}: {_first_line(error)}") from None
    if not isinstance(found, dict):
        raise InputError("audit", name, f"is {kind} of no named settings")
    _check_size(found, name, kind)
    return {str(key): value for key, value in found.items()}


def opened(text: str, name: str) -> File:
    """A YAML or JSON file. Raises InputError for what is no mapping."""
    return File(text, name, content_of(text, name), partial(changed, text, name))


def _check_size(content: Content, name: str, kind: str) -> None:
    """Raises InputError for what would take for ever to walk (aliases of aliases, which may hold themselves), and for what is no text."""
    level: list[Any] = [content]
    count, depth = 0, 0
    while level:
        below: list[Any] = []
        for value in level:
            if isinstance(value, str) and not is_text(value):
                raise InputError("audit", name, f"is {kind} with the text {value!r}, which {NO_TEXT}")
            below += [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else ()
            if count + len(below) > MOST_VALUES:
                raise InputError("audit", name, f"is {kind} of more than {MOST_VALUES:,} values, aliases written out")
        count, level, depth = count + len(below), below, depth + 1
        if depth > MOST_DEPTH:
            raise InputError("audit", name, f"is {kind} nested deeper than {MOST_DEPTH} levels")


def _first_line(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    said = getattr(error, "problem", None) or str(error)
    return f"{said.splitlines()[0]}{f', line {mark.line + 1}' if mark else ''}"


def over_defaults(content: Content, name: str) -> tuple[Content, list[str]]:
    """(The content over that of the file that its `defaults` names, as NeMo-RL has them (nemo_rl/utils/config.py, load_config_with_
    inheritance), what is assumed). A list of names is Hydra's, whose files are the program's own."""
    notes: list[str] = []
    path = Path(name)
    for _ in range(MOST_BASES):
        base = content.get("defaults")
        if not isinstance(base, str):
            break
        path = path.parent / base
        if not path.is_file():
            notes.append(f"defaults: {base} is not here: what it says is left to the keys")
            break
        below = content_of(read_text(path), str(path))
        content = merged({**below, "defaults": below.get("defaults")}, {key: value for key, value in content.items() if key != "defaults"})
    return {key: value for key, value in content.items() if key != "defaults"}, notes


def merged(below: Content, above: Content) -> Content:
    """The two contents as one, section by section; of a setting that both have, the second's.

    >>> merged({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}})
    {'a': {'b': 3, 'c': 2}}
    """
    both = {key: merged(below[key], value) for key, value in above.items() if isinstance(value, dict) and isinstance(below.get(key), dict)}
    return {**below, **above, **both}


def leaves(value: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Paths and values; lists are values.

    >>> dict(leaves({"bf16": {"enabled": True}, "steps": 3}))
    {'bf16.enabled': True, 'steps': 3}
    """
    for name, item in value.items():
        if isinstance(item, dict) and item:
            yield from leaves(item, f"{above}{name}.")
        else:
            yield f"{above}{name}", item


def named_model(content: Content) -> str:
    """The model that a file names and does not describe; "" where it names none.

    >>> named_model({"policy": {"model_name": "Qwen/Qwen3-8B"}}), named_model({"model": {"num_layers": 2}})
    ('Qwen/Qwen3-8B', '')
    """
    said = dict(leaves(content))
    return next((str(said[path]) for path in NAMES_A_MODEL if isinstance(said.get(path), str)), "")


def resolved(content: Content) -> Content:
    """The content with OmegaConf's interpolations replaced by what they stand for; one that names what is not there stays as it is.

    >>> resolved({"a": {"h": 8, "f": "${multiply:4, ${.h}}", "p": "${data_dir}/x"}})
    {'a': {'h': 8, 'f': 32, 'p': '${data_dir}/x'}}
    """
    if INTERPOLATION not in json.dumps(content, default=str):
        return content
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    for name, function in RESOLVERS.items():
        if not OmegaConf.has_resolver(name):
            OmegaConf.register_resolver(name, function)
    whole = OmegaConf.create({**content, "training": content})  # NeMo's launcher has its file under training

    def walk(value: Any, path: str) -> Any:
        if isinstance(value, dict):
            return {name: walk(item, f"{path}.{name}" if path else str(name)) for name, item in value.items()}
        if not isinstance(value, str) or INTERPOLATION not in value:
            return value
        try:
            return OmegaConf.select(whole, path)
        except (OmegaConfBaseException, TypeError, ValueError, ZeroDivisionError):
            return value

    return {name: walk(item, name) for name, item in content.items()}


class Given:
    """Values by path, with which of them have been read."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.values = dict(leaves(content))
        self.used: set[str] = set()
        self.assumed: list[str] = []

    def get(self, path: str, default: Any = None) -> Any:
        """The value, or the default where the path is not there, is empty, or the Trainer fills it."""
        self.used.add(path)
        value = self.values.get(path, default)
        if value == AUTO:
            self.assumed.append(f"{path} is auto: the Trainer's arguments say it, taken as if it were not there")
            return default
        return default if value is None else value

    def read(self, *table: Term) -> dict[str, Any]:
        """The settings of this table's paths by our names; all of it counts as read. Raises InputError."""
        said = {term.theirs: self.get(term.theirs) for term in table}
        return terms.read(table, {path: value for path, value in said.items() if value is not None})

    def number(self, path: str, kind: type[Any] = int) -> Any:
        """The number at this path; None where it is not there. Raises InputError."""
        return terms.read([Term(path, "number", back=kind)], {path: self.get(path)}).get("number")

    def truth(self, path: str, default: bool = False) -> bool:
        """The truth value at a path, in YAML's or Python's words. Raises InputError."""
        value = self.get(path, default)
        said = str(value).lower()
        if said not in TRUTHS:
            raise InputError(path, value, "is neither", ["true", "false"])
        return TRUTHS[said]

    def truths(self, switches: Iterable[tuple[str, str, bool]]) -> dict[str, bool]:
        """Truth values by another name, of switches with that name and what holds where nothing is said. Raises InputError."""
        return {name: self.truth(path, default) for path, name, default in switches}

    def take(self, *paths: str) -> None:
        """Counts these paths as read, each with what is below it."""
        self.used |= {path for path in self.values if path in paths or path.startswith(tuple(f"{one}." for one in paths))}

    def left(self) -> Iterator[tuple[str, str]]:
        """Paths that nothing has read, with what they say; an empty value says nothing."""
        for path, value in self.values.items():
            if path not in self.used and value is not None and value != {}:
                yield path, f"{path}={json.dumps(value, default=str)}"


# ------------------------------------------------------------------------------------------------------------------ changing


def changed(text: str, name: str, changes: Mapping[str, Any]) -> str | None:
    """The text with these values by path; None: it can't be said there."""
    if not changes:
        return text
    if is_json(text, name):
        try:
            return _changed_json(text, changes)
        except ValueError:  # a ds_config that was said in another format
            return None
    meant = content_of(text, name)
    new: str | None = text
    for path, value in changes.items():
        new = None if new is None else _changed_yaml(new, path.split("."), value)
        terms.put(meant, path, value)
    return new if new is not None and yaml.safe_load(new) == meant else None


def _changed_json(text: str, changes: Mapping[str, Any]) -> str:
    """The JSON text with these changes where they stand or, where that can't be, all of it in its own indentation."""
    meant, new = json.loads(text), text
    for path, value in changes.items():
        terms.put(meant, path, value)
    with suppress(yaml.YAMLError, ValueError):  # tabs, say, which YAML has not
        for path, value in changes.items():
            new = _changed_yaml(new, path.split("."), value, json.dumps) or ""
        if json.loads(new) == meant:
            return new
    indent = re.search(r"\n([ \t]+)", text)
    return json.dumps(meant, indent=indent.group(1) if indent else None, ensure_ascii=False) + ("\n" if text.endswith("\n") else "")


def _changed_yaml(text: str, path: list[str], value: Any, write: Callable[[Any], str] | None = None) -> str | None:
    """The text with one value at its place, or as a new line below its neighbours; None: it is in a list, or behind an alias. `write` gives
    a value's text; None: YAML's."""
    write = write or _flow
    node: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
    for depth, name in enumerate(path):
        if not isinstance(node, yaml.MappingNode):
            return None
        found: yaml.Node | None = next((item for key, item in node.value if key.value == name), None)
        if found is None:
            return _added(text, node, name, terms.nested({".".join(path[depth:]): value})[name], write)
        is_empty = not found.value if isinstance(found, yaml.MappingNode) else found.tag == "tag:yaml.org,2002:null"
        if is_empty and depth < len(path) - 1:
            return _at(text, found, write(terms.nested({".".join(path[depth + 1 :]): value})))
        node = found
    if node is None or (isinstance(node, yaml.CollectionNode) and not node.flow_style):
        return None
    new, before = write(value), text[node.start_mark.index : node.end_mark.index]
    # Truth values as the file writes them.
    return _at(text, node, new.capitalize() if isinstance(value, bool) and before in ("True", "False") else new)


def _at(text: str, node: yaml.Node, new: str) -> str:
    """An empty value stands behind its colon, without a place of its own."""
    start, end = node.start_mark.index, node.end_mark.index
    return text[:start] + (" " + new if start == end and text[start - 1 : start] == ":" else new) + text[end:]


def _added(text: str, node: yaml.MappingNode, name: str, value: Any, write: Callable[[Any], str]) -> str | None:
    """The text with a setting more, below the mapping's last setting that is no section; None: the mapping is empty."""
    if not node.value:
        return None
    new = f"{write(name)}: {write(value)}"
    if node.flow_style:
        key, last = node.value[-1]
        start, end = int(key.start_mark.index), int(last.end_mark.index)
        line = text[start - int(key.start_mark.column) : start]
        return f"{text[:end]},{' ' if line.strip() else chr(10) + line}{new}{text[end:]}"
    plain = [pair for pair in node.value if isinstance(pair[1], yaml.ScalarNode) and pair[1].style not in ("|", ">")]
    if not plain:  # above the first section
        start, column = int(node.value[0][0].start_mark.index), int(node.value[0][0].start_mark.column)
        return text[:start] + new + "\n" + " " * column + text[start:]
    key, last = plain[-1]
    end = text.find("\n", last.end_mark.index)
    head, rest = (text, "") if end < 0 else (text[:end], text[end:])
    return f"{head}\n{' ' * key.start_mark.column}{new}{rest}"


def _flow(value: Any) -> str:
    """The value in one line of YAML.

    >>> _flow({"a": {"b": True}}), _flow("no"), _flow(None), _flow(["x", 2])
    ('{a: {b: true}}', "'no'", 'null', '[x, 2]')
    """
    return str(yaml.safe_dump(value, default_flow_style=True, width=10**6)).removesuffix("\n").removesuffix("\n...").strip()
