"""Measurements of a cluster become a calibration: layers by least squares, collectives by nonnegative least squares. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np

from orchestrator.hardware.collectives import COLLECTIVES, Link
from orchestrator.hardware.spec import Cluster

HELD: Final = (0.05, 0.95)
"""Quantiles that are written as a figure's spread."""


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


def together(ranks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The collectives of all ranks: each repetition lasts as long as on its slowest rank, less what the products between take alone on the
    slowest, in the median of all that were measured. None of one rank."""
    rows, each_row = [], [*zip(*(rank["collectives"] for rank in ranks), strict=True)]
    if not each_row:
        return []
    products = median(seconds for each in each_row for seconds in slowest([row["products_s"] for row in each]))
    for each in each_row:
        seconds = [max(total - products, 0.0) for total in slowest([row["seconds"] for row in each])]
        rows.append({**{key: value for key, value in each[0].items() if key != "products_s"}, "seconds": seconds})
    return rows


def slowest(ranks: Sequence[Sequence[float]]) -> list[float]:
    """Seconds of each repetition on the rank where it took longest."""
    return [max(repetition) for repetition in zip(*ranks, strict=True)]


def layers(ranks: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Seconds of a micro-batch on every rank and in each repetition, by case."""
    return {name: [seconds for rank in ranks for seconds in rank["cases"][name]["microbatch_s"]] for name in ranks[0]["cases"]}


def core_share(ranks: Sequence[Mapping[str, Any]]) -> float:
    """Seconds of a micro-batch on a rank that is alone over those of one among all: 1 where ranks have devices of their own."""
    alone = median(ranks[0]["alone"]["microbatch_s"])
    return float(min(1.0, alone / median(layers(ranks)[ranks[0]["alone_case"]])))
