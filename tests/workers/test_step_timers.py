"""A slow rank and a slow link, made here on purpose, are named by what is said after a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from worker_plans import GPT, LLAMA, make_plan
from worker_pool import Pool

from orchestrator.cost.calibration import datasheet
from orchestrator.cost.price import CostModel
from orchestrator.engines import ENGINES
from orchestrator.plan import Plan, RunSettings, to_json
from orchestrator.plan.check import workload_of
from orchestrator.report import after
from orchestrator.search.planner import reprice

pytestmark = pytest.mark.engines


def trained(
    pool: Pool, corpus: str, out: Path, slow_rank: int | None = None, slow_link: tuple[int, ...] = (), seconds: float = 0.0, **fields: Any
) -> tuple[Plan, after.After, tuple[after.RankTimes, ...]]:
    """What is said of three steps of a small model."""
    plan = make_plan(fields.pop("model", GPT), steps=3, **fields)
    traits = ENGINES[plan.engine].traits(plan.cluster.software)
    cost = CostModel(workload_of(plan), traits, datasheet(plan.cluster, traits))
    plan = reprice(plan, traits, cost.calibration)
    pool.run("timed_cases.train", plan.world_size, to_json(plan), corpus, str(out), slow_rank, slow_link, seconds)
    rows = after.read([json.loads(line) for line in (out / "timers.jsonl").read_text().splitlines()])
    found = after.after(plan, cost, rows)
    assert found is not None
    assert found.steps == (2, 3)
    return plan, found, rows


@pytest.mark.parametrize(
    ("engine", "fields"),
    [
        ("megatron", {"tp": 2, "pp": 2, "zero_stage": 0}),
        pytest.param("megatron_deepspeed", {"tp": 2, "pp": 2, "zero_stage": 1}, marks=pytest.mark.full),
        pytest.param("deepspeed", {"model": LLAMA, "dp": 4, "zero_stage": 3}, marks=pytest.mark.full),
    ],
)
def test_a_rank_slowed_on_purpose_is_named(pool: Pool, corpus: str, tmp_path: Path, engine: str, fields: dict[str, Any]) -> None:
    _, found, rows = trained(pool, corpus, tmp_path / "out", slow_rank=1, seconds=0.1, engine=engine, **fields)
    assert [one.ranks for one in found.slow_ranks] == [(1,)]
    assert not found.slow_links
    assert any(line.startswith(f"slow rank: rank 1 on {rows[1].host} computes") for line in found.lines())
    assert not found.constants  # a fault is nothing to learn from
    waiting = [sum(one.waiting_s for one in row.traffic) for row in rows]
    assert waiting[1] == min(waiting)


def test_a_link_slowed_on_purpose_is_named(pool: Pool, corpus: str, tmp_path: Path) -> None:
    plan, found, rows = trained(pool, corpus, tmp_path / "out", slow_link=(2, 3), seconds=0.05, tp=2, pp=2, zero_stage=0)
    assert [(one.axis, one.ranks) for one in found.slow_links] == [("tp", (2, 3))]
    assert not found.slow_ranks
    assert any(line.startswith(f"slow link: tp traffic between ranks 2 and 3 on {rows[0].host} takes") for line in found.lines())
    stages = {after.stage_of(plan, row.rank) for row in rows}
    assert stages == {0, 1}


@pytest.mark.full
def test_a_slow_message_between_two_stages_is_named(pool: Pool, corpus: str, tmp_path: Path) -> None:
    _, found, _ = trained(pool, corpus, tmp_path / "out", slow_link=(0, 2), seconds=0.1, tp=2, pp=2, zero_stage=0)
    assert ("pp", (0, 2)) in [(one.axis, one.ranks) for one in found.slow_links]


def test_computing_transfers_and_waiting_are_the_step(pool: Pool, corpus: str, tmp_path: Path) -> None:
    plan, found, rows = trained(pool, corpus, tmp_path / "out", dp=2, zero_stage=1)
    measured = sum(pair[1] for pair in found.causes.values())
    steps = [row.step_s(step) for row in rows for step in range(2)]
    assert measured == pytest.approx(sum(steps) / len(steps), rel=1e-3)
    assert plan.predicted is not None
    assert sum(pair[0] for pair in found.causes.values()) == pytest.approx(plan.predicted.step_time_s)
    by_operation = {one.operation for row in rows for one in row.traffic if after.axis_of(plan, one) == "dp"}
    assert {"all_gather", "reduce_scatter"} <= by_operation or "all_reduce" in by_operation
    assert all(one.transfer_s == pytest.approx(other.transfer_s, abs=1e-6)
               for one, other in zip(rows[0].traffic, rows[1].traffic, strict=True))  # fmt: skip


def test_without_step_timers_nothing_is_looked_at_and_the_losses_are_the_same(pool: Pool, corpus: str, tmp_path: Path) -> None:
    plans = [make_plan(model=GPT, steps=2, dp=2, zero_stage=1, run=RunSettings(step_timers=timers)) for timers in (True, False)]
    arguments = [(to_json(plan), corpus, str(tmp_path / str(i)), None, (), 0.0) for i, plan in enumerate(plans)]
    timed, untimed = (pool.run("timed_cases.train", 2, *given) for given in arguments)
    assert timed == untimed
    assert [(tmp_path / str(i) / "timers.jsonl").exists() for i in range(2)] == [True, False]
