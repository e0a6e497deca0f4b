"""Files for schedulers beside Slurm: what they hold, that nothing in a value breaks out of them, and that their shell part starts the
ranks, tells how they ended, and saves before it is ended."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace
from test_local import wait_for

from orchestrator import recipe
from orchestrator.__main__ import main
from orchestrator.detect import machine
from orchestrator.engines import ENGINES
from orchestrator.errors import InputError
from orchestrator.job import ContainerOptions, Job, Mount, Scheduler, SlurmOptions
from orchestrator.launch.render import TRY_AGAIN, job_sbatch
from orchestrator.launch.schedulers import WRITERS, files, label

JOB = Job(
    name="llama3_8b-megatron", module="orchestrator.workers.megatron", arguments=("--plan", "plan.json"), environment={}, files=(),
    num_nodes=32, ranks_per_node=8, backend="nccl",
)  # fmt: skip
OPTIONS = SlurmOptions(time="1-02:30:00", partition="train", account="0123", requeue=3, warning_s=250, python="/opt/my venv/bin/python")
IMAGE = ContainerOptions(image="nvcr.io#nvidia/pytorch:26.06-py3", mounts=("/data", "/ref:/in:ro"), runtime="apptainer")
BARE = replace(IMAGE, mounts=())
FOLDER = "/runs/it's $(touch here) $$HOME"
NODES = (1, 32)
NODES_OF = {"lsf": ("blaunch", "LSB_DJOB_HOSTFILE"), "pbs": ("pbsdsh", "PBS_NODEFILE")}
"""What starts a program on a node, and what names the file of nodes."""


def written(name: Scheduler, job: Job = JOB, folder: str = FOLDER, options: SlurmOptions = OPTIONS, container: Any = IMAGE) -> str:
    (file,) = files((name,), job, folder, options, container, "H100-SXM-80GB")
    return file.content


def test_write_takes_each_scheduler_that_is_written_for() -> None:
    assert set(WRITERS) == set(typing.get_args(Scheduler))
    load = ["recipe=gpt_tiny", "gpus=2", "cluster=cpu", "write=pbs,lsf,pbs"]
    settings = recipe.load(load, machine(), list(ENGINES))
    assert settings.write == ("pbs", "lsf")
    assert yaml.safe_load(recipe.resolved_yaml(settings))["write"] == "pbs,lsf"
    with pytest.raises(
        InputError,
        match=r"write=slurm: is no scheduler .* choose one of "
        r"kubernetes, pytorchjob, trainjob, volcano, skypilot, dstack, hyperpod, lsf, pbs",
    ):
        recipe.load([*load[:3], "write=slurm"], machine(), list(ENGINES))


PODS: dict[Scheduler, tuple[str, str]] = {
    "kubernetes": ("$JOB_COMPLETION_INDEX", "llama3-8b-megatron-0.llama3-8b-megatron"),
    "pytorchjob": ("$RANK", '"$MASTER_ADDR"'),
    "trainjob": ("$PET_NODE_RANK", '"$PET_MASTER_ADDR"'),
    "volcano": ("$VC_TASK_INDEX", "llama3-8b-megatron-node-0.llama3-8b-megatron"),
}
"""What names a pod's place and the first pod, as bash reads it."""


def pods_of(name: Scheduler, described: dict[str, Any]) -> list[tuple[int, dict[str, Any], dict[str, Any]]]:
    """(how many, the pod's fields, its container's fields) of each kind of pod of a job."""
    spec = described["spec"]
    if name == "trainjob":
        (patch,) = spec["runtimePatches"]
        (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        pod = node["template"]["spec"]["template"]["spec"]
        trainer = spec["trainer"]
        more = {"command": trainer["command"], "image": trainer["image"], "resources": trainer["resourcesPerNode"]}
        return [(trainer["numNodes"], pod, pod["containers"][0] | more)]
    if name == "pytorchjob":
        found = [(each["replicas"], each["template"]["spec"]) for each in spec["pytorchReplicaSpecs"].values()]
    elif name == "volcano":
        found = [(task["replicas"], task["template"]["spec"]) for task in spec["tasks"]]
    else:
        found = [(spec["completions"], spec["template"]["spec"])]
    return [(count, pod, pod["containers"][0]) for count, pod in found]


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("name", PODS)
def test_each_node_is_a_pod_that_meets_the_others_at_the_first_one(name: Scheduler, nodes: int) -> None:
    *_, job = yaml.safe_load_all(written(name, replace(JOB, num_nodes=nodes)))
    found = pods_of(name, job)
    assert sum(count for count, _, _ in found) == nodes
    for _, pod, container in found:
        assert container["image"] == "nvcr.io/nvidia/pytorch:26.06-py3"
        assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}
        command = container["command"][2].replace("$$", "$")  # as Kubernetes reads it
        assert command.startswith(f"cd -- {shlex.quote(FOLDER)} || exit 2\n")
        rank, address = PODS[name]
        assert f'NNODES={nodes} RANKS_PER_NODE=8 NODE_RANK="{rank}" MASTER_ADDR={address} ' in command
        assert pod["terminationGracePeriodSeconds"] == 250
        places = {volume["mountPath"]: volume.get("readOnly", False) for volume in container["volumeMounts"]}
        assert places == {FOLDER: False, "/data": False, "/in": True, "/dev/shm": False}
        assert {volume["name"] for volume in pod["volumes"]} == {volume["name"] for volume in container["volumeMounts"]}


def test_what_the_ranks_read_outside_the_folder_is_said_to_each_scheduler() -> None:
    job = replace(JOB, outside=(Mount(path="/data/x"), Mount(path="/lustre/a b.txt", is_file=True)))  # IMAGE mounts /data
    for name in PODS:
        *_, described = yaml.safe_load_all(written(name, job))
        for _, pod, container in pods_of(name, described):
            assert container["volumeMounts"][0] == {"name": "host-0", "mountPath": "/lustre/a b.txt", "readOnly": True}
            assert [volume["hostPath"]["type"] for volume in pod["volumes"][:-1]] == ["File", *["Directory"] * 3]
    assert yaml.safe_load(written("dstack", job, container=BARE))["volumes"][:2] == ["/data/x:/data/x", "/lustre/a b.txt:/lustre/a b.txt"]
    assert "# And at its own path: '/lustre/a b.txt'\n" in written("skypilot", job, container=BARE)
    for name in ("lsf", "pbs"):
        assert "apptainer exec --nv --bind '/lustre/a b.txt:/lustre/a b.txt:ro' --bind " in written(name, job)


def test_what_several_refuse_is_one_error() -> None:
    with pytest.raises(InputError) as caught:
        files(("kubernetes", "lsf", "dstack"), JOB, FOLDER, OPTIONS, replace(BARE, image="/i/a.sqsh"), "H100-SXM-80GB")
    assert str(caught.value) == (
        "write=kubernetes,lsf,dstack: container.image=/i/a.sqsh: is a file; kubernetes takes an image of a registry; "
        "container.image=/i/a.sqsh: is enroot's: lsf and pbs start apptainer's .sif, or a registry's image; "
        "container.image=/i/a.sqsh: is a file; dstack takes an image of a registry"
    )


def test_amds_gpus_are_asked_for_by_amds_words() -> None:
    """Of Kubernetes as its device plugin names them, of apptainer by --rocm."""
    amd = replace(JOB, vendor="amd")
    for name in PODS:
        *_, job = yaml.safe_load_all(written(name, amd))
        assert all(container["resources"] == {"limits": {"amd.com/gpu": 8}} for _, _, container in pods_of(name, job))
    for script in (written("lsf", amd), written("pbs", amd), job_sbatch(amd, OPTIONS, IMAGE)):
        assert "apptainer exec --rocm --bind" in script


def test_limit_queue_and_starting_again_are_said_in_each_ones_words() -> None:
    jobs = {name: [*yaml.safe_load_all(written(name))] for name in PODS}
    (service, job), (torch_job,), (train_job,), (volcano,) = jobs.values()
    name = job["metadata"]["name"]
    assert service["metadata"]["name"] == name == service["spec"]["selector"]["batch.kubernetes.io/job-name"]
    assert job["spec"]["template"]["spec"]["subdomain"] == name
    limit = 26.5 * 3600
    spec = job["spec"]
    assert (spec["parallelism"], spec["completionMode"], spec["backoffLimit"]) == (32, "Indexed", 96)
    assert spec["template"]["spec"]["activeDeadlineSeconds"] == limit, "of one attempt"
    assert "activeDeadlineSeconds" not in spec, "which would be that of all"
    assert torch_job["spec"]["runPolicy"] == {"cleanPodPolicy": "None", "backoffLimit": 96, "activeDeadlineSeconds": 4 * limit}
    assert {kind: each["restartPolicy"] for kind, each in torch_job["spec"]["pytorchReplicaSpecs"].items()} == dict.fromkeys(
        ("Master", "Worker"), "OnFailure"
    )
    assert train_job["spec"]["activeDeadlineSeconds"] == 4 * limit
    assert "slurm.requeue=3 has no place here" in written("trainjob")
    assert (volcano["spec"]["queue"], volcano["spec"]["maxRetry"], volcano["spec"]["minAvailable"]) == ("train", 3, 32)
    assert volcano["spec"]["tasks"][0]["template"]["spec"]["activeDeadlineSeconds"] == limit
    assert volcano["spec"]["policies"][0]["action"] == "RestartJob"
    for one in (job, torch_job, train_job):
        assert one["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "train"}


def test_cores_of_a_gpu_and_rdma_are_said() -> None:
    options = replace(OPTIONS, cpus_per_gpu=12)
    assert "-l select=32:ncpus=96:ngpus=8" in written("pbs", options=options)
    for name in PODS:
        text = written(name, options=options)
        *_, job = yaml.safe_load_all(text)
        for _, _, container in pods_of(name, job):
            assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}, "requests": {"cpu": "96"}}
        assert "RDMA" in text
        assert "RDMA" not in written(name, replace(JOB, num_nodes=1))


@pytest.fixture(scope="module")
def validator(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the package kubernetes-validate."""
    folder = str(tmp_path_factory.mktemp("validator"))
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--target", folder, "kubernetes-validate"], check=True)
    return folder


@pytest.mark.full
@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("name", PODS)
def test_kubernetes_schema_takes_it(name: Scheduler, nodes: int, validator: str, tmp_path: Path) -> None:
    """Its own OpenAPI schema, strictly: no field that it does not know. Of jobs that an operator takes their pods, as plain ones."""
    *more, job = yaml.safe_load_all(written(name, replace(JOB, num_nodes=nodes)))
    if name == "kubernetes":
        more.append(job)
    for _, pod, container in pods_of(name, job) if name != "kubernetes" else ():
        spec = pod | {"containers": [container]}
        more.append({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": spec})
    (tmp_path / "job.yaml").write_text(yaml.safe_dump_all(more))
    check = (
        "import sys, yaml, kubernetes_validate as k; [k.validate(d, '1.31', strict=True) for d in yaml.safe_load_all(open(sys.argv[1]))]"
    )
    path = {**os.environ, "PYTHONPATH": validator}
    subprocess.run([sys.executable, "-c", check, tmp_path / "job.yaml"], check=True, env=path)
    broken = (tmp_path / "job.yaml").read_text().replace("terminationGracePeriodSeconds", "terminationgraceperiodseconds")
    (tmp_path / "job.yaml").write_text(broken)
    assert subprocess.run([sys.executable, "-c", check, tmp_path / "job.yaml"], check=False, env=path, capture_output=True).returncode != 0


@pytest.mark.parametrize("nodes", NODES)
def test_skypilot_gets_a_task(nodes: int) -> None:
    task = yaml.safe_load(written("skypilot", replace(JOB, num_nodes=nodes), container=BARE))
    assert set(task) == {"name", "num_nodes", "resources", "run"}
    assert task["num_nodes"] == nodes
    assert task["resources"] == {"accelerators": "H100:8", "image_id": "docker:nvcr.io/nvidia/pytorch:26.06-py3"}
    bare = yaml.safe_load(written("skypilot", replace(JOB, backend="gloo"), container=None))
    assert "resources" not in bare


@pytest.mark.parametrize("nodes", NODES)
def test_dstack_gets_a_task(nodes: int) -> None:
    task = yaml.safe_load(written("dstack", replace(JOB, num_nodes=nodes, name="m" * 60), container=replace(IMAGE, mounts=("/data",))))
    assert (task["type"], task["nodes"], task["resources"], task["max_duration"]) == ("task", nodes, {"gpu": "H100:80GB:8"}, 26.5 * 3600)
    assert len(task["name"]) == 41
    assert task["volumes"] == [f"{FOLDER}:{FOLDER}", "/data:/data"]
    (start,) = task["commands"]
    assert task["shell"] == "bash"
    assert 'MASTER_ADDR="$DSTACK_MASTER_NODE_IP"' in start


def test_lsf_and_pbs_ask_for_what_the_plan_needs() -> None:
    lsf, pbs = written("lsf").splitlines(), written("pbs").splitlines()
    asked = {"-n 32", '-R "span[ptile=1]"', '-gpu "num=8:mode=shared:j_exclusive=yes"', "-q train", "-P 0123", "-W 26:30", "-wa USR1 -wt 5"}
    assert {line.removeprefix("#BSUB ") for line in lsf if line.startswith("#BSUB")} >= asked
    asked = {"-l select=32:ncpus=8:ngpus=8", "-l place=scatter:excl", "-q train", "-A 0123", "-l walltime=26:30:00", "-N llama3-8b-megat"}
    assert {line.removeprefix("#PBS ") for line in pbs if line.startswith("#PBS")} >= asked
    gloo = replace(JOB, backend="gloo")
    assert "gpu" not in written("lsf", gloo, container=None) + written("pbs", gloo, container=None)


@pytest.mark.parametrize("name", ["lsf", "pbs"])
def test_an_image_in_pyxis_spelling_is_apptainers(name: Scheduler) -> None:
    image = ContainerOptions(image="nvcr.io#nvidia/pytorch:26.06-py3")
    assert image.runtime == "pyxis"
    assert " docker://nvcr.io/nvidia/pytorch:26.06-py3 bash " in written(name, container=image)


@pytest.mark.parametrize(("options", "amount"), [({"mem_per_gpu": "200G"}, 1600), ({"mem": "480GB"}, 480), ({"mem": "0"}, None)])
def test_the_host_memory_of_a_site_is_asked_for(options: dict[str, Any], amount: int | None) -> None:
    asked = SlurmOptions(**options)
    assert (f":ngpus=8:mem={amount}gb\n" in written("pbs", options=asked)) == (amount is not None)
    pod = list(yaml.safe_load_all(written("kubernetes", options=asked)))[1]["spec"]["template"]["spec"]["containers"][0]
    assert pod["resources"].get("requests", {}).get("memory") == (f"{amount}Gi" if amount else None)


@pytest.mark.parametrize(
    ("name", "options", "container", "says"),
    [
        ("skypilot", OPTIONS, IMAGE, "container.mounts=/data,/ref:/in:ro: has no place in SkyPilot's file"),
        ("dstack", OPTIONS, IMAGE, "container.mounts=/ref:...:ro: can't be read-only"),
        ("kubernetes", OPTIONS, None, "write=kubernetes: needs container.image="),
        ("dstack", OPTIONS, None, "write=dstack: needs container.image="),
        ("skypilot", OPTIONS, replace(BARE, image="/images/a.sif"), "is a file; skypilot takes an image of a registry"),
        ("pbs", OPTIONS, replace(IMAGE, image="/images/a.sqsh"), "container.image=/images/a.sqsh: is enroot's: lsf and pbs start"),
        ("hyperpod", SlurmOptions(nodes=(8, 16)), None, "slurm.nodes=8-16: is a range, beside which auto-resume was never tried"),
    ],
)
def test_what_one_cannot_be_told_is_an_error(name: Scheduler, options: SlurmOptions, container: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        written(name, options=options, container=container)


def test_nodes_of_slurm_nodes_are_every_schedulers() -> None:
    assert yaml.safe_load(written("skypilot", options=SlurmOptions(nodes=64), container=BARE))["resources"]["accelerators"] == "H100:4"
    assert written("lsf", options=SlurmOptions(nodes=(8, 16)), container=None) == written(
        "lsf", options=SlurmOptions(nodes=16), container=None
    )


def test_a_name_is_a_label_of_kubernetes() -> None:
    assert len(label("a" * 100)) == 52
    assert label("x" * 51 + "_y")[-1] != "-"


# ---- the shell part, with stand-ins for what starts a program on a node


def folder_with(launch: str, tmp_path: Path) -> Path:
    folder = tmp_path / "it's $(touch here) $$HOME"
    (folder / "logs").mkdir(parents=True)
    (folder / "launch.sh").write_text(f'set -eu\ncd -- "$(dirname -- "$0")"\n{launch}\n')
    (folder / "plan.json").write_text(json.dumps({"training": {"steps": 9}}))
    return folder


def run(name: Scheduler, folder: Path, hosts: list[str], job: Job) -> subprocess.CompletedProcess[str]:
    """What `allocated` gives for a job of the folder."""
    options = SlurmOptions(python=sys.executable, planner=sys.executable)
    script = folder.parent / "job"
    script.write_text(written(name, job, str(folder), options, None))
    return allocated(name, script, hosts)


def allocated(name: Scheduler, script: Path, hosts: list[str]) -> subprocess.CompletedProcess[str]:
    """The script of the scheduler in its allocation of `hosts`: what starts a program on a node starts it here."""
    starter, variable = NODES_OF[name]
    folder = script.parent
    stands_in = folder.parent / "bin" / starter
    stands_in.parent.mkdir(exist_ok=True)
    stands_in.write_text('#!/usr/bin/env bash\nshift 2; [[ $1 == -- ]] && shift\nexec "$@"\n')
    stands_in.chmod(0o755)
    listed = folder.parent / "hosts"
    listed.write_text("".join(f"{host}\n" for host in hosts))
    path = {**os.environ, "PATH": f"{stands_in.parent}:{os.environ['PATH']}", variable: str(listed)}
    return subprocess.run(["bash", script], check=False, env=path, text=True, capture_output=True)


@pytest.mark.parametrize("name", NODES_OF)
def test_each_node_starts_its_ranks_and_the_end_is_told(name: Scheduler, tmp_path: Path) -> None:
    job = replace(JOB, num_nodes=3, ranks_per_node=1, backend="gloo")
    folder = folder_with(
        'echo "$NODE_RANK of $NNODES x $RANKS_PER_NODE $MASTER_ADDR $MASTER_PORT $CONTINUE $PYTHON" >"logs/node-$NODE_RANK"', tmp_path
    )
    done = run(name, folder, ["a", "a", "b", "c"], job)
    assert done.returncode == 0, done.stderr
    assert sorted(file.read_text() for file in (folder / "logs").glob("node-*")) == [
        f"{i} of 3 x 1 a 29500 1 {sys.executable}\n" for i in range(3)
    ]
    assert json.loads((folder / "status.json").read_text())["status"] == "finished"
    assert not list(tmp_path.rglob("here"))


@pytest.mark.parametrize("name", NODES_OF)
def test_too_few_nodes_start_nothing(name: Scheduler, tmp_path: Path) -> None:
    folder = folder_with("touch logs/started", tmp_path)
    done = run(name, folder, ["a", "b"], replace(JOB, num_nodes=3, backend="gloo"))
    assert (done.returncode, list((folder / "logs").iterdir())) == (2, [])
    assert "the plan needs 3 nodes, and the job has 2" in done.stderr


@pytest.mark.parametrize("name", NODES_OF)
def test_ranks_that_fail_end_the_others_and_the_job(name: Scheduler, tmp_path: Path) -> None:
    started = time.monotonic()
    folder = folder_with("if (( NODE_RANK == 1 )); then exit 3; fi; exec sleep 60", tmp_path)
    done = run(name, folder, ["a", "b"], replace(JOB, num_nodes=2, backend="gloo"))
    assert done.returncode == 3
    assert time.monotonic() - started < 50
    assert json.loads((folder / "status.json").read_text())["status"] == "failed"


@pytest.mark.parametrize("name", NODES_OF)
def test_a_job_that_stopped_before_its_end_says_so(name: Scheduler, tmp_path: Path) -> None:
    row = json.dumps({"step": 4, "loss": 1.0})
    saves = f"mkdir -p checkpoints; echo '{row}' >metrics.jsonl; echo '{json.dumps({'step': 4})}' >checkpoints/latest.json"
    folder = folder_with(saves, tmp_path)
    assert run(name, folder, ["a"], replace(JOB, num_nodes=1, backend="gloo")).returncode == TRY_AGAIN


@pytest.mark.engines
def test_two_nodes_train_and_another_scheduler_goes_on(tmp_path: Path) -> None:
    words = ("recipe=gpt_tiny", "gpus=2", "cluster=cpu", "engine=megatron", "slurm.nodes=2", "train.save_every=2", "launch=none")
    words = (*words, "write=pbs,lsf")
    folder = tmp_path / "run"
    assert main(["run", *words, "train.steps=4", f"out={folder}"]) == 0
    done = allocated("pbs", folder / "job.pbs", ["localhost", "127.0.0.1"])
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "checkpoints" / "latest.json").read_text())["step"] == 4
    plan = json.loads((folder / "plan.json").read_text())
    plan["training"]["steps"] = 6
    (folder / "plan.json").write_text(json.dumps(plan))
    done = allocated("lsf", folder / "job.lsf", ["localhost", "127.0.0.1"])
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert rows == [1, 2, 3, 4, 5, 6]
    assert json.loads((folder / "status.json").read_text())["status"] == "finished"


def test_a_pod_has_the_status_of_ranks_that_end_while_they_are_asked_to_save(tmp_path: Path) -> None:
    """TERM has interrupted the wait for them; `kill` of all processes is a function that ends the ranks and lasts longer."""
    folder = folder_with("trap 'exit 3' USR1; touch logs/started; while sleep .1; do :; done", tmp_path)
    _, job = yaml.safe_load_all(written("kubernetes", replace(JOB, num_nodes=1), folder=str(folder)))
    shell, option, script = (word.replace("$$", "$") for word in job["spec"]["template"]["spec"]["containers"][0]["command"])
    slow = 'kill() { [[ $2 != -1 ]] || { builtin kill -USR1 "$ranks"; sleep 1; return; }; builtin kill "$@"; }\n'
    finish = tmp_path / "finish"
    finish.write_text('#!/bin/sh\necho "$5" >ended\n')
    finish.chmod(0o755)
    path = {**os.environ, "ORCHESTRATOR_PYTHON": str(finish), "JOB_COMPLETION_INDEX": "0"}
    with subprocess.Popen([shell, option, slow + script], env=path, cwd=folder) as pod:
        wait_for((folder / "logs" / "started").exists, 30)
        pod.terminate()
        assert pod.wait(30) == 3
    assert (folder / "ended").read_text() == "3\n"


def test_a_pod_that_is_to_end_asks_its_ranks_to_save_and_waits(tmp_path: Path) -> None:
    """The pod's own command as the first process of a PID namespace, to which Kubernetes sends TERM."""
    unshare = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if subprocess.run([*unshare, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no PID namespaces here")
    (tmp_path / "trains.py").write_text(
        "import signal, time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: (time.sleep(1), open('logs/saved', 'w'), exit(0)))\n"
        "open('logs/started', 'w')\n"
        "time.sleep(60)\n"
    )
    folder = folder_with(f"trap '' USR1\nexec {sys.executable} ../trains.py", tmp_path)
    _, job = yaml.safe_load_all(written("kubernetes", replace(JOB, num_nodes=1), folder=str(folder)))
    (container,) = job["spec"]["template"]["spec"]["containers"]
    start = [word.replace("$$", "$") for word in container["command"]]  # as Kubernetes reads it
    path = {**os.environ, "ORCHESTRATOR_PYTHON": sys.executable, "JOB_COMPLETION_INDEX": "0"}
    command = [*unshare, *start]
    with subprocess.Popen(command, env=path, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as pod:
        until = time.monotonic() + 30
        while not (folder / "logs" / "started").exists() and time.monotonic() < until:
            time.sleep(0.1)
        (first,) = Path(f"/proc/{pod.pid}/task/{pod.pid}/children").read_text().split()
        os.kill(int(first), signal.SIGTERM)
        _, errors = pod.communicate(timeout=40)
    assert (folder / "logs" / "saved").exists(), errors
    assert pod.returncode == 0, errors
