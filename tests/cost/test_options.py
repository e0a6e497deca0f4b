"""Prices of the engine's own ways that the user may choose: what each moves, hides and holds."""

from __future__ import annotations

import random
from typing import Any

import pytest
from cost_cases import MEGATRON, a100, candidate, cost_model, gpt, stages
from msgspec.structs import replace

from orchestrator.cost.calibration import Calibration, datasheet
from orchestrator.cost.compute import LayerSeconds, Seconds, layer_seconds
from orchestrator.cost.passes import hidden_shares
from orchestrator.cost.price import LayerCost
from orchestrator.engines import ENGINES
from orchestrator.hardware.catalog import GPUS
from orchestrator.hardware.spec import Software
from orchestrator.model.families import describe
from orchestrator.model.parts.experts import Experts
from orchestrator.model.spec import Architecture, Attention
from orchestrator.strategy.axes import cp, dp, ep, tp
from orchestrator.strategy.capabilities import StateBytes, Traits
from orchestrator.strategy.spec import Mesh, Recompute, Strategy
from orchestrator.units import GB

LAYER = cost_model().model.kind("decoder")
H, S, HEADS = 1024, 2048, 16


def layer(**strategy: Any) -> Any:
    return cost_model().layer(candidate(**strategy), "decoder", "none")


def test_overlapped_tensor_parallel_traffic_is_cheaper_and_holds_ten_gathered_tensors() -> None:
    fields = {"tp": 4, "dp": 2, "sequence_parallel": True}
    plain, hidden = layer(**fields), layer(**fields, tp_comm_overlap=True)
    share = datasheet(a100(), MEGATRON).user_buffers_overlap
    assert hidden.by_cause["tp"] == pytest.approx(plain.by_cause["tp"] * (1 - share))
    wide = {**fields, "micro_batch_size": 8}  # not bound by launches
    assert layer(**wide, tp_comm_overlap=True).backward_s < layer(**wide).backward_s
    model = cost_model()
    split = stages(model.model, [4])
    peaks = [model.score(candidate(**fields, tp_comm_overlap=flag), split)[1] for flag in (False, True)]
    assert peaks[1] - peaks[0] == pytest.approx(10 * S * H * 2)


def test_fewer_query_groups_than_tensor_parallel_ranks_cost_a_gather_of_all_heads() -> None:
    """megatron-core gathers queries, keys and values of the whole layer on every rank then (transformer/attention.py:1398-1416)."""
    gathers = replace(MEGATRON, gathers_few_query_groups=True)
    grouped = gpt(num_query_groups=4, attention_dropout=0.0)

    def part(tp: int, traits: Traits, mode: Recompute = "none") -> LayerCost:
        return cost_model(grouped, traits=traits).layer(candidate(tp=tp, dp=1, sequence_parallel=True), "decoder", mode)

    assert part(4, gathers) == part(4, MEGATRON)
    (forward, backward) = tp.query_groups(cost_model(grouped).model.kind("decoder"), candidate(tp=8).strategy, 1, 2)
    assert (forward.operation, backward.operation) == ("all_gather", "reduce_scatter")
    assert forward.nbytes == S * (HEADS + 2 * 4) * (H // HEADS) * 2
    more = part(8, gathers).by_cause["tp"] - part(8, MEGATRON).by_cause["tp"]
    assert more > 0
    assert part(8, gathers, "full").by_cause["tp"] - part(8, MEGATRON, "full").by_cause["tp"] == pytest.approx(1.5 * more)
    assert part(8, gathers).transient_forward_bytes > part(8, MEGATRON).transient_forward_bytes
    for engine, pays in (("megatron", True), ("megatron_deepspeed", True), ("deepspeed", False)):
        assert ENGINES[engine].traits(Software()).gathers_few_query_groups == pays


def test_tensor_parallel_traffic_between_nodes_is_not_overlapped() -> None:
    fields = {"tp": 16, "sequence_parallel": True}
    assert layer(**fields, tp_comm_overlap=True).by_cause["tp"] == layer(**fields).by_cause["tp"]


def test_graphs_take_the_launches_away_where_a_layer_is_bound_by_them() -> None:
    """A thin layer waits for the host; a wide one doesn't. Each micro-batch's graph has a copy of its input; all together an input, an
    output, and a gradient of each."""
    thin = cost_model(gpt(hidden_size=128, num_attention_heads=2, ffn_hidden_size=512), seq_length=256)
    for model, bound in ((thin, True), (cost_model(), False)):
        plain, graphed = (model.layer(candidate(cuda_graph_impl=impl), "decoder", "none") for impl in ("none", "local"))
        assert (plain.by_cause["overhead"] > 0) == bound
        assert graphed.by_cause["overhead"] <= plain.by_cause["overhead"]
        assert (graphed.forward_s + graphed.backward_s < plain.forward_s + plain.backward_s) == bound
        end = 2 * model.model.seq_length * model.model.architecture.hidden_size
        assert graphed.saved_bytes - plain.saved_bytes == end
        assert graphed.backward_bytes - plain.backward_bytes == 4 * end
        whole = model.layer(candidate(cuda_graph_impl="full_iteration"), "decoder", "none")
        assert whole.forward_s + whole.backward_s <= graphed.forward_s + graphed.backward_s
        assert whole.by_cause["overhead"] == 0
        attention = model.layer(candidate(cuda_graph_impl="local", cuda_graph_modules="attn"), "decoder", "none")
        assert graphed.forward_s <= attention.forward_s <= plain.forward_s
        assert (graphed.forward_s < attention.forward_s < plain.forward_s) == bound


def test_gradients_and_weights_that_wait_for_each_other_cost_a_step_more() -> None:
    model = cost_model()
    split = stages(model.model, [4])
    fields = {"dp": 64, "zero_stage": 1}
    seconds = [
        model.score(candidate(**fields, overlap_grad_reduce=reduce, overlap_param_gather=gather), split)[0]
        for reduce, gather in ((True, True), (True, False), (False, False))
    ]
    assert seconds == sorted(seconds)
    assert seconds[0] < seconds[1] < seconds[2]


def moved(kind: str, *, domain: int = 8, **mesh: int) -> list[tuple[str, str, float, int, int, int]]:
    """(when, operation, bytes, ranks, stride, count) of one layer's context parallelism with 2-byte elements."""
    strategy = Strategy(mesh=Mesh(**mesh), cp_comm_type=kind)  # type: ignore[arg-type]
    return [(t.when, t.operation, t.nbytes, t.size, t.stride, t.count) for t in cp.traffic(LAYER, strategy, 1, 2, domain=domain)]


def test_each_kind_of_context_parallelism_moves_what_its_method_says() -> None:
    """Of q, k and v, sh elements each: a ring passes on k and v (cp-1)/cp of the way, heads are exchanged once, keys are gathered whole."""
    sh = 2 * S * H  # bytes
    assert moved("p2p", cp=4) == [("forward", "p2p", 2 * sh / 4, 4, 1, 3), ("backward", "p2p", 4 * sh / 4, 4, 1, 3)]
    assert {(when, operation, nbytes) for when, operation, nbytes, *_ in moved("a2a", cp=4)} == {
        ("forward", "all_to_all", sh / 4), ("backward", "all_to_all", sh / 4),
    }  # fmt: skip
    assert sum(count for *_, count in moved("a2a", cp=4)) == 8  # q, k, v and the output, and the gradients of each
    assert [entry[:3] for entry in moved("all_gather", cp=4, tp=2)] == [
        ("forward", "all_gather", sh), ("backward", "all_gather", sh), ("backward", "reduce_scatter", sh),
    ]  # fmt: skip


def test_heads_are_exchanged_inside_a_node_and_keys_passed_on_between_nodes() -> None:
    sh = 2 * S * H
    both = moved("a2a+p2p", cp=8, tp=2)
    exchanged = [entry for entry in both if entry[1] == "all_to_all"]
    passed = [entry for entry in both if entry[1] == "p2p"]
    assert {entry[3:5] for entry in exchanged} == {(4, 2)}
    assert {entry[3:] for entry in passed} == {(2, 8, 1)}
    assert passed[0][2] == 2 * sh / 2 / 2 / 4  # half of the sequence, half of the heads by tp, a quarter of those by the exchange
    assert moved("a2a+p2p", cp=8, domain=8) == moved("a2a", cp=8)


def test_deepspeeds_ulysses_is_what_it_was_whatever_megatrons_kind() -> None:
    given = [Strategy(mesh=Mesh(cp=4), cp_comm_type=kind) for kind in ("p2p", "a2a")]  # type: ignore[arg-type]
    first, second = (list(cp.traffic(LAYER, strategy, 1, 2, kind="all_to_all")) for strategy in given)
    assert first == second
    assert all(item.operation == "all_to_all" for item in first)


@pytest.mark.parametrize(("kind", "sent"), [("alltoall", 8.0), ("flex", 4 * (1 - (3 / 4) ** 8)), ("allgather", 4.0)])
def test_a_dispatcher_sends_tokens_as_often_as_it_says(kind: str, sent: float) -> None:
    """Eight experts a token over four ranks: once for each expert; once for each rank that has any; all tokens to all ranks."""
    strategy = Strategy(mesh=Mesh(dp=4, ep=4), moe_token_dispatcher_type=kind)  # type: ignore[arg-type]
    items = list(ep.traffic(1000.0, 8, strategy, 1, 2))
    assert items[0].nbytes == pytest.approx(2 * 1000 * sent)
    assert {item.when for item in items} == {"forward", "backward"}
    assert items[0].operation == ("all_gather" if kind == "allgather" else "all_to_all")


MOE = Architecture(
    **{"family": "gpt", "name": "moe", "num_layers": 2, "hidden_size": 1024, "num_attention_heads": 16, "ffn_hidden_size": 4096},
    **{"vocab_size": 51200, "max_position_embeddings": 2048, "activation": "swiglu"},
    feed_forward=Experts(num_experts=64, topk=8, ffn_hidden_size=512),
)


def test_experts_states_are_sharded_over_their_own_data_parallel_group() -> None:
    """Under ZeRO-1 the dense part's 12 bytes are divided over dp x cp, the experts' over what ep leaves of tp x cp x dp: 32 / 8."""
    model = cost_model(describe(MOE, S))
    experts = 8 * (3 * 1024 * 512 + 2 * 512 + 1024)  # gate, up and down of a rank's eight, and their biases
    mesh = Mesh(dp=32, ep=8)
    plain, sharded = (
        model.layer(replace(candidate(dp=32), strategy=Strategy(mesh=mesh, zero_stage=stage)), "experts_decoder", "none")
        for stage in (0, 1)
    )
    dense = plain.parameters - experts
    assert (plain.weight_bytes, plain.gradient_bytes, plain.optimizer_bytes) == tuple(n * plain.parameters for n in (2, 4, 12))
    assert sharded.weight_bytes + sharded.gradient_bytes == 6 * plain.parameters
    assert sharded.optimizer_bytes == pytest.approx(12 * (dense / 32 + experts / 4))
    alone = model.layer(replace(candidate(dp=8), strategy=Strategy(mesh=Mesh(dp=8, ep=8))), "experts_decoder", "none")
    assert 0 < alone.sync_s < plain.sync_s, "one copy of the experts reduces the dense part alone"


def test_a_dispatcher_is_priced_in_a_layer_of_experts() -> None:
    model = cost_model(describe(MOE, S))

    def seconds(kind: str, ep: int) -> float:
        strategy = Strategy(mesh=Mesh(dp=32, ep=ep), moe_token_dispatcher_type=kind)  # type: ignore[arg-type]
        one = replace(candidate(dp=32), strategy=strategy)
        return float(model.layer(one, "experts_decoder", "none").by_cause["ep"])

    assert seconds("flex", 8) < seconds("alltoall", 8)
    # Over four nodes: a ring brings each token to a node once for all of its ranks, as flex does; the all-to-all eight times less those
    # that stay.
    assert seconds("flex", 32) < seconds("allgather", 32) < seconds("alltoall", 32)


def test_shared_experts_hide_the_exchange_of_tokens_as_long_as_they_take() -> None:
    """What is hidden is gone from the exchange, and slows down what hides it."""
    both = replace(MOE, feed_forward=replace(MOE.feed_forward, shared_ffn_hidden_size=64))  # type: ignore[type-var]
    wide = replace(MOE, feed_forward=replace(MOE.feed_forward, shared_ffn_hidden_size=1 << 16))  # type: ignore[type-var]

    def layer(model: Architecture, overlap: bool) -> Any:
        strategy = Strategy(mesh=Mesh(dp=32, ep=32), moe_shared_expert_overlap=overlap)
        return cost_model(describe(model, S)).layer(replace(candidate(dp=32), strategy=strategy), "experts_decoder", "none")

    plain, narrow, hidden = layer(both, False), layer(both, True), layer(wide, True)
    assert 0 < narrow.by_cause["ep"] < plain.by_cause["ep"]
    assert hidden.by_cause["ep"] == 0
    gained = plain.by_cause["ep"] - narrow.by_cause["ep"]
    slowed = narrow.by_cause["overlap"] - plain.by_cause["overlap"]
    assert 0 <= slowed < gained
    assert plain.forward_s + plain.backward_s - narrow.forward_s - narrow.backward_s == pytest.approx(gained - slowed)


def test_each_of_the_four_exchanges_hides_beside_what_is_computed_meanwhile() -> None:
    """Half of a pass's exchange is the dispatch, half the combining: dispatch forward beside the experts' backward pass, dispatch backward
    beside their forward pass, each combining beside attention of the other pass; weights' gradients that are delayed change sides."""
    rng = random.Random(3)

    def layer(least: float) -> Seconds:
        return Seconds(least + rng.uniform(0, 4), rng.uniform(0, 4), rng.uniform(0, 2), 0.0)

    for _ in range(50):
        routed = LayerSeconds(Seconds(rng.uniform(0, 4), 0.0, rng.uniform(0, 1), 9.0), Seconds(rng.uniform(0, 8), 0.0, 0.5, 9.0))
        forward, backward = layer(5.0), layer(9.0)
        sent, back = rng.uniform(0.1, 10), rng.uniform(0.1, 10)
        for late in (0.0, routed.backward.gemm / 2):
            beside = {
                "forward": (routed.backward.compute - late, backward.compute - routed.backward.compute),
                "backward": (routed.forward.compute + late, forward.compute - routed.forward.compute),
            }
            found = hidden_shares({"forward": sent, "backward": back}, forward, backward, routed, delayed=late > 0)
            for when, seconds in (("forward", sent), ("backward", back)):
                assert found[when] * seconds == pytest.approx(sum(min(seconds / 2, computed) for computed in beside[when]))
    assert hidden_shares({"forward": 0.0, "backward": 1e-9}, forward, backward, routed, delayed=False) == {"forward": 0.0, "backward": 1.0}


@pytest.mark.parametrize("delayed", [False, True])
def test_the_exchange_hides_beside_another_micro_batch_but_for_the_passes_that_have_none(delayed: bool) -> None:
    """Without a pipeline the first forward and the last backward pass of a step are alone: of m micro-batches the share 1/m gains nothing.
    The layer of the pass beside it is in memory too."""

    def layer(overlap: bool, batch: int) -> Any:
        strategy = Strategy(mesh=Mesh(dp=32, ep=32), overlap_moe_expert_parallel_comm=overlap, delay_wgrad_compute=overlap and delayed)
        model = cost_model(describe(MOE, S), global_batch_size=batch)
        return model.layer(replace(candidate(dp=32), strategy=strategy, num_microbatches=batch // 32), "experts_decoder", "none")

    plain = layer(False, 32)
    gained = {m: plain.seconds - layer(True, 32 * m).seconds for m in (1, 2, 4)}
    assert gained[1] == pytest.approx(0.0)
    assert gained[2] > 0
    assert gained[4] == pytest.approx(1.5 * gained[2])
    hidden = layer(True, 64)
    assert hidden.by_cause["ep"] < plain.by_cause["ep"]
    assert hidden.saved_bytes == plain.saved_bytes
    assert hidden.transient_backward_bytes - plain.transient_backward_bytes >= plain.saved_bytes


def test_the_router_keeps_what_it_scores_in_16_bits_whatever_the_experts_compute_in() -> None:
    """The norm's output, of which FP8 keeps a narrow copy for linears alone; a recompute of norms drops it, one of experts does not."""
    whole = describe(MOE, S)

    def without(layer: Any) -> Any:
        return replace(layer, ops=tuple(replace(op, saves=()) if getattr(op, "name", "") == "mlp.router" else op for op in layer.ops))

    less = replace(whole, runs=tuple(replace(run, layer=without(run.layer)) for run in whole.runs))

    def saved(model: Any, recompute: Recompute, **given: Any) -> float:
        return float(cost_model(model, seq_length=S, **given).layer(candidate(dp=1), "experts_decoder", recompute).saved_bytes)

    narrow = {"precision": "fp8", "cluster": replace(a100(), gpu=GPUS["H100-SXM-80GB"])}
    for recompute, given, kept in (("none", {}, 2.0), ("none", narrow, 2.0), ("mlp", {}, 2.0), ("layernorm", {}, 0.0)):
        more = saved(whole, recompute, **given) - saved(less, recompute, **given)  # type: ignore[arg-type]
        assert more == pytest.approx(kept * S * MOE.hidden_size)


def test_gradients_summed_in_fp32_are_exchanged_and_held_twice() -> None:
    """An all-to-all in place of the reduce-scatter: the same bytes, in n-1 messages, into a buffer as large as the gradients."""
    fields = {"dp": 8, "zero_stage": 1, "overlap_grad_reduce": False}
    model = cost_model()
    split = stages(model.model, [4])
    plain, exchanged = (candidate(**fields, reduce_scatter_with_fp32_accumulation=flag) for flag in (False, True))
    moved = [next(dp.traffic(8e6, 4e6, one.strategy, MEGATRON)) for one in (plain, exchanged)]
    assert [item.operation for item in moved] == ["reduce_scatter", "all_to_all"]
    assert moved[0].nbytes == moved[1].nbytes == 4e6
    peaks = [model.score(one, split)[1] for one in (plain, exchanged)]
    parameters = sum(run.count * run.layer.local_parameters(1, with_tied=False) for run in model.model.runs)
    assert peaks[1] - peaks[0] == pytest.approx(parameters * 4, rel=0.04), "in fp32, and the allocator's share"


def test_larger_groups_of_micro_batches_hold_more_and_share_the_layers_prices() -> None:
    """N - pp more micro-batches in flight in each chunk but the last, and as many tensors that wait where micro-batches come around."""
    shared = cost_model(model=replace(gpt(), num_layers=8))
    found = []
    for group in (None, 4, 6):
        one = replace(candidate(pp=4, vpp=2, num_microbatches=12), microbatch_group_size_per_vp_stage=group)
        split = stages(shared.model, [1] * 8, vpp=2)
        costs = [shared.stage(one, stage, index) for index, stage in enumerate(split)]
        alone = cost_model(model=replace(gpt(), num_layers=8))
        assert shared.score(one, split) == alone.score(one, split)
        found.append([cost.peak_bytes for cost in costs])
    assert found[0] == found[1]
    slack = 1 + shared.calibration.allocator_slack
    saved = shared.layer(one, "decoder", "none").saved_bytes
    waiting = shared.boundary_bytes(one)
    more = [(after - before) / slack for before, after in zip(found[1], found[2], strict=True)]
    assert more[1] == pytest.approx(2 * saved) == pytest.approx(more[2])
    assert more[3] >= 2 * saved + 2 * waiting * (1 - 1e-9)
    assert more[0] >= 2 * waiting


def test_a_ring_of_attention_adds_up_its_steps_and_holds_their_outputs_until_then() -> None:
    """Of cp=4: four outputs of sh/4, the first scaled (read and written), the others added to what is there (read, and that read and
    written): 2 + 3 * 3 = 11, and 11 for the queries' gradients. Of keys' and of values', causal: half a copy, two halves added, the whole
    on the diagonal: 1 + 2 * 1.5 + 3 = 7 each; all of them without a mask."""
    sh = 2 * S * H  # bytes
    (op,) = (op for op in LAYER.ops if isinstance(op, Attention))
    strategy = Strategy(mesh=Mesh(cp=4))
    assert cp.merged_bytes(op, strategy, 1, 2, steps=4) == (11 * sh / 4, (11 + 2 * 7) * sh / 4)
    assert cp.merged_bytes(replace(op, causal=False), strategy, 1, 2, steps=4) == (11 * sh / 4, 3 * 11 * sh / 4)
    assert cp.merged_bytes(op, Strategy(mesh=Mesh(cp=2)), 1, 2, steps=2) == (5 * sh / 2, (5 + 2 * 4) * sh / 2)
    assert cp.merged_bytes(op, strategy, 1, 2, steps=1) == (0.0, 0.0)
    assert cp.working_bytes(op, strategy, 1, 2, inner=1, steps=4) == 4 * (sh / 4 + 2 * sh / 4)
    assert cp.working_bytes(op, strategy, 1, 2, inner=1, steps=1) == 2 * sh, "keys and values, gathered"
    assert cp.working_bytes(op, strategy, 1, 2, inner=4, steps=1) == 3 * sh / 4


@pytest.mark.parametrize(("tp", "samples"), [(2, 1), (4, 1), (2, 3)])
def test_heads_divided_by_tensor_parallelism_divide_what_context_parallelism_moves_and_holds(tp: int, samples: int) -> None:
    """With as many groups of keys as ranks at least; a rank has one group of keys at least, and one head of queries."""
    (op,) = (op for op in LAYER.ops if isinstance(op, Attention))
    op, one = replace(op, heads=8, kv_heads=4), Strategy(mesh=Mesh(cp=4))
    many = replace(one, mesh=Mesh(cp=4, tp=tp))
    for steps in (1, 2, 4):
        alone = cp.merged_bytes(op, one, 1, 2, steps)
        assert cp.merged_bytes(op, many, samples, 2, steps) == pytest.approx([nbytes * samples / tp for nbytes in alone])
        for inner in (1, 2):
            held = cp.working_bytes(op, one, 1, 2, inner, steps)
            assert cp.working_bytes(op, many, samples, 2, inner, steps) == pytest.approx(held * samples / tp)
    few = replace(op, heads=2, kv_heads=1)
    wide = replace(one, mesh=Mesh(cp=4, tp=4))
    for price in (
        lambda op, strategy: cp.merged_bytes(op, strategy, 1, 2, 4),
        lambda op, strategy: cp.working_bytes(op, strategy, 1, 2, 1, 4),
    ):
        assert price(few, wide) == price(replace(few, heads=1), one)
    sh = 2 * op.key_len * op.head_dim / 4
    assert cp.working_bytes(replace(op, heads=4), one, 1, 2, 1, 4) == 4 * (4 + 2 * 4) * sh, "outputs, keys and values of all four steps"
    assert cp.working_bytes(replace(op, heads=4, kv_heads=32), one, 1, 2, 1, 2) == 2 * 4 * 32 * sh, "backward: also their gradients, twice"


def test_a_step_of_a_ring_is_as_efficient_as_attention_of_the_ranks_part_alone() -> None:
    """A rank of cp=4 has S/4 queries. Its four kernels have the pairs of one causal square of S/4 each ((S/4)^2/2: all queries with half of
    the keys of another rank, or half of them with all), so that four squares take as long, but for what the ring adds up."""
    gpu = replace(a100().gpu, memory_bandwidth=1e18)
    (op,) = (op for op in LAYER.ops if isinstance(op, Attention))

    def attention(op: Attention, **mesh: int) -> list[float]:
        given = (gpu, MEGATRON, StateBytes(weight=2, gradient=4, master=4, moments=8), Calibration(attention_half_length=S / 4), 8)
        passes = layer_seconds(replace(LAYER, ops=(op,)), Strategy(mesh=Mesh(**mesh)), 1, "bf16", *given)
        return [part.attention for part in passes]

    alone = attention(replace(op, query_len=S // 4, key_len=S // 4))
    assert attention(op, cp=4) == pytest.approx([4 * seconds for seconds in alone])
    assert alone[0] == pytest.approx(2 * 4 * (S / 4) ** 2 * H / 2 / (0.6 * 312e12)), "half as efficient at its half length"


def test_offloaded_modules_leave_the_gpu_but_for_two_layers_and_take_as_long_as_the_host_link() -> None:
    """By hand: a norm's input and output before queries, keys and values, these three, and what attention gives, in 16 bits; attention's
    output is copied for its kernel and for the projection."""
    tensor = 2 * S * H
    freed = {"qkv_linear": 2 * tensor, "core_attn": 3 * tensor, "core_attn+attn_proj": 4 * tensor, "qkv_linear+core_attn": 5 * tensor}
    copied = {"qkv_linear": 2, "core_attn": 4, "core_attn+attn_proj": 5, "qkv_linear+core_attn": 6}
    plain, slow = layer(), replace(a100(), host_bandwidth=GB / 10)
    efficiency = datasheet(a100(), MEGATRON).host_efficiency
    for modules, nbytes in freed.items():
        moved = layer(offload_modules=modules)
        assert plain.saved_bytes - moved.saved_bytes == nbytes
        assert moved.transient_forward_bytes - plain.transient_forward_bytes == 2 * nbytes
        assert moved.transient_backward_bytes - plain.transient_backward_bytes == 2 * nbytes
        waits = cost_model(cluster=slow).layer(candidate(offload_modules=modules), "decoder", "none")
        share = 1 - 1 / 4  # of four layers the last is not copied
        assert waits.forward_s == pytest.approx(copied[modules] * tensor * share / (GB / 10 * efficiency))
        assert waits.backward_s == waits.forward_s
        assert waits.by_cause["offload"] > 0
    assert layer(offload_modules="moe_act").saved_bytes == plain.saved_bytes, "a dense model's have none"
    small = cost_model(seq_length=512).layer
    assert small(candidate(offload_modules="qkv_linear"), "decoder", "none") == small(candidate(), "decoder", "none"), "below 1 Mi elements"
    model = cost_model(gpt(feed_forward=Experts(num_experts=8, topk=2, ffn_hidden_size=512)))
    kind = next(run.layer.kind for run in model.model.runs if run.layer.recomputable)
    kept = [model.layer(candidate(ep=8, dp=8, offload_modules=modules), kind, "none").saved_bytes for modules in (None, "moe_act")]
    assert kept[0] - kept[1] == 2 * S * 2 * 512
