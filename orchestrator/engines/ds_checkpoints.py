"""Which plans of the DeepSpeed engines have checkpoints that another layout can read."""

from __future__ import annotations

from orchestrator.plan import Plan


def reshardable(plan: Plan) -> bool:
    """Whether the worker writes this plan's states by their places in the whole model (workers/states.py, `covers`). Stage 0 in 16 bits
    and fp16 wrap optimizers that give no access to them, and SGD has none; there it writes DeepSpeed's own checkpoint, for one layout."""
    training = plan.training
    return training.optimizer == "adamw" and training.precision != "fp16" and (plan.zero_stage > 0 or training.precision == "fp32")


def why_no_resume(before: Plan, now: Plan) -> str | None:
    """Why a checkpoint of `before` can't be read under `now`; None: it can."""
    if reshardable(before) and reshardable(now):
        return None
    different = [f"{name}={old} (now {new})" for name, old, new in _layout(before, now) if old != new]
    if not different and reshardable(before) == reshardable(now):
        return None
    was = ", ".join(different) or f"precision {before.training.precision}"
    layout = f"pin.tp={before.tp} pin.pp={before.pp} pin.zero_stage={before.zero_stage} on {before.world_size} ranks"
    return f"was written with {was}; stage 0 in 16 bits, fp16 and sgd continue in the same layout only: {layout}"


def _layout(before: Plan, now: Plan) -> list[tuple[str, object, object]]:
    names = ("tp", "pp", "vpp", "dp", "cp", "zero_stage")
    rows: list[tuple[str, object, object]] = [(name, getattr(before, name), getattr(now, name)) for name in names]
    old, new = ([sum(span.count for span in stage.layers) for stage in plan.stages] for plan in (before, now))
    return [*rows, ("stages", old, new)]
