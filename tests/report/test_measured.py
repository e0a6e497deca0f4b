"""Predicted against measured."""

from __future__ import annotations

from msgspec.structs import replace
from report_plans import PLAN

from orchestrator.report.measured import comparison_table, measured_peak_memory, measured_step_time
from orchestrator.report.text import as_text


def row(step: int, seconds: float) -> dict[str, object]:
    return {"step": step, "step_time_s": seconds, "tokens_per_s": 512 * 8192 / seconds, "peak_memory_bytes": 70 * 2**30, "loss": 2.0}


def test_the_slow_first_steps_do_not_count() -> None:
    rows = [row(1, 60.0), row(2, 14.0), row(3, 13.0), row(4, 12.5), row(5, 12.6), row(6, 12.7)]
    assert measured_step_time(rows) == 12.6
    assert measured_step_time(rows[:1]) == 60.0
    assert measured_step_time([]) is None
    assert measured_step_time([{"step": 1}, {"step": 2, "step_time_s": None}]) is None


def test_prediction_and_measurement_stand_side_by_side() -> None:
    text = [" ".join(line.split()) for line in as_text(comparison_table(PLAN, [row(n, 15.0) for n in range(8)])).splitlines()]
    assert "step time 12 s 15 s 1.25" in text
    assert "tokens/s/GPU 5,461 4,369 0.80" in text
    assert "peak memory 70.0 GiB 70.0 GiB 1.00" in text
    assert "median of 5 steps after warm-up" in text


def test_what_was_not_measured_is_not_shown() -> None:
    text = as_text(comparison_table(replace(PLAN, predicted=None), [{"step": 1, "step_time_s": 0.5, "peak_memory_bytes": 0}]))
    assert "peak memory" not in text
    assert "500 ms" in text
    assert measured_peak_memory([{"peak_memory_bytes": 0}, {}]) is None
    assert as_text(comparison_table(PLAN, [])) == "No step was measured.\n"
