"""Which format a file has, and its reader."""

from __future__ import annotations

from orchestrator.audit import script
from orchestrator.audit.reading import Source
from orchestrator.errors import InputError


def read(text: str, name: str) -> Source:
    """Raises InputError for a file that no reader takes."""
    if not text.strip():
        raise InputError("audit", name, "is empty")
    return script.read(text, name)
