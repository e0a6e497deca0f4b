"""How DeepSpeed over megatron-core's layers behaves, as pricing needs it."""

from __future__ import annotations

from orchestrator.engines.ds_config import BUCKET_ELEMENTS, PREFETCH_ELEMENTS
from orchestrator.engines.ds_states import STATES
from orchestrator.engines.megatron_deepspeed.requirements import NAME
from orchestrator.engines.rules.recompute import fused_attention
from orchestrator.hardware.spec import Software
from orchestrator.strategy.capabilities import Traits


def traits(software: Software) -> Traits:
    """Bytes per parameter before sharding, with gradients summed in fp32 from stage 1 on (stage 0 can't).

    Stage 0 in bf16 keeps bf16 gradients and makes fp32 ones at the step (runtime/fp16/unfused_optimizer.py). Stage 1 in bf16 with fp32
    sums is BF16_Optimizer: one full fp32 gradient buffer beside the transient bf16 .grad (bf16_optimizer.py:163-211), reduced by a full
    all-reduce, since it has no reduce_gradients (engine.py:3088). Stages 2 and 3 hold the shard of the sums and one flat fp32 copy of it at
    the step (stage_1_and_2.py independent_gradient_partition_epilogue). In fp32 ZeRO still keeps a master copy of its shard.
    """
    return Traits(
        engine=NAME,
        states=STATES,
        gradient_bytes_on_wire="grad_reduce_dtype",
        gradient_buffer="grad_accum_dtype",
        reduce_scatter_from_stage=2,
        bucket_elements=BUCKET_ELEMENTS,
        bucket_copies=2,
        live_parameter_elements=PREFETCH_ELEMENTS,
        # Stages 0 and 1 reduce at the boundary, after the last backward pass (engine.py:3088); stages 1 and 2 gather inside step().
        overlaps_grad_reduce=False,
        overlaps_param_gather=False,
        flash_attention=fused_attention(software),
        fused_norms=software.transformer_engine,
        fp32_gradient_fusion=False,
        gathers_few_query_groups=True,
    )
