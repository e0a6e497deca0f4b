"""BLOOM's norm of token vectors (--embed-layernorm of its Megatron-DeepSpeed) is read and priced, and nothing is trained without it."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

import orchestrator as so
from orchestrator.audit.audit import Audit
from orchestrator.engines import ENGINES
from orchestrator.model.families import describe

SCRIPT = """
deepspeed --num_nodes 2 --num_gpus 8 pretrain_gpt.py --deepspeed --deepspeed_config ds.json --zero-stage 1 \\
  --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --num-layers 8 --hidden-size 1024 --num-attention-heads 16 \\
  --seq-length 2048 --max-position-embeddings 2048 --position-embedding-type alibi --pad-vocab-size-to 51200 \\
  --micro-batch-size 4 --global-batch-size 128 --train-iters 100 --lr 1e-4 --bf16 --checkpoint-activations \\
  --tokenizer-type PretrainedFromHF --tokenizer-name-or-path t5 --data-impl mmap --sync-tp-duplicated-parameters {}
"""


def audited(folder: Path, flags: str) -> Audit:
    (folder / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 4, "train_batch_size": 128, "zero_optimization": {"stage": 1}}')
    path = folder / "train.sh"
    path.write_text(SCRIPT.format(flags))
    return so.audit(path, cluster="dgx_a100_80gb")


def test_its_input_is_kept_of_every_micro_batch_in_flight_and_no_verdict_is_left_open(tmp_path: Path) -> None:
    with_it, without = audited(tmp_path, "--embed-layernorm"), audited(tmp_path, "")
    assert with_it.legal
    assert with_it.fits is True
    assert [*with_it.reading.unknown, *with_it.reading.unpriced] == []
    assert "--sync-tp-duplicated-parameters" in str(with_it.reading.slower)
    plan, other = with_it.plan, without.plan
    assert plan is not None
    assert other is not None
    weights, (bytes_kept, before) = 2 * 1024, (first_stage(one)["activations"] for one in (plan, other))
    assert parameters(plan) - parameters(other) == weights
    assert bytes_kept - before == 4 * (2 * 4 * 2048 * 1024), "of four micro-batches in flight, whatever tp"


def parameters(plan: so.Plan) -> int:
    return sum(run.layer.local_parameters(1) * run.count for run in describe(plan.model, 2048).runs)


def first_stage(plan: so.Plan) -> dict[str, float]:
    assert plan.predicted is not None
    return dict(plan.predicted.by_stage[0].memory_by_cause)


@pytest.mark.parametrize("engine", ["megatron", "megatron_deepspeed"])
def test_no_rank_is_started_without_it(engine: str, tmp_path: Path) -> None:
    plan = audited(tmp_path, "--embed-layernorm").plan
    assert plan is not None
    job = ENGINES[engine].translate(replace(plan, engine=engine))
    assert "does not norm token vectors" in job.without_worker
    assert "engine.json" not in {file.path for file in job.files}
    plain = replace(plan, engine=engine, model=replace(plan.model, embedding_norm=False))
    assert not ENGINES[engine].translate(plain).without_worker


def test_no_change_asks_for_a_flag_that_the_fork_does_not_have(tmp_path: Path) -> None:
    """BLOOM's first change was --sequence-parallel, at which its program stops."""
    ours = audited(tmp_path, "--embed-layernorm")
    (tmp_path / "other.sh").write_text(SCRIPT.format("").replace("--sync-tp-duplicated-parameters", ""))
    other = so.audit(tmp_path / "other.sh", cluster="dgx_a100_80gb")
    ruled = [one.judge.judged(replace(one.setup, sequence_parallel=True)).rule for one in (ours, other)]
    assert "BigScience's Megatron-DeepSpeed has no such flag" in ruled[0]
    assert ruled[1] == ""
