"""What the engines on megatron-core's layers write alike, engine.json, and what they need and say alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.engines import passthrough
from orchestrator.engines.hf_config import export_fields, inexpressible
from orchestrator.engines.megatron_versions import release_of, unknown
from orchestrator.engines.transformer_config import engine_fields
from orchestrator.hardware.spec import Cluster
from orchestrator.model.spec import Architecture
from orchestrator.plan import Plan


def layers_versions(cluster: Cluster) -> dict[str, str]:
    """The distributions that megatron-core's layers run on."""
    version = cluster.software.megatron_core
    fused = cluster.software.transformer_engine and not cluster.is_cpu
    beside = (*release_of(version).modules, *(("transformer-engine",) if fused else ()))
    return {"megatron-core": version} | dict.fromkeys(beside, "")


def layers_fields(plan: Plan, passes: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """engine.json's content, with the user's own values. `passes`: the engine's, as `Engine` says. Raises InputError where these contradict
    the plan."""
    passthrough.check(plan, passes)
    sections = passes[passthrough.MEGATRON]
    fields = passthrough.with_megatron(engine_fields(plan, sections), plan, sections)
    return fields | {"export": export_fields(plan.model)} if plan.run.export_to else fields


def version_notes(plan: Plan) -> list[str]:
    """What is not known of the planned release."""
    return [said for said in (unknown(plan.cluster.software.megatron_core),) if said is not None]


def why_no_exchange(engine: str, a: Architecture, model_type: str | None) -> str | None:
    """Why weights can't go between megatron-core's model and transformers'; None: they can."""
    if a.stack == "encoder_decoder":
        return f"megatron-core's {a.family} is another function than transformers': it scales its scores and has an output bias"
    if model_type == "bert":
        return f"engine={engine} has a pre-norm BERT (model_type megatron-bert in transformers), the checkpoint's is post-norm"
    return inexpressible(a)
