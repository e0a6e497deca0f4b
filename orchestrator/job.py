"""A Job is the exact list of files, argument vectors and environment that will be started."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from orchestrator.errors import InputError
from orchestrator.key import Key, one_text, words
from orchestrator.values import Value


def checked(key: str, value: str) -> str:
    """The value, for a place that is one line of a script. Raises InputError for line breaks, other control characters and what
    UTF-8 can't write."""
    if any(character < " " or character == "\x7f" for character in value):
        raise InputError(key, repr(value), "has a line break or another control character")
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise InputError(key, repr(value), "is not valid text")
    return value


def one_line(name: str, text: Any) -> str:
    """One text that stands in one line of a script. Raises InputError."""
    return checked(name, one_text(name, text))


def script(name: str, text: Any) -> str:
    """Lines of bash, as they are. Raises InputError for control characters other than line breaks."""
    lines = one_text(name, text)
    for line in lines.split("\n"):
        checked(name, line)
    return lines


def gres(name: str, text: Any) -> str:
    """Slurm's gres in one line; "" for `none`, where a site wants no GPUs asked for. Raises InputError."""
    return "" if text == "none" else one_line(name, text)


def node_range(name: str, text: Any) -> int | tuple[int, int]:
    """A number of nodes or, as "8-16", the least and the most. Raises InputError.

    >>> node_range("slurm.nodes", "16"), node_range("slurm.nodes", "8-16")
    (16, (8, 16))
    """
    parts = one_text(name, text).split("-", 1)
    if not all(part.isdecimal() for part in parts):
        raise InputError(name, text, "is not a whole number, nor the least and the most: 8-16")
    least, most = int(parts[0]), int(parts[-1])
    if least > most:
        raise InputError(name, text, "must have the least first: 8-16")
    return most if len(parts) == 1 else (least, most)


_TIME = re.compile(r"([0-9]+(:[0-9]{1,2}){0,2}|[0-9]+-[0-9]{1,2}(:[0-9]{1,2}){0,2}|UNLIMITED|INFINITE)\Z", re.IGNORECASE)
_MEMORY = re.compile(r"[0-9]+[KMGT]?B?\Z", re.IGNORECASE)


def time_limit(name: str, text: Any) -> str:
    """A time limit that sbatch takes (manual, --time). Raises InputError.

    >>> time_limit("slurm.time", "12:30:00"), time_limit("slurm.time", "1-12")
    ('12:30:00', '1-12')
    """
    if not _TIME.match(one_line(name, text)):
        raise InputError(name, text, "is no time limit", ["90 (minutes)", "12:30:00", "2-12 (days-hours)", "2-12:30:00", "UNLIMITED"])
    return str(text)


def memory(name: str, text: Any) -> str:
    """An amount of memory that sbatch takes (manual, --mem): megabytes, or with a unit. Raises InputError.

    >>> memory("slurm.mem", "480G"), memory("slurm.mem", "0")
    ('480G', '0')
    """
    if not _MEMORY.match(one_line(name, text)):
        raise InputError(name, text, "is no amount of memory", ["480G", "1T", "64000 (megabytes)", "0 (all of the node)"])
    return str(text)


def listed(name: str, text: Any) -> tuple[str, ...]:
    """The parts of a text between its commas."""
    return tuple(part for part in one_line(name, text).split(",") if part)


class File(Value, frozen=True, kw_only=True):
    """A text file of the run folder; `path` is relative to it."""

    path: str
    content: str
    executable: bool = False

    def write(self, path: Path) -> None:
        """Writes it to this path, with the folders above."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.content, encoding="utf-8")
        if self.executable:
            path.chmod(0o755)


def all_or_none(names: Sequence[str], files_of: Callable[[str], Iterable[File]]) -> list[File]:
    """The files of all these schedulers and programs. Raises InputError where one of them can't be written: why, of each such, and the
    `write=` that works. Half of what was asked for is worse than none: a folder is written once, and a script goes on to submit from it."""
    found: list[File] = []
    refused: dict[str, InputError] = {}
    for name in names:
        try:
            found += files_of(name)
        except InputError as error:
            refused[name] = error
    if not refused:
        return found
    rest = ",".join(name for name in names if name not in refused)
    works = f"; nothing is written, write={rest} would be" if rest else ""
    if len(refused) == 1:
        (alone,) = refused.values()
        raise InputError(alone.key, alone.value, alone.why + works, alone.choices)
    raise InputError("write", ",".join(refused), "; ".join(dict.fromkeys(map(str, refused.values()))) + works)


class Mount(Value, frozen=True, kw_only=True):
    """A file or folder outside the run's folder that the ranks need; a container sees it at the same path."""

    path: str
    is_file: bool = False
    read_only: bool = True


class Job(Value, frozen=True, kw_only=True):
    """What every rank runs: `python -m <module> <arguments>`, on `num_nodes` x `ranks_per_node` ranks.

    `program`: a user's own script, run in place of the module. `launcher`: what starts the ranks of a node.
    `environment` is what the plan needs (CUDA_DEVICE_MAX_CONNECTIONS and the like), nothing of the submitter's.
    `notes`: what a user should know of the files ("megatron_args.sh: no such file, because ...").
    """

    name: str
    module: str
    arguments: tuple[str, ...]
    environment: dict[str, str]
    files: tuple[File, ...]
    num_nodes: int
    ranks_per_node: int
    backend: str
    """Backend of torch.distributed: nccl or gloo."""
    vendor: Literal["nvidia", "amd"] = "nvidia"
    """Maker of the GPUs, which containers and Kubernetes must be told; means nothing without GPUs."""
    notes: tuple[str, ...] = ()
    without_worker: str = ""
    """Why our worker can't run the plan, where only the engine's own program can (`program`)."""
    program: str | None = None
    launcher: Literal["torchrun", "deepspeed"] = "torchrun"
    python_path: str | None = None
    """A folder with modules that the ranks import, before those of PYTHONPATH."""
    preflight: bool = False
    """Whether each rank runs workers/check.py before `program`; our worker does so itself."""
    outside: tuple[Mount, ...] = ()
    """What the ranks read and write outside the run's folder, parents first."""

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.ranks_per_node

    @property
    def unstartable(self) -> str:
        """Why nothing here can start the plan; empty: our worker can, or `program`."""
        return "" if self.program is not None else self.without_worker


class SlurmOptions(Value, frozen=True, kw_only=True):
    """What `job.sbatch` asks Slurm for; None leaves the choice to the site. `nodes` None: as many as the job was planned for; two numbers:
    the least and the most, of which the job is planned for the most and plans again by itself for what it has (`orchestrator.replan`).

    `exclusive` None: where the job takes every GPU of its nodes (`launch.render.with_whole_nodes`).

    `gres` None: `--gpus-per-node` for an nccl job; "" (`slurm.gres=none`) asks for no GPUs at all (sites that hand out whole nodes).
    `extra`: further words of sbatch ("--comment", "a b"), on one `#SBATCH` line. `style` torchrun: one task a node, which starts its ranks;
    srun: one task a rank. `requeue`: how often the job goes back into the queue, to go on from its newest checkpoint, when it is out of
    time or a rank or node fails. `python`: the ranks' interpreter (of a shared environment, or of the image); None: what the PATH offers
    there. `warning_s` None: by what a step and a save take (`launch.render.with_warning`).
    `planner`: an interpreter that has this package, for the job's status.json; None: `python`.
    """

    partition: Annotated[str | None, Key("slurm.partition", "partition to submit to", read=one_line)] = None
    account: Annotated[str | None, Key("slurm.account", "account to charge", read=one_line)] = None
    qos: Annotated[str | None, Key("slurm.qos", "quality of service", read=one_line)] = None
    time: Annotated[str | None, Key("slurm.time", "limit, as sbatch takes it (12:30:00)", read=time_limit)] = None
    nodes: Annotated[int | tuple[int, int] | None, Key(
        "slurm.nodes", "number of nodes, or 8-16: planned for 16, and planned anew by the job itself where it has fewer or loses one",
        type=str, default="what the plan needs", read=node_range, low=1)] = None  # fmt: skip
    nodelist: Annotated[str | None, Key("slurm.nodelist", "hosts to use", read=one_line)] = None
    exclude: Annotated[str | None, Key("slurm.exclude", "hosts to leave out", read=one_line)] = None
    constraint: Annotated[str | None, Key("slurm.constraint", "node features", read=one_line)] = None
    gres: Annotated[
        str | None,
        Key("slurm.gres", "generic resources in place of --gpus-per-node; none: ask for none (sites that hand out whole nodes)", read=gres),
    ] = None
    cpus_per_task: Annotated[int | None, Key("slurm.cpus_per_task", "cores of a task", low=1)] = None
    mem: Annotated[str | None, Key("slurm.mem", "host memory of a node", read=memory)] = None
    cpus_per_gpu: Annotated[
        int | None, Key("slurm.cpus_per_gpu", "cores for each GPU, whatever slurm.style (for a site's file)", low=1)
    ] = None
    mem_per_gpu: Annotated[str | None, Key("slurm.mem_per_gpu", "host memory for each GPU (for a site's file)", read=memory)] = None
    exclusive: Annotated[
        bool | None, Key("slurm.exclusive", "true: nothing else on the nodes", type=bool, default="true where all GPUs of a node are used")
    ] = None
    reservation: Annotated[str | None, Key("slurm.reservation", "reservation name", read=one_line)] = None
    dependency: Annotated[str | None, Key("slurm.dependency", "as sbatch takes it (afterok:1234)", read=one_line)] = None
    switches: Annotated[str | None, Key("slurm.switches", "leaf switches at most", read=one_line)] = None
    segment: Annotated[str | None, Key("slurm.segment", "nodes per block (topology/block)", read=one_line)] = None
    extra: Annotated[
        tuple[str, ...], Key("slurm.extra", "more options of sbatch, in quotes (--comment=x --nice)", type=str, read=words)
    ] = ()
    warning_s: Annotated[int | None, Key(
        "slurm.warning_s", "seconds before the time limit at which the ranks are asked to save and end",
        default="two predicted steps and two saves, 120 at least", low=1, high=65535)] = None  # fmt: skip
    style: Annotated[Literal["torchrun", "srun"], Key("slurm.style", "torchrun: one task a node; srun: one task a rank")] = "torchrun"
    requeue: Annotated[int, Key("slurm.requeue", "times to go back into the queue and on from the newest checkpoint", low=0)] = 0
    python: Annotated[
        str | None,
        Key("slurm.python", "the ranks' interpreter; default: this one where it has the engines, else the PATH's", read=one_line),
    ] = None
    planner: str | None = None
    setup: Annotated[
        str | None, Key("slurm.setup", "bash that job.sbatch runs before it starts the ranks: module load cuda/12.8", read=script)
    ] = None

    @property
    def most_nodes(self) -> int | None:
        """What the plan is for; None: as many as it needs."""
        return self.nodes[1] if isinstance(self.nodes, tuple) else self.nodes

    @property
    def least_nodes(self) -> int | None:
        """The least number of nodes with which the job goes on; None: it has one plan."""
        return self.nodes[0] if isinstance(self.nodes, tuple) else None


Scheduler = Literal["kubernetes", "pytorchjob", "trainjob", "volcano", "skypilot", "dstack", "hyperpod", "lsf", "pbs"]
"""Schedulers beside Slurm for which a run's folder gets a file (launch/schedulers.py); hyperpod's takes the place of Slurm's."""


class ContainerOptions(Value, frozen=True, kw_only=True):
    """The image that ranks run in under Slurm: by pyxis (flags of srun) or apptainer. `mounts` are HOST:CONTAINER[:MODE]; the run's folder
    and `Job.outside` are mounted at their own paths. `workdir` None: the run's folder."""

    image: Annotated[str, Key("container.image", "that ranks run in under Slurm: pyxis' name or .sqsh, or apptainer's .sif", read=one_line)]
    mounts: Annotated[
        tuple[str, ...], Key("container.mounts", "HOST:CONTAINER[:ro],... beside the run's folder, data and weights", type=str, read=listed)
    ] = ()
    workdir: Annotated[str | None, Key("container.workdir", "in the container; default: the run's folder", read=one_line)] = None
    runtime: Annotated[
        Literal["pyxis", "apptainer"], Key("container.runtime", "what starts it", default="pyxis, or apptainer for .sif")
    ] = "pyxis"


RUN_VARIABLE = "ORCHESTRATOR_RUN"
"""Environment variable that is set, to a name of its own, in every process of a run that this package supervises."""
ASKED_VARIABLE = "ORCHESTRATOR_ASKED"
"""Environment variable with the path of a file that is there once the ranks of a Slurm job are to save after their step and end."""
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
PLACES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "NNODES", "RANKS_PER_NODE", "MASTER_ADDR", "MASTER_PORT")
"""What launch.sh and torchrun say themselves."""
SECRET = re.compile(r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.IGNORECASE)
"""Names of variables that hold what must not be written to a folder that others read (WANDB_API_KEY, HF_TOKEN)."""


def check_variable(name: str, value: str) -> None:
    """Raises InputError for a name that no environment variable can have, that the launcher decides, or that is a secret's, which would be
    written to launch.sh."""
    key = f"env.{name}"
    if not VARIABLE.match(name):
        raise InputError(key, value, "is not a name that an environment variable can have")
    if name in (*PLACES, RUN_VARIABLE, ASKED_VARIABLE):
        raise InputError(key, value, "is the launcher's own: it says where each rank runs")
    if SECRET.search(name):
        why = f"looks like a secret, and would be written to launch.sh; export {name} on the nodes, or keep it in a file of your home"
        raise InputError(key, "...", why)
