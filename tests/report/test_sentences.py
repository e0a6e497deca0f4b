"""Sentences of the report: each of their branches, signs and shares, by plans with round numbers."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from report_plans import LLAMA, PLAN, PREDICTED, SLOWER

from orchestrator.engines import ENGINES
from orchestrator.model.architecture import Experts, Run
from orchestrator.model.routing import Routing, Unevenness
from orchestrator.plan import LayerSpan, Plan, Stage
from orchestrator.report.budget import format_time
from orchestrator.report.failures import elsewhere_text
from orchestrator.report.text import (
    alternatives_table,
    as_text,
    choices_text,
    difference,
    explanation_text,
    format_flops,
    price_table,
    proof,
    unasked_text,
    uneven_text,
    wide_tp_text,
)
from orchestrator.strategy.capabilities import Capabilities
from orchestrator.strategy.pins import MemoryLimit
from orchestrator.units import GIB, TFLOPS

UNPREDICTED = replace(PLAN, predicted=None)


def plain(**fields: Any) -> Capabilities:
    """Megatron's, with no options of pins but those given."""
    bare: dict[str, Any] = {"pinned_options": (), "pinned_values": {}, "least_sequence_part": 0, "microbatch_groups": False}
    return replace(ENGINES["megatron"].capabilities(PLAN.cluster.software), **{**bare, **fields})


def seconds(plan: Plan, step: float, **fields: Any) -> Plan:
    assert plan.predicted is not None
    return replace(plan, predicted=replace(plan.predicted, step_time_s=step, **fields))


def test_only_the_three_largest_causes_of_a_difference_are_named_and_none_below_half_a_percent() -> None:
    more = {"compute": 9.5, "tp_traffic": 1.1, "bubble": 1.0, "dp_traffic": 0.6, "optimizer": 0.4, "cp_traffic": 0.2}
    assert difference(PREDICTED, replace(PREDICTED, step_time_s=12.6, by_cause=more)) == (
        "+5.0%: compute +500 ms, tp traffic -400 ms, dp traffic +300 ms"
    )
    gone = {name: value for name, value in PREDICTED.by_cause.items() if name != "bubble"}
    assert difference(PREDICTED, replace(PREDICTED, step_time_s=11.0, by_cause=gone)) == "-8.3%: bubble -1 s"
    for change, said in ((0.059, "+0.5%"), (0.061, "+0.5%: cp traffic +61 ms")):  # half a percent of 12 s: 60 ms
        slower = replace(PREDICTED, step_time_s=12 + change, by_cause={**PREDICTED.by_cause, "cp_traffic": change})
        assert difference(PREDICTED, slower) == said


def test_causes_below_half_a_percent_are_added_up_unless_there_is_one_alone() -> None:
    def table(**causes: float) -> list[str]:
        return [" ".join(line.split()) for line in as_text(price_table(replace(PLAN, predicted=replace(
            PREDICTED, step_time_s=10.0, by_cause=causes, by_stage=())))).splitlines()]  # fmt: skip

    text = table(compute=9.92, bubble=0.04, latency=0.03, waiting=0.01)
    assert "3 more 80 ms 0.8%" in text
    assert not any(line.startswith("bubble") for line in text)
    assert "bubble 40 ms 0.4%" in table(compute=9.96, bubble=0.04)
    assert "bubble 50 ms 0.5%" in table(compute=9.9, bubble=0.05, latency=0.03, waiting=0.02)
    assert not any("waiting" in line for line in table(compute=10.0, waiting=1e-9))


def test_other_plans_are_numbered_from_two_and_the_chosen_one_is_none_of_them() -> None:
    rows = as_text(alternatives_table(PLAN, [PLAN, replace(SLOWER, predicted=None), SLOWER, seconds(SLOWER, 14.0)]), 200).splitlines()
    assert [row.split()[0] for row in rows if row.split() and row.split()[0].isdecimal()] == ["1", "2", "3"]
    with pytest.raises(ValueError, match="no prediction"):
        alternatives_table(UNPREDICTED, [SLOWER])


@pytest.mark.parametrize(
    ("sizes", "said"),
    [((20, 20, 20, 20), "4 stages of 20"), ((19, 20, 20, 21), "19, 2 stages of 20, 21"), ((20, 19, 20, 21), "20, 19, 20, 21 by stage")],
)
def test_stages_of_one_size_in_a_row_are_counted(sizes: tuple[int, ...], said: str) -> None:
    """Embedding and head are no layers."""
    stages = [Stage(layers=(LayerSpan(kind="decoder", first=0, count=size), LayerSpan(kind="head", first=0, count=1))) for size in sizes]
    other = replace(SLOWER, stages=tuple(stages))
    assert f"; layers: {said}" in " ".join(as_text(alternatives_table(other, [PLAN]), 200).split())
    alone = replace(SLOWER, pp=1, stages=stages[:1])
    assert "layers" not in as_text(alternatives_table(alone, [alone, seconds(alone, 15.0)]), 200)


# ---- what is known of the best plan


def test_a_plan_is_proven_where_no_other_can_be_faster() -> None:
    assert proof(PLAN, 12.0, [plain()]).startswith("Proven the fastest of the plans of megatron that were searched and fit")
    assert proof(PLAN, 11.4, [plain()]).startswith("Not proven the fastest: one of the plans of megatron that were searched and fit")
    assert "may be up to 5.0% faster" in proof(PLAN, 11.4, [plain()])
    assert proof(PLAN, None, [plain()]) == proof(UNPREDICTED, 12.0, [plain()]) == "Not proven: the search was ended early"


def test_the_space_is_named_by_its_engines_and_its_even_chunks() -> None:
    other, third = plain(engine="deepspeed"), plain(engine="megatron_deepspeed")
    assert "of megatron and deepspeed that" in proof(PLAN, 12.0, [plain(), other])
    assert "of megatron, deepspeed and megatron_deepspeed that" in proof(PLAN, 12.0, [plain(), other, third])
    assert proof(PLAN, 12.0, [plain()]).endswith("fit (interleaved: chunks as even as they go)")
    assert proof(replace(PLAN, pp=1), 12.0, [plain()]).endswith("searched and fit")
    doubled = "(interleaved: chunks as even as they go, groups of pp micro-batches or of that doubled)"
    assert proof(PLAN, 12.0, [other, plain(microbatch_groups=True)]).endswith(doubled)


def test_what_only_a_pin_takes_is_listed_once() -> None:
    """With the value that the plan has, which is not always false."""
    pinned = [plain(pinned_options=("overlap_grad_reduce", "cross_entropy_loss_fusion")),
              plain(pinned_options=("cross_entropy_loss_fusion", "tiled_mlp"), pinned_values={"etp": ("2",)})]  # fmt: skip
    kept = "; left as they are unless pinned: overlap_grad_reduce=true, cross_entropy_loss_fusion=false, tiled_mlp=1"
    assert proof(PLAN, 12.0, pinned).endswith(f"searched and fit (interleaved: chunks as even as they go){kept}"), "no experts' values"
    brief = "Proven the fastest of the plans of megatron and megatron that were searched and fit"
    assert proof(replace(PLAN, vpp=2), 12.0, pinned, brief=True) == brief
    experts = Run(layers=79, feed_forward=Experts(num_experts=4, topk=2, ffn_hidden_size=64))
    mixed = replace(PLAN, vpp=2, model=replace(PLAN.model, pattern=(Run(layers=1), experts)))
    assert proof(mixed, 12.0, [plain(pinned_options=("tiled_mlp",)), plain()], brief=True) == brief, "the dense one is in a first chunk"
    assert proof(mixed, 12.0, [plain()]).endswith("fit (interleaved: chunks as even as they go, fewer layers in the head's)")
    behind = tuple(replace(stage, layers=tuple(replace(span, chunk=1) for span in stage.layers)) for stage in mixed.stages)
    alternating = replace(mixed, model=replace(PLAN.model, pattern=(Run(layers=1), replace(experts, layers=1))), stages=behind)
    others = f"{brief} (interleaved: chunks as even as they go; pin.layout= takes others)"
    assert proof(alternating, 12.0, [plain(), plain()], brief=True) == others
    assert proof(alternating, 12.0, [plain()]).endswith("fit (interleaved: chunks as even as they go, in one split)")
    several = "; not searched, only pinned: cp of several samples at a time"
    assert proof(PLAN, 12.0, [plain(least_sequence_part=1)]).endswith(several)
    assert proof(PLAN, 12.0, [plain(), plain(least_sequence_part=1024)]).endswith(f"{several} or into parts of less than 1,024 tokens")


def test_choices_that_bounds_ruled_out_are_said_where_there_are_some() -> None:
    assert choices_text(1000, 999) == "999 of 1,000 choices had to be priced: the others are ruled out by bounds or rules"
    assert choices_text(1000, 1000) == "1,000 of 1,000 choices had to be priced"


# ---- questions


def test_why_not_says_what_the_best_plan_with_it_loses() -> None:
    said = explanation_text(PLAN, "tp=8", SLOWER, "")
    assert said.startswith("Why not tp=8? The best plan with it, megatron tp=8 ")
    assert said.endswith("takes 13.4 s and 50.0 GiB: +12.0%: tp traffic +1.8 s, bubble -360 ms")
    assert explanation_text(PLAN, "tp=3", None, "no head is a third") == "Why not tp=3? no head is a third"
    assert explanation_text(PLAN, "tp=4", PLAN, "") == "Why not tp=4? The plan has it"
    for one, other in ((UNPREDICTED, SLOWER), (PLAN, replace(SLOWER, predicted=None))):
        with pytest.raises(ValueError, match="no prediction"):
            explanation_text(one, "tp=8", other, "")


def test_a_faster_plan_with_it_says_what_kept_the_search_from_it() -> None:
    faster = seconds(SLOWER, 11.0)
    assert explanation_text(PLAN, "tp=8 pp=4", faster, "").endswith("; the search takes it only where it is asked for: pin.tp=8 pin.pp=4")
    assert explanation_text(PLAN, "tp=8 pp=4", faster, "", {"tp", "cp"}).endswith("; you fixed another: pin.tp=4")
    assert "pin." not in explanation_text(PLAN, "tp=8", seconds(SLOWER, 12.0), "", {"tp"}), "as fast is not faster"


def test_a_choice_that_nobody_asked_for_says_what_it_gains_takes_and_asks_for() -> None:
    """Of this plan, or of another one, which is named."""
    other = seconds(replace(PLAN, tp_comm_overlap=True), 11.4)
    said = unasked_text(PLAN, "pin.tp_comm_overlap=true", "needs user buffers", other)
    assert said == "Not asked for: pin.tp_comm_overlap=true: -5.0%, 11.4 s and 70.0 GiB (this plan); needs user buffers"
    assert f"({SLOWER.engine} tp={SLOWER.tp} " in unasked_text(PLAN, "x", "", replace(SLOWER, tp_comm_overlap=True))
    for plan, with_it in ((UNPREDICTED, other), (PLAN, UNPREDICTED)):
        with pytest.raises(ValueError, match="no prediction"):
            unasked_text(plan, "x", "", with_it)


def test_a_wide_tp_is_compared_with_one_inside_the_node() -> None:
    wide = replace(PLAN, tp=16, dp=1)
    assert wide_tp_text(wide, None, "none fits").endswith("Inside nvlink there is no plan: none fits")
    said = wide_tp_text(wide, SLOWER, "")
    assert said.startswith("tp 16 is wider than nvlink")
    assert "With pin.tp=8, tp=8 " in said
    assert said.endswith("takes 13.4 s: +12.0%: tp traffic +1.8 s, bubble -360 ms")
    with pytest.raises(ValueError, match="no prediction"):
        wide_tp_text(replace(wide, predicted=None), SLOWER, "")


def test_uneven_routing_says_what_it_costs_and_what_copies_would_save() -> None:
    routing = Routing(source="3 times", busiest=((1, 1.0), (4, 1.5)), fullest=((4, 1.5),), copied=((4, 1.1),))
    said = uneven_text(Unevenness(routing=routing, parts=4, step_s=12.0, even_s=10.0, copied_s=10.5))
    assert "the busiest of 4 expert ranks gets 1.50 times its even share: 2 s of the step (20.0% more than with even routing)" in said
    assert "would get 1.10 times (FlexMoE), which saves 1.5 s less what copies exchange" in said
    assert "drops" not in said
    assert "saves 0" in uneven_text(Unevenness(routing=routing, parts=4, step_s=12.0, even_s=10.0, copied_s=12.5))
    alone = uneven_text(Unevenness(routing=replace(routing, dropped=0.125), parts=1, step_s=12.0, even_s=12.0, copied_s=12.0))
    assert alone.endswith(
        "experts are not divided over ranks (ep=1), so that none waits for another. The capacity drops 12.5% of what is sent"
    )


def test_flops_change_their_unit_at_a_thousand() -> None:
    assert [format_flops(value * TFLOPS) for value in (999.4, 1000, 1.0, 0.999)] == [
        "999 TFLOP/s", "1,000 TFLOP/s", "1 TFLOP/s", "999 GFLOP/s",
    ]  # fmt: skip


def test_the_price_names_its_utilisation_risk_and_reserve() -> None:
    limit = MemoryLimit(limit=80 * GIB, reserve=10 * GIB)
    text = " ".join(as_text(price_table(PLAN, limit), 200).split())
    assert "70.0 GiB at the peak of stage 0 (backward), 100.0% of 70.0 GiB usable (80.0 GiB less 10.0 GiB reserve)" in text
    said = " ".join(as_text(price_table(PLAN, replace(limit, margin=0.1, risk=0.05)), 200).split())
    assert "reserve: at most 5% chance of running out (memory.risk))" in said
    margin = " ".join(as_text(price_table(PLAN, replace(limit, margin=0.1)), 200).split())
    assert "reserve: 95% of measured peaks are at most 10.0% above their prediction)" in margin
    beyond = replace(PLAN, predicted=replace(PREDICTED, interval=(9.0, 20.0), beyond=("scale", "gpu")))
    wide = " ".join(as_text(price_table(beyond), 200).split())
    assert "12 s a step (90%: 9 to 20), 5,461 tokens/s/GPU (90%: 3,280 to 7,280)" in wide
    assert "MFU 43.7% (90%: 26.2% to 58.3%); MFU counts causal attention as half; scale; gpu" in wide
    assert "no GPU does more than 100%" not in wide
    noisy = " ".join(as_text(price_table(replace(PLAN, predicted=replace(PREDICTED, interval=(5.0, 20.0)))), 200).split())
    counted = "MFU counts causal attention as half"
    assert f"(90%: 26.2% to 104.9%); {counted}; no GPU does more than 100%: so far the prices are noise" in noisy
    assert PLAN.model == LLAMA


def test_another_number_of_gpus_is_compared_by_all_that_the_training_takes() -> None:
    """64 GPUs at 12 s a step, 32 of them at 20 s: +100% were they as busy."""
    other = replace(seconds(SLOWER, 20.0), world_size=32, dp=1)
    said = elsewhere_text(PLAN, 32, other, "", None)
    assert said.startswith("With gpus=32: megatron ")
    assert "20 s a step, +66.7%" in said
    assert "(+100.0% by the number of GPUs alone)" in said
    steps = PLAN.training.steps
    assert f"the training takes {format_time(20.0 * steps)}, here {format_time(12.0 * steps)}" in said
    assert said.endswith("checkpoints of this plan go there whole")
    assert ", 23% chance of running out of memory; the training" in elsewhere_text(PLAN, 32, other, "", None, 0.23)
    assert elsewhere_text(PLAN, 40, other, "", "loads nothing").startswith("With gpus=40 32 of them are best used: ")
    assert elsewhere_text(PLAN, 40, other, "", "loads nothing").endswith("no checkpoint of this plan goes there: it loads nothing")
    assert elsewhere_text(PLAN, 7, None, "no whole node", None) == "With gpus=7 there is no plan: no whole node"
    for one, two in ((UNPREDICTED, other), (PLAN, replace(other, predicted=None))):
        with pytest.raises(ValueError, match="no prediction"):
            elsewhere_text(one, 32, two, "", None)
