"""What DeepSpeed can run over transformers' models."""

from __future__ import annotations

from typing import Final

from orchestrator.engines import hf_config
from orchestrator.engines.deepspeed.requirements import NAME
from orchestrator.engines.deepspeed.rules import DEEPSPEED_RULES
from orchestrator.engines.rules import sources
from orchestrator.hardware.spec import Software
from orchestrator.strategy.capabilities import Capabilities
from orchestrator.strategy.spec import DEEPSPEED_OPTIONS, RANK_ORDER

TRACED: Final = ("traced", "attention_bias")
"""Models of any architecture, by the layers that were recorded from their own code."""
PRECISIONS: Final = ("bf16", "fp16", "fp32")


def capabilities(software: Software) -> Capabilities:
    """What DeepSpeed 0.19.8 runs over transformers' models (engines README, "DeepSpeed + HF"; ds_zero, ds_autotp, ds_ulysses)."""
    return Capabilities(
        engine=NAME,
        parts=(*hf_config.PARTS, *TRACED),
        beyond_parts="; described by its own code any model of transformers may train: python -m orchestrator.describe",
        axes=("tp", "cp", "ep", "dp"),
        zero_stages=(0, 1, 2, 3),
        zero_stages_with_pipeline=(),
        sequence_parallel=False,
        recompute=("none", "full"),
        recompute_varies="never",
        uneven_stages=False,
        schedules=("1f1b",),
        offload_optimizer=True,
        zero_shard_groups=True,
        zero_shard_stages=(3,),
        pinned_options=DEEPSPEED_OPTIONS,
        tasks=("pretrain", "sft"),
        lora=True,
        precisions=PRECISIONS,
        optimizers=("adamw", "sgd"),
        rank_orders=(RANK_ORDER,),
        sources=sources.DEEPSPEED
        | {
            "precision_here": "fp16_bf16, runtime/engine.py:2000",
            "axis_pp": "pp_misc: deepspeed/runtime/pipe/module.py; pipelines are engine=megatron_deepspeed's",
            "axis_vpp": "pp_misc: deepspeed/runtime/pipe/module.py",
            "mesh": "triangle: deepspeed/runtime/config.py:456-475; autotp, ulysses: parallel_state_sp.py:28-40",
            "data_parallel": "triangle: deepspeed/runtime/config.py:456-475",
            "batch": "triangle: deepspeed/runtime/config.py:456-475, 590-656",
            "rank_order": "autotp: deepspeed/utils/groups.py:150-230 (neighbours are one group)",
            "zero_shard_size": "hpz: deepspeed/runtime/zero/partition_parameters.py:1118, a second copy of ZeRO-3's weights",
            "sequence_parallel": "mapping_deepspeed.md: no Megatron-style sequence parallelism; cp is DeepSpeed's Ulysses",
            "recompute": "transformers/modeling_utils.py gradient_checkpointing_enable, for whole layers",
        },
        rules=DEEPSPEED_RULES,
    )
