"""What megatron-core alone can run."""

from __future__ import annotations

from typing import Final

from orchestrator.engines import megatron_parts, rules
from orchestrator.engines.megatron.requirements import NAME
from orchestrator.engines.rules import rule
from orchestrator.hardware.spec import Software
from orchestrator.strategy.capabilities import Capabilities
from orchestrator.strategy.spec import RECOMPUTE_ORDER

PRECISIONS: Final = ("bf16", "fp16", "fp32", "fp8")


def capabilities(software: Software) -> Capabilities:
    """What megatron-core 0.16.1 runs and our worker starts, whatever else is installed.

    Context parallelism is legal with Transformer Engine on GPUs (rules cp_te, cp_seq), but our worker does not cut sequences: a plan has it
    where the user pins it, for Megatron's own programs.
    """
    return Capabilities(
        engine=NAME,
        parts=megatron_parts.TRAINED,
        planned_parts=megatron_parts.PLANNED,
        axes=("pp", "vpp", "tp", "ep", "dp"),
        pinned_axes=("cp",),
        zero_stages=(0, 1),
        zero_stages_with_pipeline=(0, 1),
        sequence_parallel=True,
        recompute=RECOMPUTE_ORDER,
        pinned_recompute=rules.PINNED_WITH_FUSED_ATTENTION if rules.fused_attention(software) else (),
        recompute_varies="stage",
        uneven_stages=True,
        schedules=("1f1b", "interleaved"),
        offload_optimizer=False,
        fsdp_zero_stages=(2, 3),
        precisions=PRECISIONS,
        optimizers=("adamw", "sgd"),
        rank_orders=rules.MEGATRON_ORDERS,
        rules=(
            *rules.given(NAME, PRECISIONS),
            rule(
                "grad_dtype",
                "ddp grad_reduce_in_fp32: core/distributed/distributed_data_parallel_config.py:11, param_and_grad_buffer.py",
                rules.megatron_gradient_dtype,
                "model",
            ),
            rule("fp8", "fp8: megatron/training/arguments.py:655-669", rules.fp8, "model"),
            rule("fp8_features", "fp8: Transformer Engine, pytorch/utils.py assert_dim_for_fp8_exec", rules.fp8_features, "model", "tp"),
            rule(
                "fp8_tokens",
                "fp8: Transformer Engine, pytorch/utils.py assert_dim_for_fp8_exec",
                rules.fp8_tokens,
                "model",
                "tp",
                "cp",
                "sequence_parallel",
                "micro_batch_size",
            ),
            rule("precision_aware", "pao: core/optimizer/optimizer_config.py:375-420", rules.precision_aware, "zero_stage"),
            *rules.mesh_rules(rules.megatron_rank_order),
            *rules.recompute_rules(),
            rule("cp_te", "cp_te: core/transformer/dot_product_attention.py:57", rules.cp_attention, "cp"),
            rule("cp_seq", "cp_seq: megatron/training/arguments.py:817", rules.cp_sequence, "cp"),
            rule("cp_family", "megatron_t5, megatron_bert: cp untested", rules.cp_family, "cp"),
            rule("vpp_needs_pp", "vpp_needs_pp: core/parallel_state.py:746", rules.vpp_needs_pp, "pp", "vpp"),
            rule("schedule", "get_forward_backward_func: core/pipeline_parallel/schedules.py", rules.schedule_fits, "vpp", "schedule"),
            rule(
                "vpp_M",
                "vpp_M: core/pipeline_parallel/schedules.py:995-1015",
                rules.vpp_microbatches,
                "pp",
                "vpp",
                "num_microbatches",
            ),
            rule(
                "zero_stage",
                "megatron_3d.zero: 0 and --use-distributed-optimizer; megatron_fsdp.zero",
                rules.zero_offered((0, 1), fsdp=(2, 3)),
                "zero_stage",
            ),
            rule(
                "zero_shard_size",
                "distopt_instances: core/parallel_state.py:833",
                rules.optimizer_instances,
                "zero_shard_size",
                "zero_stage",
                "dp",
                "cp",
            ),
            *rules.option_rules(),
            rule("distopt_adam", "distopt_adam: core/optimizer/distrib_optimizer.py:514", rules.distributed_adam, "zero_stage"),
            rule(
                "no_offload",
                "opt_offload: megatron/training/arguments.py:1190 (needs the precision-aware optimizer)",
                rules.no_offload,
                "offload_optimizer",
            ),
        ),
    )
