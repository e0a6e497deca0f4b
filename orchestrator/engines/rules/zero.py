"""What ZeRO needs beside its stage: optimizers, groups, types of gradients, offload."""

from __future__ import annotations

from typing import Final

from orchestrator.engines.rules.rule import refused, rule
from orchestrator.hardware.spec import Cluster
from orchestrator.strategy.capabilities import SHARDED_FROM_STAGE
from orchestrator.strategy.spec import Candidate
from orchestrator.strategy.workload import Workload
from orchestrator.units import ITEMSIZE, format_bytes


@rule(
    "optimizer_instances",
    "distopt_instances: core/parallel_state.py:833; HSDP: core/distributed/fsdp/mcore_fsdp_adapter.py:203",
    "zero_shard_size zero_stage dp cp",
    where="zero_shard_size zero_stage",
)
def optimizer_instances(candidate: Candidate, _: Workload) -> str | None:
    size, group = candidate.strategy.zero_shard_size or 1, candidate.mesh.dp * candidate.mesh.cp
    return None if size < group and group % size == 0 else f"zero_shard_size={size} must be below dp*cp={group} and divide it"


HERE_IS_NONE: Final = "offload_optimizer moves states out of a GPU's memory: here there is none"


def host_states(candidate: Candidate, workload: Workload) -> float:
    """Bytes of the optimizer's states that a rank of megatron-core has in host memory where they are offloaded: fp32 weights and Adam's two
    moments of the parameters that ranks share."""
    return 3 * ITEMSIZE["fp32"] * workload.model.parameters / candidate.mesh.world_size


def deepspeed_host_states(candidate: Candidate, workload: Workload) -> float:
    """`host_states` of DeepSpeed, which has fp32 gradients too, and the weights that go back (stages 1 and 2) or the sums of gradients
    (stage 3); at stage 2 sums in the weights' type, of all the rank's own, wait there from one micro-batch to the next
    (runtime/zero/stage_1_and_2.py:563-575, :1824; stage3.py:791)."""
    training, mesh, stage = workload.training, candidate.mesh, candidate.strategy.zero_stage
    weight, summed = ITEMSIZE["fp32" if training.precision == "fp32" else "bf16"], ITEMSIZE[training.grad_accum_dtype]
    besides = ITEMSIZE["fp32"] + (summed if stage >= SHARDED_FROM_STAGE["weight"] else weight)
    waits = stage == SHARDED_FROM_STAGE["gradient"] and summed == weight and candidate.num_microbatches > 1
    waiting = workload.model.parameters * summed / (mesh.tp * mesh.pp) if waits else 0.0
    return host_states(candidate, workload) + besides * workload.model.parameters / mesh.world_size + waiting


def lacks_host(what: str, needed: float, cluster: Cluster) -> str | None:
    """Why so many bytes are more than a rank's part of host memory; None: they are not."""
    have = f"{format_bytes(cluster.host_memory)} (cluster.host_memory)"
    return f"{what} needs {format_bytes(needed)} of host memory a rank, of {have}" if needed > cluster.host_memory else None


@rule("offload_host", "ours: what cannot be, cluster.host_memory", "model tp pp cp dp offload_optimizer", "offload_optimizer")
def fits_host(candidate: Candidate, workload: Workload) -> str | None:
    return lacks_host("offload_optimizer", host_states(candidate, workload), workload.cluster)


@rule("offload_host", "ours: what cannot be, cluster.host_memory", "model tp pp cp dp zero_stage num_microbatches offload_optimizer",
      "offload_optimizer")  # fmt: skip
def fits_deepspeeds_host(candidate: Candidate, workload: Workload) -> str | None:
    return lacks_host("offload_optimizer", deepspeed_host_states(candidate, workload), workload.cluster)


MUON: Final = "optimizer=muon with zero_stage={strategy.zero_stage}"
MEGATRON_ZERO_RULES: Final = (
    optimizer_instances,
    refused("distopt_adam", "distopt_adam: core/optimizer/distrib_optimizer.py:514", "zero_stage", "zero_stage optimizer=sgd",
            "optimizer=sgd with zero_stage={strategy.zero_stage}: Megatron's distributed optimizer takes Adam only"),
    refused("muon", "training/arguments.py:1178-1187 (0.16.1), 1669-1686; optimizer/__init__.py:769, 832, 914; optimizer/optimizer.py:1033 "
            "(0.19)", "zero_stage zero_shard_size overlap_grad_reduce fp8_param_gather", "optimizer=muon",
            ("precision=fp16", "optimizer=muon with precision=fp16: it has no loss scale"),
            ("fp8_param_gather", "optimizer=muon with fp8_param_gather: its matrices have bf16 weights"),
            ("zero_shard_size", "optimizer=muon with zero_shard_size={strategy.zero_shard_size}: Megatron has it for one instance"),
            ("zero_stage add_bias_linear experts", f"{MUON} and experts with biases, whose Adam it does not divide"),
            ("zero_stage precision=fp32",  # layer_wise_optimizer.py
             f"{MUON} and precision=fp32: what divides it wraps bf16 models alone"),
            ("zero_stage !release.divides_muon", f"{MUON}: Megatron-core {{release.version}} has it undivided, 0.19 divided"),
            ("overlap_grad_reduce !release.divides_muon", "optimizer=muon with overlap_grad_reduce: Megatron-core {release.version} has it "
             "without (pin.overlap_grad_reduce=false), 0.19 with")),
    # Whether megatron-core's HybridDeviceOptimizer takes all of the optimizer to the host.
    refused("optimizer_offload", "opt_offload: megatron/training/arguments.py:1190, core/optimizer/__init__.py:306",
            "offload_optimizer fp8_param_gather", "offload_optimizer",
            ("cpu", HERE_IS_NONE),
            ("!precision_aware_optimizer", "offload_optimizer needs train.precision_aware_optimizer=true"),
            ("fp8_param_gather !fp8_recipe=delayed",
             "offload_optimizer with fp8_param_gather needs train.fp8_recipe=delayed, not {training.fp8_recipe}")),
    fits_host,
)  # fmt: skip
"""The rules of megatron-core's distributed optimizer."""

DEEPSPEED_ZERO_RULES: Final = (
    refused("gad_mix", "gad_mix: deepspeed/runtime/engine.py:2294-2325", "zero_stage", "!zero_stage summed_otherwise",
            "zero_stage=0 sums gradients in {training.precision}; grad_accum_dtype={training.grad_accum_dtype} needs zero_stage 1 or "
            "above"),
    refused("offload_needs", "offload: deepspeed/runtime/zero/config.py:396, deepspeed/runtime/engine.py:2342",
            "zero_stage pp schedule offload_optimizer", "offload_optimizer",
            ("cpu", HERE_IS_NONE),
            ("!zero_stage", "offload_optimizer needs zero_stage 1 or above"),
            ("pp !schedule=deepspeed_1f1b", "offload_optimizer with pp={mesh.pp}: never tried under Megatron's pipeline schedule"),
            ("!optimizer=adamw", "offload_optimizer with optimizer={training.optimizer}: DeepSpeed offloads Adam")),
    fits_deepspeeds_host,
)  # fmt: skip
"""The rules of DeepSpeed's optimizers."""
