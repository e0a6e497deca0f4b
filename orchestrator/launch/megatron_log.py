"""metrics.jsonl from the lines that Megatron-LM prints, for runs of the engine's own program (entry=)."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

Row = dict[str, Any]

ITERATION = re.compile(r"iteration +(\d+)/ *\d+ \|(.+)$")
"""One line a logged iteration, by the last rank (megatron/training/training.py, training_log)."""
FIELD = re.compile(r"([^|:]+): *([-+0-9.eE]+|nan|inf) *(?=\||$)")
MEMORY = re.compile(r"memory \((MB|GB)\).*max allocated: *([0-9.]+)")
"""Said once by a rank of each pipeline stage, after the first iteration (megatron/training/utils.py, report_memory)."""
BYTES = {"MB": 2**20, "GB": 2**30}
LOSSES = ("lm loss", "loss", "mlm loss")


def iteration(line: str, tokens_per_sequence: int) -> Row | None:
    """A row of metrics.jsonl; None for another line. Megatron prints the mean since the last line, so that with --log-interval 10 a row
    stands for ten steps.

    >>> line = " iteration 10/ 100 | consumed samples: 160 | elapsed time per iteration (ms): 250.0 | learning rate: 1.0E-04 | "
    >>> iteration(line + "global batch size: 16 | lm loss: 5.4E+00 | loss scale: 1.0 | grad norm: 1.234 |", 128)
    {'step': 10, 'loss': 5.4, 'grad_norm': 1.234, 'lr': 0.0001, 'step_time_s': 0.25, 'tokens_per_s': 8192.0, 'peak_memory_bytes': None}
    """
    found = ITERATION.search(line)
    if found is None:
        return None
    numbers = {name.strip(): float(value) for name, value in FIELD.findall(found.group(2))}
    fields = {name: value for name, value in numbers.items() if math.isfinite(value)}  # JSON has no NaN
    milliseconds = fields.get("elapsed time per iteration (ms)")
    if milliseconds is None:
        return None
    seconds = milliseconds / 1000
    tokens = fields.get("global batch size", 0.0) * tokens_per_sequence
    return {
        "step": int(found.group(1)),
        "loss": next((fields[name] for name in LOSSES if name in fields), None),
        "grad_norm": fields.get("grad norm"),
        "lr": fields.get("learning rate"),
        "step_time_s": seconds,
        "tokens_per_s": tokens / seconds if seconds and tokens else None,
        "peak_memory_bytes": None,
    }


class Printed:
    """Follows what the ranks of a folder print."""

    def __init__(self, out: Path, tokens_per_sequence: int) -> None:
        self.logs = out / "logs"
        self.tokens = tokens_per_sequence
        self.offsets: dict[Path, int] = {}
        self.peak: int | None = None

    def new_rows(self) -> list[Row]:
        """A row for each iteration in what is new."""
        rows: list[Row] = []
        for log in sorted(self.logs.glob("rank-*.log")):
            for line in self._new_lines(log):
                memory = MEMORY.search(line)
                if memory:
                    self.peak = max(self.peak or 0, int(float(memory.group(2)) * BYTES[memory.group(1)]))
                row = iteration(line, self.tokens)
                if row is not None:
                    rows.append(row)
        return [row | {"peak_memory_bytes": self.peak} for row in rows]

    def _new_lines(self, log: Path) -> list[str]:
        offset = self.offsets.get(log, 0)
        if log.stat().st_size <= offset:
            return []
        with log.open("rb") as file:
            file.seek(offset)
            text = file.read()
        end = text.rfind(b"\n") + 1
        self.offsets[log] = offset + end
        return text[:end].decode(errors="replace").splitlines()
