"""A user's DeepSpeed script in place of our worker: it takes the planned ds_config.json, and DeepSpeed's monitor writes its steps. Pure."""

from __future__ import annotations

import json
from typing import Any, Final

from msgspec.structs import replace

from orchestrator.engines.ds_config import dumps
from orchestrator.engines.engine import Entry
from orchestrator.engines.entry import timeout_minutes
from orchestrator.errors import InputError
from orchestrator.job import File, Job
from orchestrator.plan import Plan

DS_CONFIG: Final = ("--deepspeed", "ds_config.json")
MONITOR: Final[dict[str, Any]] = {
    "wall_clock_breakdown": True,
    "csv_monitor": {"enabled": True, "output_path": "logs", "job_name": "deepspeed"},
}
"""What makes DeepSpeed write each step's times and learning rate, for launch/deepspeed_csv.py: they become metrics.jsonl."""


def _monitored(file: File) -> File:
    """ds_config.json with MONITOR, as far as the user's own `ds.*` keys don't say otherwise."""
    if file.path != DS_CONFIG[1]:
        return file
    return replace(file, content=dumps(MONITOR | json.loads(file.content)))


def start(plan: Plan, job: Job, entry: Entry) -> Job:
    """As `Engine.entry` says: a script that takes its config by DS_CONFIG, or, where the user's arguments say so, by --deepspeed_config."""
    if entry.without:
        raise InputError("entry.without", entry.without[0], "is for Megatron's programs")
    given = {word.partition("=")[0] for word in entry.arguments}
    own = "--deepspeed_config" in given
    if "--deepspeed" in given and not own:
        raise InputError("entry.args", "--deepspeed", f"is ours: {' '.join(DS_CONFIG)}")
    minutes = timeout_minutes(plan)
    return replace(
        job,
        program=entry.program,
        arguments=(*(() if own else DS_CONFIG), *entry.arguments),
        files=tuple(_monitored(file) for file in job.files),
        environment=job.environment | ({} if minutes is None else {"DEEPSPEED_TIMEOUT": str(minutes)}),
        launcher=entry.launcher,
    )
