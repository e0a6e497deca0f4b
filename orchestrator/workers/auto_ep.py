"""DeepSpeed's AutoEP: it takes the place of transformers' layers of experts, of which each rank then has its part, under names of its own.

deepspeed/module_inject/auto_ep_layer.py and deepspeed/moe/ep_repack.py, version 0.19.8.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from orchestrator.errors import InputError
from orchestrator.plan import Plan
from orchestrator.workers.parts import Place

LAYER = "AutoEPMoELayer"
ROUTER = "router.gate.weight"


class Source(NamedTuple):
    """Where one of AutoEP's parameters stands in transformers' model: the tensor's name, and how many of its halves of rows come first
    (transformers has gate and up in one). `layer`: AutoEP's; None: the router, which all ranks have whole."""

    name: str
    half: int = 0
    layer: Any = None


@contextlib.contextmanager
def prepared(plan: Plan) -> Iterator[None]:
    """Around DeepSpeed's initialisation with an optimizer that it has not made. It takes experts out of the groups of its own optimizers
    alone (runtime/engine.py:2330), and asserts that this was done (runtime/zero/stage_1_and_2.py:872)."""
    from deepspeed.moe.utils import configure_moe_param_groups
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    record_by_class()
    configure, register = DeepSpeedEngine._configure_optimizer, UlyssesSPAttentionHF.register_with_transformers

    def configured(engine: Any, optimizer: Any, parameters: Any) -> Any:
        optimizer.param_groups[:] = configure_moe_param_groups(optimizer.param_groups)
        return configure(engine, optimizer, parameters)

    DeepSpeedEngine._configure_optimizer = configured
    if plan.cp > 1:
        UlyssesSPAttentionHF.register_with_transformers = lambda **words: BesideUlysses(register(**words))
    try:
        yield
    finally:
        DeepSpeedEngine._configure_optimizer, UlyssesSPAttentionHF.register_with_transformers = configure, register


def record_by_class() -> None:
    """What transformers 5.23 lacks for AutoEP: since then its registry of what can be recorded is asked by model
    (utils/output_capturing.py:36), and AutoEP asks by the model's class as a string, with a default (auto_ep_presets/base.py:325)."""
    from transformers.utils import output_capturing

    def key(asked: Any) -> str:
        return asked if isinstance(asked, str) else str(asked.__class__)

    if (registry := getattr(output_capturing, "_CanRecordRegistry", None)) is not None:
        registry.get = lambda self, asked, default=None: dict.get(self, key(asked)) or ({} if default is None else default)
        registry.__setitem__ = lambda self, asked, value: dict.__setitem__(self, key(asked), value)


class BesideUlysses:
    """Ulysses' groups as AutoEP may take them: what they call the size of model parallelism is that of sequences
    (runtime/sequence_parallel/parallel_state_sp.py:103), which AutoEP would take for tensor parallelism's (runtime/engine.py:835)."""

    def __init__(self, groups: Any) -> None:
        self._groups = groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._groups, name)

    def get_tensor_model_parallel_world_size(self) -> int:
        return 1

    def get_pipeline_model_parallel_world_size(self) -> int:
        return 1


def layers(model: torch.nn.Module) -> dict[str, Any]:
    """AutoEP's layers of a model, by name."""
    return {name: module for name, module in model.named_modules() if type(module).__name__ == LAYER}


def require_layers(model: torch.nn.Module, plan: Plan) -> None:
    """Raises InputError where AutoEP left a layer of experts as it was, which it says in a warning alone."""
    from orchestrator.model.parts.experts import Experts

    wanted = sum(isinstance(layer.feed_forward, Experts) for layer in plan.model.each_layer())
    found = layers(model)
    if len(found) != wanted or any(layer.ep_size != plan.ep for layer in found.values()):
        raise InputError("pin.ep", plan.ep, f"DeepSpeed's AutoEP took {len(found)} of the model's {wanted} layers of experts")


def parameters(model: torch.nn.Module) -> dict[str, Source]:
    """AutoEP's parameters by name; {} for a model that it did not touch."""
    found: dict[str, Source] = {}
    for name, layer in layers(model).items():
        found[f"{name}.{ROUTER}"] = Source(f"{name}.gate.weight")
        found[f"{name}.experts.w1"] = Source(f"{name}.experts.gate_up_proj", 0, layer)
        found[f"{name}.experts.w3"] = Source(f"{name}.experts.gate_up_proj", 1, layer)
        found[f"{name}.experts.w2"] = Source(f"{name}.experts.down_proj", 0, layer)
    return found


def place(source: Source, parameter: torch.nn.Parameter, shapes: Mapping[str, tuple[int, ...]], replica: int) -> Place:
    """The place of AutoEP's parameter in transformers' tensor. `replica`: this rank among those that have the same of what experts are no
    part of."""
    shape, whole = tuple(getattr(parameter, "ds_shape", parameter.shape)), shapes[source.name]
    offset: tuple[int, ...] = (0,) * len(whole)
    divided = 1
    if source.layer is not None:
        offset, divided = (source.layer.ep_rank * shape[0], source.half * shape[1], 0), source.layer.ep_size
    return Place(
        key=source.name, index=(), offset=offset, shape=shape, global_shape=whole,
        parameter=parameter, start=0, first=True, main=replica // divided == 0, divided=divided,
    )  # fmt: skip
