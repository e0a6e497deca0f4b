"""What is said after a run, of rows made by hand: a pipeline of two stages with two ranks each."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from orchestrator import recipe
from orchestrator.detect import Machine
from orchestrator.engines import ENGINES
from orchestrator.planning import cost_of, fastest
from orchestrator.report import after
from orchestrator.report.text import as_text
from orchestrator.search.planner import reprice

SETTINGS = recipe.load(
    ["recipe=gpt_tiny", "gpus=4", "cluster=cpu", "engine=megatron", "pin.tp=2", "pin.pp=2", "calibration=datasheet"], Machine(), [*ENGINES]
)
PLAN = fastest(SETTINGS).plan
COST = cost_of(PLAN, SETTINGS)


def group(step: int, ranks: tuple[int, ...], operation: str, seconds: float, waiting: float = 0.0) -> dict[str, Any]:
    return {"step": step, "phase": "passes", "ranks": ranks, "operation": operation, "count": 10, "bytes": 10 * 2**19,
            "transfer_s": seconds, "waiting_s": waiting}  # fmt: skip


def rows(compute: dict[int, float] | None = None, links: dict[tuple[int, ...], float] | None = None) -> list[dict[str, Any]]:
    """Of ranks that compute 100 ms in a step of 200, or as `compute` says, and wait for the rest; groups with 10 ms of transfers each."""
    found = []
    for rank in range(4):
        own = (compute or {}).get(rank, 0.1)
        near, far = ((0, 1) if rank < 2 else (2, 3)), (rank % 2, rank % 2 + 2)
        tp, pp = ((links or {}).get(pair, 0.01) for pair in (near, far))
        traffic = [
            one
            for step in range(2)
            for one in (group(step, near, "all_reduce", tp), group(step, far, "p2p", pp, 0.5 - own - tp - pp - 0.02))
        ]
        phases = [{"data": 0.01, "passes": 0.48, "update": 0.01, "agree": 0.0}] * 2
        found.append({"rank": rank, "host": f"n{rank // 2}", "steps": [4, 5], "microbatches": 4, "peak_memory_bytes": 0,
                      "phases": phases, "traffic": traffic})  # fmt: skip
    return found


def said(*given: Any) -> after.After:
    found = after.after(PLAN, COST, after.read(rows(*given)))
    assert found is not None
    return found


def test_the_step_is_divided_by_cause() -> None:
    found = said()
    measured = {name: pair[1] for name, pair in found.causes.items()}
    wanted = {"compute": 0.1, "tp": 0.01, "pp": 0.01, "waiting": 0.36, "optimizer": 0.01, "data": 0.01}
    assert measured == pytest.approx(wanted)
    assert sum(measured.values()) == pytest.approx(0.5)
    assert PLAN.predicted is not None
    assert sum(pair[0] for pair in found.causes.values()) == pytest.approx(PLAN.predicted.step_time_s)
    lines = found.lines()
    assert "measured 500 ms (steps 4 and 5, timers of 4 ranks); most by bubble, waiting +" in lines[0]
    assert lines[1:] == ["no rank and no link stands out"]
    assert "bubble, waiting" in as_text(after.after_table(found))


def test_a_rank_that_computes_longer_than_its_like_is_named_with_its_node() -> None:
    found = said({3: 0.4})
    assert found.lines()[1:] == [
        "slow rank: rank 3 on n1 computes 4.0 times as long as its like, 300 ms more in each step; the others wait for it"
    ]
    assert not found.constants


def test_a_rank_that_is_slow_in_one_step_alone_is_not_named() -> None:
    given = rows({3: 0.4})
    for one in given[3]["traffic"]:
        if one["step"] == 1 and one["operation"] == "p2p":
            one["waiting_s"] += 0.3
    found = after.after(PLAN, COST, after.read(given))
    assert found is not None
    assert not found.slow_ranks


def test_a_link_that_takes_longer_than_the_others_of_its_axis_is_named() -> None:
    found = said(None, {(0, 1): 0.1})
    (line,) = found.lines()[1:]
    assert line == "slow link: tp traffic between ranks 0 and 1 on n0 takes 10.0 times as long as others', 90 ms more in each step"


def test_what_a_run_suggests_predicts_its_computing_and_traffic() -> None:
    found = said()
    file = after.calibration_file(PLAN, COST, found)
    again = reprice(PLAN, COST.traits, file.calibration(COST.calibration))
    assert again.predicted is not None
    other = after.predicted_causes(again, COST.calibration.step_overhead_s)
    alone = sum(after.alone_seconds(again, COST, stage) for stage in range(2)) * PLAN.num_microbatches / 2
    factor = 0.1 / alone  # measured over predicted computing of all ranks
    assert other["compute"] == pytest.approx(found.causes["compute"][0] * factor, rel=0.02)
    assert found.suggests().startswith("gemm_efficiency ")
    assert after.SAID[0] in found.constants


def test_axes_are_told_by_the_ranks_that_a_group_joins() -> None:
    wide = replace(PLAN, tp=1, pp=2, dp=2, world_size=4)

    def axis(ranks: Any, operation: str = "all_reduce") -> str:
        return after.axis_of(wide, after.read([rows()[0] | {"traffic": [group(0, ranks, operation, 0.01)]}])[0].traffic[0])

    assert [axis((0, 1)), axis((0, 2)), axis((2, 0), "p2p"), axis((0, 1, 2, 3))] == ["dp", "pp", "pp", "other"]
    assert axis({"first": 0, "size": 4, "stride": 1}) == "other"


def test_rows_of_some_ranks_alone_say_nothing() -> None:
    assert after.after(PLAN, COST, after.read(rows()[:3])) is None
    assert after.after(PLAN, COST, ()) is None
