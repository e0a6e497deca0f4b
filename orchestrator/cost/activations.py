"""Bytes of activations of one layer on one rank: what forward saves for backward, and what a pass needs besides."""

from __future__ import annotations

from typing import Final, NamedTuple

from orchestrator.cost.calibration import Calibration
from orchestrator.cost.compute import activation_itemsize
from orchestrator.cost.recompute import dropped
from orchestrator.model.routing import times
from orchestrator.model.spec import Attention, Enter, Gemm, LayerSpec, Pointwise, padded
from orchestrator.model.training import QUANTISED
from orchestrator.strategy.axes import cp
from orchestrator.strategy.capabilities import Traits
from orchestrator.strategy.spec import Recompute, Strategy


class Activations(NamedTuple):
    """One micro-batch in one layer: kept from forward to backward, and alive in addition while the pass is in the layer."""

    saved: float
    transient_forward: float
    transient_backward: float


NVFP4_SAVED: Final = 4.5 / 8
"""Bytes an element that an NVFP4 product keeps of its input for backward: along columns, 4 bits and an 8-bit scale for each 16."""


def _quantised(layer: LayerSpec, strategy: Strategy, saved: float, copied: float, without: tuple[str, ...]) -> float:
    """What FP8 changes in a sample's saved bytes: products keep their quantised inputs (`saved` bytes more an element) in place of those
    themselves, but attention keeps its output anyway, beside the projection's quantised copy (`copied`). The vocabulary's stays bf16."""
    mesh = strategy.mesh
    change = 0.0
    for op in layer.ops:
        if isinstance(op, Gemm) and not op.pad_to:
            for tensor in op.saves:
                if tensor.group not in without:
                    elements = tensor.local_elements(mesh.tp, sequence_parallel=strategy.sequence_parallel, cp=mesh.cp)
                    change += elements * (copied if tensor.group == "attention" and op.split == "row" else saved)
    return change


def _uneven(layer: LayerSpec, strategy: Strategy, itemsize: int, without: tuple[str, ...]) -> float:
    """What the rank with most tokens keeps of its experts above an even share, of a sample: the engine's own dtype for what FP8 narrows."""
    mesh, more = strategy.mesh, 0.0
    for op in layer.ops:
        if isinstance(op, Gemm | Pointwise) and op.routing is not None:
            even = sum(
                tensor.local_elements(mesh.tp, sequence_parallel=strategy.sequence_parallel, cp=mesh.cp) * (tensor.itemsize or itemsize)
                for tensor in op.saves
                if tensor.group not in without
            )
            more += (times(op.routing.fullest, mesh.ep) - 1) * mesh.etp * even
    return more


def activations(
    layer: LayerSpec,
    recompute: Recompute,
    strategy: Strategy,
    micro_batch_size: int,
    precision: str,
    traits: Traits,
    calibration: Calibration,
    domain: int = 1,
) -> Activations:
    """Saved tensors as the layer names them, divided by tp, sequence parallelism and cp; a full recompute keeps the input. `domain`: GPUs
    of the innermost network level."""
    mesh, sp = strategy.mesh, strategy.sequence_parallel
    itemsize = activation_itemsize(precision)

    def saved(*without: str) -> float:
        nbytes = layer.saved_bytes(
            mesh.tp,
            sequence_parallel=sp,
            cp=mesh.cp,
            itemsize=itemsize,
            flash_attention=traits.flash_attention,
            without=without,
        )
        if precision in QUANTISED:
            narrow = calibration.fp8_saved_bytes if precision == "fp8" else NVFP4_SAVED
            nbytes += _quantised(layer, strategy, narrow - itemsize, narrow % itemsize, without)
        if mesh.etp > 1 and "mlp" not in without:  # the tokens of all ranks that share an expert (token_dispatcher.py:700)
            gathered_tokens = sum(op.tokens * op.k for op in layer.ops if isinstance(op, Gemm) and op.experts and op.split == "column")
            nbytes += (mesh.etp - 1) * gathered_tokens * itemsize / (mesh.tp * mesh.cp)
        nbytes += _uneven(layer, strategy, itemsize, without)
        return micro_batch_size * nbytes

    everything = saved()
    if recompute == "full" and layer.recomputable:
        kept = layer.input_elements * itemsize * micro_batch_size / (mesh.cp * (mesh.tp if sp else 1))
        kept = min(kept, everything)
    else:
        kept = saved(*dropped(recompute, fused_norms=traits.fused_norms)) if layer.recomputable else everything
    largest = micro_batch_size * max(
        (
            tensor.local_elements(mesh.tp, sequence_parallel=sp, cp=mesh.cp) * (tensor.itemsize or itemsize)
            for tensor in layer.saved(flash_attention=traits.flash_attention)
        ),
        default=0.0,
    )
    gathered = 0.0
    if sp:  # the input of a tensor-parallel region, gathered over tp (layers.py:478)
        entering = max((op.elements for op in layer.ops if isinstance(op, Enter)), default=0)
        gathered = entering * itemsize * micro_batch_size / mesh.cp
    if traits.gathers_few_query_groups:  # as they come and in order: mappings.py, _gather_along_last_dim
        few = max((op.elements for op in layer.ops if isinstance(op, Attention) and op.kv_heads < mesh.tp), default=0)
        gathered = max(gathered, 2 * few * itemsize * micro_batch_size / mesh.cp)
    working = calibration.transient_activations * largest + gathered
    if mesh.cp > 1:
        inner, steps = cp.cut(strategy, traits.context_parallel, domain)
        attention = (op for op in layer.ops if isinstance(op, Attention))
        working += max((cp.working_bytes(op, strategy, micro_batch_size, itemsize, inner, steps) for op in attention), default=0.0)
    logits = logits_bytes(layer, strategy, micro_batch_size, traits)
    return Activations(kept, working + logits, working + logits + everything - kept)


def logits_bytes(layer: LayerSpec, strategy: Strategy, micro_batch_size: int, traits: Traits) -> float:
    """Logits, their fp32 copy and the softmax kept for backward, of one micro-batch over the local vocabulary (cross_entropy.py:28); over
    the whole one where the engine gathers them."""
    mesh = strategy.mesh
    total = 0.0
    for op in layer.ops:
        if isinstance(op, Gemm) and op.pad_to:
            whole = op.split is None or traits.layers == "hugging_face"
            local = op.n if whole else padded(op.n, op.pad_to, mesh.tp) // mesh.tp
            total += op.tokens * micro_batch_size / mesh.cp * local * traits.logits_bytes
    return total
