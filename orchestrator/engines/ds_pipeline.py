"""A plan's stages in the words of DeepSpeed's PipelineModule: the layers by number, embedding first and head last."""

from __future__ import annotations

from typing import Any, Final

from orchestrator.engines.transformer_config import ENDS
from orchestrator.plan import Plan
from orchestrator.strategy.spec import RECOMPUTE_MODULES, Recompute

SECTION: Final[dict[str, Any]] = {
    # Each layer checkpoints itself as the plan says: DeepSpeed's interval is one for all (runtime/pipe/module.py:340).
    "activation_checkpoint_interval": 0,
    # Boundary tensors go whole, as they are priced; under sequence parallelism each rank's is its own part already.
    "pipe_partitioned": False,
    "grad_partitioned": False,
}
"""The section "pipeline" of ds_config.json."""


def is_pipeline_module(plan: Plan) -> bool:
    """Whether DeepSpeed's own pipeline runs the plan, not megatron-core's."""
    return plan.schedule == "deepspeed_1f1b"


def modules(mode: Recompute) -> list[str]:
    """What of a layer is computed again."""
    if mode == "none":
        return []
    return ["full"] if mode == "full" else list(RECOMPUTE_MODULES[mode])


def pipeline_fields(plan: Plan) -> dict[str, Any]:
    """The section "pipeline" of engine.json. "bounds": stage i has layers bounds[i] to bounds[i + 1]; "recompute": of each transformer
    layer, the modules that are computed again, or "full"; "tied": embedding and head are one weight."""
    bounds = [0]
    for stage in plan.stages:
        bounds.append(bounds[-1] + sum(span.count for span in stage.layers))
    return {
        "bounds": bounds,
        "recompute": [modules(span.recompute) for _, span in plan.spans() if span.kind not in ENDS for _ in range(span.count)],
        "tied": plan.model.tie_embeddings,
        "seq_length": plan.training.seq_length,
    }
