"""Megatron by others' hands or in other versions than the planned engine: NVIDIA's NeMo and Megatron-Bridge recipes, Megatron-core's own
functional tests, Megatron-LM of 2021."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec.structs import replace

from orchestrator.model.training import Precision
from orchestrator.strategy.capabilities import StateBytes, Traits
from orchestrator.validate.engines.engine import EAGER, FP32_STATES, MEGATRON_STATES, MeasuredEngine, all_stages

PLANNED: Final = "megatron"
NEMO_STATES: Final = StateBytes(weight=2, gradient=2, master=4, moments=8, step=4)
"""NVIDIA's performance recipes keep gradients in bf16 (grad_reduce_in_fp32 off): --grad-reduce-in-bf16, param_and_grad_buffer.py."""
BRIDGES_BUCKET: Final = 128 * 1024 * 1024
"""Parameters of a bucket in NeMo's and Bridge's recipes, whatever the group (Megatron-Bridge, training/comm_overlap.py:577)."""
FUSED_LOSS_LOGITS: Final = 10.0
"""Megatron's --cross-entropy-loss-fusion: bf16 logits 2, fp32 copy 4, and exponentials 4 that jit does not write in place."""
IN_PLACE_LOGITS: Final = 2.0
"""Transformer Engine's loss, which Bridge's performance recipes take (cross_entropy_fusion_impl=te): it writes the gradient over the 16-bit
logits (its pytorch/cross_entropy.py)."""
CORE, FUSED_LOSS, UNFUSED = "megatron_core_tests", "megatron_core_tests_fused_loss", "megatron_core_tests_unfused"


def _traits(name: str, **more: object) -> Traits:
    shared: dict[str, object] = {
        "states": all_stages(MEGATRON_STATES, FP32_STATES),
        "gradient_bytes_on_wire": "grad_reduce_dtype",
        "reduce_scatter_from_stage": 1,
    }
    return Traits(engine=name, **(shared | more))  # type: ignore[arg-type]


def _of_functional_tests(row: Mapping[str, str], precision: Precision) -> str:
    notes = row.get("notes", "")
    if any(words in notes for words in ("attention-backend=unfused", "attention-backend=local", "transformer-impl=local")):
        return UNFUSED
    return FUSED_LOSS if "cross-entropy-loss-fusion=True" in notes else CORE


NEMO: Final = MeasuredEngine(
    # its recipes pass chunks on beside the products (Transformer Engine's user buffers)
    traits=_traits(
        "nemo",
        constants={"tp_overlap": 0.85},
        states=all_stages(NEMO_STATES, FP32_STATES),
        logits_bytes=IN_PLACE_LOGITS,
        message_parameters=(BRIDGES_BUCKET, 0),
    ),
    printed=("nemo", "bridge"),
    resembles=PLANNED,
    dispatcher="flex",  # of 110 recipes of experts 90 (expert_recipes_bridge), the others say nothing
    zero_stage=1,
    sequence_parallel=True,
    says_recompute=True,
    reduce_dtype="bf16",
    accumulate_dtype="bf16",
    adapts="megatron-core",
)
NEMO_FSDP: Final = MeasuredEngine(
    traits=_traits("nemo_megatron_fsdp", states=all_stages(NEMO_STATES, FP32_STATES), logits_bytes=IN_PLACE_LOGITS),
    printed=("megatron-fsdp",),
    zero_stage=3,
    sequence_parallel=True,
)
"""Megatron-FSDP in NVIDIA's recipes, which reduce gradients in 16 bits as the others do."""
MEGATRON_CORE: Final = MeasuredEngine(
    traits=_traits(CORE),
    printed=("megatron-core", "(te 2.", "megatron"),
    not_printed=("megatron-deepspeed",),
    resembles=PLANNED,
    zero_stage=0,
    says_recompute=True,
    variant=_of_functional_tests,
)
MEGATRON_CORE_FUSED_LOSS: Final = replace(
    MEGATRON_CORE, traits=_traits(FUSED_LOSS, logits_bytes=FUSED_LOSS_LOGITS), printed=(), variant=None
)
MEGATRON_CORE_UNFUSED: Final = replace(
    MEGATRON_CORE, traits=_traits(UNFUSED, constants=EAGER, flash_attention=False), printed=(), variant=None
)
MEGATRON_LM_2021: Final = MeasuredEngine(
    traits=_traits("megatron_lm_2021", flash_attention=False),
    printed=("megatron-lm",),
    not_printed=("(te 2.",),
    resembles=PLANNED,
    zero_stage=0,
    says_recompute=True,
)
"""Of the SC21 and the sequence-parallel papers, and BigScience's runs on V100: fused kernels, no flash attention."""
