"""One table says a value of ours in another program's words and reads it back.

A table is a sequence of terms; its subject is the object whose attributes the terms name: a plan, a model, a part of one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Any, Final, Literal, NamedTuple

Kind = Literal["harmless", "result", "cost"]
"""What a setting does that no plan says: nothing that counts (logs, paths); it changes what is trained; it changes time or memory."""


class Nothing:
    """Stands for no value: of a term that says nothing, and of a switch that was read and leaves the choice to others."""


NOTHING: Final = Nothing()


def same(value: Any) -> Any:
    """The value itself."""
    return value


class Term(NamedTuple):
    """`theirs`: the other program's name. `ours`: the subject's attribute, dotted where it is one of another. `unless`: our value of which
    nothing is said. `default`: the other program's own where the setting does not stand; NOTHING: ours is kept. `to` and `back` turn our
    value into theirs and theirs into ours. `when`: of which subjects it is said at all."""

    theirs: str
    ours: str
    unless: Any = NOTHING
    default: Any = NOTHING
    to: Callable[[Any], Any] = same
    back: Callable[[Any], Any] = same
    when: Callable[[Any], bool] = lambda subject: True


Table = Sequence[Term]


def switch(theirs: str, ours: str, value: Any) -> Term:
    """A switch of theirs that stands where ours has this value.

    >>> table = [switch("swiglu", "activation", "swiglu"), switch("squared_relu", "activation", "relu2")]
    >>> read(table, {"squared_relu": True, "swiglu": False})
    {'activation': 'relu2'}
    """
    return Term(theirs, ours, to=lambda found: found == value, back=lambda said: value if said else NOTHING)


def flag(theirs: str, ours: str) -> Term:
    """A switch of theirs that stands where ours is true, and is left out where it is false."""
    return Term(theirs, ours, unless=False, default=False, back=bool)


def say(table: Table, subject: Any) -> dict[str, Any]:
    """Their settings by name, in the table's order.

    >>> from types import SimpleNamespace
    >>> say([Term("moe_router_topk", "topk"), Term("moe_scaling", "scaling", unless=1.0)], SimpleNamespace(topk=2, scaling=1.0))
    {'moe_router_topk': 2}
    """
    found = {}
    for term in table:
        if term.when(subject) and (value := attrgetter(term.ours)(subject)) != term.unless:
            found[term.theirs] = term.to(value)
    return found


def read(table: Table, given: Mapping[str, Any]) -> dict[str, Any]:
    """Our values by name, of settings by theirs. What the settings do not say and has no default of theirs is left out."""
    found = {}
    for term in table:
        said = given.get(term.theirs, term.default)
        if said is not NOTHING and said is not None and (value := term.back(said)) is not NOTHING:
            found[term.ours] = value
    return found


def differs(table: Table, before: Any, after: Any) -> dict[str, Any]:
    """Settings that change from one subject to another, as the second has them; NOTHING: they are left out."""
    one, other = say(table, before), say(table, after)
    names = dict.fromkeys([*one, *other])
    return {name: other.get(name, NOTHING) for name in names if one.get(name, NOTHING) != other.get(name, NOTHING)}


def decided(table: Table, name: str, subject: Any) -> Any:
    """What this setting of theirs is for the subject, whether it is said or left out; NOTHING: the table has no such setting."""
    for term in table:
        if term.theirs == name:
            return term.to(attrgetter(term.ours)(subject))
    return NOTHING


def names(*tables: Table) -> frozenset[str]:
    """All settings of these tables, by the other program's names."""
    return frozenset(term.theirs for table in tables for term in table)


def kind(name: str, harmless: Sequence[str], result: Sequence[str]) -> Kind:
    """What a setting does of which a plan says nothing: as the two lists of names and patterns have it, and a cost where neither has."""
    for found, patterns in (("harmless", harmless), ("result", result)):
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            return found  # type: ignore[return-value]
    return "cost"
