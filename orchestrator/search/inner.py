"""The search inside an outer choice of an engine: which layers go to which stage and which of them are recomputed, at the least simulated
step time.

The ways to compute a stage are the recompute choices that fit the memory and that no other beats in forward, backward, exposed
synchronisation and optimizer time; search/partition.py puts stages together. So what is returned is the optimum of the simulated score over

* every contiguous split of the layers over the stages (embedding in the first, head in the last, no other stage empty; of models whose
  stages must be even between these two, those splits), and
* every recompute choice of every stage that the engine has (a pinned mode is that of all layers; of one that has a single choice for all
  stages each is searched alone, the number of layers from the fewest that fit),

for vpp=1; with vpp > 1 over those splits in which a stage's layers are spread over its chunks as evenly as they go (`shapes`), and all
layers of other kinds than the last one's are in first chunks, or where these have no room there over the even one alone; unless `left`,
the least that a partition may take which was left out, is below it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from itertools import repeat
from operator import le
from typing import NamedTuple

from msgspec.structs import replace

from orchestrator.cost.capacity import Capacity
from orchestrator.cost.memory import RecomputedPeak, StageMemory
from orchestrator.cost.price import CostModel, LayerCost, StageCost, StageSums
from orchestrator.model.spec import ModelSpec
from orchestrator.search.partition import INFINITE, ROUNDING, STRIDE, Best, Partitions, Paths, Pipeline, Steps, Way, through
from orchestrator.strategy.capabilities import Capabilities
from orchestrator.strategy.layout import Stage
from orchestrator.strategy.legality import even_between
from orchestrator.strategy.megatron_layout import (
    chunk_sizes,
    even_chunks,
    even_work,
    first_layers,
    has_uneven_ends,
    held_first,
    of_another_kind,
    pieces,
    shapes,
    splits_vary,
    spread,
    stages_of,
    transformer_layers,
)
from orchestrator.strategy.pins import MemoryLimit
from orchestrator.strategy.spec import Candidate, Recompute
from orchestrator.strategy.tree import Leaf

MOST_SIMULATED = 20
"""Partitions simulated for one outer choice. Where stage times are nearly equal, far fewer lie between bound and optimum."""


class Effort(NamedTuple):
    """What an inner search may take: partitions that are simulated; and where some are left out, passes in a second look at them with a
    sharper bound."""

    simulated: int
    further: int = 0


MUCH = Effort(MOST_SIMULATED)


class Solution(NamedTuple):
    """A partition with its score: what `CostModel.price` reports for it."""

    candidate: Candidate
    stages: tuple[Stage, ...]
    step_time_s: float
    peak_memory_bytes: float


class Answer(NamedTuple):
    """The best solution; or that none fits; or the bound that excluded all."""

    solution: Solution | None
    bound_s: float
    fits: bool = True


TIE = 1e-9
"""Relative difference in step time below which larger groups of micro-batches are not worth it."""

Chunks = tuple[tuple[tuple[str, int], ...], ...]
"""What each chunk of a stage holds: runs of (kind of layer, count)."""


class Made(NamedTuple):
    """What a way of a stage is made of: layers of each chunk, in number and as runs, and of these the first so many in this mode."""

    sizes: tuple[int, ...]
    chunks: Chunks
    recompute: tuple[Recompute, int]
    cost: StageCost


def beats(a: Way, b: Way) -> bool:
    """Whether `a` is at least as good in everything that the score reads."""
    pairs = ((a.forward_s, b.forward_s), (a.backward_s, b.backward_s))
    return a.exposed_s <= b.exposed_s and a.optimizer_s <= b.optimizer_s and all(all(map(le, x, y)) for x, y in pairs)


class _Memories(dict[int, StageMemory]):
    """The memory of each stage, made when it is asked for."""

    def __init__(self, costs: CostModel, candidate: Candidate) -> None:
        super().__init__()
        self._costs, self._candidate = costs, candidate

    def __missing__(self, p: int) -> StageMemory:
        found = self[p] = self._costs.stage_memory(self._candidate, p)
        return found


class Inner:
    """The inner search of one outer choice."""

    def __init__(
        self, costs: CostModel, model: ModelSpec, capabilities: Capabilities, leaf: Leaf, limit: MemoryLimit, layout: str | None = None,
        floor: Callable[[Candidate], float] = lambda _: 0.0, paths: Paths | None = None,
    ) -> None:  # fmt: skip
        """The search for the best plan of one leaf. `floor`: seconds that no plan of a candidate undercuts, for groups of micro-batches
        that the leaf offers beside its own; `paths`: critical paths that searches for other leaves found, to which this one adds."""
        self.costs, self.model, self.capabilities = costs, model, capabilities
        self.candidate, self.modes, groups = candidate, modes, _ = leaf
        self._floor, self._paths = floor, paths
        self._another = partial(Inner, costs, model, capabilities, limit=limit, layout=layout, paths=paths)
        self._sizes = {candidate: self} | dict.fromkeys(replace(candidate, microbatch_group_size_per_vp_stage=size) for size in groups)
        """The search by size of the groups of micro-batches, where it was looked at."""
        self.usable = limit.usable
        """Bytes that a stage may use; in a cluster of several types of GPU, those of the largest."""
        self.pp, self.vpp = candidate.mesh.pp, candidate.vpp
        self.layers = transformer_layers(model)
        self._slow = False
        """Whether nothing was as fast as `bound` was asked for."""
        self.spent = 0
        """What partitions took, in simulated passes."""
        self.left = INFINITE
        """Seconds that no partition which was left out undercuts; infinite where none was."""
        self._fullest = 0.0
        """Bytes of the fullest way to compute a stage that fits, of those that were made."""
        self._newest: tuple[float, Effort, Answer, float] | None = None
        """What `solve` was asked for last, what it answered, and what it `left`."""
        parts, self._by_stage = [0] * self.pp, [costs] * self.pp
        """The prices of each stage: its own type's."""
        if costs.cluster.parts:
            parts = [costs.cluster.part_of(p, self.pp) for p in range(self.pp)]
            self._by_stage = [costs.of_stage(candidate, p) for p in range(self.pp)]
        self._rooms = [limit.usable_of(part) for part in parts]
        """Bytes that each stage may use."""
        self._one_kind = len(model.runs) == 3
        self._others = of_another_kind(model) if self.vpp > 1 and not self._one_kind else 0
        self._even_between = even_between(capabilities, model.architecture) is not None
        self._by_layer = capabilities.recomputes_by_layer(candidate.schedule)
        self._together = capabilities.beside(modes)
        self._one_count = capabilities.recompute_varies == "job" and len(self._together) == 1 < len(modes)
        self._fixed = self._fixed_sizes(layout)
        self._ways: dict[tuple[object, ...], list[Way]] = {}
        self._more: dict[tuple[object, ...], Way] = {}
        self._added: dict[tuple[object, ...], StageSums] = costs.kept(candidate).setdefault("sums", {})
        self._between: dict[tuple[int, int], tuple[tuple[str, int], ...]] = {}
        self._priced: dict[tuple[int, str, Recompute], LayerCost] = {}
        self._memories = _Memories(costs, candidate)
        self._parts = parts
        self.capacity: Capacity | None = None
        if self._fixed is None:
            by_layer = [mode for mode in modes if mode == "full" or self._by_layer]
            self.capacity = Capacity(costs, candidate, modes, by_layer, self.layers, self._rooms, self._memories)

    @cached_property
    def _alone(self) -> list[Inner]:
        """A search for each recompute mode, where the engine computes all layers in the same one; else none."""
        together = self._together
        return [self._another(leaf=Leaf(self.candidate, modes)) for modes in together] if len(together) > 1 else []

    @cached_property
    def _head(self) -> float:
        """The layers that the head takes as long as; 0 where its chunk has as many as others all the same (`shapes`)."""
        if self.vpp == 1 or not has_uneven_ends(self.model):
            return 0.0
        longest = max(self._layer(self.pp - 1, run.layer.kind, "none").seconds for run in self.model.runs[1:-1])
        return self._layer(self.pp - 1, self.model.runs[-1].layer.kind, "none").seconds / longest

    @cached_property
    def _places(self) -> list[int]:
        """For each stage, the first stage that is like it in all that changes what it costs."""
        first: dict[tuple[object, ...], int] = {}
        last = self.pp - 1
        return [first.setdefault((p == 0, p == last, self._memories[p].flights, part), p) for p, part in enumerate(self._parts)]

    @cached_property
    def pipeline(self) -> Pipeline:
        """What all partitions share."""
        costs, candidate = self.costs, self.candidate
        hops = costs.hop_seconds(candidate) if self.pp > 1 else ()
        shape = costs.schedule(candidate), self.pp, candidate.num_microbatches, self.vpp, candidate.microbatch_group_size_per_vp_stage
        besides = costs.once_seconds(candidate), costs.busy_seconds(candidate)

        def score(ways: Sequence[Way], limit: float) -> float:
            return costs.score_stages(candidate, [way.made.cost for way in ways], limit)[0]

        return Pipeline(*shape, hops, *besides, score, self._paths)

    def _fixed_sizes(self, layout: str | None) -> tuple[int, ...] | None:
        """The layers of each chunk where they are no choice: a pinned layout, an engine with even stages, one stage, or chunks of a model
        in which kinds of layers alternate."""
        if layout is not None:
            return chunk_sizes(layout, self.model, self.pp, self.vpp)
        if self.pp == 1:
            return (self.layers,)
        if not self.capabilities.uneven_stages:
            return even_chunks(self.model, self.pp * self.vpp)
        if not (self._one_kind or splits_vary(self.model, self.pp, self.vpp)):
            return even_work(self.model, self.pp * self.vpp)
        return None

    # ---- the ways to compute a stage

    def ways(self, p: int, starts: tuple[int, ...], sizes: tuple[int, ...]) -> list[Way]:
        """The ways to compute stage p with these chunks that fit, no one beaten by another; fastest first.

        `starts`: transformer layers before each chunk, which only matter with several kinds of layers.
        """
        chunks = self._chunks(starts, sizes)
        here = (chunks, self._places[p])
        found = self._ways.get(here)
        if found is None:
            found = self._ways[here] = []
            made = [self._way(p, sizes, chunks, recompute) for recompute in self._recomputes(p, sizes, chunks)]
            fitting = sorted((way for way in made if way.peak_bytes <= self._rooms[p]), key=lambda way: way.work_s)
            self._fullest = max([self._fullest, *[way.peak_bytes for way in fitting]])
            for way in fitting:
                if not any(beats(other, way) for other in found):
                    found.append(way)
        return found

    def _recomputes(self, p: int, sizes: tuple[int, ...], chunks: Chunks) -> list[tuple[Recompute, int]]:
        """The ways (mode, layers) to recompute with which stage p fits: nothing alone where that fits, since whatever is recomputed only
        costs time; else of each mode the fewest layers that do."""
        whole, found, room = max(sizes), list[tuple[Recompute, int]](), self._rooms[p]
        lightest: Recompute = "none" if "none" in self.modes else self.modes[0]
        if lightest == "none" or not whole:
            fits = self._memories[p].peak_bytes(self._sums(p, chunks, ("none", 0))) <= room
            if fits or not whole:
                return [(lightest, 0)] if fits else []
        peaks = self._peaks(p, chunks)
        for mode in self.modes:
            if mode == "none":
                continue
            peak = peaks(mode)
            if (mode == "full" or self._by_layer) and len(self.modes) > 1:
                found += [(mode, n) for n in self._fewest(whole, peak, room)]
            elif peak(self.layers) <= room:
                found.append((mode, self.layers))
        return found

    def _fewest(self, most: int, peak: Callable[[int], float], room: float) -> list[int]:
        """The least number of layers recomputed in a mode with which the stage fits, if any has: each more costs time and saves bytes.
        Bytes are nearly linear in the number: the guess is that they are. `peak`: bytes with so many; `room`: that the stage may use."""
        low, high = 1, most
        if (first := peak(low)) <= room:
            return [low]
        if (last := peak(high)) > room:
            return []
        guess = low + int((first - room) / (first - last) * (high - low))
        while high - low > 1:  # `low` does not fit, `high` does
            guess = min(max(guess, low + 1), high - 1)
            low, high = (low, guess) if peak(guess) <= room else (guess, high)
            guess = high - 1 if guess == high else low + 1
        return [high]

    def _way(self, p: int, sizes: tuple[int, ...], chunks: Chunks, recompute: tuple[Recompute, int]) -> Way:
        cost = self._by_stage[p].stage_cost(self.candidate, self._sums(p, chunks, recompute), p)
        made = Made(sizes, chunks, recompute, cost)
        return Way(cost.forward_s, cost.backward_s, cost.exposed_s, cost.optimizer_s, cost.peak_bytes, made)

    def _peaks(self, p: int, chunks: Chunks) -> Callable[[Recompute], Callable[[int], float]]:
        """Bytes of stage p by mode, and then by the number of layers that are recomputed so."""
        ends = [self.model.runs[i].layer.kind for i, here in ((0, p == 0), (-1, p == self.pp - 1)) if here]
        layer, model = partial(self._layer, p), self.model
        known = RecomputedPeak(self._memories[p], self._sums(p, chunks, ("none", 0)), [layer(kind, "none") for kind in ends])
        runs = [(chunk, kind, count, layer(kind, "none")) for chunk, some in enumerate(chunks) for kind, count in some]
        mixed = max(map(len, chunks)) > 1

        def of_mode(mode: Recompute) -> Callable[[int], float]:
            layers = [(chunk, count, plain, layer(kind, mode)) for chunk, kind, count, plain in runs]

            def peak_bytes(first_n: int) -> float:
                if mixed:
                    return known.peak_bytes(layers, [inside for some in chunks for inside in first_layers(model, some, first_n)])
                return known.peak_bytes(layers, [first_n if first_n < count else count for _, count, _, _ in layers])

            return peak_bytes

        return of_mode

    def _layer(self, p: int, kind: str, mode: Recompute) -> LayerCost:
        """The price of a layer in stage p."""
        key = (self._parts[p], kind, mode)
        found = self._priced.get(key)
        if found is None:
            found = self._priced[key] = self._by_stage[p].layer(self.candidate, kind, mode)
        return found

    def _sums(self, p: int, chunks: Chunks, recompute: tuple[Recompute, int]) -> StageSums:
        """The layers of stage p added up, in the order in which the plan has them."""
        key = (chunks, recompute, p == 0, p == self.pp - 1, self._parts[p])
        known = self._added.get(key)
        if known is not None:
            return known
        (mode, first_n), layer = recompute, partial(self._layer, p)
        sums = self._by_stage[p].sums(self.candidate)
        if p == 0:
            sums.add(layer(self.model.runs[0].layer.kind, "none"), 1)
        first_n = 0 if mode == "none" else first_n
        for chunk, runs in enumerate(chunks):
            for (kind, count), inside in zip(runs, first_layers(self.model, runs, first_n) if first_n else repeat(0), strict=False):
                if inside:
                    sums.add(layer(kind, mode), inside, chunk)
                if count > inside:
                    sums.add(layer(kind, "none"), count - inside, chunk)
        if p == self.pp - 1:
            sums.add(layer(self.model.runs[-1].layer.kind, "none"), 1, self.vpp - 1)
        self._added[key] = sums
        return sums

    def _chunks(self, starts: tuple[int, ...], sizes: tuple[int, ...]) -> Chunks:
        if self._one_kind:
            kind = self.model.runs[1].layer.kind
            return tuple(((kind, size),) for size in sizes)
        return tuple(self._runs(first, first + size) for first, size in zip(starts, sizes, strict=True))

    def _runs(self, start: int, end: int) -> tuple[tuple[str, int], ...]:
        found = self._between.get((start, end))
        if found is None:
            found = self._between[start, end] = tuple((kind, count) for kind, _, count in pieces(self.model, start, end))
        return found

    # ---- the splits

    def even_sizes(self) -> tuple[int, ...]:
        """Chunks as even as they go, embedding and head counted as layers where that makes the split even."""
        if self._fixed is not None:
            return self._fixed
        pp, vpp = self.pp, self.vpp
        if vpp > 1 and not self._one_kind:
            return even_chunks(self.model, pp * vpp)
        if self._even_between and pp > 1:
            between = min(-(-self.layers // pp), (self.layers - 2) // max(1, pp - 2))
            ends = self.layers - (pp - 2) * between
            return (ends // 2, *[between] * (pp - 2), ends - ends // 2)
        counted = self.layers + 2 if (self.layers + 2) % (pp * vpp) == 0 else self.layers
        base, extra = divmod(counted, pp)
        totals = [base + (0 < p <= extra) for p in range(pp)] if extra < pp - 1 else [base + (p < extra) for p in range(pp)]
        if counted != self.layers:
            totals[0] -= 1
            totals[-1] -= 1
        by_stage = [spread(total, vpp, p, pp) for p, total in enumerate(totals)]
        return tuple(by_stage[p][v] for v in range(vpp) for p in range(pp))

    def least_bytes(self) -> float:
        """Bytes that the even split needs, or the one that there is; all layers in the same mode where they have to be."""
        return min((inner.least_bytes() for inner in self._alone), default=0.0) or self.need(self.even_sizes())

    def need(self, sizes: tuple[int, ...]) -> float:
        """Bytes of the fullest stage of this split at its leanest, or where all fit bytes in which they do; on a GPU with less memory than
        the largest as many more as it has less."""
        return max(self._needs(sizes))

    def _needs(self, sizes: tuple[int, ...]) -> Iterator[float]:
        """`need` of each stage that may be the fullest."""
        seen = set[tuple[object, ...]]()
        tries: list[tuple[Recompute, int]] = [(mode, 0 if mode == "none" else self.layers) for mode in reversed(self.modes)]
        for p in range(self.pp):
            chunks = self._chunks(self._starts(p, sizes), sizes[p :: self.pp])
            alike = chunks, p == 0, p == self.pp - 1, self._parts[p]
            if alike in seen and self.vpp == 1:  # fewer micro-batches are in flight than in the stage before
                continue
            seen.add(alike)
            least, peaks = INFINITE, self._peaks(p, chunks)
            for mode, first_n in tries:
                least = min(least, peaks(mode)(first_n) + self.usable - self._rooms[p])
                if least <= self.usable:
                    break
            yield least

    def _fixed_steps(self, sizes: tuple[int, ...]) -> Steps | None:
        """The one way through the stages of this split; None where a stage doesn't fit."""
        steps: Steps = []
        for p in range(self.pp):
            ways = self.ways(p, self._starts(p, sizes), sizes[p :: self.pp])
            if not ways:
                return None
            steps.append({p: [(p + 1, ways)]})
        return steps

    def _steps(self, upper: float) -> Steps | None:
        """The ways on from each number of layers before a stage to each number behind it, in splits of `upper` seconds at most; None: there
        is no such split. Over chunks a state also tells, in multiples of `STRIDE`, how many of the first layers, of other kinds than those
        behind them, stages before hold in their first chunks: which all of them are in."""
        ranges = self.capacity.ranges(upper) if self.capacity is not None else None
        if ranges is None:
            return None
        (first, *fewest), most = ranges
        if (held := held_first(self.model)) > most[0]:
            return None
        fewest = [max(first, held), *fewest]
        if self._even_between:
            fewest = [max(1, least) for least in fewest]
        steps: Steps = []
        reached, least_behind, most_behind, others = {0}, sum(fewest), sum(most), self._others
        last = self.layers + STRIDE * others
        for p in range(self.pp):
            least_behind, most_behind = least_behind - fewest[p], most_behind - most[p]
            here: dict[int, list[tuple[int, list[Way]]]] = {}
            of_size: dict[tuple[int, int], list[tuple[int, list[Way]]]] = {}  # of layers of a kind ways depend on their number alone
            for state in reached:
                first, start = divmod(state, STRIDE)
                ends = range(max(start + fewest[p], self.layers - most_behind), min(start + most[p], self.layers - least_behind) + 1)
                if self._even_between:  # a state between two stages of one size tells that too, in multiples of `STRIDE`
                    between = range(1, self.pp - 2)
                    sizes = [end - start for end in ends if first in (0, end - start)]
                    here[state] = [(start + n + STRIDE * n * (p in between), self.ways(p, (start,), (n,))) for n in sizes]
                    continue
                if self.vpp == 1 and not self._one_kind:
                    here[state] = [(end, self.ways(p, (start,), (end - start,))) for end in ends]
                    continue
                starts, onwards = (first, *[others] * (self.vpp - 1)), here.setdefault(state, [])
                for end in ends:
                    known = of_size.get((end - start, first))
                    if known is None:
                        sizes_of = shapes(end - start, self.vpp, p, self.pp, self._head)
                        known = [(STRIDE * min(first + sizes[0], others), self.ways(p, starts, sizes)) for sizes in sizes_of]
                        of_size[end - start, first] = known
                    for held, ways in known:
                        onwards.append((end + held, ways))
            steps.append(here)
            reached = {end for onwards in here.values() for end, ways in onwards if ways}
        return through(steps, last)

    def _starts(self, p: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """The layers before each chunk of stage p in this split."""
        return tuple([sum(sizes[:chunk]) for chunk in range(p, len(sizes), self.pp)])

    # ---- the search

    def bound(self, low: float, high: float) -> Answer:
        """A lower bound of `solve` between `low`, which is one, and `high`, without simulating. That nothing fits at all may be found when
        it is asked for the second time."""
        if self._fixed is not None:
            if any(need > self.usable for need in self._needs(self._fixed)):
                return Answer(None, INFINITE, fits=False)
            steps = self._fixed_steps(self._fixed)
            if steps is None:
                return Answer(None, INFINITE, fits=False)
            return Answer(None, max(low, Partitions(self.pipeline, steps, self.pp).bound))
        assert self.capacity is not None
        if self.capacity.ranges(high) is not None:
            return Answer(None, self.capacity.least(low, high))
        if self._slow and self.capacity.ranges(INFINITE) is None:
            return Answer(None, INFINITE, fits=False)
        self._slow = True
        return Answer(None, high)

    def held_to(self, limit: MemoryLimit) -> bool:
        """Whether this is the search under a limit that is no higher, too, as all that it found to fit does so there. It is held to that
        limit from then on; what it knows of bounds is of its own."""
        every = [one for inner in self._sizes.values() if inner for one in (inner, *inner.__dict__.get("_alone", ()))]
        if self.costs.cluster.parts or limit.usable > self.usable or any(inner._fullest > limit.usable for inner in every):
            return False
        for inner in every:
            inner.usable, inner._rooms = limit.usable, [limit.usable] * self.pp
            inner._another = partial(inner._another, limit=limit)
        return True

    def solve(self, threshold: float = INFINITE, effort: Effort = MUCH) -> Answer:
        """The best partition of at most `threshold` seconds; else why there is none."""
        if self._newest is not None:
            before, taken, answer, left = self._newest
            done = left == INFINITE or (effort.simulated <= taken.simulated and effort.further <= taken.further)
            if done and (threshold <= before if answer.solution is None else threshold >= answer.bound_s):
                self.left = left
                return answer
        answer = self._of_sizes(threshold, effort)
        self._newest = threshold, effort, answer, self.left
        return answer

    def _of_sizes(self, threshold: float, effort: Effort) -> Answer:
        """The best partition, in groups of micro-batches of any size that there is."""
        if len(self._sizes) == 1:
            return self._solve(threshold, effort)
        spent, left, found, bound = 0, INFINITE, None, INFINITE
        for candidate, inner in self._sizes.items():
            floor = self._floor(candidate)
            if floor > threshold * (1 + ROUNDING):
                bound = min(bound, floor)
                continue
            inner = self._sizes[candidate] = inner or self._another(leaf=Leaf(candidate, self.modes))
            answer = inner._solve(threshold, effort)
            if inner is self and not answer.fits:
                return answer  # larger groups hold no less
            spent, left, bound = spent + inner.spent, min(left, inner.left), min(bound, answer.bound_s)
            if answer.solution is not None:
                found, threshold = answer, answer.bound_s * (1 - TIE)
        self.spent, self.left = spent, left
        return found or Answer(None, bound)

    def _solve(self, threshold: float, effort: Effort) -> Answer:
        """The best answer for the candidate's own groups of micro-batches, as `solve` finds it."""
        self.left = INFINITE
        if self._alone:
            return self._solve_alone(threshold, effort)
        best, even, bound, ranges = None, None, threshold, None
        if self.capacity is not None and threshold < INFINITE:
            ranges = self.capacity.ranges(threshold)
            if ranges is None:
                return Answer(None, bound)
        sizes, late = self._fixed or self.even_sizes(), False
        if ranges is not None and not effort.further:
            totals = [sum(sizes[p :: self.pp]) for p in range(self.pp)]
            late = any(n < least or n > most for least, n, most in zip(ranges[0], totals, ranges[1], strict=True))
        steps, end = None if late else self._fixed_steps(sizes), self.pp
        if self._fixed is None:  # the even split, whose time narrows what a stage may hold
            if steps is not None:
                even, _ = self._best(steps, end, None, INFINITE if effort.further else threshold)
                if even is not None and even.seconds <= threshold:
                    best = even
            self.left = INFINITE
            steps, end = self._steps(threshold if best is None else best.seconds), self.layers + STRIDE * self._others
        if steps is not None:
            best, bound = self._best(steps, end, best, threshold, effort, even)
            bound = bound if self._fixed is not None else min(bound, threshold)  # splits that `_steps` leaves out take longer than that
        if best is not None:
            return Answer(self._solution(best), best.seconds)
        if steps is None and (self._fixed is not None or threshold == INFINITE):
            return Answer(None, INFINITE, fits=False)
        return Answer(None, bound)

    def _best(
        self, steps: Steps, end: int, best: Best | None, upper: float, effort: Effort = MUCH, near: Best | None = None
    ) -> tuple[Best | None, float]:
        """The best of these partitions and `best`, and seconds that none undercuts. Where all stages recompute the same number of layers:
        for each number from the least with which one fits, until no larger one can be faster."""
        if not self._one_count:
            walk = Partitions(self.pipeline, steps, end)
            return self._walk(walk, best, upper, effort, near), walk.bound
        left, bound, first = INFINITE, INFINITE, self._least_count(steps, end)
        needed = {way.made.recompute[1] for row in steps for onwards in row.values() for _, ways in onwards for way in ways}
        for n in sorted(count for count in needed if count >= first):  # with any other a partition only recomputes more than it needs
            at_least = [
                {state: [(after, [self._with(p, way, n) for way in ways]) for after, ways in onwards] for state, onwards in row.items()}
                for p, row in enumerate(steps)
            ]
            least = Partitions(self.pipeline, at_least, end).bound  # of this number and larger ones
            bound = min(bound, least)
            if least > upper * (1 + ROUNDING) or (best is not None and least * (1 - ROUNDING) >= best.seconds):
                break
            kept: Steps = [
                {state: [(after, [way for way in ways if way.made.recompute[1] <= n]) for after, ways in onwards]
                 for state, onwards in row.items()}
                for row in at_least
            ]  # fmt: skip
            fitting = through(kept, end)
            if fitting is not None:
                best = self._walk(Partitions(self.pipeline, fitting, end), best, upper, effort, near)
                left = min(left, self.left)
        self.left = left
        return best, bound

    def _least_count(self, steps: Steps, end: int) -> int:
        """The least number of layers that, recomputed in each chunk, lets a partition fit."""
        least = {end: 0}
        for row in reversed(steps):
            least = {
                state: min(max(least[after], way.made.recompute[1]) for after, ways in onwards for way in ways)
                for state, onwards in row.items()
            }
        return min(least.values())

    def _with(self, p: int, way: Way, n: int) -> Way:
        """The way with at least n layers of each chunk recomputed."""
        made = way.made
        n = min(n, max(made.sizes))
        if made.recompute[1] >= n:
            return way
        key = (p, made.chunks, n)
        if key not in self._more:
            self._more[key] = self._way(p, made.sizes, made.chunks, ("full", n))
        return self._more[key]

    def _walk(self, walk: Partitions, best: Best | None, upper: float, effort: Effort = MUCH, near: Best | None = None) -> Best | None:
        walk.best = best
        found = walk.search(upper, effort.simulated * self.pipeline.passes)
        if effort.further and walk.left < INFINITE:
            found = walk.search(upper, effort.further, sharply=True, near=near)
        self.spent, self.left = self.spent + walk.spent, walk.left
        return found

    def _solve_alone(self, threshold: float, effort: Effort) -> Answer:
        """The best answer where all layers have the same recompute mode: one search for each mode."""
        answers = []
        for inner in self._alone:
            answers.append(inner.solve(threshold, effort))
            if answers[-1].solution is not None:
                threshold = answers[-1].bound_s
        self.left = min(inner.left for inner in self._alone)
        self.spent = sum(inner.spent for inner in self._alone)
        solved = [answer for answer in answers if answer.solution is not None]
        if solved:
            return min(solved, key=lambda answer: answer.bound_s)
        return Answer(None, min(answer.bound_s for answer in answers), any(answer.fits for answer in answers))

    def _solution(self, best: Best) -> Solution:
        made: list[Made] = [way.made for way in best.ways]
        chunks = tuple(one.sizes[v] for v in range(self.vpp) for one in made)
        stages = stages_of(self.model, chunks, self.pp, [one.recompute for one in made])
        return Solution(self.candidate, stages, best.seconds, max(way.peak_bytes for way in best.ways))
