"""A plan as the job of `orchestrator.workers.megatron_deepspeed`."""

from __future__ import annotations

from typing import Final

from orchestrator.engines import passthrough
from orchestrator.engines.ds_config import deepspeed_environment, deepspeed_file, ds_config, is_pipeline_module, pipeline_fields
from orchestrator.engines.megatron_args import megatron_lm
from orchestrator.engines.megatron_deepspeed.capabilities import REQUIREMENTS
from orchestrator.engines.megatron_parts import PLANNED
from orchestrator.engines.translation import assemble, engine_file, layers_fields, version_notes
from orchestrator.job import Job
from orchestrator.plan import Plan

WORKER: Final = "orchestrator.workers.megatron_deepspeed"
PASSES: Final = {passthrough.MEGATRON: ("transformer_config",), passthrough.DS: ()}
"""Groups of keys that reach this engine's configuration: megatron-core's layers alone; data parallelism and optimizer are DeepSpeed's. A
ds_config has no sections of its own."""


def translate(plan: Plan) -> Job:
    """The job of a plan; writes nothing. Raises InputError where the ranks don't fill the nodes evenly, or the user's own values contradict
    the plan."""
    if plan.model.embedding_norm:
        said = ["engine.json and ds_config.json were not written: no worker reads them."]
        return assemble(plan, WORKER, [], said, without_worker=f"plan only: {PLANNED['embedding_norm']}", passes=PASSES)
    pipeline = {"pipeline": pipeline_fields(plan)} if is_pipeline_module(plan) else {}
    engine = engine_file(plan, REQUIREMENTS, layers_fields(plan, PASSES) | {"ds_config": ds_config(plan)} | pipeline)
    file, notes = deepspeed_file(plan)
    notes += [*version_notes(plan), f"megatron_args.sh was not written: {megatron_lm(plan.cluster.software)} has no DeepSpeed."]
    return assemble(plan, WORKER, [engine, file], notes, deepspeed_environment(plan), passes=PASSES)
