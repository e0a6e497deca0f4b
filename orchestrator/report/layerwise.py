"""A layer-wise plan as an expert reads it, beside the best plan that an engine can start."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from orchestrator.plan import Plan
from orchestrator.report.text import choice
from orchestrator.strategy.layerwise import LayerwisePlan
from orchestrator.units import format_bytes, format_seconds

NOISE = 1e-8
"""Relative difference of seconds that is rounding."""


def layerwise_table(plan: LayerwisePlan, engine_plan: Plan | None, at_least_s: float | None = None) -> RenderableType:
    """A row a stage, then both step times. `engine_plan` None: no engine can run this model, or none of its plans fits. `at_least_s`:
    seconds that no plan of the layer-wise space undercuts."""
    table = Table(title=Text("Layer-wise plan (no engine here starts it)", style="bold"), title_justify="left", box=None, pad_edge=False)
    for heading in ("stage", "layers", "forward", "backward", "memory"):
        table.add_column(heading, justify="left" if heading in ("stage", "layers") else "right", overflow="fold")
    for index, stage in enumerate(plan.stages):
        layers = "; ".join(f"{run.count} x {run.kind} {run.choice.label()}" for run in stage.runs)
        times = format_seconds(stage.forward_s), format_seconds(stage.backward_s)
        table.add_row(str(index), Text(layers), *times, format_bytes(stage.peak_bytes))
    lines = [
        f"pp {plan.pp}, {plan.world_size // plan.pp} ranks a stage, {plan.num_microbatches} micro-batches of "
        f"{plan.global_batch_size // plan.num_microbatches} samples",
        f"layer-wise: {format_seconds(plan.step_time_s)} a step, {plan.global_batch_size / plan.step_time_s:,.2f} samples/s, "
        f"{format_bytes(plan.peak_memory_bytes)} at the peak; no interval: no run of such a plan was measured",
    ]
    if at_least_s is not None:
        gap = 1 - at_least_s / plan.step_time_s
        left = f"not proven the fastest of its space: another plan may be up to {100 * gap:.1f}% faster"
        lines.append("proven the fastest of its space" if gap <= NOISE else left)
    if engine_plan is None or engine_plan.predicted is None:
        lines.append("best engine plan: there is none")
    else:
        seconds = engine_plan.prediction.step_time_s
        gain = 100 * (plan.global_batch_size / plan.step_time_s * seconds / engine_plan.global_batch_size - 1)
        lines.append(f"best engine plan: {format_seconds(seconds)} a step ({engine_plan.engine} {choice(engine_plan)})")
        lines.append(f"what a layer-wise runtime would add: {gain:+.1f}% speed")
    return Group(table, Text("\n".join(lines)))
