"""A batch that grows: the file, each change and the search's plan run every batch of it."""

from __future__ import annotations

from pathlib import Path

import pytest

import orchestrator as so
from orchestrator.audit.audit import Audit
from orchestrator.audit.ramp import grown, scheduled
from orchestrator.plan import Plan

SIZES = "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 --bf16 --lr 1e-4"
SCHEDULE = '--step-batch-size-schedule "0:16 2.4B:160 4.8B:256"'


def audited(tmp_path: Path, flags: str) -> Audit:
    line = f"torchrun --nnodes 16 --nproc_per_node 8 pretrain_gpt.py {SIZES} --micro-batch-size 1 --train-samples 9000 {flags}\n"
    (tmp_path / "train.sh").write_text(line)
    return so.audit(tmp_path / "train.sh", cluster="dgx_a100_80gb")


def runs(plan: Plan, batches: tuple[int, ...]) -> bool:
    """By hand: each batch divides, and fills an interleaved pipeline."""
    counts = [divmod(batch, plan.dp * plan.micro_batch_size) for batch in batches]
    return all(count and not left and (plan.vpp == 1 or (count >= plan.pp and count % plan.pp == 0)) for count, left in counts)


def test_no_change_and_no_plan_of_the_search_is_one_that_a_smaller_batch_of_the_ramp_stops(tmp_path: Path) -> None:
    """16 samples over dp=8 are 2 micro-batches: interleaving over 4 stages and more raises (schedules.py), and dp=32 has none at all."""
    degrees = "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 4"
    found = audited(tmp_path, f"{degrees} {SCHEDULE}")
    assert found.legal, found.problem
    proposed = [change.judged.plan for change in (*found.changes, *filter(None, (found.together, found.searched)))]
    assert found.fastest is not None
    assert found.fastest_here is not None
    assert all(runs(plan, (16, 160)) for plan in (*proposed, found.fastest, found.fastest_here))
    whole = audited(tmp_path, f"{degrees} --global-batch-size 256")
    without = [change.judged.plan for change in whole.changes]
    assert not all(runs(plan, (16, 160)) for plan in without), "without the ramp other changes gain most"


@pytest.mark.parametrize(
    ("ramp", "why"),
    [
        (SCHEDULE, "step_batch_size_schedule=16: its 2 micro-batches (of 1 on dp=8) are fewer than the 4 that interleaving (vpp=2) needs"),
        ("--global-batch-size 256 --rampup-batch-size 32 8 90000", "rampup_batch_size=40: its 5 micro-batches (of 1 on dp=8) leave 1 in"),
        ("--global-batch-size 256 --rampup-batch-size 36 4 90000", "rampup_batch_size=36: is no multiple of dp x micro-batch = 8 x 1"),
        ("--global-batch-size 256 --rampup-batch-size 36 4 90000 --decrease-batch-size-if-needed", "rampup_batch_size=40: its 5 micro-"),
        ("--global-batch-size 256 --rampup-batch-size 64 64 90000", ""),
        ("--global-batch-size 256 --rampup-batch-size 64 4 90000 --decrease-batch-size-if-needed", "rampup_batch_size=72: its 9 micro-"),
    ],
)
def test_a_file_whose_ramp_its_layout_cannot_run_is_not_legal(ramp: str, why: str, tmp_path: Path) -> None:
    degrees = "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 3"
    found = audited(tmp_path, f"{degrees} {ramp}")
    assert found.legal == (not why), found.problem
    assert why in found.problem


@pytest.mark.engines
@pytest.mark.parametrize("ramp", [(16, 16, 5859375, 1536), (16, 8, 1000, 64), (32, 32, 100, 512), (8, 8, 40, 64), (64, 8, 100, 64)])
def test_the_batches_are_those_that_megatron_s_own_calculator_goes_through(ramp: tuple[int, int, int, int]) -> None:
    calculator = pytest.importorskip("megatron.core.num_microbatches_calculator")
    start, step, samples, last = ramp
    if start == last:
        assert grown(*ramp) == ()
        return
    own = calculator.RampupBatchsizeNumMicroBatchesCalculator(last, 1, 1, False, 1, start, step, samples)
    sizes, consumed = [own.get_current_global_batch_size()], 0
    while sizes[-1] < last:
        consumed += sizes[-1]
        own.update(consumed, consistency_check=True)
        if own.get_current_global_batch_size() != sizes[-1]:
            sizes.append(own.get_current_global_batch_size())
    assert (*grown(*ramp), last) == tuple(sizes)
    assert scheduled(["2B:64,0:8", "1000M:1K"]) == (8, 1000, 64)
