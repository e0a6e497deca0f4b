"""Tensor parallelism of a recorded model: pairs of a column and a row that follow each other, found in its data flow."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from math import gcd
from typing import Any, NamedTuple

from torch import nn

from orchestrator.model.traced import Divided
from orchestrator.tracing.flow import STREAM, Flow, Sources


class Pair(NamedTuple):
    """Linears by the patterns of their names. `units`: what a tensor-parallel size must divide."""

    row: str
    columns: tuple[Divided, ...]
    summed: tuple[str, ...]
    units: int

    @property
    def divided(self) -> tuple[Divided, ...]:
        whole = (Divided(pattern=pattern, by="summed") for pattern in self.summed)
        return (*self.columns, Divided(pattern=self.row, by="row"), *whole)


class Partition(NamedTuple):
    """`undivided`: what stays whole and why, in words."""

    pairs: tuple[Pair, ...] = ()
    undivided: tuple[str, ...] = ()

    @property
    def units(self) -> int:
        """What tp must divide; 1 where nothing is divided."""
        return gcd(*(pair.units for pair in self.pairs)) if self.pairs else 1

    @property
    def divided(self) -> tuple[Divided, ...]:
        return tuple(dict.fromkeys(each for pair in self.pairs for each in pair.divided))

    def without(self, pair: Pair, why: str) -> Partition:
        return Partition(tuple(each for each in self.pairs if each is not pair), (*self.undivided, f"{shown(pair.row)}: {why}"))


def pattern(name: str) -> str:
    """A regular expression of this name and those that differ in numbers alone.

    >>> pattern("layers.0.mlp.up")
    'layers\\\\.\\\\d+\\\\.mlp\\\\.up'
    """
    return r"\.".join(r"\d+" if part.isdigit() else re.escape(part) for part in name.split("."))


def shown(found: str) -> str:
    """A pattern as people read it: layers.#.mlp.up."""
    return found.replace(r"\d+", "#").replace("\\", "")


def find(model: nn.Module, flow: Flow) -> Partition:
    """A linear is a row if its input comes only from linears that feed nothing else, its columns. Of pairs that share a linear the one
    with the least traffic for the weights that it divides comes first."""
    users: dict[str, set[str]] = {}
    for name, sources in flow.entering.items():
        for source in sources:
            users.setdefault(source, set()).add(name)
    inner = {row: sources for row, sources in flow.entering.items() if sources and STREAM not in sources}
    rows = {row: sources for row, sources in inner.items() if all(users[source] == {row} for source in sources)}
    taken: set[str] = set()
    found: dict[tuple[str, tuple[Divided, ...]], Pair] = {}
    why: dict[str, None] = {}
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for row, columns in sorted(rows.items(), key=lambda item: traffic(flow, *item)):
        if taken & {row, *columns}:
            continue
        refused = _refused(flow, columns, shapes)
        if refused:
            why[f"{shown(pattern(row))}: {refused}"] = None
            continue
        taken |= {row, *columns}
        pair = _pair(flow, row, columns)
        found.setdefault((pair.row, pair.columns), pair)
    pairs = tuple(pair for pair in found.values() if pair.units > 1)
    why |= {f"{shown(pair.row)}: one head of keys and values": None for pair in found.values() if pair.units == 1}
    matched = {each.pattern for pair in pairs for each in pair.divided}
    refused_too = {line.partition(":")[0] for line in why}
    for name in flow.linears:
        mine = pattern(name)
        columns_of_refused = any(name in columns for row, columns in rows.items() if shown(pattern(row)) in refused_too)
        if mine not in matched and shown(mine) not in refused_too and not columns_of_refused and name in flow.entering:
            why[f"{shown(mine)}: no other linear alone takes what it gives"] = None
    return Partition(pairs, tuple(why))


def traffic(flow: Flow, row: str, columns: Sources) -> float:
    """Elements that are all-reduced in forward and backward for each weight that is divided."""
    tokens = flow.reduced[row] // flow.linears[row].in_features
    reduced = tokens * flow.width(row) + sum(flow.reduced[column] for column in columns)
    weights = sum(flow.linears[name].weight.numel() for name in (row, *columns))
    return reduced / weights


def _pair(flow: Flow, row: str, columns: Sources) -> Pair:
    units, found = 0, []
    for column in sorted(columns):
        parts = flow.parts(column)
        for width in parts or (flow.width(column),):
            units = gcd(units, width)
        units = gcd(units, flow.units.get(column, 0))
        found.append(Divided(pattern=pattern(column), by="column", parts=parts if len(parts) > 1 else ()))
    summed = {pattern(name) for name, sources in flow.met.items() if sources and sources <= columns}
    return Pair(pattern(row), tuple(dict.fromkeys(found)), tuple(sorted(summed)), units)


def _refused(flow: Flow, columns: Sources, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Why the columns can't be divided, as shapes tell."""
    if any(column in flow.by_head for column in columns):
        return "attention is given something for each head, which would have to be divided too"
    widths = {flow.width(column) for column in columns} | {width for column in columns for width in flow.parts(column)}
    for name, sources in flow.met.items():
        if sources & columns and (widths & set(shapes[name]) or not sources <= columns):
            return f"{shown(pattern(name))} {list(shapes[name])} needs the whole width"
    return None


class Roles:
    """What a partition says of parameters and tensors by their own names."""

    def __init__(self, partition: Sequence[Divided]) -> None:
        self._by = {by: [re.compile(each.pattern) for each in partition if each.by == by] for by in ("column", "row")}

    def of_linear(self, name: str) -> Any:
        """How a linear of this name is divided: "column", "row"; None: not at all."""
        return next((by for by, found in self._by.items() if any(each.fullmatch(name) for each in found)), None)

    def inside(self, sources: Iterable[str]) -> bool:
        """Whether a tensor from these is divided."""
        sources = list(sources)
        return bool(sources) and all(source != STREAM and self.of_linear(source) == "column" for source in sources)
