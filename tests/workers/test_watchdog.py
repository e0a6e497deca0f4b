"""A hang ends, and the rank that the others wait for is named: real processes over a real store and gloo."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ports import free_port

from orchestrator import api
from orchestrator.plan import to_json

pytestmark = pytest.mark.engines

RANK = """
import os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from orchestrator.workers.watchdog import Watchdog

rank, out, how = int(os.environ["RANK"]), Path(sys.argv[1]), sys.argv[2]
store, _, world = next(iter(dist.rendezvous("env://")))
dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
def the_slow_rank():
    if how == "sleeps":
        time.sleep(60)
    os.kill(os.getpid(), 19)
with Watchdog.beside(store, rank, world, out, 2.0) as watchdog:
    for step in range(100):
        watchdog.phase(f"step {step}: data")
        if step == 3 and rank == 1:
            if how == "finishes":
                time.sleep(1.0)
            else:
                the_slow_rank()
        watchdog.phase(f"step {step}: all-reduce")
        dist.all_reduce(torch.ones(4))
        if how == "finishes" and step == 5:
            break
print("done")
"""


def run(out: Path, how: str, world: int = 3) -> list[tuple[int, str]]:
    """(exit status, stderr) of each rank; a stopped one is killed once the others have ended."""
    places = os.environ | {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, str(out), how], env=places | {"RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(world)
    ]
    try:
        for rank in (0, 2):
            ranks[rank].wait(90)
    finally:
        ranks[1].kill() if how == "stops" else None
        said = [process.communicate(timeout=30)[1] for process in ranks]
    return [(process.returncode, text) for process, text in zip(ranks, said, strict=True)]


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("sleeps", "which is working, in the_slow_rank (<string>:12), at step 3: data"),
        pytest.param("stops", "which does not answer: stopped, or stuck outside Python", marks=pytest.mark.full),
    ],
)
def test_a_rank_that_keeps_the_others_waiting_is_named_and_all_end(tmp_path: Path, how: str, what: str) -> None:
    begin = time.monotonic()
    ranks = run(tmp_path, how)
    assert time.monotonic() - begin < 60
    verdict = json.loads((tmp_path / "logs" / "hang.json").read_text())
    assert (verdict["status"], verdict["rank"], verdict["host"]) == (5, 1, os.environ.get("SLURMD_NODENAME") or socket.gethostname())
    assert f"suspect: rank 1 on {verdict['host']}, {what}" in verdict["said"]
    assert "2 of 3 ranks wait" in verdict["said"]
    for rank in (0, 2):
        status, said = ranks[rank]
        assert status == 5
        assert "in all_reduce" in said, "its stacks"
        assert f"StepTimeoutError: {verdict['said']}" in said


@pytest.mark.full
def test_a_rank_that_is_slow_within_the_limit_is_left_alone(tmp_path: Path) -> None:
    assert [status for status, _ in run(tmp_path, "finishes")] == [0, 0, 0]
    assert not (tmp_path / "logs").exists()


JOINS = """
import os, sys, torch
from torch.torch_version import TorchVersion
from orchestrator.plan import from_json
from orchestrator.workers import distributed

torch.__version__ = TorchVersion(sys.argv[1])
distributed.join(from_json(sys.stdin.read()))
print(os.environ.get("TORCH_NCCL_AVOID_RECORD_STREAMS"))
"""


@pytest.mark.parametrize(("version", "said", "has"), [("2.7.1+cu128", None, "1"), ("2.7.1", "0", "0"), ("2.8.0", None, "None")])
def test_torch_before_2_8_frees_what_collectives_took_at_once(version: str, said: str | None, has: str) -> None:
    name = "TORCH_NCCL_AVOID_RECORD_STREAMS"
    env = {key: value for key, value in os.environ.items() if key != name} | ({name: said} if said else {})
    env |= {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    plan = to_json(api.plan(recipe="gpt_tiny", gpus=1, cluster="cpu").plan)
    done = subprocess.run([sys.executable, "-c", JOINS, version], check=False, input=plan, env=env, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == (f"{has}\n", 0), done.stderr


LEAVES = """
import sys
from datetime import timedelta
import torch, torch.distributed as dist
from orchestrator.workers import distributed

rank, limit = int(sys.argv[1]), timedelta(seconds=float(sys.argv[3]))
store = dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", store=dist.PrefixStore("groups", store), rank=rank, world_size=2)
dist.all_reduce(torch.ones(4))
distributed.LEAVE = limit
if rank == 1:
    sys.stdin.readline()
else:
    dist.all_reduce(torch.ones(4), async_op=True)  # which the other rank never joins: gloo's thread waits in it
print("leaves", flush=True)
distributed.Job(torch.device("cpu"), store, rank, 2).leave()
"""


@pytest.mark.parametrize(("limit_s", "other_comes"), [(60.0, True), (0.5, False)])
def test_a_rank_that_is_done_waits_for_the_others_and_not_for_ever(limit_s: float, other_comes: bool, tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", LEAVES, str(rank), str(tmp_path / "store"), str(limit_s)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    first, other = ranks
    assert first.stdout is not None
    assert first.stdout.readline() == "leaves\n"
    if other_comes:
        with pytest.raises(subprocess.TimeoutExpired):
            first.wait(1.0)
    else:
        assert first.wait(60) == 0
    _, said = other.communicate("go\n", timeout=60)
    assert other.returncode == 0, said
    _, said = first.communicate(timeout=60)
    assert first.returncode == 0, said
    assert not said


WITH_A_MANAGER = """
import multiprocessing
from orchestrator.workers import distributed
if __name__ == "__main__":
    manager = multiprocessing.get_context("spawn").Manager()
    print(manager._process.pid, flush=True)
    distributed.leave(3)
"""


def test_a_rank_that_leaves_takes_its_own_processes_with_it(tmp_path: Path) -> None:
    """megatron-core's save starts a Manager: it outlived the rank, whose output stayed open with it."""
    (tmp_path / "rank.py").write_text(WITH_A_MANAGER)
    done = subprocess.run([sys.executable, "rank.py"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
                          capture_output=True, text=True, check=False, timeout=120)  # fmt: skip
    assert done.returncode == 3
    assert not Path(f"/proc/{done.stdout.strip()}").exists()
