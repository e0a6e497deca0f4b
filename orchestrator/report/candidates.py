"""`candidates.csv`: every outer choice of the search with its price, or why it was not taken."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from functools import lru_cache

from msgspec.structs import replace

from orchestrator.plan import Plan
from orchestrator.strategy.choices import getter, shown
from orchestrator.strategy.spec import CHOICES, Candidate
from orchestrator.strategy.tree import Outcome

FIRST_COLUMNS = (
    "engine", "tp", "pp", "vpp", "cp", "ep", "etp", "dp", "zero_stage", "zero_shard_size", "sequence_parallel", "offload_optimizer",
    "recompute", "micro_batch_size", "num_microbatches", "schedule", "rank_order", "step_time_s", "peak_memory_bytes", "reason",
)  # fmt: skip
"""The columns of the first version, in their order for ever; every choice that was declared since then follows them."""
COLUMNS = (*FIRST_COLUMNS, *(choice.name for choice in CHOICES if choice.name not in FIRST_COLUMNS))

_PATHS = {choice.name: choice.path for choice in CHOICES}
_PLACE = FIRST_COLUMNS.index("step_time_s")
_first = getter(_PATHS.get(column, column) for column in FIRST_COLUMNS[:_PLACE])
_more = getter(_PATHS[column] for column in COLUMNS[len(FIRST_COLUMNS) :])


@lru_cache(maxsize=10_000)
def _shown(values: tuple[object, ...]) -> list[str]:
    """Values of the same columns, of which most rows have the same."""
    return [*map(shown, values)]


def _row(outcome: Outcome) -> list[str]:
    seconds = "" if outcome.step_time_s is None else repr(float(outcome.step_time_s))
    peak = "" if outcome.peak_memory_bytes is None else str(round(outcome.peak_memory_bytes))
    return [*map(shown, _first(outcome.candidate)), seconds, peak, outcome.reason or "", *_shown(_more(outcome.candidate))]


def _without_recompute(candidate: Candidate) -> Candidate:
    return replace(candidate, strategy=replace(candidate.strategy, recompute="none"))


def candidates_csv(outcomes: Iterable[Outcome], plan: Plan | None = None) -> str:
    """Priced choices from the fastest, then the others in the search's order. Times in seconds, exact; memory in bytes; `recompute` is the
    strongest mode that the choice allowed, and in the row of `plan`, the one that was taken, the strongest that it has."""
    ordered = sorted(outcomes, key=lambda outcome: float("inf") if outcome.step_time_s is None else outcome.step_time_s)
    taken = None if plan is None else plan.candidate
    rows = [*map(_row, ordered)]
    for outcome, row in zip(ordered, rows, strict=True):
        if outcome.step_time_s is None or taken is None:
            break
        if _without_recompute(outcome.candidate) == _without_recompute(taken):
            row[COLUMNS.index("recompute")] = taken.strategy.recompute
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([COLUMNS, *rows])
    return text.getvalue()
