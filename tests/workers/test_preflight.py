"""The first mismatch is named with its node, on every rank, soon."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace as changed
from worker_plans import CPU, make_plan

from orchestrator.hardware.catalog import GPUS
from orchestrator.hardware.collectives import all_reduce, link_for
from orchestrator.hardware.spec import slowest
from orchestrator.plan import Plan, Prediction, RunSettings, Source
from orchestrator.workers import preflight
from orchestrator.workers.preflight import BYTES, Facts, PreflightError, agree, bandwidth_report, check_nodes, first_mismatch

pytestmark = pytest.mark.engines
H100 = GPUS["H100-SXM-80GB"]
NAME = "NVIDIA H100 80GB HBM3"

REQUIRES = {"megatron-core": "0.16.1", "transformer-engine": ""}


def facts(rank: int, **fields: object) -> Facts:
    """Two ranks a node."""
    packages = {"torch": "2.13.0", "megatron-core": "0.16.1", "deepspeed": "0.19.8", "transformer-engine": "2.9"}
    usual = {"packages": packages, "token": "t", "python": "3.11.7", "data": {"/data/c.bin": 10}, "gpus": (NAME, NAME),
             "gpu_memory": 85 * 10**9, "gpu_free": 84 * 10**9}  # fmt: skip
    return Facts(rank=rank, host=f"n{rank // 2}", local_rank=rank % 2, **usual | fields)  # type: ignore[arg-type]


def on_gpus() -> Plan:
    plan = make_plan(tp=2, dp=2)
    cluster = changed(CPU, gpu=H100, software=changed(CPU.software, transformer_engine=True))
    causes = {"tp": 0.25, "gemm": 0.75}
    prediction = Prediction(step_time_s=1.0, tokens_per_s_per_gpu=1.0, peak_memory_bytes=60e9, by_stage=(), by_cause=causes)
    return changed(plan, cluster=cluster, predicted=prediction)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"packages": {"torch": "2.12.0", "megatron-core": "0.16.1", "transformer-engine": "2.9"}}, "torch is 2.12.0, on n0 2.13.0"),
        ({"packages": {"torch": "2.13.0", "megatron-core": "0.15.0"}}, "megatron-core is 0.15.0, the plan was made for 0.16.1"),
        ({"packages": {"torch": "2.13.0", "megatron-core": "0.16.0"}}, "megatron-core is 0.16.0, the plan was made for 0.16.1"),
        ({"packages": {"torch": "2.13.0"}}, "megatron-core is not installed, the plan needs 0.16.1"),
        ({"packages": {"torch": "2.13.0", "megatron-core": "0.16.1"}}, "transformer-engine is not installed, the plan was made with it"),
        ({"python": "3.12.1"}, "Python is 3.12.1, on n0 3.11.7"),
        ({"token": ""}, "/run is not the folder that rank 0 on n0 writes"),
        ({"unwritable": "/run/logs: Read-only file system"}, "the run's folder can't be written: /run/logs: Read-only file system"),
        ({"data": {"/data/c.bin": None}}, "/data/c.bin can't be read"),
        ({"data": {"/data/c.bin": 11}}, "/data/c.bin has 11 bytes, on n0 10"),
        ({"gpus": (NAME,)}, "1 GPUs are visible, 2 ranks run here"),
        ({"gpus": ("NVIDIA A100-SXM4-80GB",) * 2}, "GPU 1 is a NVIDIA A100-SXM4-80GB, the plan was made for H100-SXM-80GB"),
        ({"mig": True, "gpus": ("NVIDIA H100 80GB HBM3 MIG 3g.40gb",) * 2}, "GPU 1 is a MIG slice"),
        ({"gpu_free": 40 * 2**30}, "GPU 1 has 40.0 GiB of 79.2 free, the plan needs 55.9: another process is on it"),
    ],
)  # fmt: skip
def test_each_mismatch_is_one_line_with_node_and_cause(fields: dict[str, object], why: str) -> None:
    ranks = [facts(0), facts(1), facts(2), facts(3)]
    assert first_mismatch(on_gpus(), ranks, "/run", REQUIRES) is None
    said = first_mismatch(on_gpus(), [*ranks[:3], facts(3, **fields)], "/run", REQUIRES)
    assert said is not None
    assert said.startswith(f"n1 (rank 3): {why}")
    assert "\n" not in said


def test_mixed_nodes_are_named_and_refused_or_held_to_the_slowest() -> None:
    """n1 has A100, n0 H100."""
    ranks = [facts(0), facts(1), *(facts(rank, gpus=("NVIDIA A100-SXM4-80GB",) * 2) for rank in (2, 3))]
    said = first_mismatch(on_gpus(), ranks, "/run", REQUIRES)
    assert said == ("n1 (rank 2): GPU 0 is a NVIDIA A100-SXM4-80GB, the plan was made for H100-SXM-80GB; cluster.mixed=slowest plans "
                    "for mixed types")  # fmt: skip
    plan = on_gpus()
    of_all = changed(plan, cluster=changed(plan.cluster, gpu=slowest([H100, GPUS["A100-SXM-80GB"]]), mixed=True))
    assert first_mismatch(of_all, ranks, "/run", REQUIRES) is None
    ranks[3] = facts(3, gpus=("NVIDIA A100-SXM4-40GB",) * 2)
    said = first_mismatch(of_all, ranks, "/run", REQUIRES)
    assert said == ("n1 (rank 3): GPU 1 is a NVIDIA A100-SXM4-40GB, slower or smaller than A100-SXM-80GB, the slowest that the plan was "
                    "made for")  # fmt: skip
    ranks[3] = facts(3, gpus=("NVIDIA T1000",) * 2)
    assert "NVIDIA T1000, which is not in the catalog" in str(first_mismatch(of_all, ranks, "/run", REQUIRES))


def meet(ranks: list[Facts], missing: int | None = None, timeout_s: float = 20.0) -> list[str]:
    """What each rank is told; threads over one store."""
    store, told = dist.HashStore(), [""] * len(ranks)

    def rank(index: int) -> None:
        try:
            told[index] = agree(on_gpus(), ranks[index], store, len(ranks), "/run", timeout_s)
        except PreflightError as error:
            told[index] = f"refused: {error}"

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(len(ranks)) if index != missing]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return told


def test_all_ranks_hear_the_same() -> None:
    ranks = [facts(rank) for rank in range(4)]
    assert meet(ranks) == ["ranks 0-1: n0, 2-3: n1"] * 4
    ranks[2] = replace(ranks[2], python="3.10.0")
    assert meet(ranks) == ["refused: n1 (rank 2): Python is 3.10.0, on n0 3.11.7"] * 4


def test_a_rank_that_never_comes_is_named_in_time() -> None:
    begin = time.monotonic()
    told = meet([facts(rank) for rank in range(3)], missing=2, timeout_s=1.0)
    assert time.monotonic() - begin < 15
    assert told[0] == told[1] == "refused: rank 2 did not come: its node is not reached, or it is stuck before it starts"


def test_folders_and_data_of_this_machine_are_really_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks; the second has another folder, then another data file."""
    monkeypatch.setattr(preflight, "SHARED_S", 0.3)
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("text")
    plan = make_plan(dp=2, run=RunSettings(data=str(corpus)))
    for second, data in ((tmp_path / "a", True), (tmp_path / "b", True), (tmp_path / "a", False)):
        store, told = dist.HashStore(), ["", ""]
        if not data:
            corpus.unlink()

        def rank(index: int, out: Path, store: dist.Store = store, told: list[str] = told) -> None:
            try:
                told[index] = check_nodes(plan, out, store, index, 2)
            except PreflightError as error:
                told[index] = str(error)

        threads = [threading.Thread(target=rank, args=(0, tmp_path / "a")), threading.Thread(target=rank, args=(1, second))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        here = socket.gethostname()
        if second.name == "b":
            why = f"is not the folder that rank 0 on {here} writes: it must be on a file system that all nodes share"
            assert told == [f"{here} (rank 1): {tmp_path}/a {why}"] * 2
        elif data:
            assert told == [f"ranks 0-1: {here}"] * 2
        else:
            assert told == [f"{here} (rank 0): {corpus} can't be read"] * 2
    assert not list((tmp_path / "a" / "logs").iterdir()), "the token is taken away"


def test_what_is_installed_is_looked_up_on_nodes_of_gpus_too(tmp_path: Path) -> None:
    """The names of the GPUs took the place of those that are looked up: every start on GPUs would have ended in "not installed"."""
    for plan in (make_plan(), on_gpus()):
        found = preflight.gather(plan, tmp_path, dist.HashStore(), 0, ["deepspeed", "no-such-distribution"])
        assert {"torch", "deepspeed"} <= found.packages.keys()
        assert "no-such-distribution" not in found.packages
        assert len(found.gpus) == (0 if plan.cluster.is_cpu else torch.cuda.device_count())


def test_a_slow_network_is_reported_with_what_it_does_to_the_step() -> None:
    plan = on_gpus()
    planned = all_reduce(BYTES["cuda"], 2, link_for(plan.cluster, 2, plan.mesh.stride("tp")))
    assert bandwidth_report(plan, {"tp": 1.9 * planned}) == []
    slow = bandwidth_report(plan, {"tp": 5 * planned})
    assert slow == ["tp=2: an all-reduce takes 5.0 times what the plan assumes (0.199 GB/s measured, the link has 1): its 250 ms grow, the "
                    "step from 1 s to about 2 s"]  # fmt: skip


def test_the_groups_of_one_process_need_no_network() -> None:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None
        assert preflight.check_groups({"tp": group}, torch.device("cpu")) == {}
    finally:
        dist.destroy_process_group()


def test_all_sources_are_looked_for(tmp_path: Path) -> None:
    for name in ("a.txt", "x.bin", "x.idx"):
        (tmp_path / name).write_text("text")
    blend = tuple(Source(weight=1.0, path=str(tmp_path / name)) for name in ("a.txt", "x.idx", "gone.idx"))
    found = preflight.data_files(make_plan(run=RunSettings(blend=blend, valid=str(tmp_path / "a.txt"))))
    sizes = {Path(path).name: size for path, size in found.items()}
    assert sizes == {"a.txt": 4, "x.bin": 4, "x.idx": 4, "gone.bin": None, "gone.idx": None}
