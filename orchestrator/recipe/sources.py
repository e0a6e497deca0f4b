"""The data keys: one source or a weighted blend, what is evaluated on, and that all of it is there and can be read."""

from __future__ import annotations

import errno
import json
import math
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from orchestrator.errors import InputError
from orchestrator.key import shown
from orchestrator.model.architecture import Architecture
from orchestrator.plan import RunSettings, Source

SHORT: Final = {"data": "data.train", "tokenizer": "data.tokenizer"}
ALTERNATIVES: Final = (
    ("data", "data.train", "data.blend"),
    ("tokenizer", "data.tokenizer"),
    ("data.valid", "data.split"),
    ("train.steps", "train.tokens", "train.epochs"),
)
"""Keys that exclude each other: of each row one is given; a later layer's takes the place of an earlier one's."""


def check_layer(flat: Mapping[str, Any]) -> None:
    """Raises InputError where one layer gives two keys that exclude each other."""
    for names in ALTERNATIVES:
        given = [name for name in names if name in flat]
        if len(given) > 1:
            first, second = given[:2]
            why = "is its short form" if SHORT.get(first) == second else "takes its place"
            raise InputError(second, shown(flat[second].text), f"{first}={shown(flat[first].text)} is given too, which {why}")


def without_replaced(merged: Mapping[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of lower layers that this layer leaves standing."""
    gone = {name for names in ALTERNATIVES if any(name in layer for name in names) for name in names}
    return {name: value for name, value in merged.items() if name not in gone}


def data_settings(merged: Mapping[str, Any], base: RunSettings, architecture: Architecture | None = None) -> dict[str, Any]:
    """RunSettings' fields of the data; what is not given stays as in `base`. Raises InputError for what is not there, and for what a model
    that is described by its own code, or looks at images, does not take."""
    found: dict[str, Any] = {
        name: getattr(base, name) for name in ("data", "blend", "valid", "split", "tokenizer", "eval_every", "eval_steps")
    }
    given = {name: merged[name].value for name in merged}
    for key in ("data", "data.train"):
        if key in given:
            path = given[key]
            found |= {"data": existing(key, path) if path is not None else None, "blend": ()}
    if "data.blend" in given:
        blend = (Source(weight=source.weight, path=existing("data.blend", source.path)) for source in given["data.blend"])
        found |= {"data": None, "blend": tuple(blend)}
    if "data.valid" in given:
        found |= {"valid": existing("data.valid", given["data.valid"]) if given["data.valid"] is not None else None, "split": ()}
    if "data.split" in given:
        found |= {"split": given["data.split"], "valid": None}
    for key in ("tokenizer", "data.tokenizer"):
        if key in given:
            found["tokenizer"] = existing_tokenizer(key, given[key]) if given[key] is not None else None
    found |= {name: given[f"train.{name}"] for name in ("eval_every", "eval_steps") if f"train.{name}" in given}
    supervised = "task" in given and given["task"] == "sft"
    other = None if architecture is None or (architecture.traced is None and architecture.vision is None) else architecture
    if other is not None and not supervised:
        _check_read(found, other)
    drawn = found["data"] is None and not found["blend"]
    holds_out = other is not None and not supervised and (drawn or other.why_drawn is not None)
    if found["eval_every"] and not holds_out and not found["valid"] and not (found["split"] and found["split"][1] > 0):
        choices = ["data.valid=PATH", "data.split=99,1,0"]
        raise InputError("train.eval_every", found["eval_every"], "has nothing to evaluate on", choices)
    return found


OF_TEXT: Final = {"blend": "data.blend", "valid": "data.valid", "split": "data.split", "tokenizer": "tokenizer"}


def _check_read(found: Mapping[str, Any], architecture: Architecture) -> None:
    """Raises InputError for data that a described model, or one that looks at images, does not take: its batches leave out by themselves
    what is evaluated on, unless they are text."""
    text, traced, why_drawn = found["data"] is not None or bool(found["blend"]), architecture.traced, architecture.why_drawn
    if why_drawn is not None and found["data"] is not None:
        raise InputError("data", shown(found["data"]), why_drawn)
    if why_drawn is None and text:
        if traced is not None and traced.code and traced.vocab_size == 1:
            why = f"{traced.code} was not seen to look input_ids up in an embedding (torch.nn.Embedding): which ids it takes can't be told"
            raise InputError("data", shown(found["data"] or found["blend"][0].path), why)
        return
    for name, key in OF_TEXT.items():
        if found[name] and (name != "tokenizer" or why_drawn is not None):
            model = traced.model_class if traced is not None else architecture.name
            why = (
                "is of text that data= names"
                if why_drawn is None
                else f"is of text, and {model} is trained on {'drawn images' if traced is None else 'none'}"
            )
            if why_drawn is not None and name in ("valid", "split"):
                why += "; without it train.eval_every= evaluates on what is drawn, or by entry= on the program's own eval_dataset"
            value = ",".join(f"{share:g}" for share in found[name]) if name == "split" else str(found[name])
            raise InputError(key, shown(value), why)


def blend_of(key: str, value: Any) -> tuple[Source, ...]:
    """ "0.7 a.txt 0.3 b.jsonl", or in YAML a list of such pairs: [[0.7, a.txt], [0.3, b.jsonl]]. Raises InputError."""
    pairs: list[Any] = []
    if isinstance(value, str):
        try:
            words = shlex.split(value)
        except ValueError as error:
            raise InputError(key, shown(value), f"can't be read: {error}") from None
        pairs = [words[at : at + 2] for at in range(0, len(words), 2)]
    elif isinstance(value, list):
        pairs = [item.split(None, 1) if isinstance(item, str) else item for item in value]
    whole = bool(pairs) and all(isinstance(pair, list) and len(pair) == 2 and all(isinstance(word, str) for word in pair) for pair in pairs)
    if not whole:
        raise InputError(key, shown(value), "needs a weight before each source, as in 0.7 a.txt 0.3 b.jsonl")
    return tuple(Source(weight=_weight(key, value, weight), path=path) for weight, path in pairs)


def split_of(key: str, value: Any) -> tuple[float, ...]:
    """ "99,1,0": shares for training, evaluation and a test. Raises InputError."""
    parts = value.strip("[] ").split(",") if isinstance(value, str) else value
    if not isinstance(parts, list) or len(parts) not in (2, 3) or not all(isinstance(part, str) for part in parts):
        raise InputError(key, shown(value), "needs two or three shares, as in 99,1,0")
    return tuple(_weight(key, value, part, zero=index > 0) for index, part in enumerate(parts))


def _weight(key: str, value: Any, text: str, *, zero: bool = False) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number < 0 or (number == 0 and not zero):
        raise InputError(key, shown(value), f"{shown(text)} is no {'share' if zero else 'number above 0'}")
    return number


def existing_folder(key: str, folder: str) -> str:
    """The absolute path of a folder that exists. Raises InputError where there is none."""
    if not Path(folder).is_dir():
        raise InputError(key, shown(folder), "is a file; a folder is needed" if Path(folder).exists() else "no such folder")
    return str(Path(folder).resolve())


NO_DATA: Final = "no such file, nor DATA.bin and DATA.idx"


def is_elsewhere(path: str) -> bool:
    """Whether the path may be one of the machines that are planned for: it is absolute, and nothing is there on this one."""
    return os.path.isabs(path) and not any(os.path.lexists(f"{path}{suffix}") for suffix in ("", ".bin", ".idx"))


def elsewhere(run: RunSettings) -> list[tuple[str, str]]:
    """The files and folders of a run that are not on this machine, each after its key."""
    blend = [("data.blend", source.path) for source in run.blend]
    named = [("data", run.data), *blend, ("data.valid", run.valid), ("tokenizer", run.tokenizer), ("model.init_from", run.init_from)]
    return [(key, path) for key, path in named if path and is_elsewhere(path)]


def check_here(merged: Mapping[str, Any]) -> None:
    """Raises InputError for data, a tokenizer or weights that are given and not on this machine, as what starts ranks needs them."""
    for key in ("data", "data.train", "data.blend", "data.valid", "tokenizer", "data.tokenizer", "model.init_from"):
        value = merged[key].value if key in merged else None
        for path in [source.path for source in value] if key == "data.blend" and value else [value]:
            if path and is_elsewhere(path):
                raise InputError(key, shown(path), NO_DATA if "data" in key and "tokenizer" not in key else "no such folder")


TOKENIZERS: Final = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt", "tokenizer.model", "*.model", "*.tiktoken")
"""Files of which a folder with a tokenizer has one."""


def has_tokenizer(folder: str) -> bool:
    """Whether a tokenizer lies in the folder."""
    return any(next(Path(folder).glob(pattern), None) for pattern in TOKENIZERS)


def existing_tokenizer(key: str, folder: str) -> str:
    """The absolute path of a folder with a tokenizer, or of one that is on other machines. Raises InputError where there is none."""
    if is_elsewhere(folder):
        return folder
    path = existing_folder(key, folder)
    if not has_tokenizer(path):
        raise InputError(key, shown(folder), f"holds no tokenizer: none of {', '.join(TOKENIZERS)}")
    return path


def check_can_be_made(key: str, text: str, folder: Path) -> None:
    """Raises InputError where this folder is not there and can't be made, or where it can't be written."""
    parent = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not parent.is_dir():
        raise InputError(key, shown(text), f"can't be made: {parent} is a file")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(key, shown(text), f"can't be made: {parent} can't be written")


def new_folder(key: str, text: str, beside: str = "") -> Path:
    """The absolute path of a folder that is new or, but for a file called `beside`, empty, below one that can be written. Raises
    InputError; makes nothing."""
    try:
        folder = Path(text).resolve()
        if folder.is_symlink():  # Python 3.13 leaves a link to itself as it is; before, resolve() says so
            raise InputError(key, shown(text), "can't be made: is a link that leads to itself")
        if folder.exists() and not folder.is_dir():
            raise InputError(key, shown(text), "is a file; a folder that is new or empty is needed")
        if folder.is_dir() and any(path.name != beside for path in folder.iterdir()):
            raise InputError(key, shown(text), "is a folder with files in it; name a new one")
        check_can_be_made(key, text, folder)
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(key, shown(text), f"can't be made: {getattr(error, 'strerror', None) or error}") from None
    return folder


def existing(key: str, data: str) -> str:
    """A readable file, absolute, or one that is on other machines; of a Megatron pair its PREFIX.idx. Raises InputError."""
    check_path(key, data)
    if is_elsewhere(data):
        return data if Path(data).suffix else f"{data}.idx"
    path = Path(data)
    pair = [Path(f"{data}{suffix}") for suffix in (".bin", ".idx")]
    indexed = pair[0].is_file()
    if any(part.is_file() for part in pair) and not all(part.is_file() for part in pair):
        missing = next(part for part in pair if not part.is_file())
        raise InputError(key, shown(data), f"is a Megatron prefix, but {missing.name} is missing")
    if not path.exists() and not indexed:
        raise InputError(key, shown(data), f"{NO_DATA} in {Path.cwd()}, where relative paths are looked for")
    if path.is_dir() and not indexed:
        raise InputError(key, shown(data), "is a folder; give a text or jsonl file, or the prefix of .bin and .idx")
    if not path.is_file() and not indexed:
        raise InputError(key, shown(data), "is no regular file")
    try:
        with (pair[0] if indexed else path).open("rb") as file:
            if not file.read(1):
                raise InputError(key, shown(data), "is empty")
    except OSError as error:
        raise InputError(key, shown(data), f"can't be read: {error.strerror}") from None
    return str((pair[1] if indexed else path).resolve())


# --------------------------------------------------------------------------------------------------------------- files

ABSENT: Final = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
MAX_FILE_BYTES: Final = 1_000_000
"""Bytes that a recipe's file may have: it is a page of text, and anything larger is the wrong file."""


def check_path(name: str, value: Any) -> None:
    """Raises InputError for a path that can't even be looked for: too long, with a zero byte, in a folder that is closed to this user.
    That nothing is there is said by who needs it."""
    if not isinstance(value, str):
        return
    try:
        Path(value).stat()
    except (OSError, ValueError) as error:
        if getattr(error, "errno", None) not in ABSENT:
            raise InputError(name, shown(value), f"can't be read: {getattr(error, 'strerror', None) or error}") from None


def read_text(path: Path, limit: int | None = MAX_FILE_BYTES) -> str:
    """The file's text. Raises InputError for one that is larger than `limit` bytes, unreadable, or no text."""
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise InputError(str(path), None, "can't be read: is no regular file")
        if limit is not None and path.exists() and path.stat().st_size > limit:
            raise InputError(str(path), None, f"is larger than {limit} bytes")
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        raise InputError(str(path), None, "is not a text file (UTF-8)") from None
    except (OSError, ValueError) as error:
        raise InputError(shown(str(path)), None, f"can't be read: {getattr(error, 'strerror', None) or error}") from None


def read_object(path: Path, key: str, value: object, whose: str = "") -> dict[str, Any]:
    """The JSON object in the file. Raises InputError of `key` and `value`, and with `whose` file it is, where there is none."""
    try:
        found = json.loads(read_text(path))
    except InputError as error:
        raise InputError(key, shown(str(value)), whose + error.why) from None
    except (ValueError, RecursionError) as error:
        raise InputError(key, shown(str(value)), f"{whose}is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise InputError(key, shown(str(value)), f"{whose}is not a JSON object")
    return found
