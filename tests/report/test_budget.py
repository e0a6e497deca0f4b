"""What a training takes, in the units that people use."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from report_plans import PLAN

from orchestrator.hardware.catalog import GPUS, POWER_W
from orchestrator.hardware.spec import Part
from orchestrator.report.budget import Budget, budget, budget_text, format_time

UNITS = {"s": 1, "minutes": 60, "hours": 3600, "days": 86400}
ONE = Budget(steps=10, tokens=1000, seconds=7200.0, num_gpus=4, power_w=None, price_per_gpu_hour=None)


@pytest.mark.parametrize("seconds", [1.0, 59.0, 60.0, 3599.0, 3600.0, 5400.0, 86400.0, 2 * 86400.0 - 60, 2 * 86400.0, 5.5 * 86400, 4e7])
def test_a_time_is_what_its_number_and_unit_say(seconds: float) -> None:
    """In the largest unit of which there is one, and days from two on."""
    number, unit = format_time(seconds).split()
    assert float(number.replace(",", "")) * UNITS[unit] == pytest.approx(seconds, rel=0.01)
    assert unit == next(name for name in ("days", "hours", "minutes", "s") if seconds >= UNITS[name] * (2 if name == "days" else 1))


def test_energy_and_cost_are_said_where_watts_and_a_price_are_known() -> None:
    assert budget_text(ONE) == "10 steps, 1K tokens: 2 hours, 8 GPU-hours"
    assert budget_text(ONE, "rank").endswith("8 rank-hours")
    for watts, said in ((100.0, ", 0.8 kWh (at the 100 W"), (124e3, ", 992 kWh"), (125e3, ", 1 MWh"), (250e3, ", 2 MWh")):
        assert said in budget_text(replace(ONE, power_w=watts))
    assert budget_text(replace(ONE, price_per_gpu_hour=2.5)).endswith(", cost 20 (at 2.5 a GPU-hour)")


def test_a_plans_budget_is_its_steps() -> None:
    found = budget(PLAN, 3.0)
    assert PLAN.predicted is not None
    assert found.seconds == PLAN.training.steps * PLAN.predicted.step_time_s
    assert found.tokens == PLAN.training.steps * 512 * 8192
    assert found.gpu_hours == pytest.approx(64 * found.seconds / 3600)
    assert found.energy_kwh == pytest.approx(0.7 * found.gpu_hours), "an H100 takes 700 W"
    assert found.cost == pytest.approx(3 * found.gpu_hours)


def test_gpus_of_several_types_take_their_mean() -> None:
    def watts(*types: tuple[str, int]) -> float | None:
        parts = tuple(Part(gpu=GPUS[name], num_gpus=many, levels=PLAN.cluster.levels) for name, many in types)
        return budget(replace(PLAN, cluster=replace(PLAN.cluster, parts=parts))).power_w

    mean = (3 * POWER_W["H100-SXM-80GB"] + POWER_W["A100-SXM-80GB"]) / 4
    assert watts(("H100-SXM-80GB", 48), ("A100-SXM-80GB", 16)) == pytest.approx(mean)
    assert watts(("H100-SXM-80GB", 48), ("cpu", 16)) is None
