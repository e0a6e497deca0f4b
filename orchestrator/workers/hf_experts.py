"""Experts as transformers' models and DeepSpeed's AutoEP hold them, all of a layer in one tensor, and as every published checkpoint has
them, one by one."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from orchestrator.workers import auto_ep
from orchestrator.workers.hf_files import Checkpoint, Rows

BIAS = "e_score_correction_bias"
"""The buffer by which a router balances its experts' load (DeepSeek-V3, GLM-4.5)."""
STACKED = {".experts.gate_up_proj": ("gate_proj", "up_proj"), ".experts.down_proj": ("down_proj",)}
"""transformers' tensors of all experts, and what an expert has in a checkpoint, one below the other."""
MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
FILE = "biases.pt"
"""The file in a checkpoint of a run that has the routers' biases, which are no parameters."""


def is_mixtral(model: torch.nn.Module) -> bool:
    """Whether its checkpoints have names of their own (MixtralForCausalLM)."""
    return bool(model.config.model_type == "mixtral")


def stored(name: str, shape: tuple[int, ...], mixtral: bool) -> list[tuple[str, int]]:
    """The tensors of a checkpoint that make up transformers' tensor `name` of this shape, each with its rows, one below the other; the
    last dimension is theirs too.

    >>> stored("model.layers.0.mlp.experts.gate_up_proj", (2, 6, 4), True)[:2]
    [('model.layers.0.block_sparse_moe.experts.0.w1.weight', 3), ('model.layers.0.block_sparse_moe.experts.0.w3.weight', 3)]
    >>> stored("model.layers.0.mlp.experts.down_proj", (2, 4, 3), False)[1]
    ('model.layers.0.mlp.experts.1.down_proj.weight', 4)
    >>> stored("model.norm.weight", (4,), False)
    [('model.norm.weight', 4)]
    """
    suffix = next((suffix for suffix in STACKED if name.endswith(suffix)), None)
    if suffix is None:
        return [(_folder(name) if mixtral else name, shape[0])]
    layer = _folder(name.removesuffix(suffix) + ".") if mixtral else name.removesuffix(suffix) + "."
    kinds = STACKED[suffix]
    words = [MIXTRAL[kind] if mixtral else kind for kind in kinds]
    return [(f"{layer}experts.{expert}.{word}.weight", shape[1] // len(kinds)) for expert in range(shape[0]) for word in words]


def _folder(name: str) -> str:
    return name.replace(".mlp.", ".block_sparse_moe.")


def read(checkpoint: Checkpoint, name: str, shape: tuple[int, ...], mixtral: bool, values: torch.Tensor, start: int) -> None:
    """Fill the flat `values`, which begin at element `start` of transformers' tensor `name` of this shape."""
    parts = stored(name, shape, mixtral)
    inner = shape[1:] if len(parts) == 1 else shape[-1:]
    width, end, at = prod(inner), start + values.numel(), 0
    for stored_name, rows in parts:
        first, last = max(0, start // width - at), min(rows, -(-end // width) - at)
        if first < last and values.numel():
            found = checkpoint.read(Rows(stored_name, first, last), tuple(slice(0, size) for size in inner), tuple(inner)).reshape(-1)
            begin = (at + first) * width
            low, high = max(start, begin), min(end, begin + found.numel())
            values[low - start : high - start].copy_(found[low - begin : high - begin])
        at += rows


def split(name: str, tensor: torch.Tensor, mixtral: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """A whole tensor of transformers' as a checkpoint has it."""
    parts = stored(name, tuple(tensor.shape), mixtral)
    if len(parts) == 1:
        yield parts[0][0], tensor
        return
    rows = tensor.reshape(-1, tensor.shape[-1]).split([count for _, count in parts])
    yield from ((stored_name, part.contiguous()) for (stored_name, _), part in zip(parts, rows, strict=True))


def of_ranks(source: auto_ep.Source, mine: torch.Tensor, mixtral: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """One of AutoEP's parameters, of which this rank has its experts' part, as a checkpoint has it. Collective over the layer's ranks."""
    if source.layer is None:
        yield stored(source.name, tuple(mine.shape), mixtral)[0][0], mine
        return
    parts = [torch.empty_like(mine) for _ in range(source.layer.ep_size)]
    dist.all_gather(parts, mine.contiguous(), group=source.layer.ep_group)
    whole = torch.cat(parts)
    halves = 2 if source.name.endswith("gate_up_proj") else 1
    names = stored(source.name, (whole.shape[0], halves * whole.shape[1], whole.shape[2]), mixtral)[source.half :: halves]
    yield from ((name, expert.contiguous()) for (name, _), expert in zip(names, whole, strict=True))


def biases(model: torch.nn.Module) -> dict[str, Any]:
    """The routers that have one, by its name in a checkpoint."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(getattr(module, BIAS, None), torch.Tensor):
            found[f"{name.removesuffix('router') + 'gate' if name.endswith('.router') else name}.{BIAS}"] = module
    return found


def put(model: torch.nn.Module, values: dict[str, torch.Tensor]) -> None:
    """Puts these biases into the routers, in fp32 whatever the model is in: what they tell apart lies near each other. Raises KeyError."""
    for name, module in biases(model).items():
        before = getattr(module, BIAS)
        setattr(module, BIAS, values[name].to(before.device, torch.float32))


def read_biases(model: torch.nn.Module, folder: Path) -> None:
    """Reads the routers' biases of a Hugging Face checkpoint, once an engine has cast what it casts."""
    found = biases(model)
    if found:
        checkpoint = Checkpoint(folder)
        put(model, {name: checkpoint.read(Rows(name, 0, len(getattr(module, BIAS))), (), ()) for name, module in found.items()})
