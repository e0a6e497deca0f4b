"""Sequences that are packed with samples which don't see each other: what that changes in a model's attention."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from math import ceil

from msgspec.structs import replace

from orchestrator.model.spec import Attention, LayerSpec, ModelSpec, Op, Pointwise, Saved
from orchestrator.model.training import Lengths


def packed(model: ModelSpec, attended: float, *, kernels: bool, masked: bool = True) -> ModelSpec:
    """The model with its layers over packed sequences. `attended`: tokens of the sample that a token is in, in the mean over tokens.
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
            return replace(op, key_len=seen, saves=tuple(saves))
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
