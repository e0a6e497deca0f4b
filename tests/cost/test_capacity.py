"""What layers a stage may hold, against every way to cut a small model."""

from __future__ import annotations

from itertools import combinations, pairwise, product

import pytest
from msgspec.structs import replace

from orchestrator import detect, planning, recipe
from orchestrator.cost.capacity import Layers, kinds_by_stage
from orchestrator.engines import ENGINES
from orchestrator.model.spec import LayerRun
from tests.cost.cost_cases import candidate, describe, gpt


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


@pytest.mark.parametrize(("name", "exact"), [("deepseek_v3", True), ("t5_large", True), ("swin_tiny", False)])
def test_layers_of_several_kinds_are_no_more_than_the_model_has_of_each(name: str, exact: bool) -> None:
    """What n of them take at least, against all ways to choose n."""
    given = recipe.load([f"recipe={name}", "gpus=8"], detect.machine(), list(ENGINES))
    costs = planning.question(given).planned[0].costs(planning.workload_of(given))
    cand = candidate(pp=2, dp=4, recompute="full")
    kinds = [run.layer.kind for run in costs.model.runs[1:-1]]
    counts = [min(costs.workload.counts[kind], 4) for kind in kinds]
    costs.workload.counts.update(zip(kinds, counts, strict=True))
    prices = [costs.layer(cand, kind, "none") for kind in kinds]
    layers = Layers(costs, cand, kinds, ("none", "full"), ("full",))
    for n in range(sum(counts) + 1):
        ways = [many for many in product(*(range(count + 1) for count in counts)) if sum(many) == n]
        for field, found in (("seconds", "seconds"), ("static_bytes", "static"), ("saved_bytes", "saved"), ("parameters", "parameters")):
            least = min(sum(k * getattr(price, field) for k, price in zip(many, prices, strict=True)) for many in ways)
            mine = getattr(layers.of(n), found)
            assert mine <= least * (1 + 1e-9)
            if exact or n in (0, sum(counts)):
                assert mine == pytest.approx(least)


@pytest.mark.parametrize("name", ["deepseek_v3", "t5_large", "llama3_8b"])
def test_a_mode_relieves_no_layer_of_more_bytes_nor_costs_it_less_than_is_reckoned_with(name: str) -> None:
    """Of every kind that a stage may hold; a mode that saves nothing is no relief."""
    given = recipe.load([f"recipe={name}", "gpus=8", "engine=megatron"], detect.machine(), list(ENGINES))
    costs = planning.question(given).planned[0].costs(planning.workload_of(given))
    cand = candidate(pp=2, dp=4, recompute="full")
    kinds = list(dict.fromkeys(run.layer.kind for run in costs.model.runs[1:-1]))
    modes = ("none", "selective", "mlp", "full")
    layers = Layers(costs, cand, kinds, modes, ("full",))
    prices = {mode: [costs.layer(cand, kind, mode) for kind in kinds] for mode in modes}
    plain = prices["none"]
    expected = [
        (
            max(a.saved_bytes - b.saved_bytes for a, b in zip(plain, prices[mode], strict=True)),
            min(b.seconds - a.seconds for a, b in zip(plain, prices[mode], strict=True)),
            mode == "full",
        )
        for mode in modes
    ]
    expected = [row for row in expected if row[0] > 0.0]
    assert len(layers.reliefs) == len(expected) >= 2
    for relief, row in zip(layers.reliefs, expected, strict=True):
        assert tuple(relief) == pytest.approx(row)
    assert layers.forward == min(cost.transient_forward_bytes for costs_ in prices.values() for cost in costs_)
    assert layers.backward == min(cost.transient_backward_bytes for costs_ in prices.values() for cost in costs_)
