"""search.prefer=plain: of plans that prices can't tell from the fastest one, that with the fewest choices which few published runs have."""

from __future__ import annotations

from typing import Any

import pytest
from instances import Wide
from msgspec.structs import replace

from orchestrator import api
from orchestrator.cost.uncertainty import pairs_of
from orchestrator.errors import NoPlanError
from orchestrator.plan import Plan
from orchestrator.report.text import difference_text
from orchestrator.search.planner import plainest, search
from orchestrator.strategy.spec import CHOICES, PUBLISHED, UNUSUAL, unusual

THIRTEEN_B: dict[str, Any] = {
    "model": {"num_layers": 40, "hidden_size": 5120, "num_attention_heads": 40, "num_query_groups": 8, "ffn_hidden_size": 13824,
              "max_position_embeddings": 131072},
    "train": {"global_batch_size": 512, "seq_length": 32768},
}  # fmt: skip


@pytest.mark.parametrize("seed", range(25))
def test_no_plan_within_the_resolution_has_fewer_unusual_choices_nor_as_few_and_is_faster(seed: int) -> None:
    i = Wide(seed)
    try:
        found = search(i.workload, i.planned_engines, replace(i.settings, top_k=100_000))
    except NoPlanError:
        pytest.skip("nothing fits")

    def place(plan: Plan) -> tuple[int, float]:
        return len(unusual(plan.candidate)), plan.prediction.step_time_s

    for within in (0.0, 0.1, 0.5):
        plain = plainest(i.workload, i.planned_engines, i.settings, found.plan, within)
        near = [plan for plan in (found.plan, *found.alternatives)
                if plan.prediction.step_time_s < found.plan.prediction.step_time_s * (1 + within) or plan is found.plan]  # fmt: skip
        fewest, seconds = min(map(place, near))
        taken = plain or found.plan
        assert place(taken) == (fewest, pytest.approx(seconds)), within
        assert plain is None or fewest < len(unusual(found.plan.candidate)), within


def test_a_13b_of_long_sequences_gets_the_plain_plan_unasked() -> None:
    fast = api.plan(recipe="llama3_8b", gpus=64, cluster="dgx_h100", **THIRTEEN_B, **{"search.prefer": "fastest"})
    plain = api.plan(recipe="llama3_8b", gpus=64, cluster="dgx_h100", **THIRTEEN_B)
    assert [choice.name for choice in unusual(fast.plan.candidate)] == ["cp_comm_type"]
    assert (plain.plan.tp, plain.plan.cp, plain.plan.pp, plain.plan.vpp) == (2, 4, 1, 1)
    assert not unusual(plain.plan.candidate)
    longer = plain.step_time_s / fast.step_time_s - 1
    assert 0 < longer < pairs_of(plain.plan.model).half
    assert plain.found.by_price is not None
    assert plain.found.by_price.candidate == fast.plan.candidate
    assert plain.found.alternatives[0].candidate == fast.plan.candidate, "take=2 takes it too"
    assert plain.found.at_least_s == fast.found.at_least_s, "what is proven is the price"
    said = difference_text(plain.plan, plain.found.by_price)
    assert said == (
        f"The fastest by price is {100 * (1 - fast.step_time_s / plain.step_time_s):.1f}% faster, with cp_comm_type (7 of 1,714 published "
        "runs): search.prefer=fastest"
    )
    assert fast.found.by_price is None
    second = api.plan(recipe="llama3_8b", gpus=64, cluster="dgx_h100", **THIRTEEN_B, take=2)
    assert second.plan.candidate == fast.plan.candidate


def test_hardly_any_published_run_has_what_is_unusual() -> None:
    assert all(choice.seen <= PUBLISHED / 100 for choice in UNUSUAL if choice.seen is not None)


def test_unusual_is_said_of_choices_that_are_searched() -> None:
    assert {choice.name for choice in UNUSUAL} <= {choice.name for choice in CHOICES if choice.searched}
