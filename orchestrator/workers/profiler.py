"""What one rank does of `python -m orchestrator.profile`: collectives between all ranks, then layers without any traffic.

    python -m orchestrator.workers.profiler --plan plan.json --out .

Collectives go over the plan's backend, by every group in OUT/groups.json at once, and between products, as in a training step: a rank
whose cores others compute on is not at once there to send. Layers are those of the plans in
OUT/cases/: each rank takes them alone (workers/rehearsal.py), all at the same time, since ranks that share a socket, a power budget or
cores slow each other; the last case once more on rank 0 while the others wait. All is measured in rounds, each of which has every
collective or case once, and beside every repetition the yardstick, by which a machine that is slower just then is told from a case that
takes longer (profile/measured.py). Each rank writes OUT/measured/rank-N.json.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count, pairwise
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.elastic.utils.store import barrier

from orchestrator.plan import from_json
from orchestrator.workers import distributed, orphans, rehearsal, runs

ROUNDS: Final = 3
REPEATS: Final = 2
"""Repetitions of each collective and size in a round; before the first is one that is not kept."""
IN_A_ROW: Final = 10
"""Products of the yardstick, and of a repetition with a collective after each."""
WIDTH: Final = {"cpu": 512, "cuda": 2048}
"""Rows and columns of a product's matrices: some milliseconds on a core, as the half of a small layer; on a GPU more than a launch."""
STEPS: Final = 4
"""Steps of each case in a round, of which the first is not kept."""
WAIT_S: Final = 600.0


class Yardstick:
    """Work that is the same each time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._square = torch.rand(WIDTH[device.type], WIDTH[device.type], device=device)

    def seconds(self, between: Callable[[], Any] = lambda: None) -> float:
        """Seconds of one product of several in a row, with `between` after each."""
        distributed.synchronise(self._device)
        begin = time.perf_counter()
        for _ in range(IN_A_ROW):
            torch.mm(self._square, self._square)
            between()
        distributed.synchronise(self._device)
        return (time.perf_counter() - begin) / IN_A_ROW


def own_group(size: int, stride: int) -> Any:
    """This rank's group of `size` ranks, `stride` apart, of all such groups, which are made."""
    rank, mine = dist.get_rank(), None
    for first in range(dist.get_world_size()):
        if first // stride % size == 0:
            ranks = [first + i * stride for i in range(size)]
            made = dist.new_group(ranks)
            mine = made if rank in ranks else mine
    return mine


def collectives(groups: list[dict[str, Any]], device: torch.device, yardstick: Yardstick) -> Iterator[dict[str, Any]]:
    """Every operation, group and number of bytes, round by round: seconds of its repetitions, each with a product before it, and of that
    product alone just before. A group is {size, stride}: all such groups work at the same time."""
    kinds = []
    for shape in groups:
        size, stride = shape["size"], shape["stride"]
        group = own_group(size, stride)
        for name in shape["operations"]:
            for nbytes in shape["bytes"]:
                said = {"operation": name, "size": size, "stride": stride, "bytes": nbytes}
                kinds.append((said, operation(name, nbytes, size, group, device)))
    for round_ in range(ROUNDS):
        for said, work in kinds:
            seconds, products = [], []
            for _ in range(REPEATS if round_ else REPEATS + 1):
                dist.barrier()
                products.append(yardstick.seconds())
                dist.barrier()
                seconds.append(yardstick.seconds(work))
            yield {**said, "seconds": seconds[-REPEATS:], "products_s": products[-REPEATS:]}


def operation(name: str, nbytes: int, size: int, group: Any, device: torch.device) -> Callable[[], None]:
    """One collective of `nbytes` as the cost model counts them: the whole tensor that is reduced, gathered, scattered or exchanged. p2p:
    a message of so many to the next rank of the group, while one comes from the rank before."""
    count = max(size, nbytes // 4 // size * size)
    whole = torch.zeros(count, device=device)
    part = torch.zeros(count // size, device=device)
    if name == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if name == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part, group=group)
    if name == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole, group=group)
    if name == "all_to_all":
        return lambda: dist.all_to_all_single(torch.empty_like(whole), whole, group=group)
    me, ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
    after, before, other = ranks[(me + 1) % size], ranks[me - 1], torch.empty_like(whole)

    def pass_on() -> None:
        for work in [dist.isend(whole, after, group=group), dist.irecv(other, before, group=group)]:
            if work is not None:
                work.wait()

    return pass_on


def leave_groups() -> None:
    """Forget the engines' groups of a case, so that the next can make its own."""
    if "megatron.core" in sys.modules:
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
    if "deepspeed" in sys.modules:
        importlib.import_module("orchestrator.workers.deepspeed_states").forget_engine()
    dist.destroy_process_group()
    gc.collect()


def case(folder: Path, rank: int, together: Callable[[], None], yardstick: Yardstick, *, alone: bool = False) -> dict[str, Any]:
    """What this rank measures of one plan in a round without traffic, and the yardstick's seconds beside each step, which all ranks take
    at once; `alone`: before and after all steps of rank 0, for which the others wait."""
    marks: list[float] = []

    def mark() -> None:
        together()
        marks.append(yardstick.seconds())

    if alone:
        mark()
    plan = from_json((folder / "plan.json").read_bytes(), str(folder))
    found: dict[str, Any] = {}
    if not alone or rank == 0:
        rehearsal.join_alone(plan, rank)
        try:
            given = plan, runs.read_engine(folder), folder, (folder / "module").read_text(), folder.parent, STEPS
            found = rehearsal.rehearse(*given, (lambda: None) if alone else mark)
        finally:
            leave_groups()
    mark()
    beside = [(marks[0], marks[1])] * (STEPS - 1) if alone else [*pairwise(marks[1:])]
    return found | {"yardstick_s": [sum(both) / 2 for both in beside]}


def main() -> None:
    parser = argparse.ArgumentParser(description="One rank of python -m orchestrator.profile.")
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    distributed.quiet()
    distributed.end_at_once_on_signals()
    orphans.end_with_launcher()
    plan = from_json(given.plan.read_bytes(), str(given.plan))
    out = given.out.resolve()
    folders = sorted(path for path in (out / "cases").iterdir() if (path / "plan.json").is_file())
    begin = time.perf_counter()
    job = distributed.join(plan)
    for folder in folders[:1]:
        rehearsal.builder((folder / "module").read_text())
    if "megatron.core" in sys.modules:
        importlib.import_module("orchestrator.workers.megatron_groups").prepare(plan)
    yardstick = Yardstick(job.device)
    traffic = list(collectives(json.loads((out / "groups.json").read_text()), job.device, yardstick))
    dist.destroy_process_group()
    collectives_s = time.perf_counter() - begin
    meetings = map("profiler/{}".format, count())

    def together() -> None:
        """A barrier of all ranks, which needs no process group."""
        barrier(job.store, job.world, next(meetings), WAIT_S)

    layers: dict[str, list[dict[str, Any]]] = {folder.name: [] for folder in folders}
    alone = []
    case(folders[0], job.rank, together, yardstick)  # not kept: what is imported and allocated at first
    for _ in range(ROUNDS):
        for folder in folders:
            layers[folder.name].append(case(folder, job.rank, together, yardstick))
        alone.append(case(folders[-1], job.rank, together, yardstick, alone=True))
    (out / "measured").mkdir(exist_ok=True)
    found = {"rank": job.rank, "collectives": traffic, "cases": layers, "alone": alone, "alone_case": folders[-1].name,
             "collectives_s": collectives_s, "seconds": time.perf_counter() - begin}  # fmt: skip
    (out / "measured" / f"rank-{job.rank}.json").write_text(json.dumps(found))
    job.leave()


if __name__ == "__main__":
    main()
