"""Inside an outer choice: which layers go to which stage and which of them are recomputed, at the least simulated step time.

A run of identical layers is one state with a count. With one kind of transformer layer a stage is known by its number of layers, so that
its ways to be computed (`Option`) are made once for each (place, count): of the recompute choices that fit the memory only those that no
other beats in forward, backward, exposed synchronisation and optimizer time.

Bounds. A stage i can't end before a micro-batch has come down to it through the stages before, it has worked m times, and the last
gradient has gone back up: lead(j) summed over j < i, plus m * work(i), and what it waits for the stages behind it (`_Walk._work`,
`_Interleaved`). The least of the largest of these over all ways to complete a partial partition is a scalar dynamic program (`_to_go`),
which then guides a depth-first enumeration: every branch that the bound does not exclude ends in a partition, and every partition is
simulated (interleaved ones unless `interleaved_floor` excludes them). So what is returned is the optimum of the simulated score over

* every contiguous split of the layers over the stages (embedding in the first, head in the last, no other stage empty), and
* every recompute choice of every stage that the engine has (a pinned mode is that of all layers),

for vpp=1; with vpp > 1 over those splits in which a stage's layers are spread over its chunks as evenly as they go (`spread`). The
enumeration stops after `MOST_SIMULATED` partitions and says so: `left` is then the least bound of what it left out. Where that could be
the fastest of all, critical paths sharpen the bound (`solve_further`, cuts.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import le, mul
from typing import NamedTuple

from orchestrator.cost.price import CostModel, StageCost
from orchestrator.cost.schedule import in_flight_by_chunk
from orchestrator.model.spec import ModelSpec
from orchestrator.search.capacity import Capacity
from orchestrator.search.cuts import Path, Times, graph_of, longest, play
from orchestrator.search.interleaved import interleaved_floor
from orchestrator.strategy.capabilities import Capabilities
from orchestrator.strategy.layout import LayerSpan, Stage
from orchestrator.strategy.megatron_layout import chunk_sizes, stages_of, transformer_layers
from orchestrator.strategy.pins import MemoryLimit
from orchestrator.strategy.spec import Candidate, Recompute
from orchestrator.strategy.tree import Leaf

MOST_SIMULATED = 60
"""Partitions simulated for one outer choice. Where stage times are nearly equal, far fewer lie between bound and optimum."""
PASSES_FOR_FLOOR = 5
"""Passes simulated in the time that a virtual stage takes in `interleaved_floor`."""
PASSES_FOR_STEP = 10
"""Passes simulated in the time that one step of a partition, a stage with an option, is bounded."""
LONGEST_CIRCLE = 4
"""Stages between which circles are looked at: of c stages they delay by 2 (c - 1) / c transfers a micro-batch, so that more add little."""
MOST_ROUNDS = 30
"""Of the game that sharpens a bound; it is mostly over after ten."""
NODES_WALKED = 600_000
"""Passes in all rounds together: a quarter of a second."""
ROUNDING = 1e-12
"""Relative slack of a bound against a simulated time: the same terms, added in another order."""
UNDECIDED = 1e-9
"""Share of the limit within which rounding could decide whether a stage fits: only `CostModel.stage` says it there."""
INFINITE = float("inf")


class Solution(NamedTuple):
    """A partition with its score: what `CostModel.price` reports for it."""

    candidate: Candidate
    stages: tuple[Stage, ...]
    step_time_s: float
    peak_memory_bytes: float


class Answer(NamedTuple):
    """The best solution; or the bytes that the leanest one needs where none fits; or the bound that excluded all."""

    solution: Solution | None
    need: float | None
    bound_s: float


class Option(NamedTuple):
    """One way to compute a stage. `work` is a micro-batch's forward and backward over all chunks, `lead` over the first chunk."""

    sizes: tuple[int, ...]
    recompute: tuple[Recompute, int]
    cost: StageCost
    work: float
    lead: float
    exposed: float


Moves = list[dict[int, tuple[tuple[int, list[Option]], ...]]]
"""For each stage: from a state (what the stages before hold) to the states behind the stage, each with the options that lead there."""


def spread(layers: int, vpp: int, stage: int, pp: int) -> tuple[int, ...]:
    """A stage's layers over its chunks, as even as they go. The first stage's first chunk has the embedding and gets no extra layer; in
    the others the last chunk gets none, which has the head in the last stage.

    >>> spread(7, 4, 0, 4), spread(7, 4, 3, 4)
    ((1, 2, 2, 2), (2, 2, 2, 1))
    """
    base, extra = divmod(layers, vpp)
    if stage == 0 and pp > 1:
        return (base,) * (vpp - extra) + (base + 1,) * extra
    return (base + 1,) * extra + (base,) * (vpp - extra)


class _Table:
    """What a stage's bytes are summed from, where all transformer layers are of one kind."""

    def __init__(self, costs: CostModel, model: ModelSpec, candidate: Candidate, modes: Sequence[Recompute]) -> None:
        kind = model.runs[1].layer.kind
        self.modes = {mode: costs.layer(candidate, kind, mode) for mode in ("none", *modes)}
        self.first = costs.layer(candidate, model.runs[0].layer.kind, "none")
        self.last = costs.layer(candidate, model.runs[-1].layer.kind, "none")
        self.fixed = sum(costs.fixed_bytes(candidate).values())
        self.slack = 1 + costs.calibration.allocator_slack
        self._costs, self._candidate = costs, candidate
        self._ends: dict[tuple[int, int], tuple[float, float, float, float, float, float, float]] = {}

    def ends(self, at_ends: int, layers: int) -> tuple[float, float, float, float, float, float, float]:
        """What recompute does not change of a stage with so many layers and (bit 0) the embedding, (bit 1) the head: bytes that stay, are
        added in backward, in the step; transient bytes of embedding and head forward, backward; what they save."""
        found = self._ends.get((at_ends, layers))
        if found is None:
            outer = [cost for bit, cost in ((1, self.first), (2, self.last)) if at_ends & bit]
            plain = self.modes["none"]
            parameters = layers * plain.parameters + sum(cost.parameters for cost in outer)
            static = layers * plain.static_bytes + sum(cost.static_bytes for cost in outer)
            found = self._ends[at_ends, layers] = (
                self.fixed + static + self._costs.bucket_bytes(self._candidate, parameters),
                layers * plain.backward_bytes + sum(cost.backward_bytes for cost in outer),
                layers * plain.step_bytes + sum(cost.step_bytes for cost in outer),
                max((cost.transient_forward_bytes for cost in outer), default=0.0),
                max((cost.transient_backward_bytes for cost in outer), default=0.0),
                self.first.saved_bytes if at_ends & 1 else 0.0,
                self.last.saved_bytes if at_ends & 2 else 0.0,
            )
        return found


def _largest(counts: set[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Those that no other one is at least as large as in everything.

    >>> _largest({(3, 1), (2, 2), (2, 1)})
    ((3, 1), (2, 2))
    """
    kept: list[tuple[int, ...]] = []
    for entry in sorted(counts, reverse=True):
        if not any(all(map(le, entry, other)) for other in kept):
            kept.append(entry)
    return tuple(kept)


class Inner:
    """The inner search of one outer choice."""

    def __init__(
        self, costs: CostModel, model: ModelSpec, capabilities: Capabilities, leaf: Leaf, limit: MemoryLimit, layout: str | None = None
    ) -> None:
        self.costs, self.model, self.capabilities = costs, model, capabilities
        self.candidate, self.modes = leaf
        self.usable = limit.usable
        self.pp, self.vpp = self.candidate.mesh.pp, self.candidate.vpp
        self.layers = transformer_layers(model)
        self.simulated = 0
        self.dismissed = 0
        """Partitions that a bound of their schedule excluded."""
        self.looked = 0
        """Steps of partitions that were bounded."""
        self.sharp = False
        """Whether critical paths are to sharpen the bound of all partitions first."""
        turns = min(self.candidate.num_microbatches, 4 * self.pp)  # by then a schedule has become periodic
        self.passes = 2 * self.pp * self.vpp * turns
        """That simulating a partition takes."""
        self.most_spent = MOST_SIMULATED * self.passes
        self.left = INFINITE
        """Seconds that no partition which was left out undercuts; infinite where none was."""
        self._one_kind = len(model.runs) == 3
        self._by_layer = capabilities.each_layer_recomputes_alone(self.candidate.schedule)
        self._fixed = self._fixed_sizes(layout)
        self._fits: bool | None = None
        self._most_fitting: list[int] | None = None
        self._capacity_of: tuple[tuple[Recompute, ...], Capacity] | None = None
        self._options: dict[tuple[object, ...], list[Option]] = {}
        self._interleaved: dict[int, _Interleaved] = {}
        m = self.candidate.num_microbatches
        self._table = _Table(costs, model, self.candidate, self.modes)
        self._flights = [in_flight_by_chunk(self.candidate.schedule, self.pp, p, m, self.vpp) for p in range(self.pp)]
        # (all chunks, the first, the last) in flight: what counts where the chunks are alike
        self._splits: dict[tuple[int, bool, int], tuple[tuple[int, ...], ...]] = {}
        self._alike: dict[tuple[object, ...], Option] = {}
        self._flights_in_all = [
            _largest({(sum(counts), counts[0] * (p == 0), counts[-1] * (p == self.pp - 1)) for counts in flights})
            for p, flights in enumerate(self._flights)
        ]
        self._boundaries = [costs.boundaries_kept(self.candidate, p, max(map(sum, flights))) for p, flights in enumerate(self._flights)]

    @property
    def spent(self) -> int:
        """What partitions have taken so far, in simulated passes."""
        return self.simulated * self.passes + PASSES_FOR_FLOOR * self.pp * self.vpp * self.dismissed + PASSES_FOR_STEP * self.looked

    def _fixed_sizes(self, layout: str | None) -> tuple[int, ...] | None:
        """The layers of each chunk where they are no choice: a pinned layout, an engine with even stages, one stage, or chunks of a model
        with several kinds of layers."""
        count = self.pp * self.vpp
        if layout is not None:
            return chunk_sizes(layout, self.model, self.pp, self.vpp)
        if self.pp == 1:
            return (self.layers,)
        if not self.capabilities.uneven_stages or (self.vpp > 1 and not self._one_kind):
            base, extra = divmod(self.layers, count)
            return tuple(base + (index < extra) for index in range(count))
        return None

    # ---- the ways to compute a stage

    def options(self, p: int, start: int, sizes: tuple[int, ...]) -> list[Option]:
        """The ways to compute stage p with these chunks that fit, no one beaten by another; fastest first.

        `start`: transformer layers before its first chunk, which only matters with several kinds of layers.
        """
        kinds = self._one_kind
        key = (sizes, p == 0, p == self.pp - 1, self._flights[p], 0 if kinds else start, 0 if self._fixed is None or kinds else p)
        found = self._options.get(key)
        if found is None:
            found = self._options[key] = self._make_options(p, start, sizes)
        return found

    def _spans(self, p: int, start: int, sizes: tuple[int, ...], recompute: tuple[Recompute, int]) -> Stage:
        """The stage as the plan would have it; layer numbers are only right where they matter."""
        mode, first_n = recompute
        if not self._one_kind:
            whole = self._fixed if self._fixed is not None else (start, *sizes, self.layers - start - sum(sizes))
            if self._fixed is not None:
                return stages_of(self.model, whole, self.pp, [recompute] * self.pp)[p]
            middle = stages_of(self.model, whole, 3, [recompute] * 3)[1].layers
            first = (LayerSpan(kind=self.model.runs[0].layer.kind, first=0, count=1),) if p == 0 else ()
            last = (LayerSpan(kind=self.model.runs[-1].layer.kind, first=0, count=1),) if p == self.pp - 1 else ()
            return Stage(layers=(*first, *middle, *last))
        spans: list[LayerSpan] = []
        kind = self.model.runs[1].layer.kind
        if p == 0:
            spans.append(LayerSpan(kind=self.model.runs[0].layer.kind, first=0, count=1))
        for chunk, size in enumerate(sizes):
            inside = 0 if mode == "none" else min(first_n, size)
            if inside:
                spans.append(LayerSpan(kind=kind, first=0, count=inside, recompute=mode, chunk=chunk))
            if size > inside:
                spans.append(LayerSpan(kind=kind, first=0, count=size - inside, chunk=chunk))
        if p == self.pp - 1:
            spans.append(LayerSpan(kind=self.model.runs[-1].layer.kind, first=0, count=1, chunk=self.vpp - 1))
        return Stage(layers=tuple(spans))

    def _option(self, p: int, start: int, sizes: tuple[int, ...], recompute: tuple[Recompute, int]) -> Option:
        """As `CostModel.stage` prices it. Stages with the same layers differ only in what they hold in flight: where sums over layers say
        plainly whether that fits, they share the rest."""
        key = (sizes, recompute, p == 0, p == self.pp - 1)
        alike = self._alike.get(key)
        if alike is not None:
            peak = self._peak(p, sizes, *recompute)
            if abs(peak - self.usable) > UNDECIDED * self.usable:
                cost = alike.cost
                twin = StageCost(
                    forward_s=cost.forward_s,
                    backward_s=cost.backward_s,
                    exposed_s=cost.exposed_s,
                    optimizer_s=cost.optimizer_s,
                    peak_bytes=peak,
                )
                return alike._replace(cost=twin)
        cost = self.costs.stage(self.candidate, self._spans(p, start, sizes, recompute), p)
        work = sum(cost.forward_s) + sum(cost.backward_s)
        option = Option(sizes, recompute, cost, work, cost.forward_s[0] + cost.backward_s[0], cost.exposed_s)
        if self._one_kind:
            self._alike[key] = option
        return option

    def _make_options(self, p: int, start: int, sizes: tuple[int, ...]) -> list[Option]:
        whole = max(sizes)
        recomputes: list[tuple[Recompute, int]] = []
        for mode in self.modes:
            if mode == "none" or not whole:
                recomputes.append((mode, 0))
                if mode == "none" and self._peak(p, sizes, mode, 0) <= self.usable:
                    break  # whatever is recomputed only costs time
            elif (mode == "full" or self._by_layer) and len(self.modes) > 1:
                recomputes += [(mode, n) for n in self._first_layers(p, start, sizes, mode)]
            else:
                recomputes.append((mode, self.layers))
        made = [self._option(p, start, sizes, recompute) for recompute in self._promising(p, sizes, recomputes)]
        fitting = [option for option in made if option.cost.peak_bytes <= self.usable]
        fitting.sort(key=lambda option: option.work)
        kept: list[Option] = []
        for option in fitting:
            if not any(self._beats(other, option) for other in kept):
                kept.append(option)
        return kept

    def _promising(self, p: int, sizes: tuple[int, ...], recomputes: list[tuple[Recompute, int]]) -> list[tuple[Recompute, int]]:
        """Those that fit and that no other beats in every chunk's backward, by sums over layers; all where only `CostModel.stage` can
        tell."""
        if not self._one_kind or len(recomputes) == 1:
            return recomputes
        plain = self._table.modes["none"]
        found: list[tuple[list[float], tuple[Recompute, int]]] = []
        for mode, n in recomputes:
            if self._peak(p, sizes, mode, n) <= self.usable * (1 + ROUNDING):
                cost = self._table.modes[mode]
                if cost.forward_s != plain.forward_s:
                    return recomputes
                more = cost.backward_s - plain.backward_s
                found.append(([min(n, size) * more if mode != "none" else 0.0 for size in sizes], (mode, n)))
        return [
            recompute
            for i, (backward, recompute) in enumerate(found)
            if not any(all(map(le, other, backward)) and (other != backward or j < i) for j, (other, _) in enumerate(found) if j != i)
        ]

    def _peak(self, p: int, sizes: tuple[int, ...], mode: Recompute, first_n: int) -> float:
        """A stage's peak bytes as `CostModel.stage` has them, from sums over layers; infinite where only that can tell."""
        if not self._one_kind:
            return INFINITE
        table = self._table
        plain = table.modes["none"]
        again = table.modes[mode]
        layers = sum(sizes) if self.vpp > 1 else sizes[0]
        at_ends = (1 if p == 0 else 0) + (2 if p == self.pp - 1 else 0)
        stiff, in_backward, in_step, forward, backward, before, after = table.ends(at_ends, layers)
        inside = 0
        if mode != "none":
            inside = sum([min(first_n, size) for size in sizes]) if self.vpp > 1 else min(first_n, layers)
        if inside:
            forward, backward = max(forward, again.transient_forward_bytes), max(backward, again.transient_backward_bytes)
        if layers > inside:
            forward, backward = max(forward, plain.transient_forward_bytes), max(backward, plain.transient_backward_bytes)
        if sizes[0] == sizes[-1] and (self.vpp == 1 or sizes.count(sizes[0]) == self.vpp):
            chunk = (inside * again.saved_bytes + (layers - inside) * plain.saved_bytes) / self.vpp
            kept = max([total * chunk + begin * before + end * after for total, begin, end in self._flights_in_all[p]])
        elif (split := self._split(p, sizes)) is not None:
            large, small, counts_of = split
            many = min(inside and first_n, large) * (again.saved_bytes - plain.saved_bytes) + large * plain.saved_bytes
            few = min(inside and first_n, small) * (again.saved_bytes - plain.saved_bytes) + small * plain.saved_bytes
            kept = max([a * many + b * few + begin * before + end * after for a, b, begin, end in counts_of])
        else:
            saved = [min(first_n, size) * again.saved_bytes + max(0, size - first_n) * plain.saved_bytes for size in sizes]
            saved[0] += before
            saved[-1] += after
            kept = max([sum(map(mul, counts, saved)) for counts in self._flights[p]])
        kept += self._boundaries[p]
        grown = kept + in_backward if self.candidate.num_microbatches > 1 else max(kept, in_backward)
        return float(stiff + table.slack * max(kept + forward, backward + grown, in_step))

    def _split(self, p: int, sizes: tuple[int, ...]) -> tuple[int, int, tuple[tuple[int, ...], ...]] | None:
        """Chunks of two sizes (`spread`): the sizes, and the micro-batches in flight (in large chunks, in small ones, in the first, in the
        last) of every peak. None for chunks of more sizes."""
        large, small = max(sizes), min(sizes)
        if large - small > 1:
            return None
        key = (p, sizes[0] == large, sizes.count(large))
        found = self._splits.get(key)
        if found is None:
            where = [index for index, size in enumerate(sizes) if size == large]
            if where != list(range(where[0], where[-1] + 1)) or (where[0] and where[-1] != len(sizes) - 1):
                return None
            begins, ends, a, b = p == 0, p == self.pp - 1, where[0], where[-1] + 1
            peaks = _largest({(sum(counts), sum(counts[a:b]), counts[0] * begins, counts[-1] * ends) for counts in self._flights[p]})
            found = self._splits[key] = tuple((inside, total - inside, begin, end) for total, inside, begin, end in peaks)
        return large, small, found

    def _beats(self, a: Option, b: Option) -> bool:
        """Whether `a` is at least as good in everything that the score reads."""
        x, y = a.cost, b.cost
        return (
            x.exposed_s <= y.exposed_s
            and x.optimizer_s <= y.optimizer_s
            and all(s <= t for s, t in zip(x.forward_s, y.forward_s, strict=True))
            and all(s <= t for s, t in zip(x.backward_s, y.backward_s, strict=True))
        )

    def _first_layers(self, p: int, start: int, sizes: tuple[int, ...], mode: Recompute) -> list[int]:
        """The numbers of layers recomputed in this mode that matter: the least that fits, because each more costs time and saves bytes.
        Both are monotone in the number, so it is found by bisection."""
        most = max(sizes)
        low, high = 1, most
        while low < high:
            middle = (low + high) // 2
            peak = self._peak(p, sizes, mode, middle)
            if peak == INFINITE:
                peak = self._option(p, start, sizes, (mode, middle)).cost.peak_bytes
            if peak <= self.usable:
                high = middle
            else:
                low = middle + 1
        return [low]

    # ---- the search

    def solve(self, threshold: float = INFINITE) -> Answer:
        """The best partition of at most `threshold` seconds; else why there is none."""
        if self.capabilities.recompute_varies == "never" and len(self.modes) > 1:
            return self._solve_each_mode(threshold)
        if self._fixed is not None:
            return self._solve_fixed(self._fixed, threshold)
        return self._solve_free(threshold)

    def solve_further(self, threshold: float, most: int) -> Answer:
        """`solve` once more, for what takes less than `threshold` seconds, in the time of `most` simulated passes."""
        self.left = INFINITE
        self.most_spent = self.spent + most
        self.sharp = True
        return self.solve(threshold)

    def _solve_each_mode(self, threshold: float) -> Answer:
        """The same mode everywhere: one search for each."""
        answers = []
        modes = self.modes
        for mode in modes:
            self.modes = (mode,)
            self._options.clear()
            self._interleaved.clear()
            self._fits = self._most_fitting = None  # what fits depends on the modes
            answers.append(self.solve(threshold))
            found = answers[-1].solution
            if found is not None:
                threshold = min(threshold, found.step_time_s)
        self.modes, self._fits, self._most_fitting = modes, None, None
        solved = [answer for answer in answers if answer.solution is not None]
        if solved:
            return min(solved, key=lambda answer: answer.bound_s)
        if all(answer.need is not None for answer in answers):
            return Answer(None, min(answer.need for answer in answers if answer.need is not None), INFINITE)
        return Answer(None, None, min(answer.bound_s for answer in answers))

    def _solve_fixed(self, sizes: tuple[int, ...], threshold: float) -> Answer:
        """Only recompute is open."""
        moves = self._fixed_moves(sizes)
        if moves is None:
            return Answer(None, self.need(sizes), INFINITE)
        return _Walk(self, moves, self.pp).run(threshold)

    def _fixed_moves(self, sizes: tuple[int, ...]) -> Moves | None:
        """The one way through the stages of this split; None where a stage doesn't fit."""
        moves: Moves = []
        for p in range(self.pp):
            options = self.options(p, sum(sizes[:p]), sizes[p :: self.pp])
            if not options:
                return None
            moves.append({p: ((p + 1, options),)})
        return moves

    def need(self, sizes: tuple[int, ...]) -> float:
        """Bytes of the fullest stage of this split at its leanest."""
        worst = 0.0
        tries: list[tuple[Recompute, int]] = [(mode, 0 if mode == "none" else self.layers) for mode in self.modes]
        for p in range(self.pp):
            start, chunks = sum(sizes[:p]), sizes[p :: self.pp]
            worst = max(worst, min(self._option(p, start, chunks, recompute).cost.peak_bytes for recompute in tries))
        return worst

    def even_sizes(self) -> tuple[int, ...]:
        """Chunks as even as they go, embedding and head counted as layers where that makes the split even."""
        if self._fixed is not None:
            return self._fixed
        pp, vpp = self.pp, self.vpp
        counted = self.layers + 2 if (self.layers + 2) % (pp * vpp) == 0 else self.layers
        base, extra = divmod(counted, pp)
        totals = [base + (0 < p <= extra) for p in range(pp)] if extra < pp - 1 else [base + (p < extra) for p in range(pp)]
        if counted != self.layers:
            totals[0] -= 1
            totals[-1] -= 1
        by_stage = [spread(total, vpp, p, pp) for p, total in enumerate(totals)]
        return tuple(by_stage[p][v] for v in range(vpp) for p in range(pp))

    def _solve_free(self, threshold: float) -> Answer:
        """Every contiguous split.

        First the even one, whose time narrows what a stage may hold; then all that its time does not exclude.
        """
        even_moves = self._fixed_moves(self.even_sizes())
        even = _Walk(self, even_moves, self.pp).run(INFINITE) if even_moves is not None else None
        incumbent = even.solution if even is not None else None
        if incumbent is not None and incumbent.step_time_s > threshold:
            incumbent = None
        upper = threshold if incumbent is None else incumbent.step_time_s
        moves = self._moves(upper)
        if moves is not None:
            answer = _Walk(self, moves, self.layers).run(upper, strictly=incumbent is not None)
            if answer.solution is not None or incumbent is None:
                return answer
        if incumbent is not None:
            return Answer(incumbent, None, incumbent.step_time_s)
        if upper == INFINITE or not self._any_fits():
            return Answer(None, self.need(self.even_sizes()), INFINITE)
        return Answer(None, None, upper)

    def bound(self, upper: float) -> Answer:
        """A lower bound of `solve` that respects the memory limit, without simulating: the scalar program over all splits of which no
        stage alone works longer than `upper`; or `upper`, where no split is that fast. No solution; `need` where no split fits."""
        if self.capabilities.recompute_varies == "never" and len(self.modes) > 1:
            return Answer(None, None, 0.0)  # nothing better than the floor is known: solve it
        if self._fixed is not None:
            moves = self._fixed_moves(self._fixed)
            return (
                Answer(None, self.need(self._fixed), INFINITE) if moves is None else Answer(None, None, _Walk(self, moves, self.pp).bound)
            )
        if not self._any_fits():
            return Answer(None, self.need(self.even_sizes()), INFINITE)
        found = self._moves(upper)
        return Answer(None, None, upper if found is None else min(upper, _Walk(self, found, self.layers).bound))

    def _any_fits(self) -> bool:
        """Whether some split fits: the even one at its leanest, or else the most layers that fit in each stage are enough; of several
        kinds of layers, whether borders lead from the first to the last."""
        if self._fits is None and not self._one_kind:
            self._fits = self.need(self.even_sizes()) <= self.usable or self._borders_lead_through()
        elif self._fits is None:
            even = self.even_sizes()
            self._fits = all(self._fits_leanest(p, even[p :: self.pp]) for p in range(self.pp))
            if not self._fits:
                self._most_fitting = []
                for p in range(self.pp):
                    self._most_fitting.append(self._fits_in(p, self._most_fitting[-1] if p else -1))
                whole = all(most >= (0 if p in (0, self.pp - 1) else 1) for p, most in enumerate(self._most_fitting))
                self._fits = whole and sum(self._most_fitting) >= self.layers
        return self._fits

    def _borders_lead_through(self) -> bool:
        """Whether stages that fit at their leanest can be put one behind the other; a layer more in a stage never frees bytes."""
        tries: list[tuple[Recompute, int]] = [(mode, 0 if mode == "none" else self.layers) for mode in self.modes]
        reached = {0}
        for p in range(self.pp):
            ends: set[int] = set()
            for start in reached:
                for n in range(0 if p in (0, self.pp - 1) else 1, self.layers - start + 1):
                    if all(self._option(p, start, (n,), recompute).cost.peak_bytes > self.usable for recompute in tries):
                        break
                    ends.add(start + n)
            reached = ends
        return self.layers in reached

    def _fits_leanest(self, p: int, sizes: tuple[int, ...]) -> bool:
        """Whether the stage fits with some mode throughout; the strongest is asked first, because it mostly does."""
        return any(self._peak(p, sizes, mode, self.layers) <= self.usable for mode in reversed(self.modes))

    def _fits_in(self, p: int, guess: int) -> int:
        """The most layers that fit in stage p at its leanest; -1: not even none. Looked for from `guess` up, where so many fit: what the
        stage before holds, which has more in flight."""

        def fits(n: int) -> bool:
            return self._fits_leanest(p, spread(n, self.vpp, p, self.pp))

        low, step = guess if guess >= 0 and fits(guess) else -1, 1
        while low + step <= self.layers and fits(low + step):
            low += step
            step *= 2
        high = min(self.layers, low + step - 1)
        while low < high:
            n = (low + high + 1) // 2
            if fits(n):
                low = n
            else:
                high = n - 1
        return low

    def _moves(self, upper: float) -> Moves | None:
        """For each stage and number of layers before it: (layers before the next stage, options), of all stages that fit in memory and
        whose work alone is not above `upper`. None where no split is left."""
        pp = self.pp
        ranges = self._ranges(upper)
        if ranges is None:
            return None
        low, most = ranges
        rest_low, rest_high = [0] * (pp + 1), [0] * (pp + 1)
        for p in range(pp - 1, -1, -1):
            rest_low[p], rest_high[p] = rest_low[p + 1] + low[p], rest_high[p + 1] + most[p]
        moves: Moves = []
        reached = [0]
        for p in range(pp):
            here: dict[int, tuple[tuple[int, list[Option]], ...]] = {}
            rests = (self.layers - rest_high[p + 1], self.layers - rest_low[p + 1])
            alike = self._steps(p, 0, low[p], most[p]) if self._one_kind else []
            for start in reached:
                steps = alike if self._one_kind else self._steps(p, start, low[p], most[p])
                onwards = tuple([(start + n, options) for n, options in steps if rests[0] <= start + n <= rests[1]])
                if onwards:
                    here[start] = onwards
            moves.append(here)
            reached = sorted({end for onwards in here.values() for end, _ in onwards})
            if not reached:
                return None
        return self._through(moves, upper) if self.vpp > 1 and self._one_kind and upper < INFINITE else moves

    def _through(self, moves: Moves, upper: float) -> Moves | None:
        """Of interleaved moves those that can still lead to a step of `upper` seconds; None where there are none.

        What the stages behind a stage take in their last chunks is the least over all ways to go on.
        """
        pp, capacity = self.pp, self._capacity()
        exposed = min(option.exposed for _, options in moves[0][0] for option in options)
        limit = upper * (1 + ROUNDING) - capacity.once - exposed
        rest: dict[int, tuple[float, float]] = {self.layers: (0.0, 0.0)}  # forward, backward seconds of the stages behind
        kept: Moves = []
        for p in range(pp - 1, -1, -1):
            alone = self.interleaved(p)
            here: dict[int, tuple[tuple[int, list[Option]], ...]] = {}
            best: dict[int, tuple[float, float]] = {}
            for start, onwards in moves[p].items():
                going = []
                for end, options in onwards:
                    if end not in rest:
                        continue
                    after_forward, after_backward = rest[end]
                    fast = [option for option in options if alone.seconds(option, after_forward, after_backward) <= limit]
                    if fast:
                        going.append((end, fast))
                        f = after_forward + min(option.cost.forward_s[-1] for option in fast)
                        b = after_backward + min(option.cost.backward_s[-1] for option in fast)
                        known = best.get(start, (INFINITE, INFINITE))
                        best[start] = min(known[0], f), min(known[1], b)
                if going:
                    here[start] = tuple(going)
            rest = best
            kept.append(here)
            if not here:
                return None
        return kept[::-1]

    def interleaved(self, p: int) -> _Interleaved:
        """Stage p of an interleaved pipeline of one kind of layers."""
        found = self._interleaved.get(p)
        if found is None:
            found = self._interleaved[p] = _Interleaved(self, p)
        return found

    def _ranges(self, upper: float) -> tuple[list[int], list[int]] | None:
        """(fewest, most) layers of each stage in the splits of at most `upper` seconds; None where there is none."""
        if self._one_kind:
            found = self._capacity().ranges(upper)
            if found is None or self._most_fitting is None:
                return found
            low, most = found[0], list(map(min, found[1], self._most_fitting))
            return None if any(a > b for a, b in zip(low, most, strict=True)) else (low, most)
        least = [0 if p in (0, self.pp - 1) else 1 for p in range(self.pp)]
        most = self._most_layers(upper)
        spare = sum(most) - self.layers
        low = [max(fewest, many - spare) for fewest, many in zip(least, most, strict=True)]
        return None if any(a > b for a, b in zip(low, most, strict=True)) else (low, most)

    def _capacity(self) -> Capacity:
        """Of these modes."""
        if self._capacity_of is None or self._capacity_of[0] != self.modes:
            flights = [max(total for total, _, _ in counts) for counts in self._flights_in_all]
            partial = [mode for mode in self.modes if mode == "full" or self._by_layer]
            self._capacity_of = self.modes, Capacity(self.costs, self.candidate, self.modes, partial, self.layers, self.usable, flights)
        return self._capacity_of[1]

    def _most_layers(self, upper: float) -> list[int]:
        """The most layers that each stage can work through m times within `upper`, nothing recomputed, embedding and head included."""
        if upper == INFINITE:
            return [self.layers] * self.pp
        c, m = self.candidate, self.candidate.num_microbatches
        first, *inner, last = (run.layer.kind for run in self.model.runs)

        def work(kind: str) -> float:
            costs = [self.costs.layer(c, kind, mode) for mode in self.modes]
            return min(cost.forward_s for cost in costs) + min(cost.backward_s for cost in costs)

        layer = min(work(kind) for kind in inner)
        most = []
        for p in range(self.pp):
            room = upper * (1 + ROUNDING) / m - (work(first) if p == 0 else 0.0) - (work(last) if p == self.pp - 1 else 0.0)
            most.append(max(-1, min(self.layers, int(room / layer))) if layer > 0 else self.layers)
        return most

    def _steps(self, p: int, start: int, low: int, most: int) -> list[tuple[int, list[Option]]]:
        """(layers, options) of the numbers of layers from `low` to `most` that fit in stage p."""
        made = [(n, self.options(p, start, spread(n, self.vpp, p, self.pp))) for n in range(low, most + 1)]
        return [(n, options) for n, options in made if options]


class _Interleaved:
    """What a stage's options take of an interleaved step, whatever the other stages do.

    Stage i begins its first backward pass once the first micro-batch has gone down through every chunk of every stage, and back up to it;
    it has then done its warm-up and one forward pass more. From the end of its last forward pass on, the last micro-batch goes the same
    way. Between the two it works on the rest: with every transfer over all vpp x pp borders, that is what a step takes at least, up to the
    end of stage 0's passes (Megatron's order, schedules.py:773).
    """

    def __init__(self, inner: Inner, p: int) -> None:
        pp, vpp, self.m, capacity = inner.pp, inner.vpp, inner.candidate.num_microbatches, inner._capacity()
        hops = inner.costs.hop_seconds(inner.candidate)
        way = sum(hops[: pp * vpp - 1])
        passes = 2 * (pp - 1 - p) + (vpp - 1) * pp + 1
        self.rests = passes < self.m * vpp
        """Whether any forward pass is left after the warm-up."""
        turns, some = divmod(min(passes, self.m * vpp), pp * vpp)
        self.early = [turns * pp + min(pp, max(0, some - chunk * pp)) for chunk in range(vpp)]
        behind, self.before = sum(hops[p : pp - 1]), sum(hops[:p])
        self.down, self.up = capacity.forward_s + way + behind, capacity.backward_s + way + behind
        self._known: dict[int, tuple[float, float, float]] = {}

    def seconds(self, option: Option, after_forward: float, after_backward: float) -> float:
        """`after_*`: what the stages behind take in their last chunks."""
        need = self._known.get(id(option))
        if need is None:
            cost, m = option.cost, self.m
            forward, backward = m * sum(cost.forward_s), m * sum(cost.backward_s)
            if self.rests:
                spent = sum(map(mul, self.early, cost.forward_s)) + sum(map(mul, self.early, cost.backward_s))
                need = (self.down + self.up + forward + backward - spent, 0.0, 0.0)
            else:  # all forward passes come first
                need = (0.0, self.before + forward + self.up, self.down + backward + self.before)
            self._known[id(option)] = need
        both, one, other = need
        return max(both + after_forward + after_backward, one + after_forward, other + after_backward)


class _Above(NamedTuple):
    """Of the stages above in a partition, seconds: a micro-batch's way `down` through their first chunks; their way down and up again with
    the exposed time of the one that this delays most (`lead`); the `largest` end so far, and the largest `update` by the optimizer."""

    down: float
    lead: float
    largest: float
    update: float
    spent: float
    """On the cut's path."""


class _Cut(NamedTuple):
    """A path's sum over stages. `values`: of each stage's options by their id; `togo`: the least of the stages that are left, by stage and
    state; `constant`: its transfers."""

    values: list[dict[int, float]]
    togo: list[dict[int, float]]
    constant: float


class _Walk:
    """Depth-first over the partitions that `moves` allows, guided by the exact bound of what is left; `end` is the state behind the last
    stage. The first stage starts at the only state of `moves[0]`."""

    def __init__(self, inner: Inner, moves: Moves, end: int) -> None:
        self.inner, self.moves, self.end = inner, moves, end
        self.pp, self.m = inner.pp, inner.candidate.num_microbatches
        hops = inner.costs.hop_seconds(inner.candidate) if self.pp > 1 else ()
        self.hops = [*hops[: self.pp - 1], 0.0]
        self.back_and_forth = [2 * hop for hop in self.hops]
        self.once = inner.costs.once_seconds(inner.candidate)
        self.flat = inner.vpp == 1 and self.pp > 1
        self.blocking = inner.candidate.schedule == "deepspeed_1f1b"
        self.chunked = inner.vpp > 1 and inner._one_kind
        self.exposed = min((option.exposed for steps in moves[0].values() for _, options in steps for option in options), default=0.0)
        self.path: list[Option] = []
        self.best: tuple[float, float, tuple[Option, ...]] | None = None
        self.cut: _Cut | None = None
        (self.start,) = moves[0]
        self._bound()

    def _bound(self) -> None:
        self.behind = self._behind()
        self.whole = self._whole()
        self.togo = self._to_go()
        self.updates = self._updates()
        least = max(self.togo[0].get(self.start, INFINITE), self.whole[0].get(self.start, 0.0) + self.exposed)
        self.bound = least + self.updates[0].get(self.start, 0.0) + self.once
        """Seconds that no partition of these moves undercuts."""

    def _to_go(self) -> list[dict[int, float]]:
        """For each stage and state: the least, over the ways to complete the partition, of the largest lead + m * work, without chunks with
        the turns; then at least the turns that micro-batches make through all the stages that are left."""
        togo: list[dict[int, float]] = [{} for _ in range(self.pp)]
        rest: dict[int, float] = {self.end: 0.0}
        for p in range(self.pp - 1, -1, -1):
            turns, behind, back_and_forth = (self.m - 1) // (self.pp - p) + 1, self.behind[p + 1], self.back_and_forth[p]
            for state, steps in self.moves[p].items():
                bounds = [
                    max(self._work(p, option, behind[end]), option.lead + back_and_forth + rest[end])
                    for end, options in steps
                    if end in rest
                    for option in options
                ]
                if bounds:
                    least = turns * sum(self.behind[p][state]) if self.flat else 0.0
                    togo[p][state] = max(least, min(bounds))
            rest = togo[p]
        return togo

    def _behind(self) -> list[dict[int, tuple[float, float]]]:
        """For each stage and state, and behind the last: the least seconds that a micro-batch takes forward, and backward, through the last
        chunks of the stages that are left; without chunks those of its transfers as well."""
        found: list[dict[int, tuple[float, float]]] = [{} for _ in range(self.pp)] + [{self.end: (0.0, 0.0)}]
        for p in range(self.pp - 1, -1, -1):
            rest, hop = found[p + 1], self.hops[p] if self.flat else 0.0
            for state, steps in self.moves[p].items():
                ways = [(rest[end], option.cost) for end, options in steps if end in rest for option in options]
                if ways:
                    forward = hop + min([f + cost.forward_s[-1] for (f, _), cost in ways])
                    found[p][state] = forward, hop + min([b + cost.backward_s[-1] for (_, b), cost in ways])
        return found

    def _whole(self) -> list[dict[int, float]]:
        """Of interleaved stages, as `_to_go`: the largest time of the whole step that one of them alone tells."""
        found: list[dict[int, float]] = [{} for _ in range(self.pp)] + [{self.end: 0.0}]
        for p in range(self.pp - 1, -1, -1) if self.chunked else ():
            rest, behind, alone = found[p + 1], self.behind[p + 1], self.inner.interleaved(p)
            for state, steps in self.moves[p].items():
                bounds = [
                    max(rest[end], alone.seconds(option, *behind[end])) for end, options in steps if end in rest for option in options
                ]
                if bounds:
                    found[p][state] = min(bounds)
        return found

    def _work(self, p: int, option: Option, behind: tuple[float, float]) -> float:
        """Seconds from when the first micro-batch reaches stage p, computed so, until the last gradient leaves it. Without chunks with what
        it waits for the stages behind it, which take a micro-batch `behind` seconds there and back, transfers included.

        Its first backward pass comes after the first micro-batch's turn through them, not just after its warm-up; and its last one after
        the last micro-batch's turn, not just after those that its warm-up was ahead. In DeepSpeed's pipeline nothing runs beside a
        transfer: the stage spends all those over its borders.
        """
        m = self.m
        work = m * option.work
        if not self.flat:
            return work
        beside, turn = 0.0, sum(behind) + self.back_and_forth[p]
        if self.blocking:
            before = self.hops[p - 1] if p else 0.0
            beside, turn = before + self.hops[p], sum(behind)
            work += 2 * (m * beside - before)
        ahead = min(m - 1, self.pp - 1 - p)
        first = turn - ahead * (option.cost.forward_s[0] + beside)
        last = turn - ahead * (option.cost.backward_s[0] + beside)
        return work + (max(0.0, first) + max(0.0, last) if m - 1 > self.pp - 1 - p else max(0.0, first, last))

    def _circled(self, p: int, option: Option) -> float:
        """By how much stage p, computed so, is delayed in its m passes because micro-batches circle between it and the stages before.

        1F1B lets stage i begin forward n + pp - i after backward n. So from backward n of stage p a way leads up to stage i, and down again
        to backward n + (p - i + 1) of stage p: it takes what the stages i to p work, and their transfers there and back. That is more than
        stage p works on as many micro-batches where the stages are as slow as it is; there is room for so many such circles between its
        first and its last turn.
        """
        free = max(0, self.m - 2 - (self.pp - 1 - p))
        most = more = 0.0
        for i in range(p - 1, max(-1, p - LONGEST_CIRCLE), -1):
            more += self.path[i].work + self.back_and_forth[i] - option.work
            most = max(most, free // (p - i + 1) * more)
        return most

    def _updates(self) -> list[dict[int, float]]:
        """The least, over the ways to complete the partition, of the largest optimizer time, which no recompute changes."""
        updates: list[dict[int, float]] = [{} for _ in range(self.pp)]
        rest: dict[int, float] = {self.end: 0.0}
        for p in range(self.pp - 1, -1, -1):
            for state, steps in self.moves[p].items():
                largest = [max(options[0].cost.optimizer_s, rest[end]) for end, options in steps if end in rest]
                if largest:
                    updates[p][state] = min(largest)
            rest = updates[p]
        return updates

    def _cut(self, path: Path) -> tuple[_Cut, list[Option]]:
        """The path as a bound, and the partition that takes least on it."""
        pp, chunks = self.pp, range(self.inner.vpp)
        values: list[dict[int, float]] = []
        for p in range(pp):
            known: dict[int, float] = {}
            forward, backward = path.forward[p::pp], path.backward[p::pp]
            for option in [option for steps in self.moves[p].values() for _, options in steps for option in options]:
                if id(option) not in known:
                    cost = option.cost
                    passes = sum([forward[v] * cost.forward_s[v] + backward[v] * cost.backward_s[v] for v in chunks])
                    known[id(option)] = passes + path.ends[p] * option.exposed
            values.append(known)
        togo: list[dict[int, float]] = [{} for _ in range(pp)] + [{self.end: 0.0}]
        best: list[dict[int, tuple[int, Option]]] = [{} for _ in range(pp)]
        for p in range(pp - 1, -1, -1):
            of, rest = values[p], togo[p + 1]
            for state, steps in self.moves[p].items():
                least = INFINITE
                for end, options in steps:
                    if end in rest:
                        for option in options:
                            seconds = of[id(option)] + rest[end]
                            if seconds < least:
                                least = togo[p][state] = seconds
                                best[p][state] = end, option
        chosen, state = [], self.start
        for p in range(pp):
            state, option = best[p][state]
            chosen.append(option)
        return _Cut(values, togo, path.transfers_s), chosen

    def _weigh(self, chosen: Sequence[Option]) -> Times:
        """What a partition's passes take."""
        costs = [option.cost for option in chosen]
        forward = [cost.forward_s[v] for v in range(self.inner.vpp) for cost in costs]
        backward = [cost.backward_s[v] for v in range(self.inner.vpp) for cost in costs]
        return Times(forward, backward, self.inner.costs.hop_seconds(self.inner.candidate), [option.exposed for option in chosen])

    def narrow(self) -> None:
        """Leave out the options that are only in partitions which the bound excludes; what is left then has a higher bound, and so on."""
        removed = True
        while removed and not self._excluded(self.bound):
            removed = False
            moves: Moves = []
            fixed = self.updates[0][self.start] + self.once
            came = {self.start: (0.0, 0.0, 0.0)}  # the least lead, way down and largest end of the stages before
            for p in range(self.pp):
                here: dict[int, tuple[tuple[int, list[Option]], ...]] = {}
                reached: dict[int, tuple[float, float, float]] = {}
                rest, behind = self.togo[p + 1] if p + 1 < self.pp else {self.end: 0.0}, self.behind[p + 1]
                for state, steps in self.moves[p].items():
                    going = []
                    for end, options in steps if state in came else ():
                        live = []
                        for option in options if end in rest else ():
                            before, down, largest = came[state]
                            lead = max(before, down + option.exposed)
                            largest = max(largest, lead + self._work(p, option, behind[end]))
                            onwards = lead + option.lead + self.back_and_forth[p]
                            if not self._excluded(max(largest, onwards + rest[end]) + fixed):
                                live.append(option)
                                known = reached.get(end, (INFINITE, INFINITE, INFINITE))
                                now = onwards, down + option.cost.forward_s[0] + self.hops[p], largest
                                reached[end] = min(known[0], now[0]), min(known[1], now[1]), min(known[2], now[2])
                        removed = removed or len(live) < len(options)
                        if live:
                            going.append((end, live))
                    if going:
                        here[state] = tuple(going)
                moves.append(here)
                came = reached
            if not came:
                self.bound = INFINITE
                return
            self.moves = moves
            self._bound()

    def sharpen(self) -> None:
        """Raise `bound` by the best mean of critical paths: a game between who chooses the partition and who chooses the path, in which
        each in turn answers best what the other plays (the double oracle: McMahan, Gordon and Blum, ICML 2003). Partitions that come up
        are simulated: they are good ones."""
        inner, c = self.inner, self.inner.candidate
        graph = graph_of(c.schedule, self.pp, self.m, inner.vpp)
        evenly = Path([float(self.m)] * (self.pp * inner.vpp), [float(self.m)] * (self.pp * inner.vpp), 0.0, [0.0] * self.pp)
        chosen = self._cut(evenly)[1]
        partitions: list[Times] = []
        paths: list[Path] = []
        fixed = self.updates[0][self.start] + self.once
        for _ in range(min(MOST_ROUNDS, NODES_WALKED // len(graph.costs))):
            self.path = chosen
            self._simulate()
            self.path = []
            partitions.append(self._weigh(chosen))
            paths.append(longest(graph, partitions[-1])[1])
            game = play(paths, partitions)
            seconds, path = longest(graph, Times.mean(partitions, game.ways[0]))
            if seconds > game.seconds * (1 + UNDECIDED):
                paths.append(path)
                game = play(paths, partitions)
            cut, chosen = self._cut(Path.mean(paths, game.paths))
            least = cut.togo[0][self.start] + cut.constant
            if least + fixed > self.bound:
                self.bound, self.cut = least + fixed, cut
            if self._excluded(self.bound) or least >= game.seconds * (1 - UNDECIDED):
                return

    def run(self, upper: float, *, strictly: bool = False) -> Answer:
        """The best partition of at most (`strictly`: less than) `upper` seconds."""
        self.upper, self.strictly = upper, strictly
        if self.inner.sharp and self.pp > 1:
            self.narrow()
            if not self._excluded(self.bound):
                self.sharpen()
        bound = self.bound
        if not self._excluded(bound):
            self._down(0, self.start, _Above(0.0, 0.0, 0.0, 0.0, 0.0 if self.cut is None else self.cut.constant))
        if self.best is None:
            return Answer(None, None, max(bound, upper) if strictly else bound)
        seconds, peak, path = self.best
        inner = self.inner
        chunks = tuple(option.sizes[v] for v in range(inner.vpp) for option in path)
        stages = stages_of(inner.model, chunks, inner.pp, [option.recompute for option in path])
        return Answer(Solution(inner.candidate, stages, seconds, peak), None, seconds)

    def _excluded(self, bound: float) -> bool:
        return bound * (1 - ROUNDING) >= self.upper if self.strictly else bound > self.upper * (1 + ROUNDING)

    def _down(self, p: int, state: int, above: _Above) -> None:
        """Complete the partition whose first p stages are `path`."""
        if p == self.pp:
            self._simulate()
            return
        last = p + 1 == self.pp
        rest, updates = ({self.end: 0.0}, {self.end: 0.0}) if last else (self.togo[p + 1], self.updates[p + 1])
        steps: list[tuple[float, int, Option, _Above]] = []
        cut, whole = self.cut, self.inner.interleaved(p) if self.chunked else None
        circles = self.flat and not self.blocking and self.hops[0] > 0.0
        for end, options in self.moves[p].get(state, ()):
            if end in rest:
                update = max(above.update, options[0].cost.optimizer_s)
                fixed = max(update, updates[end]) + self.once
                behind = self.behind[p + 1][end]
                for option in options:
                    lead = max(above.lead, above.down + option.exposed)
                    alone = self._work(p, option, behind) + (self._circled(p, option) if circles else 0.0)
                    largest = max(above.largest, lead + alone)
                    if whole is not None:
                        largest = max(largest, whole.seconds(option, *behind) + self.exposed, self.whole[p + 1][end] + self.exposed)
                    onwards = lead + option.lead + self.back_and_forth[p]
                    bound = max(largest, onwards + rest[end])
                    spent = above.spent
                    if cut is not None:
                        spent += cut.values[p][id(option)]
                        bound = max(bound, spent + cut.togo[p + 1][end])
                    bound += fixed
                    down = above.down + option.cost.forward_s[0] + self.hops[p]
                    steps.append((bound, end, option, _Above(down, onwards, largest, update, spent)))
                    self.inner.looked += 1
        steps.sort(key=lambda step: step[0])
        for bound, end, option, below in steps:
            if self._excluded(bound):
                return
            if self.inner.spent >= self.inner.most_spent:
                self.inner.left = min(self.inner.left, bound)
                return
            self.path.append(option)
            self._down(p + 1, end, below)
            self.path.pop()

    def _too_slow(self) -> bool:
        """Whether a bound tells that of this interleaved partition, without simulating it."""
        inner, costs = self.inner, [option.cost for option in self.path]
        forward = [cost.forward_s[chunk] for chunk in range(inner.vpp) for cost in costs]
        backward = [cost.backward_s[chunk] for chunk in range(inner.vpp) for cost in costs]
        end = interleaved_floor(forward, backward, inner.costs.hop_seconds(inner.candidate), self.m, self.pp, inner.vpp)
        return self._excluded(end + costs[0].exposed_s + max(cost.optimizer_s for cost in costs) + self.once)

    def _simulate(self) -> None:
        inner = self.inner
        if inner.vpp > 1 and self._too_slow():
            inner.dismissed += 1
            return
        inner.simulated += 1
        seconds, peak = inner.costs.score_stages(inner.candidate, [option.cost for option in self.path])
        if seconds < self.upper or (not self.strictly and seconds <= self.upper):
            self.upper, self.strictly = seconds, True
            self.best = (seconds, peak, tuple(self.path))
