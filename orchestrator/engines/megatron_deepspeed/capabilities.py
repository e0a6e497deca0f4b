"""megatron-core's groups, layers and 1F1B under DeepSpeed's ZeRO: stages 0 to 3 without a pipeline, stage 1 with one."""

from __future__ import annotations

from typing import Final

from orchestrator.engines import rules
from orchestrator.engines.ds_config import BUCKET_ELEMENTS, PREFETCH_ELEMENTS
from orchestrator.engines.engine import Engine
from orchestrator.engines.rules import rule
from orchestrator.engines.translation import translate as _translate
from orchestrator.hardware.spec import Software
from orchestrator.job import Job
from orchestrator.plan import Plan
from orchestrator.strategy.capabilities import Capabilities, StateBytes, Traits
from orchestrator.strategy.spec import ENGINE_OPTIONS, RANK_ORDER, RECOMPUTE_ORDER

NAME: Final = "megatron_deepspeed"
FAMILIES: Final = ("gpt", "llama", "bert", "t5")
PRECISIONS: Final = ("bf16", "fp16", "fp32")

STATES: Final = {
    "mixed/0": StateBytes(weight=2, gradient=2, master=4, moments=8, step=4),
    "mixed/1": StateBytes(weight=2, gradient=4, master=4, moments=8, backward=2),
    "mixed/2": StateBytes(weight=2, gradient=4, master=4, moments=8, step=4),
    "mixed/3": StateBytes(weight=2, gradient=4, master=4, moments=8, step=4),
    "fp32/0": StateBytes(weight=4, gradient=4, master=0, moments=8),
    "fp32/1": StateBytes(weight=4, gradient=4, master=4, moments=8, step=4),
    "fp32/2": StateBytes(weight=4, gradient=4, master=4, moments=8, step=4),
    "fp32/3": StateBytes(weight=4, gradient=4, master=4, moments=8, step=4),
}
"""DeepSpeed's bytes per parameter by precision class and stage, whatever the model is made of; `traits` says where they come from."""


def capabilities(software: Software) -> Capabilities:
    """What DeepSpeed 0.19.8 runs over megatron-core 0.16.1 models (engines README, column "DeepSpeed + mcore TP")."""
    return Capabilities(
        engine=NAME,
        families=FAMILIES,
        axes=("pp", "tp", "dp"),
        zero_stages=(0, 1, 2, 3),
        zero_stages_with_pipeline=(0, 1),
        sequence_parallel=True,
        recompute=RECOMPUTE_ORDER,
        pinned_recompute=rules.PINNED_WITH_FUSED_ATTENTION if rules.fused_attention(software) else (),
        recompute_varies="stage",
        recompute_by_layer=("deepspeed_1f1b",),
        uneven_stages=True,
        schedules=("1f1b", "deepspeed_1f1b"),
        offload_optimizer=True,
        precisions=PRECISIONS,
        optimizers=("adamw", "sgd"),
        rank_orders=(RANK_ORDER,),
        rules=(
            *rules.given(NAME, FAMILIES, PRECISIONS),
            rule(
                "grad_dtype",
                "data_types and communication_data_type: deepspeed/runtime/engine.py:1719,1799",
                rules.gradient_dtype,
                "model",
            ),
            rule("no_options", "ours: never tried under DeepSpeed's engine", rules.no_options, *ENGINE_OPTIONS),
            rule("no_precision_aware", "pao: core/optimizer/optimizer_config.py:375-420", rules.no_precision_aware, "model"),
            *rules.mesh_rules(),
            *rules.recompute_rules(),
            rule(
                "no_cp",
                "mpu_api: without get_sequence_data_parallel_group ZeRO shards over dp only, silently (runtime/zero/stage3.py:370)",
                rules.no_cp,
                "cp",
            ),
            rule("no_vpp", "no_vpp: deepspeed/runtime/pipe/schedule.py; over megatron-core untested", rules.no_vpp, "vpp"),
            rule(
                "schedule",
                "get_forward_backward_func: core/pipeline_parallel/schedules.py; TrainSchedule: deepspeed/runtime/pipe/schedule.py:189",
                rules.deepspeed_schedules,
                "pp",
                "vpp",
                "schedule",
            ),
            rule("zero_stage", "stage_range: deepspeed/runtime/zero/config.py:81", rules.zero_offered((0, 1, 2, 3)), "zero_stage"),
            rule(
                "pp_zero",
                "pp_zero: deepspeed/runtime/pipe/engine.py:76 (stages 2 and 3 reduce in every micro-batch)",
                rules.zero_with_pipeline((0, 1)),
                "pp",
                "zero_stage",
            ),
            rule(
                "pp_zero_megatron",
                "ours: orchestrator/workers/megatron_deepspeed.py (set_gradient_accumulation_boundary, allreduce_gradients)",
                rules.megatron_pipeline_zero,
                "pp",
                "schedule",
                "zero_stage",
            ),
            rule("pp_fp16", "deepspeed/runtime/engine.py backward", rules.megatron_pipeline_fp16, "model", "pp", "schedule"),
            rule(
                "pp_zero0",
                "gad_mix: deepspeed/runtime/engine.py:2316; silently wrong 4: runtime/utils.py clip_grad_norm_",
                rules.deepspeed_pipeline_zero,
                "model",
                "schedule",
                "zero_stage",
            ),
            rule("hpz", "hpz: deepspeed/runtime/zero/partition_parameters.py:1118", rules.no_shard_group, "zero_shard_size"),
            rule("gad_mix", "gad_mix: deepspeed/runtime/engine.py:2294-2325", rules.unsharded_accumulation, "zero_stage"),
            rule(
                "offload",
                "offload: deepspeed/runtime/zero/config.py:396, deepspeed/runtime/engine.py:2342",
                rules.offload,
                "offload_optimizer",
                "zero_stage",
                "pp",
                "schedule",
            ),
        ),
    )


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
        flash_attention=rules.fused_attention(software),
        fused_norms=software.transformer_engine,
        fp32_gradient_fusion=False,
        gathers_few_query_groups=True,
    )


def translate(plan: Plan) -> Job:
    """The job of `orchestrator.workers.megatron_deepspeed`."""
    return _translate(plan, "orchestrator.workers.megatron_deepspeed")


ENGINE: Final = Engine(name=NAME, capabilities=capabilities, traits=traits, translate=translate)
