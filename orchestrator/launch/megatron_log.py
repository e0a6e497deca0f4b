"""metrics.jsonl from the lines that Megatron-LM prints, for runs of the engine's own program (entry=).

What they are (megatron/training/training.py of core_v0.16.1 and core_v0.19.0, training_log and evaluate_and_print_results): losses and time
are means since the line before, but after the first line of a process sums go on (should_reset), so that the second line's are means with
the first step in them; before core_v0.16 they don't. The learning rate is that of the next step: the scheduler has stepped by then.
Evaluation is printed after the line of its step.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from orchestrator.launch.render import STARTED

Row = dict[str, Any]

ITERATION = re.compile(r"iteration +(\d+)/ *(\d+) \|(.+)$")
"""A line of the last rank for each logged iteration."""
VALIDATION = re.compile(r"validation(?:-\S+)? loss at iteration (\d+)(?: on validation set)? \|(.+)$")
"""A line of the last rank with a validation loss; at the end of a run there is one more. Of several validation sets the first counts."""
SUMS_GO_ON = "and before initialize_megatron] datetime:"
"""A line that rank 0 prints from core_v0.16 on, where the first line's sums are not cleared."""
FIELD = re.compile(r"([^|:]+): *([-+0-9.eE]+|nan|inf) *(?=\||$)")
MEMORY = re.compile(r"memory \((MB|GB)\).*max allocated: *([0-9.]+)")
"""A line of a rank of each pipeline stage with its peak memory, after the first iterations (megatron/training/utils.py, report_memory)."""
BYTES = {"MB": 2**20, "GB": 2**30}
TIME = "elapsed time per iteration (ms)"
LOOKED_FOR = f'Megatron-LM\'s "iteration N/M | ... {TIME}: T" in logs/rank-*.log'
LOSSES = ("lm loss", "loss", "mlm loss")


def fields_of(text: str) -> dict[str, float]:
    """The numbers of a line by their names; JSON has no NaN, and what is none is left out.

    >>> fields_of(" lm loss: 5.4E+00 | grad norm: nan |")
    {'lm loss': 5.4}
    """
    numbers = {name.strip(): float(value) for name, value in FIELD.findall(text)}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def loss_of(fields: dict[str, float], suffix: str = "") -> float | None:
    """The first of LOSSES that is there."""
    return next((fields[name + suffix] for name in LOSSES if name + suffix in fields), None)


class Lines:
    """Rows of one rank's log, line by line."""

    def __init__(self, tokens_per_sequence: int, first_rate: float | None, eval_every: int) -> None:
        self.tokens, self.first_rate, self.eval_every = tokens_per_sequence, first_rate, eval_every
        self.rate: tuple[int, float | None] = (1, first_rate)
        """The last rate printed, and the step from which on it holds."""
        self.first: tuple[int, dict[str, float]] | None = None
        """Step and numbers of a process' first line while the next is awaited."""
        self.fresh = True
        self.held: Row | None = None
        """A row whose evaluation is still to come."""

    def start(self) -> None:
        """A process has started: its first line is next."""
        self.fresh, self.first = True, None

    def row(self, step: int, fields: dict[str, float], *, sums_go_on: bool) -> Row | None:
        """The row of an iteration's line; None where it has no time. It stands for the steps since the line before; `lr` is that of the
        first of them."""
        if TIME not in fields:
            return None
        if step < self.rate[0]:  # a process that no line of ours announced
            self.start()
        before, self.first = self.first, (step, fields) if self.fresh and sums_go_on else None
        since = self.rate[0]
        # A resumed process prints its first rate after its first step: the rate of that one stands in the line of the step before, if any.
        lr = self.rate[1] if since == step or not self.fresh else None
        self.rate, self.fresh = (step + 1, fields.get("learning rate")), False
        loss, milliseconds = loss_of(fields), fields[TIME]
        if before is not None:
            loss, milliseconds = without_first(step, fields, *before)
        seconds = milliseconds / 1000 if milliseconds > 0 else None
        tokens = fields.get("global batch size", 0.0) * self.tokens
        return {
            "step": step,
            "loss": loss,
            "grad_norm": fields.get("grad norm"),
            "lr": lr,
            "step_time_s": seconds,
            "tokens_per_s": tokens / seconds if seconds and tokens else None,
            "peak_memory_bytes": None,
        }

    def read(self, line: str, *, sums_go_on: bool = True) -> list[Row]:
        """The rows of metrics that this line of the log completes."""
        found = ITERATION.search(line)
        if found is not None:
            step, steps = int(found.group(1)), int(found.group(2))
            row = self.row(step, fields_of(found.group(3)), sums_go_on=sums_go_on)
            if row is None:
                return []
            done = self.finish()
            if self.eval_every and (step % self.eval_every == 0 or step == steps):
                self.held = row
                return done
            return [*done, row]
        found = VALIDATION.search(line)
        if found is not None:
            loss = loss_of(fields_of(found.group(2)), " value")
            if self.held is not None and self.held["step"] == int(found.group(1)):
                self.held["valid_loss"] = loss
                return self.finish()
        elif STARTED.match(line):
            self.start()
            return self.finish()
        return []

    def finish(self) -> list[Row]:
        """The row that waits, if one does."""
        row, self.held = self.held, None
        return [] if row is None else [row]


def without_first(step: int, fields: dict[str, float], first_step: int, first: dict[str, float]) -> tuple[float | None, float]:
    """(loss, milliseconds) of the steps after a process' first, from its second line, which has them with the first.

    >>> first, second = ({"loss": loss, "elapsed time per iteration (ms)": time} for loss, time in ((6.0, 500.0), (5.0, 300.0)))
    >>> without_first(2, second, 1, first)
    (4.0, 100.0)
    """
    skipped, all_steps = "number of skipped iterations", step - first_step + 1
    milliseconds = (fields[TIME] * all_steps - first[TIME]) / (all_steps - 1)
    summed, of_first = all_steps - fields.get(skipped, 0.0), 1 - first.get(skipped, 0.0)
    loss, first_loss = loss_of(fields), loss_of(first)
    if loss is None or not of_first:
        return loss, milliseconds
    if first_loss is None or summed <= of_first:
        return None, milliseconds
    return (loss * summed - first_loss * of_first) / (summed - of_first), milliseconds


class Printed:
    """Follows what the ranks of a folder print. `first_rate`: of the first step, where it is known; `eval_every`: steps, 0: never."""

    def __init__(self, out: Path, tokens_per_sequence: int, first_rate: float | None, eval_every: int) -> None:
        self.logs = out / "logs"
        self.tokens, self.first_rate, self.eval_every = tokens_per_sequence, first_rate, eval_every
        self.offsets: dict[Path, int] = {}
        self.lines: dict[Path, Lines] = {}
        self.peak: int | None = None
        self.sums_go_on = False

    def new_rows(self, *, ended: bool = False) -> list[Row]:
        """A row for each iteration in what is new. One whose evaluation is to come waits for it, unless the run has `ended`."""
        rows: list[Row] = []
        for log in sorted(self.logs.glob("rank-*.log")):
            lines = self.lines.setdefault(log, Lines(self.tokens, self.first_rate, self.eval_every))
            for line in self._new_lines(log):
                self.sums_go_on = self.sums_go_on or SUMS_GO_ON in line
                memory = MEMORY.search(line)
                if memory:
                    self.peak = max(self.peak or 0, int(float(memory.group(2)) * BYTES[memory.group(1)]))
                rows += lines.read(line, sums_go_on=self.sums_go_on)
            if ended:
                rows += lines.finish()
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
