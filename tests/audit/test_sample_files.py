"""What the audit says of one file or more in every language that it reads, in the shape of what programs publish and in our words
(samples/, and the texts of the modules beside): samples.csv. The gate needs nothing else for it; published files themselves are of
.ci/full (test_published_files.py). REGENERATE_SAMPLES=1 writes the table anew; then read the difference."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Final

import test_around
import test_yaml_files
from test_published_files import layout, rows, write

import orchestrator as so

HERE = Path(__file__).parent
TABLE = HERE / "samples.csv"
NAMED: Final = {name: text for name, (text, *_) in test_around.FILES.items()} | {
    f"{name.removeprefix('--')}.yaml": text for name, (text, *_) in test_yaml_files.SAID.items()
}
"""Texts of the modules beside, by the names that their files get."""
COLUMNS: Final = ("path", "keys", "format", "layout", "read", "legal", "fits", "unknown", "unpriced", "result", "beside", "assumed")


def table() -> list[dict[str, str]]:
    with TABLE.open(newline="") as file:
        return list(csv.DictReader(file))


def said(path: Path, row: dict[str, str]) -> dict[str, str]:
    """The row as the audit has it now: what was read, verbatim where it may cost; of the rest how many."""
    found = so.audit(path, **dict(word.split("=", 1) for word in row["keys"].split()))
    reading = found.reading
    return {
        "path": row["path"],
        "keys": row["keys"],
        "format": reading.format,
        "layout": layout(found),
        "read": " ".join(f"{name}={value}" for name, value in sorted(reading.keys.items())),
        "legal": "yes" if found.legal else found.problem or found.untold,
        "fits": "can't be told" if found.fits is None else "yes" if found.fits else "no",
        "unknown": " ".join(reading.unknown),
        "unpriced": " ".join((*reading.unpriced, *reading.slower)),
        "result": " ".join(reading.result),
        "beside": str(len(reading.beside)),
        "assumed": str(len(reading.assumed)),
    }


def place(name: str, folder: Path) -> Path:
    """The file of a row; a text of the modules beside is written into `folder` first."""
    if name not in NAMED:
        return HERE / "samples" / name
    (folder / name).write_text(NAMED[name])
    return folder / name


def test_every_language_of_the_published_files_has_a_sample() -> None:
    assert {row["format"] for row in table()} >= {row["format"] for row in rows()}
    assert {row["path"] for row in table()} >= {*NAMED}


def test_the_audit_says_of_samples_what_the_table_has(tmp_path: Path) -> None:
    now = [said(place(row["path"], tmp_path), row) for row in table()]
    if os.environ.get("REGENERATE_SAMPLES"):
        write(TABLE, COLUMNS, now)
    for row, before in zip(now, table(), strict=True):
        assert row == before
