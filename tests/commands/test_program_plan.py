"""What Megatron's own program is told is what was priced: the search under entry=, and megatron_args.sh beside our worker's plan."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from orchestrator import detect, planning, recipe, run
from orchestrator.cost import calibration
from orchestrator.engines import ENGINES
from orchestrator.engines.megatron_args import common_recompute, megatron_args_sh, why_not
from orchestrator.plan import Plan
from orchestrator.planning import Planner
from orchestrator.recipe import Settings
from orchestrator.search.planner import reprice
from orchestrator.units import format_bytes, format_seconds

pytestmark = pytest.mark.xdist_group("said")  # one `found`
CASE = ("recipe=llama3_70b", "gpus=64", "train.precision=fp8", "memory.reserve_gib=5", "pin.tp_comm_overlap=false")
"""The fastest plan recomputes other layers on each stage, and with the same on all it is slower than another without any."""


def settings_of(*words: str) -> Settings:
    return recipe.load([*words, "launch=none"], detect.machine(), list(ENGINES))


@cache
def found(*words: str) -> planning.Found:
    return Planner(settings_of(*CASE, *words)).searched()


def seconds(plan: Plan | None) -> float:
    assert plan is not None
    assert plan.predicted is not None
    return plan.predicted.step_time_s


def priced_again(plan: Plan) -> Plan:
    traits = ENGINES[plan.engine].traits(plan.cluster.software)
    (file,) = calibration.found(None, plan.cluster, [traits], None)
    return reprice(plan, traits, calibration.priced(plan.cluster, traits, file))


def test_with_entry_the_search_is_over_what_the_program_can_be_told() -> None:
    told = found("entry=pretrain_gpt.py")
    assert why_not(told.plan) is None
    assert Planner(settings_of(*CASE, "entry=pretrain_gpt.py")).for_program(told) is None
    assert seconds(told.plan) <= seconds(found("pin.recompute=none").plan) * (1 + 1e-9)
    assert seconds(told.plan) > seconds(found("engine=megatron").plan)


def test_with_the_engines_own_loop_the_search_is_over_all_that_our_worker_trains() -> None:
    """What the command line has no word for is told each rank beside it."""
    own, planner = found("program=own", "engine=megatron"), Planner(settings_of(*CASE, "program=own", "engine=megatron"))
    assert seconds(own.plan) == seconds(found("engine=megatron").plan)
    loop, _ = planner.trained_by(own.plan)
    assert loop is not None
    assert why_not(own.plan) is not None


def test_the_arguments_beside_a_plan_that_they_can_not_say_are_the_best_ones_with_their_own_price() -> None:
    of_worker = found("engine=megatron")
    said = Planner(settings_of(*CASE, "engine=megatron")).for_program(of_worker)
    assert why_not(of_worker.plan) is not None
    assert said is not None
    assert seconds(said) == seconds(found("entry=pretrain_gpt.py").plan) == pytest.approx(seconds(priced_again(said)))
    job = Planner(settings_of(*CASE, "engine=megatron")).job(of_worker.plan, said)
    (file,) = [file for file in job.files if file.path == "megatron_args.sh"]
    assert file.content == megatron_args_sh(said)
    slower = 100 * (seconds(said) / seconds(of_worker.plan) - 1)
    (note,) = [note for note in job.notes if "megatron_args.sh" in note]
    assert f"{format_seconds(seconds(said))} a step (+{slower:.1f}%)" in note


def test_the_first_layers_of_every_chunk_are_recomputed_where_that_is_fastest_with_one_setting() -> None:
    words = ("recipe=llama3_8b", "gpus=8", "memory.limit_gib=40", "pin.tp=2", "pin.cp=1", "pin.tp_comm_overlap=false")
    told = Planner(settings_of(*words, "entry=pretrain_gpt.py")).searched().plan
    setting = common_recompute(told)
    assert setting is not None
    assert (setting["recompute_method"], setting["recompute_num_layers"]) == ("block", 1)
    for mode in ("none", "full"):
        assert seconds(told) < seconds(Planner(settings_of(*words, "entry=pretrain_gpt.py", f"pin.recompute={mode}")).searched().plan)


T5 = ("recipe=t5_large", "gpus=16", "model.activation=gelu", "cluster.software.megatron_core=0.16.1")
"""Later releases have no program for it, and none has a flag for relu."""


@pytest.mark.parametrize("words", [CASE, ("recipe=llama3_8b", "gpus=16"), ("recipe=gpt_tiny", "gpus=4"), T5])
def test_the_time_in_the_header_is_that_of_the_arguments(words: tuple[str, ...], tmp_path: Path) -> None:
    assert run.main([*words, "launch=none", f"out={tmp_path / 'out'}"]) == 0
    settings = settings_of(*words)
    result = Planner(settings).searched()
    told = Planner(settings).for_program(result) or result.plan
    assert why_not(told) is None
    again = priced_again(told).predicted
    assert again is not None
    header = (tmp_path / "out" / "megatron_args.sh").read_text().partition("MEGATRON_ARGS=(")[0]
    assert f"# Predicted: {format_seconds(again.step_time_s)} a step" in header
    assert f"{format_bytes(again.peak_memory_bytes)} at the peak" in header


def test_a_saved_plan_that_the_program_can_not_be_told_is_refused_with_entry(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "first"
    assert run.main([*CASE, "engine=megatron", "launch=none", f"out={out}"]) == 0
    assert run.main([f"plan={out / 'plan.json'}", "entry=pretrain_gpt.py", "launch=none", f"out={tmp_path / 'second'}"]) == 2
    assert "one recompute setting for all stages, and the plan's differ" in capsys.readouterr().err
