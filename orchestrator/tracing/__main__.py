"""`python -m orchestrator.tracing REQUEST.json ANSWER.json`: records the layers of a model from its own code, in a process of its
own, since that needs torch and orchestrator/describe.py, which starts it, does not.

The request has "config" (a Hugging Face config.json as text) or "code" ("package.module:factory"), "seq_length" and "decoder_seq_length"
(tokens; null: none) and "itemsize" (bytes of an activation's element). The answer has "traced" (model/traced.py) or "error", the parts of
an InputError."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from orchestrator.errors import InputError
from orchestrator.tracing.build import Source
from orchestrator.tracing.trace import described


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The content of ANSWER.json: what was recorded, or the error."""
    source = Source(config=request.get("config", ""), code=request.get("code", ""))
    try:
        return {"traced": described(source, request["seq_length"], request["decoder_seq_length"], request["itemsize"])}
    except InputError as error:
        return {"error": {"key": error.key, "value": error.value, "why": error.why, "choices": error.choices}}


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m orchestrator.tracing REQUEST.json ANSWER.json, which python -m orchestrator.describe calls")
    asked, out = map(Path, sys.argv[1:])
    out.write_bytes(msgspec.json.encode(answer(json.loads(asked.read_text()))))
