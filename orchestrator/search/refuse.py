"""What is said when nothing fits: what was missing, the nearest plan, and what to relax, all of it computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import count, islice
from math import ceil, prod

from msgspec.structs import replace

from orchestrator.cost.bounds import Floors
from orchestrator.cost.price import CostModel
from orchestrator.errors import NoPlanError
from orchestrator.hardware.spec import Cluster
from orchestrator.model.spec import ModelSpec
from orchestrator.plan import Plan
from orchestrator.search.inner import Inner
from orchestrator.search.question import Engines, PlannedEngine, SearchSettings
from orchestrator.strategy.choices import shown
from orchestrator.strategy.divisible import batches, counts, multiples
from orchestrator.strategy.layout import Prediction
from orchestrator.strategy.legality import OF_THEIR_OWN, broken_rule
from orchestrator.strategy.megatron_layout import stages_of
from orchestrator.strategy.pins import MemoryLimit, Pins
from orchestrator.strategy.spec import CHOICES, PINNED_ONLY, RECOMPUTE_ORDER, Candidate
from orchestrator.strategy.tree import Leaf, Outcome, Tree, branch_name, divisors
from orchestrator.strategy.workload import Workload
from orchestrator.units import GB, format_bytes, format_seconds
from orchestrator.values import Value


class Refused(Value, frozen=True, kw_only=True):
    """A legal choice that does not fit: its name, and what it would need, by cause."""

    choice: str
    predicted: Prediction


First = Callable[[Workload, Engines, SearchSettings], Plan | None]
"""A plan, for the most part a fast one; None where none fits."""
BY_PIN = {choice.pin: choice for choice in CHOICES}
ALTERNATIVES = frozenset({"rank_order", *(choice.name for choice in CHOICES if choice.searched and choice.name not in OF_THEIR_OWN)})
"""Choices whose default is tried beside the others: that another value is illegal is never why there is no plan."""
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
HOST_MEMORY = "cluster.host_memory"
MORE_HOST = (1.02, 1.05, 1.1, 1.2, 1.35, 1.5, 2, 3, 4, 8)
"""Multiples of the host memory that are tried, to say how much would do."""
MORE_GPUS = (2, 4, 8, 16, 32, 64)
"""Multiples of the GPUs that are tried, to say how many would do."""


def no_plan(
    workload: Workload,
    engines: Engines,
    settings: SearchSettings,
    cuts: Sequence[Outcome],
    outcomes: Sequence[Outcome],
    first: First,
) -> NoPlanError:
    """The error to raise. `outcomes` are the legal choices, none of which fits; `cuts` the branches that rules forbid; `first` the first
    plan that a search finds."""
    cluster, pins = workload.cluster, settings.pins
    who = f"{workload.model.architecture.name} on {cluster.types}"
    if not outcomes:
        why = _why_illegal(cuts, pins, cluster.num_gpus, [cut for each in engines for cut in _binding(workload, each, settings, cuts)])
        return NoPlanError(f"no legal plan for {who}: {why}{_Relaxed(workload, engines, settings, first, cuts, fitting=False).text()}")
    limits = [settings.limits_for(engine, workload)[-1] for engine in engines]
    need, nearest, refused, most = _nearest(workload, engines, limits, outcomes, pins)
    have = format_bytes(most.usable)
    why = "" if most.risk is None else f" for memory.risk={100 * most.risk:g}%"
    kept = f" ({format_bytes(most.limit)} less {format_bytes(most.reserve)} kept free{why})" if most.reserve else ""
    needs = f"needs {format_bytes(need)} of {have}{kept}"
    for more in _with_host(workload, cuts, need / most.usable):  # what lacks less of host memory than that of a GPU's is nearer
        inner = _roomy(more, engines, settings)
        broken = None if inner is None else broken_rule(inner.capabilities, inner.candidate, workload)
        if inner is not None and broken is not None:
            needs = broken[1]
            refused = at_its_leanest(inner.costs, inner.costs.model, inner.candidate, inner.even_sizes())
            nearest = refused.choice
            break
    relax = _Relaxed(workload, engines, settings, first, cuts, fitting=True).text()
    return NoPlanError(f"no plan fits for {who}: {needs}; nearest: {nearest}{relax}", refused)


def _with_host(workload: Workload, cuts: Sequence[Outcome], most: float) -> Iterator[Workload]:
    """The workload with up to `most` times the host memory, ascending, where a rule about that cut something; else none."""
    if any(HOST_MEMORY in (cut.reason or "") for cut in cuts):
        for times in MORE_HOST:
            if times <= most:
                more = GB * ceil(times * workload.cluster.host_memory / GB)
                yield replace(workload, cluster=replace(workload.cluster, host_memory=more))


def _set_by(pins: Pins) -> set[str]:
    """The names of the choices that are pinned."""
    return {choice.name for choice in CHOICES if choice.pin in pins.given()}


def _binding(workload: Workload, engine: PlannedEngine, settings: SearchSettings, cuts: Iterable[Outcome]) -> list[Outcome]:
    """What keeps the engine from a plan, one of its `cuts` for each rule: rules that pins alone break, and each without which there would
    be a plan then. Where none is, the one about most pins, and what is found so without that one; nothing where no pin is in it."""
    set_pins, broken, sure = _set_by(settings.pins), list[Outcome](), list[Outcome]()

    def walk(*more: Outcome) -> tuple[bool, list[Outcome]]:
        met: list[Outcome] = []
        without = [cut.rule or "" for cut in (*broken, *more)]
        tree = Tree(engine.capabilities, workload, settings.pins, settings.prunings, without)
        return next(tree.leaves(met.append), None) is not None, met

    for _ in range(2 * REASONS_SHOWN):
        nearest: dict[str, Outcome] = {}  # of a rule the cut in which least is decided beside pins
        for cut in sorted(cuts, key=lambda cut: len({*cut.decided} - set_pins)):
            if cut.candidate.engine == engine.name and cut.decided and cut.rule is not None:
                nearest.setdefault(cut.rule, cut)
        left = [cut for cut in nearest.values() if cut.rule not in [known.rule for known in broken]]
        left = [cut for cut in left if cut.decided[-1] not in ALTERNATIVES - set_pins]
        alone = [cut for cut in left if {*cut.decided} <= set_pins]
        if more := [] if alone else [cut for cut in left if walk(cut)[0]]:
            return [*broken, *more]
        last = alone or sorted(left, key=lambda cut: -len({*cut.decided} & set_pins))[:1]
        if not last or not {*last[0].decided} & set_pins:
            break
        broken += last
        sure = broken[:] if alone or not sure else sure
        legal, cuts = walk()
        if legal:
            return broken
    return sure


def _why_illegal(cuts: Sequence[Outcome], pins: Pins, world: int, binding: Sequence[Outcome] = ()) -> str:
    """The reasons, one a rule: of an engine those in `binding`; else those that were judged deepest in the tree first."""
    for names in (("tp", "pp", "cp", "dp"), ("pp", "ep", "etp")):  # the ranks of attention, and of the experts in a stage
        degrees = {name: getattr(pins, name) for name in names if getattr(pins, name) is not None}
        product = prod(degrees.values())
        if world % product or (len(degrees) == 4 and product != world):
            pinned = " x ".join(f"pin.{name}={degree}" for name, degree in degrees.items())
            return f"{pinned}{f' = {product:,}' if len(degrees) > 1 else ''} does not divide the {world} GPUs"
    set_pins = _set_by(pins)
    by_rule: dict[tuple[str, str | None], Outcome] = {}
    deepest = sorted(cuts, key=lambda cut: -len(cut.decided))
    for cut in [cut for cut in deepest if not (set(cut.decided) & ALTERNATIVES - set_pins)] or deepest:
        by_rule.setdefault((cut.candidate.engine, cut.rule), cut)
    of_others = {cut.candidate.engine for cut in by_rule.values()} - {cut.candidate.engine for cut in binding}
    left = [cut for cut in by_rule.values() if cut.candidate.engine in of_others]
    about_pins = [cut for cut in left if set_pins & set(cut.decided)]
    shown = _once_a_rule([*binding, *(about_pins or left)])[:REASONS_SHOWN]
    said = []
    for cut in shown:
        decided = [name for name in cut.decided if name in set_pins or name == cut.decided[-1] or cut not in binding]
        said.append(f"{branch_name(cut.candidate, decided)}: {cut.reason}")
    return "; ".join(said) or "no combination of the pinned degrees uses all GPUs"


def _once_a_rule(cuts: Sequence[Outcome]) -> list[Outcome]:
    """The first of each rule: engines have some in common."""
    return list({cut.rule: cut for cut in reversed(cuts)}.values())[::-1]


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
        inner = Inner(costs[i], costs[i].model, engines[i].capabilities, leaf, limits[i], pins.layout)
        need, looked_at = inner.need(inner.even_sizes()), looked_at + 1
        if best is None or need < best[0]:
            best = (need, inner, limits[i])
    assert best is not None
    need, inner, most = best
    refused = at_its_leanest(inner.costs, inner.costs.model, inner.candidate, inner.even_sizes())
    return need, refused.choice, refused, most


def at_its_leanest(costs: CostModel, model: ModelSpec, candidate: Candidate, sizes: Sequence[int]) -> Refused:
    """The price of a choice with these chunks (vpp-major), all layers recomputed in its strongest mode."""
    mode = candidate.strategy.recompute
    stages = stages_of(model, sizes, candidate.mesh.pp, [(mode, 0 if mode == "none" else max(sizes))] * candidate.mesh.pp)
    return Refused(choice=f"{candidate.label()} recompute={mode}", predicted=costs.price(candidate, stages))


def _fits(workload: Workload, engines: Engines, settings: SearchSettings, *, fitting: bool) -> str | None:
    """The name of a plan that would do; None: there is none. Unless `fitting` any legal one."""
    if not fitting:
        trees = (Tree(engine.capabilities, workload, settings.pins) for engine in engines)
        return next((found.candidate.label() for tree in trees for found in tree.leaves(lambda _: None)), None)
    inner = _roomy(workload, engines, settings)
    return None if inner is None else f"{inner.candidate.label()} recompute={inner.modes[-1]}"


def _roomy(workload: Workload, engines: Engines, settings: SearchSettings) -> Inner | None:
    """The inner search of a choice that fits; None: there is none."""
    for engine in engines:
        tree = Tree(engine.capabilities, workload, settings.pins)
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
            inner = Inner(here, here.model, engine.capabilities, leaf, most, settings.pins.layout)
            if inner.need(inner.even_sizes()) <= most.usable:
                return inner
    return None


def _sized(cluster: Cluster, gpus: int) -> Cluster:
    """The cluster with so many GPUs, which its outermost network is taken to reach."""
    *inner, outer = cluster.levels
    if outer.size < gpus:
        outer = replace(outer, size=-(-gpus // outer.size) * outer.size)
    return replace(cluster, num_gpus=gpus, levels=(*inner, outer))


class _Relaxed:
    """What would help, each tried and named with a plan that there is then: each pin left out, or all of them; and where a plan must be
    `fitting`, options that only pins take, an optimizer of fewer bytes, more GPUs. Without `fitting` a plan that is only legal will do,
    and is said to be too large."""

    def __init__(
        self, workload: Workload, engines: Engines, settings: SearchSettings, first: First, cuts: Sequence[Outcome], *, fitting: bool
    ) -> None:
        self.workload, self.engines, self.settings, self.first, self.fitting = workload, engines, settings, first, fitting
        self.cuts = cuts

    def text(self) -> str:
        """The end of the message; "" where nothing helps that was tried."""
        help_ = [*self.pins(), *(() if self.fitting else self.divisible())]
        if self.fitting:
            help_ += [*self.options(), *self.narrower(), *self.unpacked()]
            help_ += self.more_gpus() if not help_ else ()
        help_ += self.more_host()
        return RELAX + ", or ".join(help_) if help_ else ""

    def with_pins(self, pins: Pins) -> Plan | str | None:
        """A plan with these pins in place of the user's; the name of one that is legal and too large; None: none that will do."""
        given = replace(self.settings, pins=pins)
        found = _fits(self.workload, self.engines, given, fitting=True)
        if found is not None:
            return self.first(self.workload, self.engines, given) or found
        legal = None if self.fitting else _fits(self.workload, self.engines, given, fitting=False)
        return None if legal is None else f"legal then, but too large: {legal}"

    def pins(self) -> Iterator[str]:
        """Each pin that may be left out, with the value that it has in a plan without it; else all of them together."""
        pins, alone = self.settings.pins, False
        names = [name for name in pins.given() if name != "vpp" or pins.layout is None]
        for name in names:
            found = self.with_pins(replace(pins, **{name: None}))
            if found is not None:
                alone = True
                choice = BY_PIN.get(name)
                value = choice.of(found.candidate) if isinstance(found, Plan) and choice is not None and name != "recompute" else None
                yield f"leave out pin.{name} ({'' if value is None else f'pin.{name}={shown(value)}: '}{_named(found)})"
        if not alone and len(names) > 1:
            found = self.with_pins(Pins())
            if found is not None:
                yield f"leave out the pins {', '.join(names)} ({_named(found)})"

    def divisible(self) -> Iterator[str]:
        """The nearest batches and numbers of GPUs with which a plan is legal."""
        pins, cluster, batch = self.settings.pins, self.workload.cluster, self.workload.training.global_batch_size
        ranks = [getattr(pins, name) for name in ("tp", "pp", "cp")]
        dp = pins.dp or (cluster.num_gpus // prod(ranks) if None not in ranks else None)
        near = multiples(batch, dp * (pins.micro_batch_size or 1)) if dp else batches(cluster.num_gpus, batch)
        others = [other for other in near if other != batch and not self.settings.continues]
        training = [replace(self.workload.training, global_batch_size=other) for other in others]
        yield from self.legal(
            "train.global_batch_size", {each.global_batch_size: replace(self.workload, training=each) for each in training}
        )
        of = {} if dp else {gpus: _sized(cluster, gpus) for gpus in counts(cluster.num_gpus, cluster.gpus_per_node, batch)}
        yield from self.legal("gpus", {gpus: replace(self.workload, cluster=each) for gpus, each in of.items()})

    def legal(self, key: str, workloads: Mapping[int, Workload]) -> Iterator[str]:
        """The key with those of its values whose workload has a legal plan."""
        found = [str(value) for value, each in workloads.items() if _fits(each, self.engines, self.settings, fitting=False)]
        if found:
            yield f"{key}={' or '.join(found)}"

    def options(self) -> Iterator[str]:
        """Each option that saves memory, that the search does not try of itself (`LAST_RESORTS`), and makes a plan fit."""
        savers = {
            choice.pin: choice.offered.values
            for choice in PINNED_ONLY
            if choice.offered is not None and choice.offered.saves_memory and not choice.offered.last_resort
        }
        savers |= {"cp": self.short_parts()}
        for name, values in savers.items():
            if getattr(self.settings.pins, name) is None:
                yield from islice(filter(None, (self.option(name, value) for value in values)), 1)

    def short_parts(self) -> tuple[int, ...]:
        """Degrees of context parallelism with which a rank holds less of a sequence than is searched, ascending."""
        length, gpus = self.workload.model.seq_length, self.workload.cluster.num_gpus
        least = max(engine.capabilities.least_sequence_part for engine in self.engines)
        return tuple(degree for degree in divisors(gpus) if degree > 1 and length % degree == 0 and length // degree < least)

    def option(self, name: str, value: object) -> str | None:
        """This pin to type, with a plan; None: none fits with it."""
        found = self.with_pins(replace(self.settings.pins, **{name: value}))
        return None if found is None else f"pin.{name}={shown(value)} ({_named(found)})"

    def narrower(self) -> Iterator[str]:
        """The first optimizer of fewer bytes with which a plan fits."""
        training = self.workload.training
        for changes in NARROWER if training.optimizer == "adamw" and not self.settings.continues else ():
            narrow = replace(self.workload, training=replace(training, **changes))
            found = None if narrow == self.workload else self.of(narrow)
            if found is not None:
                yield " ".join(f"train.{name}={str(value).lower()}" for name, value in changes.items()) + f" ({_named(found)})"
                return

    def unpacked(self) -> Iterator[str]:
        """Supervised samples that have a sequence each, where that makes a plan fit."""
        if self.workload.training.packing and not self.settings.continues:
            found = self.of(replace(self.workload, training=replace(self.workload.training, packing=False)))
            yield from () if found is None else (f"data.packing=false ({_named(found)})",)

    def more_host(self) -> Iterator[str]:
        """The least host memory of those tried with which a plan fits, where a rule about it cut something."""
        for more in _with_host(self.workload, self.cuts, MORE_HOST[-1]):
            found = self.of(more)
            if found is not None:
                yield f"{HOST_MEMORY}={more.cluster.host_memory // GB}GB ({_named(found)})"
                return

    def more_gpus(self) -> Iterator[str]:
        """The fewest GPUs of those tried on which a plan fits."""
        for times in MORE_GPUS:
            more = replace(self.workload, cluster=_sized(self.workload.cluster, times * self.workload.cluster.num_gpus))
            found = self.of(more)
            if found is not None:
                yield f"gpus={more.cluster.num_gpus} ({_named(found)})"
                return

    def of(self, workload: Workload) -> Plan | str | None:
        """A plan for another workload with the user's pins."""
        found = _fits(workload, self.engines, self.settings, fitting=True)
        return None if found is None else self.first(workload, self.engines, self.settings) or found


def _named(found: Plan | str) -> str:
    """The plan's choice and time: the first that was found, of which a whole search makes more."""
    if isinstance(found, str):
        return found
    modes = {span.recompute for _, span in found.spans()}
    mode = max(modes, key=RECOMPUTE_ORDER.index)
    seconds = "" if found.predicted is None else f", about {format_seconds(found.predicted.step_time_s)} a step"
    return f"{found.candidate.label()} recompute={mode}{seconds}"
