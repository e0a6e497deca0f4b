"""A plan has at most a small chance of running out of memory where one can; memory.risk= says another; a fuller plan is shown beside it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import orchestrator as so
from orchestrator import planning, recipe, tuning
from orchestrator.__main__ import main
from orchestrator.asking import grid
from orchestrator.console.plans import fuller_lines
from orchestrator.cost.calibration import calibrated
from orchestrator.cost.memory_policy import USUAL_RISK
from orchestrator.detect import Machine
from orchestrator.engine_prices import EnginePrices
from orchestrator.engines import ENGINES
from orchestrator.planning import Planner
from orchestrator.report.memory import risk_key
from orchestrator.strategy.layerwise import TRAITS
from orchestrator.strategy.pins import MemoryLimit
from orchestrator.units import format_amount, format_bytes

KEYS = {"recipe": "llama3_8b", "gpus": 16, "engine": "megatron"}
CROWDED = {"recipe": "llama3_8b", "gpus": 8, "cluster": "dgx_h100", "engine": "megatron", "pin.tp_comm_overlap": False}
"""Its fastest plan by the reserve alone has a chance of 24%."""
FULL = {"tp": 1, "pp": 1, "cp": 1}
"""Of this, every plan fills the GPU further than is usual."""


def filled(**keys: object) -> planning.Found:
    """The fastest plan by the engine's reserve alone, as every plan was before there was a usual risk."""
    settings = recipe.load([f"{key}={value}" for key, value in keys.items()], Machine(host_memory=1 << 34), tuple(ENGINES))
    return Planner(settings).fastest(Planner(settings).space(top_k=1).held_to(-1))


def seconds(found: planning.Found) -> float:
    assert found.plan.predicted is not None
    return found.plan.predicted.step_time_s


def risk_line(said: str) -> str:
    return next(line for line in said.splitlines() if line.startswith("risk: "))


def test_by_default_a_plan_has_at_most_the_usual_chance_of_running_out() -> None:
    answer, most = so.plan(**CROWDED), filled(**CROWDED)
    assert answer.chance_of_not_fitting <= USUAL_RISK < Planner(answer.settings).chance_of_not_fitting(most.plan)
    assert answer.step_time_s > seconds(most)
    assert answer.found.limit.risk == USUAL_RISK
    assert not answer.found.none_cautious
    said = str(so.plan(**CROWDED, verbose=True))
    assert "at most 5% chance of running out (memory.risk)" in " ".join(said.split())
    assert "no plan" not in risk_line(said)


def test_one_cluster_and_setting_has_one_figure_of_usable_memory_in_every_command(tmp_path: Path) -> None:
    answer = so.plan(**CROWDED)
    usable = answer.found.limit.usable
    assert usable < answer.found.limit.limit
    run = answer.write(tmp_path / "run")
    (one, other) = (point.answer for point in so.sweep(**CROWDED, **{"pin.micro_batch_size": [1, 2]}).points if point.answer)
    largest = so.plan(**CROWDED, largest="num_layers")
    tuned = Planner(answer.settings).prices_for("megatron").limits[0]
    audited = so.audit(run / "megatron_args.sh", recipe="llama3_8b", cluster="dgx_h100", gpus=8)
    again = so.plan(plan=str(run / "plan.json"))
    limits = [one.found.limit, other.found.limit, largest.found.limit, tuned, audited.judge.limit, again.found.limit]
    assert [limit.usable for limit in limits] == [usable] * len(limits)
    assert audited.summary()["usable_memory_bytes"] == answer.summary()["usable_memory_bytes"] == usable
    assert audited.judged is not None
    assert audited.judged.chance == pytest.approx(answer.chance_of_not_fitting)


def test_two_precisions_are_compared_at_one_risk(capsys: pytest.CaptureFixture[str]) -> None:
    """FP8 was planned at a chance of 23% and bf16 at 4.5%, so that it looked 12% faster; at one risk it is 6% slower."""
    assert (
        main(
            [
                "compare",
                "recipe=deepseek_v3",
                "gpus=512",
                "cluster=dgx_h800",
                "cluster.software.deep_ep=false",
                "train.precision=bf16,fp8",
                "--json",
            ]
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["one"]["chance_of_not_fitting"] <= USUAL_RISK
    assert found["other"]["chance_of_not_fitting"] <= USUAL_RISK
    assert found["one"]["step_time_s"] < found["other"]["step_time_s"]


def test_a_comparison_says_the_chance_of_each_plan_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    """On 8 GPUs no plan with these pins is as sure as usual."""
    keys = {**CROWDED, **{f"pin.{name}": degree for name, degree in FULL.items()}}
    answers = [point.answer for point in so.sweep(**{**keys, "gpus": [8, 16]}).points if point.answer]
    first, second = (f"{format_amount(100 * answer.chance_of_not_fitting, 2)}%" for answer in answers)
    assert answers[0].chance_of_not_fitting > USUAL_RISK >= answers[1].chance_of_not_fitting
    words = [f"{key}={value}" for key, value in {**keys, "gpus": "8,16"}.items()]
    assert main(["sweep", *words]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert first in rows["8"]
    assert second in rows["16"]
    assert main(["compare", *words]) == 0
    assert re.search(rf"runs out +{re.escape(first)} chance +{re.escape(second)} chance", capsys.readouterr().out)


def test_the_usual_risk_is_that_of_memory_risk() -> None:
    asked = so.plan(**CROWDED, memory={"risk": "5%"})
    assert asked.plan.stages == so.plan(**CROWDED).plan.stages


def test_where_no_plan_is_so_sure_the_reserve_alone_counts_and_it_is_said() -> None:
    """Nothing that the reserve allows is refused."""
    most = filled(**CROWDED, **{f"pin.{name}": degree for name, degree in FULL.items()}).plan
    answer = so.plan(**CROWDED, pin=FULL)
    assert answer.plan.stages == most.stages
    assert answer.found.none_cautious
    assert answer.found.limit.risk is None
    assert "no plan searched under these pins has at most 5%" in risk_line(str(answer))
    with pytest.raises(so.NoPlanError, match=r"kept free for memory\.risk=5%"):
        so.plan(**CROWDED, pin=FULL, memory={"risk": "5%"})


def test_a_last_resort_is_taken_before_the_reserve_alone_where_it_is_safer_and_faster() -> None:
    """Without the logits in pieces nothing is as sure as usual, and what fits at all is slower."""
    keys = {
        "recipe": "llama3_8b_128k",
        "gpus": 64,
        "cluster": "dgx_h100",
        "engine": "deepspeed",
        "train": {"seq_length": 2**20, "global_batch_size": 4},
    }
    keys["model"] = {"max_position_embeddings": 2**20}
    answer, without = so.plan(**keys), so.plan(**keys, pin={"tiled_logits": 1})
    assert answer.plan.tiled_logits > 1
    assert answer.chance_of_not_fitting <= USUAL_RISK < without.chance_of_not_fitting
    assert answer.step_time_s < without.step_time_s


def test_a_plan_is_as_sure_as_usual_however_much_faster_another_one_is(capsys: pytest.CaptureFixture[str]) -> None:
    dear = {"recipe": "llama3_70b_lora", "gpus": 512, "cluster": "dgx_h100"}
    answer, most = so.plan(**dear), filled(**dear)
    assert answer.chance_of_not_fitting <= USUAL_RISK < Planner(answer.settings).chance_of_not_fitting(most.plan)
    assert answer.step_time_s > 1.1 * seconds(most)
    assert main(["plan", *(f"{key}={value}" for key, value in dear.items())]) == 0
    assert "\nfaster: memory.risk=" in capsys.readouterr().out


@pytest.mark.parametrize(("slower", "lines"), [(1.009, 0), (1.02, 1)])
def test_more_risk_is_advised_where_it_gains_a_percent(slower: float, lines: int) -> None:
    answer = so.plan(**CROWDED)
    asked = SimpleNamespace(
        found=SimpleNamespace(fuller=answer.plan, alternatives=()), step_time_s=slower * answer.step_time_s, settings=answer.settings
    )
    assert len(fuller_lines(asked)) == lines  # type: ignore[arg-type]


def test_a_given_plan_goes_by_the_reserve(tmp_path: Path) -> None:
    answer = so.plan(**CROWDED, memory={"risk": "20%"})
    assert answer.chance_of_not_fitting > USUAL_RISK
    run = answer.write(tmp_path / "run")
    again = so.plan(plan=str(run / "plan.json"))
    assert again.plan.stages == answer.plan.stages
    assert again.found.limit.risk is None
    assert not again.found.none_cautious, "nothing was searched"


def test_a_plan_that_is_read_again_is_held_to_what_it_was_found_with(tmp_path: Path) -> None:
    answer = so.plan(**CROWDED)
    again = so.plan(plan=str(answer.write(tmp_path / "run") / "plan.json"))
    assert again.found.limit == answer.found.limit
    assert again.headroom == answer.headroom


def test_a_sweep_compares_the_chances_of_running_out() -> None:
    """On 8 GPUs no plan with these pins is as sure as usual, so that a smaller reserve counts than on 16: of that it leaves more."""
    crowded, sure = (point.answer for point in so.sweep(**{**CROWDED, "gpus": [8, 16]}, pin=FULL).points)
    assert crowded is not None
    assert sure is not None
    assert crowded.chance_of_not_fitting > USUAL_RISK >= sure.chance_of_not_fitting
    assert crowded.headroom < 0.01, "of the smaller reserve's memory, nearly all of what there is"
    assert grid.figures(crowded)[-1] > grid.figures(sure)[-1]


def test_memory_that_is_free_is_of_the_usable_memory_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    """The screen, --json, a sweep's column, what a target tried (the report: test_page_numbers): a sweep had it of all of a GPU."""
    asked = {"recipe": "llama3_8b", "cluster": "dgx_h100", "train": {"tokens": "200B"}}
    answer = so.plan(**asked, gpus=32)
    free = f"{100 * answer.headroom:.1f}%"
    assert f"{100 - 100 * answer.headroom:.1f}% of {format_bytes(answer.found.limit.usable)} usable" in str(answer)
    assert "memory_free" not in answer.summary()
    table = str(so.sweep(**asked, gpus=[32, 64])).splitlines()
    assert any("usable" in line.split() for line in table[:4])
    assert free in next(line for line in table if line.split()[:1] == ["32"])
    assert main(["plan", "recipe=llama3_8b", "cluster=dgx_h100", "train.tokens=200B", "target.days=9", "gpus=32"]) == 0
    assert f"{free} of usable memory free" in next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  32: "))


def test_a_stated_reserve_alone_counts() -> None:
    answer = so.plan(**CROWDED, memory={"reserve_gib": 0})
    assert answer.found.limit.usable == answer.found.limit.limit
    assert answer.chance_of_not_fitting > USUAL_RISK
    assert answer.step_time_s <= seconds(filled(**CROWDED))


def test_without_a_gpu_nothing_is_published_and_the_reserve_stays() -> None:
    answer = so.plan(recipe="gpt_tiny", gpus=4, cluster="cpu")
    assert answer.found.limit.risk is None
    assert not answer.found.none_cautious


def test_a_plan_keeps_the_risk_that_is_asked_for_and_less_risk_is_never_faster() -> None:
    times = []
    for risk in ("30%", "5%", "1%"):
        answer = so.plan(**KEYS, memory={"risk": risk})
        assert answer.chance_of_not_fitting <= float(risk.removesuffix("%")) / 100 + 1e-9
        times.append(answer.step_time_s)
    assert times == sorted(times)


def test_less_memory_is_more_risk() -> None:
    answer = so.plan(**KEYS)
    near = so.plan(**KEYS, memory={"limit_gib": answer.peak_memory_bytes / 2**30 * 1.01, "reserve_gib": 0})
    assert near.chance_of_not_fitting > answer.chance_of_not_fitting or near.peak_memory_bytes < answer.peak_memory_bytes
    assert 0 < near.chance_of_not_fitting < 1


def test_the_faster_plan_that_may_run_out_stands_beside_with_the_key_that_takes_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *(f"{key}={value}" for key, value in CROWDED.items())]) == 0
    said = capsys.readouterr().out.splitlines()
    (risk,) = [line for line in said if line.startswith("risk: ")]
    (faster,) = [line for line in said if line.startswith("faster: ")]
    assert float(risk.split()[1].rstrip("%")) <= 100 * USUAL_RISK
    key = faster.split()[1].rstrip(":")
    assert key.startswith("memory.risk=")
    taken = so.plan(**CROWDED, memory={"risk": key.partition("=")[2]})
    most = filled(**CROWDED)
    assert taken.step_time_s <= seconds(most) * (1 + 1e-9)
    assert f"{100 * Planner(taken.settings).chance_of_not_fitting(most.plan):.2g}% chance" in faster


@pytest.mark.parametrize("chance", [0.0123, 0.0511, 0.0999, 0.1, 0.2725, 0.36])
def test_the_key_that_takes_a_plan_allows_its_chance_and_hardly_more(chance: float) -> None:
    allowed = float(risk_key(chance).removesuffix("%")) / 100
    assert chance <= allowed + 1e-9
    assert allowed < chance + 0.01


def test_where_filling_memory_gains_nothing_no_other_plan_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "recipe=t5_large", "gpus=64", "cluster=dgx_h100"]) == 0
    assert "faster: " not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("recipe", "gpus"), [("llama3_8b", 16), pytest.param("llama3_70b", 64, marks=pytest.mark.full), ("mixtral_8x7b", 64)]
)
def test_the_plan_beside_a_fuller_one_is_that_of_a_search_that_knows_nothing_of_it(recipe: str, gpus: int) -> None:
    """It is searched with the fuller search's bounds, which hold for less memory too."""
    keys = {"recipe": recipe, "gpus": gpus, "cluster": "dgx_h100"}
    alone = so.plan(**keys)
    beside = Planner(alone.settings).plan(with_fuller=True)
    assert seconds(beside) == pytest.approx(alone.step_time_s, rel=1e-9)
    assert beside.plan.stages == alone.plan.stages


def test_what_is_explained_is_the_plan_that_the_pin_gives() -> None:
    """Also where that is a plainer one than the fastest by price, which prices can't tell apart (search.prefer)."""
    keys = {"recipe": "llama3_70b", "gpus": 64, "cluster": "dgx_h100"}
    pinned = so.plan(**keys, pin={"tp": 1})
    assert pinned.found.by_price is not None, "the fastest by price is another"
    assert f"The best plan with it, megatron {pinned.plan.candidate.label().removeprefix('megatron ')}" in so.explain(so.plan(**keys), tp=1)


def test_what_is_explained_is_held_to_what_the_plan_is() -> None:
    """The best plan with a choice is as sure to fit, where one is; where none is, its chance is said."""
    answer = so.plan(**CROWDED)
    *alone, together = so.explain(answer, **FULL).splitlines()
    assert "none with it has at most a 5% chance of running out of memory, this one 23%" in together
    assert not any("chance" in line for line in alone)


def test_the_most_that_fits_is_what_a_sure_plan_holds() -> None:
    keys = {**CROWDED, "pin": {"tp": 8}, "largest": "global_batch_size"}
    sure, full = so.plan(**keys), so.plan(**keys, memory={"risk": "30%"})
    assert sure.chance_of_not_fitting <= USUAL_RISK
    assert sure.plan.global_batch_size < full.plan.global_batch_size


def limits_of(*words: str) -> list[MemoryLimit]:
    settings = recipe.load([*words, "engine=layerwise"], Machine(host_memory=1 << 34), (*ENGINES, "layerwise"))
    return EnginePrices(settings, TRAITS, calibrated(settings.cluster, TRAITS)).limits


def test_a_layer_wise_plan_is_held_to_the_same_risk() -> None:
    words = ("recipe=llama2_7b", "gpus=8", "cluster=dgx_h100")
    strict, reserve = limits_of(*words)
    assert (strict.risk, reserve.risk) == (USUAL_RISK, None)
    assert strict.usable < reserve.usable
    (asked,) = limits_of(*words, "memory.risk=1%")
    assert asked.usable < strict.usable
    (own,) = limits_of(*words, "memory.reserve_gib=2")
    assert own.reserve == 2 * 2**30
    (measured,) = limits_of("recipe=vit_huge_32")
    assert measured.risk is None, "the layers of a profile were measured"
    with pytest.raises(so.InputError, match=r"memory\.risk=0\.01: goes by published peaks"):
        limits_of("recipe=vit_huge_32", "memory.risk=1%")


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


def test_tuning_tries_what_only_the_reserve_lets_through_last() -> None:
    """Two sizes of micro-batch fit on 16 GPUs, one of them as surely as usual; a trial shows whether the other does."""
    keys = {**CROWDED, "gpus": 16, **{f"pin.{name}": degree for name, degree in FULL.items()}, "pin.zero_stage": 1}
    settings = recipe.load([f"{key}={value}" for key, value in keys.items()], Machine(host_memory=1 << 34), tuple(ENGINES))
    trials: list[tuning.Trial] = []
    while (plan := tuning.next_plan(settings, trials, ())) is not None:
        trials.append(tuning.Trial(number=len(trials) + 1, plan=plan, runs_s=(1.0,), peak_memory_bytes=None))
    chances = [Planner(settings).chance_of_not_fitting(trial.plan) for trial in trials]
    assert chances[0] <= USUAL_RISK < chances[-1]
    assert chances == sorted(chances)
