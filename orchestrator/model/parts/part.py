"""A piece of a layer, and the linears that several parts are made of.

Weights have the names and the orientation, (out, in), of megatron-core 0.16.1's own modules (local layer specs), so that they can be
compared one by one. Saved tensors follow Korthikanti et al. (arXiv 2205.05198), section 4 and figure 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

from orchestrator.model.ops import Op, Pointwise, Role, Saved, Weight
from orchestrator.model.shared import Shared
from orchestrator.values import Value

MASK_BYTES: Final = 1
"""A dropout mask has one byte an element (Korthikanti, section 4)."""
READ: Final = 2.0
WRITE: Final = 2.0
"""Bytes of one element in the 2-byte dtype that `Pointwise.moved` counts in."""


class Part(NamedTuple):
    """Weights, and operations in the order in which they run."""

    weights: tuple[Weight, ...] = ()
    ops: tuple[Op, ...] = ()


def join(*parts: Part) -> Part:
    """One part with the weights and operations of these, one after the other."""
    return Part(tuple(weight for part in parts for weight in part.weights), tuple(op for part in parts for op in part.ops))


def linear_weights(name: str, n: int, k: int, split: Literal["column", "row"] | None, *, bias: bool) -> tuple[Weight, ...]:
    """The weights (n, k) and a bias of n: a column-parallel linear divides both over n, a row-parallel one divides k and replicates the
    bias."""
    weights = [Weight(name=f"{name}.weight", shape=(n, k), split={"column": 0, "row": 1, None: None}[split])]
    if bias:
        weights.append(Weight(name=f"{name}.bias", shape=(n,), split=0 if split == "column" else None))
    return tuple(weights)


class Nothing(Value, frozen=True, kw_only=True, tag="none", tag_field="kind", omit_defaults=True):
    """A part without weights, operations, norm and addition to the residual stream."""

    @property
    def label(self) -> str:
        return ""

    def features(self, a: Shared) -> Iterator[str]:
        """The features that an engine's capabilities must name to train layers of one part."""
        yield "single_part_layers"


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
