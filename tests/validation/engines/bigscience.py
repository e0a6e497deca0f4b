"""BigScience's Megatron-DeepSpeed of 2022, which trained BLOOM: DeepSpeed's pipeline of that year under Megatron's layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec.structs import replace

from orchestrator.cost.price import CostModel
from orchestrator.hardware.collectives import COLLECTIVES
from orchestrator.model.training import Precision
from orchestrator.strategy.capabilities import StateBytes, Traits
from orchestrator.strategy.layout import Prediction, Stage
from orchestrator.strategy.spec import Candidate
from tests.validation.engines.engine import EAGER, FP32_STATES, MeasuredEngine, all_stages

FP16_STATES: Final = StateBytes(weight=2, gradient=2, master=4, moments=8, step=6)
"""DeepSpeed ZeRO-1 in fp16: stage_1_and_2.py:557; at the step the shard's gradients are flattened in 16 bits, then cast to fp32."""
BF16_STATES: Final = StateBytes(weight=2, gradient=4, master=4, moments=8, backward=3, step=6)
"""Bytes per parameter of DeepSpeed's BF16_Optimizer: a whole fp32 gradient buffer beside the transient bf16 gradients
(bf16_optimizer.py:163) and a flat copy of part of them (BLOOM's prequel: about 3 bytes beside the 6 resident ones); the step as in fp16."""
BUCKET: Final = 500_000_000
"""Elements of reduce_bucket_size and allgather_bucket_size by default (runtime/zero/config.py); two of each are alive with overlap."""
PIPELINE: Final = {"microbatch_overhead_s": 20e-3}
"""PipelineEngine's instructions for a micro-batch: blocking sends and receives, loss scaling, gradient hooks from Python, and
for every recomputed layer the random states that are read from and put back to the device, each a wait."""
FP16, BF16 = "bigscience_2022", "bigscience_2022_bf16"


class PartitionedBoundaries(CostModel):
    """Each tensor-parallel rank sends its part of a boundary tensor, and the receivers gather the whole.

    DeepSpeed 0.5.8 to 0.7.0, runtime/pipe/engine.py: `is_pipe_partitioned = is_grad_partitioned = is_model_parallel`; PartitionedTensor
    gathers over the tensor-parallel group. (The planned engine turns it off: under sequence parallelism a rank has its part alone.)
    Megatron-LM's scatter/gather of its years is the same (arXiv 2104.04473, section 4.1).
    """

    def border_seconds(self, candidate: Candidate) -> tuple[tuple[float, ...], float]:
        """Seconds of a message from each stage to the next, and seconds of the gathering behind it."""
        mesh, c = candidate.mesh, self.calibration
        if mesh.tp == 1 or candidate.strategy.sequence_parallel:
            return super().hop_seconds(candidate)[: mesh.pp], 0.0
        nbytes, stride = self.boundary_bytes(candidate), mesh.stride("pp")
        gather = COLLECTIVES["all_gather"](nbytes, mesh.tp, self.link(mesh.tp, mesh.stride("tp"))) + c.collective_overhead_s
        links = [self.pair_link(stage * stride, (stage + 1) % mesh.pp * stride, stride) for stage in range(mesh.pp)]
        return tuple(COLLECTIVES["p2p"](nbytes / mesh.tp, 2, link) + c.collective_overhead_s for link in links), gather

    def hop_seconds(self, candidate: Candidate) -> tuple[float, ...]:
        sends, gather = self.border_seconds(candidate)
        return tuple(send + gather for send in sends) * candidate.vpp


class UnusedFreed(PartitionedBoundaries):
    """Of fragmentation no more is there than the GPU has room for: torch's allocator frees its unused blocks before it runs out of memory
    (c10/cuda/CUDACachingAllocator.cpp, release_cached_blocks). BLOOM's prequel shows it: on 6, 10 and 11 stages a sequence more in a
    micro-batch takes 5.7 to 7.0 GiB up to four, 4.8 to 5.5 from there to eight, which leaves 3 or 4 GiB free."""

    def price(self, candidate: Candidate, stages: tuple[Stage, ...]) -> Prediction:
        plain = super().price(candidate, stages)
        by_stage = []
        for found in plain.by_stage:
            unused = found.memory_by_cause["fragmentation"]
            freed = min(unused, max(0.0, found.peak_memory_bytes - self.cluster.gpu.memory))
            causes = found.memory_by_cause | {"fragmentation": unused - freed}
            by_stage.append(replace(found, peak_memory_bytes=found.peak_memory_bytes - freed, memory_by_cause=causes))
        return replace(plain, by_stage=tuple(by_stage), peak_memory_bytes=max(stage.peak_memory_bytes for stage in by_stage))


def _by_precision(row: Mapping[str, str], precision: Precision) -> str:
    return FP16 if precision == "fp16" else BF16


BIGSCIENCE: Final = MeasuredEngine(
    traits=Traits(
        engine=FP16,
        constants=EAGER | PIPELINE,
        states=all_stages(FP16_STATES, FP32_STATES),
        gradient_bytes_on_wire="grad_reduce_dtype",
        reduce_scatter_from_stage=2,
        bucket_elements=BUCKET,
        bucket_copies=4,
        flash_attention=False,
        fp32_gradient_fusion=False,
    ),
    printed=("megatron-deepspeed 3d",),
    resembles="megatron_deepspeed",
    zero_stage=1,
    reduce_dtype="fp16",
    schedule="deepspeed_1f1b",
    variant=_by_precision,
    cost=UnusedFreed,
)
BIGSCIENCE_BF16: Final = replace(
    BIGSCIENCE,
    traits=replace(BIGSCIENCE.traits, engine=BF16, states=all_stages(BF16_STATES, FP32_STATES)),
    printed=(),
    reduce_dtype="fp32",
    variant=None,
)
