"""Checkpoints come from elsewhere: none of their files may run code as it is read."""

from __future__ import annotations

import enum
import os
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import torch

from orchestrator.errors import InputError

FORCED = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
"""Environment variable with which torch.load reads tensors and plain values alone, also where its caller asks for more, as DeepSpeed does
(runtime/checkpoint_engine/torch_checkpoint_engine.py:37; torch/serialization.py, `load`)."""
METADATA = ".metadata"
"""The file of torch's distributed checkpoints that torch reads by pickle (distributed/checkpoint/filesystem.py, `read_metadata`)."""
PLAIN = {
    *(("builtins", name) for name in ("set", "frozenset")),
    *(("pathlib", name) for name in ("PosixPath", "PurePosixPath")),
    ("collections", "OrderedDict"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
}
RECORDS = ("torch.distributed.checkpoint.", "megatron.core.dist_checkpointing.")
VALUES = (torch.dtype, torch.memory_format, torch.layout)


class _Plain(pickle.Unpickler):
    """Knows the classes of a distributed checkpoint's metadata alone: records and enumerations of torch.distributed.checkpoint and
    megatron.core.dist_checkpointing, sizes and types of tensors."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in PLAIN or module == "torch" or module.startswith(RECORDS):
            found = super().find_class(module, name)
            record = isinstance(found, type) and (is_dataclass(found) or issubclass(found, enum.Enum))
            if (module, name) in PLAIN or isinstance(found, VALUES) or (record and module.startswith(RECORDS)):
                return found
        raise pickle.UnpicklingError(f"it would call {module}.{name}")


@contextmanager
def refused(folder: Path) -> Iterator[None]:
    """Refuses, inside of the `with`, to read from the checkpoint in `folder` what is more than tensors and plain values. Raises InputError
    for metadata that is more, and for files that torch refuses so."""
    before = os.environ.get(FORCED)
    os.environ[FORCED] = "1"
    try:
        for metadata in folder.rglob(METADATA):
            with metadata.open("rb") as file:
                _Plain(file).load()
        yield
    except pickle.UnpicklingError as error:
        called = re.search(r"GLOBAL (\S+)", str(error))  # torch's own words are a page
        said = f"it would call {called[1]}" if called else str(error).partition("\n")[0]
        why = f"has a file that is no checkpoint's, and was not read: {said}"
        raise InputError("train.resume", folder, why) from error
    finally:
        if before is None:
            del os.environ[FORCED]
        else:
            os.environ[FORCED] = before
