"""Model FLOPs: the work that the mathematics needs, what MFU is measured in. Recompute, norms and pointwise operations don't count."""

from __future__ import annotations

from orchestrator.model.ops import Op
from orchestrator.model.spec import Attention, DeltaRule, Gemm, LayerSpec, ModelSpec, Scan

BACKWARD_AND_FORWARD = 3
"""GEMMs of a linear in forward and backward: forward, gradient of the input, gradient of the weight (Narayanan et al., arXiv 2104.04473,
appendix)."""
FROZEN = 2
"""GEMMs of a linear whose weight is frozen, of forward and backward together: the gradient of the weight is not computed."""


def forward_flops(layer: LayerSpec) -> float:
    """FLOPs of one layer's forward pass for one sample: 2mkn a GEMM, causal attention at half, a recurrence as such."""
    return sum(map(_forward_flops, layer.ops), 0.0)


def _forward_flops(op: Op) -> float:
    if isinstance(op, Gemm):
        return 2 * op.tokens * op.k * op.n
    if isinstance(op, Attention):
        return 4 * op.query_len * op.key_len * op.heads * op.head_dim * op.visible
    return op.model_flops if isinstance(op, Scan | DeltaRule) else 0.0


def model_flops_per_sample(spec: ModelSpec) -> float:
    """FLOPs of forward and backward for one sample.

    The sum that Megatron prints TFLOP/s with (training.py:220, num_floating_point_operations: causal attention counts half), except
    that the vocabulary counts unpadded and that attention without a causal mask counts full. A frozen weight has no gradient.
    """
    return sum(
        run.count
        * (forward_flops(run.layer) if run.layer.forward_only else BACKWARD_AND_FORWARD * forward_flops(run.layer) - _not_needed(run.layer))
        for run in spec.runs
    )


def _not_needed(layer: LayerSpec) -> float:
    """FLOPs of one layer's gradients of weights that are frozen, and of all gradients of what has no backward pass."""
    return sum(
        (BACKWARD_AND_FORWARD - (1 if op.forward_only else FROZEN)) * _forward_flops(op)
        for op in layer.ops
        if isinstance(op, Gemm | Attention) and (op.forward_only or (isinstance(op, Gemm) and op.frozen))
    )
