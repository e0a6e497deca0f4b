"""Parts of a model that looks at images which are not trained: their weights have neither gradients nor optimizer states. What lies below
everything that is trained has no backward pass; what lies above something that is has the gradients of its inputs."""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from orchestrator.model.hugging_face import hugging_face
from orchestrator.model.lora import frozen_layer, trainable_parameters, with_lora
from orchestrator.model.ops import Role
from orchestrator.model.parts.vision import part_of
from orchestrator.model.spec import ModelSpec
from orchestrator.model.training import Training


def with_frozen(model: ModelSpec, frozen: Collection[str], *, modules: bool = True) -> ModelSpec:
    """The model with these parts of it, of `SEEING`, frozen. `modules`: of transformers' modules; Megatron's router keeps its input
    whether it is trained or not (core/transformer/moe/moe_utils.py, RouterGatingLinearFunction)."""
    keeping: tuple[Role, ...] = () if modules else ("router",)
    below = {"vision": "vision" in frozen, "projector": {"vision", "projector"} <= {*frozen}, "language": False}
    runs = []
    for run in model.runs:
        part = part_of(run.layer.kind)
        if part in frozen:
            alone = below[part] or run.layer.kind == "embedding"
            run = replace(run, layer=replace(frozen_layer(run.layer, keeping), forward_only=alone))
        runs.append(run)
    return replace(model, runs=tuple(runs))


def trained_parameters(model: ModelSpec, training: Training, *, modules: bool = True) -> int:
    """Parameters of the whole model that this training changes: its adapters' alone, or all but the frozen parts'. `modules`: of
    transformers' modules, or of megatron-core's."""
    if training.lora is not None:
        return trainable_parameters(with_lora(hugging_face(model) if modules else model, training.lora, modules=modules))
    return trainable_parameters(with_frozen(hugging_face(model), training.freeze)) if training.freeze else model.parameters
