"""What DeepSpeed can run over transformers' models."""

from __future__ import annotations

from typing import Final

from orchestrator.engines import hf_config, rules
from orchestrator.engines.deepspeed import rules as deepspeed_rules
from orchestrator.engines.deepspeed.requirements import NAME
from orchestrator.engines.rules import rule
from orchestrator.hardware.spec import Software
from orchestrator.strategy.capabilities import Capabilities
from orchestrator.strategy.spec import ENGINE_OPTIONS, RANK_ORDER

PRECISIONS: Final = ("bf16", "fp16", "fp32")

def capabilities(software: Software) -> Capabilities:
    """What DeepSpeed 0.19.8 runs over transformers' models (engines README, "DeepSpeed + HF"; ds_zero, ds_autotp, ds_ulysses)."""
    return Capabilities(
        engine=NAME,
        parts=hf_config.PARTS,
        axes=("tp", "cp", "dp"),
        zero_stages=(0, 1, 2, 3),
        zero_stages_with_pipeline=(),
        sequence_parallel=False,
        recompute=("none", "full"),
        recompute_varies="never",
        uneven_stages=False,
        schedules=("1f1b",),
        offload_optimizer=True,
        zero_shard_groups=True,
        precisions=PRECISIONS,
        optimizers=("adamw", "sgd"),
        rank_orders=(RANK_ORDER,),
        rules=(
            rule("precision", "fp16_bf16, runtime/engine.py:2000", rules.precision(NAME, PRECISIONS), "model"),
            rule("no_options", "ours: never tried under DeepSpeed's engine", rules.no_options, *ENGINE_OPTIONS),
            rule("no_precision_aware", "pao: core/optimizer/optimizer_config.py:375-420", rules.no_precision_aware, "model"),
            rule("seq_pos", "transformers: n_positions, max_position_embeddings of the model's config", rules.positions, "model"),
            rule("hidden_heads", "transformers/models/gpt2/modeling_gpt2.py GPT2Attention", rules.head_width, "model"),
            rule("head_groups", "transformers/models/llama/modeling_llama.py repeat_kv", rules.head_groups, "model"),
            rule("hf_architecture", "transformers/models/*/configuration_*.py", deepspeed_rules.hf_architecture, "model"),
            rule(
                "grad_dtype",
                "data_types and communication_data_type: deepspeed/runtime/engine.py:1719,1799",
                rules.gradient_dtype,
                "model",
            ),
            rule("rank_order", "autotp: deepspeed/utils/groups.py:150-230 (neighbours are one group)", rules.rank_order, "rank_order"),
            rule("no_experts", "ours: dense families only", rules.no_experts, "ep", "etp"),
            rule("no_pipeline", "pp_misc: deepspeed/runtime/pipe/module.py", deepspeed_rules.no_pipeline, "pp", "vpp"),
            rule("schedule", "ours: one stage", rules.schedule_fits, "vpp", "schedule"),
            rule(
                "no_sequence_parallel",
                "mapping_deepspeed.md: no Megatron-style sequence parallelism",
                deepspeed_rules.no_sequence_parallel,
                "sequence_parallel",
            ),
            rule(
                "autotp_family",
                "autotp: deepspeed/module_inject/auto_tp.py:300 (supported)",
                deepspeed_rules.autotp_family,
                "tp",
            ),
            rule(
                "autotp_divides",
                "autotp: deepspeed/module_inject/tp_shard.py (uneven shards)",
                deepspeed_rules.autotp_divides,
                "tp",
            ),
            rule("autotp_host", "autotp: deepspeed/runtime/engine.py:942-1080", deepspeed_rules.autotp_host, "tp"),
            rule("autotp_x", "autotp_x: deepspeed/runtime/engine.py:957", deepspeed_rules.autotp_without_ulysses, "tp", "cp"),
            rule(
                "ulysses_family",
                "ulysses: deepspeed/runtime/sequence_parallel/ulysses_sp.py:560",
                deepspeed_rules.ulysses_family,
                "cp",
            ),
            rule("ulysses", "ulysses: runtime/sequence_parallel/ulysses_sp.py:143-152", deepspeed_rules.ulysses_heads, "cp"),
            rule(
                "ulysses_seq",
                "ulysses: runtime/sequence_parallel/ulysses_sp.py:707",
                deepspeed_rules.ulysses_sequence,
                "cp",
            ),
            rule("world_div", "autotp, ulysses: parallel_state_sp.py:28-40", rules.world_divides, "tp", "pp", "cp"),
            rule("world_filled", "triangle: deepspeed/runtime/config.py:456-475", rules.world_filled, "tp", "pp", "cp", "dp"),
            rule("gbs_div", "triangle: deepspeed/runtime/config.py:456-475", rules.batch_divides, "dp", "micro_batch_size"),
            rule(
                "gbs_filled",
                "triangle: deepspeed/runtime/config.py:590-656",
                rules.batch_filled,
                "dp",
                "micro_batch_size",
                "num_microbatches",
            ),
            rule("zero_stage", "stage_range: deepspeed/runtime/zero/config.py:81", rules.zero_offered((0, 1, 2, 3)), "zero_stage"),
            rule("gad_mix", "gad_mix: deepspeed/runtime/engine.py:2294-2325", rules.unsharded_accumulation, "zero_stage"),
            rule(
                "hpz",
                "hpz: deepspeed/runtime/zero/partition_parameters.py:1118, utils/groups.py",
                deepspeed_rules.hpz,
                "zero_shard_size",
                "zero_stage",
                "tp",
                "cp",
            ),
            rule(
                "offload",
                "offload: deepspeed/runtime/zero/config.py:396, deepspeed/runtime/engine.py:2342",
                rules.offload,
                "offload_optimizer",
                "zero_stage",
                "pp",
            ),
            rule(
                "offload_ulysses",
                "ours: nobody has tried it",
                deepspeed_rules.ulysses_offload,
                "offload_optimizer",
                "cp",
            ),
            rule(
                "recompute_whole",
                "transformers/modeling_utils.py gradient_checkpointing_enable",
                deepspeed_rules.no_selective,
                "recompute",
            ),
        ),
    )
