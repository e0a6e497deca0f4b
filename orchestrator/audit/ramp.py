"""A batch that grows while Megatron trains: the smaller ones of its beginning, each of which a plan has to run too."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil
from typing import Final

from orchestrator.engines.rules.rule import rule
from orchestrator.errors import InputError
from orchestrator.strategy.capabilities import Rule
from orchestrator.strategy.spec import Candidate
from orchestrator.strategy.tree import fills_groups
from orchestrator.strategy.workload import Workload

SUFFIXES: Final = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
"""What a number of --step-batch-size-schedule may end with (0.19's num_microbatches_calculator.py, _parse_numeric_value)."""

MOST: Final = 1000
"""Batches of a ramp that are looked at, the smallest."""


def ramp(name: str, batches: Iterable[int], rounded: bool = False) -> Rule:
    """The engine's rule that a step of each of these batches is run. `name`: Megatron's setting that says them, without dashes; `rounded`:
    whether it takes fewer samples where a batch does not divide (--decrease-batch-size-if-needed)."""
    where = "core/num_microbatches_calculator.py:470; core/pipeline_parallel/schedules.py:995-1015"

    @rule("ramp", where, "pp dp micro_batch_size vpp microbatch_group_size_per_vp_stage num_microbatches")
    def check(candidate: Candidate, _: Workload) -> str | None:
        dp, micro, pp = candidate.mesh.dp, candidate.micro_batch_size, candidate.mesh.pp
        for batch in batches:
            count = batch // (dp * micro)
            if not count or (batch % (dp * micro) and not rounded):
                return f"{name}={batch}: is no multiple of dp x micro-batch = {dp} x {micro}"
            group = candidate.microbatch_group_size_per_vp_stage or pp
            if candidate.vpp > 1 and not fills_groups(count, pp, group):
                given = f"{name}={batch}: its {count} micro-batches (of {micro} on dp={dp})"
                if count < group:
                    return f"{given} are fewer than the {group} that interleaving (vpp={candidate.vpp}) needs over pp={pp}"
                return f"{given} leave {count % group} in the last group of interleaving (vpp={candidate.vpp}), fewer than pp={pp}"
        return None

    return check


def grown(start: int, step: int, samples: int, last: int) -> tuple[int, ...]:
    """The batches that Megatron goes through before the last: from `start` by `step`, each for its part of so many samples
    (RampupBatchsizeNumMicroBatchesCalculator.update). A part that is smaller than a batch is passed over.

    >>> grown(16, 16, 1000, 64), grown(16, 16, 60, 64), grown(16, 16, 1000, 16)
    ((16, 32, 48), (16, 32), ())
    """
    parts = (last - start) // step
    if parts < 1:
        return ()
    found: list[int] = []
    consumed, part = 0, samples / parts
    while consumed <= samples and len(found) < MOST:
        done = int(consumed / part) if part else 0
        if done == parts:
            break
        found.append(start + done * step)
        consumed += max(1, ceil(((done + 1) * part - consumed) / found[-1])) * found[-1]
    return tuple(found)


def scheduled(words: Iterable[str]) -> tuple[int, ...]:
    """The batches of a schedule by their thresholds, the last one too. Raises InputError for words that are none.

    >>> scheduled(["0:16", "4.8B:1.5K", "2.4B:320"])
    (16, 320, 1500)
    """
    steps = [one.partition(":") for one in " ".join(words).replace(",", " ").split()]
    try:
        found = sorted((_number(threshold), _number(size)) for threshold, _, size in steps)
    except (ValueError, OverflowError):
        found = []
    if not found:
        raise InputError("step_batch_size_schedule", " ".join(words), "is not THRESHOLD:BATCH THRESHOLD:BATCH ...")
    return tuple(size for _, size in found)


def _number(text: str) -> int:
    times = SUFFIXES.get(text[-1:].upper(), 1)
    return int(float(text[:-1] if times > 1 else text) * times)
