"""memory.risk= chooses a plan by its chance of running out of memory, and the plan command shows a safer one beside the fastest."""

from __future__ import annotations

from pathlib import Path

import pytest

import orchestrator as so
from orchestrator.__main__ import main
from orchestrator.asking.questions import safer

KEYS = {"recipe": "llama3_8b", "gpus": 16, "engine": "megatron"}


def test_a_plan_keeps_the_risk_that_is_asked_for_and_less_risk_is_never_faster() -> None:
    seconds = []
    for risk in ("30%", "5%", "1%"):
        answer = so.plan(**KEYS, memory={"risk": risk})
        assert answer.chance_of_not_fitting <= float(risk.removesuffix("%")) / 100 + 1e-9
        seconds.append(answer.step_time_s)
    assert seconds == sorted(seconds)


def test_less_memory_is_more_risk() -> None:
    answer = so.plan(**KEYS)
    near = so.plan(**KEYS, memory={"limit_gib": answer.peak_memory_bytes / 2**30 * 1.01, "reserve_gib": 0})
    assert near.chance_of_not_fitting > answer.chance_of_not_fitting or near.peak_memory_bytes < answer.peak_memory_bytes
    assert 0 < near.chance_of_not_fitting < 1


def test_the_safer_plan_stands_beside_the_fastest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "recipe=llama3_70b", "gpus=64"]) == 0
    said = capsys.readouterr().out.splitlines()
    (risk,) = [line for line in said if line.startswith("risk: ")]
    (safer,) = [line for line in said if line.startswith("safer: ")]
    assert "memory.risk=1%" in safer
    assert float(risk.split()[1].rstrip("%")) > 1


def test_the_risk_is_kept_with_the_run(tmp_path: Path) -> None:
    answer = so.plan(**KEYS, memory={"risk": "1%"})
    run = answer.write(tmp_path / "run")
    assert so.plan(recipe=str(run / "config.yaml")).plan.stages == answer.plan.stages
    assert so.plan(plan=str(run / "plan.json"), memory={"risk": "1%"}).plan.stages == answer.plan.stages


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2", "is no share"), ("0", "is no share"), ("-1%", "is no share"), ("low", "is no share"), ("", "is no share|needs|empty"),
        ("100%", "is no share"), ("1e-9", "can't be told from"), ("nan", "is no share"), ("1%%", "is no share"), ("1 %2", "is no share"),
    ],
)  # fmt: skip
def test_a_risk_that_is_none_is_one_error(text: str, message: str) -> None:
    with pytest.raises(so.InputError, match=message):
        so.plan(**KEYS, memory={"risk": text})


def test_a_risk_and_a_reserve_contradict_each_other() -> None:
    with pytest.raises(so.InputError, match="give one"):
        so.plan(**KEYS, memory={"risk": "1%", "reserve_gib": 3})


@pytest.mark.parametrize(
    ("recipe", "gpus"), [("llama3_8b", 16), pytest.param("llama3_70b", 64, marks=pytest.mark.full), ("mixtral_8x7b", 64)]
)
def test_the_safer_plan_is_that_of_a_search_that_knows_nothing_of_the_first(recipe: str, gpus: int) -> None:
    """It is searched with the first search's bounds, which hold for less memory too."""
    beside = safer(so.plan(recipe=recipe, gpus=gpus))
    alone = so.plan(recipe=recipe, gpus=gpus, memory={"risk": "1%"})
    assert beside is not None
    assert beside.step_time_s == pytest.approx(alone.step_time_s, rel=1e-9)
