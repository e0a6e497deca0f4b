"""Steps of a user's DeepSpeed script, from the CSV files of DeepSpeed's own monitor, which entry= turns on in ds_config.json.

Each file has two columns, samples so far and a value (deepspeed/monitor/csv_monitor.py); DeepSpeed 0.19.8 writes the next step's learning
rate (its scheduler, where the script gives one, has stepped by then: _take_model_step), so that the first step's is unknown; with
wall_clock_breakdown the milliseconds of forward, backward and optimizer step (runtime/engine.py, _write_monitor), and no loss except in its
PipelineEngine. A process that starts again appends another header.
"""

from __future__ import annotations

import contextlib
import csv
import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]

FOLDER = Path("logs") / "deepspeed"
"""The folder in which ds_config.json of an entry= run puts the files (engines/deepspeed/entry.py)."""
TIMES = ("elapsed_time_ms_forward", "elapsed_time_ms_backward", "elapsed_time_ms_step")
"""Milliseconds of all micro-batches of a step by pass; what a script does between them is not in them."""
LOOKED_FOR = f"DeepSpeed's {FOLDER}/Train_Samples_{TIMES[-1]}.csv (its csv_monitor under wall_clock_breakdown)"


def column(path: Path) -> dict[int, float]:
    """Value by samples; the last where a restart has repeated some. A line that is still being written is left for later."""
    found = {}
    if path.exists():
        text = path.read_text(errors="replace")
        for cells in csv.reader(text[: text.rfind("\n") + 1].splitlines()):
            with contextlib.suppress(ValueError, IndexError):
                found[int(cells[0])] = float(cells[1])
    return found


class Monitored:
    """Follows the files of a run folder."""

    def __init__(self, out: Path, tokens_per_sequence: int, global_batch_size: int) -> None:
        self.folder = out / FOLDER
        self.tokens, self.batch = tokens_per_sequence, global_batch_size
        self.size = 0
        self.timed = True
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            self.timed = bool(json.loads((out / "ds_config.json").read_text()).get("wall_clock_breakdown"))

    def new_rows(self) -> list[Row]:
        """All whole steps, where the files have grown."""
        path = self.folder / "Train_Samples_lr.csv"
        last_written = self.folder / f"Train_Samples_{TIMES[-1]}.csv" if self.timed else path
        size = last_written.stat().st_size if last_written.exists() else 0
        if size == self.size or not self.batch:
            return []
        self.size = size
        rates, losses = column(path), column(self.folder / "Train_Samples_train_loss.csv")
        times = [column(self.folder / f"Train_Samples_{name}.csv") for name in TIMES]
        done = times[-1] if self.timed else rates
        return [
            self._row(samples, rates.get(samples - self.batch), losses.get(samples), [time.get(samples) for time in times])
            for samples in done
        ]

    def _row(self, samples: int, rate: float | None, loss: float | None, milliseconds: list[float | None]) -> Row:
        known = [value for value in milliseconds if value is not None]
        seconds = sum(known) / 1000 if len(known) == len(TIMES) else None
        return {
            "step": samples // self.batch,
            "loss": loss,
            "grad_norm": None,
            "lr": rate,
            "step_time_s": seconds,
            "tokens_per_s": self.batch * self.tokens / seconds if seconds and self.tokens else None,
            "peak_memory_bytes": None,
        }
