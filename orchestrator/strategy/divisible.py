"""Batches and numbers of GPUs that divide each other, to name beside those that don't."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from math import gcd

MOST_NODES = 100_000
"""Nodes by which a proposed number of GPUs may differ."""


def left_over(gpus: int, batch: int) -> int:
    """The factor of the GPUs that shares no prime with the batch, and so is never part of a data-parallel size.

    >>> left_over(72, 512), left_over(64, 512)
    (9, 1)
    """
    while (common := gcd(gpus, batch)) > 1:
        gpus //= common
    return gpus


def fewer(gpus: int, gpus_per_node: int, batch: int, layers: int) -> int | None:
    """The next fewer GPUs, in whole nodes, of which the batch leaves a smaller factor; None: it is 1 or divides the layers, or there are
    none.

    >>> fewer(120, 8, 512, 32), fewer(72, 8, 512, 80), fewer(80, 8, 512, 80)
    (112, 64, None)
    """
    left = left_over(gpus, batch)
    if left == 1 or (layers % left == 0 and left < gpus):
        return None
    step = gpus_per_node if gpus % gpus_per_node == 0 else 1
    return next((number for number in range(gpus - step, 0, -step) if left_over(number, batch) < left), None)


def multiples(value: int, unit: int) -> tuple[int, ...]:
    """The nearest multiples of the unit, at most the value and above it.

    >>> multiples(500, 16), multiples(7, 16)
    ((496, 512), (16,))
    """
    below = value // unit * unit
    return (below, below + unit) if below else (unit,)


def batches(gpus: int, batch: int) -> tuple[int, ...]:
    """The nearest batches that have all primes of the GPUs, and of their factors so many that a batch is near.

    >>> batches(72, 512), batches(768, 1024), batches(16, 513)
    ((504, 576), (960, 1152), (512, 528))
    """
    unit, shared = left_over(gpus, batch), gcd(gpus, batch)
    while shared > 1 and unit * shared > batch / 4:
        shared //= next(prime for prime in range(2, shared + 1) if shared % prime == 0)
    return multiples(batch, unit * shared)


def counts(gpus: int, gpus_per_node: int, batch: int) -> tuple[int, ...]:
    """The nearest numbers of GPUs, in whole nodes, of which nothing is left over by the batch.

    >>> counts(72, 8, 512), counts(3, 8, 512)
    ((64, 128), (2, 4))
    """
    step = gpus_per_node if gpus % gpus_per_node == 0 else 1

    def first(numbers: range) -> Iterator[int]:
        return islice((number for number in numbers if left_over(number, batch) == 1), 1)

    reach = step * MOST_NODES
    return (*first(range(gpus - step, max(0, gpus - reach), -step)), *first(range(gpus + step, gpus + reach, step)))
