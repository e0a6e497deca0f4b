"""Seconds of a layer's forward and backward pass on one rank, for one micro-batch: compute, recompute, traffic of tp, cp and ep. Data
parallelism's share (replicas.py) and pipelines' is not in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Final, NamedTuple

from msgspec.structs import replace

from orchestrator.cost.activations import Activations, LayerActivations
from orchestrator.cost.compute import LayerSeconds, Seconds, gathered_bytes, layer_seconds
from orchestrator.cost.network import Network
from orchestrator.cost.recompute import again as recomputed_part
from orchestrator.cost.recompute import one_of, tiled
from orchestrator.cost.workload import EngineWorkload
from orchestrator.model.ops import ROUTED, SHARED
from orchestrator.model.packing import waits
from orchestrator.model.routing import times
from orchestrator.model.spec import Attention, LayerSpec, Op
from orchestrator.strategy.axes import cp, ep, tp
from orchestrator.strategy.axes.traffic import Traffic
from orchestrator.strategy.capabilities import StateBytes
from orchestrator.strategy.spec import Recompute, Strategy, price_key

CAUSES = ("gemm", "attention", "memory_bound", "recompute", "overhead", "offload", "tp", "cp", "ep", "dp", "overlap")
"""What the seconds of a layer's passes are split into."""


class Passes(NamedTuple):
    """Seconds per micro-batch. `compute_*`: without traffic; `launch_*`: what the host needs to launch the pass."""

    forward_s: float
    backward_s: float
    compute_forward_s: float
    compute_backward_s: float
    launch_forward_s: float
    launch_backward_s: float
    alone_forward_s: float
    alone_backward_s: float
    """Seconds that a pass takes longer with no other micro-batch's pass beside it."""
    behind_dispatch_s: float
    """Seconds of the forward pass for the experts' computing and the exchange back, which the host launches when it knows who got how many
    tokens."""
    causes: dict[str, float]
    kept: Callable[[], Activations]
    """Returns the bytes that the passes keep, which bounds of time don't ask for."""


class _Plain(NamedTuple):
    """What passes have in common, whatever the recompute: seconds, what pieces of a sequence take once more in backward, and of each item
    of traffic what is exposed and what it slows."""

    forward: Seconds
    backward: Seconds
    once_more: Seconds
    traffic: tuple[tuple[Traffic, float, float], ...]
    alone: dict[str, float]
    behind_dispatch: float
    activations: LayerActivations


class PassPrices:
    """Prices of passes for one workload under one engine, each computed once."""

    def __init__(self, workload: EngineWorkload, network: Network) -> None:
        self._workload, self._network = workload, network
        self._known: dict[tuple[object, ...], tuple[dict[str, _Plain], dict[tuple[str, Recompute], Passes]]] = {}
        """What is priced already by `key`: by kind of layer, and by that and recompute."""
        self._parts: dict[tuple[str, object], LayerSpec] = {}
        self._again: dict[tuple[str, Recompute], LayerSpec | None] = {}
        self._newest: tuple[Strategy, int, StateBytes] | None = None
        """The strategy, samples and states of `_here`: their layers are asked for one after the other."""
        self._here: tuple[dict[str, _Plain], dict[tuple[str, Recompute], Passes]] = {}, {}
        """What is priced already under these."""

    def of(self, layer: LayerSpec, recompute: Recompute, strategy: Strategy, micro_batch_size: int, states: StateBytes) -> Passes:
        """The passes of this layer. `states`: bytes per parameter (a weight's gradient is written in backward)."""
        newest = self._newest
        if newest is None or newest[0] is not strategy or newest[1:] != (micro_batch_size, states):
            self._newest = strategy, micro_batch_size, states
            self._here = self._known.setdefault(self.key(strategy, micro_batch_size, states), ({}, {}))
        plains, passes = self._here
        known = passes.get((layer.kind, recompute))
        if known is None:
            plain = plains.get(layer.kind)
            if plain is None:
                plain = plains[layer.kind] = self._without_recompute(layer, strategy, micro_batch_size, states)
            known = passes[layer.kind, recompute] = self._priced(layer, recompute, strategy, micro_batch_size, states, plain)
        return known

    def key(self, strategy: Strategy, micro_batch_size: int, states: StateBytes) -> tuple[object, ...]:
        """All but the layer's kind and recompute that a price of passes may depend on."""
        found = pass_key(strategy, micro_batch_size, states)
        return (*found, self._waits(strategy, micro_batch_size)) if self._workload.loads else found

    def _waits(self, strategy: Strategy, micro_batch_size: int) -> float:
        """How much more attention than the mean the replica with the longest of the packed samples computes (`packing.waits`)."""
        w, dp = self._workload, strategy.mesh.dp
        if not w.loads:
            return 1.0
        microbatches = max(1, w.training.global_batch_size // (dp * micro_batch_size))
        return waits(w.loads, dp, microbatches, micro_batch_size, w.training.balance)

    def _seconds(self, layer: LayerSpec, strategy: Strategy, micro_batch_size: int, states: StateBytes) -> LayerSeconds:
        """Seconds of what a layer, or a part of one, computes, on the replica with the longest of the packed samples."""
        w = self._workload
        shape = (strategy, micro_batch_size, w.training.precision, w.cluster.gpu, w.traits, states, w.calibration, self._network.domain)
        found, more = layer_seconds(layer, *shape), self._waits(strategy, micro_batch_size)
        if more == 1.0 or not any(isinstance(op, Attention) and op.causal for op in layer.ops):
            return found
        return LayerSeconds(*(each._replace(attention=more * each.attention) for each in found))

    def launches(self, layer: LayerSpec, strategy: Strategy, micro_batch_size: int, states: StateBytes) -> tuple[float, float]:
        """Host seconds to launch a forward and a backward pass of the layer, recompute and the exchange of tokens aside."""
        w, c = self._workload, self._workload.calibration
        shape = (strategy, micro_batch_size, w.training.precision, w.cluster.gpu, w.traits, states, c, self._network.domain)
        seconds = layer_seconds(layer, *shape)
        found = {"forward": seconds.forward.launch, "backward": seconds.backward.launch}
        for item in self._dense_traffic(layer, strategy, micro_batch_size):
            found[item.when] += item.count * c.collective_launch_s
        return found["forward"], found["backward"]

    def _without_recompute(self, layer: LayerSpec, strategy: Strategy, micro_batch_size: int, states: StateBytes) -> _Plain:
        w, c, network = self._workload, self._workload.calibration, self._network
        shape = (strategy, micro_batch_size, w.training.precision, w.cluster.gpu, w.traits, states, c, network.domain)
        forward, backward = self._seconds(layer, strategy, micro_batch_size, states)
        once_more = NO_SECONDS
        in_pieces = tiled(layer, strategy)
        if in_pieces is not None:
            part, pieces = in_pieces
            whole, piece = layer_seconds(part, *shape), layer_seconds(one_of(part, pieces), *shape)
            # Weights' gradients of pieces are added up in their own type, and reach the accumulated ones together (`ds_grad_is_ready`).
            narrow = (*shape[:5], replace(states, gradient=states.weight), *shape[6:])
            first = layer_seconds(one_of(part, pieces), *narrow).backward
            forward = _with_pieces(forward, whole.forward, (*[piece.forward] * pieces,))
            backward = _with_pieces(backward, whole.backward, (*[first] * (pieces - 1), piece.backward))
            once_more = _with_pieces(NO_SECONDS, NO_SECONDS, (*[piece.forward] * pieces,))
        beside = {"forward": 0.0, "backward": 0.0}  # seconds of shared experts that are left to compute beside the exchange of tokens
        if strategy.moe_shared_expert_overlap:
            shared = layer_seconds(self._part(layer, shared_experts), *shape)
            beside = {"forward": shared.forward.compute, "backward": shared.backward.compute}
        priced, exchange = [], {"forward": 0.0, "backward": 0.0}
        for item in self._traffic(layer, strategy, micro_batch_size):
            exposed, slowed = self._exposed(item, forward if item.when == "forward" else backward)
            priced.append((item, exposed, slowed))
            if exchanged(item):
                exchange[item.when] += exposed
        traffic, alone = [], {"forward": 0.0, "backward": 0.0}
        shares = {"forward": 0.0, "backward": 0.0}
        behind = 0.0
        if strategy.overlap_moe_expert_parallel_comm or (c.expert_sync_s and layer.dispatches):
            routed = layer_seconds(self._part(layer, routed_experts), *shape)
            behind = routed.forward.compute + exchange["forward"] / 2
            if strategy.overlap_moe_expert_parallel_comm:
                most = hidden_shares(exchange, forward, backward, routed, delayed=strategy.delay_wgrad_compute)
                shares = {when: c.expert_overlap * share for when, share in most.items()}
        for item, exposed, slowed in priced:
            if item.axis == ep.AXIS:
                if exchanged(item):
                    hidden = exposed * shares[item.when]
                    alone[item.when] += hidden * (1 - c.overlap_slowdown)
                    exposed, slowed = exposed - hidden, slowed + hidden * c.overlap_slowdown
                hidden = min(exposed, beside[item.when])
                beside[item.when] -= hidden
                exposed, slowed = exposed - hidden, slowed + hidden * c.overlap_slowdown
            traffic.append((item, exposed, slowed))
        activations = LayerActivations(layer, strategy, micro_batch_size, w.training.precision, w.traits, c, network.domain)
        return _Plain(forward, backward, once_more, tuple(traffic), alone, behind, activations)

    def _part(self, layer: LayerSpec, ops: Callable[[LayerSpec], tuple[Op, ...]]) -> LayerSpec:
        """The layer with these of its operations alone."""
        part = self._parts.get((layer.kind, ops))
        if part is None:
            part = self._parts[layer.kind, ops] = replace(layer, ops=ops(layer))
        return part

    def _repeated(self, layer: LayerSpec, recompute: Recompute) -> LayerSpec | None:
        """The part of the layer that this mode of modules runs again; None: none."""
        key = (layer.kind, recompute)
        if key not in self._again:
            self._again[key] = recomputed_part(layer, recompute, fused_norms=self._workload.traits.fused_norms)
        return self._again[key]

    def _exposed(self, item: Traffic, beside: Seconds) -> tuple[float, float]:
        """Seconds of this traffic that the pass waits for, and by which the rest slows it. `beside`: what the pass computes."""
        return self._network.exposed(self._network.seconds(item), item, beside.gemm if item.hidden == "product" else beside.attention)

    def _priced(
        self, layer: LayerSpec, recompute: Recompute, strategy: Strategy, micro_batch_size: int, states: StateBytes, plain: _Plain
    ) -> Passes:
        c = self._workload.calibration
        forward, backward = plain.forward, plain.backward
        causes = dict.fromkeys(CAUSES, 0.0)
        for part in (forward, backward):
            causes["gemm"] += part.gemm
            causes["attention"] += part.attention
            causes["memory_bound"] += part.memory_bound
        repeated = self._repeated(layer, recompute)
        again, launched_again = forward.compute if recompute == "full" else 0.0, 0.0
        if repeated is not None:
            part = self._seconds(repeated, strategy, micro_batch_size, states).forward
            again, launched_again = part.compute, part.launch
        again, launched_again = again + plain.once_more.compute, launched_again + plain.once_more.launch
        causes["recompute"] = again
        forward_s, backward_s = forward.compute, backward.compute + again
        forward_launch, backward_launch = forward.launch, backward.launch + launched_again
        for item, exposed, slowed in plain.traffic:
            times = 2 if recompute == "full" and item.repeats_with_recompute else 1
            causes[item.axis] += exposed * times
            causes["overlap"] += slowed * times
            if item.when == "forward":
                forward_s += exposed + slowed
                forward_launch += item.count * c.collective_launch_s
            else:
                backward_s += exposed + slowed
                backward_launch += item.count * c.collective_launch_s
            if times == 2:
                backward_s += exposed + slowed
        for item in () if repeated is None else self._part_traffic(repeated, strategy, micro_batch_size):
            if item.repeats_with_recompute:
                exposed, slowed = self._exposed(item, forward)
                causes[item.axis] += exposed
                causes["overlap"] += slowed
                backward_s += exposed + slowed
                backward_launch += item.count * c.collective_launch_s
        return Passes(
            forward_s=forward_s,
            backward_s=backward_s,
            compute_forward_s=forward.compute,
            compute_backward_s=backward.compute + again,
            launch_forward_s=forward_launch,
            launch_backward_s=backward_launch,
            alone_forward_s=plain.alone["forward"],
            alone_backward_s=plain.alone["backward"],
            behind_dispatch_s=plain.behind_dispatch,
            causes=causes,
            kept=partial(plain.activations.with_recompute, recompute),
        )

    def _dense_traffic(self, layer: LayerSpec, strategy: Strategy, micro_batch_size: int) -> Iterator[Traffic]:
        """The traffic of tensor and context parallelism in one micro-batch."""
        size = (layer, strategy, micro_batch_size, self._workload.itemsize)
        narrow = gathered_bytes(layer, self._workload.training.precision, self._workload.cluster.gpu)
        yield from tp.traffic(*size, gathered=narrow, beside_products=self._workload.traits.overlaps_input_gradient)
        yield from cp.traffic(*size, kind=self._workload.traits.context_parallel, domain=self._network.domain)

    def _part_traffic(self, layer: LayerSpec, strategy: Strategy, micro_batch_size: int) -> Iterator[Traffic]:
        """The traffic of tensor, context and expert parallelism in one micro-batch."""
        yield from self._dense_traffic(layer, strategy, micro_batch_size)
        for op in layer.dispatches:
            together = self._network.together(strategy.mesh.ep, strategy.mesh.etp)
            busiest = 1.0 if op.routing is None else times(op.routing.busiest, strategy.mesh.ep)
            size = (op.elements, op.topk, strategy, micro_batch_size, self._workload.itemsize)
            items = ep.traffic(*size, together=together, busiest=busiest, limit=op.limit)
            yield from self._slower_leg(items) if strategy.moe_token_dispatcher_type == "flex" else items

    def _slower_leg(self, items: Iterable[Traffic]) -> Iterator[Traffic]:
        """What is sent between nodes is passed on inside them in the same kernel, piece by piece (DeepEP's internode dispatch, HybridEP):
        of both exchanges the one that takes longer."""
        slowest: dict[str, Traffic] = {}
        for item in items:
            if item.operation != "all_to_all":
                yield item
            elif item.when not in slowest or self._network.seconds(item) > self._network.seconds(slowest[item.when]):
                slowest[item.when] = item
        yield from slowest.values()

    def _traffic(self, layer: LayerSpec, strategy: Strategy, micro_batch_size: int) -> Iterator[Traffic]:
        """The traffic that the layer's passes wait for."""
        if self._workload.traits.gathers_few_query_groups:
            yield from tp.query_groups(layer, strategy, micro_batch_size, self._workload.itemsize)
        yield from self._part_traffic(layer, strategy, micro_batch_size)


NO_SECONDS: Final = Seconds(0.0, 0.0, 0.0, 0.0)


def _with_pieces(seconds: Seconds, whole: Seconds, pieces: tuple[Seconds, ...]) -> Seconds:
    """A pass, of which a part is computed in these pieces in place of as a whole."""
    return Seconds(*(have - one + sum(each) for have, one, each in zip(seconds, whole, zip(*pieces, strict=True), strict=True)))


def shared_experts(layer: LayerSpec) -> tuple[Op, ...]:
    """The operations that megatron-core computes on a stream of their own while tokens travel (transformer/moe/shared_experts.py,
    moe_shared_expert_overlap): those of the experts that all tokens visit."""
    return tuple(op for op in layer.ops if op.role in SHARED)


def routed_experts(layer: LayerSpec) -> tuple[Op, ...]:
    """The operations between the exchange of tokens and the exchange back: those of the experts that a part of the tokens visits."""
    return tuple(op for op in layer.ops if op.role in ROUTED)


def exchanged(item: Traffic) -> bool:
    """Whether this is the exchange of tokens between the ranks of experts, there or back."""
    return item.axis == ep.AXIS and item.operation == "all_to_all"


def hidden_shares(
    exchange: dict[str, float], forward: Seconds, backward: Seconds, routed: LayerSeconds, *, delayed: bool
) -> dict[str, float]:
    """The share of the seconds of `exchange` ("forward", "backward": there and back, one half each) that a layer's passes hide in
    Megatron's combined 1F1B, which runs a forward pass of one micro-batch beside a backward pass of another
    (core/models/common/model_chunk_schedule_plan.py, TransformerLayerSchedulePlan.run):

        exchange:  combine backward | dispatch forward -> dispatch backward | combine forward
        computing: attention forward | experts backward -> experts forward  | attention backward

    Each exchange hides beside what stands under it, and no more of it than that lasts: dispatch forward beside the experts' backward pass,
    dispatch backward beside their forward pass. `delayed`: the experts' weight gradients, half of their products in backward, are computed
    beside dispatch backward (`delay_wgrad_compute`). "Attention" is all but the `routed` experts.

    >>> layer, experts = Seconds(6.0, 0.0, 0.0, 0.0), Seconds(4.0, 0.0, 0.0, 0.0)
    >>> hidden_shares({"forward": 8.0, "backward": 8.0}, layer, layer, LayerSeconds(experts, experts), delayed=False)
    {'forward': 0.75, 'backward': 0.75}
    >>> hidden_shares({"forward": 8.0, "backward": 12.0}, layer, layer, LayerSeconds(experts, experts), delayed=True)
    {'forward': 0.5, 'backward': 0.6666666666666666}
    """
    late = routed.backward.gemm / 2 if delayed else 0.0
    there, back = exchange["forward"] / 2, exchange["backward"] / 2
    hidden = {
        "forward": min(there, routed.backward.compute - late) + min(there, backward.compute - routed.backward.compute),
        "backward": min(back, routed.forward.compute + late) + min(back, forward.compute - routed.forward.compute),
    }
    return {when: hidden[when] / seconds if seconds else 0.0 for when, seconds in exchange.items()}


def pass_key(strategy: Strategy, micro_batch_size: int, states: StateBytes) -> tuple[object, ...]:
    """All but the layer's kind and recompute that a price of passes may depend on: of the strategy what its declarations say (`price_key`),
    and how far apart the ranks of its groups are."""
    mesh = strategy.mesh
    strides = mesh.stride("tp") if mesh.tp > 1 else 1, mesh.stride("cp") if mesh.cp > 1 else 1
    return (micro_batch_size, states.weight, states.gradient, *strides, *price_key(strategy))
