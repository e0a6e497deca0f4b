"""Megatron-LM's pretrain scripts, or forks of them, in place of our worker: the argument list that they are started with. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
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
"""Flags any of which ends mock data."""
NOT_IN_A_TRIAL: Final = (
    "--save", "--save-interval", "--save-retain-interval", "--async-save", "--use-persistent-ckpt-worker", "--load", "--ckpt-step",
    "--pretrained-checkpoint", "--use-checkpoint-args", "--exit-on-missing-checkpoint", "--non-persistent-save-interval",
    "--non-persistent-ckpt-type", "--non-persistent-global-ckpt-dir", "--non-persistent-local-ckpt-dir",
    "--non-persistent-local-ckpt-algo", "--eval-interval", "--eval-iters", "--log-interval", "--tensorboard-dir", "--wandb-project",
    "--wandb-exp-name", "--wandb-save-dir", "--wandb-entity", "--exit-interval", "--exit-duration-in-mins", "--profile",
)  # fmt: skip
"""Flags of the user's by which a run saves, goes on from a checkpoint, evaluates, ends early, is slowed by a profiler, tells others of
itself, or tells of its steps too seldom."""


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
        if not plan.cluster.is_cpu:  # what it starts for that would lack what megatron-core lacks without a GPU (cpu/shims.py)
            # Without a worker of its own for it, saving beside the training is turned off with a warning (arguments.py:1139).
            flags += [("--async-save",), ("--use-persistent-ckpt-worker",)]
        flags += [("--exit-signal-handler",), ("--exit-signal", "SIGUSR1")]
        if plan.zero_stage:
            flags += [("--dist-ckpt-optim-fully-reshardable",)]
        if exit_minutes is not None and exit_minutes > 0:
            flags += [("--exit-duration-in-mins", str(exit_minutes))]
    return tuple(flags)


def arguments(plan: Plan, entry: Entry) -> tuple[str, ...]:
    """All that the program is started with; a trial has the learning rates of the whole training. Raises InputError where the command line
    can't say the plan, or the user's arguments contradict it."""
    reason = why_not(plan)
    if reason is not None:
        raise InputError("entry", entry.program, f"can't be started with this plan: {reason}")
    useful = useful_flags(plan, entry.exit_minutes)
    names = [flag[0] for flag in useful]
    for name in entry.without:
        if name not in names and entry.trial_steps is None:
            raise InputError("entry.without", name, "is no flag that we add", names)
    own = entry.arguments if entry.trial_steps is None else without_flags(entry.arguments, NOT_IN_A_TRIAL)
    flags = [("--train-iters", str(entry.trial_steps)) if flag[0] == "--train-iters" and entry.trial_steps else flag
             for flag in megatron_flags(plan)]  # fmt: skip
    given = {word.partition("=")[0] for word in own if word.startswith("--")}
    for flag in flags:
        if flag[0] in given and flag[0] not in OWN_CHOICE:
            raise InputError("entry.args", flag[0], f"the plan says {' '.join(flag)}; change the recipe, or pin it")
    left_out = {*given, *entry.without, *(("--mock-data",) if given & {*DATA} else ())}
    return (*(word for flag in (*flags, *useful) if flag[0] not in left_out for word in flag), *own)


def without_flags(words: Sequence[str], names: Collection[str]) -> tuple[str, ...]:
    """The words without these flags and their values.

    >>> without_flags(["--split", "98,2,0", "--save", "/there", "--load=/here", "--lr-decay-style", "cosine"], ["--save", "--load"])
    ('--split', '98,2,0', '--lr-decay-style', 'cosine')
    """
    kept: list[str] = []
    left_out = False
    for word in words:
        if word.startswith("--"):
            left_out = word.partition("=")[0] in names
        if not left_out:
            kept.append(word)
    return tuple(kept)


def start(plan: Plan, job: Job, entry: Entry) -> Job:
    """The job with a user's own program (`Engine.entry`). Raises InputError for a launcher other than torchrun."""
    if entry.launcher != "torchrun":
        why = f"starts DeepSpeed's scripts, and the plan is for engine={plan.engine}"
        raise InputError("entry.launcher", entry.launcher, why, ["torchrun"])
    return replace(job, program=entry.program, arguments=arguments(plan, entry))
