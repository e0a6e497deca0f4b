"""The price of a plan: seconds of a step and bytes of a rank, itemised. One scoring function for search and report.

A step is the simulated schedule of its stages, then what of the gradient reduction nothing hides, then the optimizer. Layers of a kind
cost the same and are priced once; a stage is a sum over its spans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from math import ceil
from operator import mul
from typing import NamedTuple

from msgspec.structs import replace

from orchestrator.cost import memory, schedule
from orchestrator.cost.calibration import Calibration
from orchestrator.cost.recompute import again as recomputed_part
from orchestrator.cost.time import activation_itemsize, layer_seconds
from orchestrator.errors import InputError
from orchestrator.hardware.collectives import COLLECTIVES, Link, link_for
from orchestrator.hardware.spec import Cluster
from orchestrator.model.flops import model_flops_per_sample
from orchestrator.model.hugging_face import hugging_face, with_separate_gate
from orchestrator.model.spec import Dispatch, LayerSpec, ModelSpec
from orchestrator.model.training import Training
from orchestrator.strategy.axes import cp, dp, ep, pp, tp
from orchestrator.strategy.axes.traffic import Traffic
from orchestrator.strategy.capabilities import SHARDED_FROM_STAGE, StateBytes, Traits
from orchestrator.strategy.layout import LayerSpan, Prediction, Stage, StagePrediction
from orchestrator.strategy.spec import RECOMPUTE_ORDER, Candidate, Mesh, Recompute, Strategy, price_key
from orchestrator.units import ITEMSIZE
from orchestrator.values import Value

USER_BUFFERS = 10
"""Gathered tensors that Transformer Engine allocates for overlapped traffic, one for each product that has some: qkv, proj, fc1 and fc2 in
forward and in the input's gradient, qkv and fc1 in the weight's (its pytorch/module/base.py, initialize_ub)."""
FORWARD_SHARE = 1 / 3
"""Of the launches of a layer: its backward has twice as many."""
COMPUTE_CAUSES = ("gemm", "attention", "memory_bound")
CAUSES = (*COMPUTE_CAUSES, "recompute", "overhead", "tp", "cp", "ep", "pp", "dp", "overlap", "bubble", "optimizer")
"""Keys of `Prediction.by_cause`, in the order of tables."""


class LayerCost(Value, frozen=True, kw_only=True):
    """One layer of a kind on one rank. Seconds and bytes per micro-batch unless they say otherwise."""

    forward_s: float
    backward_s: float
    """Recompute, exposed traffic of tp, cp and ZeRO and launches inside."""
    saved_bytes: float
    """Per micro-batch in flight."""
    transient_forward_bytes: float
    transient_backward_bytes: float
    """While the pass is in this layer: a stage needs the largest of its layers'."""
    static_bytes: float
    """Weights, gradients and optimizer states."""
    weight_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    backward_bytes: float
    """Added to the static bytes in backward (transient .grad)."""
    step_bytes: float
    """Added to the static bytes in the optimizer's step."""
    sync_s: float
    """Once a step: the gradient reduction, before overlap."""
    gather_s: float
    """Once a step: the weights' all-gather after the update (ZeRO-1 and 2), before overlap."""
    optimizer_s: float
    """Once a step."""
    parameters: int
    """On this rank, before ZeRO."""
    by_cause: dict[str, float]
    """Splits forward_s + backward_s."""


class StageCost(Value, frozen=True, kw_only=True):
    """One stage: sums over its layers. `forward_s`, `backward_s` per chunk."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    exposed_s: float
    """Once a step: what of gradient reduction and weight gathering is not hidden, and what hiding costs."""
    optimizer_s: float
    peak_bytes: float


class _Local(NamedTuple):
    """A layer on one rank before data parallelism. Seconds; `launch_*`: what the host needs to launch the pass."""

    forward_s: float
    backward_s: float
    compute_forward_s: float
    compute_backward_s: float
    launch_forward_s: float
    launch_backward_s: float
    causes: dict[str, float]
    kept: Callable[[], memory.Activations]
    """Its bytes, which bounds of time don't ask for."""


class _Setting:
    """What a strategy at a micro-batch size has been priced at."""

    __slots__ = ("boundary_bytes", "fixed_bytes", "hops", "layers")

    def __init__(self) -> None:
        self.layers: dict[tuple[str, Recompute], LayerCost] = {}
        self.hops: tuple[float, ...] | None = None
        self.boundary_bytes: float | None = None
        self.fixed_bytes: dict[str, float] | None = None


class _Sums:
    """A stage's layers added up."""

    __slots__ = (
        "backward_s",
        "forward_s",
        "gather_s",
        "gradients",
        "in_backward",
        "in_step",
        "optimizer",
        "optimizer_s",
        "parameters",
        "saved",
        "sync_s",
        "transient_backward",
        "transient_forward",
        "weights",
    )

    def __init__(self, vpp: int, overhead_s: float) -> None:
        self.forward_s = [overhead_s] * vpp
        self.backward_s = [overhead_s] * vpp
        self.saved = [0.0] * vpp
        self.weights = self.gradients = self.optimizer = self.in_backward = self.in_step = 0.0
        self.transient_forward = self.transient_backward = 0.0
        self.sync_s = self.gather_s = self.optimizer_s = 0.0
        self.parameters = 0


class CostModel:
    """Prices candidates for one model, training, cluster and engine. Pure: the caches only save time."""

    def __init__(self, model: ModelSpec, training: Training, cluster: Cluster, traits: Traits, calibration: Calibration) -> None:
        if traits.layers == "hugging_face":
            model = hugging_face(model)
        elif not traits.fused_gate:
            model = with_separate_gate(model)
        if set(model.architecture.features()) & set(traits.unfused_attention):
            traits = replace(traits, flash_attention=False)
        if training.fp8_recipe in ("delayed", "tensorwise") and cluster.gpu.has_mxfp8:
            calibration = replace(calibration, fp8_efficiency=calibration.fp8_efficiency * calibration.mxfp8_slowdown)
        self.model, self.training, self.cluster = model, training, cluster
        self.traits, self.calibration = traits, calibration
        self.kinds: dict[str, LayerSpec] = {run.layer.kind: run.layer for run in model.runs}
        self._counts: dict[str, int] = {}
        for run in model.runs:
            self._counts[run.layer.kind] = self._counts.get(run.layer.kind, 0) + run.count
        self.itemsize = activation_itemsize(training.precision)
        self._flops_per_sample = model_flops_per_sample(model)
        self._has_tied = any(weight.tied for layer in self.kinds.values() for weight in layer.weights)
        self._fp8_copies = memory.fp8_weight_bytes(training, cluster.gpu) if traits.fp8_weight_copies else 0.0
        self._domain = cluster.levels[0].size
        self._links: dict[tuple[int, int], Link] = {}
        self._state_bytes: dict[int, StateBytes] = {}
        self._locals: dict[tuple[object, ...], _Local] = {}
        self._counted: dict[tuple[str, int, bool], int] = {}
        self._settings: dict[tuple[Strategy, int], _Setting] = {}
        self.modes: tuple[Recompute, ...] = RECOMPUTE_ORDER
        """The recompute modes that bounds reckon with: a search leaves out what none of its choices may use."""
        self._current: Candidate | None = None
        self._setting = _Setting()

    # ---- layers

    def layer(self, candidate: Candidate, kind: str, recompute: Recompute) -> LayerCost:
        """One layer of this kind under the candidate, with this recompute. Raises KeyError for a kind that the model has not."""
        layers = self._setting_of(candidate).layers
        cost = layers.get((kind, recompute))
        if cost is None:
            cost = self._layer(self.kinds[kind], recompute, candidate.strategy, candidate.micro_batch_size)
            layers[kind, recompute] = cost
        return cost

    def _setting_of(self, candidate: Candidate) -> _Setting:
        """What is priced already for this strategy and micro-batch size. A search asks thousands of times in a row for one candidate:
        only a new one is hashed."""
        if candidate is not self._current:
            self._setting = self._settings.setdefault((candidate.strategy, candidate.micro_batch_size), _Setting())
            self._current = candidate
        return self._setting

    def _states(self, strategy: Strategy) -> StateBytes:
        """Bytes per parameter."""
        states = self._state_bytes.get(strategy.zero_stage)
        if states is None:
            try:
                states = memory.state_bytes(self.traits, self.training, strategy.zero_stage)
            except KeyError:
                raise InputError("pin.zero_stage", strategy.zero_stage, f"{self.traits.engine} does not have it", ()) from None
            self._state_bytes[strategy.zero_stage] = states
        return states

    def _layer(self, layer: LayerSpec, recompute: Recompute, strategy: Strategy, micro_batch_size: int) -> LayerCost:
        mesh, c = strategy.mesh, self.calibration
        per_parameter = self._states(strategy)
        if not layer.recomputable:
            recompute = "none"
        local = self.local(layer, recompute, strategy, micro_batch_size, per_parameter)
        parameters = self._parameters(layer, mesh.tp, with_tied=mesh.pp > 1)
        weight_itemsize = ITEMSIZE["fp32"] if self.training.precision == "fp32" else ITEMSIZE["bf16"]
        causes = dict(local.causes)
        passes = {"forward": local.forward_s, "backward": local.backward_s}
        launch = {"forward": local.launch_forward_s, "backward": local.launch_backward_s}
        available = {"forward": local.compute_forward_s, "backward": local.compute_backward_s}  # what ZeRO's traffic may hide behind

        sync = gather = 0.0
        weight_bytes = parameters * weight_itemsize
        gradient_bytes = parameters * self._wire_itemsize(strategy, weight_itemsize)
        for item in dp.traffic(weight_bytes, gradient_bytes, strategy, self.traits):
            seconds_moved = self._seconds_of(item)
            if item.when == "step":
                if item.operation == "all_gather":
                    gather += seconds_moved
                else:
                    sync += seconds_moved
                continue
            exposed, slowed = self._exposed(seconds_moved, item, available[item.when])
            available[item.when] = max(0.0, available[item.when] - (seconds_moved - exposed))
            causes["dp"] += exposed
            causes["overlap"] += slowed
            passes[item.when] += exposed + slowed
            launch[item.when] += c.collective_launch_s

        floor = c.layer_floor_s if layer.recomputable else 0.0
        if layer.recomputable and c.expert_layer_floor_s and any(isinstance(op, Dispatch) for op in layer.ops):
            floor = max(floor, c.expert_layer_floor_s)
        launch["forward"] = max(launch["forward"], FORWARD_SHARE * floor)
        launch["backward"] = max(launch["backward"], (1 - FORWARD_SHARE) * floor)
        if recompute == "full":
            launch["backward"] += launch["forward"]
        graph_bytes = 0.0
        if layer.recomputable and strategy.cuda_graph_impl != "none":
            launch = {when: min(c.graph_launch_s, seconds) for when, seconds in launch.items()}
            ends = (layer.input_elements + layer.output_elements) * self.itemsize * micro_batch_size
            graph_bytes = ends / (mesh.cp * (mesh.tp if strategy.sequence_parallel else 1))  # a graph has an input and output of its own
        for when, seconds_launched in launch.items():
            if seconds_launched > passes[when]:
                causes["overhead"] += seconds_launched - passes[when]
                passes[when] = seconds_launched

        held = memory.states(parameters, per_parameter, strategy)
        if self._fp8_copies and layer.recomputable:
            held = held._replace(weights=held.weights + self._fp8_copies * parameters)
        kept = local.kept()
        live_forward = live_backward = 0.0
        if strategy.zero_stage >= SHARDED_FROM_STAGE["weight"]:
            live_forward = float(weight_bytes)
            live_backward = live_forward + parameters * weight_itemsize  # weights, and gradients before they are scattered
        cost = LayerCost(
            forward_s=passes["forward"],
            backward_s=passes["backward"],
            saved_bytes=kept.saved + graph_bytes,
            transient_forward_bytes=kept.transient_forward + live_forward,
            transient_backward_bytes=kept.transient_backward + live_backward,
            static_bytes=held.resident,
            weight_bytes=held.weights,
            gradient_bytes=held.gradients,
            optimizer_bytes=held.optimizer,
            backward_bytes=held.backward,
            step_bytes=held.step,
            sync_s=sync,
            gather_s=gather,
            optimizer_s=self._optimizer_seconds(parameters, per_parameter, strategy),
            parameters=parameters,
            by_cause=causes,
        )
        if (active := self.active_share(strategy, micro_batch_size)) < 1:
            cost = replace(
                cost,
                forward_s=active * cost.forward_s,
                backward_s=active * cost.backward_s,
                by_cause={cause: active * seconds for cause, seconds in causes.items()},
            )
        experts = sum(w.local_numel(1) for w in layer.weights if w.kind == "expert")
        return self._with_experts(cost, layer, strategy, experts) if experts else cost

    def active_share(self, strategy: Strategy, micro_batch_size: int) -> float:
        """Seconds of a layer against those that it takes while all ranks compute. Where ranks share cores (`Calibration.core_share`), one
        in a pipeline of p stages works m of m + p - 1 times, and the others have its cores meanwhile: all the work over all the cores
        bounds the step from below, and so does a rank that is alone on its cores."""
        c, mesh = self.calibration, strategy.mesh
        if c.core_share >= 1 or mesh.pp == 1:
            return 1.0
        m = max(1, self.training.global_batch_size // (mesh.dp * micro_batch_size))
        return max(c.core_share, m / (m + mesh.pp - 1))

    def _with_experts(self, cost: LayerCost, layer: LayerSpec, strategy: Strategy, experts: int) -> LayerCost:
        """`cost` of a layer's dense part with its experts': their states, once-a-step traffic and update over the expert data-parallel
        group, which is what tp x cp x dp leaves beside ep x etp (mcore parallel_state.py, expert_data_parallel)."""
        mesh = strategy.mesh
        shards = mesh.ep * mesh.etp
        count = experts // shards
        folded = replace(strategy, mesh=Mesh(tp=shards, dp=max(1, mesh.expert_dp), pp=mesh.pp), zero_shard_size=None)
        per_parameter = self._states(strategy)
        held = memory.states(count, per_parameter, folded)
        itemsize = ITEMSIZE["fp32"] if self.training.precision == "fp32" else ITEMSIZE["bf16"]
        sync = gather = 0.0
        for item in dp.traffic(float(count * itemsize), float(count * self._wire_itemsize(strategy, itemsize)), folded, self.traits):
            seconds = self._seconds_of(item)
            if item.operation == "all_gather":
                gather += seconds
            else:
                sync += seconds
        return replace(
            cost,
            static_bytes=cost.static_bytes + held.resident,
            weight_bytes=cost.weight_bytes + held.weights,
            gradient_bytes=cost.gradient_bytes + held.gradients,
            optimizer_bytes=cost.optimizer_bytes + held.optimizer,
            backward_bytes=cost.backward_bytes + held.backward,
            step_bytes=cost.step_bytes + held.step,
            sync_s=cost.sync_s + sync,
            gather_s=cost.gather_s + gather,
            optimizer_s=cost.optimizer_s + self._optimizer_seconds(count, per_parameter, folded),
            parameters=cost.parameters + count,
        )

    def _parameters(self, layer: LayerSpec, tensor_parallel: int, *, with_tied: bool) -> int:
        key = (layer.kind, tensor_parallel, with_tied)
        count = self._counted.get(key)
        if count is None:
            everything = layer.local_parameters(tensor_parallel, with_tied=with_tied)
            count = self._counted[key] = everything - sum(w.local_numel(1) for w in layer.weights if w.kind == "expert")
        return count

    def local(
        self, layer: LayerSpec, recompute: Recompute, strategy: Strategy, micro_batch_size: int, per_parameter: StateBytes
    ) -> _Local:
        """What data parallelism does not change: compute, recompute, traffic of tp and cp, activations."""
        mesh, c = strategy.mesh, self.calibration
        key = (
            *(layer.kind, recompute, micro_batch_size, per_parameter.weight, per_parameter.gradient),
            *(mesh.stride("tp") if mesh.tp > 1 else 1, mesh.stride("cp") if mesh.cp > 1 else 1),
            *price_key(strategy),
        )
        local = self._locals.get(key)
        if local is not None:
            return local
        precision, traits = self.training.precision, self.traits
        forward, backward = layer_seconds(layer, strategy, micro_batch_size, precision, self.cluster.gpu, traits, per_parameter, c)
        causes = dict.fromkeys(("gemm", "attention", "memory_bound", "recompute", "overhead", "tp", "cp", "ep", "dp", "overlap"), 0.0)
        for part in (forward, backward):
            causes["gemm"] += part.gemm
            causes["attention"] += part.attention
            causes["memory_bound"] += part.memory_bound
        repeated = recomputed_part(layer, recompute, fused_norms=traits.fused_norms)
        again, launched_again = forward.compute if recompute == "full" else 0.0, 0.0
        if repeated is not None:
            part = layer_seconds(repeated, strategy, micro_batch_size, precision, self.cluster.gpu, traits, per_parameter, c).forward
            again, launched_again = part.compute, part.launch
        causes["recompute"] = again
        passes = {"forward": forward.compute, "backward": backward.compute + again}
        launch = {"forward": forward.launch, "backward": backward.launch + launched_again}
        size = (layer, strategy, micro_batch_size, self.itemsize)
        experts = [
            item
            for op in layer.ops
            if isinstance(op, Dispatch)
            for item in ep.traffic(op.elements, op.topk, strategy, micro_batch_size, self.itemsize)
        ]
        around = cp.traffic(*size, kind=self.traits.context_parallel, domain=self._domain)
        groups = tp.query_groups(*size) if self.traits.gathers_few_query_groups else ()
        for item in (*tp.traffic(*size), *groups, *around, *experts):
            attention = (forward if item.when == "forward" else backward).attention
            exposed, slowed = self._exposed(self._seconds_of(item), item, attention)
            if item.axis == ep.AXIS:
                exposed, slowed = exposed * (1 - c.ep_overlap), exposed * c.ep_overlap * c.overlap_slowdown
            times = 2 if item.repeats_with_recompute and recompute == "full" else 1
            causes[item.axis] += exposed * times
            causes["overlap"] += slowed * times
            passes[item.when] += exposed + slowed
            launch[item.when] += item.count * c.collective_launch_s
            if times == 2:
                passes["backward"] += exposed + slowed
        for item in () if repeated is None else self._repeated_traffic(repeated, strategy, micro_batch_size):
            exposed, slowed = self._exposed(self._seconds_of(item), item, forward.attention)
            causes[item.axis] += exposed
            causes["overlap"] += slowed
            passes["backward"] += exposed + slowed
            launch["backward"] += item.count * c.collective_launch_s
        local = self._locals[key] = _Local(
            forward_s=passes["forward"],
            backward_s=passes["backward"],
            compute_forward_s=forward.compute,
            compute_backward_s=backward.compute + again,
            launch_forward_s=launch["forward"],
            launch_backward_s=launch["backward"],
            causes=causes,
            kept=cache(partial(memory.activations, layer, recompute, strategy, micro_batch_size, precision, traits, c)),
        )
        return local

    def _repeated_traffic(self, part: LayerSpec, strategy: Strategy, micro_batch_size: int) -> list[Traffic]:
        """What the forward of a recomputed part of a layer communicates."""
        size = (part, strategy, micro_batch_size, self.itemsize)
        items = (*tp.traffic(*size), *cp.traffic(*size, kind=self.traits.context_parallel, domain=self._domain))
        return [item for item in items if item.repeats_with_recompute]

    def _wire_itemsize(self, strategy: Strategy, weight_itemsize: int) -> int:
        """Bytes of a gradient element on the data-parallel network."""
        wire = self.traits.gradient_bytes_on_wire
        if wire == "weight":
            return weight_itemsize
        if self.training.precision == "fp32":
            return ITEMSIZE["fp32"]
        return ITEMSIZE[strategy.grad_reduce_dtype if wire == "grad_reduce_dtype" else self.training.grad_accum_dtype]

    def _optimizer_seconds(self, parameters: int, b: StateBytes, strategy: Strategy) -> float:
        """Adam is memory-bound: reads the gradient twice (norm, update), reads and writes master weights and moments, writes the weight;
        clears all gradients. Offloaded: states at the host's rate, gradients down and weights up over its link."""
        c, gpu = self.calibration, self.cluster.gpu
        shard = parameters / dp.share("optimizer", strategy)
        memory_rate = gpu.memory_bandwidth * c.optimizer_efficiency
        clear = parameters / dp.share("gradient", strategy) * b.gradient / memory_rate
        touched = shard * (2 * b.gradient + 2 * (b.master + b.moments) + b.weight)
        if strategy.offload_optimizer:
            link = self.cluster.host_bandwidth * c.host_efficiency
            return clear + shard * (b.gradient + b.weight) / link + touched / c.host_adam_bandwidth
        return clear + touched / memory_rate

    # ---- traffic

    def link(self, size: int, stride: int) -> Link:
        key = (size, stride)
        link = self._links.get(key)
        if link is None:
            c = self.calibration

            def efficiency(level: int, domains: int) -> float:
                if level == 0:
                    return c.inner_efficiency
                return c.outer_efficiency * float((max(domains, 2) / 2) ** -c.outer_scaling)

            plain = link_for(self.cluster, size, stride, efficiency)
            link = self._links[key] = plain.slower(c.latency_factor)
        return link

    def _seconds_of(self, item: Traffic) -> float:
        link, c = self.link(item.size, item.stride), self.calibration
        if item.when == "step":
            link = link.slower(1 / c.layers_per_message)
        return item.count * (COLLECTIVES[item.operation](item.nbytes, item.size, link) + c.collective_overhead_s)

    def _exposed(self, seconds: float, item: Traffic, compute: float) -> tuple[float, float]:
        """(seconds that nothing hides, compute lost to what is hidden)."""
        c = self.calibration
        if item.hidden == "nothing":
            return seconds, 0.0
        if item.hidden in ("gemm", "user_buffers"):  # chunks of a product passed on over the inner level
            tp_overlap = self.traits.tp_overlap if c.tp_overlap < 0 else c.tp_overlap
            if item.hidden == "user_buffers":
                tp_overlap = max(tp_overlap, c.user_buffers_overlap)
            hidden = seconds * tp_overlap if item.size * item.stride <= self.cluster.levels[0].size else 0.0
        else:
            hidden = min(seconds, c.overlap_efficiency * compute)
        return seconds - hidden, hidden * c.overlap_slowdown

    def hop_seconds(self, candidate: Candidate) -> tuple[float, ...]:
        """Seconds of a transfer by virtual boundary; the entry after a chunk's last stage is the way back to stage 0.

        All stages carry the same tensor: the hidden states, and in an encoder-decoder the encoder's output with them.
        """
        mesh = candidate.mesh
        setting = self._setting_of(candidate)
        if setting.hops is None:
            nbytes = self._boundary_bytes(candidate)
            stride = mesh.stride("pp")
            times = []
            for stage in range(mesh.pp):
                link = self.pair_link(stage * stride, (stage + 1) % mesh.pp * stride, stride)
                times.append(COLLECTIVES["p2p"](nbytes, 2, link) + self.calibration.collective_overhead_s)
            setting.hops = tuple(times)
        return setting.hops * candidate.vpp

    def pair_link(self, first: int, second: int, width: int) -> Link:
        """The link between ranks `first + i` and `second + i`, i < `width`: the innermost level that holds all these pairs."""
        c, levels = self.calibration, self.cluster.levels
        level = next(
            (
                level
                for level in levels
                if self.cluster.num_gpus <= level.size or (level.size % width == 0 and first // level.size == second // level.size)
            ),
            levels[-1],
        )
        return Link(bandwidth=level.bandwidth * c.p2p_efficiency, latency=level.latency * c.latency_factor)

    def _boundary_bytes(self, candidate: Candidate) -> float:
        """Bytes of one transfer: the widest border between two kinds of layers, the same for all stages."""
        setting = self._setting_of(candidate)
        if setting.boundary_bytes is not None:
            return setting.boundary_bytes
        kinds = list(self.kinds)
        widest = 0.0
        for index in range(1, len(kinds)):
            nbytes = pp.boundary_bytes(
                self.model,
                kinds[:index],
                self.kinds[kinds[index]],
                kinds[index:],
                candidate.strategy,
                candidate.micro_batch_size,
                self.itemsize,
            )
            widest = max(widest, nbytes)
        setting.boundary_bytes = widest
        return widest

    # ---- stages

    def stage(self, candidate: Candidate, stage: Stage, index: int) -> StageCost:
        """Seconds and peak bytes of one stage; `index` counts from 0."""
        sums = self._sum(candidate, stage.layers)
        fixed = sum(self.fixed_bytes(candidate).values())
        (_, kept, forward), (_, _, backward), (_, _, step) = self._phases(candidate, sums, index)
        moving = max(kept + forward, kept + backward, step)
        peak = sums.weights + sums.gradients + sums.optimizer + fixed + self.bucket_bytes(candidate, sums.parameters)
        peak += moving + self.calibration.allocator_slack * moving
        return StageCost(
            forward_s=tuple(sums.forward_s),
            backward_s=tuple(sums.backward_s),
            exposed_s=self._exposed_step_seconds(candidate, sums),
            optimizer_s=sums.optimizer_s,
            peak_bytes=peak,
        )

    def _sum(self, candidate: Candidate, spans: Iterable[LayerSpan]) -> _Sums:
        """A stage's layers added up: seconds and saved bytes by chunk, the rest in one."""
        sums = _Sums(candidate.vpp, self.calibration.microbatch_overhead_s / 2)
        layers = self._setting_of(candidate).layers
        for span in spans:
            count, chunk = span.count, span.chunk
            cost = layers.get((span.kind, span.recompute)) or self.layer(candidate, span.kind, span.recompute)
            sums.forward_s[chunk] += count * cost.forward_s
            sums.backward_s[chunk] += count * cost.backward_s
            sums.saved[chunk] += count * cost.saved_bytes
            sums.weights += count * cost.weight_bytes
            sums.gradients += count * cost.gradient_bytes
            sums.optimizer += count * cost.optimizer_bytes
            sums.in_backward += count * cost.backward_bytes
            sums.in_step += count * cost.step_bytes
            sums.parameters += count * cost.parameters
            sums.sync_s += count * cost.sync_s
            sums.gather_s += count * cost.gather_s
            sums.optimizer_s += count * cost.optimizer_s
            if cost.transient_forward_bytes > sums.transient_forward:  # noqa: PLR1730 - a search adds up millions of spans
                sums.transient_forward = cost.transient_forward_bytes
            if cost.transient_backward_bytes > sums.transient_backward:  # noqa: PLR1730
                sums.transient_backward = cost.transient_backward_bytes
        return sums

    def _exposed_step_seconds(self, candidate: Candidate, sums: _Sums) -> float:
        """Gradient reduction and weight gathering that nothing hides, and what hiding the rest costs: once a step."""
        c, strategy = self.calibration, candidate.strategy
        hidden = 0.0
        if sums.sync_s and strategy.overlap_grad_reduce and self.traits.overlaps_grad_reduce:
            hidden += min(sums.sync_s, c.overlap_efficiency * sum(sums.backward_s) * self._windows(candidate))
        if sums.gather_s and strategy.overlap_param_gather and self.traits.overlaps_param_gather:
            hidden += min(sums.gather_s, c.overlap_efficiency * sum(sums.forward_s) * self._windows(candidate))
        return sums.sync_s + sums.gather_s - hidden + hidden * c.overlap_slowdown

    def _windows(self, candidate: Candidate) -> float:
        """Passes of the stage beside which its reduction and gathering can run: one, and when interleaved more. A chunk's gradients are
        final while the stage still works on its last pp micro-batches of the chunks before, and its weights are not needed until the first
        pp micro-batches have passed those (Megatron overlaps by chunk)."""
        return 1 + (candidate.vpp - 1) / candidate.vpp * (candidate.mesh.pp - 1)

    def boundaries_kept(self, candidate: Candidate, index: int, flight: int) -> float:
        """Bytes of what stage `index` keeps of its borders for `flight` micro-batches. DeepSpeed's pipeline keeps its output until its
        backward (pipe_buffers["outputs"]), and its input, of which the layers get a copy (runtime/pipe/engine.py, _exec_forward_pass);
        Megatron frees both (deallocate_output_tensor)."""
        if candidate.schedule != "deepspeed_1f1b":
            return 0.0
        return flight * ((index < candidate.mesh.pp - 1) + (index > 0)) * self._boundary_bytes(candidate)

    def _phases(self, candidate: Candidate, sums: _Sums, index: int) -> tuple[tuple[str, float, float], ...]:
        """(phase, activations kept, what is there besides) in bytes."""
        flights = schedule.in_flight_by_chunk(candidate.schedule, candidate.mesh.pp, index, candidate.num_microbatches, candidate.vpp)
        activations = max(sum(map(mul, counts, sums.saved)) for counts in flights)
        activations += self.boundaries_kept(candidate, index, max(map(sum, flights)))
        backward = sums.transient_backward + sums.in_backward
        if candidate.num_microbatches == 1 and activations > sums.in_backward:  # gradients come as the activations go
            backward -= sums.in_backward
        elif candidate.num_microbatches == 1:
            backward -= activations
        return (
            ("forward", activations, sums.transient_forward),
            ("backward", activations, backward),
            ("step", 0.0, sums.in_step),
        )

    def _memory(self, candidate: Candidate, spans: Iterable[LayerSpan], index: int) -> tuple[str, dict[str, float]]:
        """The phase in which the stage needs most, and its bytes by cause."""
        sums = self._sum(candidate, spans)
        phase, kept, transient = max(self._phases(candidate, sums, index), key=lambda entry: entry[1] + entry[2])
        causes = {"weights": sums.weights, "gradients": sums.gradients, "optimizer": sums.optimizer, **self.fixed_bytes(candidate)}
        causes["buffers"] += self.bucket_bytes(candidate, sums.parameters)
        causes |= {"activations": kept, "transient": transient}
        causes["fragmentation"] = self.calibration.allocator_slack * (kept + transient)
        return phase, causes

    def fixed_bytes(self, candidate: Candidate) -> dict[str, float]:
        """What every rank has whatever its layers: context, communicators, workspaces, the pipeline's buffers."""
        setting = self._setting_of(candidate)
        if setting.fixed_bytes is not None:
            return setting.fixed_bytes
        c, mesh = self.calibration, candidate.mesh
        group = dp.group(candidate.strategy)[0]
        communicators = sum(degree > 1 for degree in (mesh.tp, mesh.cp, mesh.pp, group, mesh.world_size))
        buffers = c.workspace_bytes
        if mesh.pp > 1:
            buffers += 2 * self._boundary_bytes(candidate)  # one tensor on its way out, one gradient on its way in
        if candidate.strategy.tp_comm_overlap:
            widest = max(layer.input_elements for layer in self.kinds.values())
            buffers += USER_BUFFERS * widest * self.itemsize * candidate.micro_batch_size / mesh.cp
        setting.fixed_bytes = {"context": c.context_bytes + communicators * c.communicator_bytes, "buffers": buffers}
        return setting.fixed_bytes

    def bucket_bytes(self, candidate: Candidate, parameters: int) -> float:
        """Reduction buckets, and at stage 3 the weights that prefetching keeps beside the current layer; never more than there is."""
        b = self.traits
        if candidate.mesh.dp * candidate.mesh.cp == 1 or not (b.bucket_elements or b.live_parameter_elements):
            return 0.0
        nbytes = float(min(b.bucket_elements, parameters) * b.bucket_copies * b.bucket_itemsize)
        if candidate.strategy.zero_stage >= SHARDED_FROM_STAGE["weight"]:
            nbytes += min(b.live_parameter_elements, parameters) * self._states(candidate.strategy).weight
        return nbytes

    # ---- the whole

    def _step(self, candidate: Candidate, costs: list[StageCost], hops: float | tuple[float, ...]) -> float:
        """Seconds of the step."""
        forward = [cost.forward_s[chunk] for chunk in range(candidate.vpp) for cost in costs]
        backward = [cost.backward_s[chunk] for chunk in range(candidate.vpp) for cost in costs]
        ends = schedule.finish_times(candidate.schedule, forward, backward, hops, candidate.num_microbatches, candidate.vpp)
        finished = max(end + cost.exposed_s for end, cost in zip(ends, costs, strict=True))
        return finished + max(cost.optimizer_s for cost in costs) + self.once_seconds(candidate)

    def once_seconds(self, candidate: Candidate) -> float:
        """Per step and for all stages: the step's overhead, and the all-reduce of tied embeddings between first and last stage."""
        seconds = self.calibration.step_overhead_s
        mesh = candidate.mesh
        if mesh.pp > 1 and self._has_tied:
            tied = sum(w.local_numel(mesh.tp) for layer in self.kinds.values() for w in layer.weights if w.tied)
            wire = self._wire_itemsize(candidate.strategy, ITEMSIZE["fp32" if self.training.precision == "fp32" else "bf16"])
            link = self.link(2, mesh.stride("pp") * (mesh.pp - 1))
            seconds += COLLECTIVES["all_reduce"](tied * wire, 2, link)
        return seconds

    def score(self, candidate: Candidate, stages: tuple[Stage, ...]) -> tuple[float, float]:
        """(step_time_s, peak_memory_bytes): what `price` reports, without the itemisation."""
        costs = [self.stage(candidate, stage, index) for index, stage in enumerate(stages)]
        return self.score_stages(candidate, costs)

    def score_stages(self, candidate: Candidate, costs: list[StageCost]) -> tuple[float, float]:
        """`score` for stages that are priced already."""
        hops = self.hop_seconds(candidate) if candidate.mesh.pp > 1 else 0.0
        return self._step(candidate, costs, hops), max(cost.peak_bytes for cost in costs)

    def price(self, candidate: Candidate, stages: tuple[Stage, ...]) -> Prediction:
        """The step's seconds and the ranks' bytes, itemised. `by_cause` is the slowest stage's: its compute and traffic over all
        micro-batches, transfers and bubble (what waiting on the pipeline adds), the optimizer."""
        costs = [self.stage(candidate, stage, index) for index, stage in enumerate(stages)]
        mesh, m = candidate.mesh, candidate.num_microbatches
        hops = self.hop_seconds(candidate) if mesh.pp > 1 else 0.0
        total = self._step(candidate, costs, hops)
        peak = max(cost.peak_bytes for cost in costs)

        busiest = max(range(mesh.pp), key=lambda i: (m * (sum(costs[i].forward_s) + sum(costs[i].backward_s)) + costs[i].exposed_s, -i))
        causes = dict.fromkeys(CAUSES, 0.0)
        for span in stages[busiest].layers:
            for cause, seconds in self.layer(candidate, span.kind, span.recompute).by_cause.items():
                causes[cause] += m * span.count * seconds
        causes["overhead"] += m * candidate.vpp * self.calibration.microbatch_overhead_s + self.calibration.step_overhead_s
        causes["dp"] += costs[busiest].exposed_s
        causes["optimizer"] = max(cost.optimizer_s for cost in costs)
        causes["pp"] = self.once_seconds(candidate) - self.calibration.step_overhead_s
        if mesh.pp > 1:
            causes["pp"] += max(0.0, total - self._step(candidate, costs, 0.0))
        causes["bubble"] = total - sum(causes.values())
        by_stage = []
        for index, (stage, cost) in enumerate(zip(stages, costs, strict=True)):
            phase, memory_by_cause = self._memory(candidate, stage.layers, index)
            by_stage.append(
                StagePrediction(
                    forward_s=sum(cost.forward_s),
                    backward_s=sum(cost.backward_s),
                    peak_memory_bytes=cost.peak_bytes,
                    memory_by_cause=memory_by_cause,
                    peak_phase=phase,
                )
            )
        samples = m * candidate.micro_batch_size * mesh.dp
        interval = self.calibration.interval
        return Prediction(
            step_time_s=total,
            tokens_per_s_per_gpu=samples * self.model.tokens_per_sample / total / mesh.world_size,
            peak_memory_bytes=peak,
            by_stage=tuple(by_stage),
            by_cause={cause: seconds for cause, seconds in causes.items() if seconds},
            model_flops_per_gpu=samples * self._flops_per_sample / total / mesh.world_size,
            interval=None if interval is None else (total * interval[0], total * interval[1]),
        )

    # ---- bounds

    def modes_of(self, candidate: Candidate, kind: str) -> tuple[Recompute, ...]:
        if not self.kinds[kind].recomputable:
            return ("none",)
        strongest = RECOMPUTE_ORDER.index(candidate.strategy.recompute)
        return tuple(mode for mode in self.modes if RECOMPUTE_ORDER.index(mode) <= strongest)

    def time_floor(self, candidate: Candidate) -> float:
        """Seconds that no split of the layers and no recompute up to the candidate's undercuts.

        A stage is busy for m times its layers, then exposes its synchronisation and updates; the slowest is at least the mean, and at
        least a stage with ceil(count / pp) layers of a kind; and one micro-batch must pass every layer.
        """
        m, stages = candidate.num_microbatches, candidate.mesh.pp
        c = self.calibration
        overhead = c.microbatch_overhead_s * candidate.vpp
        busy = sync = gather = optimizer = forward = backward = slowest = 0.0
        for kind, count in self._counts.items():
            costs = [self.layer(candidate, kind, mode) for mode in self.modes_of(candidate, kind)]
            layer_forward, layer_backward = min(cost.forward_s for cost in costs), min(cost.backward_s for cost in costs)
            busy += count * (layer_forward + layer_backward)
            forward += count * layer_forward
            backward += count * max(cost.backward_s for cost in costs)  # the most that can hide the reduction
            sync += count * costs[0].sync_s
            gather += count * costs[0].gather_s
            optimizer += count * costs[0].optimizer_s
            slowest = max(slowest, ceil(count / stages) * (layer_forward + layer_backward))
        strategy, b = candidate.strategy, self.traits
        half = stages * overhead / 2
        if strategy.overlap_grad_reduce and b.overlaps_grad_reduce:
            sync = max(0.0, sync - c.overlap_efficiency * (backward + half) * self._windows(candidate))
        if strategy.overlap_param_gather and b.overlaps_param_gather:
            gather = max(0.0, gather - c.overlap_efficiency * (forward + half) * self._windows(candidate))
        mean = (m * busy + sync + gather + optimizer) / stages + m * overhead
        return max(mean, m * (slowest + overhead), busy + stages * overhead) + self.once_seconds(candidate)

    def memory_floor(self, candidate: Candidate) -> float:
        """Bytes that the fullest rank can't go below, whatever the split and the recompute up to the candidate's.

        For one kind: were all stages within P bytes, stage i held at most P / (static + in flight(i) x saved) of its layers, and these
        must sum to its count. Over all kinds: the mean of the static bytes and one micro-batch's saved ones.
        """
        c, stages = self.calibration, candidate.mesh.pp
        fixed = sum(self.fixed_bytes(candidate).values())
        slack = 1 + c.allocator_slack
        flights = [
            schedule.fewest_in_flight(candidate.schedule, stages, i, candidate.num_microbatches, candidate.vpp) for i in range(stages)
        ]
        mean = floor = 0.0
        for kind, count in self._counts.items():
            costs = [self.layer(candidate, kind, mode) for mode in self.modes_of(candidate, kind)]
            static, saved = costs[0].static_bytes, min(cost.saved_bytes for cost in costs)
            transient = min(max(cost.transient_forward_bytes, cost.transient_backward_bytes) for cost in costs)
            mean += count * (static + slack * saved * min(flights))
            share = sum(1 / nbytes for flight in flights if (nbytes := static + slack * saved * flight) > 0)
            alone = count / share if share else 0.0
            one = static + slack * (saved * min(flights) + transient)
            floor = max(floor, alone, one)
        return fixed + max(floor, mean / stages)
