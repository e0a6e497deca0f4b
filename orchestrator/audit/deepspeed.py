"""A ds_config.json of DeepSpeed: read into a setup, and written again. The model, the GPUs and the sequence are keys beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from orchestrator.audit.document import Given, changed
from orchestrator.audit.reading import Reading, Setup, Source
from orchestrator.engines.deepspeed.requirements import NAME
from orchestrator.engines.passthrough import OPEN_SECTIONS, SHORT_TYPES, paths
from orchestrator.errors import InputError

SIGNS: Final = ("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
"""A JSON object with one of these is DeepSpeed's."""
UNPRICED: Final = (
    "zero_optimization.", "activation_checkpointing.", "aio.", "amp.", "autotuning.", "compression_training.", "hybrid_engine.",
    "sparse_attention",
    "flops_profiler.", "zero_allow", "zero_force", "bf16.", "fp16.", "torch_autocast.", "compile.", "communication_data_type", "prescale",
    "gradient_predivide", "sparse_gradients", "optimizer.", "timers.",
)  # fmt: skip
"""How the paths begin of settings that change time or memory, and that a plan does not say."""
BESIDE: Final = ("fp16.loss_scale", "fp16.initial_scale_power", "fp16.hysteresis", "fp16.min_loss_scale", "fp16.auto_cast",
                 "flops_profiler.",
                 "fp16.loss_scale_window", "timers.", "zero_allow", "zero_force", "optimizer.params.torch_adam")  # fmt: skip


def is_ds_config(value: object) -> bool:
    """Whether a JSON value is a ds_config."""
    return isinstance(value, dict) and any(name in value for name in SIGNS)


def read(text: str, content: Mapping[str, Any]) -> Source:
    """Raises InputError for a value that is none."""
    return Source(text=text, reading=reading_of(content), edited=partial(_edited, text, content))


LEAST: Final = {
    **dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size", "sequence_parallel_size",
                     "zero_optimization.zero_hpz_partition_size"), 1),
    "tensor_parallel.autotp_size": 0,  # DeepSpeed's own default
}  # fmt: skip


def reading_of(content: Mapping[str, Any]) -> Reading:
    """Raises InputError."""
    given = Given(content)
    micro, steps, batch = (
        given.number(path) for path in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    )
    for path, least in LEAST.items():
        value = given.number(path)
        if value is not None and value < least:
            raise InputError(path, value, f"must be at least {least}")
    stage = given.number("zero_optimization.stage") or 0
    if stage not in (0, 1, 2, 3):
        raise InputError("zero_optimization.stage", stage, "is not known", (0, 1, 2, 3))
    tp = given.number("tensor_parallel.autotp_size") or 1
    cp = given.number("sequence_parallel_size") or 1
    device = given.get("zero_optimization.offload_optimizer.device", "none")
    hpz = given.number("zero_optimization.zero_hpz_partition_size") or 1
    keys: dict[str, Any] = {}
    if batch is not None:
        keys["train.global_batch_size"] = batch
    if micro and batch:
        replicas = batch // (micro * (steps or 1))
        if steps and replicas * micro * steps == batch:
            keys["gpus"] = replicas * tp * cp
    in_bf16, in_fp16 = given.truth("bf16.enabled"), given.truth("fp16.enabled")
    kind = "bf16" if in_bf16 else "fp16" if in_fp16 else "fp32"
    keys["train.precision"] = kind
    reduce = SHORT_TYPES.get(str(given.get("communication_data_type")), given.get("communication_data_type"))
    accumulate = SHORT_TYPES.get(str(given.get("data_types.grad_accum_dtype")), given.get("data_types.grad_accum_dtype"))
    keys["train.grad_reduce_dtype"] = reduce or kind
    keys["train.grad_accum_dtype"] = accumulate or kind
    keys |= _optimizer(given)
    keys["train.clip"] = given.number("gradient_clipping", float) if "gradient_clipping" in given.values else 1.0
    if keys["train.clip"] is None:
        keys["train.clip"] = 1.0
    for path in ("zero_optimization.reduce_scatter", "zero_optimization.contiguous_gradients", "steps_per_print", "wall_clock_breakdown"):
        given.used |= {path} if path.startswith("zero") else set()
    given.assumed.append("recompute=none: a ds_config does not say whether the model checkpoints its activations; pin.recompute=full does")
    setup = Setup(
        engine=NAME,
        tp=tp,
        cp=cp,
        micro_batch_size=micro or 1,
        zero_stage=stage,  # type: ignore[arg-type]  # checked above
        zero_shard_size=hpz if hpz > 1 else None,
        offload_optimizer=device != "none" or bool(given.get("zero_optimization.cpu_offload")),
    )
    unknown, unpriced, beside = [], [], []
    known = paths()
    for path, value in given.values.items():
        if path in given.used:
            continue
        said = f"{path}={json.dumps(value)}"
        if path not in known and not any(path == section or path.startswith(f"{section}.") for section in OPEN_SECTIONS):
            unknown.append(said)
        elif path.startswith(UNPRICED) and not path.startswith(BESIDE):
            unpriced.append(said)
        else:
            beside.append(said)
    if micro is None and batch is None:
        given.assumed.append("micro-batches of 1: the file does not say; pin.micro_batch_size= does")
    accumulation = (steps or 1) if batch is None and micro else None
    return Reading(format="ds_config of DeepSpeed", keys=keys, setup=setup, accumulation=accumulation,
                   steps=None if batch is None or (micro and not steps) else steps or 1, divided=bool(batch and not micro),
                   unknown=tuple(unknown), unpriced=tuple(unpriced), beside=tuple(beside), assumed=tuple(given.assumed))  # fmt: skip


def _optimizer(given: Given) -> dict[str, Any]:
    kind = str(given.get("optimizer.type", "AdamW")).lower()
    if kind not in ("adam", "adamw", "sgd"):
        given.assumed.append(f"optimizer.type={kind} is priced as Adam")
    found: dict[str, Any] = {"train.optimizer": "sgd" if kind == "sgd" else "adamw"}
    lr = given.number("optimizer.params.lr", float)
    peak = next((given.number(f"scheduler.params.{name}", float) for name in ("warmup_max_lr", "cycle_max_lr")
                 if f"scheduler.params.{name}" in given.values), None)  # fmt: skip
    if peak or lr:
        found["train.lr"] = peak or lr
    for name, key in (("eps", "eps"), ("weight_decay", "weight_decay")):
        value = given.number(f"optimizer.params.{name}", float)
        if value is not None:
            found[f"train.{key}"] = value
    betas = given.get("optimizer.params.betas")
    if isinstance(betas, list) and len(betas) == 2:
        found["train.betas"] = betas
    given.used |= {path for path in given.values if path.startswith(("scheduler.", "optimizer.params.momentum"))}
    return found


# -------------------------------------------------------------------------------------------------------------------- editing


def _changes(before: Setup, after: Setup) -> dict[str, Any] | None:
    """Values by path; None: a ds_config can't say the change."""
    allowed = {"micro_batch_size", "zero_stage", "offload_optimizer", "tp", "cp", "zero_shard_size"}
    changed = {name for name in Setup.__struct_fields__ if getattr(before, name) != getattr(after, name)}
    if not changed <= allowed:
        return None
    found: dict[str, Any] = {}
    if "micro_batch_size" in changed:
        found["train_micro_batch_size_per_gpu"] = after.micro_batch_size
    if "zero_stage" in changed:
        found["zero_optimization.stage"] = after.zero_stage
    if "offload_optimizer" in changed:
        found["zero_optimization.offload_optimizer.device"] = "cpu" if after.offload_optimizer else "none"
    if "tp" in changed:
        found["tensor_parallel.autotp_size"] = after.tp
    if "cp" in changed:
        found["sequence_parallel_size"] = after.cp
    if "zero_shard_size" in changed:
        found["zero_optimization.zero_hpz_partition_size"] = after.zero_shard_size or 1
    return found


def _edited(text: str, content: Mapping[str, Any], before: Setup, after: Setup, gpus: int) -> str | None:
    """In the text's own indentation. Where accumulation is said it follows: from the batch over all GPUs, or else from what a step was."""
    changes = _changes(before, after)
    if changes is None:
        return None
    steps, batch = content.get("gradient_accumulation_steps"), content.get("train_batch_size")
    if isinstance(batch, int) and "train_micro_batch_size_per_gpu" not in content and (after.tp, after.cp) != (before.tp, before.cp):
        changes["train_micro_batch_size_per_gpu"] = after.micro_batch_size
    if isinstance(steps, int) and steps > 0:
        if isinstance(batch, int):
            samples, shared = batch, after.micro_batch_size * (gpus // (after.tp * after.cp))
        else:
            samples, shared = steps * before.micro_batch_size * after.tp * after.cp, after.micro_batch_size * before.tp * before.cp
        if samples % shared:
            return None
        if samples // shared != steps:
            changes["gradient_accumulation_steps"] = samples // shared
    return changed(text, "ds_config.json", changes)
