"""Sequences that are packed with samples which don't see each other: what that changes in a model's attention."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from functools import lru_cache
from math import ceil
from statistics import NormalDist
from typing import Final

from msgspec.structs import replace

from orchestrator.model.spec import Attention, LayerSpec, ModelSpec, Op, Pointwise, Saved
from orchestrator.model.training import Lengths

SHARES: Final = 32
"""Equal shares of the packed sequences whose loads are kept."""
DRAWN: Final = 2048
"""Sequences that are drawn, at least one step's, to see how far the ranks of a step are apart."""


def packed(model: ModelSpec, attended: float, samples: float = 0.0, *, kernels: bool, masked: bool = True) -> ModelSpec:
    """The model with its layers over packed sequences. `attended`: tokens of the sample that a token is in, in the mean over tokens;
    `samples`: how many a sequence has, in the mean, beside the padding behind them, which is computed as one more.
    `kernels`: flash attention computes each sample alone; otherwise, where it is `masked`, a mask of one byte a pair is made once, and all
    pairs are computed (transformers/masking_utils.py, find_packed_sequence_indices), else all pairs of each sample (cpu/attention.py)."""
    seen = ceil(attended)

    def changed(op: Op) -> Op:
        if not isinstance(op, Attention) or not op.causal:
            return op
        if kernels:
            return replace(op, attended=min(attended, op.attended or attended))
        if not masked:
            saves = (replace(one, elements=one.elements * seen // op.key_len) if one.quadratic else one for one in op.saves)
            return replace(op, key_len=seen, saves=tuple(saves), alone=samples + 1)
        return replace(op, causal=False, window=0, attended=0.0)

    def layer(spec: LayerSpec) -> LayerSpec:
        ops = tuple(changed(op) for op in spec.ops)
        if spec.kind == "embedding" and masked and not kernels:
            mask = Saved(name="packed_mask", elements=model.seq_length**2, itemsize=1)
            ops = (*ops, Pointwise(name="packed_mask", elements=model.seq_length**2, moved=1.0, moved_backward=0.0, saves=(mask,)))
        return replace(spec, ops=ops)

    return replace(model, runs=tuple(replace(run, layer=layer(run.layer)) for run in model.runs))


def pack(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Samples by sequence of at most `room` tokens: the longest first, each where it leaves the least room (best fit decreasing).

    >>> pack([5, 3, 8, 2, 4], 8)
    [[2], [0, 1], [4, 3]]
    """
    bins: list[list[int]] = []
    left: list[tuple[int, int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = bisect_left(left, (lengths[index], -1))
        if place == len(left):
            bins.append([index])
            spare, number = room - lengths[index], len(bins) - 1
        else:
            spare, number = left.pop(place)
            bins[number].append(index)
            spare -= lengths[index]
        if spare:
            insort(left, (spare, number))
    return bins


def loads(sequences: Sequence[Sequence[int]]) -> tuple[float, ...]:
    """What attention has to compute in packed sequences, of samples of so many tokens each, over their mean: sorted, the mean of each of
    `SHARES` equal shares of them.

    >>> loads([[4, 4], [8]])
    (0.6667, 1.3333)
    """
    each = sorted(sum(length * length for length in samples) for samples in sequences)
    parts = min(SHARES, len(each))
    shares = [each[part * len(each) // parts : (part + 1) * len(each) // parts] for part in range(parts)]
    mean = sum(each) / max(1, len(each))
    return tuple(round(sum(share) / len(share) / mean, 4) for share in shares)


def dealt(work: Sequence[float], ranks: int, size: int) -> list[int]:
    """The order in which the sequences of a step, of which each takes so much work, are read so that its data-parallel ranks have about
    as much each: micro-batch after micro-batch, of each `size` sequences for every rank in turn. Those of a micro-batch are like each
    other, too, for engines whose ranks wait for each other in every one.

    >>> dealt([5, 1, 4, 2], 2, 1)  # 5 and 1, 4 and 2
    [0, 2, 1, 3]
    """
    order, held = list[int](), [0.0] * ranks
    heaviest = sorted(range(len(work)), key=lambda index: (-work[index], index))
    for first in range(0, len(work), ranks * size):
        microbatch: list[list[int]] = [[] for _ in range(ranks)]
        for at in range(first, first + ranks * size, ranks):
            for rank, index in zip(sorted(range(ranks), key=held.__getitem__), heaviest[at : at + ranks], strict=False):
                microbatch[rank].append(index)
                held[rank] += work[index]
        order += [index for mine in microbatch for index in mine]
    return order


@lru_cache(maxsize=4096)
def waits(each: tuple[float, ...], ranks: int, microbatches: int, size: int, balance: str) -> float:
    """How much more attention than the mean the data-parallel rank computes that has most of it in a step, for which the others wait:
    a factor, in the mean over steps that are drawn, the same ones every time. `each`: as `Lengths.loads`; `size`: sequences of a
    micro-batch of a rank; `balance`: as `Training.balance`, of which "epoch" leaves no differences within a step.

    >>> waits((0.5, 1.5), 2, 4, 1, "none") > waits((0.5, 1.5), 2, 4, 1, "step") > 1, waits((0.5, 1.5), 1, 8, 1, "none")
    (True, 1.0)
    """
    if not each or ranks == 1 or balance == "epoch":
        return 1.0
    count = ranks * microbatches * size
    steps, shares = max(1, DRAWN // count), map(NormalDist().cdf, NormalDist().samples(max(DRAWN, count), seed=0))
    drawn = [each[min(int(share * len(each)), len(each) - 1)] for share in shares]
    most = total = 0.0
    for step in range(steps):
        work = drawn[step * count : (step + 1) * count]
        if balance == "step":
            work = [work[index] for index in dealt(work, ranks, size)]
        held = [sum(sum(work[at : at + size]) for at in range(rank * size, count, ranks * size)) for rank in range(ranks)]
        most, total = most + max(held), total + sum(held)
    return most * ranks / total


def sample_notes(found: Lengths, seq_length: int, *, packing: bool, multiple: int = 1) -> list[str]:
    """What a user should know of the samples, in lines. `multiple`: tokens to a multiple of which each packed one is padded."""
    about = "about " * bool(found.how)
    what = f" ({found.how})" * bool(found.how)
    lines = [f"data: {found.samples:,} samples, {about}{found.mean:.0f} tokens each in the mean, the longest {found.longest}{what}."]
    if packing:
        room = found.room(multiple)
        share = found.share(seq_length, multiple)
        lines.append(f"data.packing: {about}{share:.1f} samples share a sequence of {seq_length}, none sees another.")
        if multiple > 1:
            lines.append(
                f"data.packing: each is padded to a multiple of {multiple} tokens (2 cp), {100 * (1 - found.mean / room):.2g}% of all."
            )
    else:
        lines.append(f"data.packing=false: {100 * (1 - found.mean / seq_length):.0f}% of a sequence of {seq_length} is padding.")
    if found.cut:
        share = 100 * found.cut / found.samples
        lost = f"{100 * found.lost:.2g}% of all tokens are lost"
        if found.answers:
            lost += f", {found.answers_lost:,} tokens of answers ({100 * found.answers_lost / found.answers:.2g}%) among them"
        if found.dropped:
            lost += f"; {found.dropped:,} of the samples keep no answer and are left out"
        lines.append(
            f"train.seq_length={seq_length} cuts {found.cut:,} samples ({share:.2g}%) off: {lost}; {found.longest} would cut none."
        )
    if found.unlearnt:
        lines.append(f"data: {found.unlearnt:,} answers have weight 0 and no loss.")
    if found.merged:
        why = "a space at the end, say: it belongs to the completion, or generation begins with other tokens than were trained on"
        lines.append(f"data: {found.merged:,} prompts end inside a token that their completion goes on ({why}).")
    if found.unused:
        lines.append(f"data: nothing is done with {', '.join(found.unused)}: the chat template or the format has no place for it.")
    return lines
