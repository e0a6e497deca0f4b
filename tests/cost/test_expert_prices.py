"""What a layer of experts costs, by hand."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import pytest
from cost_cases import DEEPSPEED, MEGATRON, cost_model
from msgspec.structs import replace

from orchestrator.cost.activations import LayerActivations
from orchestrator.cost.calibration import Calibration
from orchestrator.cost.compute import Rates, gemm_seconds, grouped_seconds, layer_seconds
from orchestrator.cost.layer import LayerPrices, behind_host, folded
from orchestrator.cost.passes import exchanged, routed_experts, shared_experts
from orchestrator.errors import InputError
from orchestrator.hardware.catalog import GPUS
from orchestrator.hardware.collectives import all_to_all, exchange_link
from orchestrator.hardware.spec import Cluster, Level
from orchestrator.model.families import describe
from orchestrator.model.parts.experts import Experts
from orchestrator.model.routing import stated
from orchestrator.model.spec import Architecture, Dispatch, Enter, Exit, Gemm, ModelSpec, Pointwise
from orchestrator.strategy.axes import dp, ep, tp
from orchestrator.strategy.axes.traffic import Traffic
from orchestrator.strategy.spec import Candidate, Dispatcher, Mesh, Recompute, Strategy
from orchestrator.units import GB

H, S, F, SHARED, TOPK = 1024, 2048, 512, 1536, 8
MOE = Architecture(
    **{"family": "gpt", "name": "moe", "num_layers": 2, "hidden_size": H, "num_attention_heads": 16, "ffn_hidden_size": 4096},
    **{"vocab_size": 51200, "max_position_embeddings": S, "activation": "swiglu", "add_bias_linear": False},
    feed_forward=Experts(num_experts=64, topk=TOPK, ffn_hidden_size=F),
)


def moe(**experts: object) -> ModelSpec:
    return describe(replace(MOE, feed_forward=replace(MOE.experts[0], **experts)), S)


def candidate(strategy: Strategy) -> Candidate:
    return Candidate(engine="megatron", strategy=strategy, micro_batch_size=1, num_microbatches=8)


def two_levels(inside: int, inner: float, outer: float) -> Cluster:
    model = cost_model(moe())
    nvlink = Level(name="nvlink", size=inside, bandwidth=inner, latency=0.0)
    levels = (nvlink, Level(name="fabric", size=4096, bandwidth=outer, latency=0.0))
    return replace(model.cluster, num_gpus=1024, gpus_per_node=min(8, inside), levels=levels)


@pytest.mark.parametrize(
    ("inside", "size", "leaves"),
    [(8, 8, 0.0), (8, 16, 8 / 16), (8, 64, 56 / 64), (72, 64, 0.5), (64, 64, 0.0), (64, 128, 0.5)],
)
def test_an_all_to_all_sends_what_leaves_a_domain_over_each_ranks_own_adapter(inside: int, size: int, leaves: float) -> None:
    """1 GB a rank. On 72-GPU racks some group of 64 lies across a border: the smallest part that all groups share is 8 of 64."""
    link = exchange_link(two_levels(inside, 450 * GB, 50 * GB), size, 1)
    seconds = all_to_all(1 * GB, size, link)
    if inside == 72:
        leaves = 56 / 64
    assert seconds == pytest.approx(max((size - 1) / size / 450, leaves / 50))


def test_experts_products_take_their_flops_and_their_bytes() -> None:
    """Four experts of 128 rows, 4096 x 2048, at 1 PFLOP/s and 4 TB/s, half of each reached: 2.1 GFLOP in 4.3 us, and 18.4 MB
    in 9.2 us, four times one after the other. The plain product of all 512 rows reads the weight once."""
    plain = Calibration(gemm_efficiency=0.5, gemm_half_tokens=0, gemm_half_features=0, memory_efficiency=0.5, expert_efficiency=1.0)
    rates = Rates(1e15, 1e15, 4e12, 2, 2)
    flops, moved = 2 * 128 * 4096 * 2048, 2 * (128 * 4096 + 4096 * 2048 + 128 * 2048)
    assert grouped_seconds(4, 128, 4096, 2048, rates, plain) == pytest.approx(4 * (flops / 0.5e15 + moved / 2e12))
    assert grouped_seconds(4, 128, 4096, 2048, rates, plain) > gemm_seconds(512, 4096, 2048, rates, plain)
    added = grouped_seconds(4, 128, 4096, 2048, rates, plain, added_to=1e6) - grouped_seconds(4, 128, 4096, 2048, rates, plain)
    assert added == pytest.approx(4 * 1e6 / 2e12)


def test_fp8_products_of_experts_read_one_byte_an_element_and_write_two() -> None:
    """Forward writes rows, the weight's gradient the weight; each reads the two other tensors."""
    plain = Calibration(gemm_efficiency=0.5, gemm_half_tokens=0, gemm_half_features=0, memory_efficiency=0.5, expert_efficiency=1.0)
    wide, narrow = Rates(1e15, 1e15, 4e12, 2, 2), Rates(1e15, 1e15, 4e12, 2, 1)
    rows, weight, out = 128 * 4096, 4096 * 2048, 128 * 2048
    for added, read in ((0.0, rows + weight), (1e6, rows + out)):
        saved = [grouped_seconds(1, 128, 4096, 2048, rates, plain, added_to=added) for rates in (wide, narrow)]
        assert saved[0] - saved[1] == pytest.approx(read / 2e12)
    h100, operands = GPUS["H100-SXM-80GB"], {"bf16": 2, "fp8": 1.0}
    assert {precision: Rates.of(h100, precision, plain).operand for precision in operands} == operands


@pytest.mark.parametrize(
    ("experts", "share"),
    [
        ({}, 1.0),
        ({"capacity_factor": 1.25}, 1.0),  # even routing fills no expert
        ({"capacity_factor": 0.5}, 0.5),
        ({"capacity_factor": 1.25, "pad_to_capacity": True}, 1.25),
    ],
)
def test_experts_compute_and_send_what_their_capacity_lets_or_makes_them(experts: dict[str, object], share: float) -> None:
    layer = next(run.layer for run in moe(**experts).runs if run.layer.kind == "experts_decoder")
    products = [op.tokens for op in layer.ops if isinstance(op, Gemm) and op.experts]
    assert products == [S * TOPK * share] * 2
    assert [op.elements for op in layer.ops if isinstance(op, Dispatch)] == [S * H * share]


@pytest.mark.parametrize(
    ("experts", "why"),
    [
        ({"capacity_factor": 8.5}, "at most num_experts/topk=8"),
        ({"capacity_factor": 0.0}, "must be above 0"),
        ({"pad_to_capacity": True}, "needs capacity_factor"),
    ],
)
def test_a_capacity_that_megatron_cant_have_is_refused(experts: dict[str, object], why: str) -> None:
    with pytest.raises(InputError) as caught:
        moe(**experts)
    assert why in str(caught.value)


@pytest.mark.parametrize(("mode", "drops"), [("moe_act", 2 * S * TOPK * F), ("mlp", None)])
def test_recomputing_the_experts_activation_drops_what_it_makes(mode: Recompute, drops: int | None) -> None:
    """The product of gate and up, 2 bytes an element; the whole module drops more."""
    model = cost_model(moe())
    kept = {one: model.layer(candidate(Strategy(mesh=Mesh())), "experts_decoder", one).saved_bytes for one in ("none", mode)}
    assert kept["none"] - kept[mode] == drops if drops else kept["none"] - kept[mode] > 2 * S * TOPK * F


def test_shared_experts_are_a_tensor_parallel_mlp() -> None:
    """They gather and scatter the layer's tokens over tp as a dense MLP of their width does (mcore moe/shared_experts.py)."""
    with_shared = next(run.layer for run in moe(shared_ffn_hidden_size=SHARED).runs if run.layer.kind == "experts_decoder")
    without = next(run.layer for run in moe().runs if run.layer.kind == "experts_decoder")
    strategy = Strategy(mesh=Mesh(tp=4), sequence_parallel=True)

    def moved(layer: object) -> float:
        return sum(item.nbytes * item.count for item in tp.traffic(layer, strategy, 1, 2))  # type: ignore[arg-type]

    # in: gathered forward, gathered and scattered backward; out: scattered forward, gathered backward
    assert moved(with_shared) - moved(without) == 5 * S * H * 2
    kept = with_shared.saved_bytes(1, sequence_parallel=False, cp=1, itemsize=2, flash_attention=True)
    kept -= without.saved_bytes(1, sequence_parallel=False, cp=1, itemsize=2, flash_attention=True)
    assert kept == 2 * S * (2 * SHARED + SHARED)  # gate and up, and their product
    assert sum(isinstance(op, Enter | Exit) for op in with_shared.ops) == 2 + sum(isinstance(op, Enter | Exit) for op in without.ops)


def test_flex_sends_a_token_to_a_node_once_and_to_each_rank_there_once() -> None:
    """64 ranks on 8 nodes, 8 experts a token: 8 (1 - (7/8)^8) = 5.25 nodes, 64 (1 - (63/64)^8) = 7.58 ranks."""
    strategy = Strategy(mesh=Mesh(dp=64, ep=64), moe_token_dispatcher_type="flex")
    items = [item for item in ep.traffic(1000.0, 8, strategy, 1, 2, together=8) if item.when == "forward"]
    assert [(item.size, item.stride) for item in items] == [(8, 8), (8, 1)]
    assert [item.nbytes / 2000 for item in items] == [pytest.approx(8 * (1 - (7 / 8) ** 8)), pytest.approx(64 * (1 - (63 / 64) ** 8))]


@pytest.mark.parametrize(("nodes", "limit"), [(8, (8, 4)), (4, (8, 4)), (2, (8, 4)), (16, (8, 4)), (8, (8, 3)), (8, (1, 1))])
def test_a_token_whose_experts_are_in_few_groups_goes_to_few_nodes(nodes: int, limit: tuple[int, int]) -> None:
    """Against counting: all sets of groups, and every expert of a token in any of its groups alike."""
    groups, chosen = limit
    parts, topk = max(nodes, groups), 3  # the finer division, in which both are whole
    counts = []
    for some in combinations(range(groups), chosen):
        inside = [part for part in range(parts) if part * groups // parts in some]
        counts += [len({part * nodes // parts for part in experts}) for experts in product(inside, repeat=topk)]
    assert ep.visited(nodes, topk, *limit) == pytest.approx(sum(counts) / len(counts))


@pytest.mark.parametrize(("stage", "passes"), [(1, 0), (3, 2)])
def test_experts_weights_are_gathered_in_every_micro_batch_under_zero_3(stage: int, passes: int) -> None:
    """Over the 32 / 8 ranks with the same experts, which are 8 apart: in forward and in backward; at stage 1 once a step alone."""
    model = cost_model(moe(), traits=DEEPSPEED)
    strategy = Strategy(mesh=Mesh(dp=32, ep=8), zero_stage=stage)  # type: ignore[arg-type]
    weights = 8 * 3 * H * F * 2
    items = [item for item in dp.traffic(weights, weights, folded(strategy), DEEPSPEED) if item.when != "step"]
    gathers = [item for item in items if item.operation == "all_gather"]
    assert [(item.nbytes, item.size, item.stride) for item in gathers] == [(weights, 4, 8)] * passes
    everywhere = replace(strategy, mesh=Mesh(dp=8, ep=8))  # one copy of the experts: theirs don't travel
    spread, alone = (model.layer(candidate(one), "experts_decoder", "none").by_cause for one in (strategy, everywhere))
    hidden = "overlap"  # traffic that runs beside compute slows it down by a share of its seconds
    assert (spread["dp"] + spread[hidden] > alone["dp"] + alone[hidden]) == (stage == 3)


NO_LAUNCHES = dict.fromkeys(("op_overhead_s", "collective_launch_s", "grouped_launch_s", "expert_quantise_s"), 0.0)


@pytest.mark.parametrize(("recompute", "again"), [("none", False), ("selective", False), ("full", True)])
def test_the_device_waits_for_the_host_behind_each_dispatch(recompute: Recompute, again: bool) -> None:
    """100 ms to launch what follows it, beside which the experts' forward pass and the exchange back go on (of two all-to-alls in forward
    one half): in forward, and in backward where that makes forward again. Otherwise backward takes the host's time, which is longer here.
    Dense layers never wait."""
    spec, host = moe(), 0.1
    plain, waiting = (cost_model(spec, calibration=Calibration(**NO_LAUNCHES, expert_sync_s=seconds)) for seconds in (0.0, host))
    one = candidate(Strategy(mesh=Mesh(dp=8, ep=8)))
    before, after = (model.layer(one, "experts_decoder", recompute) for model in (plain, waiting))
    layer = plain.kinds["experts_decoder"]
    alone, rest = (
        cost_model(
            replace(spec, runs=tuple(replace(run, layer=replace(run.layer, ops=ops)) for run in spec.runs)), calibration=plain_calibration()
        ).layer(one, "experts_decoder", "none")
        for ops in (routed_experts(layer), ())
    )
    behind = alone.forward_s - rest.forward_s + plain.layer(one, "experts_decoder", "none").by_cause["ep"] / 4
    assert after.forward_s == pytest.approx(before.forward_s + host - behind)
    assert after.backward_s == pytest.approx(max(2 * host, before.backward_s + host - behind) if again else max(host, before.backward_s))
    assert waiting.layer(one, "head", "none") == plain.layer(one, "head", "none")


def plain_calibration() -> Calibration:
    return Calibration(**NO_LAUNCHES, expert_sync_s=0.0)


@pytest.mark.parametrize(
    ("host", "behind", "alone", "expected"),
    [
        (2.0, 3.0, 1.0, (4.0, 6.0)),  # the experts take longer than their launches
        (5.0, 3.0, 1.0, (6.0, 6.0)),  # two seconds of waiting
        (7.0, 3.0, 1.0, (8.0, 8.0)),  # backward takes the host longer than the device
        (5.0, 3.0, 0.0, (4.0, 8.0)),  # both hosts' 12 against both devices' 10
        (4.0, 3.0, 0.0, (4.0, 6.0)),
        (5.0, 3.0, 0.25, (4.5, 7.5)),  # a quarter of the passes has no other beside it
    ],
)
def test_two_passes_side_by_side_wait_for_the_host_together(
    host: float, behind: float, alone: float, expected: tuple[float, float]
) -> None:
    """4 and 6 seconds of the device, 1 and 1 of the host beside what follows a dispatch."""
    assert behind_host((4.0, 6.0), (1.0, 1.0), host, behind, again=False, alone=alone) == pytest.approx(expected)


def test_a_pass_that_makes_the_dispatch_again_waits_again() -> None:
    passes, launch = (4.0, 10.0), (1.0, 2.0)
    assert behind_host(passes, launch, 5.0, 3.0, again=True, alone=1.0) == (6.0, 12.0)
    assert behind_host(passes, launch, 8.0, 3.0, again=True, alone=1.0) == (9.0, 18.0)


@pytest.mark.parametrize(("inside", "times"), [(8, 4), (16, 0)])
def test_what_is_handed_on_inside_nodes_takes_longer_each_time(inside: int, times: int) -> None:
    """16 ranks on nodes of 8 exchange 4 times a layer; on one of 16 nothing is handed on."""
    seconds = [
        cost_model(moe(), calibration=Calibration(handed_on_s=each), cluster=two_levels(inside, 300 * GB, 25 * GB))
        .layer(candidate(Strategy(mesh=Mesh(dp=1024, ep=16), moe_token_dispatcher_type="flex")), "experts_decoder", "none")
        .by_cause["ep"]
        for each in (0.0, 1e-3)
    ]
    assert seconds[1] - seconds[0] == pytest.approx(times * 1e-3)


@pytest.mark.parametrize(
    ("dispatcher", "ep_", "times"), [("alltoall", 8, 2), ("alltoall", 64, 1), ("alltoall", 1, 1), ("flex", 8, 1), ("allgather", 8, 1)]
)
def test_an_all_to_all_puts_tokens_in_order_at_both_ends(dispatcher: Dispatcher, ep_: int, times: int) -> None:
    """By rank, then by expert where a rank has more than one of the 64, in forward and in backward."""
    layer = cost_model(moe()).kinds["experts_decoder"]
    without = replace(layer, ops=tuple(op for op in layer.ops if getattr(op, "name", "") != "mlp.permute"))
    (permute,) = (op for op in layer.ops if getattr(op, "name", "") == "mlp.permute")
    strategy = Strategy(mesh=Mesh(dp=64, ep=ep_), moe_token_dispatcher_type=dispatcher)
    model = cost_model(moe())
    w = model.workload
    whole, rest = (
        layer_seconds(each, strategy, 1, "bf16", w.cluster.gpu, w.traits, MEGATRON.states["mixed/0"], w.calibration)
        for each in (layer, without)
    )
    once = (
        permute.elements
        * permute.moved
        * w.calibration.pointwise_factor
        / (w.cluster.gpu.memory_bandwidth * w.calibration.memory_efficiency)
    )
    assert whole.forward.memory_bound - rest.forward.memory_bound == pytest.approx(times * once)
    assert whole.backward.memory_bound - rest.backward.memory_bound > 0


@pytest.mark.parametrize(("dispatcher", "ep_"), [("alltoall", 8), ("alltoall", 64), ("flex", 8), ("allgather", 8)])
def test_permutations_of_several_kernels_read_and_write_every_sum(dispatcher: Dispatcher, ep_: int) -> None:
    """Four bytes for each element that goes to an expert, in forward and again in backward, however often tokens are put in order."""
    model = cost_model(moe())
    layer, w = model.kinds["experts_decoder"], model.workload
    (permute,) = (op for op in layer.ops if getattr(op, "name", "") == "mlp.permute")
    fused, apart, neither = (
        layer_seconds(layer, strategy, 1, "bf16", w.cluster.gpu, traits, MEGATRON.states["mixed/0"], w.calibration)
        for on, traits in ((True, w.traits), (False, w.traits), (True, replace(w.traits, fused_permutations=False)))
        for strategy in [Strategy(mesh=Mesh(dp=64, ep=ep_), moe_token_dispatcher_type=dispatcher, moe_permute_fusion=on)]
    )
    assert neither == apart, "asked for without the package that has the kernels"
    more = 4 * permute.elements * w.calibration.pointwise_factor / (w.cluster.gpu.memory_bandwidth * w.calibration.memory_efficiency)
    assert apart.forward.memory_bound - fused.forward.memory_bound == pytest.approx(more)
    assert apart.backward.memory_bound - fused.backward.memory_bound == pytest.approx(more)
    assert apart.forward.launch == fused.forward.launch


def test_a_grouped_products_bytes_hide_behind_other_experts_where_nothing_exposes_them() -> None:
    """512 rows against 1,024 x 1,024 on A100: FLOPs' time and bytes' time add up, or the longer one counts."""
    rates = Rates(312e12, 19.5e12, 2e12, 2, 2.0)
    one = dict.fromkeys(("gemm_half_tokens", "gemm_half_features"), 0.0) | {"gemm_efficiency": 1.0, "memory_efficiency": 1.0}
    exposed, hidden = (grouped_seconds(8, 512, 1024, 1024, rates, Calibration(**one, grouped_bytes_exposed=share)) for share in (1.0, 0.0))
    flops, moved = 8 * 2 * 512 * 1024 * 1024 / 312e12, 8 * (512 * 1024 + 1024 * 1024 + 512 * 1024) * 2 / 2e12
    assert exposed == pytest.approx(flops + moved)
    assert hidden == pytest.approx(max(flops, moved))


def test_what_a_node_passes_on_runs_beside_what_nodes_send_each_other() -> None:
    """Eight experts a token over 16 ranks on two A100 nodes (25 and 300 GB/s): the exchange between nodes alone is waited for, 4 times a
    layer; of tokens x hidden size, half of 2 (1 - (1/2)^8) copies leave each rank."""
    bandwidth_alone = Calibration(
        **dict.fromkeys(("latency_factor", "collective_overhead_s", "handed_on_s", "outer_scaling"), 0.0), outer_efficiency=1.0
    )
    model = cost_model(moe(), calibration=bandwidth_alone)
    strategy = Strategy(mesh=Mesh(dp=16, ep=16), moe_token_dispatcher_type="flex")
    crossing = S * H * 2 * 2 * (1 - 0.5**8) / 2
    assert model.cluster.levels[1].bandwidth == 25 * GB
    assert model.layer(candidate(strategy), "experts_decoder", "none").by_cause["ep"] == pytest.approx(4 * crossing / (25 * GB))


@pytest.mark.parametrize(("precision", "waits"), [("bf16", 0.0), ("fp8", 1e-2), ("nvfp4", 1e-2)])
@pytest.mark.parametrize("ep_", [2, 8])
def test_fp8_waits_for_experts_to_be_quantised_however_many_a_rank_has(precision: str, waits: float, ep_: int) -> None:
    """10 ms in each pass, beside 100 ms to launch what follows a dispatch; in bf16 nothing is quantised, nor in a layer without experts."""
    one = candidate(Strategy(mesh=Mesh(dp=8, ep=ep_)))
    cluster = replace(cost_model(moe()).cluster, gpu=GPUS["B200"])
    before, after = (
        cost_model(moe(), calibration=Calibration(expert_sync_s=0.1, expert_quantise_s=seconds), cluster=cluster, precision=precision)
        for seconds in (0.0, 1e-2)
    )
    layers = [model.layer(one, "experts_decoder", "none") for model in (before, after)]
    assert layers[1].forward_s - layers[0].forward_s == pytest.approx(waits)
    assert layers[1].backward_s - layers[0].backward_s == pytest.approx(waits)
    assert before.layer(one, "head", "none") == after.layer(one, "head", "none")


ROUTERS: dict[str, Any] = {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": "moe_router+moe_preprocess"}


@pytest.mark.parametrize(
    ("precision", "delayed", "graphs", "later"),
    [
        ("fp8", True, {}, 1.0),
        ("fp8", False, {}, 0.0),
        ("bf16", True, {}, 0.0),
        ("fp8", True, ROUTERS, 1.0),
        ("fp8", True, ROUTERS | {"cuda_graph_modules": "attn+moe_router+moe_preprocess"}, 0.0),
        ("fp8", True, ROUTERS | {"cuda_graph_modules": None}, 0.0),
    ],
)
def test_delayed_weight_gradients_keep_the_host_busy_in_fp8(precision: str, delayed: bool, graphs: dict[str, Any], later: float) -> None:
    """A second a layer, in passes that have another micro-batch's beside them (7 of 8) and in those that have none; where attention is in a
    graph, its late gradients are too."""
    cluster = replace(cost_model(moe()).cluster, gpu=GPUS["B200"])
    strategy = Strategy(mesh=Mesh(dp=8, ep=8), overlap_moe_expert_parallel_comm=True, delay_wgrad_compute=delayed, **graphs)
    seconds = [
        cost_model(moe(), calibration=Calibration(expert_sync_s=0.1, delayed_wgrad_s=each), cluster=cluster, precision=precision)
        .layer(candidate(strategy), "experts_decoder", "none")
        .seconds
        for each in (0.0, 1.0)
    ]
    assert seconds[1] - seconds[0] == pytest.approx(later)


def test_fp8_launches_bound_a_pass_where_the_host_need_not_wait() -> None:
    """Half a second to quantise in each pass; nothing else of so small a layer takes as long."""
    cluster = replace(cost_model(moe()).cluster, gpu=GPUS["H100-SXM-80GB"])
    constants = Calibration(**(NO_LAUNCHES | {"expert_quantise_s": 0.5}), expert_sync_s=0.0)
    one = candidate(Strategy(mesh=Mesh(dp=8, ep=8)))
    for precision, launched in (("bf16", False), ("fp8", True)):
        layer = cost_model(moe(), calibration=constants, cluster=cluster, precision=precision).layer(one, "experts_decoder", "none")
        assert (layer.forward_s == pytest.approx(0.5)) == (layer.backward_s == pytest.approx(0.5)) == launched, precision


@pytest.mark.parametrize("kind", ["alltoall", "allgather", "flex"])
@pytest.mark.parametrize("etp", [1, 2])
def test_experts_send_twice_as_much_of_twice_the_samples_or_of_items_twice_as_wide(kind: Dispatcher, etp: int) -> None:
    strategy = Strategy(mesh=Mesh(dp=8, ep=4, etp=etp), moe_token_dispatcher_type=kind)

    def sent(samples: int, itemsize: int) -> list[float]:
        return [item.nbytes * item.count for item in ep.traffic(1000.0, 2, strategy, samples, itemsize)]

    once = sent(1, 2)
    assert min(once) > 0
    assert sent(2, 2) == sent(1, 4) == pytest.approx([2 * nbytes for nbytes in once])


@pytest.mark.parametrize(("ep_", "etp"), [(4, 1), (4, 2), (2, 1)])
def test_the_rank_with_most_tokens_keeps_as_many_more_of_what_its_experts_save(ep_: int, etp: int) -> None:
    """One of 64 experts gets 3 times its share: of the 64/ep of a rank so much less; the ranks that share an expert keep all of it."""
    routing = stated(3.0, 64, TOPK)
    strategy = Strategy(mesh=Mesh(dp=8, ep=ep_, etp=etp))
    kept = []
    for spec in (moe(), moe(routing=routing)):
        kind = spec.kind("experts_decoder")
        kept.append(LayerActivations(kind, strategy, 2, "bf16", MEGATRON, Calibration()).with_recompute("none").saved)
    here = 64 / ep_
    fullest = (3.0 + (here - 1) * 61 / 63) / here
    even = sum(
        tensor.local_elements(1, sequence_parallel=False, cp=1) * (tensor.itemsize or 2)
        for op in moe(routing=routing).kind("experts_decoder").ops
        if isinstance(op, Gemm | Pointwise) and op.routing is not None
        for tensor in op.saves
    )
    assert even > 0
    assert kept[1] - kept[0] == pytest.approx(2 * (fullest - 1) * etp * even)


def test_only_the_exchange_of_tokens_between_experts_is_that() -> None:
    def item(axis: str, operation: str) -> Traffic:
        return Traffic(axis=axis, operation=operation, nbytes=1.0, size=2, stride=1, when="forward")  # type: ignore[arg-type]

    assert exchanged(item("ep", "all_to_all"))
    assert not any(exchanged(item(*other)) for other in (("ep", "all_gather"), ("cp", "all_to_all"), ("tp", "all_reduce")))


def test_of_a_layers_operations_the_experts_are_the_routed_ones_and_the_shared_ones() -> None:
    layer = moe(shared_ffn_hidden_size=SHARED).kind("experts_decoder")
    shared, routed = ([op.name for op in of(layer)] for of in (shared_experts, routed_experts))  # type: ignore[union-attr]
    assert shared
    assert all(name.startswith("mlp.shared_experts.") for name in shared)
    assert {"mlp.experts.linear_fc1", "mlp.experts.linear_fc2"} <= {*routed}
    assert not {*shared} & {*routed}
    assert shared_experts(moe().kind("experts_decoder")) == ()


@pytest.mark.parametrize(("pp", "m", "alone"), [(1, 8, 1 / 8), (4, 8, 0.5), (4, 2, 1.0)])
def test_passes_run_alone_while_the_pipeline_fills_and_drains(pp: int, m: int, alone: float) -> None:
    """Of m of each stage's passes as many as there are stages, in the mean; none where nothing is paired."""
    model = cost_model(moe(), global_batch_size=m)
    paired = Strategy(mesh=Mesh(pp=pp, ep=1), overlap_moe_expert_parallel_comm=True)
    assert LayerPrices(model.workload, model.network).alone_share(paired, 1) == alone
    assert LayerPrices(model.workload, model.network).alone_share(replace(paired, overlap_moe_expert_parallel_comm=False), 1) == 0.0
    assert LayerPrices(model.workload, model.network).active_share(paired, 1) == 1.0
    shared = cost_model(moe(), global_batch_size=m, calibration=Calibration(core_share=0.25))
    assert LayerPrices(shared.workload, shared.network).active_share(paired, 1) == pytest.approx(max(0.25, m / (m + pp - 1)))
    assert LayerPrices(shared.workload, shared.network).active_share(paired, 2 * m) == pytest.approx(max(0.25, 1 / pp)), (
        "one micro-batch at least"
    )


def test_what_the_combined_schedule_does_not_compute_again_is_kept() -> None:
    """`mlp` beside the experts' exchange: the layers with experts are as without it, those without are computed again."""
    model = cost_model(moe(), global_batch_size=8)
    prices = LayerPrices(model.workload, model.network)
    layer = model.workload.kinds["experts_decoder"]
    plain = Strategy(mesh=Mesh(ep=2, dp=2))
    paired = replace(plain, overlap_moe_expert_parallel_comm=True)
    assert prices.of(layer, "mlp", paired, 1) == prices.of(layer, "none", paired, 1)
    assert prices.of(layer, "core_attn+mlp", paired, 1) == prices.of(layer, "selective", paired, 1)
    assert prices.of(layer, "mlp", plain, 1).saved_bytes < prices.of(layer, "none", plain, 1).saved_bytes
