"""program=: which of an engine's own training loop and our worker trains a plan, and why."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from hand_plans import LLAMA, make_plan
from msgspec.structs import replace

from orchestrator.detect import Machine
from orchestrator.engines import ENGINES
from orchestrator.engines.engine import Engine, OwnLoop
from orchestrator.engines.entry import own_loop
from orchestrator.errors import InputError
from orchestrator.plan import Plan, trl
from orchestrator.planning import Planner
from orchestrator.recipe import load
from orchestrator.recipe.resuming import Checkpoint
from orchestrator.run import main

PLAN = make_plan("deepspeed", LLAMA, tp=2)


def engine(*, refuses: bool = False) -> Engine:
    def why_not(plan: Plan) -> str | None:
        return f"knows no tp={plan.tp}" if refuses else None

    loop = OwnLoop(name="its loop", why_not=why_not, job=lambda plan, job, minutes, steps: job)
    return replace(ENGINES["deepspeed"], own_loop=loop)


def test_the_default_is_the_engines_where_that_can_run_the_plan() -> None:
    loop, why = own_loop(engine(), PLAN, "auto")
    assert loop is not None
    assert (loop.name, why) == ("its loop", "the default")
    assert own_loop(engine(refuses=True), PLAN, "auto") == (None, "knows no tp=2")
    assert own_loop(replace(engine(), own_loop=None), PLAN, "auto") == (None, "engine=deepspeed has no training loop but our worker's")


def test_the_default_is_our_worker_where_the_planned_release_has_no_loop_and_no_checkout_is_named() -> None:
    wheel = ENGINES["megatron"].own_loop
    assert wheel is not None
    here = replace(engine(), own_loop=replace(wheel, why_not=lambda plan: None, why_absent=lambda plan: "0.16 has none"))
    assert own_loop(here, PLAN, "auto") == (None, "0.16 has none")
    assert own_loop(here, PLAN, "auto", checkout=True)[1] == "the default"
    assert own_loop(here, PLAN, "own")[1] == "program=own"


def test_what_is_asked_for_is_taken_or_refused() -> None:
    assert own_loop(engine(), PLAN, "instrument") == (None, "program=instrument")
    loop, why = own_loop(engine(), PLAN, "own")
    assert loop is not None
    assert why == "program=own"
    with pytest.raises(InputError, match="program=own: knows no tp=2"):
        own_loop(engine(refuses=True), PLAN, "own")
    with pytest.raises(InputError, match="program=own: engine=deepspeed has no training loop but our worker's"):
        own_loop(replace(engine(), own_loop=None), PLAN, "own")


def test_deepspeed_trains_every_plan_by_the_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["gpus=2", "cluster=cpu", "launch=none", "engine=deepspeed"]
    assert main([*words, "recipe=gpt_tiny", f"out={tmp_path / 'a'}"]) == 0
    assert "\ntrained by transformers' Trainer: the default\n" in capsys.readouterr().out
    assert main([*words, "recipe=gpt_tiny", "program=instrument", "wandb.project=mine", f"out={tmp_path / 'c'}"]) == 0
    assert "\ntrained by transformers' Trainer: program=instrument\n" in capsys.readouterr().out
    assert main([*words, "recipe=vit_tiny", f"out={tmp_path / 'b'}"]) == 0
    assert "\ntrained by transformers' Trainer: the default\n" in capsys.readouterr().out
    worker = ["gpus=2", "cluster=cpu", "launch=none", "engine=megatron", "recipe=gpt_tiny", "program=instrument", "wandb.project=mine"]
    assert main([*worker, f"out={tmp_path / 'd'}"]) == 2
    assert (
        "wandb.project=mine: is for the engines' own training loops, and our worker trains this plan (program=instrument)"
        in capsys.readouterr().err
    )


def test_chats_are_said_to_be_trained_by_trl_where_it_is_and_can(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks look themselves; what a machine without TRL says names the command that installs it."""
    here = "1.16.3"

    def version(name: str) -> str:
        if not here:
            raise PackageNotFoundError(name)
        return here

    monkeypatch.setattr(trl, "version", version)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    words = ["recipe=llama_tiny_sft", "gpus=2", "cluster=cpu", "launch=none", "engine=deepspeed", f"tokenizer={tmp_path}"]

    def said(name: str, *more: str) -> tuple[str, bool]:
        out = tmp_path / name
        assert main([*words, *more, f"out={out}"]) == 0
        line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("trained by "))
        return line, " --trl)" in (out / "launch.sh").read_text()

    assert said("here") == ("trained by TRL's SFTTrainer (trl 1.16.3): the default", True)
    assert said("instrument", "program=instrument") == ("trained by transformers' Trainer: program=instrument", False)
    text, told = said("divided", "pin.tp=2")
    assert text.startswith("trained by transformers' Trainer (not TRL's SFTTrainer: tp=2: it multiplies by the head's weight itself")
    assert not told
    here = ""
    assert said("absent") == (
        "trained by transformers' Trainer (TRL is not installed here: pip install -e '.[sft]' for its SFTTrainer): the default", True
    )  # fmt: skip
    here = "1.9.0"
    assert "(TRL 1.9.0 is here, and 1.16 was read: pip install -e '.[sft]' for its SFTTrainer)" in said("older")[0]


def test_trl_is_installed_in_the_release_that_was_read() -> None:
    text = Path(__file__).parents[2].joinpath("setup.cfg").read_text()
    assert text.count(f"\n    trl>={trl.READ},<") == 2


def test_a_checkpoint_is_continued_by_the_program_that_wrote_it(tmp_path: Path) -> None:
    plan = make_plan("megatron", LLAMA, tp=2)
    plan = replace(plan, cluster=replace(plan.cluster, software=replace(plan.cluster.software, megatron_core="0.19.2")))
    settings = load(["recipe=gpt_tiny", "cluster=cpu", "gpus=2"], Machine(), [*ENGINES])
    for folder, trained_by in {"step_000002": "our worker", "iter_0000002": "Megatron's own training loop"}.items():
        saved = Checkpoint(folder=tmp_path / "checkpoints" / folder, run=tmp_path, step=2, engine="megatron", plan=plan)
        loop, _ = Planner(replace(settings, continues=saved)).trained_by(plan)
        assert (loop.name if loop else "our worker") == trained_by


def test_a_run_says_what_trains_and_keeps_what_was_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["recipe=gpt_tiny", "gpus=2", "cluster=cpu", "launch=none"]
    assert main([*words, "program=instrument", "engine=megatron", f"out={tmp_path / 'a'}"]) == 0
    assert "\ntrained by our worker: program=instrument\n" in capsys.readouterr().out
    assert "program: instrument\n" in (tmp_path / "a" / "config.yaml").read_text()
    assert main([*words, "program=own", "engine=megatron_deepspeed", f"out={tmp_path / 'b'}"]) == 2
    assert "program=own: engine=megatron_deepspeed has no training loop but our worker's; choose one of" in capsys.readouterr().err
    assert main([*words, "program=own", "entry=train.py", f"out={tmp_path / 'c'}"]) == 2
    assert "program=own: is one program, and entry= names another" in capsys.readouterr().err
