"""Measurements of a cluster become a calibration: layers by least squares, collectives by nonnegative least squares. Pure.

A machine's speed drifts: other work uses its cores, clocks fall. Beside everything that was measured stands the yardstick, work that is the
same each time (workers/profiler.py); what took longer while the yardstick did is told as at the median speed of the whole profile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np

from orchestrator.hardware.collectives import COLLECTIVES, Link
from orchestrator.hardware.spec import Cluster

HELD: Final = (0.05, 0.95)
"""Quantiles that are written as a figure's spread."""


SMOOTHED: Final = 5
"""Collectives in a row whose yardsticks' median says how fast the machine was at the one in the middle: it keeps a step, and no outlier."""
LEAST: Final = 1e-6
"""Seconds below which a collective's time is not told from others: it is lost in the noise of the products beside it."""


class Figure(NamedTuple):
    """A measured figure: median, 5% and 95% quantile, and of how many repetitions."""

    value: float
    low: float
    high: float
    repetitions: int


def figure(values: Sequence[float]) -> Figure:
    """The median of these repetitions and the range that holds 90% of them.

    >>> figure([1.0, 2.0, 3.0])
    Figure(value=2.0, low=1.1, high=2.9, repetitions=3)
    """
    value = float(median(values))
    low, high = (float(np.quantile(values, share)) for share in HELD)
    return Figure(value, min(low, value), max(high, value), len(values))


class Wire(NamedTuple):
    """A network level by its collectives: bytes/s of a rank, seconds of a hop, and of a collective whatever its size and group;
    `error`: the median of how far off the three are from the medians that were measured."""

    bandwidth: float
    hop_s: float
    collective_s: float
    error: float


def wire(rows: Sequence[Mapping[str, Any]]) -> Wire:
    """The least squares over rows of {operation, size, bytes, seconds: [...]}, each relative to its median, or to the spread of its
    repetitions (half of what lies between their quartiles) where that is wider, so that what noise hides settles nothing: every
    collective's time is linear in what a byte, a hop and a collective take (hardware/collectives.py), none of which is negative (Lawson
    and Hanson's NNLS). Raises ValueError without rows."""
    from scipy.optimize import nnls

    if not rows:
        raise ValueError("no collective was measured")
    matrix, target = [], []
    for row in rows:
        operation, size, nbytes = COLLECTIVES[row["operation"]], row["size"], row["bytes"]
        a_byte = operation(nbytes, size, Link(bandwidth=1.0, latency=0.0))
        a_hop = operation(0.0, size, Link(bandwidth=1.0, latency=1.0))
        seconds = median(row["seconds"])
        low, high = (float(np.quantile(row["seconds"], share)) for share in (0.25, 0.75))
        unit = max(seconds, (high - low) / 2, LEAST)
        matrix.append([a_byte / unit, a_hop / unit, 1 / unit])
        target.append(seconds / unit)
    columns = np.array(matrix)
    scale = columns.max(axis=0)
    found, _ = nnls(columns / scale, np.array(target))
    per_byte, hop_s, collective_s = (float(value) for value in found / scale)
    off = np.abs(columns @ np.array([per_byte, hop_s, collective_s]) - target)
    return Wire(1 / per_byte if per_byte else float("inf"), hop_s, collective_s, float(np.median(off)))


def level_of(cluster: Cluster, size: int, stride: int) -> int:
    """The outermost network level that a group of `size` ranks, `stride` apart, crosses."""
    for index, level in enumerate(cluster.levels):
        if level.size % (size * stride) == 0 or level.size >= cluster.num_gpus:
            return index
    return len(cluster.levels) - 1


def reference(ranks: Sequence[Mapping[str, Any]]) -> float:
    """Seconds of the yardstick at the median speed of the whole profile."""
    beside_layers = [seconds for rank in ranks for rounds in rank["cases"].values() for one in rounds for seconds in one["yardstick_s"]]
    return float(median([*beside_layers, *(seconds for rank in ranks for row in rank["collectives"] for seconds in row["products_s"])]))


def together(ranks: Sequence[Mapping[str, Any]], usual: float, *, by_cores: bool) -> list[dict[str, Any]]:
    """The collectives of all ranks, each repetition as long as on its slowest rank, less what the products between take alone on the
    slowest. `usual`: the yardstick's seconds (`reference`); `by_cores`: whether the ranks' own cores carry the traffic, and are as slow
    at it as at the products. `seconds` are in order of rounds. None of one rank."""
    visits = [*zip(*(rank["collectives"] for rank in ranks), strict=True)]
    speeds = [median(slowest([row["products_s"] for row in each])) for each in visits]
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for index, each in enumerate(visits):
        near = speeds[max(0, index - SMOOTHED // 2) : index + SMOOTHED // 2 + 1]
        products, said = median(near), {key: value for key, value in each[0].items() if key not in ("products_s", "seconds")}
        factor = usual / products if by_cores else 1.0
        seconds = [max(total - products, 0.0) * factor for total in slowest([row["seconds"] for row in each])]
        rows.setdefault(tuple(said.values()), {**said, "seconds": []})["seconds"] += seconds
    return [*rows.values()]


def slowest(ranks: Sequence[Sequence[float]]) -> list[float]:
    """Seconds of each repetition on the rank where it took longest."""
    return [max(repetition) for repetition in zip(*ranks, strict=True)]


def steady(one: Mapping[str, Any], what: str, usual: float) -> list[float]:
    """Seconds of each step of a case's round, as at the usual speed. `usual`: the yardstick's seconds then (`reference`)."""
    return [seconds * usual / beside for seconds, beside in zip(one[what], one["yardstick_s"], strict=True)]


def of_rounds(ranks: Sequence[Mapping[str, Any]], case: str, what: str, usual: float) -> list[list[float]]:
    """A case's seconds on all ranks at the usual speed, round by round."""
    return [
        [seconds for rank in round_ for seconds in steady(rank, what, usual)]
        for round_ in zip(*(rank["cases"][case] for rank in ranks), strict=True)
    ]


def of_case(ranks: Sequence[Mapping[str, Any]], case: str, what: str, usual: float) -> list[float]:
    """A case's seconds on all ranks and in all rounds at the usual speed."""
    return [seconds for round_ in of_rounds(ranks, case, what, usual) for seconds in round_]


def layer_s(ranks: Sequence[Mapping[str, Any]], case: str, usual: float) -> list[float]:
    """Seconds of a layer's forward pass of a case at the usual speed, round by round; none where no layer was found in the model."""
    rounds = zip(*(rank["cases"][case] for rank in ranks), strict=True)
    each = [[one["layer_forward_s"] * usual / median(one["yardstick_s"]) for one in round_ if one["layer_forward_s"]] for round_ in rounds]
    return [float(median(found)) for found in each if found]


def core_share(ranks: Sequence[Mapping[str, Any]], usual: float) -> float:
    """Seconds of a micro-batch on a rank that is alone over those of one among all: 1 where ranks have devices of their own."""
    first = ranks[0]
    alone = median(seconds for one in first["alone"] for seconds in steady(one, "microbatch_s", usual))
    return float(min(1.0, alone / median(of_case(ranks, first["alone_case"], "microbatch_s", usual))))


def spread(values: Sequence[float]) -> float:
    """Half of the range of a constant's values in the rounds, as a share of their median.

    >>> spread([0.9, 1.0, 1.2])
    0.15
    """
    middle = median(values)
    return round((max(values) - min(values)) / 2 / middle, 4) if middle else 0.0
