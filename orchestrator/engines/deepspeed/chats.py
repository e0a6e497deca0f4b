"""Chats by TRL's SFTTrainer, which the program starts in the Trainer's place where it is installed."""

from __future__ import annotations

from msgspec.structs import replace

from orchestrator.job import Job
from orchestrator.plan import Plan, trl


def own_job(plan: Plan, job: Job, exit_minutes: int | None, trial_steps: int | None) -> Job:
    """The job of the engine's own loop (`OwnLoop.job`): with the flag where TRL trains the plan as it is."""
    return job if trl.why_not_trl(plan) else replace(job, arguments=(*job.arguments, trl.FLAG))


def trained_by(plan: Plan, job: Job) -> str:
    """Who trains this job, for a screen."""
    if trl.FLAG in job.arguments:
        return trl.who(trl.absent())
    why = trl.why_not_trl(plan) if plan.training.task == "sft" else None
    return f"{trl.TRAINER} (not {trl.NAME}: {why})" if why else trl.TRAINER
