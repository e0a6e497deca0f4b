"""How DeepSpeed over transformers' models behaves, as `Traits` that pricing takes: bytes per parameter, buffers, what overlaps. Pure."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from orchestrator.engines.deepspeed.requirements import NAME
from orchestrator.engines.ds_states import DEEPSPEED
from orchestrator.hardware.spec import Software
from orchestrator.strategy.capabilities import Traits

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
