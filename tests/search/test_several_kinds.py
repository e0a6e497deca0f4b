"""Interleaved plans of models whose first layers are of another kind, or whose head predicts several tokens: every split that the search
names is priced one by one."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import combinations, pairwise, product

import pytest
from instances import CALIBRATION, TRAITS
from msgspec.structs import replace
from small_engines import megatron_like
from small_models import cluster, gpt, training

from orchestrator import recipe
from orchestrator.cost.bounds import Floors
from orchestrator.cost.price import CostModel, StageCost
from orchestrator.detect import machine
from orchestrator.engines import ENGINES
from orchestrator.model.spec import LayerRun, ModelSpec
from orchestrator.planning import Planner
from orchestrator.search.inner import Effort, Inner
from orchestrator.search.partition import INFINITE, STRIDE, Partitions, Paths
from orchestrator.strategy.megatron_layout import even_chunks, even_work, stages_of
from orchestrator.strategy.pins import MemoryLimit
from orchestrator.strategy.spec import Candidate, Mesh, Recompute, Strategy
from orchestrator.strategy.tree import Leaf
from orchestrator.strategy.workload import Workload

MODES: tuple[Recompute, ...] = ("none", "mlp", "full")


def model_of(rng: random.Random, first: int, layers: int) -> ModelSpec:
    """So many layers, the first ones of another kind, wider or narrower; where none is the head predicts two tokens. The head is long."""
    hidden = rng.choice([32, 64])
    plain = gpt(layers, hidden=hidden, seq=64, vocab=rng.choice([128, 2048, 8192]))
    embedding, decoder, head = plain.runs
    if not first:
        return replace(plain, architecture=replace(plain.architecture, mtp_num_layers=1))
    other = replace(gpt(1, hidden=rng.choice([16, 48, 96, 256]), seq=64).runs[1].layer, kind="encoder")
    runs = (embedding, LayerRun(layer=other, count=first), replace(decoder, count=layers - first), head)
    return replace(plain, runs=runs)


def splits(costs: CostModel, candidate: Candidate, first: int, layers: int) -> Iterator[tuple[int, ...]]:
    """Every way to cut the layers into chunks (vpp-major) of which a search takes some: the first kind in first chunks; a layer in each
    stage between the first and the last; chunks of a stage that differ by a layer at most, the first ones having it, or in the first stage
    the last ones too; the last chunk with fewer, as long as it and the head take longer than the stage's mean chunk."""
    pp, vpp = candidate.mesh.pp, candidate.vpp
    kinds = {run.layer.kind for run in costs.model.runs[1:-1]}
    longest = max(costs.layer(candidate, kind, "none").seconds for kind in kinds)
    head = costs.layer(candidate, costs.model.runs[-1].layer.kind, "none").seconds
    for cuts in combinations(range(layers + pp * vpp - 1), pp * vpp - 1):
        sizes = tuple(b - a - 1 for a, b in pairwise((-1, *cuts, layers + pp * vpp - 1)))
        stages = [sizes[p::pp] for p in range(pp)]
        if sum(sizes[:pp]) < first or not all(sum(stage) for stage in stages[1:-1]):
            continue
        *others, last = stages[-1]
        if max(others) - min(others) > 1 or sorted(others, reverse=True) != others or last > min(others):
            continue
        if last < sum(stages[-1]) // vpp and (last + 1) * longest + head <= (sum(stages[-1]) * longest + head) / vpp:
            continue
        even = [max(stage) - min(stage) <= 1 for stage in stages[:-1]]
        down = [[*stage] == sorted(stage, reverse=True) for stage in stages[:-1]]
        if all(even) and all(down[1:]) and (down[0] or [*stages[0]] == sorted(stages[0])):
            yield sizes


@pytest.mark.parametrize("seed", range(24))
def test_the_search_finds_the_fastest_of_all_splits_that_it_names(seed: int) -> None:
    """With room for all, for some, and with recompute everywhere; bounds are below it, and nothing is left out."""
    rng = random.Random(seed)
    pp, vpp = rng.choice([(2, 2), (2, 2), (2, 3), (3, 2), (3, 2)])
    first, layers = rng.choice([0, 1, 2]), rng.choice([5, 7, 8]) if pp * vpp < 6 else rng.choice([7, 8])
    model, m = model_of(rng, first, layers), rng.choice([pp, 2 * pp, 3 * pp])
    workload = Workload(model=model, training=training(m, seq=64), cluster=cluster(pp))
    costs = CostModel(workload, TRAITS, replace(CALIBRATION, op_overhead_s=0.0))
    strategy = Strategy(mesh=Mesh(pp=pp), recompute="full")
    one = Candidate(engine="megatron", strategy=strategy, micro_batch_size=1, num_microbatches=m, vpp=vpp, schedule="interleaved")
    whole = [choice for choice in product(MODES, range(1, layers + 1)) if choice[0] != "none"]
    recomputes: list[tuple[Recompute, int]] = [("none", 0), *whole]
    known: dict[tuple[object, ...], list[StageCost]] = {}
    plans: list[tuple[tuple[int, ...], list[list[StageCost]]]] = []
    for sizes in splits(costs, one, first, layers):
        ways = []
        for p in range(pp):
            key = tuple(stages_of(model, sizes, pp)[p].layers)
            if key not in known:
                most = max(sizes[p::pp])
                made = [stages_of(model, sizes, pp, [choice] * pp)[p] for choice in recomputes if choice[1] <= most]
                known[key] = [costs.stage(one, stage, p) for stage in made]
            ways.append(known[key])
        plans.append((sizes, ways))
    assert even_chunks(model, pp * vpp) in [sizes for sizes, _ in plans] or not first
    needs = [max(max(way.peak_bytes for way in some[:1]) for some in ways) for _, ways in plans]
    leans = [max(min(way.peak_bytes for way in some) for some in ways) for _, ways in plans]
    paths: Paths = {}
    for share in (1.0, 0.4, 0.05):
        room = math.ceil(min(leans) + share * (max(needs) - min(leans)))
        best = INFINITE
        for _, ways in plans:
            fitting = [[way for way in some if way.peak_bytes <= room] for some in ways]
            quickest = [[way for way in some if not any(_beats(other, way) for other in some)] for some in fitting]
            best = min([best, *(costs.score_stages(one, list(some))[0] for some in product(*quickest))])
        limit = MemoryLimit(limit=room, reserve=0)
        inner = Inner(
            costs, model, megatron_like(recompute=MODES, recompute_by_layer=("interleaved",)), Leaf(one, MODES), limit, paths=paths
        )
        assert inner.capacity is not None
        for sizes, ways in plans:
            for p, some in enumerate(ways):
                works = [sum(way.forward_s) + sum(way.backward_s) for way in some if way.peak_bytes <= room]
                assert inner.capacity.seconds(p, sum(sizes[p::pp])) <= min(works, default=INFINITE) * (1 + 1e-9)
        floor = Floors(costs, inner.capabilities, room, pinned_layout=False).leaf(one)
        assert floor <= best * (1 + 1e-9)
        assert inner.bound(0.0, 2 * best).bound_s <= best * (1 + 1e-9)
        assert inner.solve(0.97 * best, Effort(1)).bound_s <= best * (1 + 1e-9)
        answer = inner.solve(INFINITE, Effort(100_000))
        assert answer.solution is not None
        assert inner.left == INFINITE
        assert answer.solution.step_time_s == pytest.approx(best, rel=1e-9)
        assert answer.solution.step_time_s == pytest.approx(costs.score(one, answer.solution.stages)[0], rel=1e-9), "of the plan as it is"
        if inner.vpp > 1 and share == 1.0:  # what the others look at first
            walk = Partitions(inner.pipeline, inner._steps(2 * best) or [], inner.layers + STRIDE * inner._others)
            walk.upper, walk.most = INFINITE, 10**9
            walk._sharpen()
            assert walk.bound <= best * (1 + 1e-9)


def _beats(one: StageCost, other: StageCost) -> bool:
    """Whether another way is slower in something and faster in nothing."""
    mine, its = ((*each.forward_s, *each.backward_s, each.exposed_s, each.optimizer_s) for each in (one, other))
    return mine != its and all(a <= b for a, b in zip(mine, its, strict=True))


@pytest.mark.parametrize("name", ["gpt_oss_120b", "qwen3_next_80b_a3b"])
def test_where_kinds_alternate_the_last_chunk_is_shorter_by_the_head(name: str) -> None:
    """One split into chunks is searched there, which takes no longer than the even one."""
    settings = recipe.load(
        [f"recipe={name}", "gpus=256", "cluster=dgx_h100", "pin.pp=4", "pin.vpp=4", "pin.recompute=none"], machine(), list(ENGINES)
    )
    planner = Planner(settings)
    plan = planner.fastest().plan
    costs = next(engine for engine in planner.space().planned if engine.name == plan.engine).costs(planner.workload)
    even, taken = even_chunks(costs.model, 16), even_work(costs.model, 16)
    head, layer = (sum(costs.layer(plan.candidate, run.layer.kind, "none").seconds for run in runs) / len(runs)
                   for runs in (costs.model.runs[-1:], costs.model.runs[1:-1]))  # fmt: skip
    assert sum(taken) == sum(even)
    assert taken[-1] < even[-1]
    assert abs(even[-1] - taken[-1] - min(even[-1], head / layer)) < 1.5
    assert plan.stages == stages_of(costs.model, taken, 4)
    assert plan.prediction.step_time_s < costs.score(plan.candidate, stages_of(costs.model, even, 4))[0]
