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
    lacking = {
        "chats (task=sft) under Ulysses, or with a loss that balances experts": (
            plan.training.task == "sft" and (plan.cp > 1 or any(part.aux_loss_coeff for part in plan.model.experts))
        ),
        "models described by their own code": plan.model.traced is not None,
    }
    found = next((what for what, is_asked in lacking.items() if is_asked), None)
    return f"orchestrator/programs/hugging_face.py has no {found}" if found else trainer_files.why_not(replace(plan, cp=1))


def own_job(plan: Plan, job: Job, exit_minutes: int | None = None, trial_steps: int | None = None) -> Job:
    """The job with the Trainer in the place of our worker. Under Ulysses its files are the program's, which corrects what they lack."""
    if plan.cp > 1:
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
