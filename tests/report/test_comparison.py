"""Two plans side by side: differences from the largest, columns that sum to the plans' totals, figures that follow from each other."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from report_plans import PLAN, PREDICTED, SLOWER

import orchestrator as so
from orchestrator.model.lora import Lora
from orchestrator.report.comparison import compared, comparison_tables, facts
from orchestrator.report.text import as_text, layer_counts, stage_sizes


def test_causes_stand_from_the_largest_difference_whichever_plan_is_the_slower() -> None:
    for one, other in ((PLAN, SLOWER), (SLOWER, PLAN)):
        found = compared(one, other)
        apart = {name: abs(pair[0] - pair[1]) for name, pair in found.seconds.items()}
        assert list(apart.values()) == sorted(apart.values(), reverse=True)
        assert list(apart)[:2] == ["tp_traffic", "bubble"]


def test_the_columns_sum_to_the_plans_own_steps_and_peaks() -> None:
    found = compared(PLAN, SLOWER)
    assert [sum(pair[index] for pair in found.seconds.values()) for index in (0, 1)] == pytest.approx([12.0, 13.44])
    least = replace(PLAN, predicted=replace(PREDICTED, by_stage=PREDICTED.by_stage[::-1]))
    memory = compared(PLAN, least).memory_bytes  # of the fullest stage of each, wherever it stands
    assert all(one == other for one, other in memory.values())
    assert sum(one for one, _ in memory.values()) == pytest.approx(PREDICTED.peak_memory_bytes)


def test_a_cause_that_one_plan_lacks_is_nothing_there() -> None:
    without = replace(PLAN, predicted=replace(PREDICTED, by_cause={"compute": 9.0}))
    assert compared(PLAN, without).seconds["bubble"] == (1.0, 0.0)
    assert compared(without, PLAN).seconds["bubble"] == (0.0, 1.0)


def test_differences_have_their_sign_and_rounding_errors_no_row() -> None:
    causes = {**PREDICTED.by_cause, "tp_traffic": 3.3, "bubble": 0.64, "waiting": 1e-13}
    noisy = replace(SLOWER, predicted=replace(PREDICTED, step_time_s=13.44, by_cause=causes))
    text = [" ".join(line.split()) for line in as_text(comparison_tables(compared(PLAN, noisy), ("a", "b"))).splitlines()]
    assert "step time a b difference" in text
    assert "tp traffic 1.5 s 3.3 s +1.8 s" in text
    assert "bubble 1 s 640 ms -360 ms" in text
    assert "compute 9 s 9 s" in text
    assert "total 12 s 13.4 s +1.44 s" in text
    assert not any(line.startswith("waiting") for line in text)


def test_what_is_trained_is_said_where_it_differs() -> None:
    adapted, frozen = (replace(PLAN, training=replace(PLAN.training, **more)) for more in ({"lora": Lora(rank=16, bits=4)},
                                                                                           {"freeze": ("vision",)}))  # fmt: skip
    assert facts(adapted)["trained"] == "LoRA adapters of rank 16 (all-linear, frozen weights of 4 bits)"
    rows = [" ".join(line.split()) for line in as_text(comparison_tables(compared(frozen, PLAN)), 200).splitlines()]
    assert "trained all weights but those of vision all weights" in rows
    assert "trained" not in str(compared(PLAN, SLOWER))


def test_a_plans_figures_follow_from_its_step() -> None:
    found = facts(PLAN)
    assert found["tokens_per_s"] == pytest.approx(512 * 8192 / 12.0, rel=1e-4)
    assert found["days"] * 86400 == pytest.approx(PLAN.training.steps * 12.0)
    assert found["gpu_hours"] == pytest.approx(found["days"] * 24 * 64)


def test_steps_of_other_sizes_are_compared_by_the_token() -> None:
    one, other = (so.plan(recipe="llama3_8b", gpus=16, train={"global_batch_size": size}).plan for size in (128, 256))
    found = compared(one, other)
    said = str(found)
    assert "128 sequences of 8,192" in said
    share = 100 * ((1 + found.difference) / 2 - 1)
    assert f"Its step has 2 times the tokens: {share:+.1f}% a token" in " ".join(said.split())
    assert compared(one, one).per_token_text() == ""


def test_layers_by_stage_are_said_where_stages_differ() -> None:
    """A larger micro-batch that fits by putting layers into the last stages alone is slower for that, and not for its products."""
    pins = {"tp": 8, "pp": 4, "cp": 1, "vpp": 1, "recompute": "none"}
    given = {
        "recipe": "llama3_70b",
        "gpus": 128,
        "cluster": "dgx_h100",
        "engine": "megatron",
        "train": {"global_batch_size": 512, "steps": 100, "warmup": 0},
    }
    even, uneven = (so.plan(**given, pin=pins | {"micro_batch_size": size}).plan for size in (1, 4))
    said = str(compared(even, uneven))
    row = next(line.split() for line in said.splitlines() if line.strip().startswith("layers"))
    assert row == ["layers", *stage_sizes(even).split(), *stage_sizes(uneven).split()]
    assert facts(uneven)["layers"] == stage_sizes(uneven)
    swept = str(so.sweep(**given, pin=pins, **{"pin.micro_batch_size": [1, 4]}))
    low, high = min(layer_counts(uneven)), max(layer_counts(uneven))
    assert high - low > 10
    assert f"mbs=4, {low} to {high} layers a stage" in " ".join(swept.split())


def test_what_no_step_takes_longer_for_leaves_the_difference_as_sure_as_it_was() -> None:
    """A longer training, or another learning rate, is not another kind of run."""
    given = {"recipe": "llama3_8b", "gpus": 16, "cluster": "dgx_h100", "engine": "megatron"}
    one, longer = (
        so.plan(**given, train={"steps": steps, "lr": lr, "warmup": 0}, seed=steps).plan for steps, lr in ((100, 3e-4), (200, 1e-4))
    )
    found = compared(one, longer)
    assert found.pairs is not None
    assert found.difference_90 is not None
    assert max(map(abs, found.difference_90)) < 0.3, "their own intervals are wider"
    assert compared(one, so.plan(**given, train={"steps": 100, "warmup": 0, "precision": "fp8"}).plan).pairs is None
