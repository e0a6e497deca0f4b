"""A user's own program in place of our worker. Pure.

It runs in the run folder, on the same ranks and with the same environment as our worker would. How it is told the plan is each engine's
own (`Engine.entry`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from orchestrator.engines.engine import Engine, Entry, OwnLoop
from orchestrator.errors import InputError
from orchestrator.job import Job
from orchestrator.plan import Plan, RunSettings


def timeout_minutes(plan: Plan) -> int | None:
    """What train.step_timeout_s means to a program that has no watchdog of ours: how long a collective may last (with NCCL, torch then
    dumps its flight recorder and ends the rank). None: the program's own default, 10 minutes in Megatron-LM and DeepSpeed."""
    seconds = plan.run.step_timeout_s
    return None if seconds in (0.0, RunSettings().step_timeout_s) else max(1, math.ceil(seconds / 60))


def own_loop(engine: Engine, plan: Plan, asked: str, *, checkout: bool = False) -> tuple[OwnLoop | None, str]:
    """(the engine's own training loop where it trains the plan, else None; why). `asked`: what program= says; `checkout`: whether a
    checkout is named that has the loop. Raises InputError where it asks for a loop that can't run the plan."""
    loop = engine.own_loop
    if asked == "instrument":
        return (loop if loop is not None and loop.is_instrument else None), "program=instrument"
    why = f"engine={engine.name} has no training loop but our worker's" if loop is None else loop.why_not(plan)
    if asked == "own":
        if loop is None or why is not None:
            raise InputError("program", asked, str(why), ["instrument", "auto"])
        return loop, "program=own"
    if loop is None or why is not None:
        return None, str(why)
    absent = None if checkout and plan.training.task == "pretrain" else loop.why_absent(plan)
    return (None, absent) if absent else (loop, "the default")


def engine_of_copy(engines: Mapping[str, Engine], program: str) -> str | None:
    """The engine of the program in orchestrator/programs that a user's is a copy of (Engine.copied). None: it is no copy, or not here."""
    with suppress(OSError, ValueError):
        text = Path(program).read_text(encoding="utf-8")
        copies = (name for name, engine in engines.items() if engine.copied and f"orchestrator.programs import {engine.copied}" in text)
        return next(copies, None)
    return None


def engine_of_entry(engines: Mapping[str, Engine], program: str) -> str:
    """What engine=auto means beside entry=: that of the program which it is a copy of, else the first in the declared order that starts a
    user's program; another one is said."""
    return engine_of_copy(engines, program) or next(name for name, engine in engines.items() if engine.entry is not None)


def entry_job(engines: Mapping[str, Engine], plan: Plan, job: Job, entry: Entry) -> Job:
    """The job with the user's program in place of our worker. Raises InputError."""
    if plan.run.resume is not None:
        why = "is a checkpoint of our worker, and entry= starts another program; give that --load in entry.args"
        raise InputError("train.resume", plan.run.resume, why)
    start = engines[plan.engine].entry
    if start is None:
        able = [name for name, engine in engines.items() if engine.entry is not None]
        why = f"engine={plan.engine} is our worker's own; a program of yours can be started with one of"
        raise InputError("entry", entry.program, why, able)
    return start(plan, job, entry)
