"""Tensors by their places in the whole, as torch's distributed checkpoints: each rank writes some shards, and any rank of any layout reads
what it needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from orchestrator.errors import InputError
from orchestrator.workers.saving import Snapshot
from orchestrator.workers.unpickling import METADATA

WEIGHT = "weight"
"""The kind of tensor that is a parameter itself; optimizer states have other kinds."""
Whole = tuple[str, str, tuple[int, ...]]
"""A global tensor: kind, key, place in stacks of equal tensors."""


@dataclass(frozen=True)
class Place:
    """A shard of a global tensor as a range of a parameter. Taken when the model is built: later an engine may cut, move or join what
    parameters hold. `index` is the place in stacks of equal tensors: the layer, and the expert in it; () outside of stacks."""

    key: str
    index: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    parameter: torch.Tensor
    start: int
    """Index of the shard's first element in the flat parameter."""
    first: bool
    """Whether this is the first copy, those of data-parallel ranks aside."""
    main: bool
    """Whether it is the first of all copies."""
    divided: int = 1
    """Neighbours among the data-parallel ranks that have different parts of the tensor: expert parallelism folds over them."""

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """This shard of the parameter's value, or of a tensor of its size."""
        return whole.reshape(-1)[self.start : self.start + prod(self.shape)].view(self.shape)


def name_of(kind: str, key: str, index: Sequence[int]) -> str:
    """What a checkpoint calls a global tensor.

    >>> name_of("exp_avg", "decoder.layers.mlp.linear_fc2.weight", (3,))
    'exp_avg/decoder.layers.mlp.linear_fc2.weight/3'
    """
    return "/".join((kind, key, *map(str, index)))


class _Shards(DefaultSavePlanner):
    """Says which shards this rank writes, and gives them."""

    def __init__(self, found: Iterable[tuple[Place, str, torch.Tensor]]) -> None:
        super().__init__(flatten_state_dict=False)
        self.set_up_planner({}, is_coordinator=dist.get_rank() == 0)
        self.shards: dict[MetadataIndex, torch.Tensor] = {}
        items = []
        for place, kind, shard in found:
            index = MetadataIndex(name_of(kind, place.key, place.index), place.offset)
            self.shards[index] = shard = shard.detach().to("cpu", copy=True).contiguous()
            chunk = ChunkStorageMetadata(torch.Size(place.offset), torch.Size(place.shape))
            data = TensorWriteData(chunk, TensorProperties.create_from_tensor(shard), torch.Size(place.global_shape))
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self.shards[index]


def snapshot(found: Iterable[tuple[Place, str, torch.Tensor]], folder: Path) -> Snapshot:
    """What is left to do to write each (place, kind, shard), of which it has copies, into the folder. All ranks call this."""
    planner, writer, first = _Shards(found), FileSystemWriter(folder), dist.get_rank() == 0
    writer.set_up_storage_writer(first)
    plans: Any = [None] * dist.get_world_size() if first else None
    dist.gather_object(writer.prepare_local_plan(planner.plan), plans)
    metadata: Any = None
    if first:
        plans, metadata = planner.create_global_plan(plans)
        plans = writer.prepare_global_plan(plans)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, plans)
    written: list[Any] = []

    def write() -> None:
        written.extend(writer.write_data(mine[0], planner).wait())

    def finish() -> None:
        results: Any = [None] * dist.get_world_size() if first else None
        dist.gather_object(written, results)
        if first:
            writer.finish(metadata, results)

    return Snapshot(write=write, finish=finish)


class Parts:
    """What all ranks wrote into a folder."""

    def __init__(self, folder: Path) -> None:
        """Raises InputError where they are not a torch distributed checkpoint, as releases before wrote them."""
        if not (folder / METADATA).is_file():
            why = f"has no {METADATA}: this release reads torch's distributed checkpoints; take that run's weights (model.export_to= there)"
            raise InputError("train.resume", folder, why)
        self.files = FileSystemReader(folder)
        metadata = self.files.read_metadata()
        self.files.set_up_storage_reader(metadata, is_coordinator=True)
        self.tensors: dict[str, TensorStorageMetadata] = metadata.state_dict_metadata
        self.shapes: dict[Whole, tuple[int, ...]] = {}
        """Global shapes of the checkpoint's tensors."""
        for name, found in self.tensors.items():
            kind, key, *index = name.split("/")
            self.shapes[kind, key, tuple(map(int, index))] = tuple(found.size)

    def dtype(self, whole: Whole) -> torch.dtype:
        return self.tensors[name_of(*whole)].properties.dtype

    def of(self, kind: str, place: Place) -> torch.Tensor:
        """A rank's shard of a weight or of its moments, as `read` finds it."""
        return self.read(kind, place.key, place.index, place.offset, place.shape)

    def read(self, kind: str, key: str, index: tuple[int, ...], offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """This box of a global tensor; zeros beyond its end, where a vocabulary was padded to less. Raises KeyError where it was not
        written."""
        name = name_of(kind, key, index)
        found = self.tensors[name]
        has = [min(size, max(0, whole - begin)) for begin, size, whole in zip(offset, shape, found.size, strict=True)]
        target = torch.zeros(tuple(shape), dtype=found.properties.dtype)
        if all(has):
            box = torch.empty(has, dtype=found.properties.dtype)
            items = create_read_items_for_chunk_list(name, found, [ChunkStorageMetadata(torch.Size(offset), box.shape)])
            self.files.read_data(LoadPlan(items), _Into(box)).wait()
            target[tuple(slice(0, size) for size in has)] = box
        return target


class _Into(DefaultLoadPlanner):
    """Everything that is read goes into one tensor."""

    def __init__(self, target: torch.Tensor) -> None:
        super().__init__()
        self.target = target

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.target
