"""How unevenly tokens are sent to experts: a trace of a training, or a stated skew, as what the ranks that hold the experts get of it.

All ranks of an expert group wait for the one whose experts got most tokens, in every layer and micro-batch, since the exchange of tokens
is a collective. So of a trace three figures matter for a division of the experts into n equal parts (n = ep): the mean over layers and
micro-batches of the busiest part's load, in multiples of its even share (seconds); the most that one part got over all layers of one
micro-batch (bytes that it keeps); and the busiest part's load if each part had room for a copy of one further expert, hot experts being
copied (FlexMoE, arXiv 2304.03946, section 3.2), which no engine here does.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cache
from heapq import heapify, heappop, heapreplace
from typing import Any, Final

from orchestrator.errors import InputError
from orchestrator.values import Value

KEY: Final = "model.routing"
MOST_COPIED: Final = 200
"""Rows of a trace, evenly taken, on which copies of experts are tried."""
Times = tuple[tuple[int, float], ...]
"""(parts that the experts are divided into, multiple of a part's even share)."""


class Routing(Value, frozen=True, kw_only=True):
    """How unevenly tokens are sent to a model's experts, in multiples of what even routing gives each part that experts are divided
    into."""

    source: str
    """The trace's path, or the stated skew."""
    busiest: Times
    """The busiest part's tokens, the mean over layers and micro-batches, as a multiple of a part's even share."""
    fullest: Times
    """The most tokens that one part has over all layers of a micro-batch, as a multiple of its even share."""
    copied: Times
    """The busiest part's tokens if each part held a copy of one more expert, those of the hottest, as a multiple of a part's even share."""
    dropped: float = 0.0
    """Share of what is sent to experts that a capacity cuts off."""


class Unevenness(Value, frozen=True, kw_only=True):
    """What uneven routing costs a plan. Seconds of a step: as priced; were routing even; were hot experts copied (`Routing.copied`)."""

    routing: Routing
    parts: int
    """Parts that the plan divides the experts into."""
    step_s: float
    even_s: float
    copied_s: float


def times(pairs: Times, parts: int) -> float:
    """The multiple for so many parts.

    >>> times(((1, 1.0), (4, 1.6)), 4), times((), 4)
    (1.6, 1.0)
    """
    return dict(pairs).get(parts, 1.0)


@cache
def buffered(rows: float, num_experts: int) -> Routing:
    """The routing of experts whose ranks compute `rows` times an even share whatever they get.

    >>> buffered(7.0, 4).busiest
    ((1, 7.0), (2, 7.0), (4, 7.0))
    """
    pairs = tuple((parts, rows) for parts in range(1, num_experts + 1) if num_experts % parts == 0)
    return Routing(source=f"buffers of {rows:g} even shares", busiest=pairs, fullest=pairs, copied=pairs)


def stated(skew: float, num_experts: int, topk: int, capacity: float | None = None) -> Routing:
    """The routing in which one expert gets `skew` times its even share, the others the rest. Raises InputError for more than all tokens.

    >>> stated(3.0, 4, 1).busiest
    ((1, 1.0), (2, 1.6666666666666667), (4, 3.0))
    """
    most = num_experts / topk
    if not 1 <= skew <= most:
        raise InputError(KEY, skew, f"must be from 1 to num_experts/topk={most:g}, where every token goes to the busiest expert")
    rest = (num_experts - skew) / (num_experts - 1) if num_experts > 1 else 1.0
    row = (0, [skew, *[rest] * (num_experts - 1)])
    return measured(f"{skew:g} times an even share to one expert", [row], capacity)


def trace(text: str, source: str, num_experts: int, capacity: float | None = None) -> Routing:
    """A file of JSON lines, one for each layer of a micro-batch (or of a step):
    {"step": 1, "micro_batch": 0, "layer": 3, "tokens": [12, 0, 7, 5]}, `tokens` by expert; "micro_batch" and "group" (where several groups
    of ranks hold the experts) may be left out. Raises InputError with the line."""
    rows: list[tuple[object, list[float]]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            found: Any = json.loads(line)
            tokens = [float(count) for count in found["tokens"]]
            key = (found.get("step"), found.get("micro_batch"), found.get("group"))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            raise InputError(KEY, source, f'line {number} is no {{"step": 1, "layer": 0, "tokens": [...]}}') from None
        if len(tokens) != num_experts:
            raise InputError(KEY, source, f"line {number} has tokens of {len(tokens)} experts; the model has {num_experts}")
        if min(tokens) < 0 or sum(tokens) <= 0:
            raise InputError(KEY, source, f"line {number} has no tokens, or fewer than none")
        mean = sum(tokens) / num_experts
        rows.append((key, [count / mean for count in tokens]))
    if not rows:
        raise InputError(KEY, source, "has no lines")
    return measured(source, rows, capacity)


def measured(source: str, rows: Sequence[tuple[object, Sequence[float]]], capacity: float | None) -> Routing:
    """How uneven the routing of `rows` is: each is (what is equal in the rows of one micro-batch, each expert's load in multiples of its
    even share). `capacity`: the most of a load that an expert takes."""
    taken = rows if capacity is None else [(key, [min(load, capacity) for load in loads]) for key, loads in rows]
    num_experts = len(rows[0][1])
    kept = sum(sum(loads) for _, loads in taken) / (len(taken) * num_experts)
    even = min(1.0, capacity or 1.0)  # what the prices of even routing already count
    tried = taken[:: -(-len(taken) // MOST_COPIED)]
    busiest, fullest, copied = [], [], []
    for parts in range(1, num_experts + 1):
        if num_experts % parts:
            continue
        size = num_experts // parts
        by_part = [(key, [sum(loads[i : i + size]) / size for i in range(0, num_experts, size)]) for key, loads in taken]
        busiest.append((parts, sum(max(loads) for _, loads in by_part) / len(by_part) / even))
        together: dict[object, list[Sequence[float]]] = {}
        for key, loads in by_part:
            together.setdefault(key, []).append(loads)
        most = max(max(map(sum, zip(*layers, strict=True))) / len(layers) for layers in together.values())
        fullest.append((parts, most / even))
        copied.append((parts, sum(with_copies(loads, parts) for _, loads in tried) / len(tried) / even))
    dropped = round(max(0.0, 1 - kept), 9)
    return Routing(source=source, busiest=tuple(busiest), fullest=tuple(fullest), copied=tuple(copied), dropped=dropped)


def with_copies(loads: Sequence[float], parts: int) -> float:
    """The busiest part's load, in multiples of an even share, where each part holds one expert more than its own number: the further places
    go to copies of whatever has most tokens a copy, and what is held is spread over the parts, the largest first.

    >>> round(with_copies([3.0, 1/3, 1/3, 1/3], 4), 3)  # the hot expert is everywhere: 3/4 + 1/3
    1.083
    """
    size = len(loads) // parts
    if parts == 1:
        return sum(loads) / len(loads)
    shares = [(-load, load, 1) for load in loads]
    heapify(shares)
    held: list[float] = []
    places = parts
    while places and shares:
        _, load, copies = shares[0]
        if copies == parts:  # two on one part are of no use
            held += [load / copies] * copies
            heappop(shares)
            continue
        heapreplace(shares, (-load / (copies + 1), load, copies + 1))
        places -= 1
    held += [load / copies for _, load, copies in shares for _ in range(copies)]
    return max(_spread(sorted(held, reverse=True), parts, size + 1)) / size


def _spread(held: Iterable[float], parts: int, places: int) -> list[float]:
    """Sums of the parts, each next one to the part with least that has a place left."""
    sums, left = [0.0] * parts, [places] * parts
    for load in held:
        part = min((p for p in range(parts) if left[p]), key=lambda p: sums[p])
        sums[part] += load
        left[part] -= 1
    return sums
