"""Models of transformers under DeepSpeed, which AutoTP, AutoEP and ZeRO-3 cut: the whole model as a checkpoint of transformers'."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from orchestrator.plan import Plan, RunSettings
from orchestrator.workers import auto_ep
from orchestrator.workers.groups import Groups
from orchestrator.workers.hf_files import copy_tokenizer, let_others_read
from orchestrator.workers.parts import Place


def whole_state(model: torch.nn.Module, places: Sequence[Place], plan: Plan, groups: Groups) -> dict[str, torch.Tensor]:
    """On rank 0 every weight whole, by its name in transformers, in host memory; {} elsewhere. All ranks call this."""
    import deepspeed

    layers = {id(p): layer for layer in auto_ep.layers(model).values() for p in layer.experts.parameters()}
    by_parameter: dict[int, list[Place]] = {}
    for place in places:
        by_parameter.setdefault(id(place.parameter), []).append(place)
    found: dict[str, torch.Tensor] = {}
    for mine in by_parameter.values():
        parameter: Any = mine[0].parameter
        with torch.no_grad(), deepspeed.zero.GatheredParameters([parameter], enabled=plan.zero_stage == 3):
            parts = [parameter.detach().clone()]
        layer, shape = layers.get(id(parameter)), parts[0].shape
        cut = [0] if layer is not None else [dim for dim, size in enumerate(mine[0].global_shape) if shape[dim] != size]
        if cut:
            group = groups.group("tp") if layer is None else layer.ep_group
            mine_alone, parts = parts[0].contiguous(), [torch.empty_like(parts[0]) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, mine_alone, group=group)
        for place in mine if dist.get_rank() == 0 else ():  # the first of its group
            target = found.setdefault(place.key, torch.empty(place.global_shape, dtype=parts[0].dtype))
            for number, part in enumerate(parts):
                begin = [at + number * size * (dim in cut) for dim, (at, size) in enumerate(zip(place.offset, place.shape, strict=True))]
                target[tuple(slice(at, at + size) for at, size in zip(begin, place.shape, strict=True))] = place.of(part)
    return found


def write(whole: Any, state: dict[str, torch.Tensor], model: torch.nn.Module, folder: Path, run: RunSettings) -> None:
    """Writes these weights and the buffers of `model` as transformers does for `whole`, the same model that nothing has cut, and the
    tokenizer's files."""
    buffers = {name.replace(".router.", ".gate."): buffer.detach().cpu() for name, buffer in model.named_buffers()}
    state = state | {name: buffer for name, buffer in buffers.items() if name in whole.state_dict()}
    whole.save_pretrained(folder, state_dict=state)
    for path in folder.glob("*.safetensors"):
        let_others_read(path)
    for source in filter(None, (run.tokenizer, run.init_from)):
        copy_tokenizer(Path(source), folder)
