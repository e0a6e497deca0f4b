"""What every rank looks at before the training: is this node what the plan was made for, do all see the same folder and data, do the groups
work and how fast are they.

The first part (`check_nodes`) needs no collective: each rank puts its facts into the job's store, rank 0 compares them and puts its verdict
there. So it works where NCCL would hang, and ends within TIMEOUT_S also when a rank never comes. The first mismatch is one line with
node and cause. The second part (`check_groups`) runs a small all-reduce in every group and measures the bandwidth.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from orchestrator.hardware.catalog import by_driver_name
from orchestrator.hardware.collectives import all_reduce, link_for
from orchestrator.plan import Plan
from orchestrator.units import GB, GIB, format_seconds
from orchestrator.workers import distributed
from orchestrator.workers.data import indexed_prefix, is_indexed
from orchestrator.workers.watchdog import host

MISMATCH_STATUS = 4
"""Exit status of every rank where the nodes are not what the plan was made for: the same nodes would give the same again."""
TIMEOUT_S = 50.0
"""Seconds for all ranks to come and agree, so that a job that can't start ends within a minute."""
SHARED_S = 5.0
"""A file that was just written may take seconds to show on another node (NFS keeps attributes for 3 s and more)."""
NOTHING: Mapping[str, str] = MappingProxyType({})
EVERYWHERE = ("torch", "transformer-engine", "flash-attn")
"""Distributions that change what any engine computes, where they are installed; the engine's own stand in engine.json, "requires"."""
BYTES = {"cuda": 64 * 2**20, "cpu": 2**18}
"""Bytes of the buffers of the bandwidth measurement: long enough for NCCL's ring to fill; on gloo, a fraction of a second."""
REPEATS = 4
SLOW = 2.0
"""Times the seconds that the plan's link gives, from which a group is reported: a lost link or adapter halves the bandwidth at least, while
healthy nodes lose 10 to 30 per cent (nccl-tests)."""
SLOW_ON_SHARED_CORES = 20.0
"""Times the seconds that the plan's link gives from which a group is reported under gloo: ranks that share cores wait for their turn."""
FREE_SHARE = 0.97
"""Share of the predicted peak that must be free: the context of this process is already part of the prediction."""


class PreflightError(Exception):
    """The first mismatch: node and cause, one line."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What one rank sees. Bytes. `data`: sizes of the data's files, None: unreadable. `token`: what it read in the run's folder."""

    rank: int
    host: str
    local_rank: int
    python: str
    packages: dict[str, str]
    gpus: tuple[str, ...] = ()
    gpu_memory: int = 0
    gpu_free: int = 0
    mig: bool = False
    token: str | None = None
    unwritable: str | None = None
    data: dict[str, int | None] = field(default_factory=dict)


def packages(more: Iterable[str] = ()) -> dict[str, str]:
    """Versions by name, of those of EVERYWHERE and `more` that are installed; nothing is imported."""
    found = {}
    for name in dict.fromkeys((*EVERYWHERE, *more)):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def data_files(plan: Plan) -> dict[str, int | None]:
    """Sizes of what the run reads; None for what can't be read from here."""
    run = plan.run
    wanted: list[str] = []
    for source in (run.data, run.valid, *(source.path for source in run.blend)):
        if source is not None:
            prefix = indexed_prefix(source)
            wanted += [f"{prefix}.bin", f"{prefix}.idx"] if source.endswith(".idx") or is_indexed(source) else [source]
    wanted += [folder for folder in (plan.run.tokenizer, plan.run.resume) if folder is not None]
    sizes: dict[str, int | None] = {}
    for name in wanted:
        path = Path(name)
        if path.is_dir():
            sizes[name] = 0 if os.access(path, os.R_OK | os.X_OK) else None
        else:
            sizes[name] = path.stat().st_size if os.access(path, os.R_OK) else None
    return sizes


def gather(plan: Plan, out: Path, store: dist.Store, rank: int, names: Iterable[str] = ()) -> Facts:
    """This rank's facts. `names`: distributions whose versions are looked up beside EVERYWHERE's. Rank 0 writes a token into the run's
    folder, and the others look whether they find it there."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    folder = out / "logs"
    path = folder / "preflight-token"
    unwritable = token = None
    try:
        if rank == 0:
            token = uuid.uuid4().hex
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(token)
        elif local_rank == 0:
            own = folder / f".preflight-{rank}"
            folder.mkdir(parents=True, exist_ok=True)
            own.write_text("")
            own.unlink()
    except OSError as error:
        unwritable = f"{error.filename}: {error.strerror}"
    if rank == 0:
        store.set("token", token if token is not None and unwritable is None else "")
    else:
        store.wait(["token"], timedelta(seconds=TIMEOUT_S))
        expected = store.get("token").decode()
        token = _read_token(path, expected) if expected else ""
    facts: dict[str, Any] = {}
    if not plan.cluster.is_cpu:
        gpus = tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
        facts["gpus"] = gpus
        if local_rank < len(gpus):
            free, total = torch.cuda.mem_get_info(local_rank)
            facts |= {"gpu_free": free, "gpu_memory": total, "mig": "MIG" in gpus[local_rank].split()}
    return Facts(rank=rank, host=host(), local_rank=local_rank, python=platform.python_version(), packages=packages(names), token=token,
                 unwritable=unwritable, data=data_files(plan), **facts)  # fmt: skip


def _read_token(path: Path, expected: str) -> str:
    """What the file says once it says what is expected, or what it says, or "", after SHARED_S."""
    deadline = time.monotonic() + SHARED_S
    while True:
        try:
            found = path.read_text()
        except OSError:
            found = ""
        if found == expected or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


def first_mismatch(plan: Plan, ranks: Sequence[Facts], out: str = "OUT", requires: Mapping[str, str] = NOTHING) -> str | None:
    """A mismatch in one line with node and cause; None where all is as planned. `ranks` in order of rank; [0] has written the token.
    `requires`: engine.json's "requires", the version ("": any) by distribution; nothing where another program than our worker brings its
    own."""
    first = ranks[0]
    local_world = {facts.host: sum(other.host == facts.host for other in ranks) for facts in ranks}
    for facts in ranks:
        why = (
            _folder(facts, first, out)
            or _data(facts, first)
            or _planned_versions(requires, facts)
            or _versions(facts, first)
            or (None if plan.cluster.is_cpu else _gpu(plan, facts, first, local_world[facts.host]))
        )
        if why:
            return f"{facts.host} (rank {facts.rank}): {why}"
    return None


def _folder(facts: Facts, first: Facts, out: str) -> str | None:
    if facts.unwritable:
        return f"the run's folder can't be written: {facts.unwritable}"
    if facts.token != first.token:
        return f"{out} is not the folder that rank 0 on {first.host} writes: it must be on a file system that all nodes share"
    return None


def _data(facts: Facts, first: Facts) -> str | None:
    for name, size in facts.data.items():
        if size is None:
            return f"{name} can't be read"
        expected = first.data.get(name)
        if expected is not None and size != expected:
            return f"{name} has {size} bytes, on {first.host} {expected}"
    return None


def serves(found: str, read: str) -> bool:
    """Whether a release does what was read in another: the same, or a later patch of it.

    >>> serves("0.19.8+cu13", "0.19.8"), serves("0.19.10", "0.19.8"), serves("0.19.7", "0.19.8"), serves("0.20.0", "0.19.8")
    (True, True, False, False)
    """
    have, wanted = ([int(number) for number in re.findall(r"\d+", text.partition("+")[0])] for text in (found, read))
    return have[:2] == wanted[:2] and have >= wanted


def _planned_versions(requires: Mapping[str, str], facts: Facts) -> str | None:
    for name, version in requires.items():
        found = facts.packages.get(name)
        if found is None:
            return f"{name} is not installed, the plan " + (f"needs {version}" if version else "was made with it (cluster.software)")
        if version and not serves(found, version):
            return f"{name} is {found}, the plan was made for {version} (cluster.software)"
    return None


def _versions(facts: Facts, first: Facts) -> str | None:
    if facts.python != first.python:
        return f"Python is {facts.python}, on {first.host} {first.python}"
    for name in dict.fromkeys((*first.packages, *facts.packages)):
        if facts.packages.get(name) != first.packages.get(name):
            return f"{name} is {facts.packages.get(name, 'not installed')}, on {first.host} {first.packages.get(name, 'not installed')}"
    return None


def _gpu(plan: Plan, facts: Facts, first: Facts, local_world: int) -> str | None:
    """Why this rank's GPU is not what the plan was made for (number, type, MIG, free memory); None: it is."""
    if len(facts.gpus) <= facts.local_rank:
        return f"{len(facts.gpus)} GPUs are visible, {local_world} ranks run here"
    name = facts.gpus[facts.local_rank]
    if facts.mig:
        return f"GPU {facts.local_rank} is a MIG slice ({name}), not a whole GPU"
    known = by_driver_name(name)
    planned = plan.cluster.gpu_of_rank(facts.rank)
    if plan.cluster.parts:
        if known is None or known.name != planned.name:
            order = ", then ".join(f"{part.num_gpus} x {part.gpu.name}" for part in plan.cluster.parts)
            wanted = f"rank {facts.rank} was planned for {planned.name}; in the order of ranks: {order}"
            return f"GPU {facts.local_rank} is a {name}, and {wanted}"
    elif plan.cluster.mixed:
        if known is None:
            return f"GPU {facts.local_rank} is a {name}, which is not in the catalog: whether it is as fast as {planned.name} is not known"
        if not known.covers(planned):
            return f"GPU {facts.local_rank} is a {name}, slower or smaller than {planned.name}, the slowest that the plan was made for"
    elif known is not None and known.name != planned.name:
        several = "; cluster.mixed=slowest plans for mixed types" if name != first.gpus[first.local_rank] else ""
        return f"GPU {facts.local_rank} is a {name}, the plan was made for {planned.name}{several}"
    elif name != first.gpus[first.local_rank]:
        return f"GPU {facts.local_rank} is a {name}, on {first.host} {first.gpus[first.local_rank]}"
    needs = plan.predicted.peak_memory_bytes if plan.predicted else 0.0
    if facts.gpu_free < FREE_SHARE * needs:
        free, total = facts.gpu_free / GIB, facts.gpu_memory / GIB
        return f"GPU {facts.local_rank} has {free:.1f} GiB of {total:.1f} free, the plan needs {needs / GIB:.1f}: another process is on it"
    return None


def host_ranges(hosts: Sequence[str]) -> str:
    """The ranks of each host in one line.

    >>> host_ranges(["n0", "n0", "n1", "n1", "n2"])
    'ranks 0-1: n0, 2-3: n1, 4: n2'
    """
    parts = []
    start = 0
    for rank in range(1, len(hosts) + 1):
        if rank == len(hosts) or hosts[rank] != hosts[start]:
            parts.append(f"{start}-{rank - 1}: {hosts[start]}" if rank - 1 > start else f"{start}: {hosts[start]}")
            start = rank
    return f"ranks {', '.join(parts)}"


def agree(
    plan: Plan, facts: Facts, store: dist.Store, world: int, out: str, timeout_s: float = TIMEOUT_S, requires: Mapping[str, str] = NOTHING
) -> str:
    """All ranks give their facts; the same PreflightError on all where they don't fit; returns which rank is on which host."""
    deadline = time.monotonic() + timeout_s
    store.set(f"host/{facts.rank}", facts.host)
    store.set(f"facts/{facts.rank}", json.dumps(asdict(facts)))
    if facts.rank == 0:
        verdict, places = _judge(plan, store, world, deadline, out, requires)
        store.set("verdict", json.dumps([verdict, places]))
    else:
        try:
            store.wait(["verdict"], timedelta(seconds=timeout_s + SHARED_S))
        except dist.DistStoreError:
            raise PreflightError(f"{facts.host} (rank {facts.rank}): rank 0 gave no answer in {timeout_s:.0f} s") from None
        verdict, places = json.loads(store.get("verdict"))
    store.add("seen", 1)
    if verdict is None:
        return str(places)
    if facts.rank == 0:  # the store may live in this process
        while store.add("seen", 0) < world and time.monotonic() < deadline + SHARED_S:
            time.sleep(0.05)
    raise PreflightError(verdict)


def _judge(plan: Plan, store: dist.Store, world: int, deadline: float, out: str, requires: Mapping[str, str]) -> tuple[str | None, str]:
    ranks: list[Facts] = []
    for rank in range(world):
        try:
            store.wait([f"facts/{rank}"], timedelta(seconds=max(0.1, deadline - time.monotonic())))
        except dist.DistStoreError:
            return f"rank {rank} did not come: its node is not reached, or it is stuck before it starts", ""
        sent = json.loads(store.get(f"facts/{rank}"))
        ranks.append(Facts(**sent | {"gpus": tuple(sent["gpus"])}))
    return first_mismatch(plan, ranks, out, requires), host_ranges([facts.host for facts in ranks])


def check_nodes(
    plan: Plan, out: Path, store: dist.Store, rank: int, world: int, requires: Mapping[str, str] = NOTHING, shared: Iterable[str] = ()
) -> str:
    """Every rank, before the groups are made. `shared`: distributions that may be of any version, and missing, but not other ones on other
    nodes. Raises PreflightError, the same on all ranks."""
    apart = dist.PrefixStore("preflight", store)
    try:
        return agree(plan, gather(plan, out, apart, rank, (*requires, *shared)), apart, world, str(out.resolve()), requires=requires)
    finally:
        if rank == 0:
            (out / "logs" / "preflight-token").unlink(missing_ok=True)


# -------------------------------------------------------------------------------------------------------------- groups


def check_groups(groups: Mapping[str, dist.ProcessGroup], device: torch.device) -> dict[str, float]:
    """Seconds of an all-reduce of BYTES over the slowest group of each axis with more than one rank, all groups of an axis at the same time
    as in the training. The same on all ranks. Raises PreflightError for a wrong sum."""
    found = {}
    for axis, group in groups.items():
        size = dist.get_world_size(group)
        if size == 1:
            continue
        small = torch.ones(16, device=device)
        dist.all_reduce(small, group=group)
        wrong = not bool((small == size).all())
        buffer = torch.zeros(BYTES[device.type] // 4, device=device)
        dist.all_reduce(buffer, group=group)
        distributed.synchronise(device)
        begin = time.perf_counter()
        for _ in range(REPEATS):
            dist.all_reduce(buffer, group=group)
        distributed.synchronise(device)
        seconds = (time.perf_counter() - begin) / REPEATS
        slowest = torch.tensor([seconds, float(wrong)], dtype=torch.float64, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        if slowest[1]:
            raise PreflightError(f"an all-reduce over {axis}={size} gives a wrong sum")
        found[axis] = float(slowest[0])
    return found


def bandwidth_report(plan: Plan, measured: Mapping[str, float]) -> list[str]:
    """A line for each axis whose groups are far slower than the plan assumes, and what that does to the predicted step. `measured`: what
    `check_groups` found."""
    lines, nbytes, predicted = [], BYTES["cpu" if plan.cluster.is_cpu else "cuda"], plan.predicted
    total = predicted.step_time_s if predicted else 0.0
    for axis, seconds in measured.items():
        size = plan.mesh.degree(axis)
        link = link_for(plan.cluster, size, plan.mesh.stride(axis))
        slower = seconds / all_reduce(nbytes, size, link)
        if slower < (SLOW_ON_SHARED_CORES if plan.cluster.is_cpu else SLOW):
            continue
        line = f"{axis}={size}: an all-reduce takes {slower:.1f} times what the plan assumes "
        crossed = 2 * (size - 1) / size * nbytes  # bytes of each link (collectives.py)
        line += f"({crossed / seconds / GB:.3g} GB/s measured, the link has {link.bandwidth / GB:.3g})"
        share = predicted.by_cause.get(axis, 0.0) if predicted else 0.0
        if share:
            line += f": its {format_seconds(share)} grow, the step from {format_seconds(total)} to about "
            line += format_seconds(total + share * (slower - 1))
        lines.append(line)
    return lines
