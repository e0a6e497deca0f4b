from __future__ import annotations

from instances import CALIBRATION, TRAITS, planned_engines
from msgspec.structs import replace
from small_engines import megatron_like
from small_models import cluster, gpt, training
from test_planner import AMPLE, seconds, some_plan

from orchestrator.cost.bounds import Floors, filled
from orchestrator.engines import ENGINES
from orchestrator.hardware.spec import Cluster
from orchestrator.plan import Plan
from orchestrator.report.text import explanation_text, proof, wide_tp_text
from orchestrator.search.explain import Explanation, data_parallelism_alone, explain, narrower_tp
from orchestrator.search.planner import search
from orchestrator.search.question import SearchSettings
from orchestrator.strategy.pins import MemoryLimit, Pins
from orchestrator.strategy.workload import Workload
from orchestrator.units import MIB

MODEL = gpt(6, hidden=256, seq=128, vocab=1024)


def workload(where: Cluster) -> Workload:
    return Workload(model=MODEL, training=training(16, seq=128), cluster=where)


def asked(pins: Pins, limit: MemoryLimit = AMPLE) -> Explanation:
    engines = [(megatron_like(), TRAITS)]
    (answer,) = explain(pins, workload(cluster(8)), planned_engines(engines, CALIBRATION), SearchSettings(limit=limit))
    return answer


def test_why_not_has_the_best_plan_with_that_pin_and_its_causes() -> None:
    chosen = some_plan().plan
    answer = asked(Pins(tp=4))
    assert answer.plan is not None
    assert answer.plan.tp == 4
    best = some_plan(pins=Pins(tp=4)).plan
    assert (answer.plan.candidate, answer.plan.stages) == (best.candidate, best.stages)
    assert seconds(answer.plan) > seconds(chosen)
    text = explanation_text(chosen, answer.question, answer.plan, answer.why)
    assert text.startswith("Why not tp=4? The best plan with it, megatron tp=4")
    assert "%: " in text


def test_why_not_names_the_rule_that_forbids_it() -> None:
    answer = asked(Pins(tp=8))
    assert answer.plan is None
    assert "8 does not divide num_attention_heads=4" in explanation_text(some_plan().plan, answer.question, answer.plan, answer.why)


def test_why_not_the_other_rank_order_has_a_plan_or_the_rule_of_an_engine_without_it() -> None:
    where = cluster(16, gpus_per_node=8)
    answers = {}
    for name, engine in ENGINES.items():
        given = [(engine.capabilities(where.software), engine.traits(where.software))]
        pins = Pins(rank_order="tp-cp-ep-pp-dp")
        (answers[name],) = explain(pins, workload(where), planned_engines(given, CALIBRATION), SearchSettings(limit=AMPLE))
    plan = answers["megatron"].plan
    assert plan is not None
    assert plan.rank_order == ("tp", "cp", "ep", "pp", "dp")
    assert "rank_order=tp-cp-ep-pp-dp" in plan.candidate.label()
    assert all("illegal by rule rank_order" in answers[name].why for name in ("megatron_deepspeed", "deepspeed"))


def test_why_not_does_not_advise_to_leave_out_what_was_asked() -> None:
    assert "to relax" not in asked(Pins(tp=8)).why
    engines = [(megatron_like(), TRAITS)]
    settings = SearchSettings(pins=Pins(dp=4), limit=AMPLE)
    (answer,) = explain(Pins(tp=4), workload(cluster(8)), planned_engines(engines, CALIBRATION), settings)
    assert "leave out pin.dp" in answer.why


def test_why_not_answers_for_a_layout_of_another_model() -> None:
    answer = asked(Pins(layout="Et*2|t*2L"))
    assert answer.plan is None
    assert "the model has 6" in answer.why


def test_why_not_says_what_memory_is_missing() -> None:
    answer = asked(Pins(zero_stage=0), MemoryLimit(limit=2 * MIB, reserve=0))
    assert answer.plan is None
    assert "needs" in answer.why


def test_why_not_says_where_the_plan_has_it() -> None:
    chosen = some_plan().plan
    answer = asked(Pins(dp=chosen.dp))
    assert explanation_text(chosen, answer.question, answer.plan, answer.why).endswith("The plan has it")


def test_why_not_says_that_a_degree_does_not_divide_the_ranks() -> None:
    answer = asked(Pins(dp=5))
    assert answer.plan is None
    assert "pin.dp=5 does not divide the 8 GPUs" in answer.why


def test_a_faster_plan_that_only_a_pin_takes_is_said_to_be_that() -> None:
    chosen = some_plan().plan
    assert chosen.predicted is not None
    faster = replace(chosen, cp=2, predicted=replace(chosen.predicted, step_time_s=chosen.predicted.step_time_s * 0.9))
    text = explanation_text(chosen, "cp=2 cp_comm_type=a2a", faster, "")
    assert text.endswith("the search takes it only where it is asked for: pin.cp=2 pin.cp_comm_type=a2a")


def test_a_faster_plan_that_the_users_own_pin_forbids_names_that_pin() -> None:
    chosen = some_plan().plan
    assert chosen.predicted is not None
    faster = replace(chosen, cp=2, predicted=replace(chosen.predicted, step_time_s=chosen.predicted.step_time_s * 0.9))
    text = explanation_text(chosen, "cp=2", faster, "", {"cp": chosen.cp})
    assert text.endswith(f"; you fixed another: pin.cp={chosen.cp}")
    assert "only where it is asked for" not in text


def test_tp_wider_than_a_node_is_shown_beside_the_best_plan_without() -> None:
    engines = [(megatron_like(), TRAITS)]
    nodes = cluster(8, gpus_per_node=2)

    def best(tp: int) -> Plan:
        return search(workload(nodes), planned_engines(engines, CALIBRATION), SearchSettings(pins=Pins(tp=tp), limit=AMPLE, top_k=1)).plan

    assert [narrower_tp(best(tp)) for tp in (1, 2, 4)] == [None, None, 2]
    text = wide_tp_text(best(4), best(2), "")
    assert "tp 4 is wider than" in text
    assert "With pin.tp=2, tp=2" in text
    assert wide_tp_text(best(4), None, "a rule").endswith("there is no plan: a rule")


def test_the_proof_says_what_is_proven() -> None:
    result, engine = some_plan(), replace(megatron_like(), axes=(*megatron_like().axes, "cp"), least_sequence_part=2048)
    assert result.proven
    assert result.at_least_s == seconds(result.plan)
    said = proof(result.plan, result.at_least_s, [engine])
    assert said.startswith(f"Proven the fastest of the plans of {engine.engine} that were searched and fit")
    assert said.endswith("; not searched, only pinned: cp of several samples at a time or into parts of less than 2,048 tokens")
    assert "up to 10.0% faster" in proof(result.plan, 0.9 * seconds(result.plan), [engine])
    assert proof(result.plan, None, [engine]).startswith("Not proven")


def test_a_filled_pipeline_is_between_the_mean_and_the_even_schedule() -> None:
    for pp, m, vpp in ((2, 1, 1), (4, 4, 1), (8, 64, 1), (4, 8, 2), (16, 16, 8)):
        bound = filled(1.0, pp, m, vpp, 0.0)
        assert m / pp <= bound <= (m + (pp - 1) / vpp) / pp * (1 + 1e-12)


def test_floors_undercut_every_price() -> None:
    """Of every choice that was priced: the floor of its own, and that of its group."""
    from orchestrator.cost.price import CostModel

    result = some_plan(top_k=40)
    capabilities = megatron_like()
    costs = CostModel(workload(cluster(8)), TRAITS, CALIBRATION)
    floors = Floors(costs, capabilities, AMPLE.usable, pinned_layout=False)
    priced = [outcome for outcome in result.outcomes if outcome.step_time_s is not None]
    assert len(priced) >= 40
    for outcome in priced:
        assert outcome.step_time_s is not None
        assert floors.leaf(outcome.candidate) <= outcome.step_time_s * (1 + 1e-9)
        assert floors.group(outcome.candidate, 8) <= outcome.step_time_s * (1 + 1e-9)


def test_data_parallelism_alone_is_shown_for_every_stage_with_its_bytes_or_the_rule_against_it() -> None:
    engine = ENGINES["deepspeed"]
    given = planned_engines([(engine.capabilities(cluster(8).software), engine.traits(cluster(8).software))], CALIBRATION)
    rows = data_parallelism_alone(workload(cluster(8)), given)
    assert [row.zero_stage for row in rows] == [0, 1, 2, 3]
    assert rows[0].least is None
    assert "zero_stage=0 sums gradients in bf16" in rows[0].why
    causes = [row.least.predicted.by_stage[0].memory_by_cause for row in rows[1:] if row.least is not None]
    states = [sum(of[cause] for cause in ("weights", "gradients", "optimizer")) for of in causes]
    assert states[0] > states[1] > states[2], "a higher stage divides more of them"
    for row in data_parallelism_alone(workload(cluster(6)), given):
        assert row.least is None
        assert "dp=6 does not divide global_batch_size=16" in row.why
