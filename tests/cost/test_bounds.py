"""Lower bounds stay below every plan that they are about, and are no formality where memory is short."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from cost_cases import DEEPSPEED, a100, candidate, cost_model, gpt
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from orchestrator import detect, recipe
from orchestrator.cost.bounds import Floors, beside, filled, rounds
from orchestrator.cost.calibration import datasheet
from orchestrator.cost.layer import LayerCost, LayerPrices
from orchestrator.engines import ENGINES
from orchestrator.hardware.spec import Software
from orchestrator.model.families import describe
from orchestrator.model.lora import frozen_layer
from orchestrator.model.spec import LayerSpec
from orchestrator.planning import Planner
from orchestrator.strategy.choices import Choice
from orchestrator.strategy.layout import LayerSpan, Stage
from orchestrator.strategy.legality import stages_offered
from orchestrator.strategy.megatron_layout import even_work, stages_of
from orchestrator.strategy.spec import OFFERED, Candidate, Recompute

TRAITS = replace(DEEPSPEED, bucket_elements=10**6, bucket_copies=2, overlaps_param_gather=True)
MEGATRON = ENGINES["megatron"].capabilities(Software())
MODES = ("none", "selective", "full")
BESIDE = [(choice, value) for choice, value in OFFERED if choice.offered is not None and not choice.offered.saves_memory]


def spread(layers: int, vpp: int, stage: int) -> list[int]:
    """A stage's layers over its chunks, as evenly as they go; where they don't, the first stage's first chunk is the short one."""
    base, extra = divmod(layers, vpp)
    return [base] * (vpp - extra) + [base + 1] * extra if stage == 0 else [base + 1] * extra + [base] * (vpp - extra)


@st.composite
def plans(draw: st.DrawFn) -> tuple[Candidate, tuple[Stage, ...], int]:
    """A candidate, its stages of 1 to 8 layers with the first of each chunk's recomputed, and the number of layers."""
    pp = draw(st.sampled_from([1, 2, 3, 4]))
    vpp = draw(st.sampled_from([1, 2, 3])) if pp > 1 else 1
    sizes = [draw(st.integers(vpp, 8)) for _ in range(pp)]
    stages = []
    for index, layers in enumerate(sizes):
        mode, first = draw(st.sampled_from(MODES)), draw(st.integers(0, 8))
        spans = [LayerSpan(kind="embedding", first=0, count=1)] if index == 0 else []
        for chunk, size in enumerate(spread(layers, vpp, index)):
            again = 0 if mode == "none" else min(first, size)
            for count, how in ((again, mode), (size - again, "none")):
                if count:
                    spans.append(LayerSpan(kind="decoder", first=0, count=count, recompute=how, chunk=chunk))
        if index == pp - 1:
            spans.append(LayerSpan(kind="head", first=0, count=1, chunk=vpp - 1))
        stages.append(Stage(layers=tuple(spans)))
    fields: dict[str, Any] = {
        **{"tp": draw(st.sampled_from([1, 2, 8])), "dp": draw(st.sampled_from([1, 4])), "pp": pp, "vpp": vpp},
        **{"micro_batch_size": draw(st.sampled_from([1, 4])), "num_microbatches": pp * draw(st.integers(1, 5))},
        **{"zero_stage": draw(st.sampled_from([0, 1, 2, 3])), "recompute": "full", "overlap_grad_reduce": draw(st.booleans())},
    }
    return candidate(**fields), tuple(stages), sum(sizes)


@given(plans(), st.sampled_from([0.0, 0.5, 1.7]))
@settings(max_examples=250, deadline=None)
def test_no_plan_undercuts_its_floors_though_it_fills_the_memory_to_the_last_byte(
    plan: tuple[Candidate, tuple[Stage, ...], int], slowdown: float
) -> None:
    cand, stages, layers = plan
    calibration = replace(datasheet(a100(), TRAITS), overlap_slowdown=slowdown, overlap_efficiency=1.0)
    costs = cost_model(gpt(num_layers=layers), traits=TRAITS, calibration=calibration, modes=MODES)
    seconds, peak = costs.score(cand, stages)
    floors = Floors(costs, MEGATRON, peak, pinned_layout=False)
    assert floors.leaf(cand) <= seconds * (1 + 1e-9)
    assert floors.group(cand, cand.vpp) <= seconds * (1 + 1e-9)
    assert costs.memory_floor(cand) <= peak * (1 + 1e-9)
    overhead, samples = calibration.step_overhead_s, cand.mesh.dp * cand.micro_batch_size * cand.num_microbatches
    for most in (cand.micro_batch_size, 16 * cand.micro_batch_size):  # its bound is for the training's samples
        alike = (floors.shape(cand, most, [cand.strategy.sequence_parallel]) - overhead) * samples / costs.training.global_batch_size
        assert alike <= (seconds - overhead) * (1 + 1e-9)
    if cand.strategy.zero_stage in stages_offered(MEGATRON, cand):
        assert floors.shape_bytes(cand) <= costs.memory_floor(cand) * (1 + 1e-9)


@given(plans(), st.sampled_from([0.0, 0.5, 1.7]), st.sampled_from(BESIDE))
@settings(max_examples=250, deadline=None)
def test_no_plan_with_an_option_undercuts_the_bound_by_the_plan_without(
    plan: tuple[Candidate, tuple[Stage, ...], int], slowdown: float, option: tuple[Choice, Any]
) -> None:
    cand, stages, layers = plan
    calibration = replace(datasheet(a100(), TRAITS), overlap_slowdown=slowdown, overlap_efficiency=1.0)
    costs = cost_model(gpt(num_layers=layers), traits=TRAITS, calibration=calibration, modes=MODES)
    choice, value = option
    other = replace(cand, strategy=choice.set_on(cand.strategy, value))
    (seconds, _), (with_it, _) = costs.score(cand, stages), costs.score(other, stages)
    assert beside(costs, cand, other, MODES)(seconds, with_it) <= with_it * (1 + 1e-9)


def test_the_bound_by_the_plan_without_an_option_is_near_where_it_touches_little() -> None:
    """Else every choice would be searched again with each option."""
    plain = candidate(tp=2, dp=4, pp=2, zero_stage=1, num_microbatches=16)
    costs, other = (
        cost_model(gpt(num_layers=24)),
        replace(plain, strategy=replace(plain.strategy, reduce_scatter_with_fp32_accumulation=True)),
    )
    assert 0.99 < beside(costs, plain, other, MODES)(10.0, 10.0) / 10.0 < 1.0


def test_layers_without_a_backward_pass_have_that_bound_too() -> None:
    """Those of a frozen tower, below everything that is trained."""
    plain = candidate(dp=8, zero_stage=1, num_microbatches=8)
    other = replace(plain, strategy=replace(plain.strategy, reduce_scatter_with_fp32_accumulation=True))
    model = describe(gpt(num_layers=24), 2048)
    frozen = [replace(run, layer=replace(frozen_layer(run.layer), forward_only=run.layer.kind != "head")) for run in model.runs]
    costs = cost_model(replace(model, runs=tuple(frozen)))
    assert costs.layer(plain, "decoder", "none").backward_s == 0.0
    assert 0.9 < beside(costs, plain, other, MODES)(10.0, 10.0) / 10.0 <= 1.0


@pytest.mark.parametrize("recipe_name", ["deepseek_v3", "mixtral_8x7b", "llama3_8b"])
def test_a_larger_micro_batch_takes_no_longer_a_sample(recipe_name: str) -> None:
    """By this the bound of a mesh holds for all sizes of micro-batches."""
    given = recipe.load([f"recipe={recipe_name}", "gpus=64"], detect.machine(), list(ENGINES))
    (engine,) = [engine for engine in Planner(given).space().planned if engine.name == "megatron"]
    costs = engine.costs(Planner(given).workload)
    states = Floors(costs, engine.capabilities, 1e15, pinned_layout=False).least
    for tp, ep, sequence_parallel in ((1, 1, False), (1, 8, False), (4, 1, True), (2, 8, True), (16, 4, True)):
        ways = {"tp": tp, "dp": 64 // tp, "ep": ep if recipe_name != "llama3_8b" else 1, "sequence_parallel": sequence_parallel}
        for kind in costs.kinds:
            sizes = [candidate(**ways, micro_batch_size=size) for size in (1, 2, 3, 4, 6, 8, 16, 60, 64, 240)]
            seconds = [sum(costs.layer_floor_seconds(cand, kind, states)) / cand.micro_batch_size for cand in sizes]
            assert all(larger <= smaller * (1 + 1e-9) for smaller, larger in pairwise(seconds)), (kind, ways)


@pytest.mark.parametrize(("vpp", "micro_batches"), [(1, 2.0), (2, 0.5)])
def test_where_memory_is_short_the_recompute_that_it_takes_counts(vpp: int, micro_batches: float) -> None:
    """Eight layers a stage have room for so many micro-batches as they are, where the first stages hold 4 or more in flight."""
    costs = cost_model(gpt(num_layers=32), traits=TRAITS, modes=("none", "full"))
    cand = candidate(pp=4, vpp=vpp, micro_batch_size=8, num_microbatches=16, recompute="full")
    ample = Floors(costs, MEGATRON, 1e15, pinned_layout=False).leaf(cand)
    layer, leanest = (costs.layer(cand, "decoder", mode) for mode in ("none", "full"))
    fixed = sum(costs.fixed_bytes(cand).values())
    tight = fixed + 8 * (layer.static_bytes + micro_batches * layer.saved_bytes)
    short = Floors(costs, MEGATRON, tight, pinned_layout=False).leaf(cand)
    all_again = 32 * (leanest.seconds - layer.seconds) * 16 / 4
    assert ample < short < ample + 2 * all_again
    levels = [Floors(costs, MEGATRON, fixed + share * (tight - fixed), pinned_layout=False).leaf(cand) for share in (0.8, 1.0, 1.2, 4.0)]
    assert all(less >= more for less, more in pairwise(levels))  # more memory is never slower
    assert levels[0] > levels[-1]


def test_what_recompute_frees_is_priced_once_whatever_the_number_of_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = cost_model(gpt(num_layers=32), traits=TRAITS, modes=MODES)
    shape: dict[str, Any] = {"pp": 4, "num_microbatches": 16, "recompute": "full", "micro_batch_size": 8}
    lean = candidate(**shape, dp=4, zero_stage=2)
    layer = costs.layer(lean, "decoder", "none")
    short = sum(costs.fixed_bytes(lean).values()) + 8 * (layer.static_bytes + layer.saved_bytes)
    floors, asked = Floors(costs, MEGATRON, short, pinned_layout=False), set[str]()
    of = LayerPrices.of

    def seen(self: LayerPrices, layer: LayerSpec, mode: Recompute, *more: Any) -> LayerCost:
        asked.add(mode)
        return of(self, layer, mode, *more)

    monkeypatch.setattr(LayerPrices, "of", seen)
    news: tuple[dict[str, Any], ...] = ({"zero_stage": 1}, {"dp": 4, "zero_stage": 1}, {"dp": 8, "zero_stage": 2}, {"micro_batch_size": 16})
    for new, modes in zip(news, (MODES, ("none",), MODES, MODES), strict=True):
        asked.clear()
        assert floors.recomputed_seconds(candidate(**shape | new)) > 0.0
        assert asked == {*modes}


def test_where_the_cheapest_recompute_frees_too_little_the_dearer_one_counts() -> None:
    """One micro-batch, so that every stage has one in flight, and room between what selective recompute of all layers needs and full."""
    costs = cost_model(gpt(num_layers=32), traits=TRAITS, modes=MODES)
    cand = candidate(pp=4, micro_batch_size=8, num_microbatches=1, recompute="full")
    plain, some, leanest = (costs.layer(cand, "decoder", mode) for mode in MODES)
    ends = sum(costs.layer(cand, kind, "none").static_bytes for kind in ("embedding", "head"))
    fixed = sum(costs.fixed_bytes(cand).values())

    def more(saved: float) -> float:
        floors = Floors(costs, MEGATRON, fixed + 8 * (plain.static_bytes + saved), pinned_layout=False)
        return floors.leaf(cand) - Floors(costs, MEGATRON, 1e15, pinned_layout=False).leaf(cand)

    assert ends < 4 * some.saved_bytes
    all_some = 32 * (some.seconds - plain.seconds)
    assert 0.8 * all_some < more(some.saved_bytes) < all_some
    assert more((some.saved_bytes + leanest.saved_bytes) / 2) > 1.5 * all_some


@pytest.mark.parametrize(("pp", "vpp"), [(2, 2), (4, 2), (8, 4), (16, 2)])
def test_chunks_that_are_no_choice_are_counted_stage_by_stage(pp: int, vpp: int) -> None:
    """Layers of gpt-oss alternate: interleaved its chunks are one split, and the fullest stage bounds the step."""
    given = recipe.load(["recipe=gpt_oss_120b", "gpus=512"], detect.machine(), list(ENGINES))
    (engine,) = [engine for engine in Planner(given).space().planned if engine.name == "megatron"]
    costs = engine.costs(Planner(given).workload)
    cand = candidate(pp=pp, vpp=vpp, ep=32, dp=512 // pp, num_microbatches=4 * pp, recompute="full")
    split = stages_of(costs.model, even_work(costs.model, pp * vpp), pp)
    seconds, peak = costs.score(cand, split)
    leaf = Floors(costs, MEGATRON, peak, pinned_layout=False).leaf(cand)
    assert 0.9 * seconds < leaf <= seconds * (1 + 1e-9)
    of_any = Floors(costs, MEGATRON, peak, pinned_layout=True).leaf(cand)
    assert leaf >= of_any
    assert leaf > of_any or (pp, vpp) == (2, 2), "whose stages are as long as each other"


def test_the_time_floor_counts_what_hiding_a_reduction_costs() -> None:
    """One stage whose reduction all hides: the slowdown of it is left, 0.4 of its seconds, and nothing else."""
    traits = replace(DEEPSPEED, overlaps_grad_reduce=True)
    floors = []
    for slowdown in (0.0, 0.4):
        calibration = replace(datasheet(a100(), traits), overlap_slowdown=slowdown)
        costs = cost_model(traits=traits, calibration=calibration)
        cand = candidate(dp=8, micro_batch_size=16, num_microbatches=1)
        floors.append(costs.time_floor(cand))
    kinds = (("embedding", 1), ("decoder", 4), ("head", 1))
    reduction = sum(count * costs.layer(cand, kind, "none").sync_s for kind, count in kinds)
    assert floors[1] - floors[0] == pytest.approx(0.4 * reduction)


def test_with_room_for_all_a_pipelines_bound_is_its_work_filled_in() -> None:
    """No chunks: the whole of a micro-batch's work, the transfers that block both of their stages, the mean update and what comes once."""
    costs = cost_model(gpt(num_layers=32), traits=TRAITS)
    cand = candidate(pp=4, num_microbatches=4, micro_batch_size=4)
    layers = [(costs.layer(cand, kind, "none"), count) for kind, count in (("embedding", 1), ("decoder", 32), ("head", 1))]
    work = sum(count * layer.seconds for layer, count in layers) + 4 * costs.calibration.microbatch_overhead_s
    update = sum(count * layer.optimizer_s for layer, count in layers) / 4
    end = filled(work + 2 * sum(costs.hop_seconds(cand)[:3]), 4, 4, 1, 0.0)
    leaf = Floors(costs, MEGATRON, 1e15, pinned_layout=False).leaf(cand)
    assert leaf == pytest.approx(end + update + costs.once_seconds(cand))
    assert leaf > costs.time_floor(cand)


@pytest.mark.parametrize("name", ["llama3_70b_lora", "mixtral_8x7b"])
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_states_are_known_without_pricing_a_layer_frozen_ones_too(name: str, zero_stage: Any) -> None:
    settings = recipe.load([f"recipe={name}", "gpus=8", "engine=deepspeed", "launch=none"], detect.Machine(host_memory=1 << 40), [*ENGINES])
    asked = Planner(settings).space()
    costs = asked.planned[0].costs(asked.workload)
    for offload in (False, True):
        cand = candidate(dp=8, zero_stage=zero_stage, offload_optimizer=offload)
        for kind in costs.workload.counts:
            assert costs.layer_static_bytes(cand, kind) == pytest.approx(costs.layer(cand, kind, "none").static_bytes, rel=1e-12)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("dp", "zero_stage", "inner"), [(1, 0, 300e9), (64, 1, 300e9), (64, 1, 3e9), (64, 3, 3e9)])
def test_with_one_stage_and_no_recompute_nothing_is_left_to_bound(dp: int, zero_stage: Any, inner: float, overlap: bool) -> None:
    """The floor is the step, where the reduction hides wholly, in part, or not at all."""
    traits = replace(TRAITS, overlaps_param_gather=False)
    cluster = a100(64, inner=inner, outer=inner / 2)
    calibration = replace(datasheet(cluster, traits), overlap_slowdown=0.25, overlap_efficiency=0.5)
    costs = cost_model(traits=traits, cluster=cluster, calibration=calibration, modes=("none",))
    cand = candidate(dp=dp, zero_stage=zero_stage, micro_batch_size=2, num_microbatches=4, overlap_grad_reduce=overlap)
    spans = [LayerSpan(kind=kind, first=0, count=count) for kind, count in (("embedding", 1), ("decoder", 4), ("head", 1))]
    seconds, _ = costs.score(cand, (Stage(layers=tuple(spans)),))
    assert costs.time_floor(cand) == pytest.approx(seconds, rel=1e-12)
    assert Floors(costs, MEGATRON, 1e15, pinned_layout=False).leaf(cand) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_a_stage_of_everything_equal_has_its_floors_bytes(pp: int) -> None:
    """As many layers a stage, and ends that hold next to nothing: the memory floor is within what ends and the pipeline's order add."""
    costs = cost_model(gpt(num_layers=8, vocab_size=128), traits=TRAITS, modes=("none",))
    cand = candidate(pp=pp, micro_batch_size=4, num_microbatches=1)
    per = 8 // pp
    stages = []
    for index in range(pp):
        spans = [LayerSpan(kind="embedding", first=0, count=1)] if index == 0 else []
        spans.append(LayerSpan(kind="decoder", first=per * index, count=per))
        stages.append(Stage(layers=(*spans, *((LayerSpan(kind="head", first=0, count=1),) if index == pp - 1 else ()))))
    _, peak = costs.score(cand, tuple(stages))
    assert 0.85 * peak <= costs.memory_floor(cand) <= peak


def test_filling_is_between_the_mean_and_the_equal_stages() -> None:
    """m work/p at least, and for equal stages at most the schedule's (m + (p - 1)/v) work/p; more micro-batches, work or slower hops take
    longer, more chunks less."""
    for pp, m, vpp in ((2, 4, 1), (4, 8, 2), (8, 8, 4), (3, 1, 1)):
        found = filled(6.0, pp, m, vpp, 0.0)
        assert m * 6.0 / pp <= found <= (m + (pp - 1) / vpp) * 6.0 / pp * (1 + 1e-12)
        assert filled(12.0, pp, m, vpp, 0.0) == pytest.approx(2 * found)
        assert filled(6.0, pp, m + 1, vpp, 0.0) > found
        assert filled(6.0, pp, m, vpp, 0.1) > found
        assert filled(6.0, pp, m, vpp + 1, 0.0) < found
    assert filled(6.0, 4, 1, 1, 0.5) == pytest.approx(6.0 + 2 * 3 * 0.5), "one micro-batch goes through all, and over three borders twice"


@pytest.mark.parametrize("share", [0.5, 0.7, 0.8, 0.9, 1.0, 1.3])
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("modes", [("none", "full"), ("none", "selective", "full"), ("none", "layernorm", "mlp", "full")])
def test_the_recompute_that_memory_asks_for_is_the_least_of_a_linear_program(pp: int, share: float, modes: tuple[Any, ...]) -> None:
    """Layers may be divided: over the stages all layers, each in one of the modes, and in each stage what they hold within its room."""
    optimize = pytest.importorskip("scipy.optimize")
    costs = cost_model(gpt(num_layers=32), traits=TRAITS, modes=modes)
    cand = candidate(pp=pp, micro_batch_size=8, num_microbatches=16, recompute="full")
    each = [costs.layer(cand, "decoder", mode) for mode in modes]
    embedding, head = (costs.layer(cand, kind, "none").static_bytes for kind in ("embedding", "head"))
    slack, fixed = 1 + costs.calibration.allocator_slack, sum(costs.fixed_bytes(cand).values())
    held = [[cost.static_bytes + slack * (pp - stage) * cost.saved_bytes for cost in each] for stage in range(pp)]
    room = share * sum(by_mode[0] for by_mode in held) / pp * 32 / pp + fixed
    rooms = [room - fixed - (stage == 0) * embedding - (stage == pp - 1) * head for stage in range(pp)]
    nothing = [0.0] * len(modes)
    found = optimize.linprog(
        [cost.seconds - each[0].seconds for cost in each] * pp,
        A_ub=[[*nothing * stage, *by_mode, *nothing * (pp - 1 - stage)] for stage, by_mode in enumerate(held)],
        b_ub=rooms,
        A_eq=[[1.0] * len(modes) * pp],
        b_eq=[32.0],
        method="highs",
    )
    bound = Floors(costs, MEGATRON, room, pinned_layout=False).recomputed_seconds(cand)
    if found.status == 2:  # not even all of it again makes room
        return
    assert found.status == 0
    assert bound == pytest.approx(found.fun, rel=1e-6, abs=1e-12)
    assert bound > 0 or share >= 0.9
    assert bound == 0 or share < 1.3


@pytest.mark.parametrize("vpp", [1, 2])
def test_the_bound_of_a_group_is_its_work_filled_in_and_that_of_a_mesh_the_slowest_stages(vpp: int) -> None:
    """Before a layer of a group is priced: each layer at its least, an overhead a stage and micro-batch, and a layer less where chunks may
    be uneven. Of a mesh, without the fill, in micro-batches of as many samples as may be."""
    calibration = replace(datasheet(a100(), TRAITS), microbatch_overhead_s=0.01, step_overhead_s=0.5)
    costs = cost_model(gpt(num_layers=29, vocab_size=128), traits=TRAITS, calibration=calibration, global_batch_size=256)
    cand = candidate(pp=4, dp=2, num_microbatches=8, micro_batch_size=2, vpp=vpp)
    floors = Floors(costs, MEGATRON, 1e15, pinned_layout=False)
    each = {kind: costs.layer_floor_seconds(cand, kind, floors.least) for kind in ("embedding", "decoder", "head")}
    embedding, decoder, head = map(sum, each.values())
    work, slowest = embedding + 29 * decoder + head + 4 * 0.01, 8 * decoder + 0.01
    longest = max(forward + backward + forward for forward, backward in each.values())
    assert slowest > work / 4
    filled_in = filled(work, 4, 8, vpp, 0.0) - (longest if vpp > 1 else 0.0)
    assert floors.group(cand, vpp) == pytest.approx(max(8 * slowest, filled_in) + 0.5)
    unknown = Floors(costs, MEGATRON, 1e15, pinned_layout=True).group(cand, vpp)
    assert unknown == pytest.approx((8 * slowest if vpp > 1 else max(8 * slowest, filled_in)) + 0.5), "of chunks of any size"
    assert floors.shape(cand, 2, [False]) == pytest.approx(256 / (2 * 2) * slowest + 0.5)
    for most, samples in ((63, 63), (64, 256), (100, 256)):  # of many samples all of a step's are looked at together
        many = replace(cand, micro_batch_size=samples)
        here = 8 * sum(costs.layer_floor_seconds(many, "decoder", floors.least)) + 0.01
        assert floors.shape(cand, most, [False]) == pytest.approx(256 / (2 * samples) * here + 0.5)


@pytest.mark.parametrize("tp", [2, 4])
def test_the_bound_of_a_mesh_is_that_of_its_faster_way_with_or_without_sequence_parallelism(tp: int) -> None:
    """Which of them that is depends on the network; where rules leave one way, its own."""
    costs = cost_model(gpt(num_layers=8), traits=TRAITS)
    floors = Floors(costs, MEGATRON, 1e15, pinned_layout=False)
    both = [candidate(tp=tp, dp=2, micro_batch_size=2, num_microbatches=16, sequence_parallel=parallel) for parallel in (False, True)]
    each = [floors.group(cand, 1) - costs.calibration.step_overhead_s for cand in both]
    assert each[0] != each[1]
    for cand in both:
        for parallels, least in (([False, True], min(each)), ([False], each[0]), ([True], each[1])):
            assert floors.shape(cand, 2, parallels) - costs.calibration.step_overhead_s == pytest.approx(least)


def test_interleaving_goes_through_all_borders_once_a_group_and_round() -> None:
    """12 micro-batches in groups of 4 through three chunks: before the third group begins two have been around twice each; its first
    micro-batch then goes all the way down, and up again but for the way back from the last stage to the first."""
    costs = cost_model(gpt(num_layers=24))
    cand = candidate(pp=4, vpp=3, num_microbatches=12)
    hops = costs.hop_seconds(cand)[:4]
    layers = sum(count * costs.layer(cand, kind, "none").seconds for kind, count in (("embedding", 1), ("decoder", 24), ("head", 1)))
    through = layers + 12 * costs.calibration.microbatch_overhead_s
    down_and_up = 2 * (3 * sum(hops) - hops[3])
    assert rounds(costs, cand) == pytest.approx(2 * 2 * sum(hops) + through + down_and_up)
    assert rounds(costs, cand, 6) == pytest.approx(1 * 2 * sum(hops) + through + down_and_up)
    assert rounds(costs, replace(cand, microbatch_group_size_per_vp_stage=8)) == rounds(costs, cand, 8)
    assert rounds(costs, cand, 5) == rounds(costs, cand, 4), "a last, smaller group is one more"


@pytest.mark.parametrize("vpp", [2, 3])
@pytest.mark.parametrize(("latency", "bandwidth"), [(0.01, 1e12), (1e-9, 1e6)])
def test_over_a_slow_link_rounds_or_the_link_itself_are_the_bound(vpp: int, latency: float, bandwidth: float) -> None:
    """Long hops: every round waits for them; a narrow link: it carries an activation of each chunk and micro-batch, one after the other."""
    levels = tuple(replace(level, latency=latency, bandwidth=bandwidth) for level in a100(4).levels)
    costs = cost_model(gpt(num_layers=12), traits=TRAITS, cluster=replace(a100(4), levels=levels))
    cand = candidate(pp=4, vpp=vpp, num_microbatches=32)
    around, busy = rounds(costs, cand), costs.busy_seconds(cand)
    wire = costs.boundary_bytes(cand) / (bandwidth * costs.calibration.p2p_efficiency)
    assert busy == pytest.approx(32 * vpp * wire)
    assert (around > busy) == (latency == 0.01)
    leaf = Floors(costs, MEGATRON, 1e15, pinned_layout=False).leaf(cand)
    assert leaf == pytest.approx(max(around, busy) + costs.once_seconds(cand))
    assert Floors(costs, MEGATRON, 1e15, pinned_layout=True).leaf(cand) == leaf
    assert costs.busy_seconds(replace(cand, vpp=1, schedule="1f1b")) == 0.0
    two = candidate(pp=2, vpp=vpp, num_microbatches=32)
    assert costs.busy_seconds(two) == pytest.approx(32 * (2 * vpp - 1) * wire), "the way back is over the same link"


def test_the_floor_of_a_pipeline_is_its_slowest_stage_or_one_micro_batchs_way() -> None:
    """29 layers on 4 stages: some stage has 8. Of one micro-batch all layers follow each other. Each with its overhead."""
    calibration = replace(datasheet(a100(), TRAITS), microbatch_overhead_s=0.25, step_overhead_s=0.5)
    costs = cost_model(gpt(num_layers=29, vocab_size=128), traits=TRAITS, calibration=calibration, modes=("none",))
    cost = {kind: costs.layer(candidate(pp=4), kind, "none") for kind in ("embedding", "decoder", "head")}
    for m in (1, 16):
        cand = candidate(pp=4, num_microbatches=m)
        slowest = m * (8 * cost["decoder"].seconds + 0.25)
        way = 29 * cost["decoder"].seconds + cost["embedding"].seconds + cost["head"].seconds + 4 * 0.25
        assert costs.time_floor(cand) == pytest.approx((way if m == 1 else slowest) + costs.once_seconds(cand))


@pytest.mark.parametrize("vpp", [1, 2])
def test_of_several_kinds_the_most_frequent_one_is_recomputed_as_if_it_were_alone(vpp: int) -> None:
    """30 layers behind two of another kind, in bytes that are too few; over chunks less, as first ones may have the other kind's place."""
    plain = describe(gpt(num_layers=30), 2048)
    embedding, decoder, head = plain.runs
    other = replace(decoder, layer=replace(decoder.layer, kind="encoder"), count=2)
    cand = candidate(pp=4, vpp=vpp, micro_batch_size=8, num_microbatches=16, recompute="full")
    alone, mixed = (
        cost_model(replace(plain, runs=(embedding, *inside, head)), traits=TRAITS, modes=MODES) for inside in ((decoder,), (other, decoder))
    )
    saved, static = (getattr(alone.layer(cand, "decoder", "none"), name) for name in ("saved_bytes", "static_bytes"))
    room = sum(alone.fixed_bytes(cand).values()) + 9 * static + 10 * saved
    needed = [Floors(costs, MEGATRON, room, pinned_layout=False).recomputed_seconds(cand) for costs in (alone, mixed)]
    assert 0 < needed[1] <= needed[0]
    assert needed[1] == needed[0] or vpp > 1
    ample, short = (Floors(mixed, MEGATRON, least, pinned_layout=False).leaf(cand) for least in (1e15, room))
    assert short > 1.03 * ample


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("vpp", [1, 2, 3])
def test_what_fits_as_it_is_needs_no_recompute_however_its_layers_are_spread_over_chunks(pp: int, vpp: int) -> None:
    """In just the bytes of a plan without recompute the bound asks for none; in half of what its layers save, with as many to a chunk,
    for some."""
    for layers in (pp * vpp, pp * vpp + 1, 2 * pp * vpp - 1, 2 * pp * vpp + pp):
        costs = cost_model(gpt(num_layers=layers, vocab_size=128), traits=TRAITS, modes=("none", "full"))
        cand = candidate(pp=pp, vpp=vpp, micro_batch_size=4, num_microbatches=2 * pp, recompute="full")
        totals = [layers // pp + (stage < layers % pp) for stage in range(pp)]
        chunks = [spread(total, vpp, stage) for stage, total in enumerate(totals)]
        split = stages_of(costs.model, [chunks[stage][chunk] for chunk in range(vpp) for stage in range(pp)], pp)
        _, peak = costs.score(cand, split)
        assert Floors(costs, MEGATRON, peak, pinned_layout=False).recomputed_seconds(cand) == 0.0
    per = 6
    costs = cost_model(gpt(num_layers=per * pp * vpp, vocab_size=128), traits=TRAITS, modes=("none", "full"))
    saved, static = costs.layer(cand, "decoder", "none").saved_bytes, costs.layer(cand, "decoder", "none").static_bytes
    fixed = sum(costs.fixed_bytes(cand).values())
    short = fixed + per * vpp * static + 0.5 * pp * per * saved
    assert Floors(costs, MEGATRON, short, pinned_layout=False).recomputed_seconds(cand) > 0.0
