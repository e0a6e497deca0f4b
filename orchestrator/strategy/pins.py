"""What the user fixes and how much memory there is: the borders of the search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Optional, TypeVar

import msgspec

from orchestrator.strategy.choices import Choice
from orchestrator.strategy.spec import CHOICES
from orchestrator.values import Value

T = TypeVar("T")

LAYOUT: Final = Choice(name="layout", pin="layout", doc="Megatron's layout string (Et*2|t*3L)", searched=True, pin_type=str)
"""Which layers a stage has: no field of a candidate, so it is declared here."""

_Choices: Any = msgspec.defstruct(
    "_Choices",
    [(choice.pin, Optional[choice.pin_type], None) for choice in (*CHOICES, LAYOUT)],  # noqa: UP045 (a type that is known at run time)
    bases=(Value,),
    frozen=True,
    kw_only=True,
)


class Pins(_Choices):  # type: ignore[misc]
    """A field for each declared choice (strategy/spec.py) by its pin's name; each that is not None fixes that choice."""

    def among(self, name: str, offered: Sequence[T]) -> Sequence[T]:
        """The values to try of the choice with this pin: the pinned one alone, or those offered.

        >>> Pins(tp=4).among("tp", (1, 2, 4, 8)), Pins().among("tp", (1, 2))
        ((4,), (1, 2))
        """
        pinned: T | None = getattr(self, name)
        return offered if pinned is None else (pinned,)

    def given(self) -> dict[str, Any]:
        """The pins that are set, by name.

        >>> Pins(zero_stage=1, layout="Et|tL").given()
        {'zero_stage': 1, 'layout': 'Et|tL'}
        """
        return {name: getattr(self, name) for name in self.__struct_fields__ if getattr(self, name) is not None}


class MemoryLimit(Value, frozen=True, kw_only=True):
    """Bytes a rank may use. `reserve` is kept free of `limit` for what no model foresees; None: the share that the engine's measured peaks
    ask for (`of`)."""

    limit: int
    reserve: int | None
    margin: float | None = None
    """The share that `reserve` is by an engine's measured peaks; None: the user's own figure."""

    parts: tuple[int, ...] = ()
    """`limit` of each type of a cluster of several; `limit` is then the largest of them."""
    risk: float | None = None
    """The chance of running out that a plan may have; `margin` is then what that keeps free. None: `margin` is the reserve alone."""

    def of(self, margin: float, risk: float | None = None) -> MemoryLimit:
        """The limit for an engine of which `margin` is kept free, for a chance of `risk`, where the user has not said how much.

        >>> MemoryLimit(limit=1000, reserve=None).of(0.07).usable, MemoryLimit(limit=1000, reserve=0).of(0.07).usable
        (930, 1000)
        """
        if self.reserve is not None:
            return self
        return MemoryLimit(limit=self.limit, reserve=round(self.limit * margin), margin=margin, parts=self.parts, risk=risk)

    @property
    def usable(self) -> int:
        assert self.reserve is not None, "an engine decides what is kept free (of)"
        return self.limit - self.reserve

    def usable_of(self, part: int) -> int:
        """Bytes that a plan may use on a GPU of the type `part` (`Cluster.part_of`); `usable` where the cluster has one type. Raises
        AssertionError before an engine has decided the reserve (`of`).

        >>> MemoryLimit(limit=80, reserve=None, parts=(80, 40)).of(0.1).usable_of(1)
        36
        """
        assert self.reserve is not None, "an engine decides what is kept free (of)"
        if not self.parts:
            return self.usable
        whole = self.parts[part]
        return whole - (self.reserve if self.margin is None else round(whole * self.margin))
