"""slurm.nodes=1-2: the folder of a job gets another plan for the nodes that there are, and job.sbatch goes on with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator import replan, run
from orchestrator.errors import NoPlanError
from orchestrator.job import ContainerOptions, Job, SlurmOptions
from orchestrator.launch.render import filled, job_sbatch
from orchestrator.plan import from_json

TRAIN = ("recipe=gpt_tiny", "gpus=4", "engine=megatron", "train.save_every=5", "slurm.nodes=1-2", "launch=none")
SRUN = """#!/bin/bash
echo "${*//$'\n'/ }" >>"$T_CALLS"
if [[ "${@: -1}" == true ]]; then
  [[ "$*" == *--nodelist=n0* ]]
  exit
fi
[[ "$*" == *--nodes=1* ]] || {{ touch logs/failed-17-0-0; exit 1; }}
"""
"""The ranks fail on two nodes, since n1 is gone, and end well on one."""
SCONTROL = "#!/bin/sh\n[ $2 = hostnames ] && printf 'n0\\nn1\\n' || echo '  NodeAddr=127.0.0.1 x'\n"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "a run"
    assert run.main([*TRAIN, f"out={folder}"]) == 0
    return folder


def test_the_folder_gets_a_plan_for_the_nodes_that_are_left_and_keeps_the_former(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (out / "plan.json").read_bytes()
    script = (out / "job.sbatch").read_bytes()
    assert replan.main([str(out), "2", "1", "2"]) == 0
    assert capsys.readouterr().out.endswith("2\n")
    assert (out / "plan.json").read_bytes() == before, "it is for two nodes already"
    assert replan.main([str(out), "1", "1", "2"]) == 0
    said = capsys.readouterr()
    assert said.out == "1\n"
    assert "world_size 4 -> 2" in said.err
    plan, former = from_json((out / "plan.json").read_bytes()), from_json(before)
    assert (plan.world_size, plan.engine, plan.run, plan.training) == (2, "megatron", former.run, former.training)
    assert (out / "plans" / "0-4-ranks" / "plan.json").read_bytes() == before
    assert "planned for 1 node(s) of 2" in (out / "launch.sh").read_text()
    assert (out / "job.sbatch").read_bytes() == script, "it is running"
    assert replan.main([str(out), "2", "1", "2"]) == 0, "the node is back"
    assert from_json((out / "plan.json").read_bytes()) == from_json(before)


def test_the_number_of_a_row_is_of_that_table_alone(out: Path) -> None:
    """Other nodes have another table: the fastest of it is taken."""
    config = out / "config.yaml"
    config.write_text(f"{config.read_text()}take: 60\n")
    assert replan.replan(out, 1, 1, 2) == 1


def test_where_no_number_of_nodes_has_a_plan_nothing_is_written(out: Path) -> None:
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(NoPlanError, match="no plan for 1 to 1 nodes of 7 ranks"):
        replan.replan(out, 1, 1, 7)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_job_sbatch_goes_on_with_the_nodes_that_answer(out: Path, tmp_path: Path) -> None:
    """Slurm's programs are stand-ins; tests/launch/test_slurm_training.py asks the real ones."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("srun", SRUN.replace("{{", "{").replace("}}", "}")), ("scontrol", SCONTROL)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (out / "logs").mkdir()
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "T_CALLS": str(tmp_path / "calls"), "SLURM_JOB_ID": "17",
                   "SLURM_JOB_NODELIST": "n[0-1]", "SLURM_CPUS_ON_NODE": "8", "ORCHESTRATOR_PYTHON": sys.executable}  # fmt: skip
    done = subprocess.run(["bash", "job.sbatch"], cwd=out, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 2 nodes answer: n0" in done.stdout
    assert "replan: 1 of 1 nodes" in done.stderr
    starts = [line for line in (tmp_path / "calls").read_text().splitlines() if "launch.sh" in line]
    assert [line.split()[:3] for line in starts] == [
        ["--nodes=2", "--ntasks=2", "--nodelist=n0,n1"],
        ["--nodes=1", "--ntasks=1", "--nodelist=n0"],
    ]
    assert json.loads((out / "status.json").read_text())["status"] == "finished"


def test_the_job_asks_for_the_range_and_to_live_on_when_a_node_is_lost(out: Path) -> None:
    lines = (out / "job.sbatch").read_text().splitlines()
    assert "#SBATCH --nodes=1-2" in lines
    assert "#SBATCH --no-kill" in lines
    assert not any(line.startswith("#SBATCH --ntasks") for line in lines), "Slurm would give the least number of nodes"


def test_another_scheduler_s_file_is_for_the_most_nodes_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main([*TRAIN, "write=lsf", f"out={tmp_path / 'run'}"]) == 0
    assert "write=lsf: for the 2 nodes of slurm.nodes=1-2, a range that job.sbatch alone keeps" in capsys.readouterr().out
    assert "#BSUB -n 2\n" in (tmp_path / "run/job.lsf").read_text()
    assert "#SBATCH --nodes=1-2\n" in (tmp_path / "run/job.sbatch").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("slurm.nodes=2-1",), "must have the least first"),
        (("slurm.nodes=1-3",), "does not divide the 4 ranks"),
        (("train.save_every=0",), "there are none: train.save_every="),
        (("engine=deepspeed", "train.precision=fp32", "train.optimizer=sgd"), "read in their own only"),
        (("entry=x.py",), "name one number"),
    ],
)
def test_what_could_not_go_on_is_refused_where_it_is_typed(
    tmp_path: Path, words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {word.partition("=")[0]: word for word in (*TRAIN, *words)}
    assert run.main([*given.values(), f"out={tmp_path / 'run'}"]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("restarts", "silent", "failed", "calls"),
    [("0", 4, True, "requeue 17"), ("1", 4, True, "scancel 17"), ("0", 3, True, ""), ("0", 23, False, ""), ("0", 24, False, "requeue 17")],
)
def test_a_node_asks_for_the_requeue_where_the_jobs_own_script_is_gone(
    tmp_path: Path, restarts: str, silent: int, failed: bool, calls: str
) -> None:
    """Of a job that keeps its allocation when a node is lost, the first node may be the one. `sleep` is a stand-in that is killed the next
    time: the node itself is ended."""
    sleep = f"echo >>{tmp_path}/slept; (( $(wc -l <{tmp_path}/slept) <= {silent + 1} )) || kill -KILL $$"
    for name, text in (
        ("scontrol", f'echo "$*" >>{tmp_path}/calls'),
        ("scancel", f'echo "scancel $*" >>{tmp_path}/calls'),
        ("sleep", sleep),
    ):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "heartbeat").write_text("12\n")
    if failed:
        (tmp_path / "logs" / "failed-17-0-2").touch()
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_RESTART_COUNT": restarts, "SLURM_JOB_ID": "17"}
    subprocess.run(["bash", "-c", filled("guard.sh", requeue=1), tmp_path], env=environment, timeout=60, check=False)
    assert (tmp_path / "calls").exists() == bool(calls)
    assert not calls or (tmp_path / "calls").read_text() == f"{calls}\n"


def test_what_asks_for_the_requeue_is_started_outside_of_the_image_on_all_nodes_but_the_first() -> None:
    job = Job(name="t", module="m", arguments=(), environment={}, files=(), num_nodes=4, ranks_per_node=2, backend="gloo")
    for runtime in ("pyxis", "apptainer"):
        container = ContainerOptions(image="/images/a.sqsh", runtime=runtime)
        lines = job_sbatch(job, SlurmOptions(nodes=(2, 4), requeue=1), container).splitlines()
        (guard,) = [line for line in lines if line.strip().startswith('srun "${others[@]}"')]
        assert "a.sqsh" not in guard
        assert [line for line in lines if "a.sqsh" in line and line.startswith("srun")]


def test_a_run_folder_may_be_moved_before_and_after_its_start(out: Path) -> None:
    """None of its files says where it lies."""
    assert [path for path in out.rglob("*") if path.is_file() and str(out) in path.read_text()] == []
