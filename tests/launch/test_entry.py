"""The engine's own program, or a user's, started through us: for real, on gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.launch import local, program_metrics

HERE = Path(__file__).parent
FLAGS = HERE.parent / "engines" / "megatron_flags.csv"
TRAIN = ("recipe=gpt_tiny", "gpus=2", "train.steps=5", "train.warmup=1")


def run(out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "orchestrator.run", *TRAIN, *words, f"out={out}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.engines
def test_megatrons_program_gets_the_plans_arguments_and_its_log_becomes_metrics(tmp_path: Path) -> None:
    folder = tmp_path / "my fork"
    folder.mkdir()
    program = folder / "pretrain_gpt.py"
    program.write_bytes((HERE / "megatron_stand_in.py").read_bytes())
    out = tmp_path / "run"
    done = run(out, f"entry={program}", f"env.T_FLAGS={FLAGS}", "train.save_every=5", "entry.args=--timing-log-level 2 --split 98,2,0",
               "entry.without=--async-save", "launch=local", "pin.tp=2", "train.step_timeout_s=90")  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    parsed = json.loads((out / "parsed.json").read_text())
    wanted = {"tensor_model_parallel_size": 2, "num_layers": 4, "train_iters": 5, "timing_log_level": 2, "split": "98,2,0"}
    wanted |= {"distributed_timeout_minutes": 2, "mock_data": True, "exit_signal": "SIGUSR1", "load": "checkpoints"}
    assert {name: parsed.get(name) for name in wanted} == wanted
    assert "async_save" not in parsed
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["loss"] for row in rows] == pytest.approx([2.0, 1.0, 2 / 3, 0.5, 0.4], rel=1e-6)
    assert rows[1]["tokens_per_s"] == pytest.approx(16 * 128 / rows[1]["step_time_s"])
    assert rows[0]["peak_memory_bytes"] == int(20.5 * 2**20)
    status = json.loads((out / "status.json").read_text())
    assert (status["status"], status["steps"]) == ("finished", 5)
    assert status["measured_step_time_s"] > 0.02
    assert "measured / predicted" in done.stdout


@pytest.mark.engines
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_a_users_deepspeed_script_trains_under_the_planned_config_and_is_measured(tmp_path: Path, launcher: str) -> None:
    out = tmp_path / "run"
    words = ("engine=deepspeed", "pin.zero_stage=2", "pin.tp=1", "entry.args=--hidden 4", "launch=local", f"entry.launcher={launcher}",
             "train.step_timeout_s=90")  # fmt: skip
    done = run(out, f"entry={HERE / 'deepspeed_user.py'}", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("launch.py" in (out / "logs" / "launch.log").read_text()) == (launcher == "deepspeed")
    assert "export DEEPSPEED_TIMEOUT=2\n" in (out / "launch.sh").read_text()
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert all(row["step_time_s"] > 0 and row["tokens_per_s"] == pytest.approx(16 * 128 / row["step_time_s"]) for row in rows)
    assert rows[1]["lr"] > rows[-1]["lr"] > 0, "DeepSpeed's own schedule"
    assert json.loads((out / "status.json").read_text())["measured_step_time_s"] > 0
    assert "measured / predicted" in done.stdout
    for rank in range(2):
        stage, *losses = json.loads((out / f"user-{rank}.json").read_text())
        assert stage == 2
        assert losses[-1] < losses[0]


@pytest.mark.engines
@pytest.mark.full
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_nodes_are_checked_before_a_program_that_asks_for_it(tmp_path: Path, launcher: str) -> None:
    corpus, out = tmp_path / "corpus.txt", tmp_path / "run"
    corpus.write_text("text " * 10_000)
    words = ("engine=deepspeed", "pin.tp=1", f"entry.launcher={launcher}", "entry.preflight=true", f"data={corpus}")
    assert run(out, f"entry={HERE / 'deepspeed_user.py'}", *words, "launch=none").returncode == 0
    launch = ["bash", str(out / "launch.sh")]
    environment = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(launch, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    said = (out / "logs" / "rank-0.log").read_text().splitlines()
    assert said[1] == f"ranks 0-1: {said[0].split()[4].rstrip(',')}"
    assert (out / "user-0.json").exists()
    (out / "user-0.json").unlink()
    corpus.unlink()
    done = subprocess.run(launch, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == (1 if launcher == "torchrun" else 4)
    (out / "launch.log").write_text(done.stderr)
    failure = local.describe_failure(out, out / "launch.log", done.returncode)
    assert failure.status == 4
    assert failure.said.endswith(f"{corpus} can't be read")
    assert not (out / "user-0.json").exists()


def monitored(folder: Path, name: str, *lines: str) -> None:
    """Appends to a file as DeepSpeed's csv monitor does."""
    (folder / "logs" / "deepspeed").mkdir(parents=True, exist_ok=True)
    with (folder / "logs" / "deepspeed" / f"Train_Samples_{name}.csv").open("a") as file:
        file.write("".join(f"{line}\n" for line in lines))


def test_a_step_of_deepspeed_is_told_once_when_its_last_time_is_written(tmp_path: Path) -> None:
    plan = {"training": {"global_batch_size": 8, "seq_length": 100, "decoder_seq_length": None}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    (tmp_path / "ds_config.json").write_text('{"wall_clock_breakdown": true}')
    follower = program_metrics.Follower(tmp_path)
    follower.poll()
    monitored(tmp_path, "lr", "step,lr", "8,0.1", "16,0.2")
    monitored(tmp_path, "elapsed_time_ms_forward", "step,elapsed_time_ms_forward", "8,100.0", "16,300.0")
    monitored(tmp_path, "elapsed_time_ms_backward", "step,elapsed_time_ms_backward", "8,200.0", "16,400.0")
    monitored(tmp_path, "elapsed_time_ms_step", "step,elapsed_time_ms_step", "8,100.0")
    follower.poll()
    follower.poll()
    program_metrics.Follower(tmp_path).poll()  # of the job's end, beside the one of who waits
    first = {"step": 1, "loss": None, "grad_norm": None, "lr": 0.1, "step_time_s": 0.4, "tokens_per_s": 2000.0, "peak_memory_bytes": None}
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [first]
    program_metrics.Follower(tmp_path).poll()
    monitored(tmp_path, "elapsed_time_ms_step", "16,50.0", "step,elapsed_time_ms_step")
    follower.poll()
    assert [json.loads(line)["step_time_s"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [0.4, 0.75]


def test_the_log_of_a_resumed_run_counts_each_step_once(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "rank-1.log"
    line = " iteration {:8d}/ 9 | elapsed time per iteration (ms): 10.0 | lm loss: {:.6E} | grad norm: nan |\n"
    follower = program_metrics.Follower(tmp_path)
    log.write_text("loading\n" + line.format(1, 3.0) + line.format(2, 2.0)[:20])
    follower.poll()
    with log.open("a") as file:
        file.write(line.format(2, 2.0)[20:] + line.format(1, 3.0) + line.format(3, float("nan")))
    follower.poll()
    rows = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[1]["loss"] == 2.0
    assert rows[2]["loss"] is None, "JSON has no NaN"


def test_what_contradicts_the_plan_is_refused(tmp_path: Path) -> None:
    cases = [
        (["entry.args=--lr 1"], "entry.args=--lr: the plan says --lr 0.001"),
        (["entry.args=--tensor-model-parallel-size=4"], "entry.args=--tensor-model-parallel-size: the plan says"),
        (["entry.without=--lr"], "entry.without=--lr: is no flag that we add; choose one of --log-throughput"),
        (["engine=megatron_deepspeed"], "engine=megatron_deepspeed is our worker's own"),
        (["engine=deepspeed", "pin.tp=1", "entry.args=--deepspeed x.json"], "entry.args=--deepspeed: is ours"),
        (["entry.launcher=deepspeed"], "entry.launcher=deepspeed: starts DeepSpeed's scripts, and the plan is for engine=megatron"),
        (["engine=deepspeed", "pin.tp=1", "entry.launcher=deepspeed", "slurm.style=srun"], "slurm.style=srun: starts one task a rank"),
        (["entry.args='"], "entry.args=': can't be split into words"),
        (["launch=local"], "launch=local: there is no entry="),
    ]
    for words, why in cases:
        done = run(tmp_path / "run", f"entry={tmp_path}/none.py", *(() if "launch=local" in words else ("launch=none",)), *words)
        assert done.returncode == 2, (words, done.stdout, done.stderr)
        assert why in done.stderr, words
        assert not (tmp_path / "run").exists()
