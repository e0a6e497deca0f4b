"""A plan as a configuration of a program that shards by torch's FSDP2 (words/fsdp.py): stage 3, or 2 where it has a word for that."""

from __future__ import annotations

from typing import Any, Final

from orchestrator.engines.megatron_args import shape
from orchestrator.errors import InputError
from orchestrator.plan import Plan
from orchestrator.strategy.spec import CHOICES
from orchestrator.words import deepspeed as words
from orchestrator.words.fsdp import ACTOR, SHARDED
from orchestrator.words.terms import say

PINS: Final = {choice.name: (choice.pin, choice.default) for choice in CHOICES}
HELD: Final = {
    "zero_optimization.stage": ("zero_stage", 3),
    "tensor_parallel.autotp_size": ("tp", 1),
    "expert_parallel.autoep_size": ("ep", 1),
}
"""What is not said of a plan, by its path in a ds_config, with the pin that keeps a plan from it."""
TYPES: Final = ("bf16", "fp16")
SCHEDULES: Final = ("constant", "cosine")


def settings_of(plan: Plan, name: str) -> tuple[dict[str, Any], tuple[str, ...], dict[str, Any]]:
    """(The settings by path, what can't be said, pins that hold a search to what can). Raises InputError for what the program can't train,
    and where a setting has no place that decides what is trained."""
    program, training = SHARDED[name], plan.training
    if training.precision not in TYPES:
        raise InputError("write", name, f"can't be told train.precision={training.precision}", TYPES)
    if training.optimizer != "adamw" or training.lora is not None:
        raise InputError(
            "write", name, f"is told AdamW of all weights, and the plan has {'adapters' if training.lora else training.optimizer}"
        )
    if plan.strategy.recompute not in ("none", "full"):
        raise InputError("write", name, f"recomputes all layers or none, and the plan has recompute={plan.strategy.recompute}")
    ds = say(words.PLAN, plan) | {
        "train_batch_size": plan.global_batch_size,
        "sequence_parallel_size": plan.cp,
        "tensor_parallel.autotp_size": plan.tp,
        "bf16.enabled": training.precision == "bf16",
        "fp16.enabled": training.precision == "fp16",
        "zero_optimization.offload_optimizer.device": "cpu" if plan.offload_optimizer else "none",
    }
    said: dict[str, Any] = {term.theirs: term.to(ds[term.ours]) for term in program.table if term.ours in ds}
    placed = {term.ours for term in program.table}
    stages = (2, 3) if "zero_optimization.stage" in placed else (3,)
    lost: dict[str, Any] = {}
    if plan.zero_stage not in stages:
        lost["zero_optimization.stage"] = plan.zero_stage
    lost |= {path: size for path, size in (("tensor_parallel.autotp_size", plan.tp), ("expert_parallel.autoep_size", plan.ep))
             if size > 1 and path not in placed}  # fmt: skip
    if training.grad_reduce_dtype != "fp32":
        lost["communication_data_type"] = training.grad_reduce_dtype
    others = {name: getattr(plan, name) for name in ("zero_shard_size", "offload_activations") if getattr(plan, name)}
    said |= {program.recompute: plan.strategy.recompute == "full", program.steps: training.steps}
    if len(program.length) == 1:
        said[program.length[0]] = training.seq_length
    said |= {**_schedule(plan, name), **program.beside, **dict(zip(program.nodes, shape(plan), strict=True))}
    pins = {pin: value for path, (pin, value) in HELD.items() if path in lost}
    pins |= {pin: value for one, (pin, value) in PINS.items() if one in others and value is not None}
    unsaid = tuple(f"{path}={value}" for path, value in (lost | others).items())
    return said, unsaid, pins


def _schedule(plan: Plan, name: str) -> dict[str, Any]:
    """How the rate goes over the steps. Raises InputError for a schedule that the program has not."""
    training = plan.training
    if training.schedule not in SCHEDULES:
        raise InputError("write", name, f"can't be told train.schedule={training.schedule}", SCHEDULES)
    if name == "verl":
        optim = f"{ACTOR}.optim"
        return {f"{optim}.lr_scheduler_type": training.schedule, f"{optim}.lr_warmup_steps": training.warmup,
                f"{optim}.total_training_steps": training.steps, f"{optim}.min_lr_ratio": training.min_lr / training.lr}  # fmt: skip
    torch = "torch.optim.lr_scheduler"
    rest = training.steps - training.warmup
    after = {"name": f"{torch}.ConstantLR", "kwargs": {"factor": 1.0, "total_iters": rest}}
    if training.schedule == "cosine":
        after = {"name": f"{torch}.CosineAnnealingLR", "kwargs": {"T_max": rest, "eta_min": training.min_lr}}
    if not training.warmup:
        return {"policy.scheduler": [after]}
    rising = {"name": f"{torch}.LinearLR", "kwargs": {"start_factor": 1e-8, "end_factor": 1.0, "total_iters": training.warmup}}
    return {"policy.scheduler": [rising, after, {"milestones": [training.warmup]}]}
