"""One stage of a layer-wise plan against the enumeration of all ways to compute its layers, with prices made up for it."""

from __future__ import annotations

import math
from itertools import pairwise, product
from math import comb
from operator import le

import pytest
from made_up_prices import AMPLE, Given

from orchestrator.cost.layerwise import Outer, stage_price
from orchestrator.search.layerwise_stage import MOST_OF_SEVERAL, MOST_POINTS, StageSolver, _kept, _Point, mean, uncovered
from orchestrator.strategy.layerwise import LayerwiseStage


def solver_of(prices: Given, pp: int, index: int, room: float, m: int = 4) -> StageSolver:
    outer = Outer(pp, m, 1, None)
    return StageSolver(prices, outer, index, prices.runs, min(m, pp - index), room, whole=index == 0)


def every(prices: Given, solver: StageSolver) -> list[LayerwiseStage]:
    """All ways to compute the stage's layers that fit."""
    kinds = [kind for kind, count in prices.runs for _ in range(count)]
    made = (
        stage_price(prices, solver.outer, solver.index, [(kind, way, 1) for kind, way in zip(kinds, ways, strict=True)])
        for ways in product(*(prices.options[kind] for kind in kinds))
    )
    return [stage for stage in made if stage.peak_bytes <= solver.room]


def numbers(stage: LayerwiseStage) -> tuple[float, ...]:
    return stage.forward_s, stage.backward_s, stage.backward_s + stage.exposed_s, stage.optimizer_s


def room_of(prices: Given, pp: int, index: int, share: float) -> float:
    """Between the fewest bytes of any way and the most."""
    found = [stage.peak_bytes for stage in every(prices, solver_of(prices, pp, index, AMPLE))]
    return min(found) + share * (max(found) - min(found))


@pytest.mark.parametrize(("pp", "index"), [(1, 0), (3, 0), (3, 1), (3, 2)])
@pytest.mark.parametrize("seed", range(6))
def test_the_front_covers_every_way_below_what_is_asked_for_and_has_no_other(seed: int, pp: int, index: int) -> None:
    prices = Given(seed, hidden=0.5 * (seed % 2), overhead=0.5 * (seed % 3), each=3 if pp == 1 else 2)
    solver = solver_of(prices, pp, index, room_of(prices, pp, index, (0.0, 0.1, 0.3, 0.6, 1.0, 0.2)[seed]))
    ways = every(prices, solver)
    times = sorted(map(solver.seconds, ways))
    for upper in (math.inf, times[len(times) // 2] + 1e-3, times[0] + 1e-3):
        front = solver_of(prices, pp, index, solver.room).front(upper)
        assert front.complete
        found = {numbers(stage) for stage in front.ways}
        assert found <= set(map(numbers, ways))
        if pp == 1:
            assert [solver.seconds(stage) for stage in front.ways] == [times[0]] == [front.least_s]
            continue
        for stage in ways:
            assert solver.seconds(stage) >= upper or any(all(map(le, other, numbers(stage))) for other in found)
        assert not any(a != b and all(map(le, a, b)) for a in found for b in found), "one covers another"
        assert all(solver.seconds(stage) < upper for stage in front.ways)
        assert list(map(solver.seconds, front.ways)) == sorted(map(solver.seconds, front.ways))
        assert front.least_s <= times[0] * (1 + 1e-9)
    none = solver_of(prices, pp, index, solver.room).front(times[0])
    assert none.ways == []
    assert none.least_s >= times[0] * (1 - 1e-9) or none.complete


def test_a_front_that_is_complete_lacks_nothing_and_one_that_lacks_something_says_so() -> None:
    """With more ways than are kept of a stage among others; what is left out is no faster than it says."""
    incomplete = 0
    for seed in range(12):
        prices = Given(seed, hidden=0.5, each=3)
        solver = solver_of(prices, 3, 1, room_of(prices, 3, 1, 0.7))
        front = solver.front(math.inf)
        found = {numbers(stage) for stage in front.ways}
        missing = [stage for stage in every(prices, solver) if not any(all(map(le, other, numbers(stage))) for other in found)]
        assert not (front.complete and missing)
        assert all(solver.seconds(stage) >= front.least_s * (1 - 1e-9) for stage in missing)
        incomplete += not front.complete
    assert 0 < incomplete < 12


def relaxed(prices: Given, solver: StageSolver, share: float) -> float:
    """By enumeration: what no mix of ways that fits on average takes less than, the exposed reduction counted at this share between all
    hidden and as much as fits. A point on the lower hull of (bytes, seconds) at the bytes that there are."""
    points = []
    kinds = [kind for kind, count in prices.runs for _ in range(count)]
    for ways in product(*(prices.options[kind] for kind in kinds)):
        forward, backward = sum(way.forward_s for way in ways), sum(way.backward_s for way in ways)
        for before, after in pairwise(ways):
            there, back = prices.switch("", before.choice.tp, after.choice.tp, solver.outer)
            forward, backward = forward + there, backward + back
        sync, update = sum(way.sync_s for way in ways), sum(way.optimizer_s for way in ways)
        nbytes = sum(way.static_bytes + (1 + prices.slack) * solver.flight * way.saved_bytes for way in ways)
        seconds = solver.m * (forward + backward)
        if solver.whole:
            hides = (1 - prices.slowdown) * prices.hidden_share
            hidden, open_ = seconds + prices.slowdown * sync, seconds + sync - hides * backward
            seconds = update + (1 - share) * hidden + share * open_
        points.append((nbytes, seconds))
    cap = solver.cap
    fits = [point for point in points if point[0] <= cap]
    best = min(seconds for _, seconds in fits)
    for x, s in fits:
        for y, t in points:
            if y > cap and t < best:
                best = min(best, s + (t - s) * (cap - x) / (y - x))
    return best


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("seed", range(8))
def test_the_bound_is_the_best_price_of_a_byte(seed: int, index: int) -> None:
    """Lagrangian duality: the largest value over all prices is the lower hull's, of ways that need the least transient bytes at least."""
    prices = Given(seed, overhead=0.25)
    solver = solver_of(prices, 3, index, room_of(prices, 3, index, 0.1 + 0.1 * seed))
    found = solver.bound()
    assert found == pytest.approx(relaxed(prices, solver, 0.0) + solver.m * 0.25, rel=1e-9)
    assert found <= min(map(solver.seconds, every(prices, solver))) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_the_bound_knows_what_of_the_reduction_a_backward_pass_hides(seed: int) -> None:
    """Of the larger of two sums the best mean: of a hundred that are tried none says more."""
    prices = Given(100 + seed, hidden=0.5, overhead=0.5)
    solver = solver_of(prices, 3, 0, room_of(prices, 3, 0, 0.1 + 0.1 * seed))
    found = solver.bound()
    ahead = (1 - 0.25) * 0.5 * 0.5 / 2  # of the reduction hides behind the overhead of a backward pass
    best = max(relaxed(prices, solver, share / 100) - share / 100 * ahead for share in range(101)) + solver.m * 0.5
    assert best * (1 - 0.005) <= found <= min(map(solver.seconds, every(prices, solver))) * (1 + 1e-9)


def test_a_stage_holds_its_leanest_way_in_just_its_bytes_and_nothing_in_less() -> None:
    for index in (0, 1):
        prices = Given(3, tps=(1, 2))
        leanest = room_of(prices, 3, index, 0.0)
        assert solver_of(prices, 3, index, leanest).front(math.inf).ways
        short = solver_of(prices, 3, index, leanest * (1 - 1e-6))
        assert short.front(math.inf).ways == []
        assert solver_of(prices, 3, index, 1.0).bound() == math.inf


@pytest.mark.parametrize("layers", [4, 12, 30])
def test_layers_that_are_alike_are_told_apart_by_how_many_have_each_way_alone(layers: int) -> None:
    """Of n layers with two ways there are n + 1 sums, not 2^n; each point is taken on by both ways."""
    prices = Given(5, tps=(1,), each=2)
    prices.options["a"] = [way._replace(transient_bytes=0.0) for way in prices.options["a"]]
    fast, lean = prices.options["a"]
    prices.options["a"] = [fast._replace(forward_s=1.0, saved_bytes=9.0), fast._replace(forward_s=2.0, saved_bytes=1.0, choice=lean.choice)]
    prices.runs = (("a", layers), ("a", 0))
    solver = solver_of(prices, 3, 1, AMPLE)
    front = solver.front(math.inf)
    assert [stage.forward_s for stage in front.ways] == [float(layers)]
    assert solver.steps <= sum(2 * comb(i + 1, 1) for i in range(layers))


def point(bound: float, *values: float) -> _Point:
    return values, bound, None, 0


def test_of_points_those_with_the_least_bounds_are_kept_and_of_those_that_are_covered_none() -> None:
    points = [point(3.0, 1.0, 5.0), point(1.0, 2.0, 2.0), point(2.0, 2.0, 3.0), point(4.0, 0.0, 9.0)]
    assert _kept([*points], 4, dominance=False) == ([points[1], points[2], points[0], points[3]], True)
    assert _kept([*points], 3, dominance=False) == ([points[1], points[2], points[0]], False)
    assert _kept([*points], 3, dominance=True) == ([points[1], points[0], points[3]], True)
    assert _kept([*points], 2, dominance=True) == ([points[1], points[0]], False)
    assert _kept([], 0, dominance=True) == ([], True)


def test_a_mean_of_two_sums_has_its_share_of_the_second() -> None:
    assert [mean((2.0, 6.0), share) for share in (0.0, 0.25, 1.0)] == [2.0, 3.0, 6.0]


def test_of_priced_stages_none_is_kept_that_another_one_covers() -> None:
    """What is exposed counts with the backward pass that it follows: .5 s of pass and 2.5 s exposed are no better than 1 s and 1 s."""

    def stage(forward: float, backward: float, exposed: float, update: float) -> LayerwiseStage:
        return LayerwiseStage(runs=(), forward_s=forward, backward_s=backward, exposed_s=exposed, optimizer_s=update, peak_bytes=0.0)

    best, shorter, covered, faster = stage(1, 1, 1, 1), stage(1, 0.5, 2.5, 1), stage(1, 2, 0, 1), stage(0.5, 4, 4, 4)
    assert uncovered([faster, covered, shorter, best]) == [faster, shorter, best]


def test_a_stage_that_is_alone_keeps_more_points() -> None:
    prices = Given(1)
    assert (solver_of(prices, 1, 0, AMPLE).most, solver_of(prices, 2, 0, AMPLE).most) == (MOST_POINTS, MOST_OF_SEVERAL)
