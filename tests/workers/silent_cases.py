"""What the pool's ranks run for the silent errors."""

from __future__ import annotations

import json
import os
import tempfile
from typing import Any

import torch.distributed as dist
import worker_cases

from orchestrator.engines import ENGINES
from orchestrator.errors import InputError
from orchestrator.plan import from_json


def build(plan_json: str, edits: dict[str, Any] | None = None) -> str:
    """What the worker says to this plan, with `edits` (path in engine.json's ds_config: value, or None to leave it out); "": nothing."""
    plan = from_json(plan_json)
    engine = json.loads(next(file.content for file in ENGINES[plan.engine].translate(plan).files if file.path == "engine.json"))
    for path, value in (edits or {}).items():
        *above, last = path.split(".")
        section = engine["ds_config"]
        for name in above:
            section = section.setdefault(name, {})
        if value is None:
            del section[last]
        else:
            section[last] = value
    return _build(plan, engine)


def _build(plan: Any, engine: dict[str, Any]) -> str:
    try:
        worker_cases.build(plan, engine)
    except InputError as error:
        return str(error)
    return ""


def build_alone(plan_json: str) -> str:
    """`build` on a rank that never joined a process group."""
    plan = from_json(plan_json)
    engine = json.loads(next(file.content for file in ENGINES[plan.engine].translate(plan).files if file.path == "engine.json"))
    dist.destroy_process_group()
    try:
        return _build(plan, engine)
    finally:
        # The pool leaves the group that it made.
        if not dist.is_initialized():
            store = tempfile.mktemp(dir=os.environ.get("TMPDIR"))
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
