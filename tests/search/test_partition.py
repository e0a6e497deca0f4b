"""Bounds of partitions by paths through the schedule: never above what the schedule takes, and that of the longest path is it."""

from __future__ import annotations

import random

import pytest

from orchestrator.cost.schedule import finish_times
from orchestrator.cost.schedule.critical_path import CriticalPath, Times, game, graph_of, longest
from orchestrator.search.partition import Partitions, Pipeline, Way

Setting = tuple[str, int, int, int]
"""(schedule, stages, micro-batches, chunks)."""


def setting(rng: random.Random) -> Setting:
    schedule = rng.choice(["1f1b", "1f1b_half_duplex", "interleaved", "deepspeed_1f1b"])
    pp, vpp = rng.choice([2, 3, 4, 6]), rng.choice([2, 3]) if schedule == "interleaved" else 1
    return schedule, pp, pp * rng.choice([1, 2, 5]) if vpp > 1 else rng.randint(1, 14), vpp


def times(rng: random.Random, pp: int, vpp: int) -> Times:
    """Passes from alike to three times apart; transfers from none to longer than a pass."""
    spread, hop = rng.choice([0.0, 0.1, 2.0]), rng.choice([0.0, 0.01, 0.3, 2.0])
    n = pp * vpp
    forward = [1 + spread * rng.random() for _ in range(n)]
    backward = [2 + spread * rng.random() for _ in range(n)]
    return Times(forward, backward, [hop * rng.choice([1.0, 1.0, 0.2]) for _ in range(pp)] * vpp, [rng.random() for _ in range(pp)])


def taken(s: Setting, given: Times) -> float:
    """Seconds by the cost model's own walk."""
    schedule, _, m, vpp = s
    ends = finish_times(schedule, given.forward, given.backward, given.hops, m, vpp, jump=False)
    return max(end + exposed for end, exposed in zip(ends, given.exposed, strict=True))


@pytest.mark.parametrize("seed", range(150))
def test_the_longest_path_is_the_schedules_and_no_path_is_above_another_partitions(seed: int) -> None:
    rng = random.Random(seed)
    s = schedule, pp, m, vpp = setting(rng)
    given, other = times(rng, pp, vpp), times(rng, pp, vpp)
    other = other._replace(hops=given.hops)
    seconds, path = longest(graph_of(schedule, pp, m, vpp), given)
    assert seconds == pytest.approx(taken(s, given), rel=1e-12)
    assert path.seconds(given) == pytest.approx(seconds, rel=1e-12)
    assert path.seconds(other) <= taken(s, other) * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(30))
def test_the_game_is_won_by_neither(seed: int) -> None:
    """The mean of the paths takes as long on the best partition as the mean of the partitions does on the worst path."""
    rng = random.Random(seed)
    schedule, pp, m, vpp = setting(rng)
    first = times(rng, pp, vpp)
    partitions = [first, *(times(rng, pp, vpp)._replace(hops=first.hops) for _ in range(4))]
    graph = graph_of(schedule, pp, m, vpp)
    paths = [longest(graph, given)[1] for given in partitions]
    value, by_path, by_partition = game([[path.seconds(given) for given in partitions] for path in paths])
    mean = CriticalPath.mean(paths, by_path)
    assert min(mean.seconds(given) for given in partitions) == pytest.approx(value, rel=1e-9)
    between = Times.mean(partitions, by_partition)
    assert max(path.seconds(between) for path in paths) == pytest.approx(value, rel=1e-9)


def partition(s: Setting, given: Times) -> tuple[Partitions, list[Way]]:
    """A pipeline without chunks that has only one partition."""
    schedule, pp, m, _ = s
    ways = [
        Way(forward_s=(f,), backward_s=(b,), exposed_s=exposed, optimizer_s=0.0, peak_bytes=0.0, made=None)
        for f, b, exposed in zip(given.forward, given.backward, given.exposed, strict=True)
    ]
    pipeline = Pipeline(schedule, pp, m, 1, None, given.hops, 0.0, 0.0, lambda *_: taken(s, given))
    return Partitions(pipeline, [{p: [(p + 1, [way])]} for p, way in enumerate(ways)], pp), ways


@pytest.mark.parametrize("seed", range(300))
def test_what_a_stage_waits_for_is_in_the_step(seed: int) -> None:
    """Of every stage the turns of the first and the last micro-batch behind it; and so is the bound of all."""
    rng = random.Random(seed)
    s = schedule, pp, m, vpp = setting(rng)
    if vpp > 1:
        schedule, vpp = "1f1b", 1
        s = schedule, pp, m, vpp
    given = times(rng, pp, vpp)
    (made, ways), seconds = partition(s, given), taken(s, given)
    assert made.bound <= seconds * (1 + 1e-12)
    lead = 0.0
    for p, way in enumerate(ways):
        alone = made._work(p, way, made.behind[p + 1][p + 1])
        assert lead + alone <= seconds * (1 + 1e-12), (s, p)
        assert m * way.work_s <= alone + 1e-12
        lead += way.work_s + 2 * made.hops[p]


@pytest.mark.parametrize(("pp", "m"), [(2, 1), (4, 4), (4, 9), (6, 3), (8, 64)])
def test_the_bound_of_equal_stages_is_their_schedule(pp: int, m: int) -> None:
    """Without transfers."""
    made, _ = partition(("1f1b", pp, m, 1), Times([1.0] * pp, [2.0] * pp, [0.0] * pp, [0.0] * pp))
    assert made.bound == pytest.approx(3.0 * (m + pp - 1))
