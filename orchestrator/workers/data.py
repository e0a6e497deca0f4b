"""Real text: a source is one long row of token ids, documents joined by an end-of-document token."""

from __future__ import annotations

import hashlib
import json
import math
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.errors import InputError
from orchestrator.model.shared import SENTINELS
from orchestrator.plan import Plan

TEXT_SUFFIXES = (".txt", ".md", ".py", ".rst", ".text")
BYTES = 256


@dataclass(frozen=True, kw_only=True)
class Specials:
    """Ids beside the text's own; None where the tokenizer has none."""

    eod: int
    mask: int | None = None
    cls: int | None = None
    sep: int | None = None
    pad: int | None = None
    sentinels: tuple[int, ...] = ()

    @classmethod
    def of_bytes(cls) -> Specials:
        """The special ids of a vocabulary of bytes: after the 256 bytes end of document, mask, cls, sep, pad, then the sentinels."""
        first = BYTES + 5
        return cls(eod=BYTES, mask=BYTES + 1, cls=BYTES + 2, sep=BYTES + 3, pad=BYTES + 4, sentinels=tuple(range(first, first + SENTINELS)))


@dataclass(frozen=True, kw_only=True)
class Part:
    """A source of a blend: its share, its name in messages, its row."""

    weight: float
    name: str
    tokens: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """What a run reads: the parts it trains on, those it evaluates on (none: it doesn't), and the special ids."""

    train: tuple[Part, ...]
    valid: tuple[Part, ...]
    specials: Specials


def standard_library() -> list[Path]:
    """The modules of Python's own standard library, in the order of their names: text that every machine has."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py"))
    if not files:
        raise InputError("data", folder, "holds no sources of the standard library: give data=PATH")
    return files


def text_files(path: Path) -> list[Path]:
    """A text or jsonl file, or all of them in a folder, sorted."""
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file() and file.suffix in (*TEXT_SUFFIXES, ".jsonl"))
        if not files:
            raise InputError("data", path, "holds no text", [f"*{suffix}" for suffix in (*TEXT_SUFFIXES, ".jsonl")])
        return files
    if not path.is_file():
        raise InputError("data", path, "is not there", ["a text file", "a .jsonl", "a folder of them", "a .bin/.idx prefix"])
    return [path]


def documents(files: list[Path]) -> Iterator[bytes]:
    """One document a text file, one a line of a .jsonl (its field "text"). Raises InputError with file and line."""
    for file in files:
        if file.suffix != ".jsonl":
            yield file.read_bytes()
            continue
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    yield json.loads(line)["text"].encode()
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    raise InputError("data", f"{file}:{number}", f'is not a JSON object with a string in "text" ({error})') from None


def encode(files: list[Path], tokenizer: Any | None, specials: Specials) -> np.ndarray:
    """All documents as ids, each followed by the end-of-document id; uint16 where that holds them, else int32."""
    rows = [row for text in documents(files) for row in ids_of([text], tokenizer, specials)]
    return np.concatenate(rows) if rows else np.zeros(0, dtype=np.uint16)


def ids_of(texts: Sequence[bytes], tokenizer: Any | None, specials: Specials) -> list[np.ndarray]:
    """The ids of each text, as `encode`."""
    if tokenizer is None:
        return [np.append(np.frombuffer(text, dtype=np.uint8).astype(np.uint16), np.uint16(specials.eod)) for text in texts]
    rows = tokenizer([text.decode(errors="replace") for text in texts], add_special_tokens=False)["input_ids"]
    return [np.append(np.asarray(row, dtype=np.int32), np.int32(specials.eod)) for row in rows]


def tokenizer_of(folder: str | None) -> tuple[Any | None, Specials]:
    """The tokenizer of a folder and its special ids; without a folder bytes are the tokens."""
    return load_tokenizer(folder) if folder else (None, Specials.of_bytes())


def load_tokenizer(folder: str) -> tuple[Any, Specials]:
    """A Hugging Face tokenizer from a local folder, and its special ids."""
    from transformers import AutoTokenizer

    if not Path(folder).is_dir():
        raise InputError("tokenizer", folder, "is not a folder with a Hugging Face tokenizer")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise InputError("tokenizer", folder, f"can't be loaded: {str(error).splitlines()[0]}") from None
    sentinels = tokenizer.convert_tokens_to_ids([f"<extra_id_{i}>" for i in range(SENTINELS)])
    unknown = tokenizer.unk_token_id
    eod = next((i for i in (tokenizer.eos_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id) if i is not None), None)
    if eod is None:
        raise InputError("tokenizer", folder, "has no token that ends a document (eos, sep or pad)")
    return tokenizer, Specials(
        eod=eod,
        mask=tokenizer.mask_token_id,
        cls=tokenizer.cls_token_id,
        sep=tokenizer.sep_token_id,
        pad=tokenizer.pad_token_id,
        sentinels=tuple(i for i in sentinels if i is not None and i != unknown),
    )


def is_indexed(data: str) -> bool:
    """Whether this names a Megatron .bin/.idx pair: the prefix, or one of the two files."""
    prefix = indexed_prefix(data)
    return Path(prefix + ".bin").is_file() and Path(prefix + ".idx").is_file()


def indexed_prefix(data: str) -> str:
    return data[:-4] if data.endswith((".bin", ".idx")) else data


def indexed_tokens(prefix: str) -> np.ndarray:
    """The ids in Megatron's .bin, whose sequences stand one behind the other. Raises InputError where the .idx is not of this .bin."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    index = IndexedDataset(prefix).index
    row, count = np.memmap(f"{prefix}.bin", dtype=index.dtype, mode="r"), int(index.sequence_lengths.sum())
    if len(row) != count:
        raise InputError("data", prefix, f"has {len(row)} tokens in its .bin and {count} in its .idx")
    return row


def open_source(data: str | None, tokenizer_folder: str | None, cache: Path, *, build: bool, wait: Callable[[], None]) -> np.ndarray:
    """The ids of one source in a row, mapped. Text is encoded once, by the rank with `build`, into `cache`; the others `wait`."""
    if data and is_indexed(data):
        return indexed_tokens(indexed_prefix(data))
    files = text_files(Path(data)) if data else standard_library()
    name = hashlib.blake2b(repr([(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files] + [tokenizer_folder]).encode())
    path = cache / f"tokens-{name.hexdigest()[:16]}.npy"
    if build and not path.exists():
        row = encode(files, *tokenizer_of(tokenizer_folder))
        cache.mkdir(parents=True, exist_ok=True)
        # Each node's first rank may do this in one shared folder: whoever is last replaces the same content.
        with tempfile.NamedTemporaryFile(dir=cache, suffix=".tmp", delete=False) as file:
            np.save(file, row)
        Path(file.name).replace(path)
    wait()
    return np.load(path, mmap_mode="r")


def open_corpus(plan: Plan, cache: Path, *, build: bool, wait: Callable[[], None]) -> Corpus:
    """All that this plan reads. Every rank calls this; `wait` is a barrier."""
    run = plan.run

    def opened(path: str | None) -> np.ndarray:
        return open_source(path, run.tokenizer, cache, build=build, wait=wait)

    rows = [(source.weight, source.path, opened(source.path)) for source in run.blend]
    rows = rows or [(1.0, run.data or "the standard library", opened(run.data))]

    def share(tokens: np.ndarray, index: int) -> np.ndarray:
        """The index-th share of a row, front to back; all of it where there is no split."""
        if not run.split:
            return tokens
        first, last = (math.floor(len(tokens) * sum(run.split[:end]) / sum(run.split)) for end in (index, index + 1))
        return tokens[first:last]

    def parts(index: int) -> tuple[Part, ...]:
        return tuple(Part(weight=weight, name=name, tokens=share(tokens, index)) for weight, name, tokens in rows)

    valid: tuple[Part, ...] = ()
    if run.eval_every:
        valid = (Part(weight=1.0, name=run.valid, tokens=opened(run.valid)),) if run.valid else parts(1)
    return Corpus(train=parts(0), valid=valid, specials=tokenizer_of(run.tokenizer)[1])


ENCODED = "data/"
"""How the prefixes of corpora begin that are made of the plan's text in the run's folder (engines/megatron/own.py)."""
PIECE = 2**22
"""Tokens that are held in memory while a corpus is written."""


def write_indexed(plan: Plan, folder: Path, words: Sequence[str]) -> None:
    """Writes what this plan trains on, and then what it evaluates on, as Megatron's .bin/.idx under the prefixes in the folder that are
    among the words of a command, with a document behind each end-of-document token. Every rank calls this; each node's first writes, and
    nobody where all is there. Raises InputError where the vocabulary is too small."""
    import torch.distributed as dist
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    from orchestrator.workers import distributed

    first, prefixes = distributed.local_rank_is_first(), [word for word in words if word.startswith(ENCODED)]
    if not all((folder / f"{prefix}.idx").is_file() for prefix in prefixes):
        corpus = open_corpus(plan, folder / "data", build=first, wait=dist.barrier)
        for prefix, part in zip(prefixes, (*corpus.train, *corpus.valid), strict=True) if first else ():
            # Nodes may do this in one shared folder: whoever is last replaces the same content.
            partial = folder / f"{prefix}.{dist.get_rank()}"
            builder = IndexedDatasetBuilder(f"{partial}.bin", dtype=DType.optimal_dtype(vocabulary(plan)))
            for start in range(0, len(part.tokens), PIECE):
                ids = part.tokens[start : start + PIECE].astype(np.int64)
                check_vocabulary(plan, part, ids)
                for document in np.split(ids, np.flatnonzero(ids == corpus.specials.eod) + 1):
                    if len(document):
                        builder.add_document(document, [len(document)])
            builder.finalize(f"{partial}.idx")
            for suffix in (".bin", ".idx"):
                Path(f"{partial}{suffix}").replace(folder / f"{prefix}{suffix}")
    dist.barrier()


def vocabulary(plan: Plan) -> int:
    """Number of ids that the model takes."""
    return plan.model.vocab_size if plan.model.traced is None else plan.model.traced.token_ids


def check_vocabulary(plan: Plan, part: Part, ids: np.ndarray) -> None:
    """Raises InputError where the vocabulary is too small for these ids."""
    if (largest := int(ids.max())) >= vocabulary(plan):
        tokenizer = f"tokenizer {plan.run.tokenizer}" if plan.run.tokenizer else "the byte tokenizer"
        why = f"is too small: data {part.name} by {tokenizer} has token id {largest}"
        raise InputError("model.vocab_size", vocabulary(plan), why)
