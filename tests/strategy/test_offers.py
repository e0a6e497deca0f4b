"""What each level of the tree offers, up to the very limit of it: parts of sequences, experts' axes, second copies, orders, groups."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from small_engines import deepspeed_like, megatron_like
from small_models import cluster, gpt, training

from orchestrator.model.parts.experts import Experts
from orchestrator.model.spec import ModelSpec
from orchestrator.strategy.capabilities import Capabilities, Rule
from orchestrator.strategy.pins import Pins
from orchestrator.strategy.spec import PP_BEFORE_DP, RANK_ORDER, Candidate
from orchestrator.strategy.tree import (
    LEVELS,
    Leaf,
    Tree,
    divisors,
    fills_groups,
    group_sizes,
    larger_groups,
    level_of,
    only_axis,
    vpp_degrees,
)
from orchestrator.strategy.workload import Workload

AXES = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")


def mixture(num_experts: int, topk: int = 2) -> ModelSpec:
    plain = gpt(8)
    experts = Experts(num_experts=num_experts, topk=topk, ffn_hidden_size=64)
    return replace(plain, architecture=replace(plain.architecture, feed_forward=experts))


def candidates(capabilities: Capabilities, model: ModelSpec | None = None, gpus: int = 8, batch: int = 16, **pins: Any) -> list[Candidate]:
    engine = replace(capabilities, parts=None, rules=())
    workload = Workload(model=model or gpt(8), training=training(batch), cluster=cluster(gpus, gpus_per_node=min(gpus, 8)))
    return [leaf.candidate for leaf in Tree(engine, workload, Pins(**pins)).leaves(lambda cut: None)]


@pytest.mark.parametrize(("least", "degrees"), [(1, {1, 2, 4, 8}), (4, {1, 2, 4, 8}), (5, {1, 2, 4}), (16, {1, 2}), (17, {1}), (64, {1})])
def test_a_sequence_is_cut_into_parts_no_shorter_than_the_engine_is_searched_with(least: int, degrees: set[int]) -> None:
    """Of 32 tokens; a pin takes any part."""
    engine = megatron_like(axes=AXES, least_sequence_part=least)
    assert {candidate.mesh.cp for candidate in candidates(engine, pp=1)} == degrees
    assert {candidate.mesh.cp for candidate in candidates(engine, cp=8)} == {8}


def test_ranks_that_share_a_sequence_take_one_sample_unless_somebody_asked() -> None:
    engine = megatron_like(axes=AXES)

    def sizes(**pins: Any) -> set[int]:
        return {candidate.micro_batch_size for candidate in candidates(engine, **pins) if candidate.mesh.cp > 1}

    assert sizes() == {1}
    assert sizes(cp=2) > {1}
    assert sizes(dp=2) > {1}
    assert {candidate.micro_batch_size for candidate in candidates(engine) if candidate.mesh.cp == 1} == {1, 2, 4, 8, 16}


def test_keys_and_values_are_exchanged_in_several_ways_only_where_they_are() -> None:
    engine = megatron_like(axes=AXES, options={"cp_comm_type": ("p2p", "a2a")})
    kinds = {(candidate.mesh.cp > 1, candidate.strategy.cp_comm_type) for candidate in candidates(engine)}
    assert kinds == {(False, "p2p"), (True, "p2p"), (True, "a2a")}


def test_experts_are_divided_like_attention_or_whole_or_where_ep_could_not_be_larger_both() -> None:
    """Of 8 experts, and of 6, which ep=2 with tp=4 and ep=2 with tp=2 can't divide further."""
    engine = megatron_like(axes=AXES)

    def degrees(model: ModelSpec, **pins: Any) -> set[tuple[int, int, int]]:
        meshes = [candidate.mesh for candidate in candidates(engine, model, pp=1, cp=1, **pins)]
        return {(mesh.tp, mesh.ep, mesh.etp) for mesh in meshes}

    eight = degrees(mixture(8))
    assert {etp for tp, ep, etp in eight if ep == 1 and tp == etp} == {1, 2, 4, 8}
    assert all(etp == tp for tp, ep, etp in eight if ep == 1)
    assert {(tp, etp) for tp, ep, etp in eight if ep == 2} == {(1, 1), (2, 1), (4, 1), (8, 1), (8, 4)} - {(8, 4)}
    six = degrees(mixture(6))
    assert {(tp, etp) for tp, ep, etp in six if ep == 2} >= {(2, 1), (2, 2), (4, 4)}
    assert {(tp, etp) for tp, ep, etp in six if ep == 2 and tp == 1} == {(1, 1)}
    assert degrees(mixture(8), ep=2, etp=4, tp=1) == {(1, 2, 4)}
    assert {(ep, etp) for _, ep, etp in degrees(gpt(8))} == {(1, 1)}, "a dense model has none"


def test_all_tokens_go_to_all_ranks_only_where_these_are_fewer_than_a_token_has_experts() -> None:
    """With 4 experts a token: on 2 ranks that share them, not on 4."""
    engine = megatron_like(axes=AXES, options={"moe_token_dispatcher_type": ("alltoall", "allgather")})
    found = candidates(engine, mixture(8, topk=4), pp=1, cp=1)
    both = {(mesh.ep * mesh.etp, candidate.strategy.moe_token_dispatcher_type) for candidate in found for mesh in [candidate.mesh]}
    assert {ranks for ranks, kind in both if kind == "allgather"} == {2}
    assert {ranks for ranks, kind in both if kind == "alltoall"} == {1, 2, 4, 8}


@pytest.mark.parametrize(("gpus", "dp", "sizes"), [(16, 16, {None, 8}), (16, 8, {None}), (8, 8, {None}), (24, 24, {None, 8})])
def test_a_second_copy_of_weights_is_kept_inside_a_node_where_the_group_is_larger(gpus: int, dp: int, sizes: set[int | None]) -> None:
    engine = deepspeed_like(zero_shard_groups=True, zero_shard_stages=(3,))
    found = [candidate for candidate in candidates(engine, gpus=gpus, batch=48) if candidate.mesh.dp == dp]
    assert {candidate.strategy.zero_shard_size for candidate in found if candidate.strategy.zero_stage == 3} == sizes
    assert {candidate.strategy.zero_shard_size for candidate in found if candidate.strategy.zero_stage < 3} == {None}


@pytest.mark.parametrize(("tp", "both"), [(4, True), (8, False)])
def test_stages_are_put_nearer_where_two_of_them_then_share_a_node(tp: int, both: bool) -> None:
    """Of 8 GPUs: two stages' ranks of tp=4 lie in it, of tp=8 not."""
    engine = megatron_like(rank_orders=(RANK_ORDER, PP_BEFORE_DP))
    found = candidates(engine, gpus=32, tp=tp, pp=2)
    assert {candidate.mesh.order for candidate in found} == ({RANK_ORDER, PP_BEFORE_DP} if both else {RANK_ORDER})


def test_sequence_parallelism_and_offload_are_tried_first_with_and_then_without() -> None:
    def first(values: list[bool]) -> list[bool]:
        return list(dict.fromkeys(values))

    found = candidates(megatron_like(), tp=2, pp=1)
    assert first([candidate.strategy.sequence_parallel for candidate in found]) == [True, False]
    assert {candidate.strategy.sequence_parallel for candidate in candidates(megatron_like(), tp=1)} == {False}
    offload = first([candidate.strategy.offload_optimizer for candidate in candidates(deepspeed_like())])
    assert offload == [False, True]


def test_a_schedule_of_its_own_is_for_pipelines_without_chunks() -> None:
    engine = megatron_like(schedules=("1f1b", "interleaved", "deepspeed_1f1b"))
    kinds = {(candidate.mesh.pp > 1, candidate.vpp > 1, candidate.schedule) for candidate in candidates(engine)}
    assert kinds == {(False, False, "1f1b"), (True, False, "1f1b"), (True, False, "deepspeed_1f1b"), (True, True, "interleaved")}


def test_chunks_never_outnumber_the_layers_with_embedding_and_head() -> None:
    for layers in range(2, 20):
        for pp in range(2, 9):
            even, uneven = vpp_degrees(layers, pp, uneven=False), vpp_degrees(layers, pp, uneven=True)
            assert all(layers % (pp * vpp) == 0 for vpp in even if vpp > 1)
            assert all(pp * vpp <= layers + 2 for vpp in uneven)
            assert {*even} <= {*uneven} or layers % pp
    assert vpp_degrees(12, 1, uneven=True) == (1,)


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
def test_groups_are_filled_and_larger_ones_are_doublings(pp: int) -> None:
    """A last, smaller group must still fill the pipeline."""
    for m in range(1, 40):
        for size in range(1, 45):
            last = m % size or size
            assert fills_groups(m, pp, size) == (pp <= size <= m and last >= pp)
        sizes = group_sizes(pp, m)
        assert (sizes == (None,)) == (m % pp == 0 or m < pp)
        if sizes != (None,):
            legal = [size for size in range(1, m + 1) if fills_groups(m, pp, size)]
            assert list(sizes) == legal[:2]
        for size in larger_groups(pp, m, None):
            assert fills_groups(m, pp, size)
            assert (size // pp) & (size // pp - 1) == 0
            assert pp < size <= m
        assert (2 * pp in larger_groups(pp, m, None)) == fills_groups(m, pp, 2 * pp)


def test_two_ranks_that_share_a_sequence_are_enough_for_every_way_to_exchange() -> None:
    engine = megatron_like(axes=AXES, options={"cp_comm_type": ("p2p", "a2a")})
    kinds = {(candidate.mesh.cp, candidate.strategy.cp_comm_type) for candidate in candidates(engine, gpus=2)}
    assert kinds == {(1, "p2p"), (2, "p2p"), (2, "a2a")}


def test_groups_of_micro_batches_are_interleavings_alone_and_of_engines_that_have_them() -> None:
    """10 micro-batches over 4 stages fill groups of 5 and 6."""
    for has in (True, False):
        found = candidates(megatron_like(axes=AXES, microbatch_groups=has), gpt(8), gpus=4, batch=10, pp=4, micro_batch_size=1)
        groups = {(candidate.vpp > 1, candidate.microbatch_group_size_per_vp_stage) for candidate in found}
        assert groups == ({(False, None), (True, 5), (True, 6)} if has else {(False, None), (True, None)})


def leaves(pins: Pins, **changes: Any) -> list[Leaf]:
    engine = megatron_like(axes=AXES, parts=None, **{"microbatch_groups": True, "rules": (), **changes})
    workload = Workload(model=gpt(8), training=training(16), cluster=cluster(4))
    return list(Tree(engine, workload, pins).leaves(lambda cut: None))


def test_larger_groups_are_those_that_no_rule_forbids_and_that_nobody_decides() -> None:
    """16 micro-batches over 4 stages: groups of 8 and 16 beside 4."""
    forbids = Rule(
        id="no_eight",
        engine_rule="x",
        check=lambda candidate, _: "eight" if candidate.microbatch_group_size_per_vp_stage == 8 else None,
        needs=("microbatch_group_size_per_vp_stage",),
    )
    pins = Pins(pp=4, micro_batch_size=1)
    assert {(leaf.candidate.vpp > 1, leaf.groups) for leaf in leaves(pins)} == {(False, ()), (True, (8, 16))}
    assert {leaf.groups for leaf in leaves(pins, rules=(forbids,)) if leaf.candidate.vpp > 1} == {(16,)}
    assert {leaf.groups for leaf in leaves(pins, microbatch_groups=False)} == {()}
    pinned = replace(pins, microbatch_group_size_per_vp_stage=8)
    assert {leaf.groups for leaf in leaves(pinned)} == {()}


def test_what_no_choice_changes_is_judged_before_any() -> None:
    def level(*needs: str) -> int:
        return level_of(Rule(id="x", engine_rule="x", check=lambda candidate, given: None, needs=needs))

    assert level() == level("model", "cluster") == -1
    assert level("pp") == level("model", "pp") == 0
    assert level("tp", "pp") == LEVELS.index("tp")
    assert level("num_microbatches") == LEVELS.index("micro_batch_size")
    assert level("pp", "something") == len(LEVELS) - 1


def test_a_rule_of_one_choice_reads_no_other() -> None:
    def axis(*needs: str) -> str | None:
        return only_axis(Rule(id="x", engine_rule="x", check=lambda candidate, given: None, needs=needs))

    assert axis("tp") == axis("model", "tp") == "tp"
    assert axis("world_size", "dp") == "dp", "known with it"
    assert axis("tp", "pp") is None
    assert axis("model") is None


@pytest.mark.parametrize("number", [1, 2, 3, 4, 12, 16, 36, 97, 100, 1024])
def test_divisors_are_all_of_them_once_and_ascending(number: int) -> None:
    assert divisors(number) == tuple(d for d in range(1, number + 1) if number % d == 0)
