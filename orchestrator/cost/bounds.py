"""Lower bounds of a candidate's step time and memory that need no split of its layers: what lets most choices go unpriced.

A pipeline of p stages that works m micro-batches is filled and drained: stage i starts after the first chunks of the stages before it and
ends before their backward passes. Were the work W of one micro-batch free to be divided over the stages, stage i done at
S_i + m w_i with S_(i+1) = S_i + w_i / v + 2 h (v chunks, h a transfer), then the earliest end of all is reached where all stages end at
once: with r = 1 - 1/(v m),

    T = (W / v + 2 h (p - v m (1 - r^p))) / (1 - r^p).

For p=1 that is m W; for equal stages it lies between the mean m W / p and the schedule's (m + (p-1)/v) W / p. Sound because no choice of
w_i gives more total work by an end T: each w_i takes less from the stages behind it than it brings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from itertools import pairwise
from math import ceil, expm1, log1p
from typing import Final, NamedTuple

from msgspec.structs import replace

from orchestrator.cost.price import CostModel, LayerCost
from orchestrator.cost.schedule.flights import in_flight_by_stage, lead_of_chunks
from orchestrator.cost.states import state_bytes
from orchestrator.strategy.capabilities import Capabilities
from orchestrator.strategy.choices import getter
from orchestrator.strategy.layout import LayerSpan
from orchestrator.strategy.legality import overlaps_unasked, stages_offered
from orchestrator.strategy.megatron_layout import even_chunks, even_work, of_another_kind, splits_vary, stages_of
from orchestrator.strategy.spec import CHOICES, Candidate, Mesh, Options, Recompute, Strategy, ZeroStage

ROUNDING = 1e-9
"""Relative slack of a bound that adds the terms of a price in another order."""
NONE: tuple[Recompute, ...] = ("none",)
PLAIN: Final = Strategy(mesh=Mesh())
MANY = 64
"""Samples of a micro-batch, from which on more of them hardly take less a sample."""
BESIDE_LAYERS: Final = getter(
    choice.name
    for choice in CHOICES
    if not choice.in_layer_price and choice.name in Options.__struct_fields__ and choice.name not in ("zero_stage", "offload_optimizer")
)
"""A strategy's values of the options that the bytes of states may depend on beside ZeRO's stage and offload: all that are declared to be in
no layer's price."""


def filled(work: float, pp: int, num_microbatches: int, vpp: int, hop: float) -> float:
    """The earliest end of a pipeline whose stages share `work` seconds per micro-batch, as they like.

    >>> filled(6.0, 1, 10, 1, 0.0), round(filled(6.0, 2, 1, 1, 0.5), 6), round(filled(6.0, 3, 2, 1, 0.0), 3)
    (60.0, 7.0, 6.857)
    """
    if pp == 1:
        return num_microbatches * work
    turns = vpp * num_microbatches
    share = 1.0 if turns == 1 else -expm1(pp * log1p(-1 / turns))
    return (work / vpp + 2 * hop * (pp - turns * share)) / share


def rounds(costs: CostModel, candidate: Candidate, group: int | None = None) -> float:
    """Seconds of an interleaved schedule that its transfers take at least, whatever the split. `group`: micro-batches of a group in place
    of the candidate's.

    A group of micro-batches goes through one chunk after the other, and the next group begins behind it: before a micro-batch can enter the
    first stage's next chunk it has been through all stages, over all of their borders and the way back to the first. So each group but the
    last takes vpp - 1 such rounds, and the last one's first micro-batch all the way down and up again.
    """
    vpp, pp = candidate.vpp, candidate.mesh.pp
    hops = costs.hop_seconds(candidate)[:pp]
    groups = ceil(candidate.num_microbatches / (group or candidate.microbatch_group_size_per_vp_stage or pp))
    through = vpp * pp * costs.calibration.microbatch_overhead_s
    for seconds in costs.added(candidate).each_s:
        through += seconds
    return (groups - 1) * (vpp - 1) * sum(hops) + through + 2 * (vpp * sum(hops) - hops[-1])


def beside(costs: CostModel, before: Candidate, after: Candidate, modes: Sequence[Recompute]) -> Callable[[float, float], float]:
    """Returns a function of (bound_s, below_s): seconds that no plan of `after` undercuts in these recompute modes, of those that take less
    than `below_s`. `before`: the choice that differs from it in an option alone, of which no plan in these modes undercuts `bound_s`; 0
    where the option may save bytes, with which other plans fit. Choices that differ from both in virtual stages have the same function.

    What fits with the option fits without. Each pass of a layer takes at least the least `share` of its seconds without, and a schedule of
    passes that all take that share takes that share; of embedding and head, which a micro-batch passes once, it counts how much less they
    take than that. Of what comes once a step, no more is gone than the layers of a stage that is through below `below_s` have less of it;
    where a pass is longer, and may hide more, all.
    """
    if costs.cluster.parts or costs.boundary_bytes(after) < costs.boundary_bytes(before):
        return _nothing
    if _everywhere(costs, after) < _everywhere(costs, before):
        return _nothing
    if costs.passes_key(before) == costs.passes_key(after):
        # What differs is the same in every mode, and the share of the weakest one's seconds the largest.
        modes = modes[:1]
    kinds = [(kind, mode, layer.recomputable) for kind, layer in costs.kinds.items() for mode in (modes if layer.recomputable else NONE)]
    olds = [costs.layer(before, kind, mode) for kind, mode, _ in kinds]
    share, slowdown, ends = 1.0, max(1.0, costs.calibration.overlap_slowdown), list[tuple[LayerCost, LayerCost]]()
    longer, whole, less = slowdown > 1.0, (0.0, 0.0), (0.0, 0.0)
    for old, new, (*_, inside) in zip(olds, [costs.layer(after, kind, mode) for kind, mode, _ in kinds], kinds, strict=True):
        if (
            new.saved_bytes < old.saved_bytes
            or new.static_bytes < old.static_bytes
            or new.transient_forward_bytes < old.transient_forward_bytes
            or new.transient_backward_bytes < old.transient_backward_bytes
            or new.backward_bytes < old.backward_bytes
            or new.step_bytes < old.step_bytes
        ):
            return _nothing
        longer = longer or new.forward_s > old.forward_s or new.backward_s > old.backward_s
        if inside:
            share = min(share, new.forward_s / old.forward_s)
            if old.backward_s:  # a layer below everything that is trained has no backward pass
                share = min(share, new.backward_s / old.backward_s)
            whole = _largest(whole, _once(old, slowdown), new.seconds)
            less = _largest(less, _less_once(old, new), new.seconds)
        else:
            ends.append((old, new))
    m, of_ends = after.num_microbatches, costs.once_seconds(before)
    for old, new in ends:
        of_ends += sum(_once(old, slowdown) if longer else _less_once(old, new))
        of_ends += m * (max(0.0, old.forward_s - new.forward_s / share) + max(0.0, old.backward_s - new.backward_s / share))
    of_layers, once = sum(whole if longer else less) / m, costs.once_seconds(after)
    return lambda bound_s, below_s: (share * (bound_s - of_ends - below_s * of_layers) + once) * (1 - ROUNDING)


def _nothing(_: float, __: float) -> float:
    """Seconds that every plan takes: there is no bound."""
    return 0.0


def _once(layer: LayerCost, slowdown: float) -> tuple[float, float]:
    """Seconds of a step that a layer exposes at most, and those of its update: the stage of the one and that of the other may differ."""
    return slowdown * (layer.sync_s + layer.gather_s), layer.optimizer_s


def _less_once(old: LayerCost, new: LayerCost) -> tuple[float, float]:
    """Seconds by which a layer's reduction and gathering, and its update, are shorter."""
    moved = max(0.0, old.sync_s - new.sync_s) + max(0.0, old.gather_s - new.gather_s)
    return moved, max(0.0, old.optimizer_s - new.optimizer_s)


def _largest(known: tuple[float, float], once: tuple[float, float], seconds: float) -> tuple[float, float]:
    """The larger ones of seconds once a step, per second of a micro-batch in the layer."""
    return max(known[0], once[0] / seconds), max(known[1], once[1] / seconds)


def _everywhere(costs: CostModel, candidate: Candidate) -> float:
    """Bytes of a rank whatever its layers, buckets included as far as their size does not depend on these."""
    return sum(costs.fixed_bytes(candidate).values()) + costs.bucket_bytes(candidate, 1)


class _Held(NamedTuple):
    """Layers of a stage as (kind, count): in its first chunk, and in all of them."""

    first_chunk: list[tuple[str, int]]
    everything: list[tuple[str, int]]


def _slope(a: tuple[float, float], b: tuple[float, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])


def _by_kind(spans: Iterable[LayerSpan]) -> list[tuple[str, int]]:
    counts: dict[str, int] = {}
    for span in spans:
        counts[span.kind] = counts.get(span.kind, 0) + span.count
    return [*counts.items()]


class Floors:
    """Bounds for one engine's choices under a memory limit of `usable` bytes.

    `pinned_layout`: chunks may then have any sizes, so that only vpp=1 is known to fill.
    """

    def __init__(self, costs: CostModel, capabilities: Capabilities, usable: float, *, pinned_layout: bool) -> None:
        self.costs, self.capabilities, self.usable = costs, capabilities, usable
        self.one_kind = len(costs.model.runs) == 3
        self.pinned_layout = pinned_layout
        self.model = costs.model
        self.overlaps_unasked = overlaps_unasked(capabilities, costs.cluster, costs.model.architecture)
        inside = Counter[str]()
        for run in self.model.runs[1:-1]:
            inside[run.layer.kind] += run.count
        ((self._main, self._mains),) = inside.most_common(1)
        self._unlike = of_another_kind(self.model)
        self._states: dict[tuple[object, ...], float] = {}
        self._hulls: dict[tuple[object, ...], list[tuple[float, float]]] = {}
        self._fixed_stages: dict[tuple[int, int], list[_Held]] = {}
        self._shapes: dict[tuple[Strategy, int, tuple[bool, ...]], float] = {}
        stages = sorted({*capabilities.zero_stages, *capabilities.zero_stages_with_pipeline, *capabilities.fsdp_zero_stages})
        states = [state_bytes(costs.traits, costs.training, stage) for stage in stages]
        self.least = replace(states[0], weight=min(s.weight for s in states), gradient=min(s.gradient for s in states))
        """The fewest bytes of each state that a layer's backward pass moves, over all ZeRO stages that the engine has."""

    def under(self, usable: float) -> Floors:
        """These bounds under another limit of `usable` bytes; both share what they know of states."""
        other = copy(self)
        other.usable = usable
        return other

    def shape(self, candidate: Candidate, most: int, parallels: Sequence[bool]) -> float:
        """Seconds that no choice with the candidate's mesh undercuts, of up to `most` samples a micro-batch: one of more samples takes no
        longer a sample (products fill up, latencies and launches are shared). Of many samples all of a step's are looked at together, which
        meshes that differ in dp or pp share. `parallels`: with sequence parallelism, without, or either."""
        return self._shape(candidate, most if most < MANY else self.costs.training.global_batch_size, tuple(parallels))

    def any_shape(self, candidate: Candidate, parallels: Sequence[bool]) -> float:
        """Seconds that `shape` does not undercut either, the same for meshes that divide sequences over more or fewer ranks, or order their
        ranks otherwise: as if those of context parallelism were replicas (none takes less than its share of a whole sequence) and
        tensor-parallel ranks neighbours, with all of a step's samples together."""
        strategy, mesh = candidate.strategy, candidate.mesh
        mesh = replace(mesh, cp=1, dp=mesh.dp * mesh.cp, order=PLAIN.mesh.order)
        alike = replace(candidate, strategy=replace(strategy, mesh=mesh, cp_comm_type=PLAIN.cp_comm_type))
        return self._shape(alike, self.costs.training.global_batch_size, tuple(parallels))

    def _shape(self, candidate: Candidate, most: int, parallels: tuple[bool, ...]) -> float:
        key = candidate.strategy, most, parallels
        found = self._shapes.get(key)
        if found is None:
            micro_batches = self.costs.training.global_batch_size / (candidate.mesh.dp * most)
            each, hidden = list[float](), candidate.strategy.tp_comm_overlap or self.overlaps_unasked
            for parallel in parallels:
                strategy = replace(candidate.strategy, sequence_parallel=parallel, tp_comm_overlap=parallel and hidden)
                each.append(self._working(replace(candidate, strategy=strategy, micro_batch_size=most))[0])
            found = self._shapes[key] = micro_batches * min(each) + self.costs.calibration.step_overhead_s
        return found

    def shape_bytes(self, candidate: Candidate) -> float:
        """Bytes that the fullest rank of any choice with the candidate's mesh has at least: the states of the mean stage."""
        offload = self.capabilities.offload_optimizer
        return min((self.states_bytes(candidate, stage, offload) for stage in stages_offered(self.capabilities, candidate)), default=0.0)

    def states_bytes(self, candidate: Candidate, zero_stage: ZeroStage, offload: bool) -> float:
        """Bytes of the mean stage's states at this ZeRO stage, in place of the candidate's, with or without offload."""
        mesh, plain = candidate.mesh, candidate.strategy
        sizes = mesh.tp, mesh.cp, mesh.dp, mesh.pp, mesh.ep, mesh.etp
        key = (*sizes, zero_stage, offload, BESIDE_LAYERS(plain))  # not how ranks are ordered
        found = self._states.get(key)
        if found is None:
            here = replace(candidate, strategy=replace(plain, zero_stage=zero_stage, offload_optimizer=offload))
            layers = sum(count * self.costs.layer_static_bytes(here, kind) for kind, count in self.costs.workload.counts.items())
            found = self._states[key] = layers / mesh.pp
        return found

    def group(self, candidate: Candidate, most_vpp: int) -> float:
        """Seconds that no choice undercuts which shares mesh, sequence parallelism and micro-batch size with the candidate, whatever its
        ZeRO stage, offload and (up to `most_vpp`) virtual stages: compute and traffic of tp and cp alone."""
        pp, m = candidate.mesh.pp, candidate.num_microbatches
        slowest, work, largest = self._working(candidate)
        bound = m * slowest
        if most_vpp == 1 or (self.one_kind and not self.pinned_layout):
            bound = max(bound, filled(work, pp, m, most_vpp, 0.0) - (largest if most_vpp > 1 else 0.0))
        return bound + self.costs.calibration.step_overhead_s

    def _working(self, candidate: Candidate) -> tuple[float, float, float]:
        """Seconds of a micro-batch that the slowest stage takes at least; all stages together; and at most a layer that is recomputed."""
        busy = slowest = largest = 0.0
        pp, overhead = candidate.mesh.pp, self.costs.calibration.microbatch_overhead_s
        for count, forward, seconds in self.costs.floors(candidate, self.least):
            busy += count * seconds
            largest = max(largest, seconds + forward)  # fully recomputed
            slowest = max(slowest, ceil(count / pp) * seconds)
        work = busy + pp * overhead
        return max(work / pp, slowest + overhead), work, largest

    def leaf(self, candidate: Candidate, group: int | None = None) -> float:
        """Seconds that one choice does not undercut, whatever its split and recompute, and whatever its groups of micro-batches up to
        `group` (None: its own).

        The first chunk of stage 0 may be a layer short of its share: a stage's layers are spread over its chunks as evenly as they go.
        """
        costs, pp, vpp = self.costs, candidate.mesh.pp, candidate.vpp
        floor = costs.time_floor(candidate)
        if vpp > 1:
            least = max(rounds(costs, candidate, group), costs.busy_seconds(candidate))
            floor = max(floor, least + costs.once_seconds(candidate))
        one_split = not self.capabilities.uneven_stages or not (self.one_kind or splits_vary(self.model, pp, vpp))
        if pp > 1 and not self.pinned_layout and one_split:
            floor = max(floor, self._divided(candidate))
        if pp == 1 or (vpp > 1 and (self.pinned_layout or (one_split and not self.one_kind))):
            return floor
        work, layers = pp * vpp * costs.calibration.microbatch_overhead_s, costs.added(candidate)
        for seconds in layers.each_s:
            work += seconds
        if not self.pinned_layout:
            work += self.recomputed_seconds(candidate)
        hops, short = costs.hop_seconds(candidate)[: pp - 1], 0.0
        if vpp > 1:
            hop, short = min(hops), layers.largest_s + (0.0 if self.one_kind else self._shorter_first(candidate, layers.largest_s))
        else:  # each transfer of a micro-batch blocks both of its stages: that is work
            work, hop = work + 2 * sum(hops), 0.0
        end = filled(work, pp, candidate.num_microbatches, vpp, hop) - short
        return max(floor, end + layers.optimizer_s / pp + costs.once_seconds(candidate))

    def _shorter_first(self, candidate: Candidate, longest_s: float) -> float:
        """Seconds of a micro-batch by which all stages' first chunks may be shorter than their share, for what stands in them alone, the
        model's first layers, may be shorter than the others, which take `longest_s` at most."""
        costs, others = self.costs, self.model.runs[1:-2]
        return sum([run.count * (longest_s - costs.layer(candidate, run.layer.kind, "none").seconds) for run in others])

    def _divided(self, candidate: Candidate) -> float:
        """Seconds of a step whose chunks hold a number of layers that is no choice (`even_work`): a stage works once a micro-batch has
        come down to it through the first chunks of those before, and its last gradient goes back up."""
        costs, pp, vpp = self.costs, candidate.mesh.pp, candidate.vpp
        stages = self._fixed_stages.get((pp, vpp))
        if stages is None:
            of = even_work if self.capabilities.uneven_stages else even_chunks
            split = stages_of(self.model, of(self.model, pp * vpp), pp)
            stages = self._fixed_stages[pp, vpp] = [_Held(_by_kind(stage.chunk(0)), _by_kind(stage.layers)) for stage in split]
        overhead = costs.calibration.microbatch_overhead_s
        layers = {kind: costs.layer(candidate, kind, "none") for kind in costs.workload.counts}
        lead = end = update = 0.0
        for held, hop in zip(stages, costs.hop_seconds(candidate)[:pp], strict=True):
            work = vpp * overhead + sum([count * layers[kind].seconds for kind, count in held.everything])
            end = max(end, lead + candidate.num_microbatches * work)
            lead += overhead + sum([count * layers[kind].seconds for kind, count in held.first_chunk]) + 2 * hop
            update = max(update, sum([count * layers[kind].optimizer_s for kind, count in held.everything]))
        return end + update + costs.once_seconds(candidate)

    def recomputed_seconds(self, candidate: Candidate) -> float:
        """Seconds per micro-batch that recompute costs at least, in all stages together, so that the layers fit.

        Were layers divisible, stage i would hold room / (static + in flight x saved) of them as they are; each further one makes it
        recompute what all together need, in the mode that frees most bytes a second, and where that frees too little in dearer ones. The
        stages where that is cheapest take the rest. Of several kinds of layers those of the most frequent one count, as if the others took
        no room.
        """
        costs, pp, vpp, kind = self.costs, candidate.mesh.pp, candidate.vpp, self._main
        plain = costs.layer(candidate, kind, "none")
        slack = 1 + costs.calibration.allocator_slack
        ends = [costs.layer(candidate, run.layer.kind, "none").static_bytes for run in (self.model.runs[0], self.model.runs[-1])]
        room = self.usable - sum(costs.fixed_bytes(candidate).values())
        static, saved = plain.static_bytes, plain.saved_bytes
        left: float = self._mains
        stages = []
        shape = candidate.schedule, pp, candidate.num_microbatches, vpp, candidate.microbatch_group_size_per_vp_stage
        flights, leads = in_flight_by_stage(*shape), lead_of_chunks(*shape) if vpp > 1 else ()
        for stage, flight in enumerate(flights):
            held = slack * flight / vpp
            here = room - (ends[0] if stage == 0 else 0.0) - (ends[1] if stage == pp - 1 else 0.0)
            if vpp > 1:  # of the first stage later chunks may have a layer more, which fewer hold; and first ones have others' layers
                first, all_ahead = leads[stage]
                lacking = first * max(0, self._unlike - max(0, stage - 1)) + (all_ahead if stage == 0 else 0.0)
                here += slack * lacking * saved
            whole = static + held * saved
            free = max(0.0, here / whole)
            left -= free
            if left <= 0.0:
                return 0.0
            stages.append((held, here, whole, free))
        further = []
        sides = [(*before, after[0], _slope(before, after)) for before, after in pairwise(self._freed(candidate, kind))]
        for held, here, whole, begin in stages:
            needed = whole / held
            for freed, seconds, most, rate in sides:
                end = max(begin, here / (whole - held * most))
                further.append((seconds + rate * (needed - freed), end - begin))
                begin = end
        total = 0.0
        for seconds, most in sorted(further):
            taken = min(left, most)
            total += taken * seconds
            left -= taken
            if left <= 0.0:
                break
        return total

    def _freed(self, candidate: Candidate, kind: str) -> list[tuple[float, float]]:
        """Bytes that recompute frees of a layer, and the seconds that this takes, at the least of any mix of modes: corners of a hull."""
        key = candidate.strategy.recompute, *self.costs.passes_key(candidate)
        hull = self._hulls.get(key)
        if hull is None:
            plain, *others = [self.costs.layer(candidate, kind, mode) for mode in self.costs.modes_of(candidate, kind)]
            hull = self._hulls[key] = [(0.0, 0.0)]
            for freed, more in sorted((plain.saved_bytes - cost.saved_bytes, max(0.0, cost.seconds - plain.seconds)) for cost in others):
                if freed > hull[-1][0]:
                    while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-2], (freed, more)):
                        hull.pop()
                    hull.append((freed, more))
        return hull
