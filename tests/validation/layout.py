"""How the engines that were measured split layers over pipeline stages, from the facts that their tables leave out."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.errors import InputError
from orchestrator.model.spec import ModelSpec
from orchestrator.strategy.layout import LayerSpan, Stage
from orchestrator.strategy.megatron_layout import expand
from orchestrator.strategy.spec import Recompute
from tests.validation.rows import SkipError


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


def before_prediction(num_layers: int, parts: int) -> tuple[int, ...]:
    """Layers per part where the last one also has a layer of multi-token prediction and two losses: Megatron-Bridge's layouts of
    DeepSeek-V3 fill all parts alike and leave the rest to the last (recipes/deepseek/deepseek_v3.py); where there are too many parts for
    that, the first, with the embedding, has one layer and the last none.

    >>> before_prediction(61, 4), before_prediction(61, 16)[:2], before_prediction(61, 16)[-2:]
    ((16, 16, 16, 13), (4, 4), (4, 1))
    >>> before_prediction(61, 32)[:2], before_prediction(61, 32)[-2:], sum(before_prediction(61, 32))
    ((1, 2), (2, 0), 61)
    """
    share = -(-num_layers // parts)
    last = num_layers - share * (parts - 1)
    if last > 0 or parts == 1:
        return (*[share] * (parts - 1), last)
    first = num_layers - share * (parts - 2)
    return even_counts(num_layers, parts) if first < 1 else (first, *[share] * (parts - 2), 0)


def counts_of(text: str, num_layers: int, parts: int) -> tuple[int, ...]:
    """Layers per part by Megatron's layout string, whose `m` is a layer of multi-token prediction. Raises SkipError where it is of another
    model or pipeline.

    >>> counts_of("Et*4|(t*4|)*14tmL", 61, 16)[:2], counts_of("Et*4|(t*4|)*14tmL", 61, 16)[-1]
    ((4, 4), 1)
    """
    try:
        chunks = expand(text.replace("m", ""))
    except InputError as error:
        raise SkipError(f"pipeline_layout: {error}") from None
    counts = tuple(chunk.count("t") for chunk in chunks)
    if len(counts) != parts or sum(counts) != num_layers:
        raise SkipError(f"pipeline_layout={text} is not of {num_layers} layers on {parts} chunks")
    return counts


def stages_of(
    model: ModelSpec, counts: Sequence[int], *, pp: int, vpp: int, recompute: Recompute, full_layers: float = 1.0, head: int | None = None
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
