"""The k best of a search: what is among them, what can't be any more, ties; and how the others are listed."""

from __future__ import annotations

import math
import random

import pytest
from instances import Instance
from msgspec.structs import replace

from orchestrator.errors import NoPlanError
from orchestrator.search.inner import Solution
from orchestrator.search.planner import (
    REJECTED_IN_PLAN,
    ROUNDING,
    Choice,
    _Best,
    _in_order,
    _percent,
    _rejected,
    _Search,
    _Space,
    search,
)
from orchestrator.strategy.spec import Candidate, Mesh, Strategy
from orchestrator.strategy.tree import LEVELS, Leaf, Outcome

CANDIDATE = Candidate(engine="x", strategy=Strategy(mesh=Mesh()), micro_batch_size=1, num_microbatches=1)


def solution(seconds: float) -> Solution:
    return Solution(CANDIDATE, (), seconds, 0.0)


def choice(order: int) -> Choice:
    return Choice(order, 0, Leaf(CANDIDATE, ("none",)))


def ranked(best: _Best) -> list[tuple[float, int]]:
    return [(found.step_time_s, one.order) for found, one in best.ranked]


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("seed", range(10))
def test_the_k_fastest_are_kept_whatever_the_order_in_which_they_come(seed: int, k: int) -> None:
    """One of each choice, its latest; nothing that can't be among them is let in, nothing that can is kept out."""
    rng = random.Random(seed)
    best, known = _Best(k, math.inf), dict[int, float]()
    assert best.score is None
    for _ in range(12):
        order, seconds = rng.randrange(8), float(rng.randint(1, 20))
        if order not in known or seconds < known[order]:
            out = best.excludes(seconds, choice(order))
            assert out or not best.excludes_all(seconds), "what leaves out everything leaves out this"
            assert best.excludes_all(seconds) == (len(known) >= k and seconds > sorted(known.values())[k - 1])
            before = {place for _, place in ranked(best)}
            known[order] = seconds
            best.add(solution(seconds), choice(order))
            assert out == (order not in {place for _, place in ranked(best)}) or order in before
        assert ranked(best) == sorted((time, place) for place, time in known.items())[:k]
        assert best.score == min(known.values())
        full = len(known) >= k
        assert best.threshold(choice(0)) == (pytest.approx(sorted(known.values())[k - 1], rel=1e-8) if full else math.inf)
        assert best.threshold(choice(0)) > (sorted(known.values())[k - 1] if full else 0.0)


def test_what_differs_by_rounding_is_a_tie_that_goes_to_the_first_declared() -> None:
    for k in (1, 2):
        best = _Best(k, math.inf)
        for seconds, order in ((10.0, 5), (10.0 * (1 + ROUNDING / 2), 3), (10.0 * (1 + 3 * ROUNDING), 1), (11.0, 0)):
            best.add(solution(seconds), choice(order))
        assert [place for _, place in ranked(best)] == [3, 5][:k]
    alone = _Best(1, math.inf)
    alone.add(solution(10.0), choice(5))
    assert alone.excludes(10.0, choice(6))
    assert not alone.excludes(10.0, choice(4)), "as fast, and declared before"
    assert alone.excludes(10.0 * (1 + 3 * ROUNDING), choice(4))
    assert not alone.excludes(9.9, choice(9))


def test_while_there_are_fewer_than_k_only_a_limit_excludes() -> None:
    best = _Best(2, 7.0)
    assert (best.threshold(choice(0)), best.score) == (7.0, None)
    assert not best.excludes(7.0, choice(0))
    assert best.excludes(7.1, choice(0))
    best.add(solution(3.0), choice(1))
    assert (best.threshold(choice(0)), best.score) == (7.0, 3.0)
    assert not best.excludes(6.9, choice(0))
    assert _Best(0, 7.0).k == 1


def test_a_loss_is_said_in_tenths_of_a_percent_and_never_below_none() -> None:
    assert [_percent(bound, 10.0) for bound in (10.0, 10.004, 11.0, 25.0, 9.0)] == ["0.0%", "0.0%", "10.0%", "150.0%", "0.0%"]


def test_cuts_stand_behind_the_choice_before_them_and_choices_in_their_order() -> None:
    def outcome(name: str) -> Outcome:
        return Outcome(candidate=replace(CANDIDATE, engine=name))

    cut = [(2, outcome("cut a")), (2, outcome("cut b")), (0, outcome("cut first"))]
    found = _in_order(cut, {2: outcome("two"), 1: outcome("one"), 3: outcome("three")})
    assert [one.candidate.engine for one in found] == ["cut first", "one", "two", "cut a", "cut b", "three"]


def test_a_plan_keeps_the_alternatives_and_of_what_was_cut_the_broadest() -> None:
    i = Instance(8)
    result = search(i.workload, i.planned_engines, replace(i.settings, top_k=3))
    plans = [result.plan, *result.alternatives]
    assert len(plans) == 3
    top = plans[0].predicted
    assert top is not None
    cut = [(place, Outcome(candidate=CANDIDATE, decided=LEVELS[: 1 + place % 5], reason=f"because {place}")) for place in range(60)]
    found = _rejected(plans, top.step_time_s, cut)
    assert len(found) == REJECTED_IN_PLAN
    assert [reason.choice for reason in found[:2]] == [plan.candidate.label() for plan in plans[1:]]
    assert all(reason.why.startswith("slower by ") for reason in found[:2])
    broad = sorted(range(60), key=lambda place: place % 5)[: REJECTED_IN_PLAN - 2]
    assert [reason.why for reason in found[2:]] == [f"because {place}" for place in broad]


@pytest.mark.parametrize("seed", range(40))
def test_alternatives_of_other_kinds_change_nothing_of_the_fastest(seed: int) -> None:
    """They have another mesh each or, of fewer meshes, another micro-batch; each is slower than the plan."""
    i = Instance(seed)
    try:
        alone = search(i.workload, i.planned_engines, i.settings)
    except NoPlanError:
        pytest.skip("nothing fits")
    found = search(i.workload, i.planned_engines, replace(i.settings, top_k=4, kinds="meshes"))
    assert (found.plan.candidate, found.plan.stages) == (alone.plan.candidate, alone.plan.stages)
    assert found.at_least_s == alone.at_least_s
    plans = [found.plan, *found.alternatives]
    meshes = [(plan.engine, plan.tp, plan.pp, plan.cp, plan.ep, plan.etp) for plan in plans]
    kinds = [(*mesh, plan.micro_batch_size, plan.sequence_parallel) for mesh, plan in zip(meshes, plans, strict=True)]
    assert len(set(meshes)) == len(plans) or len(set(kinds)) == len(plans)
    steps = [plan.predicted.step_time_s for plan in plans if plan.predicted]
    assert steps == sorted(steps)


@pytest.mark.parametrize("seed", range(6))
def test_what_did_not_fit_in_a_search_with_no_less_memory_is_put_out_once(seed: int) -> None:
    """Fewer plans than are asked for leave nothing that such a choice must beat."""
    i = Instance(seed)
    space = _Space(i.workload, i.planned_engines, replace(i.settings, top_k=1000))
    first = _Search(space, {}, lambda: False, level=0)
    first.look(None)
    again = _Search(space, dict.fromkeys(first.bounds, math.inf), lambda: False, level=0)
    asked = iter(range(20_000))

    def progress(*_: object) -> None:
        next(asked)  # which ends where the search does not

    again.look(progress)
    assert not again.best.ranked
    assert {choice.order for _, choice in again.crowded} >= {choice.order for _, choice in first.best.ranked}
