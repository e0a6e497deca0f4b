"""Megatron's pipeline layout string: "Et*7|t*9|t*9|t*7L" is four chunks, E the embedding, t a transformer layer, L the loss.

The grammar is that of megatron/core/transformer/pipeline_parallel_layer_layout.py:279-318 (0.16.1): `|` between chunks, `x*n` repeats a
letter, `(...)*n` repeats a group, commas are decoration. Chunks stand vpp-major: chunk v of stage p is number v*pp + p.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, groupby
from math import floor

from orchestrator.errors import InputError
from orchestrator.model.flops import forward_flops
from orchestrator.model.parts.vision import part_of
from orchestrator.model.spec import ModelSpec
from orchestrator.strategy.layout import LayerSpan, Stage
from orchestrator.strategy.spec import Recompute

KEY = "pin.layout"
LETTERS = {"E": "embedding", "t": "transformer layer", "m": "layer of multi-token prediction", "L": "loss (head)"}
"""Layers of multi-token prediction are part of our head: they stand in its chunk, right before the loss."""
MOST_LETTERS = 1_000_000
"""Longer than any model: `t*99999999999` is refused before it fills the memory."""

_GROUP = re.compile(r"\(([^()]+)\)\*(\d+)")
_REPEAT = re.compile(r"([A-Za-z|])\*(\d+)")


def expand(text: str) -> tuple[str, ...]:
    """One string of letters for each chunk, in the order of the text. Raises InputError for what Megatron can't read.

    >>> expand("Et*3|(tt|)*2t*2L")
    ('Ettt', 'tt', 'tt', 'ttL')
    """
    flat = text.replace(",", "").replace(" ", "")
    for pattern in (_GROUP, _REPEAT):
        flat = _unroll(pattern, flat, text)
    for letter in flat:
        if letter not in "|EtmL":
            known = ", ".join(f"{key} ({name})" for key, name in LETTERS.items())
            raise InputError(KEY, text, f"{letter!r} is no part of a layout; known are {known}, |, *n and (...)*n")
    return tuple(flat.split("|"))


def _unroll(pattern: re.Pattern[str], flat: str, text: str) -> str:
    size = len(flat) + sum(len(body) * min(int(count[:9]), MOST_LETTERS) for body, count in pattern.findall(flat))
    if size > MOST_LETTERS:
        raise InputError(KEY, text, f"unrolls to more than {MOST_LETTERS} letters")
    return pattern.sub(lambda match: match.group(1) * int(match.group(2)), flat)


def compress(chunks: Sequence[str]) -> str:
    """The shortest plain form of these chunks: repeated letters as `x*n`.

    >>> compress(("E" + 7 * "t", 9 * "t", "t", "tL"))
    'Et*7|t*9|t|tL'
    """
    return "|".join("".join(_run(letter, len(list(group))) for letter, group in groupby(chunk)) for chunk in chunks)


def _run(letter: str, count: int) -> str:
    return letter if count == 1 else f"{letter}*{count}"


def transformer_layers(model: ModelSpec) -> int:
    """Number of layers between embedding and head."""
    return sum(run.count for run in model.runs[1:-1])


def divided_layers(model: ModelSpec) -> int:
    """Number of layers that a pipeline's stages divide: a tower that looks at images stands whole on the first."""
    return sum(run.count for run in model.runs[1:-1] if part_of(run.layer.kind) == "language")


def even_chunks(model: ModelSpec, chunks: int) -> tuple[int, ...]:
    """Transformer layers of each of so many chunks, vpp-major, as even as they go: the first ones have one more. Layers of multi-token
    prediction, which stand in the last chunk, count as layers of it."""
    predicting = model.architecture.mtp_num_layers
    return _chunks(model, chunks, max(0, (transformer_layers(model) + predicting) // chunks - predicting))


@cache
def even_work(model: ModelSpec, chunks: int) -> tuple[int, ...]:
    """Transformer layers of each of so many chunks as `even_chunks` has them, but that the last one, which has the head, has as many fewer
    as take as many operations as the head."""
    layers = transformer_layers(model)
    head = forward_flops(model.runs[-1].layer) * layers / sum(run.count * forward_flops(run.layer) for run in model.runs[1:-1])
    return _chunks(model, chunks, min(even_chunks(model, chunks)[-1], max(0, round((layers + head) / chunks - head))))


def _chunks(model: ModelSpec, chunks: int, last: int) -> tuple[int, ...]:
    """Transformer layers of each of so many chunks: `last` in the last of several, the others as even as they go."""
    layers = transformer_layers(model)
    last = last if chunks > 1 else layers
    base, extra = divmod(layers - last, max(1, chunks - 1))
    return (*(base + 1,) * extra, *(base,) * (chunks - 1 - extra), last)


def of_another_kind(model: ModelSpec) -> int:
    """Layers before those that are all of the last one's kind: DeepSeek's dense ones; 0 where all layers are of a kind."""
    return transformer_layers(model) - model.runs[-2].count


def splits_vary(model: ModelSpec, pp: int, vpp: int) -> bool:
    """Whether a search takes other splits into so many chunks than `even_work`: not where layers of several kinds go on behind the
    stages' first chunks, as they do where kinds alternate."""
    return vpp == 1 or sum(even_chunks(model, pp * vpp)[:pp]) >= of_another_kind(model)


def has_uneven_ends(model: ModelSpec) -> bool:
    """Whether the first or the last chunk of a pipeline is much unlike the others: layers of other kinds come first, or the head predicts
    several tokens."""
    return len(model.runs) > 3 or model.architecture.mtp_num_layers > 0


def spread(layers: int, vpp: int, stage: int, pp: int) -> tuple[int, ...]:
    """A stage's layers over its chunks, as even as they go. The first stage's first chunk has the embedding and gets no extra layer; in
    the others the last chunk gets none, which has the head in the last stage.

    >>> spread(7, 4, 0, 4), spread(7, 4, 3, 4)
    ((1, 2, 2, 2), (2, 2, 2, 1))
    """
    base, extra = divmod(layers, vpp)
    if stage == 0 and pp > 1:
        return (base,) * (vpp - extra) + (base + 1,) * extra
    return (base + 1,) * extra + (base,) * (vpp - extra)


def shapes(layers: int, vpp: int, stage: int, pp: int, head: float) -> list[tuple[int, ...]]:
    """The sizes that the chunks of a stage with so many layers may have in a search: as even as they go (`spread`). `head`: the layers that
    the head takes as long as; where that is not 0, of the first stage either the last or the first chunks may have the layer more, and
    the last chunk, which has the head, fewer until it takes no longer than the others.

    >>> shapes(7, 2, 1, 4, 2.5), shapes(7, 2, 0, 4, 2.5), shapes(5, 2, 3, 4, 2.5), shapes(9, 2, 3, 4, 2.5)
    ([(4, 3)], [(3, 4), (4, 3)], [(3, 2), (4, 1)], [(5, 4), (6, 3)])
    """
    found = [spread(layers, vpp, stage, pp)]
    if head and vpp > 1 and stage == 0 and layers % vpp:
        found.append(found[0][::-1])
    if head and vpp > 1 and stage == pp - 1:
        least = max(0, floor((layers + head) / vpp - head))
        found += [(*spread(layers - last, vpp - 1, stage, pp), last) for last in range(layers // vpp - 1, least - 1, -1)]
    return found


def held_first(model: ModelSpec) -> int:
    """Layers that stand on a pipeline's first stage, whatever they cost: those that are given what layers of the tower saw (Megatron-Bridge
    067f987, models/qwen_vl/modelling_qwen3_vl/model.py:360 of 0.6.2, asserts it)."""
    vision = model.architecture.vision
    return 0 if vision is None else len(vision.deepstack_visual_indexes)


def chunk_sizes(text: str, model: ModelSpec, pp: int, vpp: int) -> tuple[int, ...]:
    """Transformer layers of each chunk, vpp-major, in Megatron's layout string. Raises InputError("pin.layout", ...) where the string is
    not of this model, pipeline and number of chunks."""
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
    predicting = model.architecture.mtp_num_layers
    if whole.count("m") != predicting:
        raise InputError(KEY, text, f"has {whole.count('m')} layers of multi-token prediction (m); the model has {predicting}")
    if not chunks[-1].endswith("m" * predicting + "L"):
        raise InputError(KEY, text, "layers of multi-token prediction (m) stand in the last chunk, right before the loss (L), in our plans")
    layers = transformer_layers(model)
    if whole.count("t") != layers:
        difference = layers - whole.count("t")
        what = f"drops {difference}" if difference > 0 else f"has {-difference} too many"
        raise InputError(KEY, text, f"has {whole.count('t')} transformer layers, {what}: the model has {layers}")
    if (first := chunks[0].count("t")) < (held := held_first(model)):
        raise InputError(
            KEY, text, f"has {first} transformer layers in the first stage, where those must stand that the tower gives to: {held}"
        )
    return tuple(chunk.count("t") for chunk in chunks)


def layout_string(stages: Sequence[Stage], mtp_num_layers: int = 0) -> str:
    """Megatron's string for these stages, chunk after chunk: chunk v of stage p stands at v * pp + p
    (pipeline_parallel_layer_layout.py:24-151). It is the inverse of `stages_of` with `chunk_sizes`, recompute aside."""
    letter = {"embedding": "E", "head": "m" * mtp_num_layers + "L"}
    vpp = 1 + max(span.chunk for stage in stages for span in stage.layers)
    chunks = ["".join(letter.get(span.kind, "t") * span.count for span in stage.chunk(v)) for v in range(vpp) for stage in stages]
    return compress(chunks)


def stages_of(
    model: ModelSpec, sizes: Sequence[int], pp: int, recompute: Sequence[tuple[Recompute, int]] | None = None
) -> tuple[Stage, ...]:
    """Stages from the number of transformer layers of each chunk (vpp-major; the sum is the model's).

    `recompute[p]` is (mode, n): stage p computes the first n layers of each stack in each of its chunks in that mode, the others "none".
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
            inner = pieces(model, ends[index] - sizes[index], ends[index])
            recomputed = first_layers(model, [(kind, count) for kind, _, count in inner], first_n if mode != "none" else 0)
            for (kind, first, count), inside in zip(inner, recomputed, strict=True):
                if inside:
                    spans.append(LayerSpan(kind=kind, first=first, count=inside, recompute=mode, chunk=chunk))
                if count > inside:
                    spans.append(LayerSpan(kind=kind, first=first + inside, count=count - inside, chunk=chunk))
            if index == len(sizes) - 1:
                spans.append(LayerSpan(kind=model.runs[-1].layer.kind, first=0, count=1, chunk=chunk))
        stages.append(Stage(layers=tuple(spans)))
    return tuple(stages)


def first_layers(model: ModelSpec, runs: Sequence[tuple[str, int]], first_n: int) -> list[int]:
    """How many layers of each run of a chunk are among the first so many of their stack: an encoder and a decoder are two stacks, kinds of
    layers that follow each other in a decoder are one (Megatron's TransformerBlock, which takes --recompute-num-layers). What stands
    between blocks is never recomputed."""
    if len(runs) == 1:
        return [min(first_n, runs[0][1])]
    encoder, fixed = {edge.source for edge in model.edges}, model.fixed_kinds
    left, found = {True: first_n, False: first_n}, []
    for kind, count in runs:
        inside = 0 if kind in fixed else min(left[kind in encoder], count)
        left[kind in encoder] -= inside
        found.append(inside)
    return found


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
