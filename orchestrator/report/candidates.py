"""`candidates.csv`: every outer choice of the search with its price, or why it was not taken."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import Protocol

from orchestrator.strategy.spec import Candidate

COLUMNS = (
    "engine", "tp", "pp", "vpp", "cp", "ep", "etp", "dp", "zero_stage", "zero_shard_size", "sequence_parallel", "offload_optimizer",
    "recompute", "micro_batch_size", "num_microbatches", "schedule", "rank_order", "step_time_s", "peak_memory_bytes", "reason",
)  # fmt: skip
"""Stable: a column is only ever added, at the end."""


class Outcome(Protocol):
    """What the search says of one outer choice: a price, or the reason for its rejection, or both."""

    @property
    def candidate(self) -> Candidate: ...
    @property
    def step_time_s(self) -> float | None: ...
    @property
    def peak_memory_bytes(self) -> float | None: ...
    @property
    def reason(self) -> str | None: ...


def _truth(value: bool) -> str:
    return "true" if value else "false"


def _row(outcome: Outcome) -> list[object]:
    candidate, strategy, mesh = outcome.candidate, outcome.candidate.strategy, outcome.candidate.mesh
    return [
        candidate.engine, mesh.tp, mesh.pp, candidate.vpp, mesh.cp, mesh.ep, mesh.etp, mesh.dp, strategy.zero_stage,
        strategy.zero_shard_size or "", _truth(strategy.sequence_parallel), _truth(strategy.offload_optimizer), strategy.recompute,
        candidate.micro_batch_size, candidate.num_microbatches, candidate.schedule, "-".join(mesh.order),
        "" if outcome.step_time_s is None else repr(float(outcome.step_time_s)),
        "" if outcome.peak_memory_bytes is None else round(outcome.peak_memory_bytes), outcome.reason or "",
    ]  # fmt: skip


def candidates_csv(outcomes: Iterable[Outcome]) -> str:
    """Priced choices from the fastest, then the others in the search's order. Times in seconds, exact; memory in bytes; `recompute` is the
    strongest mode that the choice allowed."""
    ordered = sorted(outcomes, key=lambda outcome: float("inf") if outcome.step_time_s is None else outcome.step_time_s)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(_row(outcome) for outcome in ordered)
    return text.getvalue()
