"""How much of a GPU's memory a plan may use, and at which chance of running out: one value, of which every command asks.

A plan is held to the first of the policy's limits: that with which the chance of running out is `USUAL_RISK` at most, or what memory.risk=
says, by how far off the peaks of published runs were. Where no plan keeps it, the next one counts: what 95% of the engine's own measured
peaks stayed below. Whoever compares two plans holds both to one limit, or says the chance of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from orchestrator.cost.calibration import Calibration
from orchestrator.cost.uncertainty import Situation, chance_of_not_fitting, kept_free
from orchestrator.errors import InputError, NoPlanError
from orchestrator.strategy.pins import MemoryLimit
from orchestrator.values import Value

T = TypeVar("T")

USUAL_RISK: Final = 0.05
"""The chance of running out of memory that a plan has at most where the user says nothing of memory, and there is such a plan."""
LIKELY: Final = 0.5
"""The chance from which a plan is said not to fit: it runs out more likely than not."""


class MemoryPolicy(Value, frozen=True, kw_only=True):
    """`kept`: the share of a GPU's memory that plans leave free, with the chance of running out that it is for (None: by the engine's own
    measured peaks), the largest first: the next counts where no plan keeps the one before."""

    kept: tuple[tuple[float, float | None], ...]

    def limits(self, asked: MemoryLimit) -> tuple[MemoryLimit, ...]:
        """What plans may use in bytes, of the memory that `asked` has, the strictest first."""
        return tuple(asked.of(share, risk) for share, risk in self.kept)

    def alone(self, level: int) -> MemoryPolicy:
        """The policy with one of its limits: 0, the first, or -1, the last."""
        return MemoryPolicy(kept=(self.kept[level],))


def reserve_alone(calibration: Calibration) -> MemoryPolicy:
    """What the engine's own measured peaks ask for, and no more."""
    return MemoryPolicy(kept=((calibration.memory_margin, None),))


def policy(asked: MemoryLimit, now: Situation, calibration: Calibration) -> MemoryPolicy:
    """The policy for a user who asks for this; `now` says by which runs the error of these prices is known.

    The reserve alone counts where the user says how much is kept free; on the CPU, of which nothing is published; where the user's own runs
    measured it and nothing is predicted beyond them (as for `uncertainty.interval`); and where it keeps as much free. Raises InputError for
    a memory.risk that the measured peaks are too few to tell."""
    own = reserve_alone(calibration)
    if asked.risk is not None:
        try:
            return MemoryPolicy(kept=((kept_free(asked.risk, now), asked.risk),))
        except ValueError as error:
            raise InputError("memory.risk", f"{asked.risk:g}", str(error)) from None
    measured = calibration.own_peaks and (not now.beyond or calibration.fitted is None)
    if asked.reserve is not None or not now.generation or measured:
        return own
    usual = kept_free(USUAL_RISK, now)
    return MemoryPolicy(kept=((usual, USUAL_RISK), *own.kept)) if usual > calibration.memory_margin else own


def within(limits: Sequence[MemoryLimit], planned: Callable[[MemoryLimit], T]) -> T:
    """What is planned within the first of the limits that holds a plan. Raises the last one's NoPlanError."""
    *stricter, last = limits
    for limit in stricter:
        try:
            return planned(limit)
        except NoPlanError:
            continue
    return planned(last)


def chance(peaks: Sequence[float], rooms: Sequence[float], now: Situation) -> float:
    """The chance, 0 to 1, that one of these predicted peaks takes more than the GPU has that it is on, by runs like `now`'s."""
    return max(chance_of_not_fitting(peak, room, now) for peak, room in zip(peaks, rooms, strict=True))
