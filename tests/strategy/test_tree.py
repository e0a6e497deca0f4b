from __future__ import annotations

import itertools

import pytest
from msgspec.structs import replace
from paper import PP_OUTERMOST
from small_engines import HEADS, INTERLEAVED, deepspeed_like, megatron_like
from small_models import cluster, gpt, training

from orchestrator.strategy.capabilities import Capabilities, Rule
from orchestrator.strategy.pins import Pins
from orchestrator.strategy.spec import Candidate
from orchestrator.strategy.tree import Leaf, Outcome, Tree, divisors, vpp_degrees
from orchestrator.strategy.workload import Workload


def grow(
    capabilities: Capabilities,
    *,
    gpus: int = 8,
    layers: int = 8,
    batch: int = 16,
    pins: Pins | None = None,
    heads: int = 4,
    prunings: tuple[Rule, ...] = (),
) -> tuple[list[Leaf], list[Outcome]]:
    workload = Workload(model=gpt(layers, heads=heads), training=training(batch), cluster=cluster(gpus, gpus_per_node=min(gpus, 8)))
    cuts: list[Outcome] = []
    return list(Tree(capabilities, workload, pins or Pins(), prunings).leaves(cuts.append)), cuts


def test_every_leaf_uses_all_gpus_and_the_whole_batch() -> None:
    leaves, _ = grow(megatron_like(), gpus=24, batch=48, layers=12)
    assert len(leaves) > 100
    for leaf in leaves:
        candidate = leaf.candidate
        assert candidate.mesh.world_size == 24
        assert candidate.micro_batch_size * candidate.num_microbatches * candidate.mesh.dp == 48


def test_degrees_are_any_divisor() -> None:
    leaves, _ = grow(megatron_like(), gpus=24, batch=48, layers=12, heads=12)
    assert {leaf.candidate.mesh.tp for leaf in leaves} == {1, 2, 3, 4, 6, 12}
    assert {leaf.candidate.mesh.pp for leaf in leaves} == {1, 2, 3, 4, 6, 8, 12}


def test_the_tree_equals_filtering_the_whole_product() -> None:
    """No legal choice is lost by cutting early, none is there twice."""
    capabilities = megatron_like()
    leaves, _ = grow(capabilities, gpus=8, batch=8, layers=6)
    found = set()
    for c, *_ in leaves:
        found.add((c.mesh.pp, c.mesh.tp, c.mesh.dp, c.strategy.zero_stage, c.strategy.sequence_parallel, c.micro_batch_size, c.vpp))
    assert len(found) == len(leaves)
    expected = set()
    for pp, tp, dp, zero, sp, mbs in itertools.product(divisors(8), divisors(8), divisors(8), (0, 1), (False, True), divisors(8)):
        if pp * tp * dp != 8 or tp not in (1, 2, 4) or (8 // dp) % mbs or (sp and tp == 1) or pp > 8:
            continue
        for vpp in vpp_degrees(6, pp, uneven=True):
            if vpp == 1 or (8 // dp // mbs) % pp == 0:
                expected.add((pp, tp, dp, zero, sp, mbs, vpp))
    assert found == expected


def test_a_degree_that_no_mesh_can_have_is_cut_once() -> None:
    _, cuts = grow(megatron_like(), gpus=64, layers=64, batch=64)
    by_heads = [cut for cut in cuts if cut.rule == "heads_tp"]
    assert [cut.choice for cut in by_heads] == ["megatron tp=8", "megatron tp=16", "megatron tp=32", "megatron tp=64"]
    assert by_heads[1].reason == "illegal by rule heads_tp (transformer_config.py:924): 16 does not divide num_attention_heads=4"


def test_a_cut_names_only_what_was_decided() -> None:
    _, cuts = grow(megatron_like(), gpus=8, batch=6, layers=8)
    assert {cut.choice for cut in cuts if cut.rule == "data_parallel"} == {
        "megatron pp=1 tp=1 dp=8",
        "megatron pp=1 tp=2 dp=4",
        "megatron pp=2 tp=1 dp=4",
    }
    chunks = [cut for cut in cuts if cut.rule == "vpp_M"]
    assert chunks
    assert all("vpp=" in cut.choice for cut in chunks)


def test_a_group_of_micro_batches_is_a_choice_only_where_pp_does_not_divide_them() -> None:
    leaves, _ = grow(megatron_like(microbatch_groups=True), gpus=8, batch=20, layers=8)
    found = {}
    for leaf in leaves:
        c = leaf.candidate
        if c.vpp > 1:
            found.setdefault((c.mesh.pp, c.num_microbatches), set()).add(c.microbatch_group_size_per_vp_stage)
        else:
            assert c.microbatch_group_size_per_vp_stage is None
    larger = {(leaf.candidate.mesh.pp, leaf.candidate.num_microbatches): leaf.groups for leaf in leaves if leaf.candidate.vpp > 1}
    assert larger[2, 10] == (4, 8), "and inside the leaf that doubled, and doubled again"
    assert found[2, 10] == {None}
    assert found[2, 5] == {3, 5}
    assert found[4, 10] == {5, 6}
    assert found[4, 5] == {5}


@pytest.mark.parametrize(
    ("pins", "kept"),
    [
        (Pins(tp=2), lambda c: c.mesh.tp == 2),
        (Pins(pp=4, tp=2), lambda c: c.mesh.pp == 4 and c.mesh.tp == 2),
        (Pins(dp=4), lambda c: c.mesh.dp == 4),
        (Pins(zero_stage=1), lambda c: c.strategy.zero_stage == 1),
        (Pins(micro_batch_size=2), lambda c: c.micro_batch_size == 2),
        (Pins(vpp=2), lambda c: c.vpp == 2),
        (Pins(sequence_parallel=False), lambda c: not c.strategy.sequence_parallel),
        (Pins(layout="Et|tt|tt|tttL"), lambda c: c.mesh.pp * c.vpp == 4),
    ],
)
def test_a_pin_keeps_exactly_the_branches_that_have_it(pins: Pins, kept: object) -> None:
    assert callable(kept)
    free, _ = grow(megatron_like())
    pinned, _ = grow(megatron_like(), pins=pins)
    assert pinned
    assert [leaf for leaf in free if kept(leaf.candidate)] == pinned


def test_a_mode_that_only_a_pin_takes_is_not_searched() -> None:
    engine = replace(megatron_like(), pinned_recompute=("selective",))
    leaves, _ = grow(engine)
    assert "selective" not in {mode for leaf in leaves for mode in leaf.recompute}
    pinned, _ = grow(engine, pins=Pins(recompute="selective"))
    assert {leaf.recompute for leaf in pinned} == {("selective",)}


def test_a_pinned_recompute_is_the_only_mode() -> None:
    leaves, _ = grow(megatron_like(), pins=Pins(recompute="selective"))
    assert {leaf.recompute for leaf in leaves} == {("selective",)}
    assert {leaf.candidate.strategy.recompute for leaf in leaves} == {"selective"}


@pytest.mark.parametrize(
    ("pins", "why"),
    [
        (Pins(tp=3), "does not divide the 8 GPUs"),
        (Pins(tp=8), "does not divide num_attention_heads=4"),
        (Pins(cp=2), "megatron has no cp"),
        (Pins(vpp=3, pp=2), "num_microbatches"),
        (Pins(zero_stage=3), "zero_stage 0, 1"),
        (Pins(offload=True), "no optimizer offload"),
        (Pins(micro_batch_size=5), "does not divide global_batch_size=16"),
        (Pins(sequence_parallel=True, tp=1), "needs tp > 1"),
    ],
)
def test_a_pin_that_breaks_a_rule_leaves_nothing_but_the_reason(pins: Pins, why: str) -> None:
    batch = 15 if pins.vpp else 16
    leaves, cuts = grow(megatron_like(), pins=pins, batch=batch)
    leaves = [leaf for leaf in leaves if pins.vpp is None or leaf.candidate.mesh.dp == 1]
    assert [leaf for leaf in leaves if pins.vpp is None] == []
    assert any(why in (cut.reason or "") for cut in cuts)


def test_zero_2_and_3_only_without_a_pipeline_where_the_engine_says_so() -> None:
    leaves, _ = grow(deepspeed_like(zero_stages_with_pipeline=(1,)))
    assert {leaf.candidate.strategy.zero_stage for leaf in leaves if leaf.candidate.mesh.pp == 1} == {0, 1, 2, 3}
    assert {leaf.candidate.strategy.zero_stage for leaf in leaves if leaf.candidate.mesh.pp > 1} == {1}


def test_even_stages_only_where_the_engine_needs_them() -> None:
    leaves, cuts = grow(deepspeed_like(), layers=6)
    assert {leaf.candidate.mesh.pp for leaf in leaves} == {1, 2}
    assert any("6 layers do not split evenly over pp=4" in (cut.reason or "") for cut in cuts)


@pytest.mark.parametrize("field", ["parts", "precisions", "optimizers"])
def test_an_engine_that_cant_run_the_model_is_cut_at_the_root(field: str) -> None:
    leaves, cuts = grow(megatron_like(**{field: ("other",)}))
    assert leaves == []
    assert [cut.choice for cut in cuts] == ["megatron"]


def test_a_rule_is_judged_as_soon_as_its_needs_are_known() -> None:
    """A rule over tp alone must not be asked once per leaf."""
    asked = 0

    def check(candidate: Candidate, workload: Workload) -> str | None:
        nonlocal asked
        asked += 1
        return HEADS.check(candidate, workload)

    rule = Rule(id="heads", engine_rule="x", check=check, needs=("model", "tp"))
    leaves, _ = grow(megatron_like(rules=(rule, INTERLEAVED)), gpus=64, layers=64, batch=64)
    assert len(leaves) > 500
    assert asked == len(divisors(64))


ORDERS = (("tp", "cp", "ep", "dp", "pp"), ("tp", "cp", "ep", "pp", "dp"))


def test_a_second_rank_order_is_searched_only_where_it_puts_stages_nearer() -> None:
    """On nodes of 8: not with tp=8, whose stages never share a node, and not on one node."""
    both, _ = grow(megatron_like(rank_orders=ORDERS), gpus=16, heads=8)
    one, _ = grow(megatron_like(), gpus=16, heads=8)
    differ = [leaf for leaf in one if leaf.candidate.mesh.pp > 1 and leaf.candidate.mesh.dp > 1 and leaf.candidate.mesh.tp <= 4]
    assert any(leaf.candidate.mesh.tp == 8 for leaf in one)
    assert len(differ) > 20
    assert len(both) == len(one) + len(differ)
    assert grow(megatron_like(rank_orders=ORDERS), gpus=8)[0] == grow(megatron_like(), gpus=8)[0]


def test_a_pinned_rank_order_is_the_only_one() -> None:
    near, _ = grow(megatron_like(rank_orders=ORDERS), gpus=16, pins=Pins(rank_order="tp-cp-ep-pp-dp"))
    assert {leaf.candidate.mesh.order for leaf in near} == {ORDERS[1]}
    far, _ = grow(megatron_like(rank_orders=ORDERS), gpus=16, pins=Pins(rank_order="tp-cp-ep-dp-pp"))
    assert far == grow(megatron_like(), gpus=16)[0]
    assert len(near) == len(far)


def test_the_papers_first_takeaway_is_a_rule_that_can_be_switched_on() -> None:
    pruned, cuts = grow(megatron_like(rank_orders=ORDERS), gpus=16, prunings=(PP_OUTERMOST,))
    one, _ = grow(megatron_like(), gpus=16)
    assert pruned == one
    assert {cut.rule for cut in cuts} >= {"pp_outermost"}


def test_the_same_question_grows_the_same_tree() -> None:
    assert grow(megatron_like(), gpus=24, batch=48) == grow(megatron_like(), gpus=24, batch=48)
