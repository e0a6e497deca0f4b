"""What a schedule is: for each stage the order of its passes, whether a transfer blocks, and how long a step takes by that order.

Memory counts the micro-batches in flight along the order (`flights.py`), a timeline is played from it (`timeline.py`), and each schedule's
own `finish_times`, which is fast, is tested against that timeline.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal, NamedTuple

Action = Literal[
    "forward",
    "backward",
    "send_activation",
    "receive_activation",
    "send_gradient",
    "receive_gradient",
    "exchange_next",
    "exchange_previous",
]
"""An exchange is an activation to the next stage and a gradient back from it, both at the same time."""


class Pass(NamedTuple):
    """What a stage does next, for one micro-batch in one of its chunks (of an exchange the activation's). Transfers are named by schedules
    that they block; in the others a pass starts when what it needs has arrived."""

    action: Action
    microbatch: int
    chunk: int = 0


class Schedule(ABC):
    """One pipeline schedule. `vpp`: chunks of a stage (virtual pipeline stages)."""

    name: ClassVar[str]
    blocks: ClassVar[bool] = False
    """Whether both sides wait for each other, and while a transfer lasts."""
    half_duplex: ClassVar[bool] = False
    """Whether an activation and a gradient over the same border go one after the other."""
    keeps_borders: ClassVar[bool] = False
    """Whether a stage keeps the tensors that it received and sent until their backward pass, beside what its layers save."""
    has_chunks: ClassVar[bool] = False
    """Whether a stage may have several chunks."""

    def why_not(self, pp: int, num_microbatches: int, vpp: int) -> str | None:
        """Why it can't run so many micro-batches over such a pipeline; None: it can."""
        if num_microbatches < 1:
            return "num_microbatches must be at least 1"
        if vpp > 1 and not self.has_chunks:
            return f"{self.name} has no virtual stages"
        return None

    @abstractmethod
    def order(self, pp: int, stage: int, num_microbatches: int, vpp: int = 1) -> Iterator[Pass]:
        """Everything that this stage does in a step, in its order."""

    def transfers(self, pp: int, stage: int, num_microbatches: int) -> tuple[int, int]:
        """How many transfers block a stage in a step: over its border to the stage before, and over that to the next."""
        return 0, 0

    @abstractmethod
    def telling(self, pp: int, num_microbatches: int) -> int:
        """The fewest micro-batches known to show every state of a stage's order with `num_microbatches`, which else only repeats itself."""

    @abstractmethod
    def finish_times(
        self, forward: Sequence[float], backward: Sequence[float], hops: Sequence[float], num_microbatches: int, pp: int, *, jump: bool
    ) -> list[float]:
        """Seconds until each of pp >= 2 stages is through with its last pass, and where transfers block with sending its last gradient.
        `forward`, `backward`: of a micro-batch by virtual stage (index chunk * pp + stage); `hops`: a transfer from it to the next.
        `jump`: over periods that repeat."""
