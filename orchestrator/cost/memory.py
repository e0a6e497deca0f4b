"""The peak memory of a rank: what all ranks have, what a stage's layers need on top, and in which phase of a step that is most."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import mul
from typing import TYPE_CHECKING, NamedTuple

from orchestrator.cost.schedule import Slot, in_flight, in_flight_by_chunk
from orchestrator.cost.schedule.flights import most_in_flight
from orchestrator.cost.schedule.names import of_chunks
from orchestrator.cost.stage import StageSums
from orchestrator.cost.workload import EngineWorkload
from orchestrator.strategy.axes import dp
from orchestrator.strategy.capabilities import SHARDED_FROM_STAGE, StateBytes
from orchestrator.strategy.spec import Candidate

if TYPE_CHECKING:
    from orchestrator.cost.layer import LayerCost

USER_BUFFERS = 10
"""Gathered tensors that Transformer Engine allocates for overlapped traffic, one for each product that has some: qkv, proj, fc1 and fc2 in
forward and in the input's gradient, qkv and fc1 in the weight's (its pytorch/module/base.py, initialize_ub)."""


class Phase(NamedTuple):
    """A part of the step, the activations that are kept in it, and the bytes that are there besides."""

    name: str
    kept: float
    transient: float


def user_buffer_bytes(workload: EngineWorkload, candidate: Candidate) -> float:
    """Bytes of Transformer Engine's user buffers on every rank; 0 where the candidate has none."""
    if not candidate.strategy.tp_comm_overlap:
        return 0.0
    widest = max(layer.input_elements for layer in workload.kinds.values())
    return USER_BUFFERS * widest * workload.itemsize * candidate.micro_batch_size / candidate.mesh.cp


def fixed_bytes(workload: EngineWorkload, candidate: Candidate, boundary_bytes: float) -> dict[str, float]:
    """Bytes that every rank has whatever its layers, by cause: context, communicators, workspaces, the pipeline's buffers."""
    c, mesh = workload.calibration, candidate.mesh
    group = dp.ranks(candidate.strategy)
    communicators = sum(degree > 1 for degree in (mesh.tp, mesh.cp, mesh.pp, group, mesh.world_size))
    buffers = c.workspace_bytes
    if mesh.pp > 1:
        buffers += 2 * boundary_bytes  # one tensor on its way out, one gradient on its way in
    buffers += user_buffer_bytes(workload, candidate) + offloaded_gradient_bytes(workload, candidate)
    return {"context": c.context_bytes + communicators * c.communicator_bytes, "buffers": buffers}


def offloaded_gradient_bytes(workload: EngineWorkload, candidate: Candidate) -> int:
    """Bytes of the tensor on the GPU through which DeepSpeed's stages 1 and 2 bring an offloaded gradient back to add to it: one as long as
    the rank's largest parameter, in the weights' type, from the first step on (runtime/zero/stage_1_and_2.py:659). Under a pipeline the
    model's largest stands for every stage's, which the first and the last one have."""
    strategy = candidate.strategy
    if not (strategy.offload_optimizer and workload.traits.bucket_elements and 0 < strategy.zero_stage < SHARDED_FROM_STAGE["weight"]):
        return 0
    largest = max(
        weight.local_numel(candidate.mesh.tp) for layer in workload.kinds.values() for weight in layer.weights if not weight.frozen
    )
    return largest * workload.weight_itemsize


def bucket_bytes(workload: EngineWorkload, candidate: Candidate, states: StateBytes, parameters: float) -> float:
    """Bytes of the reduction buckets, and at stage 3 of the weights that prefetching keeps beside the current layer; never more than
    there is. Only DeepSpeed's engines have `bucket_elements` (Megatron's buckets are parts of its gradient buffer).

    From stage 1 on DeepSpeed 0.19.8 makes its contiguous buckets and copies every gradient into them whatever the group's size, one rank
    included: stages 1 and 2 in runtime/zero/stage_1_and_2.py:3256 (setup_buckets; under a pipeline :964), stage 3 in
    runtime/zero/stage3.py:780. Stage 1 in bf16 with fp32 sums flattens as much instead (runtime/engine.py:3795, bf16_optimizer.py), and
    so does stage 0, after the backward pass. A group of one gathers no weights (runtime/zero/partition_parameters.py:904).
    """
    b, stage = workload.traits, candidate.strategy.zero_stage
    if not (b.bucket_elements or b.live_parameter_elements):
        return 0.0
    alone = candidate.mesh.dp * candidate.mesh.cp == 1
    if alone and stage == 0:
        return 0.0
    nbytes = float(min(b.bucket_elements, parameters, workload.trainable) * b.bucket_copies * b.bucket_itemsize)
    if stage >= SHARDED_FROM_STAGE["weight"] and not alone:
        nbytes += min(b.live_parameter_elements, parameters) * states.weight
    return nbytes


def peak(stiff: float, slack: float, *moving: float) -> float:
    """The most bytes at any time: what is there in all phases (`stiff`), and what comes and goes in the fullest, fragmentation included.

    >>> peak(100.0, 0.5, 10.0 + 2.0, 6.0 + 8.0)
    121.0
    """
    return stiff + (1 + slack) * max(moving)


def borders_kept(candidate: Candidate, index: int, flight: int, boundary_bytes: float) -> float:
    """Bytes of what stage `index` keeps of its borders for `flight` micro-batches, where its schedule keeps any: its input and its
    output, of which the first stage has no input and the last no output.

    Of groups of N > pp micro-batches, N - pp more wait where they come around: activations on the first stage, gradients on the last
    (fwd_recv_buffer_size, core/pipeline_parallel/schedules.py:1391).
    """
    group, pp = candidate.microbatch_group_size_per_vp_stage, candidate.mesh.pp
    if group is not None:
        return (group - pp) * (index in (0, pp - 1)) * boundary_bytes
    if not of_chunks(candidate.schedule, candidate.vpp).keeps_borders:
        return 0.0
    return flight * ((index < candidate.mesh.pp - 1) + (index > 0)) * boundary_bytes


class Standing(NamedTuple):
    """What the memory of every stage of a strategy and micro-batch has: bytes whatever its layers, by cause and in all; of a transfer and
    of a parameter; and whether there are buckets."""

    fixed: dict[str, float]
    fixed_bytes: float
    boundary_bytes: float
    states: StateBytes
    has_buckets: bool


class StageMemory:
    """One stage's place in a candidate's pipeline, whatever its layers. The one place where a peak is computed."""

    __slots__ = (
        *("_buckets", "_flights", "_flown", "_single", "_states", "_workload"),
        *("borders", "candidate", "fixed", "fixed_bytes", "flight", "index", "slack"),
    )

    def __init__(self, workload: EngineWorkload, candidate: Candidate, index: int, standing: Standing) -> None:
        self._workload = workload
        self.fixed, self.fixed_bytes, boundary_bytes, self._states, self._buckets = standing
        self.candidate, self.index = candidate, index
        m, pp = candidate.num_microbatches, candidate.mesh.pp
        self._single = m == 1
        self.flight = in_flight(candidate.schedule, pp, index, m, candidate.vpp, candidate.microbatch_group_size_per_vp_stage)
        """The most micro-batches in flight at once, counted in chunks."""
        self._flights: tuple[tuple[int, ...], ...] | None = None
        self.borders = borders_kept(candidate, index, self.flight, boundary_bytes)
        self.slack = workload.calibration.allocator_slack
        """Share of activations and transients that fragmentation adds."""
        self._flown: tuple[int, int, int] | None = None

    @property
    def flights(self) -> tuple[tuple[int, ...], ...]:
        """Micro-batches in flight by chunk, at each time when saved bytes may peak."""
        if self._flights is None:
            mine = self.candidate
            shape = mine.num_microbatches, mine.vpp, mine.microbatch_group_size_per_vp_stage
            self._flights = in_flight_by_chunk(mine.schedule, mine.mesh.pp, self.index, *shape)
        return self._flights

    def activations(self, saved: Sequence[float]) -> float:
        """Bytes kept for backward at the worst time, where a micro-batch saves so many in each chunk."""
        if len(saved) == 1:
            return self.flight * saved[0] + self.borders
        most: float = max([sum(map(mul, counts, saved)) for counts in self.flights])
        return most + self.borders

    def even_activations(self, saved: float, more: float, *, first: bool) -> float:
        """Bytes kept for backward at the worst time, where each chunk saves `saved` for a micro-batch, and the first or the last `more`
        besides."""
        if not more:
            return self.flight * saved + self.borders
        if self._flown is None:
            mine = self.candidate
            shape = mine.num_microbatches, mine.vpp, mine.microbatch_group_size_per_vp_stage
            self._flown = most_in_flight(mine.schedule, mine.mesh.pp, self.index, *shape)
        together, head, tail = self._flown
        return together * saved + (head if first else tail) * more + self.borders

    def stiff_bytes(self, static: float, parameters: float) -> float:
        """Bytes that are there in all phases: states, what every rank has, buckets for so many parameters."""
        buckets = bucket_bytes(self._workload, self.candidate, self._states, parameters) if self._buckets else 0.0
        return static + self.fixed_bytes + buckets

    def phases(self, kept: float, forward: float, backward: float, in_backward: float, in_step: float) -> tuple[Phase, Phase, Phase]:
        """The bytes of a stage in the forward passes, in the backward passes and in the optimizer's step. `kept`: activations; `forward`,
        `backward`: transient in a layer; `in_backward`, `in_step`: of all layers together."""
        if self._single:  # gradients come as the activations go
            in_backward = max(0.0, in_backward - kept)
        besides = backward + in_backward
        return Phase("forward", kept, forward), Phase("backward", kept, besides), Phase("step", 0.0, in_step)

    def peak_bytes(self, sums: StageSums) -> float:
        """The most bytes that a stage of these layers needs."""
        stiff = self.stiff_bytes(sums.weights + sums.gradients + sums.optimizer, sums.parameters)
        transient = sums.transient_forward, sums.transient_backward, sums.in_backward, sums.in_step
        return self.peak_of(stiff, self.activations(sums.saved), *transient)

    def peak_of(self, stiff: float, kept: float, forward: float, backward: float, in_backward: float, in_step: float) -> float:
        """`peak` over the `phases`: what a search asks for, hundreds of thousands of times."""
        if self._single:
            in_backward = max(0.0, in_backward - kept)
        return stiff + (1 + self.slack) * max(kept + forward, kept + (backward + in_backward), in_step)

    def over_time(self, sums: StageSums, lane: Sequence[Slot]) -> list[tuple[float, float, dict[str, float]]]:
        """(begin, end, bytes by cause) of each pass of a timeline's lane, and after the last one of the optimizer's step (it ends where it
        begins). The most of them is `peak_bytes`: saved bytes come with a forward pass and go after its backward one."""
        causes = self._standing(sums)
        counts = [0] * len(sums.saved)
        found = []
        for slot in lane:
            if slot.action not in ("forward", "backward"):
                continue
            counts[slot.chunk] += slot.action == "forward"
            kept = sum(map(mul, counts, sums.saved)) + (self.borders if any(counts) else 0.0)
            phases = self.phases(kept, sums.transient_forward, sums.transient_backward, sums.in_backward, sums.in_step)
            found.append((slot.begin_s, slot.end_s, causes | self._moving(phases[slot.action == "backward"])))
            counts[slot.chunk] -= slot.action == "backward"
        end = lane[-1].end_s
        step = self.phases(0.0, 0.0, 0.0, 0.0, sums.in_step)[-1]
        return [*found, (end, end, causes | self._moving(step))]

    def _standing(self, sums: StageSums) -> dict[str, float]:
        """What is there in all phases, by cause."""
        causes = {"weights": sums.weights, "gradients": sums.gradients, "optimizer": sums.optimizer, **self.fixed}
        causes["buffers"] += bucket_bytes(self._workload, self.candidate, self._states, sums.parameters)
        return causes

    def _moving(self, phase: Phase) -> dict[str, float]:
        """What comes and goes in a phase, by cause."""
        moving = phase.kept + phase.transient
        return {"activations": phase.kept, "transient": phase.transient, "fragmentation": self.slack * moving}

    def itemised(self, sums: StageSums) -> tuple[str, dict[str, float]]:
        """The phase in which the stage needs most, and `peak_bytes` by cause."""
        kept = self.activations(sums.saved)
        phases = self.phases(kept, sums.transient_forward, sums.transient_backward, sums.in_backward, sums.in_step)
        phase = max(phases, key=lambda phase: phase.kept + phase.transient)
        return phase.name, self._standing(sums) | self._moving(phase)


class RecomputedPeak:
    """`StageMemory.peak_bytes` of some layers for one recompute after the other: states don't depend on it, so that only what passes keep
    is added up anew. `plain`: all layers without recompute; `ends`: embedding and head, which are not recomputed, where they are."""

    __slots__ = ("_backward", "_forward", "_memory", "_plain", "_stiff")

    def __init__(self, memory: StageMemory, plain: StageSums, ends: Sequence[LayerCost]) -> None:
        self._memory, self._plain = memory, plain
        self._stiff = memory.stiff_bytes(plain.weights + plain.gradients + plain.optimizer, plain.parameters)
        self._forward = max((cost.transient_forward_bytes for cost in ends), default=0.0)
        self._backward = max((cost.transient_backward_bytes for cost in ends), default=0.0)

    def peak_bytes(self, layers: Iterable[tuple[int, int, LayerCost, LayerCost]], inside: Iterable[int]) -> float:
        """Peak bytes of the stage. `layers`: (chunk, how many of a kind, the price without recompute, and with it); `inside`: how many of
        each are recomputed."""
        saved, forward, backward = self._plain.saved[:], self._forward, self._backward
        for (chunk, count, plain, recomputed), n in zip(layers, inside, strict=True):
            if n:
                saved[chunk] -= n * (plain.saved_bytes - recomputed.saved_bytes)
                if recomputed.transient_forward_bytes > forward:  # noqa: PLR1730 - asked for thousands of stages
                    forward = recomputed.transient_forward_bytes
                if recomputed.transient_backward_bytes > backward:  # noqa: PLR1730
                    backward = recomputed.transient_backward_bytes
            if count > n:
                if plain.transient_forward_bytes > forward:  # noqa: PLR1730
                    forward = plain.transient_forward_bytes
                if plain.transient_backward_bytes > backward:  # noqa: PLR1730
                    backward = plain.transient_backward_bytes
        memory, sums = self._memory, self._plain
        return memory.peak_of(self._stiff, memory.activations(saved), forward, backward, sums.in_backward, sums.in_step)
