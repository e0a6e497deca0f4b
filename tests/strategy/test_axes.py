"""The traffic of each axis for small layers, operation by operation: bytes, ranks, distances, when, and behind what it may hide."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
from msgspec.structs import replace
from small_models import gpt

from orchestrator.model.ops import Attention, Enter, Exchange, Exit
from orchestrator.model.spec import Edge, LayerSpec
from orchestrator.strategy.axes import cp, dp, ep, pp, tp
from orchestrator.strategy.axes.traffic import Traffic
from orchestrator.strategy.capabilities import StateBytes, Traits
from orchestrator.strategy.spec import Mesh, Strategy

MIXED = StateBytes(weight=2, gradient=4, master=4, moments=8)
TRAITS = Traits(engine="x", states={"mixed/0": MIXED}, gradient_bytes_on_wire="weight", reduce_scatter_from_stage=1)
ATTENTION = Attention(name="a", query_len=1024, key_len=512, heads=8, kv_heads=4, head_dim=16, causal=True)


def layer(*ops: Any) -> LayerSpec:
    return replace(gpt(1).runs[1].layer, ops=ops)


def rows(items: Any) -> list[tuple[Any, ...]]:
    """(when, operation, all bytes, ranks, stride, hidden, whether full recompute repeats it)."""
    found: list[Traffic] = list(items)
    return [(t.when, t.operation, t.count * t.nbytes, t.size, t.stride, t.hidden, t.repeats_with_recompute) for t in found]


# ---- tp


def test_tensor_parallel_regions_sum_their_outputs_and_their_inputs_gradients() -> None:
    """3 samples of 100 elements in and 50 out, halved by cp, of 2 bytes: an all-reduce each."""
    strategy = Strategy(mesh=Mesh(tp=4, cp=2))
    items = rows(tp.traffic(layer(Enter(elements=100), Exit(elements=50)), strategy, 3, 2))
    assert items == [
        ("backward", "all_reduce", 300.0, 4, 1, "gemm", False),
        ("forward", "all_reduce", 150.0, 4, 1, "gemm", True),
    ]
    assert rows(tp.traffic(layer(Enter(elements=100)), replace(strategy, mesh=Mesh(cp=2)), 3, 2)) == []


def test_sequence_parallel_regions_gather_and_scatter_and_gather_once_more_for_the_weights_gradient() -> None:
    strategy = Strategy(mesh=Mesh(tp=4), sequence_parallel=True)
    both = layer(Enter(elements=100), Exit(elements=50))
    assert rows(tp.traffic(both, strategy, 1, 2)) == [
        ("forward", "all_gather", 200.0, 4, 1, "gemm", True),
        ("backward", "all_gather", 200.0, 4, 1, "gemm", False),
        ("backward", "reduce_scatter", 200.0, 4, 1, "gemm", False),
        ("forward", "reduce_scatter", 100.0, 4, 1, "gemm", True),
        ("backward", "all_gather", 100.0, 4, 1, "gemm", False),
    ]
    narrow = [row[2] for row in rows(tp.traffic(both, strategy, 1, 2, (1.0, 1.5)))]
    assert narrow == [100.0, 100.0, 200.0, 100.0, 75.0], "what is gathered travels as products take it, sums do not"
    hidden = [row[5] for row in rows(tp.traffic(both, strategy, 1, 2, beside_products=True))]
    assert hidden == ["gemm", "product", "product", "gemm", "gemm"]
    buffers = replace(strategy, tp_comm_overlap=True)
    assert {row[5] for row in rows(tp.traffic(both, buffers, 1, 2, beside_products=True))} == {"user_buffers"}


def test_an_adapters_ranks_send_what_bridges_linears_send() -> None:
    """peft/utils.py, ParallelLinearAdapter: its linears are megatron-core's own without sequence parallelism, around which inputs are
    gathered and outputs scattered (tensor_parallel/mappings.py), but what Transformer Engine's linear with a norm hands over gathered."""
    plain = Strategy(mesh=Mesh(tp=4))
    gathered, buffers = replace(plain, sequence_parallel=True), replace(plain, sequence_parallel=True, tp_comm_overlap=True)

    def sent(strategy: Strategy, of: Any, shared: bool = False) -> list[str]:
        items = [*tp.traffic(layer(Exchange(of=of, elements=100, shared=shared)), strategy, 3, 2, (1.0, 1.0))]
        assert all((item.nbytes, item.hidden) == (600.0, "nothing") for item in items)
        return [f"{item.when} {item.operation}" for item in items]

    inner = ["forward all_gather", "backward all_reduce"], ["forward all_reduce", "backward all_reduce"]
    for strategy in (plain, gathered, buffers):
        assert (sent(strategy, "columns"), sent(strategy, "rows")) == inner
    assert sent(plain, "input", shared=True) == ["backward all_reduce"]
    assert sent(gathered, "input", shared=True) == []
    assert sent(buffers, "input", shared=True) == sent(gathered, "input") == ["forward all_gather", "backward reduce_scatter"]
    assert [sent(one, "output") for one in (plain, gathered)] == [["forward all_gather"], ["forward all_gather", "backward all_gather"]]


def test_few_query_groups_are_gathered_by_all_ranks() -> None:
    few = layer(ATTENTION)
    assert rows(tp.query_groups(few, Strategy(mesh=Mesh(tp=4)), 2, 2)) == []
    items = rows(tp.query_groups(few, Strategy(mesh=Mesh(tp=8, cp=2)), 2, 2))
    nbytes = ATTENTION.elements * 2 * 2 / 2
    assert items == [
        ("forward", "all_gather", nbytes, 8, 1, "nothing", True),
        ("backward", "reduce_scatter", nbytes, 8, 1, "nothing", False),
    ]


def test_what_is_divided_by_tp_is_the_shards_that_say_so_and_sequences_under_sequence_parallelism() -> None:
    for parallel in (False, True):
        strategy = Strategy(mesh=Mesh(tp=4), sequence_parallel=parallel)
        assert [tp.share(shard, strategy) for shard in ("tp", "sequence", "none")] == [4, 4 if parallel else 1, 1]


# ---- cp


def test_a_ring_passes_keys_and_values_on_and_their_gradients_too() -> None:
    """A quarter of 512 keys and values of 4 heads of 16, of 2 bytes and 3 samples, three times; half of the heads on each tp rank."""
    keys = 2 * 128 * 4 * 16 * 2 * 3
    strategy = Strategy(mesh=Mesh(tp=2, cp=4))
    assert rows(cp.traffic(layer(ATTENTION), strategy, 3, 2)) == [
        ("forward", "p2p", 3 * keys / 2, 4, 2, "attention", True),
        ("backward", "p2p", 2 * 3 * keys / 2, 4, 2, "attention", False),
    ]
    assert rows(cp.traffic(layer(ATTENTION), Strategy(mesh=Mesh(tp=8)), 3, 2)) == []
    many = rows(cp.traffic(layer(ATTENTION), Strategy(mesh=Mesh(tp=8, cp=4)), 3, 2))
    assert many[0][2] == 3 * keys / 4, "a rank has a key head at least"


def test_heads_are_exchanged_for_parts_of_the_sequence() -> None:
    """Queries and outputs of all heads, keys and values of theirs, repeated to one a rank; a quarter each. As much backward."""
    for kind, how in (("ring", "a2a"), ("all_to_all", "p2p")):
        strategy = Strategy(mesh=Mesh(tp=2, cp=4), cp_comm_type=how)  # type: ignore[arg-type]
        queries, keys = 2 * 1024 * 4 / 4 * 16 * 2, 2 * 512 * 4 / 4 * 16 * 2  # heads of a tp rank; of keys two, repeated to four
        assert rows(cp.traffic(layer(ATTENTION), strategy, 1, 2, kind=kind)) == [  # type: ignore[arg-type]
            (when, "all_to_all", nbytes, 4, 2, "nothing", when == "forward")
            for when in ("forward", "backward")
            for nbytes in (queries, keys)
        ]


def test_gathered_keys_are_gathered_again_in_backward_and_their_gradients_scattered() -> None:
    strategy = Strategy(mesh=Mesh(tp=2, cp=4), cp_comm_type="all_gather")
    whole = 2 * 512 * 2 * 16 * 2
    assert rows(cp.traffic(layer(ATTENTION), strategy, 1, 2)) == [
        ("forward", "all_gather", whole, 4, 2, "nothing", True),
        ("backward", "all_gather", whole, 4, 2, "nothing", False),
        ("backward", "reduce_scatter", whole, 4, 2, "nothing", False),
    ]


def test_a_ring_of_groups_exchanges_heads_inside_and_passes_keys_between() -> None:
    """8 ranks, 4 to a node: 4 exchange heads; two steps between groups that are 4 apart, with a fourth of the heads each."""
    strategy = Strategy(mesh=Mesh(cp=8), cp_comm_type="a2a+p2p")
    items = rows(cp.traffic(layer(ATTENTION), strategy, 1, 2, domain=4))
    assert [(row[1], row[3], row[4]) for row in items] == [("all_to_all", 4, 1)] * 4 + [("p2p", 2, 4)] * 2
    assert items[4][2] == 2 * 256 * 1 * 16 * 2


def test_adding_up_a_rings_steps_moves_outputs_and_gradients() -> None:
    """Of 4 steps: the first is copied (2), the three others added (3 each); causal keys of half a sequence but for the diagonal."""
    strategy = Strategy(mesh=Mesh(tp=2, cp=4))
    queries, keys = 256 * 4 * 16 * 2 * 3, 128 * 2 * 16 * 2 * 3
    assert cp.merged_bytes(ATTENTION, strategy, 3, 2, 1) == (0.0, 0.0)
    of_keys = (2 + 3 * 2) / 2 + 3
    assert cp.merged_bytes(ATTENTION, strategy, 3, 2, 4) == (11 * queries, 11 * queries + 2 * of_keys * keys)
    whole = replace(ATTENTION, causal=False)
    assert cp.merged_bytes(whole, strategy, 3, 2, 4) == (11 * queries, 11 * queries + 2 * 11 * keys)
    one = replace(ATTENTION, heads=1, kv_heads=1)
    assert cp.merged_bytes(one, Strategy(mesh=Mesh(tp=4, cp=4)), 1, 2, 4)[0] == 11 * 256 * 16 * 2, "a head at least"


def test_attention_in_parts_holds_what_its_way_of_dividing_needs() -> None:
    strategy = Strategy(mesh=Mesh(tp=2, cp=4))
    queries, keys = 256 * 4 * 16 * 2.0, 128 * 2 * 16 * 2.0

    def held(inner: int, steps: int, op: Attention = ATTENTION) -> float:
        return cp.working_bytes(op, strategy, 1, 2, inner, steps)

    assert held(1, 4) == 4 * (queries + 2 * keys)
    wide = replace(ATTENTION, kv_heads=8, query_len=4)
    assert held(1, 2, wide) == 2 * 4 * (128 * 4 * 16 * 2.0), "keys, values and their gradients, in use and coming in"
    assert held(1, 1) == 2 * 4 * keys, "gathered"
    assert held(4, 1) == queries + 2 * keys
    assert held(2, 2) == max(2 * (queries + 2 * keys), 8 * keys) + queries + 2 * keys


# ---- dp


def gradient_traffic(stage: int, traits: Traits = TRAITS, **fields: Any) -> list[tuple[Any, ...]]:
    strategy = Strategy(mesh=Mesh(tp=2, dp=8), zero_stage=stage, **fields)  # type: ignore[arg-type]
    return rows(dp.traffic(100.0, 200.0, strategy, traits))


def test_each_zero_stage_reduces_and_gathers_what_it_divides() -> None:
    assert gradient_traffic(0) == [("step", "all_reduce", 200.0, 8, 2, "last_backward", False)]
    assert gradient_traffic(1) == [
        ("step", "reduce_scatter", 200.0, 8, 2, "last_backward", False),
        ("step", "all_gather", 100.0, 8, 2, "first_forward", False),
    ]
    assert gradient_traffic(2) == [
        ("backward", "reduce_scatter", 200.0, 8, 2, "compute", False),
        ("step", "all_gather", 100.0, 8, 2, "first_forward", False),
    ]
    assert gradient_traffic(3) == [
        ("backward", "reduce_scatter", 200.0, 8, 2, "compute", False),
        ("forward", "all_gather", 100.0, 8, 2, "compute", False),
        ("backward", "all_gather", 100.0, 8, 2, "compute", False),
    ]
    assert rows(dp.traffic(100.0, 200.0, Strategy(mesh=Mesh(tp=2), zero_stage=3), TRAITS)) == []


def test_an_engine_may_reduce_otherwise() -> None:
    late = replace(TRAITS, reduce_scatter_from_stage=2, reduces_every_microbatch_from_stage=3, weight_gathers_per_microbatch=1)
    assert gradient_traffic(1, late)[0][:2] == ("step", "all_reduce")
    assert gradient_traffic(2, late)[0][:2] == ("step", "reduce_scatter")
    assert [row[:2] for row in gradient_traffic(3, late)] == [("backward", "reduce_scatter"), ("forward", "all_gather")]
    assert gradient_traffic(0, replace(TRAITS, reduce_scatter_from_stage=0))[0][1] == "all_reduce", "nobody keeps a part of it"
    for fields, traits in (
        ({"overlap_grad_reduce": False}, TRAITS),
        ({}, replace(TRAITS, overlaps_grad_reduce=False)),
    ):
        assert [row[5] for row in gradient_traffic(1, traits, **fields)] == ["nothing", "first_forward"]
        assert [row[5] for row in gradient_traffic(3, traits, **fields)] == ["nothing", "compute", "compute"]
    for fields, traits in (
        ({"overlap_param_gather": False}, TRAITS),
        ({}, replace(TRAITS, overlaps_param_gather=False)),
    ):
        assert [row[5] for row in gradient_traffic(1, traits, **fields)] == ["last_backward", "nothing"]
        assert [row[5] for row in gradient_traffic(3, traits, **fields)] == ["compute", "nothing", "nothing"]
    exchanged = gradient_traffic(1, reduce_scatter_with_fp32_accumulation=True)
    assert exchanged[0][:3] == ("step", "all_to_all", 200.0)


def test_parts_of_the_group_hold_whole_copies() -> None:
    """At stage 1 what each part of 2 has scattered is summed with the other three; at stage 3 a second copy serves backward."""
    assert gradient_traffic(1, zero_shard_size=2) == [
        ("step", "reduce_scatter", 200.0, 2, 2, "last_backward", False),
        ("step", "all_reduce", 100.0, 4, 4, "last_backward", False),
        ("step", "all_gather", 100.0, 2, 2, "first_forward", False),
    ]
    hpz = gradient_traffic(3, zero_shard_size=2)
    assert [row[3] for row in hpz] == [8, 8, 2]
    hsdp = gradient_traffic(3, zero_shard_size=2, megatron_fsdp=True)
    assert hsdp == [
        ("backward", "reduce_scatter", 200.0, 2, 2, "compute", False),
        ("step", "all_reduce", 100.0, 4, 4, "last_backward", False),
        ("forward", "all_gather", 100.0, 2, 2, "compute", False),
        ("backward", "all_gather", 100.0, 2, 2, "compute", False),
    ], "HSDP: within a copy in every micro-batch, between the copies once a step"
    for state in ("optimizer", "gradient", "weight"):
        assert dp.share(state, Strategy(mesh=Mesh(dp=8), zero_stage=3, zero_shard_size=2, megatron_fsdp=True)) == 2


# ---- ep


def expert_traffic(mesh: Mesh, dispatcher: str = "alltoall", **given: Any) -> list[tuple[Any, ...]]:
    strategy = Strategy(mesh=mesh, moe_token_dispatcher_type=dispatcher)  # type: ignore[arg-type]
    return rows(ep.traffic(1000.0, 2, strategy, 3, 2, **given))


def test_tokens_go_to_their_experts_and_back() -> None:
    """6,000 bytes of a rank's tokens to two experts each, there and back; the busiest rank waits for all."""
    assert expert_traffic(Mesh(dp=8, ep=4)) == [
        ("forward", "all_to_all", 2 * 12_000.0, 4, 1, "nothing", True),
        ("backward", "all_to_all", 2 * 12_000.0, 4, 1, "nothing", False),
    ]
    assert expert_traffic(Mesh(dp=8, ep=4), busiest=1.5)[0][2] == 2 * 18_000.0
    assert expert_traffic(Mesh(tp=2, cp=2, dp=2, ep=4))[0][2] == 2 * 3_000.0
    assert expert_traffic(Mesh(dp=8)) == []


def test_ranks_that_share_an_expert_gather_its_tokens_and_scatter_the_sums() -> None:
    gathers = [
        (when, operation, 2 * 12_000.0, 2, 1, "nothing", when == "forward")
        for when in ("forward", "backward")
        for operation in ("all_gather", "reduce_scatter")
    ]
    assert expert_traffic(Mesh(dp=8, etp=2)) == gathers
    sent = expert_traffic(Mesh(dp=8, ep=4, etp=2))
    assert sent[:4] == gathers
    assert [row[1:5] for row in sent[4:]] == [("all_to_all", 2 * 12_000.0, 4, 2)] * 2


def test_all_tokens_go_to_all_ranks_where_they_are_gathered() -> None:
    assert expert_traffic(Mesh(dp=8, ep=4), "allgather") == [
        (when, operation, 4 * 6_000.0, 4, 1, "nothing", when == "forward")
        for when in ("forward", "backward")
        for operation in ("all_gather", "reduce_scatter")
    ]


def test_a_token_goes_once_to_each_domain_and_once_to_each_rank_there() -> None:
    """8 ranks, 4 to a domain: two domains and four ranks of each; of 2 experts 1.5 domains and 8 (1 - (7/8)^2) ranks in the mean."""
    sent = expert_traffic(Mesh(dp=8, ep=8), "flex", together=4)
    between, within = 6_000 * 1.5, 6_000 * 8 * (1 - (7 / 8) ** 2)
    assert [row[1:5] for row in sent] == [
        *[("all_to_all", 2 * between, 2, 4)] * 2,
        *[("all_to_all", pytest.approx(2 * within), 4, 1)] * 2,
    ]
    assert [row[3] for row in expert_traffic(Mesh(dp=8, ep=8), "flex")] == [8, 8], "all in one domain"
    assert [row[3] for row in expert_traffic(Mesh(dp=8, ep=8), "flex", together=1)] == [8, 8], "each in its own"


@pytest.mark.parametrize(
    ("experts", "domains", "topk", "groups", "group_topk"), [(8, 2, 2, 4, 2), (8, 4, 3, 8, 4), (8, 4, 2, 2, 1), (8, 2, 2, 1, 1)]
)
def test_visited_domains_are_a_mean_over_the_chosen_groups(experts: int, domains: int, topk: int, groups: int, group_topk: int) -> None:
    """Each of `topk` experts drawn by itself among those of the chosen groups, over all choices of groups."""
    size = experts // domains
    means = []
    for chosen in combinations(range(groups), group_topk):
        allowed = [e for e in range(experts) if e * groups // experts in chosen]
        shares = [sum(e // size == d for e in allowed) / len(allowed) for d in range(domains)]
        means.append(sum(1 - (1 - share) ** topk for share in shares))
    assert ep.visited(domains, topk, groups, group_topk) == pytest.approx(sum(means) / len(means))


# ---- pp


def test_a_border_carries_the_next_layers_input_and_what_is_needed_behind_it() -> None:
    model = gpt(4)
    decoder = model.runs[1].layer
    strategy = Strategy(mesh=Mesh(tp=2, cp=2, pp=2))
    plain = decoder.input_elements * 2 * 3 / 2
    before, after = ["embedding"], ["decoder", "head"]
    assert pp.boundary_bytes(model, before, decoder, after, strategy, 3, 2) == plain
    parallel = replace(strategy, sequence_parallel=True)
    assert pp.boundary_bytes(model, before, decoder, after, parallel, 3, 2) == plain / 2
    crossing = replace(model, edges=(Edge(name="e", source="embedding", target="head", elements=100),))
    assert pp.boundary_bytes(crossing, before, decoder, after, strategy, 3, 2) == plain + 100 * 2 * 3 / 2
    for source, target in (("head", "embedding"), ("embedding", "embedding"), ("decoder", "head")):
        beside = replace(model, edges=(Edge(name="e", source=source, target=target, elements=100),))
        assert pp.boundary_bytes(beside, before, decoder, after, strategy, 3, 2) == plain
