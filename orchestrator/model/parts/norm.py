"""LayerNorm and RMSNorm, and the addition to the residual stream."""

from __future__ import annotations

from orchestrator.model.ops import Pointwise, Role, Saved, Weight
from orchestrator.model.parts.part import MASK_BYTES, READ, WRITE, Part
from orchestrator.model.shared import Shared


def norm_weights(name: str, a: Shared, width: int) -> tuple[Weight, ...]:
    """LayerNorm has a weight and a bias, RMSNorm a weight."""
    suffixes = ("weight", "bias") if a.normalization == "LayerNorm" else ("weight",)
    return tuple(Weight(name=f"{name}.{suffix}", shape=(width,), kind="norm") for suffix in suffixes)


def norm(name: str, a: Shared, tokens: int, role: Role = "norm") -> Part:
    """A norm over the hidden size: its weights and its operation. It saves its input; the output is saved by the GEMM that takes it."""
    elements = tokens * a.hidden_size
    saved = Saved(name=f"{name}.input", elements=elements, group="residual")
    return Part(
        norm_weights(name, a, a.hidden_size), (Pointwise(name=name, role=role, elements=elements, moved=READ + WRITE, saves=(saved,)),)
    )


def residual_add(name: str, a: Shared, tokens: int) -> Part:
    """Bias, dropout and residual in one kernel: reads x and the residual, writes the sum (and the mask)."""
    elements = tokens * a.hidden_size
    if not a.hidden_dropout:
        return Part(ops=(Pointwise(name=name, role="residual_add", elements=elements, moved=2 * READ + WRITE),))
    mask = Saved(name=f"{name}.mask", elements=elements, itemsize=MASK_BYTES, group="dropout")
    return Part(ops=(Pointwise(name=name, role="residual_add", elements=elements, moved=2 * READ + WRITE + MASK_BYTES, saves=(mask,)),))
