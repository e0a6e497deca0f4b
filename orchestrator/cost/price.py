"""What others ask of a cost model: seconds and bytes of a layer, a stage and a step, hops between stages, what comes once a step, bounds.

A step is the simulated schedule of its stages, then what of the gradient reduction nothing hides, then the optimizer. Layers of a kind
cost the same and are priced once; a stage is a sum over its spans. Search and report ask the same questions: what is minimised is what is
shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from copy import copy
from math import ceil
from typing import Any, NamedTuple

from msgspec.structs import replace

from orchestrator.cost import memory
from orchestrator.cost.calibration import Calibration
from orchestrator.cost.layer import LayerCost, LayerPrices
from orchestrator.cost.memory import StageMemory, Standing
from orchestrator.cost.network import Network
from orchestrator.cost.schedule import fewest_by_stage
from orchestrator.cost.stage import StageCost, StageSums, exposed_of, exposed_seconds
from orchestrator.cost.step import Played, StepPrice, Transfers, once_seconds, played, prediction, simulated_schedule, step_seconds
from orchestrator.cost.workload import engine_workload
from orchestrator.hardware.collectives import COLLECTIVES, Link
from orchestrator.strategy.axes import pp
from orchestrator.strategy.capabilities import SHARDED_FROM_STAGE, StateBytes, Traits
from orchestrator.strategy.layout import LayerSpan, Prediction, Stage
from orchestrator.strategy.spec import RECOMPUTE_ORDER, Candidate, Mesh, Recompute, Strategy
from orchestrator.strategy.workload import Workload

__all__ = ["CostModel", "LayerCost", "Played", "StageCost", "StageMemory", "StageSums"]
"""The public interface: the model, and the values that it answers with."""


class Added(NamedTuple):
    """All layers of a model added up: what they take at least on all stages together."""

    each_s: tuple[float, ...]
    """Seconds of a micro-batch in all layers of a kind."""
    busy_s: float
    """Seconds of a micro-batch in all of them."""
    forward_s: float
    longest_backward_s: float
    """Seconds of the backward passes with as much recompute as the candidate may have: the most that can hide a reduction."""
    sync_s: float
    gather_s: float
    optimizer_s: float
    slowest_s: float
    """Seconds of a micro-batch in a stage with its share of the layers of some kind."""
    largest_s: float
    """Seconds of a micro-batch in a layer that is computed again."""


class _Setting:
    """What a strategy at a micro-batch size has been priced at."""

    __slots__ = (
        "added",
        "boundary_bytes",
        "fixed_bytes",
        "held",
        "hops",
        "kept",
        "layers",
        "occupied",
        "once",
        "standing",
        "without_experts",
    )

    def __init__(self, strategy: Strategy) -> None:
        mesh = strategy.mesh
        self.without_experts = strategy
        if mesh.ep * mesh.etp > 1:
            alone = replace(mesh, ep=1, etp=1)
            self.without_experts = replace(strategy, mesh=alone, moe_token_dispatcher_type="alltoall", moe_shared_expert_overlap=False)
        """What a layer without experts knows of the strategy."""
        self.layers: dict[tuple[str, Recompute], LayerCost] = {}
        self.added: dict[tuple[Recompute, ...], Added] = {}
        """What all layers take, for each set of recompute modes that bounds reckon with."""
        self.held: dict[tuple[Recompute, ...], list[tuple[int, float, float, float]]] = {}
        """For each kind of layer their number, and of one the static bytes, and the least saved and the least transient ones."""
        self.kept: dict[object, Any] = {}
        self.hops: tuple[float, ...] | None = None
        self.once: float | None = None
        self.occupied: float | None = None
        """Seconds for which a transfer occupies the slowest border between two stages."""
        self.boundary_bytes: float | None = None
        self.fixed_bytes: dict[str, float] | None = None
        self.standing: Standing | None = None


class CostModel:
    """Prices candidates for one workload and engine. `modes`: the recompute modes that bounds reckon with; a search leaves out what none
    of its choices may use. Pure: the caches only save time."""

    def __init__(
        self, workload: Workload, traits: Traits, calibration: Calibration, modes: tuple[Recompute, ...] = RECOMPUTE_ORDER
    ) -> None:
        w = self.workload = engine_workload(workload, traits, calibration)
        self.model, self.training, self.cluster, self.traits, self.calibration = w.model, w.training, w.cluster, w.traits, w.calibration
        self.kinds, self.itemsize = w.kinds, w.itemsize
        self.network = Network(w.cluster, w.calibration, w.traits)
        self._layers = LayerPrices(w, self.network)
        self._with_experts = {kind for kind, layer in w.kinds.items() if any(weight.kind == "expert" for weight in layer.weights)}
        self.modes = modes
        self._modes_to: dict[tuple[tuple[Recompute, ...], Recompute], tuple[Recompute, ...]] = {}
        self._settings: dict[tuple[Strategy, int], _Setting] = {}
        self._floors: dict[tuple[object, ...], list[tuple[int, float, float]]] = {}
        self._setting = _Setting(Strategy(mesh=Mesh()))
        self._current: Candidate | None = None
        self._memories: dict[int, StageMemory] = {}

    def with_modes(self, modes: tuple[Recompute, ...]) -> CostModel:
        """These prices, whose bounds reckon with other recompute modes; both share what they have priced."""
        if modes == self.modes:
            return self
        other = copy(self)
        other.modes = modes
        return other

    # ---- layers

    def layer(self, candidate: Candidate, kind: str, recompute: Recompute) -> LayerCost:
        """One layer of this kind under the candidate, with this recompute. Raises KeyError for a kind that the model has not."""
        layers = self._setting_of(candidate).layers
        cost = layers.get((kind, recompute))
        if cost is None:
            strategy = self._strategy_of(candidate, kind)
            known = layers if strategy is candidate.strategy else self._known(strategy, candidate.micro_batch_size).layers
            cost = known.get((kind, recompute))
            if cost is None:
                cost = known[kind, recompute] = self._layers.of(self.kinds[kind], recompute, strategy, candidate.micro_batch_size)
            layers[kind, recompute] = cost
        return cost

    def modes_of(self, candidate: Candidate, kind: str) -> tuple[Recompute, ...]:
        """The recompute modes that a layer of this kind may have, up to the candidate's own, which is the strongest."""
        if not self.kinds[kind].recomputable:
            return ("none",)
        strongest = candidate.strategy.recompute
        found = self._modes_to.get((self.modes, strongest))
        if found is None:
            among = RECOMPUTE_ORDER[: RECOMPUTE_ORDER.index(strongest) + 1]
            found = self._modes_to[self.modes, strongest] = tuple(mode for mode in self.modes if mode in among)
        return found

    def kept(self, candidate: Candidate) -> dict[object, Any]:
        """What others made of a candidate's prices, and find by keys of their own, for candidates that differ in virtual stages too."""
        return self._setting_of(candidate).kept

    def layer_floor_seconds(self, candidate: Candidate, kind: str, states: StateBytes) -> tuple[float, float]:
        """Seconds (forward, backward) that a layer of this kind takes at least, whatever its recompute, ZeRO stage and offload; `states`:
        the fewest bytes per parameter of the stages in question."""
        strategy = self._strategy_of(candidate, kind)
        return self._layers.floor_seconds(self.kinds[kind], strategy, candidate.micro_batch_size, states)

    def floors(self, candidate: Candidate, states: StateBytes) -> list[tuple[int, float, float]]:
        """For each kind of layer how many there are, and the seconds that its forward pass and both passes take at least
        (`layer_floor_seconds`): the same for candidates that are alike in all that these depend on."""
        key = self._alike(candidate, states)
        found = self._floors.get(key)
        if found is None:
            found = self._floors[key] = []
            for kind, count in self.workload.counts.items():
                forward, backward = self.layer_floor_seconds(candidate, kind, states)
                found.append((count, forward, forward + backward))
        return found

    def passes_key(self, candidate: Candidate) -> tuple[object, ...]:
        """What the seconds of layers depend on, and the bytes that they keep for backward: candidates that share it have the same, whatever
        their recompute. From ZeRO-2 on, whose traffic goes on beside the passes, that is the whole strategy."""
        strategy = candidate.strategy
        if strategy.zero_stage >= SHARDED_FROM_STAGE["gradient"]:
            return strategy, candidate.micro_batch_size
        return self._alike(candidate, self._layers.replicas.states_of(strategy))

    def _alike(self, candidate: Candidate, states: StateBytes) -> tuple[object, ...]:
        return self._layers.alike(candidate.strategy, candidate.micro_batch_size, states)

    def layer_static_bytes(self, candidate: Candidate, kind: str) -> float:
        """Bytes of a layer's weights, gradients and states (`LayerCost.static_bytes`), without pricing its passes."""
        return self._layers.static_bytes(self.kinds[kind], candidate.strategy)

    # ---- stages

    def of_stage(self, candidate: Candidate, index: int) -> CostModel:
        """The prices of this stage's layers: of a cluster of several types of GPU those of the type that computes it."""
        return self

    def stage(self, candidate: Candidate, stage: Stage, index: int) -> StageCost:
        """Seconds and peak bytes of one stage; `index` counts from 0."""
        here = self.of_stage(candidate, index)
        return here.stage_cost(candidate, here.sums(candidate, stage.layers), index)

    def sums(self, candidate: Candidate, spans: Iterable[LayerSpan] = ()) -> StageSums:
        """A stage's layers added up; to none, others may be added one by one."""
        sums = StageSums(candidate.vpp, self.calibration.microbatch_overhead_s / 2)
        layers = self._setting_of(candidate).layers
        for span in spans:
            cost = layers.get((span.kind, span.recompute)) or self.layer(candidate, span.kind, span.recompute)
            sums.add(cost, span.count, span.chunk)
        return sums

    def stage_cost(self, candidate: Candidate, sums: StageSums, index: int) -> StageCost:
        """What layers with these sums cost as stage `index`."""
        return StageCost(
            forward_s=tuple(sums.forward_s),
            backward_s=tuple(sums.backward_s),
            exposed_s=exposed_seconds(self.workload, candidate, sums),
            optimizer_s=sums.optimizer_s,
            peak_bytes=self.stage_memory(candidate, index).peak_bytes(sums),
        )

    def stage_memory(self, candidate: Candidate, index: int) -> StageMemory:
        """What a stage's memory depends on beside its layers: answers peak bytes from sums."""
        self._setting_of(candidate)
        found = self._memories.get(index)
        if found is None:
            found = self._memories[index] = StageMemory(self.workload, candidate, index, self._standing(candidate))
        return found

    def _standing(self, candidate: Candidate) -> Standing:
        setting = self._setting_of(candidate)
        if setting.standing is None:
            fixed, states = self.fixed_bytes(candidate), self._layers.replicas.states_of(candidate.strategy)
            boundary = self.boundary_bytes(candidate) if candidate.mesh.pp > 1 else 0.0
            buckets = memory.bucket_bytes(self.workload, candidate, states, 1) > 0
            setting.standing = Standing(fixed, sum(fixed.values()), boundary, states, buckets)
        return setting.standing

    def fixed_bytes(self, candidate: Candidate) -> dict[str, float]:
        """Bytes that every rank has whatever its layers, by cause: context, communicators, workspaces, the pipeline's buffers."""
        setting = self._setting_of(candidate)
        if setting.fixed_bytes is None:
            setting.fixed_bytes = memory.fixed_bytes(self.workload, candidate, self.boundary_bytes(candidate))
        return setting.fixed_bytes

    def user_buffer_bytes(self, candidate: Candidate) -> float:
        """Bytes of Transformer Engine's user buffers on every rank; 0 where the candidate has none."""
        return memory.user_buffer_bytes(self.workload, candidate)

    def bucket_bytes(self, candidate: Candidate, parameters: int) -> float:
        """Bytes of the reduction buckets and prefetched weights of a rank with so many parameters."""
        return memory.bucket_bytes(self.workload, candidate, self._layers.replicas.states_of(candidate.strategy), parameters)

    # ---- between stages

    def link(self, size: int, stride: int) -> Link:
        """What a collective over `size` ranks that are `stride` apart has."""
        return self.network.link(size, stride)

    def pair_link(self, first: int, second: int, width: int) -> Link:
        """The link between ranks `first + i` and `second + i`, i < `width`."""
        return self.network.pair_link(first, second, width)

    def boundary_bytes(self, candidate: Candidate) -> float:
        """Bytes of one transfer: the widest border between two kinds of layers, the same for all stages."""
        setting = self._setting_of(candidate)
        if setting.boundary_bytes is None:
            kinds = list(self.kinds)
            shape = (candidate.strategy, candidate.micro_batch_size, self.itemsize)
            borders = [pp.boundary_bytes(self.model, kinds[:i], self.kinds[kinds[i]], kinds[i:], *shape) for i in range(1, len(kinds))]
            setting.boundary_bytes = max(borders, default=0.0)
        return setting.boundary_bytes

    def hop_seconds(self, candidate: Candidate) -> tuple[float, ...]:
        """Seconds of a transfer by virtual boundary; the entry after a chunk's last stage is the way back to stage 0.

        All stages carry the same tensor: the hidden states, and in an encoder-decoder the encoder's output with them.
        """
        mesh = candidate.mesh
        setting = self._setting_of(candidate)
        if setting.hops is None:
            nbytes, stride = self.boundary_bytes(candidate), mesh.stride("pp")
            links = [self.pair_link(stage * stride, (stage + 1) % mesh.pp * stride, stride) for stage in range(mesh.pp)]
            overhead = self.calibration.collective_overhead_s
            setting.hops = tuple(COLLECTIVES["p2p"](nbytes, 2, link) + overhead for link in links)
        return setting.hops * candidate.vpp

    def busy_seconds(self, candidate: Candidate) -> float:
        """Seconds of a step for which the busiest border's link carries transfers in one direction: what an interleaved schedule takes at
        least, whose transfers wait for nobody. In the others each transfer blocks its stages (`Schedule.transfers`), which is more.

        Every micro-batch takes an activation through each chunk's border, and in the other direction a gradient. The way back from the last
        stage to the first, which crosses no slower level than some border, is taken once less; two stages have one link for both.
        """
        pp, vpp, m = candidate.mesh.pp, candidate.vpp, candidate.num_microbatches
        if pp == 1 or vpp == 1:
            return 0.0
        setting = self._setting_of(candidate)
        if setting.occupied is None:
            nbytes, stride = self.boundary_bytes(candidate), candidate.mesh.stride("pp")
            borders = [self.pair_link(stage * stride, (stage + 1) * stride, stride) for stage in range(pp - 1)]
            setting.occupied = max(nbytes / link.bandwidth for link in borders)
        return m * (2 * vpp - 1 if pp == 2 else vpp) * setting.occupied

    # ---- the whole

    def schedule(self, candidate: Candidate) -> str:
        """The name in `cost.schedule` of what is simulated."""
        return simulated_schedule(self.cluster, candidate)

    def once_seconds(self, candidate: Candidate) -> float:
        """Seconds that a step takes once, whatever its stages: the step's overhead, and the all-reduce of tied embeddings between first and
        last stage."""
        setting = self._setting_of(candidate)
        if setting.once is None:
            setting.once = once_seconds(self.workload, self.network, self._layers.replicas, candidate)
        return setting.once

    def score(self, candidate: Candidate, stages: tuple[Stage, ...]) -> tuple[float, float]:
        """(step_time_s, peak_memory_bytes), as `price` reports them, without the itemisation."""
        costs = [self.stage(candidate, stage, index) for index, stage in enumerate(stages)]
        return self.score_stages(candidate, costs)

    def score_stages(self, candidate: Candidate, costs: list[StageCost], upper: float = float("inf")) -> tuple[float, float]:
        """`score` for stages that are priced already. `upper`: where the step takes longer, the answer may be any seconds above it that
        the step does not undercut."""
        seconds = step_seconds(candidate, costs, self._transfers(candidate), self.once_seconds(candidate), upper)
        return seconds, max(cost.peak_bytes for cost in costs)

    def price(self, candidate: Candidate, stages: tuple[Stage, ...]) -> Prediction:
        """The step's seconds and the ranks' bytes, itemised. `by_cause` is the busiest stage's."""
        by_stage = [self.of_stage(candidate, index) for index in range(len(stages))]
        sums = [here.sums(candidate, stage.layers) for here, stage in zip(by_stage, stages, strict=True)]
        costs = [self.stage_cost(candidate, added, index) for index, added in enumerate(sums)]
        memories = [self.stage_memory(candidate, index) for index in range(len(stages))]
        step = StepPrice(self.workload, candidate, costs, self._transfers(candidate), self.once_seconds(candidate))
        busiest = by_stage[step.busiest()]
        return prediction(step, stages, sums, memories, lambda span: busiest.layer(candidate, span.kind, span.recompute))

    def played(self, candidate: Candidate, stages: tuple[Stage, ...]) -> Played:
        """The step that `price` prices, pass by pass: what a picture of it draws."""
        costs = [self.stage(candidate, stage, index) for index, stage in enumerate(stages)]
        return played(candidate, costs, self._transfers(candidate), self.once_seconds(candidate))

    def time_floor(self, candidate: Candidate) -> float:
        """Seconds that no split of the layers and no recompute up to the candidate's undercuts.

        A stage is busy for m times its layers, then exposes its synchronisation and updates; the slowest is at least the mean, and at
        least a stage with ceil(count / pp) layers of a kind; and one micro-batch must pass every layer.
        """
        m, stages = candidate.num_microbatches, candidate.mesh.pp
        overhead = self.calibration.microbatch_overhead_s * candidate.vpp
        layers = self.added(candidate)
        half = stages * overhead / 2
        passes = layers.forward_s + half, layers.longest_backward_s + half, min(1.0, self.calibration.overlap_slowdown)
        exposed = exposed_of(self.workload, candidate, layers.sync_s, layers.gather_s, *passes)
        mean = (m * layers.busy_s + exposed + layers.optimizer_s) / stages + m * overhead
        return max(mean, m * (layers.slowest_s + overhead), layers.busy_s + stages * overhead) + self.once_seconds(candidate)

    def added(self, candidate: Candidate) -> Added:
        """All layers of the model under the candidate, none of them recomputed: what runs again only takes time, hidden traffic included.
        Candidates that differ in virtual stages have the same."""
        known = self._setting_of(candidate).added
        if self.modes not in known:
            stages, each = candidate.mesh.pp, list[float]()
            busy = sync = gather = optimizer = forward = backward = slowest = largest = 0.0
            for kind, count in self.workload.counts.items():
                modes, plain = self.modes_of(candidate, kind), self.layer(candidate, kind, "none")
                seconds = plain.seconds
                each.append(count * seconds)
                busy += each[-1]
                forward += count * plain.forward_s
                backward += count * max(
                    [self.layer(candidate, kind, mode).backward_s for mode in (("full",) if "full" in modes else modes)]
                )
                sync += count * plain.sync_s
                gather += count * plain.gather_s
                optimizer += count * plain.optimizer_s
                slowest = max(slowest, ceil(count / stages) * seconds)
                largest = max(largest, seconds + plain.forward_s)
            known[self.modes] = Added(tuple(each), busy, forward, backward, sync, gather, optimizer, slowest, largest)
        return known[self.modes]

    def memory_floor(self, candidate: Candidate) -> float:
        """Bytes that the fullest rank can't go below, whatever the split and the recompute up to the candidate's.

        For one kind: were all stages within P bytes, stage i held at most P / (static + in flight(i) x saved) of its layers, and these
        must sum to its count. Over all kinds: the mean of the static bytes and one micro-batch's saved ones.
        """
        stages = candidate.mesh.pp
        fixed = sum(self.fixed_bytes(candidate).values())
        slack = 1 + self.calibration.allocator_slack
        shape = candidate.num_microbatches, candidate.vpp, candidate.microbatch_group_size_per_vp_stage
        flights = fewest_by_stage(candidate.schedule, stages, *shape)
        least, groups = min(flights), Counter(flights).items()
        mean = floor = 0.0
        for count, static, saved, transient in self._least_held(candidate):
            mean += count * (static + slack * saved * least)
            floor = max(floor, static + slack * (saved * least + transient))
            if count > 1:  # one alone needs no more than that
                share = sum([many / nbytes for flight, many in groups if (nbytes := static + slack * saved * flight) > 0])
                floor = max(floor, count / share if share else 0.0)
        return fixed + max(floor, mean / stages)

    def _least_held(self, candidate: Candidate) -> list[tuple[int, float, float, float]]:
        """For each kind of layer their number, and what one holds at least: static bytes, saved ones and transient ones."""
        known = self._setting_of(candidate).held
        if self.modes not in known:
            found = known[self.modes] = []
            for kind, count in self.workload.counts.items():
                offered = self.modes_of(candidate, kind)  # none keeps less than full, and none is in passing less than without recompute
                modes = [self.layer(candidate, kind, mode) for mode in (("none", "full") if "full" in offered else offered)]
                transient = min([max(cost.transient_forward_bytes, cost.transient_backward_bytes) for cost in modes])
                found.append((count, modes[0].static_bytes, min([cost.saved_bytes for cost in modes]), transient))
        return known[self.modes]

    def _transfers(self, candidate: Candidate) -> Transfers:
        hops = self.hop_seconds(candidate) if candidate.mesh.pp > 1 else 0.0
        active = self._layers.active_share(candidate.strategy, candidate.micro_batch_size)
        return Transfers(self.schedule(candidate), hops, self.busy_seconds(candidate), active)

    def _setting_of(self, candidate: Candidate) -> _Setting:
        """What is priced already for this strategy and micro-batch size. A search asks thousands of times in a row for one candidate:
        only a new one is hashed."""
        if candidate is not self._current:
            self._setting = self._known(candidate.strategy, candidate.micro_batch_size)
            self._current, self._memories = candidate, {}
        return self._setting

    def _known(self, strategy: Strategy, micro_batch_size: int) -> _Setting:
        found = self._settings.get((strategy, micro_batch_size))
        if found is None:
            found = self._settings[strategy, micro_batch_size] = _Setting(strategy)
        return found

    def _strategy_of(self, candidate: Candidate, kind: str) -> Strategy:
        """The part of the candidate's strategy that a layer of this kind depends on."""
        return candidate.strategy if kind in self._with_experts else self._setting_of(candidate).without_experts
