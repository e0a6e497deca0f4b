"""A Job as scripts: `launch.sh` starts the ranks of one node, `job.sbatch` runs that on every node of a Slurm job. Pure text.

Both need nothing but bash, Python with torch, and Slurm's own programs. Every value that comes from outside is quoted. Their text is in
`scripts/`: `rank.sh` is started per rank, `on_a_node.sh` is the task of srun that runs launch.sh on a node, `guard.sh` waits beside it.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

import msgspec

from orchestrator.errors import InputError
from orchestrator.job import (
    ASKED_VARIABLE,
    RUN_VARIABLE,
    VARIABLE,
    ContainerOptions,
    File,
    Job,
    Mount,
    SlurmOptions,
    check_variable,
    checked,
)

if TYPE_CHECKING:
    from jinja2 import Environment

PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")
"""What neither bash nor sbatch gives a meaning to, as in shlex."""
FIRST_PORT, PORTS = 20000, 10000
"""The rendezvous port of a Slurm job is FIRST_PORT + job id % PORTS: below Linux's ephemeral range (32768), one a job."""
PORT_TRIES = 20
"""Ports that job.sbatch looks at, from that on, for one at which nothing listens: a service takes one or a few in a row."""


VALUED = (
    "partition", "account", "qos", "time", "nodelist", "exclude", "constraint", "gres", "cpus_per_task", "mem", "cpus_per_gpu",
    "mem_per_gpu", "reservation", "dependency", "switches", "segment",
)  # fmt: skip
"""Options of SlurmOptions that become `#SBATCH --name=value` unchanged."""


PER_GPU = {"cpus_per_gpu": "cpus_per_task", "mem_per_gpu": "mem"}
"""Options for each GPU, which a job without GPUs has not, and what sbatch takes in their place, not beside them."""


NEEDED = ("CUDA_DEVICE_MAX_CONNECTIONS", "DS_ACCELERATOR", "NVTE_CPU_OFFLOAD_V1")
"""What the plan can't do without: not to be changed by `env.*`."""


@cache
def scripts() -> Environment:
    """The scripts in the folder of that name, as templates; what one of them lacks is an error."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("orchestrator.launch", "scripts"),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        comment_start_string="{##",  # bash has ${#array[@]}
        autoescape=False,
    )


def filled(script: str, /, **values: object) -> str:
    """A script with these values in place of their names."""
    return scripts().get_template(f"{script}.j2").render(values)


def with_environment(job: Job, values: Mapping[str, str]) -> Job:
    """The job with more variables. Raises InputError for a name that can't be one, for what the plan or the launcher decides, and for names
    of secrets, which would be written to launch.sh.

    >>> job = Job(name="t", module="m", arguments=(), environment={}, files=(), num_nodes=1, ranks_per_node=1, backend="gloo")
    >>> with_environment(job, {"NCCL_DEBUG": "INFO"}).environment
    {'NCCL_DEBUG': 'INFO'}
    """
    for name, value in values.items():
        check_variable(name, value)
        if name in NEEDED and job.environment.get(name, value) != value:
            raise InputError(f"env.{name}", value, f"the plan needs {name}={job.environment[name]}")
    return msgspec.structs.replace(job, environment={**job.environment, **values})


EXIT_MARGIN_MINUTES = 5
"""What a program that watches its own time leaves of the limit: to end its step and save."""


def exit_minutes(time: str | None) -> int | None:
    """Minutes after which a program should end by itself under this limit of sbatch (minutes, minutes:seconds, hours:minutes:seconds,
    days-hours, days-hours:minutes, days-hours:minutes:seconds); None where it can't tell.

    >>> exit_minutes("12:30:00"), exit_minutes("90"), exit_minutes("1-2"), exit_minutes("2:30"), exit_minutes("UNLIMITED")
    (745, 85, 1555, None, None)
    """
    seconds = limit_s(time)
    minutes = 0 if seconds is None else seconds // 60
    return minutes - EXIT_MARGIN_MINUTES if minutes > EXIT_MARGIN_MINUTES else None


def limit_s(time: str | None) -> int | None:
    """Seconds of a limit of sbatch, in any of its spellings; None where there is none.

    >>> limit_s("12:30:00"), limit_s("90"), limit_s("1-2"), limit_s("2:30"), limit_s("UNLIMITED")
    (45000, 5400, 93600, 150, None)
    """
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time or "")
    if found is None:
        return None
    days, first, second, third = (int(part) if part is not None else None for part in found.groups())
    units = (3600, 60, 1) if days is not None or third is not None else (60, 1, 0)
    return (days or 0) * 86400 + sum((part or 0) * unit for part, unit in zip((first, second, third), units, strict=True))


HOLD_S = 20
"""Seconds in which the ranks of a start before must have ended."""
STARTED = re.compile(r"^=== rank \d+ on .* ===$\n?", re.MULTILINE)
"""The line with which a rank's log says that it starts."""

FIND = "import importlib.util, sys; sys.exit(importlib.util.find_spec('orchestrator') is None)"
"""Whether an interpreter has this package, in 30 ms: nothing is imported."""
WARNING_S = 120
"""Seconds before the time limit at which Slurm warns the script, at least: SlurmOptions.warning_s says more of a large model."""
MOST_WARNING_S = 65535
"""The most seconds of a warning that sbatch takes (manual, --signal)."""
WRITE_PER_NODE = 1e9
"""Bytes/s that a node writes to shared storage where cluster.storage_bandwidth says nothing: an assumption on the low side."""
REMIND_S = 15
"""Seconds between warnings, which are repeated: a rank that still imports its packages has no handler yet."""
SAME_AGAIN = frozenset({2, 3, 4})
"""Exit statuses of ranks that a restart would meet again: bad input, a loss that is no number (workers/runs.py), nodes that are not what
the plan was made for (workers/preflight.py)."""
WRITTEN = {
    **dict.fromkeys(("-N", "--nodes"), "slurm.nodes"),
    **dict.fromkeys(("-n", "--ntasks", "--ntasks-per-node", "--ntasks-per-gpu", "--ntasks-per-socket", "--ntasks-per-core"), "slurm.style"),
    **dict.fromkeys(("-G", "--gpus", "--gpus-per-node", "--gpus-per-task", "--gpus-per-socket", "--gres"), "slurm.gres"),
    "--signal": "slurm.warning_s",
    **dict.fromkeys(("--requeue", "--no-requeue"), "slurm.requeue"),
}
"""The key that says what an option of sbatch does which job.sbatch writes itself, and of which Slurm takes the last."""
GPUS_OF_GRES = re.compile(r"(?:^|,)(?:gres[:/])?gpu(?:[:=][^:=,(]*[a-zA-Z_][^:=,(]*)?(?:[:=](\d+))?(?=[,(]|$)")
"""The number of each type of GPU in a --gres (gpu:8, gpu:h100:4, gpu)."""
TRY_AGAIN = 75
"""Exit status of a job that stopped before its end and can be continued (EX_TEMPFAIL, sysexits.h); finish.py asks for a requeue with it."""
GPUS_SEEN = {"nvidia": "nvidia-smi -L | grep -c '^GPU '", "amd": "rocm-smi --showid --csv | grep -c '^card'"}
"""How a node counts the GPUs whose driver answers, by vendor: one that has fallen off the bus is left out, or ends the list."""
SRUN_STYLE = "one task of srun a rank"
"""A line that job.sbatch prints in slurm.style=srun: then srun's messages name ranks."""

ANSWER_S = 30
"""Seconds in which a node must start a program, else the job goes on without it."""
GONE_S = 10
"""Seconds that srun gets to end after a node's ranks have failed. Of a node that is gone it waits for Slurm's word, for SlurmdTimeout (300
s)."""


def sbatch_quote(text: str) -> str:
    r"""One word of an `#SBATCH` line. sbatch splits these lines itself: double quotes keep blanks and `#`, a backslash takes the next
    character as it is, in quotes too (src/sbatch/opt.c, _get_argument; a test asks a real sbatch where there is one).

    >>> print(sbatch_quote("--time=12:30:00"), sbatch_quote('--comment=a "b" #c'))
    --time=12:30:00 "--comment=a \"b\" #c"
    """
    if PLAIN.fullmatch(text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def exports(environment: Mapping[str, str]) -> str:
    """Lines of bash that export these variables. Raises InputError for a name that none can have, and for zero bytes."""
    lines = []
    for name, value in environment.items():
        if not VARIABLE.match(name):
            raise InputError(f"env.{name}", value, "is not a name that an environment variable can have")
        if "\0" in value:
            raise InputError(f"env.{name}", repr(value), "has a zero byte")
        lines.append(f"export {name}={shlex.quote(value)}\n")
    return "".join(lines)


def launch_sh(job: Job) -> str:
    """Starts this node's ranks through torchrun; they see the job's environment. Raises InputError for what no script can hold."""
    words = (job.module, *job.arguments) if job.program is None else (job.program, *job.arguments)
    for argument in words:
        if "\0" in argument:
            raise InputError("arguments", repr(argument), "has a zero byte")
    several = f"on every node: NODE_RANK=<0..{job.num_nodes - 1}> MASTER_ADDR=<host of node 0> bash launch.sh"
    how = "bash launch.sh" if job.num_nodes == 1 else several
    environment = exports({"PYTHONUNBUFFERED": "1", **job.environment})
    if job.python_path is not None:
        environment += f"export PYTHONPATH={shlex.quote(checked('model.code', job.python_path))}${{PYTHONPATH:+:$PYTHONPATH}}\n"
    return filled(
        "launch.sh",
        name=checked("recipe", job.name),
        world_size=job.world_size,
        num_nodes=job.num_nodes,
        ranks_per_node=job.ranks_per_node,
        how=how,
        environment=environment,
        has_gpus=job.backend == "nccl",
        rank=shlex.quote(_rank(job)),
        hold_s=HOLD_S,
        torchrun=job.launcher == "torchrun",
        module=job.program is None,
        words=shlex.join(words),
        find=FIND,
    )


def _rank(job: Job) -> str:
    """What is started per rank."""
    return filled("rank.sh", has_gpus=job.backend == "nccl", launcher=job.launcher, preflight=job.preflight)


APPTAINER_GPUS = {"nvidia": "--nv", "amd": "--rocm"}
"""How apptainer is asked for the node's GPUs and the libraries of their driver, by vendor."""
DOCKER_GPUS = {
    "nvidia": ("--gpus", "all"),
    "amd": ("--device", "/dev/kfd", "--device", "/dev/dri", '--group-add "$(stat -c %g /dev/kfd)"', "--security-opt", "seccomp=unconfined"),
}
"""How docker is, without the vendor's own runtime (rocm.docs.amd.com, "Running ROCm Docker containers"; the devices are a group's)."""


def outside(job: Job, container: ContainerOptions | None) -> list[Mount]:
    """What the job needs outside its folder and `container.mounts` has not. Raises InputError for a path that no mount can say."""
    given = [mount.partition(":") for mount in (container.mounts if container else ())]
    places = [inside.partition(":")[0] or host for host, _, inside in given]
    found = [mount for mount in job.outside if not any(mount.path == place or mount.path.startswith(f"{place}/") for place in places)]
    for mount in found:
        check_mountable("container.mounts", mount.path)
    return found


def check_mountable(key: str, path: str) -> None:
    """Raises InputError for a path that a container's mounts can't name."""
    if ":" in path or "," in path:
        raise InputError(key, path, 'has ":" or ",", at which the mounts of a container are divided: take another name')


def mount_words(mounts: Sequence[Mount]) -> list[str]:
    """HOST:CONTAINER[:ro] of each."""
    return [f"{mount.path}:{mount.path}{':ro' if mount.read_only else ''}" for mount in mounts]


def _in_container(job: Job, container: ContainerOptions) -> tuple[list[str], list[str]]:
    """(flags of srun, words before `bash launch.sh`), as bash reads them."""
    quoted = [shlex.quote(checked("container.mounts", mount)) for mount in container.mounts]
    needed = [shlex.quote(checked("container.mounts", mount)) for mount in mount_words(outside(job, container))]
    image = shlex.quote(checked("container.image", pyxis_image(container.image) if container.runtime == "pyxis" else container.image))
    workdir = '"$PWD"' if container.workdir is None else shlex.quote(checked("container.workdir", container.workdir))
    if container.runtime == "pyxis":
        mounts = ",".join([*needed, '"$PWD":"$PWD"', *(mount if ":" in mount else f"{mount}:{mount}" for mount in quoted)])
        return [f"--container-image={image}", f"--container-mounts={mounts}", f"--container-workdir={workdir}"], []
    binds = [word for mount in (*needed, '"$PWD"', *quoted) for word in ("--bind", mount)]
    return [], ["apptainer", "exec", APPTAINER_GPUS[job.vendor], *binds, "--pwd", workdir, image]


def container_command(job: Job, container: ContainerOptions, out: str) -> str:
    """One line that starts `launch.sh` of the folder on one machine, in the image: by apptainer, by enroot for its files (.sqsh), by docker
    for an image of a registry. Raises InputError."""
    gpus = job.backend == "nccl"

    def quoted(*words: str) -> list[str]:
        return [shlex.quote(checked("container", word)) for word in words]

    workdir = container.workdir or out
    needed = mount_words(outside(job, container))
    both = [mount if ":" in mount else f"{mount}:{mount}" for mount in (*needed, f"{out}:{out}", *container.mounts)]
    if container.runtime == "apptainer":
        words = ["apptainer", "exec", *([APPTAINER_GPUS[job.vendor]] if gpus else [])]
        words += [*(f"--bind {mount}" for mount in quoted(*needed, out, *container.mounts)), "--pwd", *quoted(workdir, container.image)]
    elif container.image.endswith(".sqsh"):
        words = ["enroot", "start", *(f"--mount {mount}" for mount in quoted(*both)), *quoted(container.image)]
    else:
        image = container.image.removeprefix("docker://").replace("#", "/", 1)  # pyxis writes REGISTRY#IMAGE
        words = ["docker", "run", "--rm", *(DOCKER_GPUS[job.vendor] if gpus else ()), "--ipc=host", "--ulimit", "memlock=-1"]
        words += ['--user "$(id -u):$(id -g)"', *(f"--volume {mount}" for mount in quoted(*both)), "--workdir", *quoted(workdir, image)]
    return " ".join([*words, "bash", *quoted(f"{out}/launch.sh")])


def with_whole_nodes(job: Job, slurm: SlurmOptions, gpus_per_node: int) -> SlurmOptions:
    """The options with `exclusive` decided: a job that takes every GPU of its nodes takes their cores too, of which Slurm would otherwise
    give one a task. A job without GPUs, and one whose site hands out whole nodes (`gres` ""), says nothing."""
    if slurm.exclusive is not None or job.backend != "nccl" or slurm.gres == "":
        return slurm
    return msgspec.structs.replace(slurm, exclusive=job.world_size // (slurm.most_nodes or job.num_nodes) >= gpus_per_node)


def with_warning(slurm: SlurmOptions, step_s: float, save_s: float) -> SlurmOptions:
    """The options with `warning_s` decided: the step that runs when the warning comes ends, then a checkpoint is written; both twice, since
    both are predictions, and 30 s for the signal's way. Raises InputError for a time limit that is no longer than that: the job would be
    asked to end as it starts."""
    if slurm.warning_s is None:
        wanted = 30 + 2 * (step_s + save_s)
        slurm = msgspec.structs.replace(slurm, warning_s=min(MOST_WARNING_S, max(WARNING_S, 10 * math.ceil(wanted / 10))))
    limit = limit_s(slurm.time)
    if limit is not None and slurm.warning_s is not None and slurm.warning_s > WARNING_S and limit <= slurm.warning_s:
        why = f"is no longer than the {slurm.warning_s} s before it at which the ranks are asked to save and end (slurm.warning_s=)"
        raise InputError("slurm.time", slurm.time, why)
    return slurm


def pyxis_image(image: str) -> str:
    """An image as pyxis takes it: files and its own spelling unchanged; of a registry's image "#" ends the registry's name (enroot's
    manual, import), else enroot looks for it at Docker Hub.

    >>> pyxis_image("nvcr.io/nvidia/pytorch:26.06-py3"), pyxis_image("docker://localhost:5000/a/b:1"), pyxis_image("ubuntu/nginx:1")
    ('nvcr.io#nvidia/pytorch:26.06-py3', 'docker://localhost:5000#a/b:1', 'ubuntu/nginx:1')
    >>> pyxis_image("/images/mcore.sqsh"), pyxis_image("./mcore.sqsh"), pyxis_image("nvcr.io#nvidia/pytorch:26.06-py3")
    ('/images/mcore.sqsh', './mcore.sqsh', 'nvcr.io#nvidia/pytorch:26.06-py3')
    """
    scheme, found, rest = image.rpartition("://")
    registry, slash, name = rest.partition("/")
    if "#" in rest or not slash or registry in ("", ".", "..") or rest.endswith(".sqsh"):
        return image
    return f"{scheme}{found}{registry}#{name}" if "." in registry or ":" in registry or registry == "localhost" else image


def _gpus(slurm: SlurmOptions) -> int:
    """GPUs of a node that `gres` asks for; 0: it names none."""
    return sum(int(count or 1) for count in GPUS_OF_GRES.findall(slurm.gres or ""))


def unsaid(job: Job, slurm: SlurmOptions) -> tuple[str, ...]:
    """What job.sbatch leaves to the site, in one sentence each, where that has surprised people."""
    found = []
    if slurm.time is None:
        found.append("job.sbatch has no time limit: the partition's holds, before which the ranks save and end; slurm.time=12:00:00")
    ranks = job.world_size // (slurm.most_nodes or job.num_nodes)
    if job.backend == "nccl" and ranks < job.ranks_per_node:
        found.append(f"slurm.nodes={slurm.most_nodes} puts {ranks} ranks on a node, and the plan is priced with {job.ranks_per_node}: "
                     f"gpus_per_node={ranks} plans for it")  # fmt: skip
    if job.backend == "nccl" and (asked := _gpus(slurm)) > ranks:
        found.append(f"slurm.gres={slurm.gres} asks for {asked} GPUs of a node, and {ranks} ranks are there: the others idle")
    if job.backend == "nccl" and not slurm.exclusive and slurm.gres != "" and slurm.cpus_per_task is None and slurm.cpus_per_gpu is None:
        tasks = "a task" if slurm.style == "srun" else f"the one task that starts {ranks} rank{'s' if ranks > 1 else ''}"
        found.append(f"job.sbatch shares its nodes, and Slurm may give one core to {tasks}: slurm.cpus_per_task=, or slurm.exclusive=true")
    if job.backend == "nccl" and job.num_nodes > 1 and "NCCL_SOCKET_IFNAME" not in job.environment:
        found.append("NCCL and gloo choose the network's interface by themselves: where a node has several, env.NCCL_SOCKET_IFNAME=ib0 and"
                     " env.GLOO_SOCKET_IFNAME=ib0 name it")  # fmt: skip
    return tuple(found)


def job_sbatch(job: Job, slurm: SlurmOptions, container: ContainerOptions | None = None, *, auto_resume: bool = False) -> str:
    """Runs launch.sh on every node. Nothing of the submitter's environment goes along (`--export=NONE`). `auto_resume`: srun starts it
    again after a node was replaced (AWS HyperPod). Raises InputError."""
    nodes = job.num_nodes if slurm.most_nodes is None else slurm.most_nodes
    elastic = slurm.least_nodes is not None
    if nodes < 1 or job.world_size % nodes:
        raise InputError("slurm.nodes", nodes, f"does not divide the {job.world_size} ranks of the plan")
    ranks_per_node = job.world_size // nodes
    for name, other in PER_GPU.items():
        value = getattr(slurm, name)
        if value is not None and getattr(slurm, other) is not None:
            raise InputError(f"slurm.{name}", value, f"can't stand beside slurm.{other}={getattr(slurm, other)}: sbatch takes one of them")
        if value is not None and slurm.gres == "":
            raise InputError(f"slurm.{name}", value, "is for each GPU that is asked for, and slurm.gres=none asks for none")
    if slurm.style == "srun" and job.launcher != "torchrun":
        raise InputError("slurm.style", "srun", f"starts one task a rank, and entry.launcher={job.launcher} starts the ranks itself")
    tasks = ranks_per_node if slurm.style == "srun" else 1
    options = [f"--job-name={checked('recipe', job.name)}"]
    if slurm.least_nodes is None:
        options += [f"--nodes={nodes}", f"--ntasks-per-node={tasks}"]
    else:  # with tasks Slurm gives no more nodes than the least number needs (sbatch sets ntasks to that)
        options += [f"--nodes={slurm.least_nodes}-{nodes}", f"--mincpus={tasks * (slurm.cpus_per_task or 1)}", "--no-kill"]
    if job.backend == "nccl" and 0 < _gpus(slurm) < ranks_per_node:
        raise InputError("slurm.gres", slurm.gres, f"asks for fewer GPUs than the {ranks_per_node} ranks of a node need")
    if job.backend == "nccl" and slurm.gres is None:
        options.append(f"--gpus-per-node={ranks_per_node}")
    for name, value in msgspec.structs.asdict(slurm).items():
        if name in VALUED and value not in (None, "") and (name not in PER_GPU or job.backend == "nccl"):
            options.append(f"--{name.replace('_', '-')}={checked(f'slurm.{name}', str(value))}")
    if slurm.exclusive:
        options.append("--exclusive")
        if slurm.mem is None and slurm.mem_per_gpu is None:
            options.append("--mem=0")  # all of it: a whole node has its default memory alone (DefMemPerCPU, DefMemPerNode) without a word
    options += ["--output=slurm-%j.log", "--open-mode=append", "--export=NONE", f"--signal=B:USR1@{slurm.warning_s or WARNING_S}"]
    options.append("--requeue" if slurm.requeue or auto_resume else "--no-requeue")
    lines = [sbatch_quote(option) for option in options]
    if slurm.extra:
        if not slurm.extra[0].startswith("-"):
            raise InputError("slurm.extra", slurm.extra[0], "must be an option of sbatch, such as --comment=text")
        for word in slurm.extra:
            option = word.partition("=")[0] if word.startswith("--") else word[:2]
            if (key := WRITTEN.get(option)) and (key != "slurm.gres" or (job.backend == "nccl" and slurm.gres != "")):
                raise InputError("slurm.extra", word, f"would win over what job.sbatch asks for by the plan; {key}= says it")
        lines.append(" ".join(sbatch_quote(checked("slurm.extra", word)) for word in slurm.extra))
    flags, before = ([], []) if container is None else _in_container(job, container)
    interpreters = {"PYTHON": slurm.python, "ORCHESTRATOR_PYTHON": slurm.planner or slurm.python}
    environment = exports({name: checked("slurm.python", path) for name, path in interpreters.items() if path})
    if auto_resume:
        environment += "export CONTINUE=1\n"
        flags = ["--auto-resume=1", *flags, "bash", "-c", shlex.quote(filled("hyperpod.sh")), '"${hosts[0]}"']
    return filled(
        "job.sbatch",
        elastic=elastic,
        auto_resume=auto_resume,
        find=FIND,
        same_again="|".join(str(status) for status in sorted({0, *SAME_AGAIN})),
        setup=None if slurm.setup is None else slurm.setup.rstrip("\n"),
        nodes=nodes,
        least=slurm.least_nodes,
        answer_s=ANSWER_S,
        healthy=_healthy(job),
        grace_s=slurm.warning_s or WARNING_S,
        options="\n".join(f"#SBATCH {line}" for line in lines),
        environment=environment,
        ranks_per_node=ranks_per_node,
        starter=slurm.style,
        how=SRUN_STYLE if slurm.style == "srun" else "torchrun on each node",
        tasks="One task a rank." if slurm.style == "srun" else "One task a node.",
        ntasks_per_node=tasks,
        run=" ".join(["srun", '"${options[@]}"', *flags, *before]),
        gone_s=GONE_S,
        on_a_node=f"-c {shlex.quote(filled('on_a_node.sh'))} ",
        guard=shlex.quote(filled("guard.sh", requeue=slurm.requeue)) if elastic else "",
        asked=ASKED_VARIABLE,
        requeue=slurm.requeue,
        remind=REMIND_S,
        try_again=TRY_AGAIN,
        first_port=FIRST_PORT,
        ports=PORTS,
        port_tries=PORT_TRIES,
        hostfile=job.launcher != "torchrun",
        supervisor=f"${{{RUN_VARIABLE}:-}}",
    )


def _healthy(job: Job) -> str:
    """The command that succeeds on a node which has the GPUs of its ranks; a node without the vendor's program is taken at its word."""
    if job.backend != "nccl":
        return "true"
    program = GPUS_SEEN[job.vendor].partition(" ")[0]
    return f"bash -c {shlex.quote(f'! command -v {program} >/dev/null || (( $({GPUS_SEEN[job.vendor]}) >= RANKS_PER_NODE ))')}"


def files(job: Job, *, slurm: SlurmOptions | None = None, container: ContainerOptions | None = None) -> tuple[File, ...]:
    """`launch.sh` and `job.sbatch`, to lie in the run's folder beside the job's own files."""
    return (
        File(path="launch.sh", content=launch_sh(job), executable=True),
        File(path="job.sbatch", content=job_sbatch(job, slurm or SlurmOptions(), container), executable=True),
    )
