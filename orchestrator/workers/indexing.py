"""Text and jsonl as Megatron's .bin/.idx, by megatron-core's own builder; started by `python -m orchestrator.data`.

One process reads documents and writes, others turn them into ids. OUT.bin and OUT.idx appear whole, the index last.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from functools import cache, partial
from itertools import groupby, islice
from pathlib import Path

import numpy as np

from orchestrator.errors import InputError
from orchestrator.workers import data

BATCH = 256
"""Documents that a process gets at once."""
INTERRUPTED = 130
FEW = 100
"""Documents of which a share of 1% may get none."""
LINES = 10
"""Lines of progress."""
CUTS = ("file", "blank_lines", "lines")
"""Ways to cut a text file into documents; "lines" and "blank_lines" drop what is blank."""


def documents(file: Path, cut: str = "file") -> Iterator[bytes]:
    """The texts of a file: a line of a .jsonl each, else as `cut` says. Raises InputError with file and line."""
    if file.suffix == ".jsonl" or cut == "file":
        yield from data.documents([file])
        return
    with file.open("rb") as text:
        for is_blank, lines in groupby(text, lambda line: not line.strip()):
            if not is_blank:
                yield from (part.rstrip(b"\r\n") for part in (lines if cut == "lines" else [b"".join(lines)]))


tokenizer_of = cache(data.tokenizer_of)


def ids_of(texts: Sequence[bytes], folder: str | None) -> tuple[list[np.ndarray], int]:
    """(the ids of each text, with the end of the document behind; bytes of the texts)."""
    return data.ids_of(texts, *tokenizer_of(folder)), sum(map(len, texts))


def encoded(texts: Iterator[bytes], folder: str | None, workers: int) -> Generator[tuple[list[np.ndarray], int]]:
    """What `ids_of` gives of a batch of texts after the other, in order, by this many processes."""
    work, batches = partial(ids_of, folder=folder), iter(lambda: list(islice(texts, BATCH)), [])
    if workers <= 1:
        yield from map(work, batches)
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    with multiprocessing.get_context("spawn").Pool(workers, initializer=ignore_interrupts) as pool:
        yield from pool.imap(work, batches)


def ignore_interrupts() -> None:
    """Makes a process ignore Ctrl-C, on which its parent ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def index(inputs: Sequence[str], out: Path, folder: str | None, workers: int, cut: str = "file") -> tuple[int, int]:
    """Write OUT.bin and OUT.idx; (documents, tokens). `cut`: one of CUTS. Raises InputError."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    files = [file for path in inputs for file in data.text_files(Path(path))]
    whole = {suffix: out.with_name(out.name + suffix) for suffix in (".bin", ".idx")}
    for path in whole.values():
        if path.exists():
            raise InputError("out", out, f"{path.name} is there already")
    tokenizer, specials = tokenizer_of(folder)  # a bad one is found before any work
    out.parent.mkdir(parents=True, exist_ok=True)
    written = {suffix: path.with_name(f"{path.name}.partial") for suffix, path in whole.items()}
    vocab_size = len(tokenizer) if tokenizer is not None else max(specials.sentinels) + 1
    total = max(1, sum(file.stat().st_size for file in files))
    count = tokens = done = 0
    try:
        builder = IndexedDatasetBuilder(str(written[".bin"]), dtype=DType.optimal_dtype(vocab_size))
        with contextlib.closing(encoded((text for file in files for text in documents(file, cut)), folder, workers)) as found:
            for rows, size in found:
                for row in rows:
                    builder.add_document(row, [len(row)])
                count, tokens = count + len(rows), tokens + sum(map(len, rows))
                before, done = LINES * done // total, done + size
                if LINES * done // total > before:
                    print(f"{done / total:.0%} of {total / 2**20:,.1f} MiB", flush=True)
        if not count:
            raise InputError("input", None, "holds no documents")
        builder.finalize(str(written[".idx"]))
        for suffix, path in whole.items():
            written[suffix].replace(path)
    finally:
        for path in written.values():
            path.unlink(missing_ok=True)
    return count, tokens


def main() -> int:
    parser = argparse.ArgumentParser(description="Text as Megatron's .bin/.idx; started by python -m orchestrator.data.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokenizer")
    parser.add_argument("--documents", choices=CUTS, default=CUTS[0])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("inputs", nargs="+")
    given = parser.parse_args()
    begin = time.perf_counter()
    try:
        count, tokens = index(given.inputs, given.out, given.tokenizer, given.workers, given.documents)
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
    if count < FEW and given.documents == CUTS[0]:
        print("Megatron-LM's own programs divide whole documents over training and evaluation: documents=blank_lines makes more of a text")
    print(f"To train on it: python -m orchestrator.run ... data={given.out}{tokenizer}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
