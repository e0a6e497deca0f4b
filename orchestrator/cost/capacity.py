"""How many layers a stage can hold and work through in a given time: what narrows the splits before any stage is priced.

A stage with n layers keeps at least what n of its cheapest layers do (`StageMemory`); what is above the limit must be recomputed, in the
mode that does it fastest. Both only grow with n, so that the most layers for a time are found by bisection. Stage i can't end before a
micro-batch has come down to it and gone back up: the stages before it hold at least what those behind can't, and that shortens its time in
turn (`Capacity.ranges`). Where a stage may hold several kinds of layers each number is the least that so many of them can have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, repeat
from math import ceil
from typing import NamedTuple

from orchestrator.cost.memory import StageMemory
from orchestrator.cost.price import CostModel, LayerCost
from orchestrator.cost.schedule.names import of_chunks
from orchestrator.model.spec import ModelSpec
from orchestrator.strategy.megatron_layout import has_uneven_ends
from orchestrator.strategy.spec import Candidate, Recompute

ROUNDING = 1e-9
"""Relative slack of every comparison: the same terms, added in another order."""
PASSES = 3
"""Times that the ranges are narrowed by each other; further ones change little."""
CLOSE = 0.004
"""Relative distance from the exact answer at which narrowing `least` stops."""
LONGEST = 1e300
"""Seconds that no micro-batch takes."""
INFINITE = float("inf")


class _Relief(NamedTuple):
    """A recompute mode other than none: bytes that it saves a layer at most, and the seconds that costs. `by_layer`: for any number of
    layers."""

    nbytes: float
    seconds: float
    by_layer: bool


class _Held(NamedTuple):
    """What layers take at least: seconds of a micro-batch, bytes, parameters."""

    seconds: float
    static: float
    in_backward: float
    in_step: float
    parameters: float
    saved: float


class Layers:
    """Layers of some kinds, no more of a kind than the model has: each in the fastest of some modes, and as if none were recomputed in
    bytes."""

    def __init__(
        self, here: CostModel, candidate: Candidate, kinds: Sequence[str], modes: Sequence[Recompute], partial: Sequence[Recompute]
    ) -> None:
        plain = [here.layer(candidate, kind, "none") for kind in kinds]
        others = [[here.layer(candidate, kind, mode) for mode in modes] for kind in kinds]
        fastest = [min([cost.seconds for cost in by_mode]) for by_mode in others]
        self.forward = min([cost.transient_forward_bytes for by_mode in others for cost in by_mode])
        self.backward = min([cost.transient_backward_bytes for by_mode in others for cost in by_mode])
        self.reliefs: list[_Relief] = []
        for i, mode in enumerate(modes):
            less = max([cost.saved_bytes - by_mode[i].saved_bytes for cost, by_mode in zip(plain, others, strict=True)])
            more = min([by_mode[i].seconds - least for by_mode, least in zip(others, fastest, strict=True)])
            if less > 0.0:
                self.reliefs.append(_Relief(less, more, mode in partial))
        each = [
            _Held(seconds, cost.static_bytes, cost.backward_bytes, cost.step_bytes, cost.parameters, cost.saved_bytes)
            for cost, seconds in zip(plain, fastest, strict=True)
        ]
        counts = [here.workload.counts[kind] for kind in kinds]
        self.lines: list[tuple[float, float, float]] = []
        """For each number of `_Held`: the least that a kind of layer has, the most, and how much all layers together have less than the
        most each."""
        for values in zip(*each, strict=True):
            most = max(values)
            self.lines.append((min(values), most, sum([n * (most - value) for n, value in zip(counts, values, strict=True)])))
        self._alike = [least for least, most, _ in self.lines if least == most]
        """What a layer takes, where all layers take the same; else fewer numbers than `_Held` has."""
        self._known: dict[tuple[int, int], _Held] = {}

    def of(self, n: int, vpp: int) -> _Held:
        """What n of them take; they save what those of the smallest chunk of so many do, in each chunk."""
        found = self._known.get((n, vpp))
        if found is None:
            chunk = n // vpp
            if len(self._alike) == len(self.lines):
                found = self._known[n, vpp] = _Held._make([*[n * each for each in self._alike[:-1]], chunk * self._alike[-1]])
                return found
            *others, (least, most, lack) = self.lines
            saved = max(chunk * least, chunk * most - lack)
            found = self._known[n, vpp] = _Held._make([*(max(n * low, n * high - less) for low, high, less in others), saved])
        return found


NOTHING = LayerCost(**{name: 0 for name in LayerCost.__struct_fields__ if name != "by_cause"}, by_cause={})


def kinds_by_stage(model: ModelSpec, pp: int, vpp: int = 1) -> list[tuple[str, ...]]:
    """The kinds of transformer layers that each of so many stages may hold, were they split anywhere: at least one layer in each (in its
    first chunk), but for the first and the last."""
    runs, layers, found = model.runs[1:-1], sum(run.count for run in model.runs[1:-1]), []
    for p in range(pp):
        low, high = max(0, p - 1), layers - (max(0, pp - 2 - p) if vpp == 1 else 0)
        begin, kinds = 0, []
        for run in runs:
            if begin < high and begin + run.count > low:
                kinds.append(run.layer.kind)
            begin += run.count
        found.append(tuple(dict.fromkeys(kinds)))
    return found


class _Stages:
    """What the pipelines of candidates that differ in virtual stages have in common, by stage."""

    def __init__(self, costs: CostModel, candidate: Candidate, modes: Sequence[Recompute], partial: Sequence[Recompute]) -> None:
        pp, runs = candidate.mesh.pp, costs.model.runs
        inside = tuple(dict.fromkeys(run.layer.kind for run in runs[1:-1]))
        prices = [costs.of_stage(candidate, p) for p in range(pp)]
        by_stage = kinds_by_stage(costs.model, pp, candidate.vpp) if len(inside) > 1 else [inside] * pp
        known: dict[tuple[int, tuple[str, ...]], Layers] = {}
        self.kinds = []
        for here, kinds in zip(prices, by_stage, strict=True):
            key = id(here), kinds or inside
            if key not in known:
                known[key] = Layers(here, candidate, key[1], modes, partial)
            self.kinds.append(known[key])
        fastest = {kind: min([costs.layer(candidate, kind, mode).seconds for mode in modes]) for kind in inside}
        each = chain.from_iterable(repeat(fastest[run.layer.kind], run.count) for run in runs[1:-1])
        self.before = [0.0, *accumulate(each)]
        """Seconds of a micro-batch in the model's first so many layers."""
        first, last = (here.layer(candidate, runs[i].layer.kind, "none") for i, here in ((0, prices[0]), (-1, prices[-1])))
        self.ends = [first, *[NOTHING] * (pp - 2), last]
        """Prices of the embedding in the first stage, of the head in the last, of nothing in the others."""
        self.overheads = [here.calibration.microbatch_overhead_s for here in prices]
        self.ends_s = [end.seconds for end in self.ends]
        hops = costs.hop_seconds(candidate)
        self.down = [0.0] * pp
        """Seconds until stage p begins and after it has ended, for the stages before without their layers."""
        for p in range(1, pp):
            self.down[p] = self.down[p - 1] + self.overheads[p - 1] + 2 * hops[p - 1] + (first.seconds if p == 1 else 0.0)
        self.once = costs.once_seconds(candidate) + costs.added(candidate).optimizer_s / pp
        """Seconds of a step beside its schedule: the slowest update is at least the mean."""
        self.fewest = [0 if p in (0, pp - 1) else 1 for p in range(pp)]


class Capacity:
    """How many layers each stage of a pipeline can hold and compute in a given time, for one outer choice. `partial`: modes that a stage
    may have on some of its layers alone; `usable`, `memories`: bytes and memory of each stage. Stages on several types of GPU have each
    their own."""

    def __init__(
        self,
        costs: CostModel,
        candidate: Candidate,
        modes: Sequence[Recompute],
        partial: Sequence[Recompute],
        layers: int,
        usable: Sequence[float],
        memories: Mapping[int, StageMemory] | Sequence[StageMemory],
    ) -> None:
        self.pp, self.vpp, self.m, self.layers = candidate.mesh.pp, candidate.vpp, candidate.num_microbatches, layers
        self.usable = [room * (1 + ROUNDING) for room in usable]
        self.memories = memories
        shared, what = costs.kept(candidate), (tuple(modes), tuple(partial), self.vpp > 1)
        alike: _Stages = shared.get(what) or shared.setdefault(what, _Stages(costs, candidate, modes, partial))
        self.kinds, self.ends, self.before, self.down, self.once = alike.kinds, alike.ends, alike.before, alike.down, alike.once
        self.fewest = alike.fewest
        self.empty_s = [self.vpp * overhead + end_s for overhead, end_s in zip(alike.overheads, alike.ends_s, strict=True)]
        """Seconds of a micro-batch in each stage, but for its layers."""
        self._uneven = self.pp - 1 if self.vpp > 1 and has_uneven_ends(costs.model) else -1
        """The stage whose chunks may differ by more than a layer, so that one of them may have a layer recomputed and others none."""
        self._known: list[dict[int, float]] = [{} for _ in range(self.pp)]
        self._fits = [-1] * self.pp
        """Layers that are known to fit each stage as they are."""
        self._ranges: dict[float, tuple[list[int], list[int]] | None] = {}
        self._near = layers // self.pp
        self.blocked = [0.0] * self.pp
        """Seconds of a step for which transfers block stage p, but for those of a micro-batch's way down and up again."""
        if self.vpp == 1:
            kind, hops = of_chunks(costs.schedule(candidate), 1), costs.hop_seconds(candidate)
            for p in range(self.pp):
                up, down = kind.transfers(self.pp, p, self.m)
                self.blocked[p] = max(0, up - 2) * hops[p - 1] + down * hops[p]

    def peak(self, p: int, n: int) -> float:
        """Bytes of stage p with n layers that are not recomputed, at least."""
        memory, end, layers = self.memories[p], self.ends[p], self.kinds[p]
        held = layers.of(n, self.vpp)
        forward, backward = (layers.forward, layers.backward) if n else (0.0, 0.0)
        kept = memory.even_activations(held.saved, end.saved_bytes, first=p == 0)
        stiff = memory.stiff_bytes(end.static_bytes + held.static, end.parameters + held.parameters)
        forward, backward = max(end.transient_forward_bytes, forward), max(end.transient_backward_bytes, backward)
        return memory.peak_of(stiff, kept, forward, backward, end.backward_bytes + held.in_backward, end.step_bytes + held.in_step)

    def seconds(self, p: int, n: int) -> float:
        """Seconds that a micro-batch takes at least in stage p with n layers; infinite where they don't fit."""
        if n <= self._fits[p]:
            return self.empty_s[p] + self.kinds[p].of(n, self.vpp).seconds
        found = self._known[p].get(n)
        if found is None:
            found = self._known[p][n] = self._seconds(p, n)
        return found

    def _seconds(self, p: int, n: int) -> float:
        layers, memory = self.kinds[p], self.memories[p]
        plain, over = self.empty_s[p] + layers.of(n, self.vpp).seconds, self.peak(p, n) - self.usable[p]
        if over <= 0.0:
            self._fits[p] = n
            return plain
        best, held = INFINITE, (1 + memory.slack) * memory.flight
        for relief in layers.reliefs:
            if over > held * (n // self.vpp) * relief.nbytes:
                continue
            again: float = n
            if relief.by_layer:
                again = over / (held * relief.nbytes)
                again = self.vpp * (again if p == self._uneven else ceil(again - ROUNDING))
            best = min(best, again * relief.seconds)
        return plain + best

    def most(self, p: int, seconds: float, high: int | None = None) -> int:
        """The most layers that stage p works through in `seconds` a micro-batch; -1: not even without any. `high`: that are no fewer."""
        room = seconds * (1 + ROUNDING)
        if self.empty_s[p] > room:
            return -1
        high, (_, layer_s, lack) = self.layers if high is None else high, self.kinds[p].lines[0]
        if layer_s > 0.0 and room < INFINITE:
            high = min(high, int((room - self.empty_s[p] + lack) / layer_s * (1 + ROUNDING)))
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
            wider = [(known, found[1]) for known, found in self._ranges.items() if known > upper and found is not None]
            most = min(wider)[1] if wider else [self.layers] * self.pp
            self._ranges[upper] = self._narrowed(upper, [*most])
        return self._ranges[upper]

    def _narrowed(self, upper: float, most: list[int]) -> tuple[list[int], list[int]] | None:
        """The fewest and the most layers of each stage in splits of `upper` seconds at most; None: there is no such split. `most`: layers
        of each stage that more time does not exceed."""
        pp, vpp, layers = self.pp, self.vpp, self.layers
        for _ in range(PASSES if upper < INFINITE else 1):
            before = could = sum(most)
            behind = 0  # what the stages from p on can hold
            for p in range(pp - 1, -1, -1):
                ahead = max(0, layers - behind - most[p] - vpp + 1) if p else 0
                spent = self.down[p] + self.before[-(-ahead // vpp)] + self.blocked[p] + self.once  # in their first chunks (spread)
                many = self.most(p, (upper - spent) / self.m, most[p])
                could -= most[p] - many  # what all can hold, as far as is known
                if many < self.fewest[p] or could < layers:
                    return None
                most[p] = many
                behind += many
            if behind == before:
                break
        spare = sum(most) - layers
        return [max(fewest, many - spare) for fewest, many in zip(self.fewest, most, strict=True)], most

    def least(self, low: float, high: float) -> float:
        """Seconds between `low` and `high` that no split undercuts, of which some is as fast as `high`."""
        while high - low > CLOSE * high:
            middle = (low + high) / 2
            low, high = (middle, high) if self.ranges(middle) is None else (low, middle)
        return low
