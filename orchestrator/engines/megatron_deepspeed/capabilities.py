"""What DeepSpeed can run over megatron-core's layers, how it behaves, as pricing needs it, and what its ranks need."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from orchestrator.engines import megatron_parts
from orchestrator.engines.ds_states import DEEPSPEED
from orchestrator.engines.engine import Requirements
from orchestrator.engines.rules.mesh import MESH_RULES
from orchestrator.engines.rules.model import MODEL_RULES
from orchestrator.engines.rules.pipeline import DEEPSPEED_PIPELINE_RULES
from orchestrator.engines.rules.recompute import PINNED_WITH_FUSED_ATTENTION, RECOMPUTE_RULES, fused_attention
from orchestrator.engines.rules.rule import DEEPSPEED_SOURCES, MEGATRON_SOURCES
from orchestrator.engines.rules.zero import DEEPSPEED_ZERO_RULES
from orchestrator.engines.translation import layers_versions
from orchestrator.hardware.spec import Software
from orchestrator.strategy.capabilities import Capabilities, Traits
from orchestrator.strategy.spec import RANK_ORDER, RECOMPUTE_ORDER

NAME: Final = "megatron_deepspeed"
REQUIREMENTS: Final = Requirements(
    modules=("torch", "megatron.core", "deepspeed"),
    versions=lambda cluster: layers_versions(cluster) | {"deepspeed": cluster.software.deepspeed},
)


def capabilities(software: Software) -> Capabilities:
    """What DeepSpeed 0.19.8 runs over megatron-core 0.16.1 models (engines README, column "DeepSpeed + mcore TP")."""
    return Capabilities(
        engine=NAME,
        parts=megatron_parts.TRAINED,
        planned_parts={part: megatron_parts.PLANNED[part] for part in ("embedding_norm",)},
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
        precisions=("bf16", "fp16", "fp32"),
        optimizers=("adamw", "sgd"),
        rank_orders=(RANK_ORDER,),
        sources=MEGATRON_SOURCES
        | DEEPSPEED_SOURCES
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


def traits(software: Software) -> Traits:
    """Bytes per parameter before sharding, with gradients summed in fp32 from stage 1 on (stage 0 can't).

    Stage 0 in bf16 keeps bf16 gradients and makes fp32 ones at the step (runtime/fp16/unfused_optimizer.py). Stage 1 in bf16 with fp32
    sums is BF16_Optimizer: one full fp32 gradient buffer beside the transient bf16 .grad (bf16_optimizer.py:163-211), reduced by a full
    all-reduce, since it has no reduce_gradients (engine.py:3088). Stages 2 and 3 hold the shard of the sums and one flat fp32 copy of it at
    the step (stage_1_and_2.py independent_gradient_partition_epilogue). In fp32 ZeRO still keeps a master copy of its shard.
    """
    return replace(
        DEEPSPEED,
        engine=NAME,
        flash_attention=fused_attention(software),
        fused_norms=software.transformer_engine,
        fused_permutations=software.transformer_engine,
        gathers_few_query_groups=True,
    )
