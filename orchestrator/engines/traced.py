"""A model that is described by its own code, as a worker builds it. Pure."""

from __future__ import annotations

from typing import Any

from orchestrator.engines.transformer_config import TORCH_DTYPE
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
