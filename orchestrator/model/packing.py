"""Sequences that are packed with samples which don't see each other: what that changes in a model's attention."""

from __future__ import annotations

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


def sample_notes(found: Lengths, seq_length: int, *, packing: bool, multiple: int = 1) -> list[str]:
    """What a user should know of the samples, in lines. `multiple`: tokens to a multiple of which each packed one is padded."""
    said = f"about {found.mean:.0f} tokens a sample, the longest {found.longest}"
    lines = [f"data: {found.samples} samples looked at, {said}."]
    if packing:
        room = found.room(multiple)
        lines.append(f"data.packing: about {seq_length / room:.1f} samples share a sequence of {seq_length}, none sees another.")
        if multiple > 1:
            lines.append(
                f"data.packing: each is padded to a multiple of {multiple} tokens (2 cp), {100 * (1 - found.mean / room):.2g}% of all."
            )
    else:
        lines.append(f"data.packing=false: {100 * (1 - found.mean / seq_length):.0f}% of a sequence of {seq_length} is padding.")
    if found.cut:
        share = 100 * found.cut / found.samples
        lost = f"{100 * found.lost:.2g}% of all tokens are lost"
        lines.append(f"train.seq_length={seq_length} cuts {found.cut} samples ({share:.2g}%) off: {lost}; {found.longest} would cut none.")
    return lines
