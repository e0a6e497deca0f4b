"""A rank whose checkpoint is written by processes of its own ends soon where one of them is killed, and only then."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orchestrator.errors import NO_ROOM

pytestmark = pytest.mark.engines

RANK = """
import multiprocessing, os, signal, sys, time
from pathlib import Path
from orchestrator.workers.megatron_saves import Writers
from orchestrator.workers import distributed

fork = multiprocessing.get_context("fork")
written, writers = fork.JoinableQueue(), Writers(Path())
loader = fork.Process(target=time.sleep, args=(600,))  # a data loader's process is not one of the writers
loader.start()
case = sys.argv[1]
def write():
    if case in ("written", "loader"):
        written.get(); written.task_done()
    else:
        time.sleep(600)
with writers.of(7):
    written.put(0)
    writer = fork.Process(target=write)
    writer.start()
    if case == "asked":
        os.kill(writer.pid, signal.SIGTERM)
        written.get(); written.task_done()
    elif case == "killed":
        Path("writer").write_text(str(writer.pid))
    written.join()  # as megatron-core waits
if case == "loader":
    os.kill(loader.pid, signal.SIGKILL)
time.sleep(1.5)
print("trained on", flush=True)
distributed.leave(0)
"""


@pytest.mark.parametrize("case", ["killed", "written", "loader", "asked"])
def test_a_killed_writer_ends_its_rank_and_nothing_else_does(case: str, tmp_path: Path) -> None:
    rank = subprocess.Popen([sys.executable, "-c", RANK, case], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    begun = time.monotonic()
    if case == "killed":
        while not (tmp_path / "writer").exists() or not (tmp_path / "writer").read_text():
            assert rank.poll() is None
            time.sleep(0.05)
        os.kill(int((tmp_path / "writer").read_text()), 9)
        begun = time.monotonic()
    out, error = rank.communicate(timeout=120)
    if case == "killed":
        assert rank.returncode == NO_ROOM
        assert time.monotonic() - begun < 20, "no limit of a phase was waited for"
        why = "a process that writes it for this rank was ended by signal 9 (Killed)"
        assert error.strip() == f"CheckpointError: step 7: the checkpoint can't be written: {why}; this run has no whole checkpoint yet"
    else:
        assert (rank.returncode, out) == (0, "trained on\n"), error
