"""Megatron-LM's pretrain scripts, or forks of them, in place of our worker: the argument list that they are started with. Pure."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from orchestrator.engines.engine import Entry
from orchestrator.engines.entry import timeout_minutes
from orchestrator.engines.megatron_args import Flag, megatron_flags, why_not
from orchestrator.errors import InputError
from orchestrator.job import Job
from orchestrator.plan import Plan

OWN_CHOICE: Final = (
    "--data-path", "--mock-data", "--tokenizer-type", "--tokenizer-model", "--vocab-size", "--vocab-extra-ids", "--padded-vocab-size",
    "--split", "--eval-interval", "--eval-iters", "--log-interval", "--save", "--save-interval", "--ckpt-format", "--load",
)  # fmt: skip
"""Flags that decide neither plan nor convergence: the user's replace ours."""
DATA: Final = ("--data-path", "--data-args-path", "--train-data-path", "--per-split-data-args-path")
"""Any of them ends mock data."""


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


def arguments(plan: Plan, entry: Entry) -> tuple[str, ...]:
    """All that the program is started with. Raises InputError where the command line can't say the plan, or the user's arguments contradict
    it."""
    reason = why_not(plan)
    if reason is not None:
        raise InputError("entry", entry.program, f"can't be started with this plan: {reason}")
    useful = useful_flags(plan, entry.exit_minutes)
    names = [flag[0] for flag in useful]
    for name in entry.without:
        if name not in names:
            raise InputError("entry.without", name, "is no flag that we add", names)
    given = {word.partition("=")[0] for word in entry.arguments if word.startswith("--")}
    for flag in megatron_flags(plan):
        if flag[0] in given and flag[0] not in OWN_CHOICE:
            raise InputError("entry.args", flag[0], f"the plan says {' '.join(flag)}; change the recipe, or pin it")
    left_out = {*given, *entry.without, *(("--mock-data",) if given & {*DATA} else ())}
    return (*(word for flag in (*megatron_flags(plan), *useful) if flag[0] not in left_out for word in flag), *entry.arguments)


def start(plan: Plan, job: Job, entry: Entry) -> Job:
    """As `Engine.entry` says."""
    if entry.launcher != "torchrun":
        why = f"starts DeepSpeed's scripts, and the plan is for engine={plan.engine}"
        raise InputError("entry.launcher", entry.launcher, why, ["torchrun"])
    return replace(job, program=entry.program, arguments=arguments(plan, entry))
