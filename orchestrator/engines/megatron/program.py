"""Megatron-LM's own pretrain scripts: what their command line can say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from orchestrator.engines import megatron_args, passthrough
from orchestrator.engines.engine import Program
from orchestrator.engines.megatron.capabilities import capabilities
from orchestrator.engines.megatron_parts import BY_PROGRAM, PLANNED
from orchestrator.hardware.spec import Software
from orchestrator.job import File, Job
from orchestrator.plan import Plan
from orchestrator.strategy.capabilities import Capabilities
from orchestrator.units import format_seconds

ARGUMENTS: Final = "megatron_args.sh"
NOT_WRITTEN: Final = f"{ARGUMENTS} was not written: "
"""How the note begins that gives the reason."""


def argument_capabilities(software: Software) -> Capabilities:
    """What megatron-core runs, with one recompute setting for all stages (megatron/training/arguments.py, --recompute-*), of models whose
    arguments we write."""
    ours = capabilities(software)
    return replace(ours, recompute_varies="job", parts=(*(ours.parts or ()), *BY_PROGRAM), planned_parts={"lora": PLANNED["lora"]})


def beside(job: Job, plan: Plan, other: Plan) -> Job:
    """The job of a plan that the arguments can't say, with the arguments of `other` in its folder, and a note that says so."""
    kept = [note for note in job.notes if not note.startswith(NOT_WRITTEN)]
    reasons = [note.removeprefix(NOT_WRITTEN) for note in job.notes if note.startswith(NOT_WRITTEN)]
    said = f"{ARGUMENTS} has another plan, the fastest found that its flags can say: {other.candidate.label()}"
    if plan.predicted is not None and other.predicted is not None:
        slower = 100 * (other.predicted.step_time_s / plan.predicted.step_time_s - 1)
        said += f", predicted {format_seconds(other.predicted.step_time_s)} a step ({slower:+.1f}%)"
    note = "; ".join([said, *reasons])
    files = [file for file in job.files if file.path != ARGUMENTS]
    file = File(path=ARGUMENTS, content=megatron_args.megatron_args_sh(other))
    return replace(job, files=(*files, file), notes=(*kept, note, *megatron_args.notes(other), *passthrough.notes(other)))


def words(plan: Plan) -> list[str]:
    """The arguments that say a plan which Megatron's program can be told."""
    return [word for flag in megatron_args.megatron_flags(plan) for word in flag]


def of_documents(plan: Plan) -> Sequence[str] | None:
    """The arguments by which Megatron's program divides a corpus by whole documents; None: this plan's program does not. pretrain_gpt.py's
    data set takes whole documents for each of --split's shares, those of BERT and T5 sentences."""
    if megatron_args.program_of(plan) != "pretrain_gpt.py":
        return None
    return words(plan) if megatron_args.why_not(plan) is None else ()


PROGRAM: Final = Program(
    arguments=ARGUMENTS,
    capabilities=argument_capabilities,
    why_never=megatron_args.why_never,
    why_not=megatron_args.why_not,
    words=words,
    beside=beside,
    of_documents=of_documents,
)
