"""Capabilities built by hand: an engine like megatron-core and one like DeepSpeed, with a few of their rules."""

from __future__ import annotations

from orchestrator.strategy.capabilities import Capabilities, Rule
from orchestrator.strategy.spec import RANK_ORDER, Candidate
from orchestrator.strategy.workload import Workload


def heads(candidate: Candidate, given: Workload) -> str | None:
    n = given.model.architecture.num_attention_heads
    return f"{candidate.mesh.tp} does not divide num_attention_heads={n}" if n % candidate.mesh.tp else None


def interleaved_batches(candidate: Candidate, _: Workload) -> str | None:
    pp, m = candidate.mesh.pp, candidate.num_microbatches
    size = candidate.microbatch_group_size_per_vp_stage or pp
    if candidate.vpp > 1 and (not pp <= size <= m or 0 < m % size < pp):
        return f"num_microbatches={m} does not fill groups of {size} over pp={pp}"
    return None


HEADS = Rule(id="heads_tp", engine_rule="transformer_config.py:924", check=heads, needs=("model", "tp"))
INTERLEAVED = Rule(
    id="vpp_M",
    engine_rule="schedules.py:995",
    check=interleaved_batches,
    needs=("pp", "num_microbatches", "vpp", "microbatch_group_size_per_vp_stage"),
)


def megatron_like(**changes: object) -> Capabilities:
    fields: dict[str, object] = {
        "engine": "megatron",
        "parts": ("attention", "mlp"),
        "axes": ("tp", "pp", "vpp", "dp"),
        "zero_stages": (0, 1),
        "zero_stages_with_pipeline": (0, 1),
        "sequence_parallel": True,
        "recompute": ("none", "selective", "full"),
        "recompute_varies": "stage",
        "uneven_stages": True,
        "schedules": ("1f1b", "interleaved"),
        "offload_optimizer": False,
        "precisions": ("bf16", "fp32"),
        "optimizers": ("adamw", "sgd"),
        "rank_orders": (RANK_ORDER,),
        "rules": (HEADS, INTERLEAVED),
    }
    return Capabilities(**(fields | changes))  # type: ignore[arg-type]


def deepspeed_like(**changes: object) -> Capabilities:
    fields: dict[str, object] = {
        "engine": "deepspeed",
        "axes": ("tp", "pp", "dp"),
        "zero_stages": (0, 1, 2, 3),
        "recompute": ("none", "full"),
        "recompute_varies": "never",
        "uneven_stages": False,
        "schedules": ("1f1b",),
        "offload_optimizer": True,
        "rules": (HEADS,),
    }
    return megatron_like(**(fields | changes))
