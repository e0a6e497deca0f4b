"""What all engines' translations share: the shape of the job, its environment and its files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from orchestrator.engines import passthrough
from orchestrator.engines.ds_config import deepspeed_files, ds_config, dumps
from orchestrator.engines.ds_pipeline import is_pipeline_module, pipeline_fields
from orchestrator.engines.hf_export import export_fields
from orchestrator.engines.megatron_args import SCRIPT, megatron_args_sh, notes, shape, why_not
from orchestrator.engines.transformer_config import engine_fields
from orchestrator.errors import InputError
from orchestrator.job import File, Job
from orchestrator.plan import Plan

ARGUMENTS: Final = ("--plan", "plan.json", "--out", ".")
"""Ranks run with the run folder as their working directory; plan.json is written there by the main path."""

FIRST_WITHOUT_MAX_CONNECTIONS: Final = 10.0
"""Compute capability of Blackwell, from which kernels of several streams keep their order without it (arguments.py:927-953)."""

TRAINED_FAMILIES: Final = ("gpt", "llama", "bert", "t5")
"""What our workers train (tests/workers/test_parity.py); a family that is not here is planned, checked and exported."""


def environment(plan: Plan) -> dict[str, str]:
    """What the plan needs of the ranks' environment, with nothing of the submitter's."""
    if plan.cluster.is_cpu:
        # Ranks share the cores; DeepSpeed would look for a GPU otherwise.
        return {"OMP_NUM_THREADS": "1"} | ({"DS_ACCELERATOR": "cpu"} if uses_deepspeed(plan) else {})
    env = {
        # A collective that fails ends its rank instead of hanging.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        # NCCL's flight recorder: the last collectives of each rank, written where the watchdog or NCCL's own timeout ends a hang
        # (FlightRecorder.hpp, ProcessGroupNCCL.hpp; torch's fr_trace reads the files).
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "logs/nccl_trace_rank_",
        # Activations of changing sizes leave holes in the allocator's fixed segments.
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }
    if plan.cuda_graph_impl != "none":
        # Graphs over an allocator with expandable segments (rule expandable: arguments.py:1247).
        env["NCCL_GRAPH_REGISTER"] = "0"
    older = float(plan.cluster.gpu.compute_capability) < FIRST_WITHOUT_MAX_CONNECTIONS
    if (plan.tp > 1 or plan.cp > 1) and older and not plan.megatron_fsdp:
        # One queue: communication is started before the GEMM that hides it (rules cuda_conn_1 and, without it, cuda_conn_fsdp).
        env["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    return env


def without_worker(plan: Plan) -> str:
    """Why our worker can't run this plan, which Megatron's own programs can; empty: it can."""
    lacking = [name for name, used in (("Megatron-FSDP", plan.megatron_fsdp), (f"cp={plan.cp} in Megatron", plan.cp > 1)) if used]
    if plan.engine != "megatron" or not lacking:
        return ""
    return f"our worker has no {' and no '.join(lacking)}; Megatron's own program has: entry=PATH/{SCRIPT[plan.model.family]}"


def uses_deepspeed(plan: Plan) -> bool:
    return plan.engine in ("megatron_deepspeed", "deepspeed")


def translate(plan: Plan, module: str) -> Job:
    """The job of a plan on megatron-core's layers. Pure. Raises InputError where the ranks don't fill the nodes evenly, or the user's own
    values contradict the plan."""
    passthrough.check(plan)
    engine_json = passthrough.with_megatron(engine_fields(plan), plan) | {"ds_config": ds_config(plan) if uses_deepspeed(plan) else None}
    if is_pipeline_module(plan):
        engine_json["pipeline"] = pipeline_fields(plan)
    if plan.run.export_to:
        engine_json["export"] = export_fields(plan.model)
    files = [File(path="engine.json", content=dumps(engine_json))]
    found: list[str] = []
    if uses_deepspeed(plan):
        more, said = deepspeed_files(plan)
        files, found = files + more, found + said
    reason = why_not(plan)
    if reason is None:
        files.append(File(path="megatron_args.sh", content=megatron_args_sh(plan)))
        found += [*notes(plan), *passthrough.notes(plan)]
    else:
        found.append(f"megatron_args.sh was not written: {reason}.")
    if plan.model.family not in TRAINED_FAMILIES:
        found.append(f"Our workers train {', '.join(TRAINED_FAMILIES)}; {plan.model.family} is planned, checked and exported.")
    return assemble(plan, module, files, found)


def assemble(plan: Plan, module: str, files: Sequence[File], found: Sequence[str]) -> Job:
    """Arguments, environment and shape around these files and notes. Raises InputError where the ranks don't fill the nodes evenly."""
    passthrough.check(plan)
    nodes, ranks = shape(plan)
    if nodes * ranks != plan.world_size:
        per_node = plan.cluster.gpus_per_node
        raise InputError("gpus", plan.world_size, f"does not divide evenly over {nodes} nodes of {per_node}")
    return Job(
        name=f"{plan.model.name}-{plan.engine}",
        module=module,
        arguments=ARGUMENTS,
        environment=environment(plan),
        files=tuple(files),
        num_nodes=nodes,
        ranks_per_node=ranks,
        backend="gloo" if plan.cluster.is_cpu else "nccl",
        notes=tuple(found),
        without_worker=without_worker(plan),
    )
