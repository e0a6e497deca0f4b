"""A plan as the job of `orchestrator.workers.megatron_deepspeed`."""

from __future__ import annotations

from typing import Final

from orchestrator.engines import megatron_layers
from orchestrator.engines.ds_config import deepspeed_environment, deepspeed_files, ds_config
from orchestrator.engines.ds_pipeline import is_pipeline_module, pipeline_fields
from orchestrator.engines.megatron_deepspeed.requirements import NAME, REQUIREMENTS
from orchestrator.engines.megatron_layers import arguments_file, layers_fields
from orchestrator.engines.translation import assemble, engine_file
from orchestrator.job import Job
from orchestrator.model.spec import Architecture
from orchestrator.plan import Plan

WORKER: Final = "orchestrator.workers.megatron_deepspeed"


def translate(plan: Plan) -> Job:
    """Pure. Raises InputError where the ranks don't fill the nodes evenly, or the user's own values contradict the plan."""
    pipeline = {"pipeline": pipeline_fields(plan)} if is_pipeline_module(plan) else {}
    engine = engine_file(plan, REQUIREMENTS, layers_fields(plan) | {"ds_config": ds_config(plan)} | pipeline)
    files, said = deepspeed_files(plan)
    arguments, notes = arguments_file(plan)
    return assemble(plan, WORKER, [engine, *files, *arguments], [*said, *notes], deepspeed_environment(plan))


def why_no_exchange(architecture: Architecture, model_type: str | None) -> str | None:
    """As `Engine` asks."""
    return megatron_layers.why_no_exchange(NAME, architecture, model_type)
