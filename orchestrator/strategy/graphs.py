"""What of a model's layers Megatron replays as CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, get_args

from orchestrator.model.architecture import Architecture
from orchestrator.model.parts.mamba2 import Mamba2
from orchestrator.model.parts.mlp import Mlp
from orchestrator.model.parts.part import Nothing
from orchestrator.strategy.spec import CudaGraphModules, Options

MODULES: Final = ("attn", "mlp", "mamba", "moe", "moe_router", "moe_preprocess")
"""Megatron's modules, in the order in which `CudaGraphModules` has them."""


def modules_of(named: Iterable[str]) -> CudaGraphModules | None:
    """The choice of these modules, in whatever order; None: of none. Raises ValueError where they are no choice.

    >>> modules_of(["moe_preprocess", "attn", "moe_router"])
    'attn+moe_router+moe_preprocess'
    """
    given = {*named}
    joined = "+".join(module for module in MODULES if module in given)
    if len(given) > len(joined.split("+")) or (joined and joined not in get_args(CudaGraphModules)):
        raise ValueError(f"{', '.join(sorted(given))}: no such combination of modules can be graphs")
    return next((choice for choice in get_args(CudaGraphModules) if choice == joined), None)


def by_layer(strategy: Options) -> bool:
    """Whether layers' passes are graphs, as against whole steps or nothing."""
    return strategy.cuda_graph_impl in ("local", "transformer_engine")


def graphed_modules(strategy: Options, a: Architecture) -> tuple[str, ...]:
    """The modules of a layer that are graphs, by Megatron's names; none: whole layers are, or nothing is by layers.

    Where no module was asked for, all that can be: experts compute as many tokens as their router sends them, which no graph can, unless
    they pad to a capacity; what comes before the exchange of tokens has its counts on the host first where tokens are dropped for an
    all-to-all (transformer_config.py:1769-1779); and the exchange beside another micro-batch leaves feed-forwards out (:1898).
    """
    if not by_layer(strategy):
        return ()
    together = strategy.cuda_graph_impl == "local"  # Megatron's own has a router with what comes behind it (:1725)
    if strategy.cuda_graph_modules is not None:
        said = strategy.cuda_graph_modules.split("+")
        return (*said, *(("moe_preprocess",) if together and said[-1] == "moe_router" else ()))
    overlap = strategy.overlap_moe_expert_parallel_comm
    if all(part.pad_to_capacity for part in a.experts) and not overlap:
        return ()
    kinds = a.kinds_of_layers()
    dense = any(isinstance(layer.feed_forward, Mlp) for layer in kinds)
    counts_first = strategy.moe_token_dispatcher_type == "alltoall" and any(part.capacity_factor is not None for part in a.experts)
    held = (
        ("attn", any(not isinstance(layer.mixer, Mamba2 | Nothing) for layer in kinds)),
        ("mlp", dense and not overlap),
        ("mamba", any(isinstance(layer.mixer, Mamba2) for layer in kinds)),
        ("moe_router", not (together and counts_first)),
        ("moe_preprocess", not counts_first),
    )
    return tuple(module for module, can in held if can)
