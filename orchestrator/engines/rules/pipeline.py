"""Pipelines of megatron-core's layers: what a schedule, ZeRO and precision make of each other."""

from __future__ import annotations

from typing import Final

from orchestrator.engines.rules.rule import refused, rule
from orchestrator.strategy.spec import Candidate
from orchestrator.strategy.tree import fills_groups
from orchestrator.strategy.workload import Workload


@rule("vpp_M", "vpp_M: core/pipeline_parallel/schedules.py:995-1015", "pp num_microbatches vpp microbatch_group_size_per_vp_stage")
def vpp_microbatches(candidate: Candidate, _: Workload) -> str | None:
    pp, m, group = candidate.mesh.pp, candidate.num_microbatches, candidate.microbatch_group_size_per_vp_stage
    if candidate.vpp == 1 or fills_groups(m, pp, group or pp):
        return None
    if group is None:
        return f"pp={pp} does not divide num_microbatches={m}"
    given = f"microbatch_group_size_per_vp_stage={group} with pp={pp} and num_microbatches={m}"
    if not pp <= group <= m:
        return f"{given}: it must be pp to num_microbatches"
    return f"{given}: the last group has {m % group} micro-batches, fewer than pp"


t5_pipeline = refused("t5_pp", "t5_pp: pretrain_t5.py:108", "pp", "pp encoder_decoder", "pp={mesh.pp}: Megatron has no pipeline for T5")
MEGATRON_PIPELINE_RULES: Final = (t5_pipeline, vpp_microbatches)
"""The rules of megatron-core's pipelines."""

DEEPSPEED_PIPELINE_RULES: Final = (
    t5_pipeline,
    # megatron-core's schedule calls autograd itself: DeepSpeed's engine at stage 1 is told when to reduce; stage 0 is not.
    refused("pp_zero_megatron", "ours: orchestrator/workers/megatron_deepspeed.py (set_gradient_accumulation_boundary, "
            "allreduce_gradients)", "pp schedule zero_stage", "pp !schedule=deepspeed_1f1b !zero_stage=1",
            "zero_stage={strategy.zero_stage} with schedule={candidate.schedule}: megatron-core's pipeline goes with zero_stage 1 under "
            "DeepSpeed"),
    refused("pp_fp16", "deepspeed/runtime/engine.py backward", "model pp schedule", "pp !schedule=deepspeed_1f1b precision=fp16",
            "precision=fp16 with schedule={candidate.schedule}: DeepSpeed scales the loss in its own backward, which this one never calls"),
    # Stage 0 in 16 bits: bf16 gets BF16_Optimizer, which is stage 1 with bf16 sums, and fp16 is clipped by each stage's own norm.
    refused("pp_zero0", "gad_mix: deepspeed/runtime/engine.py:2316; silently wrong 4: runtime/utils.py clip_grad_norm_",
            "model schedule zero_stage", "schedule=deepspeed_1f1b !zero_stage !precision=fp32",
            "zero_stage=0 with schedule=deepspeed_1f1b is offered in fp32 only, not in {training.precision}: take zero_stage=1"),
)  # fmt: skip
"""The rules of pipelines of megatron-core's layers over DeepSpeed's ZeRO."""
