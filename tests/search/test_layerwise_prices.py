"""A layer-wise plan whose layers are all computed alike is an engine's plan: by the same prices it takes as long."""

from __future__ import annotations

import pytest
from layerwise_instances import CALIBRATION, TRAITS
from made_up_prices import Given
from msgspec.structs import replace
from small_models import cluster, training

from orchestrator.cost.layerwise import AnalyticPrices, Outer, ProfilePrices, plan_price, stage_price
from orchestrator.cost.price import CostModel
from orchestrator.cost.profile import LayerProfile, Profile
from orchestrator.model.families import describe
from orchestrator.model.spec import Architecture
from orchestrator.model.traced import Divided, Traced
from orchestrator.strategy.layerwise import LayerChoice, LayerwiseStage
from orchestrator.strategy.layout import LayerSpan, Stage
from orchestrator.strategy.spec import Candidate, Mesh, Strategy
from orchestrator.strategy.workload import Workload

MODEL = Architecture(
    family="gpt", name="x", num_layers=4, hidden_size=128, num_attention_heads=4, ffn_hidden_size=512, vocab_size=512,
    max_position_embeddings=32, tie_embeddings=False,
)  # fmt: skip


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("pp", "tp", "first"), [(1, 1, 4), (1, 2, 4), (2, 1, 2), (2, 2, 1), (2, 4, 3)])
def test_layers_computed_alike_take_as_long_as_the_engines_plan_of_them(pp: int, tp: int, first: int, recompute: bool) -> None:
    """Overheads of micro-batches and of the step, the slowest update and what no pass hides included."""
    calibration = replace(CALIBRATION, microbatch_overhead_s=1e-3, step_overhead_s=0.5, overlap_efficiency=0.5, overlap_slowdown=0.25)
    costs = CostModel(Workload(model=describe(MODEL, 32), training=training(16), cluster=cluster(8)), TRAITS, calibration)
    prices, dp, mode = AnalyticPrices(costs), 8 // pp // tp, "full" if recompute else "none"
    layer, end = LayerChoice(tp=tp, recompute=recompute), LayerChoice(tp=tp)
    outer = Outer(pp=pp, num_microbatches=2, samples=8, ends=end)
    strategy = Strategy(mesh=Mesh(tp=tp, dp=dp, pp=pp), sequence_parallel=tp > 1, recompute=mode)  # type: ignore[arg-type]
    whole = Candidate(engine="x", strategy=strategy, micro_batch_size=8 // dp, num_microbatches=2)
    counts = [("embedding", 0, 1), ("decoder", 0, first), ("decoder", 1, 4 - first), ("head", pp - 1, 1)]
    made, stages = [], []
    for stage in range(pp):
        here = [(kind, count) for kind, at, count in counts if min(at, pp - 1) == stage and count]
        ways = {
            kind: next(way for way in prices.ways(kind, outer) if way.choice == (layer if kind == "decoder" else end)) for kind, _ in here
        }
        made.append(stage_price(prices, outer, stage, [(kind, ways[kind], count) for kind, count in here]))
        spans = [LayerSpan(kind=kind, first=0, count=count, recompute=mode if kind == "decoder" else "none") for kind, count in here]  # type: ignore[arg-type]
        stages.append(Stage(layers=tuple(spans)))
    seconds, _ = costs.score(whole, tuple(stages))
    assert plan_price(prices, outer, made) == pytest.approx(seconds, rel=1e-12)


def test_the_step_waits_for_the_slowest_update() -> None:
    costs = CostModel(Workload(model=describe(MODEL, 32), training=training(16), cluster=cluster(8)), TRAITS, CALIBRATION)
    prices, outer = AnalyticPrices(costs), Outer(pp=2, num_microbatches=1, samples=16, ends=None)

    def step(*updates: float) -> float:
        one = LayerwiseStage(runs=(), forward_s=1.0, backward_s=2.0, exposed_s=0.0, optimizer_s=0.0, peak_bytes=0.0)
        return plan_price(prices, outer, [replace(one, optimizer_s=update) for update in updates])

    assert step(0.5, 3.0) == step(3.0, 0.5) == pytest.approx(step(0.0, 0.0) + 3.0)


def legal(samples: int = 8, pp: int = 1, traced: Traced | None = None, **fields: int) -> set[int]:
    """Sizes of tp that a decoder layer may have on 8 ranks."""
    model = describe(replace(MODEL, **fields), 32)
    model = replace(model, architecture=replace(model.architecture, traced=traced))
    costs = CostModel(Workload(model=model, training=training(16), cluster=cluster(8)), TRAITS, CALIBRATION)
    outer = Outer(pp=pp, num_microbatches=2, samples=samples, ends=LayerChoice(tp=1))
    prices = AnalyticPrices(costs)
    found = {way.choice.tp for way in prices.ways("decoder", outer)}
    assert {choice.tp for choice in prices.end_choices(outer) if choice} == found
    assert not any(choice.recompute for choice in prices.end_choices(outer) if choice)
    return found


def test_tensor_parallelism_divides_heads_groups_the_mlp_the_sequence_and_leaves_every_rank_whole_samples() -> None:
    assert legal() == {1, 2, 4}, "4 heads"
    assert legal(num_query_groups=2) == {1, 2}
    assert legal(ffn_hidden_size=514) == {1, 2}
    assert legal(num_attention_heads=8) == {1, 2, 4, 8}
    assert legal(num_attention_heads=8, pp=2) == {1, 2, 4}, "four ranks a stage"
    assert legal(num_attention_heads=8, samples=2) == {4, 8}, "two samples for 8 / tp ranks"


def test_of_a_recorded_model_its_own_linears_say_what_divides_them() -> None:
    """Not the figures of its architecture; whole where no partition was found."""
    sizes = {"seq_length": 32, "itemsize": 2, "hidden_size": 128, "ffn_hidden_size": 512, "max_position_embeddings": 32}
    recorded = Traced(model_class="X", **sizes, feeds=(), runs=(), divided=(Divided(pattern="x", by="column"),), tp_divides=2)
    assert legal(traced=recorded) == {1, 2}
    assert legal(traced=replace(recorded, tp_divides=8)) == {1, 2, 4, 8}
    assert legal(traced=replace(recorded, divided=())) == {1}


def test_a_pipeline_of_one_stage_sends_nothing_and_a_change_of_nothing_costs_nothing() -> None:
    costs = CostModel(Workload(model=describe(MODEL, 32), training=training(16), cluster=cluster(8)), TRAITS, CALIBRATION)
    layer = LayerProfile(kind="decoder", count=4, parameter_bytes=1e6, forward_s={1: 1e-3}, saved_bytes={1: 1e6}, output_bytes=1e5)
    for prices in (AnalyticPrices(costs), ProfilePrices(Profile(name="x", layers=(layer,)), costs)):
        alone, two = (Outer(pp=pp, num_microbatches=2, samples=8, ends=None) for pp in (1, 2))
        assert prices.hop_s(alone) == 0.0 < prices.hop_s(two)
        assert prices.switch("decoder", 2, 2, alone) == (0.0, 0.0)
        there, back = prices.switch("decoder", 1, 2, alone)
        assert there > 0.0
        assert (back > 0.0) == isinstance(prices, AnalyticPrices), "gathered one way, a slice the other; or exchanged both ways"
    assert ProfilePrices(Profile(name="x", layers=(layer,)), costs).overheads_s() == (0.0, 0.0)
    assert AnalyticPrices(costs).overheads_s() == (CALIBRATION.microbatch_overhead_s, CALIBRATION.step_overhead_s)


@pytest.mark.parametrize(("stage", "flight"), [(0, 3), (1, 2), (2, 1)])
def test_a_stage_is_its_blocks_the_changes_between_them_and_what_no_pass_hides(stage: int, flight: int) -> None:
    """Two layers of one kind and one of the other; a quarter of what hides is lost."""
    prices = Given(7, hidden=0.5, overhead=0.5)
    a, b = next((a, b) for a in prices.options["a"] for b in prices.options["b"] if a.choice.tp != b.choice.tp)
    there, back = prices.moves[a.choice.tp, b.choice.tp]
    found = stage_price(prices, Outer(3, 4, 1, None), stage, [("a", a, 2), ("b", b, 1)])
    assert found.forward_s == 0.25 + 2 * a.forward_s + there + b.forward_s
    assert found.backward_s == 0.25 + 2 * a.backward_s + back + b.backward_s
    sync = 2 * a.sync_s + b.sync_s
    hidden = min(sync, 0.5 * found.backward_s)
    assert found.exposed_s == sync - hidden + 0.25 * hidden
    assert found.optimizer_s == 2 * a.optimizer_s + b.optimizer_s
    static, saved = 2 * a.static_bytes + b.static_bytes, 2 * a.saved_bytes + b.saved_bytes
    assert found.peak_bytes == static + 1.25 * (flight * saved + max(a.transient_bytes, b.transient_bytes))
    assert [(run.kind, run.count, run.choice) for run in found.runs] == [("a", 2, a.choice), ("b", 1, b.choice)]
    apart = stage_price(prices, Outer(3, 4, 1, None), stage, [("a", a, 1), ("a", a, 1), ("b", b, 1)])
    assert (apart.forward_s, apart.peak_bytes) == (found.forward_s, found.peak_bytes)
    assert stage_price(prices, Outer(3, 4, 1, None), stage, [("a", a, 2)]).forward_s == 0.25 + 2 * a.forward_s
