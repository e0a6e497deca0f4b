"""What DeepSpeed can run over megatron-core's layers."""

from __future__ import annotations

from typing import Final

from orchestrator.engines import megatron_parts
from orchestrator.engines.megatron_deepspeed.requirements import NAME
from orchestrator.engines.rules import sources
from orchestrator.engines.rules.mesh import MESH_RULES
from orchestrator.engines.rules.model import MODEL_RULES
from orchestrator.engines.rules.pipeline import DEEPSPEED_PIPELINE_RULES
from orchestrator.engines.rules.recompute import PINNED_WITH_FUSED_ATTENTION, RECOMPUTE_RULES, fused_attention
from orchestrator.engines.rules.zero import DEEPSPEED_ZERO_RULES
from orchestrator.hardware.spec import Software
from orchestrator.strategy.capabilities import Capabilities
from orchestrator.strategy.spec import RANK_ORDER, RECOMPUTE_ORDER

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
        pinned_recompute=PINNED_WITH_FUSED_ATTENTION if fused_attention(software) else (),
        recompute_varies="stage",
        recompute_by_layer=("deepspeed_1f1b",),
        uneven_stages=True,
        schedules=("1f1b", "deepspeed_1f1b"),
        offload_optimizer=True,
        precisions=PRECISIONS,
        optimizers=("adamw", "sgd"),
        rank_orders=(RANK_ORDER,),
        sources=sources.MEGATRON_LAYERS
        | sources.DEEPSPEED
        | {
            "axis_cp": "mpu_api: without get_sequence_data_parallel_group ZeRO shards over dp only, silently (runtime/zero/stage3.py:370)",
            "axis_vpp": "no_vpp: deepspeed/runtime/pipe/schedule.py; over megatron-core untested",
            "schedule": "get_forward_backward_func: core/pipeline_parallel/schedules.py; "
            "TrainSchedule: deepspeed/runtime/pipe/schedule.py:189",
            "zero_stage": "stage_range: deepspeed/runtime/zero/config.py:81; "
            "pp_zero: deepspeed/runtime/pipe/engine.py:76 (stages 2 and 3 reduce in every micro-batch)",
            "zero_shard_size": "hpz: deepspeed/runtime/zero/partition_parameters.py:1118",
        },
        rules=(
            *MODEL_RULES,
            *MESH_RULES,
            *RECOMPUTE_RULES,
            *DEEPSPEED_PIPELINE_RULES,
            *DEEPSPEED_ZERO_RULES,
        ),
    )
