"""How the engines that were measured split layers over pipeline stages, from the facts that their tables leave out."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.model.spec import ModelSpec
from orchestrator.strategy.layout import LayerSpan, Stage
from orchestrator.strategy.spec import Recompute


def even_counts(num_layers: int, parts: int) -> tuple[int, ...]:
    """Layers per part. Where embedding and head count as layers (Megatron's account_for_*_in_pipeline_split, Megatron-DeepSpeed's
    "type:transformer|embedding") and that divides, first and last part have one layer less; else the largest part is as small as can be.

    >>> even_counts(12, 4), even_counts(126, 16)[:2], even_counts(126, 16)[-1], even_counts(78, 12)
    ((3, 3, 3, 3), (7, 8), 7, (7, 7, 7, 7, 7, 7, 6, 6, 6, 6, 6, 6))
    """
    if num_layers % parts and (num_layers + 2) % parts == 0 and parts > 1:
        share = (num_layers + 2) // parts
        return (share - 1, *[share] * (parts - 2), share - 1)
    low, more = divmod(num_layers, parts)
    return tuple(low + (index < more) for index in range(parts))


def stages_of(
    model: ModelSpec,
    counts: Sequence[int],
    *,
    pp: int,
    vpp: int,
    recompute: Recompute,
    full_layers: float = 1.0,
    head: int | None = None,
) -> tuple[Stage, ...]:
    """Stages whose chunks hold `counts` transformer layers, chunk after chunk over the stages; embedding first, head on the chunk of that
    index (None: the last).

    `full_layers`: the share of the layers that use `recompute`; the others keep everything (torchtitan's selective modes).
    """
    kinds = [run.layer.kind for run in model.runs for _ in range(run.count)]
    body = [kind for kind in kinds if kind not in ("embedding", "head")]
    seen: dict[str, int] = {}
    chunks: list[list[LayerSpan]] = [[] for _ in range(pp)]
    position = 0
    for index, count in enumerate(counts):
        stage, chunk = index % pp, index // pp
        if index == 0:
            chunks[stage].append(LayerSpan(kind="embedding", first=0, count=1))
        for kind in dict.fromkeys(body[position : position + count]):
            number = body[position : position + count].count(kind)
            first = seen.get(kind, 0)
            with_recompute = round(number * full_layers) if recompute != "none" else 0
            if with_recompute:
                chunks[stage].append(LayerSpan(kind=kind, first=first, count=with_recompute, recompute=recompute, chunk=chunk))
            if number > with_recompute:
                chunks[stage].append(LayerSpan(kind=kind, first=first + with_recompute, count=number - with_recompute, chunk=chunk))
            seen[kind] = first + number
        position += count
        if index == (len(counts) - 1 if head is None else head):
            chunks[stage].append(LayerSpan(kind="head", first=0, count=1, chunk=chunk))
    assert len(counts) == pp * vpp, (counts, pp, vpp)
    return tuple(Stage(layers=tuple(spans)) for spans in chunks)
