"""A plan as the job of `orchestrator.workers.megatron`."""

from __future__ import annotations

from typing import Final

from orchestrator.engines import megatron_layers, megatron_parts
from orchestrator.engines.megatron.requirements import NAME, REQUIREMENTS
from orchestrator.engines.megatron_args import program_of
from orchestrator.engines.megatron_layers import arguments_file, layers_fields
from orchestrator.engines.translation import assemble, engine_file
from orchestrator.job import Job
from orchestrator.model.spec import Architecture
from orchestrator.plan import Plan

WORKER: Final = "orchestrator.workers.megatron"


def translate(plan: Plan) -> Job:
    """Pure. Raises InputError where the ranks don't fill the nodes evenly, or the user's own values contradict the plan."""
    only = megatron_parts.plan_only(plan.model)
    if only is not None:
        return assemble(plan, WORKER, [], ["engine.json and megatron_args.sh were not written: no worker reads them."], without_worker=only)
    engine = engine_file(plan, REQUIREMENTS, layers_fields(plan) | {"ds_config": None})
    files, notes = arguments_file(plan)
    return assemble(plan, WORKER, [engine, *files], notes, without_worker=without_worker(plan))


def without_worker(plan: Plan) -> str:
    """Why our worker can't run this plan, which Megatron's own programs can; empty: it can."""
    if not plan.megatron_fsdp:
        return ""
    script = program_of(plan)
    there = f"has: entry=PATH/{script}" if script else f"of Megatron-core {plan.cluster.software.megatron_core} is not there any more"
    return f"our worker has no Megatron-FSDP; Megatron's own program {there}"


def why_no_exchange(architecture: Architecture, model_type: str | None) -> str | None:
    """As `Engine` asks."""
    return megatron_layers.why_no_exchange(NAME, architecture, model_type)
