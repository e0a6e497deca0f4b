"""How far predictions are from measurements: errors, ranking within sweeps, what fits, as the report of a validation has them under keys
that are fixed: tables.<name>, all, by.<split>.<value>, held_out, unused. All figures are fractions."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from orchestrator.strategy.layout import Prediction
from tests.validation.runs import DOUBTED_GPUS, Run, Unusable, counts, doubted, held_out

WITHIN = 0.20
"""`time_within_20`: the share of rows whose step time is predicted within this."""
BOOTSTRAP_DRAWS = 1000
BOOTSTRAP_SEED = 0
TP_OF_A_NODE = 8
"""The second baseline's rule: tensor parallelism up to a node of 8, then pipeline."""


@dataclass(frozen=True, kw_only=True)
class Priced:
    """A run beside its prediction. `memory_bytes`: of the rank and of the kind that the source measured; `needed_bytes`: the whole
    process on the fullest rank, which has to be below `limit_bytes`. `interval`: 90%, seconds."""

    run: Run
    time_s: float
    memory_bytes: float
    needed_bytes: float
    limit_bytes: float
    interval: tuple[float, float] | None = None

    @property
    def predicted_to_fit(self) -> bool:
        """Whether the run is predicted to run at all: the engine can build it, and it fits."""
        return not self.run.illegal and self.needed_bytes <= self.limit_bytes

    @property
    def time_error(self) -> float | None:
        """Error of the predicted step time, signed, relative to the measured one; None: it was not measured."""
        return None if self.run.time_s is None else self.time_s / self.run.time_s - 1

    @property
    def memory_error(self) -> float | None:
        """Error of the predicted peak, signed, relative to the measured one; None: it was not measured."""
        return None if self.run.memory_bytes is None else self.memory_bytes / self.run.memory_bytes - 1


def ranks(values: Sequence[float]) -> np.ndarray:
    """Ranks from 0; equal values share their mean rank.

    >>> ranks([10.0, 30.0, 20.0, 10.0]).tolist()
    [0.5, 3.0, 2.0, 0.5]
    """
    _, which, many = np.unique(values, return_inverse=True, return_counts=True)
    means: np.ndarray = np.cumsum(many) - (many + 1) / 2
    return means[which]


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Correlation of the ranks; None where one of them has a single rank.

    >>> spearman([1, 2, 3], [10, 20, 40]), spearman([1, 2, 3], [3, 2, 1])
    (1.0, -1.0)
    """
    x, y = ranks(a), ranks(b)
    return round(float(np.corrcoef(x, y)[0, 1]), 12) if x.std() and y.std() else None


def regret(ordered: Sequence[float], top: int) -> float:
    """1 - throughput of the best of the first `top` over the best of all; `ordered`: measured seconds, best-ranked first.

    >>> regret([2.0, 1.0, 4.0], 1), regret([2.0, 1.0, 4.0], 3)
    (0.5, 0.0)
    """
    return 1 - min(ordered) / min(ordered[:top])


def smallest_model_parallel(priced: Priced) -> tuple[float, ...]:
    """Baseline: the smallest tp x pp that ran, then the largest micro-batch (ties: smallest pp)."""
    mesh = priced.run.candidate.mesh
    return (mesh.tp * mesh.pp * mesh.cp, -priced.run.candidate.micro_batch_size, mesh.pp)


def tensor_then_pipeline(priced: Priced) -> tuple[float, ...]:
    """Baseline: tp grows up to a node before pp is used, as little of both as ran, then the largest micro-batch."""
    mesh = priced.run.candidate.mesh
    follows = (mesh.pp == 1 and mesh.tp <= TP_OF_A_NODE) or mesh.tp == TP_OF_A_NODE
    return (not follows, mesh.tp * mesh.pp, -priced.run.candidate.micro_batch_size)


ORDERS: dict[str, Callable[[Priced], tuple[float, ...]]] = {
    "": lambda priced: (priced.time_s,),
    "baseline_smallest_": smallest_model_parallel,
    "baseline_tp8_": tensor_then_pipeline,
}


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What a group of comparable runs says of a ranking."""

    spearman: float | None
    regrets: dict[str, float]


def sweeps(rows: Sequence[Priced]) -> list[Sweep]:
    """The sweeps, one for each group of at least two timed runs with different times."""
    groups: dict[object, list[Priced]] = defaultdict(list)
    for priced in rows:
        if priced.run.time_s is not None:
            groups[priced.run.group].append(priced)
    found = []
    for members in groups.values():
        if len(members) < 2 or len({member.run.candidate for member in members}) < 2:
            continue
        measured = [member.run.time_s or 0.0 for member in members]
        regrets = {}
        for name, order in ORDERS.items():
            keys = [order(member) for member in members]
            ordered = [measured[i] for i in sorted(range(len(members)), key=lambda i: keys[i])]
            for top in (1, 3):
                regrets[f"{name}top{top}_regret"] = regret(ordered, top)
        correlation = spearman([member.time_s for member in members], measured) if len(members) > 2 else None
        found.append(Sweep(spearman=correlation, regrets=regrets))
    return found


def _interval(values: Sequence[float], statistic: Callable[[np.ndarray], float]) -> list[float] | None:
    """The 90% bootstrap interval of a statistic, from a fixed seed."""
    if len(values) < 2:
        return None
    array = np.asarray(values, dtype=float)
    draws = np.random.default_rng(BOOTSTRAP_SEED).integers(0, len(array), size=(BOOTSTRAP_DRAWS, len(array)))
    statistics = [statistic(array[draw]) for draw in draws]
    return [float(np.quantile(statistics, 0.05)), float(np.quantile(statistics, 0.95))]


def summary(rows: Sequence[Priced]) -> dict[str, object]:
    """Every figure of one table (or of all, or of one engine ...). None: no row to judge it by."""
    times = [abs(error) for priced in rows if (error := priced.time_error) is not None]
    memories = [error for priced in rows if (error := priced.memory_error) is not None]
    ran = [priced for priced in rows if priced.run.fits is True]
    ended = [priced for priced in rows if priced.run.fits is False]
    refused = [priced for priced in ran + ended if not priced.predicted_to_fit]
    found = sum(not priced.predicted_to_fit for priced in ended)
    with_interval = [priced for priced in rows if priced.interval is not None and priced.run.time_s is not None]
    inside = [p.interval[0] <= p.run.time_s <= p.interval[1] for p in with_interval if p.interval and p.run.time_s]
    ranked = sweeps(rows)
    result: dict[str, object] = {
        "rows_used": len(rows),
        "rows_timed": len(times),
        "rows_with_memory": len(memories),
        "time_median_ape": float(np.median(times)) if times else None,
        "time_mean_ape": float(np.mean(times)) if times else None,
        "time_median_bias": float(np.median([p.time_error for p in rows if p.time_error is not None])) if times else None,
        "time_within_20": float(np.mean([error <= WITHIN for error in times])) if times else None,
        "memory_median_ape": float(np.median(np.abs(memories))) if memories else None,
        "memory_p95_under": float(np.quantile(np.maximum(0.0, -np.asarray(memories)), 0.95)) if memories else None,
        "ran_but_refused": float(np.mean([not priced.predicted_to_fit for priced in ran])) if ran else None,
        "oom_precision": found / len(refused) if ended and refused else None,
        "oom_recall": found / len(ended) if ended else None,
        "interval_coverage": float(np.mean(inside)) if inside else None,
        "sweeps": len(ranked),
    }
    correlations = [sweep.spearman for sweep in ranked if sweep.spearman is not None]
    result["spearman"] = float(np.mean(correlations)) if correlations else None
    for name in ("top1_regret", "top3_regret", *(f"{prefix}top1_regret" for prefix in ORDERS if prefix)):
        result[name] = float(np.mean([sweep.regrets[name] for sweep in ranked])) if ranked else None
    result["intervals_90"] = {
        "time_median_ape": _interval(times, np.median),
        "spearman": _interval(correlations, np.mean),
        "top1_regret": _interval([sweep.regrets["top1_regret"] for sweep in ranked], np.mean),
        "top3_regret": _interval([sweep.regrets["top3_regret"] for sweep in ranked], np.mean),
    }
    return result


LONG = 16384
"""Tokens from which a sequence is called long."""
SPLITS: dict[str, Callable[[Priced], str]] = {
    "engine": lambda priced: priced.run.engine.name,
    "gpu": lambda priced: priced.run.gpu,
    "precision": lambda priced: priced.run.precision,
    "kind": lambda priced: priced.run.kind,
    "length": lambda priced: "16k_and_longer" if priced.run.training.seq_length >= LONG else "shorter",
}
"""The ways to group rows that the report has as `by.<name>.<value>`."""


def grouped(rows: Sequence[Priced], key: Callable[[Priced], str]) -> dict[str, list[Priced]]:
    """Rows by what `key` says of them, names in order."""
    found: dict[str, list[Priced]] = defaultdict(list)
    for priced in rows:
        found[key(priced)].append(priced)
    return dict(sorted(found.items()))


def measured_beside(run: Run, prediction: Prediction) -> Priced:
    """The prediction in the terms of the measurement."""
    return Priced(
        run=run,
        time_s=prediction.step_time_s,
        memory_bytes=run.peak_bytes(prediction),
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
