"""How megatron-core behaves, as pricing needs it."""

from __future__ import annotations

from orchestrator.engines.megatron.requirements import NAME
from orchestrator.engines.rules.recompute import fused_attention
from orchestrator.engines.transformer_config import DDP_BUCKET_ELEMENTS_PER_RANK, DDP_MIN_BUCKET_ELEMENTS
from orchestrator.hardware.spec import Software
from orchestrator.strategy.capabilities import StateBytes, Traits


def traits(software: Software) -> Traits:
    """Bytes per parameter: 18 without sharding, 6 + 12/d with (Megatron-LM theoretical_memory_usage.py:182).

    The distributed optimizer reduces gradients by reduce-scatter once a step, at the last micro-batch, and gathers the weights once.
    Stages 2 and 3 are Megatron-FSDP's, which divide the same bytes further.
    """
    mixed = StateBytes(weight=2, gradient=4, master=4, moments=8)
    full = StateBytes(weight=4, gradient=4, master=0, moments=8)
    return Traits(
        engine=NAME,
        states={f"{kind}/{stage}": states for kind, states in (("mixed", mixed), ("fp32", full)) for stage in range(4)},
        gradient_bytes_on_wire="grad_reduce_dtype",
        gradient_buffer="grad_reduce_dtype",
        reduce_scatter_from_stage=1,
        message_parameters=(DDP_MIN_BUCKET_ELEMENTS, DDP_BUCKET_ELEMENTS_PER_RANK),
        flash_attention=fused_attention(software),
        fused_norms=software.transformer_engine,
        fp8_weight_copies=True,
        gathers_few_query_groups=True,
        overlaps_input_gradient=True,
        fp32_gradient_fusion=software.apex,
    )
