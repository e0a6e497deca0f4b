"""A resumed run continues the curve: exactly in the same layout, to rounding in another of the same engine."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from worker_plans import BERT, DEEPSEEK, GPT, LLAMA, MIXTRAL, QWEN3_MOE, T5, make_plan
from worker_pool import Pool

from orchestrator.plan import RunSettings, to_json
from orchestrator.strategy.spec import PP_BEFORE_DP
from orchestrator.workers import runs

pytestmark = pytest.mark.engines

DEEPSPEED = "megatron_deepspeed"
ALONE = "deepspeed"
SP = {"tp": 2, "sequence_parallel": True}


def run(pool: Pool, corpus: str, out: Path, *, resume: Path | None = None, save_every: int = 0, **fields: Any) -> list[float]:
    settings = RunSettings(save_every=save_every, resume=str(resume) if resume else None)
    plan = make_plan(run=settings, steps=4, lr=3e-3, **fields)
    return pool.run("train_and_save", plan.world_size, to_json(plan), corpus, str(out))[0]


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "megatron tp2 zero1 to the same": ({"tp": 2, "dp": 2, "zero_stage": 1}, {"tp": 2, "dp": 2, "zero_stage": 1}),
    "megatron tp2 to tp1": ({"tp": 2}, {}),
    "megatron tp2 zero1 to tp1 dp2": ({"tp": 2, "dp": 2, "zero_stage": 1}, {"dp": 2, "zero_stage": 1}),
    "megatron pp2 vpp2 llama to pp1": ({"model": LLAMA, "pp": 2, "vpp": 2}, {"model": LLAMA}),
    "megatron experts ep2 zero1 to tp2 pp2 ep4": (
        {"model": QWEN3_MOE, "dp": 2, "ep": 2, "zero_stage": 1},
        {"model": QWEN3_MOE, **SP, "pp": 2, "dp": 2, "ep": 4, "zero_stage": 1},
    ),
    "megatron experts ep2 zero1 to zero0 ep4": (
        {"model": QWEN3_MOE, "dp": 2, "ep": 2, "zero_stage": 1},
        {"model": QWEN3_MOE, "dp": 4, "ep": 4},
    ),
    "megatron cp2 dp2 zero1 llama to cp4": (
        {"model": LLAMA, "cp": 2, "dp": 2, "zero_stage": 1, "cp_comm_type": "all_gather"},
        {"model": LLAMA, "cp": 4, "zero_stage": 1, "cp_comm_type": "all_gather"},
    ),
    "deepspeed tp2 zero1": ({"engine": DEEPSPEED, "tp": 2, "zero_stage": 1}, {"engine": DEEPSPEED, "tp": 2, "zero_stage": 1}),
    "deepspeed dp2 zero3": ({"engine": DEEPSPEED, "dp": 2, "zero_stage": 3}, {"engine": DEEPSPEED, "dp": 2, "zero_stage": 3}),
    "megatron bf16 tp2": ({"tp": 2, "precision": "bf16"}, {"tp": 2, "precision": "bf16"}),
    "megatron bf16 dp2 zero1": ({"dp": 2, "zero_stage": 1, "precision": "bf16"}, {"dp": 2, "zero_stage": 1, "precision": "bf16"}),
    "deepspeed bf16 dp2 zero1": (
        {"engine": DEEPSPEED, "dp": 2, "zero_stage": 1, "precision": "bf16"},
        {"engine": DEEPSPEED, "dp": 2, "zero_stage": 1, "precision": "bf16"},
    ),
    "deepspeed bf16 pp2 zero1": (
        {"engine": DEEPSPEED, "pp": 2, "zero_stage": 1, "precision": "bf16"},
        {"engine": DEEPSPEED, "pp": 2, "zero_stage": 1, "precision": "bf16"},
    ),
    "deepspeed bf16 zero0": (
        {"engine": DEEPSPEED, "precision": "bf16", "grad_accum_dtype": "bf16", "grad_reduce_dtype": "bf16"},
        {"engine": DEEPSPEED, "precision": "bf16", "grad_accum_dtype": "bf16", "grad_reduce_dtype": "bf16"},
    ),
    "deepspeed zero1 to zero3": ({"engine": DEEPSPEED, "dp": 2, "zero_stage": 1}, {"engine": DEEPSPEED, "dp": 4, "zero_stage": 3}),
    "deepspeed zero3 dp3 to zero1": (
        {"engine": DEEPSPEED, "dp": 3, "zero_stage": 3, "global_batch_size": 6},
        {"engine": DEEPSPEED, "dp": 2, "zero_stage": 1, "global_batch_size": 6},
    ),
    "deepspeed zero1 to zero3 dp3": (
        {"engine": DEEPSPEED, "dp": 2, "zero_stage": 1, "global_batch_size": 6},
        {"engine": DEEPSPEED, "dp": 3, "zero_stage": 3, "global_batch_size": 6},
    ),
    "deepspeed tp2 zero2 to tp1 dp2 zero0": (
        {"engine": DEEPSPEED, "tp": 2, "zero_stage": 2},
        {"engine": DEEPSPEED, "dp": 2},
    ),
    "deepspeed pp2 zero1 llama to tp2 zero3": (
        {"model": LLAMA, "engine": DEEPSPEED, "pp": 2, "zero_stage": 1},
        {"model": LLAMA, "engine": DEEPSPEED, "tp": 2, "dp": 2, "zero_stage": 3},
    ),
    "deepspeed bf16 dp2 zero1 to zero3": (
        {"engine": DEEPSPEED, "dp": 2, "zero_stage": 1, "precision": "bf16"},
        {"engine": DEEPSPEED, "dp": 4, "zero_stage": 3, "precision": "bf16"},
    ),
    "hugging face tp2 zero1 to dp2 zero3": (
        {"model": LLAMA, "engine": ALONE, "tp": 2, "zero_stage": 1},
        {"model": LLAMA, "engine": ALONE, "dp": 2, "zero_stage": 3},
    ),
    "hugging face tp2 dp2 zero3 to zero0": (
        {"model": LLAMA, "engine": ALONE, "tp": 2, "dp": 2, "zero_stage": 3},
        {"model": LLAMA, "engine": ALONE},
    ),
    "deepspeed pp2 zero1": ({"engine": DEEPSPEED, "pp": 2, "zero_stage": 1}, {"engine": DEEPSPEED, "pp": 2, "zero_stage": 1}),
}
MORE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "megatron cp2 dp2 zero1 llama to dp2": (
        {"model": LLAMA, "cp": 2, "dp": 2, "zero_stage": 1, "cp_comm_type": "all_gather"},
        {"model": LLAMA, "dp": 2, "zero_stage": 1},
    ),
    "megatron experts ep2 to the same": ({"model": MIXTRAL, "dp": 2, "ep": 2}, {"model": MIXTRAL, "dp": 2, "ep": 2}),
    "megatron experts tp2 etp2 to ep2": ({"model": MIXTRAL, **SP, "etp": 2}, {"model": MIXTRAL, **SP, "ep": 2}),
    "megatron experts pp2 ep2 zero0 to zero1": (
        {"model": MIXTRAL, "pp": 2, "dp": 2, "ep": 2},
        {"model": MIXTRAL, "dp": 4, "ep": 2, "zero_stage": 1},
    ),
    "megatron deepseek pp2 ep2 to tp2 ep4": (
        {"model": DEEPSEEK, "pp": 2, "dp": 2, "ep": 2, "zero_stage": 1},
        {"model": DEEPSEEK, **SP, "dp": 2, "ep": 4, "zero_stage": 1},
    ),
    "megatron bf16 deepseek ep2 to one rank": (
        {"model": DEEPSEEK, "dp": 2, "ep": 2, "zero_stage": 1, "precision": "bf16"},
        {"model": DEEPSEEK, "zero_stage": 1, "precision": "bf16"},
    ),
    "megatron tp2 to dp2 zero1": ({"tp": 2}, {"dp": 2, "zero_stage": 1}),
    "megatron bert tp2 pp2 to dp2": ({"model": BERT, "tp": 2, "pp": 2}, {"model": BERT, "dp": 2}),
    "megatron t5 tp2 to dp2 zero1": ({"model": T5, "tp": 2}, {"model": T5, "dp": 2, "zero_stage": 1}),
    "megatron llama tp2 pp2 dp2 zero1 to tp2 zero0": (
        {"model": LLAMA, "tp": 2, "pp": 2, "dp": 2, "zero_stage": 1},
        {"model": LLAMA, "tp": 2},
    ),
    "megatron dp4 zero1 in two instances to one": (
        {"dp": 4, "zero_stage": 1, "zero_shard_size": 2},
        {"dp": 4, "zero_stage": 1},
    ),
    "megatron pp2 dp2 zero1 stages beside each other to the default order": (
        {"pp": 2, "dp": 2, "zero_stage": 1, "rank_order": PP_BEFORE_DP},
        {"pp": 2, "dp": 2, "zero_stage": 1},
    ),
    "megatron tp2 to dp4 zero1 in two instances": ({"tp": 2}, {"dp": 4, "zero_stage": 1, "zero_shard_size": 2}),
    "megatron bf16 tp2 to dp2 zero1": ({"tp": 2, "precision": "bf16"}, {"dp": 2, "zero_stage": 1, "precision": "bf16"}),
    "megatron bf16 dp2 zero1 to tp2": ({"dp": 2, "zero_stage": 1, "precision": "bf16"}, {"tp": 2, "precision": "bf16"}),
    "deepspeed pp2 zero1 to pp1": ({"engine": DEEPSPEED, "pp": 2, "zero_stage": 1}, {"engine": DEEPSPEED, "zero_stage": 1}),
    "deepspeed pipeline pp2 zero1 to dp2 zero3": (
        {"engine": DEEPSPEED, "pp": 2, "zero_stage": 1, "pipeline_schedule": "deepspeed_1f1b"},
        {"engine": DEEPSPEED, "dp": 2, "zero_stage": 3},
    ),
    "deepspeed llama tp2 zero2 to pipeline pp2 zero0": (
        {"model": LLAMA, "engine": DEEPSPEED, "tp": 2, "zero_stage": 2},
        {"model": LLAMA, "engine": DEEPSPEED, "pp": 2, "pipeline_schedule": "deepspeed_1f1b"},
    ),
    "deepspeed t5 tp2 zero1 to dp2 zero3": (
        {"model": T5, "engine": DEEPSPEED, "tp": 2, "zero_stage": 1},
        {"model": T5, "engine": DEEPSPEED, "dp": 2, "zero_stage": 3},
    ),
    "deepspeed dp1 zero1 to pp2 bert": (
        {"model": BERT, "engine": DEEPSPEED, "zero_stage": 1},
        {"model": BERT, "engine": DEEPSPEED, "pp": 2, "zero_stage": 1},
    ),
    "hugging face dp2 zero1 to zero3": ({"engine": ALONE, "dp": 2, "zero_stage": 1}, {"engine": ALONE, "dp": 2, "zero_stage": 3}),
    "hugging face bert dp2 zero3 to zero1": (
        {"model": BERT, "engine": ALONE, "dp": 2, "zero_stage": 3},
        {"model": BERT, "engine": ALONE, "dp": 2, "zero_stage": 1},
    ),
}
"""Left to .ci/full, as LONG."""

LONG = (
    "megatron tp2 zero1 to the same",
    "deepspeed zero1 to zero3",
    "megatron experts ep2 zero1 to tp2 pp2 ep4",
    "megatron tp2 to tp1",
    "deepspeed zero1 to zero3 dp3",
    "megatron cp2 dp2 zero1 llama to cp4",
    "hugging face tp2 dp2 zero3 to zero0",
    "deepspeed zero3 dp3 to zero1",
    "deepspeed bf16 dp2 zero1 to zero3",
    "deepspeed tp2 zero2 to tp1 dp2 zero0",
    "deepspeed tp2 zero1",
    "deepspeed dp2 zero3",
    "megatron bf16 tp2",
    "deepspeed bf16 dp2 zero1",
    "deepspeed bf16 zero0",
    "deepspeed pp2 zero1",
)
"""Left to .ci/full: their parts are in other cases."""


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.full if case in (*LONG, *MORE) else ()) for case in CASES | MORE])
def test_a_resumed_run_continues_the_curve(case: str, pool: Pool, corpus: str, tmp_path: Path) -> None:
    before, after = (CASES | MORE)[case]
    whole = run(pool, corpus, tmp_path / "first", save_every=2, **before)
    # The run that resumes starts in the middle: its own losses are those of steps 3 and 4.
    half = tmp_path / "first" / "checkpoints" / "step_000002"
    resumed = run(pool, corpus, tmp_path / "second", resume=half, **after)
    tolerance = 1e-6 if before == after else 5e-3 if after.get("precision") == "bf16" else 1e-4
    np.testing.assert_allclose(resumed, whole[2:], rtol=0, atol=tolerance)
    lines = [json.loads(line) for line in (tmp_path / "second" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [3, 4]


PATHS: dict[str, tuple[dict[str, Any], ...]] = {
    "megatron": (
        {"model": LLAMA, **SP, "pp": 2, "dp": 2, "zero_stage": 1},
        {"model": LLAMA, "pp": 3, "dp": 2, "split": [[1], [2], [1]]},
        {"model": LLAMA, **SP, "dp": 2, "zero_stage": 1},
        {"model": LLAMA, "pp": 2, "vpp": 2, "dp": 4, "zero_stage": 1},
    ),
    "megatron experts": (
        {"model": QWEN3_MOE, "pp": 2, "dp": 4, "ep": 4, "zero_stage": 1},
        {"model": QWEN3_MOE, "pp": 3, "dp": 2, "ep": 2, "split": [[1], [2], [1]]},
        {"model": QWEN3_MOE, **SP, "dp": 2, "ep": 4, "zero_stage": 1},
        {"model": QWEN3_MOE, **SP, "dp": 4, "etp": 2, "ep": 2, "zero_stage": 1},
    ),
    "megatron_deepspeed": (
        {"model": LLAMA, "engine": DEEPSPEED, "tp": 2, "pp": 2, "dp": 2, "zero_stage": 1},
        {"model": LLAMA, "engine": DEEPSPEED, "tp": 2, "dp": 3, "zero_stage": 3},
        {"model": LLAMA, "engine": DEEPSPEED, "pp": 2, "dp": 2, "pipeline_schedule": "deepspeed_1f1b"},
        {"model": LLAMA, "engine": DEEPSPEED, "dp": 8, "zero_stage": 2},
    ),
    "deepspeed": (
        {"model": LLAMA, "engine": ALONE, "tp": 2, "dp": 4, "zero_stage": 1},
        {"model": LLAMA, "engine": ALONE, "dp": 6, "zero_stage": 3},
        {"model": LLAMA, "engine": ALONE, "tp": 2, "dp": 2, "zero_stage": 2},
        {"model": LLAMA, "engine": ALONE, "dp": 8, "zero_stage": 3},
    ),
}
"""Layouts on 8, 6, 4 and again 8 ranks, each of which goes on from the checkpoint of the one before."""


@pytest.mark.full
@pytest.mark.parametrize("engine", PATHS)
def test_a_run_goes_from_8_ranks_to_6_to_4_and_back(engine: str, pool: Pool, corpus: str, tmp_path: Path) -> None:
    """TP, PP, EP and ZeRO change on the way: every leg has the losses of the run that was never moved."""
    whole: list[float] = []
    source: Path | None = None
    for leg, fields in enumerate(PATHS[engine]):
        out = tmp_path / f"leg{leg}"
        settings = RunSettings(save_every=2, resume=str(source) if source else None)
        plan = make_plan(run=settings, steps=8, lr=3e-3, global_batch_size=24, **fields)
        assert plan.world_size == (8, 6, 4, 8)[leg]
        losses = pool.run("train_and_save", plan.world_size, to_json(plan), corpus, str(out))[0]
        whole = whole or losses
        np.testing.assert_allclose(losses, whole[2 * leg :], rtol=0, atol=1e-4)
        source = out / "checkpoints" / f"step_{2 * leg + 2:06d}"


def test_the_marker_names_the_newest_checkpoint_and_a_run_continues_in_its_own_folder(pool: Pool, corpus: str, tmp_path: Path) -> None:
    run(pool, corpus, tmp_path, save_every=3)
    marker = json.loads((tmp_path / "checkpoints" / "latest.json").read_text())
    assert (marker["step"], marker["folder"]) == (4, "step_000004")
    assert run(pool, corpus, tmp_path, resume=tmp_path) == []
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4


def test_deepspeed_refuses_a_checkpoint_of_another_layout(pool: Pool, corpus: str, tmp_path: Path) -> None:
    plain: dict[str, Any] = {"precision": "bf16", "grad_accum_dtype": "bf16", "grad_reduce_dtype": "bf16", "engine": DEEPSPEED}
    run(pool, corpus, tmp_path / "first", save_every=4, tp=2, **plain)
    with pytest.raises(AssertionError, match=r"was written with tp=2 \(now 1\)"):
        run(pool, corpus, tmp_path / "second", resume=tmp_path / "first", **plain)


def test_dropout_continues_where_it_was(pool: Pool, corpus: str, tmp_path: Path) -> None:
    from msgspec.structs import replace

    noisy = replace(GPT, hidden_dropout=0.1, attention_dropout=0.1)
    whole = run(pool, corpus, tmp_path / "first", save_every=2, model=noisy, tp=2)
    resumed = run(pool, corpus, tmp_path / "second", resume=tmp_path / "first" / "checkpoints" / "step_000002", model=noisy, tp=2)
    np.testing.assert_allclose(resumed, whole[2:], rtol=0, atol=1e-6)


def test_only_superseded_checkpoints_go(tmp_path: Path) -> None:
    """The newest whole ones stay, those of every tenth step stay, what an interrupted save left goes, and what is newer is not touched."""
    from orchestrator.workers.checkpoint import MARKER, superseded

    for step in (5, 10, 15, 20, 25, 30, 35):
        folder = tmp_path / f"step_{step:06d}"
        folder.mkdir()
        if step != 15:
            (folder / MARKER).write_text("{}")

    def gone(step: int, keep_last: int, keep_every: int) -> list[int]:
        return [int(path.name.removeprefix("step_")) for path in superseded(tmp_path, step, keep_last, keep_every)]

    assert gone(30, 0, 0) == [15]
    assert gone(30, 1, 0) == [5, 10, 15, 20, 25]
    assert gone(30, 2, 0) == [5, 10, 15, 20]
    assert gone(30, 2, 10) == [5, 15]
    assert gone(5, 1, 0) == []


def test_settings_are_the_plans_where_the_checkpoint_is_deepspeeds_own(pool: Pool, corpus: str, tmp_path: Path) -> None:
    """What train.change= changed of decay and betas, with which such a checkpoint was written."""
    fields = CASES["deepspeed bf16 zero0"][0]
    run(pool, corpus, tmp_path / "first", save_every=2, **fields)
    half = tmp_path / "first" / "checkpoints" / "step_000002"
    unchanged, changed = (
        run(pool, corpus, tmp_path / str(index), resume=half, **fields, **more)
        for index, more in enumerate(({}, {"weight_decay": 0.9, "betas": (0.5, 0.6)}))
    )
    assert changed[0] == unchanged[0]
    assert abs(changed[1] - unchanged[1]) > 1e-3


def test_a_run_keeps_what_it_was_told_to_and_resumes_from_it(pool: Pool, corpus: str, tmp_path: Path) -> None:
    settings = RunSettings(save_every=1, keep_last=2, keep_every=3)
    plan = make_plan(run=settings, steps=6, lr=3e-3)
    whole = pool.run("train_and_save", 1, to_json(plan), corpus, str(tmp_path / "first"))[0]
    folder = tmp_path / "first" / "checkpoints"
    assert sorted(path.name for path in folder.glob("step_*")) == ["step_000003", "step_000005", "step_000006"]
    again = make_plan(run=RunSettings(resume=str(folder / "step_000003")), steps=6, lr=3e-3)
    np.testing.assert_allclose(pool.run("train_and_save", 1, to_json(again), corpus, str(tmp_path / "second"))[0], whole[3:], atol=1e-6)


@pytest.mark.parametrize("async_save", [False, True])
def test_a_save_starts_no_process_that_could_be_killed_alone(async_save: bool, pool: Pool, corpus: str, tmp_path: Path) -> None:
    """A rank that waits for a writer of its own waits for ever when that is killed."""
    plan = make_plan(dp=2, zero_stage=1, run=RunSettings(save_every=1, async_save=async_save), steps=2)
    (tmp_path / "out").mkdir()
    assert pool.run("started_by_a_save", 2, to_json(plan), corpus, str(tmp_path / "out")) == [[], []]


@pytest.mark.parametrize("async_save", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("engine", ["megatron", DEEPSPEED])
def test_a_full_disk_is_said_and_leaves_the_last_checkpoint_whole(
    engine: str, async_save: bool, pool: Pool, corpus: str, tmp_path: Path
) -> None:
    plan = make_plan(engine=engine, zero_stage=1, run=RunSettings(save_every=1, keep_last=1, async_save=async_save), steps=1)
    (said,) = pool.run("save_with_little_disk", 1, to_json(plan), corpus, str(tmp_path / "out"), 20_000)
    folder = tmp_path / "out" / "checkpoints"
    assert said.startswith("step 2: the checkpoint can't be written: ")
    newest = f"; the newest whole checkpoint is {folder / 'step_000001'}: resume={tmp_path / 'out'} goes on from it"
    assert said.endswith(newest)
    no_room = OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl")
    assert runs.full_disk(no_room, tmp_path / "out") == f"nothing more can be written to metrics.jsonl: No space left on device{newest}"
    assert json.loads((folder / "latest.json").read_text())["step"] == 1
    again = make_plan(engine=engine, zero_stage=1, run=RunSettings(resume=str(tmp_path / "out")), steps=2)
    assert len(pool.run("train_and_save", 1, to_json(again), corpus, str(tmp_path / "next"))[0]) == 1


ASYNCHRONOUS: dict[str, dict[str, Any]] = {
    "megatron": {"dp": 2, "zero_stage": 1},
    "megatron tp2": {"tp": 2, "dp": 2, "zero_stage": 1},
    "megatron zero0 pp2": {"pp": 2},
    DEEPSPEED: {"engine": DEEPSPEED, "dp": 2, "zero_stage": 3},
    ALONE: {"model": LLAMA, "engine": ALONE, "dp": 2, "zero_stage": 1},
}


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.full if case != "megatron" else ()) for case in ASYNCHRONOUS])
def test_a_checkpoint_written_beside_the_training_is_that_of_its_step(case: str, pool: Pool, corpus: str, tmp_path: Path) -> None:
    """The weights move on while it is written: it has those of step 2 all the same, and so has the next one those of step 4."""
    settings = RunSettings(save_every=2, async_save=True)
    plan = make_plan(run=settings, steps=5, lr=3e-3, **ASYNCHRONOUS[case])
    whole = pool.run("train_and_save", plan.world_size, to_json(plan), corpus, str(tmp_path / "first"))[0]
    folder = tmp_path / "first" / "checkpoints"
    assert sorted(path.name for path in folder.glob("step_*")) == ["step_000002", "step_000004", "step_000005"]
    assert all((path / "latest.json").exists() for path in folder.glob("step_*"))
    for step in (2, 4):
        again = replace(plan, run=RunSettings(resume=str(folder / f"step_{step:06d}")))
        resumed = pool.run("train_and_save", plan.world_size, to_json(again), corpus, str(tmp_path / f"from{step}"))[0]
        np.testing.assert_allclose(resumed, whole[step:], rtol=0, atol=1e-6)


@pytest.mark.parametrize("change", [{}, {"tp": 2}, {"cp": 2}, {"dp": 4}, {"zero_stage": 1}, {"vpp": 2}])
def test_a_checkpoint_for_one_layout_is_refused_by_the_planner_where_the_worker_refuses_it(change: dict[str, Any]) -> None:
    from orchestrator.engines.ds_states import why_no_resume
    from orchestrator.workers.checkpoint import layout

    before = make_plan(engine=ALONE, dp=2, precision="bf16", grad_accum_dtype="bf16", grad_reduce_dtype="bf16")
    now = replace(before, **change)
    assert (why_no_resume(before, now) is None) == (layout(before) == layout(now)) == (not change)
