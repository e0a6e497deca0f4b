"""Text becomes Megatron's .bin/.idx: checks what is asked, then starts the worker that has the engines' packages.

    python -m orchestrator.data input=a.jsonl,notes/ out=corpus tokenizer=DIR workers=8

Exit status: 0; 2 for bad input; 130 on Ctrl-C (the same command then continues).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal

from orchestrator import commands
from orchestrator.errors import InputError, LaunchError
from orchestrator.key import Key, parse, shown
from orchestrator.recipe.sources import check_can_be_made, existing_folder

USAGE: Final = "usage: python -m orchestrator.data input=PATH[,PATH] out=PREFIX [tokenizer=DIR] [documents=blank_lines] [workers=N]"
Documents = Literal["file", "blank_lines", "lines"]
"""How a text file is cut; a .jsonl has one a line."""

KEYS: Final = {
    key.name: key
    for key in (
        Key(name="input", type=str, help="text, .jsonl (its field text), or folders of them; a comma between two"),
        Key(name="out", type=str, help="prefix of the .bin and .idx to write"),
        Key(name="tokenizer", type=str, help="folder of a Hugging Face tokenizer", default="bytes"),
        Key(
            name="documents",
            type=Documents,
            help="what one of a text file is: the file, what stands between blank lines, or a line; "
            "Megatron-LM divides whole documents over training and evaluation",
            default="file",
        ),
        Key(name="workers", type=int, help="processes", default="the cores of this machine", low=1, high=1024),
    )
}
WORKER: Final = "orchestrator.workers.indexing"
NEEDED: Final = ("megatron", "torch", "numpy")
GRACE_S: Final = 10.0


def main(words: Sequence[str]) -> int:
    """Runs the command and returns its exit status. Known errors come as one message, without a traceback."""
    said = "interrupted: nothing is kept, the same command begins anew"
    return commands.command(words, help_text, lambda given: start([sys.executable, "-m", WORKER, *arguments(given)]), interrupted=said)


def start(command: Sequence[str]) -> int:
    """Runs a command to its end and returns its exit status. On Ctrl-C, which it gets too, it may remove what it has written by half."""
    process = subprocess.Popen(command)
    try:
        return process.wait()
    except KeyboardInterrupt:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=GRACE_S)
        raise
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def help_text() -> str:
    lines = [f"  {key.name:<10} {key.help}{f' [{key.default}]' if key.default else ''}" for key in KEYS.values()]
    return "\n".join([USAGE, "", *lines])


def read(words: Sequence[str]) -> dict[str, Any]:
    """The parsed values by key. Raises InputError.

    >>> read(["input=a.txt", "out=b", "workers=2"])
    {'input': 'a.txt', 'out': 'b', 'workers': 2}
    """
    return {name: parse(KEYS[name], text) for name, text in commands.arguments(words, list(KEYS), ("input", "out")).items()}


def arguments(words: Sequence[str]) -> list[str]:
    """What the worker is started with. Raises InputError for what can't work, LaunchError where the packages are missing."""
    given = read(words)
    inputs = [path.strip() for path in given["input"].split(",")]
    for path in inputs:
        if not path:
            raise InputError("input", shown(given["input"]), "has an empty path between commas")
        if not Path(path).exists():
            raise InputError("input", shown(path), "no such file or folder")
        if not Path(path).is_dir() and not Path(path).is_file():
            raise InputError("input", shown(path), "is neither a file nor a folder")
        if path.endswith((".bin", ".idx")) and all(Path(path).with_suffix(suffix).is_file() for suffix in (".bin", ".idx")):
            raise InputError("input", shown(path), "is Megatron's own format already: token ids, no text")
    out = free_prefix(given["out"])
    cut = ["--documents", given["documents"]] if "documents" in given else []
    tokenizer = ["--tokenizer", existing_folder("tokenizer", given["tokenizer"])] if "tokenizer" in given else []
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise LaunchError(f"{', '.join(missing)}: not installed (pip install -e '.[engines]')")
    return ["--out", out, *tokenizer, *cut, "--workers", str(given.get("workers", os.cpu_count() or 1)), "--", *inputs]


def free_prefix(out: str) -> str:
    """The absolute prefix of a corpus' two files. Raises InputError where its files are there already or can't be made."""
    prefix = Path(out).absolute()
    if out.endswith(("/", ".bin", ".idx")):
        raise InputError("out", shown(out), "is no prefix: OUT.bin and OUT.idx are written")
    if prefix.is_dir():
        raise InputError("out", shown(out), "is a folder; name a prefix in it")
    for suffix in (".bin", ".idx"):
        path = prefix.with_name(prefix.name + suffix)
        if path.exists():
            raise InputError("out", shown(out), f"{path.name} is there already; remove it or name another prefix")
    check_can_be_made("out", out, prefix.parent)
    return str(prefix)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
