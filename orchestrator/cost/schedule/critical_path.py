"""Critical paths: a lower bound of all partitions at once, from the longest paths through the schedules of a few.

The passes of a schedule and what they wait for are a graph that is the same for every partition; only the passes' seconds differ. The
longest path through it counts so many forward and backward passes of each (virtual) stage, and so many transfers: a sum over stages which
no partition's step undercuts, because that path is in its graph too. So is any mean of such sums, and the least of a sum over all
partitions is a shortest path over their borders, which takes no simulation (search/partition.py).

Which mean of paths says most is a matrix game between who chooses the path and who chooses the partition (`game`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from operator import mul
from typing import NamedTuple

from orchestrator.cost.schedule.names import of_chunks
from orchestrator.cost.schedule.one_f_one_b import OneFOneB

TINY = 1e-11
"""What is not below 0 but for rounding, in a game whose payoffs are at most 1."""
MOST_PIVOTS = 400
"""Steps of the simplex method. A mean of paths is a bound whether or not it is the best one."""


def mean(columns: Sequence[Sequence[float]], shares: Sequence[float]) -> list[float]:
    """The weighted mean of vectors, in these shares.

    >>> mean([[1.0, 3.0], [3.0, 5.0]], [0.5, 0.5])
    [2.0, 4.0]
    """
    return [sum(map(mul, shares, values)) for values in zip(*columns, strict=True)]


def game(payoffs: Sequence[Sequence[float]], played: Sequence[float] = ()) -> tuple[float, list[float], list[float]]:
    """(value, shares of the rows, shares of the columns) of a game in which the row's player wants much of `payoffs[row][column]`, which
    are positive, and the column's player little: the linear program "most sum y where
    payoffs y <= 1" by the simplex method (Dantzig 1951), whose first basis is its slacks. `played`: shares of the first columns in a game
    that had fewer rows and columns; those that have one enter the basis first.

    >>> game([[4.0, 1.0], [1.0, 4.0]])
    (2.5, [0.5, 0.5], [0.5, 0.5])
    """
    rows, columns = len(payoffs), len(payoffs[0])
    scale = max(map(max, payoffs))
    table = [[*(payoff / scale for payoff in row), *(float(i == j) for j in range(rows)), 1.0] for i, row in enumerate(payoffs)]
    gains = [-1.0] * columns + [0.0] * (rows + 1)
    basis = list(range(columns, columns + rows))
    known = sorted((column for column, share in enumerate(played) if share > 0.0), key=played.__getitem__)
    for _ in range(MOST_PIVOTS):
        again = bool(known)
        enter = known.pop() if again else min(range(columns + rows), key=gains.__getitem__)
        if gains[enter] >= -TINY:
            if again:
                continue
            break
        leave = min((i for i in range(rows) if table[i][enter] > TINY), key=lambda i: (table[i][-1] / table[i][enter], basis[i]))
        pivot = table[leave][enter]
        line = table[leave] = [value / pivot for value in table[leave]]
        for i, other in enumerate(table):
            if i != leave and other[enter]:
                factor = other[enter]
                table[i] = [a - factor * b for a, b in zip(other, line, strict=True)]
        factor = gains[enter]
        gains = [a - factor * b for a, b in zip(gains, line, strict=True)]
        basis[leave] = enter
    total = gains[-1]
    chosen = [0.0] * (columns + rows)
    for i, variable in enumerate(basis):
        chosen[variable] = table[i][-1]
    prices = [max(0.0, price) for price in gains[columns:-1]]
    whole = sum(prices)
    return scale / total, [price / whole for price in prices], [share / total for share in chosen[:columns]]


class Graph(NamedTuple):
    """Nodes from 1 on, each behind what it waits for: it ends `costs` after the end of `first` and after `waits` from the end of `second`
    on; both are indices into `Times.weights`. Node 0 is the begin. `last`: by stage, its last pass."""

    first: list[int]
    second: list[int]
    waits: list[int]
    costs: list[int]
    last: list[int]


class Times(NamedTuple):
    """A partition's seconds: passes of a micro-batch by virtual stage (index chunk * pp + stage), transfers by border, and what each stage
    exposes behind its last pass."""

    forward: Sequence[float]
    backward: Sequence[float]
    hops: Sequence[float]
    exposed: Sequence[float]

    def weights(self) -> list[float]:
        """Passes, transfers, two transfers, and nothing: what a node's indices mean, in blocks of as many as there are virtual stages."""
        hops = self.hops[: len(self.forward)]
        return [*self.forward, *self.backward, *hops, *(2 * hop for hop in hops), 0.0]

    @staticmethod
    def mean(times: Sequence[Times], shares: Sequence[float]) -> Times:
        """The weighted mean of partitions' seconds, in these shares."""
        return Times(*(mean(columns, shares) for columns in zip(*times, strict=True)))


class CriticalPath(NamedTuple):
    """Passes by virtual stage, seconds of transfers, and the stage whose end is the last; of a mean of paths shares of them."""

    forward: Sequence[float]
    backward: Sequence[float]
    transfers_s: float
    ends: Sequence[float]

    def seconds(self, times: Times) -> float:
        """Seconds that this path takes in a partition."""
        pairs = ((self.forward, times.forward), (self.backward, times.backward), (self.ends, times.exposed))
        return self.transfers_s + float(sum(sum(map(mul, counts, seconds)) for counts, seconds in pairs))

    @staticmethod
    def mean(paths: Sequence[CriticalPath], shares: Sequence[float]) -> CriticalPath:
        """The weighted mean of paths, in these shares."""
        forward, backward, transfers, ends = zip(*paths, strict=True)
        return CriticalPath(mean(forward, shares), mean(backward, shares), sum(map(mul, shares, transfers)), mean(ends, shares))


class _Making:
    def __init__(self) -> None:
        self.graph = Graph([], [], [], [], [])

    def node(self, first: int, cost: int, second: int = 0, wait: int = -1) -> int:
        graph = self.graph
        graph.first.append(first)
        graph.second.append(second)
        graph.waits.append(wait)
        graph.costs.append(cost)
        return len(graph.first)


@lru_cache(maxsize=8)
def graph_of(schedule: str, pp: int, m: int, vpp: int, group: int | None = None) -> Graph:
    """The passes of m micro-batches as the engine orders them (cost/schedule/order.py)."""
    kind = of_chunks(schedule, vpp, group)
    if isinstance(kind, OneFOneB):
        return _one_f_one_b(pp, m, half_duplex=kind.half_duplex)
    return _deepspeed(pp, m) if kind.blocks else _unblocked(schedule, pp, m, vpp, group)


def _unblocked(schedule: str, pp: int, m: int, vpp: int, group: int | None) -> Graph:
    """The graph of a schedule whose transfers block nobody: a pass waits for the one before on its stage, and for the neighbour's and a
    transfer."""
    n, total = pp * vpp, m * vpp
    made = _Making()
    orders = (of_chunks(schedule, vpp, group).order(pp, stage, m, vpp) for stage in range(pp))
    lines = [
        [(one.action == "backward", one.chunk * pp + stage, one.microbatch) for one in order if one.action in ("forward", "backward")]
        for stage, order in enumerate(orders)
    ]
    ends: tuple[dict[tuple[int, int], int], dict[tuple[int, int], int]] = ({}, {})  # nodes of forward and backward passes
    at, last = [0] * pp, [0] * pp
    left = 2 * total * pp
    while left:
        for stage, line in enumerate(lines):
            while at[stage] < len(line):
                is_backward, virtual, j = line[at[stage]]
                needed = virtual + 1 if is_backward else virtual - 1
                second, wait = 0, -1
                if 0 <= needed < n:
                    if (needed, j) not in ends[is_backward]:
                        break
                    second, wait = ends[is_backward][needed, j], 2 * n + min(virtual, needed)
                last[stage] = ends[is_backward][virtual, j] = made.node(last[stage], is_backward * n + virtual, second, wait)
                at[stage] += 1
                left -= 1
    made.graph.last.extend(last)
    return made.graph


def _one_f_one_b(pp: int, m: int, *, half_duplex: bool) -> Graph:
    """Rounds of a forward and a backward pass, with a transfer over each border between the two that both sides wait for."""
    made, last = _Making(), [0] * pp
    for n in range(m + pp - 1):
        for s in range(pp):
            back = 0 <= n - (pp - 1 - s) < m
            if n < m:
                last[s] = made.node(last[s], s)
            if s < pp - 1 and (n < m or back):
                moved = 2 if half_duplex and n < m and back else 1
                last[s] = last[s + 1] = made.node(last[s], (1 + moved) * pp + s, last[s + 1])
            if back:
                last[s] = made.node(last[s], pp + s)
    made.graph.last.extend(last)
    return made.graph


def _deepspeed(pp: int, m: int) -> Graph:
    """Steps in which every second stage runs forward and the others backward, with transfers between them that both sides wait for."""
    made, last = _Making(), [0] * pp
    for step in range(2 * (m + pp - 1)):
        half, odd = divmod(step, 2)
        earlier = half - 1 + odd
        for s in range(1 - odd, pp - 1, 2):
            moved = (0 <= half - pp + 1 + s // 2 < m) + (0 <= earlier - s // 2 < m)
            if moved:
                last[s] = last[s + 1] = made.node(last[s], (1 + moved) * pp + s, last[s + 1])
        for s in range(pp):
            if s % 2 == odd:
                if 0 <= half - s // 2 < m:
                    last[s] = made.node(last[s], s)
            elif 0 <= half - pp + 1 + s // 2 < m:
                last[s] = made.node(last[s], pp + s)
    made.graph.last.extend(last)
    return made.graph


def longest(graph: Graph, times: Times) -> tuple[float, CriticalPath]:
    """(seconds until the last stage is through with what it exposes behind its passes, the path that takes them).

    >>> longest(graph_of("1f1b", 2, 4, 1), Times([1.0, 1.0], [2.0, 2.0], [0.0, 0.0], [0.0, 0.0]))  # (m + p - 1) * (f + b)
    (15.0, CriticalPath(forward=[3, 2], backward=[3, 2], transfers_s=0.0, ends=[1.0, 0.0]))
    """
    weights, exposed = times.weights(), times.exposed
    ends = [0.0]
    add = ends.append
    waits, costs = [weights[i] for i in graph.waits], [weights[i] for i in graph.costs]
    for a, b, wait, cost in zip(graph.first, graph.second, waits, costs, strict=True):
        time, other = ends[a], ends[b] + wait
        add((other if other > time else time) + cost)
    end = max(range(len(exposed)), key=lambda stage: ends[graph.last[stage]] + exposed[stage])
    counts = [0] * len(weights)
    node = graph.last[end]
    seconds = ends[node] + exposed[end]
    while node:
        at = node - 1
        counts[graph.costs[at]] += 1
        if ends[graph.second[at]] + waits[at] > ends[graph.first[at]]:
            counts[graph.waits[at]] += 1
            node = graph.second[at]
        else:
            node = graph.first[at]
    n = len(times.forward)
    transfers = sum(map(mul, counts[2 * n :], weights[2 * n :]))
    return seconds, CriticalPath(counts[:n], counts[n : 2 * n], transfers, [float(stage == end) for stage in range(len(exposed))])
