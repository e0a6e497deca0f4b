"""What megatron-core alone can run, how it behaves, as pricing needs it, and what its ranks need."""

from __future__ import annotations

from typing import Final

from orchestrator.engines import megatron_parts, megatron_versions
from orchestrator.engines.engine import Requirements
from orchestrator.engines.rules.experts import EXPERT_RULES
from orchestrator.engines.rules.graphs import GRAPH_RULES
from orchestrator.engines.rules.mesh import MEGATRON_ORDERS, MEGATRON_RULES, MESH_RULES
from orchestrator.engines.rules.model import MODEL_RULES, hybrid_stages
from orchestrator.engines.rules.options import OPTION_RULES
from orchestrator.engines.rules.pipeline import MEGATRON_PIPELINE_RULES
from orchestrator.engines.rules.precision import PRECISION_RULES
from orchestrator.engines.rules.recompute import PINNED_WITH_FUSED_ATTENTION, RECOMPUTE_RULES, fused_attention
from orchestrator.engines.rules.rule import MEGATRON_SOURCES
from orchestrator.engines.rules.samples import SAMPLE_RULES
from orchestrator.engines.rules.zero import MEGATRON_ZERO_RULES
from orchestrator.engines.transformer_config import DDP_BUCKET_ELEMENTS_PER_RANK, DDP_MIN_BUCKET_ELEMENTS
from orchestrator.engines.translation import layers_versions
from orchestrator.hardware.spec import Software
from orchestrator.strategy.capabilities import Capabilities, StateBytes, Traits
from orchestrator.strategy.spec import MEGATRON_OPTIONS, RECOMPUTE_ORDER

NAME: Final = "megatron"
REQUIREMENTS: Final = Requirements(modules=("torch", "megatron.core"), versions=layers_versions)


LEAST_SEQUENCE_PART: Final = 2048
"""Tokens of a sequence that a rank must hold for cp to be searched: no published run of pretraining whose time is known divides sequences
into shorter parts (Megatron-Bridge's recipes, MLPerf, NeMo)."""


def capabilities(software: Software) -> Capabilities:
    """What megatron-core 0.16.1 runs and our worker starts, whatever else is installed."""
    release = megatron_versions.release_of(software.megatron_core)
    return Capabilities(
        engine=NAME,
        parts=megatron_parts.trained(software.megatron_core),
        planned_parts=megatron_parts.planned(software.megatron_core),
        axes=("pp", "vpp", "tp", "cp", "ep", "etp", "dp"),
        least_sequence_part=LEAST_SEQUENCE_PART,
        zero_stages=(0, 1),
        zero_stages_with_pipeline=(0, 1),
        sequence_parallel=True,
        recompute=RECOMPUTE_ORDER,
        pinned_recompute=PINNED_WITH_FUSED_ATTENTION if fused_attention(software) else (),
        recompute_varies="stage",
        uneven_stages=True,
        even_between={} if release.lays_out_hybrids else {"single_part_layers": hybrid_stages.engine_rule},
        schedules=("1f1b", "interleaved"),
        microbatch_groups=True,
        offload_optimizer=False,
        options={
            "cp_comm_type": ("p2p", "a2a", "a2a+p2p", "all_gather"),
            "moe_token_dispatcher_type": ("alltoall", "allgather", *(("flex",) if software.deep_ep else ())),
            "moe_shared_expert_overlap": (False, True),
            "tp_comm_overlap": (False, True),
        },
        pinned_values={"offload_optimizer": (True,)} | ({} if software.deep_ep else {"moe_token_dispatcher_type": ("flex",)}),
        fsdp_zero_stages=(2, 3),
        zero_shard_stages=(1, 2, 3),
        later_releases=megatron_versions.later(software.megatron_core),
        pinned_options=MEGATRON_OPTIONS,
        off_with={} if release.divides_muon else {"muon": "overlap_grad_reduce"},
        tasks=("pretrain", "sft"),
        precision_aware_optimizer=True,
        precisions=("bf16", "fp16", "fp32", "fp8", "nvfp4"),
        optimizers=("adamw", "sgd", "muon"),
        rank_orders=MEGATRON_ORDERS,
        sources=MEGATRON_SOURCES
        | {
            "unsuited": "fp8: megatron/training/arguments.py:655-669",
            "grad_dtype": "ddp grad_reduce_in_fp32: core/distributed/distributed_data_parallel_config.py:11",
            "optimizer_dtypes": "pao: core/optimizer/optimizer_config.py:375-420",
            "schedule": "get_forward_backward_func: core/pipeline_parallel/schedules.py",
            "zero_stage": "megatron_3d.zero: 0 and --use-distributed-optimizer; megatron_fsdp.zero",
            "zero_shard_size": "distopt_instances: core/parallel_state.py:833",
            "offload": "opt_offload: megatron/training/arguments.py:1190 (needs the precision-aware optimizer)",
        },
        rules=(
            *MODEL_RULES,
            *PRECISION_RULES,
            *MESH_RULES,
            *RECOMPUTE_RULES,
            *MEGATRON_RULES,
            *EXPERT_RULES,
            *MEGATRON_PIPELINE_RULES,
            *MEGATRON_ZERO_RULES,
            *OPTION_RULES,
            *GRAPH_RULES,
            *SAMPLE_RULES,
        ),
    )


TORCH_ADAM_STEP: Final = 4.0
"""Bytes per parameter that torch's AdamW allocates in a step: the root of the second moments, of all parameters at once
(torch/optim/adam.py, _multi_tensor_adam: _foreach_sqrt). Megatron-core takes it where there is neither Transformer Engine's nor Apex'
fused one (core/optimizer/__init__.py:11-34)."""


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
        fused_permutations=software.transformer_engine,
        fp8_weight_copies=True,
        gathers_few_query_groups=True,
        overlaps_input_gradient=True,
        fp32_gradient_fusion=software.apex,
        tower_first=True,
        adam_step=0.0 if software.transformer_engine or software.apex else TORCH_ADAM_STEP,
    )
