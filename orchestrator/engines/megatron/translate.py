"""A plan as the job of `orchestrator.workers.megatron`."""

from __future__ import annotations

from typing import Final

from orchestrator.engines import hf_config, megatron_parts, passthrough
from orchestrator.engines.megatron.capabilities import REQUIREMENTS
from orchestrator.engines.megatron.program import ARGUMENTS, NOT_WRITTEN
from orchestrator.engines.megatron_args import megatron_args_sh, notes, program_of, why_not
from orchestrator.engines.translation import assemble, engine_file, layers_fields, version_notes
from orchestrator.job import File, Job
from orchestrator.plan import Plan

WORKER: Final = "orchestrator.workers.megatron"
PASSES: Final = {passthrough.MEGATRON: passthrough.SECTIONS}
"""Groups of keys that reach this engine's configuration: all of megatron-core's."""


def translate(plan: Plan) -> Job:
    """The job of a plan; writes nothing. Raises InputError where the ranks don't fill the nodes evenly, or the user's own values contradict
    the plan."""
    lora = plan.training.lora
    only = megatron_parts.plan_only(plan.model, plan.cluster.software.megatron_core, lora=lora is not None)
    if only is not None:
        if hf_config.inexpressible(plan.model) is None and (lora is None or not (lora.fused or plan.model.experts)):
            only += "; engine=deepspeed trains it"
        if lora is not None or not megatron_parts.by_program(plan.model, plan.cluster.software.megatron_core):
            return assemble(plan, WORKER, [], ["engine.json and megatron_args.sh were not written: no worker reads them."],
                            without_worker=only, passes=PASSES)  # fmt: skip
        files, said = arguments_file(plan)
        only += f"; {program_of_release(plan)}" if files else ""
        only += "; engine=deepspeed trains it described by its own code (python -m orchestrator.describe)"
        return assemble(plan, WORKER, files, said, without_worker=only, passes=PASSES)
    engine = engine_file(plan, REQUIREMENTS, layers_fields(plan, PASSES) | {"ds_config": None})
    files, said = arguments_file(plan)
    return assemble(plan, WORKER, [engine, *files], said, without_worker=without_worker(plan), passes=PASSES)


def arguments_file(plan: Plan) -> tuple[list[File], list[str]]:
    """The arguments of Megatron's own program where they can say the plan, and what a user should know of them."""
    unsure, reason = [*version_notes(plan), *prediction_notes(plan)], why_not(plan)
    if reason is not None:
        return [], [*unsure, f"{NOT_WRITTEN}{reason}."]
    return [File(path=ARGUMENTS, content=megatron_args_sh(plan))], [*unsure, *notes(plan), *passthrough.notes(plan)]


def prediction_notes(plan: Plan) -> list[str]:
    """Notes where prediction heads are not what one process computes: their loss is divided by each rank's own tokens, of which a part of
    the sequence has fewer at its end (core/models/gpt/gpt_model.py, GPTModel._postprocess; measured: 4.5e-3 of a tiny model's loss)."""
    if plan.cp == 1 or not plan.model.mtp_num_layers:
        return []
    said = "megatron-core divides the loss of prediction heads by each rank's own tokens"
    return [f"cp={plan.cp} with mtp_num_layers={plan.model.mtp_num_layers}: {said}: it is not exactly that of cp=1."]


def without_worker(plan: Plan) -> str:
    """Why our worker can't run this plan, which Megatron's own programs can; empty: it can."""
    needs = (
        ("Megatron-FSDP", plan.megatron_fsdp),
        ("optimizer offload", plan.offload_optimizer),
        ("offload of activations", plan.offload_modules is not None),
        ("Muon", plan.training.optimizer == "muon"),
        (f"cuda_graph_impl={plan.cuda_graph_impl}", plan.cuda_graph_impl not in ("none", "local")),
    )
    lacking = next((name for name, needed in needs if needed), None)
    return f"our worker has no {lacking}; {program_of_release(plan)}" if lacking else ""


def program_of_release(plan: Plan) -> str:
    """Says which program of the planned release trains what our worker lacks."""
    return f"Megatron's own program has: entry=PATH/{program_of(plan)}"
