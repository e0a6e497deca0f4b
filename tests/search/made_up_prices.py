"""Layer-wise prices that are drawn: each layer has a few ways, whose numbers have few digits, so that sums of them are exact."""

from __future__ import annotations

import random

from orchestrator.cost.layerwise import Outer, Way
from orchestrator.strategy.layerwise import LayerChoice
from orchestrator.strategy.layout import ENDS

CHOICES = [
    LayerChoice(tp=tp, zero3=zero3, recompute=recompute) for tp in (1, 2, 4) for zero3 in (False, True) for recompute in (False, True)
]
AMPLE = 1e9


class Given:
    """Layers of two kinds, two of each unless told otherwise; with `ends` embedding and head, too, which have one way."""

    world, slack, sequence_parallel = 4, 0.25, False

    def __init__(
        self,
        seed: int,
        *,
        hidden: float = 0.0,
        tps: tuple[int, ...] = (1, 2, 4),
        each: int = 3,
        overhead: float = 0.0,
        counts: tuple[int, int] = (2, 2),
        ends: bool = False,
        hop: float = 0.0,
        once: float = 0.0,
    ) -> None:
        rng = random.Random(seed)
        self.hidden_share, self.slowdown, self.overhead, self.hop, self.once = hidden, 0.25, overhead, hop, once
        self.runs: tuple[tuple[str, int], ...] = tuple(zip("ab", counts, strict=True))
        self.options: dict[str, list[Way]] = {}
        for kind in "ab":
            chosen = rng.sample([choice for choice in CHOICES if choice.tp in tps], each)
            self.options[kind] = [Way(choice, *(rng.randint(1, 64) / 8 for _ in range(4)), *self._bytes(rng)) for choice in chosen]
        self.moves = {(a, b): (rng.randint(0, 8) / 8, rng.randint(0, 8) / 8) for a in tps for b in tps}
        if ends:
            self.runs = ((ENDS[0], 1), *self.runs, (ENDS[1], 1))
            whole = LayerChoice(tp=tps[0])
            self.options |= {kind: [Way(whole, *(rng.randint(1, 32) / 8 for _ in range(4)), 4.0, 2.0, 2.0)] for kind in ENDS}

    @staticmethod
    def _bytes(rng: random.Random) -> tuple[float, float, float]:
        return float(rng.randint(4, 40)), float(rng.randint(1, 20)), float(rng.choice([2, 8, 16]))

    def ways(self, kind: str, outer: Outer) -> list[Way]:
        return self.options[kind]

    def switch(self, kind: str, before: int, after: int, outer: Outer) -> tuple[float, float]:
        return (0.0, 0.0) if before == after else self.moves[before, after]

    def fixed_bytes(self, outer: Outer, stage: int, flight: int) -> float:
        return 0.0

    def hop_s(self, outer: Outer) -> float:
        return self.hop

    def overheads_s(self) -> tuple[float, float]:
        return self.overhead, self.once

    def end_choices(self, outer: Outer) -> list[LayerChoice | None]:
        return [None]
