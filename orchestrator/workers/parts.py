"""Tensors as shards with their places in the whole, on disk: each rank writes some, and any rank of any layout reads what it needs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from orchestrator.errors import InputError

UMASK = os.umask(0)
os.umask(UMASK)
FILE_BYTES = 4 * 2**30
"""Bytes of one written file, and of what a rank holds in host memory before it writes: as transformers' own shards."""
WEIGHT = "weight"
"""The kind of tensor that is a parameter itself; optimizer states have other kinds."""
STATES = "states"
"""The folder inside a checkpoint that holds weights and moments by place (states.py)."""
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


def save_tensors(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Writes a safetensors file that others may read as far as the process lets them."""
    save_file(tensors, path, metadata=metadata)
    let_others_read(path)


def let_others_read(path: Path) -> None:
    """Gives a file the mode that any new file has: safetensors makes its own the owner's alone."""
    path.chmod(0o666 & ~UMASK)


def write_parts(found: Iterator[tuple[Place, str, torch.Tensor]], folder: Path) -> None:
    """Writes (place, kind, shard) as files of at most FILE_BYTES, each with a list of what it holds."""
    held: dict[str, torch.Tensor] = {}
    listed: list[dict[str, Any]] = []
    written = 0

    def flush() -> None:
        nonlocal written
        if held:
            name = f"rank{dist.get_rank():06d}-{written:04d}"
            save_tensors(held, folder / f"{name}.safetensors")
            (folder / f"{name}.json").write_text(json.dumps(listed))
            held.clear()
            listed.clear()
            written += 1

    for place, kind, shard in found:
        held[str(len(held))] = shard.to("cpu", copy=True).contiguous()
        about = {name: getattr(place, name) for name in ("key", "index", "offset", "shape", "global_shape")}
        listed.append({"kind": kind} | about)
        if sum(tensor.nbytes for tensor in held.values()) >= FILE_BYTES:
            flush()
    flush()


@dataclass(frozen=True)
class _Part:
    """A written shard, in `file` under `name`."""

    file: Path
    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


def damaged(file: Path, why: Exception) -> InputError:
    """The error for a file of a checkpoint that can't be read: which, and that an older one may do."""
    return InputError(
        "train.resume", file, f"can't be read ({why}): the checkpoint is damaged; an older one beside it is resumed by its folder"
    )


class Parts:
    """What all ranks wrote into a folder."""

    def __init__(self, folder: Path) -> None:
        self.shapes: dict[Whole, tuple[int, ...]] = {}
        """Global shapes of the checkpoint's tensors."""
        self._parts: dict[Whole, list[_Part]] = {}
        self._open: dict[Path, Any] = {}
        for listing in sorted(folder.glob("*.json")):
            try:
                written = json.loads(listing.read_text())
            except (OSError, ValueError) as error:
                raise damaged(listing, error) from None
            for number, about in enumerate(written):
                whole = about["kind"], about["key"], tuple(about["index"])
                part = _Part(listing.with_suffix(".safetensors"), str(number), tuple(about["offset"]), tuple(about["shape"]))
                self._parts.setdefault(whole, []).append(part)
                self.shapes[whole] = tuple(about["global_shape"])

    def of(self, kind: str, place: Place) -> torch.Tensor:
        """A rank's shard of a weight or of its moments, as `read` finds it."""
        return self.read(kind, place.key, place.index, place.offset, place.shape)

    def read(self, kind: str, key: str, index: tuple[int, ...], offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """This box of a global tensor; zeros beyond the end of what was written, where a vocabulary was padded to less. Raises RuntimeError
        where a part of it is missing."""
        whole = kind, key, index
        target: torch.Tensor | None = None
        filled = 0
        for part in self._parts.get(whole, ()):
            begins = [max(a, b) for a, b in zip(offset, part.offset, strict=True)]
            ends = [min(a + m, b + n) for a, m, b, n in zip(offset, shape, part.offset, part.shape, strict=True)]
            if any(begin >= end for begin, end in zip(begins, ends, strict=True)):
                continue
            if part.file not in self._open:
                try:
                    self._open[part.file] = safe_open(part.file, framework="pt")
                except (OSError, SafetensorError) as error:
                    raise damaged(part.file, error) from None
            here = tuple(slice(begin - at, end - at) for begin, end, at in zip(begins, ends, part.offset, strict=True))
            values = self._open[part.file].get_slice(part.name)[here]
            if target is None:
                target = torch.zeros(tuple(shape), dtype=values.dtype)
            target[tuple(slice(begin - at, end - at) for begin, end, at in zip(begins, ends, offset, strict=True))] = values
            filled += values.numel()
        ends = [min(at + size, end) for at, size, end in zip(offset, shape, self.shapes.get(whole, offset), strict=True)]
        wanted = prod(max(0, end - at) for at, end in zip(offset, ends, strict=True)) if whole in self.shapes else prod(shape)
        if filled != wanted:
            raise RuntimeError(f"{kind} of {key} {list(index)}: only {filled} elements of {list(shape)} at {list(offset)} were written")
        return torch.zeros(tuple(shape)) if target is None else target
