"""The layer-wise search: every layer its own tp, data parallelism or ZeRO-3, and recompute; pipeline outermost; the batch, if it is open.

Inside a stage the fastest ways are exact (search/layerwise_stage.py), and so is which layers go to which stage, and which ways of its
stages suit each other (search/layerwise_splits.py, search/layerwise_close.py), as long as the work stays within what the constants there
allow.
What no plan undercuts is known in any case (`LayerwiseResult.at_least_s`).
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from math import ceil
from typing import NamedTuple

from orchestrator.cost.bounds import filled
from orchestrator.errors import NoPlanError
from orchestrator.search.layerwise_prices import AnalyticPrices, Outer, Prices, ProfilePrices, Way, plan_price, stage_price
from orchestrator.search.layerwise_splits import Splits
from orchestrator.search.layerwise_stage import INFINITE, ROUNDING
from orchestrator.strategy.layerwise import ENDS, LayerwisePlan, LayerwiseStage
from orchestrator.strategy.pins import MemoryLimit
from orchestrator.strategy.tree import divisors
from orchestrator.units import format_bytes

__all__ = ["AnalyticPrices", "LayerwiseResult", "Outer", "Prices", "ProfilePrices", "Way", "layerwise", "plan_price", "stage_price"]

MOST_BATCHES = 32

LATER = (1.0, 1.1, 1.15)
"""An outer choice is estimated, then one split of it is solved, then its bound is refined, then it is searched: the later ones as if it
were so much slower, so that what others have in quick plans is known first."""
_Entry = tuple[float, int, int, float, int, Splits]
"""Of the queue: when its turn is, its place, which turn, seconds a sample that it does not undercut, batch, splits."""


class LayerwiseResult(NamedTuple):
    """The plan, and what is known about all others of its space."""

    plan: LayerwisePlan
    tried: int
    """(batch, pp, micro-batches, embedding and head) that were solved, of those that are legal."""
    legal: int
    at_least_s: float
    """Seconds that no plan of this batch undercuts, nor one of another batch that was open, counted in samples."""

    @property
    def exact(self) -> bool:
        """Whether nothing of the space is faster."""
        return self.at_least_s >= self.plan.step_time_s * (1 - 2 * ROUNDING)


def open_batches(most: int, world: int) -> tuple[int, ...]:
    """The batches that are searched where the batch is open: those up to `most` of which every rank can have as many samples, at most
    `MOST_BATCHES` of them, evenly chosen.

    >>> open_batches(32, 8), len(open_batches(4096, 8)), open_batches(4, 8)
    ((8, 16, 24, 32), 32, (4,))
    """
    step = world * max(1, ceil(most // world / MOST_BATCHES))
    return tuple(range(step, most + 1, step)) or (most,)


def layerwise(
    prices: Prices,
    global_batch_size: int | Sequence[int],
    limit: MemoryLimit,
    *,
    num_microbatches: int | None = None,
    pp: int | None = None,
) -> LayerwiseResult:
    """The layer-wise plan with most samples a second: the fastest of one batch, or over all batches given.

    `num_microbatches`, `pp`: fixed where given. Raises NoPlanError.
    """
    batches = [global_batch_size] if isinstance(global_batch_size, int) else list(global_batch_size)
    queue: list[_Entry] = []
    layers = sum(count for kind, count in prices.runs if kind not in ENDS)
    for batch in batches:
        for stages in divisors(prices.world):
            if stages > layers or pp not in (None, stages):
                continue
            for m in divisors(batch):
                if num_microbatches not in (None, m):
                    continue
                for ends in prices.end_choices(Outer(stages, m, batch // m, None)):
                    outer = Outer(stages, m, batch // m, ends)
                    splits = Splits(prices, outer, limit.usable)
                    work = sum(count * splits.fastest(kind) for kind, count in prices.runs) + stages * splits.overhead
                    if work < INFINITE:
                        bound = filled(work, stages, m, 1, prices.hop_s(outer)) + splits.once
                        queue.append((bound / batch, len(queue), 0, bound / batch, batch, splits))
    best: tuple[float, tuple[LayerwiseStage, ...], Outer, int] | None = None
    tried, legal = 0, len(queue)
    each = least = INFINITE  # seconds a sample: of the best plan, and of what none undercuts
    heapify(queue)
    while queue:
        _, place, turn, bound, batch, splits = heappop(queue)
        if bound >= each:
            continue
        found = None
        if turn == 0:
            splits.estimate()
        elif turn == 1:
            tried += 1
            found = splits.even(each * batch)
        elif turn == 2:
            found = splits.begin(each * batch)
        else:
            found = splits.finish(each * batch)
        bound = max(bound, splits.least / batch)
        if turn < len(LATER):
            heappush(queue, (bound * LATER[turn], place, turn + 1, bound, batch, splits))
        else:
            least = min(least, bound)
        if found is not None:
            best = (*found, splits.outer, batch)
            each = found[0] / batch
    if best is None:
        raise NoPlanError(f"no layer-wise plan fits in {format_bytes(limit.usable)} ({legal} outer choices)")
    seconds, chosen, outer, batch = best
    plan = LayerwisePlan(
        world_size=prices.world,
        pp=outer.pp,
        global_batch_size=batch,
        num_microbatches=outer.num_microbatches,
        stages=chosen,
        step_time_s=seconds,
        peak_memory_bytes=max(stage.peak_bytes for stage in chosen),
        sequence_parallel=prices.sequence_parallel,
    )
    return LayerwiseResult(plan, tried, legal, min(seconds, least * batch))
