"""What searches may take, counted: calls of what is dear, and of all functions together. Ceilings are a few per cent above what was taken
when they were written; a search that takes less may lower them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import CodeType, FrameType

import pytest
from layerwise_instances import medium_of
from test_layerwise import measured

from orchestrator import detect, planning, recipe
from orchestrator.engines import ENGINES
from orchestrator.search.layerwise import layerwise
from orchestrator.search.planner import search
from orchestrator.strategy.pins import MemoryLimit
from orchestrator.units import MIB

ROOMS = ("/orchestrator/search/", "/orchestrator/cost/", "/orchestrator/strategy/")
EVERYTHING = "calls"


def calls(work: Callable[[], object]) -> Counter[str]:
    """Of functions with a name in these rooms, by class and name; and of all together."""
    seen: dict[CodeType, int] = {}

    def see(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            seen[frame.f_code] = seen.get(frame.f_code, 0) + 1

    sys.setprofile(see)
    try:
        work()
    finally:
        sys.setprofile(None)
    found = Counter[str]()
    for code, times in seen.items():
        if code.co_name[0] != "<" and any(room in code.co_filename for room in ROOMS):
            found[code.co_qualname] += times
            found[EVERYTHING] += times
    return found


PLANNED: dict[tuple[str, ...], dict[str, int]] = {
    ("recipe=llama3_8b", "gpus=8", "engine=megatron", "pin.tp=1"): {
        "calls": 121_000, "LayerPrices.of": 274, "PassPrices._without_recompute": 50, "CostModel.stage_cost": 130,
        "StageMemory.peak_of": 1_260, "Capacity._seconds": 940, "Capacity._narrowed": 507, "Partitions._work": 320,
        "Partitions._down": 44, "finish_times": 21, "Inner.__init__": 119, "Inner.solve": 9, "Inner.bound": 107, "Inner.ways": 226,
        "Inner._peaks": 111, "Floors.leaf": 250, "Floors.group": 45, "Floors.shape": 20, "Floors.recomputed_seconds": 239,
        "memory_floor": 154, "Tree._walk": 3_240, "Tree._broken": 2_210, "_Search._slower": 199,
    },
    ("recipe=t5_large", "gpus=8"): {
        "calls": 40_600, "LayerPrices.of": 277, "PassPrices._without_recompute": 169, "CostModel.stage_cost": 28,
        "StageMemory.peak_of": 345, "Partitions._work": 42, "Partitions._down": 16, "finish_times": 10, "Inner.__init__": 20,
        "Inner.solve": 10, "Inner.bound": 20, "Inner.ways": 30, "Inner._peaks": 40, "Floors.leaf": 42, "Floors.group": 19,
        "Floors.shape": 12, "memory_floor": 20, "Tree._walk": 880, "Tree._broken": 391, "_Search._slower": 92,
    },
    ("recipe=gpt_tiny", "gpus=16"): {
        "calls": 75_400, "LayerPrices.of": 225, "PassPrices._without_recompute": 133, "CostModel.stage_cost": 171,
        "StageMemory.peak_of": 423, "Capacity._seconds": 89, "Capacity._narrowed": 193, "Partitions._work": 553,
        "Partitions._down": 140, "finish_times": 40, "Inner.__init__": 33, "Inner.solve": 38, "Inner.bound": 33, "Inner.ways": 343,
        "Inner._peaks": 163, "Floors.leaf": 62, "Floors.group": 80, "Floors.shape": 20, "Floors.recomputed_seconds": 52,
        "memory_floor": 33, "Tree._walk": 2_860, "Tree._broken": 2_020, "_Search._slower": 240,
    },
    ("recipe=llama3_8b", "gpus=24", "engine=megatron_deepspeed"): {
        "calls": 76_200, "LayerPrices.of": 259, "PassPrices._without_recompute": 143, "CostModel.stage_cost": 155,
        "StageMemory.peak_of": 725, "Capacity._seconds": 434, "Capacity._narrowed": 193, "Partitions._work": 492,
        "Partitions._down": 92, "finish_times": 27, "Inner.__init__": 44, "Inner.solve": 10, "Inner.bound": 44, "Inner.ways": 348,
        "Inner._peaks": 121, "Floors.leaf": 84, "Floors.group": 81, "Floors.shape": 10, "Floors.recomputed_seconds": 84,
        "memory_floor": 44, "Tree._walk": 2_360, "Tree._broken": 915, "_Search._slower": 321,
    },
    ("recipe=llama3_8b", "gpus=8", "engine=deepspeed"): {
        "calls": 71_200, "LayerPrices.of": 408, "PassPrices._without_recompute": 124, "CostModel.stage_cost": 80,
        "StageMemory.peak_of": 507, "Partitions._work": 118, "Partitions._down": 39, "finish_times": 21, "Inner.__init__": 222,
        "Inner.solve": 201, "Inner.bound": 96, "Inner.ways": 134, "Inner._peaks": 222, "Floors.leaf": 291, "Floors.group": 19,
        "Floors.shape": 7, "memory_floor": 248, "Tree._walk": 1_050, "Tree._broken": 594, "_Search._slower": 47,
    },
    ("recipe=deepseek_tiny", "gpus=8"): {
        "calls": 142_000, "LayerPrices.of": 483, "PassPrices._without_recompute": 217, "CostModel.stage_cost": 139,
        "StageMemory.peak_of": 334, "Capacity._seconds": 64, "Capacity._narrowed": 137, "Partitions._work": 354, "Partitions._down": 74,
        "finish_times": 25, "Inner.__init__": 26, "Inner.solve": 26, "Inner.bound": 26, "Inner.ways": 231, "Inner._peaks": 132,
        "Floors.leaf": 87, "Floors.group": 93, "Floors.shape": 38, "memory_floor": 26, "Tree._walk": 4_010, "Tree._broken": 5_500,
        "_Search._slower": 355,
    },
}  # fmt: skip
LAYERWISE: dict[tuple[str, int], dict[str, int]] = {
    ("measured", 300): {
        "calls": 19_900, "StageSolver.__init__": 83, "StageSolver._cheapest": 531, "StageSolver.fastest": 55, "StageSolver.bound": 165,
        "StageSolver._compared": 530, "Splits.known": 615, "Splits.front": 54, "Splits._lead": 615, "Splits.estimate": 16,
        "Splits.finish": 5, "_kept": 191, "stage_price": 106, "plan_price": 20, "Partitions._down": 41,
    },
    ("measured", 600): {
        "calls": 18_300, "StageSolver.__init__": 47, "StageSolver._cheapest": 331, "StageSolver.fastest": 51, "StageSolver.bound": 100,
        "StageSolver._compared": 1_170, "Splits.known": 474, "Splits.front": 44, "Splits._lead": 474, "Splits.estimate": 9,
        "Splits.finish": 3, "_kept": 311, "stage_price": 146, "plan_price": 1, "Partitions._down": 6,
    },
    ("measured", 1400): {
        "calls": 30_200, "StageSolver.__init__": 26, "StageSolver._cheapest": 276, "StageSolver.fastest": 50, "StageSolver.bound": 80,
        "StageSolver._compared": 3_980, "Splits.known": 295, "Splits.front": 11, "Splits._lead": 295, "Splits.estimate": 7,
        "Splits.finish": 3, "_kept": 824, "stage_price": 254, "plan_price": 2, "Partitions._down": 6,
    },
    ("measured", 4000): {
        "calls": 13_300, "StageSolver.__init__": 7, "StageSolver._cheapest": 76, "StageSolver.fastest": 17, "StageSolver.bound": 28,
        "StageSolver._compared": 1_970, "Splits.known": 99, "Splits.front": 5, "Splits._lead": 99, "Splits.estimate": 4,
        "Splits.finish": 2, "_kept": 396, "stage_price": 17, "plan_price": 1, "Partitions._down": 2,
    },
    ("medium", 4): {
        "calls": 8_230, "StageSolver.__init__": 23, "StageSolver._cheapest": 196, "StageSolver.fastest": 11, "StageSolver.bound": 89,
        "StageSolver._compared": 58, "Splits.known": 264, "Splits.front": 25, "Splits._lead": 264, "Splits.estimate": 2,
        "Splits.finish": 2, "_kept": 28, "stage_price": 11, "plan_price": 1, "Partitions._down": 5,
    },
}  # fmt: skip


@pytest.mark.parametrize("words", PLANNED, ids=" ".join)
def test_a_search_takes_no_more_than_that(words: tuple[str, ...]) -> None:
    """Of hundreds of outer choices few are priced layer by layer, fewer solved, and a few dozen partitions simulated."""
    question = planning.question(recipe.load(list(words), detect.machine(), list(ENGINES)))
    took = calls(lambda: search(question.workload, question.planned, question.asked))
    assert {name: took[name] for name, most in PLANNED[words].items() if took[name] > most} == {}


@pytest.mark.parametrize(("of", "size"), LAYERWISE)
def test_a_layer_wise_search_takes_no_more_than_that(of: str, size: int) -> None:
    """Of all stages that could be part of a plan few are solved, and few prices of a byte tried for each."""
    if of == "measured":
        prices, batch, limit, pp = measured(8, 32), 32, MemoryLimit(limit=size * MIB, reserve=0), None
    else:
        pp = size
        prices, batch, limit = medium_of({1: 0, 2: 1, 4: 0}[pp], pp)  # type: ignore[assignment]
    took = calls(lambda: layerwise(prices, batch, limit, pp=pp))
    assert {name: took[name] for name, most in LAYERWISE[of, size].items() if took[name] > most} == {}
