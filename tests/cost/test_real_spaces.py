"""Laws of prices over candidates of the engines' own spaces."""

from __future__ import annotations

import itertools
import random

import pytest
from msgspec.structs import replace
from real_spaces import WORDS, asked, candidates, name_of

from orchestrator.cost.bounds import Floors
from orchestrator.cost.price import CostModel
from orchestrator.cost.states import state_bytes
from orchestrator.strategy.spec import RECOMPUTE_ORDER
from orchestrator.strategy.tree import Tree


@pytest.mark.parametrize("words", [*WORDS, ("recipe=gpt_oss_120b", "gpus=32"), ("recipe=gpt_tiny", "gpus=8")], ids=name_of)
def test_a_layers_states_and_the_least_that_it_takes_are_those_of_its_price(words: tuple[str, ...]) -> None:
    """Its states whatever the passes; its seconds where nothing is computed again, offloaded or sharded in the passes, and no pass waits
    for the host."""
    question = asked(*words)
    for engine in question.planned:
        constants = replace(engine.calibration, layer_floor_s=0.0, expert_sync_s=0.0, expert_quantise_s=0.0)
        costs = CostModel(question.workload, engine.traits, constants)
        for chosen in candidates(question, engine, words, 6):
            states = state_bytes(engine.traits, question.workload.training, chosen.strategy.zero_stage)
            for kind in costs.kinds:
                plain = costs.layer(chosen, kind, "none")
                assert costs.layer_static_bytes(chosen, kind) == pytest.approx(plain.static_bytes, rel=1e-12)
                least = costs.layer_floor_seconds(chosen, kind, states)
                for mode in RECOMPUTE_ORDER:
                    cost = costs.layer(chosen, kind, mode)
                    assert least[0] <= cost.forward_s * (1 + 1e-12)
                    assert least[1] <= cost.backward_s * (1 + 1e-12)
                kept = chosen.strategy.zero_stage <= 1 and not chosen.strategy.offload_activations
                if kept and engine.traits.reduces_every_microbatch_from_stage > 1:
                    assert least == pytest.approx((plain.forward_s, plain.backward_s), rel=1e-12)


@pytest.mark.parametrize("words", WORDS, ids=name_of)
def test_meshes_alike_share_a_bound_that_is_below_the_own_of_each(words: tuple[str, ...]) -> None:
    """With more ranks for a sequence, or ranks in another order, a step takes no less: one price is enough for most meshes."""
    question = asked(*words)
    met = 0
    for engine in question.planned:
        tree = Tree(engine.capabilities, question.workload, question.settings.pins)
        floors = Floors(engine.costs(question.workload), engine.capabilities, 1e15, pinned_layout=False)
        shapes = [*tree.shapes(lambda _: None)]
        for shape in random.Random(str(words)).sample(shapes, min(60, len(shapes))):
            parallels, mesh = tree.sequence_parallels(shape), shape.mesh
            shared = floors.any_shape(shape, parallels)
            assert 0.0 < shared <= floors.shape(shape, max(tree.micro_batch_sizes(shape)), parallels) * (1 + 1e-9)
            met += 1
            whole = replace(shape, strategy=replace(shape.strategy, mesh=replace(mesh, cp=1, dp=mesh.dp * mesh.cp)))
            assert shared == floors.any_shape(whole, parallels)
    assert met > 5


@pytest.mark.parametrize("words", WORDS, ids=name_of)
def test_candidates_of_one_key_have_passes_of_the_same_seconds_that_keep_the_same(words: tuple[str, ...]) -> None:
    question = asked(*words)
    met = 0
    for engine in question.planned:
        costs = engine.costs(question.workload)
        for one in candidates(question, engine, words, 8):
            stages = [stage for stage in engine.capabilities.zero_stages if stage <= 1]
            for stage, copies in itertools.product(stages, (one.mesh.dp, 2 * one.mesh.dp)):
                mesh = replace(one.mesh, dp=copies)
                other = replace(one, strategy=replace(one.strategy, mesh=mesh, zero_stage=stage, overlap_grad_reduce=False))
                if costs.passes_key(one) == costs.passes_key(other):
                    for kind, mode in itertools.product(costs.kinds, engine.capabilities.recompute):
                        mine, its = costs.layer(one, kind, mode), costs.layer(other, kind, mode)
                        assert (mine.forward_s, mine.backward_s, mine.saved_bytes) == (its.forward_s, its.backward_s, its.saved_bytes)
                        met += 1
    assert met > 20


@pytest.mark.parametrize("words", WORDS, ids=name_of)
def test_seconds_by_cause_are_the_seconds(words: tuple[str, ...]) -> None:
    question = asked(*words)
    for engine in question.planned:
        costs = engine.costs(question.workload)
        for chosen in candidates(question, engine, words):
            for kind in costs.kinds:
                for mode in engine.capabilities.recompute:
                    cost = costs.layer(chosen, kind, mode)
                    assert sum(cost.by_cause.values()) == pytest.approx(cost.seconds, rel=1e-9)
                    assert all(seconds >= 0.0 for seconds in cost.by_cause.values())
