"""The questions that take several plans to answer. target.*: the least GPUs whose plan reaches it; of target.cost alone the number of GPUs
that trains soonest within it. largest=: the longest sequence, the
largest batch or the most layers that fit in memory. Both plan for one number after the other, and give back what was tried: a `Point` each,
which has the keys and the plan, or why there is none. `load` makes settings of the user's keys with others over them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

from orchestrator.asking.answer import Answer
from orchestrator.asking.grid import Load, Point
from orchestrator.engines.rules.rule import rule
from orchestrator.errors import InputError, NoPlanError
from orchestrator.planning import Planner, planned
from orchestrator.recipe import Settings
from orchestrator.report.budget import DAY_S
from orchestrator.search.planner import Progress
from orchestrator.strategy.spec import Candidate
from orchestrator.strategy.workload import Workload
from orchestrator.units import format_amount

MOST_GPUS: Final = 16384
"""The most GPUs that are tried where `gpus=` says no other bound."""
BETWEEN: Final = 8
"""Numbers that are tried between one that misses the target and its double, which reaches it."""
SHARE: Final = 32
"""The largest value is found to one part in this many."""
LARGEST: Final = 1 << 24
"""The largest value that is tried: samples of a batch, tokens of a sequence, layers."""


def answered(
    load: Load, settings: Settings, given: Mapping[str, Any], progress: Progress | None = None, *, with_fuller: bool = False
) -> tuple[Answer, tuple[Point, ...]]:
    """The answer to whatever the keys ask, whose `settings` are these, and the points that were tried on the way to it (none for one plan,
    which with `with_fuller` has a faster one beside it that fills memory further). Raises InputError, NoPlanError."""
    if settings.reinforcement is not None:
        raise InputError("task", "rl", "is answered by orchestrator.plan_rl")
    if settings.targets.given():
        asked = soonest_within if settings.targets.of_cost_alone else least_gpus
        return asked(load, settings, bounded="gpus" in given)
    if settings.largest is not None:
        return most_that_fits(load, settings)
    settings, found = planned(settings, lambda planner: planner.plan(progress, with_fuller=with_fuller))
    return Answer(settings=settings, found=found), ()


def whole(load: Load, keys: Mapping[str, str]) -> Answer:
    """The plan at these keys, with what a user may want to know beside it, and without the question that led there."""
    settings = load(keys)
    settings = msgspec.structs.replace(settings, targets=type(settings.targets)(), largest=None)
    settings, found = planned(settings, Planner.plan)
    return Answer(settings=settings, found=found)


# ------------------------------------------------------------------------------------------------------------- targets


def lacking(answer: Answer, share: float = 1.0) -> str:
    """Which target the plan misses, with figures; "" where it reaches all. `share`: of its step time, that a step takes."""
    targets, missed = answer.settings.targets, []
    if targets.days is not None and answer.days * share > targets.days:
        missed.append(answer.budget.said("days", finer(targets.days), " days", share))
    if targets.tokens_per_s is not None and answer.tokens_per_s / share < targets.tokens_per_s:
        missed.append(answer.budget.said("tokens_per_s", finer(targets.tokens_per_s), " tokens/s", 1 / share))
    if targets.cost is not None and answer.cost is not None and answer.cost * share > targets.cost:
        missed.append(f"cost {answer.budget.said('cost', finer(targets.cost), times=share)}")
    return ", ".join(missed)


def too_dear(answer: Answer) -> bool:
    """Whether the plan misses the cost alone: fewer GPUs may cost less, and more hardly ever do."""
    targets = answer.settings.targets
    others = msgspec.structs.replace(answer.settings, targets=msgspec.structs.replace(targets, cost=None))
    return targets.cost is not None and bool(lacking(answer)) and not lacking(msgspec.structs.replace(answer, settings=others))


def cost_of(point: Point) -> float:
    """What the training costs by the point's plan; 0 without one, or a price."""
    return (point.answer.cost or 0.0) if point.answer is not None else 0.0


def finer(target: float) -> Callable[[float], str]:
    """Writes amounts with so many digits that none looks like the target which it misses.

    >>> finer(6.0)(6.002), finer(6.0)(13.27)
    ('6.002', '13.3')
    """
    return lambda amount: next(
        (text for digits in range(3, 12) if float((text := format_amount(amount, digits)).replace(",", "")) != target), f"{amount!r}"
    )


def tried_for_targets(load: Load, keys: Mapping[str, str]) -> Point:
    """The plan at these keys, with what it misses. Whether it is the fastest is not proven where no plan there could reach the targets."""
    try:
        settings = load(keys)
        settings, found = planned(settings, lambda planner: planner.fastest(planner.space(top_k=1).unproven()))
        answer = Answer(settings=settings, found=found)
        at_best = 1.0 if found.at_least_s is None else found.at_least_s / answer.step_time_s
        if at_best < 1 and not lacking(answer, at_best):
            answer = Answer(settings=settings, found=Planner(settings).fastest())
    except (InputError, NoPlanError) as error:
        return Point(keys=dict(keys), why=str(error))
    return Point(keys=dict(keys), answer=answer, why=lacking(answer))


def sizes(node: int, most: int) -> Iterator[int]:
    """Powers of two in a node, then nodes by powers of two, and the most whole nodes.

    >>> list(sizes(8, 40)), list(sizes(6, 20))
    ([1, 2, 4, 8, 16, 32, 40], [1, 2, 4, 6, 12, 18])
    """
    inside = [1 << power for power in range(node.bit_length()) if 1 << power < node]
    nodes = [*(node << power for power in range(32)), most // node * node]
    yield from sorted({size for size in (*inside, *nodes) if 0 < size <= most})


def needed_at_peak(answer: Answer) -> float:
    """GPUs below which the targets can't be reached though every GPU ran at its peak: tokens are a number of FLOPs, whatever the plan."""
    rate = answer.mfu
    targets, seconds = answer.settings.targets, answer.budget.seconds
    if not rate:
        return 0.0
    at_peak = answer.plan.world_size * rate  # GPUs that would do what this plan does, at their peak
    shares = [0.0]
    if targets.days is not None:
        shares.append(seconds / (targets.days * DAY_S))
    if targets.tokens_per_s is not None:
        shares.append(targets.tokens_per_s / answer.tokens_per_s)
    return at_peak * max(shares)


def _sought(settings: Settings, *, bounded: bool) -> tuple[int, int]:
    """(GPUs of a node, the most that may be tried). `bounded`: the settings' GPUs are the most. Raises InputError for a saved plan."""
    if settings.plan is not None:
        raise InputError("plan", None, "is for a number of GPUs; a target looks for one: leave one of them out")
    return settings.cluster.gpus_per_node, settings.cluster.num_gpus if bounded else MOST_GPUS


def _not_reached(settings: Settings, most: int, nearest: Iterable[Point]) -> NoPlanError:
    best = [f"{point.keys['gpus']} GPUs: {point.why}" for point in nearest]
    words = " ".join(f"target.{name}={value:g}" for name, value in settings.targets.given().items())
    return NoPlanError(f"{words}: not reached with up to {most} GPUs ({'; '.join(best) or 'fewer than it takes at their peak'})")


def soonest_within(load: Load, settings: Settings, *, bounded: bool) -> tuple[Answer, tuple[Point, ...]]:
    """The number of GPUs whose fastest plan ends soonest of those that cost no more than target.cost: of powers of two up to the first
    behind them that costs more, then of numbers between those two. `bounded`: the settings' GPUs are the most. Raises NoPlanError."""
    node, most = _sought(settings, bounded=bounded)
    tried: list[Point] = []
    within: list[Answer] = []

    def reaches(size: int) -> bool:
        tried.append(point := tried_for_targets(load, {"gpus": str(size)}))
        if point.answer is not None and not point.why:
            within.append(point.answer)
        return point.answer is not None and not point.why

    for size in sizes(node, most):
        if not reaches(size) and within:
            last = within[-1].plan.world_size
            unit = max(node, math.ceil((size - last) / BETWEEN / node) * node) if size > node else 1
            for between in range(last + unit, size, unit):
                reaches(between)
            break
    if not within:
        priced = [point for point in tried if point.answer is not None]
        raise _not_reached(settings, most, [min(priced or tried, key=cost_of)])
    soonest = min(within, key=lambda answer: answer.days)
    return whole(load, {"gpus": str(soonest.plan.world_size)}), tuple(tried)


def least_gpus(load: Load, settings: Settings, *, bounded: bool) -> tuple[Answer, tuple[Point, ...]]:
    """The least number of GPUs whose fastest plan reaches the targets: of powers of two (of nodes, where it is more than one), then of
    whole nodes between the first that does, or that misses the cost alone, and its half. `bounded`: the settings' GPUs are the most. Raises
    NoPlanError."""
    node, most = _sought(settings, bounded=bounded)
    tried: list[Point] = []

    def reaches(size: int) -> bool:
        tried.append(tried_for_targets(load, {"gpus": str(size)}))
        return tried[-1].answer is not None and not tried[-1].why

    def first_between(few: int, many: int) -> int | None:
        """The first number of GPUs between these that reaches all: with more the cost is missed, with fewer the rest."""
        unit = max(node, math.ceil((many - few) / BETWEEN / node) * node) if many > node else 1
        for size in range(few + unit, many, unit):
            if reaches(size):
                return size
            if tried[-1].answer is not None and too_dear(tried[-1].answer):
                return None if unit <= node else first_between(size - unit, size)
        return None if unit <= node or not many - few > unit else first_between(range(few, many, unit)[-1], many)

    too_few, hit, dear = 0, None, False
    for size in sizes(node, most):
        if any(point.answer is not None and size < needed_at_peak(point.answer) for point in tried):
            too_few = size
            continue
        if reaches(size):
            hit = size
            break
        if not dear and tried[-1].answer is not None and too_dear(tried[-1].answer):
            dear = True
            if (hit := first_between(too_few, size)) is not None:
                return whole(load, {"gpus": str(hit)}), tuple(tried)
        too_few = size
    if hit is None:
        if dear:
            raise _not_reached(settings, most, [min((one for one in tried if one.answer and too_dear(one.answer)), key=cost_of)])
        if tried and tried[-1].keys["gpus"] != str(too_few):  # what the most that may be asked for would reach is the answer
            reaches(too_few)
        raise _not_reached(settings, most, tried[-1:])
    unit = max(node, math.ceil((hit - too_few) / BETWEEN / node) * node) if hit > node else 1
    for size in range(too_few + unit, hit, unit):
        if reaches(size):
            hit = size
            break
    return whole(load, {"gpus": str(hit)}), tuple(tried)


# ------------------------------------------------------------------------------------------------------------- largest


@rule("no_accumulation", "largest=global_batch_size", "pp num_microbatches")
def no_accumulation(candidate: Candidate, workload: Workload) -> str | None:
    """Why a plan holds less than a batch at once: more micro-batches than stages."""
    stages = candidate.mesh.pp
    return None if candidate.num_microbatches <= stages else f"{candidate.num_microbatches} micro-batches on {stages} stages"


def most_that_fits(load: Load, settings: Settings) -> tuple[Answer, tuple[Point, ...]]:
    """The largest value with a plan: doubled until there is none, then halved in. Raises NoPlanError where the recipe's own has none."""
    if settings.plan is not None:
        raise InputError("plan", None, "is for one model and batch; largest= looks for another: leave one of them out")
    key, start, unit = asked_value(settings)
    rules = (no_accumulation,) if settings.largest == "global_batch_size" else ()
    tried: list[Point] = []
    level = 0

    def fits(value: int) -> bool:
        try:
            at, found = planned(
                load({key: str(value)}),
                lambda planner: planner.fastest(planner.space(top_k=1, prunings=rules).held_to(level), any_plan=True),
            )
        except (InputError, NoPlanError) as error:
            tried.append(Point(keys={key: str(value)}, why=str(error)))
            return False
        tried.append(Point(keys={key: str(value)}, answer=Answer(settings=at, found=found), why="fits"))
        return True

    def grain(value: int) -> int:
        return max(unit, value // SHARE // unit * unit)

    most = min(LARGEST, settings.architecture.max_position_embeddings) if settings.largest == "seq_length" else LARGEST
    best = largest_of(fits, start, unit, grain, most)
    if best is None and not settings.cluster.is_cpu:  # where no plan keeps the first of the memory policy's limits, the last
        tried, level = [], -1
        best = largest_of(fits, start, unit, grain, most)
    if best is None:
        raise NoPlanError(f"largest={settings.largest}: {key}={unit} has no plan either: {tried[-1].why}")
    if best + unit > most:
        fits(best + unit)  # says what holds it
    at = msgspec.structs.replace(load({key: str(best)}), largest=None)
    at, found = planned(at, lambda planner: planner.searched() if not rules else planner.fastest(planner.space(prunings=rules)))
    return Answer(settings=at, found=found), tuple(tried)


def asked_value(settings: Settings) -> tuple[str, int, int]:
    """(key, the value that the recipe has, the step in which others are tried): sequences in 128s, as kernels like them; batches in the
    number of GPUs, which every data-parallel size divides; layers one by one."""
    gpus = settings.cluster.num_gpus
    if settings.largest == "num_layers":
        if settings.architecture.pattern:
            raise InputError(
                "largest", "num_layers", f"{settings.architecture.name} has a pattern of layers, which decides how many there are"
            )
        return "model.num_layers", settings.architecture.num_layers, 1
    if settings.largest == "seq_length":
        return "train.seq_length", settings.training.seq_length, 128
    return "train.global_batch_size", settings.training.global_batch_size, gpus


def largest_of(fits: Callable[[int], bool], start: int, unit: int, grain: Callable[[int], int], most: int = LARGEST) -> int | None:
    """The largest multiple of `unit` that fits and is not above `most`, as if all below it did: to `grain` of it; None: not even one unit
    fits.

    >>> largest_of(lambda value: value <= 1000, 512, 1, lambda value: 1), largest_of(lambda value: value <= 1000, 4096, 128, lambda v: 128)
    (1000, 896)
    >>> largest_of(lambda value: value <= 1000, 512, 1, lambda value: 1, most=900)
    900
    """
    low, high = 0, max(unit, start // unit * unit)
    while high <= most and fits(high):
        low, high = high, 2 * high
    if low and most < high:
        high = most // unit * unit + unit
        if low < high - unit and fits(high - unit):
            low = high - unit
    if not low:
        while high > unit:
            middle = max(unit, high // 2 // unit * unit)
            if fits(middle):
                low = middle
                break
            high = middle
    while low and high - low > grain(low):
        middle = (low + high) // 2 // unit * unit
        if middle in (low, high):
            break
        if fits(middle):
            low = middle
        else:
            high = middle
    return low or None
