"""A local checkpoint as transformers has it: tensors read by rows, and written in files of bounded size with config.json."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from safetensors.torch import save_file

from orchestrator.errors import InputError
from orchestrator.plan import RunSettings

KEY = "model.init_from"
CONFIG = "config.json"
GENERATION = "generation_config.json"
UMASK = os.umask(0)
os.umask(UMASK)
FILE_BYTES = 4 * 2**30
"""Bytes of one written file: as transformers' own shards."""
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
TOKENIZER_FILES = (
    *("tokeniz*", "chat_template.*", "additional_chat_templates", "vocab.*", "merges.txt"),
    *("special_tokens_map.json", "added_tokens.json", "*.model", "*.tiktoken", "*processor_config.json"),
)
"""Files and folders that transformers' tokenizers and processors save, or are read from, as patterns."""
SECOND_NAMES = {"cls.predictions.bias": "cls.predictions.decoder.bias"}
"""Second names of tensors: BERT's output bias stands under either."""


@dataclass(frozen=True)
class Rows:
    """Rows `begin` to `end` of a Hugging Face tensor; of its transpose where it is a GPT-2 Conv1D, which keeps [in, out]."""

    name: str
    begin: int
    end: int
    transposed: bool = False

    @property
    def count(self) -> int:
        return self.end - self.begin


class Checkpoint:
    """The tensors of a local Hugging Face checkpoint: model.safetensors or pytorch_model.bin, whole or in parts with an index. Files are
    mapped, not read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, Path] = {}
        self.open: dict[Path, Any] = {}
        for whole in ("model.safetensors", "pytorch_model.bin"):
            index = folder / f"{whole}.index.json"
            if index.is_file():
                try:
                    self.files = {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
                except (ValueError, KeyError, AttributeError) as error:
                    raise InputError(KEY, index, f"is not an index of weights: {error}") from None
            elif (folder / whole).is_file():
                self.files = dict.fromkeys(self._names(folder / whole), folder / whole)
            if self.files:
                return
        raise InputError(KEY, folder, "holds no weights", ["model.safetensors", "pytorch_model.bin", "either with .index.json"])

    def _opened(self, file: Path) -> Any:
        if file not in self.open:
            try:
                if file.suffix == ".safetensors":
                    self.open[file] = safe_open(file, framework="pt")
                else:
                    self.open[file] = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
            except Exception as error:
                raise InputError(KEY, file, f"can't be read: {error}") from None
        return self.open[file]

    def _names(self, file: Path) -> Sequence[str]:
        return list(self._opened(file).keys())

    def _find(self, name: str) -> str:
        """The name of a tensor in the checkpoint: the same, or without its first part, as the bare model has it."""
        for candidate in (name, name.partition(".")[2], SECOND_NAMES.get(name)):
            if candidate in self.files:
                return candidate
        raise InputError(KEY, self.folder, f"has no tensor {name}")

    def read(self, rows: Rows, inner: tuple[slice, ...], inner_shape: tuple[int, ...]) -> torch.Tensor:
        """These rows of a tensor, and the part `inner` of its other dimensions, whose whole is `inner_shape`. Raises InputError for another
        shape."""
        name = self._find(rows.name)
        file = self._opened(self.files[name])
        tensor = file.get_slice(name) if self.files[name].suffix == ".safetensors" else file[name]
        shape = tuple(tensor.get_shape() if hasattr(tensor, "get_shape") else tensor.shape)
        laid = shape[::-1] if rows.transposed else shape
        if laid[1:] != inner_shape or rows.end > laid[0]:
            wanted = (rows.end, *inner_shape)[:: -1 if rows.transposed else 1]
            raise InputError(KEY, self.folder, f"{name} has shape {list(shape)}, the model needs {list(wanted)}")
        index = (slice(rows.begin, rows.end), *inner)
        return tensor[index[::-1]].T if rows.transposed else tensor[index]


def save_tensors(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Writes a safetensors file that others may read as far as the process lets them."""
    save_file(tensors, path, metadata=metadata)
    let_others_read(path)


def let_others_read(path: Path) -> None:
    """Gives a file the mode that any new file has: safetensors makes its own the owner's alone."""
    path.chmod(0o666 & ~UMASK)


def write_files(like: dict[str, torch.Tensor], read: Callable[[str], torch.Tensor], folder: Path) -> None:
    """Writes the tensors that `read` gives as model.safetensors, or as several files with an index, one file's after the other. `like`:
    tensors of their shapes and data types, of the meta device."""
    split = split_torch_state_dict_into_shards(like, max_shard_size=FILE_BYTES)
    for file, names in split.filename_to_tensors.items():
        save_tensors({name: read(name) for name in names}, folder / file, {"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def copy_tokenizer(run: RunSettings, folder: Path) -> None:
    """The files of the tokenizer that the run read with, else of the checkpoint's that training began with."""
    source = run.tokenizer or run.init_from
    for path in {path for pattern in TOKENIZER_FILES for path in Path(source).glob(pattern)} if source else ():
        if path.is_dir():
            shutil.copytree(path, folder / path.name)
        else:
            shutil.copyfile(path, folder / path.name)


def copy_generation(run: RunSettings, folder: Path) -> None:
    """How the checkpoint that training began with is sampled from, where it says so, with the special tokens that were learnt."""
    source = Path(run.init_from or "", GENERATION)
    if run.init_from and source.is_file():
        fields = json.loads(source.read_text()) | special_tokens(run, GENERATION)
        (folder / GENERATION).write_text(json.dumps(fields, indent=2) + "\n")


def special_tokens(run: RunSettings, file: str = CONFIG) -> dict[str, Any]:
    """Special tokens of the tokenizer that the run read with, over those of the checkpoint that training began with: without the
    end-of-sequence token that was learnt generation would not end. `file`: that the checkpoint says them in."""
    before = json.loads(Path(run.init_from, file).read_text()) if run.init_from else {}
    found = {name: before[name] for name in SPECIAL_TOKENS if name in before}
    if run.tokenizer:
        import transformers

        tokenizer = transformers.AutoTokenizer.from_pretrained(run.tokenizer, local_files_only=True)
        read = {name: getattr(tokenizer, name, None) for name in SPECIAL_TOKENS}
        several = {name: token if isinstance(token, list) else [token] for name, token in found.items()}
        found |= {name: token for name, token in read.items() if token is not None and token not in several.get(name, ())}
    return found


def write_config(fields: dict[str, Any], keywords: dict[str, Any], folder: Path, dtype: torch.dtype, run: RunSettings) -> None:
    """Writes config.json, generation_config.json and the tokenizer's files. `fields`: "config_class" and "model_class"."""
    import transformers

    keywords = keywords | {"architectures": [fields["model_class"]], "dtype": str(dtype).removeprefix("torch.")} | special_tokens(run)
    copy_tokenizer(run, folder)
    copy_generation(run, folder)
    getattr(transformers, fields["config_class"])(**keywords).save_pretrained(folder)  # last: where it is, the checkpoint is whole
