"""A pipeline stage: sums over its layers, and what comes of them once its place in the pipeline is known."""

from __future__ import annotations

from orchestrator.cost.layer import LayerCost
from orchestrator.cost.replicas import own_bucket
from orchestrator.cost.workload import EngineWorkload
from orchestrator.strategy.axes import dp
from orchestrator.strategy.spec import Candidate
from orchestrator.values import Value


class StageCost(Value, frozen=True, kw_only=True):
    """One stage in its place. `forward_s`, `backward_s` per chunk and micro-batch."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    exposed_s: float
    """Seconds of a step for what is not hidden of gradient reduction and weight gathering, and for what hiding costs."""
    optimizer_s: float
    peak_bytes: float


class StageSums:
    """Layers added up, in whatever stage they stand: seconds and saved bytes by chunk, the rest in one. A search that goes from layer to
    layer adds each in constant time, and asks `CostModel.stage_cost` and `StageMemory.peak_bytes` of the sums.

    `overhead_s`: what a chunk's forward, and its backward, takes besides its layers.
    """

    __slots__ = (
        "backward_s", "forward_s", "gather_s", "gradients", "in_backward", "in_step", "optimizer", "optimizer_s", "parameters", "saved",
        "sync_s", "transient_backward", "transient_forward", "weights",
    )  # fmt: skip

    def __init__(self, vpp: int, overhead_s: float) -> None:
        self.forward_s = [overhead_s] * vpp
        self.backward_s = [overhead_s] * vpp
        self.saved = [0.0] * vpp
        """Bytes that one micro-batch keeps from forward to backward."""
        self.weights = self.gradients = self.optimizer = self.in_backward = self.in_step = 0.0
        self.transient_forward = self.transient_backward = 0.0
        self.sync_s = self.gather_s = self.optimizer_s = 0.0
        self.parameters = 0

    def add(self, cost: LayerCost, count: int, chunk: int = 0) -> None:
        """Adds `count` layers of this cost to a chunk."""
        self.forward_s[chunk] += count * cost.forward_s
        self.backward_s[chunk] += count * cost.backward_s
        self.saved[chunk] += count * cost.saved_bytes
        self.weights += count * cost.weight_bytes
        self.gradients += count * cost.gradient_bytes
        self.optimizer += count * cost.optimizer_bytes
        self.in_backward += count * cost.backward_bytes
        self.in_step += count * cost.step_bytes
        self.parameters += count * cost.parameters
        self.sync_s += count * cost.sync_s
        self.gather_s += count * cost.gather_s
        self.optimizer_s += count * cost.optimizer_s
        if cost.transient_forward_bytes > self.transient_forward:  # noqa: PLR1730 - a search adds up millions of spans
            self.transient_forward = cost.transient_forward_bytes
        if cost.transient_backward_bytes > self.transient_backward:  # noqa: PLR1730
            self.transient_backward = cost.transient_backward_bytes

    def copy(self) -> StageSums:
        """Sums of the same layers, to add others to."""
        twin = StageSums(0, 0.0)
        for name in self.__slots__:
            value = getattr(self, name)
            setattr(twin, name, value[:] if isinstance(value, list) else value)
        return twin


def exposed_seconds(workload: EngineWorkload, candidate: Candidate, sums: StageSums) -> float:
    """Seconds of a step for gradient reduction and weight gathering that nothing hides, and for what hiding the rest costs."""
    slowdown, beside = workload.calibration.overlap_slowdown, 1 - late_share(workload, candidate, sums.parameters)
    sync, gather = beside * sums.sync_s, beside * sums.gather_s
    late = sums.sync_s - sync + sums.gather_s - gather
    return late + exposed_of(workload, candidate, sync, gather, sum(sums.forward_s), sum(sums.backward_s), slowdown)


def late_share(workload: EngineWorkload, candidate: Candidate, parameters: float) -> float:
    """The share, 0 to 1, of a stage's reduction and gathering that no pass can hide as its buckets are larger than the engine's own, whose
    last and first are in `overlap_efficiency`: the last bucket's gradients are whole when backward ends, and the first one's weights are
    needed when forward begins. Only the first stage has buckets (core/distributed/distributed_data_parallel.py:100), and its first chunk
    of layers (training/training.py, disable_bucketing): the others' passes hide the whole."""
    bucket, group = candidate.strategy.ddp_bucket_size, dp.ranks(candidate.strategy)
    if bucket is None or not parameters:
        return 0.0
    return min(1.0, max(0, bucket - own_bucket(workload.traits, group)) / parameters)


def exposed_of(
    workload: EngineWorkload, candidate: Candidate, sync_s: float, gather_s: float, forward_s: float, backward_s: float, slowdown: float
) -> float:
    """`exposed_seconds` of a stage whose micro-batch takes `forward_s` and `backward_s`: the reduction hides beside the last backward
    passes, the gathering beside the first forward ones, each no longer than the share `overlap_efficiency` of them, and a hidden second
    costs `slowdown`. With a slowdown of at most 1 no division of work over stages exposes less in all than one stage with all of it."""
    strategy, traits = candidate.strategy, workload.traits
    beside = workload.calibration.overlap_efficiency * windows(candidate)
    hidden = 0.0
    if sync_s and strategy.overlap_grad_reduce and traits.overlaps_grad_reduce:
        hidden += min(sync_s, beside * backward_s)
    if gather_s and strategy.overlap_param_gather and traits.overlaps_param_gather:
        hidden += min(gather_s, beside * forward_s)
    return sync_s + gather_s - hidden + hidden * slowdown


def windows(candidate: Candidate) -> float:
    """Passes of the stage beside which its reduction and gathering can run: one, and when interleaved more. A chunk's gradients are
    final while the stage still works on its last pp micro-batches of the chunks before, and its weights are not needed until the first
    pp micro-batches have passed those (Megatron overlaps by chunk).

    >>> from orchestrator.strategy.spec import Mesh, Strategy
    >>> two = Candidate(engine="", strategy=Strategy(mesh=Mesh(pp=4)), micro_batch_size=1, num_microbatches=8, vpp=2)
    >>> windows(two)  # half of a micro-batch's passes for each of the other pp - 1
    2.5
    """
    return 1 + (candidate.vpp - 1) / candidate.vpp * (candidate.mesh.pp - 1)
