"""Files of programs around Megatron and DeepSpeed, as their users have them: what they say, and changes as a diff of the same words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import orchestrator as so
from orchestrator.audit import formats
from orchestrator.errors import InputError

VERL = """\
#!/usr/bin/env bash
TP=${TP:-2}
ACTOR=(
    actor_rollout_ref.actor.ppo_mini_batch_size=32
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=${TP}
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full
    actor_rollout_ref.rollout.n=4
)
python3 -m verl.trainer.main_ppo model_engine=megatron "${ACTOR[@]}" trainer.nnodes=2 trainer.n_gpus_per_node=8 \\
    data.max_prompt_length=1024 data.max_response_length=3072
"""
FSDP = """\
python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 \\
    actor_rollout_ref.actor.fsdp_config.reshard_after_forward=True trainer.n_gpus_per_node=8 actor_rollout_ref.actor.optim.lr=1e-6
"""
SWIFT = """\
NPROC_PER_NODE=8 \\
megatron sft --model Qwen/Qwen3-8B --tensor_model_parallel_size 2 --micro_batch_size 1 --global_batch_size 64 --max_length 4096 \\
    --recompute_granularity none
"""
BRIDGE = """\
CMD="python scripts/training/run_recipe.py --recipe qwen3_8b_pretrain_config -tp 2 -mb 1 \\
  train.global_batch_size=64 model.sequence_parallel=true dataset.seq_length=4096"
torchrun --nnodes 2 --nproc_per_node 8 bash -c "$CMD"
"""
PYTHON = """\
def configure(cfg):
    cfg.model.tensor_model_parallel_size = 2
    cfg.train.micro_batch_size = 1  # one
    cfg.train.global_batch_size = 64
    cfg.mixed_precision = bf16_with_fp8_current_scaling_mixed()
    cfg.model.head = make_head(cfg)
"""
AXOLOTL = """\
base_model: a/b
sequence_len: 4096
micro_batch_size: 1
gradient_accumulation_steps: 4
learning_rate: 1e-5
gradient_checkpointing: true
bf16: auto
deepspeed: {zero_optimization: {stage: 2}}
"""
SLIME = """\
source models/qwen3-8B.sh
python3 train.py --actor-num-nodes 2 --actor-num-gpus-per-node 8 "${MODEL_ARGS[@]}" --tensor-model-parallel-size 2 --micro-batch-size 1 \\
    --global-batch-size 64 --lr 1e-6 --use-kl-loss
"""
FILES: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "verl.sh": (VERL, {"tp": 2, "recompute": "full", "zero_stage": 1}, 16, "ppo_micro_batch_size_per_gpu=2"),
    "fsdp.sh": (FSDP, {"zero_stage": 3, "recompute": "full"}, 8, "ppo_micro_batch_size_per_gpu=2"),
    "swift.sh": (SWIFT, {"tp": 2, "recompute": "none"}, 8, "--micro_batch_size 2"),
    "bridge.sh": (BRIDGE, {"tp": 2, "sequence_parallel": True}, 16, "-mb 2"),
    "recipe.py": (PYTHON, {"tp": 2}, 0, "    cfg.train.micro_batch_size = 2  # one"),
    "axolotl.yaml": (AXOLOTL, {"zero_stage": 2, "recompute": "full"}, 0, "micro_batch_size: 2"),
    "slime.sh": (SLIME, {"tp": 2, "zero_stage": 1}, 16, "--micro-batch-size 2"),
}
"""Text, choices, GPUs (0: it does not say), and what another micro-batch looks like."""


@pytest.mark.parametrize("name", FILES)
def test_a_file_says_its_plan_and_is_changed_in_its_own_words(name: str) -> None:
    text, chosen, gpus, line = FILES[name]
    source = formats.read(text, name)
    reading = source.reading
    assert reading.unknown == ()
    assert {one: getattr(reading.setup, one) for one in chosen} == chosen
    assert reading.keys.get("gpus", 0) == gpus
    after = replace(reading.setup, micro_batch_size=2)
    changed = source.edited(reading.setup, after, 16)
    assert changed is not None
    assert line in changed
    assert formats.read(changed, name).reading.setup == after
    assert len(changed.splitlines()) == len(text.splitlines())


@pytest.mark.parametrize("name", FILES)
def test_its_audit_has_a_plan(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(FILES[name][0])
    found = so.audit(tmp_path / name, recipe="llama3_8b", cluster="dgx_h100", **({} if FILES[name][2] else {"gpus": 16}))
    assert found.plan is not None
    assert found.legal, found.problem
    assert found.plan.world_size == FILES[name][2] or 16


def test_a_prompt_s_responses_are_samples_and_their_lengths_one_sequence() -> None:
    keys = formats.read(VERL, "verl.sh").reading.keys
    assert (keys["train.global_batch_size"], keys["train.seq_length"]) == (128, 4096)


def test_what_only_running_a_recipe_tells_is_said() -> None:
    reading = formats.read(PYTHON, "recipe.py").reading
    assert reading.keys["train.precision"] == "fp8"
    assert any("model.head is make_head(cfg), which only running it tells" in line for line in reading.assumed)
    with pytest.raises(InputError, match="sets fields of a recipe in 'configure', 'other': keep one of them"):
        formats.read(PYTHON + "def other(cfg):\n    cfg.train.micro_batch_size = 3\n", "recipe.py")


def test_nemo_rl_s_defaults_are_the_file_that_they_name(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(
        "policy: {megatron_cfg: {enabled: true, tensor_model_parallel_size: 4}, train_global_batch_size: 64}\n"
    )
    text = "defaults: base.yaml\npolicy: {megatron_cfg: {pipeline_model_parallel_size: 2}}\n"
    reading = formats.read(text, str(tmp_path / "mine.yaml")).reading
    assert (reading.setup.tp, reading.setup.pp, reading.keys["train.global_batch_size"]) == (4, 2, 64)
    alone = formats.read(text.replace("base", "none"), str(tmp_path / "mine.yaml")).reading
    assert any("defaults: none.yaml is not here" in line for line in alone.assumed)
