"""The engines' own rules that say what a field of `Capabilities` says (`Capabilities.sources`)."""

from __future__ import annotations

from typing import Final

MEGATRON_LAYERS: Final = {
    "precision_here": "DeepSpeed runtime/engine.py:2000 (fp16, bf16 on the device)",
    "axis_ep": "ep_basic: megatron/training/arguments.py:1025",
    "axis_etp": "ep_basic: megatron/training/arguments.py:1025",
    "mesh": "world_div: core/parallel_state.py:741, 744",
    "data_parallel": "gbs_div: core/num_microbatches_calculator.py:340",
    "batch": "gbs_div: core/num_microbatches_calculator.py:340; DeepSpeed's triangle: runtime/config.py:456-475",
    "sequence_parallel": "sp_needs_tp: core/model_parallel_config.py:409",
    "chunks": "vpp_needs_pp: core/parallel_state.py:746; ours: an empty stage (pp_layout allows it) only waits",
    "rank_order": "rank_order: core/parallel_state.py:808-816",
}
"""Sources of the rules that every engine on megatron-core's layers has, by rule."""
DEEPSPEED: Final = {
    "grad_dtype": "data_types and communication_data_type: deepspeed/runtime/engine.py:1719,1799",
    "optimizer_dtypes": "pao: core/optimizer/optimizer_config.py:375-420 is Megatron's, deepspeed/runtime/engine.py has others",
    "options": "ours: Megatron's options, never tried under deepspeed/runtime/engine.py",
    "zero_stage": "stage_range: deepspeed/runtime/zero/config.py:81",
}
"""Sources of the rules that both engines with DeepSpeed's ZeRO have, by rule."""
