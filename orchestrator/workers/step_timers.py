"""How long two steps of a run take on every rank: its own computing, transfers, and waiting for other ranks. OUT/timers.jsonl has a row for
each rank.

For the length of those steps torch's process groups are looked on: how long a collective holds this rank up (its launch and its wait on a
CPU, the compute stream's wait by CUDA events on a GPU), so that traffic behind computing counts nothing. The n-th collective of a group is
the same one on all of its ranks: the rank that it held up least came last, waited for nobody, and had the transfer alone; what the others
had more is waiting. No clocks are compared. Afterwards nothing is left in place.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from orchestrator.plan import Plan
from orchestrator.workers import distributed
from orchestrator.workers.watchdog import host

FILE: Final = "timers.jsonl"
STEPS: Final = 2
WARM_UP: Final = 3
"""First steps that are not looked at where there are enough others: buffers, communicators and kernels are made in them."""

OPERATIONS: Final = {
    "allreduce": "all_reduce", "allreduce_coalesced": "all_reduce", "reduce": "reduce", "broadcast": "broadcast",
    "allgather": "all_gather", "_allgather_base": "all_gather", "all_gather_single": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather", "all_gather_single_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter", "_reduce_scatter_base": "reduce_scatter", "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter", "reduce_scatter_single_coalesced": "reduce_scatter",
    "alltoall": "all_to_all", "alltoall_base": "all_to_all", "all_to_all_single": "all_to_all",
    "barrier": "barrier", "gather": "gather", "scatter": "scatter", "send": "p2p", "recv": "p2p",
}  # fmt: skip
"""What a process group can be asked for (torch.distributed calls these by name), and what the cost model calls it."""


def timed_steps(first_step: int, steps: int) -> range:
    """Steps done before each step that is looked at, of a run from `first_step` to `steps`.

    >>> timed_steps(0, 100), timed_steps(0, 3), timed_steps(7, 8), timed_steps(5, 5)
    (range(3, 5), range(1, 3), range(7, 8), range(5, 5))
    """
    taken = steps - first_step
    begin = first_step + min(WARM_UP, max(0, taken - STEPS))
    return range(begin, min(steps, begin + STEPS))


def nbytes_of(arguments: Iterable[Any]) -> int:
    """Bytes of the whole tensor that is reduced, gathered, scattered or sent: the largest argument, the tensors of a list together."""

    def size(value: Any) -> int:
        if isinstance(value, torch.Tensor):
            return value.numel() * value.element_size()
        return sum(size(item) for item in value) if isinstance(value, list | tuple) else 0

    return max((size(argument) for argument in arguments), default=0)


class Held:
    """One operation: its group (or, p2p, its pair), and how long it held this rank up."""

    __slots__ = ("begin", "events", "group", "is_sync", "key", "nbytes", "operation", "phase", "seconds", "share", "step")

    def __init__(self, key: tuple[Any, ...], group: Any, operation: str, nbytes: int, step: int, phase: str) -> None:
        self.key, self.group, self.operation, self.nbytes, self.step, self.phase = key, group, operation, nbytes, step, phase
        self.seconds = 0.0
        self.share = 1.0
        """Share of `seconds` that is this operation's: several operations that are waited for together each have all of them."""
        self.events: list[tuple[Any, Any]] = []
        self.begin: Any = None
        self.is_sync = False

    @property
    def own(self) -> float:
        return self.seconds * self.share


class Interceptor:
    """`with Interceptor(...)`: the process groups' operations and waits are timed. `now` says step and phase."""

    def __init__(self, device: torch.device, now: Callable[[], tuple[int, str]]) -> None:
        self.held: list[Held] = []
        self._is_cuda = device.type == "cuda"
        self._now = now
        self._open: dict[int, list[Held]] = {}
        self._batch: list[Held] | None = None
        self._before: list[tuple[type, str, Any]] = []
        self._ranks: dict[str, tuple[int, ...]] = {}

    def __enter__(self) -> Interceptor:
        group, work = torch._C._distributed_c10d.ProcessGroup, torch._C._distributed_c10d.Work
        for name, operation in OPERATIONS.items():
            if name in vars(group):
                self._replace(group, name, partial(self._launch, name, operation))
        self._replace(group, "_start_coalescing", self._begin_batch)
        self._replace(group, "_end_coalescing", self._end_batch)
        self._replace(work, "wait", self._wait)
        return self

    def __exit__(self, *error: object) -> None:
        for kind, name, descriptor in self._before:
            setattr(kind, name, descriptor)
        self._before.clear()
        self._open.clear()

    def _replace(self, kind: type, name: str, around: Callable[[Any], Any]) -> None:
        self._before.append((kind, name, vars(kind)[name]))  # getattr would give a function that no longer binds its object
        setattr(kind, name, around(getattr(kind, name)))

    def _mark(self) -> Any:
        """A moment of the host or, on a GPU, of its current stream; None while that is recorded as a CUDA graph."""
        if not self._is_cuda:
            return time.perf_counter()
        if torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _span(self, held: Held, begin: Any, end: Any) -> None:
        if begin is None or end is None:
            return
        if self._is_cuda:
            held.events.append((begin, end))
        else:
            held.seconds += end - begin

    def _of(self, group: Any, name: str, operation: str, arguments: tuple[Any, ...]) -> Held | None:
        """The operation to be timed; None in a group of this rank alone, or of ranks that nobody knows."""
        if group.size() == 1:
            return None
        ranks = self._ranks.get(group.group_name)
        if ranks is None:
            try:
                ranks = tuple(dist.get_process_group_ranks(group))
            except (KeyError, ValueError):  # one that torch has forgotten while somebody uses it still
                ranks = ()
            self._ranks[group.group_name] = ranks
        if not ranks:
            return None
        key: tuple[Any, ...] = (ranks, group.group_name)
        if name in ("send", "recv"):
            mine, other = ranks[group.rank()], ranks[arguments[1]]
            key = ((mine, other) if name == "send" else (other, mine), group.group_name)
        return Held(key, group, operation, nbytes_of(arguments), *self._now())

    def _launch(self, name: str, operation: str, original: Any) -> Any:
        def launch(group: Any, *arguments: Any, **named: Any) -> Any:
            held = self._of(group, name, operation, arguments)
            if held is None:
                return original(group, *arguments, **named)
            begin = self._mark()
            work = original(group, *arguments, **named)
            options = arguments[-1] if arguments else named.get("opts")
            held.is_sync = getattr(options, "asyncOp", True) is False
            if not self._is_cuda:
                self._span(held, begin, self._mark())  # gloo takes it in another thread
            elif held.is_sync:
                if work is None:
                    self._span(held, begin, self._mark())
                held.begin = begin
            self.held.append(held)
            if self._batch is not None:
                self._batch.append(held)
            elif work is not None:
                self._open[id(work)] = [held]
            return work

        return launch

    def _wait(self, original: Any) -> Any:
        def wait(work: Any, *arguments: Any, **named: Any) -> Any:
            several = self._open.pop(id(work), None)
            if not several:
                return original(work, *arguments, **named)
            begin = several[0].begin if self._is_cuda and several[0].is_sync else self._mark()
            result = original(work, *arguments, **named)
            end = self._mark()
            for held in several:
                held.share = 1 / len(several)
                self._span(held, begin, end)
            return result

        return wait

    def _begin_batch(self, original: Any) -> Any:
        def begin(group: Any, *arguments: Any, **named: Any) -> Any:
            self._batch = []
            return original(group, *arguments, **named)

        return begin

    def _end_batch(self, original: Any) -> Any:
        def end(group: Any, *arguments: Any, **named: Any) -> Any:
            work = original(group, *arguments, **named)
            if self._batch and work is not None:
                self._open[id(work)] = self._batch
            self._batch = None
            return work

        return end

    def settle(self) -> None:
        """Turns events into seconds, once the device has come to rest."""
        for held in self.held:
            held.seconds += sum(begin.elapsed_time(end) for begin, end in held.events) / 1e3
            held.events, held.begin = [], None


class StepTimers:
    """`begin(step)`, `phase(name)` for each part of it, `end(step)`: nothing but two comparisons in a step that is not looked at, as all
    are before `look_at`. All ranks call them."""

    def __init__(self, plan: Plan, device: torch.device, out: Path, peak_memory: Callable[[torch.device], int]) -> None:
        self._device, self._out, self._peak_memory = device, out, peak_memory
        self._steps = range(0)
        self._microbatches = plan.num_microbatches
        self._active: Interceptor | None = None
        self._held: list[Held] = []
        self._phases: list[dict[str, float]] = []
        self._current, self._since = "", 0.0

    def look_at(self, steps: range) -> None:
        """What shall be looked at (`timed_steps`)."""
        self._steps = steps
        # Of this job: a process may have had others, of other numbers of ranks.
        self._call = dist.distributed_c10d._get_default_store().add(f"step_timers/calls/{dist.get_rank()}", 1)

    def begin(self, step: int) -> None:
        """The step after `step` steps begins, with its data."""
        if step not in self._steps:
            return
        distributed.synchronise(self._device)
        self._phases.append({})
        self._current, self._since = "data", time.perf_counter()
        self._active = Interceptor(self._device, lambda: (len(self._phases) - 1, self._current))
        self._active.__enter__()

    def phase(self, name: str) -> None:
        """Ends the part of the step that goes on and begins the next: "passes", "update", "agree"."""
        if self._active is None:
            return
        distributed.synchronise(self._device)
        now = time.perf_counter()
        phases = self._phases[-1]
        phases[self._current] = phases.get(self._current, 0.0) + now - self._since
        self._current, self._since = name, now

    def end(self, step: int) -> None:
        """The step is done; after the last that is looked at, the ranks compare and rank 0 writes."""
        if self._active is None:
            return
        self.phase("")
        self._active.__exit__()
        self._active.settle()
        self._held += self._active.held
        self._active = None
        if step + 1 == self._steps.stop:
            self._write()
            self._held = []

    def _write(self) -> None:
        least = self._least()
        store = dist.PrefixStore(f"step_timers/{self._call}", dist.distributed_c10d._get_default_store())
        row = {"rank": dist.get_rank(), "host": host(), "steps": [step + 1 for step in self._steps], "microbatches": self._microbatches,
               "peak_memory_bytes": self._peak_memory(self._device),
               "phases": [{name: round(seconds, 7) for name, seconds in phases.items()} for phases in self._phases],
               "traffic": rows_of(self._held, least)}  # fmt: skip
        store.set(f"row/{row['rank']}", json.dumps(row))
        if row["rank"] == 0:
            lines = [store.get(f"row/{rank}").decode() + "\n" for rank in range(dist.get_world_size())]
            partial = self._out / f"{FILE}.partial"
            partial.write_text("".join(lines))
            partial.replace(self._out / FILE)

    def _least(self) -> dict[tuple[Any, ...], list[float]]:
        """For each operation of a group or pair, in order, the seconds on the rank that it held up least; where a group's ranks counted
        different numbers of operations, the seconds on this rank."""
        by_key: dict[tuple[Any, ...], list[Held]] = defaultdict(list)
        for held in self._held:
            by_key[held.key].append(held)
        messages = {key: several for key, several in by_key.items() if several[0].operation == "p2p"}
        least = self._least_of_messages(messages)
        for key in sorted(by_key.keys() - messages.keys()):
            several = by_key[key]
            where = "cpu" if dist.get_backend(several[0].group) == "gloo" else self._device
            seconds = torch.tensor([held.seconds for held in several], dtype=torch.float32, device=where)
            count = torch.tensor([len(several), -len(several)], dtype=torch.int64, device=where)
            dist.all_reduce(count, op=dist.ReduceOp.MIN, group=several[0].group)
            if count[0] == -count[1]:
                dist.all_reduce(seconds, op=dist.ReduceOp.MIN, group=several[0].group)
            least[key] = seconds.tolist()
        return least

    def _least_of_messages(self, messages: dict[tuple[Any, ...], list[Held]]) -> dict[tuple[Any, ...], list[float]]:
        """Sender and receiver of a message tell each other over the job's store."""
        store = dist.PrefixStore(f"step_timers/{self._call}", dist.distributed_c10d._get_default_store())
        rank, least = dist.get_rank(), {}
        for (pair, name), several in messages.items():
            mine = [held.seconds for held in several]
            store.set(f"{pair[0]}/{pair[1]}/{name}/{rank}", json.dumps(mine))
        for (pair, name), several in messages.items():
            mine = [held.seconds for held in several]
            other = json.loads(store.get(f"{pair[0]}/{pair[1]}/{name}/{pair[0] + pair[1] - rank}"))
            both = len(other) == len(mine)
            least[pair, name] = [min(values) for values in zip(mine, other, strict=True)] if both else mine
        return least


def rows_of(held: Iterable[Held], least: dict[tuple[Any, ...], list[float]]) -> list[dict[str, Any]]:
    """Rows of operations by step, phase, group (or pair) and operation: how many, bytes together, seconds of transfer and of waiting."""
    found: dict[tuple[Any, ...], list[float]] = {}
    at: dict[tuple[Any, ...], int] = defaultdict(int)
    for one in held:
        index = at[one.key]
        at[one.key] += 1
        transfer = min(one.seconds, least[one.key][index]) * one.share
        sums = found.setdefault((one.step, one.phase, one.key[0], one.operation), [0, 0, 0.0, 0.0])
        for place, value in enumerate((1, one.nbytes, transfer, max(0.0, one.own - transfer))):
            sums[place] += value
    return [
        {"step": step, "phase": phase, "ranks": written(ranks), "operation": operation, "count": int(count), "bytes": int(nbytes),
         "transfer_s": round(transfer, 7), "waiting_s": round(waiting, 7)}
        for (step, phase, ranks, operation), (count, nbytes, transfer, waiting) in found.items()
    ]  # fmt: skip


def written(ranks: tuple[int, ...]) -> list[int] | dict[str, int]:
    """A group's ranks, short where they are evenly apart.

    >>> written((0, 1)), written((0, 4, 8, 12)), written((0, 1, 4, 5))
    ([0, 1], {'first': 0, 'size': 4, 'stride': 4}, [0, 1, 4, 5])
    """
    stride = ranks[1] - ranks[0]
    if len(ranks) > 2 and all(after - before == stride for before, after in itertools.pairwise(ranks)):
        return {"first": ranks[0], "size": len(ranks), "stride": stride}
    return list(ranks)
