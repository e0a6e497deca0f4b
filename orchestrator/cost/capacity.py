"""How many layers a stage can hold and work through in a given time: what narrows the splits before any stage is priced.

A stage with n layers keeps at least what n of its cheapest layers do (`StageMemory`); what is above the limit must be recomputed, in the
mode that does it fastest. Both only grow with n, so that the most layers for a time are found by bisection. Stage i can't end before a
micro-batch has come down to it and gone back up: the stages before it hold at least what those behind can't, and that shortens its time in
turn (`Capacity.ranges`). Where a stage may hold several kinds of layers each number is the least of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil
from typing import NamedTuple

from orchestrator.cost.memory import StageMemory
from orchestrator.cost.price import CostModel, LayerCost
from orchestrator.model.spec import ModelSpec
from orchestrator.strategy.spec import Candidate, Recompute

ROUNDING = 1e-9
"""Relative slack of every comparison: the same terms, added in another order."""
PASSES = 3
"""Times that the ranges are narrowed by each other; further ones change little."""
CLOSE = 0.004
"""Relative: how close `least` comes to what it could say."""
LONGEST = 1e300
"""Seconds that no micro-batch takes."""
INFINITE = float("inf")


class _Relief(NamedTuple):
    """Another mode than none: bytes that it saves a layer at most, and the seconds that costs. `by_layer`: for any number of layers."""

    nbytes: float
    seconds: float
    by_layer: bool


class _Layer(NamedTuple):
    """The least of some kinds of layers in some modes: seconds of a micro-batch, bytes, parameters."""

    seconds: float
    optimizer_s: float
    static: float
    saved: float
    forward: float
    backward: float
    in_backward: float
    in_step: float
    parameters: int
    reliefs: tuple[_Relief, ...] = ()

    def plus(self, n: int, other: _Layer) -> _Layer:
        """This beside n of another."""
        if not n:
            return self
        return _Layer(
            self.seconds + n * other.seconds,
            self.optimizer_s + n * other.optimizer_s,
            self.static + n * other.static,
            self.saved + n * other.saved,
            max(self.forward, other.forward),
            max(self.backward, other.backward),
            self.in_backward + n * other.in_backward,
            self.in_step + n * other.in_step,
            self.parameters + n * other.parameters,
        )

    @classmethod
    def of(cls, plain: Sequence[LayerCost], every: Sequence[LayerCost]) -> _Layer:
        """Of these kinds without recompute, and in every mode that they may have."""
        return cls(
            seconds=min(cost.seconds for cost in every),
            optimizer_s=min(cost.optimizer_s for cost in plain),
            static=min(cost.static_bytes for cost in plain),
            saved=min(cost.saved_bytes for cost in plain),
            forward=min(cost.transient_forward_bytes for cost in every),
            backward=min(cost.transient_backward_bytes for cost in every),
            in_backward=min(cost.backward_bytes for cost in plain),
            in_step=min(cost.step_bytes for cost in plain),
            parameters=min(cost.parameters for cost in plain),
        )


NOTHING = _Layer(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0)


def kinds_by_stage(model: ModelSpec, pp: int) -> list[tuple[str, ...]]:
    """The kinds of transformer layers that each of so many stages may hold, were they split anywhere: at least one layer in each, but for
    the first and the last."""
    runs, layers, found = model.runs[1:-1], sum(run.count for run in model.runs[1:-1]), []
    for p in range(pp):
        low, high = max(0, p - 1), layers - max(0, pp - 2 - p)
        begin, kinds = 0, []
        for run in runs:
            if begin < high and begin + run.count > low:
                kinds.append(run.layer.kind)
            begin += run.count
        found.append(tuple(dict.fromkeys(kinds)))
    return found


class Capacity:
    """For one outer choice. `partial`: modes that a stage may have on some of its layers alone; `usable`, `memories`: of each stage. Stages
    on several types of GPU have each their own."""

    def __init__(
        self,
        costs: CostModel,
        candidate: Candidate,
        modes: Sequence[Recompute],
        partial: Sequence[Recompute],
        layers: int,
        usable: Sequence[float],
        memories: Sequence[StageMemory],
    ) -> None:
        self.pp, self.vpp, self.m, self.layers = candidate.mesh.pp, candidate.vpp, candidate.num_microbatches, layers
        self.usable = [room * (1 + ROUNDING) for room in usable]
        self.memories = memories
        inside = tuple(dict.fromkeys(run.layer.kind for run in costs.model.runs[1:-1]))
        prices = [costs.of_stage(candidate, p) for p in range(self.pp)]
        ends = [costs.model.runs[i].layer.kind for i in (0, -1)]

        def least(here: CostModel, kinds: Iterable[str]) -> _Layer:
            some = [{mode: here.layer(candidate, kind, mode) for mode in ("none", *modes)} for kind in kinds]
            found = _Layer.of([by_mode["none"] for by_mode in some], [by_mode[mode] for by_mode in some for mode in modes])
            reliefs = []
            for mode in modes:
                less = max(by_mode["none"].saved_bytes - by_mode[mode].saved_bytes for by_mode in some)
                more = min(by_mode[mode].seconds for by_mode in some) - found.seconds
                if less > 0.0:
                    reliefs.append(_Relief(less, max(0.0, more), mode in partial))
            return found._replace(reliefs=tuple(reliefs))

        by_stage = kinds_by_stage(costs.model, self.pp) if len(inside) > 1 else [inside] * self.pp
        known: dict[tuple[int, tuple[str, ...]], _Layer] = {}
        self.least_layers = []
        for here, kinds in zip(prices, by_stage, strict=True):
            key = id(here), kinds or inside
            if key not in known:
                known[key] = least(here, key[1])
            self.least_layers.append(known[key])
        everywhere = [known.get((id(here), inside)) or least(here, inside) for here in dict.fromkeys(prices)]
        self.layer_s = min(layer.seconds for layer in everywhere)
        outer = [here.layer(candidate, kind, "none") for here, kind in zip((prices[0], prices[-1]), ends, strict=True)]
        first, last = (_Layer.of([cost], [cost]) for cost in outer)
        self.ends = [NOTHING.plus(p == 0, first).plus(p == self.pp - 1, last) for p in range(self.pp)]
        """Embedding and head, where they are."""
        overheads = [here.calibration.microbatch_overhead_s for here in prices]
        self.empty_s = [candidate.vpp * overhead + end.seconds for overhead, end in zip(overheads, self.ends, strict=True)]
        """Seconds of a micro-batch in each stage, but for its layers."""
        self._known: list[dict[int, float]] = [{} for _ in range(self.pp)]
        self._ranges: dict[float, tuple[list[int], list[int]] | None] = {}
        self._near = layers // self.pp
        hops = costs.hop_seconds(candidate)
        self.down = [0.0] * self.pp
        """Seconds until stage p begins and after it has ended, for the stages before without their layers."""
        for p in range(1, self.pp):
            self.down[p] = self.down[p - 1] + overheads[p - 1] + 2 * hops[p - 1] + (first.seconds if p == 1 else 0.0)
        updates = layers * min(layer.optimizer_s for layer in everywhere) + first.optimizer_s + last.optimizer_s
        self.once = costs.once_seconds(candidate) + updates / self.pp
        """Seconds of a step beside its schedule: the slowest update is at least the mean."""
        self.fewest = [0 if p in (0, self.pp - 1) else 1 for p in range(self.pp)]

    def peak(self, p: int, n: int) -> float:
        """Bytes of stage p with n layers that are not recomputed, at least."""
        memory, end, layer = self.memories[p], self.ends[p], self.least_layers[p] if n else NOTHING
        kept = memory.even_activations(n // self.vpp * layer.saved, end.saved, first=p == 0)  # as in the smallest chunk
        stiff = memory.stiff_bytes(end.static + n * layer.static, end.parameters + n * layer.parameters)
        forward, backward = max(end.forward, layer.forward), max(end.backward, layer.backward)
        return memory.peak_of(stiff, kept, forward, backward, end.in_backward + n * layer.in_backward, end.in_step + n * layer.in_step)

    def seconds(self, p: int, n: int) -> float:
        """At least this long does a micro-batch take in stage p with n layers; infinite where they don't fit."""
        found = self._known[p].get(n)
        if found is None:
            found = self._known[p][n] = self._seconds(p, n)
        return found

    def _seconds(self, p: int, n: int) -> float:
        layer, memory = self.least_layers[p], self.memories[p]
        plain, over = self.empty_s[p] + n * layer.seconds, self.peak(p, n) - self.usable[p]
        if over <= 0.0:
            return plain
        best, held = INFINITE, (1 + memory.slack) * memory.flight
        for relief in layer.reliefs:
            if over > held * (n // self.vpp) * relief.nbytes:
                continue
            again = self.vpp * ceil(over / (held * relief.nbytes) - ROUNDING) if relief.by_layer else n
            best = min(best, again * relief.seconds)
        return plain + best

    def most(self, p: int, seconds: float) -> int:
        """The most layers that stage p works through in `seconds` a micro-batch; -1: not even without any."""
        room = seconds * (1 + ROUNDING)
        if self.empty_s[p] > room:
            return -1
        high, layer_s = self.layers, self.least_layers[p].seconds
        if layer_s > 0.0 and room < INFINITE:
            high = min(high, int((room - self.empty_s[p]) / layer_s * (1 + ROUNDING)))
        room = min(room, LONGEST)  # what does not fit takes for ever
        if self.seconds(p, high) <= room:
            return high
        low, top, step = -1, high, 1
        while high - low > 1:  # a stage holds about as many as the last one that was asked for: bisection only where they are on both sides
            middle = (low + high) // 2 if low >= 0 and high < top else min(max(self._near, low + 1), high - 1)
            low, high = (middle, high) if self.seconds(p, middle) <= room else (low, middle)
            self._near, step = (low + step if low == middle else high - step), 2 * step
        self._near = low
        return low

    def ranges(self, upper: float) -> tuple[list[int], list[int]] | None:
        """(fewest, most) layers of each stage in any split that takes at most `upper` seconds; None where there is none."""
        if upper not in self._ranges:
            self._ranges[upper] = self._narrowed(upper)
        return self._ranges[upper]

    def _narrowed(self, upper: float) -> tuple[list[int], list[int]] | None:
        pp, vpp, layers = self.pp, self.vpp, self.layers
        most = [layers] * pp
        for _ in range(PASSES if upper < INFINITE else 1):
            before = sum(most)
            behind = 0  # what the stages from p on can hold
            for p in range(pp - 1, -1, -1):
                ahead = max(0, layers - behind - most[p] - vpp + 1) / vpp if p else 0.0  # of the first chunks (spread)
                spent = self.down[p] + ahead * self.layer_s + self.once
                most[p] = min(most[p], self.most(p, (upper - spent) / self.m))
                if most[p] < self.fewest[p]:
                    return None
                behind += most[p]
            if behind < layers:
                return None
            if behind == before:
                break
        spare = sum(most) - layers
        return [max(fewest, many - spare) for fewest, many in zip(self.fewest, most, strict=True)], most

    def least(self, low: float, high: float, enough: float = INFINITE) -> float:
        """Seconds between `low` and `high` that no split undercuts; `high` where none is as fast. Beyond `enough` it need not be close."""
        if self.ranges(high) is None:
            return high
        if low < enough < high:
            if self.ranges(enough) is None:
                return enough
            high = enough
        while high - low > CLOSE * high:
            middle = (low + high) / 2
            low, high = (middle, high) if self.ranges(middle) is None else (low, middle)
        return low
