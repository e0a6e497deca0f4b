"""Real trainings of gpt_tiny over two nodes of a real Slurm on this machine, and what happens when something goes wrong."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import slurm_cluster
from test_local import wait_for

from orchestrator import tuning
from orchestrator.plan import from_json

pytestmark = [
    pytest.mark.engines,
    pytest.mark.xdist_group("slurm"),
    pytest.mark.skipif(slurm_cluster.missing() is not None, reason=str(slurm_cluster.missing())),
]
HERE = Path(__file__).parent
STEPS = 4
TRAIN = ("recipe=gpt_tiny", "gpus=4", "engine=megatron", "pin.tp=2", "pin.pp=2", "pin.vpp=1", "pin.micro_batch_size=4",
         "pin.recompute=none", "train.warmup=1")  # fmt: skip
ALONE = ("recipe=gpt_tiny", "gpus=2", "engine=megatron", "pin.tp=2", *TRAIN[6:])
FAST = """
gpu: cpu
gpus_per_node: 64
levels: [{name: loopback, size: node, bandwidth: 100 TB/s, latency: 1 ns}]
host_bandwidth: 3 GB/s
host_memory: 4 GB
software: {transformer_engine: false, flash_attention: false, apex: false}
"""
"""A network that no machine has."""
STARTED: list[subprocess.Popen[str]] = []
FOREVER = ("train.steps=100000",)
SUBMIT = ("launch=slurm", "launch.wait=true", "slurm.nodes=2", "slurm.time=10", "slurm.cpus_per_task=2")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with slurm_cluster.slurm(tmp_path_factory.mktemp("slurm") / "home") as environment:
        yield environment


@pytest.fixture(autouse=True)
def nothing_left(cluster: dict[str, str]) -> Iterator[None]:
    """A test that fails leaves no job to the next."""
    yield
    for process in STARTED:
        process.kill()
    STARTED.clear()
    subprocess.run(["scancel", "--user=root", "--full"], env=cluster, check=False)
    wait_for(lambda: not subprocess.run(["squeue", "-h"], env=cluster, capture_output=True, check=False).stdout, 60)


def begin(out: Path, environment: dict[str, str], *words: str, train: tuple[str, ...] = TRAIN) -> subprocess.Popen[str]:
    """The main path, in the background."""
    command = [sys.executable, "-m", "orchestrator.run", *train, *words, f"out={out}"]
    STARTED.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    return STARTED[-1]


def end(process: subprocess.Popen[str], seconds: float = 480.0) -> tuple[int, str]:
    try:
        said, _ = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return process.returncode, said


def metrics(out: Path) -> list[dict[str, Any]]:
    path = out / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def losses(out: Path) -> list[float]:
    return [row["loss"] for row in metrics(out)]


def status(out: Path) -> dict[str, Any]:
    return json.loads((out / "status.json").read_text())


def pid_of(rank: int, out: Path) -> int:
    """The worker of this rank: its working directory is the folder, its RANK is said in its environment."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if f"RANK={rank}".encode() in variables and b"orchestrator.workers.megatron" in words and (folder / "cwd").resolve() == out:
                return int(folder.name)
        except OSError:
            continue
    raise AssertionError(f"rank {rank} does not run")


def job_of(out: Path) -> str:
    return next(path.stem.removeprefix("slurm-") for path in out.glob("slurm-*.log"))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a local run on two ranks, without the pipeline, which was planned for a faster network than there is."""
    out = tmp_path_factory.mktemp("local") / "run"
    cluster = out.with_name("fast.yaml")
    cluster.write_text(FAST)
    code, said = end(begin(out, slurm_cluster.of_our_worker(), "launch=local", f"train.steps={STEPS}", f"cluster={cluster}", train=ALONE))
    assert code == 0, said
    slow = next(line for line in status(out)["preflight"] if line.startswith("tp=2: an all-reduce takes "))
    assert re.search(r"assumes \(.* GB/s measured, the link has 1e\+05\): its .* grow, the step from .* to about .*$", slow)
    assert f"preflight: {slow}\n" in said
    return losses(out)


@pytest.mark.parametrize("style", ["torchrun", pytest.param("srun", marks=pytest.mark.full)])
def test_two_nodes_train_to_the_losses_of_a_local_run(tmp_path: Path, cluster: dict[str, str], reference: list[float], style: str) -> None:
    """TP 2 x PP 2 over both nodes."""
    out = tmp_path / "a run"
    code, said = end(begin(out, cluster, *SUBMIT, f"slurm.style={style}", f"train.steps={STEPS}", "env.T_ADDED=a 'b'"))
    assert code == 0, said
    assert "Submitted as job" in said
    assert f"step {STEPS}/{STEPS}" in said
    assert losses(out) == pytest.approx(reference, abs=1e-5)
    assert (status(out)["status"], status(out)["steps"]) == ("finished", STEPS)
    assert (out / "logs" / "rank-0.log").read_text().splitlines()[1] == "ranks 0-1: n0, 2-3: n1"


@pytest.mark.full  # Slurm holds a requeued job back for two minutes
def test_a_killed_rank_is_requeued_and_goes_on_to_the_same_losses(tmp_path: Path, cluster: dict[str, str], reference: list[float]) -> None:
    """One task of srun a rank."""
    out = tmp_path / "run"
    process = begin(out, cluster, *SUBMIT, f"train.steps={STEPS}", "train.save_every=2", "slurm.style=srun", "slurm.requeue=1")
    wait_for((out / "checkpoints" / "latest.json").exists, 120)
    os.kill(pid_of(3, out), signal.SIGKILL)
    wait_for((out / "status.json").exists, 60)
    first = status(out)
    assert (first["status"], first["failed_rank"], first["failed_host"], first["restarts"]) == ("requeued", 3, "n1", 0)
    assert first["error"] == "ended by SIGKILL (out of memory, or killed by someone)"
    code, said = end(process)
    assert code == 0, said
    assert (status(out)["status"], status(out)["restarts"], status(out)["steps"]) == ("finished", 1, STEPS)
    assert [row["step"] for row in metrics(out)] == [1, 2, 3, 4]
    assert losses(out) == pytest.approx(reference, abs=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("style", ["torchrun", "srun"])
def test_a_hung_rank_ends_the_job_and_is_named(tmp_path: Path, cluster: dict[str, str], style: str) -> None:
    out = tmp_path / "run"
    process = begin(out, cluster, *SUBMIT, *FOREVER, f"slurm.style={style}", "train.step_timeout_s=5")
    wait_for(lambda: len(metrics(out)) >= 2, 120)
    os.kill(pid_of(2, out), signal.SIGSTOP)
    begun = time.monotonic()
    code, said = end(process)
    assert time.monotonic() - begun < 60
    assert (code, status(out)["status"], status(out)["exit_status"]) == (5, "failed", 5), said
    assert (status(out)["failed_rank"], status(out)["failed_host"]) == (2, "n1")
    assert "suspect: rank 2 on n1, which does not answer" in status(out)["error"]
    assert "Current thread" in (out / "logs" / "rank-0.log").read_text(), "stacks"


@pytest.mark.full
def test_the_time_limit_saves_requeues_and_then_stops(tmp_path: Path, cluster: dict[str, str]) -> None:
    """One minute each; Slurm warns 20 s before. Without a restart left the job ends as stopped, to be continued."""
    out = tmp_path / "run"
    process = begin(out, cluster, *SUBMIT[:3], "slurm.time=1", "slurm.requeue=1", "slurm.warning_s=20", *FOREVER)
    code, said = end(process, 400)
    written = status(out)
    assert (code, written["status"], written["exit_status"], written["restarts"]) == (75, "stopped", 75, 1), said
    saved = json.loads((out / "checkpoints" / "latest.json").read_text())["step"]
    assert written["error"] == f"stopped as asked, saved after step {saved} of 100000"
    assert [row["step"] for row in metrics(out)] == list(range(1, saved + 1)), "no step is lost or repeated"


@pytest.mark.full
def test_a_step_longer_than_two_minutes_ends_and_is_saved_before_the_time_limit(tmp_path: Path, cluster: dict[str, str]) -> None:
    """Slurm warns 180 s before a limit of four minutes, in the middle of a step that takes 130 s more: one rank is held back that long. Its
    default of 120 s would have ended the job first."""
    out = tmp_path / "run"
    process = begin(out, cluster, *SUBMIT[:3], "slurm.time=4", "slurm.warning_s=180", "train.step_timeout_s=600", *FOREVER)
    wait_for(lambda: len(metrics(out)) >= 2, 55)
    wait_for(lambda: "the time limit is near" in (out / f"slurm-{job_of(out)}.log").read_text(), 120)
    held = pid_of(2, out)
    os.kill(held, signal.SIGSTOP)
    time.sleep(130)
    os.kill(held, signal.SIGCONT)
    code, said = end(process, 120)
    assert (code, status(out)["status"]) == (75, "stopped"), said
    saved = json.loads((out / "checkpoints" / "latest.json").read_text())["step"]
    assert status(out)["error"] == f"stopped as asked, saved after step {saved} of 100000"
    assert [row["step"] for row in metrics(out)] == list(range(1, saved + 1)), "no step is lost or repeated"


@pytest.mark.full
def test_the_warning_is_kept_for_ranks_that_still_start(tmp_path: Path, cluster: dict[str, str]) -> None:
    out = tmp_path / "run"
    process = begin(out, cluster, *SUBMIT, *FOREVER)
    wait_for(lambda: list(out.glob("slurm-*.log")), 60)
    time.sleep(1)
    subprocess.run(["scancel", "--batch", "--signal=USR1", job_of(out)], env=cluster, check=True)
    code, said = end(process)
    assert (code, status(out)["status"]) == (75, "stopped"), said


@pytest.mark.full
@pytest.mark.parametrize(("tracking", "nodes"), [("pgid", "2"), ("linuxproc", "1-2")], ids=["ranks untold", "elastic"])
def test_a_warning_reaches_the_ranks_and_ends_no_task(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, tracking: str, nodes: str
) -> None:
    out = tmp_path / "run"
    with slurm_cluster.slurm(tmp_path_factory.mktemp("slurm") / "home", tracking=tracking) as environment:
        process = begin(out, environment, *SUBMIT[:2], f"slurm.nodes={nodes}", *SUBMIT[3:], *FOREVER)
        wait_for(lambda: len(metrics(out)) >= 2, 180)
        subprocess.run(["scancel", "--batch", "--signal=USR1", job_of(out)], env=environment, check=True)
        code, said = end(process)
    assert (code, status(out)["status"]) == (75, "stopped"), said
    assert json.loads((out / "checkpoints" / "latest.json").read_text())["step"] == len(metrics(out))


@pytest.mark.full
@pytest.mark.skipif(not os.access(slurm_cluster.FREEZER, os.W_OK), reason="no cgroup of version 1 in which groups can be made")
@pytest.mark.parametrize(
    "more", [("slurm.nodes=2",), ("slurm.nodes=2", "slurm.style=srun"), ("slurm.nodes=1-2",)], ids=["torchrun", "srun", "elastic"]
)
def test_a_preempted_job_saves_and_goes_on_and_a_failure_ends_at_once(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, more: tuple[str, ...]
) -> None:
    """By a job of another partition, GraceTime before the end: TERM to the tasks, nothing to job.sbatch. Where a rank fails TERM comes to
    the other tasks, too, KillWait before KILL."""
    out = tmp_path / "run"
    with slurm_cluster.slurm(tmp_path_factory.mktemp("slurm") / "home", tracking="cgroup", grace_s=90, kill_wait_s=60) as environment:
        process = begin(out, environment, *SUBMIT[:2], *SUBMIT[3:], *FOREVER, "slurm.requeue=1", "train.step_timeout_s=600", *more)
        wait_for(lambda: len(metrics(out)) >= 2, 180)
        urgent = ["sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"]
        subprocess.run(urgent, env=environment, check=True)
        wait_for((out / "status.json").exists, 80)
        log = (out / f"slurm-{job_of(out)}.log").read_text()
        saved = json.loads((out / "checkpoints" / "latest.json").read_text())["step"]
        assert (status(out)["status"], saved) == ("requeued", len(metrics(out))), log
        assert "job.sbatch: Slurm is about to end the job, the ranks are asked to save and end" in log
        pends = ["squeue", "--noheader", "--states=PENDING", f"--jobs={job_of(out)}"]
        wait_for(lambda: subprocess.run(pends, env=environment, check=False, capture_output=True).stdout, 40)  # its script has ended, too
        asks = ["scontrol", "update", f"JobId={job_of(out)}", "StartTime=now"]  # Slurm holds a requeued job back for two minutes
        subprocess.run(asks, env=environment, check=True)
        wait_for(lambda: len(metrics(out)) > saved, 240)
        begun = time.monotonic()
        os.kill(pid_of(3, out), signal.SIGKILL)
        code, said = end(process)
        assert time.monotonic() - begun < 50
    assert (code, status(out)["status"], status(out)["restarts"]) == (137, "failed", 1), said
    assert [row["step"] for row in metrics(out)] == list(range(1, len(metrics(out)) + 1)), "no step is lost or repeated"


@pytest.mark.full
def test_scancel_is_the_cause_and_is_not_requeued(tmp_path: Path, cluster: dict[str, str]) -> None:
    out = tmp_path / "run"
    process = begin(out, cluster, *SUBMIT, *FOREVER, "slurm.requeue=3")
    wait_for(lambda: len(metrics(out)) >= 2, 120)
    subprocess.run(["scancel", job_of(out)], env=cluster, check=True)
    code, said = end(process)
    assert code != 0, said
    assert (status(out)["status"], status(out)["error"]) == ("interrupted", "Slurm: cancelled")


ENTRIES = {
    "megatron": (f"entry={HERE / 'megatron_stand_in.py'}", f"env.T_FLAGS={HERE.parent / 'engines' / 'megatron_flags.csv'}", "pin.tp=2"),
    "torchrun": (f"entry={HERE / 'deepspeed_user.py'}", "engine=deepspeed", "pin.tp=1"),
    "deepspeed": (f"entry={HERE / 'deepspeed_user.py'}", "engine=deepspeed", "pin.tp=1", "entry.launcher=deepspeed"),
}


@pytest.mark.full
@pytest.mark.parametrize("entry", ENTRIES)
def test_the_job_itself_writes_the_metrics_of_a_program_that_nobody_waits_for(tmp_path: Path, cluster: dict[str, str], entry: str) -> None:
    out = tmp_path / "run"
    words = (*TRAIN[:2], *ENTRIES[entry], "train.steps=5", "train.warmup=1", "launch=slurm", *SUBMIT[2:], f"out={out}")
    command = [sys.executable, "-m", "orchestrator.run", *words]
    done = subprocess.run(command, env=cluster, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (out / "metrics.jsonl").exists()
    wait_for((out / "status.json").exists, 200)
    said = next(out.glob("slurm-*.log")).read_text()
    assert [row["step"] for row in metrics(out)] == [1, 2, 3, 4, 5], said
    assert (status(out)["status"], status(out)["steps"]) == ("finished", 5)
    assert status(out)["measured_step_time_s"] > 0
    assert status(out)["predicted_step_time_s"] > 0
    if entry == "deepspeed":
        assert (out / "hostfile").read_text() == "n0 slots=2\nn1 slots=2\n"
        assert "launch.py" in said


@pytest.mark.full
def test_tune_in_an_allocation_runs_its_plans_on_both_nodes_and_trains_the_faster(tmp_path: Path, cluster: dict[str, str]) -> None:
    """salloc, and the same command in it: two plans one after the other, then the run itself, all of the one job."""
    out = tmp_path / "a tune"
    words = ["recipe=gpt_tiny", "gpus=4", "engine=megatron", "launch=slurm", "slurm.nodes=2", "slurm.cpus_per_task=2"]
    words += ["tune=2", "tune.steps=5", f"train.steps={STEPS}", f"out={out}"]
    command = ["salloc", "-N2", "-c4", "-Q", sys.executable, "-m", "orchestrator.run", *words]
    ended = subprocess.run(command, env=cluster, capture_output=True, text=True, timeout=500, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    trials = tuning.read_trials(out)
    assert [trial.why for trial in trials] == ["", ""]
    best = min(trials, key=lambda trial: trial.measured_s or 0.0)
    assert from_json((out / "plan.json").read_bytes()).candidate == best.plan.candidate
    for folder in (out, out / "tune" / "1", out / "tune" / "2"):
        assert (folder / "logs" / "rank-0.log").read_text().splitlines()[1] == "ranks 0-1: n0, 2-3: n1"
    assert "taken" in ended.stdout
    assert len(metrics(out)) == STEPS


@pytest.mark.full
def test_no_rank_of_a_program_that_was_measured_lives_on_beside_the_next_in_the_allocation(tmp_path: Path, cluster: dict[str, str]) -> None:
    """A script of the user's, which would go on for long: ended on both nodes, then the next plan runs."""
    out = tmp_path / "a tune"
    script = (f"entry={HERE / 'deepspeed_user.py'}", "entry.args=--steps 300", "engine=deepspeed", "pin.tp=1", "pin.zero_stage=1")
    words = ["recipe=gpt_tiny", "gpus=4", "launch=slurm", "slurm.nodes=2", "slurm.cpus_per_task=2", *script, "tune=2", "tune.rounds=1",
             "tune.steps=4", f"out={out}"]  # fmt: skip
    command = ["salloc", "-N2", "-c4", "-Q", sys.executable, "-m", "orchestrator.run", *words]
    ended = subprocess.run(command, env=cluster, capture_output=True, text=True, timeout=500, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    trials = tuning.read_trials(out)
    assert [(trial.why, trial.measured_s is not None) for trial in trials] == [("", True)] * 2
    for folder, next_one in ((out / "tune" / "1", out / "tune" / "2"), (out / "tune" / "2", out)):
        assert 4 < len(metrics(folder)) < 300
        assert not [*folder.glob("user-*.json")]
        last_written = max(path.stat().st_mtime for path in (folder / "logs" / "deepspeed").iterdir())
        assert last_written < (next_one / "launch.sh").stat().st_mtime
    assert metrics(out)[-1]["step"] == 300
    assert len([*out.glob("user-*.json")]) == 4


@pytest.mark.full
def test_a_dead_node_is_the_cause_and_the_job_goes_on_elsewhere(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Last: a cluster of its own, which loses slurmd of n1 and gets it back."""
    home = tmp_path_factory.mktemp("slurm") / "home"
    with slurm_cluster.slurm(home, timeout_s=10) as environment:
        out = tmp_path / "run"
        process = begin(out, environment, *SUBMIT, *FOREVER, "train.save_every=1")
        wait_for(lambda: len(metrics(out)) >= 2, 120)
        os.kill(int((home / "slurmd.n1.pid").read_text()), signal.SIGKILL)
        code, said = end(process)
        assert code != 0, said
        assert (status(out)["status"], status(out)["error"]) == ("failed", "Slurm: a node failed: n1"), said


@pytest.mark.full
def test_a_job_that_loses_its_first_node_goes_back_into_the_queue(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Its script is gone with that node, and Slurm, which need not have noticed, keeps the allocation: another node asks."""
    home = tmp_path_factory.mktemp("slurm") / "home"
    with slurm_cluster.slurm(home) as environment:
        out = tmp_path / "run"
        begin(out, environment, *SUBMIT[:2], "slurm.nodes=1-2", *SUBMIT[3:], *FOREVER, "train.save_every=1", "slurm.requeue=1")
        wait_for(lambda: len(metrics(out)) >= 2, 180)
        lose("n0", home)
        shows = ["scontrol", "show", "job", job_of(out)]
        wait_for(lambda: "Restarts=1 " in subprocess.run(shows, env=environment, capture_output=True, text=True, check=False).stdout, 240)
        lose("n1", home)  # slurmstepd would wait for the first node after the cluster's end


def of_node(name: str, home: Path) -> set[int]:
    """slurmd of a node, the tasks that run there, and what started them."""
    found = {int((home / f"slurmd.{name}.pid").read_text())}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            starter = Path(f"/proc/{parent}/cmdline").read_text()
        except OSError:
            continue
        if f"SLURMD_NODENAME={name}".encode() in variables and f"SLURM_CONF={home / 'slurm.conf'}".encode() in variables:
            found |= {int(folder.name), *([parent] if starter.startswith("slurmstepd") else [])}
    return found


def lose(name: str, home: Path) -> None:
    """Kills all of a node, all at once: what watches an srun ends the step of one that is killed."""
    members = of_node(name, home)
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for member in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member, number)


@pytest.mark.full
def test_a_job_that_loses_a_node_goes_on_at_once_on_the_other_one_under_a_new_plan(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Unattended, inside its allocation: Slurm need not even have noticed. Everything of node n1 is killed; no step that was saved is taken
    twice, and the losses are those of a run that nobody disturbed."""
    home = tmp_path_factory.mktemp("slurm") / "home"
    steps = 16
    recipe = ("recipe=gpt_tiny", "gpus=4", "engine=megatron", f"train.steps={steps}")
    with slurm_cluster.slurm(home) as environment:
        code, said = end(begin(tmp_path / "whole", slurm_cluster.of_our_worker(), "launch=local", train=recipe))
        assert code == 0, said
        out = tmp_path / "run"
        words = ("launch=slurm", "launch.wait=true", "slurm.nodes=1-2", "slurm.time=10", "slurm.cpus_per_task=2", "train.save_every=1",
                 "train.keep_last=2")  # fmt: skip
        process = begin(out, environment, *words, train=recipe)
        wait_for(lambda: len(metrics(out)) >= 3, 180)
        assert json.loads((out / "plan.json").read_text())["world_size"] == 4
        lost = time.time()
        lose("n1", home)
        wait_for(lambda: json.loads((out / "plan.json").read_text())["world_size"] == 2, 180)
        planned = time.time()
        done = len(metrics(out))
        wait_for(lambda: len(metrics(out)) > done, 180)
        print(f"from the loss of a node to the new plan {planned - lost:.1f} s, to the next step {time.time() - lost:.1f} s")
        code, said = end(process)
        log = next(out.glob("slurm-*.log")).read_text()
        assert code == 0, said + log
        assert "job.sbatch: 1 of 2 nodes answer: n0" in log
        assert "replan: 1 of 1 nodes" in log
        assert (status(out)["status"], status(out)["steps"], status(out)["restarts"]) == ("finished", steps, 0)
        assert [row["step"] for row in metrics(out)] == list(range(1, steps + 1))
        assert losses(out) == pytest.approx(losses(tmp_path / "whole"), abs=1e-4)
        assert [path.name for path in (out / "plans").iterdir()] == ["0-4-ranks"]
