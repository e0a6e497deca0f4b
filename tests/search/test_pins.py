"""A plan that is called the fastest of all is the fastest: no pin of any choice that the product knows gives a faster one, but for what the
sentence leaves to a pin."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from orchestrator import recipe
from orchestrator.detect import machine
from orchestrator.engines import ENGINES
from orchestrator.errors import NoPlanError
from orchestrator.plan import Plan
from orchestrator.planning import Planner
from orchestrator.report.text import proof
from orchestrator.search.planner import search
from orchestrator.strategy.choices import Choice
from orchestrator.strategy.spec import CHOICES
from orchestrator.strategy.tree import group_sizes, larger_groups

ROUNDING = 1e-9
GATE = (("llama_tiny", 8), ("bert_large", 8))
TWENTY = (
    *(("gpt_tiny", 8), ("t5_large", 16), ("bert_huge_32", 8), ("bert_huge_48", 16), ("gpt2_xl", 16), ("gpt3_175b", 512)),
    *(("gpt3_1t", 1024), ("llama2_7b", 8), ("llama2_70b", 64), ("llama3_8b", 16), ("llama3_70b", 64), ("llama3_405b", 1024)),
    *(("llama3_8b_128k", 16), ("mixtral_tiny", 8), ("mixtral_8x7b", 64), ("qwen3_8b", 16), ("qwen3_moe_tiny", 8)),
    *(("qwen3_30b_a3b", 32), ("t5_11b", 32), ("t5_tiny", 8)),
)  # fmt: skip


def values(choice: Choice, plan: Plan) -> Iterator[Any]:
    """What to pin: each word of a choice of words, and of numbers the plan's halved and doubled, 2 and a node's ranks."""
    kinds = typing.get_args(choice.pin_type) if typing.get_origin(choice.pin_type) is not None else (choice.pin_type,)
    if typing.get_origin(choice.pin_type) is typing.Literal:
        yield from kinds
    elif bool in kinds:
        yield from (False, True)
    else:
        now = choice.of(plan.candidate) or 1
        yield from dict.fromkeys(value for value in (now // 2, 2 * now, 2, plan.cluster.gpus_per_node) if value > 0)


@pytest.mark.parametrize(
    ("name", "gpus"), [*(pytest.param(*case) for case in GATE), *(pytest.param(*case, marks=pytest.mark.full) for case in TWENTY)]
)
def test_no_pinned_choice_is_faster_than_the_fastest_of_all(name: str, gpus: int) -> None:
    settings = recipe.load([f"recipe={name}", f"gpus={gpus}", "launch=none"], machine(), list(ENGINES))
    space = Planner(settings).space(top_k=1)
    found = Planner(settings).fastest(space)
    plan = found.plan
    assert plan.predicted is not None
    said = proof(plan, found.at_least_s, found.searched)
    if not said.startswith("Proven"):
        pytest.skip(said)
    kept, searched_by_pin = (
        re.search(rf"; {words}: ([^;]*)", said) for words in ("left as they are unless pinned", "not searched, only pinned")
    )
    left_out = {words.split("=")[0] for words in (kept[1].split(", ") if kept else ())}
    left_out |= {words.split(" ")[0] for words in (searched_by_pin[1].split(", ") if searched_by_pin else ())}
    tried = 0
    for choice in CHOICES:
        for value in values(choice, plan):
            if choice.name in left_out and (choice.name != "cp" or not searched_with(plan, value, found.searched)):
                continue
            if f"{choice.name}={value}" in left_out:
                continue
            pins = replace(space.settings.pins, **{choice.pin: value})
            try:
                other = search(space.workload, space.planned, replace(space.settings, pins=pins)).plan
            except NoPlanError:
                continue
            tried += 1
            assert other.predicted is not None
            if other.vpp > 1 and not searched_groups(other):
                continue
            least = plan.predicted.step_time_s * (1 - ROUNDING)
            assert other.predicted.step_time_s >= least, f"pin.{choice.pin}={value}: {other.candidate.label()}"
    assert tried > 5


def searched_with(plan: Plan, cp: int, searched: Any) -> bool:
    """Whether the search takes this degree unasked."""
    return all(plan.training.seq_length // cp >= engine.least_sequence_part for engine in searched if "cp" in engine.axes)


def searched_groups(plan: Plan) -> bool:
    """Whether the search takes these groups of micro-batches unasked: the smallest, doubled or not."""
    size = plan.microbatch_group_size_per_vp_stage or plan.pp
    smallest = [base or plan.pp for base in group_sizes(plan.pp, plan.num_microbatches)]
    return any(size in (base, *larger_groups(plan.pp, plan.num_microbatches, base)) for base in smallest)


def test_long_sequences_are_divided_without_being_asked() -> None:
    """Llama 3 8B at 131,072 tokens on 16 H100, in a kind of context parallelism that no other kind beats: over 8 ranks where memory is
    filled to the reserve, over 4 beside a wider tp where the plan is as sure to fit as usual."""
    settings = recipe.load(["recipe=llama3_8b_128k", "launch=none", "search.prefer=fastest"], machine(), list(ENGINES))
    space = Planner(settings).space(top_k=1)
    plan = Planner(settings).fastest(space).plan
    assert plan.predicted is not None
    assert plan.cp == 4
    most = Planner(settings).fastest(space.held_to(-1))
    assert most.plan.cp == 8
    for pins in ({"cp": 1}, {"cp": plan.cp, "cp_comm_type": "p2p"}, {"cp": plan.cp, "cp_comm_type": "all_gather"}):
        other = search(space.workload, space.planned, replace(space.settings, pins=replace(space.settings.pins, **pins))).plan
        assert other.predicted is not None
        assert other.predicted.step_time_s > plan.predicted.step_time_s
