"""metrics.jsonl of a program that isn't ours (entry=): from what Megatron-LM prints, or from the CSV files of DeepSpeed's monitor."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from orchestrator.launch import deepspeed_csv, megatron_log
from orchestrator.values import Value

Row = dict[str, Any]

LOOKED_FOR = f"{megatron_log.LOOKED_FOR}, {deepspeed_csv.LOOKED_FOR}"
"""The lines and files that tell of a program's steps, as messages name them."""


class Planned(Value, frozen=True, kw_only=True):
    """What plan.json says of a run's steps; nothing where a folder has none."""

    tokens_per_sequence: int = 0
    global_batch_size: int = 0
    first_rate: float | None = None
    """The learning rate of Megatron's first step: its warm-up begins at 0."""
    eval_every: int = 0

    @classmethod
    def read(cls, out: Path) -> Planned:
        """What the plan in the folder says; the defaults where it can't be read."""
        try:
            plan = json.loads((out / "plan.json").read_text())
            training = plan["training"]
            return cls(
                tokens_per_sequence=int(training["seq_length"]) + int(training["decoder_seq_length"] or 0),
                global_batch_size=int(training["global_batch_size"]),
                first_rate=0.0 if training["warmup"] else float(training["lr"]),
                eval_every=int(plan["run"]["eval_every"]),
            )
        except (OSError, ValueError, KeyError, TypeError):
            return cls()


def rows_of(path: Path) -> list[Row]:
    """The lines of a metrics.jsonl; none where there is none. What is no JSON object is passed over: the last line of a run that was cut
    off, or one that is being written."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict):
                rows.append(row)
    return rows


class Follower:
    """Appends a line to metrics.jsonl of a folder for each step that its program tells of and that is not there yet."""

    def __init__(self, out: Path) -> None:
        self.metrics = out / "metrics.jsonl"
        self.size = -1
        self.last_step = 0
        plan = Planned.read(out)
        self.printed = megatron_log.Printed(out, plan.tokens_per_sequence, plan.first_rate, plan.eval_every)
        self.monitored = deepspeed_csv.Monitored(out, plan.tokens_per_sequence, plan.global_batch_size)

    def poll(self, *, ended: bool = False) -> None:
        """Read what is new; once the run has `ended`, with the step whose evaluation never came. Another process may follow too (the job at
        its end, and who waits for it), or the program writes them itself before it prints: what is there counts."""
        found = (*self.printed.new_rows(ended=ended), *self.monitored.new_rows())
        size = self.metrics.stat().st_size if self.metrics.exists() else 0
        if size != self.size:
            self.last_step = max((row["step"] for row in rows_of(self.metrics) if isinstance(row.get("step"), int)), default=0)
        rows: dict[int, Row] = {}
        for row in found:
            if row["step"] > self.last_step:
                rows.setdefault(row["step"], row)
        if rows:
            with self.metrics.open("a") as file:
                file.writelines(json.dumps(rows[step]) + "\n" for step in sorted(rows))
            self.last_step = max(rows)
        self.size = self.metrics.stat().st_size if self.metrics.exists() else 0
