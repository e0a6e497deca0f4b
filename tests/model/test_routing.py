"""Routing that is not even: what a trace or a stated skew says of the ranks that hold the experts, and what that costs a plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

import orchestrator as so
from orchestrator import detect, recipe
from orchestrator.cost.price import CostModel
from orchestrator.engines import ENGINES
from orchestrator.errors import InputError
from orchestrator.model.parts.experts import Experts
from orchestrator.model.routing import Routing, stated, times, trace, with_copies
from orchestrator.planning import Planner
from orchestrator.recipe import Settings
from orchestrator.recipe.resolved import resolved_yaml
from orchestrator.report.text import uneven_text
from orchestrator.strategy.layout import Prediction
from orchestrator.strategy.megatron_layout import stages_of
from orchestrator.strategy.pins import Pins
from orchestrator.strategy.tree import Tree

CASE = ("recipe=mixtral_8x7b", "gpus=16", "launch=none")


def settings_of(*words: str) -> Settings:
    return recipe.load([*CASE, *words], detect.machine(), list(ENGINES))


def lines(*rows: tuple[int, int, list[int]]) -> str:
    return "\n".join(json.dumps({"step": step, "layer": layer, "tokens": tokens}) for step, layer, tokens in rows)


def experts(settings: Settings) -> Experts:
    (found,) = settings.architecture.experts
    return found


def price(settings: Settings, ep: int, dispatcher: str = "alltoall") -> Prediction:
    """Of a plan with this ep, all else equal."""
    asked = Planner(settings).space()
    (engine,) = [engine for engine in asked.planned if engine.name == "megatron"]
    pins = Pins(tp=1, pp=2, cp=1, ep=ep, vpp=1, micro_batch_size=1, zero_stage=1, recompute="full", moe_token_dispatcher_type=dispatcher)
    leaf = next(Tree(engine.capabilities, asked.workload, pins).leaves(lambda _: None))
    costs = CostModel(asked.workload, engine.traits, engine.calibration)
    return costs.price(leaf.candidate, stages_of(asked.workload.model, (16, 16), 2, [("full", 16)] * 2))


def test_a_trace_gives_the_mean_of_the_busiest_part_of_each_layer_and_the_fullest_rank() -> None:
    found = trace(lines((1, 0, [6, 2, 2, 2]), (1, 1, [1, 1, 1, 1]), (2, 0, [0, 0, 2, 6]), (2, 1, [1, 1, 3, 3])), "t", 4)
    assert dict(found.busiest) == pytest.approx({1: 1.0, 2: (8 / 6 + 1 + 2 + 1.5) / 4, 4: (2 + 1 + 3 + 1.5) / 4})
    assert dict(found.fullest)[2] == pytest.approx((2 + 1.5) / 2)  # the second half in step 2, over both layers
    assert dict(found.fullest)[4] == pytest.approx((3 + 1.5) / 2)
    assert found.dropped == 0


def test_a_capacity_cuts_the_hot_experts_and_says_what_is_dropped() -> None:
    found = stated(4.0, 8, 2, capacity=1.5)
    assert dict(found.busiest)[8] == pytest.approx(1.5)
    assert found.dropped == pytest.approx(2.5 / 8)
    assert dict(stated(4.0, 8, 2, capacity=0.5).busiest)[8] == pytest.approx(1.0)  # of what even routing is cut to


def test_copies_of_hot_experts_never_make_the_busiest_part_busier_and_can_not_beat_the_mean() -> None:
    loads = [5.0, 1.0, 0.5, 0.5, 0.5, 0.25, 0.125, 0.125]
    for parts in (2, 4, 8):
        size = 8 // parts
        alone = max(sum(loads[i : i + size]) / size for i in range(0, 8, size))
        assert 1.0 <= with_copies(loads, parts) <= alone


def test_copies_go_to_whatever_has_most_tokens_a_copy() -> None:
    """Three parts with two places each: of 6, 6 and 2 both hot experts are copied, then one of them again: 3, 3, 2, 2, 2 and 2."""
    assert with_copies([6.0, 6.0, 2.0], 3) == 5.0
    assert with_copies([6.0, 2.0], 1) == 4.0, "one part holds everything: the mean"
    assert with_copies([8.0, 0.0], 2) == 4.0, "a copy on each part"


def test_a_stated_skew_leaves_the_rest_to_the_others() -> None:
    assert stated(1.0, 1, 1).busiest == ((1, 1.0),)
    assert stated(2.0, 2, 1).busiest == ((1, 1.0), (2, 2.0))
    assert dict(stated(3.0, 4, 1).busiest) == pytest.approx({1: 1.0, 2: 5 / 3, 4: 3.0})
    assert dict(stated(3.0, 4, 1).fullest) == pytest.approx({1: 1.0, 2: 5 / 3, 4: 3.0})
    assert stated(3.0, 4, 1).dropped == 0.0
    with pytest.raises(InputError, match=r"model.routing=3.1: must be from 1 to num_experts/topk=3"):
        stated(3.1, 6, 2)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "has no lines"),
        ("{}", "line 1 is no"),
        ('{"tokens": 3}', "line 1 is no"),
        ('{"step": 1, "layer": 0, "tokens": [1, 2]}', "line 1 has tokens of 2 experts; the model has 8"),
        ('{"step": 1, "layer": 0, "tokens": [0, 0, 0, 0, 0, 0, 0, 0]}', "line 1 has no tokens"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(text: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=why) as caught:
        settings_of(f"model.routing={path}")
    assert caught.value.key == "model.routing"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("recipe=mixtral_8x7b", "model.routing=0.5"), "must be from 1 to num_experts/topk=4"),
        (("recipe=mixtral_8x7b", "model.routing=5"), "must be from 1 to num_experts/topk=4"),
        (("recipe=mixtral_8x7b", "model.routing=absent.jsonl"), "is no number, and as a trace"),
        (("recipe=llama3_8b", "model.routing=2"), "the model has none"),
    ],
)
def test_what_is_no_routing_of_this_model_is_refused(words: tuple[str, ...], why: str) -> None:
    with pytest.raises(InputError, match=why):
        recipe.load(["gpus=16", *words], detect.machine(), list(ENGINES))


def test_the_busiest_rank_is_priced_and_the_more_the_further_experts_are_divided() -> None:
    even, uneven = settings_of(), settings_of("model.routing=3")
    slower = {ep: price(uneven, ep).step_time_s / price(even, ep).step_time_s for ep in (1, 2, 4, 8)}
    assert slower[1] == 1.0
    assert 1.0 < slower[2] < slower[4] < slower[8] < 3.0
    grown = price(uneven, 8).by_cause["ep"] / price(even, 8).by_cause["ep"]
    assert 2.5 < grown < 3.0  # bytes, not latencies
    gathered = price(uneven, 8, "allgather").by_cause["ep"] / price(even, 8, "allgather").by_cause["ep"]
    assert gathered == pytest.approx(1.0)  # every rank gets all tokens as it is
    assert price(uneven, 8).peak_memory_bytes > price(even, 8).peak_memory_bytes


def test_even_routing_said_or_padded_changes_no_price() -> None:
    even = price(settings_of(), 8)
    assert price(settings_of("model.routing=1"), 8).step_time_s == pytest.approx(even.step_time_s, rel=1e-12)
    settings = settings_of("model.routing=4")
    padded = replace(experts(settings), capacity_factor=1.0, pad_to_capacity=True)
    assert all(getattr(op, "routing", None) is None for op in padded.part(settings.architecture, 64).ops)


def test_a_skewed_routing_plans_with_less_expert_parallelism_and_says_what_it_costs() -> None:
    found = Planner(settings_of("model.routing=4", "engine=megatron", "pin.pp=2", "pin.cp=1")).searched()
    even = Planner(settings_of("engine=megatron", "pin.pp=2", "pin.cp=1")).searched()
    assert even.uneven is None
    assert found.plan.ep < even.plan.ep
    uneven = found.uneven
    assert uneven is not None
    assert found.plan.predicted is not None
    assert uneven.step_s == pytest.approx(found.plan.predicted.step_time_s)
    assert uneven.even_s <= uneven.copied_s * (1 + 1e-9) <= uneven.step_s * (1 + 2e-9)
    words = ("model.routing=4", "engine=megatron", "pin.pp=2", "pin.cp=1", f"pin.ep={even.plan.ep}", "pin.tp_comm_overlap=false")
    pinned = Planner(settings_of(*words)).searched()
    assert pinned.uneven is not None
    assert pinned.uneven.even_s < pinned.uneven.copied_s < pinned.uneven.step_s
    said = uneven_text(pinned.uneven)
    assert f"the busiest of {even.plan.ep} expert ranks gets {times(stated(4, 8, 2).busiest, even.plan.ep):.2f} times" in said
    assert "no engine here copies experts" in said


def test_the_routing_goes_through_the_resolved_recipe(tmp_path: Path) -> None:
    settings = settings_of("model.routing=2")
    (tmp_path / "again.yaml").write_text(resolved_yaml(settings))
    again = recipe.load([f"recipe={tmp_path / 'again.yaml'}", "launch=none"], detect.machine(), list(ENGINES))
    assert isinstance(experts(again).routing, Routing)
    assert experts(again) == experts(settings)


def test_a_plan_says_that_it_takes_routing_to_be_even_where_expert_ranks_wait_for_each_other() -> None:
    words = {"recipe": "qwen3_moe_tiny", "gpus": 4, "cluster": "cpu", "engine": "megatron"}
    said = {ep: " ".join(str(so.plan(**words, pin={"ep": ep})).split()) for ep in (1, 2)}
    assert "even over 2 expert ranks" in said[2]
    assert "even over" not in said[1]
    assert "even over" not in str(so.plan(**words, pin={"ep": 2}, model={"routing": 1.5}))
