"""A stage is the sum of its layers, and its peak is that of its fullest phase: numbers that can be checked by hand."""

from __future__ import annotations

import random

import pytest
from cost_cases import DEEPSPEED, MEGATRON, a100, candidate, cost_model, gpt, stages
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from orchestrator.cost.calibration import datasheet
from orchestrator.cost.memory import RecomputedPeak
from orchestrator.cost.price import StageMemory, StageSums
from orchestrator.strategy.layout import LayerSpan, Stage
from orchestrator.strategy.spec import Recompute

RECOMPUTES = ("none", "full", "mlp")


@given(st.lists(st.tuples(st.sampled_from(RECOMPUTES), st.integers(1, 5), st.integers(0, 1)), max_size=5), st.integers(0, 3))
def test_layers_added_one_by_one_cost_what_the_stage_costs(spans: list[tuple[str, int, int]], index: int) -> None:
    model = cost_model(gpt(num_layers=32))
    cand = candidate(pp=4, dp=2, vpp=2, zero_stage=1)
    stage = Stage(layers=tuple(LayerSpan(kind="decoder", first=0, count=n, recompute=mode, chunk=chunk) for mode, n, chunk in spans))
    one_by_one = model.sums(cand)
    layers = [(mode, chunk) for mode, n, chunk in spans for _ in range(n)]
    random.Random(0).shuffle(layers)
    for mode, chunk in layers:
        one_by_one.add(model.layer(cand, "decoder", mode), 1, chunk)
    ours, whole = model.stage_cost(cand, one_by_one, index), model.stage(cand, stage, index)
    assert ours.forward_s == pytest.approx(whole.forward_s)
    assert ours.backward_s == pytest.approx(whole.backward_s)
    assert (ours.exposed_s, ours.optimizer_s, ours.peak_bytes) == pytest.approx((whole.exposed_s, whole.optimizer_s, whole.peak_bytes))


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=2, max_size=2), st.integers(0, 3), st.sampled_from(["full", "mlp"])
)
def test_a_peak_for_another_recompute_is_the_stages_own(chunks: list[tuple[int, int]], index: int, mode: Recompute) -> None:
    """Of each of two chunks so many layers, the first of them recomputed; embedding and head where they are."""
    model = cost_model(gpt(num_layers=32))
    cand = candidate(pp=4, dp=2, vpp=2, zero_stage=1)
    outer = [(kind, chunk) for kind, chunk, here in (("embedding", 0, index == 0), ("head", 1, index == 3)) if here]
    plain, asked = model.sums(cand), model.sums(cand)
    for kind, chunk in outer:
        plain.add(model.layer(cand, kind, "none"), 1, chunk)
        asked.add(model.layer(cand, kind, "none"), 1, chunk)
    without, recomputed = model.layer(cand, "decoder", "none"), model.layer(cand, "decoder", mode)
    layers, insides = [], []
    for chunk, (count, some) in enumerate(chunks):
        inside = min(some, count)
        plain.add(without, count, chunk)
        layers.append((chunk, count, without, recomputed))
        insides.append(inside)
        for cost, many in ((recomputed, inside), (without, count - inside)):
            if many:
                asked.add(cost, many, chunk)
    memory = model.stage_memory(cand, index)
    if any(count for count, _ in chunks):
        found = RecomputedPeak(memory, plain, [model.layer(cand, kind, "none") for kind, _ in outer]).peak_bytes(layers, insides)
        assert found == pytest.approx(memory.peak_bytes(asked), rel=1e-12)


def test_a_copy_of_sums_goes_its_own_way() -> None:
    model, cand = cost_model(), candidate(dp=2)
    layer = model.layer(cand, "decoder", "none")
    first = model.sums(cand)
    first.add(layer, 2)
    second = first.copy()
    second.add(layer, 3)
    assert second.saved == [5 * layer.saved_bytes]
    assert first.saved == [2 * layer.saved_bytes]
    assert second.parameters == 5 * layer.parameters
    assert second.transient_backward == layer.transient_backward_bytes  # the largest, not the sum


def memory_of(stage: int = 0, *, traits: object = MEGATRON, slack: float = 0.0, **fields: object) -> StageMemory:
    calibration = replace(datasheet(a100(), MEGATRON), allocator_slack=slack)
    return cost_model(gpt(num_layers=8), traits=traits, calibration=calibration).stage_memory(candidate(**fields), stage)  # type: ignore[arg-type]


def held(saved: list[float], forward: float = 0.0, backward: float = 0.0, in_backward: float = 0.0, in_step: float = 0.0) -> StageSums:
    added = StageSums(len(saved), 0.0)
    added.saved, added.transient_forward, added.transient_backward = saved, forward, backward
    added.in_backward, added.in_step = in_backward, in_step
    return added


@pytest.mark.parametrize(
    ("sums", "most", "phase"),
    [
        (held([10.0], forward=5.0, backward=3.0), 4 * 10 + 5, "forward"),
        (held([10.0], forward=5.0, backward=3.0, in_backward=4.0), 4 * 10 + 7, "backward"),
        (held([1.0], in_step=9.0), 9, "step"),
    ],
)
def test_the_peak_is_that_of_the_fullest_phase(sums: StageSums, most: float, phase: str) -> None:
    """pp=4: the first stage holds 4 micro-batches in flight, none in the optimizer's step."""
    memory = memory_of(pp=4, num_microbatches=8)
    assert memory.peak_bytes(sums) - memory.fixed_bytes == pytest.approx(most)
    name, causes = memory.itemised(sums)
    assert name == phase
    assert sum(causes.values()) == pytest.approx(memory.peak_bytes(sums))
    fragments = memory_of(pp=4, num_microbatches=8, slack=0.1)
    assert fragments.peak_bytes(sums) - fragments.fixed_bytes == pytest.approx(1.1 * most)
    assert fragments.itemised(sums)[1]["fragmentation"] == pytest.approx(0.1 * most)


@pytest.mark.parametrize(("in_backward", "most"), [(4.0, 10 + 3), (10.0, 10 + 3), (12.0, 10 + 2 + 3)])
def test_with_one_micro_batch_gradients_take_the_place_of_activations(in_backward: float, most: float) -> None:
    sums = held([10.0], backward=3.0, in_backward=in_backward)
    alone, several = memory_of(pp=1, num_microbatches=1), memory_of(pp=1, num_microbatches=2)
    assert alone.peak_bytes(sums) - alone.fixed_bytes == pytest.approx(most)
    assert several.peak_bytes(sums) - several.fixed_bytes == pytest.approx(10 + 3 + in_backward)


def test_chunks_peak_where_the_heavier_one_has_most_in_flight() -> None:
    """pp=2, two chunks, stage 0: (4, 1) in flight, or (3, 2)."""
    memory = memory_of(pp=2, vpp=2, num_microbatches=4)
    assert memory.activations([10.0, 1.0]) == 41.0
    assert memory.activations([1.0, 10.0]) == 23.0


def test_deepspeeds_stages_keep_what_crosses_their_borders() -> None:
    """The first its output, the last its input, those between both: once for each micro-batch in flight."""
    model = cost_model(gpt(num_layers=8), traits=DEEPSPEED)
    cand = candidate(pp=4, num_microbatches=8, schedule="deepspeed_1f1b")
    border = 2048 * 1024 * 2
    assert model.boundary_bytes(cand) == border
    kept = [model.stage_memory(cand, stage).activations([0.0]) / border for stage in range(4)]
    assert kept == [4 * 1, 3 * 2, 2 * 2, 1 * 1]
    megatron = candidate(pp=4, num_microbatches=8)
    assert [model.stage_memory(megatron, stage).activations([0.0]) for stage in range(4)] == [0.0] * 4


def test_every_rank_pays_for_communicators_and_for_the_pipelines_two_buffers() -> None:
    model = cost_model()
    c = model.calibration
    one, two = model.fixed_bytes(candidate()), model.fixed_bytes(candidate(pp=2))
    assert one == {"context": c.context_bytes, "buffers": c.workspace_bytes}
    assert two["context"] - c.context_bytes == pytest.approx(2 * c.communicator_bytes)  # the pipeline's, and the one of all ranks
    assert two["buffers"] - c.workspace_bytes == 2 * 2048 * 1024 * 2


def test_the_slowest_stage_updates_last_and_once_for_all() -> None:
    """Stage 0 has the embedding besides: its update is the longer one, and the step waits for it and not for both."""
    model = cost_model()
    cand = candidate(pp=2, dp=2, zero_stage=1)
    split = stages(model.model, [2, 2])
    updates = [model.stage(cand, stage, index).optimizer_s for index, stage in enumerate(split)]
    prediction = model.price(cand, split)
    assert prediction.by_cause["optimizer"] == max(updates)
    costs = [model.stage(cand, stage, index) for index, stage in enumerate(split)]
    free = [replace(cost, optimizer_s=0.0) for cost in costs]
    assert model.score_stages(cand, costs)[0] - model.score_stages(cand, free)[0] == pytest.approx(max(updates))
    late = [replace(free[0], exposed_s=free[0].exposed_s + 1.0), free[1]]
    assert model.score_stages(cand, late)[0] > model.score_stages(cand, free)[0]


def test_nothing_added_up_is_nothing() -> None:
    sums = StageSums(2, 0.25)
    assert (sums.forward_s, sums.backward_s) == ([0.25, 0.25], [0.25, 0.25])
    others = [getattr(sums, name) for name in StageSums.__slots__ if name not in ("forward_s", "backward_s", "saved")]
    assert [sums.saved, *others] == [[0.0, 0.0], *[0] * len(others)]


def test_of_groups_larger_than_the_pipeline_what_comes_around_waits_at_its_ends_alone() -> None:
    """Groups of 6 on 4 stages: two activations more on the first, two gradients more on the last (fwd_recv_buffer_size)."""
    model = cost_model(gpt(num_layers=8))
    for group, kept in ((6, [2, 0, 0, 2]), (4, [0, 0, 0, 0]), (None, [0, 0, 0, 0])):
        cand = replace(candidate(pp=4, vpp=2, num_microbatches=12), microbatch_group_size_per_vp_stage=group)
        assert [model.stage_memory(cand, stage).borders for stage in range(4)] == [n * model.boundary_bytes(cand) for n in kept]
