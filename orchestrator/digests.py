"""A digest of every file of a checkpoint, so that a damaged one is named before anything is trained from it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from orchestrator.errors import InputError

LISTING: Final = "digests.json"
"""The file in a checkpoint's folder that lists its files: {file: {"bytes": its size, "sha256": its digest}}, files by their path in the
folder."""
Digests = Mapping[str, Mapping[str, int | str]]


OF_A_RANK: Final = re.compile(r"(?:rank|__|generators-)([0-9]+)[-_.][^/]*\Z")
"""Names of files that one rank has written, of our checkpoints and torch's distributed ones."""


def written_by(folder: Path, rank: int | None) -> list[str]:
    """The files below the folder that this rank wrote, by their names, as paths in the folder. A rank is asked for its own alone: what
    others write may not be whole, or not be seen on its node yet. None: those whose names say no rank, once all have written."""
    found = []
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        match = OF_A_RANK.search(name)
        if not name.startswith(LISTING) and (int(match[1]) if match else None) == rank and path.is_file():
            found.append(name)
    return sorted(found)


def digests(folder: Path, names: Iterable[str]) -> dict[str, dict[str, int | str]]:
    """The size and SHA-256 of these files, by name. Raises OSError."""
    found: dict[str, dict[str, int | str]] = {}
    for name in names:
        with (folder / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        found[name] = {"bytes": (folder / name).stat().st_size, "sha256": digest}
    return found


def listed(folder: Path) -> Digests | None:
    """What the folder's listing says; None where it has none (a checkpoint of an earlier version). Raises InputError for a damaged one."""
    path = folder / LISTING
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): {"bytes": int(of["bytes"]), "sha256": str(of["sha256"])} for name, of in content.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError("train.resume", path, f"can't be read ({error}): the checkpoint is damaged") from None


def damages(folder: Path, of: Digests, part: int = 0, parts: int = 1, *, read: bool = True) -> Iterator[str]:
    """What is not as it was written, a sentence a file, of every `parts`-th file of the listing from number `part` on. `read`: whether
    files are read, or their sizes alone are looked at."""
    for name in sorted(of)[part::parts]:
        path, wanted = folder / name, of[name]
        try:
            nbytes = path.stat().st_size
            if nbytes != wanted["bytes"]:
                yield f"{path} has {nbytes:,} bytes, {wanted['bytes']:,} were written"
            elif read and digests(folder, [name])[name]["sha256"] != wanted["sha256"]:
                yield f"{path} is not what was written: its SHA-256 is another"
        except OSError as error:
            yield f"{path} can't be read: {error.strerror or error}"
