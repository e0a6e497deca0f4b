"""tune=K through a user's own program, for real, on gloo: measured by what it tells of its steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator import tuning
from orchestrator.launch import local
from orchestrator.units import format_seconds

HERE = Path(__file__).parent
FLAGS = HERE.parent / "engines" / "megatron_flags.csv"
LINE = " iteration {step:8d}/ 9 | elapsed time per iteration (ms): 10.0 | lm loss: 2.0 |"


def tune(out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    base = ("recipe=gpt_tiny", "gpus=2", "cluster=cpu", "launch=local", "calibration=datasheet")
    command = [sys.executable, "-m", "orchestrator.run", *base, *words, f"out={out}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.engines
def test_megatrons_program_is_tuned_by_its_own_step_times_and_only_the_training_saves(tmp_path: Path) -> None:
    """The program is slower with a larger micro-batch, which no price says; a warm-up longer than a trial is no obstacle."""
    program, out = tmp_path / "pretrain_gpt.py", tmp_path / "run"
    program.write_bytes((HERE / "megatron_stand_in.py").read_bytes())
    words = ("engine=megatron", "pin.tp=2", "train.steps=8", "train.warmup=6", "train.save_every=4", f"env.T_FLAGS={FLAGS}", "tune=2",
             "tune.steps=4", f"entry.args=--log-interval 7 --save {tmp_path / 'kept'}", "entry.without=--log-throughput")  # fmt: skip
    done = tune(out, f"entry={program}", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    trials = tuning.read_trials(out)
    assert [trial.number for trial in trials] == [1, 2]
    small, large = sorted(trials, key=lambda trial: trial.plan.micro_batch_size)
    assert large.measured_s == pytest.approx(0.02 * large.plan.micro_batch_size, rel=0.5)
    assert json.loads((out / "plan.json").read_text())["micro_batch_size"] == small.plan.micro_batch_size
    assert json.loads((out / "plan.json").read_text())["prices"] is None, "a program without timers teaches no prices"
    assert [row["step"] for row in rows(out / "tune" / "1")] == [1, 2, 3, 4]
    tried, trained = (json.loads((folder / "parsed.json").read_text()) for folder in (out / "tune" / "1", out))
    names = ("train_iters", "lr_decay_iters", "lr_warmup_iters", "log_interval", "save", "load")
    assert [tried.get(name) for name in names] == [4, 8, 6, 1, None, None]
    assert [trained.get(name) for name in names] == [8, 8, 6, 7, str(tmp_path / "kept"), "checkpoints"]
    assert "taken" in done.stdout


@pytest.mark.full
@pytest.mark.engines
def test_a_deepspeed_script_that_knows_nothing_of_steps_is_ended_when_it_has_taken_enough(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ("engine=deepspeed", "pin.tp=1", "pin.zero_stage=1", "tune=2", "tune.rounds=1", "tune.steps=4", "entry.args=--steps 400",
             "ds.wall_clock_breakdown=false")  # fmt: skip
    done = tune(out, f"entry={HERE / 'deepspeed_user.py'}", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    trials = tuning.read_trials(out)
    assert [trial.why for trial in trials] == ["", ""]
    assert all(trial.measured_s for trial in trials)
    assert len({trial.plan.micro_batch_size for trial in trials}) == 2
    for number in "12":
        assert 4 < len(rows(out / "tune" / number)) < 400
        assert json.loads((out / "tune" / number / "status.json").read_text())["status"] == "finished"
        assert not (out / "tune" / number / "user-0.json").exists(), "it was ended on its way"
    assert rows(out)[-1]["step"] == 400
    assert (out / "user-0.json").exists()


TELLS_NOTHING = "import sys; print('training', sys.argv[1:], flush=True)"
TELLS_NOTHING_FOR_EVER = f"import time; {TELLS_NOTHING}; time.sleep(600)"


@pytest.mark.engines
@pytest.mark.parametrize(
    ("program", "said"),
    [
        (TELLS_NOTHING, "s, but its log has no step times: looked for Megatron-LM's \"iteration N/M | ... elapsed time per iteration"),
        (TELLS_NOTHING_FOR_EVER, "and was ended (train.step_timeout_s), but its log has no step times: looked for "),
    ],
    ids=["ends", "goes on"],
)
def test_a_program_without_step_times_is_one_error(program: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(program)
    done = tune(tmp_path / "run", f"entry={tmp_path / 'program.py'}", "engine=megatron", "pin.tp=1", "tune=3", "train.step_timeout_s=8")
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: tune=3: plan 1 ran ")
    assert said in line
    assert not tuning.read_trials(tmp_path / "run"), "what taught nothing is not kept as a trial"


@pytest.mark.parametrize("wanted", [2, 3])
def test_a_program_that_hangs_has_failed_unless_it_took_the_steps_asked_for(wanted: int, tmp_path: Path) -> None:
    lines = "\n".join(f"echo '{LINE.format(step=step)}' >>logs/rank-0.log" for step in (1, 2))
    (tmp_path / "launch.sh").write_text(f"{lines}\nexec sleep 600\n")
    told = tuning.ReportedSteps(wanted, 2.0)
    outcome = told.ended(local.run_script(tmp_path, "launch.sh", environment={}, on_step=told.step, enough=told.enough, own=False))
    assert [row["step"] for row in outcome.rows] == [1, 2]
    hung = ("failed", f"no step in {format_seconds(2.0)} after step 2 (train.step_timeout_s)")
    assert (outcome.status, outcome.last_line) == (("finished", None) if wanted == 2 else hung)
