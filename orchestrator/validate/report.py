"""The report of a validation as plain data, its keys fixed: tables.<name>, all, by.<split>.<value>, held_out, unused."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from orchestrator.strategy.layout import Prediction
from orchestrator.validate.metrics import SPLITS, Priced, grouped, summary
from orchestrator.validate.pricing import seen_peak
from orchestrator.validate.runs import DOUBTED_GPUS, Run, Unusable, counts, doubted, held_out


def measured_beside(run: Run, prediction: Prediction) -> Priced:
    """The prediction in the terms of the measurement."""
    return Priced(
        run=run,
        time_s=prediction.step_time_s,
        memory_bytes=seen_peak(run, prediction),
        needed_bytes=prediction.peak_memory_bytes,
        limit_bytes=run.cluster.gpu.memory,
        interval=prediction.interval,
    )


def table_of(priced: Priced) -> str:
    """The table that a row is reported under; with a colon, one that is not summed up."""
    if priced.run.training.lora is not None:
        return f"{priced.run.table}:lora"
    if counts(priced.run):
        return priced.run.table
    return f"{priced.run.table}:{f'{DOUBTED_GPUS}_gpus' if doubted(priced.run) else 'not_fitted'}"


def parts_of(rows: Sequence[Priced]) -> dict[str, Any]:
    """The report's parts `tables` by name, `all`, and `by` split and value."""
    trusted = [row for row in rows if ":" not in table_of(row)]
    return {
        "tables": {name: summary(part) for name, part in grouped(rows, table_of).items()},
        "all": summary(trusted),
        "by": {split: {name: summary(part) for name, part in grouped(trusted, key).items()} for split, key in SPLITS.items()},
    }


def report_of(rows: Sequence[Priced], unusable: Sequence[Unusable]) -> dict[str, Any]:
    """Everything but the recovery of experts' configurations."""
    reasons: dict[str, Counter[str]] = defaultdict(Counter)
    for row in unusable:
        reasons[row.table][row.why] += 1
    return {
        **parts_of(rows),
        "held_out": parts_of([row for row in rows if held_out(row.run) and ":" not in table_of(row)]),
        "unused": {table: dict(sorted(counts.items())) for table, counts in sorted(reasons.items())},
    }
