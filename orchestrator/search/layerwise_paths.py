"""What of a 1F1B pipeline's stages delays its end: paths through the schedule, and the mean of paths whose bound is largest.

A step lasts as long as the longest path through its passes (cost/schedule.py). So for each path the seconds of its passes are a bound that
is a sum over stages: so many forward and backward passes of each, what of the reduction of the stage where it ends is not hidden, and one
stage's update. A mean of such bounds is a bound as well, and minimising it takes each stage for itself. Which mean is best, of the ways
that are known for each stage, is a linear program: its columns are those ways, its rows the paths (Dantzig and Wolfe, "Decomposition
principle for linear programs", Operations Research 1960).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

INFINITE = float("inf")
TINY = 1e-11
"""Relative to the largest bound: what is not below 0 but for rounding."""
MOST_PIVOTS = 400
"""Steps of the simplex method; after `DEGENERATE` of them by Bland's rule, which can't go in circles."""
DEGENERATE = 200


class Objective(NamedTuple):
    """What of a stage counts: so many of its forward and backward passes, of what is not hidden of the reduction, and of the update."""

    forward: float
    backward: float
    exposed: float = 0.0
    optimizer: float = 0.0

    @property
    def passes(self) -> float:
        """Of micro-batches, forward and back."""
        return (self.forward + self.backward) / 2


def through(passes: float, *, whole: bool = True) -> Objective:
    """So many micro-batches; of the `whole` also reduction and update."""
    return Objective(passes, passes, 1.0, 1.0) if whole else Objective(passes, passes)


class Numbers(NamedTuple):
    """Seconds of a stage: a micro-batch forward and backward, what of the reduction is not hidden, the update; or means of them."""

    forward: float
    backward: float
    exposed: float
    optimizer: float


class Path(NamedTuple):
    """What of each stage is passed, and how many transfers."""

    stages: tuple[Objective, ...]
    hops: int


def times(objective: Objective, numbers: Numbers) -> float:
    """Seconds of what of a stage counts.

    >>> times(Objective(4, 4, 1), Numbers(1.0, 2.0, 0.5, 0.1))
    12.5
    """
    return objective[0] * numbers[0] + objective[1] * numbers[1] + objective[2] * numbers[2] + objective[3] * numbers[3]


def longest(stages: Sequence[Numbers], hop: float, m: int) -> tuple[float, Path]:
    """Seconds of m micro-batches through these stages, reductions and updates included, and the path that takes them.

    >>> one = Numbers(1.0, 2.0, 0.5, 0.0)
    >>> seconds, path = longest([one, one], 0.0, 4)
    >>> seconds, sum(times(weights, one) for weights in path.stages)
    (15.5, 15.5)
    """
    pp, last = len(stages), len(stages) - 1
    ready = [0.0] * (pp + 1)
    down: list[list[bool]] = []  # of each round and stage: whether the forward pass waited for the stage before
    up: list[list[bool]] = []  # and the backward pass for the stage behind
    for n in range(m + last):
        waited_down, waited_up = [False] * pp, [False] * pp
        arrived = 0.0
        for i in range(pp):
            done = ready[i]
            if n < m:
                if arrived > done:
                    done, waited_down[i] = arrived, True
                done += stages[i].forward
                arrived = done + hop
            if last <= n + i < m + last:
                back = ready[i + 1] + hop if i < last else 0.0
                if back > done:
                    done, waited_up[i] = back, True
                done += stages[i].backward
            ready[i] = done
        down.append(waited_down)
        up.append(waited_up)
    end = max(range(pp), key=lambda i: ready[i] + stages[i].exposed)
    slowest = max(range(pp), key=lambda i: stages[i].optimizer)
    forward, backward, hops = [0] * pp, [0] * pp, 0
    n, i, is_backward = m - 1 + last - end, end, True
    while n >= 0:
        if is_backward:
            backward[i] += 1
            if up[n][i]:
                n, i, hops = n - 1, i + 1, hops + 1
            elif n < m:
                is_backward = False
            elif n - 1 + i >= last:
                n -= 1  # the rounds of the end have backward passes only
            else:
                n, is_backward = m - 1, False
        else:
            forward[i] += 1
            if down[n][i]:
                i, hops = i - 1, hops + 1
            else:
                n -= 1
                is_backward = n + i >= last
    passes = tuple(Objective(forward[p], backward[p], float(p == end), float(p == slowest)) for p in range(pp))
    return ready[end] + stages[end].exposed + stages[slowest].optimizer, Path(passes, hops)


class Mean(NamedTuple):
    """`seconds`: of the fastest mean of each stage's ways; `ways[p][k]`: its shares; `paths[j]`: those of the paths that bound it."""

    seconds: float
    ways: list[list[float]]
    paths: list[float]


def mixed(constants: Sequence[float], table: Sequence[Sequence[Sequence[float]]]) -> Mean:
    """The mean of ways whose longest path is shortest. `table[j][p][k]`: seconds of path j in stage p computed in way k, `constants[j]`
    those of path j besides.

    >>> mixed([0.0, 0.0], [[[4.0, 1.0]], [[1.0, 4.0]]])  # of two ways one is long on each path
    Mean(seconds=2.5, ways=[[0.5, 0.5]], paths=[0.5, 0.5])
    """
    rows, pp = len(constants), len(table[0])
    columns = [(p, k) for p in range(pp) for k in range(len(table[0][p]))]
    first = [constants[j] + sum(table[j][p][0] for p in range(pp)) for j in range(rows)]
    top = max(range(rows), key=lambda j: first[j])
    # Every stage in its first way: the others are 0, and so is the slack of the longest path.
    free = [column for column in columns if column[1]]
    width = len(free) + 1  # the last one: the slack of path `top`
    change = [[table[j][p][k] - table[j][p][0] for p, k in free] for j in range(rows)]
    tableau: list[list[float]] = []  # a row for each basic variable: coefficients of the nonbasic ones, and its value
    basis: list[tuple[str, int, int]] = []
    for p in range(pp):
        tableau.append([float(q == p) for q, _ in free] + [0.0, 1.0])
        basis.append(("way", p, 0))
    for j in range(rows):
        if j != top:
            tableau.append([a - b for a, b in zip(change[j], change[top], strict=True)] + [-1.0, first[top] - first[j]])
            basis.append(("path", j, 0))
    costs = [*change[top], 1.0, first[top]]  # seconds = costs[-1] + costs . nonbasic
    nonbasic: list[tuple[str, int, int]] = [("way", p, k) for p, k in free] + [("path", top, 0)]
    scale = max(*first, 1e-30)
    for pivot in range(MOST_PIVOTS):
        below = [q for q in range(width) if costs[q] < -TINY * scale]
        if not below:
            break
        enter = min(below, key=lambda q: nonbasic[q]) if pivot > DEGENERATE else min(below, key=lambda q: costs[q])
        leave, least = -1, INFINITE
        for r, line in enumerate(tableau):
            if line[enter] > TINY:
                ratio = line[-1] / line[enter]
                if ratio < least or (ratio == least and basis[r] < basis[leave]):
                    leave, least = r, ratio
        if leave < 0:
            break
        line = tableau[leave]
        inverse = 1.0 / line[enter]
        line[enter] = 1.0
        line[:] = [value * inverse for value in line]
        for other in tableau:
            if other is not line and other[enter]:
                factor, other[enter] = other[enter], 0.0
                other[:] = [a - factor * b for a, b in zip(other, line, strict=True)]
        factor, costs[enter] = costs[enter], 0.0
        constant = costs[-1] + factor * line[-1]
        costs[:] = [a - factor * b for a, b in zip(costs, line, strict=True)]
        costs[-1] = constant
        basis[leave], nonbasic[enter] = nonbasic[enter], basis[leave]
    shares = [[0.0] * len(table[0][p]) for p in range(pp)]
    paths = [0.0] * rows
    for (what, a, b), line in zip(basis, tableau, strict=True):
        if what == "way":
            shares[a][b] = max(0.0, line[-1])
    for (what, a, _), cost in zip(nonbasic, costs, strict=False):
        if what == "path":
            paths[a] = max(0.0, cost)
    whole = sum(paths)
    return Mean(costs[-1], shares, [share / whole for share in paths])
