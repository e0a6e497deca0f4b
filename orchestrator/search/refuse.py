"""What is said when nothing fits: what was missing, the nearest plan, and what to relax, all of it computed."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import count
from math import prod

from msgspec.structs import replace

from orchestrator.cost.bounds import Floors
from orchestrator.cost.price import CostModel
from orchestrator.errors import NoPlanError
from orchestrator.hardware.spec import Cluster
from orchestrator.model.spec import ModelSpec
from orchestrator.search.inner import Inner
from orchestrator.search.question import Engines, SearchSettings
from orchestrator.strategy.layout import Prediction
from orchestrator.strategy.megatron_layout import stages_of
from orchestrator.strategy.pins import MemoryLimit, Pins
from orchestrator.strategy.spec import CHOICES, Candidate
from orchestrator.strategy.tree import Leaf, Outcome, Tree
from orchestrator.strategy.workload import Workload
from orchestrator.units import format_bytes
from orchestrator.values import Value


class Refused(Value, frozen=True, kw_only=True):
    """A legal choice that does not fit: its name, and what it would need, by cause."""

    choice: str
    predicted: Prediction


REASONS_SHOWN = 4
LOOKED_AT = 40
"""Choices of least memory whose need is computed exactly; the others are known by their floor."""
NARROWER: tuple[dict[str, object], ...] = (
    {"precision_aware_optimizer": True},
    {"precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
)
"""Optimizers that need less memory: one that computes the same, then one with narrower moments. The search takes neither by itself."""
RELAX = "; to relax: "
"""Begins the last part of the message: what would help."""
MORE_GPUS = (2, 4, 8, 16, 32, 64)
"""Multiples of the GPUs that are tried, to say how many would do."""


def no_plan(
    workload: Workload,
    engines: Engines,
    settings: SearchSettings,
    cuts: Sequence[Outcome],
    outcomes: Sequence[Outcome],
) -> NoPlanError:
    """The error to raise. `outcomes` are the legal choices, none of which fits; `cuts` the branches that rules forbid."""
    cluster, pins = workload.cluster, settings.pins
    who = f"{workload.model.architecture.name} on {cluster.types}"
    if not outcomes:
        why = _why_illegal(cuts, pins, cluster.num_gpus)
        return NoPlanError(f"no legal plan for {who}: {why}{_relaxed(workload, engines, settings, fitting=False)}")
    limits = [settings.limits_for(engine, workload)[-1] for engine in engines]
    need, nearest, refused, most = _nearest(workload, engines, limits, outcomes, pins)
    have = format_bytes(most.usable)
    why = "" if most.risk is None else f" for memory.risk={100 * most.risk:g}%"
    kept = f" ({format_bytes(most.limit)} less {format_bytes(most.reserve)} kept free{why})" if most.reserve else ""
    relax = _relaxed(workload, engines, settings, fitting=True)
    return NoPlanError(f"no plan fits for {who}: needs {format_bytes(need)} of {have}{kept}; nearest: {nearest}{relax}", refused)


def _why_illegal(cuts: Sequence[Outcome], pins: Pins, world: int) -> str:
    """The reasons, one a rule, those that were judged deepest in the tree first: they are what is between the pins and a plan."""
    degrees = {name: getattr(pins, name) for name in ("tp", "pp", "cp", "dp") if getattr(pins, name) is not None}
    product = prod(degrees.values())
    if world % product or (len(degrees) == 4 and product != world):
        pinned = " x ".join(f"pin.{name}={degree}" for name, degree in degrees.items())
        return f"{pinned}{f' = {product}' if len(degrees) > 1 else ''} does not divide the {world} GPUs"
    by_rule: dict[str | None, Outcome] = {}
    for cut in sorted(cuts, key=lambda cut: -len(cut.decided)):
        by_rule.setdefault(cut.rule, cut)
    set_pins = {choice.name for choice in CHOICES if choice.pin in pins.given()}
    about_pins = [cut for cut in by_rule.values() if set_pins & set(cut.decided)]
    shown = (about_pins or list(by_rule.values()))[:REASONS_SHOWN]
    return "; ".join(f"{cut.choice}: {cut.reason}" for cut in shown) or "no combination of the pinned degrees uses all GPUs"


def _nearest(
    workload: Workload, engines: Engines, limits: Sequence[MemoryLimit], outcomes: Sequence[Outcome], pins: Pins
) -> tuple[float, str, Refused, MemoryLimit]:
    """(bytes, choice, its price, its engine's limit) of the choice that lacks least, of those with the lowest floors. `outcomes` without a
    reason have the bytes of their mesh's states."""
    index = {engine.name: i for i, engine in enumerate(engines)}
    costs = [engine.costs(workload) for engine in engines]
    ranked = [(outcome.peak_memory_bytes or float("inf"), order, bool(outcome.reason)) for order, outcome in enumerate(outcomes)]
    heapify(ranked)
    best: tuple[float, Inner, MemoryLimit] | None = None
    looked_at = 0
    while ranked and looked_at < LOOKED_AT:
        floor, order, known = heappop(ranked)
        if best is not None and floor >= best[0]:
            break
        candidate = outcomes[order].candidate
        i = index[candidate.engine]
        if not known:  # that of its mesh
            heappush(ranked, (costs[i].memory_floor(candidate), order, True))
            continue
        leaf = Leaf(candidate, (candidate.strategy.recompute,))
        inner = Inner(costs[i], workload.model, engines[i].capabilities, leaf, limits[i], pins.layout)
        need, looked_at = inner.need(inner.even_sizes()), looked_at + 1
        if best is None or need < best[0]:
            best = (need, inner, limits[i])
    assert best is not None
    need, inner, most = best
    refused = at_its_leanest(inner.costs, workload.model, inner.candidate, inner.even_sizes())
    return need, refused.choice, refused, most


def at_its_leanest(costs: CostModel, model: ModelSpec, candidate: Candidate, sizes: Sequence[int]) -> Refused:
    """The price of a choice with these chunks (vpp-major), all layers recomputed in its strongest mode."""
    mode = candidate.strategy.recompute
    stages = stages_of(model, sizes, candidate.mesh.pp, [(mode, 0 if mode == "none" else max(sizes))] * candidate.mesh.pp)
    return Refused(choice=f"{candidate.label()} recompute={mode}", predicted=costs.price(candidate, stages))


def _fits(workload: Workload, engines: Engines, settings: SearchSettings, *, fitting: bool) -> str | None:
    """The name of a plan that would do; None: there is none. Unless `fitting` any legal one."""
    trees = [Tree(engine.capabilities, workload, settings.pins) for engine in engines]
    if not fitting:
        return next((found.candidate.label() for tree in trees for found in tree.leaves(lambda _: None)), None)
    for engine, tree in zip(engines, trees, strict=True):
        here, most = engine.costs(workload), settings.limits_for(engine, workload)[-1]
        shapes = list(tree.shapes(lambda _: None))
        bounds = Floors(here, engine.capabilities, most.usable, pinned_layout=settings.pins.layout is not None) if shapes else None
        queue: list[tuple[float, int, Candidate, Leaf | None]] = []
        for order, shape in enumerate(shapes):
            assert bounds is not None
            queue.append((bounds.shape_bytes(shape), order, shape, None))
        heapify(queue)
        looked_at, places = 0, count(len(queue))
        while queue and queue[0][0] <= most.usable and looked_at < LOOKED_AT:
            _, _, shape, leaf = heappop(queue)
            if leaf is None:
                for below in tree.below(shape, lambda _: None):
                    heappush(queue, (here.memory_floor(below.candidate), next(places), shape, below))
                continue
            looked_at += 1
            inner = Inner(here, workload.model, engine.capabilities, leaf, most, settings.pins.layout)
            if inner.need(inner.even_sizes()) <= most.usable:
                return f"{leaf.candidate.label()} recompute={leaf.recompute[-1]}"
    return None


def _grown(cluster: Cluster, times: int) -> Cluster:
    """The cluster with that many times its GPUs.

    Its outermost network is taken to reach them.
    """
    gpus = cluster.num_gpus * times
    *inner, outer = cluster.levels
    if outer.size < gpus:
        outer = replace(outer, size=-(-gpus // outer.size) * outer.size)
    return replace(cluster, num_gpus=gpus, levels=(*inner, outer))


def _relaxed(workload: Workload, engines: Engines, settings: SearchSettings, *, fitting: bool) -> str:
    """What would help, each tried: leaving out one pin, leaving out all, and where a plan must be `fitting` an optimizer of fewer bytes,
    more GPUs. Without `fitting` a plan that is only legal will do, and is said to be too large."""
    help_: list[str] = []
    names = [*settings.pins.given()]

    def without(pins: Pins) -> str | None:
        fewer = replace(settings, pins=pins)
        found = _fits(workload, engines, fewer, fitting=True)
        if found is not None or fitting:
            return found
        legal = _fits(workload, engines, fewer, fitting=False)
        return None if legal is None else f"legal then, but too large: {legal}"

    for name in names:
        if name == "vpp" and settings.pins.layout is not None:
            continue
        found = without(replace(settings.pins, **{name: None}))
        if found is not None:
            help_.append(f"leave out pin.{name} ({found})")
    if not help_ and len(names) > 1:
        found = without(Pins())
        if found is not None:
            help_.append(f"leave out the pins {', '.join(names)} ({found})")
    if not help_ and fitting:
        training = workload.training
        for changes in NARROWER if training.optimizer == "adamw" else ():
            narrow = replace(workload, training=replace(training, **changes))
            found = None if narrow == workload else _fits(narrow, engines, settings, fitting=True)
            if found is not None:
                help_.append(" ".join(f"train.{name}={str(value).lower()}" for name, value in changes.items()) + f" ({found})")
                break
        for times in MORE_GPUS:
            more = replace(workload, cluster=_grown(workload.cluster, times))
            found = _fits(more, engines, settings, fitting=True)
            if found is not None:
                help_.append(f"gpus={more.cluster.num_gpus} ({found})")
                break
    if not help_:
        return ""
    return RELAX + ", or ".join(help_)
