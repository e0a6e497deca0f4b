"""The plan of every shipped recipe at 8, 64, 512 and 4,096 GPUs: what a change of the search must leave as it is, or make faster.

    python tests/benchmarks/shipped_plans.py [out=FILE] [against=FILE] [recipes=NAME,NAME] [gpus=8,64]

A line for each recipe and number of GPUs, separated by tabs: recipe, GPUs, seconds of a step (an error's first words where there is no
plan), the choice, its stages (layers x recompute of each), seconds that no plan undercuts. Recipes of measured layers are planned layer by
layer, at the GPUs of their own cluster. `against`: an earlier run's output; what differs is listed, and the exit status is 1 where a plan
got slower by more than rounding. With PYTHONPATH=another tree the same is asked of that tree.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from orchestrator import recipe
from orchestrator.commands import arguments, command, usage
from orchestrator.cost import calibration
from orchestrator.cost.price import CostModel
from orchestrator.detect import machine
from orchestrator.engines import ENGINES
from orchestrator.errors import OrchestratorError
from orchestrator.model.spec import ModelSpec
from orchestrator.plan import Plan
from orchestrator.planning import Planner
from orchestrator.search.layerwise import ProfilePrices, layerwise
from orchestrator.strategy.layerwise import NAME, TRAITS, LayerwisePlan
from orchestrator.strategy.workload import Workload

GPUS = (8, 64, 512, 4096)
ROUNDING = 1e-9
FOLDER = Path(__file__).parents[2] / "recipes"


def names(folder: str) -> list[str]:
    return sorted(path.stem for path in (FOLDER / folder).glob("*.yaml"))


def stages_text(plan: Plan) -> str:
    """Like "1+4none+2full | 6none+1": layers with their recompute, embedding and head as 1; chunks divided by "/"."""
    texts = []
    for stage in plan.stages:
        chunks: dict[int, list[str]] = {}
        for span in stage.layers:
            chunks.setdefault(span.chunk, []).append(str(span.count) + ("" if span.kind in ("embedding", "head") else span.recompute))
        texts.append("/".join("+".join(parts) for parts in chunks.values()))
    return " | ".join(texts)


def layerwise_text(plan: LayerwisePlan) -> str:
    return " | ".join(" + ".join(f"{run.count}x{run.kind} {run.choice.label()}" for run in stage.runs) for stage in plan.stages)


def planned(name: str, gpus: int) -> tuple[str, str, str, str]:
    """(seconds, choice, stages, seconds that no plan undercuts)."""
    try:
        settings = recipe.load([f"recipe={name}", f"gpus={gpus}", "launch=none"], machine(), [*ENGINES, NAME])
        found = Planner(settings).searched()
    except OrchestratorError as error:
        return str(error).split(":")[0], "", "", ""
    assert found.plan.predicted is not None
    least = "" if found.at_least_s is None else f"{found.at_least_s:.6g}"
    return f"{found.plan.predicted.step_time_s:.12g}", found.plan.candidate.label(), stages_text(found.plan), least


def planned_by_layer(name: str) -> tuple[str, str, str, str]:
    settings = recipe.load([f"recipe={name}", "launch=none"], machine(), [*ENGINES, NAME])
    assert settings.profile is not None
    model = ModelSpec(architecture=settings.architecture, seq_length=settings.training.seq_length, runs=())
    constants = calibration.calibrated(settings.cluster, TRAITS)
    workload = Workload(model=model, training=settings.training, cluster=settings.cluster)
    prices = ProfilePrices(settings.profile, CostModel(workload, TRAITS, constants))
    found = layerwise(prices, settings.training.global_batch_size, settings.limit.of(constants.memory_margin))
    plan = found.plan
    return f"{plan.step_time_s:.12g}", f"pp={plan.pp} m={plan.num_microbatches}", layerwise_text(plan), f"{found.at_least_s:.6g}"


def compared(before: Sequence[str], now: Sequence[str]) -> list[str]:
    """What differs, in words; what got slower begins with SLOWER."""
    old = {tuple(line.split("\t")[:2]): line.split("\t") for line in before}
    found = []
    for line in now:
        new = line.split("\t")
        was = old.get((new[0], new[1]))
        if was is None or was[2:5] == new[2:5]:
            continue
        try:
            a, b = float(was[2]), float(new[2])
            kind = "SLOWER" if b > a * (1 + ROUNDING) else "same time" if b >= a * (1 - ROUNDING) else "faster"
            found.append(f"{kind}: {new[0]} on {new[1]}: {was[2]} -> {new[2]} s ({100 * (b / a - 1):+.4f}%): {was[3]} -> {new[3]}")
        except ValueError:
            found.append(f"SLOWER: {new[0]} on {new[1]}: {was[2]} -> {new[2]}")
    return found


def main(words: Sequence[str]) -> None:
    given = arguments(words, ["out", "against", "recipes", "gpus"])
    asked = given["recipes"].split(",") if "recipes" in given else None
    gpus = [int(text) for text in given["gpus"].split(",")] if "gpus" in given else GPUS
    lines = []
    for name in names("models") + names("profiles"):
        if asked is not None and name not in asked:
            continue
        for n in (0,) if name in names("profiles") else gpus:
            started = time.process_time()
            cells = planned_by_layer(name) if n == 0 else planned(name, n)
            lines.append("\t".join((name, str(n), *cells)))
            gc.collect()
            print(f"{lines[-1][:150]}  [{time.process_time() - started:.2f} CPU s]", flush=True)
    if "out" in given:
        Path(given["out"]).write_text("\n".join(lines) + "\n", encoding="utf-8")
    if "against" in given:
        differences = compared(Path(given["against"]).read_text(encoding="utf-8").splitlines(), lines)
        print("\n".join(differences) or "the same plans")
        if any(line.startswith("SLOWER") for line in differences):
            raise OrchestratorError("some plans are slower")


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:], lambda: usage(__doc__), main))
