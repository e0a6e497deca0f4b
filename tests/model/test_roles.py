"""What is made of an operation goes by its role: under any other name it costs the same."""

from __future__ import annotations

from itertools import count
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from orchestrator import recipe
from orchestrator.cost.passes import routed_experts, shared_experts
from orchestrator.cost.recompute import again, tiled
from orchestrator.detect import Machine
from orchestrator.engines import ENGINES
from orchestrator.model.families import describe
from orchestrator.model.hugging_face import hugging_face
from orchestrator.model.lora import Lora, with_lora
from orchestrator.model.ops import FEED_FORWARD, ROUTED, SHARED
from orchestrator.model.spec import LayerSpec, ModelSpec
from orchestrator.strategy.spec import RECOMPUTE_MODULES, Mesh, Strategy
from orchestrator.units import GIB
from tests.validation.engines.engine import with_separate_gate

RECIPES = ("llama3_8b", "gpt2_xl", "bert_large", "t5_large", "mixtral_8x7b", "deepseek_tiny", "qwen3_next_80b_a3b", "vit_tiny")


def model_of(name: str) -> ModelSpec:
    settings = recipe.load([f"recipe={name}", "gpus=8", "cluster=dgx_h100"], Machine(host_memory=64 * GIB), list(ENGINES))
    return describe(settings.architecture, settings.training.seq_length, settings.training.decoder_seq_length)


def renamed(model: ModelSpec) -> ModelSpec:
    """The same with a new name for each operation and each weight."""
    number = count()

    def layer(spec: LayerSpec) -> LayerSpec:
        ops = tuple(replace(op, name=f"x{next(number)}") if "name" in op.__struct_fields__ else op for op in spec.ops)
        return replace(spec, ops=ops, weights=tuple(replace(weight, name=f"w{next(number)}") for weight in spec.weights))

    return replace(model, runs=tuple(replace(run, layer=layer(run.layer)) for run in model.runs))


def without_names(value: Any) -> Any:
    plain = msgspec.to_builtins(value)

    def cut(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: cut(item) for key, item in part.items() if key != "name"}
        return [cut(item) for item in part] if isinstance(part, list | tuple) else part

    return cut(plain)


def variants(model: ModelSpec) -> dict[str, ModelSpec]:
    found = {"as Megatron builds it": model, "with a separate gate": with_separate_gate(model)}
    if model.architecture.traced is None:
        found["transformers"] = hugging_face(model)
        found["transformers with LoRA"] = with_lora(hugging_face(model), Lora(rank=4, dropout=0.1))
        found["Megatron with LoRA"] = with_lora(model, Lora(rank=4), modules=False)
    return found


@pytest.mark.parametrize("name", RECIPES)
def test_names_of_operations_decide_nothing(name: str) -> None:
    model = model_of(name)
    tiles = (Strategy(mesh=Mesh(), tiled_mlp=2), Strategy(mesh=Mesh(), tiled_logits=2))
    for (which, plain), other in zip(variants(model).items(), variants(renamed(model)).values(), strict=True):
        assert [without_names(run.layer.ops) for run in plain.runs] == [without_names(run.layer.ops) for run in other.runs], which
        assert [without_names(run.layer.weights) for run in plain.runs] == [without_names(run.layer.weights) for run in other.runs], which
        for a, b in zip(plain.runs, other.runs, strict=True):
            for mode in RECOMPUTE_MODULES:
                assert without_names(again(a.layer, mode, fused_norms=True)) == without_names(again(b.layer, mode, fused_norms=True))
            assert [without_names(tiled(a.layer, one)) for one in tiles] == [without_names(tiled(b.layer, one)) for one in tiles]


def test_experts_are_told_apart_by_their_roles() -> None:
    layer = next(run.layer for run in model_of("qwen3_next_80b_a3b").runs if run.layer.kind == "experts_decoder")
    assert [op.role for op in routed_experts(layer)] == ["routed_fc1", "routed_activation", "routed_fc2"]
    assert [op.role for op in shared_experts(layer)] == ["shared_fc1", "shared_activation", "shared_fc2"]
    inside = [op.role for op in layer.ops if op.role in FEED_FORWARD]
    assert inside[:2] == ["router", "permute"]
    assert set(inside[2:]) == ROUTED | SHARED


def test_a_gate_and_a_convolution_are_no_norms() -> None:
    """Under transformers' RMSNorm they were priced as one, because of how their first saved tensor is called."""
    kinds = {run.layer.kind: run.layer for run in hugging_face(model_of("qwen3_next_80b_a3b")).runs}
    moved = {op.name: op.moved for layer in kinds.values() for op in layer.ops if op.__struct_config__.tag == "pointwise" and op.elements}
    assert moved["self_attention.output_gate"] == 6.0
    assert moved["self_attention.conv1d"] == 4.0
    assert moved["input_layernorm"] == 36.0


def test_the_loss_of_a_recorded_model_is_what_follows_its_logits() -> None:
    head = model_of("vit_tiny").runs[-1].layer
    roles = [op.role for op in head.ops]
    assert "loss" in roles
    after = roles[roles.index("loss") :]
    assert {role for role, op in zip(after, head.ops[roles.index("loss") :], strict=True) if "moved" in op.__struct_fields__} == {"loss"}
