"""The words and tables of report.html have the plan's own numbers; what is drawn of ranks, moments and candidates is there."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace
from report_plans import PLAN, PREDICTED, SLOWER, llama

import orchestrator as so
from orchestrator.plan import Plan
from orchestrator.planning import Planner
from orchestrator.report import page
from orchestrator.report.after import After
from orchestrator.strategy.pins import MemoryLimit
from orchestrator.strategy.tree import Outcome
from orchestrator.units import GIB

LIMIT = MemoryLimit(limit=80 * GIB, reserve=0)


class Costs:
    """Of candidates: no plan is faster than 5 s."""

    @staticmethod
    def time_floor(candidate: object) -> float:
        return 5.0


def shown(plan: Plan = PLAN, **fields: Any) -> page.Shown:
    return page.Shown(plan=plan, model=llama(), costs=Costs(), **{"limit": LIMIT, **fields})  # type: ignore[arg-type]


def cells(table: str) -> list[list[str]]:
    rows = re.findall(r"<tr>(.*?)</tr>", table)
    return [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in rows if "<td" in row]


# ---- ranks


@pytest.mark.parametrize("order", [("tp", "cp", "ep", "dp", "pp"), ("tp", "cp", "ep", "pp", "dp"), ("pp", "tp", "cp", "ep", "dp")])
@pytest.mark.parametrize(("tp", "pp", "dp"), [(4, 4, 4), (2, 3, 5), (1, 4, 2), (1, 1, 6), (2, 1, 1), (1, 4, 1)])
def test_every_rank_is_in_the_stage_whose_ranks_name_it(order: tuple[str, ...], tp: int, pp: int, dp: int) -> None:
    plan = replace(PLAN, tp=tp, pp=pp, dp=dp, world_size=tp * pp * dp, rank_order=order)
    places = [page.coordinates(plan, rank) for rank in range(plan.world_size)]
    assert len({tuple(sorted(place.items())) for place in places}) == plan.world_size
    assert all(len(place) == sum(degree > 1 for degree in (tp, pp, dp)) for place in places)
    for stage in range(pp):
        mine = [rank for rank, place in enumerate(places) if place.get("pp", 0) == stage]
        assert spoken(page.ranks_of(plan, stage), plan.world_size) == mine


def spoken(text: str, world: int) -> list[int]:
    """The ranks that "3", "0 to 7", "0 to 3 of every 16", "1, 5" or "1, 5 ... 13" names."""
    found = list(map(int, re.findall(r"\d+", text)))
    if "of every" in text:
        first, last, every = found
        return sorted(rank + start for start in range(0, world, every) for rank in range(first, last + 1))
    if "," in text and "..." not in text:
        return found
    if "..." in text:
        first, second, last = found
        return list(range(first, last + 1, second - first))
    return list(range(found[0], found[-1] + 1))


def test_ranks_that_are_not_drawn_are_said() -> None:
    many = replace(PLAN, world_size=page.MOST_RANKS + 64)
    assert f"The first {page.MOST_RANKS} of {page.MOST_RANKS + 64} ranks." in page.rank_words(many)
    assert "The first" not in page.rank_words(replace(PLAN, world_size=page.MOST_RANKS))


# ---- words


def test_the_head_says_how_much_is_free_or_lacking() -> None:
    text = page.head(shown(), "t")
    assert ">fits</strong>: 70.0 GiB of 80.0 GiB usable, 12.5% of it free" in text
    assert "fits</strong>: 70.0 GiB of 70.0 GiB usable, 0.0% of it free" in page.head(
        shown(limit=MemoryLimit(limit=70 * GIB, reserve=0)), "t"
    )
    lacking = page.head(shown(limit=MemoryLimit(limit=66 * GIB, reserve=2 * GIB)), "t")
    assert ">does not fit</strong>: 70.0 GiB of 64.0 GiB usable, lacks 6.0 GiB" in lacking
    crowded = MemoryLimit(limit=66 * GIB, reserve=2 * GIB)
    assert ">may not fit</strong>: 70.0 GiB of 64.0 GiB usable, lacks 6.0 GiB, 23% chance of running out" in page.head(
        shown(limit=crowded, chance=0.234), "t"
    )
    assert ">does not fit</strong>" in page.head(shown(limit=crowded, chance=0.7), "t")
    assert "no interval: no run like this was measured" in text
    assert "a step (90%: 11 to 13)" in page.head(shown(replace(PLAN, predicted=replace(PREDICTED, interval=(11.0, 13.0)))), "t").replace(
        "</strong>", ""
    )


def test_causes_stand_from_the_largest_with_their_shares_and_sum_to_the_step() -> None:
    rows = cells(page.cause_table(PLAN))
    assert rows[0] == ["compute", "9 s", "75.0%"]
    assert rows[1] == ["tp traffic", "1.5 s", "12.5%"]
    assert rows[-1] == ["total", "12 s", "100.0%"]
    assert len(rows) == len(PREDICTED.by_cause) + 1
    rounded = replace(PLAN, predicted=replace(PREDICTED, by_cause={**PREDICTED.by_cause, "overlap": -2.2e-16}))
    assert cells(page.cause_table(rounded)) == rows, "what is left by rounding is no cause"


def test_memory_of_each_stage_is_in_gib_by_cause() -> None:
    table = page.memory_table(shown())
    assert "usable: 80.00" in table
    rows = cells(table)
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    assert [row[-2] for row in rows] == ["70.00", "60.00", "60.00", "58.00"]
    assert [row[-1] for row in rows] == ["backward"] * 4
    assert [row[1:3] for row in rows] == [["8.00", "16.00"]] * 4


def right(table: str) -> list[bool]:
    """Which columns are aligned right."""
    heads = re.findall(r'<th scope="col"( class="number")?>', table)
    (first, *_) = re.findall(r"<tbody><tr>(.*?)</tr>", table)
    assert [bool(mark) for mark in re.findall(r"<td( class=\"number\")? data-is", first)] == [bool(mark) for mark in heads]
    return [bool(mark) for mark in heads]


def test_columns_of_numbers_and_no_others_are_aligned_right() -> None:
    """Of memory: the stage and the phase are none, each cause and the peak are."""
    assert right(page.memory_table(shown())) == [False, *[True] * 6, False]
    assert right(page.cause_table(PLAN)) == [False, True, True]
    after = After(steps=(4,), ranks=1, causes={"compute": (1.0, 0.0)}, slow_ranks=(), slow_links=(), constants={})
    assert right(page.after_part(after)) == [False, True, True]
    rows = [{"step": step, "step_time_s": 15.0} for step in range(9)]
    assert right(page.measured_section(shown(rows=rows), None)) == [False, True, True, True]
    section = page.candidates_section(page.drawn_of(shown(outcomes=outcomes(), floor=lambda candidate: 33.0)), "")
    nearest, rules = section.split("Rules that cut branches")
    assert right(nearest) == [False, True, True, False]
    assert right(rules) == [False, False, True]


def test_a_table_escapes_and_aligns_its_numbers() -> None:
    table = page.table("<c>", ("a", "b"), [("<x>", 1)], (1,))
    assert "<caption>&lt;c&gt;</caption>" in table
    assert '<td data-is="a">&lt;x&gt;</td><td class="number" data-is="b">1</td>' in table, "a narrow page says the heading in each cell"
    assert '<th scope="col">a</th><th scope="col" class="number">b</th>' in table


def test_time_at_work_waiting_and_updating_is_the_step() -> None:
    answer = so.plan(recipe="gpt_tiny", gpus=4, cluster="cpu", pin={"pp": 2, "tp": 1})
    costs = Planner(answer.settings).prices_of(answer.plan).costs(answer.plan)
    of = page.Shown(plan=answer.plan, model=llama(), limit=LIMIT, costs=costs)
    step = costs.played(answer.plan.candidate, answer.plan.stages)
    table = page.timeline_table(of, step)
    for index, row in enumerate(cells(table)):
        busy = sum(slot.end_s - slot.begin_s for slot in step.lanes[index])
        waits = step.total_s - busy - step.exposed_s[index] - step.optimizer_s - step.once_s
        assert row[2].endswith(f"({100 * waits / step.total_s:.1f}%)")
        assert waits >= -1e-9
    assert f"most {'chunks of ' * (answer.plan.vpp > 1)}micro-batches in flight" in table
    for row in cells(page.memory_table(of)):
        assert sum(map(float, row[1:-2])) == pytest.approx(float(row[-2]), abs=0.03), "every cause has its column"
    for stage in range(2):
        kept = page.moments(of, step, stage)
        peak = max(sum(causes.values()) for *_, causes in kept)
        assert answer.predicted is not None
        assert peak == pytest.approx(answer.predicted.by_stage[stage].peak_memory_bytes)
        assert all(begin <= end for begin, end, _ in kept)
        assert all(one[1] <= other[0] + 1e-9 for one, other in pairwise(kept))


# ---- candidates


def outcomes() -> list[Outcome]:
    other, slower = replace(PLAN, tp=2, dp=8).candidate, SLOWER.candidate
    return [
        Outcome(candidate=slower, step_time_s=13.44, peak_memory_bytes=50.0 * GIB, reason="slower"),
        Outcome(candidate=PLAN.candidate, step_time_s=12.0, peak_memory_bytes=70.0 * GIB),
        Outcome(candidate=other, at_least_s=20.0, reason="its bound"),
        Outcome(candidate=slower, at_least_s=15.0, reason="nearer"),
        Outcome(candidate=other, peak_memory_bytes=95.0 * GIB, reason="too large"),
        Outcome(candidate=slower, peak_memory_bytes=90.0 * GIB, reason="less so"),
        Outcome(candidate=replace(other, engine="deepspeed"), peak_memory_bytes=85.0 * GIB, reason="another engine's costs"),
        *[Outcome(candidate=other, decided=("pp",), reason="r", rule="one") for _ in range(2)],
        *[Outcome(candidate=other, decided=("pp",), reason="s", rule="two") for _ in range(3)],
    ]


def test_candidates_are_drawn_the_fastest_first_then_by_their_bounds_then_by_what_they_lack() -> None:
    points = page.candidate_points(shown(outcomes=outcomes(), floor=lambda candidate: 33.0))
    assert [point[1:] for point in points] == [
        (12.0, 70.0 * GIB, "priced", "the plan"),
        (13.44, 50.0 * GIB, "priced", "12.0% slower"),
        (15.0, 33.0, "slower", "nearer"),
        (20.0, 33.0, "slower", "its bound"),
        (5.0, 90.0 * GIB, "lacks memory", "less so"),
        (5.0, 95.0 * GIB, "lacks memory", "too large"),
    ]
    assert [point[3] for point in page.candidate_points(shown(outcomes=outcomes()))] == ["priced"] * 2, "nothing is known of the others"


def test_rules_are_counted_the_most_frequent_first() -> None:
    drawn = page.drawn_of(shown(outcomes=outcomes()))
    assert (drawn.total, drawn.ruled) == (12, (("megatron", "s", 3), ("megatron", "r", 2)))
    section = page.candidates_section(page.drawn_of(shown(outcomes=outcomes(), floor=lambda candidate: 33.0)), "")
    rows = cells(section)
    assert [row[1] for row in rows[:3]] == ["12 s", "13.4 s", "at least 15 s"]
    assert "12 choices; drawn are" in section
    assert "The nearest 6" in section


def test_what_was_measured_stands_beside_what_was_predicted() -> None:
    rows = [{"step": step, "step_time_s": 15.0, "peak_memory_bytes": 77 * GIB} for step in range(9)]
    section = page.measured_section(shown(rows=rows), None)
    assert cells(section) == [["step", "12 s", "15 s", "1.25"], ["memory", "70.0 GiB", "77.0 GiB", "1.10"]]
    assert page.measured_section(shown(), None) == ""
    without = [{"step": step, "step_time_s": 15.0} for step in range(9)]
    assert len(cells(page.measured_section(shown(rows=without), None))) == 1
    after = After(steps=(4,), ranks=1, causes={"compute": (1.0, 0.0)}, slow_ranks=(), slow_links=(), constants={})
    assert cells(page.after_part(after)) == [["compute", "1 s", "-"]]
