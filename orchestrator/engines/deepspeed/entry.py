"""A user's DeepSpeed script in the program's place: it takes the planned ds_config.json, and DeepSpeed's monitor writes its steps. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import PurePath
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
OTHER_MONITORS: Final = ("tensorboard", "wandb", "comet")
"""Sections of the user's that a trial goes without."""


def _monitored(file: File, *, trial: bool) -> File:
    """ds_config.json with MONITOR, as far as the user's own `ds.*` keys don't say otherwise; in a trial, which is run for its times, with
    MONITOR alone."""
    if file.path != DS_CONFIG[1]:
        return file
    config = json.loads(file.content)
    if trial:
        config = {name: value for name, value in config.items() if name not in (*OTHER_MONITORS, *MONITOR)}
    return replace(file, content=dumps(MONITOR | config))


def own_config(words: Sequence[str]) -> str | None:
    """What the user's arguments give as --deepspeed_config; None: nothing.

    >>> own_config(["--deepspeed", "--deepspeed_config", "a.json"]), own_config(["--deepspeed_config=b.json"]), own_config(["--lr", "1"])
    ('a.json', 'b.json', None)
    """
    for word, after in zip(words, [*words, ""][1:], strict=True):
        name, equals, value = word.partition("=")
        if name == "--deepspeed_config":
            return value if equals else after
    return None


def start(plan: Plan, job: Job, entry: Entry) -> Job:
    """The job with a user's own program (`Engine.entry`): a script that takes its config by DS_CONFIG, or, where the user's arguments say
    so, by --deepspeed_config. How many steps it takes is its own affair: who measures it ends it. Raises InputError for arguments that
    contradict the plan."""
    if entry.without:
        raise InputError("entry.without", entry.without[0], "is for Megatron's programs")
    given = {word.partition("=")[0] for word in entry.arguments}
    own = own_config(entry.arguments)
    if "--deepspeed" in given and own is None:
        raise InputError("entry.args", "--deepspeed", f"is ours: {' '.join(DS_CONFIG)}")
    if own is not None and entry.trial_steps is not None and PurePath(own) != PurePath(DS_CONFIG[1]):
        raise InputError("entry.args", f"--deepspeed_config {own}", f"is the same for all plans that tune= tries; theirs: {DS_CONFIG[1]}")
    minutes = timeout_minutes(plan)
    return replace(
        job,
        program=entry.program,
        arguments=(*(DS_CONFIG if own is None else ()), *entry.arguments),
        files=tuple(_monitored(file, trial=entry.trial_steps is not None) for file in job.files),
        environment=job.environment | ({} if minutes is None else {"DEEPSPEED_TIMEOUT": str(minutes)}),
        launcher=entry.launcher,
    )
