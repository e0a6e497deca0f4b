"""metrics.jsonl of a program that isn't ours (entry=): from what Megatron-LM prints, or from the CSV files of DeepSpeed's monitor."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from orchestrator.launch import deepspeed_csv, megatron_log

Row = dict[str, Any]


def tokens_per_sequence(out: Path) -> int:
    """Of the folder's plan; 0 where it has none."""
    try:
        training = json.loads((out / "plan.json").read_text())["training"]
        return int(training["seq_length"]) + int(training["decoder_seq_length"] or 0)
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def last_step(path: Path) -> int:
    """The highest step in a metrics.jsonl; 0 without any."""
    found = 0
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError, TypeError, AttributeError):  # the last line of a run that was cut off
            found = max(found, int(json.loads(line).get("step", 0)))
    return found


class Follower:
    """Appends a line to metrics.jsonl of a folder for each step that its program tells of and that is not there yet."""

    def __init__(self, out: Path) -> None:
        self.metrics = out / "metrics.jsonl"
        self.size = -1
        self.last_step = 0
        tokens = tokens_per_sequence(out)
        self.printed = megatron_log.Printed(out, tokens)
        self.monitored = deepspeed_csv.Monitored(out, tokens)

    def poll(self) -> None:
        """Read what is new. Another process may follow too (the job at its end, and who waits for it): what it has written counts."""
        size = self.metrics.stat().st_size if self.metrics.exists() else 0
        if size != self.size:
            self.last_step = last_step(self.metrics)
        rows: dict[int, Row] = {}
        for row in (*self.printed.new_rows(), *self.monitored.new_rows()):
            if row["step"] > self.last_step:
                rows.setdefault(row["step"], row)
        if rows:
            with self.metrics.open("a") as file:
                file.writelines(json.dumps(rows[step]) + "\n" for step in sorted(rows))
            self.last_step = max(rows)
        self.size = self.metrics.stat().st_size if self.metrics.exists() else 0
