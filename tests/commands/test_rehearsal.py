"""A plan's worst stages alone, before its start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator import rehearsal
from orchestrator.detect import Machine
from orchestrator.engines import ENGINES
from orchestrator.errors import LaunchError
from orchestrator.plan import Plan
from orchestrator.planning import Planner
from orchestrator.recipe import Settings, load
from orchestrator.report.after import alone_seconds
from orchestrator.run import main

GPT3 = (
    "recipe=gpt3_175b",
    "gpus=1024",
    "cluster=dgx_h100",
    "engine=megatron",
    "pin.tp=8",
    "pin.pp=8",
    "pin.vpp=1",
    "pin.micro_batch_size=1",
)

LARGER = ("train.global_batch_size=32", "pin.micro_batch_size=8", "train.steps=5")


def settings_of(*words: str) -> Settings:
    return load(list(words), Machine(), [*ENGINES])


@pytest.fixture(scope="module")
def large() -> tuple[Plan, Settings]:
    settings = settings_of(*GPT3)
    return Planner(settings).fastest().plan, settings


def test_the_fullest_and_the_slowest_stage_are_rehearsed(large: tuple[Plan, Settings]) -> None:
    plan, _ = large
    assert plan.predicted is not None
    stages = plan.predicted.by_stage
    found = rehearsal.stages_to_rehearse(plan)
    (fullest,) = (stage for stage, why in found.items() if "fullest" in why)
    (slowest,) = (stage for stage, why in found.items() if "slowest" in why)
    assert stages[fullest].peak_memory_bytes == max(stage.peak_memory_bytes for stage in stages)
    assert stages[slowest].forward_s + stages[slowest].backward_s == max(stage.forward_s + stage.backward_s for stage in stages)
    assert rehearsal.first_middle_last(plan) == [0, 512, 896]
    assert [rehearsal.rank_of(plan, stage) for stage in (0, 1, 7)] == [0, 128, 896]


def test_alone_a_stage_takes_less_than_with_its_traffic(large: tuple[Plan, Settings]) -> None:
    plan, settings = large
    assert plan.predicted is not None
    cost = Planner(settings).prices_for(plan.engine).costs(plan)
    for index, stage in enumerate(plan.predicted.by_stage):
        alone = alone_seconds(plan, cost, index)
        assert 0.5 * (stage.forward_s + stage.backward_s) < alone < stage.forward_s + stage.backward_s


def test_what_is_built_must_have_the_parameters_that_are_priced(large: tuple[Plan, Settings]) -> None:
    plan, settings = large
    cost = Planner(settings).prices_for(plan.engine).costs(plan)
    wanted = [rehearsal.parameters_of(plan, cost, stage) for stage in range(8)]
    assert sum(wanted) * 8 == pytest.approx(175e9, rel=0.01)
    built = [{"stage": 0, "rank": 0, "layers": 12, "embedding": True, "parameters": wanted[0]}]
    (line,) = rehearsal.built_lines(plan, cost, built)
    assert line == f"rehearsal: rank 0 (stage 0) builds: 12 layers, embedding, {wanted[0]:,} parameters, as priced"
    with pytest.raises(LaunchError, match="are priced"):
        rehearsal.built_lines(plan, cost, [{**built[0], "parameters": wanted[0] + 1}])


def test_a_program_of_ones_own_is_not_rehearsed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "pretrain_gpt.py"
    program.write_text("")
    words = ["recipe=gpt_tiny", "gpus=2", "cluster=dgx_h100", f"entry={program}", "launch=none", f"out={tmp_path / 'out'}"]
    assert main([*words, "rehearse=true"]) == 2
    assert "rehearse=true: is for our workers" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize(
    ("engine", "pins"),
    [
        ("megatron", ("pin.tp=2", "pin.pp=2")),
        ("megatron_deepspeed", ("pin.tp=2", "pin.pp=2")),
        ("deepspeed", ("pin.zero_stage=1", "pin.tp=1")),
    ],
)
def test_a_rank_alone_has_the_peak_of_the_same_rank_in_the_whole_run(
    engine: str, pins: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = "llama_tiny" if engine == "deepspeed" else "gpt_tiny"
    words = [f"recipe={recipe}", "gpus=4", "cluster=cpu", f"engine={engine}", *pins, *LARGER, "launch=local", "rehearse=true"]
    assert main([*words, f"out={tmp_path / 'run'}"]) == 0
    written = [json.loads(path.read_text())[0] for path in sorted((tmp_path / "run" / rehearsal.FOLDER).glob("*.json"))]
    rows = [json.loads(line) for line in (tmp_path / "run" / "timers.jsonl").read_text().splitlines()]
    whole = {row["rank"]: row["peak_memory_bytes"] for row in rows}
    assert written
    for one in written:
        assert one["peak_memory_bytes"] == pytest.approx(whole[one["rank"]], rel=0.03)
    said = capsys.readouterr().out
    before = said.partition("Rehearsal: one rank alone")[0]
    assert "a rehearsal first, then the training: launch=none rehearses alone\nrehearsing stage " in before
    assert "Rehearsal: one rank alone" in said


@pytest.mark.full
def test_three_ranks_of_a_thousand_are_built_without_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GPT3, "launch=none", "rehearse=true", f"out={tmp_path / 'run'}"]) == 0
    said = capsys.readouterr().out
    assert [f"rank {rank} (stage {stage}) builds: 12 layers" in said for rank, stage in ((0, 0), (512, 4), (896, 7))] == [True] * 3
    (written,) = (json.loads(path.read_text()) for path in (tmp_path / "run" / rehearsal.FOLDER).glob("*.json"))
    assert max(one["host_peak_bytes"] for one in written) < 4e9
