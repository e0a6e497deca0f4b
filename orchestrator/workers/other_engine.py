"""A checkpoint that another engine wrote, read into this one's layout: weights, and Adam's moments where this engine's optimizer can be
given them.

What differs is where a checkpoint keeps a tensor and what it calls it. megatron-core writes torch's distributed checkpoints, the DeepSpeed
engines write shards by place (parts.py); transformers' models have other names than megatron-core's. The moments of a weight are
arranged as the weight is, so that the table between the names (hf_weights.py) is good for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from orchestrator.errors import InputError
from orchestrator.model.spec import Architecture
from orchestrator.workers.checkpoint import Saved
from orchestrator.workers.hf_files import Rows
from orchestrator.workers.hf_weights import EXPERTS, LAYERS, Piece, assemble, pieces_by_name, sources
from orchestrator.workers.parts import STATES, WEIGHT, Parts, Place, Whole

Names = Literal["transformers", "megatron_core"]
"""The program whose names a checkpoint's tensors have."""
EMBEDDING = "embedding.word_embeddings.weight"
"""A tensor of megatron-core's that every model has."""
METADATA = ".metadata"
"""The file of a torch distributed checkpoint that says what it holds."""
MASTERS = ("optimizer.state.param.", "optimizer.state.fp32_param.", "")
"""What the names of master weights begin with in a checkpoint of `megatron`: with the distributed optimizer, with the plain one, and in
fp32, where the weights are their own (optimizer_formats.py)."""
MOMENT = "optimizer.state.{}."


class Reader(Protocol):
    """Tensors by their places in the whole model."""

    def of(self, kind: str, place: Place) -> torch.Tensor:
        """This shard of a weight, or of one of its moments (`kind`)."""
        ...


def reader(saved: Saved, architecture: Architecture, names: Names) -> Reader:
    """A checkpoint that another engine wrote, under these names. Raises InputError for one that no other layout can read."""
    found: DistributedParts | Parts
    if (saved.folder / METADATA).is_file():
        found = DistributedParts(saved.folder)
    elif (saved.folder / STATES).is_dir():
        found = Parts(saved.folder / STATES)
    else:
        why = f"was written by engine={saved.layout['engine']} for its own layout alone (stage 0 in 16 bits, fp16, sgd)"
        raise InputError("train.resume", saved.folder, why)
    if ("megatron_core" if (WEIGHT, EMBEDDING, ()) in found.shapes else "transformers") == names:
        return found
    return NamedByMegatron(found, architecture) if names == "megatron_core" else NamedByHuggingFace(found, architecture)


class NamedByMegatron:
    """Tensors of Hugging Face's names under megatron-core's."""

    def __init__(self, parts: Parts | DistributedParts, architecture: Architecture) -> None:
        self.parts, self.architecture = parts, architecture

    def of(self, kind: str, place: Place) -> torch.Tensor:
        target = torch.zeros(place.shape)
        first, last = place.offset[0], place.offset[0] + place.shape[0]
        at = 0
        for rows in sources(self.architecture, place.key, place.index, place.global_shape[0]):
            begin, end = max(first, at), min(last, at + rows.count)
            if begin < end:
                target[begin - first : end - first] = self._read(kind, rows, rows.begin + begin - at, end - begin, place)
            at += rows.count
        return target

    def _read(self, kind: str, rows: Rows, begin: int, count: int, place: Place) -> torch.Tensor:
        offset, shape = (begin, *place.offset[1:]), (count, *place.shape[1:])
        if rows.transposed:
            return self.parts.read(kind, rows.name, (), offset[::-1], shape[::-1]).T
        return self.parts.read(kind, rows.name, (), offset, shape)


class NamedByHuggingFace:
    """Tensors of megatron-core's names under Hugging Face's."""

    def __init__(self, parts: Parts | DistributedParts, architecture: Architecture) -> None:
        self.parts = parts
        self.pieces: dict[str, list[Piece]] = pieces_by_name(architecture, parts.shapes)

    def of(self, kind: str, place: Place) -> torch.Tensor:
        if place.key not in self.pieces:
            raise InputError("train.resume", place.key, "is no weight of the checkpoint's model")
        whole = assemble(self.pieces[place.key], self.parts, kind)
        target = torch.zeros(place.shape)  # rows beyond a vocabulary that was padded to less are zero
        box = [slice(begin, min(begin + size, has)) for begin, size, has in zip(place.offset, place.shape, whole.shape, strict=True)]
        found = whole[tuple(box)]
        target[tuple(slice(0, size) for size in found.shape)] = found
        return target


class DistributedParts:
    """What the engine `megatron` wrote: one torch distributed checkpoint, read box by box. Like `Parts`."""

    def __init__(self, folder: Path) -> None:
        self.files = FileSystemReader(folder)
        self.metadata = self.files.read_metadata()
        stored = self.metadata.state_dict_metadata.items()
        self.tensors = {name: found for name, found in stored if isinstance(found, TensorStorageMetadata)}
        self.files.set_up_storage_reader(self.metadata, is_coordinator=True)
        self.shapes: dict[Whole, tuple[int, ...]] = {}
        """Global shapes of the checkpoint's tensors."""
        for name, found in self.tensors.items():
            if not name.startswith("optimizer."):
                lead = _lead(name)
                for index in product(*map(range, found.size[:lead])):
                    self.shapes[WEIGHT, name, index] = tuple(found.size[lead:])

    def of(self, kind: str, place: Place) -> torch.Tensor:
        return self.read(kind, place.key, place.index, place.offset, place.shape)

    def read(self, kind: str, key: str, index: tuple[int, ...], offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """This box of a global tensor, in fp32; zeros beyond its end."""
        prefixes = MASTERS if kind == WEIGHT else (MOMENT.format(kind),)
        name = next((prefix + key for prefix in prefixes if prefix + key in self.tensors), None)
        if name is None:
            raise RuntimeError(f"the checkpoint has no {kind} of {key}")
        found = self.tensors[name]
        has = [min(size, max(0, whole - begin)) for begin, size, whole in zip(offset, shape, found.size[len(index) :], strict=True)]
        target = torch.zeros(tuple(shape))
        if all(has):
            box = torch.empty((*(1 for _ in index), *has), dtype=found.properties.dtype)
            chunk = ChunkStorageMetadata(offsets=torch.Size((*index, *offset)), sizes=box.shape)
            items = create_read_items_for_chunk_list(name, found, [chunk])
            self.files.read_data(LoadPlan(items), _Into(box)).wait()
            target[tuple(slice(0, size) for size in has)] = box.view(has).float()
        return target


def _lead(name: str) -> int:
    """How many dimensions of megatron-core's tensor say its place in stacks: the layer, where that is not in the name, and the expert.

    >>> _lead("decoder.layers.mlp.experts.experts.linear_fc2.weight"), _lead("decoder.layers.5.mlp.linear_fc2.weight"), _lead("x.weight")
    (2, 0, 0)
    """
    prefix = next((prefix for prefix in LAYERS if name.startswith(prefix)), None)
    if prefix is None:
        return 0
    short = name.removeprefix(prefix)
    return (not short.partition(".")[0].isdigit()) + (EXPERTS in short)


class _Into(DefaultLoadPlanner):
    """Everything that is read goes into one tensor."""

    def __init__(self, target: torch.Tensor) -> None:
        super().__init__()
        self.target = target

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.target
