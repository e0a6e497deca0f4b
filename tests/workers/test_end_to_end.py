"""The programs as the launcher starts them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from ports import free_port
from worker_plans import GPT, make_plan

from orchestrator import recipe
from orchestrator.detect import machine
from orchestrator.engines import ENGINES
from orchestrator.job import ASKED_VARIABLE
from orchestrator.plan import Plan, RunSettings, to_json
from orchestrator.plan.check import workload_of
from orchestrator.planning import Planner
from orchestrator.workers.saving import limit_s

pytestmark = pytest.mark.engines

FIELDS = {"step", "loss", "grad_norm", "lr", "step_time_s", "tokens_per_s", "peak_memory_bytes"}


def write_job(plan: Plan, out: Path) -> tuple[list[str], dict[str, str]]:
    """The run folder as the main path writes it; what to start in it, by torchrun."""
    job = ENGINES[plan.engine].translate(plan)
    out.mkdir()
    (out / "plan.json").write_text(to_json(plan))
    for file in job.files:
        (out / file.path).write_text(file.content)
    start = ["-m", "torch.distributed.run", "--nproc-per-node", str(plan.world_size), "--master-port", str(free_port())]
    return [sys.executable, *start, "-m", job.module, *job.arguments], dict(os.environ) | job.environment


def read_metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def start(plan: Plan, out: Path) -> list[dict[str, Any]]:
    """Run the job to its end; its metrics."""
    command, environment = write_job(plan, out)
    done = subprocess.run(command, cwd=out, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert not [line for line in done.stdout.splitlines() if not line.startswith(("ranks 0", "preflight: "))]
    return read_metrics(out)


def test_a_checkpoint_that_hangs_is_ended_after_the_time_that_a_step_may_last_and_its_bytes_take(tmp_path: Path) -> None:
    """The rename of the marker waits for a file that nobody reads: a file system that no longer answers. It hung 1,800 s at least,
    whatever train.step_timeout_s= said."""
    plan = make_plan(GPT, tp=1, zero_stage=1, steps=1, run=RunSettings(save_every=1, step_timeout_s=5.0))
    command, environment = one_rank(plan, tmp_path / "run")
    (tmp_path / "run" / "checkpoints").mkdir()
    os.mkfifo(tmp_path / "run" / "checkpoints" / "latest.json.tmp")
    assert 5.0 < limit_s(plan) < 6.0
    done = subprocess.run(command, cwd=tmp_path / "run", env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 5, done.stderr[-3000:]
    verdict = json.loads((tmp_path / "run" / "logs" / "hang.json").read_text())
    assert verdict["status"] == 5
    assert verdict["said"].startswith("step 1: checkpoint: no progress for ")
    assert limit_s(plan) <= verdict["reports"][0]["seconds"] < limit_s(plan) + 5
    assert len(read_metrics(tmp_path / "run")) == 1


def test_a_checkpoint_has_the_time_that_its_bytes_take_on_a_slow_file_system() -> None:
    """70 billion parameters on 8 nodes: 14 bytes each, an eighth a node, at 200 MB/s; one copy of them without ZeRO; 0 stays never."""
    plan = load_plan("recipe=llama3_70b", "gpus=64", "cluster=dgx_h100", "pin.zero_stage=1", "train.step_timeout_s=30")
    parameters = workload_of(plan).model.parameters
    assert limit_s(plan) == pytest.approx(30 + 14 * parameters / 8 / 200e6)
    assert 600 < limit_s(plan) < 700
    alone = replace(plan, zero_stage=0)
    assert limit_s(alone) == pytest.approx(30 + 14 * parameters / -(-64 // plan.dp // 8) / 200e6)
    assert limit_s(replace(plan, run=RunSettings(step_timeout_s=0.0))) == 0.0


def load_plan(*words: str) -> Plan:
    return Planner(recipe.load([*words, "launch=none"], machine(), list(ENGINES))).fastest().plan


def test_two_ranks_train_and_a_resumed_run_continues_on_one(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"tp": 2, "zero_stage": 1, "steps": 4, "lr": 3e-3}
    metrics = start(make_plan(GPT, run=RunSettings(save_every=2), **fields), tmp_path / "first")
    assert [line["step"] for line in metrics] == [1, 2, 3, 4]
    assert all(set(line) == FIELDS for line in metrics)
    assert metrics[-1]["loss"] < metrics[0]["loss"] - 0.2
    resume = RunSettings(save_every=2, resume=str(tmp_path / "first" / "checkpoints" / "step_000002"))
    command, environment = one_rank(make_plan(GPT, run=resume, **fields | {"tp": 1}), tmp_path / "a second")
    done = subprocess.run(command, cwd=tmp_path / "a second", env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    resumed = read_metrics(tmp_path / "a second")
    for before, after in zip(metrics[2:], resumed, strict=True):
        assert after["step"] == before["step"]
        assert after["loss"] == pytest.approx(before["loss"], abs=1e-5)
        assert after["grad_norm"] == pytest.approx(before["grad_norm"], rel=1e-4)


def test_two_ranks_train_under_deepspeed(tmp_path: Path) -> None:
    plan = make_plan(GPT, "megatron_deepspeed", dp=2, zero_stage=2, steps=4, lr=3e-3, run=RunSettings(save_every=4))
    metrics = start(plan, tmp_path / "run")
    assert metrics[-1]["loss"] < metrics[0]["loss"] - 0.2
    assert json.loads((tmp_path / "run" / "checkpoints" / "latest.json").read_text())["step"] == 4


def one_rank(plan: Plan, out: Path) -> tuple[list[str], dict[str, str]]:
    """The same program without torchrun around it, so that its own exit status is seen."""
    command, environment = write_job(plan, out)
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [sys.executable, *command[command.index("-m", 3) :]], environment | place


def test_a_loss_that_is_no_number_ends_with_status_3_and_one_line(tmp_path: Path) -> None:
    plan = make_plan(GPT, lr=1e30, warmup=0, schedule="constant", clip=0.0, steps=20)
    command, environment = one_rank(plan, tmp_path / "run")
    done = subprocess.run(command, cwd=tmp_path / "run", env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 3, done.stderr[-3000:]
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("NonFiniteLossError: step ")
    assert "nothing was saved" in last
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.full
def test_a_refused_vocabulary_is_the_last_line_with_status_1(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\N{SNOWMAN}" * 1000)
    from msgspec.structs import replace

    plan = make_plan(replace(GPT, vocab_size=200, make_vocab_size_divisible_by=8), run=RunSettings(data=str(text)))
    command, environment = one_rank(plan, tmp_path / "run")
    done = subprocess.run(command, cwd=tmp_path / "run", env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert "model.vocab_size=200" in done.stderr.strip().splitlines()[-1]


@contextlib.contextmanager
def training(run: Path) -> Iterator[subprocess.Popen[bytes]]:
    """One rank of a long training that has done a step."""
    command, environment = one_rank(make_plan(GPT, steps=100_000), run)
    process = subprocess.Popen(command, cwd=run, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not ((run / "metrics.jsonl").exists() and (run / "metrics.jsonl").read_text()):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.1)
        yield process
    finally:
        process.kill()


def test_sigterm_ends_a_rank_at_once(tmp_path: Path) -> None:
    with training(tmp_path / "run") as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=3) == -signal.SIGTERM


@pytest.mark.full  # the local run below has it too
def test_sigusr1_saves_and_ends_well(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with training(run) as process:
        process.send_signal(signal.SIGUSR1)
        assert process.wait(timeout=30) == 0
        assert json.loads((run / "checkpoints" / "latest.json").read_text())["step"] == read_metrics(run)[-1]["step"]


def test_a_file_saves_and_ends_well_as_sigusr1_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which job.sbatch writes, for ranks that Slurm's signals do not reach."""
    run, asked = tmp_path / "run", tmp_path / "asked"
    monkeypatch.setenv(ASKED_VARIABLE, str(asked))
    with training(run) as process:
        asked.touch()
        assert process.wait(timeout=60) == 0
        assert json.loads((run / "checkpoints" / "latest.json").read_text())["step"] == read_metrics(run)[-1]["step"]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGKILL])
def test_a_local_run_that_a_signal_ends_says_where_it_stopped_and_how_it_goes_on(number: signal.Signals, tmp_path: Path) -> None:
    """Saved before its last step: not "Finished", and another exit status. Killed: from which step it goes on."""
    out = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "orchestrator.run",
        "recipe=gpt_tiny",
        "gpus=1",
        "train.steps=100000",
        "train.save_every=3",
        f"out={out}",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def ranks() -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and (entry / "cwd").readlink() == out and b"\0--plan\0" in (entry / "cmdline").read_bytes():
                    found.append(entry)
        return [int(entry.name) for entry in found if b"torch.distributed.run" not in (entry / "cmdline").read_bytes()]

    try:
        marker = out / "checkpoints" / "latest.json"
        deadline = time.monotonic() + 180
        while not marker.is_file():
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.1)
        (rank,) = ranks()
        os.kill(rank, number)
        said = process.communicate(timeout=120)[0]
    finally:
        process.kill()
    step = json.loads(marker.read_text())["step"]
    if number == signal.SIGKILL:
        assert "error: training failed: rank 0 on " in said
        assert said.endswith(f"resume={out} goes on from step {step}\n")
        return
    assert step == read_metrics(out)[-1]["step"]
    assert said.endswith(f"Stopped as asked, saved after step {step} of 100000; resume={out} goes on\n")
    status = json.loads((out / "status.json").read_text())
    assert (process.returncode, status["status"], status["exit_status"]) == (75, "stopped", 75)
