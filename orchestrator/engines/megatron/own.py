"""Megatron's own training loop in the place of our worker (programs/megatron.py): why it can't train a plan, and its job. Pure."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from orchestrator.engines.engine import Entry
from orchestrator.engines.megatron.entry import arguments
from orchestrator.engines.megatron_args import program_of, reads_indexed_data, why_not
from orchestrator.job import Job
from orchestrator.plan import Plan

PROGRAM: Final = "orchestrator.programs.megatron"
CHECKOUT: Final = "MEGATRON_LM"
"""The variable that names a checkout of Megatron-LM (programs/megatron_hooks.py)."""
INSTALL: Final = f"megatron-core>=0.19, whose wheel has it, or a checkout of Megatron-LM named by env.{CHECKOUT}=PATH"
OF_MEGATRON: Final = "iter_"
"""How the names of Megatron's checkpoints begin (training/checkpointing.py, get_checkpoint_name)."""
LOSS_IS_LOOKED_AT: Final = "--no-check-for-nan-in-loss-and-grad"
"""The flag under which all ranks look at the loss together (programs/megatron_hooks.py), where Megatron's check would raise on some and
leave the others waiting."""


def why_not_own(plan: Plan) -> str | None:
    """Why Megatron's own loop can't run this plan as it is; None: it can."""
    run = plan.run
    lacking = {
        "LoRA": plan.training.lora is not None,
        "chats (task=sft) as packed here": plan.training.task == "sft",
        "choice between a checkpoint's forms of GELU (model.init_from)": run.init_from is not None and plan.model.activation == "gelu",
        "train.trace_routing": run.trace_routing,
        "text that it would have to encode: python -m orchestrator.data writes the .bin and .idx that it reads": (
            (run.data is not None or bool(run.blend)) and not reads_indexed_data(plan)
        ),
        "relu": plan.model.activation == "relu",
        "vocabulary file of BERT's and T5's programs, which entry= can be given: entry.args=--vocab-file": plan.model.stack != "decoder",
        "saving beside the training on CPU ranks": run.async_save and plan.cluster.is_cpu,
    }
    found = next((what for what, is_asked in lacking.items() if is_asked), None)
    return f"Megatron's own training loop has no {found}" if found else why_not(plan)


def why_no_resume(before: Plan, now: Plan) -> str | None:
    """Why Megatron's loop can't read a checkpoint of the first plan under the second; None: it can."""
    if (before.zero_stage == 0) == (now.zero_stage == 0):
        return None
    stages = f"{before.zero_stage}, not of {now.zero_stage}"
    return f"Megatron's own training loop reads it into plans of zero_stage={stages}; pin.zero_stage={before.zero_stage}"


def own_job(plan: Plan, job: Job, exit_minutes: int | None = None, trial_steps: int | None = None) -> Job:
    """The job with Megatron's loop in the place of our worker. `exit_minutes`, `trial_steps`: as of `Entry`. Raises InputError."""
    words = arguments(plan, Entry(program=program_of(plan) or PROGRAM, exit_minutes=exit_minutes, trial_steps=trial_steps))
    return replace(job, module=PROGRAM, arguments=(*words, LOSS_IS_LOOKED_AT), without_worker="")
