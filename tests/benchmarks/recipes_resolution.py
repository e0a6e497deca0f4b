"""Were every published recipe the fastest there is, how many would a planner with our errors find within 5% of its best plan?

    PYTHONPATH=. python tests/benchmarks/recipes_resolution.py recipes=expert_recipes_bridge.csv runs=MEASUREMENTS [plans=60]

For each legal recipe of experts that is planned: so many of our best plans, one a division (degrees, chunks, micro-batch), as
many times as slow as the recipe as they are predicted to be, and none faster. Then errors are drawn for each, half of their variance common
to all plans of a recipe, and the recipe is compared with the plan that seems fastest. The errors are as large as the differences between
published runs that are divided differently are off by (`pairs` of validate's report), and half, a quarter and an eighth of that. About four
minutes of one core.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from orchestrator.calibrate.pricing import Choose
from orchestrator.commands import arguments, command, usage
from orchestrator.errors import InputError, OrchestratorError
from orchestrator.search.planner import search
from orchestrator.search.question import SearchSettings
from tests.validation import pairs, recipes
from tests.validation.__main__ import price_all
from tests.validation.pricing import named
from tests.validation.recovery import CLOSE
from tests.validation.rows import SkipError
from tests.validation.tables import load

KEYS = ("recipes", "runs", "plans")
DRAWS = 400
SEED = 1
COMMON = 0.5
"""Of an error's variance: what all plans of a model on a cluster share."""
NORMAL_MEDIAN = 0.6745
"""Of the absolute value of a standard normal variable."""
RIVALS = (3, 10, 60)
"""How many of the plans count as different ones: neighbours are off alike."""


def rivals(row: dict[str, str], choose: Choose, plans: int) -> list[float] | None:
    """How many times the recipe's predicted time our best plans take, fastest first; None where it is not planned."""
    try:
        asked = recipes.asked(row, choose)
        found = search(asked.run.workload, [asked.engine], SearchSettings(top_k=plans, pins=asked.dispatched))
    except (OrchestratorError, SkipError):
        return None
    if asked.illegal:
        return None
    seconds: dict[object, float] = {}
    for plan in (found.plan, *found.alternatives):
        if plan.predicted is not None:
            took, divided = plan.predicted.step_time_s, recipes.division(plan.candidate)
            seconds[divided] = min(took, seconds.get(divided, took))
    return sorted(took / asked.price.step_time_s for took in seconds.values())


def seems_close(ratios: Sequence[float], deviation: float, draw: random.Random) -> bool:
    """Whether the recipe, which no plan is truly faster than, is within 5% of the plan that seems fastest."""
    common = draw.gauss(0, deviation * math.sqrt(COMMON))
    own_part = deviation * math.sqrt(1 - COMMON)
    return CLOSE * min(max(1.0, ratio) * math.exp(common + draw.gauss(0, own_part)) for ratio in ratios) >= 1


def main(words: Sequence[str]) -> int:
    """Exit status."""
    return command(words, lambda: usage(__doc__), run)


def run(words: Sequence[str]) -> None:
    """The command. Raises InputError."""
    given = arguments(words, KEYS, required=("recipes", "runs"))
    plans = given.get("plans", "60")
    if not plans.isdecimal() or not int(plans):
        raise InputError("plans", plans, "must be a whole number above 0")
    choose, rows = named(None), recipes.read(given["recipes"])
    priced, _ = price_all(load(Path(given["runs"]))[0], choose)
    median = pairs.report(priced)["experts"]["divided"]["median"]
    found = [rivals(row, choose, int(plans)) for row in rows if row.get("ep") and row.get("etp")]
    judged = [ratios for ratios in found if ratios]
    if median is None:
        raise InputError("runs", given["runs"], "holds no two runs of one model of experts that are divided differently")
    if not judged:
        raise InputError("recipes", given["recipes"], "holds no legal recipe of experts")
    within = sum(CLOSE * ratios[0] >= 1 for ratios in judged)
    print(f"{len(judged)} legal recipes of experts; {within / len(judged):.0%} are within 5% of our best plan.")
    print(f"Differences between published runs are off by {median:.1%} in the median.")
    for off in (median, median / 2, median / 4, median / 8):
        draw = random.Random(SEED)
        shares = []
        for many in RIVALS:
            close = sum(seems_close(ratios[:many], off / NORMAL_MEDIAN, draw) for ratios in judged for _ in range(DRAWS))
            shares.append(f"{close / DRAWS / len(judged):.0%} ({many} rivals)")
        print(f"  off by {off:.1%}: {', '.join(shares)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
