"""What the engines on megatron-core's layers write alike: engine.json, and megatron_args.sh for Megatron's own program."""

from __future__ import annotations

from typing import Any

from orchestrator.engines import passthrough
from orchestrator.engines.hf_config import inexpressible
from orchestrator.engines.hf_export import export_fields
from orchestrator.engines.megatron_args import megatron_args_sh, notes, why_not
from orchestrator.engines.megatron_versions import release_of, unknown
from orchestrator.engines.transformer_config import engine_fields
from orchestrator.hardware.spec import Cluster
from orchestrator.job import File
from orchestrator.model.spec import Architecture
from orchestrator.plan import Plan


def layers_versions(cluster: Cluster) -> dict[str, str]:
    """The distributions that megatron-core's layers run on."""
    version = cluster.software.megatron_core
    fused = cluster.software.transformer_engine and not cluster.is_cpu
    beside = (*release_of(version).modules, *(("transformer-engine",) if fused else ()))
    return {"megatron-core": version} | dict.fromkeys(beside, "")


def layers_fields(plan: Plan) -> dict[str, Any]:
    """engine.json's content, with the user's own values. Raises InputError where these contradict the plan."""
    passthrough.check(plan)
    fields = passthrough.with_megatron(engine_fields(plan), plan)
    return fields | {"export": export_fields(plan.model)} if plan.run.export_to else fields


def arguments_file(plan: Plan) -> tuple[list[File], list[str]]:
    """megatron_args.sh where the plan can be said in arguments, and what a user should know of it."""
    unsure = [said for said in (unknown(plan.cluster.software.megatron_core),) if said is not None]
    reason = why_not(plan)
    if reason is not None:
        return [], [*unsure, f"megatron_args.sh was not written: {reason}."]
    return [File(path="megatron_args.sh", content=megatron_args_sh(plan))], [*unsure, *notes(plan), *passthrough.notes(plan)]


def why_no_exchange(engine: str, a: Architecture, model_type: str | None) -> str | None:
    """Why weights can't go between megatron-core's model and transformers'; None: they can."""
    if a.stack == "encoder_decoder":
        return f"megatron-core's {a.family} is another function than transformers': it scales its scores and has an output bias"
    if model_type == "bert":
        return f"engine={engine} has a pre-norm BERT (model_type megatron-bert in transformers), the checkpoint's is post-norm"
    return inexpressible(a)
