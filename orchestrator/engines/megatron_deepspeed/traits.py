"""How DeepSpeed over megatron-core's layers behaves, as pricing needs it."""

from __future__ import annotations

from msgspec.structs import replace

from orchestrator.engines.ds_states import DEEPSPEED
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
    return replace(
        DEEPSPEED,
        engine=NAME,
        flash_attention=fused_attention(software),
        fused_norms=software.transformer_engine,
        gathers_few_query_groups=True,
    )
