"""Two plans side by side: what was chosen, and where the time and the memory go, cause by cause; and many plans as a table, a row a
combination of keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, log1p
from typing import Any, Final

from msgspec import structs
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from orchestrator.cost.uncertainty import BEYOND, Pairs, pairs_of
from orchestrator.model.training import Training
from orchestrator.plan import Plan
from orchestrator.report.budget import Budget, budget, format_time
from orchestrator.report.measured import measured_peak_memory, measured_step_time, steady_steps
from orchestrator.report.text import NOISE, PIPE_WIDTH, Fitting, _table, as_text, cause_name, choice, stage_sizes
from orchestrator.units import format_amount, format_bytes, format_count, format_seconds
from orchestrator.values import Printed, Value

WRITTEN: Final = (("step", "step_s", format_seconds), ("tokens/s", "tokens_per_s", "{:,.0f}".format), ("days", "days", format_amount),
                  ("GPU-hours", "gpu_hours", "{:,.0f}".format))  # fmt: skip
"""Rows of the comparison: heading, figure of the budget, how it is written."""


UNTIMED: Final = ("lr", "min_lr", "schedule", "decay_steps", "decay", "warmup", "betas", "eps", "weight_decay", "clip", "steps", "seed")
"""Settings of a training that change what comes of it, or how long it goes on, and no step's time."""


def timed(training: Training) -> dict[str, Any]:
    """The settings that a step's time may depend on, by name."""
    return {name: value for name, value in structs.asdict(training).items() if name not in UNTIMED}


class Measured(Value, frozen=True, kw_only=True):
    """What a run's steps took behind its warm-up: the median of their seconds, and the most bytes of a GPU, where the run could tell."""

    steps: int
    step_time_s: float
    peak_memory_bytes: float | None


class Comparison(Printed, frozen=True, kw_only=True):
    """`one` and `other`, priced; seconds and bytes by cause as (one's, the other's)."""

    one: Plan
    other: Plan
    seconds: dict[str, tuple[float, float]]
    """Seconds of the step by cause (one's, the other's), the largest difference first."""
    memory_bytes: dict[str, tuple[float, float]]
    """Bytes of each plan's fullest stage by cause (one's, the other's)."""
    chances: tuple[float | None, float | None] = (None, None)
    """The chances that they run out of memory, 0 to 1; None: not known."""
    measured: tuple[Measured | None, Measured | None] = (None, None)
    """What the runs that these are the plans of took; None: it is no run's, or no step is measured."""
    goodputs: tuple[float | None, float | None] = (None, None)
    """The shares of the time that train (`Budget.goodput`)."""

    def __repr__(self) -> str:
        """One line: the two plans have megabytes."""
        one, other = (f"{plan.engine} {choice(plan)}" for plan in (self.one, self.other))
        return f"<Comparison of {one} with {other}: {100 * self.difference:+.1f}% a step>"

    @property
    def difference(self) -> float:
        """How much longer the other's step takes, as a share; below 0: it is the faster one."""
        return self.other.prediction.step_time_s / self.one.prediction.step_time_s - 1

    @property
    def pairs(self) -> Pairs | None:
        """What is known of such a difference by pairs of published runs: those of one training, but for what no step's time depends on, on
        the same GPUs, under an engine of which runs were fitted; None elsewhere."""
        alike = all(getattr(self.one, name) == getattr(self.other, name) for name in ("engine", "model", "cluster"))
        alike = alike and timed(self.one.training) == timed(self.other.training)
        fitted = self.one.prediction.interval and BEYOND["engine"] not in self.one.prediction.beyond
        return pairs_of(self.one.model) if alike and fitted else None

    @property
    def difference_90(self) -> tuple[float, float] | None:
        """The 90% interval of `difference`: by `pairs` or, without, as far as the two steps' own go, and then as wide as both."""
        if self.pairs is not None:
            return ((1 + self.difference) / exp(self.pairs.most) - 1, (1 + self.difference) * exp(self.pairs.most) - 1)
        one, other = (plan.prediction.interval for plan in (self.one, self.other))
        return (other[0] / one[1] - 1, other[1] / one[0] - 1) if one and other else None

    def difference_text(self) -> str:
        """How much longer the other's step takes, how sure that is, and by what."""
        interval, pairs = self.difference_90, self.pairs
        said = f"{100 * self.difference:+.1f}%"
        if interval is None:
            return f"{said}; no interval: no run like one of these was measured"
        said += f" (90%: {100 * interval[0]:+.1f} to {100 * interval[1]:+.1f}%"
        if pairs is None:
            return f"{said}; by both steps' own intervals: no pair of published runs differs so)"
        apart = "further apart" if abs(log1p(self.difference)) > pairs.half else "nearer"
        return f"{said}, by pairs of published runs), {apart} than the {100 * pairs.half:.1f}% by which half of these pairs are off"

    @property
    def difference_measured(self) -> float | None:
        """`difference` of what was measured; None where it was not measured of both."""
        one, other = self.measured
        return other.step_time_s / one.step_time_s - 1 if one and other else None

    def per_token_text(self) -> str:
        """How much longer the other takes a token, where its steps have another number of tokens; else ""."""
        one, other = (plan.global_batch_size * plan.training.seq_length for plan in (self.one, self.other))
        if one == other:
            return ""
        share = (1 + self.difference) * one / other - 1
        return f". Its step has {other / one:.3g} times the tokens: {100 * share:+.1f}% a token"

    def __str__(self) -> str:
        """The tables that the command prints."""
        return as_text(comparison_tables(self), PIPE_WIDTH)

    def summary(self) -> dict[str, Any]:
        """The comparison as JSON has it."""
        return {
            "one": facts(self.one, self.goodputs[0]) | {"chance_of_not_fitting": self.chances[0]},
            "other": facts(self.other, self.goodputs[1]) | {"chance_of_not_fitting": self.chances[1]},
            "measured": self.measured,
            "difference": self.difference,
            "difference_measured": self.difference_measured,
            "difference_90": self.difference_90,
            "step_time_s_by_cause": self.seconds,
            "memory_bytes_by_cause": self.memory_bytes,
        }


def trained_text(training: Training) -> str:
    """Which weights are trained."""
    if (lora := training.lora) is not None:
        bits = f", frozen weights of {lora.bits} bits" if lora.bits else ""
        return f"LoRA adapters of rank {lora.rank} ({', '.join(lora.targets)}{bits})"
    return f"all weights but those of {', '.join(training.freeze)}" if training.freeze else "all weights"


def facts(plan: Plan, goodput: float | None = None) -> dict[str, Any]:
    """What a plan is, and its figures, with failures by this `Budget.goodput`. Raises ValueError for a plan without prediction."""
    of, predicted = structs.replace(budget(plan), goodput=goodput), plan.prediction
    return {
        "model": plan.model.name, "cluster": plan.cluster.name, "gpus": plan.world_size, "engine": plan.engine, "choice": choice(plan),
        "layers": stage_sizes(plan) or "all in one stage", "calibration": plan.calibration, "trained": trained_text(plan.training),
        "global_batch_size": plan.global_batch_size, "seq_length": plan.training.seq_length,
        "steps": plan.training.steps, "step_time_s": predicted.step_time_s, "interval_s": predicted.interval,
        "peak_memory_bytes": predicted.peak_memory_bytes, **of.figures(),
    }  # fmt: skip


def measured_in(rows: Sequence[Mapping[str, Any]]) -> Measured | None:
    """What the lines of a metrics.jsonl say; None: no step was measured."""
    seconds = measured_step_time(rows)
    if seconds is None:
        return None
    return Measured(steps=len(steady_steps(rows)), step_time_s=seconds, peak_memory_bytes=measured_peak_memory(rows))


def compared(
    one: Plan,
    other: Plan,
    chances: tuple[float | None, float | None] = (None, None),
    measured: tuple[Measured | None, Measured | None] = (None, None),
    goodputs: tuple[float | None, float | None] = (None, None),
) -> Comparison:
    """The two plans side by side, with the `chances` that they run out of memory, what their runs took, and the shares of the time that
    train. Raises ValueError for a plan without prediction."""
    memory = [predicted.by_stage[predicted.fullest].memory_by_cause for predicted in (one.prediction, other.prediction)]
    causes = {"seconds": _pairs(one.prediction.by_cause, other.prediction.by_cause), "memory_bytes": _pairs(*memory)}
    return Comparison(one=one, other=other, chances=chances, measured=measured, goodputs=goodputs, **causes)


def _pairs(one: dict[str, float], other: dict[str, float]) -> dict[str, tuple[float, float]]:
    pairs = {name: (one.get(name, 0.0), other.get(name, 0.0)) for name in dict.fromkeys([*one, *other])}
    return dict(sorted(pairs.items(), key=lambda item: -abs(item[1][1] - item[1][0])))


def comparison_tables(of: Comparison, names: tuple[str, str] = ("one", "other")) -> RenderableType:
    """What differs, then time and memory by cause with the difference."""
    plans = (of.one, of.other)
    first, second = (facts(plan, goodput) for plan, goodput in zip(plans, of.goodputs, strict=True))
    budgets = [structs.replace(budget(plan), goodput=goodput) for plan, goodput in zip(plans, of.goodputs, strict=True)]
    head = _table(("", False), (names[0], False), (names[1], False))
    for name in ("model", "cluster", "gpus", "engine", "choice", "layers", "calibration"):
        head.add_row(name, Text(str(first[name])), Text(str(second[name])))
    if first["trained"] != second["trained"]:
        head.add_row("trained", Text(first["trained"]), Text(second["trained"]))
    head.add_row("batch", *(f"{plan.global_batch_size:,} sequences of {plan.training.seq_length:,}" for plan in (of.one, of.other)))
    head.add_row("steps", *(f"{plan.training.steps:,}" for plan in (of.one, of.other)))
    for name, figure, write in WRITTEN:
        head.add_row(name, *(each.said(figure, write) for each in budgets))
    head.add_row("memory", format_bytes(first["peak_memory_bytes"]), format_bytes(second["peak_memory_bytes"]))
    if any(chance is not None for chance in of.chances):
        head.add_row("runs out", *("" if chance is None else f"{format_amount(100 * chance, 2)}% chance" for chance in of.chances))
    if any(of.measured):
        steps = ("not measured" if one is None else f"{format_seconds(one.step_time_s)}, median of {one.steps}" for one in of.measured)
        head.add_row("step measured", *steps)
        peaks = ("" if one is None or one.peak_memory_bytes is None else format_bytes(one.peak_memory_bytes) for one in of.measured)
        head.add_row("memory measured", *peaks)
    measured = "" if of.difference_measured is None else f"; measured {100 * of.difference_measured:+.1f}%"
    longer = Text(f"{names[1]} takes {of.difference_text()}{of.per_token_text()}{measured}")
    step = _causes("step time", of.seconds, names, seconds=True)
    memory = _causes("memory of the fullest stage", of.memory_bytes, names, seconds=False)
    return Group(head, longer, step, memory)


def _causes(heading: str, pairs: dict[str, tuple[float, float]], names: tuple[str, str], *, seconds: bool) -> Table:
    write = format_seconds if seconds else format_bytes
    table = _table((heading, False), (names[0], True), (names[1], True), ("difference", True))
    least = NOISE * sum(one + other for one, other in pairs.values())
    for name, (one, other) in ((name, tuple(value if value > least else 0.0 for value in pair)) for name, pair in pairs.items()):
        if one or other:
            table.add_row(cause_name(name), write(one), write(other), signed(other - one, write(abs(other - one))))
    table.add_section()
    one, other = (sum(pair[index] for pair in pairs.values()) for index in (0, 1))
    table.add_row("total", write(one), write(other), signed(other - one, write(abs(other - one))))
    return table


def signed(difference: float, written: str) -> str:
    """A difference as `written`, with its sign; "" where there is none.

    >>> signed(-2.0, "2 s"), signed(0.0, "0 s")
    ('-2 s', '')
    """
    return "" if not difference else f"{'+' if difference > 0 else '-'}{written}"


SWEPT: Final = (("step", "step_s", format_seconds), ("tokens/s", "tokens_per_s", format_count), ("training", "whole_s", format_time),
                ("GPU-hours", "gpu_hours", format_count), ("cost", "cost", format_count))  # fmt: skip
"""Columns of a sweep: heading, figure of the budget, how it is written."""


class Row(Value, frozen=True, kw_only=True):
    """`plan` in one line with its figures; without `budget` there is none, and `why` says so."""

    keys: dict[str, str]
    plan: str = ""
    budget: Budget | None = None
    headroom: float = 0.0
    """The share of the usable memory that the fullest rank leaves free."""
    chance: float | None = None
    """The chance of running out of memory, 0 to 1; None: nothing is known of it."""
    on_front: bool = False
    why: str = ""


def sweep_table(names: Sequence[str], rows: Sequence[Row]) -> RenderableType:
    """The keys that vary, then the figures, each above its 90% interval, cost where there is a price; the plans are lines below, and what
    marks mean. Without room for all, tokens/s, then GPU-hours stay out: a step's time says the one, and the training's time or cost the
    other."""
    plans = []
    for row in rows:
        plan = f"none: {row.why}" if row.budget is None else row.plan
        plans.append(Text(f"{' '.join(f'{name}={row.keys[name]}' for name in names)}: {plan}"))
    planned = [row for row in rows if row.budget is not None]
    marked = not all(row.on_front for row in planned)
    tables = (_swept(names, rows, left_out, marked=marked) for left_out in ((), ("tokens/s",), ("tokens/s", "GPU-hours")))
    priced = {row.budget is not None and row.budget.cost is not None for row in planned}
    weighed = f"training time, GPU-hours{MIXED if len(priced) > 1 else ', cost'} and the chance of running out of memory"
    legend = f"{LEGEND[marked]} in {weighed} together by more than prices can tell"
    said = f"{len(planned)} of {len(rows)} have a plan; {legend}; below each figure its 90% interval"
    return Group(Fitting(*tables, wrapped=False), *plans, Text(said))


MIXED: Final = ", not cost,"
"""In place of the cost, where some rows have none."""
LEGEND: Final = {True: "*: no other is better", False: "none is better than another"}
"""What is said of the rows of a sweep, by whether some are marked: where all would be, none is."""


def _swept(names: Sequence[str], rows: Sequence[Row], left_out: Sequence[str], *, marked: bool) -> Table:
    priced = any(row.budget is not None and row.budget.cost is not None for row in rows)
    shown = [one for one in SWEPT if one[0] not in left_out and (priced or one[0] != "cost")]
    chances = any(row.chance is not None for row in rows)
    beside = ["usable\nfree", *(["runs\nout"] if chances else [])]
    table = _table(*((name, False) for name in names), *((heading, True) for heading in (*(one[0] for one in shown), *beside)), ("", False))
    for row in rows:
        keys, of = [Text(row.keys[name]) for name in names], row.budget
        if of is None:
            table.add_row(*keys)
            continue
        figures = ["\n".join(of.words(name, write)) if getattr(of, name) is not None else "" for _, name, write in shown]
        chance = "" if row.chance is None else f"{format_amount(100 * row.chance, 2)}%"
        table.add_row(*keys, *figures, f"{100 * row.headroom:.1f}%", *([chance] if chances else []), "*" if marked and row.on_front else "")
    for column in table.columns:
        column.no_wrap = True
    return table
