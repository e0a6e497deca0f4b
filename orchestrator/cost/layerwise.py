"""What a layer costs under each choice of Galvatron's space (arXiv 2211.13878), where every layer has its own tp, ZeRO-3 and recompute:
by the analytic model or by a measured profile; stages and plans from that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from orchestrator.cost.memory import peak
from orchestrator.cost.price import CostModel
from orchestrator.cost.profile import LayerProfile, Profile
from orchestrator.cost.schedule import finish_times, in_flight
from orchestrator.hardware.collectives import COLLECTIVES
from orchestrator.strategy.layerwise import NAME, ChosenRun, LayerChoice, LayerwiseStage
from orchestrator.strategy.layout import ENDS
from orchestrator.strategy.spec import Candidate, Mesh, Strategy
from orchestrator.strategy.tree import divisors


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
    """The seconds and bytes that a layerwise search adds up: the analytic model's, or a measured profile's."""

    world: int
    runs: tuple[tuple[str, int], ...]
    """(kind, layers in a row), embedding and head included where they are searched."""
    slack: float
    """Share of activations and transients that fragmentation adds."""
    hidden_share: float
    """Share of a backward pass beside which gradients can be reduced."""
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
    """Prices of the cost model, with Megatron's sequence parallelism wherever tp > 1: layers hand over tokens that are divided over all
    ranks."""

    def __init__(self, costs: CostModel) -> None:
        self.costs = costs
        self.world = costs.cluster.num_gpus
        self.runs = tuple((run.layer.kind, run.count) for run in costs.model.runs)
        c = costs.calibration
        self.slack, self.hidden_share, self.slowdown = c.allocator_slack, c.overlap_efficiency, c.overlap_slowdown
        self.sequence_parallel = True
        self._ways: dict[tuple[str, Outer], list[Way]] = {}

    def _candidate(self, choice: LayerChoice, outer: Outer) -> Candidate:
        mesh = Mesh(tp=choice.tp, dp=self.world // outer.pp // choice.tp, pp=outer.pp)
        strategy = Strategy(
            mesh=mesh,
            zero_stage=3 if choice.zero3 else 0,
            sequence_parallel=choice.tp > 1,
            grad_reduce_dtype=self.costs.training.grad_reduce_dtype,
        )
        return Candidate(engine=NAME, strategy=strategy, micro_batch_size=outer.samples // mesh.dp, num_microbatches=outer.num_microbatches)

    def _legal(self, choice: LayerChoice, outer: Outer) -> bool:
        model = self.costs.model
        heads, groups = model.architecture.num_attention_heads, model.architecture.query_groups
        tp, group = choice.tp, self.world // outer.pp
        lengths = (model.seq_length, model.decoder_seq_length or model.seq_length)
        divides = heads % tp == 0 and groups % tp == 0 and model.architecture.ffn_hidden_size % tp == 0
        recorded = model.architecture.traced
        if recorded is not None:  # what is divided was found in its code; linears that stay whole compute the rank's share of tokens
            divides = tp == 1 or (bool(recorded.divided) and recorded.tp_divides % tp == 0)
        return group % tp == 0 and outer.samples % (group // tp) == 0 and divides and all(length % tp == 0 for length in lengths)

    def ways(self, kind: str, outer: Outer) -> list[Way]:
        """The legal ways to compute a layer of this kind."""
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
        """Seconds (forward, backward) to change the degree of tp between two layers: every rank has its part of the tokens, and changes it
        for another within the larger group."""
        if before == after:
            return 0.0, 0.0
        elements = self.costs.kinds[kind].input_elements if kind != "embedding" else 0
        nbytes = elements * self.costs.itemsize * outer.samples * outer.pp / self.world
        size = max(before, after)
        seconds = COLLECTIVES["all_to_all"](nbytes, size, self.costs.link(size, 1)) + self.costs.calibration.collective_overhead_s
        return seconds, seconds

    def fixed_bytes(self, outer: Outer, stage: int, flight: int) -> float:
        """Bytes of context and communicators, as if all sizes were used."""
        group = self.world // outer.pp
        tp = max((d for d in divisors(group) if d < group), default=1)
        return sum(self.costs.fixed_bytes(self._candidate(LayerChoice(tp=tp), outer)).values())

    def hop_s(self, outer: Outer) -> float:
        """Seconds of a transfer to the next stage."""
        candidate = self._candidate(LayerChoice(tp=self.world // outer.pp), outer)
        return max(self.costs.hop_seconds(candidate)[:-1]) if outer.pp > 1 else 0.0

    def overheads_s(self) -> tuple[float, float]:
        """Seconds that are added (to each micro-batch in each stage, to each step)."""
        return self.costs.calibration.microbatch_overhead_s, self.costs.calibration.step_overhead_s

    def end_choices(self, outer: Outer) -> list[LayerChoice | None]:
        """The legal choices for embedding and head together, which are never recomputed."""
        return [c for c in choices(self.world // outer.pp) if not c.recompute and self._legal(c, outer)]


class ProfilePrices:
    """Prices of measured layers, with traffic by the cluster's links. They are without sequence parallelism, as the profiles were taken."""

    def __init__(self, profile: Profile, costs: CostModel) -> None:
        self.profile, self.costs = profile, costs
        self.world = costs.cluster.num_gpus
        self.runs = tuple((layer.kind, layer.count) for layer in profile.layers)
        self._layers: dict[str, LayerProfile] = {layer.kind: layer for layer in profile.layers}
        c = costs.calibration
        self.slack, self.hidden_share, self.slowdown = 0.0, c.overlap_efficiency, c.overlap_slowdown
        self.sequence_parallel = False
        self._ways: dict[tuple[str, Outer], list[Way]] = {}

    def ways(self, kind: str, outer: Outer) -> list[Way]:
        """The ways to compute a layer of this kind whose degree was measured."""
        if (kind, outer) not in self._ways:
            self._ways[kind, outer] = self._make_ways(kind, outer)
        return self._ways[kind, outer]

    def _make_ways(self, kind: str, outer: Outer) -> list[Way]:
        layer, profile, group = self._layers[kind], self.profile, self.world // outer.pp
        found = []
        for choice in choices(group):
            tp, dp = choice.tp, group // choice.tp
            if outer.samples % dp or tp not in layer.saved_bytes:
                continue
            local = outer.samples // dp
            reduce = layer.reductions * COLLECTIVES["all_reduce"](layer.output_bytes * local, tp, self.costs.link(tp, 1))
            compute = layer.forward(tp) * local
            forward, backward = compute + reduce, profile.backward_of_forward * compute + reduce
            saved = layer.saved_bytes[tp] * local
            transient = 0.0
            if choice.recompute:
                backward += forward
                transient, saved = saved, min(saved, layer.output_bytes * local)
            weights = layer.parameter_bytes / tp
            static, sync = weights * profile.states_per_weight, 0.0
            apart = self.costs.link(dp, tp)
            if choice.zero3:
                forward += COLLECTIVES["all_gather"](weights, dp, apart)
                backward += COLLECTIVES["all_gather"](weights, dp, apart) + COLLECTIVES["reduce_scatter"](weights, dp, apart)
                static /= dp
                transient += weights
            else:
                sync = COLLECTIVES["all_reduce"](weights, dp, apart)
            found.append(Way(choice, forward, backward, sync, 0.0, static, saved, transient))
        return found

    def switch(self, kind: str, before: int, after: int, outer: Outer) -> tuple[float, float]:
        """Seconds (forward, backward) to change the degree of tp between two layers: a larger tp has more samples on each rank, which are
        gathered on the way in, a smaller one's gradients on the way back; the other way is a slice."""
        if before == after:
            return 0.0, 0.0
        large, small = max(before, after), min(before, after)
        nbytes = self._layers[kind].output_bytes * outer.samples * outer.pp / self.world * large
        seconds = COLLECTIVES["all_gather"](nbytes, large // small, self.costs.link(large // small, small))
        return (seconds, 0.0) if after > before else (0.0, seconds)

    def fixed_bytes(self, outer: Outer, stage: int, flight: int) -> float:
        """Bytes of embedding and head: half each with a pipeline. Their activations are of one rank's samples, as are those of the
        layers."""
        at_ends = (stage == 0) + (stage == outer.pp - 1)
        local = outer.samples * outer.pp / self.world
        return (self.profile.other_state_bytes + self.profile.other_saved_bytes * local * flight) * at_ends / 2

    def hop_s(self, outer: Outer) -> float:
        """Seconds of a transfer to the next stage: the widest output, the samples divided over the stage's ranks."""
        if outer.pp == 1:
            return 0.0
        group = self.world // outer.pp
        nbytes = max(layer.output_bytes for layer in self.profile.layers) * outer.samples / group
        return COLLECTIVES["p2p"](nbytes, 2, self.costs.pair_link(0, group, group))

    def overheads_s(self) -> tuple[float, float]:
        """Seconds that are added (to each micro-batch in each stage, to each step): none in a profile of layers."""
        return 0.0, 0.0

    def end_choices(self, outer: Outer) -> list[LayerChoice | None]:
        """The choices for embedding and head: only None, as a profile doesn't search them."""
        return [None]


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
        peak_bytes=peak(prices.fixed_bytes(outer, stage, flight) + static, prices.slack, flight * saved + transient),
    )


def plan_price(prices: Prices, outer: Outer, stages: Sequence[LayerwiseStage]) -> float:
    """Seconds of the step: the simulated schedule, the last exposed reduction, the slowest update."""
    ends = finish_times("1f1b", [s.forward_s for s in stages], [s.backward_s for s in stages], prices.hop_s(outer), outer.num_microbatches)
    finished = max(end + stage.exposed_s for end, stage in zip(ends, stages, strict=True))
    return finished + max(stage.optimizer_s for stage in stages) + prices.overheads_s()[1]
