"""From a layout to the stages of a plan and back: which layers each pipeline stage holds, chunk after chunk."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from orchestrator.errors import InputError
from orchestrator.model.spec import ModelSpec
from orchestrator.plan import LayerSpan, Stage
from orchestrator.strategy.layout import KEY, compress, expand
from orchestrator.strategy.spec import Recompute


def transformer_layers(model: ModelSpec) -> int:
    """Layers between embedding and head."""
    return sum(run.count for run in model.runs[1:-1])


def parse_layout(text: str, model: ModelSpec, pp: int, vpp: int) -> tuple[Stage, ...]:
    """The stages that Megatron's layout string describes, nothing recomputed. Raises InputError("pin.layout", ...) where the string is
    not of this model, pipeline and number of chunks."""
    return stages_of(model, chunk_sizes(text, model, pp, vpp), pp)


def chunk_sizes(text: str, model: ModelSpec, pp: int, vpp: int) -> tuple[int, ...]:
    """Transformer layers of each chunk, vpp-major. Raises InputError as `parse_layout`."""
    chunks = expand(text)
    if len(chunks) != pp * vpp:
        raise InputError(KEY, text, f"has {len(chunks)} chunks; pp={pp} x vpp={vpp} needs {pp * vpp}")
    whole = "".join(chunks)
    for letter, name in (("E", "embedding"), ("L", "loss")):
        if whole.count(letter) != 1:
            raise InputError(KEY, text, f"must have the {name} ({letter}) exactly once, has it {whole.count(letter)} times")
    if whole[0] != "E" or whole[-1] != "L":
        raise InputError(KEY, text, "must start with the embedding (E) and end with the loss (L)")
    if not chunks[0].startswith("E") or not chunks[-1].endswith("L"):
        raise InputError(KEY, text, "the embedding (E) belongs to the first chunk and the loss (L) to the last")
    layers = transformer_layers(model)
    if whole.count("t") != layers:
        difference = layers - whole.count("t")
        what = f"drops {difference}" if difference > 0 else f"has {-difference} too many"
        raise InputError(KEY, text, f"has {whole.count('t')} transformer layers, {what}: the model has {layers}")
    return tuple(chunk.count("t") for chunk in chunks)


def layout_string(stages: Sequence[Stage], model: ModelSpec) -> str:
    """Megatron's string for these stages.

    It is the inverse of `parse_layout`, recompute aside.
    """
    first, last = model.runs[0].layer.kind, model.runs[-1].layer.kind
    letter = {first: "E", last: "L"}
    vpp = 1 + max(span.chunk for stage in stages for span in stage.layers)
    chunks = ["".join(letter.get(span.kind, "t") * span.count for span in stage.chunk(v)) for v in range(vpp) for stage in stages]
    return compress(chunks)


def stages_of(
    model: ModelSpec,
    sizes: Sequence[int],
    pp: int,
    recompute: Sequence[tuple[Recompute, int]] | None = None,
) -> tuple[Stage, ...]:
    """Stages from the number of transformer layers of each chunk (vpp-major; the sum is the model's).

    `recompute[p]` is (mode, n): stage p computes the first n layers of each run of each of its chunks in that mode, the others "none".
    """
    modes: Sequence[tuple[Recompute, int]] = recompute if recompute is not None else [("none", 0)] * pp
    ends = tuple(accumulate(sizes))
    stages: list[Stage] = []
    for p in range(pp):
        mode, first_n = modes[p]
        spans: list[LayerSpan] = []
        for chunk, index in enumerate(range(p, len(sizes), pp)):
            if index == 0:
                spans.append(LayerSpan(kind=model.runs[0].layer.kind, first=0, count=1, chunk=chunk))
            for kind, first, count in pieces(model, ends[index] - sizes[index], ends[index]):
                inside = min(first_n, count) if mode != "none" else 0
                if inside:
                    spans.append(LayerSpan(kind=kind, first=first, count=inside, recompute=mode, chunk=chunk))
                if count > inside:
                    spans.append(LayerSpan(kind=kind, first=first + inside, count=count - inside, chunk=chunk))
            if index == len(sizes) - 1:
                spans.append(LayerSpan(kind=model.runs[-1].layer.kind, first=0, count=1, chunk=chunk))
        stages.append(Stage(layers=tuple(spans)))
    return tuple(stages)


def pieces(model: ModelSpec, start: int, end: int) -> list[tuple[str, int, int]]:
    """(kind, first within the kind, count) of the transformer layers [start, end), counted over all runs."""
    found: list[tuple[str, int, int]] = []
    offset = 0
    seen: dict[str, int] = {}
    for run in model.runs[1:-1]:
        kind = run.layer.kind
        low, high = max(start - offset, 0), min(end - offset, run.count)
        if low < high:
            found.append((kind, seen.get(kind, 0) + low, high - low))
        seen[kind] = seen.get(kind, 0) + run.count
        offset += run.count
    return found
