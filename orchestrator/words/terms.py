"""One table says a value of ours in another program's words and reads it back.

A table is a sequence of terms; its subject is the object whose attributes the terms name: a plan, a model, a part of one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from operator import attrgetter
from typing import Any, Final, Literal, NamedTuple

from orchestrator.errors import InputError

Kind = Literal["harmless", "result", "time", "buffers", "cost"]
"""What a setting does that no plan says: nothing that counts (logs, paths); it changes what is trained; it changes time, and memory not; it
may add memory, and frees at most what communication and the update have beside the states; it changes time or memory."""


class Nothing:
    """Stands for no value: of a term that says nothing, and of a switch that was read and leaves the choice to others."""


NOTHING: Final = Nothing()


def same(value: Any) -> Any:
    """Returns the value itself."""
    return value


def always(subject: Any) -> bool:
    """True: said of every subject."""
    return True


SHORT_TYPES: Final = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "uint8": "fp8"}
"""torch's names of data types, and those of plans and of Megatron-LM's flags; 8 bits are kept as bytes (optimizer_config.py)."""
LONG_TYPES: Final = {short: name for name, short in SHORT_TYPES.items()}


def short_type(name: Any) -> str:
    """A data type as plans call it.

    >>> short_type("torch.bfloat16"), short_type("bf16")
    ('bf16', 'bf16')
    """
    return SHORT_TYPES.get(plain := str(name).removeprefix("torch."), plain)


class Term(NamedTuple):
    """`theirs`: the other program's name. `ours`: the subject's attribute, dotted where it is one of another. `unless`: their value of
    which nothing is said. `default`: the other program's own where the setting does not stand; NOTHING: ours is kept. `to` and `back` turn
    our value into theirs and theirs into ours; `of` makes theirs of the whole subject, in place of `to`. `when`: of which subjects it is
    said at all. `least`: of a number that is read."""

    theirs: str
    ours: str
    unless: Any = NOTHING
    default: Any = NOTHING
    to: Callable[[Any], Any] = same
    back: Callable[[Any], Any] = same
    when: Callable[[Any], object] = always
    of: Callable[[Any], Any] | None = None
    least: float | None = None

    def value(self, subject: Any) -> Any:
        """The other program's value for the subject, whether it is said or left out."""
        return self.to(attrgetter(self.ours)(subject)) if self.of is None else self.of(subject)


Table = Sequence[Term]
MOST: Final = 1e18
"""The largest number that a setting may have: none counts so many of anything."""


def switch(theirs: str, ours: str, *values: Any) -> Term:
    """A switch of theirs that stands where ours has one of these values, and is read as the first.

    >>> table = [switch("swiglu", "activation", "swiglu"), switch("squared_relu", "activation", "relu2")]
    >>> read(table, {"squared_relu": True, "swiglu": False})
    {'activation': 'relu2'}
    """
    return Term(theirs, ours, unless=False, to=lambda found: found in values, back=lambda said: values[0] if said else NOTHING)


def named(names: str, above: str = "", **alike: Any) -> Table:
    """Terms of settings, below the section `above`, whose values are ours as they are: words "theirs=ours", or one where both are the same.
    `alike`: what else these terms have, all alike.

    >>> [(term.theirs, term.ours) for term in named("n_layer=num_layers hidden_size", "model.")]
    [('model.n_layer', 'num_layers'), ('model.hidden_size', 'hidden_size')]
    """
    pairs = (name.split("=") for name in names.split())
    return [Term(above + theirs, ours[0] if ours else theirs, **alike) for theirs, *ours in pairs]


def flags(names: str) -> Table:
    """Switches of theirs, named as in `named`, that stand where ours is true, and are left out where it is false."""
    return named(names, unless=False, default=False, back=bool)


def unsaid(names: str, ours: str, value: Any) -> Table:
    """Settings of theirs that would take the place of one of ours: nothing says or reads them, and without them theirs is this value."""
    return [Term(name, ours, of=lambda subject: value, back=lambda said: NOTHING, when=lambda subject: False) for name in names.split()]


def fixed(theirs: str, value: Any) -> Term:
    """A setting that has this value whatever the subject."""
    return Term(theirs, "", of=lambda subject: value)


def only(condition: Callable[[Any], object], table: Table) -> Table:
    """The terms, said of subjects of which the condition is true."""
    return [term._replace(when=condition) for term in table]


def inside(part: Callable[[Any], Any], table: Table) -> Table:
    """The terms of a part of the subject, said of the subject: nothing where it has no such part (None)."""

    def moved(term: Term) -> Term:
        return term._replace(
            of=lambda subject: term.value(part(subject)), when=lambda subject: (found := part(subject)) is not None and term.when(found)
        )

    return [moved(term) for term in table]


def say(table: Table, subject: Any) -> dict[str, Any]:
    """The other program's settings for the subject, by name, in the table's order.

    >>> from types import SimpleNamespace
    >>> say([Term("moe_router_topk", "topk"), Term("moe_scaling", "scaling", unless=1.0)], SimpleNamespace(topk=2, scaling=1.0))
    {'moe_router_topk': 2}
    """
    said = ((term, term.value(subject)) for term in table if term.when(subject))
    return {term.theirs: value for term, value in said if value != term.unless}


def read(table: Table, given: Mapping[str, Any]) -> dict[str, Any]:
    """Our values by name, of settings by theirs. What the settings do not say and has no default of theirs is left out. Raises InputError
    for what is no number, too small, or larger than MOST."""
    found = {}
    for term in table:
        said = given.get(term.theirs, term.default)
        if said is NOTHING or said is None:
            continue
        try:
            value = term.back(said)
        except (TypeError, ValueError, OverflowError):
            raise InputError(term.theirs, said, "is no number") from None
        if isinstance(value, int | float) and not abs(value) <= MOST:
            raise InputError(term.theirs, said, f"is beyond {MOST:g}")
        if term.least is not None and value < term.least:
            raise InputError(term.theirs, said, f"must be at least {term.least}")
        if value is not NOTHING:
            found[term.ours] = value
    return found


def differs(table: Table, before: Any, after: Any) -> dict[str, Any]:
    """Settings that change from one subject to another, as the second has them; NOTHING: they are left out."""
    one, other = say(table, before), say(table, after)
    names = dict.fromkeys([*one, *other])
    return {name: other.get(name, NOTHING) for name in names if one.get(name, NOTHING) != other.get(name, NOTHING)}


def decided(table: Table, name: str, subject: Any) -> Any:
    """What this setting of theirs is for the subject, whether it is said or left out; NOTHING: the table has no such setting."""
    return next((term.value(subject) for term in table if term.theirs == name), NOTHING)


def put(content: dict[str, Any], path: str, value: Any) -> None:
    """Sets a value in nested groups, which are made where they are not there."""
    *above, last = path.split(".")
    for name in above:
        if not isinstance(content.get(name), dict):
            content[name] = {}
        content = content[name]
    content[last] = value


def section(content: Any, path: str) -> dict[str, Any]:
    """The group of settings at a path of nested ones; an empty one where it is none.

    >>> section({"a": {"b": {"c": 1}}}, "a.b"), section({"a": 3}, "a.b")
    ({'c': 1}, {})
    """
    for name in path.split("."):
        content = content.get(name) if isinstance(content, dict) else None
    return content if isinstance(content, dict) else {}


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by path as groups in groups.

    >>> nested({"bf16.enabled": True, "steps": 3})
    {'bf16': {'enabled': True}, 'steps': 3}
    """
    found: dict[str, Any] = {}
    for path, value in settings.items():
        put(found, path, value)
    return found


def names(*tables: Table) -> frozenset[str]:
    """All settings of these tables, by the other program's names."""
    return frozenset(term.theirs for table in tables for term in table)


@cache
def kinds(*of: str) -> dict[str, Kind]:
    """What settings of these programs do of which no plan says anything, by name or pattern: the lists of names.json."""
    listed: dict[str, dict[Kind, str]] = json.loads(files("orchestrator.words").joinpath("names.json").read_text(encoding="utf-8"))
    return {name: kind for program in of for kind, names in listed[program].items() for name in names.split()}


def kind_in(known: Mapping[str, Kind], name: str) -> Kind | None:
    """The kind of the first name or pattern of `known` that fits; None: none does."""
    return known.get(name) or next((kind for pattern, kind in known.items() if fnmatchcase(name, pattern)), None)


@cache
def kind(program: str, name: str) -> Kind:
    """What a setting of this program does of which a plan says nothing. What is in no list counts as one that changes time or memory.

    >>> kind("megatron_lm", "tensorboard_dir"), kind("megatron_lm", "init_method_std"), kind("megatron_lm", "hybrid_context_parallel")
    ('harmless', 'result', 'cost')
    """
    return kind_in(kinds(program), name) or "cost"
