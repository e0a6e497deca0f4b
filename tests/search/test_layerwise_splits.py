"""The splits of a layer-wise pipeline, one by one: what bounds them, which are looked at, and that the best of all is found."""

from __future__ import annotations

import math
from itertools import combinations, pairwise, product

import pytest
from layerwise_instances import WORSE
from made_up_prices import AMPLE, Given

from orchestrator.cost.layerwise import Outer, plan_price, stage_price
from orchestrator.search import layerwise_stage
from orchestrator.search.layerwise import Split, Splits, layerwise
from orchestrator.search.layerwise_stage import uncovered
from orchestrator.strategy.layerwise import LayerwiseStage
from orchestrator.strategy.layout import ENDS
from orchestrator.strategy.pins import MemoryLimit
from orchestrator.strategy.tree import divisors

SHAPES = [(seed, pp, m) for seed, (pp, m) in enumerate([(2, 1), (2, 4), (3, 2), (3, 5), (4, 4), (5, 3), (3, 1)])]


def given(seed: int, *, ends: bool) -> Given:
    return Given(seed, each=2, overhead=0.5, counts=(3, 2), ends=ends, hop=0.25, once=1.5, hidden=0.5 * (seed % 2))


def made(seed: int, pp: int, m: int, usable: float = AMPLE, *, ends: bool = True) -> tuple[Given, Splits]:
    prices = given(seed, ends=ends)
    return prices, Splits(prices, Outer(pp, m, 1, None), usable)


def every(layers: int, pp: int) -> list[Split]:
    """Every split, no stage of it empty."""
    found = []
    for cuts in combinations(range(1, layers), pp - 1):
        found.append([(p, start, end) for p, (start, end) in enumerate(pairwise((0, *cuts, layers)))])
    return found


def kinds_of(prices: Given, splits: Splits, p: int, start: int, end: int) -> list[str]:
    inner = [kind for kind, count in prices.runs if kind not in ENDS for _ in range(count)]
    here = inner[start:end]
    if prices.runs[0][0] == ENDS[0]:
        here = ([ENDS[0]] if p == 0 else []) + here + ([ENDS[1]] if p == splits.pp - 1 else [])
    return here


def stages_of(prices: Given, splits: Splits, p: int, start: int, end: int) -> list[LayerwiseStage]:
    """Every way to compute the stage that fits."""
    kinds = kinds_of(prices, splits, p, start, end)
    ways = product(*(prices.options[kind] for kind in kinds))
    stages = (stage_price(prices, splits.outer, p, [(k, w, 1) for k, w in zip(kinds, some, strict=True)]) for some in ways)
    return [stage for stage in stages if stage.peak_bytes <= splits.usable]


def alone(prices: Given, splits: Splits, p: int, start: int, end: int) -> float:
    """Seconds that the stage is busy at the least, and where it is the first what it exposes and updates."""
    times = [
        splits.m * (one.forward_s + one.backward_s) + (one.exposed_s + one.optimizer_s if p == 0 else 0.0)
        for one in stages_of(prices, splits, p, start, end)
    ]
    return min(times, default=math.inf)


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize(("seed", "pp", "m"), SHAPES)
def test_a_stages_layers_and_the_way_to_it_are_the_models(seed: int, pp: int, m: int, ends: bool) -> None:
    prices, splits = made(seed, pp, m, ends=ends)
    fastest = {kind: min(way.forward_s + way.backward_s for way in prices.options[kind]) for kind, _ in prices.runs}
    whole = sum(count * fastest[kind] for kind, count in prices.runs)
    assert splits.work_s == pytest.approx(whole + pp * 0.5)
    for split in every(5, pp):
        for p, start, end in split:
            runs = splits._runs(p, start, end)
            assert [kind for kind, count in runs for _ in range(count)] == kinds_of(prices, splits, p, start, end)
            assert all(a[0] != b[0] for a, b in pairwise(runs))
            before = sum(fastest[kind] for q, a, b in split[:p] for kind in kinds_of(prices, splits, q, a, b))
            assert splits._lead(p, start) == pytest.approx(before + p * (0.5 + 2 * 0.25))


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("share", [1.0, 1.3, 3.0])
@pytest.mark.parametrize(("seed", "pp", "m"), SHAPES)
def test_what_a_stage_needs_at_least_is_not_more_than_it_needs(seed: int, pp: int, m: int, share: float, ends: bool) -> None:
    """By sums over layers, and once it was solved by that; infinite only where nothing fits."""
    prices, splits = made(seed, pp, m, ends=ends)
    least = max(min(stage.peak_bytes for stage in stages_of(prices, splits, *edge)) for edge in splits._even())
    prices, splits = made(seed, pp, m, share * least, ends=ends)
    splits.estimate(math.inf)
    edges = {edge for split in every(5, pp) for edge in split}
    needs = {edge: alone(prices, splits, *edge) for edge in edges}
    for edge in edges:
        assert splits.known(*edge) <= needs[edge] * (1 + 1e-9)
    for edge in sorted(edges):
        front = splits.front(*edge, math.inf)
        assert splits.known(*edge) == front.least_s <= needs[edge] * (1 + 1e-9)
        assert (front.ways == []) == (needs[edge] == math.inf)


@pytest.mark.parametrize("share", [1.05, 1.2, 1.5])
@pytest.mark.parametrize(("seed", "pp", "m"), SHAPES)
def test_at_the_price_of_a_byte_a_stage_of_the_even_split_is_the_sum_of_its_layers(seed: int, pp: int, m: int, share: float) -> None:
    """Without changes of tp, and where all ways have as many transient bytes, nothing else is in its bound: embedding and head are."""
    prices = Given(seed, tps=(1,), overhead=0.5, counts=(3, 2), ends=True, hop=0.25, once=1.5, hidden=0.5)
    prices.options = {kind: [way._replace(transient_bytes=2.0) for way in ways] for kind, ways in prices.options.items()}
    outer = Outer(pp, m, 1, None)
    fewest = Splits(prices, outer, AMPLE)
    leanest = max(min(stage.peak_bytes for stage in stages_of(prices, fewest, *edge)) for edge in fewest._even())
    splits = Splits(prices, outer, share * leanest)
    splits.estimate(math.inf)
    for edge in splits._even():
        solver = splits._solver(*edge)
        assert splits.known(*edge) == pytest.approx(solver.bound(), rel=1e-9)
        assert splits.known(*edge) <= alone(prices, splits, *edge) * (1 + 1e-9)


@pytest.mark.parametrize(("seed", "pp", "m"), SHAPES)
def test_all_splits_whose_stages_are_fast_enough_are_looked_at_and_the_bound_is_the_least_of_them(seed: int, pp: int, m: int) -> None:
    """A stage can't end before a micro-batch came down to it, it worked, and the last gradient went up: the largest of these sums."""
    prices, splits = made(seed, pp, m)
    splits.estimate(math.inf)
    fastest = {kind: min(way.forward_s + way.backward_s for way in prices.options[kind]) for kind, _ in prices.runs}

    def bound(split: Split) -> float:
        found = 0.0
        for p, start, end in reversed(split):
            one = sum(fastest[kind] for kind in kinds_of(prices, splits, p, start, end)) + 0.5 + (0.5 if p < pp - 1 else 0.0)
            found = max(splits.known(p, start, end), one + found)
        return found + 1.5

    bounds = sorted(map(bound, every(5, pp)))
    for upper in (math.inf, bounds[len(bounds) // 2] + 1e-6, bounds[0] + 1e-6):
        edges = [*splits._edges(upper)]
        assert len(edges) == len({*edges})
        fast = [split for split in every(5, pp) if not any(splits._slow(*edge, upper) for edge in split)]
        assert {edge for split in fast for edge in split} <= {*edges}
        assert not any(splits._slow(*edge, upper) for edge in edges)
        assert {*edges} <= {edge for split in every(5, pp) for edge in split}
        least, split = splits._table(upper)
        assert least == pytest.approx(bounds[0])
        assert bound(split) == pytest.approx(bounds[0])
        assert split in every(5, pp)
    assert splits._table(bounds[0]) == (bounds[0], [])
    assert splits.least >= bounds[0] * (1 - 1e-9)


@pytest.mark.parametrize("share", [1.0, 1.2, 3.0])
@pytest.mark.parametrize(("seed", "pp", "m"), SHAPES[:4])
def test_the_best_of_all_splits_and_ways_is_found(seed: int, pp: int, m: int, share: float) -> None:
    prices, splits = made(seed, pp, m)
    least = max(min(stage.peak_bytes for stage in stages_of(prices, splits, *edge)) for edge in splits._even())
    prices, splits = made(seed, pp, m, share * least)
    best = math.inf
    for split in every(5, pp):
        stages = [uncovered(stages_of(prices, splits, *edge)) for edge in split]
        best = min([best, *(plan_price(prices, splits.outer, chosen) for chosen in product(*stages))])
    assert splits.least <= best * (1 + 1e-9)
    splits.estimate(math.inf)
    assert splits.least <= best * (1 + 1e-9)
    found = splits.finish(math.inf)
    assert found is not None
    assert splits.least >= min(found.seconds, splits._table(math.inf)[0]) * (1 - 1e-9)
    assert splits.least <= best * (1 + 1e-9) <= found.seconds * (1 + 2e-9) <= best * (1 + WORSE) * (1 + 1e-9)
    assert found.seconds == plan_price(prices, splits.outer, found.stages)
    assert all(stage.peak_bytes <= splits.usable for stage in found.stages)
    again = made(seed, pp, m, share * least)[1]
    again.estimate(found.seconds)
    assert again.finish(found.seconds) is None, "none is faster"
    assert again.least <= found.seconds * (1 + 1e-9)


@pytest.mark.parametrize(("seed", "pp", "m"), SHAPES)
def test_an_even_split_has_as_much_to_do_in_each_stage_as_layers_allow(seed: int, pp: int, m: int) -> None:
    """Each border is where the layers before it first have their share of the work, and leaves a layer for every stage."""
    _, splits = made(seed, pp, m)
    split = splits._even()
    assert split in every(5, pp)
    work = splits._way
    for p, start, _ in split[1:]:
        share = work[-1] * p / pp
        lowest, highest = split[p - 1][1] + 1, splits.layers - (pp - p)
        assert lowest <= start <= highest
        assert work[start] >= share * (1 - 1e-9) or start == highest
        assert work[start - 1] < share or start == lowest


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_what_none_undercuts_is_true_though_ways_are_left_out(seed: int, few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every batch, pipeline, number of micro-batches, split and way. With one point kept for each number of layers plans are worse."""
    if few:
        monkeypatch.setattr(layerwise_stage, "MOST_POINTS", 1)
        monkeypatch.setattr(layerwise_stage, "MOST_OF_SEVERAL", 1)
    prices = Given(seed, each=3, hidden=0.5, overhead=0.25, hop=0.125, once=0.5)
    fullest = max(stage.peak_bytes for stage in stages_of(prices, Splits(prices, Outer(1, 1, 8, None), AMPLE), 0, 0, 4))
    limit = MemoryLimit(limit=int(fullest * (0.6, 0.3)[seed % 2]), reserve=0)
    best, batches = math.inf, (4, 8)
    for batch in batches:
        for pp in (1, 2, 4):
            for m in divisors(batch):
                splits = Splits(prices, Outer(pp, m, batch // m, None), limit.usable)
                for split in every(4, pp):
                    ways = [uncovered(stages_of(prices, splits, *edge)) for edge in split]
                    times = [plan_price(prices, splits.outer, chosen) for chosen in product(*ways)]
                    best = min([best, *(seconds / batch for seconds in times)])
    found = layerwise(prices, batches, limit)
    batch = found.plan.global_batch_size
    assert found.at_least_s / batch <= best * (1 + 1e-9)
    assert best * (1 - 1e-9) <= found.plan.step_time_s / batch
    if found.exact:
        assert found.plan.step_time_s / batch == pytest.approx(best, rel=1e-8)
    else:
        assert found.at_least_s < found.plan.step_time_s
    assert found.plan.step_time_s / batch <= best * (1.5 if few else 1 + WORSE)
    splits = Splits(prices, Outer(2, 4, 2, None), limit.usable)
    splits.estimate(math.inf)
    kept = splits.finish(math.inf)
    assert splits.least >= min(math.inf if kept is None else kept.seconds, splits._table(math.inf)[0]) * (1 - 1e-9)
    one = layerwise(prices, batch, limit, pp=found.plan.pp, num_microbatches=found.plan.num_microbatches).plan
    assert one.step_time_s == pytest.approx(found.plan.step_time_s)
    assert (one.pp, one.num_microbatches) == (found.plan.pp, found.plan.num_microbatches)
