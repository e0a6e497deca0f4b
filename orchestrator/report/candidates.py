"""`candidates.csv`: every outer choice of the search with its price, or why it was not taken."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable

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

_OF_OUTCOME = ("step_time_s", "peak_memory_bytes", "reason")
"""The columns that are no candidate's, side by side."""
_PLACE = COLUMNS.index(_OF_OUTCOME[0])
_PATHS = {choice.name: choice.path for choice in CHOICES}
_values = getter(_PATHS.get(column, column) for column in COLUMNS if column not in _OF_OUTCOME)


def _row(outcome: Outcome) -> list[str]:
    said = [*map(shown, _values(outcome.candidate))]
    said[_PLACE:_PLACE] = [
        "" if outcome.step_time_s is None else repr(float(outcome.step_time_s)),
        "" if outcome.peak_memory_bytes is None else str(round(outcome.peak_memory_bytes)),
        outcome.reason or "",
    ]
    return said


def _without_recompute(candidate: Candidate) -> Candidate:
    return replace(candidate, strategy=replace(candidate.strategy, recompute="none"))


def candidates_csv(outcomes: Iterable[Outcome], plan: Plan | None = None) -> str:
    """Priced choices from the fastest, then the others in the search's order. Times in seconds, exact; memory in bytes; `recompute` is the
    strongest mode that the choice allowed, and in the row of `plan`, the one that was taken, the strongest that it has."""
    ordered = sorted(outcomes, key=lambda outcome: float("inf") if outcome.step_time_s is None else outcome.step_time_s)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    taken = None if plan is None else plan.candidate
    for outcome in ordered:
        row = _row(outcome)
        if taken is not None and outcome.step_time_s is not None and _without_recompute(outcome.candidate) == _without_recompute(taken):
            row[COLUMNS.index("recompute")] = taken.strategy.recompute
        writer.writerow(row)
    return text.getvalue()
