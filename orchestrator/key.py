"""A setting is declared once, in the annotation of the field that holds it; all that lists settings is derived from the declarations.

    steps: Annotated[int, Key("train.steps", "to train", unit="steps", low=1, high=10**12)] = 20

From that line come the parser of its text, its range, its default, its lines in --help and in the JSON Schema of a recipe, the names of
which a slip of the keyboard is corrected to, and the place where the value goes. The list itself is recipe/keys.py.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import types
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from functools import cache
from typing import Any, Final, Literal, Union

import msgspec

from orchestrator.errors import InputError
from orchestrator.units import GB, GBIT, GIB, KB, KIB, MB, MIB, MS, TB, TFLOPS, US
from orchestrator.values import defaults_of


class Key(msgspec.Struct, frozen=True):
    """What is said of a setting where it is declared; the last three fields are filled in from there (`declared`)."""

    name: str
    """The key's full name: train.lr."""
    help: str
    type: Any = None
    """What its text is read as, where that is not the field's own type."""
    default: str = ""
    """The default as --help shows it, where that is not the field's own."""
    unit: str = ""
    """The unit of a number: tokens, steps, s."""
    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    """The range: at least, at most, more than, less than."""
    read: Callable[[str, Any], Any] | None = None
    """Reads name and text (or YAML's list or mapping) to a value, where the type does not say how. Raises InputError."""
    offered: Any = None
    """A value that trains the same model and that only the user sets: a plan that would gain by it says so (search/unasked.py)."""
    asks: str = ""
    """What that asks for: needs another optimizer."""
    path: bool = False
    """Whether the value is, or may be, a path."""
    aliases: tuple[str, ...] = ()
    """Other names of the same key."""

    field: str = ""
    """The field of the struct `owner` that the value goes to."""
    owner: Any = None


def declared(*structs: type[msgspec.Struct]) -> tuple[Key, ...]:
    """The keys among the fields of structs, in order, each with its field's type and default.

    >>> steps = typing.Annotated[int, Key("train.steps", "to train", low=1)]
    >>> (key,) = declared(msgspec.defstruct("Run", [("steps", steps, 20)]))
    >>> key.name, key.type, key.default, key.field
    ('train.steps', <class 'int'>, '20', 'steps')
    """
    return tuple(key for struct in structs for key in _declared(struct))


@cache
def _declared(struct: type[msgspec.Struct]) -> tuple[Key, ...]:
    """The keys among the fields of one struct."""
    found = []
    hints = typing.get_type_hints(struct, include_extras=True)
    for name, default in defaults_of(struct).items():
        if typing.get_origin(hints[name]) is not typing.Annotated:
            continue
        kind, *notes = typing.get_args(hints[name])
        for note in notes:
            if isinstance(note, Key):
                filled = {"type": kind if note.type is None else note.type, "default": note.default or default_shown(default)}
                found.append(msgspec.structs.replace(note, **filled, field=name, owner=struct))
    return tuple(found)


def default_shown(default: Any) -> str:
    """A field's default as a user types it; "" for none.

    >>> default_shown((0.9, 0.95)), default_shown(False), default_shown(None), default_shown(())
    ('0.9,0.95', 'false', '', '')
    """
    if default is None or default is msgspec.NODEFAULT:
        return ""
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    return str(default).lower() if isinstance(default, bool) else str(default)


def options_of(kind: Any) -> tuple[Any, ...]:
    """The members of an optional or union type; (kind,) otherwise."""
    return typing.get_args(kind) if isinstance(kind, types.UnionType) or typing.get_origin(kind) is Union else (kind,)


# ------------------------------------------------------------------------------------------------------------- parsing

_INTEGER = re.compile(r"[+-]?[0-9]+(_[0-9]{3})*\Z")
_FLOAT = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\Z")
_LETTERED = re.compile(r"[0-9._]+ ?[A-Za-z]+\Z")
_LENGTH = re.compile(r"([0-9]{1,9}) ?([kKM])\Z")
LENGTH: Final = {"K": 2**10, "M": 2**20}
"""Tokens of a sequence's length, as models are called by it: 128k are 131,072."""
_NULL = ("null", "~")
MAX_DIGITS: Final = 18
"""An integer of more digits is a slip of the keyboard: nothing here counts beyond 10^18."""


def parse(key: Key, text: Any) -> Any:
    """The value that `text` stands for. Raises InputError that names key, value and choices.

    >>> parse(Key("gpus", "", type=int), "16"), parse(Key("train.lr", "", type=float), "3e-4")
    (16, 0.0003)
    >>> parse(Key("train.seq_length", "", type=int, unit="tokens"), "128k")
    131072
    >>> parse(Key("train.betas", "", type=tuple[float, float]), "[0.9, 0.95]")
    (0.9, 0.95)
    """
    options = options_of(key.type)
    if text is None or (type(None) in options and key.read is None and isinstance(text, str) and text.lower() in _NULL):
        if type(None) in options:
            return None
        raise InputError(key.name, "null", "needs a value")
    if key.read is not None:
        value = key.read(key.name, text)
    elif is_structured(key.type):
        return _parse_structure(key, text)
    else:
        kind = next(option for option in options if option is not type(None))
        length = _LENGTH.match(text) if key.unit == "tokens" and isinstance(text, str) else None
        try:
            value = int(length[1]) * LENGTH[length[2].upper()] if length else parse_as(key.name, kind, text)
        except InputError as error:
            if not key.unit or kind not in (int, float) or not isinstance(text, str) or not _LETTERED.match(text):
                raise
            why = f"{error.why}: {key.unit} are counted, without letters behind the digits"
            with suppress(InputError):
                amount = count(key.name, text.upper())
                why += f"; {text} tokens are {amount} / train.seq_length of them" if key.unit == "sequences" else f", as in {amount}"
            raise InputError(key.name, shown(text), why) from None
    check_range(key, text, value if isinstance(value, tuple) else (value,))
    return value


def is_structured(kind: Any) -> bool:
    """Whether values of this type are groups of keys, or lists of them: parts of layers."""
    members = [inner for option in options_of(kind) for inner in (typing.get_args(option) or (option,))]
    return any(isinstance(member, type) and issubclass(member, msgspec.Struct) for member in members)


def _parse_structure(key: Key, tree: Any) -> Any:
    """What YAML's tree of strings, or JSON on a command line, stands for."""
    if isinstance(tree, str):
        try:
            tree = json.loads(tree)
        except ValueError:
            raise InputError(key.name, shown(tree), "is not JSON; write it in a recipe, as YAML, or here as JSON") from None
    try:
        return msgspec.convert(tree, key.type, strict=False)
    except msgspec.ValidationError as error:
        raise InputError(key.name, shown(tree), str(error)) from None


NO_TEXT: Final = "has half of a surrogate pair, or bytes that are not UTF-8: no file can hold it as text"


def is_text(value: str) -> bool:
    """Whether UTF-8 can say it.

    >>> is_text("Grüße"), is_text("\\ud800")
    (True, False)
    """
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def one_text(name: str, text: Any) -> str:
    """The text itself. Raises InputError for a list, a group of keys, or nothing."""
    if not isinstance(text, str):
        raise InputError(name, shown(text), "needs one value, not a list or a group of keys")
    if not text.strip():
        raise InputError(name, repr(text), "is empty")
    if not is_text(text):
        raise InputError(name, shown(text), NO_TEXT)
    return text


COUNT: Final = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_COUNT = re.compile(r"([0-9.]+(?:[eE][+]?[0-9]+)?) ?([kKMBT]?)\Z")


def share(name: str, text: Any) -> float:
    """A share between 0 and 1, as a number or in percent. Raises InputError.

    >>> share("memory.risk", "1%"), share("memory.risk", "0.05")
    (0.01, 0.05)
    """
    said = one_text(name, text)
    try:
        value = float(said.removesuffix("%")) / (100 if said.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 < value < 1:
        raise InputError(name, shown(text), "is no share between 0 and 1, such as 1% or 0.01")
    return value


def count(name: str, text: Any) -> int:
    """A whole number, in short as the field writes it. Raises InputError.

    >>> count("train.tokens", "1.5T"), count("train.tokens", "300B"), count("train.tokens", "1_000")
    (1500000000000, 300000000000, 1000)
    """
    match = _COUNT.match(one_text(name, text).replace("_", ""))
    try:
        value = Decimal(match.group(1)) * COUNT[match.group(2)] if match else None
    except InvalidOperation:
        value = None
    if value is None or value != int(value):
        raise InputError(name, shown(text), "is not a whole number, such as 1T, 300B or 5_000_000")
    return int(value)


def amount(name: str, text: Any) -> float:
    """A number, in short as the field writes it. Raises InputError.

    >>> amount("target.cost", "2.5M"), amount("target.cost", "800k"), amount("target.cost", "1e6")
    (2500000.0, 800000.0, 1000000.0)
    """
    said = one_text(name, text)
    factor = COUNT.get(said[-1:], 1)
    return float(factor * parse_as(name, float, said[:-1] if said[-1:] in COUNT else said))


def words(name: str, text: Any) -> tuple[str, ...]:
    """Words as a shell splits them. Raises InputError for an open quote.

    >>> words("slurm.extra", "--comment 'a b'")
    ('--comment', 'a b')
    """
    if text == "":
        return ()
    try:
        return tuple(shlex.split(one_text(name, text)))
    except ValueError as error:
        raise InputError(name, shown(text), f"can't be split into words: {error}") from None


def parse_as(name: str, kind: Any, text: Any) -> Any:
    """The value of this type that `text` stands for. Raises InputError."""
    origin = typing.get_origin(kind)
    if origin is tuple:
        return _parse_tuple(name, typing.get_args(kind), text)
    text = one_text(name, text)
    if origin is Literal:
        choices = typing.get_args(kind)
        for choice in choices:
            if text == str(choice):
                return choice
        raise InputError(name, shown(text), "is not known", choices)
    if kind is bool:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise InputError(name, shown(text), "is neither", ["true", "false"])
    if kind is int:
        if not _INTEGER.match(text) or len(text) > MAX_DIGITS:
            raise InputError(name, shown(text), "is not a whole number" if len(text) <= MAX_DIGITS else "is too long for a number")
        return int(text.replace("_", ""))
    if kind is float:
        value = float(text) if _FLOAT.match(text) else math.nan
        if not math.isfinite(value):
            raise InputError(name, shown(text), "is not a finite number")
        return value
    return text


def _parse_tuple(name: str, kinds: tuple[Any, ...], text: Any) -> tuple[Any, ...]:
    """A tuple of values read from "0.9,0.95", "[0.9, 0.95]" or a YAML list. Raises InputError."""
    parts = [part.strip() for part in text.strip().removeprefix("[").removesuffix("]").split(",")] if isinstance(text, str) else text
    if not isinstance(parts, list) or len(parts) != len(kinds):
        raise InputError(name, shown(text), f"needs {len(kinds)} numbers with a comma between them")
    return tuple(parse_as(name, kind, part) for kind, part in zip(kinds, parts, strict=True))


def check_range(key: Key, text: Any, values: tuple[Any, ...]) -> None:
    """Raises InputError where one of the values is outside the key's range; `text` is what the message shows."""
    if key.low is key.high is key.above is key.below is None:
        return
    for value in values:
        if key.low is not None and value < key.low:
            raise InputError(key.name, shown(text), f"must be at least {key.low:g}")
        if key.above is not None and value <= key.above:
            raise InputError(key.name, shown(text), f"must be above {key.above:g}")
        if key.high is not None and value > key.high:
            raise InputError(key.name, shown(text), f"must be at most {key.high:.10g}")
        if key.below is not None and value >= key.below:
            raise InputError(key.name, shown(text), f"must be below {key.below:g}")


LONGEST_SHOWN: Final = 200


def shown(value: Any) -> str:
    """A value in a message: one short line."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= LONGEST_SHOWN else text[: LONGEST_SHOWN - 3] + "..."


def put_once(given: dict[str, Any], name: str, value: Any) -> None:
    """Puts a key among those that were given. Raises InputError for one that was given before."""
    if name in given:
        raise InputError(name, shown(value), f"is given twice, first as {name}={shown(given[name])}")
    given[name] = value


def names(name: str, text: Any) -> tuple[str, ...]:
    """Names with a comma between them, or YAML's list of them. Raises InputError.

    >>> names("train.change", "lr, steps"), names("train.change", "")
    (('lr', 'steps'), ())
    """
    parts = text if isinstance(text, list) else [] if text in ("", None) else one_text(name, text).split(",")
    return tuple(one_text(name, part).strip() for part in parts)


BYTES: Final = {"B": 1, "KB": KB, "MB": MB, "GB": GB, "TB": TB, "KiB": KIB, "MiB": MIB, "GiB": GIB}
RATES: Final = {"B/s": 1, "KB/s": KB, "MB/s": MB, "GB/s": GB, "TB/s": TB, "Mbit/s": GBIT / 1000, "Gbit/s": GBIT, "Tbit/s": GBIT * 1000}
SECONDS: Final = {"s": 1.0, "ms": MS, "us": US, "ns": 1e-9}
LIMITS: Final = {"B": (1.0, 1e18), "B/s": (1.0, 1e18), "s": (1e-12, 1e6), "FLOP/s": (1.0, 1e21)}
"""Least and most of a quantity, by its base unit: no part of a computer lies beyond."""
FLOPS: Final = {"FLOP/s": 1, "GFLOP/s": TFLOPS / 1000, "TFLOP/s": TFLOPS, "PFLOP/s": TFLOPS * 1000}


def quantity(key: str, text: Any, units: Mapping[str, float], *, zero: bool = False, most: float | None = None) -> float:
    """A number with one of these units, in the base unit; `most`: where there is a lower limit than its unit's. Raises InputError.

    >>> quantity("bandwidth", "400 Gbit/s", RATES), quantity("memory", "80GiB", BYTES)
    (50000000000.0, 85899345920.0)
    """
    example = f"a number and a unit, such as 4 {list(units)[-1]}"
    if not isinstance(text, str):
        raise InputError(key, None if text is None else shown(text), f"needs {example}")
    number = text.rstrip("/abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ").strip()
    unit = text.strip()[len(number) :].strip()
    if unit not in units:
        raise InputError(key, shown(text), f"needs {example}", units)
    parse(Key(name=key, type=float, help=""), number)
    value = float(Decimal(number) * Decimal(str(units[unit])))  # 1.9 us is 1.9e-06, not 1.8999999999999998e-06
    if value < 0 or (value == 0 and not zero):
        raise InputError(key, shown(text), "must be above 0")
    base = next(name for name, factor in units.items() if factor == 1)
    least, greatest = LIMITS[base]
    greatest = greatest if most is None else most
    if value and not least <= value <= greatest:
        raise InputError(key, shown(text), f"must be from {least:g} to {greatest:g} {base}")
    return value
