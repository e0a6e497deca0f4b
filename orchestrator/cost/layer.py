"""What one layer costs on one rank: seconds of its forward and backward pass, seconds that come once a step (gradient reduction, gather of
the updated weights, optimizer), and bytes. Sums up the passes (cost/passes.py) and the data-parallel copies of its weights
(cost/replicas.py); stages and pipelines are not known here."""

from __future__ import annotations

from math import inf
from typing import Final, NamedTuple

from msgspec.structs import replace

from orchestrator.cost import quantised
from orchestrator.cost.activations import LayerActivations
from orchestrator.cost.graphs import Graph, graph_of
from orchestrator.cost.muon import Muon
from orchestrator.cost.network import Network
from orchestrator.cost.passes import Passes, PassPrices
from orchestrator.cost.replicas import Replica, ReplicaPrices
from orchestrator.cost.states import states
from orchestrator.cost.workload import EngineWorkload
from orchestrator.model.spec import Gemm, LayerSpec
from orchestrator.model.training import QUANTISED
from orchestrator.strategy.axes import dp
from orchestrator.strategy.capabilities import SHARDED_FROM_STAGE, StateBytes
from orchestrator.strategy.graphs import by_layer, graphed_modules
from orchestrator.strategy.offloading import offloaded
from orchestrator.strategy.spec import RECOMPUTE_MODULES, WITHOUT_MLP, Mesh, Recompute, Strategy
from orchestrator.values import Value

FORWARD_SHARE = 1 / 3
"""Share of a layer's launches that its forward pass has: its backward has twice as many."""
CHECKPOINTS_ON_GPU = 3
"""Checkpoints of a stage that stay on the GPU where the others go to host memory: the last one, which never leaves, and two whose copies
may go on (keep_last_count and max_fwd_stash_count of DeepSpeed 0.19.8's runtime/activation_checkpointing/offload_activations.py)."""

PASSING_LAYERS = 2
"""Layers whose offloaded tensors are on the GPU beside a pass: the one that it is in, and in forward the one before, whose copy goes on, in
backward the next, which is fetched beside it (core/pipeline_parallel/fine_grained_activation_offload.py:923, bulk_reload)."""


Pair = tuple[float, float]
"""Seconds of a layer's forward and backward pass."""


class LayerCost(Value, frozen=True, kw_only=True):
    """One layer of a kind on one rank. Seconds and bytes per micro-batch unless they say otherwise."""

    forward_s: float
    backward_s: float
    """Seconds of backward, with recompute, exposed traffic of tp, cp and ZeRO, and launches."""
    saved_bytes: float
    """Bytes kept for backward by each micro-batch in flight."""
    transient_forward_bytes: float
    transient_backward_bytes: float
    """Bytes alive while a pass is in this layer, beside those kept: a stage needs the largest of its layers'."""
    weight_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    backward_bytes: float
    """Bytes that come to the static ones in backward (transient .grad)."""
    step_bytes: float
    """Bytes that come to the static ones in the optimizer's step."""
    sync_s: float
    """Seconds of a step for the gradient reduction, before overlap."""
    gather_s: float
    """Seconds of a step for the weights' all-gather after the update (ZeRO-1 and 2), before overlap."""
    optimizer_s: float
    """Seconds of a step for the optimizer's update."""
    parameters: int
    """Parameters on this rank, before ZeRO."""
    by_cause: dict[str, float]
    """Seconds of forward and backward together, by cause."""

    @property
    def static_bytes(self) -> float:
        """Bytes of weights, gradients and optimizer states."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def seconds(self) -> float:
        """Seconds of forward and backward for one micro-batch."""
        return self.forward_s + self.backward_s


class Graphed(NamedTuple):
    """Host seconds for the launches of the passes that a layer's graph replays at once, bytes of its own buffers, and those that each
    micro-batch in flight keeps for it."""

    launches: Pair
    buffer_bytes: float
    kept_bytes: float


NO_GRAPH: Final = Graphed((0.0, 0.0), 0.0, 0.0)


class _Rest(NamedTuple):
    """What a layer's price has whatever its recompute: its copies on a rank, bytes, and shares of the passes (`alone_share`,
    `active_share`)."""

    states: StateBytes
    copies: Replica
    parameters: int
    weight_bytes: float
    gathered: float
    scattered: float
    graph: Graphed
    alone: float
    active: float


class LayerPrices:
    """Prices of the layers of one workload under one engine and its constants, over one network."""

    def __init__(self, workload: EngineWorkload, network: Network) -> None:
        self._workload, self._network = workload, network
        self.passes = PassPrices(workload, network)
        self.replicas = ReplicaPrices(workload, network)
        self._muon = Muon(workload, network)
        self._copies: dict[tuple[str, Strategy], Replica] = {}
        """A rank's copy of a layer's weights by kind of layer and strategy: it is the same for every recompute and micro-batch."""
        self._graphs: dict[tuple[str, Strategy, int], Graphed] = {}
        self._newest: tuple[LayerSpec, Strategy, int, _Rest] | None = None
        self._experts: dict[str, int] = {}
        """Parameters of all experts of a layer, by kind of layer."""
        self._experts_host_s: dict[str, float] = {}
        """`_experts_host_seconds` by kind of layer."""
        self._recomputable = sum(count for kind, count in workload.counts.items() if workload.kinds[kind].recomputable)

    def of(self, layer: LayerSpec, recompute: Recompute, strategy: Strategy, micro_batch_size: int) -> LayerCost:
        """The cost of a layer (not cached). A layer that can't be recomputed (embedding, head) is priced as with recompute=none."""
        if not layer.recomputable or layer.forward_only:
            recompute = "none"
        elif strategy.overlap_moe_expert_parallel_comm and layer.dispatches:
            recompute = WITHOUT_MLP.get(recompute, recompute)  # the combined schedule calls the experts' parts, not their layer
        w, here = self._workload, self._rest_of(layer, strategy, micro_batch_size)
        passes = self.passes.of(layer, recompute, strategy, micro_batch_size, here.states)
        kept = passes.kept()
        left = copied = passing = 0.0
        if strategy.offload_activations:
            # DeepSpeed's is of checkpoints; Transformer Engine's (cpu_offload.py), which Megatron's layers have, of all that is saved.
            leaves = recompute == "full" or (w.traits.layers != "hugging_face" and layer.recomputable)
            copied = kept.saved if leaves else 0.0
            left = copied * self._share_beyond(CHECKPOINTS_ON_GPU)
        if strategy.offload_modules is not None and layer.recomputable:
            left, copied = self._offloaded(layer, recompute, strategy, micro_batch_size, strategy.offload_modules)
            passing = PASSING_LAYERS * left
        forward_s, backward_s, causes = self._seconds(
            layer, recompute, strategy, micro_batch_size, passes, here.alone, here.copies, self._copy_seconds(copied)
        )
        active, held, graph = here.active, here.copies.held, here.graph
        if active != 1.0:
            causes = {cause: active * seconds for cause, seconds in causes.items()}
        unpacked = (0.0, 0.0)
        if w.training.lora is not None and w.training.lora.bits is not None:
            unpacked = quantised.working(layer, strategy, micro_batch_size, w.training.precision, w.weight_itemsize, recompute == "full")
        return LayerCost(
            forward_s=active * forward_s,
            backward_s=active * backward_s,
            saved_bytes=kept.saved - left + graph.kept_bytes,
            transient_forward_bytes=kept.transient_forward + here.gathered + unpacked[0] + passing,
            transient_backward_bytes=kept.transient_backward
            + here.gathered
            + unpacked[1]
            + passing
            + here.scattered
            + (kept.saved + kept.transient_forward if strategy.overlap_moe_expert_parallel_comm and layer.recomputable else 0.0),
            # of the layer that goes forward beside it; the ends have none (model_chunk_schedule_plan.py, run)
            weight_bytes=here.weight_bytes,
            gradient_bytes=held.gradients,
            optimizer_bytes=held.optimizer,
            backward_bytes=held.backward + graph.buffer_bytes,
            step_bytes=held.step,
            sync_s=here.copies.sync_s,
            gather_s=here.copies.gather_s,
            optimizer_s=here.copies.optimizer_s,
            parameters=here.parameters,
            by_cause=causes,
        )

    def _rest_of(self, layer: LayerSpec, strategy: Strategy, micro_batch_size: int) -> _Rest:
        """What the layer's price has whatever its recompute; the latest is kept, as its modes are asked for one after the other."""
        known = self._newest
        if known is not None and known[0] is layer and known[1] is strategy and known[2] == micro_batch_size:
            return known[3]
        w, mesh = self._workload, strategy.mesh
        dense = self.replicas.dense_parameters(layer, mesh.tp, with_tied=mesh.pp > 1)
        frozen = self.replicas.frozen_parameters(layer, mesh.tp, with_tied=mesh.pp > 1)
        experts = self._expert_parameters(layer, strategy)
        copies = self._copies.get((layer.kind, strategy))
        if copies is None:
            own, routed = self._grown(layer, strategy, dense, experts)
            per_frozen = self.replicas.frozen_of(strategy, layer)
            copies = self.replicas.of(own, strategy, frozen, linears=layer.recomputable, per_frozen=per_frozen)
            if experts:
                apart, ranks = self._frozen_experts(layer, routed), dp.ranks(strategy)
                copies = copies.beside(self.replicas.of(routed, folded(strategy), apart, ranks, linears=True, per_frozen=per_frozen))
            if self._muon.has(layer):
                update = sum(self._muon.update_s(layer, strategy, experts=of) for of in (False, True))
                copies = copies._replace(optimizer_s=copies.optimizer_s + update)
            self._copies[layer.kind, strategy] = copies
        parameters = dense + experts
        gathered = scattered = 0.0  # weights as ZeRO-3 gathers them, and gradients before they are scattered
        if strategy.zero_stage >= SHARDED_FROM_STAGE["weight"]:
            _, itemsize = self.replicas.weights_of(strategy, linears=layer.recomputable)
            _, frozen_itemsize = self.replicas.frozen_of(strategy, layer)
            frozen += self._frozen_experts(layer, experts) if experts else 0
            gathered = (parameters - frozen) * itemsize + frozen * frozen_itemsize
            scattered = float((parameters - frozen) * w.weight_itemsize)
        rest = _Rest(
            states=self.replicas.states_of(strategy),
            copies=copies,
            parameters=parameters,
            weight_bytes=copies.held.weights + self._copies_beside(layer, strategy) * parameters,
            gathered=gathered,
            scattered=scattered,
            graph=self._graphed(layer, strategy, micro_batch_size) if by_layer(strategy) else NO_GRAPH,
            alone=self.alone_share(strategy, micro_batch_size),
            active=self.active_share(strategy, micro_batch_size),
        )
        self._newest = layer, strategy, micro_batch_size, rest
        return rest

    def static_bytes(self, layer: LayerSpec, strategy: Strategy) -> float:
        """Bytes of weights, gradients and optimizer states of a layer on this rank."""
        per_parameter, _ = self.replicas.weights_of(strategy, linears=layer.recomputable)
        dense = self.replicas.dense_parameters(layer, strategy.mesh.tp, with_tied=strategy.mesh.pp > 1)
        frozen = self.replicas.frozen_parameters(layer, strategy.mesh.tp, with_tied=strategy.mesh.pp > 1)
        experts = self._expert_parameters(layer, strategy)
        dense, experts = self._grown(layer, strategy, dense, experts)
        held = states(dense - frozen, per_parameter, strategy).resident + self._copies_beside(layer, strategy) * (dense + experts)
        if frozen:
            held += states(frozen, self.replicas.frozen_of(strategy, layer)[0], strategy).weights
        if experts:
            still = self._frozen_experts(layer, experts)
            held += states(experts - still, per_parameter, folded(strategy)).resident
            if still:
                held += states(still, self.replicas.frozen_of(strategy, layer)[0], folded(strategy)).weights
        return held

    def _grown(self, layer: LayerSpec, strategy: Strategy, dense: int, experts: int) -> tuple[int, int]:
        """Elements that the buffers of so many parameters of a layer have, without and of its experts."""
        if not self._muon.has(layer):
            return dense, experts
        return round(dense * self._muon.growth(strategy, experts=False)), round(experts * self._muon.growth(strategy, experts=True))

    def _copies_beside(self, layer: LayerSpec, strategy: Strategy) -> float:
        """Bytes per weight of the FP8 copies beside a bf16 one."""
        return self._workload.fp8_copies if layer.recomputable and not strategy.fp8_param_gather else 0.0

    def _expert_parameters(self, layer: LayerSpec, strategy: Strategy) -> int:
        """Parameters of the experts on one rank, before ZeRO."""
        experts = self._experts.get(layer.kind)
        if experts is None:
            experts = self._experts[layer.kind] = sum(weight.local_numel(1) for weight in layer.weights if weight.kind == "expert")
        return experts // (strategy.mesh.ep * strategy.mesh.etp)

    def _frozen_experts(self, layer: LayerSpec, experts: int) -> int:
        """Parameters of so many experts' that are not trained."""
        if self._workload.trainable == inf:
            return 0
        frozen = sum(weight.local_numel(1) for weight in layer.weights if weight.kind == "expert" and weight.frozen)
        return experts * frozen // self._experts[layer.kind]

    def floor_seconds(self, layer: LayerSpec, strategy: Strategy, micro_batch_size: int, states: StateBytes) -> tuple[float, float]:
        """Seconds (forward, backward) that no price of this layer undercuts, whatever its recompute, its ZeRO stage and its offload.
        `states`: the fewest bytes per parameter that any of the stages in question has."""
        passes = self.passes.of(layer, "none", strategy, micro_batch_size, states)
        active, alone = self.active_share(strategy, micro_batch_size), self.alone_share(strategy, micro_batch_size)
        least = passes.forward_s + alone * passes.alone_forward_s, passes.backward_s + alone * passes.alone_backward_s
        launch = passes.launch_forward_s, passes.launch_backward_s
        forward, backward = self._bounded(layer, "none", strategy, micro_batch_size, least, launch, passes.behind_dispatch_s, alone)
        return active * forward, active * backward

    def alike(self, strategy: Strategy, micro_batch_size: int, states: StateBytes) -> tuple[object, ...]:
        """What `floor_seconds` depends on beside the layer."""
        shares = self.active_share(strategy, micro_batch_size), self.alone_share(strategy, micro_batch_size)
        return (*shares, strategy.cuda_graph_impl, strategy.cuda_graph_modules, *self.passes.key(strategy, micro_batch_size, states))

    def alone_share(self, strategy: Strategy, micro_batch_size: int) -> float:
        """The share, 0 to 1, of a rank's passes that run alone where Megatron pairs a forward with a backward pass of another micro-batch
        to hide the exchange of tokens: warm-up, and as many at the end. 0 without that option. Without a pipeline one forward and one
        backward pass of m (core/pipeline_parallel/combined_1f1b.py); of the vpp m of stage r in interleaving 2(pp - r - 1) + (vpp - 1) pp +
        1 (schedules.py:778), in the stages' mean pp/m of them, whatever vpp."""
        if not strategy.overlap_moe_expert_parallel_comm:
            return 0.0
        mesh = strategy.mesh
        m = max(1, self._workload.training.global_batch_size // (mesh.dp * micro_batch_size))
        return min(1.0, mesh.pp / m)

    def active_share(self, strategy: Strategy, micro_batch_size: int) -> float:
        """The factor, 0 to 1, on seconds that a layer takes while all ranks compute; 1 on GPUs. Where ranks share cores
        (`Calibration.core_share`), one in a pipeline of p stages works m of m + p - 1 times, and the others have its cores meanwhile: all
        the work over all the cores bounds the step from below, and so does a rank that is alone on its cores."""
        mesh, least = strategy.mesh, self._workload.calibration.core_share
        if least >= 1.0:
            return least
        m = max(1, self._workload.training.global_batch_size // (mesh.dp * micro_batch_size))
        return max(least, m / (m + mesh.pp - 1))

    def _seconds(
        self,
        layer: LayerSpec,
        recompute: Recompute,
        strategy: Strategy,
        micro_batch_size: int,
        plain: Passes,
        alone: float,
        dense: Replica,
        copy_s: float,
    ) -> tuple[float, float, dict[str, float]]:
        """Seconds (forward, backward, both by cause): the passes, of which the share `alone` has no other beside it, with ZeRO's traffic in
        every micro-batch; never faster than their launches, which cores make between their computing, nor than `copy_s`, a copy between
        GPU and host memory that goes on beside each."""
        c = self._workload.calibration
        causes = dict(plain.causes)
        forward, backward = plain.forward_s + alone * plain.alone_forward_s, plain.backward_s + alone * plain.alone_backward_s
        causes["ep"] += alone * (plain.alone_forward_s + plain.alone_backward_s)
        forward_launch, backward_launch = plain.launch_forward_s, plain.launch_backward_s
        available = {"forward": plain.compute_forward_s, "backward": plain.compute_backward_s}  # what the traffic may hide behind
        for item, moved_s in dense.in_passes:
            if layer.forward_only and item.when == "backward":
                continue
            exposed, slowed = self._network.exposed(moved_s, item, available[item.when])
            available[item.when] = max(0.0, available[item.when] - (moved_s - exposed))
            causes["dp"] += exposed
            causes["overlap"] += slowed
            if item.when == "forward":
                forward, forward_launch = forward + (exposed + slowed), forward_launch + c.collective_launch_s
            else:
                backward, backward_launch = backward + (exposed + slowed), backward_launch + c.collective_launch_s
        if layer.forward_only or layer.recomputable:
            forward_launch = max(forward_launch, FORWARD_SHARE * c.layer_floor_s)
        if layer.recomputable and not layer.forward_only:
            backward_launch = max(backward_launch, (1 - FORWARD_SHARE) * c.layer_floor_s)
        passes, launch = (forward, backward), (forward_launch, backward_launch)
        bound = self._bounded(layer, recompute, strategy, micro_batch_size, passes, launch, plain.behind_dispatch_s, alone)
        causes["overhead"] += (bound[0] + bound[1]) - (forward + backward)
        carried_s = self._carried_seconds(strategy, micro_batch_size, dense.carried_bytes) if dense.carried_bytes else 0.0
        if copy_s or carried_s:
            copies = copy_s, copy_s + carried_s
            causes["offload"] += sum([copied - seconds for copied, seconds in zip(copies, bound, strict=True) if copied > seconds])
            bound = max(bound[0], copies[0]), max(bound[1], copies[1])
        return *bound, causes

    def _carried_seconds(self, strategy: Strategy, micro_batch_size: int, nbytes: float) -> float:
        """Seconds for which so many bytes of gradients (`Replica.carried_bytes`) are on the host's link in a micro-batch's backward, in the
        mean over a step's: at stage 2 the first micro-batch's go down alone, and where it is the only one they do so behind it."""
        c, cluster = self._workload.calibration, self._workload.cluster
        if strategy.zero_stage < SHARDED_FROM_STAGE["weight"]:
            m = max(1, self._workload.training.global_batch_size // (strategy.mesh.dp * micro_batch_size))
            nbytes *= 0.0 if m == 1 else 1 - 1 / (2 * m)
        return nbytes / (cluster.host_bandwidth * c.host_efficiency)

    def _offloaded(
        self, layer: LayerSpec, recompute: Recompute, strategy: Strategy, micro_batch_size: int, modules: str
    ) -> tuple[float, float]:
        """Bytes of a layer and micro-batch that Megatron's offload of modules takes from the GPU, and those that it copies to the host:
        what attention gives is kept by its kernel and by the projection behind it, and copied for either (FusedAttnFunc; attention.py:1147,
        1207 of megatron-core)."""
        w, mesh = self._workload, strategy.mesh

        def nbytes(of: str, precision: str) -> float:
            sp = strategy.sequence_parallel
            part = offloaded(layer, of, mesh.tp, mesh.cp, sequence_parallel=sp, micro_batch_size=micro_batch_size)
            priced = LayerActivations(part, strategy, micro_batch_size, precision, w.traits, w.calibration, self._network.domain)
            return priced.with_recompute(recompute).saved

        leaves = nbytes(modules, w.training.precision)
        return leaves, leaves + (nbytes("attn_proj", "bf16") if "core_attn" in modules.split("+") else 0.0)

    def _share_beyond(self, first: int) -> float:
        """The share of the layers that can be recomputed which is left without the first so many."""
        return max(0.0, 1 - first / self._recomputable)

    def _copy_seconds(self, checkpoint: float) -> float:
        """Seconds in which a copy engine, on a stream of its own, takes a layer's checkpoint of so many bytes to host memory in forward, or
        back in backward: all layers' but the last one's (ALST, arXiv 2506.13996; _start_offload and _restore_tensor in
        offload_activations.py)."""
        c, cluster = self._workload.calibration, self._workload.cluster
        return checkpoint * self._share_beyond(1) / (cluster.host_bandwidth * c.host_efficiency) if checkpoint else 0.0

    def _bounded(
        self,
        layer: LayerSpec,
        recompute: Recompute,
        strategy: Strategy,
        micro_batch_size: int,
        passes: Pair,
        launch: Pair,
        behind: float,
        alone: float,
    ) -> Pair:
        """Seconds of the passes, which take the device so long, where the host has `launch` to do for them, beside it or, if cores compute,
        in between, and the experts' part. `behind`: seconds behind a dispatch; `alone`: as `alone_share`."""
        c, host = self._workload.calibration, self._experts_host_seconds(layer)
        forward, backward = launch
        if host and not c.expert_sync_s:  # the host runs ahead of the device
            forward, backward, host = forward + host, backward + host, 0.0
        if recompute == "full":
            backward += forward
        if strategy.cuda_graph_impl == "full_iteration":
            forward = backward = host = 0.0
        elif strategy.cuda_graph_impl != "none":
            replayed = self._graphed(layer, strategy, micro_batch_size).launches
            forward -= max(0.0, min(forward, replayed[0]) - c.graph_launch_s)
            backward -= max(0.0, min(backward, replayed[1]) - c.graph_launch_s)
        if self._workload.cluster.is_cpu:  # a core launches an operation and then computes it
            return passes[0] + forward, passes[1] + backward
        bound = max(passes[0], forward), max(passes[1], backward)
        if not host:
            return bound
        late = strategy.delay_wgrad_compute and self._workload.training.precision in QUANTISED
        if late and "attn" not in graphed_modules(strategy, self._workload.model.architecture):
            backward += c.delayed_wgrad_s
        unpaired = alone if strategy.overlap_moe_expert_parallel_comm else 1.0
        return behind_host(bound, (forward, backward), host, behind, again=dispatches_again(recompute), alone=unpaired)

    def _experts_host_seconds(self, layer: LayerSpec) -> float:
        """Seconds that the host needs to launch a pass of the layer's routed experts beyond its operations."""
        host = self._experts_host_s.get(layer.kind)
        if host is None:
            c, routed = self._workload.calibration, bool(layer.dispatches)
            narrow = any(isinstance(op, Gemm) and op.experts and not op.wide for op in layer.ops)
            quantised = narrow and self._workload.training.precision in QUANTISED
            host = self._experts_host_s[layer.kind] = routed * (c.expert_sync_s + quantised * c.expert_quantise_s)
        return host

    def _graphed(self, layer: LayerSpec, strategy: Strategy, micro_batch_size: int) -> Graphed:
        """What of this layer's passes graphs of layers replay."""
        key = (layer.kind, strategy, micro_batch_size)
        if key not in self._graphs:
            graph = graph_of(layer, graphed_modules(strategy, self._workload.model.architecture), strategy)
            self._graphs[key] = NO_GRAPH if graph is None else self._with_graph(layer, graph, strategy, micro_batch_size)
        return self._graphs[key]

    def _with_graph(self, layer: LayerSpec, graph: Graph, strategy: Strategy, micro_batch_size: int) -> Graphed:
        mesh = strategy.mesh
        shards = mesh.cp * (mesh.tp if strategy.sequence_parallel else 1)
        end = layer.output_elements * self._workload.itemsize * micro_batch_size / shards
        part = replace(layer, ops=graph.ops)
        launches = self.passes.launches(part, strategy, micro_batch_size, self.replicas.states_of(strategy))
        if graph.ops == layer.ops:  # with what is recomputed
            launches = inf, inf
        return Graphed(launches, graph.ends * end, graph.kept * end)


def behind_host(passes: Pair, launch: Pair, host: float, behind: float, *, again: bool, alone: float) -> Pair:
    """Seconds of the passes of a layer of experts, which take the device `passes` and the host `launch` and, for what follows the
    dispatch, `host` seconds more in each pass. Of them the share `alone` has no pass of another micro-batch beside it.

    Alone, a pass takes either the host's time or the device's, of which what lies `behind` the dispatch takes `host` at least in forward:
    the host begins with it when the counts arrive. Backward has them from forward, and waits only where it makes the dispatch `again`.
    Two passes side by side take both devices' times or both hosts', as each has the other's kernels to run meanwhile (on H100 the overlap
    ended all idling, `Calibration.expert_sync_s`).

    >>> device, nothing = (3.0, 6.0), (0.0, 0.0)
    >>> behind_host(device, nothing, 2.5, 1.0, again=False, alone=1.0), behind_host(device, nothing, 5.0, 1.0, again=False, alone=0.0)
    ((4.5, 6.0), (3.0, 7.0))
    """
    (forward, backward), waits = passes, max(0.0, host - behind)
    forward_host, backward_host = launch[0] + host, launch[1] + host * (2 if again else 1)
    by_itself = max(forward + waits, forward_host), max(backward + (waits if again else 0.0), backward_host)
    late = max(0.0, forward_host + backward_host - (forward + backward))
    return alone * by_itself[0] + (1 - alone) * forward, alone * by_itself[1] + (1 - alone) * (backward + late)


def dispatches_again(recompute: Recompute) -> bool:
    """Whether backward sends tokens to their experts anew.

    >>> [dispatches_again(mode) for mode in ("none", "selective", "core_attn+mlp", "full")]
    [False, False, True, True]
    """
    return recompute == "full" or "mlp" in RECOMPUTE_MODULES.get(recompute, ())


def folded(strategy: Strategy) -> Strategy:
    """The strategy as the experts' states, traffic and update see it: copied over the expert data-parallel group, which is what
    tp x cp x dp leaves beside ep x etp (mcore parallel_state.py, expert_data_parallel). hpZ's second copy of the weights has the experts'
    too (deepspeed/runtime/zero/partition_parameters.py:1118), which nothing divides then."""
    mesh, second = strategy.mesh, None if dp.divides_states(strategy) else strategy.zero_shard_size
    return replace(strategy, mesh=Mesh(tp=mesh.ep * mesh.etp, dp=max(1, mesh.expert_dp), pp=mesh.pp), zero_shard_size=second)
