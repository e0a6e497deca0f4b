"""Random small instances of the layer-wise search by seed, and every plan of them."""

from __future__ import annotations

import math
import random
from itertools import combinations, product
from operator import le

from instances import CALIBRATION
from msgspec.structs import replace
from small_models import cluster, gpt, training

from orchestrator.cost.price import CostModel
from orchestrator.cost.profile import LayerProfile, Profile
from orchestrator.errors import NoPlanError
from orchestrator.model.spec import LayerRun, ModelSpec
from orchestrator.search.layerwise import AnalyticPrices, LayerwiseResult, Outer, Prices, ProfilePrices, layerwise, plan_price, stage_price
from orchestrator.strategy.layerwise import TRAITS, LayerwiseStage
from orchestrator.strategy.pins import MemoryLimit
from orchestrator.strategy.tree import divisors
from orchestrator.strategy.workload import Workload
from orchestrator.units import GB, MIB


def two_kinds(layers: int, hidden: int) -> ModelSpec:
    """Decoder layers, then as many with a wider MLP under another name."""
    model = gpt(layers, hidden=hidden, seq=64, vocab=512)
    wide = gpt(1, hidden=2 * hidden, seq=64, vocab=512).runs[1].layer
    ends = model.runs[0], model.runs[2]
    return replace(model, runs=(ends[0], model.runs[1], LayerRun(layer=replace(wide, kind="encoder"), count=1), ends[1]))


def prices_of(seed: int) -> tuple[Prices, int, MemoryLimit]:
    """Analytic prices of a tiny model, its batch, and a limit between the leanest plan's bytes and ample."""
    rng = random.Random(seed)
    hidden = rng.choice([64, 128])
    model = two_kinds(rng.choice([1, 2]), hidden) if rng.random() < 0.5 else gpt(rng.choice([2, 3]), hidden=hidden, seq=64, vocab=512)
    batch = rng.choice([4, 8])
    where = cluster(rng.choice([2, 4]), bandwidth=rng.choice([1, 20, 300]) * GB)
    calibration = replace(CALIBRATION, overlap_efficiency=rng.choice([0.0, 0.8]), op_overhead_s=0.0)
    prices = AnalyticPrices(CostModel(Workload(model=model, training=training(batch, seq=64), cluster=where), TRAITS, calibration))
    return prices, batch, MemoryLimit(limit=int(leanest(prices, batch, 1) * rng.choice([1.0, 1.1, 1.3, 1.6, 10.0])), reserve=0)


def leanest(prices: Prices, batch: int, pp: int) -> int:
    """About the fewest bytes that some plan needs."""
    low, high = 1 * MIB, 400 * MIB
    while high - low > MIB // 64 and high - low > high // 200:
        middle = (low + high) // 2
        try:
            layerwise(prices, batch, MemoryLimit(limit=middle, reserve=0), pp=pp)
            high = middle
        except NoPlanError:
            low = middle
    return high


def random_profile(rng: random.Random, layers: int, sizes: tuple[int, ...], kinds: int) -> Profile:
    """Kinds of layers whose seconds and bytes have nothing to do with each other."""
    cuts = sorted(rng.sample(range(1, layers), kinds - 1))
    counts = [b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True)]
    found = []
    for i, count in enumerate(counts):
        whole = rng.uniform(2, 12) * MIB
        found.append(
            LayerProfile(
                kind=f"layer{i}",
                count=count,
                parameter_bytes=rng.uniform(0.2, 6) * MIB,
                forward_s={tp: rng.uniform(0.8, 1.3) * 1e-3 / tp for tp in sizes},
                saved_bytes={tp: whole / tp * rng.uniform(1.0, 1.5) for tp in sizes},
                output_bytes=rng.uniform(0.1, 1) * MIB,
                reductions=rng.choice([2, 3]),
            )
        )
    return Profile(name="random", layers=tuple(found), other_state_bytes=rng.uniform(0, 4) * MIB, other_saved_bytes=rng.uniform(0, 1) * MIB)


def pipeline_of(seed: int, pp: int) -> tuple[Prices, int, MemoryLimit]:
    """As `prices_of`, for a pipeline of pp stages that have one, two or four ranks each."""
    rng = random.Random(1000 * pp + seed)
    group = rng.choice([1, 2, 2, 4] if pp == 2 else [1, 2, 2])
    layers = pp + rng.choice([1, 2, 3] if group < 4 else [0, 1])
    batch = rng.choice([4, 8])
    where = cluster(pp * group, bandwidth=rng.choice([1, 20, 300]) * GB)
    calibration = replace(CALIBRATION, overlap_efficiency=rng.choice([0.0, 0.8]), op_overhead_s=0.0)
    hidden = rng.choice([64, 128])
    if rng.random() < 0.4:
        model = two_kinds(layers - 1, hidden) if rng.random() < 0.5 else gpt(layers, hidden=hidden, seq=64, vocab=512)
        workload = Workload(model=model, training=training(batch, seq=64), cluster=where)
        prices: Prices = AnalyticPrices(CostModel(workload, TRAITS, calibration))
    else:
        profile = random_profile(rng, layers, tuple(divisors(group)), min(layers, rng.choice([1, 1, 2, 2, 3])))
        prices = ProfilePrices(profile, CostModel(Workload(model=gpt(2), training=training(batch), cluster=where), TRAITS, calibration))
    return prices, batch, MemoryLimit(limit=int(leanest(prices, batch, pp) * rng.choice([1.0, 1.05, 1.1, 1.3, 1.6, 10.0])), reserve=0)


def exhaustive(prices: Prices, batch: int, limit: MemoryLimit, pp: int = 1) -> float:
    """Every layer in every way, every split, every micro-batch size, every size of embedding and head."""
    best = math.inf
    kinds = [kind for kind, count in prices.runs for _ in range(count)]
    for m in divisors(batch):
        for ends in prices.end_choices(Outer(pp, m, batch // m, None)):
            outer = Outer(pp, m, batch // m, ends)
            beside = 1 if ends is not None else 0
            for cuts in combinations(range(1 + beside, len(kinds) - beside), pp - 1):  # a layer at least beside embedding and head
                borders = [0, *cuts, len(kinds)]
                stages = [stages_of(prices, outer, p, kinds[borders[p] : borders[p + 1]], limit) for p in range(pp)]
                best = min([best, *(plan_price(prices, outer, chosen) for chosen in product(*stages))])
    return best


WORSE = 0.005
"""How much slower than the best of all plans a found one may be."""


def within(found: LayerwiseResult, best: float) -> bool:
    """Whether the best of all plans lies where the search says: not above the plan, not below `at_least_s`; and the plan is a good one."""
    ours = found.plan.step_time_s
    return found.at_least_s <= best * (1 + 1e-9) and best * (1 - 1e-9) <= ours <= best * (1 + WORSE)


def stages_of(prices: Prices, outer: Outer, p: int, kinds: list[str], limit: MemoryLimit) -> list[LayerwiseStage]:
    """All ways to compute these layers that fit and that no other one covers."""
    made = (
        stage_price(prices, outer, p, [(kind, way, 1) for kind, way in zip(kinds, ways, strict=True)])
        for ways in product(*(prices.ways(kind, outer) for kind in kinds))
    )
    kept: dict[tuple[float, ...], LayerwiseStage] = {}
    for stage in made:
        numbers = (stage.forward_s, stage.backward_s, stage.exposed_s, stage.optimizer_s)
        if stage.peak_bytes <= limit.usable and not any(all(map(le, other, numbers)) for other in kept):
            kept[numbers] = stage
    return list(kept.values())


def medium_of(seed: int, pp: int) -> tuple[Prices, int, MemoryLimit]:
    """8 to 12 layers, mostly of different kinds, on four ranks or eight: far beyond enumeration."""
    rng = random.Random(seed)
    group = {1: rng.choice([4, 8]), 2: rng.choice([2, 4]), 4: 2}[pp]
    layers, batch = rng.randint(8, 12), 8
    where = cluster(pp * group, bandwidth=rng.choice([1, 20, 300]) * GB)
    calibration = replace(CALIBRATION, overlap_efficiency=rng.choice([0.0, 0.8]), op_overhead_s=0.0)
    profile = random_profile(rng, layers, tuple(divisors(group)), layers - rng.randint(0, 2))
    prices = ProfilePrices(profile, CostModel(Workload(model=gpt(2), training=training(batch), cluster=where), TRAITS, calibration))
    return prices, batch, MemoryLimit(limit=int(leanest(prices, batch, pp) * rng.choice([1.02, 1.1, 1.3, 1.6, 3.0])), reserve=0)
