"""What DeepSpeed can run over megatron-core's layers."""

from __future__ import annotations

from typing import Final

from orchestrator.engines import megatron_parts, rules
from orchestrator.engines.megatron_deepspeed.requirements import NAME
from orchestrator.engines.rules import rule
from orchestrator.hardware.spec import Software
from orchestrator.strategy.capabilities import Capabilities
from orchestrator.strategy.spec import ENGINE_OPTIONS, RANK_ORDER, RECOMPUTE_ORDER

PRECISIONS: Final = ("bf16", "fp16", "fp32")

def capabilities(software: Software) -> Capabilities:
    """What DeepSpeed 0.19.8 runs over megatron-core 0.16.1 models (engines README, column "DeepSpeed + mcore TP")."""
    return Capabilities(
        engine=NAME,
        parts=megatron_parts.TRAINED,
        axes=("pp", "tp", "dp"),
        zero_stages=(0, 1, 2, 3),
        zero_stages_with_pipeline=(0, 1),
        sequence_parallel=True,
        recompute=RECOMPUTE_ORDER,
        pinned_recompute=rules.PINNED_WITH_FUSED_ATTENTION if rules.fused_attention(software) else (),
        recompute_varies="stage",
        recompute_by_layer=("deepspeed_1f1b",),
        uneven_stages=True,
        schedules=("1f1b", "deepspeed_1f1b"),
        offload_optimizer=True,
        precisions=PRECISIONS,
        optimizers=("adamw", "sgd"),
        rank_orders=(RANK_ORDER,),
        rules=(
            *rules.given(NAME, PRECISIONS),
            rule(
                "grad_dtype",
                "data_types and communication_data_type: deepspeed/runtime/engine.py:1719,1799",
                rules.gradient_dtype,
                "model",
            ),
            rule("no_options", "ours: never tried under DeepSpeed's engine", rules.no_options, *ENGINE_OPTIONS),
            rule("no_precision_aware", "pao: core/optimizer/optimizer_config.py:375-420", rules.no_precision_aware, "model"),
            *rules.mesh_rules(),
            *rules.recompute_rules(),
            rule(
                "no_cp",
                "mpu_api: without get_sequence_data_parallel_group ZeRO shards over dp only, silently (runtime/zero/stage3.py:370)",
                rules.no_cp,
                "cp",
            ),
            rule("no_vpp", "no_vpp: deepspeed/runtime/pipe/schedule.py; over megatron-core untested", rules.no_vpp, "vpp"),
            rule(
                "schedule",
                "get_forward_backward_func: core/pipeline_parallel/schedules.py; TrainSchedule: deepspeed/runtime/pipe/schedule.py:189",
                rules.deepspeed_schedules,
                "pp",
                "vpp",
                "schedule",
            ),
            rule("zero_stage", "stage_range: deepspeed/runtime/zero/config.py:81", rules.zero_offered((0, 1, 2, 3)), "zero_stage"),
            rule(
                "pp_zero",
                "pp_zero: deepspeed/runtime/pipe/engine.py:76 (stages 2 and 3 reduce in every micro-batch)",
                rules.zero_with_pipeline((0, 1)),
                "pp",
                "zero_stage",
            ),
            rule(
                "pp_zero_megatron",
                "ours: orchestrator/workers/megatron_deepspeed.py (set_gradient_accumulation_boundary, allreduce_gradients)",
                rules.megatron_pipeline_zero,
                "pp",
                "schedule",
                "zero_stage",
            ),
            rule("pp_fp16", "deepspeed/runtime/engine.py backward", rules.megatron_pipeline_fp16, "model", "pp", "schedule"),
            rule(
                "pp_zero0",
                "gad_mix: deepspeed/runtime/engine.py:2316; silently wrong 4: runtime/utils.py clip_grad_norm_",
                rules.deepspeed_pipeline_zero,
                "model",
                "schedule",
                "zero_stage",
            ),
            rule("hpz", "hpz: deepspeed/runtime/zero/partition_parameters.py:1118", rules.no_shard_group, "zero_shard_size"),
            rule("gad_mix", "gad_mix: deepspeed/runtime/engine.py:2294-2325", rules.unsharded_accumulation, "zero_stage"),
            rule(
                "offload",
                "offload: deepspeed/runtime/zero/config.py:396, deepspeed/runtime/engine.py:2342",
                rules.offload,
                "offload_optimizer",
                "zero_stage",
                "pp",
                "schedule",
            ),
        ),
    )
