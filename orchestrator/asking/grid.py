"""Keys that have several values: every combination is planned for, and the best are told from the others."""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, Final

from orchestrator.asking.answer import Answer
from orchestrator.cost.memory_policy import USUAL_RISK
from orchestrator.cost.uncertainty import pairs_of
from orchestrator.engines import ENGINES
from orchestrator.errors import InputError, NoPlanError
from orchestrator.job import ContainerOptions, SlurmOptions
from orchestrator.key import count, is_structured, options_of, parse, share, shown
from orchestrator.planning import Planner, planned
from orchestrator.recipe import KEYS, Settings, check_no_question
from orchestrator.recipe.cluster_fields import cluster_field
from orchestrator.recipe.clusters import read_cluster, read_named, stored
from orchestrator.recipe.keys import OPEN_GROUPS, name_or_mapping
from orchestrator.recipe.read import check_key, key_and_value
from orchestrator.report.comparison import Row, sweep_table
from orchestrator.report.text import PIPE_WIDTH, as_text, choice, layer_counts
from orchestrator.strategy.layerwise import NAME as LAYERWISE
from orchestrator.values import Printed, Value

MOST_POINTS: Final = 2000
"""Combinations of a sweep; more are a slip of the keyboard: a search takes a quarter of a second to some seconds."""
READ_AS_ONE: Final = (None, count, share, name_or_mapping)
"""Readers of keys whose value has no comma of its own."""

Load = Callable[[Mapping[str, Any]], Settings]
"""Settings of the keys of a command with these over them, by full name. Raises InputError."""


class Point(Value, frozen=True, kw_only=True):
    """One combination: its values of the keys that vary, and its plan, or why there is none."""

    keys: dict[str, str]
    answer: Answer | None = None
    why: str = ""

    def summary(self) -> dict[str, Any]:
        """The combination as JSON has it."""
        return {"keys": self.keys, **({"why": self.why} if self.answer is None else self.answer.summary())}


class Sweep(Printed, frozen=True, kw_only=True):
    """The answers at all combinations, in the order asked."""

    points: tuple[Point, ...]
    left: int = 0
    """Combinations that were not planned for: the user interrupted it."""

    @property
    def front(self) -> tuple[Point, ...]:
        """The points that no other one of them beats in training time, GPU-hours, cost and the chance of not fitting together by more than
        prices can tell; each of the rest is beaten by one of them."""
        answers = [point.answer for point in self.points if point.answer is not None]
        priced = all(answer.cost is not None for answer in answers)
        planned = [(point, figures(point.answer, priced=priced)) for point in self.points if point.answer is not None]
        margin = max((pairs_of(answer.plan.model).half for answer in answers), default=0.0)
        kept = unbeaten([own for _, own in planned], margin)
        return tuple(point for index, (point, _) in enumerate(planned) if index in kept)

    def rows(self) -> list[Row]:
        """The rows of a table, one for each combination."""
        front = {id(point) for point in self.front}
        rows = []
        for point in self.points:
            answer = point.answer
            if answer is None:
                rows.append(Row(keys=point.keys, why=point.why))
                continue
            said, counts = f"{answer.plan.engine} {choice(answer.plan)}", layer_counts(answer.plan)
            if max(counts) - min(counts) > 1:
                said += f", {min(counts)} to {max(counts)} layers a stage"
            said += "".join(f", one node of {shared}" for shared in answer.plan.cluster.shared_nodes)
            rows.append(
                Row(keys=point.keys, plan=said, budget=answer.budget, headroom=answer.headroom, on_front=id(point) in front,
                    chance=None if answer.plan.cluster.is_cpu else answer.chance_of_not_fitting)
            )  # fmt: skip
        return rows

    def table(self) -> list[dict[str, Any]]:
        """A flat record a point, as data frames take it: its keys, then its figures with their units (Answer.summary), or `why` there is no
        plan."""
        return [
            {**{name: int(text) if text.isdecimal() else text for name, text in record.pop("keys").items()}, **record}
            for record in self.summary()
        ]

    def __repr__(self) -> str:
        planned = sum(point.answer is not None for point in self.points)
        return f"<Sweep of {len(self.points)} points, {planned} with a plan>"

    def __str__(self) -> str:
        """The table that the command prints."""
        return as_text(sweep_table(list(self.points[0].keys), self.rows()), PIPE_WIDTH)

    def summary(self) -> list[dict[str, Any]]:
        """The sweep as JSON has it, one entry for each combination."""
        front = {id(point) for point in self.front}
        return [{**point.summary(), "on_front": id(point) in front} for point in self.points]


def figures(answer: Answer, *, priced: bool = True) -> tuple[float, ...]:
    """What a user weighs, the less the better: seconds of the training, GPU-hours, cost (0 where not every point has a price), and the
    chance of running out of memory where it is more than usual. Memory that is free beyond that makes no plan better."""
    of, is_cpu = answer.budget, answer.plan.cluster.is_cpu
    return (
        of.whole_s,
        of.gpu_hours,
        (of.cost or 0.0) if priced else 0.0,
        USUAL_RISK if is_cpu else max(USUAL_RISK, answer.chance_of_not_fitting),
    )


def beats(one: Sequence[float], other: Sequence[float], margin: float = 0.0) -> bool:
    """Whether the first is better in something by more than the share `margin`, and worse in nothing by more than that.

    >>> beats((1, 2), (1, 3)), beats((1, 2), (1, 2)), beats((0, 3), (1, 2)), beats((1, 2), (1, 2.05), 0.03), beats((1, 2), (0.99, 4), 0.03)
    (True, False, False, False, True)
    """
    pairs = list(zip(one, other, strict=True))
    return all(a * (1 - margin) <= b for a, b in pairs) and any(a < b * (1 - margin) for a, b in pairs)


def unbeaten(rows: Sequence[Sequence[float]], margin: float) -> set[int]:
    """Indices of rows of which none beats another, and of which one beats each row that is left out: what is beaten by such a row alone as
    is beaten itself stays.

    >>> sorted(unbeaten([(8, 1.0), (4, 1.03), (2, 1.06)], 0.04))
    [0, 2]
    """
    left, kept = [*range(len(rows))], set()
    while left:
        # Where each is beaten by another, in a circle, the first stays.
        one = next((index for index in left if not any(beats(rows[other], rows[index], margin) for other in left)), left[0])
        kept.add(one)
        left = [index for index in left if index != one and not beats(rows[one], rows[index], margin)]
    return kept


def takes_a_list(name: str) -> bool:
    """Whether a comma in the value of this key divides values of a sweep: not where the value has commas of its own, and not where no
    plan depends on it.

    >>> takes_a_list("gpus"), takes_a_list("cluster.levels.nvlink.bandwidth"), takes_a_list("train.betas"), takes_a_list("slurm.nodelist")
    (True, True, False, False)
    """
    key = KEYS.get(name)
    if key is None:
        group = OPEN_GROUPS.get(name.partition(".")[0])
        return group is not None and group.read is cluster_field
    several = is_structured(key.type) or any(typing.get_origin(option) is tuple for option in options_of(key.type))
    return key.read in READ_AS_ONE and not several and key.owner not in (SlurmOptions, ContainerOptions)


def varied(words: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """(words with one value, values by key of the others). Raises InputError.

    >>> varied(["recipe=gpt_tiny", "gpus=8,16"])
    (['recipe=gpt_tiny'], {'gpus': ['8', '16']})
    """
    plain: list[str] = []
    lists: dict[str, list[str]] = {}
    names = [key_and_value(word)[0] for word in words]
    for word in words:
        name, text = key_and_value(word)
        check_key(name, text)
        values = [value.strip() for value in text.split(",")]
        if len(values) == 1 or not takes_a_list(name):
            plain.append(word)
            continue
        if names.count(name) > 1:
            raise InputError(name, shown(text), "is given twice")
        if "" in values or len(set(values)) < len(values):
            raise InputError(name, shown(text), "has a value twice, or none between two commas")
        for value in values if name in KEYS else ():
            parse(KEYS[name], value)  # what is no value of the key at all is no row of the table either
        lists[name] = values
    points = 1
    for values in lists.values():
        points *= len(values)
    if points > MOST_POINTS:
        raise InputError(
            next(iter(lists)),
            shown(",".join(next(iter(lists.values())))),
            f"makes {points:,} points with the others; at most {MOST_POINTS:,}",
        )
    return plain, lists


def _said(keys: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in keys.items())


def grid(lists: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    """Every combination, the last key fastest.

    >>> grid({"a": ["1", "2"], "b": ["x"]})
    [{'a': '1', 'b': 'x'}, {'a': '2', 'b': 'x'}]
    """
    return [dict(zip(lists, values, strict=True)) for values in product(*lists.values())]


def point(load: Load, keys: Mapping[str, str]) -> Point:
    """The plan of one combination, or what makes it impossible, which the point says."""
    try:
        settings = load(keys)
        settings, found = planned(settings, Planner.saved if settings.plan is not None else Planner.fastest)
    except (InputError, NoPlanError) as error:
        return Point(keys=dict(keys), why=str(error))
    return Point(keys=dict(keys), answer=Answer(settings=settings, found=found))


def _engine(name: str) -> None:
    if name not in (known := ["auto", *ENGINES]):
        why = "is planned by python -m orchestrator.run" if name == LAYERWISE else "is not known"
        raise InputError("engine", shown(name), why, known)


NAMED: Final[Mapping[str, Callable[[str], object]]] = {
    "recipe": lambda name: read_named("recipe", name, "profiles" if name in stored("profiles") else "models"),
    "cluster": read_cluster,
    "engine": _engine,
}
"""Keys whose values are names, and what raises InputError for one that nobody knows."""


def check_names(key: str, names: Sequence[str]) -> None:
    """Raises InputError for all of these names that nobody knows: each is a slip, and no row without a plan, which a night of searches
    would end with."""
    refused: dict[str, InputError] = {}
    for name in names:
        try:
            NAMED[key](name)
        except InputError as error:
            refused[name] = error
    if refused:
        whys = [f"{name}: {error.why}" if len(refused) > 1 else error.why for name, error in refused.items()]
        choices = next((error.choices for error in refused.values() if error.choices), [])
        raise InputError(key, ",".join(refused), "; ".join(whys), choices)


def sweep(
    load: Load, lists: Mapping[str, Sequence[str]], progress: Callable[[int, int], None] | None = None, *, partial: bool = False
) -> Sweep:
    """The plans of all combinations; `partial`: on Ctrl-C those before it. `progress` is told how many are done, and of how many. Raises
    InputError, also for a question (target.*, largest=), and NoPlanError where none has a plan."""
    for name in NAMED.keys() & lists:
        check_names(name, lists[name])
    asked = grid(lists)
    points: list[Point] = []
    for done, keys in enumerate(asked):
        if progress is not None:
            progress(done, len(asked))
        try:
            points.append(point(load, keys))
        except KeyboardInterrupt:
            if not partial or not any(one.answer for one in points):
                raise
            return Sweep(points=tuple(points), left=len(asked) - done)
        if points[-1].answer is not None and points[-1].answer.settings.verbose:
            raise InputError("verbose", "true", "is for the screen of one plan: plan, run or audit")
        if (answer := points[-1].answer) is not None:
            check_no_question(answer.settings)
    if not any(one.answer for one in points):
        check_no_question(load(asked[0]))  # a slip in a key that does not vary is said as one
        raise NoPlanError(f"none of {len(points)} combinations has a plan; {_said(asked[0])}: {points[0].why}")
    return Sweep(points=tuple(points))
