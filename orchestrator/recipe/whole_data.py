"""Data read to its end before anything starts: an .idx that says what its .bin has, and chats that have something to learn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from orchestrator.errors import InputError
from orchestrator.model.architecture import Architecture
from orchestrator.model.training import Training
from orchestrator.plan import RunSettings, Source
from orchestrator.recipe.documents import FIELDS, HEADER
from orchestrator.recipe.supervised import images_in, lines_of, texts_of

TOKEN_TYPES: Final = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 8: 2}
"""Bytes of a token by the code of its type; 6 and 7 are floats (megatron-core's core/datasets/indexed_dataset.py, DType)."""
VERSION: Final = 1
BYTES: Final = 256
BYTES_A_TOKEN: Final = 4
"""Bytes of English text that a tokenizer of 32K to 128K words makes one token of."""
MADE_UP: Final = "Python's own sources, byte by byte"


def is_made_up(run: RunSettings) -> bool:
    """Whether nobody says what to train on."""
    return run.data is None and not run.blend


def trained_on(run: RunSettings, architecture: Architecture | None = None) -> str:
    """What it trains on, in words.

    >>> trained_on(RunSettings()), trained_on(RunSettings(data="/a.jsonl", tokenizer="/llama"))
    ("Python's own sources, byte by byte, as data= is not given", '/a.jsonl by the tokenizer /llama')
    >>> trained_on(RunSettings(data="/a.jsonl")), trained_on(RunSettings(data="/ids.bin"))
    ('/a.jsonl, byte by byte, as tokenizer= is not given', '/ids.bin')
    """
    if is_made_up(run):
        drawn = architecture is not None and (architecture.traced is not None or architecture.why_drawn is not None)
        return f"{'drawn batches' if drawn else MADE_UP}, as data= is not given"
    whole = " + ".join(f"{source.weight:g} {source.path}" for source in run.blend) or str(run.data)
    if run.tokenizer:
        return f"{whole} by the tokenizer {run.tokenizer}"
    return f"{whole}, byte by byte, as tokenizer= is not given" if read_as_bytes(run) else whole


def read_as_bytes(run: RunSettings) -> bool:
    """Whether each byte of the texts is an id, as nothing else makes ids of them. A Megatron prefix has ids: its files or suffix say so."""
    paths = [path for path in (run.data, *(source.path for source in run.blend)) if path]
    ids = any(path.endswith((".bin", ".idx")) or Path(f"{path}.idx").is_file() for path in paths)
    return bool(paths) and run.tokenizer is None and not ids


def passes(run: RunSettings, training: Training) -> dict[str, float]:
    """How often a pretraining passes each source that is a file here, by its path: by the tokens that a Megatron index counts, else by a
    file's bytes, of which a tokenizer makes a token of about BYTES_A_TOKEN."""
    sources = run.blend or ((Source(weight=1.0, path=run.data),) if run.data else ())
    tokens = training.steps * training.global_batch_size * (training.seq_length + (training.decoder_seq_length or 0))
    learnt = run.split[0] / sum(run.split) if run.split else 1.0
    found = {}
    for source in sources:
        prefix = source.path.removesuffix(".bin").removesuffix(".idx")
        index, text = Path(f"{prefix}.idx"), Path(source.path)
        if index.is_file() and Path(f"{prefix}.bin").is_file():
            with index.open("rb") as file:
                code = FIELDS.unpack(file.read(len(HEADER) + FIELDS.size)[len(HEADER) :])[1]
            held = Path(f"{prefix}.bin").stat().st_size / TOKEN_TYPES.get(code, 4)
        elif text.is_file():
            held = text.stat().st_size / (BYTES_A_TOKEN if run.tokenizer else 1)
        else:
            continue
        share = source.weight / sum(one.weight for one in sources)
        found[source.path] = tokens * share / max(1.0, held * learnt)
    return found


def check_whole(run: RunSettings, *, supervised: bool) -> None:
    """Raises InputError with the file, and its line or sequence, for data of which a rank would find that it can't be read
    in the middle of the training, or never."""
    for path in dict.fromkeys(filter(None, (run.data, *(source.path for source in run.blend), run.valid))):
        prefix = path.removesuffix(".bin").removesuffix(".idx")
        if Path(f"{prefix}.bin").is_file() and Path(f"{prefix}.idx").is_file():
            check_index(prefix)
        elif supervised and Path(path).is_file():
            check_samples(path, chats=run.tokenizer is not None)


def check_first_texts(run: RunSettings) -> None:
    """Raises InputError for a .jsonl to pretrain on whose first line has no text: a job that waits in a queue would end there."""
    for path in dict.fromkeys(filter(None, (run.data, *(source.path for source in run.blend), run.valid))):
        if not (path.endswith(".jsonl") and Path(path).is_file()):
            continue
        where, line = next(lines_of(path), (path, b""))
        try:
            first = json.loads(line)
        except (ValueError, RecursionError):
            first = None
        if not (isinstance(first, dict) and isinstance(first.get("text"), str)):
            said = isinstance(first, dict) and bool({"messages", "prompt"} & first.keys())
            why = f'is not a JSON object with a string in "text"{": task=sft trains on chats and prompts" if said else ""}'
            raise InputError("data", where, why)


def check_bytes(run: RunSettings, token_ids: int) -> None:
    """Raises InputError where text is read byte by byte by a model of fewer `token_ids` than there are bytes and the end of a document."""
    if (is_made_up(run) or read_as_bytes(run)) and token_ids <= BYTES:
        why = f"is too small: {run.data or 'text'} is read byte by byte, which takes {BYTES + 1} ids; tokenizer=FOLDER has others"
        raise InputError("model.vocab_size", token_ids, why)


def check_index(prefix: str) -> None:
    """Raises InputError for an index that is cut, of a wrong type, or that points outside its .bin."""
    import numpy as np

    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")

    def refuse(why: str) -> InputError:
        return InputError("data", str(index), why)

    with index.open("rb") as file:
        head = file.read(len(HEADER) + FIELDS.size)
    if not head.startswith(HEADER) or len(head) < len(HEADER) + FIELDS.size:
        raise refuse("is no index of Megatron's: it does not begin as one")
    version, code, sequences, documents = FIELDS.unpack(head[len(HEADER) :])
    if version != VERSION:
        raise refuse(f"has version {version}; {VERSION} is read")
    if code not in TOKEN_TYPES:
        raise refuse(f"has tokens of type {code}, which is no whole number: choose one of {', '.join(map(str, TOKEN_TYPES))}")
    needs, has = len(head) + 12 * sequences + 8 * documents, index.stat().st_size
    if has not in (needs, needs + sequences):  # a mode for each sequence may follow
        raise refuse(f"has {has:,} bytes, and the {sequences:,} sequences and {documents:,} documents that it counts take {needs:,}")
    if not sequences:
        raise refuse("has no sequence")
    lengths = np.memmap(index, np.int32, "r", len(head), (sequences,))
    pointers = np.memmap(index, np.int64, "r", len(head) + 4 * sequences, (sequences,))
    if (wrong := lengths < 0).any():
        at = int(wrong.argmax())
        raise refuse(f"sequence {at:,} has {int(lengths[at]):,} tokens")
    size, item = data.stat().st_size, TOKEN_TYPES[code]
    wrong = (pointers < 0) | (pointers > size - lengths.astype(np.int64) * item)
    if wrong.any():
        at = int(wrong.argmax())
        tokens = f"{int(lengths[at]):,} tokens of {item} bytes at byte {int(pointers[at]):,}"
        raise refuse(f"sequence {at:,} is {tokens}, and {data.name} has {size:,} bytes")
    if documents:
        ends = np.memmap(index, np.int64, "r", len(head) + 12 * sequences, (documents,))
        if ends[0] != 0 or ends[-1] != sequences or (np.diff(ends) < 0).any():
            raise refuse(f"its documents do not divide its {sequences:,} sequences in order")


def check_samples(path: str, *, chats: bool) -> None:
    """Raises InputError for the first line that is no sample, has no answer or is no text, or whose image is not there."""
    for where, line in lines_of(path):
        texts_of(line, where, chats=chats)
        if missing := [image for image in images_in(line)[1] if not (Path(path).parent / image).is_file()]:
            raise InputError("data", where, f"its image {missing[0]} is not there; paths are from the folder of {Path(path).name}")
