"""What engines' translations share: the shape of the job, its environment and its files; and what those on megatron-core's layers write,
need and say alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from orchestrator.engines import passthrough
from orchestrator.engines.ds_config import dumps
from orchestrator.engines.engine import Requirements
from orchestrator.engines.hf_config import export_fields, inexpressible, other_in_megatron
from orchestrator.engines.megatron_args import one_connection, shape, switches
from orchestrator.engines.megatron_versions import release_of, unknown
from orchestrator.engines.transformer_config import engine_fields
from orchestrator.errors import InputError
from orchestrator.hardware.spec import Cluster
from orchestrator.job import File, Job
from orchestrator.model.packing import sample_notes
from orchestrator.model.spec import Architecture
from orchestrator.model.training import EIGHT_BIT
from orchestrator.plan import Plan

ARGUMENTS: Final = ("--plan", "plan.json", "--out", ".")
"""Ranks run with the run folder as their working directory; plan.json is written there by the main path."""


def environment(plan: Plan) -> dict[str, str]:
    """What the plan needs of the ranks' environment, with nothing of the submitter's."""
    if plan.cluster.is_cpu:
        return {
            "OMP_NUM_THREADS": "1",  # ranks share the cores
            # torch asks glibc for aligned blocks, whose cut-off ends are kept for small requests, and gloo's threads let go of tensors at
            # any moment: the holes no longer fit the next tensor. Without these two caches freed ends are merged at once. One arena: the
            # buffers of gloo's threads take the holes too. gpt_tiny on 4 ranks (tp 2, pp 2), the rank that holds most after 5 and 30
            # steps: 459 and 517 MB, with this 434 and 458; no difference in CPU seconds (2 cores, glibc 2.36, 2026-11-23). What is freed
            # at the heap's end stays, and nothing is a mapping of its own: else a step maps its activations anew. A Llama of 4 layers of
            # 128 on 2 ranks, 8 samples of 256: 2.2 million page faults in 30 steps, now .2, the kernel 6.2 of 32 CPU seconds, now 1.6
            # (2026-11-28). glibc's own limit for mappings goes to 32 MiB alone, which 8 heads' scores of 1,024 tokens have: 6 steps of
            # 4 such samples a rank had 11.0 million faults, now .5, the kernel 26 of 78 CPU seconds, now 3 of 53, and the peak is 823
            # MB, now 940: what is freed lies between other tensors (2026-11-29). The end stays however much of it is free: with a limit of
            # 4 GiB 16 such samples (2 layers of 256, 5.6 GB) took 9.3 s forward and backward, now 6.6 (the same day).
            "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0:glibc.malloc.arena_max=1"
            ":glibc.malloc.trim_threshold=1125899906842624:glibc.malloc.mmap_max=0",
        }
    env = {
        # A collective that fails ends its rank instead of hanging.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        # NCCL's flight recorder: the last collectives of each rank, written where the watchdog or NCCL's own timeout ends a hang
        # (FlightRecorder.hpp, ProcessGroupNCCL.hpp; torch's fr_trace reads the files).
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "logs/nccl_trace_rank_",
    }
    if plan.cluster.gpu.vendor == "nvidia":
        # Activations of changing sizes leave holes in the allocator's fixed segments. torch has no others before 2.11 on ROCm (pytorch
        # pull request 177974), where they may hang (pytorch issue 192259).
        env["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    if plan.cuda_graph_impl != "none":
        # Graphs over an allocator with expandable segments (rule expandable: arguments.py:1247).
        env["NCCL_GRAPH_REGISTER"] = "0"
    env |= switches(plan)
    if one_connection(plan):
        env["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    return env


def engine_file(plan: Plan, requirements: Requirements, content: Mapping[str, Any]) -> File:
    """The file engine.json: what the worker is told beside the plan, and the versions of what it must run on."""
    more = {"deep_ep": plan.moe_token_dispatcher_type == "flex", "emerging_optimizers": plan.training.optimizer == "muon"}
    more["bitsandbytes"] = plan.training.optimizer in EIGHT_BIT
    requires = requirements.versions(plan.cluster) | {name: "" for name, needed in more.items() if needed}
    return File(path="engine.json", content=dumps({"engine": plan.engine, "requires": requires, **content}))


def assemble(
    plan: Plan,
    worker: str,
    files: Sequence[File],
    notes: Sequence[str],
    more_environment: Mapping[str, str] = {},
    without_worker: str = "",
    passes: Mapping[str, Sequence[str]] = {},
) -> Job:
    """The job in which each rank runs `python -m worker` with these files; it also says what is known of supervised samples. `passes`: the
    engine's, as `Engine` says. Raises InputError where the ranks don't fill the nodes evenly, or the user's own values contradict the
    plan."""
    passthrough.check(plan, passes)
    training = plan.training
    if training.lengths is not None:
        length, packing, multiple = training.seq_length, bool(training.packing), plan.sample_multiple
        notes = [*notes, *sample_notes(training.lengths, length, packing=packing, multiple=multiple)]
    nodes, ranks = shape(plan)
    if nodes * ranks != plan.world_size:
        per_node = plan.cluster.gpus_per_node
        raise InputError("gpus", plan.world_size, f"does not divide evenly over {nodes} nodes of {per_node}")
    return Job(
        name=f"{plan.model.name}-{plan.engine}",
        module=worker,
        arguments=ARGUMENTS,
        environment=environment(plan) | dict(more_environment),
        files=tuple(files),
        num_nodes=nodes,
        ranks_per_node=ranks,
        backend="gloo" if plan.cluster.is_cpu else "nccl",
        vendor=plan.cluster.gpu.vendor,
        notes=tuple(notes),
        without_worker=without_worker,
    )


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
    return inexpressible(a) or other_in_megatron(a)


def why_other_samples(before: Plan, now: Plan) -> str | None:
    """Why the data of a run under `before` would not go on where it stopped under `now`; None: it would."""
    old, new = before.sample_multiple, now.sample_multiple
    if not now.training.packing or old == new:
        return None
    why = f"packs samples padded to a multiple of {old} tokens (cp={before.cp}), and cp={now.cp} to one of {new}: other samples would share"
    return f"{why} a sequence; pin.cp={before.cp} goes on with its data"
