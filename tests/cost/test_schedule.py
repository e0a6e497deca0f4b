"""The schedules against a walk of each rank's own list of passes, and against the closed forms of the papers."""

from __future__ import annotations

import itertools
import math
import random
from itertools import pairwise
from operator import le, mul
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.cost.schedule import fewest_by_stage, finish_times, in_flight, in_flight_by_chunk, timeline
from orchestrator.cost.schedule.interleaved import Interleaved
from orchestrator.cost.schedule.names import SCHEDULES, of_chunks
from orchestrator.cost.schedule.periods import drift, shift


def simulate(*arguments: Any) -> float:
    """Seconds until the last stage is through."""
    return max(finish_times(*arguments))


Pass = tuple[str, int, int]
"""("F" or "B", micro-batch, chunk)."""


def order_1f1b(rank: int, m: int, pp: int, vpp: int) -> list[Pass]:
    """schedules.py:2093."""
    warm_up = min(m, pp - 1 - rank)
    passes: list[Pass] = [("F", k, 0) for k in range(warm_up)]
    for k in range(m - warm_up):
        passes += [("F", warm_up + k, 0), ("B", k, 0)]
    return passes + [("B", k, 0) for k in range(m - warm_up, m)]


def order_interleaved(rank: int, m: int, pp: int, vpp: int, group: int | None = None) -> list[Pass]:
    """schedules.py:745-798, micro-batch groups of pp or of `group`; k-th pass by arithmetic, where Megatron makes a table."""
    size = group or pp
    total, period = m * vpp, size * vpp

    def virtual(k: int) -> tuple[int, int]:
        first = k // period * size
        here = min(size, m - first)  # the last group has what is left
        return first + k % period % here, k % period // here

    forward: list[Pass] = [("F", *virtual(k)) for k in range(total)]
    backward: list[Pass] = [("B", n, vpp - 1 - chunk) for n, chunk in map(virtual, range(total))]
    warm_up = min(total, 2 * (pp - rank - 1) + (vpp - 1) * size)
    passes = forward[:warm_up]
    for k in range(total - warm_up):
        passes += [forward[warm_up + k], backward[k]]
    return passes + backward[total - warm_up :]


Message = tuple[int, str, int]
"""(border, "activation" or "gradient", micro-batch)."""


def calls_1f1b(rank: int, m: int, pp: int) -> list[Pass | list[Message]]:
    """schedules.py:2093 with its calls of the communicator, each a list of messages that it returns behind (p2p_communication.py)."""

    def border(*messages: Message) -> list[list[Message]]:
        there = [message for message in messages if 0 <= message[0] < pp - 1]
        return [there] if there else []

    above, below = rank - 1, rank
    warm_up = min(m, pp - 1 - rank)
    made: list[Pass | list[Message]] = []
    for k in range(warm_up):
        made += [*border((above, "activation", k)), ("F", k, 0), *border((below, "activation", k))]
    if warm_up < m:
        made += border((above, "activation", warm_up))
    for k in range(m - warm_up):
        made += [("F", warm_up + k, 0), *border((below, "activation", warm_up + k), (below, "gradient", k)), ("B", k, 0)]
        last = warm_up + k + 1 == m
        made += border((above, "gradient", k)) if last else border((above, "gradient", k), (above, "activation", warm_up + k + 1))
    for k in range(m - warm_up, m):
        made += [*border((below, "gradient", k)), ("B", k, 0), *border((above, "gradient", k))]
    return made


def walk_1f1b(f: list[float], b: list[float], hops: list[float], m: int, *, half_duplex: bool) -> list[float]:
    """Events: a message is on its way from when both sides have called for it, each direction of a border by itself; a call is over when
    all of its messages are there. `half_duplex`: they go one after the other."""
    pp = len(f)
    lists = [calls_1f1b(rank, m, pp) for rank in range(pp)]
    asked: dict[tuple[Message, int], float] = {}
    clock, position = [0.0] * pp, [0] * pp
    moving = True
    while moving:
        moving = False
        for rank in range(pp):
            while position[rank] < len(lists[rank]):
                one = lists[rank][position[rank]]
                if isinstance(one, tuple):
                    clock[rank] += f[rank] if one[0] == "F" else b[rank]
                else:
                    for message in one:
                        moving |= (message, rank) not in asked
                        asked.setdefault((message, rank), clock[rank])
                    sides = [[asked.get((message, side)) for side in (message[0], message[0] + 1)] for message in one]
                    if any(time is None for both in sides for time in both):
                        break
                    begun = [max(filter(None, both), default=0.0) for both in sides]
                    lasts = len(one) if half_duplex else 1
                    clock[rank] = max(begin + lasts * hops[border] for begin, (border, *_) in zip(begun, one, strict=True))
                position[rank] += 1
                moving = True
    assert all(at == len(made) for at, made in zip(position, lists, strict=True)), "deadlock"
    return clock


def walk(schedule: str, f: list[float], b: list[float], hops: list[float], m: int, vpp: int, group: int | None = None) -> list[float]:
    """Every rank runs its list in order. Interleaved a pass waits for what it needs; else calls of the communicator block. Nothing is
    assumed of the schedule."""
    if schedule.startswith("1f1b"):
        return walk_1f1b(f, b, hops, m, half_duplex=schedule == "1f1b_half_duplex")
    pp, last = len(f) // vpp, len(f) - 1
    lists = [order_interleaved(rank, m, pp, vpp, group) for rank in range(pp)]
    ends: dict[tuple[str, int, int], float] = {}
    clock, position = [0.0] * pp, [0] * pp
    left = sum(len(passes) for passes in lists)
    while left:
        before = left
        for rank in range(pp):
            while position[rank] < len(lists[rank]):
                name, microbatch, chunk = lists[rank][position[rank]]
                i = chunk * pp + rank
                if name == "F":
                    arrives = ends.get(("F", microbatch, i - 1), None if i else 0.0)
                    hop = hops[i - 1] if i else 0.0
                else:
                    arrives = ends.get(("F", microbatch, i)) if i == last else ends.get(("B", microbatch, i + 1))
                    hop = 0.0 if i == last else hops[i]
                if arrives is None:
                    break
                clock[rank] = max(clock[rank], arrives + hop) + (f[i] if name == "F" else b[i])
                ends[name, microbatch, i] = clock[rank]
                position[rank] += 1
                left -= 1
        assert left < before, "deadlock"
    return clock


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[str, list[float], list[float], list[float], int, int]:
    pp, vpp = draw(st.integers(2, 6)), draw(st.sampled_from([1, 1, 2, 3]))
    m = draw(st.integers(1, 50)) if vpp == 1 else pp * draw(st.integers(1, 8))
    rng = random.Random(draw(st.integers(0, 10**6)))
    equal = draw(st.booleans())
    f = [1.0 if equal else rng.uniform(0.1, 1) for _ in range(pp * vpp)]
    b = [2.0 if equal else rng.uniform(0.1, 2) for _ in range(pp * vpp)]
    hops = [rng.uniform(0, 0.3) if draw(st.booleans()) else 0.0 for _ in range(pp * vpp)]
    flat = draw(st.sampled_from(["1f1b", "1f1b_half_duplex"]))
    return (flat if vpp == 1 else "interleaved"), f, b, hops, m, vpp


@given(pipelines())
@settings(deadline=None, max_examples=150)
def test_both_schedules_equal_the_walk_of_the_ranks_own_lists(
    pipeline: tuple[str, list[float], list[float], list[float], int, int],
) -> None:
    expected = walk(*pipeline)
    assert finish_times(*pipeline, jump=False) == pytest.approx(expected, rel=1e-12)
    assert finish_times(*pipeline) == pytest.approx(expected, rel=1e-9)


Grouped = tuple[str, list[float], list[float], list[float], int, int, int]


@st.composite
def grouped(draw: st.DrawFn) -> Grouped:
    """Pipelines in groups of more than pp micro-batches, the last of which may be smaller; few values or many, few groups or many."""
    pp, vpp = draw(st.integers(2, 5)), draw(st.integers(2, 3))
    group = pp + draw(st.integers(0, pp + 2))
    last = draw(st.sampled_from([0, *range(pp, group)]))
    m = group * draw(st.one_of(st.integers(1, 4), st.integers(5, 40))) + last
    rng = random.Random(draw(st.integers(0, 10**6)))
    few = draw(st.booleans())

    def times(values: list[float]) -> list[float]:
        return [rng.choice(values) if few else rng.uniform(min(values), max(values)) for _ in range(pp * vpp)]

    forward, hops = times([1.0, 1.0, 1.001, 1.03, 1.5, 4.0]), times([0.0, 0.0, 0.01, 0.4, 2.0])
    return "interleaved", forward, [2 * t for t in times([1.0, 1.0, 1.001, 1.5, 4.0])], hops, m, vpp, group


@given(grouped())
@settings(deadline=None, max_examples=250)
def test_groups_of_micro_batches_equal_the_walk_of_the_ranks_own_lists(pipeline: Grouped) -> None:
    expected = walk(*pipeline)
    assert finish_times(*pipeline, jump=False) == pytest.approx(expected, rel=1e-12)
    assert finish_times(*pipeline) == pytest.approx(expected, rel=1e-9)
    lanes = timeline(*pipeline)
    assert [lane[-1].end_s for lane in lanes] == pytest.approx(expected, rel=1e-9)


@given(grouped(), st.floats(0.5, 1.2), st.integers(0, 4))
@settings(deadline=None, max_examples=250)
def test_a_walk_that_stops_above_its_limits_undercuts_no_end_and_says_that_they_are_missed(
    pipeline: Grouped, share: float, rank: int
) -> None:
    """Of a rank the limit is a share of its end; the others have none."""
    ends = walk(*pipeline)
    limits = [share * end if index == rank else math.inf for index, end in enumerate(ends)]
    found = finish_times(*pipeline, limits=limits)
    assert all(one <= end * (1 + 1e-9) for one, end in zip(found, ends, strict=True))
    if found != pytest.approx(ends, rel=1e-9):
        assert any(one > limit for one, limit in zip(found, limits, strict=True))


def test_a_limit_far_below_the_end_stops_the_walk() -> None:
    """Transfers as long as three passes make every rank wait in every period: what is known after the first is far from the end."""
    pipeline = ("interleaved", [1.0] * 8, [2.0] * 8, 9.0, 400, 2)
    stopped, ends = finish_times(*pipeline, limits=[1000.0] * 4), finish_times(*pipeline)
    assert 1000 < max(stopped) < 0.9 * max(ends)
    assert finish_times(*pipeline, limits=[max(ends)] * 4) == ends
    assert all(above >= below + 9.0 + 2.0 for above, below in pairwise(stopped)), "the last gradient goes up from rank to rank"


def test_groups_of_pp_micro_batches_are_the_default() -> None:
    rng = random.Random(3)
    f, b, hops = ([rng.uniform(1, 2) for _ in range(12)] for _ in range(3))
    assert finish_times("interleaved", f, b, hops, 40, 3, 4) == finish_times("interleaved", f, b, hops, 40, 3)


def test_a_trillion_micro_batches_in_groups_are_jumped_over() -> None:
    """As with groups of pp: (m + (p-1)/v) (f + b). The last group has 4 of 7."""
    m, pp, vpp = 10**12 - 10**12 % 7 + 4, 4, 2
    step = simulate("interleaved", [0.5] * 8, [1.0] * 8, 0.0, m, vpp, 7)
    assert step == pytest.approx((m + (pp - 1) / vpp) * 3.0, rel=1e-9)


def test_larger_groups_hide_transfers_and_hold_more() -> None:
    """A micro-batch comes around to its next chunk N - pp passes before its turn."""
    steps = [simulate("interleaved", [1.0] * 8, [2.0] * 8, 0.3, 24, 2, group) for group in (4, 6)]
    assert steps[1] < steps[0]
    assert in_flight("interleaved", 4, 0, 24, 2, 6) == in_flight("interleaved", 4, 0, 24, 2, 4) + 2


@pytest.mark.parametrize(
    ("pp", "vpp", "m", "group"),
    [(2, 2, 5, 3), (4, 2, 6, 6), (4, 2, 22, 6), (3, 3, 18, 5), (4, 3, 50, 7), (2, 2, 41, 3), (2, 3, 6, 4), (2, 4, 9, 3)],
)
def test_in_flight_counts_in_groups_equal_the_ranks_own_lists(pp: int, vpp: int, m: int, group: int) -> None:
    rng = random.Random(m)
    for rank in range(pp):
        weights = [[rng.random() ** 3 for _ in range(vpp)] for _ in range(40)]  # chunks that weigh much more than others, too
        held, peaks = [0] * vpp, list[list[int]]()
        for name, _, chunk in order_interleaved(rank, m, pp, vpp, group):
            held[chunk] += 1 if name == "F" else -1
            peaks.append(held[:])
        found = in_flight_by_chunk("interleaved", pp, rank, m, vpp, group)
        assert {tuple(peak) for peak in peaks} >= set(found)
        assert fewest_by_stage("interleaved", pp, m, vpp, group)[rank] == max(map(min, peaks)) == max(map(min, found))
        for weight in weights:
            heaviest, ours = (max(sum(map(mul, counts, weight)) for counts in given) for given in (peaks, found))
            assert ours == pytest.approx(heaviest)
        assert in_flight("interleaved", pp, rank, m, vpp, group) == max(map(sum, peaks))
        warm_up = 2 * (pp - rank - 1) + (vpp - 1) * group
        assert max(map(sum, peaks)) == min(m * vpp, warm_up + 1)


@pytest.mark.engines
def test_an_order_in_groups_is_megatrons_own_schedule_table() -> None:
    """megatron-core's get_schedule_table and its number of warm-up passes, over every group that it takes."""
    from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

    class Stage:
        """What get_pp_rank_microbatches asks of a communicator."""

        def __init__(self, pp: int, rank: int, vpp: int) -> None:
            self.pp_group, self.pp, self.rank_, self.virtual_pipeline_model_parallel_size = self, pp, rank, vpp

        def size(self) -> int:
            return self.pp

        def rank(self) -> int:
            return self.rank_

    seen = 0
    for pp, vpp, m in itertools.product((2, 3, 4), (2, 3), range(2, 15)):
        for group in range(pp, m + 1):
            if of_chunks("interleaved", vpp, group).why_not(pp, m, vpp) is not None:
                continue
            seen += 1
            table = get_schedule_table(m, vpp, group)
            for rank in range(pp):
                passes = list(of_chunks("interleaved", vpp, group).order(pp, rank, m, vpp))
                assert [(n, chunk) for action, n, chunk in passes if action == "forward"] == table
                assert [(n, vpp - 1 - chunk) for action, n, chunk in passes if action == "backward"] == table
                warm_up = get_pp_rank_microbatches(m, vpp, group, p2p_communicator=Stage(pp, rank, vpp))[2]
                first = next(index for index, one in enumerate(passes) if one.action == "backward")
                assert first == min(m * vpp, warm_up + 1)
    assert seen > 100


@pytest.mark.parametrize(("pp", "vpp", "m"), [(2, 1, 1), (4, 1, 3), (6, 1, 20), (2, 2, 4), (4, 2, 8), (4, 3, 4), (3, 2, 24)])
def test_a_schedules_order_is_megatrons_list_of_passes(pp: int, vpp: int, m: int) -> None:
    schedule = SCHEDULES["interleaved" if vpp > 1 else "1f1b"]
    for rank in range(pp):
        order = schedule.order(pp, rank, m, vpp)
        ours = [(action[0].upper(), microbatch, chunk) for action, microbatch, chunk in order if action in ("forward", "backward")]
        assert ours == (order_interleaved if vpp > 1 else order_1f1b)(rank, m, pp, vpp)


@given(pipelines(), st.booleans())
@settings(deadline=None, max_examples=100)
def test_a_step_ends_where_the_timeline_of_the_orders_ends(
    pipeline: tuple[str, list[float], list[float], list[float], int, int], blocks: bool
) -> None:
    schedule, f, b, hops, m, vpp = pipeline
    if blocks and vpp == 1:
        schedule = "deepspeed_1f1b"
    lanes = timeline(schedule, f, b, hops, m, vpp)
    assert [lane[-1].end_s for lane in lanes] == pytest.approx(finish_times(schedule, f, b, hops, m, vpp), rel=1e-9)
    for lane in lanes:  # a stage does one thing at a time
        assert all(before.end_s <= after.begin_s + 1e-12 for before, after in itertools.pairwise(lane))
        passes = [slot for slot in lane if slot.action in ("forward", "backward")]
        assert len(passes) == 2 * m * vpp


def test_over_a_slow_link_two_micro_batches_take_three_transfers_each_way_but_one() -> None:
    """Two stages of 1 s forward and 2 s backward, 10 s a transfer: forward, down, forward, meanwhile both passes behind; then an exchange;
    both passes behind, up, and the last backward. Were transfers only delays, the second activation would go down beside the first."""
    assert simulate("1f1b", [1.0, 1.0], [2.0, 2.0], 10.0, 2) == 1 + 10 + 3 + 10 + 3 + 10 + 2
    assert [one.transfers(2, 0, 2)[1] for one in SCHEDULES.values()] == [3, 4, 0, 4]


@pytest.mark.parametrize("schedule", ["1f1b", "1f1b_half_duplex", "deepspeed_1f1b"])
@pytest.mark.parametrize(("pp", "m"), [(2, 1), (2, 5), (4, 1), (4, 3), (4, 4), (5, 12)])
def test_the_transfers_that_block_a_stage_are_those_of_its_order(schedule: str, pp: int, m: int) -> None:
    for stage in range(pp):
        actions = [one.action for one in SCHEDULES[schedule].order(pp, stage, m)]
        up = sum(action in ("receive_activation", "send_gradient", "exchange_previous") for action in actions)
        down = sum(action in ("send_activation", "receive_gradient", "exchange_next") for action in actions)
        if SCHEDULES[schedule].half_duplex:  # an exchange takes two
            up, down = up + actions.count("exchange_previous"), down + actions.count("exchange_next")
        assert SCHEDULES[schedule].transfers(pp, stage, m) == (up, down)


@st.composite
def nearly_periodic(draw: st.DrawFn) -> tuple[str, list[float], list[float], list[float], int, int]:
    """Times out of a few values: ties, one slow stage, slow links; long enough to be jumped over."""
    schedule = draw(st.sampled_from(["1f1b", "1f1b_half_duplex", "interleaved", "deepspeed_1f1b"]))
    pp = draw(st.integers(2, 6))
    vpp = draw(st.integers(2, 3)) if schedule == "interleaved" else 1
    m = pp * draw(st.integers(2, 40)) + (0 if vpp > 1 else draw(st.integers(0, 5)))
    times = st.lists(st.sampled_from([1.0, 1.0, 1.001, 1.03, 1.5, 4.0]), min_size=pp * vpp, max_size=pp * vpp)
    links = st.lists(st.sampled_from([0.0, 0.0, 0.01, 0.4, 2.0]), min_size=pp * vpp, max_size=pp * vpp)
    return schedule, draw(times), [2 * t for t in draw(times)], draw(links), m, vpp


@given(nearly_periodic())
@settings(deadline=None, max_examples=250)
def test_jumping_over_periods_never_changes_any_stages_end(
    pipeline: tuple[str, list[float], list[float], list[float], int, int],
) -> None:
    assert finish_times(*pipeline) == pytest.approx(finish_times(*pipeline, jump=False), rel=1e-10)


@pytest.mark.parametrize(("schedule", "vpp"), [("1f1b", 1), ("deepspeed_1f1b", 1), ("interleaved", 2)])
def test_a_trillion_micro_batches_are_jumped_over(schedule: str, vpp: int) -> None:
    """Equal stages: (m + (p-1)/v) (f + b). Walked, this would take months."""
    m, pp = 10**12, 4
    step = simulate(schedule, [1.0 / vpp] * pp * vpp, [2.0 / vpp] * pp * vpp, 0.0, m, vpp)
    assert step == pytest.approx((m + (pp - 1) / vpp) * 3.0, rel=1e-9)


def test_a_slow_second_stage_sets_the_pace_of_all() -> None:
    """From its first pass to its last it never waits: 1 s of forward to it, 11 s for each micro-batch, 2 s of backward behind it. Its last
    forward ends three of its backward passes (18 s) before its end; the stages after it are through when their last gradient is taken: the
    next one when the slow stage begins its last backward pass, the one behind it when that begins the one before."""
    for m in (8, 9, 1000):
        end = 1 + 11 * m
        assert finish_times("1f1b", [1, 5, 1, 1], [2, 6, 2, 2], 0.0, m) == pytest.approx([end + 2, end, end - 6, end - 12])


def test_a_state_that_moved_as_one_has_a_shift_and_one_that_drifts_has_steps() -> None:
    assert shift([10.0, 12.0, 11.0], [7.0, 9.0, 8.0]) == 3.0
    assert shift([10.0, 12.5, 11.0], [7.0, 9.0, 8.0]) is None
    assert shift([10.0, 12.0, 11.5], [7.0, 9.0, 8.0]) is None
    blocks = [([0.0, 0.0], [9.0, -1.0]), ([10.0, 11.0], [7.0, -1.0]), ([20.0, 22.0], [5.0, -1.0])]
    assert drift(blocks) == (1, [10.0, 11.0])  # the margin is 3, then 1, then -1: one period is safe, and one more is walked
    assert drift(blocks[:2]) == (0, [])
    assert drift([*blocks, ([31.0, 33.0], [3.0, -1.0])])[0] == 0  # it moved by 11 and not by 10
    assert drift([*blocks[:2], ([20.0, 22.0], [-5.0, -1.0])])[0] == 0  # a margin has changed its sign


@pytest.mark.parametrize(("pp", "vpp", "m"), [(8, 1, 1024), (3, 1, 999), (4, 2, 512), (5, 3, 400)])
def test_jumping_over_periods_changes_nothing_with_many_micro_batches(pp: int, vpp: int, m: int) -> None:
    rng = random.Random(pp)
    for spread in (0.0, 0.02, 0.5):
        f = [1 + rng.uniform(0, spread) for _ in range(pp * vpp)]
        b = [2 + rng.uniform(0, spread) for _ in range(pp * vpp)]
        schedule = "interleaved" if vpp > 1 else "1f1b"
        plain = finish_times(schedule, f, b, 0.01, m, vpp, jump=False)
        assert finish_times(schedule, f, b, 0.01, m, vpp) == pytest.approx(plain, rel=1e-9)


@given(pp=st.integers(1, 16), m=st.integers(1, 64), t=st.floats(0.01, 10))
def test_the_bubble_of_equal_stages_is_p_minus_1_over_m(pp: int, m: int, t: float) -> None:
    """Narayanan et al. (arXiv 2104.04473), section 2.2.1."""
    step = simulate("1f1b", [t] * pp, [2 * t] * pp, 0.0, m)
    assert step / (m * 3 * t) - 1 == pytest.approx((pp - 1) / m, rel=1e-9, abs=1e-9)


@given(pp=st.integers(2, 8), vpp=st.integers(2, 4), groups=st.integers(1, 6), t=st.floats(0.01, 10))
def test_the_interleaved_bubble_is_p_minus_1_over_m_v(pp: int, vpp: int, groups: int, t: float) -> None:
    """Narayanan et al. (arXiv 2104.04473), section 2.2.2."""
    m = pp * groups
    step = simulate("interleaved", [t] * (pp * vpp), [2 * t] * (pp * vpp), 0.0, m, vpp)
    assert step / (m * vpp * 3 * t) - 1 == pytest.approx((pp - 1) / (m * vpp), rel=1e-9)


@given(pipelines())
@settings(deadline=None, max_examples=100)
def test_no_step_is_shorter_than_a_stages_work_and_the_way_to_it(
    pipeline: tuple[str, list[float], list[float], list[float], int, int],
) -> None:
    schedule, f, b, hops, m, vpp = pipeline
    step = simulate(schedule, f, b, hops, m, vpp)
    pp = len(f) // vpp
    if vpp == 1:
        assert step >= max(sum(f[:i]) + sum(b[:i]) + m * (f[i] + b[i]) for i in range(pp)) * (1 - 1e-12)
    assert step >= max(m * sum(f[i::pp] + b[i::pp]) for i in range(pp)) * (1 - 1e-12)
    assert step >= (sum(f) + sum(b)) * (1 - 1e-12)


@given(pipelines(), st.integers(0, 17), st.floats(0, 1))
@settings(deadline=None, max_examples=100)
def test_a_slower_pass_or_link_never_ends_sooner(
    pipeline: tuple[str, list[float], list[float], list[float], int, int], where: int, more: float
) -> None:
    schedule, f, b, hops, m, vpp = pipeline
    before = simulate(schedule, f, b, hops, m, vpp)
    for values in (f, b, hops):
        changed = [value + more if i == where % len(values) else value for i, value in enumerate(values)]
        arguments = [changed if values is other else other for other in (f, b, hops)]
        assert simulate(schedule, arguments[0], arguments[1], arguments[2], m, vpp) >= before * (1 - 1e-9)


@pytest.mark.parametrize(("pp", "m"), [(2, 64), (8, 1024), (5, 333)])
def test_jumping_changes_nothing_under_deepspeed(pp: int, m: int) -> None:
    rng = random.Random(m)
    f, b, hops = ([rng.uniform(low, high) for _ in range(pp)] for low, high in ((1, 1.1), (2, 2.2), (0, 0.1)))
    plain = finish_times("deepspeed_1f1b", f, b, hops, m, jump=False)
    assert finish_times("deepspeed_1f1b", f, b, hops, m) == pytest.approx(plain, rel=1e-9)


def test_without_transfers_equal_stages_end_as_in_1f1b_under_deepspeed() -> None:
    assert simulate("1f1b", [1.0] * 4, [2.0] * 4, 0.0, 64) == simulate("deepspeed_1f1b", [1.0] * 4, [2.0] * 4, 0.0, 64)


@pytest.mark.parametrize(("pp", "vpp", "m"), [(2, 1, 1), (4, 1, 3), (6, 1, 20), (2, 2, 4), (4, 2, 8), (4, 3, 4), (3, 2, 24)])
def test_in_flight_counts_equal_the_ranks_own_lists(pp: int, vpp: int, m: int) -> None:
    schedule = "interleaved" if vpp > 1 else "1f1b"
    rng = random.Random(0)
    for rank in range(pp):
        weight = [rng.random() for _ in range(vpp)]
        held = [0] * vpp
        most, heaviest = 0, 0.0
        for name, _, chunk in (order_interleaved if vpp > 1 else order_1f1b)(rank, m, pp, vpp):
            held[chunk] += 1 if name == "F" else -1
            most = max(most, sum(held))
            heaviest = max(heaviest, sum(n * w for n, w in zip(held, weight, strict=True)))
        assert in_flight(schedule, pp, rank, m, vpp) == most
        peaks = in_flight_by_chunk(schedule, pp, rank, m, vpp)
        assert max(sum(n * w for n, w in zip(counts, weight, strict=True)) for counts in peaks) == pytest.approx(heaviest)
        assert 1 <= fewest_by_stage(schedule, pp, m, vpp)[rank] * vpp <= most
        assert not any(one != other and all(map(le, one, other)) for one in peaks for other in peaks), "one covers another"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_more_micro_batches_than_repeat_hold_no_more(schedule: str) -> None:
    for pp in (2, 3, 5):
        vpp = 3 if SCHEDULES[schedule].has_chunks else 1
        for stage in range(pp):
            enough = in_flight_by_chunk(schedule, pp, stage, SCHEDULES[schedule].telling(pp, pp * 9), vpp)
            lists = [list(SCHEDULES[schedule].order(pp, stage, pp * 9, vpp))]
            held, most = [0] * vpp, 0
            for action, _, chunk in lists[0]:
                held[chunk] += {"forward": 1, "backward": -1}.get(action, 0)
                most = max(most, sum(held))
            assert max(map(sum, enough)) == most
            assert in_flight_by_chunk(schedule, pp, stage, pp * 9, vpp) == enough


def test_groups_hold_at_least_a_micro_batch_a_stage_the_last_one_too() -> None:
    """Megatron's rule (schedules.py:996 and 1007): of pp to m micro-batches, and the last group has none left or pp."""
    for pp, m, size in itertools.product(range(1, 6), range(1, 13), [None, *range(1, 14)]):
        group = size or pp
        left = m % group
        legal = pp <= group <= m and (left == 0 or left >= pp)
        assert (Interleaved(size).why_not(pp, m, 2) is None) == legal, (pp, m, size)


def test_interleaving_needs_whole_groups() -> None:
    with pytest.raises(ValueError, match="num_microbatches=6 is not a multiple of pp=4"):
        simulate("interleaved", [1.0] * 8, [1.0] * 8, 0.0, 6, 2)
    with pytest.raises(ValueError, match="leaves 3 to the last group of 7, fewer than pp=4"):
        simulate("interleaved", [1.0] * 8, [1.0] * 8, 0.0, 10, 2, 7)
    for size in (3, 11):
        with pytest.raises(ValueError, match=f"groups of {size} micro-batches are not of pp=4 to num_microbatches=10"):
            simulate("interleaved", [1.0] * 8, [1.0] * 8, 0.0, 10, 2, size)
    with pytest.raises(ValueError, match="schedule=1f1b with vpp=1 has no groups"):
        simulate("1f1b", [1.0] * 4, [1.0] * 4, 0.0, 10, 1, 5)
    with pytest.raises(ValueError, match="choose one of"):
        simulate("gpipe", [1.0] * 2, [1.0] * 2, 0.0, 6)
