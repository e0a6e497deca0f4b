"""Longest paths through schedules and the game between paths and partitions, against linear programs and counts by hand."""

from __future__ import annotations

import random
from operator import mul

import pytest

from orchestrator.cost.schedule import finish_times
from orchestrator.cost.schedule.critical_path import CriticalPath, Times, game, graph_of, longest


@pytest.mark.parametrize("seed", range(25))
def test_a_game_has_the_value_of_its_linear_program_whatever_was_played_before(seed: int) -> None:
    """Most v with shares of rows whose mean is v in every column; no column's player does better than the shares that are returned."""
    optimize = pytest.importorskip("scipy.optimize")
    rng = random.Random(seed)
    rows, columns = rng.randint(1, 6), rng.randint(1, 6)
    payoffs = [[rng.choice([1.0, 2.0, 5.0]) if seed % 3 == 0 else rng.uniform(1, 9) for _ in range(columns)] for _ in range(rows)]
    program = optimize.linprog(
        [0.0] * rows + [-1.0],
        A_ub=[[-payoffs[row][column] for row in range(rows)] + [1.0] for column in range(columns)],
        b_ub=[0.0] * columns,
        A_eq=[[1.0] * rows + [0.0]],
        b_eq=[1.0],
        bounds=[(0, None)] * rows + [(None, None)],
        method="highs",
    )
    played = [0.0, *(rng.choice([0.0, 0.3, 0.7]) for _ in range(columns - 1))]
    for before in ((), played[: columns - 1], played):
        value, by_row, by_column = game(payoffs, before)
        assert value == pytest.approx(-program.fun, rel=1e-9)
        for shares in (by_row, by_column):
            assert sum(shares) == pytest.approx(1.0)
            assert min(shares) >= 0.0
        assert min(sum(map(mul, by_row, column)) for column in zip(*payoffs, strict=True)) == pytest.approx(value)
        assert max(sum(map(mul, row, by_column)) for row in payoffs) == pytest.approx(value)


SHAPES = [
    ("1f1b", 2, 4, 1, None), ("1f1b", 4, 2, 1, None), ("1f1b_half_duplex", 3, 5, 1, None), ("deepspeed_1f1b", 3, 4, 1, None),
    ("deepspeed_1f1b", 4, 2, 1, None), ("interleaved", 2, 4, 2, None), ("interleaved", 3, 6, 3, None), ("interleaved", 2, 8, 2, 3),
    ("interleaved", 3, 11, 2, 4),
]  # fmt: skip


@pytest.mark.parametrize(("schedule", "pp", "m", "vpp", "group"), SHAPES)
def test_a_graph_has_every_pass_once_and_each_transfer_of_those_that_block(
    schedule: str, pp: int, m: int, vpp: int, group: int | None
) -> None:
    graph = graph_of(schedule, pp, m, vpp, group)
    n = pp * vpp
    counts = [graph.costs.count(index) for index in range(4 * n + 1)]
    assert counts[: 2 * n] == [m] * (2 * n)
    one, both = counts[2 * n : 3 * n], counts[3 * n : 4 * n]
    assert counts[4 * n] == 0
    if schedule == "interleaved":
        assert one == both == [0] * n, "nobody waits while a transfer lasts"
        assert sum(wait >= 0 for wait in graph.waits) == 2 * m * (n - 1)
        return
    assert all(wait == -1 for wait in graph.waits)
    for border in range(pp - 1):
        if schedule == "1f1b":  # an activation and a gradient at once between warm-up and drain
            assert one[border] == m + min(m, pp - 1 - border)
            assert both[border] == 0
        else:
            assert one[border] + 2 * both[border] == 2 * m
    assert one[pp - 1] == both[pp - 1] == 0
    assert all(graph.last[stage] in range(1, len(graph.costs) + 1) for stage in range(pp))


@pytest.mark.parametrize(("schedule", "pp", "m", "vpp", "group"), SHAPES)
def test_the_longest_path_ends_with_the_last_stage_and_what_it_exposes(schedule: str, pp: int, m: int, vpp: int, group: int | None) -> None:
    """Its counts times the seconds of a pass are its length, which is the schedule's; a stage that exposes much is where it ends."""
    rng = random.Random(f"{schedule} {pp} {m}")
    n = pp * vpp
    forward, backward = ([rng.uniform(low, 2 * low) for _ in range(n)] for low in (1, 2))
    hops = [rng.uniform(0, 1) for _ in range(pp)] * vpp
    ends = finish_times(schedule, forward, backward, hops, m, vpp, group, jump=False)
    for late in range(pp):
        exposed = [100.0 * (stage == late) for stage in range(pp)]
        seconds, path = longest(graph_of(schedule, pp, m, vpp, group), Times(forward, backward, hops, exposed))
        assert seconds == pytest.approx(ends[late] + 100.0)
        assert path.ends == [float(stage == late) for stage in range(pp)]
        spent = sum(map(mul, path.forward, forward)) + sum(map(mul, path.backward, backward)) + path.transfers_s + 100.0
        assert spent == pytest.approx(seconds)
        assert path.seconds(Times(forward, backward, hops, exposed)) == pytest.approx(seconds)
        assert all(count == int(count) and 0 <= count <= m for count in (*path.forward, *path.backward))


def test_means_are_of_each_number() -> None:
    a, b = Times([1.0, 2.0], [3.0, 4.0], [0.5, 0.0], [0.0, 8.0]), Times([3.0, 2.0], [5.0, 0.0], [0.5, 0.0], [4.0, 0.0])
    assert Times.mean([a, b], [0.25, 0.75]) == Times([2.5, 2.0], [4.5, 1.0], [0.5, 0.0], [3.0, 2.0])
    one, other = CriticalPath([1, 0], [2, 0], 6.0, [1.0, 0.0]), CriticalPath([3, 4], [0, 0], 2.0, [0.0, 1.0])
    mean = CriticalPath.mean([one, other], [0.5, 0.5])
    assert mean == CriticalPath([2.0, 2.0], [1.0, 0.0], 4.0, [0.5, 0.5])
    assert mean.seconds(a) == pytest.approx((one.seconds(a) + other.seconds(a)) / 2)
    assert one.seconds(a) == 6.0 + 1.0 + 6.0 + 0.0
    assert a.weights() == [1.0, 2.0, 3.0, 4.0, 0.5, 0.0, 1.0, 0.0, 0.0]
