"""What data parallelism adds to weights on a rank: their states under ZeRO, the traffic of gradients and weights, and the update."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from msgspec.structs import replace

from orchestrator.cost.network import Network
from orchestrator.cost.states import EIGHT_BIT_MOMENTS, States, primary_weight_bytes, state_bytes, states
from orchestrator.cost.workload import EngineWorkload
from orchestrator.errors import InputError
from orchestrator.model.lora import packed_bytes
from orchestrator.model.spec import Gemm, LayerSpec
from orchestrator.strategy.axes import dp
from orchestrator.strategy.axes.traffic import Traffic
from orchestrator.strategy.capabilities import SHARDED_FROM_STAGE, StateBytes, Traits
from orchestrator.strategy.spec import Strategy
from orchestrator.units import ITEMSIZE


def own_bucket(traits: Traits, ranks: int) -> int:
    """Parameters of a bucket where `ddp_bucket_size` says nothing, over so many ranks; 0: the engine has no such size."""
    least, each = traits.message_parameters
    return max(least, each * ranks)


class Replica(NamedTuple):
    """One rank's copy of some weights: bytes held, and seconds once a step, before anything hides them."""

    held: States
    sync_s: float
    """Seconds of the gradients' reduction."""
    gather_s: float
    """Seconds of the weights' all-gather after the update (ZeRO-1 and 2)."""
    optimizer_s: float
    in_passes: tuple[tuple[Traffic, float], ...]
    """What travels in every micro-batch, with its seconds (ZeRO-2's reductions, ZeRO-3's gathers)."""
    carried_bytes: float = 0.0
    """Bytes of gradients that go over the host's link in every micro-batch's backward (`ReplicaPrices.carried_bytes`)."""

    def beside(self, other: Replica) -> Replica:
        """The sum of this copy and another of the same rank."""
        held = States(*(mine + its for mine, its in zip(self.held, other.held, strict=True)))
        return Replica(
            held,
            self.sync_s + other.sync_s,
            self.gather_s + other.gather_s,
            self.optimizer_s + other.optimizer_s,
            (*self.in_passes, *other.in_passes),
            self.carried_bytes + other.carried_bytes,
        )


class ReplicaPrices:
    """Prices of a rank's copy of weights, for one workload and network."""

    def __init__(self, workload: EngineWorkload, network: Network) -> None:
        self._workload, self._network = workload, network
        self._state_bytes: dict[int, StateBytes] = {}
        self._counted: dict[tuple[str, int, bool], int] = {}
        self._frozen: dict[tuple[str, int, bool], int] = {}
        self._packed: dict[str, float] = {}
        """Bytes of a frozen weight in few bits, by kind of layer."""

    def states_of(self, strategy: Strategy) -> StateBytes:
        """Bytes per parameter before sharding. Raises InputError for a ZeRO stage that the engine has not."""
        found = self._state_bytes.get(strategy.zero_stage)
        if found is None:
            traits = self._workload.traits
            if self._workload.cluster.is_cpu:  # where torch's Adam goes from parameter to parameter
                traits = replace(traits, adam_step=0.0)
            try:
                found = state_bytes(traits, self._workload.training, strategy.zero_stage)
            except KeyError:
                raise InputError("pin.zero_stage", strategy.zero_stage, f"{traits.engine} does not have it", ()) from None
            self._state_bytes[strategy.zero_stage] = found
        return found

    def weights_of(self, strategy: Strategy, *, linears: bool) -> tuple[StateBytes, float]:
        """Bytes per parameter before sharding, and those of a weight that is gathered. `linears`: of a layer whose products may be FP8's.
        Raises InputError as `states_of`."""
        w, per_parameter = self._workload, self.states_of(strategy)
        if linears and w.training.optimizer == "muon":
            per_parameter = replace(per_parameter, moments=per_parameter.moments / 2)  # momentum alone
        if not (strategy.fp8_param_gather and linears):
            return per_parameter, w.weight_itemsize
        held, gathered = primary_weight_bytes(w.training, w.cluster.gpu, strategy)
        return replace(per_parameter, weight=held), gathered

    def dense_parameters(self, layer: LayerSpec, tensor_parallel: int, *, with_tied: bool) -> int:
        """Parameters of the layer on one rank before ZeRO, without its experts'. `with_tied`: weights that are shared with another stage
        too."""
        key = (layer.kind, tensor_parallel, with_tied)
        count = self._counted.get(key)
        if count is None:
            everything = layer.local_parameters(tensor_parallel, with_tied=with_tied)
            count = self._counted[key] = everything - sum(w.local_numel(1) for w in layer.weights if w.kind == "expert")
        return count

    def frozen_parameters(self, layer: LayerSpec, tensor_parallel: int, *, with_tied: bool) -> int:
        """Parameters among `dense_parameters` that are not trained."""
        if self._workload.trainable == inf:
            return 0
        key = (layer.kind, tensor_parallel, with_tied)
        count = self._frozen.get(key)
        if count is None:
            own = (weight for weight in layer.weights if weight.frozen and weight.kind != "expert" and (with_tied or not weight.tied))
            count = self._frozen[key] = sum(weight.local_numel(tensor_parallel) for weight in own)
        return count

    def frozen_of(self, strategy: Strategy, layer: LayerSpec) -> tuple[StateBytes, float]:
        """`weights_of` for this layer's weights that are not trained, in the mean over them."""
        per_parameter, itemsize = self.weights_of(strategy, linears=layer.recomputable)
        lora = self._workload.training.lora
        if lora is None or lora.bits is None:
            return per_parameter, itemsize
        packed = self._packed.get(layer.kind)
        if packed is None:
            ops = [op for op in layer.ops if isinstance(op, Gemm) and op.bits is not None]
            nbytes = sum(packed_bytes(lora.bits, op.k) * op.k * op.n for op in ops)
            packed = self._packed[layer.kind] = nbytes / sum(op.k * op.n for op in ops) if ops else 0.0
        if not packed:
            return per_parameter, itemsize
        return replace(per_parameter, weight=packed), packed

    def of(
        self,
        parameters: int,
        strategy: Strategy,
        frozen: int = 0,
        ranks: int | None = None,
        *,
        linears: bool = False,
        per_frozen: tuple[StateBytes, float] | None = None,
    ) -> Replica:
        """The copy of so many weights on a rank. `parameters`: of the rank before ZeRO, replicated over the strategy's dp x cp; `frozen` of
        them are not trained: stage 3 divides and gathers them like the others, else they are there and nothing happens to them. `ranks`:
        those that share weights which are no experts' (None: the strategy's dp x cp), by whose number a bucket is as large as it is, one of
        experts too. `linears`: as in `weights_of`. `per_frozen`: `frozen_of` them (None: like the others)."""
        w = self._workload
        per_parameter, itemsize = self.weights_of(strategy, linears=linears)
        of_frozen, frozen_itemsize = per_frozen or (per_parameter, itemsize)
        trained = parameters - frozen
        gathered = trained * itemsize + (frozen * frozen_itemsize if strategy.zero_stage >= SHARDED_FROM_STAGE["weight"] else 0.0)
        sync = gather = 0.0
        in_passes = []
        for item in dp.traffic(gathered, trained * self.wire_itemsize(strategy), strategy, w.traits):
            seconds = self._network.seconds(item, self._messages(trained, strategy, ranks or dp.ranks(strategy)))
            if item.when != "step":
                in_passes.append((item, seconds))
            elif item.operation == "all_gather":
                gather += seconds
            else:
                sync += seconds
        held = states(trained, per_parameter, strategy)
        if frozen:
            held = held._replace(weights=held.weights + states(frozen, of_frozen, strategy).weights)
        update = self._optimizer_seconds(trained, per_parameter, strategy)
        return Replica(held, sync, gather, update, tuple(in_passes), self.carried_bytes(trained, strategy))

    def carried_bytes(self, parameters: float, strategy: Strategy) -> float:
        """Bytes that DeepSpeed carries over the host's link in the backward of a micro-batch behind the first, to add so many trained
        parameters' gradients to the sums that it keeps beside an offloaded optimizer: the rank's part comes up, and goes down again.
        Stage 2 keeps it in the weights' type (runtime/zero/stage_1_and_2.py:1809, async_accumulate_grad_in_cpu_via_gpu), stage 3 in that
        of sums (runtime/zero/stage3.py:2022, partition_grads); stage 1 sums on the GPU. Without a GPU there is nothing to carry."""
        w, stage = self._workload, strategy.zero_stage
        offloads = strategy.offload_optimizer and w.traits.bucket_elements and not w.cluster.is_cpu
        if not offloads or stage < SHARDED_FROM_STAGE["gradient"]:
            return 0.0
        sums = ITEMSIZE["fp32" if w.training.precision == "fp32" else w.training.grad_accum_dtype]
        itemsize = sums if stage >= SHARDED_FROM_STAGE["weight"] else w.weight_itemsize
        return 2 * itemsize * parameters / dp.share("gradient", strategy)

    def _messages(self, parameters: int, strategy: Strategy, ranks: int) -> float | None:
        """Messages in which so many parameters travel once a step; None: `Calibration.layers_per_message` says how many. Megatron-core's
        buckets (core/distributed/distributed_data_parallel.py:64) grow with the group, so that the hops of its ring take no longer than
        the bytes. On later stages of a pipeline, and in its later chunks, a chunk is one bucket (:100), which is left out."""
        bucket = strategy.ddp_bucket_size or own_bucket(self._workload.traits, ranks)
        return parameters / bucket if bucket and self._workload.trainable == inf else None

    def wire_itemsize(self, strategy: Strategy) -> int:
        """Bytes of a gradient element on the data-parallel network."""
        w = self._workload
        wire = w.traits.gradient_bytes_on_wire
        if wire == "weight":
            return w.weight_itemsize
        if w.training.precision == "fp32":
            return ITEMSIZE["fp32"]
        return ITEMSIZE[strategy.grad_reduce_dtype if wire == "grad_reduce_dtype" else w.training.grad_accum_dtype]

    def _optimizer_seconds(self, parameters: int, b: StateBytes, strategy: Strategy) -> float:
        """Seconds of the update. Adam is memory-bound: reads the gradient twice (norm, update), reads and writes master weights and
        moments, writes the weight; clears all gradients. Offloaded: states at the host's rate, gradients down and weights up over its
        link."""
        c, cluster = self._workload.calibration, self._workload.cluster
        shard = parameters / dp.share("optimizer", strategy)
        memory_rate = cluster.gpu.memory_bandwidth * c.optimizer_efficiency
        clear = parameters / dp.share("gradient", strategy) * b.gradient / memory_rate
        touched = shard * (2 * b.gradient + 2 * (b.master + b.moments) + b.weight)
        if strategy.offload_optimizer:
            link = cluster.host_bandwidth * c.host_efficiency
            return clear + shard * (b.gradient + b.weight) / link + touched / c.host_adam_bandwidth
        if self._workload.training.optimizer == "paged_adamw_8bit":  # its pages come and go over the host's link, should the GPU be full
            link = cluster.host_bandwidth * c.host_efficiency
            return clear + touched / memory_rate + shard * 2 * EIGHT_BIT_MOMENTS / link
        return clear + touched / memory_rate
