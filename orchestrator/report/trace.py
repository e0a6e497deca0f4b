"""A step's timeline as Chrome's trace events, which Perfetto and chrome://tracing show."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from orchestrator.cost.price import Played
from orchestrator.plan import Plan

US: Final = 1e6
MOST_EVENTS: Final = 60_000
"""Events of a step that are written one by one; of a longer step the middle is one event a stage, which says how many passes it stands
for."""


LEAST_FOLDED: Final = 8
"""Backward passes of a stage below which the whole step is drawn."""
FOLDED_SHARE: Final = 0.25
"""The least share of a step that is worth a fold."""
FOLD_WIDTH: Final = 0.12
"""Width of the fold over that of what is drawn in full: room for the two moments beside it."""


class Bar(NamedTuple):
    """A pass on a stage, or several in a row (`kind` "steady")."""

    stage: int
    kind: str
    label: str
    begin_s: float
    end_s: float
    microbatch: int = 0
    chunk: int = 0


def bars(step: Played, most: int) -> Iterator[Bar]:
    """All passes, exposed reductions and the optimizer; of more than `most` passes, those in the middle of each stage as one."""
    shown = max(4, most // max(1, len(step.lanes)))
    for stage, lane in enumerate(step.lanes):
        head, tail = lane, lane[:0]
        if len(lane) > shown:
            head, tail = lane[: shown // 2], lane[-(shown // 2) :]
        for part, slots in enumerate((head, tail)):
            if part and slots:
                between = len(lane) - len(head) - len(tail)
                yield Bar(stage, "steady", f"{between} passes like these", head[-1].end_s, slots[0].begin_s)
            for slot in slots:
                yield Bar(stage, slot.action, f"{slot.action} of micro-batch {slot.microbatch}", slot.begin_s, slot.end_s, slot.microbatch,
                          slot.chunk)  # fmt: skip
        end, exposed = lane[-1].end_s, step.exposed_s[stage]
        if exposed > 0:
            yield Bar(stage, "reduction", "gradient reduction that nothing hides", end, end + exposed)
        done = step.optimizer_begin_s + step.optimizer_s
        yield Bar(stage, "optimizer", "optimizer", step.optimizer_begin_s, done)
        if step.once_s > 0:
            yield Bar(stage, "once", "once a step: overhead, tied embeddings", done, step.total_s)


class Fold(NamedTuple):
    """The middle of a step, where it repeats itself, drawn `width_s` seconds wide."""

    begin_s: float
    end_s: float
    width_s: float

    def at(self, seconds: float) -> float:
        """Where this moment of the step is drawn, in seconds from the left.

        >>> fold = Fold(2.0, 10.0, 1.0)
        >>> fold.at(1.0), fold.at(6.0), fold.at(12.0)
        (1.0, 2.5, 5.0)
        """
        inside = min(max(seconds - self.begin_s, 0.0), self.end_s - self.begin_s)
        return seconds - inside + inside / (self.end_s - self.begin_s) * self.width_s


def folded(step: Played) -> Fold | None:
    """What is left between the first passes with one period, and the last period with the end; None: too little for a fold. A period is a
    forward and a backward pass of the first stage or, of an interleaved pipeline, those of all its chunks for a micro-batch a stage."""
    lane = step.lanes[0]
    backward = [slot.begin_s for slot in lane if slot.action == "backward"]
    if len(backward) < LEAST_FOLDED:
        return None
    chunks = 1 + max(slot.chunk for slot in lane)
    period = (backward[-1] - backward[0]) / (len(backward) - 1) * (chunks * len(step.lanes) if chunks > 1 else 1)
    begin, end = backward[0] + period, max(slot.end_s for slot in lane if slot.action == "forward") - period
    if end - begin < FOLDED_SHARE * step.total_s:
        return None
    return Fold(begin, end, (step.total_s - end + begin) * FOLD_WIDTH)


def trace_json(plan: Plan, step: Played) -> str:
    """A process a pipeline, a thread a stage, times in microseconds."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": 0, "name": "process_name", "args": {"name": f"predicted step of {plan.candidate.label()}"}}
    ]
    for stage in range(plan.pp):
        events.append({"ph": "M", "pid": 0, "tid": stage, "name": "thread_name", "args": {"name": f"stage {stage}"}})
    for bar in bars(step, MOST_EVENTS):
        event = {"ph": "X", "pid": 0, "tid": bar.stage, "name": bar.label, "cat": bar.kind, "ts": bar.begin_s * US,
                 "dur": (bar.end_s - bar.begin_s) * US}  # fmt: skip
        events.append(event | ({"args": {"chunk": bar.chunk}} if plan.vpp > 1 and bar.kind in ("forward", "backward") else {}))
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":")) + "\n"
