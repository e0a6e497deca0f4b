"""Jobs of reinforcement learning: an audit says that the policy's update alone is priced, and its diffs are words that Hydra takes."""

from __future__ import annotations

from pathlib import Path

import pytest

import orchestrator as so
from orchestrator.audit import formats
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


TRL = """\
accelerate launch --config_file fsdp2.yaml --num_processes 8 trl/scripts/{program}.py --model_name_or_path Qwen/Qwen3-8B \\
  --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --max_length 2048 --bf16 --gradient_checkpointing {more}--output_dir out
"""
FSDP2 = (
    "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\nfsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: true}\n"
)
FACTORY = "stage: {stage}\nfinetuning_type: full\ncutoff_len: 2048\nper_device_train_batch_size: 1\nlearning_rate: 5.0e-6\nbf16: true\n"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("dpo.sh", TRL.format(program="dpo", more="--beta 0.1 "), "dpo.py: a sample is a chosen and a rejected response"),
        ("dpo.yaml", FACTORY.format(stage="dpo") + "deepspeed: {zero_optimization: {stage: 3}}\n", "stage=dpo: a sample is a chosen"),
        (
            "kto.yaml",
            FACTORY.format(stage="kto") + "deepspeed: {zero_optimization: {stage: 3}}\n",
            "stage=kto: a reference model passes them",
        ),
        ("rm.yaml", FACTORY.format(stage="rm") + "deepspeed: {zero_optimization: {stage: 3}}\n", "stage=rm: a sample is a chosen"),
    ],
)
def test_preferences_get_no_chance_and_no_change_by_the_price_of_supervised_training(
    tmp_path: Path, name: str, text: str, said: str
) -> None:
    """Two sequences a sample and a reference model: a change to micro-batches of 8 was advised, at a 1.9% chance of running out."""
    (tmp_path / "fsdp2.yaml").write_text(FSDP2)
    (tmp_path / name).write_text(text)
    found = so.audit(tmp_path / name, gpus=8, cluster="dgx_h100", **({} if name == "dpo.sh" else {"recipe": "qwen3_8b"}))
    shown = str(found)
    assert f"\notherwise  {said}" in shown
    assert ("plan task=rl rl.algorithm=dpo prices the whole job" in shown) == ("dpo" in name)
    assert found.legal
    assert found.fits is None
    assert found.summary()["otherwise"].startswith(said)
    assert found.summary()["chance_of_not_fitting"] is None
    assert "chance of running out" not in shown
    assert (found.changes, found.together, found.searched) == ((), None, None)
    assert "a search" not in shown.lower()


def test_supervised_training_under_accelerate_s_fsdp_is_changed_by_its_words_alone(tmp_path: Path) -> None:
    """A DeepSpeed section was added with the micro-batch, beside the FSDP that accelerate's file has."""
    (tmp_path / "fsdp2.yaml").write_text(FSDP2)
    (tmp_path / "sft.sh").write_text(TRL.format(program="sft", more=""))
    found = so.audit(tmp_path / "sft.sh", gpus=8, cluster="dgx_h100")
    assert not found.reading.otherwise
    assert found.fits
    wider = next(change for change in found.changes if change.what.startswith("micro_batch_size"))
    assert "+" in wider.diff
    assert "--deepspeed" not in wider.diff


def test_recompute_under_accelerate_is_changed_at_its_flag_or_said_where_accelerate_s_file_has_it(tmp_path: Path) -> None:
    """The flag stayed, with its opposite at the end of the command; beside accelerate's own word there was "no place" for the change."""
    (tmp_path / "fsdp2.yaml").write_text(FSDP2)
    (tmp_path / "sft.sh").write_text(TRL.format(program="sft", more=""))
    without = next(one for one in so.audit(tmp_path / "sft.sh", gpus=8, cluster="dgx_h100").changes if "recompute full -> none" in one.what)
    assert without.text == TRL.format(program="sft", more="").replace("checkpointing", "checkpointing false")
    (tmp_path / "fsdp2.yaml").write_text(FSDP2.replace("fsdp_version: 2", "fsdp_version: 2, fsdp_activation_checkpointing: true"))
    found = so.audit(tmp_path / "sft.sh", gpus=8, cluster="dgx_h100")
    without = next(one for one in found.changes if "recompute full -> none" in one.what)
    place = "gradient_checkpointing here and fsdp_config.fsdp_activation_checkpointing in fsdp2.yaml"
    assert without.elsewhere == f"recompute=none is said by {place}"
    assert "no place where" not in str(found).partition("\n2. ")[0]


def test_the_zero_stage_that_accelerate_s_file_says_is_named_there(tmp_path: Path) -> None:
    """The audit said "the file has no place where this could be said", of a stage that deepspeed_config has."""
    (tmp_path / "fsdp2.yaml").write_text("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3}\nnum_processes: 8\n")
    (tmp_path / "sft.sh").write_text(TRL.format(program="sft", more=""))
    changes = so.audit(tmp_path / "sft.sh", gpus=8, cluster="dgx_h100").changes
    stage = next(one for one in changes if one.what.startswith("zero_stage 3 -> "))
    assert stage.elsewhere == "zero_stage=1 is said by deepspeed_config.zero_stage in fsdp2.yaml"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("stage: dpo\npref_loss: sigmoid", "with weights of its own unless adapters are trained. Priced"),
        ("stage: dpo\npref_loss: simpo", ""),  # LLaMA-Factory's finetuning_args.py, use_ref_model
        ("stage: dpo\npref_loss: orpo", ""),
        ("beta: 0.1", "unless adapters are trained (ORPO and CPO, whose files look alike, have none). Priced"),
        (
            "beta: 0.1\nprecompute_ref_log_probs: true",
            "a reference model passes all samples before the first step (precompute_ref_log_probs)",
        ),
    ],
)
def test_a_reference_model_is_said_where_the_loss_has_one(tmp_path: Path, settings: str, said: str) -> None:
    (tmp_path / "run.yaml").write_text(f"{settings}\nper_device_train_batch_size: 1\nlearning_rate: 5.0e-6\nbf16: true\nmax_length: 2048\n")
    reading = formats.read((tmp_path / "run.yaml").read_text(), "run.yaml").reading
    assert "twice the time and activations" in reading.otherwise
    assert ("reference model" in reading.otherwise) == bool(said)
    assert said in reading.otherwise
    assert not any("precompute" in line for line in reading.unknown)
