"""The decision tree: every outer choice that an engine's capabilities, the model and the cluster allow, outermost axis first.

Galvatron (VLDB 2023, arXiv 2211.13878, section 3.2) puts PP at the root, because it moves the least data and so belongs on the slowest
network level, and divides each stage's devices among the other axes below it. Here the order is PP, TP, CP, EP, DP, then what does not
change the mesh: rank order, ZeRO stage, sequence parallelism, micro-batch size, virtual stages, offload, recompute. A degree is any
divisor, not only a power of two.

A branch is cut at the first level at which a rule that forbids it can be judged (`Rule.needs`); each cut is an `Outcome` with a reason.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import islice, product
from typing import NamedTuple

from msgspec.structs import replace

from orchestrator.strategy.capabilities import Capabilities, Rule
from orchestrator.strategy.choices import getter, shown
from orchestrator.strategy.legality import PLANNER, overlaps_unasked, rules_of, stages_offered, unsuited
from orchestrator.strategy.megatron_layout import divided_layers, expand
from orchestrator.strategy.pins import Pins
from orchestrator.strategy.spec import (
    CHOICES,
    ENGINE_OPTIONS,
    LAST_RESORTS,
    RANK_ORDER,
    RECOMPUTE_ORDER,
    Candidate,
    Mesh,
    Recompute,
    Strategy,
)
from orchestrator.strategy.workload import Workload
from orchestrator.values import Value

INNER = "recompute"
MOST_GROUP_SIZES = 2
"""Sizes of interleaving's groups that are tried where pp micro-batches don't fill them: the smallest hold least, and the next may end
sooner."""

OWN_LEVELS = (
    *("pp", "tp", "cp", "cp_comm_type", "ep", "etp", "moe_token_dispatcher_type"),
    *("moe_shared_expert_overlap", "dp", "rank_order"),
    *("zero_stage", "zero_shard_size", "sequence_parallel", "tp_comm_overlap"),
    *("micro_batch_size", "vpp", "microbatch_group_size_per_vp_stage", "offload_optimizer"),
)
"""Levels whose values depend on what is decided above them, each with a function of its own; from the root down."""
LEVELS = (*OWN_LEVELS, *(choice.name for choice in CHOICES if choice.searched and choice.name not in (*OWN_LEVELS, INNER)), INNER)
"""The tree's levels from the root down: those, then any other choice that is searched (`Capabilities.options` has its values), then what
is chosen layer by layer inside a leaf."""

FIXED_WITH = {
    "num_microbatches": "micro_batch_size",
    "layout": "vpp",
    "world_size": "dp",
    "expert_dp": "dp",
    **{choice.name: choice.fixed_with for choice in CHOICES if choice.fixed_with},
}
"""Fields that are known as soon as another one is."""

SHAPE = LEVELS.index("rank_order") + 1
"""Levels that decide a mesh: what is below one shares its groups of ranks."""

GIVEN = frozenset({"model", "training", "cluster", "software", "family", "precision", "optimizer", "world", *ENGINE_OPTIONS})
"""What a rule may need that is no choice of the tree's."""
BY_NAME = {choice.name: choice for choice in CHOICES}
SAID = [(name, None if BY_NAME[name].always_said else (BY_NAME[name].default,)) for name in LEVELS]
"""Each level with the value that is not said; None: all are."""
VALUES = getter(BY_NAME[name].path for name in LEVELS)
DISPATCHER = BY_NAME["moe_token_dispatcher_type"]
SHARED_OVERLAP = BY_NAME["moe_shared_expert_overlap"]
TP_OVERLAP = BY_NAME["tp_comm_overlap"]


class Outcome(Value, frozen=True, kw_only=True):
    """What became of an outer choice: priced, or the reason why it was not taken.

    A branch that was cut before all was decided has `decided` < LEVELS: the other fields of `candidate` then mean nothing. Seconds, bytes.
    """

    candidate: Candidate
    decided: tuple[str, ...] = LEVELS
    step_time_s: float | None = None
    peak_memory_bytes: float | None = None
    reason: str | None = None
    rule: str | None = None
    """The rule that forbids it, where one does."""
    at_least_s: float | None = None
    """Seconds that none of its plans undercuts, where it was dropped for them."""

    @property
    def choice(self) -> str:
        """The candidate's name, or the name of the branch that was decided of it."""
        return self.candidate.label() if self.decided == LEVELS else branch_name(self.candidate, self.decided)


class Leaf(NamedTuple):
    """An outer choice that breaks no rule; `recompute` are the modes that the inner search may use, weakest first; `groups` larger sizes of
    interleaving's groups than the candidate's that it may take, ascending."""

    candidate: Candidate
    recompute: tuple[Recompute, ...]
    groups: tuple[int, ...] = ()


Cut = Callable[[Outcome], None]


@cache
def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending.

    >>> divisors(24)
    (1, 2, 3, 4, 6, 8, 12, 24)
    """
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def vpp_degrees(layers: int, pp: int, *, uneven: bool) -> tuple[int, ...]:
    """Virtual stages that are worth a look: those that divide a stage's layers, or with uneven stages also those that divide them when
    embedding and head are counted as layers (Megatron's --account-for-embedding-in-pipeline-split and -loss-).

    >>> vpp_degrees(96, 8, uneven=False), vpp_degrees(126, 16, uneven=True)
    ((1, 2, 3, 4, 6, 12), (1, 2, 4, 8))
    """
    if pp == 1:
        return (1,)
    if not uneven:
        return divisors(layers // pp) if layers % pp == 0 else (1,)
    whole = {*divisors(-(-layers // pp)), *divisors(-(-(layers + 2) // pp))}
    return tuple(sorted(v for v in whole if pp * v <= layers + 2))


def fills_groups(num_microbatches: int, pp: int, size: int) -> bool:
    """Whether Megatron's interleaving runs so many micro-batches over a pipeline in groups of `size`: a last, smaller group must still
    fill the pipeline (core/pipeline_parallel/schedules.py:995-1015).

    >>> [size for size in range(1, 21) if fills_groups(20, 8, size)]
    [10, 11, 12, 20]
    """
    return pp <= size <= num_microbatches and (num_microbatches % size == 0 or num_microbatches % size >= pp)


def group_sizes(pp: int, num_microbatches: int) -> tuple[int | None, ...]:
    """The sizes of interleaving's groups that are worth a look; None: pp. Larger groups hold more activations.

    >>> group_sizes(8, 16), group_sizes(8, 20), group_sizes(8, 4)
    ((None,), (10, 11), (None,))
    """
    if num_microbatches % pp == 0 or num_microbatches < pp:
        return (None,)
    legal = (size for size in range(pp, num_microbatches + 1) if fills_groups(num_microbatches, pp, size))
    return tuple(islice(legal, MOST_GROUP_SIZES))


def larger_groups(pp: int, num_microbatches: int, size: int | None) -> tuple[int, ...]:
    """Sizes of interleaving's groups above `size` (None: pp), doubled again and again: a stage waits less for what its neighbours send,
    and holds more.

    >>> larger_groups(4, 16, None), larger_groups(4, 12, None), larger_groups(4, 10, 5)
    ((8, 16), (8,), (10,))
    """
    found, next_size = [], 2 * (size or pp)
    while next_size <= num_microbatches:
        if fills_groups(num_microbatches, pp, next_size):
            found.append(next_size)
        next_size *= 2
    return tuple(found)


def about_groups(rules: Iterable[Rule]) -> list[Rule]:
    """The rules about interleaving's groups."""
    return [rule for rule in rules if "microbatch_group_size_per_vp_stage" in rule.needs]


def groups_beside(
    candidate: Candidate, capabilities: Capabilities, pins: Pins, rules: Sequence[Rule], workload: Workload
) -> tuple[int, ...]:
    """Larger groups than the candidate's (`larger_groups`) that none of these rules forbids, where the engine has them and nobody pins
    one."""
    if candidate.vpp == 1 or not capabilities.microbatch_groups or pins.microbatch_group_size_per_vp_stage is not None:
        return ()
    sizes = larger_groups(candidate.mesh.pp, candidate.num_microbatches, candidate.microbatch_group_size_per_vp_stage)
    given = [(size, replace(candidate, microbatch_group_size_per_vp_stage=size)) for size in sizes]
    return tuple(size for size, each in given if all(rule.check(each, workload) is None for rule in rules))


def level_of(rule: Rule) -> int:
    """The level at which the rule can be judged: -1 before any choice; the last level for a field that the tree does not know."""
    deepest = -1
    for name in rule.needs:
        if name not in GIVEN:
            field = FIXED_WITH.get(name, name)
            deepest = max(deepest, LEVELS.index(field) if field in LEVELS else len(LEVELS) - 1)
    return deepest


def only_axis(rule: Rule) -> str | None:
    """The one choice that this rule reads, if it reads just one: then a degree is cut once, not once in every branch."""
    choices = {FIXED_WITH.get(name, name) for name in rule.needs if name not in GIVEN}
    return choices.pop() if len(choices) == 1 else None


def branch_name(candidate: Candidate, decided: Iterable[str]) -> str:
    """The engine and what is decided of the candidate, as one line."""
    return " ".join([candidate.engine, *(f"{name}={field(candidate, name)}" for name in decided)])


def field(candidate: Candidate, name: str) -> str:
    """A candidate's value at a level, as tables show it."""
    return shown(BY_NAME[name].of(candidate))


class Tree:
    """The tree of one engine. `prunings` are further rules that a plan must keep, `without` the ids of rules that it need not."""

    def __init__(
        self, capabilities: Capabilities, workload: Workload, pins: Pins, prunings: tuple[Rule, ...] = (), without: Collection[str] = ()
    ) -> None:
        self.capabilities, self.workload, self.pins = capabilities, workload, pins
        self.world = workload.cluster.num_gpus
        self.layers = divided_layers(workload.model)
        self.experts = "experts" in workload.model.architecture.features()
        self.chunks = len(expand(pins.layout)) if pins.layout is not None else None
        self.rules = tuple(rule for rule in (*rules_of(capabilities, workload), *prunings) if rule.id not in without)
        self._overlaps_unasked = overlaps_unasked(capabilities, workload.cluster, workload.model.architecture)
        replaced = any(getattr(pins, choice.pin) for choice in CHOICES if choice.instead_of == SHARED_OVERLAP.name)
        able = True in capabilities.options.get(SHARED_OVERLAP.name, ()) and not workload.cluster.is_cpu
        self._overlaps_shared = able and not replaced
        self.modes: tuple[Recompute, ...] = ()
        """Recompute modes that no rule forbids whatever else is chosen; known with the first of `shapes`."""
        self._at: list[list[Rule]] = [[] for _ in range(len(LEVELS) + 1)]
        self._alone: dict[str, list[Rule]] = {}
        for rule in self.rules:
            if rule.only_with and rule.only_with not in capabilities.options and getattr(pins, BY_NAME[rule.only_with].pin) is None:
                continue
            axis = only_axis(rule)
            if axis in ("pp", "tp", "cp", "ep", "etp", "recompute"):
                self._alone.setdefault(axis, []).append(rule)
            else:
                self._at[level_of(rule) + 1].append(rule)
        self._of_groups = about_groups(self.rules)
        of_mesh = {*LEVELS[:SHAPE], "sequence_parallel", *GIVEN}
        known = self._at[LEVELS.index("sequence_parallel") + 1]
        self._of_sequence_parallel = [rule for rule in known if {FIXED_WITH.get(name, name) for name in rule.needs} <= of_mesh]
        self._resorts = {
            choice.name: pins.among(choice.pin, capabilities.options[choice.name])
            for choice in LAST_RESORTS
            if choice.name in capabilities.options
        }
        """The values of the options that save memory, where they are searched."""
        own: tuple[Callable[[Candidate], Iterator[Candidate]], ...] = (
            *(self._pp, self._tp, self._cp, self._cp_comm_type, self._ep, self._etp, self._dispatcher),
            *(self._shared_expert_overlap, self._dp, self._rank_order, self._zero_stage),
            *(self._zero_shard_size, self._sequence_parallel, self._tp_comm_overlap, self._micro_batch_size, self._vpp),
            *(self._microbatch_group, self._offload_optimizer),
        )
        others = LEVELS[len(own) : LEVELS.index(INNER)]
        self._branch: tuple[Callable[[Candidate], Iterator[Candidate]], ...] = (*own, *(partial(self._option, name) for name in others))

    def leaves(self, cut: Cut) -> Iterator[Leaf]:
        """Every legal outer choice in declared order; `cut` is told of each branch that is not.

        Deterministic.
        """
        for shape in self.shapes(cut):
            yield from self.below(shape, cut)

    def shapes(self, cut: Cut) -> Iterator[Candidate]:
        """Every mesh that no rule forbids, with the kind of its context parallelism, in declared order: a candidate of which only this much
        is decided."""
        root = Candidate(engine=self.capabilities.engine, strategy=Strategy(mesh=Mesh()), micro_batch_size=1, num_microbatches=1)
        pinned = {name: value for name, value in self.pins.given().items() if name in ENGINE_OPTIONS}
        if off := self.capabilities.off_with.get(self.workload.training.optimizer):
            pinned.setdefault(off, False)
        root = _with_strategy(root, grad_reduce_dtype=self.workload.training.grad_reduce_dtype, **pinned)
        why = unsuited(self.capabilities, self.workload)
        if why is not None:
            cut(Outcome(candidate=root, decided=(), reason=why, rule="unsuited"))
            return
        if self._broken(root, 0, cut):
            return
        self._degrees = {axis: self._allowed_degrees(axis, root, cut) for axis in ("pp", "tp", "cp", "ep", "etp")}
        self.modes = self._allowed_modes(root, cut)
        yield from self._walk(root, 0, SHAPE, cut)

    def below(self, shape: Candidate, cut: Cut) -> Iterator[Leaf]:
        """The legal outer choices with this mesh."""
        found = self._walk(shape, SHAPE, len(self._branch), cut)
        for candidate in self._with_resorts(found, cut) if self._resorts else found:
            modes = self._recompute(candidate, cut)
            if modes:
                whole = replace(candidate, strategy=replace(candidate.strategy, recompute=modes[-1]))
                yield Leaf(whole, modes, self._larger_groups(whole))

    def _with_resorts(self, candidates: Iterable[Candidate], cut: Cut) -> Iterator[Candidate]:
        """Each candidate with all combinations of the options that save memory."""
        rules = [rule for rule in self.rules if {*self._resorts} & {*rule.needs} and "recompute" not in rule.needs]
        for candidate in candidates:
            for values in product(*self._resorts.values()):
                child = _with_strategy(candidate, **dict(zip(self._resorts, values, strict=True)))
                broken = ((rule, why) for rule in rules if (why := rule.check(child, self.workload)) is not None)
                if first := next(broken, None):
                    cut(_illegal(child, self.decided(child, len(LEVELS)), *first))
                else:
                    yield child

    def _larger_groups(self, candidate: Candidate) -> tuple[int, ...]:
        """Sizes of interleaving's groups that no rule forbids, where the engine has them and nobody pins one; else none."""
        return groups_beside(candidate, self.capabilities, self.pins, self._of_groups, self.workload)

    def micro_batch_sizes(self, shape: Candidate) -> Sequence[int]:
        """The micro-batch sizes in samples that a mesh may have, but for what rules forbid. Under context parallelism that nobody asked
        for, one sample: ranks that share two samples would better take one each, with as many tokens and less to exchange."""
        one = shape.mesh.cp > 1 and self.pins.cp is None and self.pins.dp is None
        return self.pins.among("micro_batch_size", (1,) if one else divisors(self.workload.training.global_batch_size // shape.mesh.dp))

    def sequence_parallels(self, shape: Candidate) -> tuple[bool, ...]:
        """Whether choices of the mesh may have sequence parallelism, or be without it: the values that rules about the mesh alone leave;
        False where they leave none."""
        both = self._sequence_parallel(shape)
        legal = (each for each in both if all(rule.check(each, self.workload) is None for rule in self._of_sequence_parallel))
        return tuple(each.strategy.sequence_parallel for each in legal) or (False,)

    def decided(self, candidate: Candidate, depth: int = SHAPE) -> tuple[str, ...]:
        """The names of those of the first `depth` levels that say something of the candidate: an axis of one rank says nothing."""
        values = zip(SAID[:depth], VALUES(candidate), strict=False)
        return tuple([name for (name, silent), value in values if silent is None or value != silent[0]])

    def _walk(self, candidate: Candidate, level: int, end: int, cut: Cut) -> Iterator[Candidate]:
        """The branches at level `end` below one at `level`."""
        for child in self._branch[level](candidate):
            if not self._broken(child, level + 1, cut):
                if level + 1 == end:
                    yield child
                else:
                    yield from self._walk(child, level + 1, end, cut)

    def _broken(self, candidate: Candidate, depth: int, cut: Cut) -> bool:
        """Whether a rule that can be judged once `depth` levels are decided, and not before, forbids the branch."""
        for rule in self._at[depth]:
            why = rule.check(candidate, self.workload)
            if why is not None:
                cut(_illegal(candidate, self.decided(candidate, depth), rule, why))
                return True
        return False

    def _allowed_degrees(self, axis: str, root: Candidate, cut: Cut) -> tuple[int, ...]:
        offered = axis in self.capabilities.axes
        if axis in ("ep", "etp") and not self.experts:
            offered = False
        allowed = []
        for degree in self.pins.among(axis, divisors(self.world) if offered else (1,)):
            candidate = _with_mesh(root, axis, degree)
            if self.world % degree:
                why = f"{axis}={degree} does not divide the {self.world} GPUs"
                cut(Outcome(candidate=candidate, decided=(axis,), reason=why, rule="mesh"))
                continue
            if axis == "pp" and self.chunks is not None and self.chunks % degree:
                why = f"pin.layout has {self.chunks} chunks, which pp={degree} does not divide"
                cut(Outcome(candidate=candidate, decided=(axis,), reason=why, rule="layout"))
                continue
            for rule in self._alone.get(axis, ()):
                broken = rule.check(candidate, self.workload)
                if broken is not None:
                    cut(_illegal(candidate, (axis,), rule, broken))
                    break
            else:
                allowed.append(degree)
        return tuple(allowed)

    def _allowed_modes(self, root: Candidate, cut: Cut) -> tuple[Recompute, ...]:
        """The recompute modes that no rule forbids, weakest first. Where a pinned one is forbidden, or all are, `cut` gets the reason."""
        allowed: list[Recompute] = []
        blocked: list[Outcome] = []
        offered = [mode for mode in self.capabilities.recompute if mode not in self.capabilities.pinned_recompute]
        for mode in self.pins.among("recompute", offered):
            candidate = _with_strategy(root, recompute=mode)
            for rule in self._alone.get("recompute", ()):
                broken = rule.check(candidate, self.workload)
                if broken is not None:
                    blocked.append(_illegal(candidate, ("recompute",), rule, broken))
                    break
            else:
                allowed.append(mode)
        for outcome in blocked[:1] if not allowed else ():
            cut(outcome)
        return tuple(sorted(allowed, key=RECOMPUTE_ORDER.index))

    def _left(self, candidate: Candidate) -> int:
        mesh = candidate.mesh
        return self.world // (mesh.pp * mesh.tp * mesh.cp)

    def _pp(self, candidate: Candidate) -> Iterator[Candidate]:
        for degree in self._degrees["pp"]:
            yield _with_mesh(candidate, "pp", degree)

    def _tp(self, candidate: Candidate) -> Iterator[Candidate]:
        for degree in self._degrees["tp"]:
            if self._left(candidate) % degree == 0:
                yield _with_mesh(candidate, "tp", degree)

    def _cp(self, candidate: Candidate) -> Iterator[Candidate]:
        """The candidate with each cp that leaves parts of sequences no shorter than the engine is to be searched with."""
        most = self.workload.training.seq_length // self.capabilities.least_sequence_part
        for degree in self._degrees["cp"]:
            if self._left(candidate) % degree == 0 and (degree <= max(1, most) or self.pins.cp is not None):
                yield _with_mesh(candidate, "cp", degree)

    def _cp_comm_type(self, candidate: Candidate) -> Iterator[Candidate]:
        """The candidate with each kind of cp exchange that is offered or pinned; with the default alone where nothing is exchanged, so that
        a choice is not tried twice."""
        offered = self.capabilities.options.get("cp_comm_type", ("p2p",)) if candidate.mesh.cp > 1 else ("p2p",)
        for kind in self.pins.among("cp_comm_type", offered):
            yield _with_strategy(candidate, cp_comm_type=kind)

    def _ep(self, candidate: Candidate) -> Iterator[Candidate]:
        for degree in self._degrees["ep"]:
            if (self.world // candidate.mesh.pp) % degree == 0:
                yield _with_mesh(candidate, "ep", degree)

    def _etp(self, candidate: Candidate) -> Iterator[Candidate]:
        """The candidate with whole experts; with each divided as attention is where every rank has some of all of them (ep=1), and
        elsewhere only where ep can't be so much larger: that divides the same bytes and sends less. A pin takes any."""
        if self.pins.etp is None and not (self.experts and "etp" in self.capabilities.axes):
            yield candidate
            return
        mesh = candidate.mesh
        offered: tuple[int, ...] = (mesh.tp,) if mesh.ep == 1 else (1,)
        if mesh.ep > 1 and any(part.num_experts % (mesh.ep * mesh.tp) for part in self.workload.model.architecture.experts):
            offered = (1, mesh.tp)
        for degree in self.pins.among("etp", offered):
            if degree in self._degrees["etp"] and (self.world // candidate.mesh.pp) % (candidate.mesh.ep * degree) == 0:
                yield _with_mesh(candidate, "etp", degree)

    def _dispatcher(self, candidate: Candidate) -> Iterator[Candidate]:
        """The candidate with each token sent to its experts, by one's means or another's; where fewer ranks share the experts than a token
        has, also with all tokens sent to all of these ranks, which is then less. A pin takes any."""
        name, ranks = DISPATCHER.name, candidate.mesh.ep * candidate.mesh.etp
        offered = tuple(self.capabilities.options.get(name, (DISPATCHER.default,))) if ranks > 1 else (DISPATCHER.default,)
        if ranks >= max((part.topk for part in self.workload.model.architecture.experts), default=0):
            offered = tuple(kind for kind in offered if kind != "allgather")
        for kind in self.pins.among(name, offered):
            yield candidate if kind == DISPATCHER.default else _with_strategy(candidate, **{name: kind})

    def _shared_expert_overlap(self, candidate: Candidate) -> Iterator[Candidate]:
        """The candidate with shared experts computed beside the exchange of tokens wherever no rule forbids it: it hides seconds of theirs
        and keeps no more bytes. Not on CPU ranks, which have no streams, where tokens travel nowhere, and beside a pinned choice that takes
        its place."""
        name, mesh = SHARED_OVERLAP.name, candidate.mesh
        beside = _with_strategy(candidate, **{name: True})
        legal = self._overlaps_shared and mesh.ep * mesh.etp > 1 and not self._broken(beside, LEVELS.index(name) + 1, lambda _: None)
        for value in self.pins.among(name, (legal,)):
            yield beside if value else candidate

    def _dp(self, candidate: Candidate) -> Iterator[Candidate]:
        dp = self._left(candidate)
        if self.pins.dp is None or self.pins.dp == dp:
            yield _with_mesh(candidate, "dp", dp)

    def _rank_order(self, candidate: Candidate) -> Iterator[Candidate]:
        """The candidate with each order of ranks that differs for axes above 1; an order that puts PP nearer only where that takes a
        transfer off a slower network level, or else it only puts DP farther. A pinned one is the only one."""
        if self.pins.rank_order is not None:
            yield _with_mesh(candidate, "order", tuple(self.pins.rank_order.split("-")))
            return
        seen, degree = set[tuple[str, ...]](), candidate.mesh.degree
        wide = {axis for axis in RANK_ORDER if degree(axis) > 1}
        for order in self.capabilities.rank_orders:
            shape = tuple(axis for axis in order if axis in wide)
            if shape in seen:
                continue
            mesh = replace(candidate.mesh, order=order)
            if not seen or order[-1] == "pp" or self._nearer(mesh.stride("pp")):
                seen.add(shape)
                yield _with_strategy(candidate, mesh=mesh)

    def _nearer(self, stride: int) -> bool:
        """Whether ranks so far apart share a domain of a level that does not hold all GPUs."""
        return any(2 * stride <= level.size < self.world for level in self.workload.cluster.levels)

    def _zero_stage(self, candidate: Candidate) -> Iterator[Candidate]:
        for stage in self.pins.among("zero_stage", stages_offered(self.capabilities, candidate)):
            yield _with_strategy(candidate, zero_stage=stage)

    def _zero_shard_size(self, candidate: Candidate) -> Iterator[Candidate]:
        """The candidate without a second copy of ZeRO-3's weights; where the engine can keep one, also with one inside each inner network
        level."""
        levels = self.workload.cluster.levels if self.capabilities.zero_shard_groups and candidate.strategy.zero_stage == 3 else ()
        inside = [size for size in dict.fromkeys(level.size for level in levels) if 1 < size < candidate.mesh.dp and self.world % size == 0]
        for size in self.pins.among("zero_shard_size", (None, *inside)):
            yield _with_strategy(candidate, zero_shard_size=size)

    def _sequence_parallel(self, candidate: Candidate) -> Iterator[Candidate]:
        offered = (True, False) if self.capabilities.sequence_parallel and candidate.mesh.tp > 1 else (False,)
        for choice in self.pins.among("sequence_parallel", offered):
            yield _with_strategy(candidate, sequence_parallel=choice)

    def _tp_comm_overlap(self, candidate: Candidate) -> Iterator[Candidate]:
        """The candidate with tensor-parallel traffic beside the products wherever that is searched and no rule forbids it: what is without
        is looked at where the buffers don't fit, or take room (search/planner.py). A pin takes either."""
        name = TP_OVERLAP.name
        beside = _with_strategy(candidate, **{name: True})
        able = candidate.strategy.sequence_parallel and self._overlaps_unasked
        legal = able and all(rule.check(beside, self.workload) is None for rule in self.rules if name in rule.needs)
        for value in self.pins.among(name, (legal,)):
            yield beside if value else candidate

    def _micro_batch_size(self, candidate: Candidate) -> Iterator[Candidate]:
        per_rank = self.workload.training.global_batch_size // candidate.mesh.dp
        for size in self.micro_batch_sizes(candidate):
            yield replace(candidate, micro_batch_size=size, num_microbatches=per_rank // size)

    def _vpp(self, candidate: Candidate) -> Iterator[Candidate]:
        pp = candidate.mesh.pp
        flat = [name for name in self.capabilities.schedules if name != "interleaved"]
        if self.chunks is not None:
            degrees: tuple[int, ...] = (self.chunks // pp,)
        elif "vpp" in self.capabilities.axes and "interleaved" in self.capabilities.schedules:
            degrees = vpp_degrees(self.layers, pp, uneven=self.capabilities.uneven_stages)
        else:
            degrees = (1,)
        for vpp in self.pins.among("vpp", degrees):
            for schedule in self.pins.among("schedule", ["interleaved"] if vpp > 1 else flat if pp > 1 else flat[:1]):
                yield replace(candidate, vpp=vpp, schedule=schedule)

    def _microbatch_group(self, candidate: Candidate) -> Iterator[Candidate]:
        """The candidate with groups of pp micro-batches; where the engine has others and they don't fill those, with the smallest that they
        fill."""
        offered: tuple[int | None, ...] = (None,)
        if candidate.vpp > 1 and self.capabilities.microbatch_groups:
            offered = group_sizes(candidate.mesh.pp, candidate.num_microbatches)
        for size in self.pins.among("microbatch_group_size_per_vp_stage", offered):
            yield candidate if size is None else replace(candidate, microbatch_group_size_per_vp_stage=size)

    def _offload_optimizer(self, candidate: Candidate) -> Iterator[Candidate]:
        for choice in self.pins.among("offload", (False, True) if self.capabilities.offload_optimizer else (False,)):
            yield _with_strategy(candidate, offload_optimizer=choice)

    def _option(self, name: str, candidate: Candidate) -> Iterator[Candidate]:
        """A level without a function of its own: every value that the engine offers."""
        for value in self.pins.among(BY_NAME[name].pin, self.capabilities.options.get(name, (BY_NAME[name].default,))):
            yield _with_strategy(candidate, **{name: value})

    def _recompute(self, candidate: Candidate, cut: Cut) -> tuple[Recompute, ...]:
        """The modes that no rule forbids; a cut where there is none. A pinned mode is the only one."""
        if not self._at[len(LEVELS)]:
            return self.modes
        modes = []
        blocked: list[Outcome] = []
        for mode in self.modes:
            if not self._broken(_with_strategy(candidate, recompute=mode), len(LEVELS), blocked.append):
                modes.append(mode)
        if not modes:
            for outcome in blocked[:1]:
                cut(outcome)
        return tuple(modes)


def _illegal(candidate: Candidate, decided: tuple[str, ...], rule: Rule, why: str) -> Outcome:
    name = rule.id if rule.engine_rule == PLANNER else f"{rule.id} ({rule.engine_rule})"
    return Outcome(candidate=candidate, decided=decided, reason=f"illegal by rule {name}: {why}", rule=rule.id)


def _with_mesh(candidate: Candidate, axis: str, value: object) -> Candidate:
    return _with_strategy(candidate, mesh=replace(candidate.mesh, **{axis: value}))


def _with_strategy(candidate: Candidate, **changes: object) -> Candidate:
    strategy = candidate.strategy
    for name, value in changes.items():
        if getattr(strategy, name) != value:
            return replace(candidate, strategy=replace(strategy, **changes))
    return candidate
