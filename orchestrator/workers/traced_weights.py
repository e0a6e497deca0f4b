"""Hugging Face checkpoints of models that were recorded from their own code: names and shapes are their modules' own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from orchestrator.errors import InputError
from orchestrator.model.traced import Traced
from orchestrator.plan import Plan
from orchestrator.tracing import build
from orchestrator.workers import hugging_face
from orchestrator.workers.groups import Groups
from orchestrator.workers.hf_files import KEY, Checkpoint, Rows, copy_tokenizer, save_config, write_files
from orchestrator.workers.parts import Place

POOLER = "pooler"
"""A part of the names of parameters that a base model has and a checkpoint of its language model lacks: they stay as the seed made them, as
in transformers."""


def load(model: nn.Module, folder: Path) -> tuple[list[str], list[str]]:
    """Fill every parameter and buffer that the checkpoint has, in place, whole or in ZeRO-3's partitions, before AutoTP cuts. Returns the
    parameters that stay as the seed made them, which are those of a head, and the checkpoint's tensors that the model has not. Raises
    InputError for a tensor of another shape, and for one that is missing below the head."""
    checkpoint, below = Checkpoint(folder), f"{getattr(model, 'base_model_prefix', '')}."
    new, used = [], set()
    buffers = ((name, buffer) for name, buffer in _kept_buffers(model) if checkpoint.found(name) is not None)
    with torch.no_grad():
        for name, parameter in (*model.named_parameters(), *buffers):
            found = checkpoint.found(name)
            if found is None:
                headless = not any(each.startswith(below) for each, _ in model.named_parameters())
                if POOLER not in name and (headless or name.startswith(below)):
                    raise InputError(KEY, folder, f"has no tensor {name}")
                new.append(name)
                continue
            used.add(found)
            shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
            if not shape:
                parameter.copy_(checkpoint.whole(name))
                continue
            width = prod(shape[1:])
            for values, start in hugging_face.local_ranges(parameter):
                first, last = start // width, -(-(start + values.numel()) // width)
                if first < last:
                    rows = checkpoint.read(Rows(name, first, last), tuple(slice(0, size) for size in shape[1:]), shape[1:])
                    begin = start - first * width
                    values.copy_(rows.reshape(-1)[begin : begin + values.numel()])
    return new, sorted(checkpoint.files.keys() - used)


def _kept_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that checkpoints have (statistics of batch norms), by name."""
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def export(model: nn.Module, places: Sequence[Place], plan: Plan, traced: Traced, groups: Groups, folder: Path) -> None:
    """Write a checkpoint that transformers' own class loads. All ranks call this; rank 0 holds one file's tensors at a time."""
    named = _whole(model, places, plan, groups)
    if dist.get_rank():
        for _ in named:
            pass
    else:
        folder.mkdir(parents=True, exist_ok=True)
        dtype = write_files(named, folder)
        source = plan.run.tokenizer or plan.run.init_from
        if source:
            copy_tokenizer(Path(source), folder)
        config = build.config_of(traced.config)
        config.architectures = [traced.model_class]
        config.dtype = str(dtype).removeprefix("torch.")
        save_config(config, folder)
    dist.barrier()


def _whole(model: nn.Module, places: Sequence[Place], plan: Plan, groups: Groups) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor on the CPU) one after the other: gathered from ZeRO-3's partitions and joined from AutoTP's parts."""
    import deepspeed

    of: dict[str, list[Place]] = {}
    for place in places:
        of.setdefault(place.key, []).append(place)
    for name, parameter in model.named_parameters():
        gathered: Any = deepspeed.zero.GatheredParameters([parameter]) if plan.zero_stage == 3 else nullcontext()
        with torch.no_grad(), gathered:
            tensor = parameter.detach().clone()
        yield name, _joined(tensor, of[name], groups).cpu()
    for name, buffer in _kept_buffers(model):
        yield name, buffer.detach().cpu()


def _joined(tensor: torch.Tensor, places: list[Place], groups: Groups) -> torch.Tensor:
    """A parameter as it was before AutoTP cut it: the parts of all tensor-parallel ranks, each at its `places` (one, or several where a
    fused weight was cut in pieces). Every rank of the group calls this and gets the whole."""
    whole = places[0].global_shape
    if tuple(tensor.shape) == whole:
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(groups.size("tp"))]
    dist.all_gather(parts, tensor.contiguous(), group=groups.group("tp"))
    found = tensor.new_empty(whole)
    cut = next(dim for dim, size in enumerate(whole) if tensor.shape[dim] != size)
    for place in places:
        size = place.shape[cut]
        begin = place.offset[cut] - groups.rank("tp") * size
        for rank, part in enumerate(parts):
            found.narrow(cut, begin + rank * size, size).copy_(place.of(part))
    return found
