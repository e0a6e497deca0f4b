"""What layers a stage may hold, against every way to cut a small model."""

from __future__ import annotations

from itertools import combinations, pairwise, product
from math import ceil, inf

import pytest
from msgspec.structs import replace

from orchestrator import detect, recipe
from orchestrator.cost.capacity import Capacity, Layers, kinds_by_stage
from orchestrator.engines import ENGINES
from orchestrator.model.spec import LayerRun
from orchestrator.planning import Planner
from tests.cost.cost_cases import candidate, cost_model, describe, gpt


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
    costs = Planner(given).space().planned[0].costs(Planner(given).workload)
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
            mine = getattr(layers.of(n, cand.vpp), found)
            assert mine <= least * (1 + 1e-9)
            if exact or n in (0, sum(counts)):
                assert mine == pytest.approx(least)


@pytest.mark.parametrize("name", ["deepseek_v3", "t5_large", "llama3_8b"])
def test_a_mode_relieves_no_layer_of_more_bytes_nor_costs_it_less_than_is_reckoned_with(name: str) -> None:
    """Of every kind that a stage may hold; a mode that saves nothing is no relief."""
    given = recipe.load([f"recipe={name}", "gpus=8", "engine=megatron"], detect.machine(), list(ENGINES))
    costs = Planner(given).space().planned[0].costs(Planner(given).workload)
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


@pytest.mark.parametrize("by_layer", [True, False])
@pytest.mark.parametrize("share", [0.4, 0.7, 1.0, 2.0])
def test_a_stage_recomputes_as_few_layers_as_make_room(by_layer: bool, share: float) -> None:
    """Or all of them, where a stage has one mode; none where they fit, and where even all are too few it takes for ever. The most layers
    for a time are found as by trying every number."""
    costs = cost_model(gpt(num_layers=24))
    cand = candidate(pp=4, micro_batch_size=8, num_microbatches=8, recompute="full")
    plain, full = (costs.layer(cand, "decoder", mode) for mode in ("none", "full"))
    memories = [costs.stage_memory(cand, p) for p in range(4)]
    ends = [costs.layer(cand, "embedding", "none").seconds, 0.0, 0.0, costs.layer(cand, "head", "none").seconds]

    def capacity(rooms: list[float]) -> Capacity:
        return Capacity(costs, cand, ("none", "full"), ("full",) if by_layer else (), 24, rooms, memories)

    ample = capacity([1e15] * 4)
    rooms = [ample.peak(p, 0) + share * (ample.peak(p, 12) - ample.peak(p, 0)) for p in range(4)]
    tight = capacity(rooms)
    for p in range(4):
        empty = costs.calibration.microbatch_overhead_s + ends[p]
        expected = []
        for n in range(25):
            over = ample.peak(p, n) - rooms[p]
            freed = (1 + memories[p].slack) * (4 - p) * (plain.saved_bytes - full.saved_bytes)
            again = 0 if over <= rooms[p] * 1e-9 else ceil(over / freed - 1e-6) if by_layer else n if over <= n * freed else 25
            seconds = empty + n * plain.seconds + again * (full.seconds - plain.seconds)
            expected.append(seconds if again <= n else inf)
            assert tight.seconds(p, n) == pytest.approx(expected[-1])
            assert ample.seconds(p, n) == pytest.approx(empty + n * plain.seconds)
        for seconds in (0.0, 0.999 * empty, empty, expected[6], 0.999 * expected[6], 1.001 * expected[6], 1e9, inf):
            most = max((n for n in range(25) if expected[n] <= seconds * (1 + 1e-9) and expected[n] < inf), default=-1)
            assert capacity(rooms).most(p, seconds) == most
            assert tight.most(p, seconds) == most, "whatever was asked before"
            assert tight.most(p, seconds, 20) == min(most, 20)


def test_before_and_behind_a_stage_are_the_way_down_and_up_and_the_transfers_that_block_it() -> None:
    """Of 8 micro-batches over 4 stages: each takes an activation and a gradient over a border, all but a warm-up's both at once."""
    costs = cost_model(gpt(num_layers=24))
    cand = candidate(pp=4, num_microbatches=8)
    memories = [costs.stage_memory(cand, p) for p in range(4)]
    capacity = Capacity(costs, cand, ("none",), (), 24, [1e15] * 4, memories)
    hops, overhead = costs.hop_seconds(cand), costs.calibration.microbatch_overhead_s
    embedding, decoder, head = (costs.layer(cand, kind, "none") for kind in ("embedding", "decoder", "head"))
    way = [0.0]
    for p in range(3):
        way.append(way[-1] + overhead + 2 * hops[p] + (embedding.seconds if p == 0 else 0.0))
    assert capacity.down == pytest.approx(way)
    assert capacity.before == pytest.approx([n * decoder.seconds for n in range(25)])
    both = [8 + min(8, 3 - p) for p in range(3)]
    blocked = [(both[p - 1] - 2) * hops[p - 1] if p else 0.0 for p in range(4)]
    assert capacity.blocked == pytest.approx([blocked[p] + (both[p] * hops[p] if p < 3 else 0.0) for p in range(4)])
    update = embedding.optimizer_s + 24 * decoder.optimizer_s + head.optimizer_s
    assert capacity.once == pytest.approx(costs.once_seconds(cand) + update / 4)
    assert capacity.ranges(inf) == ([0, 1, 1, 0], [24] * 4)
    slowest = capacity.once + capacity.blocked[1] + way[1] + 8 * (overhead + 6 * decoder.seconds)
    assert capacity.ranges(0.5 * slowest) is None
    chunked = candidate(pp=4, vpp=2, num_microbatches=8)
    memories = [costs.stage_memory(chunked, p) for p in range(4)]
    assert Capacity(costs, chunked, ("none",), (), 24, [1e15] * 4, memories).blocked == [0.0] * 4


@pytest.mark.parametrize("pp", [2, 3])
def test_a_stage_with_chunks_may_hold_kinds_of_all_rows(pp: int) -> None:
    """Every stage between the first and the last has a layer in its first chunk."""
    model = describe(gpt(), 2048)
    first, decoder, last = model.runs
    runs = [LayerRun(layer=replace(decoder.layer, kind=kind), count=2) for kind in "abc"]
    layers, held = "aabbcc", [set[str]() for _ in range(pp)]
    for places in combinations(range(len(layers) + 2 * pp - 1), 2 * pp - 1):
        sizes = [b - a - 1 for a, b in pairwise((-1, *places, len(layers) + 2 * pp - 1))]
        if 0 not in sizes[1 : pp - 1]:
            for chunk in range(2 * pp):
                held[chunk % pp] |= {*layers[sum(sizes[:chunk]) : sum(sizes[: chunk + 1])]}
    assert [{*some} for some in kinds_by_stage(replace(model, runs=(first, *runs, last)), pp, 2)] == held
