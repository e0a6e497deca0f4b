"""Measured layers in place of analytic ones: seconds and bytes per sample, by layer kind and tensor-parallel degree."""

from __future__ import annotations

from orchestrator.values import Value


class LayerProfile(Value, frozen=True, kw_only=True):
    """`count` layers of a kind in a row. Seconds and bytes are for one sample; keys are tensor-parallel degrees.

    `forward_s` may hold degree 1 alone: others then take its tp-th part. `output_bytes`: what a layer hands to the next, and what each
    all-reduce of tensor parallelism carries.
    """

    kind: str
    count: int
    parameter_bytes: float
    """Bytes of a layer's weights alone, before any sharding."""
    forward_s: dict[int, float]
    saved_bytes: dict[int, float]
    output_bytes: float
    reductions: int = 2
    """All-reduces of tensor parallelism in the forward pass, as many in the backward: attention's and the MLP's; a decoder that attends to
    an encoder has three."""

    def forward(self, tp: int) -> float:
        """Seconds of a layer's forward pass at this degree of tensor parallelism."""
        return self.forward_s.get(tp, self.forward_s[1] / tp)


class Profile(Value, frozen=True, kw_only=True):
    """A measured model. `other_*`: what embedding and head hold, half of it on the first rank's stage and half on the last's."""

    name: str
    layers: tuple[LayerProfile, ...]
    other_state_bytes: float = 0.0
    other_saved_bytes: float = 0.0
    """Bytes that embedding and head keep for backward, per sample."""
    backward_of_forward: float = 2.0
    """Seconds of a backward pass against the forward's."""
    states_per_weight: float = 4.0
    """Bytes of weights, gradients and Adam's two moments against those of the weights (all in fp32)."""
    source: str = ""
