"""Both sides of a price's conditions, each part of one alone: where nothing is to be paid the price is nothing, to the last bit."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from cost_cases import MEGATRON, a100, candidate, cost_model, describe, gpt, stages
from msgspec.structs import replace

from orchestrator.cost.activations import LayerActivations
from orchestrator.cost.bounds import Floors, filled, rounds
from orchestrator.cost.calibration import Calibration, datasheet
from orchestrator.cost.price import CostModel, StageSums
from orchestrator.cost.schedule import finish_times
from orchestrator.cost.schedule.periods import drift, shift
from orchestrator.cost.uncertainty import Situation, kept_free, ratios
from orchestrator.engines import ENGINES
from orchestrator.hardware.catalog import GPUS
from orchestrator.hardware.spec import Software
from orchestrator.model.ops import Attention, Enter, Gemm, Saved
from orchestrator.model.parts.experts import Experts
from orchestrator.model.spec import LayerSpec
from orchestrator.model.training import Training
from orchestrator.strategy.capabilities import Traits
from orchestrator.strategy.spec import PP_BEFORE_DP, RECOMPUTE_ORDER, Mesh, Recompute, Strategy
from orchestrator.strategy.workload import Workload

CAPABLE = ENGINES["megatron"].capabilities(Software())
TRAITS = replace(MEGATRON, states={f"mixed/{stage}": MEGATRON.states["mixed/1"] for stage in range(4)})
LAYER = describe(gpt(), 2048).kind("decoder")
C = replace(Calibration(), transient_activations=2.0)


# Activations


def working(layer: LayerSpec, traits: Traits = MEGATRON, samples: int = 1, precision: str = "bf16", **fields: Any) -> float:
    """Bytes that a forward pass needs besides what it keeps."""
    degrees = {axis: fields.pop(axis) for axis in ("tp", "cp") if axis in fields}
    strategy = Strategy(mesh=Mesh(**degrees), **fields)
    return LayerActivations(layer, strategy, samples, precision, traits, C, 8).with_recompute("none").transient_forward


@pytest.mark.parametrize(("samples", "cp", "tp"), list(product((1, 3), (1, 2), (2, 4))))
def test_a_pass_needs_the_gathered_input_of_its_widest_region_and_twice_its_largest_tensor(samples: int, cp: int, tp: int) -> None:
    """Under sequence parallelism alone; the whole of the rank's tokens, whatever tp."""
    saved = (Saved(name="x", elements=2**20, shard="tp"), Saved(name="mask", elements=2**20, shard="tp", itemsize=1))
    product_ = Gemm(name="x", tokens=1024, k=512, n=512, split="column", saves=saved)
    layer = replace(LAYER, ops=(Enter(elements=2**18), product_, Enter(elements=2**19)))
    largest = 2 * 2 * 2**20 * samples / (tp * cp)
    assert working(layer, samples=samples, tp=tp, cp=cp, cp_comm_type="a2a") == pytest.approx(largest)
    gathered = largest + 2 * 2**19 * samples / cp
    assert working(layer, samples=samples, tp=tp, cp=cp, cp_comm_type="a2a", sequence_parallel=True) == pytest.approx(gathered)


def test_a_layer_without_operations_keeps_and_needs_nothing() -> None:
    empty = replace(LAYER, ops=(), input_elements=0)
    for fields in ({}, {"tp": 2, "sequence_parallel": True}, {"tp": 2, "cp": 2}):
        assert working(empty, replace(MEGATRON, gathers_few_query_groups=True), **fields) == 0.0


@pytest.mark.parametrize(("kv_heads", "tp", "few"), [(2, 4, True), (4, 4, False), (8, 4, False), (1, 2, True), (1, 1, False)])
def test_query_groups_fewer_than_ranks_are_gathered_twice_by_engines_that_do(kv_heads: int, tp: int, few: bool) -> None:
    """As they come and in order."""
    op = Attention(name="a", query_len=1024, key_len=1024, heads=8, kv_heads=kv_heads, head_dim=64, causal=True)
    layer = replace(LAYER, ops=(op,))
    assert working(layer, tp=tp) == 0.0
    gathering = replace(MEGATRON, gathers_few_query_groups=True)
    assert working(layer, gathering, samples=3, tp=tp) == (2 * 2 * 3 * op.elements if few else 0.0)
    two = replace(layer, ops=(op, replace(op, name="b", query_len=512, key_len=512)))
    assert working(two, gathering, samples=3, tp=tp) == (2 * 2 * 3 * op.elements if few else 0.0), "one after the other"
    beside = replace(layer, ops=(op, Enter(elements=10 * op.elements)))
    assert working(beside, gathering, tp=tp, sequence_parallel=tp > 1) == (20 * op.elements if tp > 1 else 0.0), "the larger of both"


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_below_stage_3_a_layer_needs_its_activations_alone(zero_stage: Any) -> None:
    costs = cost_model()
    cand = candidate(dp=8, zero_stage=zero_stage)
    for mode in RECOMPUTE_ORDER:
        kept = LayerActivations(LAYER, cand.strategy, 1, "bf16", costs.traits, costs.calibration, 8).with_recompute(mode)
        cost = costs.layer(cand, "decoder", mode)
        assert (cost.saved_bytes, cost.transient_forward_bytes, cost.transient_backward_bytes) == kept


@pytest.mark.parametrize(("tp", "cp", "etp"), [(1, 1, 1), (2, 1, 2), (1, 2, 2), (2, 2, 4), (4, 1, 2)])
def test_ranks_that_share_an_expert_keep_each_others_tokens(tp: int, cp: int, etp: int) -> None:
    """Each its own share of the tokens, which it sent: of two experts a token two copies come."""
    product_ = Gemm(name="mlp.experts.linear_fc1", tokens=1024, k=512, n=2048, split="column", experts=8)
    layer = replace(LAYER, ops=(product_, replace(product_, name="mlp.experts.linear_fc2", k=2048, n=512, split="row")))
    strategy = Strategy(mesh=Mesh(tp=tp, cp=cp, dp=4, etp=etp))
    found = LayerActivations(layer, strategy, 3, "bf16", MEGATRON, C, 8).with_recompute("none")
    assert found.saved == pytest.approx((etp - 1) * 3 * 1024 * 512 * 2 / (tp * cp))


# Memory of a stage


def test_with_one_micro_batch_gradients_that_fit_in_the_place_of_activations_take_none() -> None:
    costs = cost_model()
    for m, besides in ((1, 0.0), (2, 5.0)):
        memory = costs.stage_memory(candidate(num_microbatches=m), 0)
        assert memory.peak_of(0.0, 10.0, 0.0, 0.0, 5.0, 0.0) == (1 + memory.slack) * (10.0 + besides)
        assert [phase.transient for phase in memory.phases(10.0, 0.0, 0.0, 5.0, 7.0)] == [0.0, besides, 7.0]
        assert memory.peak_of(100.0, 10.0, 1.0, 0.0, 0.0, 20.0) == 100.0 + (1 + memory.slack) * 20.0


@pytest.mark.parametrize("index", range(4))
def test_even_chunks_hold_what_they_would_hold_one_by_one(index: int) -> None:
    """And what the first or the last of them has besides."""
    memory = cost_model(gpt(num_layers=8)).stage_memory(candidate(pp=4, vpp=3, num_microbatches=8), index)
    for saved, more in ((3.0, 0.0), (3.0, 5.0), (0.0, 5.0)):
        assert memory.even_activations(saved, more, first=True) == pytest.approx(memory.activations([saved + more, saved, saved]))
        assert memory.even_activations(saved, more, first=False) == pytest.approx(memory.activations([saved, saved, saved + more]))


@pytest.mark.parametrize(("m", "mode"), [(1, "none"), (4, "none"), (4, "full")])
def test_the_fullest_moment_of_a_step_is_the_peak_and_what_comes_goes_again(m: int, mode: Recompute) -> None:
    """Transfers hold nothing of their own; after the last pass the optimizer's step is left. A backward pass that makes a layer again needs
    more than the forward one did."""
    costs = cost_model()
    cand, split = candidate(pp=2, num_microbatches=m), stages(costs.model, [2, 2], mode)
    lanes = costs.played(cand, split).lanes
    for index, stage in enumerate(split):
        memory, sums = costs.stage_memory(cand, index), costs.sums(cand, stage.layers)
        moments = memory.over_time(sums, lanes[index])
        assert len(moments) == 2 * m + 1
        assert max(sum(causes.values()) for _, _, causes in moments) == pytest.approx(memory.peak_bytes(sums))
        assert moments[-1][2]["activations"] == 0.0
        assert moments[-1][:2] == (lanes[index][-1].end_s, lanes[index][-1].end_s)
        passes = [(slot.begin_s, slot.end_s) for slot in lanes[index] if slot.action in ("forward", "backward")]
        assert [moment[:2] for moment in moments[:-1]] == passes
        actions = [slot.action for slot in lanes[index] if slot.action in ("forward", "backward")]
        moving = [(action, causes["transient"]) for action, (*_, causes) in zip(actions, moments, strict=False)]
        needed = {way: {nbytes for action, nbytes in moving if action == way} for way in actions}
        assert needed["forward"] == {sums.transient_forward}
        assert min(needed["backward"]) >= sums.transient_backward
        if index == 0:  # the last stage's logits are more than a layer
            assert (min(needed["backward"]) > sums.transient_forward) == (mode == "full")


# Caches that only save time


def test_a_layer_without_experts_is_priced_once_whatever_divides_the_experts() -> None:
    costs = cost_model(gpt(num_layers=8))
    plain = costs.layer(candidate(dp=8), "decoder", "none")
    apart = {"moe_token_dispatcher_type": "flex"}, {"moe_shared_expert_overlap": True}
    for fields in ({"ep": 2}, {"ep": 8}, {"ep": 2, "etp": 2}, *({"ep": 4, **more} for more in apart)):
        assert costs.layer(candidate(dp=8, **fields), "decoder", "none") is plain


def test_a_model_that_reckons_with_other_modes_knows_what_either_priced() -> None:
    costs = cost_model()
    assert costs.with_modes(costs.modes) is costs
    other = costs.with_modes(("none", "full"))
    assert other is not costs
    assert (other.modes, costs.modes) == (("none", "full"), RECOMPUTE_ORDER)
    cand = candidate(recompute="full")
    assert other.layer(cand, "decoder", "full") is costs.layer(cand, "decoder", "full")
    assert other.modes_of(cand, "decoder") == ("none", "full")
    assert costs.modes_of(cand, "decoder") == RECOMPUTE_ORDER
    assert other.modes_of(cand, "head") == ("none",)
    assert other.modes_of(candidate(recompute="mlp"), "decoder") == ("none",)


# Constants


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "mxfp8", "blockwise"])
@pytest.mark.parametrize("gpu", ["H100-SXM", "B200"])
def test_scales_of_whole_tensors_are_faster_than_of_blocks_where_the_hardware_has_both(recipe: Any, gpu: str) -> None:
    cluster = replace(a100(), gpu=next(one for name, one in GPUS.items() if name.startswith(gpu)))
    training = Training(global_batch_size=64, seq_length=2048, precision="fp8", fp8_recipe=recipe)
    base = datasheet(cluster, MEGATRON)
    found = CostModel(Workload(model=describe(gpt(), 2048), training=training, cluster=cluster), MEGATRON, base).calibration
    faster = gpu == "B200" and recipe in ("delayed", "tensorwise")
    assert found.fp8_efficiency == pytest.approx(base.fp8_efficiency * (base.mxfp8_slowdown if faster else 1.0))


def test_the_least_risk_that_can_be_told_is_one_run_more_than_was_measured() -> None:
    now = Situation(generation="9", experts=False, eight_bit=False)
    least = 1 / (len(ratios(now, "bytes").values) + 1)
    assert 0.0 < kept_free(least, now) < 1.0
    with pytest.raises(ValueError, match="can't be told"):
        kept_free(least * 0.9999, now)


# Schedules


def test_a_state_of_passes_that_take_no_time_does_not_move() -> None:
    assert shift([0.0, 0.0], [0.0, 0.0]) == 0.0
    assert drift([([0.0, 0.0], [0.0])] * 3)[1] == [0.0, 0.0]
    assert finish_times("interleaved", [0.0] * 4, [0.0] * 4, 0.0, 1000, 2) == [0.0, 0.0]


def test_margins_that_grow_or_stay_never_change_their_sign() -> None:
    blocks = [([10.0 * n, 11.0 * n], [5.0 + n, -5.0 - n, 1.0, 0.0]) for n in range(3)]
    assert drift(blocks) == (2**62, [10.0, 11.0])
    towards = [([10.0 * n, 11.0 * n], [5.0 + n, -7.0 + 2 * n]) for n in range(3)]
    assert drift(towards) == (0, [10.0, 11.0]), "-7, -5, -3: 1.5 periods from 0, of which one is walked"


@pytest.mark.parametrize(("pp", "vpp", "m"), [(2, 2, 40), (4, 2, 400), (4, 3, 40)])
def test_where_no_rank_waits_its_end_is_known_from_its_work(pp: int, vpp: int, m: int) -> None:
    """Equal chunks and no transfers: a walk that stops above its limits answers with the ends themselves."""
    f, b = [1.0] * pp * vpp, [2.0] * pp * vpp
    ends = finish_times("interleaved", f, b, 0.0, m, vpp)
    assert finish_times("interleaved", f, b, 0.0, m, vpp, limits=[0.9 * max(ends)] * pp) == pytest.approx(ends)
    assert max(ends) == pytest.approx((m + (pp - 1) / vpp) * vpp * 3.0)


def test_a_rank_ends_no_sooner_than_the_next_ones_last_gradient_comes() -> None:
    """The first rank has next to no work of its own, and is through when the others are: its limit alone stops the walk."""
    f, b = [0.01, 1.0, 1.0, 1.0] * 2, [0.02, 2.0, 2.0, 2.0] * 2
    ends = finish_times("interleaved", f, b, 9.0, 400, 2)
    stopped = finish_times("interleaved", f, b, 9.0, 400, 2, limits=[1000.0, *[float("inf")] * 3])
    assert 400 * 0.06 < 1000 < stopped[0] < 0.9 * ends[0]


# Bounds


def test_a_border_inside_a_node_is_faster_than_one_between_nodes() -> None:
    """8 GPUs a node: with stages before copies four stages of two are in one; with copies before stages each border is the fabric's."""
    costs = cost_model(gpt(num_layers=8), cluster=a100(16))
    near = candidate(tp=2, pp=4, dp=2, vpp=2, num_microbatches=8)
    near = replace(near, strategy=replace(near.strategy, mesh=replace(near.mesh, order=PP_BEFORE_DP)))
    far = candidate(tp=2, pp=4, dp=2, vpp=2, num_microbatches=8)
    nbytes, share = costs.boundary_bytes(near), costs.calibration.p2p_efficiency
    inner, outer = (level.bandwidth * share for level in costs.cluster.levels)
    assert costs.busy_seconds(near) == pytest.approx(8 * 2 * nbytes / inner)
    assert costs.busy_seconds(far) == pytest.approx(8 * 2 * nbytes / outer)


@pytest.mark.parametrize(("pp", "per_node"), [(2, 8), (4, 2), (4, 4)])
@pytest.mark.parametrize("m", [8, 64])
def test_the_bound_of_chunks_is_their_work_filled_in_less_a_layer(pp: int, per_node: int, m: int) -> None:
    """No memory limit. The work of all layers and of an overhead a chunk; the fastest of the borders; the mean update, and the step's
    overhead."""
    cluster = a100(pp * 2, gpus_per_node=per_node)
    calibration = replace(datasheet(cluster, MEGATRON), microbatch_overhead_s=0.01, step_overhead_s=0.5)
    costs = cost_model(gpt(num_layers=31), traits=TRAITS, cluster=cluster, calibration=calibration, modes=("none",))
    cand = candidate(pp=pp, dp=2, vpp=2, num_microbatches=m)
    layers = [(costs.layer(cand, kind, "none"), count) for kind, count in (("embedding", 1), ("decoder", 31), ("head", 1))]
    work = sum(count * layer.seconds for layer, count in layers) + pp * 2 * 0.01
    longest = max(layer.seconds + layer.forward_s for layer, _ in layers)
    update = sum(count * layer.optimizer_s for layer, count in layers) / pp
    hops = costs.hop_seconds(cand)[: pp - 1]
    end = filled(work, pp, m, 2, min(hops)) - longest + update + costs.once_seconds(cand)
    others = max(costs.time_floor(cand), rounds(costs, cand) + costs.once_seconds(cand))
    leaf = Floors(costs, CAPABLE, 1e15, pinned_layout=False).leaf(cand)
    assert leaf == pytest.approx(max(end, others), rel=1e-9)
    assert end > others or pp == 2
    assert (min(hops) < max(hops)) == (per_node == 4), "two stages a node"


@pytest.mark.parametrize("vpp", [1, 2])
def test_even_stages_end_after_what_comes_down_and_their_own_work(vpp: int) -> None:
    """8 layers on each of 4 stages: a stage begins behind the first chunks of those before and two transfers over each border, then works
    all micro-batches; the slowest update and what comes once follow."""
    calibration = replace(datasheet(a100(4), MEGATRON), microbatch_overhead_s=0.1, step_overhead_s=7.0)
    costs = cost_model(gpt(num_layers=32), traits=TRAITS, cluster=a100(4), calibration=calibration, modes=("none",))
    cand = candidate(pp=4, vpp=vpp, num_microbatches=64)
    embedding, decoder, head = (costs.layer(cand, kind, "none") for kind in ("embedding", "decoder", "head"))
    hops = costs.hop_seconds(cand)
    inside = [embedding.seconds, 0.0, 0.0, head.seconds]
    ends, lead = [], 0.0
    for stage in range(4):
        ends.append(lead + 64 * (vpp * 0.1 + 8 * decoder.seconds + inside[stage]))
        lead += 0.1 + 8 / vpp * decoder.seconds + (inside[0] if stage == 0 else 0.0) + 2 * hops[stage]
    update = max(8 * decoder.optimizer_s + end.optimizer_s for end in (embedding, head))
    expected = max(ends) + update + costs.once_seconds(cand)
    any_split = Floors(costs, CAPABLE, 1e15, pinned_layout=False).leaf(cand)
    divided = Floors(costs, replace(CAPABLE, uneven_stages=False), 1e15, pinned_layout=False).leaf(cand)
    assert divided == pytest.approx(expected)
    assert divided > any_split


@pytest.mark.parametrize("offload", [False, True])
def test_a_means_states_are_all_layers_over_the_stages(offload: bool) -> None:
    costs = cost_model(gpt(num_layers=8), traits=TRAITS)
    floors = Floors(costs, CAPABLE, 1e15, pinned_layout=False)
    for stage in (0, 1, 2, 3):
        cand = candidate(pp=4, dp=2)
        here = replace(cand, strategy=replace(cand.strategy, zero_stage=stage, offload_optimizer=offload))
        each = {kind: costs.layer(here, kind, "none").static_bytes for kind in ("embedding", "decoder", "head")}
        mean = (each["embedding"] + 8 * each["decoder"] + each["head"]) / 4
        assert floors.states_bytes(cand, stage, offload) == pytest.approx(mean)


def test_bounds_of_states_differ_where_an_option_alone_does() -> None:
    """Megatron's own FSDP keeps one copy of FP8 weights, where its distributed optimizer keeps two: whichever is asked for first."""
    costs = cost_model(cluster=replace(a100(), gpu=GPUS["H100-SXM-80GB"]), traits=TRAITS, precision="fp8", fp8_recipe="delayed")
    both = [candidate(dp=2, zero_stage=2, fp8_param_gather=True, megatron_fsdp=own) for own in (False, True)]
    for order in (both, both[::-1]):
        floors = Floors(costs, CAPABLE, 1e15, pinned_layout=False)
        found = {cand.strategy.megatron_fsdp: floors.states_bytes(cand, 2, offload=False) for cand in order}
        assert found[True] < found[False]


def test_a_played_step_ends_when_the_last_reduction_is_through() -> None:
    """Whichever stage's: with one stage and no transfers, and with two."""
    costs = cost_model()
    for counts in ([4], [1, 3], [3, 1]):
        cand = candidate(pp=len(counts), dp=8, num_microbatches=2, overlap_grad_reduce=False)
        split = stages(costs.model, counts)
        played = costs.played(cand, split)
        assert played.total_s == pytest.approx(costs.score(cand, split)[0])
        through = [lane[-1].end_s + exposed for lane, exposed in zip(played.lanes, played.exposed_s, strict=True)]
        assert played.optimizer_begin_s == max(through)
        assert min(played.exposed_s) > 0.0


def test_sums_of_nothing_need_nothing_beside_what_every_rank_has() -> None:
    memory = cost_model().stage_memory(candidate(), 0)
    assert memory.peak_bytes(StageSums(1, 0.0)) == memory.fixed_bytes


@pytest.mark.parametrize("samples", [1, 64])
def test_on_one_stage_the_floor_of_memory_is_all_that_is_kept_or_one_layer_with_what_it_needs(samples: int) -> None:
    """Of one micro-batch: the states and saved bytes of all layers, or those of the head with its logits, whichever is more."""
    costs = cost_model(gpt(num_layers=1), modes=("none",))
    cand = candidate(micro_batch_size=samples, num_microbatches=4)
    each = [costs.layer(cand, kind, "none") for kind in ("embedding", "decoder", "head")]
    slack = 1 + costs.calibration.allocator_slack
    together = sum(cost.static_bytes + slack * cost.saved_bytes for cost in each)
    alone = max(
        cost.static_bytes + slack * (cost.saved_bytes + max(cost.transient_forward_bytes, cost.transient_backward_bytes)) for cost in each
    )
    assert (alone > together) == (samples == 64)
    assert costs.memory_floor(cand) == pytest.approx(sum(costs.fixed_bytes(cand).values()) + max(together, alone))


@pytest.mark.parametrize("graphs", ["none", "local"])
@pytest.mark.parametrize("launch", [1e-9, 1.0])
def test_a_layer_that_nothing_slows_takes_its_floor(graphs: Any, launch: float) -> None:
    """One rank, no recompute: what it computes, or its launches, of which a graph's replay is one where the layer may be replayed."""
    calibration = replace(datasheet(a100(), MEGATRON), op_overhead_s=launch, graph_launch_s=1e-3)
    costs = cost_model(calibration=calibration)
    cand = candidate(cuda_graph_impl=graphs)
    for kind in ("embedding", "decoder", "head"):
        cost = costs.layer(cand, kind, "none")
        assert costs.layer_floor_seconds(cand, kind, MEGATRON.states["mixed/0"]) == pytest.approx((cost.forward_s, cost.backward_s))
        assert (cost.forward_s >= 1.0) == (launch == 1.0 and not (kind == "decoder" and graphs == "local"))


@pytest.mark.parametrize("m", [1, 2, 8])
def test_a_paired_layer_of_experts_takes_its_floor_too(m: int) -> None:
    """Passes that have no other beside them wait for their exchange of tokens."""
    parts = gpt(num_layers=4, feed_forward=Experts(num_experts=8, topk=2, ffn_hidden_size=4096))
    no_host = dict.fromkeys(("op_overhead_s", "collective_launch_s", "grouped_launch_s", "expert_sync_s"), 0.0)
    calibration = replace(datasheet(a100(8), MEGATRON), **no_host)
    costs = cost_model(parts, cluster=a100(8), calibration=calibration, global_batch_size=4 * 8 * m)
    kind = next(kind for kind, layer in costs.kinds.items() if any(weight.kind == "expert" for weight in layer.weights))
    plain, paired = (
        candidate(dp=8, ep=8, micro_batch_size=4, num_microbatches=m, overlap_moe_expert_parallel_comm=paired) for paired in (False, True)
    )
    for cand in (plain, paired):
        cost = costs.layer(cand, kind, "none")
        assert costs.layer_floor_seconds(cand, kind, MEGATRON.states["mixed/0"]) == pytest.approx((cost.forward_s, cost.backward_s))
    alone, never = costs.layer(paired, kind, "none").seconds, costs.layer(plain, kind, "none").seconds
    assert alone == pytest.approx(never) if m == 1 else alone < never, "one micro-batch has no other"


def test_a_single_stage_spends_nothing_on_transfers() -> None:
    costs = cost_model()
    assert "pp" not in costs.price(candidate(num_microbatches=4), stages(costs.model, [4])).by_cause
    assert costs.price(candidate(pp=2, num_microbatches=4), stages(costs.model, [2, 2])).by_cause["pp"] > 0.0
