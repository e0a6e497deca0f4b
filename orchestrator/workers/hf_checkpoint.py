"""Models of transformers under DeepSpeed: where each weight stands in the whole model, which AutoTP, AutoEP and ZeRO-3 cut, and the whole
model as a checkpoint of transformers'."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from orchestrator.plan import Plan, RunSettings
from orchestrator.workers import auto_ep, hugging_face, lora
from orchestrator.workers.checkpoint import Saved
from orchestrator.workers.deepspeed_trainer import DeepSpeedTrainer
from orchestrator.workers.groups import REPLICAS, Groups
from orchestrator.workers.hf_files import copy_tokenizer, special_tokens
from orchestrator.workers.parts import Place, let_others_read
from orchestrator.workers.saving import Snapshot

BIAS: Final = "e_score_correction_bias"
"""The end of the name of the buffer by which a router balances its experts' load (DeepSeek-V3, GLM-4.5)."""
BIASES: Final = "biases.pt"
"""The file in a checkpoint of a run that has the routers' biases, which are no parameters."""


def places(model: torch.nn.Module, groups: Groups, fields: dict[str, Any]) -> list[Place]:
    """The place in the whole model of every parameter, after AutoTP has cut it."""
    shapes = {name: tuple(parameter.shape) for name, parameter in uncut(fields).named_parameters()}
    tp_rank, replica = groups.rank("tp"), groups.rank(REPLICAS)
    found, experts = [], auto_ep.parameters(model)
    for name, parameter in model.named_parameters():
        if name in experts:
            found.append(auto_ep.place(experts[name], parameter, shapes, replica))
            continue
        shape, whole = tuple(getattr(parameter, "ds_shape", parameter.shape)), shapes[name]
        offset = tuple(0 if here == there else tp_rank * here for here, there in zip(shape, whole, strict=True))
        first = shape != whole or tp_rank == 0
        about = {"key": name, "index": (), "offset": offset, "shape": shape, "global_shape": whole}
        found.append(Place(parameter=parameter, start=0, first=first, main=first and replica == 0, **about))
    return found


def uncut(fields: dict[str, Any]) -> Any:
    """The model of engine.json's "model" that nothing has cut, on the meta device."""
    with torch.device("meta"):
        return hugging_face.build_model(fields | {"gradient_checkpointing": False})


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


class HuggingFaceStates(DeepSpeedTrainer):
    """The checkpoints of one rank of a Hugging Face model: what each engine's have, and the routers' biases, which don't move: a run that
    goes on may not begin with the checkpoint that they are from."""

    names = "transformers"

    def save(self, folder: Path, step: int) -> None:
        super().save(folder, step)
        self._save_biases(folder)

    def snapshot(self, folder: Path, step: int) -> Snapshot:
        found = super().snapshot(folder, step)
        self._save_biases(folder)
        return found

    def _save_biases(self, folder: Path) -> None:
        biases = {name: value.cpu() for name, value in hugging_face.float_buffers(self.model).items() if name.endswith(BIAS)}
        if biases and dist.get_rank() == 0:
            torch.save(biases, folder / BIASES)

    def load(self, saved: Saved) -> None:
        super().load(saved)
        if (path := saved.folder / BIASES).is_file():
            hugging_face.restore(self.model, torch.load(path, weights_only=True))

    def export(self, folder: Path) -> None:
        """Writes a Hugging Face checkpoint; of a model with LoRA peft's adapter, or on request the sum of both. Rank 0 has the whole model
        in host memory."""
        fields, run, model = self.engine_fields["model"], self.plan.run, self.model
        state, adapted = whole_state(model, self.places, self.plan, self.groups), fields.get("lora")
        if dist.get_rank() == 0 and adapted and not adapted["merge"]:
            lora.write(state, adapted, run.init_from, folder)
        elif dist.get_rank() == 0:
            plain = {name: value for name, value in fields.items() if name != "lora"} | {"config": fields["config"] | special_tokens(run)}
            write(uncut(plain), lora.merged(model, state) if adapted else state, model, folder, run)
        dist.barrier()
