"""Every plan of a small instance, priced one by one: what the planner is checked against.

It shares nothing with the planner but the price and the rules: no decision tree, no bound, no table. Only for instances of a few GPUs and
layers: the number of plans grows as compositions of the layers over the chunks times the recompute choices of every stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product

from msgspec.structs import replace

from orchestrator.cost.calibration import Calibration
from orchestrator.cost.mixed import cost_model
from orchestrator.cost.price import StageCost
from orchestrator.hardware.spec import Cluster
from orchestrator.model.spec import ModelSpec
from orchestrator.model.training import Training
from orchestrator.search.inner import spread
from orchestrator.strategy.capabilities import Capabilities, Traits
from orchestrator.strategy.layout import Stage
from orchestrator.strategy.legality import rules_of, unsuited
from orchestrator.strategy.megatron_layout import stages_of, transformer_layers
from orchestrator.strategy.pins import MemoryLimit
from orchestrator.strategy.spec import RECOMPUTE_ORDER, Candidate, Mesh, Recompute, Strategy
from orchestrator.strategy.tree import vpp_degrees
from orchestrator.strategy.workload import Workload


def outer_choices(capabilities: Capabilities, workload: Workload) -> Iterator[Candidate]:
    """The whole product of the choices, filtered by all rules at once."""
    world, batch = workload.cluster.num_gpus, workload.training.global_batch_size
    layers = transformer_layers(workload.model)
    if unsuited(capabilities, workload) is not None:
        return
    rules = rules_of(capabilities, workload)
    degrees = range(1, world + 1)
    flags = (False, True)
    copies = [None, *sorted({level.size for level in workload.cluster.levels})] if capabilities.zero_shard_groups else [None]
    for pp, tp, cp, dp, zero, sp, size, offload, order, copy in product(
        degrees, degrees, degrees, degrees, capabilities.zero_stages, flags, range(1, batch + 1), flags, capabilities.rank_orders, copies
    ):
        if pp * tp * cp * dp != world or batch % (dp * size):
            continue
        if copy is not None and not (zero == 3 and 1 < copy < dp and world % copy == 0):  # a second copy of ZeRO-3's weights
            continue
        for vpp in vpp_degrees(layers, pp, uneven=capabilities.uneven_stages):
            for schedule in capabilities.schedules:
                if (vpp > 1) != (schedule == "interleaved"):
                    continue
                m = batch // (dp * size)
                for group, recompute in product(groups(capabilities, pp, vpp, m), capabilities.recompute):
                    candidate = Candidate(
                        engine=capabilities.engine,
                        strategy=Strategy(
                            mesh=Mesh(tp=tp, cp=cp, dp=dp, pp=pp, order=order),
                            zero_stage=zero,
                            zero_shard_size=copy,
                            sequence_parallel=sp,
                            recompute=recompute,
                            offload_optimizer=offload,
                            grad_reduce_dtype=workload.training.grad_reduce_dtype,
                        ),
                        micro_batch_size=size,
                        num_microbatches=m,
                        vpp=vpp,
                        microbatch_group_size_per_vp_stage=group,
                        schedule=schedule,  # type: ignore[arg-type]
                    )
                    if all(rule.check(candidate, workload) is None for rule in rules):
                        yield candidate


def groups(capabilities: Capabilities, pp: int, vpp: int, m: int) -> list[int | None]:
    """Sizes of interleaving's groups: pp, or where pp does not divide the micro-batches the two smallest that leave no part group which
    is smaller than the pipeline; and those doubled again and again."""
    if vpp == 1 or not capabilities.microbatch_groups:
        return [None]
    legal = [size for size in range(pp, m + 1) if m % size == 0 or m % size >= pp]
    smallest = [pp] if m % pp == 0 else legal[:2]
    doubled = {size * 2**times for size in smallest for times in range(m.bit_length())}
    return [None, *(size for size in legal if size in doubled and size != pp)]


def compositions(total: int, least: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every way to write `total` as ordered parts, part i at least `least[i]`.

    >>> list(compositions(3, (0, 1)))
    [(0, 3), (1, 2), (2, 1)]
    """
    free = total - sum(least)
    if free < 0:
        return
    bars = len(least) - 1
    for cut in combinations(range(free + bars), bars):
        edges = (-1, *cut, free + bars)
        yield tuple(low + b - a - 1 for low, a, b in zip(least, edges[:-1], edges[1:], strict=True))


def splits(model: ModelSpec, capabilities: Capabilities, pp: int, vpp: int) -> Iterator[tuple[int, ...]]:
    """Transformer layers of each chunk, vpp-major: every contiguous split with vpp=1; else a stage's layers are spread over its chunks
    as evenly as they go."""
    layers = transformer_layers(model)
    if not capabilities.uneven_stages:
        if layers % (pp * vpp) == 0:
            yield (layers // (pp * vpp),) * (pp * vpp)
        return
    least = [1] * pp
    least[0] = least[-1] = 0
    if pp == 1:
        least = [0]
    for totals in compositions(layers, least):
        by_stage = [spread(total, vpp, p, pp) for p, total in enumerate(totals)]
        yield tuple(by_stage[p][v] for v in range(vpp) for p in range(pp))


def recomputes(
    capabilities: Capabilities, schedule: str, modes: Sequence[Recompute], sizes: Sequence[int], pp: int
) -> Iterator[tuple[tuple[Recompute, int], ...]]:
    """Every choice of (mode, first n layers of each chunk) by stage."""
    layers = sum(sizes)
    by_layer = capabilities.recomputes_by_layer(schedule)

    def of_stage(most: int) -> list[tuple[Recompute, int]]:
        found: list[tuple[Recompute, int]] = []
        for mode in modes:
            counts = range(1, most + 1) if mode == "full" or by_layer else [layers]
            found += [(mode, 0)] if mode == "none" else [(mode, count) for count in counts]
        return found

    if capabilities.recompute_varies == "never" or len(modes) == 1:
        yield from (((mode, 0 if mode == "none" else layers),) * pp for mode in modes)
    elif capabilities.recompute_varies == "job":
        yield from ((choice,) * pp for choice in of_stage(max(sizes)))
    else:
        yield from product(*(of_stage(max(sizes[p::pp])) for p in range(pp)))


def best(
    model: ModelSpec,
    training: Training,
    cluster: Cluster,
    engines: Sequence[tuple[Capabilities, Traits]],
    limit: MemoryLimit,
    calibration: Calibration,
) -> tuple[float, Candidate, tuple[Stage, ...]] | None:
    """The fastest plan that fits, by enumeration: (seconds, candidate, stages); None where none fits."""
    found: tuple[float, Candidate, tuple[Stage, ...]] | None = None
    workload = Workload(model=model, training=training, cluster=cluster)
    for capabilities, traits in engines:
        costs = cost_model(workload, traits, calibration)
        legal: dict[Candidate, list[Recompute]] = {}
        for candidate in outer_choices(capabilities, workload):
            key = replace(candidate, strategy=replace(candidate.strategy, recompute="none"))
            legal.setdefault(key, []).append(candidate.strategy.recompute)
        for key, allowed in legal.items():
            modes = [mode for mode in RECOMPUTE_ORDER if mode in allowed]
            candidate = replace(key, strategy=replace(key.strategy, recompute=modes[-1]))
            pp = candidate.mesh.pp
            for sizes in splits(model, capabilities, pp, candidate.vpp):
                priced: dict[tuple[int, tuple[Recompute, int]], StageCost] = {}
                for recompute in recomputes(capabilities, candidate.schedule, modes, sizes, pp):
                    for p, choice in enumerate(recompute):
                        if (p, choice) not in priced:
                            stage = stages_of(model, sizes, pp, [choice] * pp)[p]
                            priced[p, choice] = costs.stage(candidate, stage, p)
                    parts = [priced[p, choice] for p, choice in enumerate(recompute)]
                    if any(part.peak_bytes > limit.usable_of(cluster.part_of(p, pp)) for p, part in enumerate(parts)):
                        continue
                    seconds, _ = costs.score_stages(candidate, parts)
                    if found is None or seconds < found[0]:
                        found = (seconds, candidate, stages_of(model, sizes, pp, recompute))
    return found
