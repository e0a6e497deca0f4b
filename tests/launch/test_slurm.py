"""Slurm: with stubs what is asked of it, and on a real one (two nodes on this machine) what comes of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm_cluster
from slurm_keys import slurm_options
from test_local import prepared, wait_for
from test_render import NASTY

from orchestrator.errors import LaunchError
from orchestrator.job import Job, SlurmOptions
from orchestrator.launch import local, slurm
from orchestrator.launch.local import Row
from orchestrator.launch.render import files

SBATCH = """#!/bin/sh
printf '%s\\n' "$*" >> {folder}/calls
env | grep '^SBATCH_' > {folder}/env
case "$1" in
--test-only) echo "sbatch: {test}" >&2; exit {refuse};;
*) echo "4711;cluster";;
esac
"""


def stub(folder: Path, monkeypatch: pytest.MonkeyPatch, *, refuse: int = 0, test: str = "Job 4711 to start at noon") -> None:
    (folder / "bin").mkdir()
    program = folder / "bin" / "sbatch"
    program.write_text(SBATCH.format(folder=folder, refuse=refuse, test=test))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")


def test_submit_asks_first_and_says_how_to_watch_and_cancel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub(tmp_path, monkeypatch)
    out = tmp_path / "a run"
    done = slurm.submit(out)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls == [f"--test-only --chdir={out} {out}/job.sbatch", f"--parsable --chdir={out} {out}/job.sbatch"]
    assert (done.job_id, done.cancel, done.test) == ("4711", "scancel 4711", "Job 4711 to start at noon")
    assert done.watch == f"squeue -j 4711; tail -F '{out}/slurm-4711.log'"
    assert "Submitted as job 4711" in str(done)


def test_a_refused_job_is_not_submitted_and_slurm_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub(tmp_path, monkeypatch, refuse=1, test="error: invalid partition specified: h100")
    with pytest.raises(LaunchError, match="invalid partition specified: h100") as refused:
        slurm.submit(tmp_path)
    assert refused.value.status == 2
    assert len((tmp_path / "calls").read_text().splitlines()) == 1


def test_the_script_wins_over_the_submitters_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub(tmp_path, monkeypatch)
    for name in ("EXPORT", "PARTITION", "ACCOUNT", "TIMELIMIT"):
        monkeypatch.setenv(f"SBATCH_{name}", "mine")
    slurm.submit(tmp_path, SlurmOptions(partition="theirs", time="1:00"))
    assert (tmp_path / "env").read_text() == "SBATCH_ACCOUNT=mine\n", "what the script leaves open stays the site's or user's"


SCONTROL = """#!/bin/sh
echo "   JobState=$(cat {folder}/state) Reason=None ExitCode=0:0"
"""


def test_a_finished_run_is_over_while_slurm_still_waits_for_a_lost_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm keeps the job COMPLETING until SlurmdTimeout; the run has written that it finished. Before that, and where the run stopped or
    is requeued, COMPLETING is no end."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "scontrol").write_text(SCONTROL.format(folder=tmp_path))
    (tmp_path / "bin" / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    (tmp_path / "state").write_text("COMPLETING")
    job = slurm.Submitted(job_id="4711", log="", watch="", cancel="", test="")
    looks = []
    endings = ("requeued", "stopped", "finished")

    def row(_: Row) -> None: ...

    def report() -> bool:
        status = endings[min(len(looks), 2)]
        looks.append(status)
        fields = {"error": None, "failed_rank": None, "failed_host": None, "log": "", "restarts": 1, "exit_status": 0}
        times = {"started": "2026-01-01T00:00:00+00:00", "ended": "9999-01-01T00:00:00+00:00"}
        (tmp_path / "status.json").write_text(json.dumps({"status": status, **fields, **times}))
        return True

    monkeypatch.setattr(local.Metrics, "new_rows", lambda self: [{"step": len(looks)}] if report() else [])
    outcome = slurm.follow(job, tmp_path, on_step=row, poll_s=0.01)
    assert looks[:3] == list(endings)
    assert outcome.status == "finished"
    assert outcome.restarts == 1


def test_without_slurm_there_is_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="no sbatch on the PATH"):
        slurm.submit(tmp_path)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    job = prepared(tmp_path)
    with pytest.raises(LaunchError, match="no Slurm allocation"):
        slurm.start_in_allocation(job, tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n0")
    with pytest.raises(LaunchError, match="no srun"):
        slurm.start_in_allocation(job, tmp_path)


SRUN = """#!/bin/bash
trap 'sleep 2.5; touch {folder}/over; exit 143' TERM
touch {folder}/up
while true; do sleep 0.1; done
"""
HOSTS = """#!/bin/sh
case "$2" in
hostnames) echo n0; echo n1;;
node) echo "NodeAddr=127.0.0.1";;
esac
"""


def test_who_ends_a_run_in_an_allocation_goes_on_when_its_ranks_on_all_nodes_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """srun, told to end, comes back when the tasks of all nodes are gone; here it takes longer than what is left behind is waited for."""
    (tmp_path / "bin").mkdir()
    for name, text in (("srun", SRUN), ("scontrol", HOSTS)):
        (tmp_path / "bin" / name).write_text(text.format(folder=tmp_path))
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    for name, value in (("JOB_ID", "1"), ("JOB_NODELIST", "n[0-1]"), ("JOB_NUM_NODES", "2"), ("CPUS_ON_NODE", "2")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    job = Job(name="t", module="m", arguments=(), environment={}, files=(), num_nodes=2, ranks_per_node=1, backend="gloo")
    for file in files(job, slurm=SlurmOptions()):
        (tmp_path / file.path).write_text(file.content)
    outcome = slurm.start_in_allocation(job, tmp_path, enough=(tmp_path / "up").exists)
    assert (outcome.status, outcome.exit_status) == ("finished", 0)
    assert (tmp_path / "over").exists()


# ------------------------------------------------------------------------------------------------------- a real Slurm

real = [
    pytest.mark.engines,
    pytest.mark.xdist_group("slurm"),
    pytest.mark.skipif(slurm_cluster.missing() is not None, reason=str(slurm_cluster.missing())),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with slurm_cluster.slurm(tmp_path_factory.mktemp("slurm") / "home") as environment:
        yield environment


@pytest.fixture
def inside(cluster: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, cluster[name])
    return cluster


def two_nodes(out: Path, *arguments: str, **options: str) -> Job:
    """Two nodes of two ranks each, of the small program."""
    prepared(out, *arguments)
    job = Job(name="tiny", module="rank_program", arguments=arguments, environment={"T_PLAN": "needs"}, files=(), num_nodes=2,
              ranks_per_node=2, backend="gloo")  # fmt: skip
    for file in files(job, slurm=slurm_options({"time": "00:05:00", "cpus_per_task": "2", "python": sys.executable, **options})):
        (out / file.path).write_text(file.content)
    return job


class TestRealSlurm:
    pytestmark = real

    def test_a_partition_that_would_preempt_the_job_before_it_saves_is_said(
        self, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with slurm_cluster.slurm(tmp_path_factory.mktemp("slurm") / "home", tracking="pgid", grace_s=90) as environment:
            for name in ("SLURM_CONF", "PATH"):
                monkeypatch.setenv(name, environment[name])
            said = []
            for partition, seconds in (("main", None), ("main", 60), ("urgent", None)):
                job = Job(name="t", module="m", arguments=(), environment={}, files=(), num_nodes=1, ranks_per_node=1, backend="gloo")
                for file in files(job, slurm=SlurmOptions(partition=partition, warning_s=seconds)):
                    (tmp_path / file.path).write_text(file.content)
                said.append(str(slurm.submit(tmp_path)).partition("\nwarning: ")[2])
        begins = "Slurm preempts jobs of partition main with GraceTime=90 s, and "
        before = "what was saved before counts (train.save_every=)"
        assert said == [
            f"{begins}a step and a save may take 120 s: {before}",
            f"{begins}proctrack/pgid ends the ranks at once: {before}, or PreemptParameters=send_user_signal of the site",
            "",
        ]

    @pytest.mark.full
    def test_a_submitted_job_runs_on_both_nodes_and_nothing_leaks(
        self, tmp_path: Path, inside: dict[str, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        out = tmp_path / "it's a $(run)"
        two_nodes(out, "show", "a 'b'")
        monkeypatch.setenv("T_SECRET", "of the submitter")
        submitted = slurm.submit(out)
        assert "to start at" in submitted.test
        assert slurm.wait(submitted, poll_s=0.3) == ("COMPLETED", 0)
        shown = [json.loads((out / f"shown-{rank}.json").read_text()) for rank in range(4)]
        assert [one["env"]["SLURMD_NODENAME"] for one in shown] == ["n0", "n0", "n1", "n1"]
        assert [one["env"]["LOCAL_RANK"] for one in shown] == ["0", "1", "0", "1"]
        assert all(one["argv"] == ["show", "a 'b'"] and one["cwd"] == str(out) for one in shown)
        assert all(one["env"]["T_PLAN"] == "needs" and "T_SECRET" not in one["env"] for one in shown)
        assert (out / "logs" / "rank-3.log").read_text().endswith(" ===\nrank 3 is done\n")
        assert "job " in Path(submitted.log).read_text()
        written = json.loads((out / "status.json").read_text())
        assert (written["status"], written["exit_status"], written["steps"], written["error"]) == ("finished", 0, 3, None)
        assert written["measured_step_time_s"] == 0.01

    @pytest.mark.full
    def test_a_dead_rank_ends_the_job_on_both_nodes(self, tmp_path: Path, inside: dict[str, str]) -> None:
        two_nodes(tmp_path, "killed")
        seen: list[Row] = []
        begin = time.monotonic()
        outcome = slurm.follow(slurm.submit(tmp_path), tmp_path, on_step=seen.append, poll_s=0.3)
        assert time.monotonic() - begin < 60
        assert (outcome.status, outcome.exit_status, outcome.rank) == ("failed", 137, 1)
        assert [row["step"] for row in seen] == [1, 2, 3]
        written = json.loads((tmp_path / "status.json").read_text())
        assert (written["status"], written["exit_status"], written["failed_rank"]) == ("failed", 137, 1)
        assert written["error"] == "ended by SIGKILL (out of memory, or killed by someone)"

    @pytest.mark.full
    def test_a_cancelled_job_says_so(self, tmp_path: Path, inside: dict[str, str]) -> None:
        two_nodes(tmp_path, "sleep")
        submitted = slurm.submit(tmp_path)
        wait_for(lambda: all((tmp_path / f"up-{rank}").exists() for rank in range(4)))
        subprocess.run(["scancel", submitted.job_id], check=True)
        outcome = slurm.follow(submitted, tmp_path, poll_s=0.3)
        assert outcome.status == "interrupted"
        wait_for((tmp_path / "status.json").exists, 20)
        written = json.loads((tmp_path / "status.json").read_text())
        assert (written["status"], written["exit_status"], written["steps"]) == ("interrupted", 143, 3)

    def test_slurms_refusal_is_the_message(self, tmp_path: Path, inside: dict[str, str]) -> None:
        two_nodes(tmp_path, partition="no such")
        with pytest.raises(LaunchError, match="nvalid partition"):
            slurm.submit(tmp_path)

    def test_a_real_sbatch_reads_every_word_as_it_was_written(self, tmp_path: Path, inside: dict[str, str]) -> None:
        name = " ".join(NASTY).replace("\\\\", "")
        job = Job(name=name, module="m", arguments=(), environment={}, files=(), num_nodes=1, ranks_per_node=1, backend="gloo")
        (tmp_path / "job.sbatch").write_text(files(job, slurm=SlurmOptions(extra=("--hold", "--comment", name)))[1].content)
        (tmp_path / "launch.sh").write_text("")
        submitted = slurm.submit(tmp_path)
        shown = subprocess.run(["squeue", "-h", "-j", submitted.job_id, "-o", "%j|%k"], capture_output=True, text=True, check=True).stdout
        subprocess.run(["scancel", submitted.job_id], check=True)
        assert shown.strip("\n") == f"{name}|{name}"

    @pytest.mark.full
    def test_an_allocation_is_used_and_the_rank_that_failed_is_named(self, tmp_path: Path, inside: dict[str, str]) -> None:
        two_nodes(tmp_path, "exit", "7")
        program = """
import json, sys
from pathlib import Path
from orchestrator.job import Job
from orchestrator.launch.slurm import start_in_allocation
out = Path(sys.argv[1])
job = Job(name="t", module="m", arguments=(), environment={}, files=(), num_nodes=2, ranks_per_node=2, backend="gloo")
outcome = start_in_allocation(job, out)
print(json.dumps([outcome.status, outcome.exit_status, outcome.last_line, outcome.rank, len(outcome.rows)]))
"""
        command = ["salloc", "-N2", "-c2", "-Q", sys.executable, "-c", program, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
        assert done.stdout, done.stderr
        assert json.loads(done.stdout) == ["failed", 7, "train.seq_length=7: is odd", 1, 3]
