"""What layers a stage may hold, against every way to cut a small model."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from msgspec.structs import replace

from orchestrator.cost.capacity import kinds_by_stage
from orchestrator.model.spec import LayerRun
from tests.cost.cost_cases import describe, gpt


@pytest.mark.parametrize("pp", [1, 2, 3, 4])
@pytest.mark.parametrize("counts", [(4,), (1, 3), (2, 1, 2), (1, 1, 1, 3)])
def test_a_stage_may_hold_the_kinds_that_some_cut_gives_it(counts: tuple[int, ...], pp: int) -> None:
    """Every stage between the first and the last, which have embedding and head, has a layer at least."""
    model = describe(gpt(), 2048)
    first, decoder, last = model.runs
    kinds = [f"kind{index}" for index in range(len(counts))]
    runs = [LayerRun(layer=replace(decoder.layer, kind=kind), count=count) for kind, count in zip(kinds, counts, strict=True)]
    layers = [kind for kind, count in zip(kinds, counts, strict=True) for _ in range(count)]
    held: list[set[str]] = [set() for _ in range(pp)]
    for places in combinations(range(len(layers) + 3), pp - 1):  # borders that may be the same at the ends
        cuts = [0, *(place - 1 for place in places), len(layers)]
        sizes = [after - before for before, after in pairwise(cuts)]
        if min(sizes) < 0 or 0 in sizes[1:-1]:
            continue
        for stage, (begin, end) in enumerate(pairwise(cuts)):
            held[stage] |= {*layers[begin:end]}
    found = kinds_by_stage(replace(model, runs=(first, *runs, last)), pp)
    assert [{*some} for some in found] == held
    assert all(list(some) == sorted(some) for some in found), "in the model's order, each once"
