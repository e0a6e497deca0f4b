"""candidates.csv: stable columns, exact numbers, every choice."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass

from report_plans import PLAN, SLOWER

from orchestrator.report.candidates import COLUMNS, candidates_csv
from orchestrator.strategy.spec import Candidate


@dataclass(frozen=True)
class Found:
    candidate: Candidate
    step_time_s: float | None
    peak_memory_bytes: float | None
    reason: str | None


def test_every_choice_is_there_the_fastest_first_and_numbers_are_exact() -> None:
    found = [
        Found(PLAN.candidate, None, None, 'illegal: "16", not 8'),
        Found(SLOWER.candidate, 13.44, 50.4, "slower by 12.0%"),
        Found(PLAN.candidate, 0.1 + 0.2, 7e10, None),
        Found(SLOWER.candidate, None, 1e11, "needs 93.1 GiB"),
    ]
    rows = list(csv.DictReader(io.StringIO(candidates_csv(found))))
    assert [row["step_time_s"] for row in rows] == ["0.30000000000000004", "13.44", "", ""]
    assert [row["peak_memory_bytes"] for row in rows] == ["70000000000", "50", "", "100000000000"]
    assert [row["reason"] for row in rows] == ["", "slower by 12.0%", 'illegal: "16", not 8', "needs 93.1 GiB"]
    assert tuple(rows[0]) == COLUMNS
    first = rows[0]
    assert (first["engine"], first["tp"], first["pp"], first["dp"], first["zero_stage"]) == ("megatron", "4", "4", "4", "1")
    assert (first["sequence_parallel"], first["offload_optimizer"], first["recompute"]) == ("true", "false", "full")
    assert (first["num_microbatches"], first["rank_order"], first["zero_shard_size"]) == ("128", "tp-cp-ep-dp-pp", "")


def test_no_choice_leaves_the_heading() -> None:
    assert candidates_csv([]) == ",".join(COLUMNS) + "\n"
