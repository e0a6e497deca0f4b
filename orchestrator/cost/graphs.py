"""What CUDA graphs of layers change in their price: launches that the host no longer makes, and tensors that stay where they are.

Two public runs on 64 GH200 that differ in graphs alone reserve 3.72 GiB more with those of 23 Mamba layers, and 10.82 with those of all 52,
23 of them routers' (Nemotron-3-Nano, 8,192 tokens, jobs 6932739 and 6932741 beside 6933820): by this 3.77 and 11.36.
"""

from __future__ import annotations

from typing import NamedTuple

from orchestrator.model.ops import FEED_FORWARD, SHARED
from orchestrator.model.spec import Dispatch, Enter, LayerSpec, Op, Scan
from orchestrator.strategy.spec import Strategy


class Graph(NamedTuple):
    """The operations of a layer that one graph holds, and tensors as wide as the layer's output: `ends` that it has once for all
    micro-batches, its input's and outputs' own buffers and their gradients', and `kept` of each micro-batch in flight that would otherwise
    be free again."""

    ops: tuple[Op, ...]
    ends: int
    kept: int


ENDS, ROUTER_ENDS = 2 * 2, 2 * 3
"""Buffers of one input and one output, and of one input, the residual and the tokens that are sent, with a gradient each."""


def graph_of(layer: LayerSpec, modules: tuple[str, ...], strategy: Strategy) -> Graph | None:
    """The graph of a layer with these modules (`strategy.graphs.graphed_modules`), which follow each other; None: it has none.

    Behind a router it gives the residual, the tokens that are sent and the shared experts' output (transformer_layer.py:1267-1283); an
    all-to-all sorts the tokens before it sends them, once for each expert that they go to (moe/token_dispatcher.py, dispatch_preprocess).
    The input of the next layer's graph is a copy.
    """
    if not layer.recomputable:
        return None
    if not modules:
        return Graph(layer.ops, ENDS, 1)
    after = next((i for i, op in enumerate(layer.ops) if op.role == "mlp_norm" or op.role in FEED_FORWARD), len(layer.ops))
    after -= after > 0 and after < len(layer.ops) and isinstance(layer.ops[after - 1], Enter)
    mixer, rest = layer.ops[:after], layer.ops[after:]
    held: list[Op] = []
    if ("mamba" if any(isinstance(op, Scan) for op in mixer) else "attn") in modules:
        held += mixer
    sent = next((op for op in rest if isinstance(op, Dispatch)), None)
    if sent is None:
        held += rest if "mlp" in modules else ()
        return Graph(tuple(held), ENDS, 1) if held else None
    if "moe" in modules:
        return Graph((*held, *rest), ENDS, 1)
    if "moe_router" not in modules:
        return Graph(tuple(held), ENDS, 0) if held else None
    beside = strategy.moe_shared_expert_overlap
    sorts = "moe_preprocess" in modules
    inside = {"mlp_norm", "router", *(() if beside else SHARED), *(("permute",) if sorts else ())}
    held += [op for op in rest if op.role in inside]
    shared = not beside and any(op.role in SHARED for op in rest)
    sorted_ones = sent.topk if sorts and strategy.moe_token_dispatcher_type == "alltoall" else 0
    return Graph(tuple(held), ROUTER_ENDS, shared + sorted_ones)
