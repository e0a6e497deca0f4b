"""torch's DistributedDataParallel over a model of Hugging Face transformers: an engine in a package of its own.

Pure, as every engine's side of the plan is: torch is imported by worker.py alone.
"""

from __future__ import annotations

from orchestrator.engines.engine import Engine, Requirements
from orchestrator.engines.hf_config import hf_fields, inexpressible
from orchestrator.engines.translation import assemble, engine_file
from orchestrator.hardware.spec import Software
from orchestrator.job import Job
from orchestrator.plan import Plan
from orchestrator.strategy.capabilities import Capabilities, Rule, StateBytes, Traits
from orchestrator.strategy.spec import RANK_ORDER

REQUIREMENTS = Requirements(modules=("torch", "transformers"))


def capabilities(software: Software) -> Capabilities:
    """Data parallelism in fp32, whole models, whole layers recomputed or none."""
    return Capabilities(
        engine="ddp",
        parts=("attention", "mlp", "llama3_rope"),
        axes=("dp",),
        zero_stages=(0,),
        zero_stages_with_pipeline=(),
        sequence_parallel=False,
        recompute=("none", "full"),
        recompute_varies="never",
        uneven_stages=False,
        schedules=("1f1b",),
        offload_optimizer=False,
        precisions=("fp32",),
        optimizers=("adamw",),
        rank_orders=(RANK_ORDER,),
        rules=(
            Rule(
                id="hf_architecture",
                engine_rule="transformers/models/*/configuration_*.py",
                check=lambda candidate, workload: inexpressible(workload.model.architecture),
                needs=("model",),
            ),
        ),
    )


def traits(software: Software) -> Traits:
    """fp32 weights, gradients and Adam's two moments; gradients are views of the buckets (gradient_as_bucket_view), all-reduced beside the
    backward pass of the last micro-batch."""
    return Traits(
        engine="ddp",
        states={"fp32/0": StateBytes(weight=4, gradient=4, master=0, moments=8)},
        gradient_bytes_on_wire="weight",
        reduce_scatter_from_stage=4,
        overlaps_param_gather=False,
        fp32_gradient_fusion=False,
        layers="hugging_face",
    )


def translate(plan: Plan) -> Job:
    """The job of `ddp_engine.worker`."""
    return assemble(plan, "ddp_engine.worker", [engine_file(plan, REQUIREMENTS, {"model": hf_fields(plan)})], [])


ENGINE = Engine(name="ddp", capabilities=capabilities, traits=traits, translate=translate, requirements=REQUIREMENTS)
