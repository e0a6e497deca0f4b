"""A user's own program in place of our worker: Megatron-LM's pretrain scripts or forks of them, or a DeepSpeed script. Pure.

It runs in the run folder, on the same ranks and with the same environment as our worker would.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, Final, Literal

from msgspec.structs import replace

from orchestrator.engines.ds_config import dumps
from orchestrator.engines.megatron_args import Flag, megatron_flags, why_not
from orchestrator.errors import InputError
from orchestrator.job import File, Job
from orchestrator.plan import Plan, RunSettings

Launcher = Literal["torchrun", "deepspeed"]

ENGINE_OF_ENTRY: Final = "megatron"
"""What engine=auto means beside entry=: the arguments of Megatron-LM are the commoner case; engine=deepspeed is said."""

DS_CONFIG: Final = ("--deepspeed", "ds_config.json")
MONITOR: Final[dict[str, Any]] = {
    "wall_clock_breakdown": True,
    "csv_monitor": {"enabled": True, "output_path": "logs", "job_name": "deepspeed"},
}
"""What makes DeepSpeed write each step's times and learning rate, for launch/deepspeed_csv.py: they become metrics.jsonl."""

OWN_CHOICE: Final = (
    "--data-path", "--mock-data", "--tokenizer-type", "--tokenizer-model", "--vocab-size", "--vocab-extra-ids", "--padded-vocab-size",
    "--split", "--eval-interval", "--eval-iters", "--log-interval", "--save", "--save-interval", "--ckpt-format", "--load",
)  # fmt: skip
"""Flags that decide neither plan nor convergence: the user's replace ours."""
DATA: Final = ("--data-path", "--data-args-path", "--train-data-path", "--per-split-data-args-path")
"""Any of them ends mock data."""


def timeout_minutes(plan: Plan) -> int | None:
    """What train.step_timeout_s means to a program that has no watchdog of ours: how long a collective may last (with NCCL, torch then
    dumps its flight recorder and ends the rank). None: the program's own default, 10 minutes in Megatron-LM and DeepSpeed."""
    seconds = plan.run.step_timeout_s
    return None if seconds in (0.0, RunSettings().step_timeout_s) else max(1, math.ceil(seconds / 60))


def useful_flags(plan: Plan, exit_minutes: int | None = None) -> tuple[Flag, ...]:
    """What we add for a run that nobody watches: save beside the training, in a layout that any other plan can load; save and leave
    on Slurm's warning (launch/render.py sends SIGUSR1) and before the time limit; say which GPU is slow; go on from the own checkpoint."""
    flags: list[Flag] = [("--log-throughput",)]
    minutes = timeout_minutes(plan)
    if minutes is not None:
        flags += [("--distributed-timeout-minutes", str(minutes))]
    if not plan.cluster.is_cpu:
        flags += [("--log-straggler",)]
    if plan.run.save_every:
        # Without a worker of its own for it, saving beside the training is turned off with a warning (arguments.py:1139).
        flags += [("--load", "checkpoints"), ("--async-save",), ("--use-persistent-ckpt-worker",)]
        flags += [("--exit-signal-handler",), ("--exit-signal", "SIGUSR1")]
        if plan.zero_stage:
            flags += [("--dist-ckpt-optim-fully-reshardable",)]
        if exit_minutes is not None and exit_minutes > 0:
            flags += [("--exit-duration-in-mins", str(exit_minutes))]
    return tuple(flags)


def _megatron(plan: Plan, program: str, more: Sequence[str], without: Sequence[str], exit_minutes: int | None) -> tuple[str, ...]:
    """The argument list. Raises InputError where the command line can't say the plan, or the user's arguments contradict it."""
    reason = why_not(plan)
    if reason is not None:
        raise InputError("entry", program, f"can't be started with this plan: {reason}")
    useful = useful_flags(plan, exit_minutes)
    names = [flag[0] for flag in useful]
    for name in without:
        if name not in names:
            raise InputError("entry.without", name, "is no flag that we add", names)
    given = {word.partition("=")[0] for word in more if word.startswith("--")}
    for flag in megatron_flags(plan):
        if flag[0] in given and flag[0] not in OWN_CHOICE:
            raise InputError("entry.args", flag[0], f"the plan says {' '.join(flag)}; change the recipe, or pin it")
    mock = () if given & {*DATA} else ("--mock-data",)
    ours = [flag for flag in (*megatron_flags(plan), *useful) if flag[0] not in given and flag[0] not in without]
    return (*(word for flag in ours if flag[0] != "--mock-data" or mock for word in flag), *more)


def _monitored(file: File) -> File:
    """ds_config.json with MONITOR, as far as the user's own `ds.*` keys don't say otherwise."""
    if file.path != DS_CONFIG[1]:
        return file
    return replace(file, content=dumps(MONITOR | json.loads(file.content)))


def _deepspeed(plan: Plan, job: Job, program: str, more: Sequence[str], without: Sequence[str], launcher: Launcher) -> Job:
    """A script that takes its config by DS_CONFIG, or, where the user's arguments say so, by --deepspeed_config. Raises InputError."""
    if without:
        raise InputError("entry.without", without[0], "is for Megatron's programs")
    given = {word.partition("=")[0] for word in more}
    own = "--deepspeed_config" in given
    if "--deepspeed" in given and not own:
        raise InputError("entry.args", "--deepspeed", f"is ours: {' '.join(DS_CONFIG)}")
    minutes = timeout_minutes(plan)
    return replace(
        job,
        program=program,
        arguments=(*(() if own else DS_CONFIG), *more),
        files=tuple(_monitored(file) for file in job.files),
        environment=job.environment | ({} if minutes is None else {"DEEPSPEED_TIMEOUT": str(minutes)}),
        launcher=launcher,
    )


def entry_job(
    plan: Plan, job: Job, program: str, more: Sequence[str] = (), without: Sequence[str] = (), exit_minutes: int | None = None,
    launcher: Launcher = "torchrun",
) -> Job:  # fmt: skip
    """The job with `program` in place of our worker. `more`: the user's arguments, which come last. `exit_minutes`: what the time limit
    leaves. Raises InputError."""
    if plan.run.resume is not None:
        why = "is a checkpoint of our worker, and entry= starts another program; give that --load in entry.args"
        raise InputError("train.resume", plan.run.resume, why)
    if plan.engine == "deepspeed":
        return _deepspeed(plan, job, program, more, without, launcher)
    if launcher != "torchrun":
        raise InputError("entry.launcher", launcher, f"starts DeepSpeed's scripts, and the plan is for engine={plan.engine}", ["torchrun"])
    if plan.engine != "megatron":
        raise InputError("entry", program, f"engine={plan.engine} is our worker's own; a program of yours can be started with one of",
                         ["megatron", "deepspeed"])  # fmt: skip
    return replace(job, program=program, arguments=_megatron(plan, program, more, without, exit_minutes))
