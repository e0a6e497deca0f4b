"""Memory side by side: the sums are right, and each row says whether it fits."""

from __future__ import annotations

import re

from msgspec.structs import replace
from report_plans import PLAN, PREDICTED

from orchestrator.plan import Prediction
from orchestrator.report.memory import data_parallel_table, memory_table
from orchestrator.report.text import WIDTH, as_text
from orchestrator.strategy.pins import MemoryLimit
from orchestrator.units import GIB

LIMIT = MemoryLimit(limit=80 * GIB, reserve=2 * GIB)


def needing(gibibytes: float) -> Prediction:
    """PREDICTED with a stage of this size: everything above 38 GiB is activations."""
    stage = PREDICTED.by_stage[0]
    causes = {**stage.memory_by_cause, "activations": (gibibytes - 38.0) * GIB}
    return replace(PREDICTED, by_stage=(replace(stage, peak_memory_bytes=gibibytes * GIB, memory_by_cause=causes),))


def test_a_refused_choice_is_itemised_against_the_limit() -> None:
    text = as_text(memory_table("megatron tp=1", needing(100), LIMIT))
    rows = [line.split() for line in text.splitlines() if line.strip()]
    assert ["needs", "100.0", "GiB"] in rows
    assert ["usable", "78.0", "GiB"] in rows
    assert ["lacks", "22.0", "GiB"] in rows
    shown = [float(row[-2]) * (1 if row[-1] == "GiB" else 1 / 1024) for row in rows[2:] if row[0] not in ("needs", "usable", "lacks")]
    assert sum(shown) == 100.0


def test_data_parallelism_is_shown_beside_the_plan() -> None:
    rows = [("megatron", 0, needing(100), ""), ("megatron", 1, needing(60), ""), ("deepspeed", 0, None, "illegal by rule x: y")]
    text = as_text(data_parallel_table(PLAN, rows, LIMIT))
    assert re.search(r"the plan .* 70.0 GiB +fits", text)
    assert re.search(r"megatron ZeRO-0 .* 100.0 GiB +22.0 GiB", text)
    assert re.search(r"megatron ZeRO-1 .* 60.0 GiB +fits", text)
    assert "deepspeed ZeRO-0: illegal by rule x: y" in text
    assert max(map(len, text.splitlines())) <= WIDTH


def test_a_narrow_terminal_keeps_the_names_of_the_rows_and_whole_figures() -> None:
    rows = [("megatron_deepspeed", 1, needing(100), ""), ("deepspeed", 2, needing(60), "")]
    table = data_parallel_table(PLAN, rows, LIMIT)
    wide, narrow = as_text(table, 120), as_text(table, 80)
    assert "activations" in wide
    assert "activations" not in narrow
    assert re.search(r"megatron_deepspeed ZeRO-1 +100.0 GiB +22.0 GiB", narrow)
    assert re.search(r"deepspeed ZeRO-2 +60.0 GiB +fits", narrow)
    assert max(map(len, narrow.splitlines())) <= 80
