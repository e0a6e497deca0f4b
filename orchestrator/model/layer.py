"""One kind of layer, runs of equal layers, and the tensors that ride along between them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from math import prod

from orchestrator.model.ops import Attention, Dispatch, Enter, Exchange, Exit, Gemm, Op, Saved, Weight
from orchestrator.values import Value


class LayerSpec(Value, frozen=True, kw_only=True, dict=True):
    """One kind of layer. `input_elements` per sample is what enters (what full recompute keeps, what a pipeline boundary before it
    carries); `output_elements` what leaves. `recomputable`: engines recompute transformer layers, never the embedding or the head."""

    kind: str
    weights: tuple[Weight, ...]
    ops: tuple[Op, ...]
    input_elements: int
    output_elements: int
    recomputable: bool = True
    forward_only: bool = False
    """Whether it is frozen, and so is all that its input comes from: it has no backward pass and keeps nothing for one."""

    @cached_property
    def borders(self) -> tuple[Enter | Exit | Exchange, ...]:
        """Operations at the borders of tensor-parallel regions, and between an adapter's ranks, in order."""
        return tuple(op for op in self.ops if isinstance(op, Enter | Exit | Exchange))

    @cached_property
    def attentions(self) -> tuple[Attention, ...]:
        return tuple(op for op in self.ops if isinstance(op, Attention))

    @cached_property
    def dispatches(self) -> tuple[Dispatch, ...]:
        return tuple(op for op in self.ops if isinstance(op, Dispatch))

    def local_parameters(self, tp: int, *, with_tied: bool = True) -> int:
        """Parameters of this layer on one tensor-parallel rank."""
        return sum(w.local_numel(tp) for w in self.weights if with_tied or not w.tied)

    def saved(self, *, flash_attention: bool) -> Sequence[Saved]:
        """What the layer keeps for its backward pass with this attention."""
        return self._saved[flash_attention]

    @cached_property
    def _saved(self) -> tuple[list[Saved], list[Saved]]:
        """What it keeps without and with flash attention."""
        unfused, fused = (
            [saved for op in self.ops for saved in op.saves if saved.exists(flash_attention=flash)] for flash in (False, True)
        )
        return unfused, fused

    def saved_bytes(
        self,
        tp: int = 1,
        *,
        sequence_parallel: bool = False,
        cp: int = 1,
        itemsize: int = 2,
        flash_attention: bool = True,
        without: Collection[str] = (),
    ) -> float:
        """Bytes kept for backward on one rank, per sample; `without`: the groups that are recomputed."""
        return sum(
            saved.local_elements(tp, sequence_parallel=sequence_parallel, cp=cp) * (saved.itemsize or itemsize)
            for saved in self.saved(flash_attention=flash_attention)
            if saved.group not in without
        )

    @property
    def parameters(self) -> int:
        """Parameters of the whole layer, unpadded, tied copies not counted."""
        return sum(prod(w.shape) for w in self.weights if not w.tied)

    @property
    def visited_share(self) -> float:
        """The share of the experts' weights that a token's own are; 1 without a choice of experts."""
        experts = max((op.experts for op in self.ops if isinstance(op, Gemm)), default=0)
        return max((op.topk / experts for op in self.dispatches), default=1.0) if experts else 1.0


class LayerRun(Value, frozen=True, kw_only=True):
    """`count` identical layers in a row of a model."""

    layer: LayerSpec
    count: int


class Edge(Value, frozen=True, kw_only=True):
    """A tensor that rides along: `elements` per sample made by the last layer of kind `source`, needed by every `target` layer."""

    name: str
    source: str
    target: str
    elements: int
