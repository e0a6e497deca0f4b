"""Megatron's own training loop in the place of our worker (programs/megatron.py): why it can't train a plan, and its job. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from orchestrator.engines.engine import Entry
from orchestrator.engines.megatron.capabilities import REQUIREMENTS
from orchestrator.engines.megatron.entry import arguments, without_flags
from orchestrator.engines.megatron_args import program_of, reads_indexed_data, why_not
from orchestrator.engines.megatron_versions import number
from orchestrator.engines.transformer_config import common_recompute, recompute_fields
from orchestrator.engines.translation import engine_file
from orchestrator.job import Job
from orchestrator.plan import Plan

ENGINE: Final = "engine.json"
PROGRAM: Final = "orchestrator.programs.megatron"
CHECKOUT: Final = "MEGATRON_LM"
"""The variable that names a checkout of Megatron-LM (programs/megatron_hooks.py)."""
INSTALL: Final = f"megatron-core>=0.19, whose wheel has it, or a checkout of Megatron-LM named by env.{CHECKOUT}=PATH"
FIRST: Final = number("0.19.0")
"""The release from which on it has."""
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
        "train.trace_routing": run.trace_routing,
        "vocabulary file of BERT's and T5's programs, which entry= can be given: entry.args=--vocab-file": plan.model.stack != "decoder",
        "saving beside the training on CPU ranks": run.async_save and plan.cluster.is_cpu,
    }
    found = next((what for what, is_asked in lacking.items() if is_asked), None)
    return f"Megatron's own training loop has no {found}" if found else why_not(told(plan))


def told(plan: Plan) -> Plan:
    """The plan as Megatron's command line is told it: recompute that differs by stage is left out, and an activation without a flag said as
    GELU, which each rank takes from engine.json; so are supervised samples, which the program reads itself (programs/megatron_hooks.py)."""
    if plan.model.activation == "relu":
        plan = replace(plan, model=replace(plan.model, activation="gelu"))
    plan = replace(plan, training=replace(plan.training, task="pretrain", packing=None, lengths=None))
    if common_recompute(plan) is not None:
        return plan
    stages = (replace(stage, layers=tuple(replace(span, recompute="none") for span in stage.layers)) for stage in plan.stages)
    return replace(plan, stages=tuple(stages))


def why_absent(plan: Plan) -> str | None:
    """Why the wheel of the planned release has no training loop; None: it has."""
    version = plan.cluster.software.megatron_core
    return None if number(version) >= FIRST else f"megatron-core {version} has no training loop of its own: {INSTALL}"


def encoded(plan: Plan) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(prefixes, in the run's folder, of the corpora that a plan's text is encoded into to be trained on; of those that it is evaluated
    on). A share of data.split is a corpus of its own: Megatron would divide whole documents."""
    run = plan.run
    sources = max(1, len(run.blend))
    valid = 0 if not run.eval_every else 1 if run.valid else sources
    return tuple(f"data/train-{number}" for number in range(sources)), tuple(f"data/valid-{number}" for number in range(valid))


def _data(plan: Plan) -> tuple[str, ...]:
    """The arguments that name the corpora of a plan's text."""
    train, valid = encoded(plan)
    weights = [repr(source.weight) for source in plan.run.blend] or ["1.0"]

    def blend(prefixes: Sequence[str]) -> list[str]:
        return [word for pair in zip(weights, prefixes, strict=False) for word in pair]

    return ("--train-data-path", *blend(train), *(("--valid-data-path", *blend(valid)) if valid else ()))


def own_job(plan: Plan, job: Job, exit_minutes: int | None = None, trial_steps: int | None = None) -> Job:
    """The job with Megatron's loop in the place of our worker. `exit_minutes`, `trial_steps`: as of `Entry`. Raises InputError."""
    words = arguments(told(plan), Entry(program=program_of(plan) or PROGRAM, exit_minutes=exit_minutes, trial_steps=trial_steps))
    if plan.training.task == "sft":  # samples have answers of different lengths: the mean is over all of a global batch
        words = (*without_flags(words, ("--mock-data", "--split")), "--calculate-per-token-loss")
    elif not reads_indexed_data(plan):
        words = (*without_flags(words, ("--mock-data", "--split")), *_data(plan))
    files = job.files
    if not any(file.path == ENGINE for file in files) and told(plan) != plan:  # our worker can't train such a model, and has no file
        by_stage = {"per_stage": [recompute_fields(plan, stage) for stage in range(plan.pp)]}
        files = (*files, engine_file(plan, REQUIREMENTS, by_stage))
    return replace(job, module=PROGRAM, files=files, arguments=(*words, LOSS_IS_LOOKED_AT), without_worker="")
