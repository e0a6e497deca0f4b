"""How far a difference between two predictions can be trusted: pairs of published runs of one training on the same GPUs.

Two runs that are divided differently (degrees, chunks, micro-batch) say how much longer one took; the prediction says so too. Two runs of
one configuration in different releases, or on different days, say how far measurements themselves agree: no price can tell plans apart that
are nearer than this. Runs of one source and engine alone are held beside each other.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import combinations
from typing import Any, Final, NamedTuple

from tests.validation.metrics import Priced
from tests.validation.recipes import division
from tests.validation.recovery import question_of
from tests.validation.runs import Run

ENGINE: Final = "nemo"
"""The measured engine whose runs are those of Megatron's plans (NeMo, Megatron-Bridge, MLPerf)."""
CLEAR: Final = 0.05
"""A difference that is measured as more than this is one that a plan ought to have named."""


def question(run: Run) -> Hashable:
    """What was trained, on what, by whom."""
    return run.table, run.engine.name, run.sweep_id, question_of(run)


def configuration(run: Run) -> Hashable:
    """What a source says of how it ran, as one key."""
    return question(run), run.candidate, run.stages, run.training, run.experts


class Beside(NamedTuple):
    """Two measured runs: how much longer one took, measured and predicted, as logarithms of the ratios."""

    measured: float
    predicted: float
    divided_alike: bool


def together(rows: Iterable[Priced], by: Callable[[Run], Hashable]) -> Iterator[Beside]:
    """Every two rows with a measured time that are alike in this."""
    groups: dict[Hashable, list[tuple[float, float, Hashable]]] = defaultdict(list)
    for row in rows:
        if row.run.time_s is not None:
            groups[by(row.run)].append((row.run.time_s, row.time_s, division(row.run.candidate)))
    for group in groups.values():
        for one, other in combinations(group, 2):
            yield Beside(math.log(one[0] / other[0]), math.log(one[1] / other[1]), one[2] == other[2])


def middle(values: Sequence[float], share: float) -> float | None:
    """The value that this share of them stays below; None: there are none.

    >>> middle([0.1, 0.2, 0.4], 0.5), middle([], 0.5)
    (0.2, None)
    """
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else None


def figures(rows: Sequence[Priced]) -> dict[str, Any]:
    """`divided` and `again` of these rows: pairs, and by how much they are off in the median and in nine of ten, as shares. `clear_named`:
    of pairs that differ by more than 5% those where the prediction names the faster one."""
    divided = [pair for pair in together(rows, question) if not pair.divided_alike]
    errors = [abs(pair.predicted - pair.measured) for pair in divided]
    clear = [pair.predicted * pair.measured > 0 for pair in divided if abs(pair.measured) > math.log1p(CLEAR)]
    again = [abs(pair.measured) for pair in together(rows, configuration)]
    return {
        "divided": {
            "pairs": len(errors),
            "median": middle(errors, 0.5),
            "nine_of_ten": middle(errors, 0.9),
            "clear": len(clear),
            "clear_named": sum(clear) / len(clear) if clear else None,
        },
        "again": {"pairs": len(again), "median": middle(again, 0.5), "nine_of_ten": middle(again, 0.9)},
    }


def report(rows: Sequence[Priced]) -> dict[str, Any]:
    """`pairs` of the report: of dense models, and of mixtures of experts."""
    planned = [row for row in rows if row.run.engine.name == ENGINE and row.run.training.lora is None]
    kinds = {"dense": "dense", "experts": "moe"}
    return {name: figures([row for row in planned if row.run.kind == kind]) for name, kind in kinds.items()}


def real_routing(rows: Sequence[Priced]) -> dict[str, dict[str, Any]]:
    """`real_routing` of the report: how far off runs are whose routers nothing forced to be even, on tuned stacks, where what else they
    wait for is known. `runs`: each. `configurations`: those of one configuration as one, their times' geometric mean; a card that is
    measured again is no other training."""
    real = [
        row
        for row in rows
        if row.run.experts.balanced is False
        and row.run.training.lora is None
        and row.run.time_s is not None
        and row.run.cluster.stack == "tuned"
    ]
    alike: dict[Hashable, list[float]] = defaultdict(list)
    for row in real:
        alike[configuration(row.run)].append(math.log(row.time_s / row.run.time_s) if row.run.time_s else 0.0)
    off = {
        "runs": [abs(math.expm1(each)) for ratios in alike.values() for each in ratios],
        "configurations": [abs(math.expm1(sum(ratios) / len(ratios))) for ratios in alike.values()],
    }
    return {
        name: {
            "count": len(errors),
            "median": middle(errors, 0.5),
            "within_20": sum(e <= 0.2 for e in errors) / len(errors) if errors else None,
        }
        for name, errors in off.items()
    }
