"""Hugging Face's Trainer on DeepSpeed's ZeRO-3, with its default buffers and other people's attention and loss kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec.structs import replace

from orchestrator.model.training import Precision
from orchestrator.strategy.capabilities import StateBytes, Traits
from tests.validation.engines.bigscience import BUCKET
from tests.validation.engines.engine import EAGER, FP32_STATES, TORCH_LOGITS, MeasuredEngine, all_stages

STATES: Final = StateBytes(weight=2, gradient=2, master=4, moments=8, step=4)
"""Stage 3 steps by sub-group: fp32 gradients alone (stage3.py:2683)."""
LIVE: Final = 1_050_000_000
"""Elements of gathered weights that stage 3 keeps beside the current layer: stage3_max_live_parameters and stage3_prefetch_bucket_size by
default."""
PLAIN, UNFUSED, TILED_LOSS = "hf_trainer_deepspeed", "hf_trainer_deepspeed_unfused", "hf_trainer_deepspeed_tiled_loss"


def _by_kernels(row: Mapping[str, str], precision: Precision) -> str:
    if row.get("flash_attention", "").startswith("no"):
        return UNFUSED
    return TILED_LOSS if "liger" in row.get("engine", "").lower() else PLAIN


HF_DEEPSPEED: Final = MeasuredEngine(
    traits=Traits(
        engine=PLAIN,
        states=all_stages(STATES, FP32_STATES),
        gradient_bytes_on_wire="weight",
        reduce_scatter_from_stage=2,
        bucket_elements=BUCKET,
        bucket_copies=2,
        live_parameter_elements=LIVE,
        logits_bytes=TORCH_LOGITS,
        fp32_gradient_fusion=False,
    ),
    printed=("hf trainer + deepspeed", "deepspeed zero-3"),
    resembles="deepspeed",
    transformers=True,
    zero_stage=3,
    variant=_by_kernels,
)
HF_DEEPSPEED_UNFUSED: Final = replace(
    HF_DEEPSPEED, traits=replace(HF_DEEPSPEED.traits, engine=UNFUSED, constants=EAGER, flash_attention=False), printed=(), variant=None
)
HF_DEEPSPEED_TILED_LOSS: Final = replace(
    HF_DEEPSPEED, traits=replace(HF_DEEPSPEED.traits, engine=TILED_LOSS, logits_bytes=0.0), printed=(), variant=None
)
