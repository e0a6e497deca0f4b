"""YAML whose keys are Megatron-LM's flags, as Megatron-MoE-ModelZoo has it (MODEL_ARGS: {--tensor-model-parallel-size: 4})."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from orchestrator.audit import megatron, script
from orchestrator.audit.document import File
from orchestrator.audit.reading import Setup, Source
from orchestrator.audit.script import ENOUGH, Flag, Line
from orchestrator.audit.shell import Piece, Script, Word

PROGRAM: Final = "pretrain_gpt.py"
NOTHING_AROUND: Final = Script(commands=(), variables={}, files={}, sbatch=(), notes=())


def section_of(content: Mapping[str, Any]) -> str | None:
    """The section that has Megatron's flags; None: none has enough."""
    for name, value in content.items():
        if isinstance(value, dict) and sum(str(key).startswith("--") for key in value) >= ENOUGH:
            return name
    return None


def read(file: File, section: str) -> Source:
    """The file's flags as a command line has them. A value that a variable holds is said. Raises InputError."""
    given = {str(flag): value for flag, value in file.content[section].items() if str(flag).startswith("--")}
    flags = []
    for flag, value in given.items():
        words = [] if value is True else value if isinstance(value, list) else str(value).split()
        if value is not False and value is not None:
            flags.append(Flag(flag, tuple(Word((Piece(str(one)),)) for one in words), Word((Piece(flag),))))
    reading = script.reading_of(Line((), tuple(flags), PROGRAM), NOTHING_AROUND)

    def values(before: Setup, after: Setup, gpus: int) -> dict[str, Any]:
        changes: dict[str, Any] = {}
        for flag, values in megatron.flags_changed(before, after).items():
            if values is None and flag not in given:
                continue
            changes[f"{section}.{flag}"] = False if values is None else values[0] if len(values) == 1 else " ".join(values) or True
        return {path: int(value) if str(value).isdecimal() else value for path, value in changes.items()}

    return Source(file.text, reading, values, file.change)
