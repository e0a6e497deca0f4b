"""Every scheduler's file at one and at 32 nodes, in a folder, with an interpreter and mounts of names that a shell reads otherwise: each
node's shell part runs with the variables that its scheduler sets, and stand-ins write down what they were started with."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import venv
from pathlib import Path
from typing import Final, get_args

import pytest
import yaml
from msgspec.structs import replace

from orchestrator.__main__ import main
from orchestrator.errors import InputError
from orchestrator.job import ContainerOptions, Job, Scheduler, SlurmOptions
from orchestrator.launch.render import files as slurm_files
from orchestrator.launch.schedulers import files
from tests.launch.test_schedulers import BARE, IMAGE, JOB, NODES, NODES_OF, PODS, pods_of

HOSTILE: Final = ('-rf it\'s "q"', "$(touch broken)", "$$HOME ${HOME}", "`touch broken`", "$(PATH) -n ; touch broken", "- x #&")
"""Names of folders, each in the one before."""
MODULE_WORDS: Final = ["-m", "orchestrator.workers.megatron", "--plan", "plan.json"]
STAND_IN: Final = """#!/usr/bin/env bash
[[ $1 == -c ]] && exit 0
printf '%s\\0' "$@" >>"$RECORD/${NODE_RANK:-${SLURM_NODEID:-job}}.${CONTINUE:-new}"
"""
"""In place of python and torchrun: takes what launch.sh asks of an interpreter, and writes down with what it is started."""


def program(path: Path, text: str = STAND_IN) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


class Run:
    """A folder with a job for one scheduler, and what its shell parts have started."""

    def __init__(self, tmp_path: Path, name: Scheduler, nodes: int, container: ContainerOptions | None) -> None:
        self.name, self.nodes, self.root = name, nodes, tmp_path
        self.folder = tmp_path.joinpath("runs", *HOSTILE)
        self.bin, self.record = tmp_path / "bin", tmp_path / "record"
        self.record.mkdir()
        for each in ("python", "torchrun"):
            program(self.bin / each)
        self.python = program(self.folder / "bin" / "python")
        job = replace(JOB, num_nodes=nodes, name="-n it's $(touch broken) `touch broken`")
        options = SlurmOptions(partition="$(touch broken) 'q'", account='-a "b"', time="2:00:00", exclusive=None, python=str(self.python))
        for file in (*slurm_files(job, slurm=options), *files((name,), job, str(self.folder), options, container, "H100-SXM-80GB")):
            (self.folder / file.path).write_text(file.content)
            self.written = self.folder / file.path

    def shell(self, *command: str | Path, **variables: str) -> None:
        """Runs it outside the folder with these variables."""
        path = {"PATH": f"{self.bin}:{os.environ['PATH']}", "RECORD": str(self.record), "HOME": str(self.root)}
        done = subprocess.run(command, check=False, cwd=self.root, env={**path, **variables}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def started(self) -> dict[str, list[str]]:
        """The words of what was started, by the number of the node and whether it goes on."""
        return {path.name: path.read_text().split("\0")[:-1] for path in self.record.iterdir()}

    def check(self, address: str, port: int | str = 29500) -> None:
        """Each node has started its ranks by torchrun, with its number and the first node's address; nothing has broken out of a name."""
        found = self.started()
        for node in range(self.nodes):
            words = found[f"{node}.1"]
            several = ["--nnodes", str(self.nodes), "--node-rank", str(node), "--master-addr", address, "--master-port", str(port)]
            places = several if self.nodes > 1 else ["--standalone", "--local-addr", "127.0.0.1"]
            assert words[words.index("--nproc-per-node") - len(places) : words.index("--nproc-per-node")] == places
            assert words[words.index("--nproc-per-node") + 1] == str(JOB.ranks_per_node)
            ranks = words[words.index("rank") + 1 :]
            interpreter = str(self.python) if self.name in (*NODES_OF, "hyperpod") else "python"
            assert ranks == [interpreter, *MODULE_WORDS, "--continue", *self.after(node, ranks)]
        assert not list(self.root.rglob("broken"))

    def after(self, node: int, ranks: list[str]) -> list[str]:
        """The words of orchestrator.finish, which a node writes behind those of its ranks where it is started there."""
        words = ranks[len(MODULE_WORDS) + 2 :]
        assert not words or words[:3] == ["-m", "orchestrator.finish", str(self.folder)], node
        return words

    def ended(self) -> list[tuple[str, str]]:
        """(folder, log) of each orchestrator.finish, which is told when the ranks were started."""
        words = [word for each in self.started().values() for word in each]
        calls = [words[i + 1 : i + 5] for i, word in enumerate(words) if word == "orchestrator.finish"]
        assert all((status, started[10:11], started[-6:]) == ("0", "T", "+00:00") for _, _, status, started in calls), calls
        return [(folder, log) for folder, log, _, _ in calls]


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("name", PODS)
def test_a_pod_of_each_kind_starts_its_ranks(name: Scheduler, nodes: int, tmp_path: Path) -> None:
    run = Run(tmp_path, name, nodes, IMAGE)
    *_, job = yaml.safe_load_all(run.written.read_text())
    commands = [pod_container["command"] for count, _, pod_container in pods_of(name, job) for _ in range(count)]
    place, address = (word.strip('"$') for word in PODS[name])
    for node, command in enumerate(commands):
        variables = {place: str(node)} | ({address: "first.host"} if address.isupper() else {})
        run.shell(*(word.replace("$$", "$") for word in command), **variables)  # as Kubernetes reads it
    run.check("first.host" if address.isupper() else PODS[name][1].replace("llama3-8b-megatron", job["metadata"]["name"]))
    assert run.ended() == [(str(run.folder), "logs/rank-0.log")] * nodes


@pytest.mark.parametrize("nodes", NODES)
def test_skypilots_nodes_start_their_ranks(nodes: int, tmp_path: Path) -> None:
    """In a bash script, with the addresses of all nodes, a line each (sky/skylet/log_lib.py, make_task_bash_script)."""
    run = Run(tmp_path, "skypilot", nodes, BARE)
    script = program(
        tmp_path / "script", f"#!/bin/bash\ncd {shlex.quote(str(tmp_path))}\n{yaml.safe_load(run.written.read_text())['run']}\n"
    )
    for node in range(nodes):
        run.shell(script, SKYPILOT_NODE_RANK=str(node), SKYPILOT_NODE_IPS="\n".join(f"10.0.0.{i}" for i in range(nodes)))
    run.check("10.0.0.0")
    assert run.ended() == [(str(run.folder), "logs/rank-0.log")] * nodes


@pytest.mark.parametrize("nodes", NODES)
def test_dstacks_nodes_start_their_ranks(nodes: int, tmp_path: Path) -> None:
    """By the shell that the file names, or the image's /bin/sh (dstack 0.22, server/services/jobs/configurators/base.py)."""
    run = Run(tmp_path, "dstack", nodes, BARE)
    task = yaml.safe_load(run.written.read_text())
    shell = f"/bin/{task.get('shell', 'sh')}"
    for node in range(nodes):
        run.shell(shell, "-i", "-c", " && ".join(task["commands"]), DSTACK_NODE_RANK=str(node), DSTACK_MASTER_NODE_IP="10.0.0.7")
    run.check("10.0.0.7")
    assert run.ended() == [(str(run.folder), "logs/rank-0.log")] * nodes


@pytest.mark.parametrize("image", [None, replace(IMAGE, mounts=("/data/$(touch broken) 'x'", "/-a `touch broken`:/in:ro"))])
@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("name", NODES_OF)
def test_lsf_and_pbs_start_their_ranks_on_each_node(name: Scheduler, nodes: int, image: ContainerOptions | None, tmp_path: Path) -> None:
    """pbsdsh's programs have none of the script's variables, blaunch's have them."""
    run = Run(tmp_path, name, nodes, image)
    starter, variable = NODES_OF[name]
    kept = 'env -i RECORD="$RECORD"' if name == "pbs" else ""
    program(run.bin / starter, f'#!/usr/bin/env bash\nshift 2; [[ $1 == -- ]] && shift\nexec {kept} "$@"\n')
    mounts = program(
        run.bin / "apptainer", '#!/bin/bash\nprintf "%s\\0" "$@" >"$RECORD/image"\nwhile [[ $1 != bash ]]; do shift; done\nexec "$@"\n'
    )
    (tmp_path / "hosts").write_text("".join(f"n{i}\n" for i in range(nodes)))
    run.shell("bash", run.written, **{variable: str(tmp_path / "hosts")})
    inside = (run.record / "image").read_text().split("\0")[:-1] if image else []
    (run.record / "image").unlink(missing_ok=True)
    run.check("n0")
    assert run.ended() == [(str(run.folder), "logs/rank-0.log")]
    if image is not None:
        assert mounts.exists()
        assert [inside[i + 1] for i, word in enumerate(inside) if word == "--bind"] == [str(run.folder), *image.mounts]
        assert inside[-2:] == ["bash", f"{run.folder}/launch.sh"]


@pytest.mark.parametrize("image", [None, replace(IMAGE, mounts=("/data/$(touch broken) 'x'",))])
@pytest.mark.parametrize("nodes", NODES)
def test_hyperpods_srun_resumes_and_its_nodes_start_their_ranks(nodes: int, image: ContainerOptions | None, tmp_path: Path) -> None:
    """srun's flag, not sbatch's, in an exclusive job that may be requeued; a step that starts again after the first node was replaced
    meets at the new one."""
    run = Run(tmp_path, "hyperpod", nodes, image)
    asked = [line for line in run.written.read_text().splitlines() if line.startswith("#SBATCH")]
    assert {f"#SBATCH --nodes={nodes}", "#SBATCH --exclusive", "#SBATCH --mem=0", "#SBATCH --requeue"} <= {*asked}
    assert not any("resume" in line for line in asked)
    program(run.bin / "apptainer", '#!/bin/bash\nwhile [[ $1 != bash ]]; do shift; done\nexec "$@"\n')
    hosts = '#!/bin/bash\n[[ $2 == hostnames ]] && { tr , "\\n" <<<"$3"; exit; }\necho "  NodeAddr=127.0.0.1 x"\n'
    program(run.bin / "scontrol", hosts)
    listed, nodes_now = (",".join(f"n{i}" for i in range(start, nodes + start)) for start in (0, 1))
    for step in (listed, nodes_now):
        program(
            run.bin / "srun",
            '#!/bin/bash\n[[ " $* " == *" --auto-resume=1 "* ]] || exit 9\nwhile [[ $1 == --* ]]; do shift; done\n'
            f'for (( i = 0; i < {nodes}; i++ )); do SLURM_NODEID=$i SLURM_STEP_NODELIST={step} "$@" || exit; done\n',
        )
        slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": listed, "SLURM_CPUS_ON_NODE": "8"}
        run.shell("bash", "-c", 'cd -- "$1" && bash job.sbatch', "job", run.folder, **slurm)
        run.check("127.0.0.1" if step == listed else "n1", 20007)
        assert (str(run.folder), "slurm-7.log") in run.ended()
        for file in run.record.iterdir():
            file.unlink()


def test_hyperpods_file_is_the_folders_job_sbatch(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ("recipe=gpt_tiny", "gpus=16", "cluster=dgx_h100", "launch=none", "write=hyperpod,pbs", f"out={folder}")
    assert main(["run", *words]) == 0
    assert " --auto-resume=1 " in (folder / "job.sbatch").read_text()
    assert sorted(path.name for path in folder.glob("*job*")) == ["job.pbs", "job.sbatch"]
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", folder / "job.sbatch"], check=True)


def test_hyperpod_refuses_shared_nodes() -> None:
    with pytest.raises(InputError, match=r"slurm\.exclusive=false: does not go with write=hyperpod"):
        files(("hyperpod",), JOB, "/runs/a", SlurmOptions(exclusive=False), None, "H100-SXM-80GB")


# ---- the programs' own parsers


PARSERS: Final = {
    "skypilot": "import sky; task = sky.Task.from_yaml(sys.argv[1]); (asked,) = task.resources;"
    " print(json.dumps([task.num_nodes, asked.accelerators, task.run]))",
    "dstack": "import yaml; from dstack._internal.core.models.configurations import parse_apply_configuration as parse;"
    " task = parse(yaml.safe_load(open(sys.argv[1]))); asked = task.resources.gpu;"
    " print(json.dumps([task.nodes, {asked.name[0]: asked.count.min}, task.commands[0]]))",
}
"""Prints (nodes, GPUs of a node by name, what each starts) as the program reads them."""


@pytest.mark.full
@pytest.mark.parametrize("name", PARSERS)
def test_its_own_parser_takes_it(name: Scheduler, tmp_path: Path) -> None:
    """In an environment of its own; at each number of nodes, and not with a field that the program does not know."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    got = subprocess.run([python, "-m", "pip", "install", "-q", name], check=False, capture_output=True, text=True)
    if got.returncode:
        pytest.skip(f"{name} can't be installed from the package index here: {got.stderr.strip().splitlines()[-1]}")
    folder = str(Path("/runs").joinpath(*HOSTILE))
    file = tmp_path / "task.yaml"

    def read() -> subprocess.CompletedProcess[str]:
        command = [python, "-c", f"import json, sys; {PARSERS[name]}", file]
        alone = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
        return subprocess.run(command, check=False, env=alone, cwd=tmp_path, capture_output=True, text=True)

    for nodes in NODES:
        job: Job = replace(JOB, num_nodes=nodes)
        (written,) = files((name,), job, folder, SlurmOptions(time="2:00:00"), BARE, "H100-SXM-80GB")
        file.write_text(written.content)
        done = read()
        assert done.returncode == 0, done.stderr
        said = yaml.safe_load(written.content)
        assert yaml.safe_load(done.stdout.splitlines()[-1]) == [nodes, {"H100": 8}, said.get("run") or said["commands"][0]]
    file.write_text(written.content + "numnodes: 2\n")
    assert read().returncode != 0


def test_each_scheduler_is_run_here() -> None:
    assert {*PODS, *NODES_OF, *PARSERS, "hyperpod"} == {*get_args(Scheduler)}
