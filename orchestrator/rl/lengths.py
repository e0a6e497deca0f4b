"""The lengths of a step's responses as a draw that can be repeated: generation ends with the longest, training is packed by tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import exp, log, sqrt
from statistics import NormalDist

from orchestrator.rl.job import Responses

NEAR = 1e-3
"""Share by which the mean of the cut lengths may miss the one that was said."""


@lru_cache(maxsize=256)
def drawn(responses: Responses, count: int, seed: int) -> tuple[int, ...]:
    """`count` lengths in tokens, at least 1; the same for the same seed. The mean of very many, cut off at the longest, is the one said.

    >>> drawn(Responses(mean=100, spread=0, longest=200), 3, 0)
    (100, 100, 100)
    >>> sorted(set(drawn(Responses(mean=2, spread=1, longest=3, values=(1, 3)), 50, 0)))
    [1, 3]
    """
    if responses.values:
        uniform = map(NormalDist().cdf, NormalDist().samples(count, seed=seed))
        return tuple(responses.values[min(int(share * len(responses.values)), len(responses.values) - 1)] for share in uniform)
    if not responses.spread:
        return (max(1, round(responses.mean)),) * count
    middle, width = shape(responses)
    return tuple(_cut(exp(middle + width * one), responses.longest) for one in NormalDist().samples(count, seed=seed))


def shape(responses: Responses) -> tuple[float, float]:
    """(mean, standard deviation) of the logarithm of the lengths before they are cut, such that the cut ones have the mean that was said.

    >>> shape(Responses(mean=100, spread=50, longest=10**9))[1]
    0.4723...
    """
    width = sqrt(log(1 + (responses.spread / responses.mean) ** 2))
    points = [NormalDist().inv_cdf((index + 0.5) / 512) for index in range(512)]
    low, high = log(responses.mean) - width * width, log(responses.longest) + 4 * width
    while high - low > NEAR:
        middle = (low + high) / 2
        mean = sum(min(exp(middle + width * point), responses.longest) for point in points) / len(points)
        low, high = (middle, high) if mean < responses.mean else (low, middle)
    return (low + high) / 2, width


def _cut(length: float, longest: int) -> int:
    return max(1, min(round(length), longest))


def squares(lengths: Sequence[int]) -> float:
    """The mean of the squares of these lengths.

    >>> squares([1, 3])
    5.0
    """
    return sum(length * length for length in lengths) / len(lengths)
