"""The paper's workloads on 8 TITAN RTX: our layer-wise plan against the authors', both priced by the same measured profile.

    python tests/benchmarks/galvatron_cells.py PATH/authors_search_results.csv

The file has what the search of Galvatron's VLDB 2023 artifact finds (columns model, search, mem_GB, opt_bsz, pred_throughput_sps, pp,
step_s, plan_per_stage; a strategy is pp-tp-dp, `f` sharded data parallelism). At the authors' batch size; their plan at whichever number of
micro-batches suits it best, since the file does not say theirs. Their space has no recompute; ours has it. Which ranks an axis takes
(`*`) is not told apart: one network level here.
"""

from __future__ import annotations

import csv
import re
import sys
import time
from itertools import pairwise
from math import inf

from orchestrator.cost.calibration import datasheet
from orchestrator.cost.price import CostModel
from orchestrator.detect import Machine, machine
from orchestrator.errors import NoPlanError
from orchestrator.model.spec import ModelSpec
from orchestrator.recipe import load
from orchestrator.search.layerwise import Outer, ProfilePrices, Way, layerwise, plan_price, stage_price
from orchestrator.strategy.layerwise import BEHAVIOUR, NAME, LayerChoice
from orchestrator.strategy.pins import MemoryLimit
from orchestrator.strategy.tree import divisors
from orchestrator.units import GIB

RECIPES = {
    "bert32": "bert_huge_32_measured",
    "bert48": "bert_huge_48_measured",
    "t5_32": "t5_large_32_measured",
    "t5_48": "t5_large_48_measured",
}
STRATEGY = re.compile(r"(\d+)-(\d+)\*?-(\d+)\*?(f?)")
MEMORY_STEPS = (8, 12, 16, 20)


def prices_of(recipe: str, here: Machine) -> ProfilePrices:
    settings = load([f"recipe={recipe}"], here, [NAME])
    assert settings.profile is not None
    model = ModelSpec(architecture=settings.architecture, seq_length=settings.training.seq_length, runs=())
    costs = CostModel(model, settings.training, settings.cluster, BEHAVIOUR, datasheet(settings.cluster, BEHAVIOUR))
    return ProfilePrices(settings.profile, costs)


def stages_of(text: str, pp: int, layers: int) -> list[list[LayerChoice]]:
    """The layers' choices by stage. The file cuts long plans off: what is missing is as the last that is there, the stages even."""
    if "x[" in text:
        stage = [choice(one) for count, one in re.findall(r"(\d+)x\[([^\]]+)\]", text) for _ in range(int(count))]
        return [stage] * pp
    stages = [[choice(one) for one in part.split(",") if STRATEGY.search(one)] for part in text.split("||")]
    if sum(map(len, stages)) == layers:
        return stages
    flat = [one for part in stages for one in part]
    flat += [flat[-1]] * (layers - len(flat))
    borders = [layers * p // pp for p in range(pp + 1)]
    return [flat[a:b] for a, b in pairwise(borders)]


def choice(text: str) -> LayerChoice:
    match = STRATEGY.search(text)
    assert match is not None, text
    return LayerChoice(tp=int(match.group(2)), zero3=match.group(4) == "f")


def authors_time(prices: ProfilePrices, pp: int, batch: int, stages: list[list[LayerChoice]], usable: float) -> float:
    """Seconds of their plan at its best number of micro-batches; infinite where it fits with none."""
    kinds = [kind for kind, count in prices.runs for _ in range(count)]
    best = inf
    for m in divisors(batch):
        outer = Outer(pp, m, batch // m, None)
        ways = {kind: {way.choice: way for way in prices.ways(kind, outer)} for kind, _ in prices.runs}
        offset, costs = 0, []
        for index, layers in enumerate(stages):
            names = kinds[offset : offset + len(layers)]
            offset += len(layers)
            blocks: list[tuple[str, Way, int]] = []
            for kind, one in zip(names, layers, strict=True):
                if one in ways[kind]:
                    blocks.append((kind, ways[kind][one], 1))
            if len(blocks) == len(layers):
                costs.append(stage_price(prices, outer, index, blocks))
        if len(costs) == len(stages) and max(cost.peak_bytes for cost in costs) <= usable:
            best = min(best, plan_price(prices, outer, costs))
    return best


def main() -> None:
    here = machine()
    with open(sys.argv[1]) as file:
        rows = [row for row in csv.DictReader(file) if row["search"] == "full"]
    heads = f"{'model':<8}{'GB':>4}{'batch':>7}{'authors say':>13}{'theirs here':>13}{'ours':>10}{'samples/s':>11}{'faster':>9}{'CPU s':>7}"
    print(f"{heads}  ours")
    for row in rows:
        prices = prices_of(RECIPES[row["model"]], here)
        batch, pp, memory = int(row["opt_bsz"]), int(row["pp"]), int(row["mem_GB"])
        limit = MemoryLimit(limit=memory * GIB, reserve=0)
        layers = sum(count for _, count in prices.runs)
        theirs = authors_time(prices, pp, batch, stages_of(row["plan_per_stage"], pp, layers), limit.usable) if pp > 0 else inf
        started = time.process_time()
        try:
            ours = layerwise(prices, batch, limit).plan
            seconds = ours.step_time_s
            used = f"pp={ours.pp} m={ours.num_microbatches} " + " | ".join(
                ", ".join(f"{run.count}x{run.choice.label()}" for run in stage.runs) for stage in ours.stages[:2]
            )
        except NoPlanError:
            seconds, used = inf, "no plan fits"
        spent = time.process_time() - started
        said = f"{float(row['step_s']):.3f} s" if pp > 0 else "no plan"
        here_s = f"{theirs:.3f} s" if theirs < inf else "doesn't fit" if pp > 0 else "-"
        faster = f"{100 * (theirs / seconds - 1):+.1f}%" if theirs < inf and seconds < inf else "-"
        cell = f"{row['model']:<8}{memory:>4}{batch:>7}{said:>13}{here_s:>13}"
        print(f"{cell}{seconds:>10.3f}{batch / seconds:>11.2f}{faster:>9}{spent:>7.1f}  {used[:90]}", flush=True)


if __name__ == "__main__":
    main()
