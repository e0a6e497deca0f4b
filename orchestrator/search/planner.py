"""Finds the fastest plan that fits, for a model, a cluster and the engines' capabilities, with what became of every other choice.

1. The decision tree (strategy/tree.py) gives the legal meshes; each branch it cuts has its rule as a reason. A mesh whose states alone
   don't fit is out.
2. A queue by lower bound: of meshes that are alike; when one comes to the queue's head its own; when it comes there again of its outer
   choices, in groups and then each; when a choice comes there its memory floor against the limit and the bound of the inner search, with
   which it queues again; when it comes a second time the inner search itself (search/inner.py): stage partition and recompute, exact in
   the simulated step time.
3. Whatever is left when the head's bound is above the k-th best time found is slower: its bound says by how much at least.
4. The winner and the alternatives are priced again by `CostModel.price`, the one scoring function.

Bounds never decide a tie: a choice is only dropped where its bound is above the threshold, or no lower and later in declared order. What
is faster by rounding only is a tie.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from heapq import heapify, heappop, heappush
from math import isclose
from typing import Any, NamedTuple

from msgspec.structs import replace

from orchestrator.cost.bounds import Floors, beside
from orchestrator.cost.calibration import Calibration
from orchestrator.cost.mixed import cost_model
from orchestrator.cost.price import CostModel
from orchestrator.errors import InputError
from orchestrator.plan import Plan, Reason, chosen
from orchestrator.plan.check import workload_of
from orchestrator.search.inner import MOST_SIMULATED, Effort, Inner, Solution
from orchestrator.search.partition import Paths
from orchestrator.search.question import DEFAULTS, Engines, PlannedEngine, SearchSettings
from orchestrator.search.refuse import no_plan
from orchestrator.strategy.capabilities import Capabilities, Rule, Traits
from orchestrator.strategy.choices import Choice as Option
from orchestrator.strategy.choices import getter
from orchestrator.strategy.legality import PLANNER, legal_modes, rules_of, unsuited, why_not_stages
from orchestrator.strategy.megatron_layout import chunk_sizes
from orchestrator.strategy.spec import LAST_RESORTS, RECOMPUTE_ORDER, UNUSUAL, Candidate, Recompute, Strategy, twins, unusual
from orchestrator.strategy.tree import LEVELS, Leaf, Outcome, Tree, about_groups, groups_beside, level_of, only_axis
from orchestrator.strategy.workload import Workload
from orchestrator.units import format_bytes
from orchestrator.values import Value

__all__ = ["Outcome", "SearchResult", "faster", "fastest_with", "plainest", "reprice", "search"]

ROUNDING = 1e-9
"""Relative slack of every bound: a bound and a price add the same terms in another order."""
LOOK_AHEAD = 1.15
"""How far above its bound so far a choice's inner bound is looked for at a time: the splits that may be faster are few, and most choices
never come to the queue's head again."""
BEYOND = 1.02
"""Times the k-th best time: how far a choice's bound is looked for. Another search of a part of the space begins with it (`known`), and
the plan that it finds is mostly a little slower."""
STOPPED = "not looked at: the search was stopped before (search.budget_s)"
RESORTS = frozenset(choice.name for choice in LAST_RESORTS)
"""Options of the engines in which choices of one search may differ."""
RESORTED = getter(choice.path for choice in LAST_RESORTS)
"""A candidate's values of these options."""
REJECTED_IN_PLAN = 40
"""Reasons that plan.json keeps; candidates.csv has all."""

Progress = Callable[[int, int, float | None], None]
"""(outer choices done, outer choices in all, seconds of the best plan so far)."""


class Bounds(NamedTuple):
    """Seconds that no plan of an outer choice undercuts, of those that a search looked at; infinite where none fits. `fuller`: of plans
    that are held to the last limits of the engines' policies, where the others are held to the first."""

    usual: Mapping[Candidate, float] = {}
    fuller: Mapping[Candidate, float] = {}
    modes: Mapping[Candidate, tuple[Recompute, ...]] = {}
    """The recompute modes that the choices may use."""
    paths: Paths | None = None
    """Critical paths of pipelines that were looked at."""
    space: _Space | None = None
    """What was searched."""


UNKNOWN = Bounds()


class SearchResult(Value, frozen=True, kw_only=True):
    """`outcomes` are in declared order; `alternatives` are the best plans of the next best outer choices, fastest first.

    `complete`: False where the search was stopped early; the plan is then the best found.
    """

    plan: Plan
    alternatives: tuple[Plan, ...]
    outcomes: tuple[Outcome, ...]
    complete: bool = True
    proven: bool = True
    """Whether the plan is the proven optimum of its space: whatever was left out has a bound that is not below its time."""
    at_least_s: float | None = None
    """Seconds that no plan of the space undercuts: the plan's own where it is proven. None where the search was stopped."""
    bounds: Bounds = UNKNOWN
    fuller: Plan | None = None
    """The fastest plan under the last limits of the engines' policies, where that was asked for; nothing is proven of it."""
    searched: tuple[Capabilities, ...] = ()
    """What the engines could do as they were searched: with the options that save memory where nothing fits without."""


SHAPE, GROUP, FLOOR, SOLVE, AGAIN = -2, -1, 0, 1, 2
"""What an entry of the queue waits for: its mesh's choices; its choices' own floors; its inner bound; its first solution; its best one."""
AT_FIRST = 1
"""Partitions simulated for a choice until it comes to the queue's head again."""
MOST_PASSES = 8_000_000
"""Passes simulated until choices that come to the queue's head again are no longer looked at more closely than `AT_FIRST`; and of what
they left out until no more of them are looked on in: many pipelines' bounds are then within a few percent of the best plan's time."""
IN_VAIN = 32
"""Choices one after the other whose bound by those without an option leaves them in, until others' is no longer asked for."""
ROOM_OF_BUFFERS = 0.04
"""Share of a GPU's memory that user buffers take at least where the same choice without any is looked at beside it: a rule of thumb. In the
shipped recipes on H100 (8, 64, 512 and 4,096 GPUs) they gain .1 to 6.3% of a step, and lose 7.5% of one alone, in which they are 5.4 GB
for 65,536 tokens a rank; to look at both everywhere takes a search 10 to 30% longer."""
RESORT_GAIN = 0.005
"""Share of a step that a safer plan with options that save memory must gain over one that keeps the reserve alone: more than rounding."""
WIDE = 1_000_000
"""A number above that of a mesh's choices: places in declared order count the meshes first."""


class Choice(NamedTuple):
    """An outer choice on its way through the search, or (`leaf.recompute` is empty) a mesh whose choices were not looked at: `order` is its
    place in declared order."""

    order: int
    engine: int
    leaf: Leaf

    @property
    def whole(self) -> bool:
        return bool(self.leaf.recompute)


Entry = tuple[float, int, int, list[Choice], Inner | None]
"""(lower bound in seconds, place of the first choice in declared order, what is next, choices, the inner search where it has begun)."""


def search(
    workload: Workload,
    engines: Engines,
    settings: SearchSettings = DEFAULTS,
    *,
    progress: Progress | None = None,
    stop: Callable[[], bool] | None = None,
    known: Bounds = UNKNOWN,
    with_fuller: bool = False,
    with_outcomes: bool = True,
) -> SearchResult:
    """The fastest plan for the workload on any of the engines. `known`: bounds of a search whose space has all of this one's.

    Plans keep the first limits of the engines' policies; where none does, the last ones. Where none does that either, options that save
    memory are searched too (`strategy.spec.LAST_RESORTS`), and where one that has them keeps the first limits and is faster. `with_fuller`:
    also `SearchResult.fuller`, whose search goes first: its bounds hold for less memory too. `with_outcomes`: False leaves
    `SearchResult.outcomes` empty.

    `stop` is asked between two choices once there is a plan; True ends the search with the best one so far. Raises NoPlanError, with what
    was missing and what to relax, and InputError for a layout that is not the model's.
    """
    alike = None if known.space is None else known.space.asked_of(workload, engines, settings)
    space, stop = alike or _Space(workload, engines, settings), stop or (lambda: False)
    several = any(len(engine.policy.kept) > 1 for engine in engines)
    usual, full, *_ = known

    resorts = [engine.able_to(engine.capabilities.with_last_resorts()) for engine in engines]
    has_resorts = any(one.capabilities != other.capabilities for one, other in zip(resorts, engines, strict=True))

    def with_last_resorts(refused: _Search) -> SearchResult:
        """What fits with the options that save memory, once nothing does without. Raises NoPlanError."""
        if not has_resorts:
            return refused.result(float("inf"))
        asked = workload, resorts, settings
        return search(*asked, progress=progress, stop=stop, with_fuller=with_fuller, with_outcomes=with_outcomes)

    fuller = None
    if with_fuller and several:
        fuller = _Search(space, full, stop, level=-1, top_k=1)
        fuller.look(None)
        usual = full = fuller.bounds
        if not fuller.best.ranked:
            return with_last_resorts(fuller)
    running = _Search(space, usual, stop, level=0)
    running.look(progress)
    least = running.finish()
    if several and not running.best.ranked:  # that less memory does not hold a choice says nothing of more
        running = _Search(space, full, stop, level=-1)
        running.look(progress)
        least = running.finish()
        if has_resorts and running.best.ranked:
            below_s = running.plan().prediction.step_time_s * (1 - RESORT_GAIN)
            if faster(workload, resorts, settings, below_s) is not None:
                return with_last_resorts(running)
    if not running.best.ranked:
        return with_last_resorts(running)
    beside = None if fuller is None else fuller.plan()
    bounds = Bounds(running.bounds, {} if fuller is None else fuller.bounds, space.modes, space.paths, space)
    result = running.result(least, with_outcomes=with_outcomes)
    return replace(result, bounds=bounds, fuller=beside, searched=tuple(engine.capabilities for engine in engines))


def faster(workload: Workload, engines: Engines, settings: SearchSettings, below_s: float, *, any_plan: bool = False) -> Plan | None:
    """The fastest plan that takes less than so many seconds and keeps the first limits of the engines' policies; None: there is none. It is
    found sooner than the fastest of all: the bound cuts from the start. `any_plan`: the first that is found will do."""
    running = _Search(_Space(workload, engines, settings), {}, lambda: any_plan, level=0, top_k=1, below_s=below_s)
    running.look(None)
    return running.plan() if running.best.ranked else None


def plainest(workload: Workload, engines: Engines, settings: SearchSettings, plan: Plan, within: float) -> Plan | None:
    """The plan with the fewest unusual choices (`strategy.spec.unusual`) of those that take at most `within`, a share, longer than this one
    and keep the first limits of the engines' policies, the fastest of these; None: none has fewer."""
    found, fewest, below_s = None, len(unusual(plan.candidate)), plan.prediction.step_time_s * (1 + within)
    needs = tuple(choice.name for choice in UNUSUAL)
    while fewest:

        def check(candidate: Candidate, _: Workload, most: int = fewest - 1) -> str | None:
            names = [choice.name for choice in unusual(candidate)]
            return f"{', '.join(names)}: more than {most} unusual" if len(names) > most else None

        fewer = Rule(id="plainer", engine_rule=PLANNER, check=check, needs=needs)
        plainer = faster(workload, engines, replace(settings, top_k=1, prunings=(*settings.prunings, fewer)), below_s)
        if plainer is None:
            break
        found, fewest = plainer, len(unusual(plainer.candidate))
    return found


def _first(workload: Workload, engines: Engines, settings: SearchSettings) -> Plan | None:
    """The first plan that fits under the first limits of the engines' policies, else under the last, as a search takes them; bounds make it
    a fast one. None: none fits."""
    held = ([engine.held_to(level) for engine in engines] for level in (0, -1))
    return next(filter(None, (faster(workload, each, settings, float("inf"), any_plan=True) for each in held)), None)


def fastest_with(
    option: tuple[Option, Any],
    least: float,
    known: Sequence[tuple[Candidate, float]],
    modes: Mapping[Candidate, tuple[Recompute, ...]],
    workload: Workload,
    engine: PlannedEngine,
    settings: SearchSettings,
    below_s: float,
    paths: Paths | None = None,
) -> Plan | None:
    """The fastest plan with this value of an option that takes less than `below_s` seconds and keeps what `faster` does; None: there is
    none. `known`: one engine's legal choices without it, each with seconds that no plan undercuts, ascending, of which it is taken to leave
    the share `least` at least; `modes`: their recompute modes; `paths`: as in `Bounds`."""
    if not known:
        return None
    (choice, value), changed = option, {option[0].name, option[0].instead_of}
    costs, limit, found = engine.costs(workload), settings.limits_for(engine, workload)[0], None
    capabilities, layout = engine.capabilities, settings.pins.layout
    bounds = Floors(costs, capabilities, limit.usable, pinned_layout=layout is not None)
    rules = rules_of(capabilities, workload)
    of_groups = about_groups(rules)
    same_groups = not any(changed & {*rule.needs} for rule in of_groups)
    offered = [mode for mode in capabilities.recompute if mode not in capabilities.pinned_recompute]
    allowed = _Allowed(rules, workload, changed, settings.pins.among("recompute", offered))
    floors: dict[tuple[Strategy, int, tuple[Recompute, ...]], Callable[[float, float], float]] = {}
    spent = in_vain = 0
    for before, before_s in known:
        if before_s * least >= below_s:
            break
        candidate = replace(before, strategy=choice.set_on(before.strategy, value))
        if allowed.never(candidate):
            break
        if not least and (costs.time_floor(before) >= below_s or costs.time_floor(candidate) >= below_s):  # what frees bytes takes time
            continue
        before_modes = modes[before]
        with_it = allowed.modes(candidate, before_modes)
        if not with_it:
            continue
        if least and same_groups and in_vain < IN_VAIN and {*with_it} <= {*before_modes}:
            alike = before.strategy, before.micro_batch_size, with_it
            if alike not in floors:
                floors[alike] = beside(costs, before, candidate, with_it)
            if floors[alike](before_s, below_s) >= below_s:
                in_vain = 0
                continue
            in_vain += 1
        if bounds.group(candidate, candidate.vpp) >= below_s or costs.memory_floor(candidate) > limit.usable:
            continue
        groups = groups_beside(candidate, capabilities, settings.pins, of_groups, workload)
        if bounds.leaf(candidate, groups[-1] if groups else None) >= below_s:
            continue
        inner = Inner(costs, costs.model, capabilities, Leaf(candidate, with_it, groups), limit, layout, paths=paths)
        bound = inner.bound(before_s * least, below_s)
        if not bound.fits or bound.bound_s >= below_s:
            continue
        solution = inner.solve(below_s, Effort(AT_FIRST if spent > MOST_PASSES // 8 else MOST_SIMULATED)).solution
        spent += inner.spent
        if solution is not None and solution.step_time_s < below_s:
            below_s, found = solution.step_time_s, solution
    return None if found is None else _plan_of(found, workload, costs)


class _Allowed:
    """What rules allow a choice that differs from a legal one in some options alone: others' verdicts are known."""

    def __init__(self, rules: Sequence[Rule], workload: Workload, changed: Collection[str], modes: Sequence[Recompute]) -> None:
        about = [rule for rule in rules if {*changed} & {*rule.needs}]
        self._workload, self._tried = workload, modes
        self._plain = [rule for rule in about if "recompute" not in rule.needs]
        self._both = [rule for rule in about if "recompute" in rule.needs]
        others = [rule for rule in rules if "recompute" in rule.needs and rule not in self._both]
        self._alone = [rule for rule in others if only_axis(rule) == "recompute"]
        """The rules that have the same verdict on a mode whatever else is chosen."""
        self._others = [rule for rule in others if rule not in self._alone]
        self._once: bool | None = None

    def never(self, candidate: Candidate) -> bool:
        """Whether a rule forbids the options whatever else is chosen."""
        if self._once is None:
            whatever = [rule for rule in self._plain if level_of(rule) < 0 and not RESORTS & {*rule.needs}]
            self._once = any(rule.check(candidate, self._workload) is not None for rule in whatever)
        return self._once

    def modes(self, candidate: Candidate, before: Sequence[Recompute]) -> tuple[Recompute, ...]:
        """The recompute modes with which the candidate is legal, of which `before` were so without the options."""
        if any(rule.check(candidate, self._workload) is not None for rule in self._plain):
            return ()
        if not self._both:
            return tuple(before)
        if self._alone:
            self._tried, self._alone = legal_modes(self._alone, candidate, self._workload, self._tried), []
        found = {*legal_modes(self._both, candidate, self._workload, self._tried)}
        more = legal_modes(self._others, candidate, self._workload, [mode for mode in self._tried if mode in found and mode not in before])
        return tuple(mode for mode in self._tried if mode in found and (mode in before or mode in more))


def _plan_of(solution: Solution, workload: Workload, costs: CostModel) -> Plan:
    return Plan(
        **chosen(solution.candidate),
        global_batch_size=workload.training.global_batch_size,
        stages=solution.stages,
        predicted=costs.price(solution.candidate, solution.stages),
        model=workload.model.architecture,
        training=workload.training,
        cluster=workload.cluster,
        calibration=costs.calibration.name,
    )


class _Space:
    """What all searches of one question share, however much memory a plan may use: the trees, the meshes with their choices, the prices and
    the bounds that know of no memory."""

    def __init__(self, workload: Workload, engines: Engines, settings: SearchSettings) -> None:
        self.workload, self.engines, self.settings = workload, [*engines], settings
        self.asked = engines
        """The engines whose plans are wanted, which may be fewer."""
        self.trees = [Tree(engine.capabilities, workload, settings.pins, settings.prunings) for engine in engines]
        self.costs: list[CostModel] = []
        self.cut: list[tuple[int, Outcome]] = []
        """Branches that the trees cut above the meshes, each with the place of the mesh before it."""
        self.modes: dict[Candidate, tuple[Recompute, ...]] = {}
        """The recompute modes of each choice that was looked at."""
        self.paths: Paths | None = {}
        self.inners: dict[Candidate, Inner] = {}
        """The inner searches of choices for which a plan was looked for, the newest."""
        meshes = self._meshes()
        limits = [settings.limits_for(engine, workload)[-1] for engine in engines]
        self.floors = {
            i: Floors(self.costs[i], engines[i].capabilities, limits[i].usable, pinned_layout=settings.pins.layout is not None)
            for i in sorted({mesh.engine for mesh in meshes})  # an engine without a choice may have no such precision
        }
        self.meshes = meshes
        """The meshes in declared order."""
        self.first_bound, self.bound, self.states = cache(self._first_bound), cache(self._bound), cache(self._states)
        self.below, self.groups = cache(self._below), cache(self._groups)

    def __eq__(self, other: object) -> bool:
        """All are equal, and like none at all: what one keeps saves time, and answers do not differ by it."""
        return other is None or isinstance(other, _Space)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A pickle has none."""
        return type(None), ()

    def asked_of(self, workload: Workload, engines: Engines, settings: SearchSettings) -> _Space | None:
        """This space for one of its engines, whose own program computes every stage in the same way; None: it would be another one."""
        (engine, *more), mine = engines, self.settings
        index = next((i for i, one in enumerate(self.engines) if one.shares_prices(engine)), None)
        if index is None or more or workload is not self.workload or (settings.pins, settings.prunings) != (mine.pins, mine.prunings):
            return None
        there = self.engines[index].capabilities
        alike = {name: getattr(there, name) for name in ("recompute_varies", "parts", "planned_parts")}
        if replace(engine.capabilities, **alike) != there or unsuited(engine.capabilities, workload) is not None:
            return None
        other = object.__new__(_Space)
        other.__dict__.update(self.__dict__)
        other.engines, other.asked, other.settings, other.inners = [*self.engines], engines, settings, {}
        other.engines[index] = engine
        other.meshes = [mesh for mesh in self.meshes if mesh.engine == index]
        other.cut = [cut for cut in self.cut if cut[1].candidate.engine == engine.name]
        return other

    def _meshes(self) -> list[Choice]:
        """The legal meshes of all engines, in declared order."""
        meshes: list[Choice] = []
        for index, (engine, tree) in enumerate(zip(self.engines, self.trees, strict=True)):
            cuts: list[Outcome] = []
            for shape in tree.shapes(cuts.append):
                meshes.append(Choice((len(meshes) + 1) * WIDE, index, Leaf(shape, ())))
                self.cut += [(meshes[-1].order, outcome) for outcome in cuts]
                cuts.clear()
            self.cut += [(len(meshes) * WIDE + WIDE - 1, outcome) for outcome in cuts]
            offered = {"none", *tree.modes}
            self.costs.append(engine.costs(self.workload, tuple(mode for mode in RECOMPUTE_ORDER if mode in offered)))
        return meshes

    def _first_bound(self, mesh: Choice) -> float:
        """Seconds that no choice of the mesh undercuts; of those that divide sequences, most of all meshes, such as are soon known."""
        shape = mesh.leaf.candidate
        if shape.mesh.cp == 1:
            return self.bound(mesh)
        return self.floors[mesh.engine].any_shape(shape, self.trees[mesh.engine].sequence_parallels(shape))

    def _bound(self, mesh: Choice) -> float:
        """Seconds that no choice of the mesh undercuts."""
        tree, shape = self.trees[mesh.engine], mesh.leaf.candidate
        return self.floors[mesh.engine].shape(shape, max(tree.micro_batch_sizes(shape)), tree.sequence_parallels(shape))

    def _states(self, mesh: Choice) -> float:
        """Bytes of the mesh's states."""
        return self.floors[mesh.engine].shape_bytes(mesh.leaf.candidate)

    def _below(self, mesh: Choice) -> tuple[list[Choice], list[tuple[int, Outcome]]]:
        """The mesh's choices, and the branches that the tree cut on the way to them."""
        layout = self.settings.pins.layout
        cuts: list[Outcome] = []
        found: list[Choice] = []
        for leaf in self.trees[mesh.engine].below(mesh.leaf.candidate, cuts.append):
            if layout is not None:
                model = self.costs[mesh.engine].model
                sizes = chunk_sizes(layout, model, leaf.candidate.mesh.pp, leaf.candidate.vpp)
                if why := why_not_stages(self.engines[mesh.engine].capabilities, model.architecture, sizes):
                    raise InputError("pin.layout", layout, why)
            found.append(Choice(mesh.order + 2 * len(found) + 1, mesh.engine, leaf))
            self.modes[leaf.candidate] = leaf.recompute
        return found, [(mesh.order, outcome) for outcome in cuts]

    def without_buffers(self, choice: Choice) -> Choice | None:
        """The choice without `tp_comm_overlap`, where the tree took that unasked; None: it did not."""
        candidate = choice.leaf.candidate
        if not candidate.strategy.tp_comm_overlap or self.settings.pins.tp_comm_overlap:
            return None
        plain = replace(candidate, strategy=replace(candidate.strategy, tp_comm_overlap=False))
        self.modes[plain] = choice.leaf.recompute
        return Choice(choice.order + 1, choice.engine, choice.leaf._replace(candidate=plain))

    def _groups(self, mesh: Choice) -> list[tuple[float, list[Choice]]]:
        """The mesh's choices: those that differ only in ZeRO stage, offload of the optimizer and virtual stages share a group and its bound
        in seconds."""
        groups: dict[tuple[object, ...], list[Choice]] = {}
        for choice in self.below(mesh)[0]:
            candidate = choice.leaf.candidate
            alike = candidate.strategy.sequence_parallel, candidate.micro_batch_size, *RESORTED(candidate)
            groups.setdefault(alike, []).append(choice)
        bound = self.floors[mesh.engine].group
        return [(bound(group[0].leaf.candidate, max(choice.leaf.candidate.vpp for choice in group)), group) for group in groups.values()]


class _Search:
    """One search: its queue, the best so far, and what became of every other choice."""

    def __init__(
        self,
        space: _Space,
        known: Mapping[Candidate, float],
        stop: Callable[[], bool],
        *,
        level: int,
        top_k: int | None = None,
        below_s: float = float("inf"),
    ) -> None:
        """Starts a search. `level`: which of the engines' limits holds, 0, the first, or -1, the last. `top_k`: plans that are wanted, in
        place of the settings' number."""
        self.space, self.known, self.stop = space, known, stop
        self.workload, self.engines, self.settings = space.workload, space.engines, space.settings
        self.limits = [self.settings.limits_for(engine, self.workload)[level] for engine in self.engines]
        self.costs = space.costs
        self.complete = True
        self.cut = list(space.cut)
        """Branches that the trees cut, each with the place of the mesh before it."""
        self.outcomes: dict[int, Outcome] = {}
        """What became of choices that were priced, don't fit or were not looked at, by place in declared order."""
        self.slower: list[tuple[Choice, float]] = []
        """Choices that can't be among the k best, each with its bound in seconds."""
        self.crowded: list[tuple[float | Inner, Choice]] = []
        """Meshes and choices that don't fit, each with bytes that it takes at least, or its inner search, which knows how many it takes."""
        self.unfinished: list[tuple[Inner, Choice]] = []
        self.bounds: dict[Candidate, float] = {}
        self.unbuffered: set[int] = set()
        """Places of the choices with user buffers whose likes without any are looked at too."""
        self.spent = 0
        """Passes that inner searches simulated so far."""
        self.floors = {i: floors.under(self.limits[i].usable) for i, floors in space.floors.items()}
        self.queue: list[Entry] = []
        for mesh in space.meshes:
            if below_s < float("inf") and space.first_bound(mesh) > below_s:  # nobody asks a search for faster plans why it took no other
                continue
            states = space.states(mesh)
            if states > self._usable(mesh):
                self.crowded.append((states, mesh))
            else:
                self.queue.append((space.first_bound(mesh), mesh.order, SHAPE, [mesh], None))
        kind = _itself if self.settings.kinds == "choices" else _by_batch
        if self.settings.kinds == "meshes" and len({_by_mesh(mesh) for *_, (mesh,), _ in self.queue}) >= self.settings.top_k:
            kind = _by_mesh
        self.best = _Best(top_k or self.settings.top_k, below_s, kind)
        heapify(self.queue)
        self.total, self.done = len(self.queue), 0

    def _below(self, mesh: Choice) -> list[Choice]:
        """The choices of a mesh."""
        found, cuts = self.space.below(mesh)
        self.cut += cuts
        return found

    def _usable(self, choice: Choice) -> float:
        """Bytes of a GPU that a plan of the choice's engine may take."""
        return self.limits[choice.engine].usable

    def _late(self) -> bool:
        return self.best.score is not None and self.stop()

    def look(self, progress: Progress | None) -> None:
        """Take the queue's heads until none of them can be among the k best, or it is late."""
        while self.queue:
            bound, _, step, group, inner = heappop(self.queue)
            if progress is not None:
                progress(self.done, self.total, self.best.score)
            if self._late():
                self.complete = False
                for choice in (choice for left in (group, *(item[3] for item in self.queue)) for choice in left):
                    self.outcomes.setdefault(choice.order, self._outcome(choice, reason=STOPPED))
                break
            if self.best.excludes_all(bound):
                self._excluded(bound, group)
                for left in sorted(self.queue):
                    self._excluded(left[0], left[3])
                self.queue.clear()
            elif self.best.excludes(bound, group[0]):
                self._excluded(bound, group)
            elif step == SHAPE and (least := self.space.bound(group[0])) > bound:
                heappush(self.queue, (least, group[0].order, SHAPE, group, None))
            elif step == SHAPE:
                self.total, self.done = self.total + len(self._below(group[0])), self.done + 1
                for least, choices in self.space.groups(group[0]):
                    heappush(self.queue, (max(bound, least), choices[0].order, GROUP, choices, None))
            elif step == GROUP:
                for choice in group:
                    self._floored(bound, choice)
            elif step == FLOOR:
                self._bounded(bound, group[0], inner)
            else:
                assert inner is not None
                self._solved(bound, group[0], inner, first=step == SOLVE)
        if progress is not None:
            progress(self.total, self.total, self.best.score)

    def _excluded(self, bound: float, group: list[Choice]) -> None:
        """Choices that wait together can't be among the k best."""
        for choice in group:
            if choice.order not in self.outcomes:
                self._slower(choice, bound)
        self.done += len(group)

    def _floored(self, bound: float, choice: Choice) -> None:
        """Put the choice into the queue with its own bound, or out where its states alone don't fit."""
        candidate, groups, here = choice.leaf.candidate, choice.leaf.groups, self.floors[choice.engine]
        if self.costs[choice.engine].user_buffer_bytes(candidate) > ROOM_OF_BUFFERS * self._usable(choice):
            self._without_buffers(choice, bound)
        floor = self.known.get(candidate)
        if floor is None:
            states = here.states_bytes(candidate, candidate.strategy.zero_stage, candidate.strategy.offload_optimizer)
            if states > self._usable(choice):
                self._too_large(choice, states)
                return
            floor = here.leaf(candidate, groups[-1] if groups else None)
        heappush(self.queue, (max(bound, floor), choice.order, FLOOR, [choice], None))

    def _without_buffers(self, choice: Choice, bound: float) -> None:
        """Put what is like the choice, but has no user buffers where it has any unasked, into the queue with this bound, once."""
        plain = None if choice.order in self.unbuffered else self.space.without_buffers(choice)
        if plain is not None:
            self.unbuffered.add(choice.order)
            self.total += 1
            self._floored(bound, plain)

    def _slower(self, choice: Choice, bound: float) -> None:
        """The choice, or the mesh, is out: no plan of it is faster than `bound` seconds, and so none can be among the k best."""
        self.slower.append((choice, bound))
        if choice.whole:
            self.bounds[choice.leaf.candidate] = bound

    def _bounded(self, bound: float, choice: Choice, inner: Inner | None) -> None:
        """Put the choice back into the queue with its inner bound, or out where it doesn't fit."""
        i, usable = choice.engine, self._usable(choice)
        if inner is None:
            floor = self.costs[i].memory_floor(choice.leaf.candidate)
            if floor > usable:
                self._too_large(choice, floor)
                return
            inner = self.space.inners.get(choice.leaf.candidate)
            inner = inner if inner is not None and inner.held_to(self.limits[i]) else None
        if inner is None:
            capabilities = self.engines[i].capabilities
            given = self.costs[i], self.costs[i].model, capabilities, choice.leaf, self.limits[i], self.settings.pins.layout
            inner = Inner(*given, self.floors[i].leaf, self.space.paths)
        if bound == float("inf"):  # `known` of a search with no less memory, in which it did not fit
            self._too_large(choice, inner)
            return
        look = bound * LOOK_AHEAD
        answer = inner.bound(bound, min(look, self.best.threshold(choice) * BEYOND))
        if answer.fits:
            step = FLOOR if answer.bound_s == look else SOLVE
            heappush(self.queue, (max(bound, answer.bound_s), choice.order, step, [choice], inner))
        else:
            self._too_large(choice, inner)

    def _solved(self, bound: float, choice: Choice, inner: Inner, *, first: bool) -> None:
        """The choice's fastest plan, if it can be among the k best. The first time only near its bound, and after a few partitions: the
        others wait in the queue by their own bound, which is mostly the higher one."""
        threshold = self.best.threshold(choice)
        most = min(threshold, bound * LOOK_AHEAD) if first else threshold
        self.space.inners[choice.leaf.candidate] = inner
        answer = inner.solve(most, Effort(AT_FIRST if first or self.spent > MOST_PASSES else MOST_SIMULATED))
        self.spent += inner.spent
        if not answer.fits:
            self._too_large(choice, inner)
            return
        if answer.solution is not None:
            seconds, peak = answer.solution.step_time_s, answer.solution.peak_memory_bytes
            self.outcomes[choice.order] = Outcome(candidate=answer.solution.candidate, step_time_s=seconds, peak_memory_bytes=peak)
            self.bounds[choice.leaf.candidate] = min(seconds, inner.left)
            self.best.add(answer.solution, choice)
        left = inner.left if answer.solution is not None else min(inner.left, most)
        if first and not self.best.excludes(left, choice):
            heappush(self.queue, (max(bound, left), choice.order, AGAIN, [choice], inner))
            return
        self.done += 1
        if inner.left < float("inf"):
            self.unfinished.append((inner, choice))
        if answer.solution is None:
            self._slower(choice, max(bound, answer.bound_s, min(self.best.threshold(choice), inner.left) * (1 - ROUNDING)))

    def _too_large(self, choice: Choice, least: float | Inner) -> None:
        """The choice is out: it takes so many bytes at least, or what the inner search says once somebody asks. One without user buffers
        takes its place where it has any."""
        self.crowded.append((least, choice))
        self.bounds[choice.leaf.candidate] = float("inf")
        self.done += 1
        self._without_buffers(choice, 0.0)

    def _outcome(self, choice: Choice, *, reason: str, need: float | None = None, at_least_s: float | None = None) -> Outcome:
        decided = LEVELS if choice.whole else self.space.trees[choice.engine].decided(choice.leaf.candidate)
        return Outcome(candidate=choice.leaf.candidate, decided=decided, peak_memory_bytes=need, reason=reason, at_least_s=at_least_s)

    def finish(self) -> float:
        """Look on in the choices whose inner search stopped for number, where a partition that it left out could be the fastest of all,
        until it is late or `most_further` passes were simulated. The seconds that no plan undercuts: the best's own where nothing is left
        that could."""
        best, most = self.best, self.settings.most_further
        if best.score is None:
            return float("inf")
        least, spent = float("inf"), 0
        for inner, choice in sorted(self.unfinished, key=lambda entry: entry[0].left):
            tie = best.score * (1 + ROUNDING)  # goes to the first in declared order, whichever is looked at first
            may_win = inner.left < best.score * (1 - ROUNDING) or (inner.left <= tie and choice.order < best.ranked[0][1].order)
            if most and may_win and inner.left < least and spent < MOST_PASSES and not self._late():
                spent -= inner.spent
                answer = inner.solve(tie, Effort(MOST_SIMULATED, max(1, (most - spent - inner.spent) // 3)))
                spent += inner.spent
                if answer.solution is not None and answer.solution.step_time_s <= tie:
                    best.add(answer.solution, choice)
            least = min(least, inner.left)
        return best.score if least >= best.score * (1 - ROUNDING) else least

    def plan(self, place: int = 0) -> Plan:
        """The best, or what comes so many places behind it."""
        solution, choice = self.best.ranked[place]
        return _plan_of(solution, self.workload, self.costs[choice.engine])

    def result(self, least: float, *, with_outcomes: bool = True) -> SearchResult:
        """The plans and, `with_outcomes`, every other choice with its reason. `least`: seconds that no plan undercuts. Raises
        NoPlanError."""
        if not self.best.ranked:
            missing = []
            for least_bytes, mesh in sorted(self.crowded, key=lambda entry: entry[1].order):
                need, why = (least_bytes.least_bytes(), "known") if isinstance(least_bytes, Inner) else (least_bytes, "")
                missing += [self._outcome(choice, reason=why, need=need) for choice in ([mesh] if mesh.whole else self._below(mesh))]
            raise no_plan(self.workload, self.space.asked, self.settings, [each for _, each in self.cut], missing, _first)
        plans = [self.plan(place) for place in range(len(self.best.ranked))]
        winner = plans[0]
        top = winner.prediction.step_time_s
        return SearchResult(
            plan=replace(winner, rejected=_rejected(plans, top, self.cut)),
            alternatives=tuple(plans[1:]),
            outcomes=self._outcomes(winner) if with_outcomes else (),
            complete=self.complete,
            proven=self.complete and least >= top,
            at_least_s=least if self.complete else None,
        )

    def _outcomes(self, winner: Plan) -> tuple[Outcome, ...]:
        """What became of every choice, in declared order."""
        named, top = winner.candidate.label(), winner.prediction.step_time_s
        for choice, bound in self.slower:
            why = f"slower than {named} by at least {_percent(bound, top)}"
            if bound == float("inf"):  # the fuller search found so, which may use more
                why = f"needs more than {format_bytes(self._usable(choice))}"
            self.outcomes[choice.order] = self._outcome(choice, reason=why, at_least_s=bound)
        for least_bytes, choice in self.crowded:
            need, at_least = (least_bytes.least_bytes(), "") if isinstance(least_bytes, Inner) else (least_bytes, "at least ")
            why = f"needs {at_least}{format_bytes(need)} of {format_bytes(self._usable(choice))}"
            self.outcomes[choice.order] = self._outcome(choice, reason=why, need=need)
        return _in_order(self.cut, self.outcomes)


def _itself(choice: Choice) -> object:
    """A kind of which this outer choice is the only one."""
    return choice.order


def _by_mesh(choice: Choice) -> object:
    """The engine, and how GPUs are divided."""
    mesh = choice.leaf.candidate.mesh
    return choice.engine, mesh.tp, mesh.pp, mesh.cp, mesh.ep, mesh.etp


def _by_batch(choice: Choice) -> object:
    """What is one group of a mesh's choices; a mesh whose choices were not looked at is none's like."""
    candidate = choice.leaf.candidate
    return (_by_mesh(choice), candidate.micro_batch_size, candidate.strategy.sequence_parallel) if choice.whole else choice.order


class _Best:
    """The best solutions so far, one for each kind of outer choice, best first; the k-th is what other kinds must beat.

    Those that differ by rounding from the fastest are a tie, which goes to the declared order; so on behind them.
    """

    def __init__(self, k: int, below_s: float, kind: Callable[[Choice], object] = _itself) -> None:
        self.k, self.below_s, self.kind = max(1, k), below_s, kind
        self.ranked: list[tuple[Solution, Choice]] = []
        self.kinds: list[object] = []
        """The kind of each."""

    @property
    def score(self) -> float | None:
        """Seconds of the best plan found; None: there is none yet."""
        return self.ranked[0][0].step_time_s if self.ranked else None

    def _to_beat(self, choice: Choice) -> tuple[Solution, Choice] | None:
        """What a plan of the choice must beat: the k-th best; None: there are fewer. Where a kind is several choices, the first k kinds
        that come, in the order of their bounds, will do: it must beat the best of another choice of its kind or, where there are k or it
        is one of them, the best of all."""
        if self.kind is _itself:
            return self.ranked[-1] if len(self.ranked) == self.k else None
        kind, counted = self.kind(choice), len(self.ranked) == self.k
        for item, its in zip(self.ranked, self.kinds, strict=True):
            if item[1].order == choice.order:
                counted = True
            elif its == kind:
                return item
        return self.ranked[0] if counted else None

    def threshold(self, choice: Choice) -> float:
        """Seconds that a plan of the choice must not be above: rounding more than what it must beat; where that is nothing, `below_s`."""
        worst = self._to_beat(choice)
        return self.below_s if worst is None else worst[0].step_time_s * (1 + ROUNDING)

    def excludes(self, bound: float, choice: Choice) -> bool:
        """Whether a choice, or the choices of a mesh from this on, with this lower bound can't be among the k best any more."""
        if self.ranked and bound < self.ranked[0][0].step_time_s and bound <= self.below_s:  # whatever it must beat
            return False
        worst = self._to_beat(choice)
        if worst is None:
            return bound > self.below_s
        return bound > worst[0].step_time_s * (1 + ROUNDING) or (bound >= worst[0].step_time_s and choice.order > worst[1].order)

    def excludes_all(self, bound: float) -> bool:
        """Whether nothing with such a lower bound, or a higher one, can be among the k best any more."""
        return len(self.ranked) == self.k and bound > self.ranked[-1][0].step_time_s * (1 + ROUNDING)

    def add(self, solution: Solution, choice: Choice) -> None:
        """Ranks this solution, in place of another one of the same choice or a slower one of its kind, and keeps the best `k`."""
        others = [item for item in self.ranked if item[1].order != choice.order]
        rest = sorted([*others, (solution, choice)], key=lambda item: (item[0].step_time_s, item[1].order))
        self.ranked = []
        while rest and len(self.ranked) < self.k:
            tie = [item for item in rest if item[0].step_time_s <= rest[0][0].step_time_s * (1 + ROUNDING)]
            for item in sorted(tie, key=lambda item: item[1].order):
                if not any(self.kind(item[1]) == self.kind(other) or _twins(item[0], one) for one, other in self.ranked):
                    self.ranked.append(item)
            rest = rest[len(tie) :]
        del self.ranked[self.k :]
        self.kinds = [self.kind(choice) for _, choice in self.ranked]


def _twins(one: Solution, other: Solution) -> bool:
    """Whether two solutions are one plan under two names."""
    return (
        one.candidate != other.candidate
        and twins(one.candidate, other.candidate)
        and isclose(one.step_time_s, other.step_time_s, rel_tol=ROUNDING)
        and isclose(one.peak_memory_bytes, other.peak_memory_bytes, rel_tol=ROUNDING)
    )


def _percent(bound: float, top: float) -> str:
    return f"{100 * max(0.0, bound / top - 1):.1f}%"


def _in_order(cut: list[tuple[int, Outcome]], outcomes: dict[int, Outcome]) -> tuple[Outcome, ...]:
    """Cuts stand before the leaf that the tree reached next."""
    keyed = [((place, 1, i), outcome) for i, (place, outcome) in enumerate(cut)]
    keyed += [((place, 0, 0), outcome) for place, outcome in outcomes.items()]
    return tuple(outcome for _, outcome in sorted(keyed, key=lambda item: item[0]))


def _rejected(plans: list[Plan], top: float, cut: list[tuple[int, Outcome]]) -> tuple[Reason, ...]:
    """The alternatives with what they lose, then the branches that were cut nearest to the root."""
    reasons = [Reason(choice=plan.candidate.label(), why=f"slower by {_percent(plan.prediction.step_time_s, top)}") for plan in plans[1:]]
    broad = sorted((outcome for _, outcome in cut), key=lambda outcome: len(outcome.decided))[: REJECTED_IN_PLAN - len(reasons)]
    return (*reasons, *(Reason(choice=outcome.choice, why=outcome.reason or "") for outcome in broad))


def reprice(plan: Plan, traits: Traits, calibration: Calibration) -> Plan:
    """The plan with a fresh prediction."""
    costs = cost_model(workload_of(plan), traits, calibration)
    return replace(plan, predicted=costs.price(plan.candidate, plan.stages), calibration=calibration.name)
