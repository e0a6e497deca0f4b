"""What of a layer Megatron takes to host memory until backward needs it, module by module (--offload-modules)."""

from __future__ import annotations

from typing import Any, Final

from msgspec.structs import replace

from orchestrator.errors import InputError
from orchestrator.model.ops import ROUTED
from orchestrator.model.spec import LayerSpec, Op, Saved

MODULES: Final = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act")
"""Megatron's names (core/transformer/transformer_config.py:894), in the order of a layer."""
OF_EXPERTS: Final = frozenset({"expert_fc1", "moe_act"})
LEAST_ELEMENTS: Final = 1024 * 1024
"""Elements of the smallest tensor that goes (transformer_config.py:906, min_offloaded_tensor_size)."""
BY_ROLE: Final = {"core_attention": "core_attn", "projection": "attn_proj", "routed_fc1": "expert_fc1", "routed_activation": "moe_act"}


def read_modules(name: str, text: Any) -> str | None:
    """The modules of "moe_act+core_attn" in the order of a layer; None for no text. Raises InputError for a name that Megatron has not.

    >>> read_modules("pin.offload_modules", "moe_act+core_attn")
    'core_attn+moe_act'
    """
    given = [part.strip() for part in text.split("+")] if isinstance(text, str) else [str(part) for part in text or ()]
    for module in given:
        if module not in MODULES:
            raise InputError(name, text, f"{module!r} is no module that Megatron offloads", MODULES)
    return "+".join(module for module in MODULES if module in given) or None


def _modules(layer: LayerSpec) -> list[str | None]:
    """The module of each operation of a layer, under which Megatron takes what it saves; None: under none.

    A norm that is part of the linear behind it is that linear's: Transformer Engine's, but before latent attention and before experts
    (models/gpt/gpt_layer_specs.py), where it is a module of its own. All on the way to queries, keys and values is `qkv_linear`
    (transformer/attention.py:980, multi_latent_attention.py:246).
    """
    roles = [op.role for op in layer.ops]
    if "core_attention" not in roles:  # state spaces and delta rules, which have no such modules
        return [BY_ROLE.get(role) or ("mlp_norm" if role == "mlp_norm" and ROUTED & {*roles} else None) for role in roles]
    attention, latent = roles.index("core_attention"), "key_value_up" in roles
    found: list[str | None] = []
    for place, role in enumerate(roles):
        if role == "input_norm":
            found.append("attn_norm" if latent else "qkv_linear")
        elif role == "mlp_norm":
            found.append("mlp_norm" if ROUTED & {*roles} else None)
        else:
            found.append("qkv_linear" if place < attention else BY_ROLE.get(role))
    return found


def offloaded(layer: LayerSpec, modules: str, tp: int, cp: int, *, sequence_parallel: bool, micro_batch_size: int) -> LayerSpec:
    """The layer with those operations alone of which tensors go to host memory under `modules`, and no other of their tensors."""
    named = modules.split("+")

    def goes(tensor: Saved) -> bool:
        elements = tensor.local_elements(tp, sequence_parallel=sequence_parallel, cp=cp)
        return not tensor.quadratic and micro_batch_size * elements >= LEAST_ELEMENTS

    kept: list[Op] = []
    for op, module in zip(layer.ops, _modules(layer), strict=True):
        if module in named and (saves := tuple(tensor for tensor in op.saves if goes(tensor))):
            kept.append(replace(op, saves=saves))
    return replace(layer, ops=tuple(kept))


def without_use(layers: tuple[LayerSpec, ...], modules: str) -> str:
    """The first of these modules that no layer has, or ""."""
    had = {module for layer in layers for op, module in zip(layer.ops, _modules(layer), strict=True) if op.saves}
    return next((module for module in modules.split("+") if module not in had), "")
