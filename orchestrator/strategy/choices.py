"""A choice is declared once, in the annotation of the field that holds it; all that lists choices is derived from the declarations.

    tp_comm_overlap: Annotated[bool, Choice(doc="tensor-parallel traffic beside the products")] = False

From that line come the pin and the `explain` key with their help, the plan's field and its JSON schema, the column of candidates.csv, the
words in a plan's one-line name, and a part of the key by which prices of layers are kept. The lists themselves stand in strategy/spec.py.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any

import msgspec
from msgspec.structs import replace

from orchestrator.values import Value, defaults_of


class Offered(Value, frozen=True, kw_only=True):
    """Values of a choice that compute the same and that only a pin gives: a plan that would gain by one says so (search/unasked.py)."""

    values: tuple[Any, ...]
    asks: str
    """What they ask for, or why the search leaves them out: needs DeepEP installed on every node."""
    saves_memory: bool = False
    """Whether a plan may fit with one that does not fit without."""
    own_program: bool = False
    """Whether it is taken unasked where a plan with it is ahead by more than any other is and the engine's own program, which has it, is
    what trains it (`Planner`)."""
    frees: bool = False
    """Whether all that one does is to make room: only what does not fit without is then looked at with it."""
    last_resort: bool = False
    """Whether the search takes one of its own accord where nothing fits without. Otherwise the refusal names it (search/refuse.py)."""


class Choice(Value, frozen=True, kw_only=True):
    """What is said of a choice where it is declared; the last four fields are filled in from there (`declared`)."""

    doc: str
    """What it is, for --help and the JSON schema."""
    unit: str = ""
    """The unit of a number: ranks, samples."""
    searched: bool = False
    """Whether the decision tree tries its values; otherwise it is the default unless a pin says more."""
    in_layer_price: bool = True
    """Whether what a layer computes, keeps or sends within a micro-batch may depend on it. False: only what happens beside the layers or
    once a step does, or the price asks for it anew each time. True is always right, and only costs time where False would do."""
    fixed_with: str = ""
    """Name of another choice whose level of the tree decides this one too."""
    always_said: bool = False
    """Whether a plan's one-line name says it at its default too."""
    short: str = ""
    """The choice's name in a plan's one-line name, where that is shorter: mbs."""
    words: tuple[tuple[Any, str], ...] = ()
    """What a plan's one-line name says of a value, where it isn't short=value."""
    pin: str = ""
    """The name of its pin where that is another."""
    pin_type: Any = None
    """The pin's type where that is another: an order of axes is given in one word."""
    read: Callable[[str, Any], Any] | None = None
    """Reads its pin's name and text to a value, where the type does not say how. Raises InputError."""
    offered: Offered | None = None
    """Values that only a pin gives."""
    instead_of: str = ""
    """The choice that is left at its default where this one is not, as the engine takes one of both."""
    seen: int | None = None
    """How many of the `PUBLISHED` runs have another value than the default, where few do: so many check its prices.
    None: many, or the search tries no other."""
    usual: tuple[Any, ...] = ()
    """Other values that `seen` does not count, as many runs have them."""
    after: str = ""
    """The choice behind which it is listed, where that is declared in another struct."""

    name: str = ""
    path: str = ""
    """Where a candidate holds the value: strategy.mesh.tp."""
    type: Any = None
    default: Any = None

    def of(self, candidate: object) -> Any:
        """The candidate's value of this choice."""
        return attrgetter(self.path)(candidate)

    @property
    def values_tried(self) -> tuple[Any, ...]:
        """The default, then the values that are offered."""
        return self.default, *(() if self.offered is None else self.offered.values)

    def set_on(self, options: Any, value: Any) -> Any:
        """A strategy or plan with this value, and what it takes the place of at its default."""
        others = {self.instead_of: False} if self.instead_of and value != self.default else {}
        return replace(options, **{self.name: value, **others})

    def says(self, value: Any) -> str:
        """The part of a plan's one-line name for this value; "" where nothing need be said.

        >>> Choice(doc="", name="tp", short="tp", default=1).says(4), Choice(doc="", name="tp", short="tp", default=1).says(1)
        ('tp=4', '')
        """
        if value == self.default and not self.always_said:
            return ""
        for known, word in self.words:
            if value == known:
                return word
        return self.short if value is True else f"{self.short}={shown(value)}"


@lru_cache(maxsize=10_000, typed=True)
def shown(value: object) -> str:
    """A choice's value as a user types it and tables show it.

    >>> shown(True), shown(("tp", "dp")), shown(None), shown(4)
    ('true', 'tp-dp', '', '4')
    """
    if value is None:
        return ""
    if isinstance(value, tuple):
        return "-".join(value)
    return str(value).lower() if value is True or value is False else str(value)


def declared(*structs: tuple[str, type[msgspec.Struct]]) -> tuple[Choice, ...]:
    """The choices among the fields of structs, each given with the path at which a candidate holds it ("strategy.mesh." or "").

    In declared order, except that one with `after` follows the choice of that name.
    """
    found: list[Choice] = []
    for path, struct in structs:
        hints = typing.get_type_hints(struct, include_extras=True)
        for field, given in defaults_of(struct).items():
            kind, *notes = typing.get_args(hints[field]) if typing.get_origin(hints[field]) is typing.Annotated else (None,)
            for note in notes:
                if isinstance(note, Choice):
                    name, default = note.name or field, None if given is msgspec.NODEFAULT else given
                    found.append(
                        msgspec.structs.replace(
                            note, name=name, path=path + field, type=kind, default=default, short=note.short or name,
                            pin=note.pin or name, pin_type=note.pin_type or kind,
                        )
                    )  # fmt: skip
    ordered = [choice for choice in found if not choice.after]
    for choice in found:
        if choice.after:
            ordered.insert(1 + [other.name for other in ordered].index(choice.after), choice)
    return tuple(ordered)


def getter(paths: Iterable[str]) -> Callable[[Any], tuple[Any, ...]]:
    """The values at two or more paths, as one tuple that can be a key."""
    get: Callable[[Any], tuple[Any, ...]] = attrgetter(*paths)
    return get


def line(choices: Sequence[Choice], values: Iterable[Any]) -> list[str]:
    """What there is to say of each choice with its value."""
    said = (choice.says(value) for choice, value in zip(choices, values, strict=True) if choice.always_said or value != choice.default)
    return [word for word in said if word]
