"""What the pool's ranks run for the silent errors."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist
import worker_cases

from orchestrator.engines import ENGINES
from orchestrator.errors import InputError
from orchestrator.plan import from_json


def build(plan_json: str, edits: dict[str, Any] | None = None) -> str:
    """What a rank says to this plan, with `edits` (path in the ds_config that it reads: value, or None to leave it out); "": nothing."""
    return _build(from_json(plan_json), edits or {})


def _build(plan: Any, edits: dict[str, Any]) -> str:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in ENGINES[plan.engine].translate(plan).files:
            (folder / file.path).write_text(file.content)
        read = folder / ("ds_config.auto.json" if plan.engine == "deepspeed" else "engine.json")
        content = json.loads(read.read_text())
        for path, value in edits.items():
            *above, last = path.split(".")
            section = content.get("ds_config", content)
            for part in above:
                section = section.setdefault(part, {})
            if value is None:
                del section[last]
            else:
                section[last] = value
        read.write_text(json.dumps(content))
        try:
            worker_cases.build(plan, folder)
        except (InputError, ValueError) as error:  # transformers' own
            return str(error)
    return ""


def build_alone(plan_json: str) -> str:
    """`build` on a rank that never joined a process group."""
    plan = from_json(plan_json)
    dist.destroy_process_group()
    try:
        return _build(plan, {})
    finally:
        # The pool leaves the group that it made.
        if not dist.is_initialized():
            store = tempfile.mktemp(dir=os.environ.get("TMPDIR"))
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
