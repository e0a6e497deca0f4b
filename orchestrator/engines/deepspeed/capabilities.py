"""What DeepSpeed can run over transformers' models, how it behaves, as pricing needs it, and what its ranks need. Pure."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from orchestrator.engines import hf_config
from orchestrator.engines.deepspeed.rules import DEEPSPEED_RULES
from orchestrator.engines.ds_states import DEEPSPEED
from orchestrator.engines.engine import Requirements
from orchestrator.engines.rules.rule import DEEPSPEED_SOURCES
from orchestrator.hardware.spec import Software
from orchestrator.model.training import EIGHT_BIT
from orchestrator.strategy.capabilities import Capabilities, Traits
from orchestrator.strategy.spec import DEEPSPEED_OPTIONS, RANK_ORDER

NAME: Final = "deepspeed"
REQUIREMENTS: Final = Requirements(
    modules=("torch", "deepspeed", "transformers"),
    versions=lambda cluster: {"deepspeed": cluster.software.deepspeed, "transformers": ""},
)

TRACED: Final = ("traced", "attention_bias")
"""Models of any architecture, by the layers that were recorded from their own code."""


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
        precisions=("bf16", "fp16", "fp32"),
        optimizers=("adamw", "sgd", *EIGHT_BIT),
        rank_orders=(RANK_ORDER,),
        sources=DEEPSPEED_SOURCES
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


LOGITS_BYTES: Final = 14.0
"""Bytes per logit at the loss's peak in backward: the 16-bit logits 2, log_softmax's saved fp32 output 4, its gradient 4, the fp32 logits'
4."""


def traits(software: Software) -> Traits:
    """DeepSpeed's states and traffic under Hugging Face's layers.

    The layers are torch's own operations one by one (model/hugging_face.py): slower than megatron-core's where those are fused. AutoTP's
    all-reduces are waited for (module_inject/layers.py), and so are Ulysses' all-to-alls. Attention is torch's flash kernel or the
    flash-attn package on any GPU, but for t5, whose relative bias no flash kernel takes (integrations/sdpa_attention.py).
    """
    return replace(
        DEEPSPEED,
        engine=NAME,
        tp_overlap=0.0,
        logits_bytes=LOGITS_BYTES,
        layers="hugging_face",
        unfused_attention=("encoder_decoder", "attention_bias"),
        context_parallel="all_to_all",
    )
