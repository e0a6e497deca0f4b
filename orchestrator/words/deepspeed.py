"""DeepSpeed's language: settings by their paths in ds_config.json (deepspeed/runtime/config.py and zero/config.py of 0.19.8)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from orchestrator.model.training import EIGHT_BIT
from orchestrator.words.terms import NOTHING, Table, Term, short_type, switch, unsaid


def _has_adam(plan: Any) -> bool:
    return bool(plan.training.optimizer == "adamw")


def _is_its_own(plan: Any) -> bool:
    """Whether DeepSpeed makes the optimizer. Bitsandbytes' it is given, by the Trainer."""
    return bool(plan.training.optimizer not in EIGHT_BIT)


def _accumulates(plan: Any) -> bool:
    """Stage 0 refuses any type but the model's (runtime/engine.py:2294-2325) and takes that by itself."""
    return bool(plan.zero_stage and plan.training.precision != "fp32")


SIZES: Final[Table] = (
    # With tp it is left out: without Megatron's groups DeepSpeed would check it against the whole world (runtime/config.py:468).
    Term("train_batch_size", "global_batch_size", back=int, least=1, when=lambda plan: plan.tp == 1),
    Term("train_micro_batch_size_per_gpu", "micro_batch_size", back=int, least=1),
    Term("gradient_accumulation_steps", "num_microbatches", back=int, least=1),
)
TRAINING: Final[Table] = (
    Term("gradient_clipping", "training.clip", default=1.0, back=float),
    switch("fp16.enabled", "training.precision", "fp16"),
    switch("bf16.enabled", "training.precision", "bf16", "fp8"),
    Term("data_types.grad_accum_dtype", "training.grad_accum_dtype", back=short_type, when=_accumulates),
    Term("communication_data_type", "training.grad_reduce_dtype", back=short_type),
    Term("optimizer.type", "training.optimizer", default="AdamW", to={"adamw": "AdamW", "sgd": "SGD"}.get, when=_is_its_own,
         back=lambda kind: "sgd" if str(kind).lower() == "sgd" else "adamw"),
    Term("optimizer.params.lr", "training.lr", back=lambda rate: float(rate) or NOTHING, when=_is_its_own),
    Term("optimizer.params.betas", "training.betas", to=list, when=_has_adam,
         back=lambda betas: betas if isinstance(betas, list) and len(betas) == 2 else NOTHING),
    Term("optimizer.params.eps", "training.eps", back=float, when=_has_adam),
    Term("optimizer.params.weight_decay", "training.weight_decay", back=float, when=_is_its_own),
)  # fmt: skip
ZERO: Final[Table] = (
    Term("zero_optimization.stage", "zero_stage", default=0, back=int),
    Term("zero_optimization.zero_hpz_partition_size", "zero_shard_size", unless=1, to=lambda size: size or 1,
         back=lambda size: int(size) if int(size) > 1 else None),
    Term("zero_optimization.offload_optimizer.device", "offload_optimizer", unless="none", default="none",
         to=lambda on: "cpu" if on else "none", back=lambda device: device != "none", when=lambda plan: plan.zero_stage > 0),
)  # fmt: skip
OWN_PARALLELISM: Final[Table] = (
    # By which a script without Ulysses' groups divides the world before the batch is checked against it.
    Term("sequence_parallel_size", "cp", unless=1, default=1, back=int, least=1),
    Term("tensor_parallel.autotp_size", "tp", unless=1, default=1, back=lambda size: int(size) or 1, least=1),  # 0 is DeepSpeed's own
    Term("expert_parallel.autoep_size", "ep", unless=1, back=int),
)
"""Ulysses, AutoTP and AutoEP: of plans whose parallelism DeepSpeed brings itself."""
OTHERWISE: Final[Table] = (
    Term("zero_optimization.cpu_offload", "offload_optimizer", back=lambda on: bool(on) or NOTHING),
    Term("pipeline.stages", "pp", back=lambda stages: NOTHING),
    Term("data_parallel_size", "dp", back=lambda ranks: NOTHING),
    *unsaid("torch_autocast.enabled", "training.precision", False),
    *unsaid("zero_optimization.mics_shard_size", "zero_shard_size", -1),
    *unsaid("pipeline.partition", "stages", None),
    *unsaid("pipeline.activation_checkpoint_interval", "stages.recompute", 0),
)
"""Settings that a plan decides and says in other words."""
PLAN: Final[Table] = (*SIZES, *TRAINING, *ZERO, *OWN_PARALLELISM, *OTHERWISE)

WHOLE_SECTIONS: Final = {
    "scheduler": "training.schedule",
    "elasticity": "global_batch_size",
    "autotuning": "micro_batch_size",
    "tensor_parallel.tp": "tp",
}
"""Sections that take the place of a plan's choice, whatever they say, with its name."""
DEFAULTS: Final[Mapping[str, Any]] = {
    "aio.block_size": 1 << 20, "aio.queue_depth": 8, "aio.intra_op_parallelism": 1, "aio.thread_count": 1, "aio.single_submit": False,
    "aio.overlap_events": True, "aio.use_gds": False, "activation_checkpointing.partition_activations": False,
    "activation_checkpointing.contiguous_memory_optimization": False, "activation_checkpointing.cpu_checkpointing": False,
    "activation_checkpointing.number_checkpoints": None, "activation_checkpointing.synchronize_checkpoint_boundary": False,
    "activation_checkpointing.profile": False,
}  # fmt: skip
"""DeepSpeed's own values of settings that files copy whole and of which a plan says nothing (runtime/swap_tensor/constants.py and
runtime/activation_checkpointing/config.py; aio.thread_count was intra_op_parallelism before 0.16)."""
