"""Parts of a model that looks at images which are not trained: their weights have neither gradients nor optimizer states. What lies below
everything that is trained has no backward pass; what lies above something that is has the gradients of its inputs."""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from orchestrator.model.layer import LayerSpec
from orchestrator.model.lora import frozen_layer
from orchestrator.model.spec import ModelSpec


def part_of(layer: LayerSpec) -> str:
    """The part, of `SEEING`, that a layer of such a model is in."""
    return (
        "vision" if layer.kind == "patches" or layer.kind.startswith("vision") else "projector" if layer.kind == "projector" else "language"
    )


def with_frozen(model: ModelSpec, frozen: Collection[str]) -> ModelSpec:
    """The model with these parts of it, of `SEEING`, frozen."""
    below = {
        "vision": "vision" in frozen,
        "projector": {"vision", "projector"} <= {*frozen},
        "language": False,  # something below it is trained, or it is
    }
    runs = []
    for run in model.runs:
        part = part_of(run.layer)
        if part in frozen:
            alone = below[part] or run.layer.kind == "embedding"
            run = replace(run, layer=replace(frozen_layer(run.layer), forward_only=alone))
        runs.append(run)
    return replace(model, runs=tuple(runs))
