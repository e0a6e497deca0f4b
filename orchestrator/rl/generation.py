"""Seconds of generating a step's responses: each engine runs as many sequences at once as its keys and values have room for, takes the next
when one ends, and is done with its last; generation ends with the slowest engine."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from math import ceil
from typing import Final

from orchestrator.rl.decode import Decoder, Layout
from orchestrator.rl.job import RlJob
from orchestrator.rl.lengths import drawn, squares
from orchestrator.units import format_bytes
from orchestrator.values import Value

MOST_STEPS: Final = 16
"""Steps that are played as one, at most: by then a step takes what its tokens take."""
MOST_PLAYED: Final = 250_000
"""Sequences that are played, at most, where that are several steps'."""
FEW: Final = 0.1
"""Share of the sequences that an engine runs at its fullest, at which the tail is said to begin."""


class Generation(Value, frozen=True, kw_only=True):
    """Responses of one step as they are generated."""

    layout: Layout
    engines: int
    running: int
    """Sequences that a data-parallel rank runs at once, at most."""
    limited_by: str
    """What bounds that: cache (no room for more keys and values), concurrency (rl.concurrency), samples (there are no more)."""
    seconds: float
    prefill_s: float
    """Seconds of reading prompts, a part of `seconds`."""
    tail_s: float
    """Seconds, a part of `seconds`, in which the slowest engine runs a tenth of its sequences or fewer."""
    tokens: float
    """Tokens of all responses."""
    weight_bytes: float
    """Bytes of weights on one GPU."""
    model_bytes: float
    """Bytes of the whole model's weights."""
    cache_bytes: float
    """Bytes of a GPU for keys and values."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of all engines together."""
        return self.tokens / self.seconds


class Room(Value, frozen=True, kw_only=True):
    """How many sequences fit: bytes of a GPU for keys and values, and sequences at once."""

    cache_bytes: float
    running: int
    lacking: str = ""
    """Why not even one fits, in numbers; "" where one does."""


def room(decoder: Decoder, job: RlJob, memory: float) -> Room:
    """What is left of `memory` bytes of a GPU beside weights and workspace. Sequences hold as many tokens at once as they have in the mean
    over their steps: longer ones run for longer, so that it is E[length^2] / 2 E[length] and the prompt's, which a prompt's samples
    share; blocks are given as tokens come (PagedAttention, arXiv 2309.06180)."""
    free = memory - decoder.weight_bytes - decoder.engine.workspace
    whole = decoder.sequence_bytes(job.longest)
    if free < whole:
        why = (
            f"the weights take {format_bytes(decoder.weight_bytes)} of a GPU, workspaces {format_bytes(decoder.engine.workspace)}, one "
            f"sequence of {job.longest} tokens {format_bytes(whole)}: more than the {format_bytes(memory)} of it that generation may use"
        )
        return Room(cache_bytes=max(free, 0.0), running=0, lacking=why)
    lengths = drawn(job.responses, min(job.sequences, 4096), job.sequences)
    held = job.prompt_length / job.samples + squares(lengths) / (2 * sum(lengths) / len(lengths))
    return Room(cache_bytes=free, running=max(1, int(free / decoder.sequence_bytes(held))))


def generation(decoder: Decoder, job: RlJob, gpus: int, found: Room, seed: int = 0) -> Generation:
    """A step's responses on `gpus` GPUs, by the draw of lengths with this seed. The slowest rank is the one with most tokens or the one
    with the longest response: only these two are played. Where samples may be several steps old, so many steps' are generated as one."""
    engines = gpus // decoder.layout.gpus
    ranks = engines * decoder.layout.dp
    steps = max(1, min(1 + job.keys.staleness, MOST_STEPS, MOST_PLAYED // job.sequences))
    lengths = drawn(job.responses, steps * job.sequences, seed)
    shares = dealt(lengths, ranks)
    most = max(map(len, shares))
    running = min(found.running, job.keys.concurrency, most)
    limited = "samples" if running == most else "cache" if running == found.running else "concurrency"
    fullest = {max(range(ranks), key=lambda rank: sum(shares[rank])), max(range(ranks), key=lambda rank: max(shares[rank], default=0))}
    slowest = max((played(decoder, shares[rank], job.prompt_length, running) for rank in sorted(fullest)), key=sum)
    prompts = max(1, ceil(job.prompts / engines))
    prefill = decoder.prefill_seconds(float(prompts * job.prompt_length))
    return Generation(
        layout=decoder.layout,
        engines=engines,
        running=running,
        limited_by=limited,
        seconds=sum(slowest) / steps + prefill,
        prefill_s=prefill,
        tail_s=slowest[1] / steps,
        tokens=float(sum(lengths)) / steps,
        weight_bytes=decoder.weight_bytes,
        model_bytes=decoder.model_bytes,
        cache_bytes=found.cache_bytes,
    )


def dealt(lengths: Sequence[int], ranks: int) -> list[Sequence[int]]:
    """The lengths by rank: as many each, neighbours together, as a prompt's samples are.

    >>> dealt([1, 2, 3, 4, 5], 2)
    [[1, 2], [3, 4, 5]]
    """
    return [lengths[rank * len(lengths) // ranks : (rank + 1) * len(lengths) // ranks] for rank in range(ranks)]


def played(decoder: Decoder, lengths: Sequence[int], prompt: int, running: int) -> tuple[float, float]:
    """Seconds of one rank's steps: (with many running, with a tenth of the most or fewer). The longest first would be faster: an engine
    does not know them, and takes them as they come. Between two ends the number that runs is constant, and their tokens grow by one a
    step."""
    waiting = list(reversed(lengths))
    ends = [(length, length) for length in (waiting.pop() for _ in range(min(running, len(waiting))))]
    heapify(ends)
    few, now, held = max(1, int(FEW * len(ends))), 0, 0
    many_s = few_s = 0.0
    while ends:
        steps, active = ends[0][0] - now, len(ends)
        seconds = steps * decoder.step_seconds(active, prompt + held / active + (steps + 1) / 2)
        if active <= few:
            few_s += seconds
        else:
            many_s += seconds
        now += steps
        held += steps * active
        while ends and ends[0][0] == now:
            held -= heappop(ends)[1]
            if waiting:
                length = waiting.pop()
                heappush(ends, (now + length, length))
    return many_s, few_s
