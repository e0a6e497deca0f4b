"""Lengths of responses: the draw has the mean that was said, and is the same each time."""

from __future__ import annotations

from statistics import fmean, pstdev

import pytest

from orchestrator.rl.job import Responses
from orchestrator.rl.lengths import drawn


@pytest.mark.parametrize(("mean", "spread", "longest"), [(800.0, 600.0, 3946), (3000.0, 1800.0, 3946), (100.0, 20.0, 100_000)])
def test_the_mean_of_the_cut_lengths_is_the_one_said(mean: float, spread: float, longest: int) -> None:
    found = drawn(Responses(mean=mean, spread=spread, longest=longest), 20_000, 7)
    assert fmean(found) == pytest.approx(mean, rel=0.02)
    assert max(found) <= longest
    assert min(found) >= 1


def test_lengths_that_nothing_cuts_have_the_deviation_said() -> None:
    assert pstdev(drawn(Responses(mean=500.0, spread=200.0, longest=10**6), 20_000, 1)) == pytest.approx(200, rel=0.05)


def test_a_draw_can_be_repeated_and_another_seed_is_another() -> None:
    of = Responses(mean=500.0, spread=200.0, longest=10**6)
    assert drawn(of, 50, 3) == drawn(of, 50, 3) != drawn(of, 50, 4)


def test_a_file_is_drawn_from_as_it_is() -> None:
    found = drawn(Responses(mean=0, spread=0, longest=9, values=(1, 1, 1, 9)), 4000, 0)
    assert {*found} == {1, 9}
    assert fmean(found) == pytest.approx(3, rel=0.1)
