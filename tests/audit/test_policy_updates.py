"""Jobs of reinforcement learning: an audit says that the policy's update alone is priced, and its diffs are words that Hydra takes."""

from __future__ import annotations

from pathlib import Path

import pytest

import orchestrator as so
from orchestrator.audit.audit import Audit

VERL = """\
python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer.yaml \\
    data.train_batch_size=1024 data.max_prompt_length=1024 data.max_response_length=1024 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \\
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2 actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \\
    actor_rollout_ref.rollout.n=5 trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.total_epochs=15
"""


@pytest.fixture(scope="module")
def verl(tmp_path_factory: pytest.TempPathFactory) -> Audit:
    path = tmp_path_factory.mktemp("verl") / "train.sh"
    path.write_text(VERL)
    return so.audit(path, cluster="dgx_h100", recipe="qwen3_8b")


def test_words_that_a_script_of_hydras_gets_are_added_or_set(verl: Audit) -> None:
    """Neither is among verl's own settings (config/engine/megatron.yaml), where Hydra refuses a word without a plus."""
    diffs = "\n".join(change.diff for change in verl.changes)
    assert "++actor_rollout_ref.actor.megatron.override_transformer_config.pipeline_model_parallel_layout=" in diffs
    assert "tp_comm_overlap" not in diffs, "no program of rollouts makes user buffers"
    assert "+    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=1" in diffs.replace("  +", "+")


def test_what_a_change_asks_for_is_said_with_it(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(
        "torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8 --sequence-parallel --num-layers 32 --hidden-size 4096 "
        "--num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 --vocab-size 32000 --micro-batch-size 1 "
        "--global-batch-size 8 --bf16 --transformer-impl transformer_engine"
    )
    said = str(so.audit(tmp_path / "train.sh", cluster="dgx_h100"))
    assert "(tp_comm_overlap needs Transformer Engine's user buffers, before Hopper by CUDA IPC)" in said


def test_that_the_update_alone_is_priced_is_said(verl: Audit) -> None:
    assert "a step is an update of the policy, of which 4 follow a generation; generation, log-probabilities" in str(verl)
