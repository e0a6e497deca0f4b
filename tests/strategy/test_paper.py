from __future__ import annotations

import pytest
from paper import NO_DP_WITH_SDP, PAPER_RULES, PP_FIRST, PaperRule, count, paper_strategies


def per_pp(world: int, rules: tuple[PaperRule, ...]) -> list[int]:
    degrees = [dict(strategy).get("pp", 1) for strategy in paper_strategies(world, rules)]
    return [degrees.count(2**k) for k in range(world.bit_length())]


def test_the_papers_tree_on_8_gpus_without_pruning() -> None:
    """Section 3.2: 34 candidates; 21/9/3/1 for PP 1/2/4/8."""
    assert count(8, (PP_FIRST,)) == 34
    assert per_pp(8, (PP_FIRST,)) == [21, 9, 3, 1]


def test_the_papers_tree_on_8_gpus_with_pruning() -> None:
    assert count(8) == 22
    assert per_pp(8, PAPER_RULES) == [11, 7, 3, 1]


def test_activation_checkpointing_doubles_the_tree() -> None:
    assert count(8, (PP_FIRST,), recompute=True) == 68
    assert count(8, recompute=True) == 44


@pytest.mark.parametrize(("world", "strategies"), [(16, 37), (32, 56), (64, 79), (128, 106), (1024, 211)])
def test_the_papers_tree_on_more_gpus(world: int, strategies: int) -> None:
    assert count(world) == strategies


def test_each_rule_can_be_left_out_and_only_takes_away() -> None:
    everything = set(paper_strategies(16, ()))
    for rule in PAPER_RULES:
        kept = set(paper_strategies(16, (rule,)))
        assert kept < everything
        assert all(rule.allows(strategy) for strategy in kept)
    assert set(paper_strategies(16)) == set(paper_strategies(16, (PP_FIRST,))) & set(paper_strategies(16, (NO_DP_WITH_SDP,)))


@pytest.mark.parametrize("world", [0, 3, 24])
def test_the_papers_tree_is_for_powers_of_two(world: int) -> None:
    with pytest.raises(ValueError, match="powers of two"):
        count(world)
