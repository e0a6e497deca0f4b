"""A layer-wise plan beside an engine's: speeds are samples a second, whatever the two batches are."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from report_plans import PLAN

from orchestrator.report.layerwise import layerwise_table
from orchestrator.report.text import as_text
from orchestrator.strategy.layerwise import ChosenRun, LayerChoice, LayerwisePlan, LayerwiseStage
from orchestrator.units import GIB

STAGE = LayerwiseStage(
    runs=(ChosenRun(kind="decoder", count=3, choice=LayerChoice(tp=2)), ChosenRun(kind="decoder", count=1, choice=LayerChoice(zero3=True))),
    forward_s=0.01, backward_s=0.02, exposed_s=0.0, optimizer_s=0.0, peak_bytes=3 * GIB,
)  # fmt: skip
CHOSEN = LayerwisePlan(
    world_size=8, pp=2, global_batch_size=64, num_microbatches=16, stages=(STAGE, STAGE), step_time_s=1.0, peak_memory_bytes=3 * GIB,
    sequence_parallel=True,
)  # fmt: skip


@pytest.mark.parametrize(("seconds", "gain"), [(1.0, "+50.0%"), (1.5, "+0.0%"), (3.0, "-50.0%")])
def test_what_it_would_add_is_the_ratio_of_samples_a_second(seconds: float, gain: str) -> None:
    """The engine's plan: 512 samples in 12 s; this one's: 64 in `seconds`, as many in 1.5."""
    text = as_text(layerwise_table(replace(CHOSEN, step_time_s=seconds), PLAN))
    assert f"what a layer-wise runtime would add: {gain} speed" in text
    assert f"{64 / seconds:,.2f} samples/s" in text
    assert "no interval: no run of such a plan was measured" in text.replace("\n", " ")


def test_its_shape_is_said() -> None:
    text = [" ".join(line.split()) for line in as_text(layerwise_table(CHOSEN, None)).splitlines()]
    assert "pp 2, 4 ranks a stage, 16 micro-batches of 4 samples" in text
    assert "1 3 x decoder tp=2; 1 x decoder tp=1 zero3 10 ms 20 ms 3.0 GiB" in text
    assert "best engine plan: there is none" in text
    assert "best engine plan: there is none" in as_text(layerwise_table(CHOSEN, replace(PLAN, predicted=None)))


def test_what_is_not_proven_says_how_much_faster_another_may_be() -> None:
    assert "proven" not in as_text(layerwise_table(CHOSEN, PLAN))
    assert "\nproven the fastest of its space" in as_text(layerwise_table(CHOSEN, PLAN, 1.0))
    assert "not proven the fastest of its space: another plan may be up to 10.0% faster" in as_text(layerwise_table(CHOSEN, PLAN, 0.9))
