"""Which format a file has, and its reader."""

from __future__ import annotations

import json

from orchestrator.audit import deepspeed, script
from orchestrator.audit.reading import Source
from orchestrator.errors import InputError


def read(text: str, name: str) -> Source:
    """Raises InputError for a file that no reader takes."""
    if not text.strip():
        raise InputError("audit", name, "is empty")
    if name.endswith(".json") or text.lstrip().startswith("{"):
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InputError("audit", name, f"is not JSON: {error}") from None
        if deepspeed.is_ds_config(content):
            return deepspeed.read(text, content)
        raise InputError("audit", name, f"is no ds_config: it has none of {', '.join(deepspeed.SIGNS)}")
    if name.endswith((".yaml", ".yml")):
        raise InputError("audit", name, "is YAML, of which no format is read yet: a shell script of Megatron-LM or a ds_config.json is")
    return script.read(text, name)
