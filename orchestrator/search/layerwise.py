"""The layer-wise search: every layer its own tp, data parallelism or ZeRO-3, and recompute; pipeline outermost.

Inside a stage the time is linear in how many layers are computed which way, but for what redistribution costs where neighbours differ in
tp, and for the gradient reduction that hides behind one backward pass: step = m (forward + backward) + optimizer + the larger of two
linear functions (all hidden, and as much hidden as fits). Memory is a sum and one maximum (the transient part), which is fixed in turn to
each value it can have. What is left is exact by dynamic programming over runs of identical layers, block by block (a way, a count), on
Pareto fronts of (bytes, the two linear times). Blocks are pruned by the Lagrangian bound: the shortest path with a price on bytes, which
no split of the layers undercuts (Handler and Zang, "A dual algorithm for the constrained shortest path problem", Networks 1980).

Stages: each stage's ways are solved for its own m (forward + backward) + exposed + optimizer; splits over the stages are then bounded as in
search/inner.py and simulated. So the result is exact for pp=1 while fronts stay below `MOST_POINTS`; for pp>1 it is the best of plans whose
stages are each the fastest for their layers and begin within `NEAR` layers of the split that is even by work.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple, Protocol

from orchestrator.cost.price import CostModel
from orchestrator.cost.profile import LayerProfile, Profile
from orchestrator.cost.schedule import finish_times, in_flight
from orchestrator.errors import NoPlanError
from orchestrator.hardware.collectives import COLLECTIVES
from orchestrator.search.floors import filled
from orchestrator.strategy.layerwise import ENDS, NAME, ChosenRun, LayerChoice, LayerwisePlan, LayerwiseStage
from orchestrator.strategy.pins import MemoryLimit
from orchestrator.strategy.spec import Candidate, Mesh, Strategy
from orchestrator.strategy.tree import divisors
from orchestrator.units import format_bytes

INFINITE = float("inf")
ROUNDING = 1e-9
"""Relative slack of a bound against a sum of the same terms in another order."""
GAPS = (0.0003, 0.001, 0.003, 0.01, 0.05)
"""How far above the Lagrangian bound a solution is looked for, one after the other: fronts grow with the gap."""
BISECTIONS = 14
NEAR = 1
"""Layers by which a stage may begin before or after the split that is even by work."""
MOST_POINTS = 60
"""Of a front, in all: of more, those with the least bounds are kept, and the result is no longer exact (`LayerwiseResult.exact`)."""
MOST_SIMULATED = 200
"""Splits simulated for one (pp, micro-batches)."""


class Way(NamedTuple):
    """A layer of a kind under a choice: seconds and bytes of a rank, per micro-batch or (sync, optimizer, static) once."""

    choice: LayerChoice
    forward_s: float
    backward_s: float
    sync_s: float
    optimizer_s: float
    static_bytes: float
    saved_bytes: float
    transient_bytes: float


class Outer(NamedTuple):
    """What all layers share: stages, micro-batches, samples of one micro-batch (of all the stage's ranks), and the size of embedding and
    head (None: the model has none that is searched)."""

    pp: int
    num_microbatches: int
    samples: int
    ends: LayerChoice | None


class Prices(Protocol):
    """Where seconds and bytes come from: the analytic model, or a measured profile."""

    world: int
    runs: tuple[tuple[str, int], ...]
    """(kind, layers in a row), embedding and head included where they are searched."""
    slack: float
    hidden_share: float
    """Of a backward pass, beside which gradients can be reduced."""
    slowdown: float
    sequence_parallel: bool

    def ways(self, kind: str, outer: Outer) -> list[Way]: ...
    def switch(self, kind: str, before: int, after: int, outer: Outer) -> tuple[float, float]: ...
    def fixed_bytes(self, outer: Outer, stage: int, flight: int) -> float: ...
    def hop_s(self, outer: Outer) -> float: ...
    def overheads_s(self) -> tuple[float, float]: ...
    def end_choices(self, outer: Outer) -> list[LayerChoice | None]: ...


def choices(group: int) -> list[LayerChoice]:
    """The leaves below a stage of `group` ranks; ZeRO-3 needs more than one rank to divide among."""
    found = []
    for tp in divisors(group):
        for zero3 in (False, True) if tp < group else (False,):
            found += [LayerChoice(tp=tp, zero3=zero3, recompute=recompute) for recompute in (False, True)]
    return found


class AnalyticPrices:
    """By the cost model, with Megatron's sequence parallelism wherever tp > 1: layers hand over tokens that are divided over all ranks."""

    def __init__(self, costs: CostModel) -> None:
        self.costs = costs
        self.world = costs.cluster.num_gpus
        self.runs = tuple((run.layer.kind, run.count) for run in costs.model.runs)
        c = costs.calibration
        self.slack, self.hidden_share, self.slowdown = 1 + c.allocator_slack, c.overlap_efficiency, c.overlap_slowdown
        self.sequence_parallel = True
        self._ways: dict[tuple[str, Outer], list[Way]] = {}

    def _candidate(self, choice: LayerChoice, outer: Outer) -> Candidate:
        mesh = Mesh(tp=choice.tp, dp=self.world // outer.pp // choice.tp, pp=outer.pp)
        strategy = Strategy(
            mesh=mesh,
            zero_stage=3 if choice.zero3 else 0,
            sequence_parallel=choice.tp > 1,
            recompute="full" if choice.recompute else "none",
            grad_reduce_dtype=self.costs.training.grad_reduce_dtype,
        )
        return Candidate(
            engine=NAME, strategy=strategy, micro_batch_size=outer.samples // mesh.dp, num_microbatches=outer.num_microbatches
        )

    def _legal(self, choice: LayerChoice, outer: Outer) -> bool:
        model = self.costs.model
        heads, groups = model.architecture.num_attention_heads, model.architecture.query_groups
        tp, group = choice.tp, self.world // outer.pp
        lengths = (model.seq_length, model.decoder_seq_length or model.seq_length)
        divides = heads % tp == 0 and groups % tp == 0 and model.architecture.ffn_hidden_size % tp == 0
        return group % tp == 0 and outer.samples % (group // tp) == 0 and divides and all(length % tp == 0 for length in lengths)

    def ways(self, kind: str, outer: Outer) -> list[Way]:
        """Legal ones."""
        key = (kind, outer if kind in ENDS else outer._replace(ends=None))
        if key not in self._ways:
            self._ways[key] = self._make_ways(kind, outer)
        return self._ways[key]

    def _make_ways(self, kind: str, outer: Outer) -> list[Way]:
        group = self.world // outer.pp
        found = []
        wanted = [outer.ends] if kind in ENDS else choices(group)
        for choice in wanted:
            if choice is None or not self._legal(choice, outer):
                continue
            cost = self.costs.layer(self._candidate(choice, outer), kind, "full" if choice.recompute else "none")
            found.append(
                Way(
                    *(choice, cost.forward_s, cost.backward_s, cost.sync_s, cost.optimizer_s, cost.static_bytes, cost.saved_bytes),
                    max(cost.transient_forward_bytes, cost.transient_backward_bytes + cost.backward_bytes),
                )
            )
        return found

    def switch(self, kind: str, before: int, after: int, outer: Outer) -> tuple[float, float]:
        """(forward, backward): every rank has its part of the tokens, and changes it for another within the larger group."""
        if before == after:
            return 0.0, 0.0
        elements = self.costs._kinds[kind].input_elements if kind != "embedding" else 0
        nbytes = elements * self.costs._itemsize * outer.samples * outer.pp / self.world
        size = max(before, after)
        seconds = COLLECTIVES["all_to_all"](nbytes, size, self.costs._link(size, 1)) + self.costs.calibration.collective_overhead_s
        return seconds, seconds

    def fixed_bytes(self, outer: Outer, stage: int, flight: int) -> float:
        """Context and communicators, as if all sizes were used."""
        group = self.world // outer.pp
        tp = max((d for d in divisors(group) if d < group), default=1)
        return sum(self.costs._fixed_bytes(self._candidate(LayerChoice(tp=tp), outer)).values())

    def hop_s(self, outer: Outer) -> float:
        """A transfer to the next stage."""
        candidate = self._candidate(LayerChoice(tp=self.world // outer.pp), outer)
        return max(self.costs._boundary_seconds(candidate)[:-1]) if outer.pp > 1 else 0.0

    def overheads_s(self) -> tuple[float, float]:
        """(each micro-batch and stage, each step)."""
        return self.costs.calibration.microbatch_overhead_s, self.costs.calibration.step_overhead_s

    def end_choices(self, outer: Outer) -> list[LayerChoice | None]:
        """Embedding and head have one size."""
        return [c for c in choices(self.world // outer.pp) if not c.recompute and self._legal(c, outer)]


class ProfilePrices:
    """Measured layers; traffic by the cluster's links. Without sequence parallelism, as the profiles were taken."""

    def __init__(self, profile: Profile, costs: CostModel) -> None:
        self.profile, self.costs = profile, costs
        self.world = costs.cluster.num_gpus
        self.runs = tuple((layer.kind, layer.count) for layer in profile.layers)
        self._layers: dict[str, LayerProfile] = {layer.kind: layer for layer in profile.layers}
        c = costs.calibration
        self.slack, self.hidden_share, self.slowdown = 1.0, c.overlap_efficiency, c.overlap_slowdown
        self.sequence_parallel = False

    def ways(self, kind: str, outer: Outer) -> list[Way]:
        """Those whose degree was measured."""
        layer, profile, group = self._layers[kind], self.profile, self.world // outer.pp
        found = []
        for choice in choices(group):
            tp, dp = choice.tp, group // choice.tp
            if outer.samples % dp or tp not in layer.saved_bytes:
                continue
            local = outer.samples // dp
            link = self.costs._link(tp, 1)
            reduce = profile.reductions * COLLECTIVES["all_reduce"](layer.output_bytes * local, tp, link) if tp > 1 else 0.0
            compute = layer.forward(tp) * local
            forward, backward = compute + reduce, profile.backward_of_forward * compute + reduce
            saved = layer.saved_bytes[tp] * local
            transient = 0.0
            if choice.recompute:
                backward += forward
                transient, saved = saved, min(saved, layer.output_bytes * local)
            weights = layer.parameter_bytes / tp
            static, sync = weights * profile.states_per_weight, 0.0
            apart = self.costs._link(dp, tp)
            if choice.zero3:
                forward += COLLECTIVES["all_gather"](weights, dp, apart)
                backward += COLLECTIVES["all_gather"](weights, dp, apart) + COLLECTIVES["reduce_scatter"](weights, dp, apart)
                static /= dp
                transient += weights
            elif dp > 1:
                sync = COLLECTIVES["all_reduce"](weights, dp, apart)
            found.append(Way(choice, forward, backward, sync, 0.0, static, saved, transient))
        return found

    def switch(self, kind: str, before: int, after: int, outer: Outer) -> tuple[float, float]:
        """(forward, backward): a larger tp has more samples on each rank, which are gathered on the way in, a smaller one's gradients on
        the way back; the other way is a slice."""
        if before == after:
            return 0.0, 0.0
        large, small = max(before, after), min(before, after)
        nbytes = self._layers[kind].output_bytes * outer.samples * outer.pp / self.world * large
        seconds = COLLECTIVES["all_gather"](nbytes, large // small, self.costs._link(large // small, small))
        return (seconds, 0.0) if after > before else (0.0, seconds)

    def fixed_bytes(self, outer: Outer, stage: int, flight: int) -> float:
        """Embedding and head: half each with a pipeline. Their activations are of one rank's samples, as are those of the layers."""
        at_ends = (stage == 0) + (stage == outer.pp - 1)
        local = outer.samples * outer.pp / self.world
        return (self.profile.other_state_bytes + self.profile.other_saved_bytes * local * flight) * at_ends / 2

    def hop_s(self, outer: Outer) -> float:
        """A transfer to the next stage: the widest output, the samples divided over the stage's ranks."""
        if outer.pp == 1:
            return 0.0
        group = self.world // outer.pp
        nbytes = max(layer.output_bytes for layer in self.profile.layers) * outer.samples / group
        return COLLECTIVES["p2p"](nbytes, 2, self.costs._pair_link(0, group, group))

    def overheads_s(self) -> tuple[float, float]:
        """A profile of layers has none."""
        return 0.0, 0.0

    def end_choices(self, outer: Outer) -> list[LayerChoice | None]:
        """They are not searched."""
        return [None]


# ------------------------------------------------------------------------------------------------------------- a stage

Blocks = tuple["Blocks", int, Way, int] | None
"""The way here: (what came before, run, way, layers)."""


class _Priced(NamedTuple):
    """A way with what it adds to the stage: bytes; seconds if all of the reduction is hidden, and if as much as fits one backward pass."""

    way: Way
    nbytes: float
    times: tuple[float, float]


class _Run(NamedTuple):
    """`ways` by tp."""

    layers: int
    ways: dict[int, list[_Priced]]
    switch: dict[tuple[int, int], tuple[float, float]]
    """Times of a change of tp inside the run or into it."""


class StageSolver:
    """The fastest ways for one stage's layers: least m (forward + backward) + optimizer + exposed within the bytes."""

    def __init__(self, prices: Prices, outer: Outer, runs: Sequence[tuple[str, int]], flight: int, room: float) -> None:
        self.prices, self.outer, self.flight, self.room = prices, outer, flight, room
        self.kinds = [kind for kind, _ in runs]
        self.counts = [count for _, count in runs]
        self.ways = [prices.ways(kind, outer) for kind in self.kinds]
        self.m = outer.num_microbatches
        self.exact = True

    def times(self, way: Way) -> tuple[float, float]:
        """The two linear times of a layer."""
        base = self.m * (way.forward_s + way.backward_s) + way.optimizer_s
        slow, share = self.prices.slowdown, self.prices.hidden_share
        return base + slow * way.sync_s, base + way.sync_s - (1 - slow) * share * way.backward_s

    def nbytes(self, way: Way) -> float:
        """What a layer adds to the stage's bytes."""
        return way.static_bytes + self.prices.slack * self.flight * way.saved_bytes

    def solve(self, upper: float = INFINITE) -> tuple[float, list[tuple[int, Way, int]]] | None:
        """(seconds, blocks as (run, way, layers)) below `upper`; None where nothing that fast fits."""
        if not all(self.ways):
            return None
        best: tuple[float, list[tuple[int, Way, int]]] | None = None
        for limit in sorted({way.transient_bytes for ways in self.ways for way in ways}, reverse=True):
            runs = self._runs(limit)
            if runs is None:
                break
            front = _Front(runs, self.room - self.prices.slack * limit)
            found = front.solve(best[0] if best else upper)
            self.exact = self.exact and front.exact
            if found is not None:
                best = found
        return best

    def _runs(self, limit: float) -> list[_Run] | None:
        runs: list[_Run] = []
        slow, share = self.prices.slowdown, self.prices.hidden_share
        for index, ways in enumerate(self.ways):
            by_tp: dict[int, list[_Priced]] = {}
            for way in ways:
                if way.transient_bytes <= limit:
                    by_tp.setdefault(way.choice.tp, []).append(_Priced(way, self.nbytes(way), self.times(way)))
            if not by_tp:
                return None
            for tp, group in by_tp.items():  # of equal tp, so that neighbours don't matter
                by_tp[tp] = [w for i, w in enumerate(group) if not any(_covers(v, w, j < i) for j, v in enumerate(group) if j != i)]
            before = {*by_tp} | ({*runs[-1].ways} if runs else set())
            switch = {}
            for a in before:
                for b in by_tp:
                    f, back = self.prices.switch(self.kinds[index], a, b, self.outer)
                    time = self.m * (f + back)
                    switch[a, b] = (time, time - (1 - slow) * share * back)
            runs.append(_Run(self.counts[index], by_tp, switch))
        return runs


def _covers(a: _Priced, b: _Priced, earlier: bool) -> bool:
    """Whether `b` is not needed beside `a`."""
    better = a.nbytes <= b.nbytes and a.times[0] <= b.times[0] and a.times[1] <= b.times[1]
    return better and (a[1:] != b[1:] or earlier)


_Sum = tuple[float, float, float, float]
"""Of a path: time + price x bytes, bytes, and the two times."""
NOTHING: _Sum = (0.0, 0.0, 0.0, 0.0)
SAME = 1e-15


def _plus(a: _Sum, b: _Sum, times: int = 1) -> _Sum:
    return a[0] + times * b[0], a[1] + times * b[1], a[2] + times * b[2], a[3] + times * b[3]


def _cheapest(before: int, run: _Run, steps: list[tuple[int, _Sum]], rest: dict[int, _Sum], which: int) -> _Sum:
    """One more layer in front of `rest`, behind a layer of tp `before` (0: none)."""
    best: _Sum | None = None
    for tp, each in steps:
        s0, s1 = run.switch[before, tp] if before else (0.0, 0.0)
        then = rest[tp]
        total = then[0] + each[0] + (s1 if which else s0)
        if best is None or total < best[0]:
            best = (total, then[1] + each[1], then[2] + each[2] + s0, then[3] + each[3] + s1)
    assert best is not None
    return best


class _Front:
    """Least max(time 0, time 1) over sequences of ways whose bytes are within `cap`."""

    def __init__(self, runs: list[_Run], cap: float) -> None:
        self.runs, self.cap = runs, cap
        self.exact = True

    def solve(self, upper: float) -> tuple[float, list[tuple[int, Way, int]]] | None:
        """The best strictly below `upper`; None where there is none."""
        least = [min(priced.nbytes for ways in run.ways.values() for priced in ways) for run in self.runs]
        self.leanest = [0.0] * (len(self.runs) + 1)
        for r in range(len(self.runs) - 1, -1, -1):
            self.leanest[r] = self.leanest[r + 1] + least[r] * self.runs[r].layers
        self.least = least
        if self.leanest[0] > self.cap:
            return None
        bounds = []
        near = upper
        for which in (0, 1):
            dual = self._dual(which, near)
            if dual is None:
                return None
            bounds.append((dual[0], dual[1], which))
            near = min(near, dual[2] * (1 + 4 * ROUNDING))  # wide enough that the path itself is found
        lower, self.price, self.which = max(bounds)
        self.togo = self._suffix(self.price, self.which)
        for gap in GAPS:
            if lower * (1 + gap) >= near:
                break
            found = self._search(lower * (1 + gap))
            if found is not None:
                return found
        return self._search(near)

    def _suffix(self, price: float, which: int) -> list[list[dict[int, float]]]:
        """For each run and number of its layers left: by the tp of the layer before, the least time + price x bytes of all that follows."""
        following: dict[int, float] = {}
        table: list[list[dict[int, float]]] = []
        for r in range(len(self.runs) - 1, -1, -1):
            run = self.runs[r]
            cost = {tp: min(w.times[which] + price * w.nbytes for w in ways) for tp, ways in run.ways.items()}
            here = {tp: following[tp] for tp in run.ways} if following else dict.fromkeys(run.ways, 0.0)
            rows = [here]
            for _ in range(1, run.layers):
                here = {a: min([run.switch[a, b][which] + cost[b] + here[b] for b in run.ways]) for a in run.ways}
                rows.append(here)
            if r:
                following = {a: min([run.switch[a, b][which] + cost[b] + here[b] for b in run.ways]) for a in self.runs[r - 1].ways}
            table.append(rows)
        return table[::-1]

    def _path(self, price: float, which: int) -> tuple[float, float, float]:
        """(least time + price x bytes of all paths, its bytes, its true time)."""
        following: dict[int, _Sum] = {}
        for r in range(len(self.runs) - 1, -1, -1):
            run = self.runs[r]
            steps: list[tuple[int, _Sum]] = []
            for tp, ways in run.ways.items():
                cheapest = min(ways, key=lambda w: w.times[which] + price * w.nbytes)
                t0, t1 = cheapest.times
                steps.append((tp, (cheapest.times[which] + price * cheapest.nbytes, cheapest.nbytes, t0, t1)))
            here = {tp: following.get(tp, NOTHING) for tp in run.ways}
            for done in range(1, run.layers):
                new = {a: _cheapest(a, run, steps, here, which) for a in run.ways}
                change = [new[a][0] - here[a][0] for a in new]
                here = new
                if max(change) - min(change) <= SAME * abs(change[0]):  # all go on alike: one way for the rest
                    _, each = min(steps, key=lambda step: step[1][0])
                    left = run.layers - done - 1
                    here = {a: _plus(here[a], each, left) for a in here}
                    break
            before = self.runs[r - 1].ways if r else (0,)
            following = {a: _cheapest(a, run, steps, here, which) for a in before}
        total, nbytes, t0, t1 = following[0]
        return total, nbytes, max(t0, t1)

    def _dual(self, which: int, upper: float) -> tuple[float, float, float] | None:
        """(bound, price of a byte, seconds of the best path met that fits): the largest bound over prices, by bisection. None as soon as
        a bound is not below `upper`."""
        best, at, seen = -INFINITE, 0.0, INFINITE

        def look(price: float) -> bool:
            nonlocal best, at, seen
            total, nbytes, seconds = self._path(price, which)
            bound = total - price * self.cap
            if bound > best:
                best, at = bound, price
            if nbytes <= self.cap:
                seen = min(seen, seconds)
            return nbytes <= self.cap

        if look(0.0):
            return None if best >= upper * (1 - ROUNDING) else (best, at, seen)
        low, high = 0.0, max(best, 1e-12) / max(self.cap, 1.0)
        while not look(high):
            if best >= upper * (1 - ROUNDING):
                return None
            low, high = high, high * 4
            if high > 1e30:
                return None if best >= upper * (1 - ROUNDING) else (best, at, seen)
        for _ in range(BISECTIONS):
            if best >= upper * (1 - ROUNDING):
                return None
            middle = (low + high) / 2
            low, high = (low, middle) if look(middle) else (middle, high)
        return None if best >= upper * (1 - ROUNDING) else (best, at, seen)

    def _search(self, upper: float) -> tuple[float, list[tuple[int, Way, int]]] | None:
        """The best strictly below `upper`, on Pareto fronts by the tp of the last layer."""
        limit = (upper + self.price * self.cap) * (1 + ROUNDING)
        cap = self.cap * (1 + ROUNDING)
        points: dict[int, list[_Point]] = {0: [(0.0, 0.0, 0.0, None)]}
        for r, run in enumerate(self.runs):
            for done in range(1, run.layers + 1):
                rest = run.layers - done
                room = cap - rest * self.least[r] - self.leanest[r + 1]
                togo = self.togo[r][rest]
                ahead: dict[int, list[_Point]] = {}
                for tp, ways in run.ways.items():
                    reach: list[_Point] = []
                    most = limit - togo[tp]
                    for before, front in points.items():
                        s0, s1 = run.switch[before, tp] if before else (0.0, 0.0)
                        for nbytes, t0, t1, blocks in front:
                            for way, each, (each0, each1) in ways:
                                b = nbytes + each
                                a0, a1 = t0 + s0 + each0, t1 + s1 + each1
                                if b <= room and (a1 if self.which else a0) + self.price * b <= most:
                                    if blocks is not None and blocks[2] is way and blocks[1] == r:
                                        reach.append((b, a0, a1, (blocks[0], r, way, blocks[3] + 1)))
                                    else:
                                        reach.append((b, a0, a1, (blocks, r, way, 1)))
                    if reach:
                        kept = _pareto(reach)
                        if len(kept) > MOST_POINTS:
                            self.exact = False
                            kept.sort(key=lambda point: (point[2] if self.which else point[1]) + self.price * point[0])
                            kept = kept[:MOST_POINTS]
                        ahead[tp] = kept
                points = ahead
                if not points:
                    return None
        ends = [(max(t0, t1), blocks) for front in points.values() for b, t0, t1, blocks in front if b <= self.cap]
        seconds, path = min(ends, key=lambda end: end[0], default=(INFINITE, None))
        if seconds >= upper:
            return None
        found = []
        while path is not None:
            path, r, way, count = path
            found.append((r, way, count))
        return seconds, found[::-1]


_Point = tuple[float, float, float, Blocks]
"""Bytes, the two times, the way here."""


def _pareto(front: list[_Point]) -> list[_Point]:
    """Those that no other one beats in all three; asked first: the ones that are fastest so far, which beat most."""
    front.sort(key=lambda p: p[:3])
    kept: list[_Point] = []
    fast0: _Point = (INFINITE, INFINITE, INFINITE, None)
    fast1 = fast0
    for point in front:
        _, t0, t1, _ = point
        beaten = t0 >= fast0[1] and t1 >= fast1[2]
        if beaten and (t1 >= fast0[2] or t0 >= fast1[1] or any(other[1] <= t0 and other[2] <= t1 for other in kept)):
            continue
        kept.append(point)
        if t0 < fast0[1]:
            fast0 = point
        if t1 < fast1[2]:
            fast1 = point
    return kept


def _tidy(blocks: Sequence[tuple[int, Way, int]]) -> list[tuple[int, Way, int]]:
    """Neighbours of one run and tp cost the same in any order: each way once."""
    tidy: list[tuple[int, Way, int]] = []
    for (run, _), members in groupby(blocks, key=lambda block: (block[0], block[1].choice.tp)):
        counts: dict[Way, int] = {}
        for _, way, count in members:
            counts[way] = counts.get(way, 0) + count
        tidy += [(run, way, count) for way, count in counts.items()]
    return tidy


# ------------------------------------------------------------------------------------------------------------ the whole


class _Stage(NamedTuple):
    cost: LayerwiseStage
    work: float


def stage_price(prices: Prices, outer: Outer, stage: int, blocks: Sequence[tuple[str, Way, int]]) -> LayerwiseStage:
    """What the blocks of a stage, in order, cost: (kind, way, layers)."""
    flight = in_flight("1f1b", outer.pp, stage, outer.num_microbatches)
    overhead, _ = prices.overheads_s()
    forward = backward = overhead / 2
    sync = optimizer = static = saved = transient = 0.0
    before: int | None = None
    for kind, way, count in blocks:
        if before is not None:
            f, b = prices.switch(kind, before, way.choice.tp, outer)
            forward, backward = forward + f, backward + b
        before = way.choice.tp
        forward += count * way.forward_s
        backward += count * way.backward_s
        sync += count * way.sync_s
        optimizer += count * way.optimizer_s
        static += count * way.static_bytes
        saved += count * way.saved_bytes
        transient = max(transient, way.transient_bytes)
    hidden = min(sync, prices.hidden_share * backward)
    return LayerwiseStage(
        runs=tuple(ChosenRun(kind=kind, count=count, choice=way.choice) for kind, way, count in blocks),
        forward_s=forward,
        backward_s=backward,
        exposed_s=sync - hidden + prices.slowdown * hidden,
        optimizer_s=optimizer,
        peak_bytes=prices.fixed_bytes(outer, stage, flight) + static + prices.slack * (flight * saved + transient),
    )


def plan_price(prices: Prices, outer: Outer, stages: Sequence[LayerwiseStage]) -> float:
    """Seconds of the step: the simulated schedule, the last exposed reduction, the slowest update."""
    ends = finish_times("1f1b", [s.forward_s for s in stages], [s.backward_s for s in stages], prices.hop_s(outer), outer.num_microbatches)
    finished = max(end + stage.exposed_s for end, stage in zip(ends, stages, strict=True))
    return finished + max(stage.optimizer_s for stage in stages) + prices.overheads_s()[1]


class LayerwiseResult(NamedTuple):
    """`exact`: nothing of the space was left out; with a pipeline, splits and stages are (see above)."""

    plan: LayerwisePlan
    exact: bool
    tried: int
    """(pp, micro-batches, embedding and head) that were solved, of those that are legal."""
    legal: int


class _Splits:
    """The stages of one outer choice."""

    def __init__(self, prices: Prices, outer: Outer, usable: float) -> None:
        self.prices, self.outer, self.usable = prices, outer, usable
        self.solved: dict[tuple[object, ...], tuple[float, _Stage | None]] = {}
        self.inner = [(kind, count) for kind, count in prices.runs if kind not in ENDS]
        self.layers = sum(count for _, count in self.inner)
        self._fastest: dict[str, float] = {}
        self.exact = outer.pp == 1
        self.first = prices.runs[0][0] if prices.runs[0][0] in ENDS else None
        self.last = prices.runs[-1][0] if prices.runs[-1][0] in ENDS else None

    def stage(self, p: int, start: int, end: int, upper: float) -> _Stage | None:
        """The fastest ways for layers [start, end) in stage p, below `upper` seconds; None: there are none."""
        runs: list[tuple[str, int]] = [(self.first, 1)] if p == 0 and self.first else []
        offset = 0
        for kind, count in self.inner:
            low, high = max(start - offset, 0), min(end - offset, count)
            if low < high:
                runs.append((kind, high - low))
            offset += count
        if p == self.outer.pp - 1 and self.last:
            runs.append((self.last, 1))
        flight = in_flight("1f1b", self.outer.pp, p, self.outer.num_microbatches)
        fixed = self.prices.fixed_bytes(self.outer, p, flight)
        key = (tuple(runs), flight, fixed)
        known = self.solved.get(key)
        if known is not None and (known[1] is not None or known[0] >= upper):
            return known[1]
        found: _Stage | None = None
        if runs:
            solver = StageSolver(self.prices, self.outer, runs, flight, self.usable - fixed)
            answer = solver.solve(upper)
            self.exact = self.exact and solver.exact
            if answer is not None:
                blocks = _tidy(answer[1])
                cost = stage_price(self.prices, self.outer, p, [(runs[r][0], way, count) for r, way, count in blocks])
                found = _Stage(cost, cost.forward_s + cost.backward_s)
        self.solved[key] = (upper, found)
        return found

    def best(self, upper: float) -> tuple[float, tuple[LayerwiseStage, ...]] | None:
        """The best split below `upper`."""
        pp, m = self.outer.pp, self.outer.num_microbatches
        once = self.prices.overheads_s()[1]
        if pp == 1:
            found = self.stage(0, 0, self.layers, upper)
            if found is None:
                return None
            seconds = plan_price(self.prices, self.outer, [found.cost])
            return (seconds, (found.cost,)) if seconds < upper else None
        hop = self.prices.hop_s(self.outer)
        even = self._borders()
        best: tuple[float, tuple[LayerwiseStage, ...]] | None = None
        stages = [self.stage(p, even[p], even[p + 1], upper) for p in range(pp)]
        if all(stages):
            costs = tuple(stage.cost for stage in stages if stage is not None)
            seconds = plan_price(self.prices, self.outer, costs)
            if seconds < upper:
                best = (seconds, costs)
                upper = seconds
        togo: list[dict[int, float]] = [{} for _ in range(pp)] + [{self.layers: 0.0}]
        steps: dict[tuple[int, int], list[tuple[int, _Stage]]] = {}
        for p in range(pp - 1, -1, -1):
            starts = [0] if p == 0 else range(max(p, even[p] - NEAR), min(self.layers - (pp - p), even[p] + NEAR) + 1)
            for start in starts:
                for end in togo[p + 1]:
                    if end <= start or (p < pp - 1 and end == self.layers):
                        continue
                    stage = self.stage(p, start, end, upper) if self._may(p, start, end, upper) else None
                    if stage is None or m * stage.work > upper:
                        continue
                    steps.setdefault((p, start), []).append((end, stage))
                    bound = max(m * stage.work, stage.work + (2 * hop if p < pp - 1 else 0.0) + togo[p + 1][end])
                    togo[p][start] = min(togo[p].get(start, INFINITE), bound)
        simulated = 0

        def down(p: int, start: int, lead: float, largest: float, path: list[_Stage]) -> None:
            nonlocal best, upper, simulated
            if p == pp:
                simulated += 1
                costs = tuple(stage.cost for stage in path)
                seconds = plan_price(self.prices, self.outer, costs)
                if seconds < upper:
                    best, upper = (seconds, costs), seconds
                return
            onwards = []
            for end, stage in steps.get((p, start), ()):
                if end in togo[p + 1]:
                    here = max(largest, lead + m * stage.work)
                    below = lead + stage.work + (2 * hop if p < pp - 1 else 0.0)
                    onwards.append((max(here, below + togo[p + 1][end]) + once, end, stage, below, here))
            for bound, end, stage, below, here in sorted(onwards, key=lambda item: item[0]):
                if bound >= upper or simulated >= MOST_SIMULATED:
                    return
                down(p + 1, end, below, here, [*path, stage])

        down(0, 0, 0.0, 0.0, [])
        return best

    def _borders(self) -> list[int]:
        """Where stages begin if each has as much to do, every layer at its fastest."""
        each = [self.fastest(kind) for kind, count in self.inner for _ in range(count)]
        total, done, borders = sum(each), 0.0, [0]
        for index, seconds in enumerate(each):
            done += seconds
            left = self.outer.pp - len(borders)
            if left and (done >= total * len(borders) / self.outer.pp or self.layers - index - 1 == left) and len(borders) < self.outer.pp:
                borders.append(index + 1)
        return [*borders, self.layers]

    def _may(self, p: int, start: int, end: int, upper: float) -> bool:
        """Whether the layers, each at its fastest, are through within `upper`."""
        least = 0.0
        offset = 0
        for kind, count in self.inner:
            low, high = max(start - offset, 0), min(end - offset, count)
            if low < high:
                least += (high - low) * self.fastest(kind)
            offset += count
        return self.outer.num_microbatches * least < upper

    def fastest(self, kind: str) -> float:
        """Seconds of a micro-batch in one layer of this kind; infinite where it has no legal way."""
        if kind not in self._fastest:
            ways = self.prices.ways(kind, self.outer)
            self._fastest[kind] = min((way.forward_s + way.backward_s for way in ways), default=INFINITE)
        return self._fastest[kind]


def layerwise(
    prices: Prices, global_batch_size: int, limit: MemoryLimit, *, num_microbatches: int | None = None, pp: int | None = None
) -> LayerwiseResult:
    """The fastest layer-wise plan. Raises NoPlanError. `num_microbatches`, `pp`: fixed where given."""
    outers: list[tuple[float, int, Outer, _Splits]] = []
    layers = sum(count for kind, count in prices.runs if kind not in ENDS)
    for stages in divisors(prices.world):
        if stages > layers or pp not in (None, stages):
            continue
        for m in divisors(global_batch_size):
            if num_microbatches not in (None, m):
                continue
            for ends in prices.end_choices(Outer(stages, m, global_batch_size // m, None)):
                outer = Outer(stages, m, global_batch_size // m, ends)
                splits = _Splits(prices, outer, limit.usable)
                work = sum(count * splits.fastest(kind) for kind, count in prices.runs) + stages * prices.overheads_s()[0]
                if work < INFINITE:
                    bound = filled(work, stages, m, 1, prices.hop_s(outer)) + prices.overheads_s()[1]
                    outers.append((bound, len(outers), outer, splits))
    best: tuple[float, tuple[LayerwiseStage, ...], Outer] | None = None
    tried = 0
    exact = True
    for bound, _, outer, splits in sorted(outers, key=lambda entry: entry[:2]):
        if best is not None and bound >= best[0]:
            break
        tried += 1
        found = splits.best(best[0] if best else INFINITE)
        exact = exact and splits.exact
        if found is not None:
            best = (*found, outer)
    if best is None:
        raise NoPlanError(f"no layer-wise plan fits in {format_bytes(limit.usable)} ({len(outers)} outer choices)")
    seconds, chosen, outer = best
    plan = LayerwisePlan(
        world_size=prices.world,
        pp=outer.pp,
        global_batch_size=global_batch_size,
        num_microbatches=outer.num_microbatches,
        stages=chosen,
        step_time_s=seconds,
        peak_memory_bytes=max(stage.peak_bytes for stage in chosen),
        sequence_parallel=prices.sequence_parallel,
    )
    return LayerwiseResult(plan, exact, tried, len(outers))
