"""A Job for schedulers other than a plain Slurm: one file each, which starts launch.sh once a node. Pure text.

All of them see the run's folder at one path on every node, as Slurm does, and say CONTINUE=1: submitted again, or put back by the
scheduler, a job goes on from the newest checkpoint of its folder; the first start has none. At the end `orchestrator.finish` writes
status.json; a job that was asked to stop before its end exits with its status 75, which schedulers can be told to start again.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping
from typing import Any, Final

import yaml
from msgspec.structs import replace

from orchestrator.errors import InputError
from orchestrator.job import ContainerOptions, File, Job, SlurmOptions, all_or_none, checked
from orchestrator.launch.render import APPTAINER_GPUS, TRY_AGAIN, WARNING_S, exports, filled, job_sbatch, limit_s, mount_words, outside

MASTER_PORT: Final = 29500
SHARED_MEMORY: Final = "/dev/shm"
LABEL_LENGTH: Final = 52
"""Characters of a Job's name in Kubernetes: a pod's has up to 11 more (its index and a suffix), and a label at most 63."""
DSTACK_LENGTH: Final = 41
"""Characters of a run's name in dstack."""
SKY_GPUS: Final = {
    "A100-SXM-80GB": "A100-80GB",
    "A100-SXM-40GB": "A100",
    "H100-SXM-80GB": "H100",
    "H200-SXM": "H200",
    "V100-SXM-32GB": "V100-32GB",
}
"""Names of GPUs in SkyPilot's catalogue (`sky show-gpus`) where they are not the first word of ours."""


def label(name: str) -> str:
    """A name as Kubernetes takes it (RFC 1123: letters, digits and dashes, a letter first).

    >>> label("llama3_8b"), label("3B Chat!"), label("_")
    ('llama3-8b', 'run-3b-chat', 'run')
    """
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return (plain if plain[:1].isalpha() else f"run-{plain}".rstrip("-"))[:LABEL_LENGTH].rstrip("-")


def _minutes(options: SlurmOptions) -> int | None:
    seconds = limit_s(options.time)
    return None if seconds is None else -(-seconds // 60)


def _for_kubernetes(text: str) -> str:
    """The text as a value in which Kubernetes reads variables, $(NAME), and takes $$ as $ (kubernetes.io, "Define Dependent Environment
    Variables").

    >>> _for_kubernetes("$(touch here) $$HOME")
    '$$(touch here) $$$$HOME'
    """
    return text.replace("$", "$$")


def _command(job: Job, folder: str, rank: str, address: str) -> list[str]:
    """What a pod runs in the run's folder. `rank`, `address`: as of `_on_a_node`."""
    return ["bash", "-c", _for_kubernetes(_on_a_node(job, folder, rank, address, in_a_pod=True))]


def _storage(job: Job, folder: str, container: ContainerOptions | None) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(a pod's volumes, where its container has them): what the job reads, the run's folder, container.mounts, and shared memory."""
    mounts, files = _mounts(job, folder, container), {mount.path for mount in job.outside if mount.is_file}
    volumes = [
        {"name": f"host-{i}", "hostPath": {"path": host, "type": "File" if host in files else "Directory"}}
        for i, (host, _, _) in enumerate(mounts)
    ]
    places: list[dict[str, Any]] = [
        {"name": f"host-{i}", "mountPath": inside} | ({"readOnly": True} if readonly else {})
        for i, (_, inside, readonly) in enumerate(mounts)
    ]
    shared = {"name": "shared-memory"}
    return [*volumes, shared | {"emptyDir": {"medium": "Memory"}}], [*places, shared | {"mountPath": SHARED_MEMORY}]


def _memory(job: Job, options: SlurmOptions) -> tuple[int, str] | None:
    """Host memory of a node by slurm.mem= or slurm.mem_per_gpu=, (a number, its unit of 1024: K, M, G or T); None: none is said."""
    of_gpus = options.mem_per_gpu if job.backend == "nccl" else None
    text = (options.mem or of_gpus or "0").upper().removesuffix("B")
    amount = int(text.rstrip("KMGT")) * (1 if options.mem else job.ranks_per_node)
    return (amount, text[-1] if text[-1].isalpha() else "M") if amount else None


def _resources(job: Job, options: SlurmOptions) -> dict[str, Any]:
    """What a pod takes of its node: its GPUs, and for each the cores and memory that slurm.cpus_per_gpu= and mem_per_gpu= say."""
    cores, memory = (options.cpus_per_gpu or 0) * job.ranks_per_node, _memory(job, options)
    asked = ({"cpu": str(cores)} if cores else {}) | ({"memory": f"{memory[0]}{memory[1]}i"} if memory else {})
    gpus = {"limits": {f"{job.vendor}.com/gpu": job.ranks_per_node}} if job.backend == "nccl" else {}
    return gpus | ({"requests": asked} if asked else {})


def _pod(
    job: Job, folder: str, options: SlurmOptions, container: ContainerOptions | None, scheduler: str, name: str, command: list[str]
) -> dict[str, Any]:
    """A node's pod, which is not started again by itself. `name`: its container's. Raises InputError without an image."""
    volumes, places = _storage(job, folder, container)
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": options.warning_s or WARNING_S,
        "containers": [
            {
                "name": name,
                "image": _image(container, scheduler),
                "command": command,
                "resources": _resources(job, options),
                "volumeMounts": places,
            }
        ],
        "volumes": volumes,
    }


def _described(job: Job, file: str, documents: list[dict[str, Any]], more: str = "") -> str:
    """The documents as YAML without anchors, under what a user should know of them."""
    head = (
        f"# {checked('recipe', job.name)}: {job.num_nodes} pod(s) of {job.ranks_per_node} ranks. kubectl apply -f {file}\n"
        "# The run's folder is the nodes' own path, on storage that they share: another volume goes in place of hostPath.\n"
    )
    if job.num_nodes > 1 and job.backend == "nccl":
        head += "# RDMA between nodes is the cluster's own (a resource, IPC_LOCK, hostNetwork): without it NCCL goes over TCP.\n"
    return head + more + yaml.safe_dump_all(json.loads(json.dumps(documents)), sort_keys=False, width=10**6)


def _kueue(options: SlurmOptions) -> dict[str, Any]:
    """Labels by which Kueue takes a job into `slurm.partition`, its local queue."""
    return {"labels": {"kueue.x-k8s.io/queue-name": options.partition}} if options.partition else {}


def _deadline(options: SlurmOptions, attempts: int = 1) -> dict[str, int]:
    """`slurm.time` of a pod, or of a job that starts its pods again: Kubernetes counts one from its first start on, however often that is
    (kubernetes.io, "Job termination and cleanup")."""
    limit = limit_s(options.time)
    return {} if limit is None else {"activeDeadlineSeconds": limit * attempts}


def kubernetes(job: Job, folder: str, options: SlurmOptions, container: ContainerOptions | None, gpu: str) -> str:
    """An indexed Job with a headless Service, which needs no operator: pod 0's name is the rendezvous (kubernetes.io, "Indexed Job",
    "Job with Pod-to-Pod Communication"). `slurm.partition` is Kueue's local queue. Raises InputError without an image."""
    name = label(job.name)
    pod = _pod(job, folder, options, container, "kubernetes", "ranks", _command(job, folder, "JOB_COMPLETION_INDEX", f"{name}-0.{name}"))
    service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"batch.kubernetes.io/job-name": name}}
    spec = {
        "completions": job.num_nodes,
        "parallelism": job.num_nodes,
        "completionMode": "Indexed",
        "backoffLimit": job.num_nodes * options.requeue,  # where a rank fails the pods of all nodes do
        "template": {"spec": {"subdomain": name, **_deadline(options), **pod}},
    }
    described = [
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": service},
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name, **_kueue(options)}, "spec": spec},
    ]
    return _described(job, "kubernetes.yaml", described)


def pytorchjob(job: Job, folder: str, options: SlurmOptions, container: ContainerOptions | None, gpu: str) -> str:
    """A PyTorchJob of Kubeflow's training operator 1.x: its first pod is the master, RANK a pod's place (training-operator 1.9,
    pkg/controller.v1/pytorch/envvar.go). Raises InputError without an image."""
    command = _command(job, folder, "RANK", '"$MASTER_ADDR"')
    pod = _pod(job, folder, options, container, "pytorchjob", "pytorch", command)
    del pod["restartPolicy"]  # the replicas'
    replicas = {"Master": 1, "Worker": job.num_nodes - 1}
    again = "OnFailure" if options.requeue else "Never"
    policy = {"cleanPodPolicy": "None", "backoffLimit": job.num_nodes * options.requeue}
    policy |= _deadline(options, 1 + options.requeue)
    spec = {
        "runPolicy": policy,
        "pytorchReplicaSpecs": {
            kind: {"replicas": count, "restartPolicy": again, "template": {"spec": pod}} for kind, count in replicas.items() if count
        },
    }
    metadata = {"name": label(job.name), **_kueue(options)}
    described = [{"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": metadata, "spec": spec}]
    return _described(job, "pytorchjob.yaml", described)


def trainjob(job: Job, folder: str, options: SlurmOptions, container: ContainerOptions | None, gpu: str) -> str:
    """A TrainJob of Kubeflow Trainer 2.2 or later, on its runtime torch-distributed, whose one replicated job is named node
    (kubeflow/trainer at 8c0f505: manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml; pkg/constants/constants.go has PET_NODE_RANK and
    PET_MASTER_ADDR). Raises InputError without an image."""
    volumes, places = _storage(job, folder, container)
    of_node = {
        "terminationGracePeriodSeconds": options.warning_s or WARNING_S,
        "volumes": volumes,
        "containers": [{"name": "node", "volumeMounts": places}],
    }
    node = {"name": "node", "template": {"spec": {"template": {"spec": of_node}}}}
    spec = {
        "runtimeRef": {"name": "torch-distributed"},
        **_deadline(options, 1 + options.requeue),
        "trainer": {
            "image": _image(container, "trainjob"),
            "command": _command(job, folder, "PET_NODE_RANK", '"$PET_MASTER_ADDR"'),
            "numNodes": job.num_nodes,
            "numProcPerNode": job.ranks_per_node,
            "resourcesPerNode": _resources(job, options),
        },
        "runtimePatches": [
            {"manager": "orchestrator", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [node]}}}},
        ],
    }
    metadata = {"name": label(job.name), **_kueue(options)}
    described = [{"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": metadata, "spec": spec}]
    more = f"# slurm.requeue={options.requeue} has no place here: how often it starts again is the runtime's failurePolicy.\n"
    return _described(job, "trainjob.yaml", described, more if options.requeue else "")


def volcano(job: Job, folder: str, options: SlurmOptions, container: ContainerOptions | None, gpu: str) -> str:
    """A Job of Volcano, whose pods start together or not at all: its plugins env and svc say a pod's place and give it a name
    (volcano at ed72c7c: pkg/controllers/job/plugins/env/const.go, svc/svc.go). `slurm.partition` is its queue. Raises InputError without an
    image."""
    name = label(job.name)
    pod = _pod(job, folder, options, container, "volcano", "ranks", _command(job, folder, "VC_TASK_INDEX", f"{name}-node-0.{name}"))
    spec = {
        "schedulerName": "volcano",
        "minAvailable": job.num_nodes,
        **({"queue": options.partition} if options.partition else {}),
        "maxRetry": options.requeue,
        "plugins": {"env": [], "svc": []},
        "policies": [
            {"events": ["PodFailed", "PodEvicted"], "action": "RestartJob" if options.requeue else "AbortJob"},
            {"event": "TaskCompleted", "action": "CompleteJob"},
        ],
        "tasks": [{"name": "node", "replicas": job.num_nodes, "template": {"spec": {**_deadline(options), **pod}}}],
    }
    described = [{"apiVersion": "batch.volcano.sh/v1alpha1", "kind": "Job", "metadata": {"name": name}, "spec": spec}]
    return _described(job, "volcano.yaml", described)


def skypilot(job: Job, folder: str, options: SlurmOptions, container: ContainerOptions | None, gpu: str) -> str:
    """A task of SkyPilot (docs.skypilot.co, "Task YAML"; SKYPILOT_NODE_RANK and SKYPILOT_NODE_IPS, "Distributed multi-node jobs")."""
    if container is not None and container.mounts:
        raise InputError("container.mounts", ",".join(container.mounts), "has no place in SkyPilot's file: add its file_mounts by hand")
    resources: dict[str, Any] = {}
    if job.backend == "nccl":
        resources["accelerators"] = f"{SKY_GPUS.get(gpu, gpu.partition('-')[0])}:{job.ranks_per_node}"
    if container is not None:
        resources["image_id"] = f"docker:{_image(container, 'skypilot')}"
    address = '"$(head -n 1 <<<"$SKYPILOT_NODE_IPS")"'
    start = _on_a_node(job, folder, "SKYPILOT_NODE_RANK", address)
    task = {"name": label(job.name), "num_nodes": job.num_nodes, "resources": resources, "run": start}
    head = (
        f"# {checked('recipe', job.name)}: {job.num_nodes} node(s) of {job.ranks_per_node} ranks. {submit('skypilot')}\n"
        f"# Every node must see the run's folder at {shlex.quote(folder)}: a volume, or file_mounts with mode MOUNT.\n"
    )
    head += "".join(f"# And at its own path: {shlex.quote(checked('container.mounts', mount.path))}\n" for mount in job.outside)
    return head + yaml.safe_dump({key: value for key, value in task.items() if value != {}}, sort_keys=False, width=10**6)


def dstack(job: Job, folder: str, options: SlurmOptions, container: ContainerOptions | None, gpu: str) -> str:
    """A task of dstack (dstack.ai/docs, "task" and "Distributed tasks": DSTACK_NODE_RANK, DSTACK_MASTER_NODE_IP). Raises InputError without
    an image."""
    name, _, rest = gpu.partition("-")
    memory = rest.rpartition("-")[2]
    gpus = f"{name}:{memory}:{job.ranks_per_node}" if memory.endswith("GB") else f"{name}:{job.ranks_per_node}"
    if readonly := next((mount for mount in (container.mounts if container else ()) if mount.endswith(":ro")), None):
        raise InputError("container.mounts", readonly, "can't be read-only in dstack's file: leave out :ro")
    limit = limit_s(options.time)
    start = _on_a_node(job, folder, "DSTACK_NODE_RANK", '"$DSTACK_MASTER_NODE_IP"')
    task = {
        "type": "task",
        "name": label(job.name)[:DSTACK_LENGTH].rstrip("-"),
        "nodes": job.num_nodes,
        "image": _image(container, "dstack"),
        "volumes": [f"{host}:{inside}" for host, inside, _ in _mounts(job, folder, container)],
        "shell": "bash",  # in an image it would be /bin/sh
        "commands": [start],
        "resources": {"gpu": gpus} if job.backend == "nccl" else {},
        "max_duration": "off" if limit is None else limit,
    }
    head = (
        f"# {checked('recipe', job.name)}: {job.num_nodes} node(s) of {job.ranks_per_node} ranks. {submit('dstack')}\n"
        "# The run's folder is the nodes' own path, on storage that they share (dstack's instance volumes).\n"
    )
    return head + yaml.safe_dump({key: value for key, value in task.items() if value != {}}, sort_keys=False, width=10**6)


def _mounts(job: Job, folder: str, container: ContainerOptions | None) -> list[tuple[str, str, bool]]:
    """Paths of the nodes that a container sees, what the job needs and its folder first: (there, inside, whether it may only read)."""
    found = [(mount.path, mount.path, mount.read_only) for mount in outside(job, container)]
    found.append((folder, folder, False))
    for mount in container.mounts if container else ():
        host, _, rest = mount.partition(":")
        inside, _, mode = rest.partition(":")
        found.append((host, inside or host, mode == "ro"))
    return found


def _on_a_node(job: Job, folder: str, rank: str, address: str, *, in_a_pod: bool = False) -> str:
    """What each node runs. `rank`: the variable with its number; `address`: of the first one, as bash reads it; `in_a_pod`: whether it is
    the first process of a pod, which hands on what ends it."""
    places = {"nodes": job.num_nodes, "ranks": job.ranks_per_node, "rank": rank, "address": address, "port": MASTER_PORT}
    return filled("node.sh", folder=shlex.quote(folder), in_a_pod=in_a_pod, try_again=TRY_AGAIN, **places)


def hyperpod(job: Job, folder: str, options: SlurmOptions, container: ContainerOptions | None, gpu: str) -> str:
    """job.sbatch for the Slurm of AWS SageMaker HyperPod, where srun has --auto-resume=1: after a node is replaced the same step starts
    again, with all its set-up, in an exclusive allocation; a job that was given GPUs by --gres or --gpus is requeued instead
    (docs.aws.amazon.com/sagemaker, "Automatic node recovery and auto-resume"). Raises InputError for shared nodes."""
    if options.exclusive is False:
        why = "does not go with write=hyperpod, whose auto-resume needs whole nodes: slurm.exclusive=true, or all GPUs of each node"
        raise InputError("slurm.exclusive", "false", why)
    return job_sbatch(job, replace(options, exclusive=True), container, auto_resume=True)


def lsf(job: Job, folder: str, options: SlurmOptions, container: ContainerOptions | None, gpu: str) -> str:
    """A script for bsub: one slot a node, blaunch on each (IBM Spectrum LSF, bsub and blaunch). The ranks are warned by USR1 before the
    limit, as under Slurm."""
    minutes, warned = _minutes(options), -(-(options.warning_s or WARNING_S) // 60)
    lines = [f"-J {shlex.quote(label(job.name))}", f"-n {job.num_nodes}", '-R "span[ptile=1]"', "-o lsf-%J.log", "-x"]
    lines += [f'-gpu "num={job.ranks_per_node}:mode=shared:j_exclusive=yes"'] if job.backend == "nccl" else []
    lines += [f"-q {shlex.quote(options.partition)}"] if options.partition else []
    lines += [f"-P {shlex.quote(options.account)}"] if options.account else []
    lines += [f"-W {minutes // 60}:{minutes % 60:02}", f"-wa USR1 -wt {warned}"] if minutes is not None else []
    text = "#!/usr/bin/env bash\n" + "".join(f"#BSUB {line}\n" for line in lines)
    return text + _script(job, folder, options, container, submit("lsf"), "$LSB_DJOB_HOSTFILE", 'blaunch -z "${hosts[node]}"')


def pbs(job: Job, folder: str, options: SlurmOptions, container: ContainerOptions | None, gpu: str) -> str:
    """A script for qsub: a chunk a node, pbsdsh on each (OpenPBS reference guide, qsub and pbsdsh)."""
    minutes = _minutes(options)
    gpus = f":ngpus={job.ranks_per_node}" if job.backend == "nccl" else ""
    cores = options.cpus_per_task or (options.cpus_per_gpu or 1) * job.ranks_per_node
    memory = _memory(job, options)
    asked = f"ncpus={cores}{gpus}" + (f":mem={memory[0]}{memory[1].lower()}b" if memory else "")
    lines = [f"-N {label(job.name)[:15]}", f"-l select={job.num_nodes}:{asked}"]
    lines += ["-l place=scatter:excl", "-j oe"]
    lines += [f"-q {shlex.quote(options.partition)}"] if options.partition else []
    lines += [f"-A {shlex.quote(options.account)}"] if options.account else []
    lines += [f"-l walltime={minutes // 60}:{minutes % 60:02}:00"] if minutes is not None else []
    text = "#!/usr/bin/env bash\n" + "".join(f"#PBS {line}\n" for line in lines)
    return text + _script(job, folder, options, container, submit("pbs"), "$PBS_NODEFILE", 'pbsdsh -n "$node" --', path=True)


def _script(
    job: Job,
    folder: str,
    options: SlurmOptions,
    container: ContainerOptions | None,
    submit: str,
    hosts: str,
    start: str,
    *,
    path: bool = False,
) -> str:
    """The script behind its options: launch.sh on each of the `hosts` of a file, by `start`, in the image where there is one. `path`:
    what is started there has none of this script's variables."""
    interpreters = {"PYTHON": options.python, "ORCHESTRATOR_PYTHON": options.planner or options.python}
    environment = exports({name: checked("slurm.python", value) for name, value in interpreters.items() if value})
    launch = f"bash {shlex.quote(checked('out', f'{folder}/launch.sh'))}"
    if container is not None:
        if container.image.endswith(".sqsh"):
            raise InputError("container.image", container.image, "is enroot's: lsf and pbs start apptainer's .sif, or a registry's image")
        gpus = [APPTAINER_GPUS[job.vendor]] if job.backend == "nccl" else []
        mounts = [*mount_words(outside(job, container)), folder, *container.mounts]
        binds = [word for mount in mounts for word in ("--bind", shlex.quote(checked("container.mounts", mount)))]
        words = ["apptainer", "exec", *gpus, *binds, "--pwd", shlex.quote(container.workdir or folder)]
        image = _of_registry(container)
        is_file = image.endswith(".sif") or "://" in image or image.startswith(("/", "."))
        words.append(shlex.quote(image if is_file else f"docker://{image}"))
        launch = " ".join([*words, launch])
    if options.python:
        launch = f'PYTHON="$PYTHON" {launch}'
    if path:
        launch = f'PATH="$PATH" {launch}'
    return filled(
        "hosts.sh",
        name=checked("recipe", job.name),
        nodes=job.num_nodes,
        ranks=job.ranks_per_node,
        submit=submit,
        folder=shlex.quote(folder),
        environment=environment,
        hosts=hosts,
        start=start,
        port=MASTER_PORT,
        launch=launch,
        try_again=TRY_AGAIN,
    )


def _of_registry(container: ContainerOptions) -> str:
    """The image as registries spell it, without docker:// and pyxis' # behind the registry's name."""
    return container.image.removeprefix("docker://").replace("#", "/", 1)


def _image(container: ContainerOptions | None, scheduler: str) -> str:
    """The image by its registry's name. Raises InputError for none, and for a file."""
    if container is None:
        raise InputError("write", scheduler, "needs container.image=, the image that the pods run")
    image = _of_registry(container)
    if image.startswith(("/", ".")) or image.endswith((".sif", ".sqsh")):
        raise InputError("container.image", container.image, f"is a file; {scheduler} takes an image of a registry")
    return image


def submit(name: str) -> str:
    """What submits the file of this scheduler, in its folder."""
    return f"{SUBMIT.get(name, 'kubectl apply -f')} {WRITERS[name][0]}"


SUBMIT: Final = {"skypilot": "sky launch", "dstack": "dstack apply -f", "hyperpod": "sbatch", "lsf": "bsub <", "pbs": "qsub"}
"""What takes a scheduler's file; kubectl takes the others."""
Writer = Callable[[Job, str, SlurmOptions, ContainerOptions | None, str], str]
WRITERS: Final[Mapping[str, tuple[str, Writer]]] = {
    "kubernetes": ("kubernetes.yaml", kubernetes),
    "pytorchjob": ("pytorchjob.yaml", pytorchjob),
    "trainjob": ("trainjob.yaml", trainjob),
    "volcano": ("volcano.yaml", volcano),
    "skypilot": ("skypilot.yaml", skypilot),
    "dstack": ("job.dstack.yml", dstack),
    "hyperpod": ("job.sbatch", hyperpod),
    "lsf": ("job.lsf", lsf),
    "pbs": ("job.pbs", pbs),
}
"""Each scheduler's file by the name that `write=` takes: its path, and what writes it for a job in a folder on GPUs of a name."""


def files(
    names: tuple[str, ...], job: Job, folder: str, options: SlurmOptions, container: ContainerOptions | None, gpu: str
) -> tuple[File, ...]:
    """The file of each scheduler, for the most nodes of a range, which Slurm's job.sbatch alone keeps. Raises InputError for what one of
    them can't be told."""
    if options.least_nodes is not None and "hyperpod" in names:
        several = f"{options.least_nodes}-{options.most_nodes}"
        raise InputError("slurm.nodes", several, "is a range, beside which auto-resume was never tried: write=hyperpod needs one number")
    if options.most_nodes is not None:
        job = replace(job, num_nodes=options.most_nodes, ranks_per_node=job.world_size // options.most_nodes)
    of = lambda name: [File(path=WRITERS[name][0], content=WRITERS[name][1](job, folder, options, container, gpu))]  # noqa: E731
    return tuple(all_or_none(names, of))
