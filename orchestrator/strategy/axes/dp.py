"""Data parallelism and ZeRO (arXiv 1910.02054): who holds which share of the states, and what is reduced and gathered when.

Context-parallel ranks hold the same weights: the group is dp x cp, in Megatron ("dp_cp") as in DeepSpeed with a sequence group.
"""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.strategy.axes.traffic import PASSES, Hidden, Operation, Traffic, When
from orchestrator.strategy.capabilities import SHARDED_FROM_STAGE, Traits
from orchestrator.strategy.spec import Strategy

AXIS = "dp"


def group(strategy: Strategy) -> tuple[int, int]:
    """(size, stride) of the ranks that hold the same weights."""
    mesh = strategy.mesh
    strides = [mesh.stride(axis) for axis in ("cp", "dp") if mesh.degree(axis) > 1]
    return ranks(strategy), min(strides, default=1)


def ranks(strategy: Strategy) -> int:
    """How many ranks hold the same weights."""
    return strategy.mesh.dp * strategy.mesh.cp


def share(state: str, strategy: Strategy) -> int:
    """Ranks over which ZeRO divides a state: "optimizer", "gradient" or "weight"; 1: each has it whole.

    >>> from orchestrator.strategy.spec import Mesh
    >>> share("gradient", Strategy(mesh=Mesh(dp=8), zero_stage=2)), share("weight", Strategy(mesh=Mesh(dp=8), zero_stage=2))
    (8, 1)
    """
    if strategy.zero_stage < SHARDED_FROM_STAGE[state]:
        return 1
    return shard_size(strategy) if divides_states(strategy) else ranks(strategy)


def divides_states(strategy: Strategy) -> bool:
    """Whether `zero_shard_size` are the ranks that share one copy of all that is divided. False: it is hpZ's, of a second copy."""
    return strategy.zero_stage < SHARDED_FROM_STAGE["weight"] or strategy.megatron_fsdp


def shard_size(strategy: Strategy) -> int:
    """Ranks over which one copy of the states is divided: the group, or the part of it that `zero_shard_size` names
    (Megatron's --num-distributed-optimizer-instances, which is HSDP under its own FSDP; InternEvo's zero1 size), or hpZ's second copy."""
    size = ranks(strategy)
    return min(strategy.zero_shard_size or size, size)


def traffic(weight_bytes: float, gradient_bytes: float, strategy: Strategy, traits: Traits) -> Iterator[Traffic]:
    """The exchange of gradients and weights: `weight_bytes` on this rank before sharding, whose gradients take `gradient_bytes` on the
    wire.

    Gradients: an all-reduce, or from `reduce_scatter_from_stage` on a reduce-scatter; once a step or, from
    `reduces_every_microbatch_from_stage` on, in every micro-batch. Weights: at stages 1 and 2 gathered once a step after the update,
    at stage 3 in the forward and in the backward of every micro-batch (section 7: 2 psi in all at stages 0 to 2, 3 psi at stage 3).
    """
    if ranks(strategy) == 1:
        return
    size, stride = group(strategy)
    stage = strategy.zero_stage
    scatters = stage >= traits.reduce_scatter_from_stage and stage > 0
    every = stage >= traits.reduces_every_microbatch_from_stage
    overlaps = strategy.overlap_grad_reduce and traits.overlaps_grad_reduce
    inner = shard_size(strategy)
    reductions: list[tuple[Operation, float, int, int]] = [("all_reduce", gradient_bytes, size, stride)]
    if scatters and (inner == size or not divides_states(strategy)):
        exchanged = strategy.reduce_scatter_with_fp32_accumulation
        reductions = [("all_to_all" if exchanged else "reduce_scatter", gradient_bytes, size, stride)]
    elif scatters:  # inside each shard group, then between the groups that hold the same shard
        reductions = [("reduce_scatter", gradient_bytes, inner, stride)]
        reductions.append(("all_reduce", gradient_bytes / inner, size // inner, stride * inner))
    when: When = "backward" if every else "step"
    hidden: Hidden = "nothing" if not overlaps else "compute" if every else "last_backward"
    for operation, nbytes, sharing, apart in reductions:
        yield Traffic(axis=AXIS, operation=operation, nbytes=nbytes, size=sharing, stride=apart, when=when, hidden=hidden)
        if strategy.megatron_fsdp:  # between the copies with the last micro-batch alone (megatron_fsdp.py:768)
            when, hidden = "step", "last_backward" if overlaps else "nothing"
    gathers = strategy.overlap_param_gather and traits.overlaps_param_gather
    if stage >= SHARDED_FROM_STAGE["weight"]:
        hidden = "compute" if gathers else "nothing"
        for when, sharing in list(zip(PASSES, (inner if divides_states(strategy) else size, inner), strict=True))[
            : traits.weight_gathers_per_microbatch
        ]:
            yield Traffic(axis=AXIS, operation="all_gather", nbytes=weight_bytes, size=sharing, stride=stride, when=when, hidden=hidden)
    elif stage >= SHARDED_FROM_STAGE["optimizer"]:
        hidden = "first_forward" if gathers else "nothing"
        yield Traffic(axis=AXIS, operation="all_gather", nbytes=weight_bytes, size=inner, stride=stride, when="step", hidden=hidden)
