"""The engine's own program, or a user's, started through us: for real, on gloo."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.launch import local, program_metrics
from orchestrator.run import main

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
               "entry.without=--log-throughput", "launch=local", "pin.tp=2", "train.step_timeout_s=90")  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    parsed = json.loads((out / "parsed.json").read_text())
    wanted = {"tensor_model_parallel_size": 2, "num_layers": 4, "train_iters": 5, "timing_log_level": 2, "split": "98,2,0"}
    wanted |= {"distributed_timeout_minutes": 2, "mock_data": True, "exit_signal": "SIGUSR1", "load": "checkpoints"}
    assert {name: parsed.get(name) for name in wanted} == wanted
    assert "log_throughput" not in parsed
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
@pytest.mark.parametrize("launcher", [pytest.param("torchrun", marks=pytest.mark.full), "deepspeed"])
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
    assert [row["lr"] for row in rows] == [None, *[1e-3] * 4], "the schedule is the script's own to give, and this one gives none"
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


def written_plan(folder: Path, **training: object) -> None:
    """What a follower reads of plan.json."""
    common = {"global_batch_size": 8, "seq_length": 100, "decoder_seq_length": None, "lr": 0.5, "warmup": 2}
    (folder / "plan.json").write_text(json.dumps({"training": common | training, "run": {"eval_every": 4}}))


def rows_of(folder: Path) -> list[dict[str, float | None]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def monitored(folder: Path, name: str, *lines: str) -> None:
    """Appends to a file as DeepSpeed's csv monitor does."""
    (folder / "logs" / "deepspeed").mkdir(parents=True, exist_ok=True)
    with (folder / "logs" / "deepspeed" / f"Train_Samples_{name}.csv").open("a") as file:
        file.write("".join(f"{line}\n" for line in lines))


def test_a_step_of_deepspeed_is_told_once_when_its_last_time_is_written(tmp_path: Path) -> None:
    written_plan(tmp_path)
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
    first = {"step": 1, "loss": None, "grad_norm": None, "lr": None, "step_time_s": 0.4, "tokens_per_s": 2000.0, "peak_memory_bytes": None}
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [first]
    program_metrics.Follower(tmp_path).poll()
    monitored(tmp_path, "elapsed_time_ms_step", "16,50.0", "step,elapsed_time_ms_step")
    follower.poll()
    rows = rows_of(tmp_path)
    assert [row["step_time_s"] for row in rows] == [0.4, 0.75]
    assert [row["lr"] for row in rows] == [None, 0.1], "DeepSpeed writes the next step's"


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


STARTED = "=== rank 1 on node0, 2026-11-22T04:00:00Z ==="
SUMS_GO_ON = "[after in-job setup and before initialize_megatron] datetime: 2026-11-22 04:00:00.000000 "


def megatrons_log(losses: dict[int, float], rates: dict[int, float], *, last: int, skipped: tuple[int, ...] = ()) -> list[str]:
    """What training_log of core_v0.16.1 prints with --log-interval 1 for a process that takes these steps: the rate after the scheduler's
    step, and sums that the first line does not clear. Each step takes 100 ms times its number."""
    lines, total, time, advanced, left_out = [], 0.0, 0.0, 0, 0
    for index, (step, loss) in enumerate(losses.items()):
        time += 100.0 * step
        left_out += step in skipped
        if step not in skipped:
            total, advanced = total + loss, advanced + 1
        lines.append(
            f" [2026-11-22 04:00:00.000000] iteration {step:8d}/{last:8d} | consumed samples: {8 * step:12d} | elapsed time per iteration "
            f"(ms): {time / (advanced + left_out):.1f} | learning rate: {rates[step + 1]:.6E} | global batch size: {8:5d} |"
            + (f" lm loss: {total / max(1, advanced):.6E} |" if total else "")
            + f" loss scale: 1.0 | grad norm: 1.000 | number of skipped iterations: {left_out:3d} | number of nan iterations:   0 |"
        )
        if index:
            total, time, advanced, left_out = 0.0, 0.0, 0, 0
    return lines


def test_rows_of_megatrons_log_are_of_one_step_each_after_a_resume_too(tmp_path: Path) -> None:
    """Loss and time are the step's own, though the second line of a process is a mean with the first; so is `lr`, not the next step's."""
    written_plan(tmp_path)
    (tmp_path / "logs").mkdir()
    losses = {step: 10.0 / step for step in range(1, 8)}
    rates = {step: 0.001 * step for step in range(1, 10)} | {1: 0.0}
    begun = megatrons_log({step: losses[step] for step in (1, 2, 3)}, rates, last=9, skipped=(2,))
    resumed = megatrons_log({step: losses[step] for step in (4, 5, 6, 7)}, rates, last=9)
    (tmp_path / "logs" / "rank-0.log").write_text(f"{SUMS_GO_ON}\n")
    (tmp_path / "logs" / "rank-1.log").write_text("\n".join((STARTED, *begun, STARTED, *resumed)) + "\n")
    program_metrics.Follower(tmp_path).poll(ended=True)
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert rows[1]["loss"] is None, "left out for an overflow, as in fp16"
    assert [row["loss"] for row in rows if row["step"] != 2] == pytest.approx([losses[step] for step in losses if step != 2], rel=1e-5)
    assert [row["step_time_s"] for row in rows] == pytest.approx([0.1 * step for step in losses], rel=1e-3)
    assert [row["lr"] for row in rows] == pytest.approx([rates[step] for step in losses], rel=1e-6)


def test_lines_of_a_megatron_before_0_16_are_taken_as_they_are(tmp_path: Path) -> None:
    """Its first line clears the sums; it doesn't print what 0.16 does at its start."""
    (tmp_path / "logs").mkdir()
    line = " iteration {:8d}/ 9 | elapsed time per iteration (ms): 10.0 | lm loss: {:.6E} |\n"
    (tmp_path / "logs" / "rank-1.log").write_text(STARTED + "\n" + line.format(1, 3.0) + line.format(2, 2.0))
    program_metrics.Follower(tmp_path).poll()
    assert [row["loss"] for row in rows_of(tmp_path)] == [3.0, 2.0]


def test_megatrons_validation_loss_is_in_the_row_of_its_step(tmp_path: Path) -> None:
    """As evaluate_and_print_results prints it, after the step's line; the row waits for it, but not after the run's end."""
    written_plan(tmp_path)
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "rank-1.log"
    said = " validation loss at iteration {} | lm loss value: {:.6E} | lm loss PPL: 1.000000E+00 | "
    lines = megatrons_log(dict.fromkeys(range(1, 10), 3.0), dict.fromkeys(range(1, 11), 0.1), last=9)
    log.write_text("\n".join(lines[:4]) + "\n")
    follower = program_metrics.Follower(tmp_path)
    follower.poll()
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2, 3]
    with log.open("a") as file:
        dashes = "-" * 60
        file.write("\n".join((dashes, said.format(4, 2.5), dashes, *lines[4:8], said.format(8, 2.25), lines[8])) + "\n")
    follower.poll()
    assert [row.get("valid_loss") for row in rows_of(tmp_path)] == [None, None, None, 2.5, None, None, None, 2.25]
    before = log.read_text()
    log.write_text(before + said.format("9 on validation set", 2.125) + "\n" + said.format("9 on test set", 2.0) + "\n")
    follower.poll()
    assert [row.get("valid_loss") for row in rows_of(tmp_path)][-1] == 2.125
    (tmp_path / "metrics.jsonl").unlink()
    log.write_text(before)
    program_metrics.Follower(tmp_path).poll(ended=True)
    assert [row.get("valid_loss") for row in rows_of(tmp_path)][-1] is None
    assert len(rows_of(tmp_path)) == 9


def test_a_corpus_of_one_document_is_refused_before_the_program_that_would_wait_for_ever(tmp_path: Path) -> None:
    """Megatron-LM core_v0.16.1, core/datasets/gpt_dataset.py: epochs of nothing are counted without an end."""
    corpus = tmp_path / "corpus"
    index = struct.pack("<9sQBQQiqqq", b"MMIDIDX\0\0", 1, 8, 1, 2, 10_000, 0, 0, 1)
    corpus.with_suffix(".idx").write_bytes(index)
    corpus.with_suffix(".bin").write_bytes(bytes(20_000))
    words = (f"data={corpus}", "data.split=99,1,0", "engine=megatron", "launch=none")
    done = run(tmp_path / "run", f"entry={tmp_path}/pretrain_gpt.py", *words)
    assert done.returncode == 2
    assert "has 1 document; Megatron-LM divides whole documents by --split 99,1,0, and evaluation gets none" in done.stderr
    assert not (tmp_path / "run").exists()
    done = run(tmp_path / "ours", *words)
    assert done.returncode == 0, done.stderr
    assert "note: megatron_args.sh can't be started: data=" in done.stdout


def test_what_contradicts_the_plan_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
        where = (f"entry={tmp_path}/none.py", *(() if "launch=local" in words else ("launch=none",)), f"out={tmp_path / 'run'}")
        assert main([*TRAIN, *where, *words]) == 2, words
        assert why in capsys.readouterr().err, words
        assert not (tmp_path / "run").exists()
