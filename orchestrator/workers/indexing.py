"""Text and jsonl as Megatron's .bin/.idx, by megatron-core's own builder; started by `python -m orchestrator.data`.

The input is cut into parts; processes turn them into ids beside the output (OUT.parts/), and one process joins them. What is done is
kept until the end: an interrupted command continues where it was. OUT.bin and OUT.idx appear whole, the index last.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from orchestrator.errors import InputError
from orchestrator.workers import data

PART_BYTES = 32 * 2**20
"""Bytes of text in one part: seconds of work, so that little is lost and progress is seen."""
BATCH = 256
"""Documents that a tokenizer gets at once."""
MANIFEST = "manifest.json"
INTERRUPTED = 130
FEW = 100
"""Documents of which a share of 1% may get none."""
LINES = 10
"""Lines of progress where the output is no terminal."""


@dataclass(frozen=True)
class Piece:
    """Bytes `begin` to `end` of a file: documents that begin there. `cut`: how a text file is cut, one of CUTS or SEPARATOR and a text."""

    path: str
    begin: int
    end: int
    cut: str = "file"


CUTS = ("file", "blank_lines", "lines")
"""Ways to cut a text file into documents; "lines" and "blank_lines" drop what is blank. `SEPARATOR` is another."""
SEPARATOR = "separator:"
"""Beginning of a `cut` whose rest is a text that stands between two documents."""


def parts_of(files: Sequence[Path], part_bytes: int, cut: str = "file") -> list[list[Piece]]:
    """The pieces of all files in order, gathered into parts of about `part_bytes`. A text file is one piece unless its lines say where a
    document begins."""
    pieces = []
    for file in files:
        size = file.stat().st_size
        step = part_bytes if file.suffix == ".jsonl" or cut in ("lines", "blank_lines") else max(1, size)
        pieces += [Piece(str(file), begin, min(size, begin + step), cut) for begin in range(0, size, step)]
    parts: list[list[Piece]] = []
    room = 0
    for piece in pieces:
        size = piece.end - piece.begin
        if not parts or size > room:
            parts.append([])
            room = part_bytes
        parts[-1].append(piece)
        room -= size
    return parts


def documents(piece: Piece) -> Iterator[bytes]:
    """The texts of a piece; of a .jsonl the lines that begin in it. Raises InputError with the file and the place."""
    with open(piece.path, "rb") as file:
        if not piece.path.endswith(".jsonl"):
            yield from _paragraphs(piece, file) if piece.cut == "blank_lines" else _texts(piece, file)
            return
        if piece.begin:
            file.seek(piece.begin - 1)
            file.readline()  # the rest of a line that began before; nothing but the newline where one begins here
        while (at := file.tell()) < piece.end:
            line = file.readline()
            if line.strip():
                try:
                    yield json.loads(line)["text"].encode()
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    raise InputError("input", piece.path, f'at byte {at}: is not a JSON object with a string in "text" ({error})') from None


def _texts(piece: Piece, file: BinaryIO) -> Iterator[bytes]:
    """The whole file, its lines that begin in the piece, or what stands between separators; without what is blank where it is cut."""
    if piece.cut == "file":
        yield file.read()
    elif piece.cut == "lines":
        _seek_line(piece, file)
        while file.tell() < piece.end:
            line = file.readline().rstrip(b"\r\n")
            if line.strip():
                yield line
    else:
        separator = piece.cut.removeprefix(SEPARATOR).encode()
        yield from (part.strip(b"\r\n") for part in file.read().split(separator) if part.strip())


def _paragraphs(piece: Piece, file: BinaryIO) -> Iterator[bytes]:
    """Lines without a blank one between them, where the blank line before the first begins in the piece (or the file does)."""
    _seek_line(piece, file)
    lines: list[bytes] = []
    ours = piece.begin == 0
    while True:
        inside = file.tell() < piece.end
        line = file.readline()
        if line.strip():
            if ours:
                lines.append(line)
            elif not inside:
                return
        else:
            if lines:
                yield b"".join(lines).rstrip(b"\r\n")
                lines = []
            if not line or not inside:
                return
            ours = True


def _seek_line(piece: Piece, file: BinaryIO) -> None:
    """Goes to the first line that begins in the piece."""
    if piece.begin:
        file.seek(piece.begin - 1)
        file.readline()


@cache
def tokenizer_of(folder: str | None) -> tuple[Any, data.Specials]:
    return data.load_tokenizer(folder) if folder else (None, data.Specials.of_bytes())


def ids_of(texts: Sequence[bytes], folder: str | None) -> list[np.ndarray]:
    """The ids of each text, with the end of the document behind."""
    tokenizer, specials = tokenizer_of(folder)
    if tokenizer is None:
        rows: list[Any] = [np.frombuffer(text, dtype=np.uint8) for text in texts]
    else:
        rows = tokenizer([text.decode(errors="replace") for text in texts], add_special_tokens=False)["input_ids"]
    return [np.append(np.asarray(row, dtype=np.int32), np.int32(specials.eod)) for row in rows]


def write_part(pieces: Sequence[Piece], folder: str | None, target: Path) -> None:
    """One part's ids and the lengths of its documents, as one .npz that appears whole."""
    rows: list[np.ndarray] = []
    waiting: list[bytes] = []
    for piece in pieces:
        for text in documents(piece):
            waiting.append(text)
            if len(waiting) == BATCH:
                rows += ids_of(waiting, folder)
                waiting = []
    rows += ids_of(waiting, folder) if waiting else []
    ids = np.concatenate(rows) if rows else np.zeros(0, np.int32)
    partial = target.with_suffix(".tmp")
    with partial.open("wb") as file:
        np.savez(file, ids=ids, lengths=np.asarray([len(row) for row in rows], np.int64))
    partial.replace(target)


def vocabulary(folder: str | None) -> int:
    """Ids that may come out, which decides their bytes."""
    tokenizer, specials = tokenizer_of(folder)
    return len(tokenizer) if tokenizer is not None else max(specials.sentinels) + 1


class Progress:
    """Shows the bytes that are done: a bar on a terminal, a line each tenth elsewhere."""

    def __init__(self, total: int, done: int) -> None:
        self.total, self.done, self.shown, self.bar = max(1, total), done, 0, None
        if sys.stdout.isatty():
            from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            self.bar = Bar(TextColumn("indexing"), BarColumn(), DownloadColumn(), TimeRemainingColumn(), transient=True)
            self.task = self.bar.add_task("", total=self.total, completed=done)
            self.bar.start()

    def add(self, size: int) -> None:
        self.done += size
        if self.bar is not None:
            self.bar.update(self.task, completed=self.done)
        elif (tenth := LINES * self.done // self.total) > self.shown:
            self.shown = tenth
            print(f"{self.done / self.total:.0%} of {self.total / 2**20:,.1f} MiB", flush=True)

    def stop(self) -> None:
        if self.bar is not None:
            self.bar.stop()


def work_folder(out: Path, manifest: dict[str, Any]) -> Path:
    """OUT.parts/ of this very input: an earlier one's is cleared. Raises InputError where it is not ours."""
    folder = out.with_name(out.name + ".parts")
    path = folder / MANIFEST
    if folder.exists() and not path.is_file() and any(folder.iterdir()):
        raise InputError("out", out, f"{folder} is in the way: it is not of an earlier start of this command")
    text = json.dumps(manifest)
    if path.is_file() and path.read_text() != text:
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return folder


def join(folder: Path, names: Sequence[str], out: Path, vocab_size: int) -> tuple[int, int]:
    """OUT.bin and OUT.idx from all parts; (documents, tokens)."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    partial = {suffix: folder / f"whole{suffix}" for suffix in (".bin", ".idx")}
    builder = IndexedDatasetBuilder(str(partial[".bin"]), dtype=DType.optimal_dtype(vocab_size))
    count = tokens = 0
    for name in names:
        with np.load(folder / name) as part:
            ids, lengths = part["ids"], part["lengths"]
        for row in np.split(ids, np.cumsum(lengths)[:-1]) if len(lengths) else ():
            builder.add_document(row, [len(row)])
        count, tokens = count + len(lengths), tokens + len(ids)
    builder.finalize(str(partial[".idx"]))
    if not count:
        raise InputError("input", None, "holds no documents")
    for suffix in (".bin", ".idx"):
        partial[suffix].replace(out.with_name(out.name + suffix))
    return count, tokens


def index(
    inputs: Sequence[str], out: Path, folder: str | None, workers: int, part_bytes: int = PART_BYTES, cut: str = "file"
) -> tuple[int, int]:
    """Write OUT.bin and OUT.idx; (documents, tokens). `cut`: one of CUTS, or SEPARATOR and a text. Raises InputError."""
    files = [file for path in inputs for file in data.text_files(Path(path))]
    _check_cut(files, cut)
    for suffix in (".bin", ".idx"):
        if out.with_name(out.name + suffix).exists():
            raise InputError("out", out, f"{out.name}{suffix} is there already")
    out.parent.mkdir(parents=True, exist_ok=True)
    parts = parts_of(files, part_bytes, cut)
    names = [f"part-{number:06d}.npz" for number in range(len(parts))]
    described = [[asdict(piece) for piece in part] for part in parts]
    stamps = [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    work = work_folder(out, {"files": stamps, "tokenizer": folder, "parts": described})
    sizes = [sum(piece.end - piece.begin for piece in part) for part in parts]
    missing = [number for number, name in enumerate(names) if not (work / name).is_file()]
    there = sum(sizes) - sum(sizes[number] for number in missing)
    if there:
        print(f"continues: {len(parts) - len(missing)} of {len(parts)} parts are there", flush=True)
    vocab_size = vocabulary(folder)  # a bad tokenizer is found before any work
    progress = Progress(sum(sizes), there)
    jobs = {number: (parts[number], folder, work / names[number]) for number in missing}
    try:
        for number in write_parts(jobs, min(workers, len(missing))):
            progress.add(sizes[number])
    finally:
        progress.stop()
    found = join(work, names, out, vocab_size)
    shutil.rmtree(work)
    return found


def _check_cut(files: Sequence[Path], cut: str) -> None:
    """Raises InputError where the separator is in no file: what was meant as one is not."""
    texts = [file for file in files if file.suffix != ".jsonl"]
    separator = cut.removeprefix(SEPARATOR)
    if cut not in CUTS and not any(separator.encode() in file.read_bytes() for file in texts):
        why = "is in none of the text files" if texts else "has no text file to cut: a .jsonl has one document a line"
        raise InputError("separator", repr(separator), why)


def ignore_interrupts() -> None:
    """Makes a process ignore Ctrl-C, on which its parent starts no more parts and waits for those at hand."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def write_parts(jobs: dict[int, tuple[list[Piece], str | None, Path]], workers: int) -> Iterator[int]:
    """The numbers of the parts as they are done, by this many processes; by this one if it is alone."""
    if workers <= 1:
        for number, job in jobs.items():
            write_part(*job)
            yield number
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"), initializer=ignore_interrupts)
    try:
        tasks = {pool.submit(write_part, *job): number for number, job in jobs.items()}
        for task in as_completed(tasks):
            task.result()
            yield tasks[task]
    finally:
        pool.shutdown(cancel_futures=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Text as Megatron's .bin/.idx; started by python -m orchestrator.data.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokenizer")
    parser.add_argument("--documents", choices=CUTS, default=CUTS[0])
    parser.add_argument("--separator")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("inputs", nargs="+")
    given = parser.parse_args()
    begin = time.perf_counter()
    try:
        cut = SEPARATOR + given.separator if given.separator else given.documents
        count, tokens = index(given.inputs, given.out, given.tokenizer, given.workers, cut=cut)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.status
    except OSError as error:  # a full disk, a folder that can't be made
        print(f"error: {error.filename or given.out}: {error.strerror or error}", file=sys.stderr)
        return InputError.status
    except KeyboardInterrupt:
        return INTERRUPTED
    tokenizer = f" tokenizer={given.tokenizer}" if given.tokenizer else ""
    print(f"{given.out}.bin and .idx: {count:,} documents, {tokens:,} tokens, {time.perf_counter() - begin:.1f} s")
    if count < FEW and given.documents == CUTS[0] and not given.separator:
        print("Megatron-LM's own programs divide whole documents over training and evaluation: documents=blank_lines makes more of a text")
    print(f"To train on it: python -m orchestrator.run ... data={given.out}{tokenizer}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
