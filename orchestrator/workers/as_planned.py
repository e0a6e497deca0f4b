"""What DeepSpeed takes without a word is looked at before and after it is built: is it the plan?

Its configuration reads the world from whatever group there is, an `mpu` without a name that it asks for included: on any error it goes on
with a world of one rank (deepspeed/runtime/config.py:455-475). Keys that it does not find, or whose value is "auto", are its defaults.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from orchestrator.errors import InputError
from orchestrator.plan import Plan

UNCLIPPED = 1e30
"""A bound that clips nothing: stage 0 computes no norm unless it clips."""
ACCUMULATED = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def require_ranks(plan: Plan) -> None:
    """Raises InputError where the plan's ranks are not in one process group."""
    ranks = dist.get_world_size() if dist.is_initialized() else None
    if ranks != plan.world_size:
        why = "there is no process group" if ranks is None else f"the process group has {ranks} ranks"
        raise InputError("world_size", plan.world_size, f"{why}: DeepSpeed would train as if it were alone")


def require_no_auto(ds_config: Any, path: str = "ds_config") -> None:
    """Raises InputError for an "auto", which only the Hugging Face Trainer fills in."""
    if ds_config == "auto":
        raise InputError(path, "auto", "is filled in by the Hugging Face Trainer alone; DeepSpeed would take its own default")
    for name, value in ds_config.items() if isinstance(ds_config, dict) else ():
        require_no_auto(value, f"{path}.{name}")


def require_as_planned(engine: Any, plan: Plan) -> None:
    """Raises InputError that names what a DeepSpeed engine does otherwise than the plan."""
    training = plan.training
    clip = training.clip or (UNCLIPPED if plan.zero_stage == 0 else 0.0)
    pairs = {
        # Who shares ZeRO's states: the ranks of a sequence as well, which hold the same weights.
        "dp x cp": (engine.seq_dp_world_size, plan.dp * plan.cp),
        "zero_stage": (engine.zero_optimization_stage(), plan.zero_stage),
        "micro_batch_size": (engine.train_micro_batch_size_per_gpu(), plan.micro_batch_size),
        "num_microbatches": (engine.gradient_accumulation_steps(), plan.num_microbatches),
        "training.clip": (engine.gradient_clipping(), clip),
        "zero_shard_size": (engine.zero_hpz_partition_size(), plan.zero_shard_size or 1),
    }
    if plan.zero_stage >= 1:
        pairs["training.grad_accum_dtype"] = (engine.get_data_types()[1], ACCUMULATED[training.grad_accum_dtype])
    if plan.cp == 1:
        # Under Ulysses DeepSpeed has no group of data-parallel ranks alone.
        pairs["dp"] = (engine.dp_world_size, plan.dp)
    if engine.autotp_size() <= 1:
        # Micro-batch x accumulation x the world that its configuration saw, which under AutoTP is all ranks.
        pairs["global_batch_size"] = (engine.train_batch_size(), plan.global_batch_size)
    for key, (found, wanted) in pairs.items():
        if found != wanted:
            raise InputError(key, str(wanted), f"DeepSpeed took {found} in its place")
