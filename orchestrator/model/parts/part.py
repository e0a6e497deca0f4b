"""A piece of a layer, and the linears that several parts are made of.

Weights have the names and the orientation, (out, in), of megatron-core 0.16.1's own modules (local layer specs), so that they can be
compared one by one. Saved tensors follow Korthikanti et al. (arXiv 2205.05198), section 4 and figure 2.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from orchestrator.model.ops import Op, Weight

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
