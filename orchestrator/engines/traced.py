"""A model that is described by its own code, as a worker builds it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestrator.engines.transformer_config import TORCH_DTYPE
from orchestrator.model.traced import Divided, Traced
from orchestrator.plan import Plan


def traced_fields(plan: Plan) -> dict[str, Any]:
    """What `engine.json` says of the model; the rest is the plan's (`Traced`)."""
    assert plan.model.traced is not None
    return {
        "model_class": plan.model.traced.model_class,
        "dtype": TORCH_DTYPE[plan.training.precision],
        "gradient_checkpointing": plan.strategy.recompute == "full",
        "zero_init": plan.zero_stage == 3 and plan.tp == 1,
    }


def partition_config(divided: Sequence[Divided]) -> dict[str, Any]:
    """AutoTP's `tensor_parallel.partition_config` (deepspeed/module_inject/autotp_config.py): patterns are of parameters' names, matched
    at their beginning.

    >>> partition_config([Divided(pattern="up", by="column", parts=(4, 4))])["layer_specs"]
    [{'patterns': ['up\\\\.weight$'], 'partition_type': 'column', 'shape': [2, -1], 'partition_dim': 0}]
    """
    return {"use_default_specs": False, "layer_specs": [_layer_spec(each) for each in divided]}


def _layer_spec(divided: Divided) -> dict[str, Any]:
    if divided.by == "summed":
        return {"patterns": [f"{divided.pattern}$"], "partition_type": "skip", "grad_allreduce": True}
    spec: dict[str, Any] = {"patterns": [rf"{divided.pattern}\.weight$"], "partition_type": divided.by}
    if divided.parts:
        equal = len(set(divided.parts)) == 1
        spec |= {"shape": [len(divided.parts) if equal else list(divided.parts), -1], "partition_dim": 0}
    return spec


def partition_note(traced: Traced, tp: int) -> str:
    """What is divided, and what stays whole and why."""
    linears = sum(each.by in ("column", "row") for each in traced.divided)
    whole = f"; whole: {'; '.join(traced.undivided)}" if traced.undivided else ""
    return f"tp={tp} divides {linears} kinds of linears of {traced.model_class} (ds_config.json, tensor_parallel.partition_config){whole}."
