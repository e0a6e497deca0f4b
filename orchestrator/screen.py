"""What a plan's commands print, and the progress of a search on a terminal."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

from orchestrator.job import Job
from orchestrator.launch import render
from orchestrator.model.families import describe
from orchestrator.planning import Found
from orchestrator.recipe import Settings
from orchestrator.units import format_seconds

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

FILE_WIDTH = 120
"""Columns where the output is no terminal: tables of plans want more than the usual 80."""
SHOWN_AFTER_S = 1.0
"""A search that is done by then needs no progress bar."""


def screen() -> Console:
    """The terminal at its own width; a file or pipe at a fixed one."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=FILE_WIDTH)


class SearchProgress:
    """A bar on a terminal once a search has taken SHOWN_AFTER_S; nothing elsewhere."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.bar: Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def show(self, done: int, total: int, best_s: float | None) -> None:
        """What the search calls: outer choices done, in all, and seconds of the best plan so far."""
        if self.bar is None:
            if time.monotonic() - self.started < SHOWN_AFTER_S or not sys.stdout.isatty():
                return
            from rich.progress import Progress

            self.bar = Progress(transient=True)
            self.bar.add_task("searching", total=total)
            self.bar.start()
        found = "" if best_s is None else f", best {format_seconds(best_s)}"
        self.bar.update(self.bar.task_ids[0], completed=done, description=f"searching{found}")


def show_plan(settings: Settings, found: Found, job: Job, out: Path) -> None:
    """The plan, its price, the alternatives, and what the files are."""
    from orchestrator.report import text
    from orchestrator.report.memory import data_parallel_table, memory_table

    console = screen()
    plan = found.plan
    model = describe(plan.model, plan.training.seq_length, plan.training.decoder_seq_length)
    console.print(text.plan_table(plan, model, found.limit))
    console.print(text.price_table(plan, found.limit))
    if not found.complete:
        print(f"search.budget_s={settings.budget_s} ended the search: this is the best plan so far, others may be faster")
    if found.outcomes:
        console.print(text.alternatives_table(plan, found.alternatives))
        for line in text.close_engines(plan, found.alternatives):
            print(line)
        alone = [(row.engine, row.zero_stage, row.least.predicted if row.least else None, row.why) for row in found.alone]
        if any(predicted is not None and predicted.peak_memory_bytes > found.limit.usable for _, _, predicted, _ in alone):
            console.print(data_parallel_table(plan, alone, found.limit))
        total, priced = len(found.outcomes), sum(outcome.step_time_s is not None for outcome in found.outcomes)
        for explanation in found.explained:
            print(text.explanation_text(plan, explanation.question, explanation.plan, explanation.why))
            if explanation.refused is not None:
                console.print(memory_table(explanation.refused.choice, explanation.refused.predicted, found.limit))
        for other_tp in found.narrower:
            print(text.wide_tp_text(plan, other_tp.plan, other_tp.why))
        for other in found.unasked:
            print(text.unasked_text(plan, other.key, other.predicted, found.limit))
        print(text.proof(plan, found.at_least_s, found.searched) + ".")
        print(f"{total} choices: {priced} priced, {total - priced} not taken; candidates.csv has each with its price or reason")
    print(f"Written to {out}")
    slurm = render.with_whole_nodes(job, settings.slurm, settings.cluster.gpus_per_node)
    by_slurm = settings.launch == "slurm" or job.num_nodes > 1
    for note in (*job.notes, *(render.unsaid(job, slurm) if by_slurm else ())):
        print(f"note: {note}")
    sys.stdout.flush()
