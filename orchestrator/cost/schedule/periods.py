"""Jumps over the periods of a schedule. With constant stage times it is a max-plus linear system and turns periodic (Baccelli et al.,
"Synchronization and Linearity", 1992, theorem 3.112): from some turn on its state repeats up to a shift of the clock, and whole periods can
be jumped over."""

from __future__ import annotations

from collections.abc import Sequence
from operator import sub

RELATIVE_TOLERANCE = 1e-12
"""Two shifts are the same period when they differ by less than this share of the time so far (rounding of sums)."""
MANY = 2**62
"""A number of periods above that of any step."""


def shift(new: Sequence[float], old: Sequence[float]) -> float | None:
    """The constant by which all clocks of a state moved on; None: they moved differently.

    >>> shift([5.0, 7.0], [2.0, 4.0]), shift([5.0, 7.0], [2.0, 5.0])
    (3.0, None)
    """
    moved = new[0] - old[0]
    tolerance = RELATIVE_TOLERANCE * new[0]
    for a, b in zip(reversed(new), reversed(old), strict=True):  # the last clock mostly tells
        if abs(a - b - moved) > tolerance:
            return None
    return moved


def drift(blocks: Sequence[tuple[Sequence[float], Sequence[float]]]) -> tuple[int, list[float]]:
    """(periods that may be jumped over, by how much each clock moves in one) where the ranks move at different but constant speeds.
    `blocks`: at the end of each period so far the state, and the margins by which every pass of the period waited for its own rank rather
    than for a transfer.

    While every pass keeps waiting for the same thing, all times grow linearly: that lasts until the first margin changes its sign. Here
    the margin falls by 1 a period from 4 and gets to 0 in the fourth from now, so three may be jumped over:

    >>> drift([([0.0, 0.0], [6.0]), ([10.0, 11.0], [5.0]), ([20.0, 22.0], [4.0])])
    (3, [10.0, 11.0])
    """
    if len(blocks) < 3:
        return 0, []
    (s0, _), (s1, m1), (s2, m2) = blocks[-3:]
    steps = list(map(sub, s2, s1))
    tolerance = RELATIVE_TOLERANCE * s2[0]
    if any(abs(new - old) > tolerance for new, old in zip(steps, map(sub, s1, s0), strict=True)):
        return 0, []
    periods = MANY
    for before, now in zip(m1, m2, strict=True):
        if before * now < 0:
            return 0, []
        change = now - before
        if abs(change) > tolerance and change * now < 0:
            periods = min(periods, int(-now / change) - 1)
    return periods, steps
