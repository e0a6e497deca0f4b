"""transformers' Trainer in the place of our worker (programs/hugging_face.py): why it can't train a plan, and its job. Pure."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from orchestrator.engines.deepspeed import trainer_files
from orchestrator.engines.deepspeed.translate import own_settings
from orchestrator.engines.ds_states import why_no_resume
from orchestrator.engines.engine import OwnLoop
from orchestrator.job import Job
from orchestrator.plan import Plan

PROGRAM: Final = "orchestrator.programs.hugging_face"


def why_not(plan: Plan) -> str | None:
    """Why the Trainer can't train this plan, with what its run asks for; None: it can."""
    if plan.model.traced is not None:
        return "orchestrator/programs/hugging_face.py has no models described by their own code"
    if plan.ep > 1:  # runtime/zero/stage_1_and_2.py, _configure_moe_settings: it divides the groups of an optimizer that it makes itself
        return "DeepSpeed's AutoEP does not take the Trainer's optimizer"
    return trainer_files.why_no_schedule(plan)


def own_job(plan: Plan, job: Job, exit_minutes: int | None = None, trial_steps: int | None = None) -> Job:
    """The job with the Trainer in the place of our worker. Its files are there also where by hand they lack what the program corrects."""
    if not any(file.path == trainer_files.TRAINER for file in job.files):
        files = trainer_files.files_of(plan, own_settings(plan), checkpointing=plan.strategy.recompute == "full")
        notes = tuple(note for note in job.notes if not note.startswith(trainer_files.NONE))
        job = replace(job, files=(*job.files, *files), notes=notes)
    return replace(job, module=PROGRAM)


LOOP: Final = OwnLoop(
    name="transformers' Trainer",
    why_not=why_not,
    job=own_job,
    modules=("accelerate",),
    install="pip install -e '.[engines]'",
    why_no_resume=why_no_resume,
    reshardable=True,
    is_default=True,
)
