"""Hugging Face checkpoints and Hugging Face's own models under DeepSpeed: the names are the same, AutoTP and ZeRO-3 cut the tensors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from orchestrator.plan import Plan
from orchestrator.workers import auto_ep, hf_experts, hugging_face, lora
from orchestrator.workers.groups import REPLICAS, Groups
from orchestrator.workers.hf_files import CONFIG, Checkpoint, write_config, write_files
from orchestrator.workers.parts import Place

ACTIVATIONS = ("activation_function", "hidden_act", "feed_forward_proj")
"""The config fields that name an activation. The planner knows one GELU, transformers several."""


def match_activation(fields: dict[str, Any], folder: Path) -> None:
    """Take the checkpoint's own activation in engine.json's "model"."""
    before = json.loads((folder / CONFIG).read_text())
    for name in ACTIVATIONS:
        if name in before and name in fields["config"]:
            fields["config"][name] = before[name]


def load(model: torch.nn.Module, folder: Path) -> None:
    """Fill every parameter of a whole or partitioned model but LoRA's adapters in place, before AutoTP cuts it: a rank reads the rows that
    its part touches.
    Raises InputError for a tensor that is missing or of another shape."""
    checkpoint = Checkpoint(folder)
    with torch.no_grad():
        for full_name, parameter in model.named_parameters():
            name, shape = lora.base_name(full_name), tuple(getattr(parameter, "ds_shape", parameter.shape))
            if lora.is_adapter(name):
                continue
            for values, start in hugging_face.local_ranges(parameter):
                hf_experts.read(checkpoint, name, shape, hf_experts.is_mixtral(model), values, start)


def places(model: torch.nn.Module, groups: Groups, fields: dict[str, Any]) -> list[Place]:
    """The place in the whole model of every parameter that is trained, after AutoTP has cut it."""
    shapes = _whole_shapes(fields)
    tp_rank, replica = groups.rank("tp"), groups.rank(REPLICAS)
    found, experts = [], auto_ep.parameters(model)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if name in experts:
            found.append(auto_ep.place(experts[name], parameter, shapes, replica))
            continue
        shape, whole = tuple(getattr(parameter, "ds_shape", parameter.shape)), shapes[name]
        offset = tuple(0 if here == there else tp_rank * here for here, there in zip(shape, whole, strict=True))
        first = shape != whole or tp_rank == 0
        about = {"key": name, "index": (), "offset": offset, "shape": shape, "global_shape": whole}
        found.append(Place(parameter=parameter, start=0, first=first, main=first and replica == 0, **about))
    return found


def _whole_shapes(fields: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of each weight of the model that nothing has cut, by name."""
    with torch.device("meta"):
        uncut = hugging_face.build_model(fields | {"gradient_checkpointing": False})
    return {name: tuple(parameter.shape) for name, parameter in uncut.named_parameters()}


def export(model: torch.nn.Module, plan: Plan, groups: Groups, folder: Path, fields: dict[str, Any]) -> None:
    """Write a Hugging Face checkpoint into `folder`; of a model with LoRA peft's adapter, or on request the sum of both. All ranks call
    this; rank 0 holds one file's tensors at a time. `fields`: engine.json's "model"."""
    adapted = fields.get("lora")
    if adapted is None:
        named = whole_tensors(model, plan, groups, fields)
    else:
        join = partial(_whole, _whole_shapes(fields), groups)
        named = (lora.merged if adapted["merge"] else lora.adapters)(model, partial(_gathered, plan), join)
    if dist.get_rank() == 0 and adapted is not None and not adapted["merge"]:
        lora.write_adapters(named, adapted, plan.run.init_from, folder)
    elif dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        dtype = write_files(named, folder)
        write_config(fields, fields["config"], folder, dtype, plan.run)
    else:
        for _ in named:
            pass
    dist.barrier()


def _gathered(plan: Plan, parameters: list[torch.nn.Parameter]) -> Any:
    """A context in which these parameters are whole."""
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters, enabled=plan.zero_stage == 3)


def whole_tensors(model: torch.nn.Module, plan: Plan, groups: Groups, fields: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor on the CPU) one after the other. Collectives over the data-parallel group at stage 3 and over tp: all ranks go
    through it together."""
    shapes, experts, mixtral = _whole_shapes(fields), auto_ep.parameters(model), hf_experts.is_mixtral(model)
    for name, parameter in model.named_parameters():
        with torch.no_grad(), _gathered(plan, [parameter]):
            tensor = parameter.detach().clone()
        if name in experts:
            yield from ((stored, part.cpu()) for stored, part in hf_experts.of_ranks(experts[name], tensor, mixtral))
        else:
            yield from hf_experts.split(name, _whole(shapes, groups, name, tensor).cpu(), mixtral)
    for name, module in hf_experts.biases(model).items():
        yield name, getattr(module, hf_experts.BIAS).detach().float().cpu()


def _whole(shapes: dict[str, tuple[int, ...]], groups: Groups, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A named tensor with the other tensor-parallel ranks' parts."""
    cut = [dim for dim, size in enumerate(shapes[name]) if tensor.shape[dim] != size]
    return _joined(tensor.contiguous(), cut[0], groups) if cut else tensor


def _joined(tensor: torch.Tensor, dim: int, groups: Groups) -> torch.Tensor:
    """The tensor-parallel ranks' equal parts along `dim`."""
    parts = [torch.empty_like(tensor) for _ in range(groups.size("tp"))]
    dist.all_gather(parts, tensor, group=groups.group("tp"))
    return torch.cat(parts, dim=dim)
