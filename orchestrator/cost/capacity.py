"""How many layers a stage can hold and work through in a given time: what narrows the splits before any stage is priced.

Closed forms over counts: a stage with n layers keeps at least its static bytes and what its micro-batches in flight save; what is above the
limit must be recomputed, in the mode that does it fastest. Both only grow with n, so that the most layers for a time are found without
pricing a stage. Stage i can't end before a micro-batch has come down to it and gone back up: the stages before it hold at least what those
behind can't, and that shortens its time in turn (`Capacity.ranges`). Of several kinds of layers each number is the least of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from orchestrator.cost.price import CostModel, LayerCost
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


class _Place(NamedTuple):
    """A stage but for its layers: seconds of a micro-batch, bytes that stay and that a pass adds, and micro-batches in flight over all
    its chunks."""

    seconds: float
    nbytes: float
    transient: float
    flight: int


class Capacity:
    """For one outer choice. `partial`: modes that a stage may have on some of its layers alone; `flights`: micro-batches in flight by
    stage, counted in chunks."""

    def __init__(
        self,
        costs: CostModel,
        candidate: Candidate,
        modes: Sequence[Recompute],
        partial: Sequence[Recompute],
        layers: int,
        usable: float,
        flights: Sequence[int],
    ) -> None:
        first, *inside, last = (run.layer.kind for run in costs.model.runs)
        self.pp, self.vpp, self.m, self.layers = candidate.mesh.pp, candidate.vpp, candidate.num_microbatches, layers
        self.usable = usable * (1 + ROUNDING)
        self.slack = 1 + costs.calibration.allocator_slack
        by_kind = [{mode: costs.layer(candidate, kind, mode) for mode in ("none", *modes)} for kind in dict.fromkeys(inside)]
        plain = [by_mode["none"] for by_mode in by_kind]
        every = [by_mode[mode] for by_mode in by_kind for mode in modes]
        self.saved = min(cost.saved_bytes for cost in plain)
        self.static = min(cost.static_bytes for cost in plain)
        self.in_backward = min(cost.backward_bytes for cost in plain)
        self.layer_s = min(_seconds(cost) for cost in every)
        self.reliefs = []
        for mode in modes:
            less = max(by_mode["none"].saved_bytes - by_mode[mode].saved_bytes for by_mode in by_kind)
            more = min(_seconds(by_mode[mode]) for by_mode in by_kind) - self.layer_s
            if less > 0.0:
                self.reliefs.append(_Relief(less, max(0.0, more), mode in partial))
        ends = [costs.layer(candidate, kind, "none") for kind in (first, last)]
        overhead = costs.calibration.microbatch_overhead_s
        self.transient_forward = min(cost.transient_forward_bytes for cost in every)
        self.transient_backward = min(cost.transient_backward_bytes for cost in every)
        stiff = sum(costs.fixed_bytes(candidate).values())
        self.places = []
        for p, flight in enumerate(flights):
            here = [cost for cost, there in zip(ends, (p == 0, p == self.pp - 1), strict=True) if there]
            self.places.append(
                _Place(
                    candidate.vpp * overhead + sum(map(_seconds, here)),
                    stiff + sum(cost.static_bytes for cost in here),
                    max((max(cost.transient_forward_bytes, cost.transient_backward_bytes) for cost in here), default=0.0),
                    flight,
                )
            )
        hops = costs.hop_seconds(candidate)
        self.down = [0.0] * self.pp
        """Seconds until stage p begins and after it has ended, for the stages before without their layers."""
        for p in range(1, self.pp):
            self.down[p] = self.down[p - 1] + overhead + 2 * hops[p - 1] + (_seconds(ends[0]) if p == 1 else 0.0)
        updates = layers * min(cost.optimizer_s for cost in plain) + sum(cost.optimizer_s for cost in ends)
        self.once = costs.once_seconds(candidate) + updates / self.pp
        """Seconds of a step beside its schedule: the slowest update is at least the mean."""
        self.fewest = [0 if p in (0, self.pp - 1) else 1 for p in range(self.pp)]

    def seconds(self, p: int, n: int) -> float:
        """At least this long does a micro-batch take in stage p with n layers; infinite where they don't fit."""
        place = self.places[p]
        alike = n // self.vpp  # layers of the smallest chunk
        held = self.slack * place.flight
        passing = max(place.transient, self.transient_forward, self.transient_backward + n * self.in_backward) if n else place.transient
        over = place.nbytes + n * self.static + held * alike * self.saved + self.slack * passing - self.usable
        plain = place.seconds + n * self.layer_s
        if over <= 0.0:
            return plain
        best = INFINITE
        for relief in self.reliefs:
            if over > held * alike * relief.nbytes:
                continue
            again = self.vpp * ceil(over / (held * relief.nbytes) - ROUNDING) if relief.by_layer else n
            best = min(best, again * relief.seconds)
        return plain + best

    def most(self, p: int, seconds: float) -> int:
        """The most layers that stage p works through in `seconds` a micro-batch; -1: not even without any."""
        room = seconds * (1 + ROUNDING)
        if self.places[p].seconds > room:
            return -1
        high = self.layers
        if self.layer_s > 0.0 and room < INFINITE:
            high = min(high, int((room - self.places[p].seconds) / self.layer_s * (1 + ROUNDING)))
        room = min(room, LONGEST)  # what does not fit takes for ever
        if self.seconds(p, high) <= room:
            return high
        low = -1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.seconds(p, middle) <= room else (low, middle)
        return low

    def ranges(self, upper: float) -> tuple[list[int], list[int]] | None:
        """(fewest, most) layers of each stage in any split that takes at most `upper` seconds; None where there is none."""
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

    def least(self, low: float, high: float) -> float:
        """Seconds between `low` and `high` that no split undercuts; `high` where none is as fast."""
        if self.ranges(high) is None:
            return high
        while high - low > CLOSE * high:
            middle = (low + high) / 2
            low, high = (middle, high) if self.ranges(middle) is None else (low, middle)
        return low


def _seconds(cost: LayerCost) -> float:
    return cost.forward_s + cost.backward_s
