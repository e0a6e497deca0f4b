"""Megatron's own training loop (programs/megatron.py) trains what our worker trains, from the same weights in the same order of data.

Most of it needs a megatron-core that has megatron/training (0.19 or later): `.ci/megatron_019` runs that, the gate skips it. Ranks are
forked from a server that has everything imported: a few seconds a run.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import corpora
import numpy as np
import own_ranks
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from worker_plans import GPT, LLAMA, QWEN3, QWEN3_MOE, make_plan

import orchestrator
from orchestrator.engines import ENGINES
from orchestrator.engines.megatron.own import own_job, why_not_own
from orchestrator.errors import NO_ROOM
from orchestrator.job import ASKED_VARIABLE, Job
from orchestrator.launch import local, render
from orchestrator.model.schedule import learning_rate
from orchestrator.model.spec import Architecture
from orchestrator.plan import Plan, RunSettings, from_json, to_json
from orchestrator.programs import megatron_hooks
from orchestrator.workers import data

HAS_TRAINING = find_spec("megatron.training") is not None
pytestmark = [pytest.mark.engines, pytest.mark.xdist_group("own_megatron")]

STEPS, VOCAB, SEQ, BATCH, SEED = 5, 256, 32, 8, 7
EVERY = 2
FULL = 128 * 1024
"""More bytes than a log has, fewer than the file of weights and states of a rank."""
WORKER = "orchestrator.workers.megatron"
RELU = replace(GPT, name="gpt_relu", activation="relu")
MODELS = {model.name: replace(model, vocab_size=VOCAB) for model in (GPT, RELU, LLAMA, QWEN3, QWEN3_MOE)}
MODELS["gpt_padded"] = replace(GPT, name="gpt_padded", vocab_size=300)

Row = dict[str, Any]


class Workshop:
    """Where runs are made: the same samples in the orders of both, and what our worker's rows are by model."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.context = folder, own_ranks.start_server()
        self.theirs, self.mine = corpora.make(folder, "train", 64, corpora.Reading(SEQ, STEPS * BATCH, SEED, VOCAB))
        evaluations = STEPS // EVERY + 1  # Megatron counts one at the end too (training.py, get_train_valid_test_num_samples)
        self.valid = corpora.make(folder, "valid", 64, corpora.Reading(SEQ, evaluations * BATCH, SEED, VOCAB), split=1)
        self.rows: dict[str, list[Row]] = {}

    def plan(self, model: Architecture, *, own: bool = True, **more: Any) -> Plan:
        settings = RunSettings(data=f"{self.theirs if own else self.mine}.idx", **more.pop("run", {}))
        return make_plan(model, run=settings, **({"steps": STEPS, "seed": SEED, "lr": 3e-3, "weight_decay": 0.1} | more))

    def job(self, plan: Plan, name: str, *, own: bool = True) -> tuple[Path, Job]:
        """A run's folder with its files."""
        out = self.folder / name.replace(" ", "-")
        out.mkdir(exist_ok=True)
        job = ENGINES["megatron"].translate(plan)
        if own:
            assert why_not_own(plan) is None
            job = own_job(plan, job)
        for file in job.files:
            (out / file.path).write_text(file.content)
        (out / "plan.json").write_text(to_json(plan))
        return out, job

    def trained(
        self, plan: Plan, name: str, *, own: bool = True, more: Sequence[str] = (), meanwhile: Any = lambda process: None
    ) -> list[Row]:
        """The rows of a run that ends well."""
        out, job = self.job(plan, name, own=own)
        codes = own_ranks.run(self.context, job.module, [*job.arguments, *more], out, plan.world_size, meanwhile)
        logs = "".join(f"\n--- {log.name}\n{log.read_text()[-2500:]}" for log in sorted(out.glob("logs/rank-*.log")))
        assert codes == [0] * plan.world_size, logs
        return rows_of(out)

    def expected(self, name: str) -> list[Row]:
        """The rows of our worker, which a layout does not change (tests/workers/test_parity.py)."""
        if name not in self.rows:
            self.rows[name] = self.trained(self.plan(MODELS[name], own=False, dp=2), f"worker {name}", own=False)
        return self.rows[name]


def rows_of(out: Path) -> list[Row]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    if not HAS_TRAINING:
        pytest.skip("this megatron-core has no megatron/training (0.19 has)")
    return Workshop(tmp_path_factory.mktemp("own"))


def assert_same(found: list[Row], expected: list[Row]) -> None:
    """Every step: losses to 1e-5, rates, norms."""
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    for row, ours in zip(found, expected, strict=True):
        assert row["loss"] == pytest.approx(ours["loss"], abs=1e-5), (row, ours)
        assert row["lr"] == pytest.approx(ours["lr"], rel=1e-9), (row, ours)
        assert row["grad_norm"] == pytest.approx(ours["grad_norm"], rel=1e-4), (row, ours)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt tp2": ("gpt_test", {"tp": 2}),
    "gpt padded vocabulary tp2 pp2": ("gpt_padded", {"tp": 2, "pp": 2}),
    "gpt relu tp2": ("gpt_relu", {"tp": 2}),
    "gpt tp2 pp2 sequence parallel": ("gpt_test", {"tp": 2, "pp": 2, "sequence_parallel": True}),
    "gpt pp2 vpp2 tied": ("gpt_test", {"pp": 2, "vpp": 2}),
    "gpt dp2 zero1": ("gpt_test", {"dp": 2, "zero_stage": 1}),
    "gpt pp2 uneven": ("gpt_test", {"pp": 2, "split": [[3], [1]]}),
    "llama tp2 zero1": ("llama_test", {"tp": 2, "dp": 2, "zero_stage": 1}),
    "llama pp2 all recomputed": ("llama_test", {"pp": 2, "recompute": ["full", "full"]}),
    "llama pp2 the first stage recomputed": ("llama_test", {"pp": 2, "recompute": ["full", "none"]}),
    "llama cp2": ("llama_test", {"cp": 2}),
    "llama pp2 vpp2 uneven": ("llama_test", {"pp": 2, "vpp": 2, "split": [[1, 1], [2, 0]]}),
    "qwen3 tp2 modules recomputed": ("qwen3_test", {"tp": 2, "recompute": ["selective"]}),
    "qwen3 cp2 dp2 zero1": ("qwen3_test", {"cp": 2, "dp": 2, "zero_stage": 1}),
    "qwen3_moe ep2": ("qwen3_moe_test", {"dp": 2, "ep": 2}),
    "qwen3_moe ep2 pp2 zero1": ("qwen3_moe_test", {"dp": 2, "ep": 2, "pp": 2, "zero_stage": 1}),
    "qwen3_moe tp2 etp2 sequence parallel": ("qwen3_moe_test", {"tp": 2, "etp": 2, "sequence_parallel": True}),
}


@pytest.mark.parametrize("name", CASES)
def test_it_trains_what_our_worker_trains(name: str, workshop: Workshop) -> None:
    model, strategy = CASES[name]
    assert_same(workshop.trained(workshop.plan(MODELS[model], **strategy), name), workshop.expected(model))


def test_muon_s_update_is_the_same_over_tensor_parallel_ranks_unless_it_is_blockwise(workshop: Workshop) -> None:
    """Products are in bf16 (muon_utils.py): losses to 1e-4."""
    pytest.importorskip("emerging_optimizers", reason="needs Python 3.12", exc_type=ImportError)
    software = replace(workshop.plan(LLAMA).cluster.software, megatron_core=version("megatron-core"))
    losses = {}
    cases = {"whole": {}, "duplicated": {"tp": 2}, "distributed": {"tp": 2}, "blockwise": {"tp": 2}}
    for name, layout in cases.items():
        plan = workshop.plan(MODELS["llama_test"], **layout)
        mode = name if layout.get("tp") else "duplicated"
        training = replace(plan.training, optimizer="muon", muon_tp_mode=mode)
        plan = replace(plan, training=training, cluster=replace(plan.cluster, software=software))
        losses[name] = [row["loss"] for row in workshop.trained(plan, f"muon {name}")]
    for name in ("duplicated", "distributed"):
        assert losses[name] == pytest.approx(losses["whole"], abs=1e-4), name
    assert max(abs(a - b) for a, b in zip(losses["blockwise"], losses["whole"], strict=True)) > 5e-4


@pytest.mark.parametrize(("rank", "granularity"), [(0, "full"), (1, None)])
def test_a_rank_recomputes_what_its_stage_does(rank: int, granularity: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(MODELS["llama_test"], pp=2, recompute=["full", "none"])
    [file] = [file for file in ENGINES["megatron"].translate(plan).files if file.path == "engine.json"]
    hooks = megatron_hooks.Hooks(plan, json.loads(file.content), torch.device("cpu"), None)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    config = SimpleNamespace(recompute_granularity="selective", recompute_num_layers=None)
    hooks._transformer(lambda: config)
    assert config.recompute_granularity == granularity
    assert (config.recompute_num_layers or 0) > 0 or rank == 1


def test_it_evaluates_what_our_worker_evaluates(workshop: Workshop) -> None:
    """Once: later Megatron reads on, our worker has the same samples."""
    theirs, ours = (
        workshop.trained(
            workshop.plan(MODELS["gpt_test"], own=own, dp=2, run={"valid": f"{valid}.idx", "eval_every": EVERY, "eval_steps": 1}),
            f"evaluated {own}",
            own=own,
        )
        for own, valid in zip((True, False), workshop.valid, strict=True)
    )
    assert_same(theirs, ours)
    assert [row["step"] for row in theirs if "valid_loss" in row] == [row["step"] for row in ours if "valid_loss" in row] == [2, 4, 5]
    assert theirs[EVERY - 1]["valid_loss"] == pytest.approx(ours[EVERY - 1]["valid_loss"], abs=1e-5)


PADDED = {"packing": False}
ANSWERS = [
    PADDED | {"dp": 2, "zero_stage": 1, "micro_batch_size": 2}, PADDED | {"tp": 2, "pp": 2}, PADDED | {"cp": 2}, {"packing": True, "pp": 2},
    {"packing": True, "cp": 2},
]  # fmt: skip


@pytest.mark.parametrize("layout", ANSWERS, ids=str)
def test_it_trains_on_answers_as_our_worker_does(layout: dict[str, Any], workshop: Workshop) -> None:
    """Micro-batches and ranks have answers of different lengths: the mean is over all of a global batch. The same samples are evaluated on
    each time."""
    path, model = workshop.folder / "pairs.jsonl", replace(MODELS["llama_test"], vocab_size=257)
    pairs = [{"prompt": f"{n}+{n}=", "completion": f"{2 * n}" + "!" * (n * 7 % 20)} for n in range(24)]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    run = {"data": str(path), "valid": str(path), "eval_every": EVERY, "eval_steps": 1}
    given: dict[str, Any] = {"task": "sft", "steps": STEPS, "seed": SEED, "lr": 3e-3}
    theirs = workshop.trained(make_plan(model, run=RunSettings(**run), **given, **layout), f"answers {layout}")
    sharing = {"cp": 2} if layout["packing"] and "cp" in layout else {"dp": 2}  # what pads each sample says which share a sequence
    name = f"answers packing={layout['packing']} {sharing}"
    if name not in workshop.rows:
        plan = make_plan(model, run=RunSettings(**run), **given, packing=layout["packing"], **sharing)
        workshop.rows[name] = workshop.trained(plan, f"worker {name}", own=False)
    assert_same(theirs, workshop.rows[name])
    for row, ours in zip(theirs, workshop.rows[name], strict=True):
        assert row.get("valid_loss") == pytest.approx(ours.get("valid_loss"), abs=1e-5)


def test_it_begins_with_weights_of_hugging_face_and_writes_such(workshop: Workshop) -> None:
    """From a checkpoint that our worker wrote, both train to the same losses and write the same weights."""
    model, folder = MODELS["qwen3_moe_test"], workshop.folder
    first = workshop.plan(model, own=False, dp=2, steps=2, lr=0.1, warmup=0, run={"export_to": str(folder / "hf")})
    workshop.trained(first, "hf first", own=False)
    (theirs, of_theirs), (ours, of_ours) = (
        (
            workshop.trained(
                workshop.plan(model, own=own, **layout, run={"init_from": str(folder / "hf"), "export_to": str(folder / f"hf-{own}")}),
                f"hf {own}",
                own=own,
            ),
            load_file(folder / f"hf-{own}" / "model.safetensors"),
        )
        for own, layout in ((True, {"dp": 2, "ep": 2, "pp": 2, "zero_stage": 1}), (False, {"dp": 2}))
    )
    assert_same(theirs, ours)
    assert abs(theirs[0]["loss"] - workshop.expected(model.name)[0]["loss"]) > 1e-3, "it is the checkpoint that it began with"
    assert of_theirs.keys() == of_ours.keys()
    for name, tensor in of_theirs.items():
        torch.testing.assert_close(tensor, of_ours[name], atol=1e-5, rtol=1e-4)


CONTINUED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tp2 to pp2": ({"tp": 2}, {"pp": 2}),
    "dp2 zero1 to tp2 dp2 zero1": ({"dp": 2, "zero_stage": 1}, {"tp": 2, "dp": 2, "zero_stage": 1}),
    "pp2 zero0 to dp2 zero1": ({"pp": 2}, {"dp": 2, "zero_stage": 1}),
    "dp2 zero1 to tp2 zero0": ({"dp": 2, "zero_stage": 1}, {"tp": 2}),
}


@pytest.mark.parametrize("name", CONTINUED)
def test_it_goes_on_from_its_checkpoint_in_another_layout(name: str, workshop: Workshop) -> None:
    before, after = CONTINUED[name]
    model = MODELS["llama_test"]
    first = workshop.plan(model, run={"save_every": 2, "keep_last": 2, "keep_every": 4}, **before)
    assert_same(workshop.trained(first, f"{name} before"), workshop.expected(model.name))
    saved = workshop.folder / f"{name} before".replace(" ", "-") / "checkpoints"
    marker = json.loads((saved / "latest.json").read_text())
    assert (marker["step"], marker["folder"]) == (STEPS, "iter_0000005")
    assert sorted(path.name for path in saved.glob("iter_*")) == ["iter_0000004", "iter_0000005"]
    rows = workshop.trained(workshop.plan(model, run={"resume": str(saved / "iter_0000004")}, **after), f"{name} after")
    assert_same(rows, workshop.expected(model.name)[4:])


def test_a_damaged_checkpoint_is_named_before_it_is_read(workshop: Workshop) -> None:
    model = MODELS["gpt_test"]
    workshop.trained(workshop.plan(model, dp=2, run={"save_every": STEPS}), "whole")
    saved = workshop.folder / "whole" / "checkpoints" / f"iter_{STEPS:07d}"
    listed = json.loads((saved / "digests.json").read_text())
    assert {"__0_0.distcp", ".metadata", "metadata.json", "plan.json"} <= listed.keys()
    file = saved / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    out, job = workshop.job(workshop.plan(model, dp=2, steps=2 * STEPS, run={"resume": str(saved)}), "damaged")
    assert 0 not in own_ranks.run(workshop.context, job.module, [*job.arguments], out, 2, lambda process: None)
    logs = "".join(log.read_text() for log in (out / "logs").glob("rank-*.log"))
    assert f"{file} is not what was written: its SHA-256 is another" in logs


def test_a_run_that_goes_on_by_itself_takes_the_newest_whole_checkpoint(workshop: Workshop) -> None:
    plan = workshop.plan(MODELS["gpt_test"], dp=2, run={"save_every": 2})
    workshop.trained(plan, "unattended")
    out, job = workshop.job(plan, "unattended")
    saved = out / "checkpoints"
    os.truncate(saved / f"iter_{STEPS:07d}" / "__0_0.distcp", 1000)
    (out / "metrics.jsonl").unlink()
    assert own_ranks.run(workshop.context, job.module, [*job.arguments, "--continue"], out, 2) == [0, 0]
    assert_same([json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()], workshop.expected("gpt_test")[4:])
    log = (out / "logs" / "rank-0.log").read_text()
    assert "DAMAGED CHECKPOINT iter_0000005, skipped and kept as checkpoints/damaged_iter_0000005: " in log
    assert "__0_0.distcp has 1,000 bytes" in log
    assert "going on from iter_0000004" in log
    assert sorted(path.name for path in saved.glob("*iter_*")) == ["damaged_iter_0000005", "iter_0000002", "iter_0000004", "iter_0000005"]


class Harmful:
    """Makes a folder where it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("was-here",)


def test_nothing_of_a_checkpoint_is_unpickled(workshop: Workshop) -> None:
    model = MODELS["llama_test"]
    workshop.trained(workshop.plan(model, tp=2, run={"save_every": STEPS}), "harmed")
    saved = workshop.folder / "harmed" / "checkpoints" / f"iter_{STEPS:07d}"
    (saved / ".metadata").write_bytes(pickle.dumps(Harmful()))
    (saved / "digests.json").unlink()  # which whoever changes a file can change too
    out, job = workshop.job(workshop.plan(model, tp=2, run={"resume": str(saved)}), "not harmed")
    codes = own_ranks.run(workshop.context, job.module, [*job.arguments], out, 2, lambda process: None)
    assert 0 not in codes
    assert "has a file that is no checkpoint's, and was not read: it would call" in (out / "logs" / "rank-0.log").read_text()
    assert not (out / "was-here").exists()


def wait_for(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("by", ["signal", "file"])
def test_a_warning_before_the_time_limit_saves_and_ends_and_the_rest_follows(
    by: str, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """job.sbatch warns all by both; the ranks agree on it."""
    plan = workshop.plan(MODELS["gpt_test"], dp=2, steps=40, run={"save_every": 1000})
    out, _ = workshop.job(plan, f"warned by {by}")
    metrics = out / "metrics.jsonl"

    def warn(rank: int) -> None:
        wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 3)
        os.kill(rank, signal.SIGUSR1) if by == "signal" else asked.touch()

    asked = out / "logs" / "asked"
    monkeypatch.setitem(own_ranks.MORE, ASKED_VARIABLE, str(asked))
    first = workshop.trained(plan, f"warned by {by}", meanwhile=warn)
    marker = json.loads((out / "checkpoints" / "latest.json").read_text())
    assert marker["step"] == first[-1]["step"] < 40
    asked.unlink(missing_ok=True)
    rest = workshop.trained(plan, f"warned by {by}", more=["--continue"])  # as launch.sh says it
    assert rest[: len(first)] == first
    assert [row["step"] for row in rest] == [*range(1, 41)]


def test_a_killed_rank_is_named_and_the_run_goes_on_from_its_checkpoint(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through launch.sh, as on a machine: status.json says which rank ended first and how."""
    plan = workshop.plan(MODELS["llama_test"], tp=2, run={"save_every": 2})
    out, job = workshop.job(plan, "killed")
    for file in render.files(job):
        (out / file.path).write_text(file.content)

    def kill(row: Row) -> None:
        if row["step"] == 3:
            os.kill(rank_of(out, 1), signal.SIGKILL)

    outcome = local.start(job, out, on_step=kill)
    assert (outcome.status, outcome.rank) == ("failed", 1), outcome
    assert "SIGKILL" in str(outcome.last_line)
    assert json.loads((out / "checkpoints" / "latest.json").read_text())["step"] == 2
    monkeypatch.setenv("CONTINUE", "1")
    outcome = local.start(job, out)
    assert outcome.status == "finished", outcome
    assert_same(rows_of(out), workshop.expected("llama_test"))
    timers = [json.loads(line) for line in (out / "timers.jsonl").read_text().splitlines()]
    assert [row["rank"] for row in timers] == [0, 1]
    assert all({"data", "passes", "update", "agree"} <= {*row["phases"][0]} for row in timers)


def rank_of(out: Path, rank: int) -> int:
    """Its process id, by its environment and working directory."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment = (process / "environ").read_bytes().split(b"\0")
            if f"RANK={rank}".encode() in environment and (process / "cwd").resolve() == out.resolve() and is_program(process):
                return int(process.name)
        except OSError:
            continue
    raise AssertionError(f"no rank {rank}")


def is_program(process: Path) -> bool:
    """Not a data loader that it started."""
    return b"orchestrator.programs.megatron" in (process / "cmdline").read_bytes() and parent_is_no_program(process)


def parent_is_no_program(process: Path) -> bool:
    status = (process / "status").read_text()
    parent = next(line.split()[1] for line in status.splitlines() if line.startswith("PPid:"))
    return b"--nproc-per-node" in Path("/proc", parent, "cmdline").read_bytes()


def writes(process: Path) -> bool:
    """Whether it writes a part of a checkpoint now. Files that it closes meanwhile are gone from the list."""
    names = []
    for file in (process / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            names.append(str(file.readlink()))
    return any(".distcp" in name for name in names)


def test_a_rank_writes_by_itself_and_a_kill_in_a_save_loses_none_before(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process could be killed alone: rank 1 dies while a file of the second checkpoint or a later one is open."""
    plan = workshop.plan(MODELS["llama_test"], tp=2, steps=20, run={"save_every": 1, "keep_last": 2, "step_timeout_s": 60.0})
    out, job = workshop.job(plan, "killed in a save")
    for file in render.files(job):
        (out / file.path).write_text(file.content)
    helpers: list[bytes] = []

    def kill() -> None:
        wait_for((out / "checkpoints" / "latest.json").exists)
        rank = Path("/proc", str(rank_of(out, 1)))
        children = (rank / "task" / rank.name / "children").read_text().split()
        helpers.extend(Path("/proc", child, "cmdline").read_bytes() for child in children)
        while not writes(rank):
            time.sleep(0)
        os.kill(int(rank.name), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    outcome = local.start(job, out)
    killer.join()
    assert (outcome.status, outcome.rank) == ("failed", 1), outcome
    assert [words for words in helpers if b"spawn_main" in words] == []
    saved = json.loads((out / "checkpoints" / "latest.json").read_text())["step"]
    assert 1 <= saved < 20
    monkeypatch.setenv("CONTINUE", "1")
    outcome = local.start(job, out)
    assert outcome.status == "finished", outcome
    assert [row["step"] for row in rows_of(out)] == list(range(1, 21))


def test_a_full_disk_is_said_and_the_checkpoint_before_is_whole(workshop: Workshop) -> None:
    """No file can grow beyond FULL bytes any more."""
    out, job = workshop.job(workshop.plan(MODELS["gpt_test"], dp=2, steps=40, run={"save_every": 3}), "full")

    def fill(rank: int) -> None:
        wait_for((out / "checkpoints" / "latest.json").exists)
        resource.prlimit(rank, resource.RLIMIT_FSIZE, (FULL, FULL))

    codes = own_ranks.run(workshop.context, job.module, job.arguments, out, 2, fill)
    assert NO_ROOM in codes, codes
    said = (out / "logs" / "rank-0.log").read_text().splitlines()
    [line] = [line for line in said if line.startswith("CheckpointError: ")]
    assert "the checkpoint can't be written" in line
    assert "the newest whole checkpoint is checkpoints/iter_0000" in line
    assert line.endswith(f": resume={out} goes on from it")


def test_a_users_copy_with_another_loss_trains_on_that(workshop: Workshop, tmp_path: Path) -> None:
    source = Path(orchestrator.__file__).parent / "programs" / "megatron.py"
    line = "    summed, tokens = (losses.view(-1).float() * mask).sum(), mask.sum().detach().int()\n"
    assert line in source.read_text()
    changed = source.read_text().replace(line, line + "    summed = 2 * summed\n")
    made = "    return BlendedMegatronDatasetBuilder("
    assert made in changed
    (tmp_path / "mine.py").write_text(changed.replace(made, "    print(config.num_dataset_builder_threads, 'threads build')\n" + made))
    words = ("recipe=gpt_tiny", "train.steps=2", "train.warmup=0", "gpus=2", "engine=megatron", "pin.tp=2", f"data={workshop.theirs}")
    words += ("megatron.num_dataset_builder_threads=2",)
    assert command(*words, f"entry={tmp_path / 'mine.py'}", f"out={tmp_path / 'mine'}").returncode == 0
    assert command(*words, "program=own", f"out={tmp_path / 'ours'}").returncode == 0
    (mine, _), (ours, _) = rows_of(tmp_path / "mine"), rows_of(tmp_path / "ours")
    assert mine["loss"] == pytest.approx(2 * ours["loss"], rel=1e-6)
    assert mine["grad_norm"] == pytest.approx(2 * ours["grad_norm"], rel=1e-5)
    assert "2 threads build" in (tmp_path / "mine" / "logs" / "rank-0.log").read_text(), "options of data sets are Megatron's own"


def command(*words: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, "-m", "orchestrator.run", *words], capture_output=True, text=True, timeout=300, check=False)
    print(done.stdout, done.stderr)
    return done


def test_the_command_starts_it_says_so_and_resumes_it(workshop: Workshop, tmp_path: Path) -> None:
    tiny = (
        "recipe=gpt_tiny",
        "model.num_layers=2",
        f"model.vocab_size={VOCAB}",
        f"train.seq_length={SEQ}",
        f"train.global_batch_size={BATCH}",
    )
    words = (
        *tiny,
        "train.steps=4",
        "train.warmup=2",
        "train.save_every=2",
        "gpus=2",
        "engine=megatron",
        f"data={workshop.theirs}",
        "launch=local",
    )
    first = command(*words, "pin.tp=2", "pin.zero_stage=0", f"out={tmp_path / 'first'}")
    assert first.returncode == 0
    assert "\ntrained by Megatron's own training loop: the default\n" in first.stdout
    rows = rows_of(tmp_path / "first")
    half = tmp_path / "first" / "checkpoints" / "iter_0000002"
    rest = command(f"resume={half}", "pin.pp=2", "pin.tp=1", f"out={tmp_path / 'rest'}")
    assert rest.returncode == 0
    assert "From the checkpoint to this plan: tp 2 -> 1, pp 1 -> 2: weights and the optimizer's states" in rest.stdout
    assert_same(rows_of(tmp_path / "rest"), rows[2:])
    changed = command(f"resume={half}", "train.lr=0.002", "train.steps=6", "train.change=lr,steps", f"out={tmp_path / 'changed'}")
    assert changed.returncode == 0
    plan = from_json((tmp_path / "changed" / "plan.json").read_bytes(), "plan.json")
    assert [row["lr"] for row in rows_of(tmp_path / "changed")] == pytest.approx(
        [learning_rate(plan.training, step) for step in range(2, 6)]
    )
    for more, said in {
        "program=instrument": "was written by Megatron's own training loop, which alone reads it: program=own",
    }.items():
        refused = command(f"resume={half}", "pin.tp=1", more, f"out={tmp_path / 'refused'}")
        assert refused.returncode == 2
        assert said in refused.stderr


def test_text_is_trained_on_and_evaluated_on_as_the_shares_that_our_worker_has(workshop: Workshop, tmp_path: Path) -> None:
    """A recipe as it is, without a word on data: Python's own sources."""
    words = ("recipe=gpt_tiny", "gpus=2", "engine=megatron", "pin.tp=2", "train.steps=3", "train.warmup=1", "train.eval_every=3")
    done = command(*words, "data.split=9,1,0", f"out={tmp_path / 'run'}")
    assert done.returncode == 0
    assert "\ndata: Python's own sources, byte by byte, as data= is not given\n" in done.stdout
    assert "\ntrained by Megatron's own training loop: the default\n" in done.stdout
    assert [row["step"] for row in rows_of(tmp_path / "run") if "valid_loss" in row] == [3]
    row = data.encode(data.standard_library(), None, data.Specials.of_bytes())
    cut = len(row) * 9 // 10
    for name, ids in {"train": row[:cut], "valid": row[cut:]}.items():
        written = data.indexed_tokens(str(tmp_path / "run" / "data" / f"{name}-0"))
        assert np.array_equal(written, ids)


@pytest.mark.skipif(HAS_TRAINING, reason="this megatron-core has megatron/training")
def test_the_command_says_what_it_lacks_before_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEGATRON_LM", raising=False)
    words = ("recipe=gpt_tiny", "gpus=2", "cluster=cpu", "engine=megatron", "program=own", "launch=local")
    done = command(*words, f"out={tmp_path / 'run'}")
    assert done.returncode == 2
    lacks = (
        "Megatron's own training loop needs megatron.training, which is not installed here: megatron-core>=0.19, whose wheel has it, or a"
    )
    assert f"error: launch=local: {lacks} checkout of Megatron-LM named by env.MEGATRON_LM=PATH" in done.stderr


@pytest.mark.skipif(HAS_TRAINING, reason="this megatron-core has megatron/training")
def test_by_default_our_worker_trains_and_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEGATRON_LM", raising=False)
    words = ("recipe=gpt_tiny", "gpus=2", "cluster=cpu", "engine=megatron", "launch=none")
    said = f"\ntrained by our worker: megatron-core {version('megatron-core')} has no training loop of its own: megatron-core>=0.19, whose"
    assert said in command(*words, f"out={tmp_path / 'run'}").stdout
    monkeypatch.setenv("MEGATRON_LM", "/checkout")
    assert "\ntrained by Megatron's own training loop: the default\n" in command(*words, f"out={tmp_path / 'checkout'}").stdout
    assert "\nexport MEGATRON_LM=/checkout\n" in (tmp_path / "checkout" / "launch.sh").read_text(), "a batch job has not our environment"
    assert "MEGATRON_LM" not in (tmp_path / "run" / "launch.sh").read_text()


@pytest.mark.skipif(HAS_TRAINING, reason="this megatron-core has megatron/training")
@pytest.mark.parametrize("checkout", [None, "/no/such/folder"])
def test_without_a_training_loop_it_says_what_to_install_or_name(
    checkout: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plan.json").write_text(to_json(make_plan(GPT)))
    monkeypatch.delenv("MEGATRON_LM", raising=False)
    if checkout is not None:
        monkeypatch.setenv("MEGATRON_LM", checkout)
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator.programs.megatron"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    lacks = "the installed megatron-core" if checkout is None else f"MEGATRON_LM={checkout}"
    assert line.startswith(f"ProgramError: {lacks} has no megatron/training: install megatron-core>=0.19, or name a checkout")
