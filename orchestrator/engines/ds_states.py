"""How DeepSpeed keeps and moves states, whatever the model is made of: bytes per parameter before sharding, buckets, what overlaps; and
which plans have checkpoints that another layout can read."""

from __future__ import annotations

from typing import Final

from orchestrator.engines.ds_config import BUCKET_ELEMENTS, PREFETCH_ELEMENTS
from orchestrator.engines.translation import why_other_samples
from orchestrator.plan import Plan
from orchestrator.plan.check import bound_to_layout, has_states_by_place
from orchestrator.strategy.capabilities import StateBytes, Traits

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
DEEPSPEED: Final = Traits(
    engine="",
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
    fp32_gradient_fusion=False,
)
"""What pricing must know of DeepSpeed under any layers; each engine that has it gives its name and what its layers do."""


def why_no_resume(before: Plan, now: Plan) -> str | None:
    """Why a checkpoint of `before` can't be read under `now`, or its data not go on; None: it can."""
    if (why := why_other_samples(before, now)) is not None:
        return why
    if has_states_by_place(before) and has_states_by_place(now):
        return None
    layouts = [{**{name: getattr(plan, name) for name in ("tp", "pp", "vpp", "dp", "cp", "zero_stage")},
                "stages": [sum(span.count for span in stage.layers) for stage in plan.stages]} for plan in (before, now)]  # fmt: skip
    different = [f"{name}={old} (now {layouts[1][name]})" for name, old in layouts[0].items() if old != layouts[1][name]]
    if not different and has_states_by_place(before) == has_states_by_place(now):
        return None
    was = ", ".join(different) or f"precision {before.training.precision}"
    layout = f"pin.tp={before.tp} pin.pp={before.pp} pin.zero_stage={before.zero_stage} on {before.world_size} ranks"
    why = bound_to_layout(before) or bound_to_layout(now)
    return f"was written with {was}; with {why} it goes on in the same layout only: {layout}"
