"""From a model, a cluster and the engines' capabilities to the fastest plan that fits, with what became of every other choice.

1. The decision tree (strategy/tree.py) gives the legal meshes; each branch it cuts has its rule as a reason. A mesh whose states alone
   don't fit is out.
2. A queue by lower bound: of a mesh; when it comes to the queue's head of its outer choices, in groups and then each; when a choice comes
   there its memory floor against the limit and the bound of the inner search, with which it queues again; when it comes a second time the
   inner search itself (search/inner.py): stage partition and recompute, exact in the simulated step time.
3. Whatever is left when the head's bound is above the k-th best time found is slower: its bound says by how much at least.
4. The winner and the alternatives are priced again by `CostModel.price`, the one scoring function.

Bounds never decide a tie: a choice is only dropped where its bound is above the threshold, or no lower and later in declared order. What
is faster by rounding only is a tie.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from orchestrator.cost.bounds import Floors
from orchestrator.cost.calibration import Calibration
from orchestrator.cost.mixed import cost_model
from orchestrator.cost.price import CostModel
from orchestrator.plan import Plan, Reason, chosen
from orchestrator.search.check import check_plan, workload_of
from orchestrator.search.inner import MOST_AT_ONCE, MOST_SIMULATED, Inner, Solution
from orchestrator.search.question import DEFAULTS, Engines, SearchSettings
from orchestrator.search.refuse import no_plan
from orchestrator.strategy.capabilities import Traits
from orchestrator.strategy.megatron_layout import chunk_sizes
from orchestrator.strategy.spec import RECOMPUTE_ORDER, Candidate
from orchestrator.strategy.tree import LEVELS, Leaf, Outcome, Tree
from orchestrator.strategy.workload import Workload
from orchestrator.units import format_bytes
from orchestrator.values import Value

__all__ = ["Outcome", "SearchResult", "check_plan", "reprice", "search"]

ROUNDING = 1e-9
"""Relative slack of every bound: a bound and a price add the same terms in another order."""
LOOK_AHEAD = 1.15
"""How far above its bound so far a choice's inner bound is looked for at a time: the splits that may be faster are few, and most choices
never come to the queue's head again."""
STOPPED = "not looked at: the search was stopped before (search.budget_s)"
REJECTED_IN_PLAN = 40
"""Reasons that plan.json keeps; candidates.csv has all."""

Progress = Callable[[int, int, float | None], None]
"""(outer choices done, outer choices in all, seconds of the best plan so far)."""


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
    bounds: dict[Candidate, float] = msgspec.field(default_factory=dict)
    """Seconds that no plan of an outer choice undercuts, of those that were looked at; infinite where none fits."""


SHAPE, GROUP, FLOOR, SOLVE = -2, -1, 0, 1
"""What an entry of the queue waits for: its mesh's choices; its choices' own floors; its inner bound; its solution."""
WIDE = 1_000_000
"""More choices than a mesh has: places in declared order count the meshes first."""


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
    known: Mapping[Candidate, float] | None = None,
) -> SearchResult:
    """The fastest plan for the workload on any of the engines. `known`: bounds of a search whose space has all of this one's.

    `stop` is asked between two choices once there is a plan; True ends the search with the best one so far. Raises NoPlanError, with what
    was missing and what to relax, and InputError for a layout that is not the model's.
    """
    model, pins = workload.model, settings.pins
    limits = [settings.limit_for(engine, workload) for engine in engines]
    outcomes: dict[int, Outcome] = {}
    cut: list[tuple[int, Outcome]] = []
    meshes: list[Choice] = []
    trees = [Tree(engine.capabilities, workload, pins, settings.prunings) for engine in engines]
    costs = []
    for index, (engine, tree) in enumerate(zip(engines, trees, strict=True)):
        cuts: list[Outcome] = []
        for shape in tree.shapes(cuts.append):
            meshes.append(Choice((len(meshes) + 1) * WIDE, index, Leaf(shape, ())))
            cut += [(meshes[-1].order, outcome) for outcome in cuts]
            cuts.clear()
        cut += [(len(meshes) * WIDE + WIDE - 1, outcome) for outcome in cuts]
        offered = {"none", *tree.modes}
        costs.append(engine.costs(workload, tuple(mode for mode in RECOMPUTE_ORDER if mode in offered)))
    best = _Best(settings.top_k)
    bounds: dict[Candidate, float] = {}
    complete = True
    slower: list[tuple[Choice, float]] = []
    unfinished: list[tuple[Inner, Choice]] = []
    floors = {
        i: Floors(costs[i], engines[i].capabilities, limits[i].usable, pinned_layout=pins.layout is not None)
        for i in sorted({mesh.engine for mesh in meshes})  # an engine without a choice may have no such precision
    }
    queue: list[Entry] = []
    crowded: list[tuple[float, Choice]] = []
    for mesh in meshes:
        shape, here = mesh.leaf.candidate, floors[mesh.engine]
        states = here.shape_bytes(shape)
        if states > limits[mesh.engine].usable:
            crowded.append((states, mesh))
        else:
            most = trees[mesh.engine].micro_batch_sizes(shape)[-1]
            queue.append((here.shape(shape, most), mesh.order, SHAPE, [mesh], None))
    heapify(queue)
    total, done, simulated = len(queue), 0, MOST_SIMULATED if settings.most_further else MOST_AT_ONCE

    def below(mesh: Choice) -> list[Choice]:
        """The mesh's choices."""
        cuts: list[Outcome] = []
        found: list[Choice] = []
        for leaf in trees[mesh.engine].below(mesh.leaf.candidate, cuts.append):
            if pins.layout is not None:
                chunk_sizes(pins.layout, model, leaf.candidate.mesh.pp, leaf.candidate.vpp)
            found.append(Choice(mesh.order + len(found) + 1, mesh.engine, leaf))
        cut.extend((mesh.order, outcome) for outcome in cuts)
        return found

    def outcome(choice: Choice, *, reason: str, need: float | None = None, at_least_s: float | None = None) -> Outcome:
        decided = LEVELS if choice.whole else trees[choice.engine].decided(choice.leaf.candidate)
        return Outcome(candidate=choice.leaf.candidate, decided=decided, peak_memory_bytes=need, reason=reason, at_least_s=at_least_s)

    def late() -> bool:
        return stop is not None and best.score is not None and stop()

    while queue:
        bound, order, step, group, inner = heappop(queue)
        if progress is not None:
            progress(done, total, best.score)
        if late():
            complete = False
            for choice in (choice for left in (group, *(item[3] for item in queue)) for choice in left):
                outcomes[choice.order] = outcome(choice, reason=STOPPED)
            break
        if best.excludes(bound, order):
            slower += [(choice, bound) for choice in group]
            done += len(group)
            continue
        if step == SHAPE:
            found = below(group[0])
            total, done = total + len(found), done + 1
            for entry in _groups(found, floors, bound):
                heappush(queue, entry)
            continue
        if step == GROUP:
            for choice in group:
                candidate = choice.leaf.candidate
                floor = floors[choice.engine].leaf(candidate) if known is None or candidate not in known else known[candidate]
                heappush(queue, (max(bound, floor), choice.order, FLOOR, [choice], None))
            continue
        (choice,) = group
        candidate = choice.leaf.candidate
        need: float | None = None
        at_least = ""
        if inner is None:
            floor = costs[choice.engine].memory_floor(candidate)
            if floor > limits[choice.engine].usable:
                need, at_least = floor, "at least "
            else:
                i = choice.engine
                inner = Inner(costs[i], model, engines[i].capabilities, choice.leaf, limits[i], pins.layout, simulated)
        if inner is not None and step == FLOOR:
            look = bound * LOOK_AHEAD
            answer = inner.bound(bound, look)
            need = answer.need
            if need is None:
                heappush(queue, (max(bound, answer.bound_s), order, FLOOR if answer.bound_s == look else SOLVE, group, inner))
                continue
        elif inner is not None:
            answer = inner.solve(best.threshold)
            if inner.left < float("inf"):
                unfinished.append((inner, choice))
            if answer.solution is not None:
                seconds, peak = answer.solution.step_time_s, answer.solution.peak_memory_bytes
                outcomes[order] = Outcome(candidate=candidate, step_time_s=seconds, peak_memory_bytes=peak)
                bounds[candidate] = min(seconds, inner.left)
                best.add(answer.solution, choice)
                done += 1
                continue
            need = answer.need
            bound = max(bound, answer.bound_s, min(best.threshold, inner.left) * (1 - ROUNDING))
        done += 1
        if need is not None:
            why = f"needs {at_least}{format_bytes(need)} of {format_bytes(limits[choice.engine].usable)}"
            outcomes[order] = Outcome(candidate=candidate, peak_memory_bytes=need, reason=why)
            bounds[candidate] = float("inf")
        else:
            slower.append((choice, bound))
    if progress is not None:
        progress(total, total, best.score)
    least = _finish(best, unfinished, settings.most_further, late)
    if not best.ranked:
        missing = [each for _, each in sorted(outcomes.items())]
        missing += [outcome(choice, reason="", need=states) for states, mesh in crowded for choice in below(mesh)]
        raise no_plan(workload, engines, settings, [each for _, each in cut], missing)
    plans: list[Plan] = []
    for solution, choice in best.ranked:
        plans.append(_plan(solution, workload, costs[choice.engine]))
    winner = plans[0]
    assert winner.predicted is not None
    top = winner.predicted.step_time_s
    named = winner.candidate.label()
    for choice, bound in slower:
        if choice.whole:
            bounds[choice.leaf.candidate] = bound
        why = f"slower than {named} by at least {_percent(bound, top)}"
        outcomes[choice.order] = outcome(choice, reason=why, at_least_s=bound)
    for states, mesh in crowded:
        why = f"needs at least {format_bytes(states)} of {format_bytes(limits[mesh.engine].usable)}"
        outcomes[mesh.order] = outcome(mesh, reason=why, need=states)
    everything = _in_order(cut, outcomes)
    rejected = _rejected(plans, top, cut)
    return SearchResult(
        plan=replace(winner, rejected=rejected),
        alternatives=tuple(plans[1:]),
        outcomes=everything,
        complete=complete,
        proven=complete and least >= top,
        at_least_s=least if complete else None,
        bounds=bounds,
    )


def _groups(choices: Sequence[Choice], floors: Mapping[int, Floors], least: float) -> list[Entry]:
    """Entries of the queue for a mesh's choices, none below `least` seconds: those that differ only in ZeRO stage, offload and virtual
    stages share an entry and its bound."""
    groups: dict[tuple[object, ...], list[Choice]] = {}
    for choice in choices:
        candidate = choice.leaf.candidate
        groups.setdefault((candidate.strategy.sequence_parallel, candidate.micro_batch_size), []).append(choice)
    queue: list[Entry] = []
    for group in groups.values():
        most_vpp = max(choice.leaf.candidate.vpp for choice in group)
        bound = floors[group[0].engine].group(group[0].leaf.candidate, most_vpp)
        queue.append((max(least, bound), group[0].order, GROUP, group, None))
    return queue


def _finish(best: _Best, unfinished: list[tuple[Inner, Choice]], most: int, late: Callable[[], bool]) -> float:
    """Look on in the choices whose inner search stopped for number, where a partition that it left out could be the fastest of all, until
    it is `late` or `most` passes were simulated. The seconds that no plan undercuts: the best's own where nothing is left that could."""
    if best.score is None:
        return float("inf")
    least, spent = float("inf"), 0
    for inner, choice in sorted(unfinished, key=lambda entry: entry[0].left):
        tie = best.score * (1 + ROUNDING)  # goes to the first in declared order, whichever was looked at first
        may_win = inner.left < best.score * (1 - ROUNDING) or (inner.left <= tie and choice.order < best.ranked[0][1].order)
        if most and may_win and not late():
            spent -= inner.spent
            answer = inner.solve(tie, max(1, (most - spent - inner.spent) // 3))
            spent += inner.spent
            if answer.solution is not None and answer.solution.step_time_s <= tie:
                best.add(answer.solution, choice)
        least = min(least, inner.left)
    return best.score if least >= best.score * (1 - ROUNDING) else least


class _Best:
    """The best solutions so far, one for each outer choice, best first; the k-th is what the others must beat.

    Those that differ by rounding from the fastest are a tie, which goes to the declared order; so on behind them.
    """

    def __init__(self, k: int) -> None:
        self.k = max(1, k)
        self.ranked: list[tuple[Solution, Choice]] = []

    @property
    def score(self) -> float | None:
        """Seconds of the best."""
        return self.ranked[0][0].step_time_s if self.ranked else None

    @property
    def threshold(self) -> float:
        """Seconds that the next must not be above: rounding more than the k-th best; infinite while there are fewer."""
        return self.ranked[-1][0].step_time_s * (1 + ROUNDING) if len(self.ranked) == self.k else float("inf")

    def excludes(self, bound: float, order: int) -> bool:
        """Whether a choice with this lower bound and place can't be among the k best any more."""
        if len(self.ranked) < self.k:
            return False
        worst, last = self.ranked[-1]
        return bound > self.threshold or (bound >= worst.step_time_s and order > last.order)

    def add(self, solution: Solution, choice: Choice) -> None:
        """With this solution in place of another one of the same choice."""
        others = [item for item in self.ranked if item[1].order != choice.order]
        rest = sorted([*others, (solution, choice)], key=lambda item: (item[0].step_time_s, item[1].order))
        self.ranked = []
        while rest and len(self.ranked) < self.k:
            tie = [item for item in rest if item[0].step_time_s <= rest[0][0].step_time_s * (1 + ROUNDING)]
            self.ranked += sorted(tie, key=lambda item: item[1].order)
            rest = rest[len(tie) :]
        del self.ranked[self.k :]


def _percent(bound: float, top: float) -> str:
    return f"{100 * max(0.0, bound / top - 1):.1f}%"


def _plan(solution: Solution, workload: Workload, costs: CostModel) -> Plan:
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


def _in_order(cut: list[tuple[int, Outcome]], outcomes: dict[int, Outcome]) -> tuple[Outcome, ...]:
    """Cuts stand before the leaf that the tree reached next."""
    keyed = [((place, 1, i), outcome) for i, (place, outcome) in enumerate(cut)]
    keyed += [((place, 0, 0), outcome) for place, outcome in outcomes.items()]
    return tuple(outcome for _, outcome in sorted(keyed, key=lambda item: item[0]))


def _rejected(plans: list[Plan], top: float, cut: list[tuple[int, Outcome]]) -> tuple[Reason, ...]:
    """The alternatives with what they lose, then the branches that were cut nearest to the root."""
    reasons = []
    for plan in plans[1:]:
        assert plan.predicted is not None
        reasons.append(Reason(choice=plan.candidate.label(), why=f"slower by {_percent(plan.predicted.step_time_s, top)}"))
    broad = sorted((outcome for _, outcome in cut), key=lambda outcome: len(outcome.decided))[: REJECTED_IN_PLAN - len(reasons)]
    return (*reasons, *(Reason(choice=outcome.choice, why=outcome.reason or "") for outcome in broad))


def reprice(plan: Plan, traits: Traits, calibration: Calibration) -> Plan:
    """The same plan with a fresh prediction."""
    costs = cost_model(workload_of(plan), traits, calibration)
    return replace(plan, predicted=costs.price(plan.candidate, plan.stages), calibration=calibration.name)
