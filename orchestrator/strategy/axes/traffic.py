"""What an axis says of its traffic: the operation, its bytes, over which ranks, when, and behind what it may hide."""

from __future__ import annotations

from typing import Final, Literal

from orchestrator.values import Value

Operation = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "p2p"]
When = Literal["forward", "backward", "step"]
PASSES: Final[tuple[When, When]] = ("forward", "backward")
Hidden = Literal["nothing", "gemm", "user_buffers", "product", "attention", "compute", "first_forward", "last_backward"]
"""What a transfer can hide behind. gemm: the share `Traits.tp_overlap`; user_buffers: that of Transformer Engine's overlap; product: one of
the pass's products; attention, compute: that part of the same layer and pass; the others: that pass of the stage."""


class Traffic(Value, frozen=True, kw_only=True):
    """`count` operations of `nbytes` each, over groups of `size` ranks that are `stride` apart.

    forward, backward: once a micro-batch. step: once a step. `nbytes` as `hardware.collectives` counts them: the whole gathered or
    reduced tensor, what one rank holds in an all-to-all, one message.
    """

    axis: str
    operation: Operation
    nbytes: float
    size: int
    stride: int
    when: When
    hidden: Hidden = "nothing"
    count: int = 1
    handed_on: bool = False
    """A rank of each domain that it reaches hands it on to the others there, in the same kernel."""

    @property
    def repeats_with_recompute(self) -> bool:
        """Whether a full recompute runs it again in backward: all of forward but ZeRO's gathers, which backward has anyway."""
        return self.when == "forward" and self.axis != "dp"
